"""Quantized: a tensor as codes and scales that lie as it does, and the function that makes one of a shard.

Quantising a shard needs no communication: where the codec's blocks are whole on every rank, the codes and scales
that ranks make apart are, bit for bit, those of the full tensor. So gathering the codes (one byte per element and
a scale per block) replaces gathering the values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from vescale_fsdp.dtensor.piece_map import contiguous_pieces_of, local_tensor, zeros_sharded_with
from vescale_fsdp.quantize.codec import BlockCodec


@dataclass(frozen=True, eq=False)
class Quantized:
    """Codes and scales of one tensor.

    Args:
        codec: what made them.
        codes: uint8, of the tensor's shape; a DTensor if the tensor was one, cut at the same places.
        scales: one per block, of the codec's dtype; cut where the codes are.

    Examples:
        >>> from vescale_fsdp.quantize import Int8Rows
        >>> codes = quantize(torch.ones(4, 64), Int8Rows())
        >>> codes.codes.shape, codes.dequantize()[0, 0].item()
        (torch.Size([4, 64]), 1.0)
    """

    codec: BlockCodec
    codes: torch.Tensor
    scales: torch.Tensor

    def full(self) -> Quantized:
        """The whole tensor's codes and scales on every rank: gathers bytes, no values (a collective)."""
        whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in (self.codes, self.scales)]
        return Quantized(self.codec, *whole)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Values again; a tensor that lies as the codes do. Local."""
        values = torch.zeros_like(self.codes, dtype=dtype)
        codes = local_tensor(self.codes, "tensor of codes")
        scales = local_tensor(self.scales, "tensor of scales")
        grid = self.codec.grid(tuple(self.codes.shape))
        local_tensor(values, "tensor").copy_(self.codec.decode(codes, scales, grid, dtype))
        return values


@torch.no_grad()
def quantize(tensor: torch.Tensor, codec: BlockCodec) -> Quantized:
    """Codes and scales of a tensor, made by each rank of what it holds. No communication.

    Args:
        tensor: plain, or a DTensor of contiguous pieces (RaggedShard, Shard(0), Replicate).
        codec: the format.

    Raises:
        LayoutError: if a rank boundary cuts a block.

    Examples:
        >>> from vescale_fsdp.quantize import Fp8Blocks
        >>> quantize(torch.randn(256, 256), Fp8Blocks(128, 128)).scales.shape
        torch.Size([2, 2])
    """
    pieces = contiguous_pieces_of(tensor, "another placement")
    grid = codec.grid(tuple(tensor.shape))
    numels = pieces.count_in_blocks(grid.band_numel, lambda piece: grid.scales_of(piece, "tensor"))
    codes = torch.zeros_like(tensor, dtype=torch.uint8)
    scales = zeros_sharded_with(tensor, pieces, grid.scales_shape, numels, codec.scale_dtype)
    local_codes, local_scales = codec.encode(local_tensor(tensor), grid)
    local_tensor(codes, "tensor of codes").copy_(local_codes)
    local_tensor(scales, "tensor of scales").copy_(local_scales)
    return Quantized(codec, codes, scales)
