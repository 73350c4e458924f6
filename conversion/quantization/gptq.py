"""Dequantize GPTQ and AWQ: integers of 2, 3, 4 or 8 bits in words of 32 bits, with a scale and zero point per group.

    GPTQ   q.qweight i32 [k * bits / 32, n]   q.qzeros i32 [groups, n * bits / 32]   q.scales [groups, n]   q.g_idx [k]
    AWQ    q.qweight i32 [k, n / 8]           q.qzeros i32 [groups, n / 8]           q.scales [groups, n]

Weights are stored transposed: a weight is ``((code - zero point) * scale)`` as [k, n], rounded to the dtype of the
scales, and then transposed. GPTQ's first version (``checkpoint_format: gptq``) stores zero points minus one; the second
(``gptq_v2``) stores them as they are. With ``desc_act``, ``g_idx`` names the group of each row. AWQ has 4 bits, and an
order of its own within a word.
"""

from __future__ import annotations

from vescale_fsdp.conversion.engine.coded_tensors import IndexedView, ScaledView, UnpackedView
from vescale_fsdp.conversion.engine.tensor_view import MappedView, TensorView
from vescale_fsdp.conversion.quantization.bit_packing import BitPacking
from vescale_fsdp.conversion.quantization.model import (
    Floats,
    QuantizedModel,
    as_float,
    mismatch,
    refusal,
    scales_dtype,
    shifted_codes,
)
from vescale_fsdp.layout.index_maps import Permute

_AWQ = BitPacking(4, order=(0, 2, 4, 6, 1, 3, 5, 7))
_GPTQ_BITS = (2, 3, 4, 8)
# Names of GPTQ's two versions in config.json; auto-round names the library whose format it writes.
_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0, "auto_round:auto_gptq": 1, "auto_gptq": 1}
_AWQ_VERSIONS = ("gemm", "auto_round:auto_awq", "auto_awq")
_METHODS = ("gptq", "awq", "auto-round", "intel/auto-round", "auto_round")


def transposed_groups(model: QuantizedModel, name: str) -> Floats | None:
    """Dequantize codes that are named ``qweight``.

    Raises:
        ConversionError: if config.json does not say how, or says another way than these.
    """
    module, _, leaf = name.rpartition(".")
    parts = {
        part: model.first_of(f"{module}.{part}" if module else part) for part in ("qzeros", "scales", "g_idx")
    }
    codes, zeros, scales, index = model.views[name], parts["qzeros"], parts["scales"], parts["g_idx"]
    if leaf != "qweight" or zeros is None or scales is None or codes.info.dtype.name != "int32":
        return None
    if len(codes.info.shape) != 2 or len(scales.info.shape) != 2 or zeros.info.dtype.name != "int32":
        raise mismatch(codes, scales, "matrices of words and scales")
    version = _version(model, name)
    groups, cols = scales.info.shape
    if version in _AWQ_VERSIONS:
        values, points, index = *_awq(codes, zeros, scales), None
    else:
        bits = _bits(model, codes, zeros, cols, index)
        rows = codes.info.shape[0] * 32 // bits if index is None else index.info.shape[0]
        values = shifted_codes(UnpackedView(codes, BitPacking(bits), 0, rows), 0)
        # Added after unpacking, so that 15 becomes 16, as in AutoGPTQ.
        points = shifted_codes(UnpackedView(zeros, BitPacking(bits), 1, cols), -_ZERO_OFFSETS[version])
    rows = values.info.shape[0]
    if points.info.shape != scales.info.shape or groups < 1 or (index is None and rows % groups):
        raise mismatch(
            codes, scales, f"a scale and zero point for each of {cols} columns, in groups of {rows} rows"
        )
    floats, block = as_float(scales), (max(rows // groups, 1), 1)
    if index is not None:
        floats, points, block = IndexedView(floats, index, 0), IndexedView(points, index, 0), (1, 1)
    view = MappedView(
        Permute((1, 0)), (ScaledView(values, floats, block, scales_dtype(scales), zeros=points),)
    )
    weight = f"{module}.weight" if module else "weight"
    return model.floats(weight, view, codes, zeros, scales, parts["g_idx"])


def _version(model: QuantizedModel, name: str) -> str:
    """Return the format's name in config.json.

    Raises:
        ConversionError: if it is none of these, or is not named.
    """
    if model.method not in _METHODS:
        raise refusal(
            "a config.json whose quantization_config names gptq or awq",
            f"quant_method {model.method}" if model.method else "no quantization_config",
            f"tensor {name}",
        )
    settings = model.settings
    if model.method == "awq":
        version = str(settings.get("version") or settings.get("format") or "gemm").lower()
    elif model.method == "gptq":
        version = str(settings.get("checkpoint_format") or settings.get("format") or "gptq").lower()
    else:
        version = str(settings.get("packing_format") or "auto_round:auto_gptq").lower()
    if version not in _ZERO_OFFSETS and version not in _AWQ_VERSIONS:
        known = ", ".join((*_ZERO_OFFSETS, *_AWQ_VERSIONS))
        raise refusal(
            f"one of the formats {known}", f"{model.method} in the format {version}", f"tensor {name}"
        )
    return version


def _awq(codes: TensorView, zeros: TensorView, scales: TensorView) -> tuple[TensorView, TensorView]:
    """Return AWQ's codes and zero points as float32."""
    cols = scales.info.shape[1]
    for words in (codes, zeros):
        if cols % 8 or words.info.shape[1] != cols // 8:
            raise mismatch(codes, words, f"{cols // 8} words for {cols} columns")
    values, points = (shifted_codes(UnpackedView(words, _AWQ, 1, cols), 0) for words in (codes, zeros))
    return values, points


def _bits(
    model: QuantizedModel, codes: TensorView, zeros: TensorView, cols: int, index: TensorView | None
) -> int:
    """Return the bits per code: those of config.json if they fit the shapes, since some layers may have others.

    Raises:
        CorruptCheckpointError: if no number of bits fits.
    """

    def fits(bits: int) -> bool:
        packing = BitPacking(bits)
        if zeros.info.shape[1] != packing.num_words(cols):
            return False
        words = codes.info.shape[0]
        return (
            words % packing.words == 0 if index is None else words == packing.num_words(index.info.shape[0])
        )

    named = model.settings.get("bits")
    candidates = ([named] if named in _GPTQ_BITS else []) + list(_GPTQ_BITS)
    found = next(filter(fits, candidates), None)
    if found is None or codes.info.shape[1] != cols:
        raise mismatch(
            codes, zeros, f"words with codes of {', '.join(map(str, _GPTQ_BITS))} bits for {cols} columns"
        )
    return found
