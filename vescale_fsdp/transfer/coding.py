"""Codes and scales of a tensor, computed by each rank from its piece.

    measure    the largest magnitude of each block, over the items of this rank
    agree      on the largest magnitude of each block that spans ranks (`memory.CutBlocks`)
    scales     the codec computes them from the magnitudes
    codes      item by item, for any box that is sent

A codec divides each matrix of a tensor (its last two dims) into blocks, and gives each block a scale. Rows of a matrix
are called *lines*, and a *band* is one row of blocks. No block spans two matrices, such as two experts of a fused
tensor. The rank that stores the first item of a block owns the block's scale.

    lines of 6, blocks of 2 x 3, two ranks        a a a b b b      a whole on rank 0, with its scale
                                                  a a a b b b      c cut: first item and scale on rank 0
                                                  c c|c d d d      d whole on rank 1, with its scale
                                                  c c c d d d

Bands and lines are numbered through all matrices, as if every matrix had whole bands. With these numbers a line tells
its band, and only real lines have items:

    2 matrices of 3 lines, blocks of 2 lines      lines 0 1 | 2 .      bands 0 and 1
                                                  lines 4 5 | 6 .      bands 2 and 3; lines 3 and 7 do not exist

The codes and scales are, bit for bit, those that the codec computes from the whole tensor, one matrix after another.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from vescale_fsdp.layout.geometry import Box, boxes_of_range, contiguous_strides, numel_of
from vescale_fsdp.layout.region import Copy, Region

if TYPE_CHECKING:
    from vescale_fsdp.quantize.codec import BlockCodec, BlockGrid

Shape = tuple[int, ...]
# A box of a quantized tensor that a rank stores, and a copy of the box's items: from the rank's flat memory to the
# rank's codes, which are numbered through all of the rank's boxes.
StoredBox = tuple[Box, Copy]

_SLAB_NUMEL = 1 << 18  # items that are processed at once: intermediate results stay in a CPU cache


@dataclass(frozen=True)
class MatrixGrid:
    """The blocks of a tensor: one grid for each matrix. A tensor of fewer than two dims is one matrix.

    Args:
        matrix: the codec's grid of one matrix.
        stack_shape: the tensor's dims before the last two.
    """

    matrix: BlockGrid
    stack_shape: Shape

    @classmethod
    def of(cls, codec: BlockCodec, shape: Shape) -> MatrixGrid:
        """Return the grid of a tensor of this shape."""
        return cls(codec.grid(shape[-2:]), shape[:-2])

    @property
    def shape(self) -> Shape:
        """Shape of the tensor."""
        return (*self.stack_shape, *self.matrix.shape)

    @property
    def rows(self) -> int:
        """Lines of a block."""
        return self.matrix.rows

    @property
    def cols(self) -> int:
        """Items of a line that are in one block."""
        return self.matrix.cols

    @property
    def lines(self) -> int:
        """Lines of one matrix."""
        # Rounded up, since a vector's last line may be short.
        return -(-self.matrix.numel // self.matrix.line_numel)

    @property
    def bands(self) -> int:
        """Bands of one matrix; the last one may be short."""
        return -(-self.lines // self.rows)

    @property
    def numbered_lines(self) -> int:
        """Numbers of lines from one matrix to the next: the lines of whole bands."""
        return self.bands * self.rows

    @property
    def scales_shape(self) -> Shape:
        """Shape of the tensor of scales: stack, bands, blocks per band; for a vector, one scale per line."""
        return (*self.stack_shape, *self.matrix.scales_shape)

    def cuts_no_block(self, block_numel: int) -> bool:
        """Return whether cuts of the flat tensor at multiples of ``block_numel`` cut no block."""
        band_numel = self.matrix.band_numel
        if self.stack_shape and self.lines % self.rows:
            band_numel = self.matrix.numel  # bands have two sizes, so only whole matrices are regular
        return block_numel % band_numel == 0

    def first_items(self, scales: Box) -> Box:
        """Return a box of the tensor that contains the first item of each block of a box of scales."""
        if not self.matrix.shape:  # a scalar has one item and one scale
            return Box((), ())
        block = (self.rows, self.cols) if len(self.matrix.shape) == 2 else (self.cols,)
        steps = (*(1,) * len(self.stack_shape), *block)
        offsets = tuple(offset * step for offset, step in zip(scales.offsets, steps, strict=True))
        sizes = tuple((size - 1) * step + 1 for size, step in zip(scales.sizes, steps, strict=True))
        return Box(offsets, sizes)


class MatrixBox(NamedTuple):
    """A box: lines [row, row + rows) of one or several matrices, and columns [col, col + cols) of these lines.

    Also where the box's items are in the rank's flat memory and among the rank's codes.

    Attributes:
        row: number of the first line, counted through all matrices.
        start: number of the box's first code among the rank's codes, which have the box's items line by line.
        at: index of the box's first item in the rank's flat memory.
        row_stride, col_stride: strides of lines and columns in this memory.
    """

    row: int
    rows: int
    col: int
    cols: int
    start: int
    at: int
    row_stride: int
    col_stride: int

    def blocks(self, grid: MatrixGrid) -> tuple[range, range]:
        """Return the rows of blocks (bands) and the columns of blocks in which the box has items."""
        return (
            range(self.row // grid.rows, -(-(self.row + self.rows) // grid.rows)),
            range(self.col // grid.cols, -(-(self.col + self.cols) // grid.cols)),
        )


def matrix_boxes(stored: Iterable[StoredBox], grid: MatrixGrid) -> Iterator[MatrixBox]:
    """Yield the boxes of lines and columns that tile a rank's boxes of a tensor, in the order of the codes."""
    for box, copy in stored:
        if len(grid.shape) < 2:
            yield from _boxes_of_vector(box, copy, grid)
            continue
        col, cols, col_stride = box.offsets[-1], box.sizes[-1], copy.source_strides[-1]
        steps = contiguous_strides((*grid.stack_shape, grid.numbered_lines))
        first = sum(offset * step for offset, step in zip(box.offsets[:-1], steps, strict=True))
        # Adjacent dims are one where they have regular numbers of lines and regular addresses: size, step, stride.
        dims: list[tuple[int, int, int]] = []
        for size, step, stride in zip(box.sizes[:-1], steps, copy.source_strides[:-1], strict=True):
            if size == 1:
                continue
            if dims and dims[-1][1:] == (step * size, stride * size):
                size *= dims.pop()[0]
            dims.append((size, step, stride))
        # The lines of a box have consecutive numbers.
        rows, row_stride = (dims[-1][0], dims[-1][2]) if dims and dims[-1][1] == 1 else (1, cols)
        outer = dims[:-1] if rows > 1 else dims
        for number, index in enumerate(np.ndindex(*(size for size, _, _ in outer))):
            row = first + sum(at * step for at, (_, step, _) in zip(index, outer, strict=True))
            at = copy.source + sum(at * stride for at, (_, _, stride) in zip(index, outer, strict=True))
            start = copy.target + number * rows * cols
            yield MatrixBox(row, rows, col, cols, start, at, row_stride, col_stride)


