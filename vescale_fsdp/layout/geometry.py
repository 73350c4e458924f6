"""Flat ranges of a row-major tensor, boxes, intersections, and numbers per rank. Integers only.

A rank's *piece* of a tensor is one half-open range of its flattened elements. Everything outside this library (DCP,
safetensors slices, zarr chunks) uses n-d *boxes*. This module converts ranges to boxes: a flat range of an n-d tensor
is at most ``2 * n - 1`` boxes, in flat order, and each box is contiguous in the range.

Example, shape (4, 5), range [3, 17)::

        0  1  2  3  4
    0   .  .  .  A  A      A: offsets (0, 3) sizes (1, 2)   head
    1   B  B  B  B  B      B: offsets (1, 0) sizes (2, 5)   whole rows
    2   B  B  B  B  B
    3   C  C  .  .  .      C: offsets (3, 0) sizes (1, 2)   tail

Numbers per rank, such as the elements of a tensor on each rank, are stored as runs of equal numbers (`RunLengths`), so
that memory and work do not grow with the number of ranks. A tensor that is one range of a buffer gives at most five
runs. For 11 ranks::

    0 0 0 5 8 8 8 8 2 0 0        runs (count, value): (3, 0) (1, 5) (4, 8) (1, 2) (2, 0)
                                 indices: 0  1  2 | 3 | 4  5  6  7 | 8 | 9 10
                                 starts:  0  0  0 | 0 | 5 13 21 29 | 37| 39 39
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, groupby, pairwise, repeat
from typing import NamedTuple, overload


class Range(NamedTuple):
    """Half-open range [start, stop) of flat element indices; empty if ``start >= stop``."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return max(0, self.stop - self.start)

    def intersect(self, other: Range) -> Range:
        """Return the intersection of both ranges; if it is empty, its ``start == stop``."""
        start = max(self.start, other.start)
        return Range(start, max(start, min(self.stop, other.stop)))

    def shift(self, by_numel: int) -> Range:
        """Return this range, moved by ``by_numel`` elements."""
        return Range(self.start + by_numel, self.stop + by_numel)


@dataclass(frozen=True, slots=True)
class Box:
    """An n-d rectangle inside a tensor: one offset and one size per dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def intersect(self, other: Box) -> Box | None:
        """Return the intersection of both boxes, or None if it is empty."""
        offsets = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True))
        stops = tuple(
            min(a + n, b + m)
            for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        if any(start >= stop for start, stop in zip(offsets, stops, strict=True)):
            return None
        return Box(offsets, tuple(s - o for o, s in zip(offsets, stops, strict=True)))

    def with_range(self, dim: int, start: int, size: int) -> Box:
        """Return this box with [start, start + size) in place of its range in ``dim``."""
        return Box(
            (*self.offsets[:dim], start, *self.offsets[dim + 1 :]),
            (*self.sizes[:dim], size, *self.sizes[dim + 1 :]),
        )

    def chunk(self, dim: int, num_chunks: int, index: int) -> Box:
        """Return the part of this box on rank ``index`` under ``Shard(dim)`` over ``num_chunks`` ranks, maybe empty."""
        dim %= len(self.sizes)  # like torch's Shard, accept a negative dim
        chunk = chunk_of(self.sizes[dim], num_chunks, index)
        return self.with_range(dim, self.offsets[dim] + chunk.start, chunk.numel)

    def slices(self, origin: Sequence[int] | None = None) -> tuple[slice, ...]:
        """Return slices that select this box from the full tensor, or from a part of it that begins at ``origin``."""
        corner = origin if origin is not None else (0,) * len(self.offsets)
        return tuple(
            slice(o - c, o - c + n) for o, n, c in zip(self.offsets, self.sizes, corner, strict=True)
        )


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box that covers a whole tensor of this shape."""
    return Box(_zeros(len(shape)), tuple(shape))


@lru_cache  # one tuple for the boxes of all tensors: a checkpoint may have a hundred thousand
def _zeros(count: int) -> tuple[int, ...]:
    return (0,) * count


