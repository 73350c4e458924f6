"""Regions of tensors, and the copies between two regions; integer arithmetic without tensors.

A region is a flat range of the row-major elements of a box, an n-dimensional rectangle of the tensor:

    ragged piece             box = the whole tensor     range = the piece
    Shard, TP, EP            box = the rank's box       range = all of the box
    replica 1 of 4           box = the replicated box   range = its second quarter

In memory and in a file, a region is one contiguous run of elements. The elements that two regions share are a few
boxes, and each is one `Copy`: a box that is strided in either region, or contiguous in both (a *run*).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from vescale_fsdp.layout.geometry import (
    Box,
    Range,
    boxes_of_range,
    contiguous_strides,
    whole_box,
)

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Region:
    """The elements ``span`` of a ``box`` of a tensor, counted in the box's row-major order; both are half-open."""

    box: Box
    span: Range

    @classmethod
    def of_box(cls, box: Box) -> Region:
        """Return the region of all elements of a box."""
        return cls(box, Range(0, box.numel))

    @property
    def numel(self) -> int:
        """Number of elements in the region."""
        start, stop = self.span
        return stop - start if stop > start else 0

    def part(self, index: int, count: int) -> Region:
        """Return part ``index`` of ``count`` consecutive parts, whose sizes differ by at most one element."""
        start, numel = self.span.start, self.span.numel
        return Region(self.box, Range(start + numel * index // count, start + numel * (index + 1) // count))

    def pieces(self) -> Iterator[tuple[Box, int]]:
        """Yield boxes of the tensor that tile the region, each with the index of its first element in the region."""
        # Fast path: the region is the whole box.
        if self.span.start == 0 and self.span.stop == self.box.numel:
            if self.numel:
                yield self.box, 0
            return
        first = 0
        for box in boxes_of_range(self.box.sizes, *self.span):
            offsets = tuple(a + b for a, b in zip(box.offsets, self.box.offsets, strict=True))
            yield Box(offsets, box.sizes), first
            first += box.numel


def whole_region(shape: Sequence[int]) -> Region:
    """Return the region of all elements of a tensor of this shape."""
    return Region.of_box(whole_box(shape))


class Copy(NamedTuple):
    """A strided n-d copy between two flat memories, such as the items of two regions; all numbers count items.

    Item ``(i, j, ..)`` of a box of these sizes is item ``source + i * source_strides[0] + j * source_strides[1] + ..``
    of the source, and likewise of the target. `Copy.of` joins dims, so that a copy that is contiguous on both sides, a
    *run*, has one dim.

    The source strides of `overlaps` are *nested*: ``source_strides[d] >= sizes[d + 1] * source_strides[d + 1]``, so
    that the copy reads the source front to back. `source_ranges` and `within` need this.
    """

    sizes: tuple[int, ...]
    source: int
    source_strides: tuple[int, ...]
    target: int
    target_strides: tuple[int, ...]

    @classmethod
    def of(
        cls,
        sizes: Sequence[int],
        source: int,
        source_strides: Sequence[int],
        target: int,
        target_strides: Sequence[int],
    ) -> Copy:
        """Return a copy with as few dims as possible.

        >>> Copy.of((4, 1, 6), 30, (6, 6, 1), 0, (6, 9, 1))
        Copy(sizes=(24,), source=30, source_strides=(1,), target=0, target_strides=(1,))

        Raises:
            ValueError: if a size is not positive, or sizes and strides differ in their number of dims.
        """
        joined: list[int] = []  # sizes and strides of the joined dims, from the innermost outward
        source_steps: list[int] = []
        target_steps: list[int] = []
        for size, source_step, target_step in zip(
            reversed(sizes), reversed(source_strides), reversed(target_strides), strict=True
        ):
            if size < 1:
                raise ValueError(f"a copy of sizes {tuple(sizes)}")
            if size == 1:
                continue
            if (
                joined
                and source_step == joined[-1] * source_steps[-1]
                and target_step == joined[-1] * target_steps[-1]
            ):
                joined[-1] *= size
            else:
                joined.append(size)
                source_steps.append(source_step)
                target_steps.append(target_step)
        if not joined:
            return cls.run(source, target, 1)
        return cls(tuple(joined[::-1]), source, tuple(source_steps[::-1]), target, tuple(target_steps[::-1]))

    @classmethod
    def run(cls, source: int, target: int, numel: int) -> Copy:
        """Return the copy of ``numel`` consecutive items."""
        return cls((numel,), source, (1,), target, (1,))

    @property
    def numel(self) -> int:
        """Number of items that are copied."""
        return math.prod(self.sizes)

    @property
    def is_run(self) -> bool:
        """Whether the items are consecutive in the source and in the target."""
        return self.source_strides == (1,) == self.target_strides

    def shift(self, source_numel: int, target_numel: int = 0) -> Copy:
        """Return this copy, moved by ``source_numel`` items in the source and ``target_numel`` in the target."""
        source, target = self.source + source_numel, self.target + target_numel
        return Copy(self.sizes, source, self.source_strides, target, self.target_strides)

    def source_view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the copy's items in ``flat``, the whole source memory, 1D; a view of shape `sizes`."""
        return flat.as_strided(self.sizes, self.source_strides, flat.storage_offset() + self.source)

    def target_view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the copy's items in ``flat``, the whole target memory, 1D; a view of shape `sizes`."""
        return flat.as_strided(self.sizes, self.target_strides, flat.storage_offset() + self.target)

    def source_ranges(self, max_gap_numel: int = 0) -> Iterator[Range]:
        """Yield the ranges of the source that cover the copy, in order; source strides must be nested.

        Args:
            max_gap_numel: ranges with at most this many items between them are joined, and include these items.
        """
        numel, outer = 1, list(zip(self.sizes, self.source_strides, strict=True))
        # The gaps of an outer dim are at least as large as those of an inner one, because strides are nested.
        while outer and outer[-1][1] - numel <= max_gap_numel:
            size, stride = outer.pop()
            numel += (size - 1) * stride
        for steps in product(*(range(0, size * stride, stride) for size, stride in outer)):
            start = self.source + sum(steps)
            yield Range(start, start + numel)

    def within(self, start: int, stop: int) -> Iterator[Copy]:
        """Yield copies of those items whose index in the source is in [start, stop); source strides must be nested.

        There are at most ``2 * len(sizes) - 1`` such copies.

        >>> [(part.sizes, part.source) for part in Copy((3, 4), 0, (10, 1), 0, (4, 1)).within(12, 30)]
        [((2,), 12), ((4,), 20)]
        """
        (size, *inner), (stride, *inner_strides) = self.sizes, self.source_strides
        start, stop = start - self.source, stop - self.source
        # Items from the first to the last item of one index of the first dim.
        numel = 1 + sum((n - 1) * step for n, step in zip(inner, inner_strides, strict=True))
        # Indices of the first dim: [first, last) have some of their items in the range, [begin, end) have all.
        first, last = max(0, (start - numel) // stride + 1), min(size, -(-stop // stride))
        begin, end = max(first, -(-start // stride)), min(last, (stop - numel) // stride + 1)
        for index in range(first, min(begin, last)):  # cut by `start`, and maybe by `stop`: at most one
            yield from self._at(index).within(self.source + start, self.source + stop)
        if begin + 1 == end and inner:
            yield self._at(begin)
        elif begin < end:
            yield self._replace(
                sizes=(end - begin, *inner),
                source=self.source + begin * stride,
                target=self.target + begin * self.target_strides[0],
            )
        for index in range(max(begin, end), last):  # cut by `stop` alone: at most one
            yield from self._at(index).within(self.source + start, self.source + stop)

    def _at(self, index: int) -> Copy:
        """Return the copy of one index of the first of several dims."""
        source = self.source + index * self.source_strides[0]
        target = self.target + index * self.target_strides[0]
        return Copy(self.sizes[1:], source, self.source_strides[1:], target, self.target_strides[1:])


def overlaps(source: Region, target: Region) -> list[Copy]:
    """Return the copies that move the items of both regions from the source region to the target region.

    The memory on each side has the items of its region, in the region's order.
    """
    if source.box == target.box:  # the spans are ranges of one box, as for two ragged pieces of a tensor
        shared = source.span.intersect(target.span)
        if not shared.numel:
            return []
        return [Copy.run(shared.start - source.span.start, shared.start - target.span.start, shared.numel)]
    if source.box.intersect(target.box) is None:
        return []
    copies: list[Copy] = []
    targets = [(box, first, contiguous_strides(box.sizes)) for box, first in target.pieces()]
    for source_box, source_first in source.pieces():
        source_strides = contiguous_strides(source_box.sizes)
        for target_box, target_first, target_strides in targets:
            shared_box = source_box.intersect(target_box)
            if shared_box is None:
                continue
            copy = Copy.of(
                shared_box.sizes,
                source_first + _index(shared_box, source_box, source_strides),
                source_strides,
                target_first + _index(shared_box, target_box, target_strides),
                target_strides,
            )
            # A run that continues the last run on both sides is joined with the last run.
            if copies and copy.is_run and copies[-1].is_run:
                last = copies[-1]
                if (last.source + last.numel, last.target + last.numel) == (copy.source, copy.target):
                    copies[-1] = Copy.run(last.source, last.target, last.numel + copy.numel)
                    continue
            copies.append(copy)
    return copies


def compose(first: Copy, second: Copy) -> Iterator[Copy]:
    """Yield the copies from the source of ``first`` to the target of ``second`` that both make, one after the other.

    The target of ``first`` and the source of ``second`` are one memory, in which ``first`` writes no item twice. Dims
    are not joined: no dim of a result is longer than the dim of each copy from which it is made.

    >>> transpose, rows = Copy((2, 3), 0, (3, 1), 0, (1, 2)), Copy((2,), 2, (1,), 0, (1,))
    >>> [(copy.sizes, copy.source, copy.source_strides) for copy in compose(transpose, rows)]
    [((2,), 1, (3,))]
    """
    if first.is_run and first.target <= second.source:
        # The usual case, a box of a whole tensor.
        last = second.source + _span(list(zip(second.sizes, second.source_strides, strict=True)))
        if last < first.target + first.numel:
            yield second.shift(first.source - first.target)
            return
    written = _by_stride(zip(first.sizes, first.target_strides, first.source_strides, strict=True))
    read = _by_stride(zip(second.sizes, second.source_strides, second.target_strides, strict=True))
    repeated = [(size, 0, into) for size, stride, into in read if stride == 0]  # read several times
    read = [dim for dim in read if dim[1]]
    origin = first.source, second.target
    for dims, source, target in _meet(written, read, second.source - first.target, origin, repeated):
        sizes, source_strides, target_strides = zip(*dims, strict=True) if dims else ((1,), (1,), (1,))
        yield Copy(sizes, source, source_strides, target, target_strides)


_Dim = tuple[int, int, int]  # size, stride in the shared memory, stride in the other memory of the copy


def _by_stride(dims: Iterable[_Dim]) -> list[_Dim]:
    """Return the dims of several indices, the largest stride first."""
    return sorted((dim for dim in dims if dim[0] > 1), key=lambda dim: -dim[1])


def _span(dims: Sequence[tuple[int, ...]]) -> int:
    """Return the distance from the first to the last item of dims (size, stride, ..)."""
    return sum((dim[0] - 1) * dim[1] for dim in dims)


def _meet(
    written: list[_Dim], read: list[_Dim], ahead: int, origin: tuple[int, int], dims: list[_Dim]
) -> Iterator[tuple[list[_Dim], int, int]]:
    """Yield the items that two strided boxes of one memory share: for `compose`.

    Args:
        written, read: dims of both boxes, the largest stride first.
        ahead: index of the first read item, less that of the first written item.
        origin: index of the first written item in the source, and of the first read item in the target.
        dims: the dims (size, source stride, target stride) that have been matched.

    Yields:
        Matched dims, and the indices of the first item in the source and in the target.
    """
    written_span, read_span = _span(written), _span(read)
    if ahead > written_span or ahead + read_span < 0:
        return
    if not written and not read:
        yield dims, *origin
        return
    stride = max(box[0][1] for box in (written, read) if box)
    source, target = origin
    # Cut a long dim of a smaller stride, so that both boxes have a dim of this stride, or none.
    for box, is_written in ((written, True), (read, False)):
        if not box or box[0][1] == stride:
            continue
        (size, step, other), rest = box[0], box[1:]
        whole, left = divmod(stride, step)
        if size * step <= stride:  # at most one index of this stride
            continue
        parts: list[tuple[int, list[_Dim]]]  # the index at which a part begins, and the dims of the part
        if left:  # the strides do not divide each other: index by index
            parts = [(index, rest) for index in range(size)]
        else:
            outer = size // whole
            parts = [(0, [(outer, stride, other * whole), (whole, step, other), *rest])]
            if size % whole:
                parts.append((outer * whole, [(size % whole, step, other), *rest]))
        for start, part in parts:
            part = [dim for dim in part if dim[0] > 1]
            if is_written:
                yield from _meet(part, read, ahead - start * step, (source + start * other, target), dims)
            else:
                yield from _meet(written, part, ahead + start * step, (source, target + start * other), dims)
        return
    num_written, from_step, written_rest = _top(written, stride)
    num_read, into_step, read_rest = _top(read, stride)
    low, high = -((_span(written_rest) - ahead) // stride), (ahead + _span(read_rest)) // stride
    for apart in range(low, high + 1):  # the written index, less the read index
        start, stop = max(0, apart), min(num_written, num_read + apart)
        if start < stop:
            matched = [*dims, (stop - start, from_step, into_step)] if stop - start > 1 else dims
            begin = source + start * from_step, target + (start - apart) * into_step
            yield from _meet(written_rest, read_rest, ahead - apart * stride, begin, matched)


def _top(box: list[_Dim], stride: int) -> tuple[int, int, list[_Dim]]:
    """Return size and other stride of a box's dim of this stride (one index if it has none), and the other dims."""
    if box and box[0][1] == stride:
        return box[0][0], box[0][2], box[1:]
    return 1, 0, box


def _index(inner: Box, outer: Box, strides: tuple[int, ...]) -> int:
    """Return the index of the first item of ``inner`` among the items of ``outer``, which have these strides."""
    return sum((a - b) * step for a, b, step in zip(inner.offsets, outer.offsets, strides, strict=True))
