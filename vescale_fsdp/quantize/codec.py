"""Block codecs: tensors as 8-bit codes and one scale per block, in the formats that matrix units read.

    codec               block      scale                        value
    Fp8Blocks(128,128)  128 x 128  fp32, amax / 448             code * scale      DeepSeek's weights
    Fp8Blocks(1, 128)   1 x 128    fp32                         code * scale      its activations
    Mxfp8()             1 x 32     E8M0, 2^(floor(log2 amax)-8) code * scale      OCP Microscaling 1.0
    Int8Rows()          one row    fp32, amax / 127             code * scale      int8 weights of matrix units

Codes are e4m3 (``float8_e4m3fn``) or int8, stored as uint8 so that every collective supports them. Kernels take
``.view(codec.code_dtype)``, and ``.view(torch.float8_e8m0fnu)`` of MX scales. The 8-bit floats were compared with
torchao's reference functions. Short blocks at the edges are quantised as they are. A block with a NaN or an infinity
decodes to NaN: a broken weight stays visible.

A tensor is read as lines; adjacent blocks form *bands* of lines, and a band is one run of flat elements (`BlockGrid`)::

    Flat(4), 10 elements            Tiles(2, 3), shape (3, 5)
    lines of 4, one block each      lines are rows, bands of 2 rows, blocks of 2 x 3
      aaaa                            a a a b b
      bbbb                            a a a b b
      cc      last block short        c c c d d     last band short, b and d narrow

A piece that begins and ends between bands can be quantised alone, without communication: its codes and scales are,
bit for bit, those of the full tensor. A `Granularity` of the same block makes such pieces. Gathering the codes (one
byte per element and a scale per block) then replaces gathering the values. Stacks (E, m, k) are read as E * m rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from vescale_fsdp.dtensor.piece_map import contiguous_pieces_of, local_tensor, zeros_sharded_with
from vescale_fsdp.errors import LayoutError
from vescale_fsdp.layout.geometry import FlatRange, numel_of
from vescale_fsdp.layout.granularity import Flat, Granularity, Tiles
from vescale_fsdp.lazy import set_module


@set_module("vescale_fsdp.quantize")
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
        """Elements per band, which must stay whole on one rank."""
        return self.rows * self.line_numel

    @property
    def scales_per_band(self) -> int:
        """Blocks in a band."""
        return -(-self.line_numel // self.cols)

    def bands_of(self, numel: int) -> int:
        """Bands of a run of elements that begins with a band."""
        return -(-numel // self.band_numel)

    def scales_of(self, piece: FlatRange, where: str) -> int:
        """The number of scales of a piece.

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
                todo="ask for whole blocks when sharding: fully_shard(model, granularity=AdamW8bit.granularity()) "
                "or the codec's own granularity",
            )
        return self.bands_of(piece.numel) * self.scales_per_band

    def tiled(self, flat: torch.Tensor, fill: int = 0) -> torch.Tensor:
        """A run of whole bands as [bands, rows, blocks per line, cols].

        Args:
            flat: 1-D, beginning with a band.
            fill: the value of missing elements.

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


_E4M3_MAX = 448.0
_E4M3_MAX_EXPONENT = 8  # of 256, the largest power of two in e4m3
_INT8_MAX = 127.0
_LEAST_AMAX = 1e-12
_WHOLE_ROW = 1 << 40  # columns: more than any row has
_E8M0_BIAS = 127
_E8M0_NAN = 255
_HALF_LEAST_NORMAL_BITS = 0x00400000  # of 2^-127, which has no exponent field of its own


@dataclass(frozen=True)
class BlockCodec(ABC):
    """The conversion of a tensor into codes and scales. Subclasses are final, frozen values.

    Args:
        rows, cols: size of a block.

    Examples:
        >>> Fp8Blocks(128, 128).granularity
        Tiles(rows=128, cols=128)
    """

    rows: int
    cols: int

    code_dtype: ClassVar[torch.dtype]
    """dtype of codes, which are stored as uint8."""

    scale_dtype: ClassVar[torch.dtype]
    """dtype in which scales are stored and sent."""

    def __post_init__(self) -> None:
        if min(self.rows, self.cols) < 1:
            raise LayoutError(
                "A block must have at least one element.",
                expected="rows >= 1 and cols >= 1",
                got=f"{self.rows} x {self.cols}",
                where=type(self).__name__,
            )

    @property
    def granularity(self) -> Tiles:
        """The granularity of whole blocks: ``fully_shard(model, granularity=codec.granularity)``."""
        return Tiles(self.rows, self.cols)

    def grid(self, shape: tuple[int, ...]) -> BlockGrid:
        """The blocks of a tensor of this shape."""
        line_numel = shape[-1] if shape else 1
        return grid_of(shape, Tiles(self.rows, min(self.cols, max(line_numel, 1))))

    @abstractmethod
    def codes_of(self, values: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """uint8 codes of values (fp32) by the factors of their blocks; element-wise, also for parts of blocks."""

    @abstractmethod
    def scales_of(self, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For the largest magnitudes of blocks (fp32): the factors of values (fp32), and the scales to store."""

    @abstractmethod
    def factors_of(self, scales: torch.Tensor) -> torch.Tensor:
        """The factors of codes (fp32), from stored scales."""

    @torch.no_grad()
    def quantize(self, tensor: torch.Tensor) -> Quantized:
        """Codes and scales of a tensor; each rank encodes its own piece, without communication.

        Args:
            tensor: plain, or a DTensor of contiguous pieces (RaggedShard, Shard(0), Replicate).

        Raises:
            LayoutError: if a rank boundary cuts a block.

        Examples:
            >>> Fp8Blocks(128, 128).quantize(torch.randn(256, 256)).scales.shape
            torch.Size([2, 2])
        """
        pieces = contiguous_pieces_of(tensor, "another placement")
        grid = self.grid(tuple(tensor.shape))
        numels = pieces.count_in_blocks(grid.band_numel, lambda piece: grid.scales_of(piece, "tensor"))
        codes = torch.zeros_like(tensor, dtype=torch.uint8)
        scales = zeros_sharded_with(tensor, pieces, grid.scales_shape, numels, self.scale_dtype)
        local_codes, local_scales = self.encode(local_tensor(tensor), grid)
        local_tensor(codes, "tensor of codes").copy_(local_codes)
        local_tensor(scales, "tensor of scales").copy_(local_scales)
        return Quantized(self, codes, scales)

    def encode(self, flat: torch.Tensor, grid: BlockGrid) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales of a run of whole bands.

        Args:
            flat: 1-D, any floating-point dtype.
            grid: of the tensor that the run belongs to.

        Returns:
            uint8 codes like ``flat``, and 1-D scales of ``scale_dtype``, one per block.
        """
        tiles = grid.tiled(flat).float()
        factors, scales = self.scales_of(tiles.abs().amax((1, 3)))
        codes = self.codes_of(tiles, factors[:, None, :, None])
        return grid.untiled(codes, flat.numel()), scales.reshape(-1)

    def decode(
        self, codes: torch.Tensor, scales: torch.Tensor, grid: BlockGrid, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Inverse of `encode`, up to rounding: 1-D, of ``dtype``."""
        factors = self.factors_of(scales.view(-1, grid.scales_per_band))
        tiles = grid.tiled(codes.view(self.code_dtype).float())
        return grid.untiled(tiles * factors[:, None, :, None], codes.numel()).to(dtype)