def numel_of(shape: Sequence[int]) -> int:
    """Return the number of elements of a tensor of this shape (1 for a 0-d tensor)."""
    return math.prod(shape)


def round_up(number: int, step: int) -> int:
    """Return the smallest multiple of ``step`` that is at least ``number``.

    >>> round_up(13, 4), round_up(12, 4)
    (16, 12)
    """
    return number + -number % step  # Python's % is never negative


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return row-major strides in elements: stride ``d`` is the product of the sizes of all dims after ``d``."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * shape[dim]
    return tuple(strides)


# Cached, because DCP and checkpoints compute the boxes of each piece several times.
@lru_cache(maxsize=4096)
def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> tuple[Box, ...]:
    """Cut the flat range [start, stop) of a tensor into boxes, in flat order.

    Args:
        shape: full shape of the tensor, row-major.
        start, stop: half-open range of flat element indices, ``0 <= start <= stop <= numel``.

    Returns:
        At most ``2 * len(shape) - 1`` boxes whose flat ranges, in order, tile [start, stop) exactly;
        none for an empty range.

    >>> [(box.offsets, box.sizes) for box in boxes_of_range((4, 5), 3, 10)]
    [((0, 3), (1, 2)), ((1, 0), (1, 5))]

    Raises:
        ValueError: if the range is not inside the tensor.
    """
    numel = numel_of(shape)
    if not 0 <= start <= stop <= numel:
        raise ValueError(f"range [{start}, {stop}) is not inside shape {shape} of {numel} elements")
    if start == stop:  # `_boxes_under` needs a non-empty range
        return ()
    return tuple(_boxes_under((), shape, start, stop))


