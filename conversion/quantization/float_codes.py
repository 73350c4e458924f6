"""Raw bits of floats: casts between float types, and the codes of quantized weights. Does not import torch.

Casts (`cast_array`, `cast_into`) round bit for bit as torch's ``.to(dtype)``: from float64 to 16 bits in two steps, by
way of float32. NaNs stay NaNs, of other bits than torch's. The converter runs without torch, whose import takes a
second and 200 MiB. If other code has already imported torch, as in a training process, torch casts, because it is
several times as fast. bfloat16, which numpy lacks, is the upper half of a float32, computed by integer arithmetic.

Codes of quantized weights are decoded by the tables of `code_table` and `nibble_table`:

    table        bytes                          value
    e4m3, e5m2   8-bit floats                   the float
    ..fnuz       8-bit floats of AMD            the float; 128 is NaN, there are no infinities and no negative zero
    int8         -128 .. 127                    the integer
    e8m0         exponents of scales            2^(byte - 127)
    e2m1         two 4-bit floats, low first    0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives
    e2m1+0       the same                       the same, without a negative zero
    int4         two numbers, low first         -8 .. 7
    e2m3         6-bit floats, unpacked         the float
    nibbles(t)   two indices, high first        t[index], as bitsandbytes packs nf4 and fp4

`Fp8Encoding` gives bit for bit the codes of transformers' reference for fp8 blocks, and those of
`vescale_fsdp.quantize.Fp8Blocks`, which names the exception. `Mxfp4Encoding` follows the OCP's microscaling formats; it
rounds scales up, so that no value is clipped, and values to nearest, ties to even.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from vescale_fsdp.layout.dtypes import DType

_E4M3_MAX = np.float32(448.0)  # the largest finite value
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the values of codes 0 to 7; bit 3 is the sign
_E2M1_MAX = np.float32(6.0)
# Midpoints between adjacent values of e2m1. A value at a midpoint gets the code whose last bit is 0 (ties to even).
_E2M1_BOUNDS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=np.float32)
_E8M0_BIAS = 127


@cache
def code_table(kind: str) -> np.ndarray:
    """Return the values of each code, float32 [codes, values per code], for a table of the module's docstring."""
    codes = np.arange(256)
    if kind == "int8":
        return codes.astype(np.uint8).view(np.int8).astype(np.float32)[:, None]
    if kind == "e8m0":
        # 255 means NaN, but loaders that compute the power get infinity, and so does this table.
        with np.errstate(over="ignore"):
            return np.ldexp(np.float32(1), codes - _E8M0_BIAS).astype(np.float32)[:, None]
    if kind == "e5m2":  # the upper half of a float16
        return (codes.astype(np.uint16) << np.uint16(8)).view(np.float16).astype(np.float32)[:, None]
    if kind == "int4":
        halves = np.stack([codes & 15, codes >> 4], axis=1)
        return np.where(halves < 8, halves, halves - 16).astype(np.float32)
    if kind in ("e2m1", "e2m1+0"):
        values = np.array([*_E2M1, *(-value for value in _E2M1)], dtype=np.float32)
        values[8] = 0.0 if kind == "e2m1+0" else -0.0
        return values[np.stack([codes & 15, codes >> 4], axis=1)]
    if kind == "e2m3":
        return _small_floats(codes[:64], exponent_bits=2, mantissa_bits=3, bias=1)[:, None]
    if kind.endswith("fnuz"):
        mantissa_bits = int(kind[3])
        values = _small_floats(codes, 7 - mantissa_bits, mantissa_bits, bias=2 ** (6 - mantissa_bits))
        values[128] = np.nan
        return values[:, None]
    assert kind == "e4m3", kind
    values = _small_floats(codes, exponent_bits=4, mantissa_bits=3, bias=7)
    values[[127, 255]] = [np.nan, -np.nan]  # e4m3fn has this NaN only, and no infinity
    return values[:, None]


