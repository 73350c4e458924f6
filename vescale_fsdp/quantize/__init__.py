"""Block-wise codecs, which store a tensor as 8-bit codes and one scale per block, and gathers that send such codes."""

from vescale_fsdp.quantize.codec import BlockCodec, Fp8Blocks, Int8Rows, Mxfp8, Quantized
from vescale_fsdp.quantize.codec import BlockGrid as BlockGrid  # not public: pickles name it in this package
from vescale_fsdp.quantize.quantized_gather import QuantizedGather

__all__ = ["BlockCodec", "Fp8Blocks", "Int8Rows", "Mxfp8", "Quantized", "QuantizedGather"]
