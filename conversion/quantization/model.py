"""`QuantizedModel`: the tensors and settings that weights are dequantized from, and the steps that schemes share.

A scheme is a function of a model and the name of one of its tensors. If the tensor is the codes of a weight that the
scheme describes, it returns the weight as `Floats`, otherwise None. Schemes only plan: values are computed when a view
is read.

Libraries compute in the dtype of a weight's scales, or in the dtype of the original weight, and round to it. A view
rounds to the same dtype, and is then cast to the requested dtype, so that its bits are those of the library's weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from vescale_fsdp.conversion.engine.casting import CastView
from vescale_fsdp.conversion.engine.coded_tensors import DecodedView
from vescale_fsdp.conversion.engine.tensor_view import MappedView, RenamedView, TensorView, read_range
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError, option
from vescale_fsdp.layout.dtypes import DType, dtype_from_torch
from vescale_fsdp.layout.index_maps import Reshape

if TYPE_CHECKING:
    import numpy as np

F32 = dtype_from_torch("float32")
BF16 = dtype_from_torch("bfloat16")
# Names in torch of dtypes whose values a table lists -> the table.
_TABLES = {
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
    "float8_e4m3fnuz": "e4m3fnuz",
    "float8_e5m2fnuz": "e5m2fnuz",
    "float8_e8m0fnu": "e8m0",
    "int8": "int8",
}


class Floats(NamedTuple):
    """A dequantized weight: its name, its values, and the names of its codes and scales, the codes first."""

    name: str
    view: TensorView
    used: tuple[str, ...]


@dataclass(frozen=True)
class QuantizedModel:
    """A model whose weights are to be dequantized.

    Args:
        views: the model's tensors.
        settings: the quantization config in config.json; empty if there is none.
        described: ``__metadata__`` of the model's safetensors files, in which torchao describes tensors.
        dtype: the requested dtype of the floats.
    """

    views: Mapping[str, TensorView]
    settings: Mapping[str, Any]
    described: Mapping[str, str]
    dtype: DType

    @cached_property
    def method(self) -> str:
        """The library that quantized the model, as config.json names it; empty if unknown."""
        return str(self.settings.get("quant_method") or "").lower()

    def first_of(self, *names: str) -> TensorView | None:
        """Return the first of these tensors that the model has."""
        return next((self.views[name] for name in names if name in self.views), None)

    def floats(self, name: str, view: TensorView, *used: TensorView | None) -> Floats:
        """Return a dequantized weight in the requested dtype.

        Args:
            name: the weight's name.
            view: its values.
            used: its codes, then its scales and other tensors that only describe it.
        """
        cast = view if view.info.dtype == self.dtype else CastView(view, self.dtype)
        return Floats(
            name, RenamedView(cast, name), tuple(part.info.name for part in used if part is not None)
        )


Scheme = Callable[[QuantizedModel, str], "Floats | None"]


def decoded(codes: TensorView, kind: str) -> TensorView:
    """Return the values of codes of one byte, by the table `code_table` (kind)."""
    from vescale_fsdp.conversion.quantization.float_codes import (
        code_table,  # imports numpy, which most conversions do not need
    )

    return DecodedView(codes, code_table(kind), kind)


def shifted_codes(codes: TensorView, offset: int) -> TensorView:
    """Return uint8 codes minus an offset, as float32."""
    import numpy as np

    table = np.arange(256, dtype=np.float32)[:, None] - np.float32(offset)
    return DecodedView(codes, table, f"uint8 - {offset}")


def table_of(dtype: DType) -> str | None:
    """Return the table of a dtype of one byte; None if there is none."""
    return _TABLES.get(dtype.name)


def as_float(view: TensorView) -> TensorView:
    """Return scales or zero points as float32. Scales of dtype uint8 are exponents of powers of two (e8m0)."""
    dtype = view.info.dtype
    if table := table_of(dtype) or ("e8m0" if dtype.name == "uint8" else None):
        return decoded(view, table)
    return view if dtype == F32 else CastView(view, F32)


def reshaped(view: TensorView, shape: tuple[int, ...]) -> TensorView:
    """Return a view in another shape with as many items."""
    return view if view.info.shape == shape else MappedView(Reshape(shape), (view,))


def scales_dtype(scales: TensorView) -> DType:
    """Return the dtype in which libraries compute with these scales: their own; bfloat16 for scales of one byte."""
    return scales.info.dtype if scales.info.dtype.kind == "float" else BF16


def small_array(view: TensorView, most: int) -> np.ndarray:
    """Read all bytes of a small tensor.

    Raises:
        ValueError: if the tensor has more than ``most`` bytes, which a damaged or hostile file may claim.
    """
    if view.info.nbytes > most:
        raise ValueError(f"{view.info.name} has {view.info.nbytes} bytes")
    return read_range(view, 0, view.info.numel)


def mismatch(codes: TensorView, scales: TensorView, expected: str) -> CorruptCheckpointError:
    """Return the error for codes and scales whose shapes do not match."""
    return CorruptCheckpointError(
        "Codes and scales of a weight do not fit each other.",
        expected=expected,
        got=f"{scales.info.name} of shape {scales.info.shape}",
        where=f"tensor {codes.info.name} of shape {codes.info.shape}",
        todo=f"pass the config.json of this model with {option('config')}, or copy the checkpoint again",
    )


def refusal(expected: str, got: object, where: str) -> ConversionError:
    """Return the error for weights that are quantized in a known way which cannot be dequantized here."""
    return ConversionError(
        "These weights are quantized in a way that cannot be dequantized here.",
        expected=expected,
        got=got,
        where=where,
        todo=f"dequantize with the library that made them, or leave out {option('dequantize')} to copy them unchanged",
    )
