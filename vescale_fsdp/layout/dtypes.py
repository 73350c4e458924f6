"""One table of all element types that plans, checkpoints and conversions support. Does not import torch.

The tables of other libraries each lack some types: torch's safetensors map lacks the sub-byte and unsigned types, and
safetensors' torch map lacks two types that its core reads. With these tables, a conversion would depend on the library
that reads the file. Here each type is one row: its safetensors code (None if safetensors lacks the type), its torch
name (None if torch lacks the type) and its width. The names in other formats are computed from the row.

Sub-byte types are *packed*: in memory, in DCP and in torch their last dim counts bytes, while a safetensors header
counts elements (``float4_e2m1fn_x2`` of shape (4, 8) is 32 bytes, and (4, 16) in the header). This package uses the
byte-counting shape everywhere; `DType.to_header_shape` and `DType.from_header_shape` convert it for headers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vescale_fsdp.errors import ConversionError, LayoutError, option

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class DType:
    """One element type.

    Args:
        code: its name in a safetensors header; None if safetensors lacks the type.
        torch_name: its name in torch without the ``torch.`` prefix; None if torch lacks the type.
        bits: bits per element, where an element is what a safetensors header counts.
        kind: ``"float"``, ``"quantized"`` (a float of 8 bits or fewer), ``"int"``, ``"bool"`` or ``"complex"``. Only
            ``"float"`` may be cast.
        is_numpy: whether numpy, and so zarr, has the type under torch's name.
    """

    code: str | None
    torch_name: str | None
    bits: int
    kind: str
    is_numpy: bool = False

    def __hash__(self) -> int:
        # Cheaper than hashing all fields: conversions hash a DType per tensor.
        return hash(self.torch_name or self.code)

    @property
    def name(self) -> str:
        """The name in torch; for a type that torch lacks, the safetensors code."""
        return self.torch_name or str(self.code)

    @cached_property
    def itemsize(self) -> int:
        """Bytes per item of the shapes that this package uses; 1 for packed types, whose last dim counts bytes."""
        return max(1, self.bits // 8)

    @property
    def required_torch_name(self) -> str:
        """The name in torch.

        Raises:
            ConversionError: if torch has no such type.
        """
        if self.torch_name is None:
            raise ConversionError(
                "PyTorch has no such element type.",
                expected="a type of torch",
                got=self.name,
                todo=f"exclude these tensors with {option('exclude')}",
            )
        return self.torch_name

    @property
    def is_packed(self) -> bool:
        """Whether elements are smaller than a byte, so that a byte contains several elements or parts of elements."""
        return self.bits < 8

    @property
    def zarr_name(self) -> str:
        """The zarr type that stores this type's bytes: the type itself, or an unsigned integer of the same width."""
        return self.name if self.is_numpy else f"uint{8 * self.itemsize}"

    @property
    def carrier(self) -> tuple[str, int]:
        """The safetensors code that rank files use for this type, and the number of stored items per element.

        Rank files only use codes that old safetensors readers support, so that every reader can open the files; the
        manifest contains the type's own name. The carrier of a type must never change: it is a part of the format.
        """
        if self.code is not None and self.code not in _NEWER_CODES:
            return self.code, 1
        if self.kind == "complex" and self.name not in _NEWER_PAIRS:
            return f"F{self.bits // 2}", 2  # as pairs of floats
        return f"U{8 * self.itemsize}", 1

    @property
    def raw(self) -> np.dtype[Any]:
        """The numpy type for copying this type's bytes: unsigned integers, so that no value is interpreted."""
        import numpy as np

        # V is numpy's untyped bytes: complex128 would need an integer of 16 bytes, which numpy lacks.
        return np.dtype(f"u{self.itemsize}") if self.itemsize <= 8 else np.dtype(f"V{self.itemsize}")

    def to_header_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the safetensors header's shape for a tensor of this shape, whose last dim counts bytes if packed.

        Raises:
            ConversionError: if the bytes of a row are not whole elements.
        """
        if not self.is_packed:
            return tuple(shape)
        if not shape or shape[-1] * 8 % self.bits:
            raise _odd_shape(self, shape, "rows whose bytes are whole elements")
        return (*shape[:-1], shape[-1] * 8 // self.bits)

    def from_header_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return this package's shape, whose last dim counts bytes if packed, for a shape in a safetensors header.

        Raises:
            ConversionError: if the elements of a row are not whole bytes.
        """
        if not self.is_packed:
            return tuple(shape)
        if not shape or shape[-1] * self.bits % 8:
            raise _odd_shape(self, shape, "rows whose elements are whole bytes")
        return (*shape[:-1], shape[-1] * self.bits // 8)

    def nbytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of a tensor of this shape, whose last dim counts bytes if the type is packed."""
        return math.prod(shape) * self.itemsize


def _odd_shape(dtype: DType, shape: Sequence[int], expected: str) -> ConversionError:
    return ConversionError(
        f"This shape is not valid for a {dtype.code} tensor.",
        expected=expected,
        got=f"shape {tuple(shape)} at {dtype.bits} bits per element",
        todo="repack the tensor so that its last dim fills whole bytes",
    )


# The rows are in the order of the safetensors enum, narrow types first. The reference writer sorts tensors in the
# reverse order, so that each one is naturally aligned after a header that is padded to 8 bytes.
DTYPES: tuple[DType, ...] = (
    DType("BOOL", "bool", 8, "bool", is_numpy=True),
    DType("F4", "float4_e2m1fn_x2", 4, "quantized"),
    DType("F6_E2M3", None, 6, "quantized"),
    DType("F6_E3M2", None, 6, "quantized"),
    DType("U8", "uint8", 8, "int", is_numpy=True),
    DType("I8", "int8", 8, "int", is_numpy=True),
    DType("F8_E5M2", "float8_e5m2", 8, "quantized"),
    DType("F8_E4M3", "float8_e4m3fn", 8, "quantized"),
    DType("F8_E8M0", "float8_e8m0fnu", 8, "quantized"),
    DType("F8_E4M3FNUZ", "float8_e4m3fnuz", 8, "quantized"),
    DType("F8_E5M2FNUZ", "float8_e5m2fnuz", 8, "quantized"),
    DType("I16", "int16", 16, "int", is_numpy=True),
    DType("U16", "uint16", 16, "int", is_numpy=True),
    DType("F16", "float16", 16, "float", is_numpy=True),
    DType("BF16", "bfloat16", 16, "float"),
    DType("I32", "int32", 32, "int", is_numpy=True),
    DType("U32", "uint32", 32, "int", is_numpy=True),
    DType("F32", "float32", 32, "float", is_numpy=True),
    DType("C64", "complex64", 64, "complex", is_numpy=True),
    DType("F64", "float64", 64, "float", is_numpy=True),
    DType("I64", "int64", 64, "int", is_numpy=True),
    DType("U64", "uint64", 64, "int", is_numpy=True),
    DType(None, "complex32", 32, "complex"),
    DType(None, "complex128", 128, "complex", is_numpy=True),
    DType(None, "bcomplex32", 32, "complex"),  # pairs of bfloat16, since torch 2.15
    # Types that torch defines for extensions. They take one byte or two per element, whatever the number in the name.
    *(DType(None, f"{sign}int{bits}", 8, "int") for sign in ("", "u") for bits in range(1, 8)),
    *(DType(None, name, 8, "int") for name in ("bits8", "bits1x8", "bits2x4", "bits4x2")),
    DType(None, "bits16", 16, "int"),
)
# Codes that safetensors added late, and complex types that torch added late. Old readers do not support them, so
# `DType.carrier` avoids them.
_NEWER_CODES = {"F4", "F6_E2M3", "F6_E3M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}
_NEWER_PAIRS = {"bcomplex32"}
_BY_CODE = {dtype.code: dtype for dtype in DTYPES if dtype.code}
_BY_NAME = {dtype.name: dtype for dtype in DTYPES}
# torch has several names for some types. Pickles may contain any of these names.
_ALIASES = "float=float32 double=float64 half=float16 int=int32 long=int64 short=int16"
_ALIASES += " chalf=complex32 cfloat=complex64 cdouble=complex128"
_BY_NAME |= {alias: _BY_NAME[name] for alias, name in (pair.split("=") for pair in _ALIASES.split())}


def known_dtype(name: str) -> DType | None:
    """Return the type of this name, with or without the ``torch.`` prefix, or None if it is not in the table.

    >>> dtype = known_dtype("torch.bfloat16")
    >>> dtype.code, dtype.itemsize, dtype.zarr_name
    ('BF16', 2, 'uint16')
    """
    return _BY_NAME.get(name.removeprefix("torch."))


def itemsize_of(name: str) -> int:
    """Return the bytes per element of the dtype of this name, such as ``"bfloat16"`` or ``"float8_e4m3fn"``.

    Raises:
        LayoutError: for a name that is not in the table.
    """
    dtype = known_dtype(name)
    if dtype is None:
        raise LayoutError(
            "This dtype is not known.",
            expected="the name of a torch dtype, such as 'bfloat16'",
            got=name,
        )
    return dtype.itemsize


def dtype_from_code(code: str) -> DType:
    """Return the type of a safetensors code.

    Raises:
        ConversionError: if the safetensors format has no such code.
    """
    if code not in _BY_CODE:
        raise ConversionError(
            "The safetensors format has no such element type.",
            expected=f"one of {', '.join(sorted(_BY_CODE))}",
            got=code,
            todo="check that the file is a safetensors file of a known version",
        )
    return _BY_CODE[code]


# Numpy's codes, such as f4: the first letter of the kind of number, then the bytes per element.
_OF_NUMPY = {f"{dtype.name[0]}{dtype.itemsize}": dtype for dtype in DTYPES if dtype.is_numpy}


def dtype_from_numpy(code: str) -> DType | None:
    """Return the type of a numpy code such as ``f4``, ``u2`` or ``b1``, or None if the type is not numeric."""
    return _OF_NUMPY.get(code)


def dtype_from_torch(name: str) -> DType:
    """Return the type of this name, with or without the ``torch.`` prefix.

    Raises:
        ConversionError: for a name that is not in the table.
    """
    try:
        return _BY_NAME[name.removeprefix("torch.")]
    except KeyError as error:
        raise ConversionError(
            "This element type cannot be converted.",
            expected=f"one of {', '.join(sorted(_BY_NAME))}",
            got=name,
            todo="convert the tensor to one of these types before saving it",
        ) from error
