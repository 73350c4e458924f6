"""Dequantize the packed formats of compressed-tensors (llm-compressor); `blocks` dequantizes the others.

    pack-quantized         q.weight_packed i32 [n, k * bits / 32], q.weight_scale [n, groups], q.weight_shape,
                           q.weight_zero_point i32 [n * bits / 32, groups], q.weight_g_idx [k]
    nvfp4-pack-quantized   q.weight_packed u8 [n, k / 2], q.weight_scale e4m3 per 16 values, q.weight_global_scale
    mxfp4-pack-quantized   q.weight_packed u8 [n, k / 2], q.weight_scale e8m0 per 32 values
    mxfp6-pack-quantized   q.weight_packed u8 [n, k * 3 / 4], q.weight_scale e8m0 per 32 values

Integers are ``(code - zero point) * scale``, rounded to the dtype of the scales. Their number of bits and their group
size follow from the shapes, because a config.json may name several, for layers that only the library can tell apart.
NVFP4 is ``code * (scale / global scale)`` in float32, rounded to bfloat16; MX formats are bfloat16 as well.
"""

from __future__ import annotations

from vescale_fsdp.conversion.engine.coded_tensors import DecodedView, IndexedView, ScaledView, UnpackedView
from vescale_fsdp.conversion.engine.tensor_view import TensorView
from vescale_fsdp.conversion.quantization.bit_packing import BitPacking
from vescale_fsdp.conversion.quantization.blocks import scaled_in_rows, times_whole, zeros_in_grid
from vescale_fsdp.conversion.quantization.float_codes import code_table
from vescale_fsdp.conversion.quantization.model import (
    BF16,
    Floats,
    QuantizedModel,
    as_float,
    decoded,
    mismatch,
    refusal,
    reshaped,
    scales_dtype,
    shifted_codes,
    small_array,
)
from vescale_fsdp.errors import CorruptCheckpointError

_PACKED = "_packed"
_NOT_READ = ("sparse-bitmask", "sparse-24-bitmask", "marlin-24")


def refuse_unreadable(model: QuantizedModel) -> None:
    """Check the format that config.json names.

    Raises:
        ConversionError: if it cannot be dequantized here.
    """
    if model.method != "compressed-tensors":
        return
    groups = model.settings.get("config_groups") or {}
    formats = [model.settings.get("format"), *(group.get("format") for group in groups.values())]
    if unreadable := [str(each) for each in formats if each in _NOT_READ]:
        raise refusal("a format of compressed-tensors without sparsity", unreadable[0], "config.json")
    sparsity = (model.settings.get("sparsity_config") or {}).get("format")
    if sparsity not in (None, "dense"):
        raise refusal("dense weights", f"sparsity_config with format {sparsity}", "config.json")
    if model.settings.get("transform_config"):
        raise refusal("weights without transforms of activations", "a transform_config", "config.json")


def packed(model: QuantizedModel, name: str) -> Floats | None:
    """Dequantize packed codes: integers in words of 32 bits, or FP4 and FP6 in bytes."""
    base = name.removesuffix(_PACKED)
    codes, scales = model.views[name], model.first_of(f"{base}_scale")
    if base == name or scales is None or len(codes.info.shape) < 2 or not scales.info.shape:
        return None
    if codes.info.dtype.name == "uint8":
        return _floats(model, base, codes, scales)
    return _integers(model, base, codes, scales) if codes.info.dtype.name == "int32" else None


def _floats(model: QuantizedModel, base: str, codes: TensorView, scales: TensorView) -> Floats:
    """Dequantize FP4 or FP6 with a scale per 16 or 32 values of a row."""
    whole = model.first_of(f"{base}_global_scale")
    is_nv = scales.info.dtype.name == "float8_e4m3fn"
    size = 16 if is_nv else 32
    if codes.info.shape[-1] * 4 == scales.info.shape[-1] * size * 3:  # 3 bytes for 4 values
        count = codes.info.shape[-1] * 4 // 3
        unpacked = UnpackedView(codes, BitPacking(6, 8), len(codes.info.shape) - 1, count)
        values: TensorView = DecodedView(unpacked, code_table("e2m3"), "e2m3")
    else:
        values = decoded(codes, "e2m1")
    by_group = as_float(scales)
    if whole is not None:
        by_group = times_whole(by_group, whole, divides=True)
    view = scaled_in_rows(values, by_group, size, BF16)
    return model.floats(base, view, codes, scales, whole)