def _boxes_under(prefix: tuple[int, ...], rest: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of a non-empty range of the subtensor at leading indices ``prefix``.

    Args:
        prefix: indices of the leading dims, which select the subtensor.
        rest: shape of the subtensor.
        start, stop: flat range inside the subtensor.
    """
    ones = (1,) * len(prefix)
    if not rest:
        yield Box(prefix, ones)
        return
    inner = rest[1:]
    (first, head), (last, tail) = divmod(start, numel_of(inner)), divmod(stop, numel_of(inner))
    if first == last:  # the range is inside one index of this dim
        yield from _boxes_under((*prefix, first), inner, head, tail)
        return
    if head:
        yield from _boxes_under((*prefix, first), inner, head, numel_of(inner))
        first += 1
    if last > first:
        yield Box((*prefix, first, *(0,) * len(inner)), (*ones, last - first, *inner))
    if tail:
        yield from _boxes_under((*prefix, last), inner, 0, tail)


def run_start(shape: Sequence[int], box: Box) -> int | None:
    """Return the flat index of the box's first element, or None if the box is not one run of a row-major tensor.

    >>> run_start((4, 5), Box((1, 0), (2, 5))), run_start((4, 5), Box((0, 0), (2, 4)))
    (5, None)
    """
    start, stride = 0, 1
    whole = True  # whether the box has the full size in all dims after the current one
    for full, offset, size in zip(reversed(shape), reversed(box.offsets), reversed(box.sizes), strict=True):
        if not whole and size != 1:  # several indices of this dim, but not all elements between them
            return None
        whole = whole and size == full
        start += offset * stride
        stride *= full
    return start


def chunk_of(numel: int, num_chunks: int, index: int) -> Range:
    """Return the range of chunk ``index`` of ``numel`` items, cut as ``Shard`` and ``torch.chunk`` do.

    The last chunks may be short or empty.

    >>> [chunk_of(5, 3, index) for index in range(3)]
    [Range(start=0, stop=2), Range(start=2, stop=4), Range(start=4, stop=5)]
    """
    size = -(-numel // num_chunks)  # rounded up
    start = min(size * index, numel)
    return Range(start, min(start + size, numel))


@dataclass(frozen=True)
class RunLengths(Sequence[int]):
    """A sequence of non-negative ints, compared and hashed by content.

    Args:
        runs: pairs (count, value), in order. Adjacent runs of equal value are joined, and empty runs are dropped.
    """

    runs: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        joined: list[tuple[int, int]] = []
        for count, value in self.runs:
            if joined and joined[-1][1] == value:
                joined[-1] = (joined[-1][0] + count, value)
            elif count:  # empty runs are dropped, so that equal sequences compare equal
                joined.append((count, value))
        object.__setattr__(self, "runs", tuple(joined))  # the class is frozen

    @classmethod
    def of(cls, values: Iterable[int]) -> RunLengths:
        """Return the runs of ``values``, or ``values`` itself if it is a RunLengths."""
        if isinstance(values, RunLengths):
            return values
        return cls(tuple((sum(1 for _ in equal), value) for value, equal in groupby(values)))

    @cached_property
    def _firsts(self) -> tuple[int, ...]:
        """Index of each run's first value, followed by the number of all values."""
        return (0, *accumulate(count for count, _ in self.runs))

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        """Sum of the values before each run, followed by the sum of all values."""
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
        indices = range(len(self))[index]  # range handles negative indices, slices and bounds
        if isinstance(indices, range):
            return RunLengths.of(map(self.__getitem__, indices))
        return self.runs[bisect_right(self._firsts, indices) - 1][1]

    @property
    def distinct(self) -> frozenset[int]:
        """The values that occur."""
        return frozenset(value for _, value in self.runs)

    @property
    def total(self) -> int:
        """Sum of all values."""
        return self._starts[-1]

    def start(self, index: int) -> int:
        """Return the sum of the values before ``index``; for ``index == len(self)`` this is the total."""
        run = bisect_right(self._firsts, index) - 1  # the last run that begins at or before the index
        if run == len(self.runs):  # index == len(self): no run begins there
            return self.total
        return self._starts[run] + (index - self._firsts[run]) * self.runs[run][1]

    def holders(self, start: int, stop: int) -> Iterator[int]:
        """Yield the indices that own at least one of the elements [start, stop).

        Index i owns the elements [self.start(i), self.start(i + 1)).

        >>> list(RunLengths.of([4, 0, 4, 4]).holders(3, 8))
        [0, 2]
        """
        run = bisect_right(self._starts, start) - 1  # the last run that begins at or before element `start`
        while start < stop and run < len(self.runs) and self._starts[run] < stop:
            (_, value), origin = self.runs[run], self._starts[run]
            if value:  # a run of zeros owns nothing
                first = (max(start, origin) - origin) // value
                # - 1, because `stop` is exclusive: the last owned element is the one before it.
                last = (min(stop, self._starts[run + 1]) - 1 - origin) // value
                yield from range(self._firsts[run] + first, self._firsts[run] + last + 1)
            run += 1

    def within(self, start: int, stop: int) -> RunLengths:
        """Return how many of the elements [start, stop) each index owns.

        Index i owns the elements [self.start(i), self.start(i + 1)).

        >>> tuple(RunLengths.of([4, 0, 4, 4]).within(3, 8))
        (1, 0, 4, 0)
        """
        runs = []
        # strict=False, because `_starts` has one more item: the total.
        for (count, value), origin in zip(self.runs, self._starts, strict=False):
            # `start` and `stop` are each inside the range of at most one index of this run. The run is cut before and
            # after both of these indices (`marks`), so that all indices between two marks own equally many elements.
            at = [(edge - origin) // value for edge in (start, stop)] if value else []
            marks = sorted({0, count, *(min(max(index, 0), count) for i in at for index in (i, i + 1))})
            for first, last in pairwise(marks):
                begin = origin + first * value
                # The overlap with index `first`, which is the same for all indices up to `last`.
                overlap = min(stop, begin + value) - max(start, begin)
                runs.append((last - first, max(0, overlap)))
        return RunLengths(tuple(runs))

    def map(self, function: Callable[[int], int]) -> RunLengths:
        """Return the runs with ``function`` applied to each value; the function is called once per run."""
        return RunLengths(tuple((count, function(value)) for count, value in self.runs))
