"""Changing the type of ordinary floats while they stream. Everything else keeps its type, always.

Router biases or state-space parameters may have to stay float32, so besides one type for all there are
patterns with a type of their own, and those win. Integers, booleans, complex and 8-bit or smaller floats
are never cast; the scales of quantised weights only by a pattern that names them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from vescale_fsdp.checkpoint.moves.stored_tensor import TensorInfo
from vescale_fsdp.checkpoint.moves.tensor_view import TensorView, WrapperView
from vescale_fsdp.errors import ConversionError
from vescale_fsdp.layout.dtypes import DType, dtype_from_torch
from vescale_fsdp.layout.geometry import Box

if TYPE_CHECKING:
    import numpy as np


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
            if text.startswith("="):
                raise ConversionError(
                    "A cast has no pattern of names.",
                    expected="TYPE, or PATTERN=TYPE",
                    got=text,
                    todo="write --dtype bf16, or --dtype '*.bias=float32'",
                )
            if pattern:
                patterns[pattern] = float_type(name)
            else:
                default = float_type(name)
        require_one_rule_each("--dtype", texts)
        return cls(default, patterns)

    def apply(self, views: Sequence[TensorView], kept: Collection[str] = ()) -> list[TensorView]:
        """The same tensors, cast where a rule says so; those ``kept`` only where a pattern does.

        Raises:
            ConversionError: for a pattern that matches no tensor, or one that must not be cast.
        """
        unused = set(self.patterns)
        found: list[TensorView] = []
        for view in views:
            info = view.info
            pattern = next((p for p in self.patterns if fnmatchcase(info.name, p)), None)
            unused -= {p for p in unused if fnmatchcase(info.name, p)}
            default = None if info.name in kept else self.default
            dtype = self.patterns[pattern] if pattern is not None else default
            if dtype is None or dtype == info.dtype or (pattern is None and info.dtype.kind != "float"):
                found.append(view)
                continue
            if info.dtype.kind != "float":
                raise _bad(f"a float tensor for {pattern}", f"{info.name} of {info.dtype.name}")
            found.append(CastView(view, dtype))
        if unused:
            raise _bad("patterns that match a tensor", ", ".join(sorted(unused)))
        return found


def require_one_rule_each(option: str, texts: Sequence[str]) -> None:
    """Refuse texts such as ``bf16`` and ``*.bias=fp16`` of which two differ in what the same names get: none is the
    last word.

    Raises:
        ConversionError: naming them.
    """
    given: dict[str, str] = {}
    for text in texts:
        pattern = text.rpartition("=")[0]
        if (other := given.setdefault(pattern, text)) != text:
            raise ConversionError(
                f"Two {option} are given for the same tensors.",
                expected="one for all, and one for each pattern of names",
                got=f"{other} and {text}",
                todo="leave one out, or give it a pattern of its own",
            )


def float_type(name: str) -> DType:
    """The ordinary float type of a name such as ``bfloat16`` or ``bf16``.

    Raises:
        ConversionError: if it is none.
    """
    try:
        dtype = dtype_from_torch(_SHORT.get(name, name))
    except ConversionError:
        dtype = None
    if dtype is None or dtype.kind != "float":
        raise ConversionError(
            "Weights cannot be cast to this type.",
            expected="float16, bfloat16, float32 or float64",
            got=name,
            todo="name one of these; quantise with a tool that chooses scales: casting alone loses values",
        )
    return dtype


_SHORT = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "fp32": "float32", "f32": "float32"}


def _bad(expected: str, got: str) -> ConversionError:
    return ConversionError(
        "A --dtype pattern cannot be applied.",
        expected=expected,
        got=got,
        todo="correct the pattern; names are listed by: vescale-convert inspect SRC",
    )


@dataclass(frozen=True)
class CastView(WrapperView):
    """A float tensor in another float type.

    Args:
        lost: gets, by box, how many finite values of a box that was read became infinite.
    """

    dtype: DType
    lost: dict[Box, int] = field(default_factory=dict, compare=False, repr=False)

    @property
    def info(self) -> TensorInfo:
        found = self.inner.info
        return TensorInfo(found.name, found.shape, self.dtype)

    def read_into(self, box: Box, out: np.ndarray) -> None:
        import numpy as np

        from vescale_fsdp.views.float_codes import cast_into

        source = self.inner.info.dtype
        raw = np.empty(box.sizes, dtype=source.raw)
        self.inner.read_into(box, raw)
        if lost := cast_into(raw, source, out, self.dtype):
            self.lost[box] = lost

    @property
    def overflows(self) -> int:
        return sum(self.lost.values()) + self.inner.overflows

    def identity(self) -> str:
        return f"{self.inner.identity()} as {self.dtype.name}"
