"""Items of one float type as another, bit for bit as torch's ``.to(dtype)`` rounds them, by torch or without it.

The converter starts without torch, which takes a second and 200 MiB to import; where it is loaded already, as beside
live shards, it casts: several times as fast. bfloat16, which numpy lacks, is the upper half of a float32 and is made
by integer arithmetic.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from vescale_fsdp.layout.dtypes import DType

_NUMPY = {"float16": np.float16, "float32": np.float32, "float64": np.float64}
_BF16_NAN = 0x7FC0
_INFINITIES: dict[str, np.unsignedinteger[Any]] = {
    "float16": np.uint16(0x7C00),
    "bfloat16": np.uint16(0x7F80),
    "float32": np.uint32(0x7F800000),
    "float64": np.uint64(0x7FF0000000000000),
}
_NARROWER_THAN = {  # types that lack some value of these
    "float64": ("float32", "bfloat16", "float16"),
    "float32": ("bfloat16", "float16"),
    "bfloat16": ("float16",),
}
_BLOCK_ITEMS = 1 << 15  # intermediate values of so many stay in a core's cache


def cast_array(raw: np.ndarray, source: DType, target: DType) -> np.ndarray:
    """Raw items of one float type as raw items of another, rounded to nearest, ties to even."""
    if source == target:
        return raw
    out = np.empty(raw.shape, dtype=target.raw)
    cast_into(raw, source, out, target)
    return out


def cast_into(raw: np.ndarray, source: DType, out: np.ndarray, target: DType) -> int:
    """`cast_array`, written to ``out`` of the same shape; returns how many finite items became infinite."""
    lost = 0
    cast = _by_torch if _torch_has(source, target) and raw.flags.writeable else _by_numpy
    with np.errstate(over="ignore", invalid="ignore"):  # too large for the target is infinity, as in torch
        for items, into in _blocks(raw, out):
            cast(items, source, into, target)
            lost += _new_infinities(items, source, into, target)
    return lost


def _new_infinities(raw: np.ndarray, source: DType, out: np.ndarray, target: DType) -> int:
    """How many items are infinite as ``target`` and were finite."""
    if target.name not in _NARROWER_THAN.get(source.name, ()):
        return 0
    infinite = _is_infinite(out, target)
    return int(np.count_nonzero(infinite & ~_is_infinite(raw, source))) if infinite.any() else 0


def _is_infinite(raw: np.ndarray, dtype: DType) -> np.ndarray:
    infinity = _INFINITIES[dtype.name]
    return (raw << infinity.dtype.type(1)) == infinity << infinity.dtype.type(1)  # the sign falls off


def _by_numpy(raw: np.ndarray, source: DType, out: np.ndarray, target: DType) -> None:
    values = _from_bf16(raw) if source.name == "bfloat16" else raw.view(_NUMPY[source.name])
    if target.name == "bfloat16":
        out[...] = _to_bf16(values.astype(np.float32, copy=False))
    elif target.name == "float16" and values.dtype == np.float32:
        out[...] = _to_f16(values)
    else:
        out.view(_NUMPY[target.name])[...] = values


def _torch_has(source: DType, target: DType) -> bool:
    """Whether torch is loaded and gives the very same bits: of float16, NaNs come out otherwise."""
    return "torch" in sys.modules and {source.name, target.name} == {"bfloat16", "float32"}


def _by_torch(raw: np.ndarray, source: DType, out: np.ndarray, target: DType) -> None:
    torch = sys.modules["torch"]
    values = torch.from_numpy(raw).view(getattr(torch, source.name))
    torch.from_numpy(out).view(getattr(torch, target.name)).copy_(values)
    if target.name == "bfloat16":
        is_nan = values.isnan()
        if is_nan.any():  # of which torch makes one value or another, by where in its vectors they lie
            out[is_nan.numpy()] = _BF16_NAN


def _blocks(raw: np.ndarray, out: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Both in small parts, where they are runs of memory."""
    if not (raw.flags.c_contiguous and out.flags.c_contiguous):
        yield raw, out
        return
    items, into = raw.reshape(-1), out.reshape(-1)
    for start in range(0, items.size, _BLOCK_ITEMS):
        yield items[start : start + _BLOCK_ITEMS], into[start : start + _BLOCK_ITEMS]


def _from_bf16(raw: np.ndarray) -> np.ndarray:
    return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _to_bf16(values: np.ndarray) -> np.ndarray:
    """Keep the upper half of each float32, rounded to nearest even; any NaN becomes the one torch makes."""
    bits = np.ascontiguousarray(values).view(np.uint32).reshape(values.shape)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += bits
    rounded += np.uint32(0x7FFF)
    rounded >>= np.uint32(16)
    kept = rounded.astype(np.uint16)
    kept[np.isnan(values)] = _BF16_NAN
    return kept


def _to_f16(values: np.ndarray) -> np.ndarray:
    """As numpy rounds each float32; but numpy raises a processor flag for each that is tiny: 4 million a second."""
    bits = np.ascontiguousarray(values).view(np.uint32).reshape(values.shape)
    size = bits & np.uint32(0x7FFFFFFF)
    half = size >> np.uint32(13)
    half &= np.uint32(1)
    half += size
    half += np.uint32(
        0xC8000FFF
    )  # another bias of the exponent, less than half of the last place: modulo 2^32
    half >>= np.uint32(13)
    # Below 2^-14 places no longer follow the exponent: they are those of a float32 beside 0.5, which rounds as it adds.
    small = size < 0x38800000
    half[small] = (size[small].view(np.float32) + np.float32(0.5)).view(np.uint32) - np.uint32(0x3F000000)
    large = size >= 0x47800000  # 2^16 and more, infinity, NaN
    if large.any():
        nans = (size > 0x7F800000) * np.maximum((size & np.uint32(0x7FFFFF)) >> np.uint32(13), 1)
        half[large] = (0x7C00 + nans)[large]
    half |= (bits >> np.uint32(16)) & np.uint32(0x8000)
    return half.astype(np.uint16)