class _E4m3Codec(BlockCodec):
    """A codec whose codes are e4m3."""

    code_dtype: ClassVar[torch.dtype] = torch.float8_e4m3fn

    def codes_of(self, values: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        scaled = (values * factors).clamp(-_E4M3_MAX, _E4M3_MAX)
        return scaled.to(torch.float8_e4m3fn).view(torch.uint8)


@set_module("vescale_fsdp.quantize")
@dataclass(frozen=True)
class Fp8Blocks(_E4m3Codec):
    """e4m3 codes and fp32 scales: 128 x 128 blocks for weights, 1 x 128 for activations.

    Examples:
        >>> codec = Fp8Blocks(128, 128)
        >>> codec.grid((256, 512)).scales_shape
        (2, 4)
    """

    rows: int = 128
    cols: int = 128

    scale_dtype: ClassVar[torch.dtype] = torch.float32

    def scales_of(self, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # As in torchao's kernels: the quotient in fp64, rounded to fp32; the reciprocal of that is stored.
        factors = (_E4M3_MAX / amax.clamp(min=_LEAST_AMAX).double()).float()
        return factors, factors.reciprocal()

    def factors_of(self, scales: torch.Tensor) -> torch.Tensor:
        return scales


@set_module("vescale_fsdp.quantize")
@dataclass(frozen=True)
class Mxfp8(_E4m3Codec):
    """e4m3 codes and power-of-two scales for every 32 elements of a row (MX, scale rounded down).

    Examples:
        >>> Mxfp8().grid((4, 64)).scales_shape
        (4, 2)
    """

    rows: int = 1
    cols: int = 32

    scale_dtype: ClassVar[torch.dtype] = torch.uint8

    def scales_of(self, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # The exponent field of an fp32 number is its biased floor(log2); E8M0 has the same bias.
        exponent = (amax.view(torch.int32) >> 23) & 0xFF
        biased = (exponent - _E4M3_MAX_EXPONENT).clamp(min=0)
        scales = torch.where(amax.isfinite(), biased, _E8M0_NAN).to(torch.uint8)
        # Not the reciprocal of a scale: some devices flush the least one, 2^-127, to 0.
        return _power_of_two(torch.where(scales == _E8M0_NAN, scales, 2 * _E8M0_BIAS - scales)), scales

    def factors_of(self, scales: torch.Tensor) -> torch.Tensor:
        return _power_of_two(scales)


@set_module("vescale_fsdp.quantize")
@dataclass(frozen=True)
class Int8Rows(BlockCodec):
    """int8 codes and one fp32 scale per row, or per so many columns of it.

    Examples:
        >>> Int8Rows().grid((4, 64)).scales_shape
        (4, 1)
    """

    rows: int = 1
    cols: int = _WHOLE_ROW

    code_dtype: ClassVar[torch.dtype] = torch.int8
    scale_dtype: ClassVar[torch.dtype] = torch.float32

    def codes_of(self, values: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        # The scale marks a block with a NaN: an integer cannot.
        scaled = (values * factors).nan_to_num(0.0).round().clamp(-_INT8_MAX, _INT8_MAX)
        return scaled.to(torch.int8).view(torch.uint8)

    def scales_of(self, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        factors = (_INT8_MAX / amax.clamp(min=_LEAST_AMAX).double()).float()
        return factors, factors.reciprocal()

    def factors_of(self, scales: torch.Tensor) -> torch.Tensor:
        return scales


def _power_of_two(biased: torch.Tensor) -> torch.Tensor:
    """2^(biased - 127) in fp32, from bits because `exp2` need not be exact; NaN for the E8M0 code of NaN."""
    bits = torch.where(biased == 0, _HALF_LEAST_NORMAL_BITS, biased.int() << 23)
    return torch.where(biased == _E8M0_NAN, torch.nan, bits.view(torch.float32))


@set_module("vescale_fsdp.quantize")
@dataclass(frozen=True, eq=False)
class Quantized:
    """Codes and scales of one tensor.

    Args:
        codec: their format.
        codes: uint8, of the tensor's shape; a DTensor with the same pieces, if the tensor was one.
        scales: one per block, of the codec's dtype; cut at the same blocks as the codes.

    Examples:
        >>> codes = Int8Rows().quantize(torch.ones(4, 64))
        >>> codes.codes.shape, codes.dequantize()[0, 0].item()
        (torch.Size([4, 64]), 1.0)
    """

    codec: BlockCodec
    codes: torch.Tensor
    scales: torch.Tensor

    def full(self) -> Quantized:
        """The whole tensor's codes and scales on every rank: a collective that gathers bytes, not values."""
        whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in (self.codes, self.scales)]
        return Quantized(self.codec, *whole)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The decoded values, with the placements of the codes. Local."""
        values = torch.zeros_like(self.codes, dtype=dtype)
        codes = local_tensor(self.codes, "tensor of codes")
        scales = local_tensor(self.scales, "tensor of scales")
        grid = self.codec.grid(tuple(self.codes.shape))
        local_tensor(values, "tensor").copy_(self.codec.decode(codes, scales, grid, dtype))
        return values
