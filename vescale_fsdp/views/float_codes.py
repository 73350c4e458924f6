"""Raw bits of floats: casts between float types, and the codes of quantized weights. Does not import torch by itself.

Casts (`cast_array`, `cast_into`) round bit for bit as torch's ``.to(dtype)``. The converter starts without torch, which
takes a second and 200 MiB to import. If torch is already loaded, as next to live shards, torch casts, because it is
several times as fast. bfloat16, which numpy lacks, is the upper half of a float32, computed by integer arithmetic.

Codes of quantized weights, by table of `code_table` and `nibble_table`:

    table        bytes                          value
    e4m3, e5m2   8-bit floats                   itself
    int8         -128 .. 127                    itself
    e8m0         exponents of scales            2^(byte - 127)
    e2m1         two 4-bit floats, low first    0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives
    nibbles(t)   two indices, high first        t[index], as bitsandbytes packs nf4 and fp4

Encoding (`Fp8Encoding`, `Mxfp4Encoding`) is bit for bit that of transformers' reference for fp8 blocks, and of the
OCP's microscaling formats for mxfp4 (scales rounded up, so that no value is clipped; values to nearest, ties to even).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from vescale_fsdp.layout.dtypes import DType

_E4M3_MAX = np.float32(448.0)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_MAX = np.float32(6.0)
# Midpoints between adjacent values; a value at a midpoint gets the code whose last bit is 0.
_E2M1_BOUNDS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=np.float32)
_E8M0_BIAS = 127


@cache
def code_table(kind: str) -> np.ndarray:
    """The values of each byte, float32 [256, values per byte], for e4m3, e5m2, int8, e8m0 or e2m1."""
    codes = np.arange(256)
    if kind == "int8":
        return codes.astype(np.uint8).view(np.int8).astype(np.float32)[:, None]
    if kind == "e8m0":
        with np.errstate(over="ignore"):  # 255 is NaN, but loaders that compute the power get infinity
            return np.ldexp(np.float32(1), codes - _E8M0_BIAS).astype(np.float32)[:, None]
    if kind == "e5m2":  # the upper half of a float16
        return (codes.astype(np.uint16) << np.uint16(8)).view(np.float16).astype(np.float32)[:, None]
    if kind == "e2m1":
        values = np.array([*_E2M1, *(-value for value in _E2M1)], dtype=np.float32)
        return values[np.stack([codes & 15, codes >> 4], axis=1)]
    assert kind == "e4m3", kind
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    # 10: the exponent's bias of 7, and 3 bits of mantissa. maximum: subnormals have the exponent of 1.
    sizes = np.ldexp(
        np.where(exponent, mantissa + 8, mantissa).astype(np.float32), np.maximum(exponent, 1) - 10
    )
    sizes[codes & 127 == 127] = np.nan  # e4m3fn has this NaN only, and no infinity
    return np.copysign(sizes, np.where(codes < 128, 1, -1)).astype(np.float32)[:, None]


def nibble_table(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """The two values of each byte, float32 [256, 2], for a table of 16 values; the byte's upper half comes first."""
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
        """(factors to multiply values by, scales to store) for the largest magnitudes of blocks (float32)."""
        is_plain = amax > 0  # False for blocks of zeros and of NaN
        # Two roundings, because torch divides a number by a tensor as the number times the reciprocal.
        inverse = np.float32(1) / np.where(is_plain, amax, np.float32(1))
        factors = np.where(is_plain, inverse * _E4M3_MAX, np.float32(1))
        return factors, np.float32(1) / factors

    def codes(self, scaled: np.ndarray) -> np.ndarray:
        """uint8 codes of scaled values (float32), to nearest, ties to even."""
        bits = np.clip(scaled, -_E4M3_MAX, _E4M3_MAX).view(np.uint32)
        sign = ((bits >> np.uint32(24)) & np.uint32(0x80)).astype(np.uint8)
        bits = bits & np.uint32(0x7FFFFFFF)
        # Below 2^-6 the sum with 2^14 has the code in its last bits, rounded to nearest even by float addition.
        shift = np.float32(2**14)
        small = (bits.view(np.float32) + shift).view(np.uint32) - shift.view(np.uint32)
        odd = (bits >> np.uint32(20)) & np.uint32(1)
        # The exponent's bias is 127 in float32, and 7 in e4m3.
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
        """As `Fp8Encoding.scales`: the smallest power of two for which no value exceeds 6."""
        bits = (amax / _E2M1_MAX).astype(np.float32).view(np.uint32)
        # Adding 0x7FFFFF rounds the exponent up. 254 is the largest scale: 255 means NaN.
        biased = np.minimum((bits + np.uint32(0x7FFFFF)) >> np.uint32(23), np.uint32(254))
        biased = np.where(np.isfinite(amax), biased, np.uint32(255)).astype(np.uint8)
        with np.errstate(over="ignore"):
            factors = np.ldexp(np.float32(1), _E8M0_BIAS - biased.astype(np.int32)).astype(np.float32)
        return factors, biased

    def codes(self, scaled: np.ndarray) -> np.ndarray:
        """Bytes of two values each, adjacent in the last dim."""
        sizes = np.abs(scaled)
        index = np.searchsorted(_E2M1_BOUNDS, sizes, side="left").astype(np.uint8)
        # There are 7 midpoints. Index 7 is past the last one, so it is compared with midpoint 6.
        is_tie = sizes == _E2M1_BOUNDS[np.minimum(index, 6)]
        index = np.minimum(index + (is_tie & (index & 1 == 1)), 7).astype(np.uint8)
        nibbles = index | (np.signbit(scaled).astype(np.uint8) << np.uint8(3))
        return nibbles[..., 0::2] | (nibbles[..., 1::2] << np.uint8(4))


