"""Sets of ranks by rule, not by list: whole worlds, pipeline stages, every n-th rank, n of every m."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

Run = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class RankSet:
    """Ranks ``start + i * outer_step + j * step`` for i < outer, j < count, of every run.

    Args:
        runs: (start, count, step, outer, outer_step), in ascending order of start.
    """

    runs: tuple[Run, ...]

    @classmethod
    def of(cls, ranks: Iterable[int]) -> RankSet:
        """The set of these ranks, in as few runs as two levels of repetition give."""
        return cls(tuple(_repeat(_runs(sorted(set(ranks))))))

    @classmethod
    def world(cls, world_size: int) -> RankSet:
        """All ranks of a world."""
        return cls(((0, world_size, 1, 1, 0),))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks, ascending."""
        return tuple(
            sorted(
                start + turn * outer_step + place * step
                for start, count, step, outer, outer_step in self.runs
                for turn in range(outer)
                for place in range(count)
            )
        )

    def __contains__(self, rank: int) -> bool:
        place = bisect_left(self.ranks, rank)
        return place < len(self.ranks) and self.ranks[place] == rank

    def union(self, other: RankSet) -> RankSet:
        """Ranks in either set."""
        return RankSet.of([*self.ranks, *other.ranks])

    def to_json(self) -> list[list[int]]:
        """Plain values that `from_json` reads back without loss."""
        return [list(run) for run in self.runs]

    @classmethod
    def from_json(cls, data: Any) -> RankSet:
        """Inverse of `to_json`."""
        return cls(tuple((int(a), int(b), int(c), int(d), int(e)) for a, b, c, d, e in data))


def _runs(ranks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Greedy (start, count, step) runs of ascending ranks."""
    runs: list[tuple[int, int, int]] = []
    at = 0
    while at < len(ranks):
        step = ranks[at + 1] - ranks[at] if at + 1 < len(ranks) else 1
        stop = at + 1
        while stop < len(ranks) and ranks[stop] - ranks[stop - 1] == step:
            stop += 1
        # A pair far apart is more often the end of one run and the start of the next.
        if stop - at == 2 and step > 1 and stop < len(ranks):
            stop, step = at + 1, 1
        runs.append((ranks[at], stop - at, step if stop - at > 1 else 1))
        at = stop
    return runs


def _repeat(runs: Sequence[tuple[int, int, int]]) -> Iterable[Run]:
    """Join equal runs at equal distances."""
    at = 0
    while at < len(runs):
        start, count, step = runs[at]
        stop = at + 1
        distance = runs[stop][0] - start if stop < len(runs) else 0
        while (
            stop < len(runs)
            and runs[stop][1:] == (count, step)
            and runs[stop][0] == start + (stop - at) * distance
        ):
            stop += 1
        yield start, count, step, stop - at, distance if stop - at > 1 else 0
        at = stop