def _boxes_of_vector(stored: Box, copy: Copy, grid: MatrixGrid) -> Iterator[MatrixBox]:
    """Yield the boxes of a stored box of a tensor without rows, which is cut into lines."""
    line = grid.matrix.line_numel
    # A scalar is a vector of one item.
    first, stride = (stored.offsets[0], copy.source_strides[0]) if stored.offsets else (0, 1)
    done = 0
    for box in boxes_of_range((grid.lines, line), first, first + stored.numel):
        (row, col), (rows, cols) = box.offsets, box.sizes
        start, at = copy.target + done, copy.source + done * stride
        yield MatrixBox(row, rows, col, cols, start, at, line * stride, stride)
        done += box.numel


def scale_regions(stored: Iterable[StoredBox], grid: MatrixGrid) -> list[Region]:
    """Return the regions of the tensor of scales that a rank owns which stores these boxes of the quantized tensor."""
    num_dims = len(grid.scales_shape)
    regions = []
    for box in matrix_boxes(stored, grid):
        # Rounded up at both ends: the rank owns the scales of blocks whose first item is in the box.
        bands = range(-(-box.row // grid.rows), -(-(box.row + box.rows) // grid.rows))
        cols = range(-(-box.col // grid.cols), -(-(box.col + box.cols) // grid.cols))
        for stacked in (
            boxes_of_range((*grid.stack_shape, grid.bands), bands.start, bands.stop) if cols else ()
        ):
            # A vector has one block per line, so its scales have no dim for columns.
            offsets, sizes = (*stacked.offsets, cols.start), (*stacked.sizes, len(cols))
            regions.append(Region.of_box(Box(offsets[:num_dims], sizes[:num_dims])))
    return regions


def cut_blocks_of(stored: Iterable[StoredBox], grid: MatrixGrid) -> set[int]:
    """Return the numbers (band by band) of the blocks that a rank's boxes may cut.

    The result may include whole blocks that no single box covers.
    """

    def cut(blocks: range, is_first_cut: bool, is_last_cut: bool) -> set[int]:
        """Return the first and the last block, each only if it is cut."""
        edges = ((blocks.start, is_first_cut), (blocks.stop - 1, is_last_cut))
        return {block for block, is_cut in edges if is_cut}

    numbers: set[int] = set()
    for box in matrix_boxes(stored, grid):
        bands, cols = box.blocks(grid)
        bottom, right = box.row + box.rows, box.col + box.cols
        # The last band of a matrix and the last block of a line may be short, and are then not cut.
        ends_matrix = bottom % grid.numbered_lines == grid.lines % grid.numbered_lines
        cut_bands = cut(bands, box.row % grid.rows != 0, bottom % grid.rows != 0 and not ends_matrix)
        cut_cols = cut(
            cols, box.col % grid.cols != 0, right % grid.cols != 0 and right < grid.matrix.line_numel
        )
        numbers.update(band * grid.matrix.scales_per_band + col for band in cut_bands for col in cols)
        numbers.update(band * grid.matrix.scales_per_band + col for band in bands for col in cut_cols)
    return numbers


class CodedTensor:
    """One rank's piece of a tensor that a codec quantizes. The constructor measures the largest magnitudes.

    Args:
        grid: the blocks of the whole tensor.
        stored: the boxes of the tensor that the rank stores.
        local: the rank's flat memory that has the boxes' items.

    Attributes:
        amax: 2D [bands, blocks per band], the largest magnitude of each block, for the bands that have items on this
            rank. Before codes or scales are computed, ranks agree on the magnitudes of blocks that span ranks.
        first_block: number, in the whole tensor, of the first block of ``amax``.
    """

    def __init__(
        self, codec: BlockCodec, grid: MatrixGrid, stored: Iterable[StoredBox], local: torch.Tensor
    ) -> None:
        self._codec = codec
        self._grid = grid
        self._local = local
        self._boxes = list(matrix_boxes(stored, grid))
        bands = [box.blocks(grid)[0] for box in self._boxes]
        self._first_band = min((band.start for band in bands), default=0)  # default: this rank has no items
        num_bands = max((band.stop for band in bands), default=0) - self._first_band
        per_band = grid.matrix.scales_per_band
        self.first_block = self._first_band * per_band
        self.amax = torch.zeros(num_bands, per_band, dtype=torch.float32, device=local.device)
        for box in self._boxes:
            for rows in self._slabs(box):
                self._measure(box, rows)
        self._results: tuple[torch.Tensor, torch.Tensor] | None = None

    def _items(self, box: MatrixBox, rows: range, col: int, cols: int) -> torch.Tensor:
        """Return a view of a slab's items in columns [col, col + cols): 3D [bands, lines per band, cols]."""
        num_bands = max(len(rows) // self._grid.rows, 1)
        height = len(rows) // num_bands
        start = box.at + (rows.start - box.row) * box.row_stride + (col - box.col) * box.col_stride
        # `as_strided` counts from the start of the storage, not of the tensor.
        return self._local.as_strided(
            (num_bands, height, cols),
            (height * box.row_stride, box.row_stride, box.col_stride),
            self._local.storage_offset() + start,
        )

    def _bands(self, rows: range) -> slice:
        """Return the rows of `amax` for the bands of a slab."""
        first = rows.start // self._grid.rows - self._first_band
        return slice(first, first + max(len(rows) // self._grid.rows, 1))

    def _slabs(self, box: MatrixBox) -> Iterator[range]:
        """Split the rows of a box into *slabs*: as many whole bands as fit a CPU cache; each cut band is a slab."""
        height = self._grid.rows
        # At least one band, even if a band exceeds the cache. max(box.cols, 1): no division by zero for empty boxes.
        many = max(1, _SLAB_NUMEL // (max(box.cols, 1) * height)) * height
        row, stop = box.row, box.row + box.rows
        while row < stop:
            within = row % height
            whole = (stop - row) // height * height
            rows = min(many, whole) if not within and whole else min(height - within, stop - row)
            yield range(row, row + rows)
            row += rows

    def _measure(self, box: MatrixBox, rows: range) -> None:
        """Update ``amax`` with the magnitudes of a slab's items."""
        # The cast comes last, when few items are left.
        by_col = self._items(box, rows, box.col, box.cols).abs().amax(1).float()
        cols = box.blocks(self._grid)[1]
        before = box.col - cols.start * self._grid.cols
        behind = len(cols) * self._grid.cols - before - box.cols
        # Pad to whole blocks. Zeros do not change a maximum of magnitudes.
        largest = F.pad(by_col, (before, behind)).view(len(by_col), len(cols), -1).amax(2)
        # A block may get items from several boxes and slabs.
        known = self.amax[self._bands(rows), cols.start : cols.stop]
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
        chosen = []
        num_dims = len(self._grid.stack_shape) + 1  # dims of a box of scales that together number bands
        steps = contiguous_strides((*self._grid.stack_shape, self._grid.bands))
        for region, _ in regions:
            # `scale_regions` makes boxes of consecutive bands.
            band = sum(
                offset * step for offset, step in zip(region.box.offsets[:num_dims], steps, strict=True)
            )
            bands, first = numel_of(region.box.sizes[:num_dims]), band - self._first_band
            # A vector's scales have no dim for columns: column 0, one column.
            col, cols = (*region.box.offsets, 0)[num_dims], (*region.box.sizes, 1)[num_dims]
            chosen.append(scales[first : first + bands, col : col + cols].reshape(-1))
        return torch.cat(chosen) if chosen else scales.new_empty(0)

    def encode(self, out: torch.Tensor, sizes: Shape, strides: Shape, start: int) -> None:
        """Write the codes of a strided box of this rank's codes into ``out``.

        Args:
            out: uint8 of shape ``sizes``.
            strides, start: strides of the box in the numbers of this rank's codes, and the number of the first code.
        """
        if strides == (1,):  # consecutive codes may span several matrix boxes
            self._encode_run(out, start, start + sizes[0])
            return
        if len(sizes) == 1:  # a strided vector is a matrix of one column
            out, sizes, strides = out.view(-1, 1), (*sizes, 1), (*strides, 1)
        box = self._box_at(start)
        row, col = divmod(start - box.start, box.cols)
        # The dim of ``sizes`` that runs over lines, if the second dim runs over columns of these lines.
        line_dim = 0 if strides == (box.cols, 1) else 1 if strides == (1, box.cols) else None
        if line_dim is None or col + sizes[1 - line_dim] > box.cols:
            # Neither lines nor columns of one box, such as line 0 of several experts: index by index.
            for index in range(sizes[0]):
                self.encode(out[index], sizes[1:], strides[1:], start + index * strides[0])
            return
        by_line = out if line_dim == 0 else out.t()
        rows, cols = min(sizes[line_dim], box.rows - row), sizes[1 - line_dim]
        self._encode_box(by_line[:rows], box, row, col, (rows, cols))
        if rows < len(by_line):  # the next lines are in the next box, such as those of the next expert
            self.encode(by_line[rows:], (len(by_line) - rows, cols), (box.cols, 1), start + rows * box.cols)

    def _box_at(self, number: int) -> MatrixBox:
        """Return the matrix box that contains the code with this number."""
        return self._boxes[bisect_right(self._boxes, number, key=lambda box: box.start) - 1]

    def _encode_run(self, out: torch.Tensor, start: int, stop: int) -> None:
        """Write the codes with numbers [start, stop) into ``out``, 1D."""
        at = start
        while at < stop:
            box = self._box_at(at)
            end = min(stop, box.start + box.rows * box.cols)
            for inner in boxes_of_range((box.rows, box.cols), at - box.start, end - box.start):
                (row, col), (rows, cols) = inner.offsets, inner.sizes
                into = out[at - start : at - start + inner.numel].view(rows, cols)
                self._encode_box(into, box, row, col, (rows, cols))
                at += inner.numel

    def _encode_box(
        self, out: torch.Tensor, box: MatrixBox, row: int, col: int, sizes: tuple[int, int]
    ) -> None:
        """Write the codes of some lines and columns of a matrix box into ``out``.

        Args:
            row, col: the first line and the first column, relative to the box.
            sizes: number of lines and number of columns.
        """
        rows, cols = sizes
        factors = self._factors_and_scales[0]
        first_row, first_col = box.row + row, box.col + col
        indices = torch.arange(first_col, first_col + cols, dtype=torch.int64, device=out.device)
        block_of = indices // self._grid.cols
        for slab in self._slabs(box._replace(row=first_row, rows=rows, col=first_col, cols=cols)):
            values = self._items(box, slab, first_col, cols).float()
            by_col = factors[self._bands(slab)].index_select(1, block_of)
            codes = self._codec.codes_of(values, by_col[:, None, :])
            here = slab.start - first_row
            out[here : here + len(slab)].copy_(codes.view(len(slab), cols))
