"""Block-wise codecs: tensors as 8-bit codes and one scale per block, cut where ragged shards are cut."""

from vescale_fsdp.quantize.block_grid import BlockGrid, grid_of
from vescale_fsdp.quantize.codec import BlockCodec, Fp8Blocks, Int8Rows, Mxfp8
from vescale_fsdp.quantize.quantized_gather import QuantizedGather
from vescale_fsdp.quantize.quantized_tensor import Quantized, quantize

__all__ = [
    "BlockCodec",
    "BlockGrid",
    "Fp8Blocks",
    "Int8Rows",
    "Mxfp8",
    "Quantized",
    "QuantizedGather",
    "grid_of",
    "quantize",
]
