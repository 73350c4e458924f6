"""Every element type a checkpoint may hold: one table, with bits per element, and no torch import.

The tables of the libraries around us each miss some types (torch's safetensors map lacks the sub-byte and
the unsigned kinds, safetensors' torch map lacks two that its core reads), so conversions would depend on who
reads the file. Here each type is one row: its safetensors code (None where that format has no such type),
its torch name (None where torch has none) and its width.

Sub-byte types are *packed*: in memory, in DCP and in torch their last dim counts bytes
(``float4_e2m1fn_x2`` of shape (4, 8) is 32 bytes), while a safetensors header counts elements ((4, 16)).
This package uses the byte-counting shape everywhere; `to_header_shape` and `from_header_shape` translate at
the file's edge.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vescale_fsdp.errors import ConversionError, explain

if TYPE_CHECKING:
    import numpy as np

__all__ = ["DTYPES", "DType", "dtype_from_code", "dtype_from_torch"]


@dataclass(frozen=True)
class DType:
    """One element type.

    Args:
        code: its name in a safetensors header, or None.
        torch_name: its name in torch without the ``torch.`` prefix, or None.
        bits: bits per element as a safetensors header counts elements.
        kind: ``"float"`` (may be cast), ``"quantized"`` (a float of 8 bits or fewer), ``"int"``, ``"bool"``
            or ``"complex"`` (never cast).
    """

    code: str | None
    torch_name: str | None
    bits: int
    kind: str

    @property
    def name(self) -> str:
        """The name people know it by: torch's, else safetensors'."""
        return self.torch_name or str(self.code)

    @cached_property
    def itemsize(self) -> int:
        """Bytes per item of the shapes this package uses (1 for packed types)."""
        return max(1, self.bits // 8)

    @property
    def is_packed(self) -> bool:
        """Whether one byte holds parts of several elements."""
        return self.bits < 8

    @property
    def raw(self) -> np.dtype[Any]:
        """The numpy type its bytes travel as; values are never interpreted while copying."""
        import numpy as np

        return np.dtype(f"u{self.itemsize}") if self.itemsize <= 8 else np.dtype(f"V{self.itemsize}")

    def to_header_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape a safetensors header records for a tensor of this (byte-counting) shape.

        Raises:
            ConversionError: if the bytes of a row do not hold whole elements.
        """
        if not self.is_packed:
            return tuple(shape)
        if not shape or shape[-1] * 8 % self.bits:
            raise ConversionError(_odd_shape(self, shape, "bytes per row that hold whole elements"))
        return (*shape[:-1], shape[-1] * 8 // self.bits)

    def from_header_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The inverse of `to_header_shape`.

        Raises:
            ConversionError: if a row of elements does not fill whole bytes.
        """
        if not self.is_packed:
            return tuple(shape)
        if not shape or shape[-1] * self.bits % 8:
            raise ConversionError(_odd_shape(self, shape, "rows of elements that fill whole bytes"))
        return (*shape[:-1], shape[-1] * self.bits // 8)

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of a tensor of this (byte-counting) shape."""
        return math.prod(shape) * self.itemsize


def _odd_shape(dtype: DType, shape: Sequence[int], expected: str) -> str:
    return explain(
        f"a {dtype.code} tensor cannot have this shape",
        expected=expected,
        got=f"shape {tuple(shape)} at {dtype.bits} bits per element",
        todo="repack the tensor so that its last dim fills whole bytes",
    )


# The order is that of the safetensors enum: the reference writer sorts data by it, last first, so that with a
# header padded to 8 bytes every tensor is naturally aligned.
DTYPES: tuple[DType, ...] = (
    DType("BOOL", "bool", 8, "bool"),
    DType("F4", "float4_e2m1fn_x2", 4, "quantized"),
    DType("F6_E2M3", None, 6, "quantized"),
    DType("F6_E3M2", None, 6, "quantized"),
    DType("U8", "uint8", 8, "int"),
    DType("I8", "int8", 8, "int"),
    DType("F8_E5M2", "float8_e5m2", 8, "quantized"),
    DType("F8_E4M3", "float8_e4m3fn", 8, "quantized"),
    DType("F8_E8M0", "float8_e8m0fnu", 8, "quantized"),
    DType("F8_E4M3FNUZ", "float8_e4m3fnuz", 8, "quantized"),
    DType("F8_E5M2FNUZ", "float8_e5m2fnuz", 8, "quantized"),
    DType("I16", "int16", 16, "int"),
    DType("U16", "uint16", 16, "int"),
    DType("F16", "float16", 16, "float"),
    DType("BF16", "bfloat16", 16, "float"),
    DType("I32", "int32", 32, "int"),
    DType("U32", "uint32", 32, "int"),
    DType("F32", "float32", 32, "float"),
    DType("C64", "complex64", 64, "complex"),
    DType("F64", "float64", 64, "float"),
    DType("I64", "int64", 64, "int"),
    DType("U64", "uint64", 64, "int"),
    DType(None, "complex128", 128, "complex"),
)
_BY_CODE = {dtype.code: dtype for dtype in DTYPES if dtype.code}
_BY_TORCH = {dtype.torch_name: dtype for dtype in DTYPES if dtype.torch_name}
# torch spells some types in more than one way; pickles may use any of them.
_BY_TORCH |= {
    alias: _BY_TORCH[name]
    for alias, name in {
        "float": "float32",
        "double": "float64",
        "half": "float16",
        "int": "int32",
        "long": "int64",
        "short": "int16",
        "cfloat": "complex64",
        "cdouble": "complex128",
    }.items()
}


def dtype_from_code(code: str) -> DType:
    """The type a safetensors header names.

    Raises:
        ConversionError: for a code that is not in the format.
    """
    if code not in _BY_CODE:
        raise ConversionError(
            explain(
                "unknown safetensors dtype",
                expected=f"one of {', '.join(sorted(_BY_CODE))}",
                got=code,
                todo="check that the file is a safetensors file of a known version",
            )
        )
    return _BY_CODE[code]


def dtype_from_torch(name: str) -> DType:
    """The type torch calls ``name`` (with or without the ``torch.`` prefix).

    Raises:
        ConversionError: for a name that is not in the table.
    """
    short = name.removeprefix("torch.")
    if short not in _BY_TORCH:
        raise ConversionError(
            explain(
                "this element type cannot be converted",
                expected=f"one of {', '.join(sorted(_BY_TORCH))}",
                got=name,
                todo="convert the tensor to one of these types before saving it",
            )
        )
    return _BY_TORCH[short]
