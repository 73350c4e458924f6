"""Codes and scales of a source's tensors, made by each rank of what it holds, wherever blocks are cut.

    measure    the largest magnitude of each block, of the items held here
    agree      of blocks that several ranks hold, the largest of all: one all-reduce of one number per cut block
    scales     from the magnitudes, as the codec says
    codes      item by item, of whatever box is on its way

What a rank makes so is, bit for bit, its part of what the codec makes of the whole tensor.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from vescale_fsdp.checkpoint.manifest.distribution import LayoutCut
from vescale_fsdp.checkpoint.manifest.region import Region
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator
from vescale_fsdp.checkpoint.transfer.planning.blocks import MatrixBox, cut_blocks_of, matrix_boxes
from vescale_fsdp.checkpoint.transfer.planning.links import Codec, Grid
from vescale_fsdp.checkpoint.transfer.planning.sources import SourceTensor
from vescale_fsdp.checkpoint.transfer.planning.transfer_plan import TransferPlan
from vescale_fsdp.layout.geometry import boxes_of_range

Key = tuple[str, Codec]  # what codes and scales of one tensor share

_SLAB_NUMEL = 1 << 18  # items that are looked at in one go, so that what they become stays in a cache


class CutBlocks:
    """The blocks of a plan's coded tensors that lie on several ranks: the same list on all ranks.

    Attributes:
        blocks: numbers of each coded tensor's cut blocks, ascending.
        total: cut blocks of all tensors.
    """

    def __init__(self, plan: TransferPlan) -> None:
        self.blocks = {key: sorted(_cut_blocks(source, plan)) for key, source in _coded_sources(plan).items()}
        self.total = sum(map(len, self.blocks.values()))

    def agree(self, tensors: Mapping[Key, CodedTensor], coordinator: Coordinator) -> None:
        """Give every rank the largest magnitudes of the cut blocks it has items of; a collective, if there are any."""
        if not self.total:
            return
        # As integers the order of magnitudes is the same, and a NaN is the largest of them.
        largest = torch.zeros(self.total, dtype=torch.int32, device="cpu")
        own: list[tuple[CodedTensor, list[int], list[int]]] = []
        start = 0
        for key, blocks in self.blocks.items():
            if key in tensors:
                places, here = tensors[key].blocks_here(blocks)
                own.append((tensors[key], [start + place for place in places], here))
            start += len(blocks)
        for tensor, places, here in own:
            largest[places] = tensor.amax.view(-1)[here].cpu().view(torch.int32)
        coordinator.raise_to_largest(largest)
        for tensor, places, here in own:
            tensor.amax.view(-1)[here] = largest[places].view(torch.float32).to(tensor.amax.device)


def coded_here(plan: TransferPlan, rank: int, local_of: Mapping[str, torch.Tensor]) -> dict[Key, CodedTensor]:
    """The coded tensors that a rank holds part of, their blocks measured.

    Args:
        local_of: 1D, the rank's region of each tensor.
    """
    found = {}
    for key, source in _coded_sources(plan).items():
        position = source.holders.position(rank)
        if position is not None:
            found[key] = CodedTensor(source, source.held_region(position[0]), local_of[source.name])
    return found


def _coded_sources(plan: TransferPlan) -> dict[Key, SourceTensor]:
    """One source of each tensor and codec, in the order of the plan's leaves."""
    found: dict[Key, SourceTensor] = {}
    for leaf in plan.leaves:
        if leaf.source.codec is not None:
            found.setdefault((leaf.source.name, leaf.source.codec), leaf.source)
    return found


def _cut_blocks(source: SourceTensor, plan: TransferPlan) -> set[int]:
    grid = source.grid
    assert grid is not None
    cuts = source.distribution.cuts
    if len(cuts) == 1 and isinstance(cuts[0], LayoutCut):
        slot = plan.source.structure.layouts[cuts[0].layout].slots[cuts[0].slot]
        if slot.block_numel % (grid.rows * grid.line_numel) == 0:
            return set()  # what the planner keeps whole is whole on every rank
    return {
        block for region in source.held_regions() for block in cut_blocks_of(region, source.held_shape, grid)
    }


class _Slab(NamedTuple):
    """Rows of a box: whole bands, or part of one."""

    row: int
    rows: int
    bands: slice  # counted from the first that is held here

    @property
    def num_bands(self) -> int:
        """How many bands, whole or not."""
        return int(self.bands.stop - self.bands.start)


