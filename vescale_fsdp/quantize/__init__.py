"""Block-wise codecs: tensors as 8-bit codes and one scale per block, cut at the same blocks as ragged shards."""

from vescale_fsdp.quantize.codec import BlockCodec, Fp8Blocks, Int8Rows, Mxfp8, Quantized
from vescale_fsdp.quantize.codec import BlockGrid as BlockGrid  # not public: pickles look for it here
from vescale_fsdp.quantize.quantized_gather import QuantizedGather

__all__ = ["BlockCodec", "Fp8Blocks", "Int8Rows", "Mxfp8", "Quantized", "QuantizedGather"]
