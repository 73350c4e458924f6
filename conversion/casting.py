"""Changing the type of ordinary floats while they stream. Everything else keeps its type, always.

Router biases or state-space parameters may have to stay float32, so besides one type for all there are
patterns with a type of their own, and those win. Integers, booleans, complex and 8-bit or smaller floats
are never cast. Values are those of torch's ``.to(dtype)``; numpy does the work, so that no torch import is
needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import numpy as np

from vescale_fsdp.conversion.dtypes import DType, dtype_from_torch
from vescale_fsdp.conversion.tensors import TensorInfo
from vescale_fsdp.conversion.view import TensorView
from vescale_fsdp.errors import ConversionError, explain
from vescale_fsdp.geometry import Box

__all__ = ["CastRules", "CastView", "cast_array"]

_NUMPY = {"float16": np.float16, "float32": np.float32, "float64": np.float64}
_BF16_NAN = 0x7FC0


@dataclass(frozen=True)
class CastRules:
    """Which tensor gets which type.

    Args:
        default: for every ordinary float; None to keep the source's types.
        patterns: name pattern (``*``, ``?``) -> type; the first that matches wins over the default.
    """

    default: DType | None = None
    patterns: Mapping[str, DType] = field(default_factory=dict)

    @classmethod
    def parse(cls, texts: Sequence[str]) -> CastRules:
        """From texts such as ``bfloat16`` or ``*.gate.bias=float32``.

        Raises:
            ConversionError: for a type that is no ordinary float.
        """
        default: DType | None = None
        patterns: dict[str, DType] = {}
        for text in texts:
            pattern, _, name = text.rpartition("=")
            dtype = dtype_from_torch(_SHORT.get(name, name))
            if dtype.kind != "float":
                raise ConversionError(
                    explain(
                        "weights cannot be cast to this type",
                        expected="float16, bfloat16, float32 or float64",
                        got=name,
                        todo="quantise with a tool that chooses scales; casting alone would lose the values",
                    )
                )
            if pattern:
                patterns[pattern] = dtype
            else:
                default = dtype
        return cls(default, patterns)

    def apply(self, views: Sequence[TensorView]) -> list[TensorView]:
        """The same tensors, cast where a rule says so.

        Raises:
            ConversionError: for a pattern that matches no tensor, or one that must not be cast.
        """
        unused = set(self.patterns)
        found: list[TensorView] = []
        for view in views:
            info = view.info
            pattern = next((p for p in self.patterns if fnmatchcase(info.name, p)), None)
            unused -= {p for p in unused if fnmatchcase(info.name, p)}
            dtype = self.patterns[pattern] if pattern is not None else self.default
            if dtype is None or dtype == info.dtype or (pattern is None and info.dtype.kind != "float"):
                found.append(view)
                continue
            if info.dtype.kind != "float":
                raise ConversionError(
                    _bad(f"a float tensor for {pattern}", f"{info.name} of {info.dtype.name}")
                )
            found.append(CastView(view, dtype))
        if unused:
            raise ConversionError(_bad("patterns that match a tensor", ", ".join(sorted(unused))))
        return found


_SHORT = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "fp32": "float32", "f32": "float32"}


def _bad(expected: str, got: str) -> str:
    return explain(
        "a --dtype pattern cannot be applied",
        expected=expected,
        got=got,
        todo="correct the pattern; names are listed by: vescale-convert inspect SRC",
    )


@dataclass(frozen=True)
class CastView(TensorView):
    """A float tensor in another float type."""

    inner: TensorView
    dtype: DType

    @property
    def info(self) -> TensorInfo:
        found = self.inner.info
        return TensorInfo(found.name, found.shape, self.dtype)

    def read_into(self, box: Box, out: np.ndarray) -> None:
        source = self.inner.info.dtype
        raw = np.empty(box.sizes, dtype=source.raw)
        self.inner.read_into(box, raw)
        out[...] = cast_array(raw, source, self.dtype)

    def identity(self) -> str:
        return f"{self.inner.identity()} as {self.dtype.name}"


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
