"""Dequantize codes whose scales have the weight's name: FP8 and int8 of any library; and gpt-oss's MXFP4.

    q.weight  fp8   [n, k]        + q.weight_scale_inv | q.weight_scale  per block, row or tensor (any library)
    q.weight  int8  [n, k]        + q.weight_scale (+ q.weight_zero_point)           compressed-tensors, torch
    q.weight  fp4   [n, k / 2]    + q.weight_scale_inv per 32 values                 transformers' fine-grained FP8
    w_blocks  u8    [e, n, k / 32, 16]  + w_scales (e8m0)                            gpt-oss, MXFP4

Formulas, in float32 and then rounded to the requested dtype, except where stated:

    transformers         code * scale
    compressed-tensors   (code - zero point) * scale, rounded to the dtype of the scales
    ModelOpt, FP8        code * scale, with the scale rounded to the requested dtype first
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vescale_fsdp.conversion.engine.casting import CastView
from vescale_fsdp.conversion.engine.coded_tensors import ScaledView
from vescale_fsdp.conversion.engine.tensor_view import MappedView, TensorView
from vescale_fsdp.conversion.quantization.model import (
    Floats,
    QuantizedModel,
    as_float,
    decoded,
    mismatch,
    reshaped,
    scales_dtype,
    table_of,
)
from vescale_fsdp.errors import ConversionError, option
from vescale_fsdp.layout.dtypes import DType
from vescale_fsdp.layout.index_maps import Permute

_BLOCK = (128, 128)  # the default of transformers' FineGrainedFP8Config, if config.json names no size
MX_BLOCK = 32  # values per scale in all MX formats, by OCP's specification


def blocks(model: QuantizedModel, name: str) -> Floats | None:
    """Dequantize codes whose scales are named NAME_scale_inv (DeepSeek) or NAME_scale (most libraries)."""
    codes = model.views[name]
    scales = model.first_of(f"{name}_scale_inv", f"{name}_scale")
    kind = table_of(codes.info.dtype)
    is_packed = codes.info.dtype.name == "float4_e2m1fn_x2" or (model.method == "fp8" and kind == "int8")
    if scales is None or (kind in (None, "e8m0") and not is_packed):
        return None
    zeros = model.first_of(f"{name}_zero_point")
    if zeros is not None and table_of(zeros.info.dtype) is None and zeros.info.dtype.kind != "float":
        return None
    values = decoded(codes, "e2m1" if is_packed else str(kind))
    stored = scales
    if model.method == "modelopt" and kind != "int8" and scales.info.dtype.kind == "float":
        scales = CastView(scales, model.dtype)
    rounded = scales_dtype(scales) if model.method == "compressed-tensors" else model.dtype
    grid, block = _grid_of(model, values, scales)
    points = None if zeros is None else as_float(zeros_in_grid(values, zeros, grid))
    view = ScaledView(values, reshaped(as_float(scales), grid), block, rounded, zeros=points)
    return model.floats(name, view, codes, stored, zeros)


def zeros_in_grid(codes: TensorView, zeros: TensorView, grid: tuple[int, ...]) -> TensorView:
    """Return zero points in the shape of the scales.

    Raises:
        CorruptCheckpointError: if there are more or fewer zero points than scales.
    """
    if zeros.info.numel != math.prod(grid):
        raise mismatch(codes, zeros, f"{math.prod(grid)} zero points, one for each scale")
    return reshaped(zeros, grid)


def scaled_in_rows(values: TensorView, scales: TensorView, size: int, dtype: DType) -> TensorView:
    """Return ``value * scale``, with a scale for each ``size`` values of a row.

    Args:
        values: float32 [.., cols].
        scales: float32 [.., cols / size].
        dtype: dtype of the result.

    Raises:
        CorruptCheckpointError: if there are more or fewer scales.
    """
    *lead, cols = values.info.shape
    if cols % size or scales.info.shape != (*lead, cols // size):
        raise mismatch(values, scales, f"scales of shape {(*lead, cols // size)}, one for each {size} values")
    return ScaledView(values, scales, (*(1,) * len(lead), size), dtype)


def times_whole(scales: TensorView, second: TensorView, *, divides: bool = False) -> TensorView:
    """Return scales multiplied (or divided) by the one value of a tensor.

    Raises:
        CorruptCheckpointError: if the tensor has several values.
    """
    shape = scales.info.shape
    if second.info.numel != 1:
        raise mismatch(scales, second, "one value")
    return ScaledView(scales, reshaped(as_float(second), (1,) * len(shape)), shape, divides=divides)


def mxfp4_experts(model: QuantizedModel, name: str) -> Floats | None:
    """Dequantize gpt-oss's stacked experts: blocks [experts, n, k / 32, 16] of two values per byte."""
    scales = model.first_of(f"{name.removesuffix('blocks')}scales")
    view = model.views[name]
    if not name.endswith("_blocks") or view.info.dtype.name != "uint8" or scales is None:
        return None
    shape = view.info.shape
    if len(shape) != 4 or shape[-1] * 2 != MX_BLOCK or scales.info.shape != shape[:-1]:
        raise mismatch(view, scales, f"blocks [experts, n, k / 32, 16] and a scale for each, not {shape}")
    values = decoded(reshaped(view, (*shape[:2], shape[2] * shape[3])), "e2m1")
    scaled = ScaledView(values, decoded(scales, "e8m0"), (1, 1, MX_BLOCK), model.dtype)
    # gpt-oss stores the blocks of the transposed weight.
    transposed = MappedView(Permute((0, 2, 1)), (scaled,))
    return model.floats(name.removesuffix("_blocks"), transposed, view, scales)


