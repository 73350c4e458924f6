"""Dequantize torchao: tensor subclasses that safetensors files store as tensors of a common prefix.

    metadata  "q.weight": {"_type": "Int8Tensor", "_data": {"block_size": [1, 64], "dtype": ...}, ...}
    tensors   q._weight_qdata, q._weight_scale, q._weight_zero_point

The metadata of the file names the class, and the class its formula. All but Int4Tensor round to the dtype of the
original weight:

    Int8Tensor, IntxUnpackedToInt8Tensor   (code - zero point) * scale
    Float8Tensor, MXTensor                 code * scale
    NVFP4Tensor                            code * (per_tensor_scale * scale)
    Int4Tensor                             code * scale + zero point, codes from -8 to 7, in the dtype of the scales
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from vescale_fsdp.conversion.engine.coded_tensors import ScaledView
from vescale_fsdp.conversion.engine.tensor_view import MappedView, TensorView
from vescale_fsdp.conversion.quantization.blocks import scaled_in_rows, times_whole
from vescale_fsdp.conversion.quantization.model import (
    Floats,
    QuantizedModel,
    as_float,
    decoded,
    mismatch,
    refusal,
    reshaped,
    table_of,
)
from vescale_fsdp.layout.dtypes import DType, dtype_from_torch
from vescale_fsdp.layout.index_maps import Permute

_CODES = "_qdata"


class _Described(NamedTuple):
    """One tensor subclass: the weight's name, its class, its attributes, and its tensors."""

    name: str
    kind: str
    facts: Mapping[str, Any]
    parts: Mapping[str, TensorView]

    @property
    def codes(self) -> TensorView:
        return self.parts["qdata"]

    def dtype(self, fact: str) -> DType:
        """Return the dtype that an attribute names."""
        return dtype_from_torch(str(self.facts[fact]["_data"]))


def described(model: QuantizedModel, name: str) -> Floats | None:
    """Dequantize codes that are named MODULE._PARAMETER_qdata.

    Raises:
        ConversionError: if the metadata names a class that cannot be dequantized here.
        CorruptCheckpointError: if the tensors do not match the metadata.
    """
    module, _, leaf = name.rpartition(".")
    if not leaf.startswith("_") or not leaf.endswith(_CODES):
        return None
    parameter = leaf.removeprefix("_").removesuffix(_CODES)
    weight = f"{module}.{parameter}" if module else parameter
    if weight not in model.described:
        return None
    try:
        entry = json.loads(model.described[weight])
        kind, facts = str(entry["_type"]), dict(entry["_data"])
        prefix = name.removesuffix("qdata")
        parts = {part: model.views[f"{prefix}{part}"] for part in entry["_tensor_data_names"]}
        each = _Described(weight, kind, facts, parts)
        if kind not in _KINDS:
            raise refusal(f"one of the classes {', '.join(_KINDS)}", kind, f"tensor {weight}")
        if "act_pre_scale" in parts:
            raise refusal("inputs that are not scaled", f"{kind} with act_pre_scale", f"tensor {weight}")
        view = _KINDS[kind](each)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise refusal(
            "metadata as torchao writes it", f"{type(error).__name__}: {error}", f"tensor {weight}"
        ) from error
    used = [part for label, part in parts.items() if label != "qdata"]
    return model.floats(weight, view, each.codes, *used)


