"""Dequantize the 4-bit floats of NVIDIA's ModelOpt; `blocks` dequantizes its FP8 and int8.

    NVFP4   q.weight u8 [n, k / 2]   q.weight_scale e4m3 [n, k / 16]   q.weight_scale_2   (q.input_scale)
    MXFP4   q.weight u8 [n, k / 2]   q.weight_scale e8m0 [n, k / 32]

NVFP4 is ``code * (scale * scale_2)`` in float32, rounded to the requested dtype, as by ``NVFP4QTensor.dequantize``.
"""

from __future__ import annotations

from collections.abc import Iterable

from vescale_fsdp.conversion.quantization.blocks import MX_BLOCK, scaled_in_rows, times_whole
from vescale_fsdp.conversion.quantization.model import Floats, QuantizedModel, as_float, decoded, refusal
from vescale_fsdp.errors import some

_NV_BLOCK = 16  # values per scale in NVFP4
# Integers of 4 bits that are packed along rows, and weights that need a low-rank product added.
_NOT_READ = ("W4A16_AWQ", "W4A8_AWQ", "NVFP4_SVD")


def refuse_unreadable(model: QuantizedModel, names: Iterable[str]) -> None:
    """Check the algorithm that config.json names, and that no layer scales its inputs.

    Args:
        names: names of the model's codes and scales.

    Raises:
        ConversionError: if weights cannot be dequantized here.
    """
    algorithm = str(model.settings.get("quant_algo"))
    if model.method == "modelopt" and algorithm in _NOT_READ:
        raise refusal("FP8, int8, NVFP4 or MXFP4", f"quant_algo {algorithm}", "config.json")
    # Such layers multiply their inputs before the product with the weight.
    if scaled := sorted(name for name in names if name.rpartition(".")[2] == "pre_quant_scale"):
        raise refusal("inputs that are not scaled", some(scaled), "the model")


def two_per_byte(model: QuantizedModel, name: str) -> Floats | None:
    """Dequantize ModelOpt's NVFP4 and MXFP4: bytes of two values."""
    codes, scales, second = (model.first_of(name + end) for end in ("", "_scale", "_scale_2"))
    if codes is None or scales is None or codes.info.dtype.name != "uint8" or not codes.info.shape:
        return None
    size = MX_BLOCK if scales.info.dtype.name in ("uint8", "float8_e8m0fnu") else _NV_BLOCK
    if size == _NV_BLOCK and second is None:
        return None
    # The library's table for NVFP4 has no negative zero.
    values = decoded(codes, "e2m1+0" if size == _NV_BLOCK else "e2m1")
    rows = as_float(scales)
    if second is not None:
        rows = times_whole(rows, second)
    view = scaled_in_rows(values, rows, size, model.dtype)
    return model.floats(name, view, codes, scales, second)
