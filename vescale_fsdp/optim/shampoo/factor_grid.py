"""FactorGrid: which blocks of a parameter have Shampoo factors of their own, and which of them a rank holds.

A matrix is cut into blocks of at most b x b; a *band* is one row of blocks. Factors are tensors whose first two
indices are the block's place, so "the factor of block (i, j)" means the same at every world size::

    shape (5, 7), b = 4                left (2, 2, 4, 4)      right (2, 2, 4, 4)
      band 0   A A A A B B B           A: 4 x 4   B: 4 x 4    A: 4 x 4   B: 3 x 3
               ...4 rows                (the corner of size height or width is used, the rest stays 0)
      band 1   C C C C D D D           C: 1 x 1   D: 1 x 1    C: 4 x 4   D: 3 x 3

Stacks (E, m, k) have ceil(m / b) bands per matrix. Vectors are one column in blocks of b, with left factors only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from vescale_fsdp.errors import LayoutError
from vescale_fsdp.layout.geometry import FlatRange
from vescale_fsdp.layout.granularity import Flat, Granularity, Rows, Whole


class BlockArea(NamedTuple):
    """Blocks of equal size that lie side by side in a rank's piece, and their factors' place in the local state."""

    top: int  # first line, counted from the start of the piece
    left: int  # first column
    height: int  # of a block
    width: int
    band: int  # the first, counted from the first band of the piece
    column: int
    bands: int = 1  # how many
    columns: int = 1

    @property
    def side_numel(self) -> int:
        """Elements of the larger one of a block's factors: never fewer than its own."""
        return max(self.height, self.width) ** 2

    @property
    def numel(self) -> int:
        """Elements of all blocks' larger factors."""
        return self.bands * self.columns * self.side_numel

    def parts(self, most_blocks: int) -> Iterator[BlockArea]:
        """Areas of at most so many blocks."""
        columns = min(self.columns, most_blocks)
        bands = most_blocks // columns
        for band in range(0, self.bands, bands):
            for column in range(0, self.columns, columns):
                yield self._replace(
                    top=self.top + band * self.height,
                    left=self.left + column * self.width,
                    band=self.band + band,
                    column=self.column + column,
                    bands=min(bands, self.bands - band),
                    columns=min(columns, self.columns - column),
                )


@dataclass(frozen=True)
class FactorGrid:
    """Blocks of at most ``block`` x ``block`` over ``stack`` matrices of ``rows`` x ``cols``.

    Args:
        order: dims that have a factor: 2 for matrices, 1 for vectors.
    """

    stack: int
    rows: int
    cols: int
    block: int
    order: int

    @property
    def bands_per_matrix(self) -> int:
        """Rows of blocks in one matrix."""
        return -(-self.rows // self.block)

    @property
    def period(self) -> int:
        """Elements after which the ends of bands repeat: a band, or a matrix if its last band is short."""
        even = self.stack == 1 or self.rows % self.block == 0
        return (self.block if even else self.rows) * self.cols

    @property
    def num_columns(self) -> int:
        """Blocks side by side."""
        return -(-self.cols // self.block)

    @property
    def factor_shapes(self) -> dict[str, tuple[int, int, int, int]]:
        """Shapes of the left factors, and of the right ones if there are any: [band, column, side, side]."""
        lines = {"left": self.rows, "right": self.cols} if self.order == 2 else {"left": self.rows}
        place = (self.stack * self.bands_per_matrix, self.num_columns)
        return {side: (*place, min(self.block, n), min(self.block, n)) for side, n in lines.items()}

    def band_start(self, band: int) -> int:
        """Flat index of the first element of a band; of the tensor's end for the band after the last."""
        matrix, place = divmod(band, self.bands_per_matrix)
        return (matrix * self.rows + place * self.block) * self.cols

    def bands_in(self, piece: FlatRange) -> range:
        """The bands that a piece holds.

        Raises:
            LayoutError: if the piece begins or ends inside a band.
        """
        if not piece.numel:
            return range(0)
        first, last = self._band_at(piece.start), self._band_at(piece.stop)
        if self.band_start(first) != piece.start or self.band_start(last) != piece.stop:
            raise LayoutError(
                "A rank boundary cuts a Shampoo block.",
                expected=f"cuts between blocks of {self.block} rows of {self.cols}",
                got=f"[{piece.start}, {piece.stop})",
                where=f"{self.stack} matrices of {self.rows} x {self.cols}",
                todo="ask for whole blocks when sharding: fully_shard(model, granularity="
                f"Shampoo.granularity(block_size={self.block})), or pass the parameter in adamw_params=[...]",
            )
        return range(first, last)

    def _band_at(self, start: int) -> int:
        """The last band that begins at or before a flat index."""
        matrix, line = divmod(start // self.cols, self.rows)
        return matrix * self.bands_per_matrix + line // self.block

    def areas_in(self, piece: FlatRange) -> Iterator[BlockArea]:
        """The blocks of a piece; bands of one height that follow each other, together."""
        top = first = 0
        last_height = self.rows - (self.bands_per_matrix - 1) * self.block
        heights = (
            last_height if band % self.bands_per_matrix == self.bands_per_matrix - 1 else self.block
            for band in self.bands_in(piece)
        )
        for height, alike in groupby(heights):
            bands = len(list(alike))
            whole, rest = divmod(self.cols, self.block)
            for column, width, columns in ((0, self.block, whole), (whole, rest, min(1, rest))):
                if columns:
                    yield BlockArea(top, column * self.block, height, width, first, column, bands, columns)
            top, first = top + bands * height, first + bands


def factor_grid_of(shape: tuple[int, ...], block: int) -> FactorGrid:
    """The grid of a parameter of 1, 2 or 3 dims.

    Raises:
        LayoutError: for other numbers of dims, and for empty parameters.
    """
    if len(shape) not in (1, 2, 3) or 0 in shape:
        raise LayoutError(
            "Shampoo has factors for vectors, matrices and stacks of matrices.",
            expected="a non-empty shape of 1, 2 or 3 dims",
            got=f"shape {shape}",
            todo="pass this parameter in adamw_params=[...]",
        )
    if len(shape) == 1:
        return FactorGrid(1, shape[0], 1, block, 1)
    return FactorGrid(shape[0] if len(shape) == 3 else 1, shape[-2], shape[-1], block, 2)


def granularity_of(shape: tuple[int, ...], block: int) -> Granularity:
    """What keeps the bands of a parameter whole."""
    if len(shape) == 1:
        return Flat(block)
    # Rows(b) of a stack counts rows through all matrices: its cuts meet the bands only if b divides them.
    if len(shape) == 3 and shape[-2] % block:
        return Whole("matrix")
    return Rows(block)