def _small_floats(codes: np.ndarray, exponent_bits: int, mantissa_bits: int, bias: int) -> np.ndarray:
    """Return the values of floats of a few bits (sign, exponent, mantissa) that are all finite, as float32."""
    mantissa = codes & ((1 << mantissa_bits) - 1)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    # Normal numbers have an implicit leading 1; subnormals have exponent 1.
    whole = np.where(exponent, mantissa + (1 << mantissa_bits), mantissa).astype(np.float32)
    sizes = np.ldexp(whole, np.maximum(exponent, 1) - bias - mantissa_bits)
    is_negative = codes >> (exponent_bits + mantissa_bits)
    return np.copysign(sizes, np.where(is_negative, -1, 1)).astype(np.float32)


def nibble_table(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return the two values of each byte, float32 [256, 2], for a table of 16 values. The upper half comes first."""
    codes = np.arange(256)
    return np.asarray(values, dtype=np.float32)[np.stack([codes >> 4, codes & 15], axis=1)]


@dataclass(frozen=True)
class Fp8Encoding:
    """e4m3 codes and float32 scales for blocks of rows and columns: a value is its code times its scale."""

    rows: int = 128
    cols: int = 128
    values_per_byte = 1
    code_name = "float8_e4m3fn"
    scale_name = "float32"

    def scales(self, amax: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (factors that values are multiplied by, scales to store) for each block.

        Args:
            amax: largest magnitude in each block, float32.
        """
        is_finite = np.isfinite(amax)
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            # Reciprocal, then product, because torch divides a number by a tensor so: the roundings must be the same.
            factors = np.float32(1) / amax * _E4M3_MAX
        factors = np.where(is_finite & np.isfinite(factors), factors, np.float32(1))  # 1 for zeros
        return factors, np.where(is_finite, np.float32(1) / factors, np.float32(np.nan))

    def codes(self, scaled: np.ndarray) -> np.ndarray:
        """Return uint8 codes of scaled values (float32), rounded to nearest, ties to even."""
        bits = np.clip(scaled, -_E4M3_MAX, _E4M3_MAX).view(np.uint32)
        sign = ((bits >> np.uint32(24)) & np.uint32(0x80)).astype(np.uint8)
        bits = bits & np.uint32(0x7FFFFFFF)
        # Below 2^-6, e4m3 is subnormal. Adding 2^14 puts the code into the last bits of the sum, and float addition
        # rounds to nearest, ties to even.
        shift = np.float32(2**14)
        small = (bits.view(np.float32) + shift).view(np.uint32) - shift.view(np.uint32)
        odd = (bits >> np.uint32(20)) & np.uint32(1)
        # Above, 0x7FFFF + odd rounds the 20 bits that are dropped, ties to even. The exponent's bias changes from 127
        # in float32 to 7 in e4m3.
        large = ((bits + np.uint32(0x7FFFF) + odd) >> np.uint32(20)) - np.uint32((127 - 7) << 3)
        codes = np.where(bits < np.uint32((127 - 6) << 23), small, large).astype(np.uint8)
        return np.where(bits > np.uint32(0x7F800000), np.uint8(0x7F), codes) | sign  # NaN


@dataclass(frozen=True)
class Mxfp4Encoding:
    """e2m1 codes, two in a byte, and e8m0 scales for every 32 values of a row."""

    rows: int = 1
    cols: int = 32
    values_per_byte = 2
    code_name = "uint8"
    scale_name = "uint8"

    def scales(self, amax: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (factors that values are multiplied by, scales to store) for each block.

        A scale is the smallest power of two for which no scaled value exceeds 6, the largest value of e2m1.

        Args:
            amax: largest magnitude in each block, float32.
        """
        bits = (amax / _E2M1_MAX).astype(np.float32).view(np.uint32)
        # Adding 0x7FFFFF rounds the exponent up. 254 is the largest scale: 255 means NaN.
        biased = np.minimum((bits + np.uint32(0x7FFFFF)) >> np.uint32(23), np.uint32(254))
        biased = np.where(np.isfinite(amax), biased, np.uint32(255)).astype(np.uint8)
        with np.errstate(over="ignore"):
            factors = np.ldexp(np.float32(1), _E8M0_BIAS - biased.astype(np.int32)).astype(np.float32)
        return factors, biased

    def codes(self, scaled: np.ndarray) -> np.ndarray:
        """Return uint8 codes of scaled values (float32). A byte has two values that are adjacent in the last dim."""
        sizes = np.abs(scaled)
        index = np.searchsorted(_E2M1_BOUNDS, sizes, side="left").astype(np.uint8)
        # A value above the last of 7 midpoints has index 7. `minimum` only keeps this index valid: it is never a tie.
        is_tie = sizes == _E2M1_BOUNDS[np.minimum(index, 6)]
        index = np.minimum(index + (is_tie & (index & 1 == 1)), 7).astype(np.uint8)
        nibbles = index | (np.signbit(scaled).astype(np.uint8) << np.uint8(3))
        return nibbles[..., 0::2] | (nibbles[..., 1::2] << np.uint8(4))


_NUMPY = {"float16": np.float16, "float32": np.float32, "float64": np.float64}
_BF16_NAN = 0x7FC0  # the NaN of torch's casts to bfloat16
# The bits of positive infinity.
_INFINITIES: dict[str, np.unsignedinteger[Any]] = {
    "float16": np.uint16(0x7C00),
    "bfloat16": np.uint16(0x7F80),
    "float32": np.uint32(0x7F800000),
    "float64": np.uint64(0x7FF0000000000000),
}
_NARROWER_THAN = {  # types whose largest finite value is below that of the key, so that a cast may overflow
    "float64": ("float32", "bfloat16", "float16"),
    "float32": ("bfloat16", "float16"),
    "bfloat16": ("float16",),
}
_BLOCK_ITEMS = 1 << 15  # so small that the intermediate values of a block stay in a core's cache


def cast_array(raw: np.ndarray, source: DType, target: DType) -> np.ndarray:
    """Return raw items of one float type as raw items of another, rounded to nearest, ties to even."""
    if source == target:
        return raw
    out = np.empty(raw.shape, dtype=target.raw)
    cast_into(raw, source, out, target)
    return out


def cast_into(raw: np.ndarray, source: DType, out: np.ndarray, target: DType) -> int:
    """Cast as `cast_array` does, into ``out``, and return the number of finite items that became infinite."""
    overflows = 0
    # torch is faster, if it is loaded. For these two types its bits are the same; for float16 its NaNs differ.
    torch_casts = "torch" in sys.modules and {source.name, target.name} == {"bfloat16", "float32"}
    # torch.from_numpy warns about read-only arrays, so numpy casts them.
    cast = _by_torch if torch_casts and raw.flags.writeable else _by_numpy
    may_overflow = target.name in _NARROWER_THAN.get(source.name, ())
    # Values too large for the target become infinity, as in torch. numpy would warn.
    with np.errstate(over="ignore", invalid="ignore"):
        for items, into in _blocks(raw, out):
            cast(items, source, into, target)
            if may_overflow and _may_have_infinite(into, target):
                infinite = _is_infinite(into, target)
                overflows += int(np.count_nonzero(infinite & ~_is_infinite(items, source)))
    return overflows


def _may_have_infinite(raw: np.ndarray, dtype: DType) -> bool:
    """Return whether an item is an infinity or a NaN, in a third of the time of `_is_infinite`."""
    infinity = _INFINITIES[dtype.name]
    without_sign = infinity.dtype.type(np.iinfo(infinity.dtype).max >> 1)
    return bool(raw.size) and bool((raw & without_sign).max() >= infinity)


def _is_infinite(raw: np.ndarray, dtype: DType) -> np.ndarray:
    """Return a bool per item: whether it is an infinity of either sign."""
    infinity = _INFINITIES[dtype.name]
    # The shifts drop the sign bit.
    return (raw << infinity.dtype.type(1)) == infinity << infinity.dtype.type(1)


def _by_numpy(raw: np.ndarray, source: DType, out: np.ndarray, target: DType) -> None:
    """Cast raw items into ``out`` by numpy and integer arithmetic."""
    if source.name == "bfloat16" and target.name == "float32":
        np.left_shift(raw, np.uint32(16), out=out.view(np.uint32), dtype=np.uint32)
        return
    if source.name == "bfloat16":
        values = (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)  # the upper half of a float32
    else:
        values = raw.view(_NUMPY[source.name])
    if target.name == "bfloat16":
        out[...] = _to_bf16(values.astype(np.float32, copy=False))
    elif target.name == "float16":
        out[...] = _to_f16(values.astype(np.float32, copy=False))
    else:
        out.view(_NUMPY[target.name])[...] = values


def _by_torch(raw: np.ndarray, source: DType, out: np.ndarray, target: DType) -> None:
    """Cast raw items into ``out`` by torch, which must be loaded."""
    torch = sys.modules["torch"]
    values = torch.from_numpy(raw).view(getattr(torch, source.name))
    torch.from_numpy(out).view(getattr(torch, target.name)).copy_(values)
    if target.name == "bfloat16":
        is_nan = values.isnan()
        # The bits of torch's NaNs depend on an item's position in a vector register. Conversions must be reproducible.
        if is_nan.any():
            out[is_nan.numpy()] = _BF16_NAN


def _blocks(raw: np.ndarray, out: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield both arrays in small flat parts if they are contiguous, else as they are."""
    if not (raw.flags.c_contiguous and out.flags.c_contiguous):
        yield raw, out
        return
    items, into = raw.reshape(-1), out.reshape(-1)
    for start in range(0, items.size, _BLOCK_ITEMS):
        yield items[start : start + _BLOCK_ITEMS], into[start : start + _BLOCK_ITEMS]


def _to_bf16(values: np.ndarray) -> np.ndarray:
    """Return the upper half of each float32, rounded to nearest even. Every NaN becomes torch's."""
    bits = np.ascontiguousarray(values).view(np.uint32).reshape(values.shape)
    # Computes (bits + 0x7FFF + the last bit that is kept) >> 16: to nearest, ties to even. In place, to save memory.
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += bits
    rounded += np.uint32(0x7FFF)
    rounded >>= np.uint32(16)
    upper = rounded.astype(np.uint16)
    if values.size and np.isnan(values.max()):  # faster than a mask of all NaNs, which are rare
        upper[np.isnan(values)] = (
            _BF16_NAN  # rounding may turn the bits of a NaN into an infinity or a number
        )
    return upper


def _to_f16(values: np.ndarray) -> np.ndarray:
    """Return float16 bits, rounded as numpy does. numpy is slow for tiny values: each raises a processor flag."""
    bits = np.ascontiguousarray(values).view(np.uint32).reshape(values.shape)
    size = bits & np.uint32(0x7FFFFFFF)
    half = size >> np.uint32(13)
    half &= np.uint32(1)
    half += size
    # (15 - 127) << 23 changes the exponent's bias, and 0xFFF is just below half of the last place that is kept.
    half += np.uint32(0xC8000FFF)
    half >>= np.uint32(13)
    # Below 2^-14, float16 is subnormal: its values have the spacing of float32 values at 0.5, so adding 0.5 rounds.
    small = size < 0x38800000
    half[small] = (size[small].view(np.float32) + np.float32(0.5)).view(np.uint32) - np.uint32(0x3F000000)
    large = size >= 0x47800000  # 2^16 and more, infinity, NaN
    if large.any():
        # The mantissa of a NaN is at least 1, because with a mantissa of 0 it would be infinity.
        nans = (size > 0x7F800000) * np.maximum((size & np.uint32(0x7FFFFF)) >> np.uint32(13), 1)
        half[large] = (0x7C00 + nans)[large]
    half |= (bits >> np.uint32(16)) & np.uint32(0x8000)
    return half.astype(np.uint16)
