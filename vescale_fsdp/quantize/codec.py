"""Block codecs: a tensor as 8-bit codes and one scale per block, in formats that the matrix units of GPUs read.

    codec               block      scale                        value
    Fp8Blocks(128,128)  128 x 128  fp32, amax / 448             code * scale      DeepSeek's weights
    Fp8Blocks(1, 128)   1 x 128    fp32, amax / 448             code * scale      DeepSeek's activations
    Mxfp8()             1 x 32     E8M0, 2^(floor(log2 amax)-8) code * scale      OCP Microscaling 1.0
    Int8Rows()          one row    fp32, amax / 127             code * scale      int8 weights of matrix units

Codes are e4m3 (``float8_e4m3fn``) or int8, stored as uint8 so that every collective supports them. Kernels take codes
as ``codes.view(codec.code_dtype)``, and MX scales as ``scales.view(torch.float8_e8m0fnu)``. Blocks at the edges of a
tensor may be smaller. A block with a NaN or an infinity decodes to NaN, so that a broken weight stays visible.

Mxfp8 computes the bits of torchao's ``to_mx``. Fp8Blocks computes those of transformers' ``FineGrainedFP8Config``, as
``vescale-convert --quantize fp8-128x128`` does. A block of zeros has scale 1. So has a block whose largest magnitude is
below 1.32e-36, which decodes to zeros; transformers computes an infinite factor there, and NaN for the block's zeros.

A tensor is divided into *lines*, such as its rows. A *band* is one row of blocks. A band covers whole lines, so its
elements are consecutive (`BlockGrid`)::

    Flat(4), 10 elements            Tiles(2, 3), shape (3, 5)
    lines of 4, one block each      lines are rows, bands of 2 rows, blocks of 2 x 3
      aaaa                            a a a b b
      bbbb                            a a a b b
      cc      last block short        c c c d d     last band short, b and d narrow

A rank can quantize a piece that consists of whole bands without communication: codes and scales have the same bits as
those of the full tensor. Sharding with a `Granularity` of the same block gives such pieces. Ranks can then gather codes
(one byte per element, one scale per block) instead of values. A tensor of shape (E, m, k) is treated as E * m rows, so
a block may span two experts. For engines, `vescale_fsdp.transfer.links` quantizes each expert alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, final

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from vescale_fsdp.dtensor.meeting import one_meeting
from vescale_fsdp.dtensor.piece_map import contiguous_pieces_of, local_tensor, name_of, zeros_sharded_with
from vescale_fsdp.errors import LayoutError
from vescale_fsdp.layout.geometry import Range, numel_of
from vescale_fsdp.layout.granularity import Flat, Granularity, Tiles
from vescale_fsdp.lazy import set_module


@set_module("vescale_fsdp.quantize")
@dataclass(frozen=True)
class BlockGrid:
    """The division of a tensor into blocks of ``rows`` lines and ``cols`` elements of a line.

    Args:
        shape: global shape of the tensor.
        line_numel: elements per line, at least 1.
        rows, cols: size of a block; the last block of a line and the last band of the tensor may be smaller.
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
        """Number of elements in the tensor."""
        return numel_of(self.shape)

    @cached_property
    def band_numel(self) -> int:
        """Elements per band. No rank boundary may cut a band."""
        return self.rows * self.line_numel

    @cached_property
    def scales_per_band(self) -> int:
        """Number of blocks in a band."""
        return -(-self.line_numel // self.cols)

    def bands_of(self, numel: int) -> int:
        """Return the number of bands in ``numel`` elements that start with a band; the last band may be short."""
        return -(-numel // self.band_numel)

    def scales_of(self, piece: Range, where: str) -> int:
        """Return the number of scales of a piece.

        Args:
            piece: range of elements of the flattened tensor.
            where: name of the tensor, for the error.

        Raises:
            LayoutError: if the piece begins or ends inside a band.
        """
        # The end of the tensor is a valid end of a piece, though the last band may be short.
        inner_stop = 0 if piece.stop == self.numel else piece.stop % self.band_numel
        if piece.numel and (piece.start % self.band_numel or inner_stop):
            raise LayoutError(
                "A rank boundary cuts a quantization block.",
                expected=f"cuts at multiples of {self.band_numel} elements ({self.rows} x {self.line_numel})",
                got=f"[{piece.start}, {piece.stop}) of {self.numel}",
                where=f"{where} of shape {self.shape}",
                todo="ask for whole blocks when sharding: fully_shard(model, granularity=AdamW8bit.granularity()) "
                "or the codec's own granularity",
            )
        return self.bands_of(piece.numel) * self.scales_per_band

    def tiled(self, flat: torch.Tensor, fill: int = 0) -> torch.Tensor:
        """Return a piece as whole bands, reshaped to [bands, rows, blocks per line, cols].

        Args:
            flat: 1-D, starts with a band.
            fill: value of the elements that are added to short blocks.

        Returns:
            A view of ``flat`` if no block is short, else a new tensor.
        """
        bands, blocks = self.bands_of(flat.numel()), self.scales_per_band
        if missing := bands * self.band_numel - flat.numel():
            flat = F.pad(flat, (0, missing), value=fill)
        if narrow := blocks * self.cols - self.line_numel:
            flat = F.pad(flat.view(bands * self.rows, self.line_numel), (0, narrow), value=fill)
        return flat.view(bands, self.rows, blocks, self.cols)

    def is_even(self, numel: int) -> bool:
        """Return whether no block in ``numel`` elements that start with a band is short: `tiled` is a view."""
        return numel % self.band_numel == 0 and self.line_numel % self.cols == 0

    def untiled(self, tiles: torch.Tensor, numel: int) -> torch.Tensor:
        """Undo `tiled`: return the first ``numel`` elements, 1-D, without the elements that were added."""
        lines = tiles.reshape(-1, self.scales_per_band * self.cols)[:, : self.line_numel]
        return lines.reshape(-1)[:numel]


def grid_of(shape: tuple[int, ...], block: Granularity) -> BlockGrid:
    """Return a tensor's grid for `Flat` or `Tiles` blocks. Below 2-D, `Tiles` blocks are runs of ``cols`` elements.

    Raises:
        LayoutError: for any other granularity.

    Examples:
        >>> from vescale_fsdp import Flat
        >>> grid_of((8, 512), Flat(256)).scales_per_band
        1
    """
    numel = numel_of(shape)
    if isinstance(block, Tiles) and len(shape) >= 2:
        line = max(1, shape[-1])  # at least 1, to avoid a division by zero for an empty last dim
        scales_shape = (-(-(numel // line) // block.rows), -(-line // block.cols))
        return BlockGrid(shape, line, block.rows, block.cols, scales_shape)
    if isinstance(block, (Flat, Tiles)):
        run = block.numel if isinstance(block, Flat) else block.cols
        return BlockGrid(shape, run, 1, run, (-(-numel // run),))
    raise LayoutError(
        "A quantization block must be a Flat or Tiles granularity.",
        expected="Flat(256), Flat(2048), Tiles(32, 32), ...",
        got=block,
        todo="pass Flat or Tiles as the block",
    )


_E4M3_MAX = 448.0  # largest finite value of float8_e4m3fn
_E4M3_MAX_EXPONENT = 8  # the largest power of two in e4m3 is 2^8
_INT8_MAX = 127.0  # -128 is not used, so that codes are symmetric
_WHOLE_ROW = 1 << 40  # number of columns: more than any row has, so a block is a whole row
_E8M0_BIAS = 127  # the same bias as of fp32's exponent
_E8M0_NAN = 255  # the only E8M0 code that is not a power of two
_HALF_LEAST_NORMAL_BITS = 0x00400000  # fp32 bits of 2^-127 (subnormal), the value of E8M0's code 0


@dataclass(frozen=True)
class BlockCodec(ABC):
    """Converts tensors into codes and scales, and back. Instances are frozen values, which can be hashed and compared.

    Args:
        rows, cols: size of a block.

    Examples:
        >>> Fp8Blocks(128, 128).granularity
        Tiles(rows=128, cols=128)
    """

    rows: int
    cols: int

    code_dtype: ClassVar[torch.dtype]
    """dtype of codes. Tensors of codes have dtype uint8, and are viewed in this dtype to compute."""

    scale_dtype: ClassVar[torch.dtype] = torch.float32
    """dtype in which scales are stored and sent."""

    largest: ClassVar[float]
    """The largest value of a code. Each block is scaled so that its largest magnitude has this value."""

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
        """The granularity to pass to `fully_shard`, so that no rank boundary cuts a block."""
        return Tiles(self.rows, self.cols)

    def grid(self, shape: tuple[int, ...]) -> BlockGrid:
        """Return the grid of blocks of a tensor of this shape."""
        line_numel = shape[-1] if shape else 1
        # Not wider than a row, because `tiled` pads lines to a multiple of the block's width.
        return grid_of(shape, Tiles(self.rows, min(self.cols, max(line_numel, 1))))

    @abstractmethod
    def codes_of(self, values: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """Return uint8 codes of fp32 values. ``factors`` are the factors of their blocks, broadcast to ``values``."""

    def scales_of(self, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the factors (fp32) by which values are multiplied, and the scales to store, one by one.

        Args:
            amax: the largest magnitude of each block, fp32, of any shape.
        """
        # Reciprocal, then product, as torch divides a number by a tensor. In numpy this rule is in
        # `conversion.quantization.float_codes`.
        factors = amax.reciprocal() * self.largest
        is_finite = amax.isfinite()
        factors = torch.where(
            is_finite & factors.isfinite(), factors, 1.0
        )  # 1 for zeros: their factor is infinite
        return factors, torch.where(is_finite, factors.reciprocal(), torch.nan)

    def factors_of(self, scales: torch.Tensor) -> torch.Tensor:
        """Return the factors (fp32) by which codes are multiplied, from stored scales of any shape, one by one."""
        return scales

    @torch.no_grad()
    def quantize(self, tensor: torch.Tensor) -> Quantized:
        """Return the codes and scales of a tensor. Each rank encodes its own piece, without communication.

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
        numels = pieces.count_in_blocks(grid.band_numel, lambda piece: grid.scales_of(piece, name_of(tensor)))
        codes = torch.zeros_like(tensor, dtype=torch.uint8)
        scales = zeros_sharded_with(tensor, pieces, grid.scales_shape, numels, self.scale_dtype)
        local_codes, local_scales = self.encode(local_tensor(tensor), grid)
        local_tensor(codes, "tensor of codes").copy_(local_codes)
        local_tensor(scales, "tensor of scales").copy_(local_scales)
        return Quantized(self, codes, scales)

    @final  # `QuantizedGather` encodes and decodes many tensors at once, by the methods above
    def encode(self, flat: torch.Tensor, grid: BlockGrid) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes and scales of a piece of whole bands.

        Args:
            flat: the piece, 1-D, of any floating-point dtype.
            grid: grid of the whole tensor.

        Returns:
            uint8 codes with the shape of ``flat``, and 1-D scales of ``scale_dtype``, one per block.
        """
        tiles = grid.tiled(flat).float()
        factors, scales = self.scales_of(tiles.abs().amax((1, 3)))
        codes = self.codes_of(tiles, factors[:, None, :, None])
        return grid.untiled(codes, flat.numel()), scales.reshape(-1)

    @final
    def decode(
        self, codes: torch.Tensor, scales: torch.Tensor, grid: BlockGrid, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Return the values of a piece (1-D, ``dtype``) from its codes and scales: undoes `encode`, up to rounding."""
        factors = self.factors_of(scales.view(-1, grid.scales_per_band))
        tiles = grid.tiled(codes.view(self.code_dtype).float())
        return grid.untiled(tiles * factors[:, None, :, None], codes.numel()).to(dtype)


class _E4m3Codec(BlockCodec):
    """A codec whose codes are e4m3."""

    code_dtype: ClassVar[torch.dtype] = torch.float8_e4m3fn
    largest: ClassVar[float] = _E4M3_MAX

    def codes_of(self, values: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        # e4m3fn has no infinity: a product that rounding puts above the maximum would become NaN.
        scaled = (values * factors).clamp(-_E4M3_MAX, _E4M3_MAX)
        return scaled.to(torch.float8_e4m3fn).view(torch.uint8)


@set_module("vescale_fsdp.quantize")
@dataclass(frozen=True)
class Fp8Blocks(_E4m3Codec):
    """e4m3 codes and fp32 scales: 128 x 128 blocks for weights, 1 x 128 for activations (arXiv 2412.19437).

    Args:
        rows: rows of a block.
        cols: columns of a block.

    Examples:
        >>> codec = Fp8Blocks(128, 128)
        >>> codec.grid((256, 512)).scales_shape
        (2, 4)
    """

    rows: int = 128
    cols: int = 128


@set_module("vescale_fsdp.quantize")
@dataclass(frozen=True)
class Mxfp8(_E4m3Codec):
    """e4m3 codes, and a power-of-two scale for every 32 elements of a row, rounded down (MXFP8).

    The format is that of the OCP Microscaling Formats (MX) specification, version 1.0.

    Examples:
        >>> Mxfp8().grid((4, 64)).scales_shape
        (4, 2)
    """

    rows: int = 1
    cols: int = 32

    scale_dtype: ClassVar[torch.dtype] = torch.uint8

    def scales_of(self, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # The exponent bits of an fp32 number are its floor(log2) plus the bias 127, which is E8M0's bias too.
        exponent = (amax.view(torch.int32) >> 23) & 0xFF
        biased = (exponent - _E4M3_MAX_EXPONENT).clamp(min=0)  # code 0 is E8M0's smallest scale
        scales = torch.where(amax.isfinite(), biased, _E8M0_NAN).to(torch.uint8)
        # The factor is made from bits, because a computed reciprocal may be 2^-127, which some devices flush to 0.
        return _power_of_two(torch.where(scales == _E8M0_NAN, scales, 2 * _E8M0_BIAS - scales)), scales

    def factors_of(self, scales: torch.Tensor) -> torch.Tensor:
        return _power_of_two(scales)


@set_module("vescale_fsdp.quantize")
@dataclass(frozen=True)
class Int8Rows(BlockCodec):
    """int8 codes and one fp32 scale per row, or per ``cols`` columns of a row.

    Examples:
        >>> Int8Rows().grid((4, 64)).scales_shape
        (4, 1)
    """

    rows: int = 1
    cols: int = _WHOLE_ROW

    code_dtype: ClassVar[torch.dtype] = torch.int8
    largest: ClassVar[float] = _INT8_MAX

    def codes_of(self, values: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        # Integers have no NaN. A block with a NaN has the scale NaN, so it decodes to NaN whatever its codes are.
        scaled = (values * factors).nan_to_num(0.0).round().clamp(-_INT8_MAX, _INT8_MAX)
        return scaled.to(torch.int8).view(torch.uint8)


def _power_of_two(biased: torch.Tensor) -> torch.Tensor:
    """Return 2^(biased - 127) in fp32; NaN for the E8M0 code of NaN. Made from bits, because `exp2` may round."""
    bits = torch.where(biased == 0, _HALF_LEAST_NORMAL_BITS, biased.int() << 23)
    return torch.where(biased == _E8M0_NAN, torch.nan, bits.view(torch.float32))


@set_module("vescale_fsdp.quantize")
@dataclass(frozen=True, eq=False)  # no __eq__, because tensors compare element by element
class Quantized:
    """Codes and scales of one tensor.

    Args:
        codec: the format.
        codes: uint8, of the tensor's shape; a DTensor with the tensor's pieces if the tensor was a DTensor.
        scales: one per block, in the codec's ``scale_dtype``; each rank has the scales of the blocks it has codes of.

    Examples:
        >>> codes = Int8Rows().quantize(torch.ones(4, 64))
        >>> codes.codes.shape, codes.dequantize()[0, 0].item()
        (torch.Size([4, 64]), 1.0)
    """

    codec: BlockCodec
    codes: torch.Tensor
    scales: torch.Tensor

    def full(self) -> Quantized:
        """Return the full tensor's codes and scales, on every rank. Collective; it sends codes, not values."""
        with one_meeting("Quantized.full"):
            whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in (self.codes, self.scales)]
        return Quantized(self.codec, *whole)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the decoded values, with the placements of the codes, without communication."""
        values = torch.zeros_like(self.codes, dtype=dtype)
        codes = local_tensor(self.codes, "tensor of codes")
        scales = local_tensor(self.scales, "tensor of scales")
        grid = self.codec.grid(tuple(self.codes.shape))
        local_tensor(values, "tensor").copy_(self.codec.decode(codes, scales, grid, dtype))
        return values
