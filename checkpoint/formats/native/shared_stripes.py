"""Stripes that several ranks want: which of them reads each, and sends it to the others.

    wanted      0: stripes 0 .. 15 of file 0     2: the same                 (replicas of one shard under HSDP)
    read        0: 0 .. 7                        2: 8 .. 15

`vescale_fsdp.checkpoint.ranks.exchange` sends them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple


class StripeRun(NamedTuple):
    """Stripes [first, stop) of the file of a rank that saved."""

    saved_rank: int
    first: int
    stop: int


class SharedStripes(NamedTuple):
    """Stripes [first, stop) that several ranks want, and which of them reads them."""

    saved_rank: int
    first: int
    stop: int
    sender: int
    receivers: tuple[int, ...]


def plan_shared(wanted: Sequence[Iterable[StripeRun]], max_stripes: int) -> list[SharedStripes]:
    """The stripes that several ranks want, dealt out evenly among those ranks, in an order for `waves_of`.

    Args:
        wanted: by rank, runs of stripes; those of one rank do not overlap.
        max_stripes: how many are read and sent at once.
    """
    edges: dict[int, dict[int, list[tuple[int, bool]]]] = {}
    for rank, runs in enumerate(wanted):
        for run in runs:
            of_file = edges.setdefault(run.saved_rank, {})
            of_file.setdefault(run.first, []).append((rank, True))
            of_file.setdefault(run.stop, []).append((rank, False))
    found: list[SharedStripes] = []
    load: Counter[int] = Counter()
    for saved_rank, of_file in sorted(edges.items()):
        now: set[int] = set()
        places = sorted(of_file)
        for first, stop in pairwise(places):
            now -= {rank for rank, begins in of_file[first] if not begins}
            now |= {rank for rank, begins in of_file[first] if begins}
            if len(now) < 2:
                continue
            at = first
            for place, reader in enumerate(sorted(now, key=lambda rank: (load[rank], rank))):
                count = (stop - first - place + len(now) - 1) // len(now)
                others = tuple(sorted(now - {reader}))
                load[reader] += count
                for start in range(at, at + count, max_stripes):
                    end = min(start + max_stripes, at + count)
                    found.append(SharedStripes(saved_rank, start, end, reader, others))
                at += count
    turns: Counter[int] = Counter()
    order: list[tuple[int, int, SharedStripes]] = []
    for turn in found:
        order.append((turns[turn.sender], turn.sender, turn))
        turns[turn.sender] += 1
    return [turn for *_, turn in sorted(order)]