_NUMPY = {"float16": np.float16, "float32": np.float32, "float64": np.float64}
_BF16_NAN = 0x7FC0
_INFINITIES: dict[str, np.unsignedinteger[Any]] = {
    "float16": np.uint16(0x7C00),
    "bfloat16": np.uint16(0x7F80),
    "float32": np.uint32(0x7F800000),
    "float64": np.uint64(0x7FF0000000000000),
}
_NARROWER_THAN = {  # types that lack some finite values of the key
    "float64": ("float32", "bfloat16", "float16"),
    "float32": ("bfloat16", "float16"),
    "bfloat16": ("float16",),
}
_BLOCK_ITEMS = 1 << 15  # the intermediate values of a block stay in a core's cache


def cast_array(raw: np.ndarray, source: DType, target: DType) -> np.ndarray:
    """Raw items of one float type as raw items of another, rounded to nearest, ties to even."""
    if source == target:
        return raw
    out = np.empty(raw.shape, dtype=target.raw)
    cast_into(raw, source, out, target)
    return out


def cast_into(raw: np.ndarray, source: DType, out: np.ndarray, target: DType) -> int:
    """`cast_array` into ``out`` of the same shape; returns the number of finite items that became infinite."""
    overflows = 0
    # torch, if it is loaded, is faster, and has exactly the same bits for these two types; for float16 its NaNs differ.
    torch_casts = "torch" in sys.modules and {source.name, target.name} == {"bfloat16", "float32"}
    # torch.from_numpy warns about read-only arrays, so numpy casts them.
    cast = _by_torch if torch_casts and raw.flags.writeable else _by_numpy
    may_overflow = target.name in _NARROWER_THAN.get(source.name, ())
    # Values too large for the target become infinity, as in torch: numpy must not warn.
    with np.errstate(over="ignore", invalid="ignore"):
        for items, into in _blocks(raw, out):
            cast(items, source, into, target)
            if may_overflow and (infinite := _is_infinite(into, target)).any():
                overflows += int(np.count_nonzero(infinite & ~_is_infinite(items, source)))
    return overflows


def _is_infinite(raw: np.ndarray, dtype: DType) -> np.ndarray:
    infinity = _INFINITIES[dtype.name]
    return (raw << infinity.dtype.type(1)) == infinity << infinity.dtype.type(1)  # the shift drops the sign


def _by_numpy(raw: np.ndarray, source: DType, out: np.ndarray, target: DType) -> None:
    if source.name == "bfloat16":
        values = (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        values = raw.view(_NUMPY[source.name])
    if target.name == "bfloat16":
        out[...] = _to_bf16(values.astype(np.float32, copy=False))
    elif target.name == "float16" and values.dtype == np.float32:
        out[...] = _to_f16(values)
    else:
        out.view(_NUMPY[target.name])[...] = values


def _by_torch(raw: np.ndarray, source: DType, out: np.ndarray, target: DType) -> None:
    torch = sys.modules["torch"]
    values = torch.from_numpy(raw).view(getattr(torch, source.name))
    torch.from_numpy(out).view(getattr(torch, target.name)).copy_(values)
    if target.name == "bfloat16":
        is_nan = values.isnan()
        if is_nan.any():  # torch's NaN bits depend on the position in its vectors
            out[is_nan.numpy()] = _BF16_NAN


def _blocks(raw: np.ndarray, out: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Both arrays in small parts, if they are contiguous."""
    if not (raw.flags.c_contiguous and out.flags.c_contiguous):
        yield raw, out
        return
    items, into = raw.reshape(-1), out.reshape(-1)
    for start in range(0, items.size, _BLOCK_ITEMS):
        yield items[start : start + _BLOCK_ITEMS], into[start : start + _BLOCK_ITEMS]


def _to_bf16(values: np.ndarray) -> np.ndarray:
    """The upper half of each float32, rounded to nearest even; every NaN becomes torch's."""
    bits = np.ascontiguousarray(values).view(np.uint32).reshape(values.shape)
    # bits + 0x7FFF + the last bit that is kept: to nearest, ties to even.
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += bits
    rounded += np.uint32(0x7FFF)
    rounded >>= np.uint32(16)
    upper = rounded.astype(np.uint16)
    upper[np.isnan(values)] = _BF16_NAN
    return upper


def _to_f16(values: np.ndarray) -> np.ndarray:
    """float16 bits, rounded as numpy does. Numpy itself is slow for tiny values: each raises a processor flag."""
    bits = np.ascontiguousarray(values).view(np.uint32).reshape(values.shape)
    size = bits & np.uint32(0x7FFFFFFF)
    half = size >> np.uint32(13)
    half &= np.uint32(1)
    half += size
    half += np.uint32(0xC8000FFF)  # (15 - 127) << 23, the change of bias, plus almost half of the last place
    half >>= np.uint32(13)
    # Below 2^-14 the spacing is constant: that of a float32 next to 0.5, so adding 0.5 rounds.
    small = size < 0x38800000
    half[small] = (size[small].view(np.float32) + np.float32(0.5)).view(np.uint32) - np.uint32(0x3F000000)
    large = size >= 0x47800000  # 2^16 and more, infinity, NaN
    if large.any():
        # At least 1, because a mantissa of 0 would be infinity.
        nans = (size > 0x7F800000) * np.maximum((size & np.uint32(0x7FFFFF)) >> np.uint32(13), 1)
        half[large] = (0x7C00 + nans)[large]
    half |= (bits >> np.uint32(16)) & np.uint32(0x8000)
    return half.astype(np.uint16)
