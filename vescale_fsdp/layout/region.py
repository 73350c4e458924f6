"""Regions: one rank's part of one tensor, and the overlap of two regions; integer arithmetic without tensors.

A region is a flat range of the row-major elements of a box, an n-dimensional rectangle of the tensor:

    ragged piece             box = the whole tensor     range = the piece
    Shard, TP, EP            box = the rank's box       range = all of the box
    replica 1 of 4           box = the replicated box   range = its second quarter

In memory and in a file, a region is one contiguous run of elements. The overlap of two regions consists of *runs*,
which are contiguous in both regions, and *patches*, which are boxes that are strided in at least one of the regions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from vescale_fsdp.layout.geometry import (
    Box,
    FlatRange,
    boxes_of_range,
    contiguous_strides,
    numel_of,
    run_start,
    whole_box,
)

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Region:
    """The elements ``span`` of a ``box`` of a tensor, counted in the box's row-major order; both are half-open."""

    box: Box
    span: FlatRange

    @classmethod
    def of_box(cls, box: Box) -> Region:
        """Return the region of all elements of a box."""
        return cls(box, FlatRange(0, box.numel))

    @property
    def numel(self) -> int:
        """Number of elements in the region."""
        start, stop = self.span
        return stop - start if stop > start else 0

    def part(self, index: int, count: int) -> Region:
        """Return part ``index`` of ``count`` consecutive parts, whose sizes differ by at most one element."""
        start, numel = self.span.start, self.span.numel
        return Region(
            self.box, FlatRange(start + numel * index // count, start + numel * (index + 1) // count)
        )

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


class SharedRun(NamedTuple):
    """A run of elements that is contiguous in two regions.

    Attributes:
        source, target: index of the run's first element in each region.
        numel: number of elements.
    """

    source: int
    target: int
    numel: int

    def source_view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a 1D view of the shared elements; ``flat`` has all elements of the source region."""
        return flat[self.source : self.source + self.numel]

    def target_view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a 1D view of the shared elements; ``flat`` has all elements of the target region."""
        return flat[self.target : self.target + self.numel]


class SharedPatch(NamedTuple):
    """A box that two regions share, strided in at least one of the regions.

    In each region, a larger box that is contiguous there surrounds the shared box.

    Attributes:
        source, target: index, in each region, of the surrounding box's first element.
        source_sizes, target_sizes: sizes of the surrounding boxes.
        source_box, target_box: the shared box, relative to the corner of each surrounding box.
    """

    source: int
    source_sizes: tuple[int, ...]
    source_box: Box
    target: int
    target_sizes: tuple[int, ...]
    target_box: Box

    @property
    def numel(self) -> int:
        """Number of elements of the shared box."""
        return self.source_box.numel

    def source_view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return an n-dimensional view of the shared box; ``flat`` is 1D and has all elements of the source region."""
        stop = self.source + numel_of(self.source_sizes)
        return flat[self.source : stop].view(self.source_sizes)[self.source_box.slices()]

    def target_view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return an n-dimensional view of the shared box; ``flat`` is 1D and has all elements of the target region."""
        stop = self.target + numel_of(self.target_sizes)
        return flat[self.target : stop].view(self.target_sizes)[self.target_box.slices()]


def overlaps(source: Region, target: Region) -> list[SharedRun | SharedPatch]:
    """Return the elements that are in both regions, as runs and patches."""
    if source.box == target.box:  # then flat ranges of one box, as for two ragged pieces of a tensor
        shared = source.span.intersect(target.span)
        if not shared.numel:
            return []
        return [SharedRun(shared.start - source.span.start, shared.start - target.span.start, shared.numel)]
    if source.box.intersect(target.box) is None:
        return []
    merged: list[SharedRun | SharedPatch] = []
    targets = list(target.pieces())
    for source_box, source_start in source.pieces():
        for target_box, target_start in targets:
            shared_box = source_box.intersect(target_box)
            if shared_box is None:
                continue
            item = _share(shared_box, source_box, source_start, target_box, target_start)
            last = merged[-1] if merged else None
            # A run that continues the last run in both regions is joined with it.
            if (
                isinstance(item, SharedRun)
                and isinstance(last, SharedRun)
                and last.source + last.numel == item.source
                and last.target + last.numel == item.target
            ):
                merged[-1] = SharedRun(last.source, last.target, last.numel + item.numel)
            else:
                merged.append(item)
    return merged


def _share(
    shared: Box, source_box: Box, source: int, target_box: Box, target: int
) -> SharedRun | SharedPatch:
    """Return a shared box as a run if it is contiguous in both surrounding boxes, else as a patch."""
    in_source = _relative(shared, source_box)
    in_target = _relative(shared, target_box)
    source_start = run_start(source_box.sizes, in_source)
    target_start = run_start(target_box.sizes, in_target)
    if source_start is not None and target_start is not None:
        return SharedRun(source + source_start, target + target_start, shared.numel)
    return SharedPatch(source, source_box.sizes, in_source, target, target_box.sizes, in_target)


def _relative(inner: Box, outer: Box) -> Box:
    return Box(tuple(a - b for a, b in zip(inner.offsets, outer.offsets, strict=True)), inner.sizes)


def runs_of_box(sizes: tuple[int, ...], box: Box, *, max_gap_numel: int) -> list[FlatRange]:
    """Return the flat runs of a row-major tensor that cover a box.

    Runs with at most ``max_gap_numel`` elements between them are joined, and include these elements.
    """
    runs = [FlatRange(0, 1)]
    for offset, size, stride, full in reversed(  # from the innermost dim outward
        list(zip(box.offsets, box.sizes, contiguous_strides(sizes), sizes, strict=True))
    ):
        whole_dim = size == full and len(runs) == 1 and runs[0] == FlatRange(0, stride)
        if whole_dim:
            runs = [FlatRange(0, stride * size)]
            continue
        shifted: list[FlatRange] = []
        for index in range(offset, offset + size):
            for run in runs:
                start, stop = run.shift(index * stride)
                if shifted and start - shifted[-1].stop <= max_gap_numel:
                    shifted[-1] = FlatRange(shifted[-1].start, stop)
                else:
                    shifted.append(FlatRange(start, stop))
            if len(shifted) == 1 and runs[0].start + stride - runs[-1].stop <= max_gap_numel:
                # Every further index would only extend the single run: skip to the last index.
                last = runs[-1].shift((offset + size - 1) * stride).stop
                shifted = [FlatRange(shifted[0].start, last)]
                break
        runs = shifted
    return runs
