"""Cast float tensors to another dtype during a conversion. Only float16, bfloat16, float32 and float64 are cast.

A default dtype applies to all float tensors. Name patterns with their own dtype override it, for example for router
biases or state-space parameters that must stay float32. Integers, booleans, complex numbers and floats of 8 bits or
less are never cast. Scales of quantized weights are cast only by a pattern that matches their names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from vescale_fsdp.conversion.engine.stored_tensor import TensorInfo
from vescale_fsdp.conversion.engine.tensor_view import TensorView, WrapperView
from vescale_fsdp.errors import ConversionError, option
from vescale_fsdp.layout.dtypes import DType, dtype_from_torch
from vescale_fsdp.layout.geometry import Box

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class CastRules:
    """The dtype that each tensor is cast to.

    Args:
        default: dtype for all float tensors; None keeps the source's dtypes.
        patterns: name pattern (``*``, ``?``) -> dtype. The first matching pattern overrides the default.
    """

    default: DType | None = None
    patterns: Mapping[str, DType] = field(default_factory=dict)

    @classmethod
    def parse(cls, texts: Sequence[str]) -> CastRules:
        """Parse the texts of a ``dtype`` argument, such as ``bfloat16`` or ``*.gate.bias=float32``.

        Raises:
            ConversionError: for a dtype other than float16, bfloat16, float32 and float64, or if two options give one
                pattern different dtypes.
        """
        default: DType | None = None
        patterns: dict[str, DType] = {}
        for text in texts:
            pattern, _, name = text.rpartition("=")  # the last "=", because a pattern may contain one
            if text.startswith("="):
                raise ConversionError(
                    "A cast has an empty name pattern.",
                    expected="TYPE, or PATTERN=TYPE",
                    got=text,
                    todo=f"pass {option('dtype', 'bf16')}, or {option('dtype', '*.bias=float32')}",
                )
            if pattern:
                patterns[pattern] = float_type(name)
            else:
                default = float_type(name)
        require_one_rule_each("dtype", texts)
        return cls(default, patterns)

    def apply(self, views: Sequence[TensorView], kept: Collection[str] = ()) -> list[TensorView]:
        """Return the tensors, cast by the rules.

        Args:
            kept: names of tensors that the default does not apply to, such as scales.

        Raises:
            ConversionError: if a pattern matches no tensor, or a tensor that is not a float.
        """
        unused = set(self.patterns)
        cast_views: list[TensorView] = []
        for view in views:
            info = view.info
            pattern = next((p for p in self.patterns if fnmatchcase(info.name, p)), None)
            # Also patterns that an earlier pattern overrides here: they are not misspelled.
            unused -= {p for p in unused if fnmatchcase(info.name, p)}
            default = None if info.name in kept else self.default
            dtype = self.patterns[pattern] if pattern is not None else default
            if dtype is None or dtype == info.dtype or (pattern is None and info.dtype.kind != "float"):
                cast_views.append(view)
                continue
            if info.dtype.kind != "float":
                raise _bad(f"a float tensor for {pattern}", f"{info.name} of {info.dtype.name}")
            cast_views.append(view.as_dtype(dtype) or CastView(view, dtype))
        if unused:
            raise _bad("patterns that match a tensor", ", ".join(sorted(unused)))
        return cast_views

    def apply_wider(self, views: Sequence[TensorView]) -> list[TensorView]:
        """Return the tensors, cast where the rules choose a wider dtype: what is computed from them is rounded once.

        Unlike `apply`, patterns may match no tensor, because names may change later. 8-bit floats are not cast.
        """
        cast_views = []
        for view in views:
            info = view.info
            pattern = next((p for p in self.patterns if fnmatchcase(info.name, p)), None)
            dtype = self.default if pattern is None else self.patterns[pattern]
            is_wider = dtype is not None and dtype.itemsize > info.dtype.itemsize > 1
            if dtype is None or not is_wider or info.dtype.kind != "float":
                cast_views.append(view)
            else:
                cast_views.append(view.as_dtype(dtype) or CastView(view, dtype))
        return cast_views


def require_one_rule_each(name: str, texts: Sequence[str]) -> None:
    """Check that no two options, such as ``*.bias=bf16`` and ``*.bias=fp16``, give one pattern different values.

    Raises:
        ConversionError: if two options conflict; the message contains both.
    """
    given: dict[str, str] = {}
    for text in texts:
        pattern = text.rpartition("=")[0]
        if (other := given.setdefault(pattern, text)) != text:
            raise ConversionError(
                f"Two values of {option(name)} apply to the same tensors.",
                expected="at most one without a pattern, and one for each name pattern",
                got=f"{other} and {text}",
                todo="remove one of them, or change its pattern",
            )


def float_type(name: str) -> DType:
    """Return the dtype for a name such as ``bfloat16``, ``bf16`` or ``BF16``, as safetensors writes it.

    Raises:
        ConversionError: if the name is not that of float16, bfloat16, float32 or float64.
    """
    try:
        dtype = dtype_from_torch(_SHORT.get(name.lower(), name.lower()))
    except ConversionError:  # an unknown name: the error below lists the possible names
        dtype = None
    if dtype is None or dtype.kind != "float":
        raise ConversionError(
            "Weights cannot be cast to this type.",
            expected="float16, bfloat16, float32 or float64",
            got=name,
            todo=f"use one of these; fewer bits would need scales, which {option('quantize')} computes",
        )
    return dtype


_SHORT = {"bf16": "bfloat16"} | {f"{f}{bits}": f"float{bits}" for f in ("f", "fp") for bits in (16, 32, 64)}


def _bad(expected: str, got: str) -> ConversionError:
    """Return the error for a pattern that matches no tensor, or a tensor that cannot be cast."""
    return ConversionError(
        "A pattern of a cast cannot be applied.",
        expected=expected,
        got=got,
        todo="correct the pattern; list the names with: vescale-convert inspect SRC",
    )


@dataclass(frozen=True)
class CastView(WrapperView):
    """A float tensor cast to another float dtype.

    Args:
        dtype: the dtype to cast to.
        lost: filled by reads: box -> number of finite values in the box that became infinite.
    """

    dtype: DType
    lost: dict[Box, int] = field(default_factory=dict, compare=False, repr=False)

    @property
    def info(self) -> TensorInfo:
        inner = self.inner.info
        return TensorInfo(inner.name, inner.shape, self.dtype)

    def read_into(self, box: Box, out: np.ndarray) -> None:
        from vescale_fsdp.conversion.quantization.float_codes import cast_into

        if lost := cast_into(self.inner.read(box), self.inner.info.dtype, out, self.dtype):
            self.lost[box] = lost  # by box, so that a second read of a box is not counted again

    @property
    def overflows(self) -> int:
        return sum(self.lost.values()) + super().overflows

    def identity(self) -> str:
        return f"{self.inner.identity()} as {self.dtype.name}"
