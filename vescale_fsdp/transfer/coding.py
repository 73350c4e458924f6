"""Codes and scales of a tensor, computed by each rank from the part that it stores.

    measure    the largest magnitude of each block, over the items of this rank
    agree      on the largest magnitude of each block that spans ranks (`memory.CutBlocks`)
    scales     the codec computes them from the magnitudes
    codes      item by item, for any box that is sent

A codec views a tensor as a matrix, whose rows are called *lines*, and gives each block of the matrix a scale. A *band*
is one row of blocks. Any region of the tensor is a few boxes of the matrix. The rank that stores the first item of a
block owns the block's scale.

    lines of 6, blocks of 2 x 3, two ranks        a a a b b b      a whole on rank 0, with its scale
                                                  a a a b b b      c cut: first item and scale on rank 0
                                                  c c|c d d d      d whole on rank 1, with its scale
                                                  c c c d d d

The codes and scales are, bit for bit, this rank's part of those that the codec computes from the whole tensor.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from vescale_fsdp.checkpoint.manifest.region import Region, runs_of_box
from vescale_fsdp.layout.geometry import Box, FlatRange, boxes_of_range, numel_of

if TYPE_CHECKING:
    from vescale_fsdp.quantize.codec import BlockCodec, BlockGrid

Shape = tuple[int, ...]

_SLAB_NUMEL = 1 << 18  # items that are processed at once: intermediate results stay in a CPU cache


class MatrixBox(NamedTuple):
    """Rows [row, row + rows) and columns [col, col + cols) of the matrix as which a codec views a tensor.

    Attributes:
        start: index of the box's first item in the rank's flat memory, which has the box's items row by row.
    """

    row: int
    rows: int
    col: int
    cols: int
    start: int

    def blocks(self, grid: BlockGrid) -> tuple[range, range]:
        """Return the rows of blocks (bands) and the columns of blocks in which the box has items."""
        return (
            range(self.row // grid.rows, -(-(self.row + self.rows) // grid.rows)),
            range(self.col // grid.cols, -(-(self.col + self.cols) // grid.cols)),
        )


def matrix_boxes(region: Region, shape: Shape, grid: BlockGrid) -> Iterator[MatrixBox]:
    """Yield the boxes of the codec's matrix that tile a region of a tensor, in the order of the region's memory.

    Args:
        shape: shape of the whole tensor.
    """
    line = grid.line_numel
    if len(shape) < 2:  # a vector has no rows, so it is cut into lines of `line` items
        first = region.box.offsets[0] if shape else 0
        offset = 0
        for box in boxes_of_range((-(-numel_of(shape) // line), line), *region.span.shift(first)):
            (row, col), (rows, cols) = box.offsets, box.sizes
            yield MatrixBox(row, rows, col, cols, offset)
            offset += box.numel
        return
    for box, offset in region.pieces():
        col, cols = box.offsets[-1], box.sizes[-1]
        # One box per run of adjacent lines: all dims but the last are flattened into the matrix's rows.
        for run in runs_of_box(shape[:-1], Box(box.offsets[:-1], box.sizes[:-1]), max_gap_numel=0):
            yield MatrixBox(run.start, run.numel, col, cols, offset)
            offset += run.numel * cols


def scale_regions(region: Region, shape: Shape, grid: BlockGrid) -> list[Region]:
    """Return the regions of the tensor of scales that a rank owns, if it stores ``region`` of a tensor of ``shape``."""
    regions = []
    for box in matrix_boxes(region, shape, grid):
        # Rounded up at both ends: the rank owns the scales of blocks whose first item is in the box.
        bands = range(-(-box.row // grid.rows), -(-(box.row + box.rows) // grid.rows))
        cols = range(-(-box.col // grid.cols), -(-(box.col + box.cols) // grid.cols))
        if bands and cols:
            num_dims = len(grid.scales_shape)  # 1 if bands have one block each, so one scale per band
            corners = Box((bands.start, cols.start)[:num_dims], (len(bands), len(cols))[:num_dims])
            regions.append(Region(corners, FlatRange(0, corners.numel)))
    return regions


def cut_blocks_of(region: Region, shape: Shape, grid: BlockGrid) -> set[int]:
    """Return the row-major numbers of the blocks of which a region may contain only a part.

    Some of these blocks may be whole, since several boxes of one region can together cover a block.

    Args:
        shape: shape of the whole tensor.
    """

    def cut(blocks: range, start: int, size: int, step: int, full: int) -> set[int]:
        """Return the first and the last block, each only if [start, start + size) has only a part of it.

        Args:
            blocks: numbers of the blocks in which [start, start + size) has items.
            step: items of a block.
            full: items of the whole dim. Its last block may be shorter than ``step``, and is then not cut.
        """
        edges = (
            (blocks.start, start % step != 0),
            (blocks.stop - 1, start + size < full and (start + size) % step != 0),
        )
        return {block for block, is_cut in edges if is_cut}

    num_lines = -(-numel_of(shape) // grid.line_numel)
    numbers: set[int] = set()
    for box in matrix_boxes(region, shape, grid):
        bands, cols = box.blocks(grid)
        cut_bands = cut(bands, box.row, box.rows, grid.rows, num_lines)
        cut_cols = cut(cols, box.col, box.cols, grid.cols, grid.line_numel)
        numbers.update(band * grid.scales_per_band + col for band in cut_bands for col in cols)
        numbers.update(band * grid.scales_per_band + col for band in bands for col in cut_cols)
    return numbers


def hull_of(box: Box, shape: Shape, grid: BlockGrid) -> FlatRange:
    """Return a range of the tensor's flat items that contains the first item of each block of a box of scales.

    The rank that stores the first item of a block owns its scale, so ranks outside of this range own no scale of the
    box.
    """
    bands = box.offsets[0], box.offsets[0] + box.sizes[0] - 1
    cols = (box.offsets[1], box.offsets[1] + box.sizes[1] - 1) if len(box.sizes) > 1 else (0, 0)
    first, last = (
        band * grid.rows * grid.line_numel + col * grid.cols for band, col in zip(bands, cols, strict=True)
    )
    return FlatRange(first, min(last + 1, numel_of(shape)))


class _Slab(NamedTuple):
    """Rows [row, row + rows) of a matrix box: several whole bands, or part of one band.

    Attributes:
        bands: the rows of `CodedTensor.amax` for the slab's bands.
        num_bands: number of these bands.
    """

    row: int
    rows: int
    bands: slice
    num_bands: int


class CodedTensor:
    """One rank's part of a tensor that a codec quantizes. Measures the largest magnitudes when it is created.

    Args:
        region: the part that the rank stores.
        shape: shape of the whole tensor.
        local: 1D, the items of the part.

    Attributes:
        amax: 2D [bands, blocks per band], the largest magnitude of each block, for the bands that have items on this
            rank. Ranks agree on the blocks that they share before codes or scales are computed.
        first_block: row-major number, in the whole tensor, of the first block of ``amax``.
    """

    def __init__(self, codec: BlockCodec, region: Region, shape: Shape, local: torch.Tensor) -> None:
        self._codec = codec
        self._grid = codec.grid(shape)
        self._local = local
        self._boxes = list(matrix_boxes(region, shape, self._grid))
        bands = [box.blocks(self._grid)[0] for box in self._boxes]
        self._first_band = min((band.start for band in bands), default=0)  # default: this rank has no items
        num_bands = max((band.stop for band in bands), default=0) - self._first_band
        per_band = self._grid.scales_per_band
        self.first_block = self._first_band * per_band
        self.amax = torch.zeros(num_bands, per_band, dtype=torch.float32, device=local.device)
        for box in self._boxes:
            for slab in self._slabs(box):
                self._measure(box, slab)
        self._results: tuple[torch.Tensor, torch.Tensor] | None = None

    def _slabs(self, box: MatrixBox) -> Iterator[_Slab]:
        """Split the rows of a box into slabs: as many whole bands as fit a CPU cache; each cut band is a slab."""
        height = self._grid.rows
        # At least one band, even if it exceeds the cache. max(box.cols, 1): no division by zero for empty boxes.
        many = max(1, _SLAB_NUMEL // (max(box.cols, 1) * height)) * height
        row, stop = box.row, box.row + box.rows
        while row < stop:
            within = row % height
            whole = (stop - row) // height * height
            rows = min(many, whole) if not within and whole else min(height - within, stop - row)
            first, num_bands = row // height - self._first_band, max(rows // height, 1)
            yield _Slab(row, rows, slice(first, first + num_bands), num_bands)
            row += rows

    def _measure(self, box: MatrixBox, slab: _Slab) -> None:
        """Update ``amax`` with the magnitudes of a slab's items."""
        start = box.start + (slab.row - box.row) * box.cols
        items = self._local[start : start + slab.rows * box.cols]
        # The cast comes last, when few items are left.
        by_col = items.view(slab.num_bands, -1, box.cols).abs().amax(1).float()
        cols = box.blocks(self._grid)[1]
        before = box.col - cols.start * self._grid.cols
        behind = len(cols) * self._grid.cols - before - box.cols
        # Pad to whole blocks. Zeros do not change a maximum of magnitudes.
        largest = F.pad(by_col, (before, behind)).view(slab.num_bands, len(cols), -1).amax(2)
        # A block may get items from several boxes and slabs.
        known = self.amax[slab.bands, cols.start : cols.stop]
        known.copy_(torch.maximum(known, largest))

    @property
    def _factors_and_scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The codec's factors and scales of the blocks of `amax`."""
        if self._results is None:  # at first use, not earlier: ranks must first agree on the magnitudes
            self._results = self._codec.scales_of(self.amax)
        return self._results

    def scales(self, regions: Sequence[tuple[Region, int]]) -> torch.Tensor:
        """Return the scales of all ``regions`` of the tensor of scales, concatenated, 1D."""
        scales = self._factors_and_scales[1]
        parts = []
        for region, _ in regions:
            # 1D scales (one per band) have no second dim: use column 0, one column.
            band, col = region.box.offsets[0] - self._first_band, (*region.box.offsets, 0)[1]
            bands, cols = region.box.sizes[0], (*region.box.sizes, 1)[1]
            parts.append(scales[band : band + bands, col : col + cols].reshape(-1))
        return torch.cat(parts) if parts else scales.new_empty(0)

    def encode(self, out: torch.Tensor, sizes: Shape, strides: Shape, start: int) -> None:
        """Write the codes of a strided box of this rank's items into ``out``.

        Args:
            out: uint8 of shape ``sizes``.
            strides, start: strides of the box in this rank's flat memory, and the index of its first item there.
        """
        if strides == (1,):  # contiguous items may span several matrix boxes
            self._encode_run(out, start, start + sizes[0])
            return
        if len(sizes) == 1:  # a strided vector is a matrix of one column
            out, sizes, strides = out.view(-1, 1), (*sizes, 1), (*strides, 1)
        box = self._box_at(start)
        row, col = divmod(start - box.start, box.cols)
        if strides == (box.cols, 1) and row + sizes[0] <= box.rows and col + sizes[1] <= box.cols:
            self._encode_box(out, box, row, col, (sizes[0], sizes[1]))
        elif strides == (1, box.cols) and row + sizes[1] <= box.rows and col + sizes[0] <= box.cols:
            self._encode_box(out.t(), box, row, col, (sizes[1], sizes[0]))
        else:  # neither rows nor columns of one box, such as the same row of several experts: index by index
            for index in range(sizes[0]):
                self.encode(out[index], sizes[1:], strides[1:], start + index * strides[0])

    def _box_at(self, index: int) -> MatrixBox:
        """Return the matrix box that contains the item at ``index`` of the flat memory."""
        return self._boxes[bisect_right(self._boxes, index, key=lambda box: box.start) - 1]

    def _encode_run(self, out: torch.Tensor, start: int, stop: int) -> None:
        """Write the codes of items [start, stop) of the flat memory into ``out``, 1D."""
        at = start
        while at < stop:
            box = self._box_at(at)
            end = min(stop, box.start + box.rows * box.cols)
            for part in boxes_of_range((box.rows, box.cols), at - box.start, end - box.start):
                (row, col), (rows, cols) = part.offsets, part.sizes
                into = out[at - start : at - start + part.numel].view(rows, cols)
                self._encode_box(into, box, row, col, (rows, cols))
                at += part.numel

    def _encode_box(
        self, out: torch.Tensor, box: MatrixBox, row: int, col: int, sizes: tuple[int, int]
    ) -> None:
        """Write the codes of a part of a matrix box into ``out``.

        Args:
            row, col: the first item of the part, relative to the box.
            sizes: rows and columns of the part.
        """
        rows, cols = sizes
        factors = self._factors_and_scales[0]
        first_col = box.col + col
        indices = torch.arange(first_col, first_col + cols, dtype=torch.int64, device=out.device)
        block_of = indices // self._grid.cols
        for slab in self._slabs(MatrixBox(box.row + row, rows, first_col, cols, 0)):
            here = slab.row - box.row - row
            start = box.start + (row + here) * box.cols + col
            by_band = (slab.num_bands, slab.rows // slab.num_bands, cols)
            steps = (by_band[1] * box.cols, box.cols, 1)
            # `as_strided` counts from the start of the storage, not of the tensor.
            values = self._local.as_strided(by_band, steps, self._local.storage_offset() + start).float()
            by_col = factors[slab.bands].index_select(1, block_of)
            codes = self._codec.codes_of(values, by_col[:, None, :])
            out[here : here + slab.rows].copy_(codes.view(slab.rows, cols))
