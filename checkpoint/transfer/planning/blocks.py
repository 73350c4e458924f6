"""Blocks of a tensor that is cut anywhere: which rank has which part of them, and which scales it makes.

A codec reads a tensor as a matrix of lines (`BlockGrid`) and makes one scale per block. Any region of the tensor is
a few boxes of that matrix. A block's scale is held where the block's first item is; a block that is cut needs what
all its holders know before any of them can make it.

    lines of 6, blocks of 2 x 3, two ranks        a a a b b b      a whole on rank 0: its scale there
                                                  a a a b b b      c cut: its corner, so its scale, on rank 0
                                                  c c|c d d d      d whole on rank 1: its scale there
                                                  c c c d d d
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from vescale_fsdp.checkpoint.manifest.region import Region, runs_of_box
from vescale_fsdp.checkpoint.transfer.planning.links import Grid
from vescale_fsdp.layout.geometry import Box, FlatRange, boxes_of_range, numel_of


class MatrixBox(NamedTuple):
    """Rows [row, row + rows) and columns [col, col + cols) of a tensor's lines.

    Attributes:
        place: of the first item in the region's flat memory, in which the items follow row by row.
    """

    row: int
    rows: int
    col: int
    cols: int
    place: int

    def blocks(self, grid: Grid) -> tuple[range, range]:
        """Bands and columns of blocks that the box has items of."""
        return (
            range(self.row // grid.rows, -(-(self.row + self.rows) // grid.rows)),
            range(self.col // grid.cols, -(-(self.col + self.cols) // grid.cols)),
        )


def matrix_boxes(region: Region, shape: tuple[int, ...], grid: Grid) -> Iterator[MatrixBox]:
    """The boxes of lines that tile a region, in the order of its memory."""
    line = grid.line_numel
    if len(shape) < 2:
        first = region.box.offsets[0] if shape else 0
        start, stop = region.span.shift(first)
        at = 0
        for box in boxes_of_range((-(-numel_of(shape) // line), line), start, stop):
            (row, col), (rows, cols) = box.offsets, box.sizes
            yield MatrixBox(row, rows, col, cols, at)
            at += box.numel
        return
    for box, place in region.pieces():
        col, cols = box.offsets[-1], box.sizes[-1]
        for run in runs_of_box(shape[:-1], Box(box.offsets[:-1], box.sizes[:-1]), max_gap_numel=0):
            yield MatrixBox(run.start, run.numel, col, cols, place)
            place += run.numel * cols


def corners_of(box: MatrixBox, grid: Grid) -> Box | None:
    """The blocks whose first item lies in a box, as a box of bands and columns."""
    bands = range(-(-box.row // grid.rows), -(-(box.row + box.rows) // grid.rows))
    cols = range(-(-box.col // grid.cols), -(-(box.col + box.cols) // grid.cols))
    return Box((bands.start, cols.start), (len(bands), len(cols))) if bands and cols else None


def scale_regions(region: Region, shape: tuple[int, ...], grid: Grid) -> list[Region]:
    """Regions of the tensor of scales that the holder of a region makes."""
    found = []
    for box in matrix_boxes(region, shape, grid):
        corners = corners_of(box, grid)
        if corners is not None:
            if len(grid.scales_shape) == 1:
                corners = Box(corners.offsets[:1], corners.sizes[:1])
            found.append(Region(corners, FlatRange(0, corners.numel)))
    return found


def cut_blocks_of(region: Region, shape: tuple[int, ...], grid: Grid) -> set[int]:
    """Numbers of the blocks, band by band, that a region may hold only part of; some that it holds whole too."""
    num_lines = -(-numel_of(shape) // grid.line_numel)
    per_band = -(-grid.line_numel // grid.cols)
    found: set[int] = set()
    for box in matrix_boxes(region, shape, grid):
        bands, cols = box.blocks(grid)
        cut_bands = _cut(bands, box.row, box.rows, grid.rows, num_lines)
        cut_cols = _cut(cols, box.col, box.cols, grid.cols, grid.line_numel)
        found.update(band * per_band + col for band in cut_bands for col in cols)
        found.update(band * per_band + col for band in bands for col in cut_cols)
    return found


def _cut(blocks: range, start: int, size: int, step: int, full: int) -> set[int]:
    """Of blocks that [start, start + size) has items of, those that it has not all of."""
    found = set()
    if start % step:
        found.add(blocks.start)
    if (start + size) % step and start + size < full:
        found.add(blocks.stop - 1)
    return found


def hull_of(box: Box, shape: tuple[int, ...], grid: Grid) -> FlatRange:
    """A range of the tensor's items with the first items of all blocks of a box of scales."""
    bands = box.offsets[0], box.offsets[0] + box.sizes[0] - 1
    cols = (box.offsets[1], box.offsets[1] + box.sizes[1] - 1) if len(box.sizes) > 1 else (0, 0)
    first, last = (
        band * grid.rows * grid.line_numel + col * grid.cols for band, col in zip(bands, cols, strict=True)
    )
    return FlatRange(first, min(last + 1, numel_of(shape)))