class CodedTensor:
    """One tensor of a source under a codec: the blocks that this rank holds items of.

    Args:
        region: what the rank holds.
        local: 1D, its items.

    Attributes:
        amax: 2D [bands, blocks per band], the largest magnitude of each block.
    """

    def __init__(self, source: SourceTensor, region: Region, local: torch.Tensor) -> None:
        assert source.codec is not None and source.grid is not None
        self._codec: Codec = source.codec
        self._grid: Grid = source.grid
        self._local = local
        self._boxes = list(matrix_boxes(region, source.held_shape, self._grid))
        bands = [box.blocks(self._grid)[0] for box in self._boxes]
        self._first_band = min((band.start for band in bands), default=0)
        num_bands = max((band.stop for band in bands), default=0) - self._first_band
        per_band = -(-self._grid.line_numel // self._grid.cols)
        self.amax = torch.zeros(num_bands, per_band, dtype=torch.float32, device=local.device)
        for box in self._boxes:
            for slab in self._slabs(box):
                self._measure(box, slab)
        self._made: tuple[torch.Tensor, torch.Tensor] | None = None

    def _slabs(self, box: MatrixBox) -> Iterator[_Slab]:
        """The rows of a box in whole bands, as many at a time as stay in a cache, and cut bands one by one."""
        height = self._grid.rows
        many = max(1, _SLAB_NUMEL // (max(box.cols, 1) * height)) * height
        row, stop = box.row, box.row + box.rows
        while row < stop:
            within = row % height
            whole = (stop - row) // height * height
            rows = min(many, whole) if not within and whole else min(height - within, stop - row)
            first = row // height - self._first_band
            yield _Slab(row, rows, slice(first, first + max(rows // height, 1)))
            row += rows

    def _measure(self, box: MatrixBox, slab: _Slab) -> None:
        """Raise the magnitudes of a slab's blocks to what its items reach."""
        start = box.place + (slab.row - box.row) * box.cols
        items = self._local[start : start + slab.rows * box.cols]
        by_col = items.view(slab.num_bands, -1, box.cols).abs().amax(1).float()
        cols = box.blocks(self._grid)[1]
        before = box.col - cols.start * self._grid.cols
        behind = len(cols) * self._grid.cols - before - box.cols
        found = F.pad(by_col, (before, behind)).view(slab.num_bands, len(cols), -1).amax(2)
        known = self.amax[slab.bands, cols.start : cols.stop]
        known.copy_(torch.maximum(known, found))

    def blocks_here(self, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        """Of some blocks those in the bands held here: their places in the list, and in the magnitudes."""
        first = self._first_band * self.amax.shape[1]
        places = [place for place, block in enumerate(blocks) if 0 <= block - first < self.amax.numel()]
        return places, [blocks[place] - first for place in places]

    @property
    def _factors_and_scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._made is None:  # not before magnitudes are agreed
            self._made = self._codec.scales_of(self.amax)
        return self._made

    def scales(self, regions: Sequence[tuple[Region, int]]) -> torch.Tensor:
        """1D, the scales of regions of the tensor of scales, one after the other."""
        made = self._factors_and_scales[1]
        parts = []
        for region, _ in regions:
            band, col = region.box.offsets[0] - self._first_band, (*region.box.offsets, 0)[1]
            bands, cols = region.box.sizes[0], (*region.box.sizes, 1)[1]
            parts.append(made[band : band + bands, col : col + cols].reshape(-1))
        return torch.cat(parts) if parts else made.new_empty(0)

    def encode(self, out: torch.Tensor, sizes: tuple[int, ...], strides: tuple[int, ...], start: int) -> None:
        """Codes of a strided box of the local items.

        Args:
            out: uint8, of ``sizes``.
            strides, start: steps in the local memory, and the place of the first item.
        """
        box = self._box_at(start)
        row, col = divmod(start - box.place, box.cols)
        if strides == (1,):
            self._encode_run(out, start, start + sizes[0])
        elif len(sizes) == 1 and strides[0] == box.cols and row + sizes[0] <= box.rows:
            self._encode_box(out.view(-1, 1), box, row, col, (sizes[0], 1))
        elif strides == (box.cols, 1) and row + sizes[0] <= box.rows and col + sizes[1] <= box.cols:
            self._encode_box(out, box, row, col, (sizes[0], sizes[1]))
        elif strides == (1, box.cols) and row + sizes[1] <= box.rows and col + sizes[0] <= box.cols:
            self._encode_box(out.t(), box, row, col, (sizes[1], sizes[0]))
        else:  # steps over what the matrix has no name for, such as experts: index by index
            inner, steps = sizes[1:] or (1,), strides[1:] or (1,)
            for index in range(sizes[0]):
                self.encode(out[index].view(inner), inner, steps, start + index * strides[0])

    def _box_at(self, place: int) -> MatrixBox:
        return self._boxes[bisect_right(self._boxes, place, key=lambda box: box.place) - 1]

    def _encode_run(self, out: torch.Tensor, start: int, stop: int) -> None:
        """Codes of items [start, stop)."""
        at = start
        while at < stop:
            box = self._box_at(at)
            end = min(stop, box.place + box.rows * box.cols)
            for part in boxes_of_range((box.rows, box.cols), at - box.place, end - box.place):
                (row, col), (rows, cols) = part.offsets, part.sizes
                into = out[at - start : at - start + part.numel].view(rows, cols)
                self._encode_box(into, box, row, col, (rows, cols))
                at += part.numel

    def _encode_box(
        self, out: torch.Tensor, box: MatrixBox, row: int, col: int, sizes: tuple[int, int]
    ) -> None:
        """Codes of part of a matrix box, ``row`` and ``col`` counted from its corner."""
        rows, cols = sizes
        factors = self._factors_and_scales[0]
        first = (box.col + col) // self._grid.cols
        block_of = (
            torch.arange(box.col + col, box.col + col + cols, dtype=torch.int64, device=out.device)
            // self._grid.cols
            - first
        )
        strips = MatrixBox(box.row + row, rows, box.col + col, cols, 0)
        for slab in self._slabs(strips):
            here = slab.row - strips.row
            start = box.place + (row + here) * box.cols + col
            sizes_here = (slab.num_bands, slab.rows // slab.num_bands, cols)
            steps = (sizes_here[1] * box.cols, box.cols, 1)
            values = self._local.as_strided(sizes_here, steps, self._local.storage_offset() + start).float()
            by_col = factors[slab.bands, first:].index_select(1, block_of)
            codes = self._codec.codes_of(values, by_col[:, None, :])
            out[here : here + slab.rows].copy_(codes.view(slab.rows, cols))
