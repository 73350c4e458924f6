"""Dequantize bitsandbytes: int8 with a scale per row, and NF4 or FP4 in runs that share a scale.

    q.weight int8 [n, k]  + q.SCB [n] (+ q.weight_format)
    q.weight [n * k / 2]  + q.weight.absmax, .quant_map, .quant_state.bitsandbytes__nf4 (+ .nested_absmax, ...)

The bytes of 4-bit codes may be stored with any dtype (``bnb_4bit_quant_storage``). Their values are rounded to the
dtype in the quantization state, as by ``dequantize_4bit``; those of int8 to the requested dtype.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from vescale_fsdp.conversion.engine.coded_tensors import DecodedView, RawBytesView, ScaledView
from vescale_fsdp.conversion.engine.tensor_view import MappedView, TensorView
from vescale_fsdp.conversion.quantization.model import (
    Floats,
    QuantizedModel,
    as_float,
    decoded,
    mismatch,
    reshaped,
    small_array,
)
from vescale_fsdp.conversion.quantization.names import BITSANDBYTES_STATE
from vescale_fsdp.errors import CorruptCheckpointError
from vescale_fsdp.layout.dtypes import DType, known_dtype
from vescale_fsdp.layout.index_maps import Slice

_MOST_STATE_BYTES = 2**16  # maximum size of the JSON in a bitsandbytes tensor
_STATES = ("quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4")
_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", *_STATES)


def int8_rows(model: QuantizedModel, name: str) -> Floats | None:
    """Dequantize LLM.int8: one scale per row, and a tensor that names the layout of the codes."""
    module = name.rpartition(".")[0]
    view, scales = model.views[name], model.first_of(f"{module}.SCB")
    if view.info.dtype.name != "int8" or scales is None or not view.info.shape:
        return None
    rows, *rest = view.info.shape
    if scales.info.shape != (rows,):
        raise mismatch(view, scales, f"{rows} scales")
    by_row = reshaped(as_float(scales), (rows, *(1,) * len(rest)))
    # 1 / 127, with as many digits as in bitsandbytes, for the same rounding.
    scaled = ScaledView(decoded(view, "int8"), by_row, (1, *rest), model.dtype, factor=7.874015718698502e-3)
    return model.floats(name, scaled, view, scales, model.first_of(f"{module}.weight_format"))


def four_bits(model: QuantizedModel, name: str) -> Floats | None:
    """Dequantize NF4 or FP4: flat bytes of two values each, the upper half first.

    Raises:
        CorruptCheckpointError: if the quantization state next to the codes is missing, or cannot be read.
    """
    view = model.views[name]
    parts = {part: found for part in _PARTS if (found := model.first_of(f"{name}.{part}")) is not None}
    states = [part for part in _STATES if part in parts]
    if not states and (view.info.dtype.name != "uint8" or "absmax" not in parts):
        return None
    if not states:
        raise mismatch(view, parts["absmax"], f"a tensor {name}{BITSANDBYTES_STATE}nf4 next to them")
    try:
        facts = json.loads(small_array(parts[states[0]], _MOST_STATE_BYTES).tobytes())
        shape, run, dtype = tuple(map(int, facts["shape"])), int(facts["blocksize"]), _dtype_of(facts)
        scales = _run_scales(parts, facts)
        numbers = small_array(parts["quant_map"], 64).view("float32")  # 16 numbers
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpointError(
            "The quantization state that bitsandbytes stored for a weight cannot be read.",
            expected="JSON with its shape, block size and type",
            got=f"{type(error).__name__}: {error}",
            where=f"tensor {name}.{states[0]}",
        ) from error
    # As bytes: FSDP-QLoRA stores the codes with a float dtype.
    flat = RawBytesView(reshaped(view, (view.info.numel,)))
    from vescale_fsdp.conversion.quantization.float_codes import nibble_table

    table = nibble_table(numbers)
    # These 128 bytes are the first 16 rows of pairs, which contain all 16 numbers.
    values = DecodedView(flat, table, f"nibbles {table.tobytes().hex()[:256]}")
    count = values.info.numel
    if run < 1 or scales.info.shape != (-(-count // run),):
        raise mismatch(view, scales, f"a scale for each {run} of {count} values")
    scaled: TensorView = ScaledView(values, scales, (run,), dtype)
    if count - math.prod(shape) == 1:  # the last half byte is unused
        scaled = MappedView(Slice(0, 0, count - 1), (scaled,))
    return model.floats(name, reshaped(scaled, shape), view, *parts.values())


def _dtype_of(facts: Mapping[str, Any]) -> DType:
    """Return the dtype of the original weight.

    Raises:
        ValueError: if it is not a float.
    """
    dtype = known_dtype(str(facts["dtype"]))
    if dtype is None or dtype.kind != "float":
        raise ValueError(f"dtype {facts['dtype']}")
    return dtype


def _run_scales(parts: Mapping[str, TensorView], facts: Mapping[str, Any]) -> TensorView:
    """Return a weight's scales as float32; nested scales are codes with scales of their own."""
    scales = parts["absmax"]
    if scales.info.dtype.kind == "float":
        return as_float(scales)
    table = small_array(parts["nested_quant_map"], 1024).view("float32")  # 256 numbers
    values = DecodedView(scales, table[:, None], f"table {table.tobytes().hex()}")
    nested, run = as_float(parts["nested_absmax"]), int(facts["nested_blocksize"])
    return ScaledView(values, nested, (run,), offset=float(facts["nested_offset"]))