def _named_blocks(settings: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    """Return the block sizes that config.json names; transformers' default if it names none for fp8."""
    sizes = [settings.get("weight_block_size")]
    # Compressed-tensors has a block or group size per group of layers.
    weights = [group.get("weights") or {} for group in (settings.get("config_groups") or {}).values()]
    sizes += [each.get("block_structure") for each in weights]
    sizes += [(1, each["group_size"]) for each in weights if (each.get("group_size") or 0) > 0]
    if settings.get("quant_method") == "fp8" and "weight_block_size" not in settings:
        sizes.append(_BLOCK)
    return tuple((int(size[0]), int(size[1])) for size in sizes if size)


def _grid_of(
    model: QuantizedModel, values: TensorView, scales: TensorView
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of the scales with as many dims as the values, and the size of a block in each dim.

    Raises:
        ConversionError: if several block sizes match, and config.json names no quantization.
        CorruptCheckpointError: if no block size matches.
    """
    shape, grid = values.info.shape, scales.info.shape
    if scales.info.numel == 1:
        grid = (1,) * len(shape)
    elif len(grid) == 2 * len(shape) and set(grid[1::2]) == {1}:  # ModelOpt's [rows, 1, cols, 1]
        grid = grid[::2]
    elif len(grid) == 1 or (len(grid) < len(shape) and grid == shape[: len(grid)] and shape[-1] != shape[-2]):
        grid = (
            *grid,
            *(1,) * (len(shape) - len(grid)),
        )  # one scale per row or expert, or per row of each expert
    named = _named_blocks(model.settings)
    blocks = (_block_sizes(shape, grid, each) for each in (*named, None))
    if block := next(filter(None, blocks), None):
        return grid, block
    if not _some_block_fits(shape, grid):
        raise mismatch(values, scales, "a scale for each block, each row, or all")
    # Libraries divide evenly if the named size does not apply, as for the experts of a model whose other layers it
    # describes. Without a config the size would be a guess.
    if model.method and all(size % count == 0 for size, count in zip(shape, grid, strict=True)):
        return grid, tuple(size // count for size, count in zip(shape, grid, strict=True))
    if named:
        raise mismatch(values, scales, f"a scale for each block of {named[0]}, each row, or all")
    raise ConversionError(
        "The block size of a quantized weight is not known: several fit its scales.",
        expected="a config.json whose quantization_config names weight_block_size",
        got=f"scales of shape {grid} for a weight of shape {shape}, and no block size",
        where=f"tensor {values.info.name}",
        todo=f"pass the folder with this model's config.json: {option('config')}",
    )


def _block_sizes(
    shape: tuple[int, ...], grid: tuple[int, ...], named: tuple[int, int] | None
) -> tuple[int, ...] | None:
    """Return the size of a block in each dim, or None if no size or several sizes match the number of scales.

    Args:
        shape: shape of the values.
        grid: shape of the scales, with as many dims.
        named: block size of the last two dims in config.json, which is preferred if it matches; None if not named.
    """
    if len(shape) != len(grid):
        return None
    # The named size applies to the last two dims; before them, each expert has its own scales.
    sizes = (*(1,) * (len(shape) - 2), *named)[-len(shape) :] if named and shape else (None,) * len(shape)
    block = []
    for size, count, usual in zip(shape, grid, sizes, strict=True):
        least, most = _fitting_sizes(size, count)
        if usual is not None and count == -(-size // usual):  # rounded up: the last block may be smaller
            block.append(usual)
        elif least == most:
            block.append(least)
        else:
            return None
    return tuple(block)


def _some_block_fits(shape: tuple[int, ...], grid: tuple[int, ...]) -> bool:
    """Return whether any block size gives this number of scales in each dim."""
    return len(shape) == len(grid) and all(
        least <= most for least, most in (_fitting_sizes(*pair) for pair in zip(shape, grid, strict=True))
    )


def _fitting_sizes(size: int, count: int) -> tuple[int, int]:
    """Return the least and the greatest block size that split ``size`` items into ``count`` blocks; least > greatest
    if no size does.
    """
    if count < 1:
        return 1, 0  # no size
    if count == 1:
        return max(size, 1), max(size, 1)  # a larger block gives the same values
    return -(-size // count), -(-size // (count - 1)) - 1