def _affine(each: _Described) -> TensorView:
    """Return ``(code - zero point) * scale`` of int8 codes in blocks."""
    values, block = decoded(each.codes, "int8"), tuple(int(n) for n in each.facts["block_size"])
    shape = values.info.shape
    grid = tuple(size // part for size, part in zip(shape, block, strict=True))
    scales, zeros = each.parts["scale"], each.parts.get("zero_point")
    for part in filter(None, (scales, zeros)):
        if part.info.numel != math.prod(grid) or any(size % n for size, n in zip(shape, block, strict=True)):
            raise mismatch(each.codes, part, f"one item for each block of {block}")
    points = None if zeros is None else reshaped(_numbers(zeros), grid)
    dtype = each.dtype("dtype")
    return ScaledView(values, reshaped(as_float(scales), grid), block, dtype, zeros=points)


def _numbers(zeros: TensorView) -> TensorView:
    """Return zero points as float32.

    Raises:
        ConversionError: if they are integers of more than a byte.
    """
    if zeros.info.dtype.kind == "int" and zeros.info.dtype.name != "int8":
        raise refusal("zero points of dtype int8", zeros.info.dtype.name, f"tensor {zeros.info.name}")
    return as_float(zeros)


def _float8(each: _Described) -> TensorView:
    """Return ``code * scale``; scales have as many dims as the codes, and divide them evenly."""
    values, scales = decoded(each.codes, str(table_of(each.codes.info.dtype))), each.parts["scale"]
    shape, grid = values.info.shape, scales.info.shape
    if scales.info.numel == 1:
        grid = (1,) * len(shape)
    if len(grid) != len(shape) or any(n < 1 or size % n for size, n in zip(shape, grid, strict=False)):
        raise mismatch(each.codes, scales, "a scale for each block of equal size")
    block = tuple(size // n for size, n in zip(shape, grid, strict=True))
    return ScaledView(values, reshaped(as_float(scales), grid), block, each.dtype("dtype"))


def _by_row_group(each: _Described, scales: TensorView) -> TensorView:
    """Return ``code * scale`` of groups within rows, with scales in row-major order."""
    if each.facts.get("is_swizzled_scales"):
        raise refusal("scales in row-major order", f"{each.kind} with swizzled scales", f"tensor {each.name}")
    elem = each.codes.info.dtype.name
    is_fp4 = each.kind == "NVFP4Tensor" or elem in ("uint8", "float4_e2m1fn_x2")
    if not is_fp4 and elem not in ("float8_e4m3fn", "float8_e5m2"):
        raise refusal("elements of FP8 or FP4", f"{each.kind} of {elem}", f"tensor {each.name}")
    values = decoded(each.codes, "e2m1" if is_fp4 else str(table_of(each.codes.info.dtype)))
    size = int(each.facts["block_size"])
    *lead, cols = values.info.shape
    scales = reshaped(scales, (*lead, cols // size))
    return scaled_in_rows(values, scales, size, each.dtype("orig_dtype"))


def _mx(each: _Described) -> TensorView:
    """Return an MXTensor: scales are exponents of powers of two."""
    if "FP6" in str(each.facts.get("elem_dtype")).upper():
        raise refusal("elements of FP8 or FP4", f"{each.kind} of FP6", f"tensor {each.name}")
    return _by_row_group(each, as_float(each.parts["scale"]))


def _nv(each: _Described) -> TensorView:
    """Return an NVFP4Tensor: scales of e4m3, and one for the whole tensor."""
    scales, whole = as_float(each.parts["scale"]), each.parts.get("per_tensor_scale")
    return _by_row_group(each, scales if whole is None else times_whole(scales, whole))


def _int4(each: _Described) -> TensorView:
    """Return an Int4Tensor: two codes per byte, the lower first; scales and zero points are [.., groups, rows]."""
    values, scales, zeros = decoded(each.codes, "int4"), each.parts["scale"], each.parts["zero_point"]
    *lead, rows, cols = values.info.shape
    size = int(each.facts["block_size"][-1])
    turned = (*range(len(lead)), len(lead) + 1, len(lead))
    by_row = [MappedView(Permute(turned), (as_float(part),)) for part in (scales, zeros)]
    for part in by_row:
        if cols % size or part.info.shape != (*lead, rows, cols // size):
            raise mismatch(each.codes, part, f"items for {rows} rows in groups of {size}")
    return ScaledView(values, by_row[0], (*(1,) * (len(lead) + 1), size), scales.info.dtype, shifts=by_row[1])


_KINDS = {
    "Int8Tensor": _affine,
    "IntxUnpackedToInt8Tensor": _affine,
    "Float8Tensor": _float8,
    "MXTensor": _mx,
    "NVFP4Tensor": _nv,
    "Int4Tensor": _int4,
}
