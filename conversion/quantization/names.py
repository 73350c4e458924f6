"""Find the tensors of a model that are codes and scales of quantized weights.

    q.weight (fp8)  + q.weight_scale_inv | q.weight_scale     one per block, row or tensor: DeepSeek, ModelOpt, others
    w (fp8)         + w_scale_inv | w_scale                   stacked experts
    w_blocks        + w_scales                                mxfp4: gpt-oss; the weight is the transpose
    q.weight_packed + q.weight_scale, ...                     compressed-tensors, 1 to 8 bits and FP4
    q.qweight       + q.qzeros, q.scales (+ q.g_idx)          GPTQ and AWQ
    q.weight (int8) + q.SCB (+ q.weight_format)               bitsandbytes, 8 bits
    q.weight (u8)   + q.weight.absmax, .quant_map, ...        bitsandbytes, nf4 and fp4, nested scales too; the bytes
                                                              may be stored as bfloat16 (FSDP-QLoRA) or another dtype
    q._weight_qdata + q._weight_scale, ...                    torchao, described in the file's metadata
    norm.scale (float32)                                      a parameter, not a scale: there are no codes next to it

By dtype, scales are ordinary floats. But a weight is code times scale, so a cast that rounds a scale would change every
weight of its block. Scales are recognized by the codes next to them. If config.json has a quantization config, scales
are also recognized by the names that loaders look for. Unknown kinds of codes count too: they keep their dtype.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from vescale_fsdp.conversion.engine.stored_tensor import TensorInfo

# Part of the name WEIGHT.quant_state.bitsandbytes__nf4, which marks WEIGHT as packed even if its dtype is a float.
BITSANDBYTES_STATE = ".quant_state.bitsandbytes__"

# Integer tensors with these names are codes; all other integer tensors (position ids, counters) are ordinary data.
_CODES = re.compile(
    r"(q?weights?|[^.]*_(packed|blocks|codes)|[^.]*weight_(packed|quantized)|qweight|qzeros|W_q|codes|"
    r"_?(weight_)?(q?data|int_data|qdata)|_[^.]*_qdata|[^.]*:_?(q|int_)?data)",
    re.IGNORECASE,
)
# Words in the names of scales, zero points and tables; only next to codes, since "shift" may also name a parameter.
_SCALE_WORDS = re.compile(
    r"scale|absmax|amax|quant|zero|(^|[._:])scb$|codebook|table|shift|offset|g_idx", re.IGNORECASE
)
# Scales of attention and the KV cache. The codes are not next to them, but in layers of the same module.
_KV_SCALE = re.compile(r"(q|k|v|kv|prob|attn)_(scale|zero_point)(_float)?")
# Names that loaders look for if config.json declares a quantization, even if no codes are next to them.
_LOADERS_NAMES = re.compile(
    r"(q|k|v|kv|prob|attn|weight|input|output|activation|[^.]*_proj)_(global_)?(scale|zero_point)s?(_inv|_2)?"
)


def find_quantized(infos: Iterable[TensorInfo], config: Mapping[str, Any] | None) -> frozenset[str]:
    """Return the names of codes and scales among a model's tensors; ``config`` is the model's config.json."""
    dtypes = {info.name: info.dtype for info in infos}
    codes = {
        name
        for name, dtype in dtypes.items()
        if dtype.kind == "quantized" or (dtype.kind == "int" and _CODES.fullmatch(name.rpartition(".")[2]))
    }
    packed = {name.partition(BITSANDBYTES_STATE)[0] for name in dtypes if BITSANDBYTES_STATE in name}
    codes |= packed & dtypes.keys()
    # Names below which scales may be: the modules of codes, and the weights themselves (weight.absmax). The codes of a
    # tensor subclass are an attribute (weight._data), so the weight's module counts too.
    containers = set(codes)
    for name in codes:
        module, _, leaf = name.rpartition(".")
        containers |= {module, module.rpartition(".")[0]} if leaf.startswith("_") else {module}
    # Names of all modules that enclose a container, in which scales of attention may be.
    parents = {name[:at] for name in containers for at, letter in enumerate(name) if letter == "."}
    # compression_config is the older key of compressed-tensors.
    is_declared = bool(config and (config.get("quantization_config") or config.get("compression_config")))

    def is_scale(name: str) -> bool:
        """Return whether a tensor that is not codes is a scale, by its name and the codes near it."""
        module, _, leaf = name.rpartition(".")
        outer, _, last = module.rpartition(".")
        if _SCALE_WORDS.search(leaf) and (
            # Some libraries nest scales one level deeper: ``q.quant_state.absmax``, ``q.meta.scale``.
            module in containers or (last in ("quant_state", "meta") and outer in containers)
        ):
            return True
        if _KV_SCALE.fullmatch(leaf) and module in parents:
            return True
        return is_declared and _LOADERS_NAMES.fullmatch(leaf) is not None

    return frozenset(codes | {name for name in dtypes if name not in codes and is_scale(name)})
