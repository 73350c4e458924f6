"""BlockGrid: a tensor cut into blocks with one scale each, and the same cut of a rank's piece of it.

A tensor is read as lines; blocks stand side by side in *bands* of lines, and a band is one run of flat elements::

    Flat(4), 10 elements            Tiles(2, 3), shape (3, 5)
    lines of 4, one block each      lines are rows, bands of 2 rows, blocks of 2 x 3
      aaaa                            a a a b b
      bbbb                            a a a b b
      cc      last block short        c c c d d     last band short, b and d narrow

A piece that begins and ends between bands can be quantised alone: its codes and scales are, bit for bit,
those of the full tensor. That is what a `Granularity` of the same block asks of the planner. Stacks (E, m, k)
are read as E * m rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from vescale_fsdp.errors import LayoutError
from vescale_fsdp.layout.geometry import FlatRange, numel_of
from vescale_fsdp.layout.granularity import Flat, Granularity, Tiles


@dataclass(frozen=True)
class BlockGrid:
    """Blocks of ``rows`` x ``cols`` elements over lines of ``line_numel``.

    Args:
        shape: global shape of the tensor.
        line_numel: elements per line, at least 1.
        rows, cols: size of a block; the last ones of a line or of the tensor may be smaller.
        scales_shape: shape of the tensor of scales.

    Examples:
        >>> from vescale_fsdp import Tiles
        >>> grid_of((256, 512), Tiles(128, 128)).scales_shape
        (2, 4)
    """

    shape: tuple[int, ...]
    line_numel: int
    rows: int
    cols: int
    scales_shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return numel_of(self.shape)

    @property
    def band_numel(self) -> int:
        """Elements per band: what must stay whole on one rank."""
        return self.rows * self.line_numel

    @property
    def scales_per_band(self) -> int:
        """Blocks side by side."""
        return -(-self.line_numel // self.cols)

    def bands_of(self, numel: int) -> int:
        """Bands of a run of elements that begins with a band."""
        return -(-numel // self.band_numel)

    def scales_of(self, piece: FlatRange, where: str) -> int:
        """How many scales a piece has of its own.

        Raises:
            LayoutError: if the piece begins or ends inside a band.
        """
        inner_stop = 0 if piece.stop == self.numel else piece.stop % self.band_numel
        if piece.numel and (piece.start % self.band_numel or inner_stop):
            raise LayoutError(
                "A rank boundary cuts a quantisation block.",
                expected=f"cuts at multiples of {self.band_numel} elements ({self.rows} x {self.line_numel})",
                got=f"[{piece.start}, {piece.stop}) of {self.numel}",
                where=f"{where} of shape {self.shape}",
                todo="ask for whole blocks when sharding: fully_shard(model, granularity=AdamW8bit.granularity())"
                " or the codec's own granularity",
            )
        return self.bands_of(piece.numel) * self.scales_per_band

    def tiled(self, flat: torch.Tensor, fill: int = 0) -> torch.Tensor:
        """A run of whole bands as [bands, rows, blocks per line, cols].

        Args:
            flat: 1-D, beginning with a band.
            fill: what stands for elements that are missing.

        Returns:
            A view if every block is complete, else a new tensor.
        """
        bands = self.bands_of(flat.numel())
        missing = bands * self.band_numel - flat.numel()
        lines = F.pad(flat, (0, missing), value=fill) if missing else flat
        lines = lines.view(bands * self.rows, self.line_numel)
        narrow = self.scales_per_band * self.cols - self.line_numel
        lines = F.pad(lines, (0, narrow), value=fill) if narrow else lines
        return lines.view(bands, self.rows, self.scales_per_band, self.cols)

    def untiled(self, tiles: torch.Tensor, numel: int) -> torch.Tensor:
        """Inverse of `tiled`: 1-D, ``numel`` elements."""
        lines = tiles.reshape(-1, self.scales_per_band * self.cols)[:, : self.line_numel]
        return lines.reshape(-1)[:numel]


def grid_of(shape: tuple[int, ...], block: Granularity) -> BlockGrid:
    """The grid of a tensor for blocks of `Flat` runs or `Tiles`; tensors below 2-D have flat blocks of a row.

    Raises:
        LayoutError: for any other granularity.

    Examples:
        >>> from vescale_fsdp import Flat
        >>> grid_of((8, 512), Flat(256)).scales_per_band
        1
    """
    numel = numel_of(shape)
    if isinstance(block, Tiles) and len(shape) >= 2:
        line = max(1, shape[-1])
        scales_shape = (-(-(numel // line) // block.rows), -(-line // block.cols))
        return BlockGrid(shape, line, block.rows, block.cols, scales_shape)
    if isinstance(block, (Flat, Tiles)):
        run = block.numel if isinstance(block, Flat) else block.cols
        return BlockGrid(shape, run, 1, run, (-(-numel // run),))
    raise LayoutError(
        "Quantisation blocks are runs or tiles.",
        expected="Flat(256), Flat(2048), Tiles(32, 32), ...",
        got=block,
        todo="pass one of these as the block",
    )
