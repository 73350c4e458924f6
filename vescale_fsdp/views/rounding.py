"""Items of one float type as another, bit for bit as torch's ``.to(dtype)`` rounds them, without torch.

bfloat16, which numpy lacks, is the upper half of a float32 and is made by integer arithmetic.
"""

from __future__ import annotations

import numpy as np

from vescale_fsdp.layout.dtypes import DType

__all__ = ["cast_array"]

_NUMPY = {"float16": np.float16, "float32": np.float32, "float64": np.float64}
_BF16_NAN = 0x7FC0


def cast_array(raw: np.ndarray, source: DType, target: DType) -> np.ndarray:
    """Raw items of one float type as raw items of another, rounded to nearest, ties to even."""
    if source == target:
        return raw
    values = _from_bf16(raw) if source.name == "bfloat16" else raw.view(_NUMPY[source.name])
    with np.errstate(over="ignore", invalid="ignore"):  # too large for the target is infinity, as in torch
        if target.name == "bfloat16":
            return _to_bf16(values.astype(np.float32))
        return values.astype(_NUMPY[target.name]).view(target.raw)


def _from_bf16(raw: np.ndarray) -> np.ndarray:
    return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _to_bf16(values: np.ndarray) -> np.ndarray:
    """Keep the upper half of each float32, rounded to nearest even; any NaN becomes the one torch makes."""
    bits = np.ascontiguousarray(values).view(np.uint32).reshape(values.shape)
    lowest_kept = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + np.uint32(0x7FFF) + lowest_kept) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(_BF16_NAN), rounded)
