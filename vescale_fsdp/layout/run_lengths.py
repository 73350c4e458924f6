"""RunLengths: one int per rank, kept as runs of equal ones, so that memory and work do not grow with the ranks.

What ranks hold of a tensor that lies in one range of a buffer is at most five runs, however many ranks there are::

    0 0 0 5 8 8 8 8 2 0 0        runs (count, value): (3, 0) (1, 5) (4, 8) (1, 2) (2, 0)
                                 places:  0  1  2 | 3 | 4  5  6  7 | 8 | 9 10
                                 starts:  0  0  0 | 0 | 5 13 21 29 | 37| 39 39
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise, repeat
from typing import overload


@dataclass(frozen=True)
class RunLengths(Sequence[int]):
    """A sequence of non-negative ints; equal, and of one hash, if the ints are.

    Args:
        runs: (count, value) in order. Neighbours of one value are joined and empty runs left out.
    """

    runs: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        joined: list[tuple[int, int]] = []
        for count, value in self.runs:
            if joined and joined[-1][1] == value:
                joined[-1] = (joined[-1][0] + count, value)
            elif count:
                joined.append((count, value))
        object.__setattr__(self, "runs", tuple(joined))

    @classmethod
    def of(cls, values: Iterable[int]) -> RunLengths:
        """The runs of any ints; costs nothing if they are runs already."""
        if isinstance(values, RunLengths):
            return values
        return cls(tuple((sum(1 for _ in equal), value) for value, equal in groupby(values)))

    @cached_property
    def _firsts(self) -> tuple[int, ...]:
        """Place of each run's first value, then the number of places."""
        return (0, *accumulate(count for count, _ in self.runs))

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        """Sum of the values before each run, then of all."""
        return (0, *accumulate(count * value for count, value in self.runs))

    def __len__(self) -> int:
        return self._firsts[-1]

    def __iter__(self) -> Iterator[int]:
        for count, value in self.runs:
            yield from repeat(value, count)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> RunLengths: ...
    def __getitem__(self, index: int | slice) -> int | RunLengths:
        places = range(len(self))[index]
        if isinstance(places, range):
            return RunLengths.of(map(self.__getitem__, places))
        return self.runs[bisect_right(self._firsts, places) - 1][1]

    @property
    def distinct(self) -> frozenset[int]:
        """The values that occur."""
        return frozenset(value for _, value in self.runs)

    @property
    def total(self) -> int:
        """Sum of all values."""
        return self._starts[-1]

    def start(self, place: int) -> int:
        """Sum of the values before a place; of all before the place after the last."""
        run = bisect_right(self._firsts, place) - 1
        if run == len(self.runs):
            return self.total
        return self._starts[run] + (place - self._firsts[run]) * self.runs[run][1]

    def holders(self, start: int, stop: int) -> Iterator[int]:
        """Places that hold any of the elements [start, stop), where place p holds [start(p), start(p + 1)).

        >>> list(RunLengths.of([4, 0, 4, 4]).holders(3, 8))
        [0, 2]
        """
        run = bisect_right(self._starts, start) - 1
        while start < stop and run < len(self.runs) and self._starts[run] < stop:
            (_, value), origin = self.runs[run], self._starts[run]
            if value:
                first = (max(start, origin) - origin) // value
                last = (min(stop, self._starts[run + 1]) - 1 - origin) // value
                yield from range(self._firsts[run] + first, self._firsts[run] + last + 1)
            run += 1

    def within(self, start: int, stop: int) -> RunLengths:
        """How many of the elements [start, stop) each place holds, where place p holds [start(p), start(p + 1)).

        >>> tuple(RunLengths.of([4, 0, 4, 4]).within(3, 8))
        (1, 0, 4, 0)
        """
        runs = []
        for (count, value), origin in zip(self.runs, self._starts, strict=False):
            # An edge falls into at most one place of a run; the places between two marks hold the same.
            at = [(edge - origin) // value for edge in (start, stop)] if value else []
            marks = sorted({0, count, *(min(max(place, 0), count) for i in at for place in (i, i + 1))})
            for first, last in pairwise(marks):
                begin = origin + first * value
                held = min(stop, begin + value) - max(start, begin)
                runs.append((last - first, max(0, held)))
        return RunLengths(tuple(runs))

    def map(self, function: Callable[[int], int]) -> RunLengths:
        """The function's value for each value; it is asked once per run."""
        return RunLengths(tuple((count, function(value)) for count, value in self.runs))