def _integers(model: QuantizedModel, base: str, codes: TensorView, scales: TensorView) -> Floats:
    """Dequantize integers of 1 to 8 bits."""
    stored_shape, zeros, index = (
        model.first_of(f"{base}_{part}") for part in ("shape", "zero_point", "g_idx")
    )
    shape = _shape(codes, stored_shape)
    packing = _packing(codes, shape[-1])
    grid = scales.info.shape if len(scales.info.shape) == len(shape) else (*scales.info.shape, 1)
    if len(grid) != len(shape) or grid[-1] < 1 or shape[-1] % grid[-1]:
        raise mismatch(codes, scales, f"scales for groups of equal size of rows of {shape[-1]} values")
    if scales.info.numel == 1:
        grid = (1,) * len(shape)
    elif grid[:-1] != shape[:-1]:
        raise mismatch(codes, scales, f"scales for {shape[:-1]} rows")
    offset = 1 << (packing.bits - 1)
    values = shifted_codes(UnpackedView(codes, packing, len(shape) - 1, shape[-1]), offset)
    by_group = reshaped(as_float(scales), grid)
    points = None if zeros is None else _zero_points(codes, zeros, packing.bits, grid)
    block = (*(1 if n > 1 else m for n, m in zip(grid[:-1], shape[:-1], strict=True)), shape[-1] // grid[-1])
    if index is not None:  # columns of a group are not adjacent
        last = len(shape) - 1
        if index.info.shape != shape[-1:] or index.info.dtype.kind != "int":
            raise mismatch(codes, index, f"a group for each of {shape[-1]} columns")
        by_group = IndexedView(by_group, index, last)
        points = None if points is None else IndexedView(points, index, last)
        block = (*block[:-1], 1)
    view = ScaledView(values, by_group, block, scales_dtype(scales), zeros=points)
    return model.floats(base, view, codes, scales, zeros, index, stored_shape)


def _shape(codes: TensorView, stored: TensorView | None) -> tuple[int, ...]:
    """Return the weight's shape, which is stored next to the codes, since words may have unused bits.

    Raises:
        CorruptCheckpointError: if there is no shape, or it is not that of the codes.
    """
    problem = "no tensor with the shape"
    if stored is not None:
        try:
            numbers = small_array(stored, 64).view(stored.info.dtype.name).tolist()
            shape = tuple(int(each) for each in numbers)
            if shape[:-1] == codes.info.shape[:-1] and shape[-1] >= 1:
                return shape
            problem = f"the shape {shape}"
        except (ValueError, TypeError) as error:  # not numbers, or too many
            problem = f"{type(error).__name__}: {error}"
    raise CorruptCheckpointError(
        "The shape of a packed weight cannot be read.",
        expected=f"a tensor with the shape of {codes.info.shape[0]} rows",
        got=problem,
        where=f"tensor {codes.info.name}",
    )


def _packing(codes: TensorView, cols: int) -> BitPacking:
    """Return how rows of ``cols`` codes are packed.

    Raises:
        ConversionError: if no number of bits, or more than one, gives this number of words.
    """
    words = codes.info.shape[-1]
    fitting = [packing for packing in map(BitPacking, range(1, 9)) if packing.num_words(cols) == words]
    if len(fitting) != 1:
        bits = " or ".join(str(packing.bits) for packing in fitting) or "none"
        where = f"tensor {codes.info.name}"
        raise refusal(
            "codes of 1 to 8 bits, packed densely", f"{words} words for {cols} codes: {bits} bits", where
        )
    return fitting[0]


def _zero_points(codes: TensorView, zeros: TensorView, bits: int, grid: tuple[int, ...]) -> TensorView:
    """Return zero points as float32 in the shape of the scales. Their rows are packed like the codes' columns.

    Raises:
        CorruptCheckpointError: if there are more or fewer zero points than scales.
    """
    if zeros.info.dtype.name == "int8":
        return decoded(zeros_in_grid(codes, zeros, grid), "int8")
    packing, dim = BitPacking(bits), len(grid) - 2
    if zeros.info.dtype.name != "int32" or zeros.info.shape != (
        *grid[:dim],
        packing.num_words(grid[dim]),
        grid[-1],
    ):
        raise mismatch(codes, zeros, f"zero points of {bits} bits for scales of shape {grid}")
    return shifted_codes(UnpackedView(zeros, packing, dim, grid[dim]), 1 << (bits - 1))
