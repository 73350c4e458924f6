"""Which tensors are codes of quantised weights, and which are their scales.

Scales are ordinary floats by type, but a weight is code times scale: rounding a scale changes every weight of its
block. They are told by what lies beside them, since a layer's own parameter may be called ``scale`` too:

    q_proj.weight            float8     code        q_proj.weight_scale_inv    float32   its scale
    up_proj.weight           uint8      code        up_proj.weight.absmax      float32   bitsandbytes' scale
    up_proj.weight           bfloat16   code        up_proj.weight.quant_state.bitsandbytes__nf4  (quant_storage)
    norm.scale               float32    nobody's: a parameter

and, where a config.json says that the model is quantised, by the names that loaders look for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from vescale_fsdp.checkpoint.moves.stored_tensor import TensorInfo

BITSANDBYTES_STATE = ".quant_state.bitsandbytes__"  # follows the name of a packed weight, whatever its dtype

# Integers under these names are codes; others (position ids, counters) are what they seem.
_CODES = re.compile(
    r"(q?weights?|[^.]*_(packed|blocks|codes)|[^.]*weight_(packed|quantized)|qweight|qzeros|W_q|codes|"
    r"_?(weight_)?(q?data|int_data|qdata)|[^.]*:_?(q|int_)?data)",
    re.IGNORECASE,
)
_SCALE_WORDS = re.compile(
    r"scale|absmax|amax|quant|zero|(^|[._:])scb$|codebook|table|shift|offset|g_idx", re.IGNORECASE
)
# Of attention: no code lies beside them, but inside the layers of their module.
_KV_SCALE = re.compile(r"(q|k|v|kv|prob|attn)_(scale|zero_point)(_float)?")
_LOADERS_NAMES = re.compile(
    r"(q|k|v|kv|prob|attn|weight|input|output|activation|[^.]*_proj)_(global_)?(scale|zero_point)s?(_inv|_2)?"
)


def find_quantized(infos: Iterable[TensorInfo], config: Mapping[str, Any] | None) -> frozenset[str]:
    """Names of codes and scales among a model's tensors; ``config`` is its config.json."""
    found = list(infos)
    codes = {info.name for info in found if _is_code(info)}
    codes |= {info.name.partition(BITSANDBYTES_STATE)[0] for info in found if BITSANDBYTES_STATE in info.name}
    codes &= {info.name for info in found}
    homes = {home for name in codes for home in _homes(name)}
    around = {home[:at] for home in homes for at, letter in enumerate(home) if letter == "."}
    says_so = bool(config and (config.get("quantization_config") or config.get("compression_config")))
    scales = {
        info.name
        for info in found
        if info.name not in codes and _is_scale(*_split(info.name), homes, around, says_so=says_so)
    }
    return frozenset(codes | scales)


def _split(name: str) -> tuple[str, str]:
    module, _, leaf = name.rpartition(".")
    return module, leaf


def _is_code(info: TensorInfo) -> bool:
    if info.dtype.kind == "quantized":
        return True
    return info.dtype.kind == "int" and _CODES.fullmatch(_split(info.name)[1]) is not None


def _homes(name: str) -> tuple[str, ...]:
    """Modules whose scales are a code's: its own, its name (``weight.absmax``), and for the parts of a tensor
    subclass (``weight._data``) the module around."""
    module, leaf = _split(name)
    return (module, name, _split(module)[0]) if leaf.startswith("_") else (module, name)


def _is_scale(module: str, leaf: str, homes: set[str], around: set[str], *, says_so: bool) -> bool:
    if _SCALE_WORDS.search(leaf) and any(home in homes for home in _ends(module, leaf)):
        return True
    if _KV_SCALE.fullmatch(leaf) and module in around:
        return True
    return says_so and _LOADERS_NAMES.fullmatch(leaf) is not None


def _ends(module: str, leaf: str) -> tuple[str, ...]:
    """The module, and the tensor inside it that ``quant_state.NAME`` and its like are part of."""
    outer, last = _split(module)
    return (module, outer) if last in ("quant_state", "meta") else (module,)
