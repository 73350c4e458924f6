"""Dequantize a model: ``--dequantize``, and ``SourceOptions(dequantize=..)`` of `load`.

The schemes are tried in order for each tensor that may be codes. Unknown kinds of codes are an error, because a partly
dequantized model would be wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vescale_fsdp.conversion.engine.carried_state import CarriedState
from vescale_fsdp.conversion.engine.tensor_view import TensorView
from vescale_fsdp.conversion.quantization import (
    bitsandbytes,
    blocks,
    compressed_tensors,
    gguf,
    gptq,
    modelopt,
    torchao,
)
from vescale_fsdp.conversion.quantization.model import QuantizedModel, Scheme, refusal
from vescale_fsdp.conversion.quantization.names import find_quantized
from vescale_fsdp.errors import ConversionError, option, some
from vescale_fsdp.layout.dtypes import DType

# More specific schemes come first: NF4 stored as int8 must not be taken for int8.
_SCHEMES: tuple[Scheme, ...] = (
    gguf.rows,
    torchao.described,
    bitsandbytes.four_bits,
    bitsandbytes.int8_rows,
    blocks.mxfp4_experts,
    gptq.transposed_groups,
    compressed_tensors.packed,
    modelopt.two_per_byte,
    blocks.blocks,
)


def dequantized(state: CarriedState, config: Mapping[str, Any], dtype: DType) -> CarriedState:
    """Return the state with all quantized weights of its model as floats of ``dtype``, and without scales.

    Raises:
        ConversionError: if no weight is quantized, or some weights are quantized in an unknown way.
        CorruptCheckpointError: if the shapes of codes and scales do not match.
    """
    views = {name: view for name, view in state.views.items() if name in state.is_model}
    quantized = find_quantized([view.info for view in views.values()], config)
    if not quantized:
        raise ConversionError(
            "There is nothing to dequantize.",
            expected="weights of fp8, mxfp4, int8 or nf4, with their scales",
            got=f"{len(views)} tensors without codes",
            todo=f"leave out {option('dequantize')}; {option('dtype')} casts ordinary floats",
        )
    settings = config.get("quantization_config") or config.get("compression_config") or {}
    model = QuantizedModel(views, settings, _described(state), dtype)
    compressed_tensors.refuse_unreadable(model)
    modelopt.refuse_unreadable(model, quantized)
    weights: dict[str, tuple[TensorView, str]] = {}
    used: set[str] = set()
    for name in quantized:
        if (floats := next(filter(None, (scheme(model, name) for scheme in _SCHEMES)), None)) is not None:
            weights[floats.name] = (floats.view, name)
            used.update(floats.used)
    left = sorted(quantized - used)
    if codes := [name for name in left if views[name].info.dtype.kind != "float"]:
        method = f"quant_method {model.method}: " if model.method else ""
        raise refusal(
            "fp8, int8, int4 or fp4 with scales as compressed-tensors, GPTQ, AWQ, bitsandbytes, torchao, ModelOpt, "
            "gpt-oss or GGUF store them",
            f"{method}{some(codes)}",
            "the model",
        )
    # Such as scales of activations, and scales next to weights that are stored as floats.
    warning = (f"scales without a weight of their own are dropped: {some(left)}",) if left else ()
    return state.with_replaced(weights, used.union(left), warning)


def _described(state: CarriedState) -> dict[str, str]:
    """Return the descriptions of tensors in safetensors metadata, by the names that these have in the state."""
    name, short = next(iter(state.model.names.items()))
    prefix = name.removesuffix(short)
    return {f"{prefix}{key}": text for key, text in state.file_metadata.items()}
