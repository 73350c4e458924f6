"""--dtype beside quantized weights: codes and scales keep their types, parameters that are called alike do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.command import vescale_convert
from tests.support.dtype_zoo import same_bytes
from vescale_fsdp.conversion import ConvertOptions, ConvertReport, convert, open_source

F32, F16, FP8 = torch.float32, torch.float16, torch.float8_e4m3fn
U8, I8, I32, I64 = torch.uint8, torch.int8, torch.int32, torch.int64
# Scheme -> (config, tensors that keep their types, tensors that are cast); names as the libraries write them.
SCHEMES: dict[str, tuple[dict[str, Any], dict[str, torch.dtype], dict[str, torch.dtype]]] = {
    "fp8 blocks": (
        {"quant_method": "fp8"},
        {"q_proj.weight": FP8, "q_proj.weight_scale_inv": F32},
        {"q_proj.bias": F32, "norm.weight": F32, "norm.scale": F32},
    ),
    "fp8 static": (
        {},
        {
            "attn.q_proj.weight": FP8,
            "attn.q_proj.weight_scale": F32,
            "attn.q_proj.input_scale": F32,
            "attn.k_scale": F32,
        },
        {"attn.q_proj.bias": F32, "attn.k_norm.scale": F32, "attn.scale": F32},
    ),
    "fused experts": (
        {},
        {"experts.gate_up_proj": FP8, "experts.gate_up_proj_scale_inv": F32},
        {"experts.gate_up_proj_bias": F32},
    ),
    "mxfp4": (
        {"quant_method": "mxfp4"},
        {"experts.down_proj_blocks": U8, "experts.down_proj_scales": U8},
        {"experts.down_proj_bias": F32, "router.weight": F32},
    ),
    "bitsandbytes 4": (
        {},
        {
            "up.weight": U8,
            "up.weight.absmax": F32,
            "up.weight.quant_map": F32,
            "up.weight.nested_absmax": F32,
            "up.weight.nested_quant_map": F32,
            "up.weight.quant_state.bitsandbytes__nf4": U8,
        },
        {"up.bias": F32},
    ),
    "bitsandbytes 8": ({}, {"up.weight": I8, "up.SCB": F32, "up.weight_format": U8}, {"up.bias": F32}),
    "compressed-tensors": (
        {"quant_method": "compressed-tensors"},
        {
            "o.weight_packed": I32,
            "o.weight_scale": F16,
            "o.weight_zero_point": I8,
            "o.weight_shape": I64,
            "o.weight_g_idx": I32,
            "o.input_global_scale": F32,
            "attn.k_scale": F32,
        },
        {"o.bias": F32, "scale": F32},
    ),
    "gptq": (
        {"quant_method": "gptq"},
        {"o.qweight": I32, "o.qzeros": I32, "o.scales": F16, "o.g_idx": I32},
        {"o.bias": F16, "ls1.scales": F32},
    ),
    "torchao": (
        {},
        {"0._weight_qdata": I8, "0._weight_scale": F32, "0._weight_zero_point": F32},
        {"0.bias": F32},
    ),
    "quanto": (
        {},
        {"h.q.weight._data": I8, "h.q.weight._scale": F32, "h.q.input_scale": F32, "h.q.output_scale": F32},
        {"h.q.bias": F32, "h.scale": F32},
    ),
    "hqq": ({}, {"h.W_q": U8, "h.scale": F32, "h.zero": F32}, {"h.bias": F32}),
    "none": (
        {},
        {"embeddings.position_ids": I64},
        {"embeddings.scale": F32, "input_scale": F32, "zero": F32},
    ),
}
CASES = sorted(SCHEMES)


def _tensors(types: dict[str, torch.dtype]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: (torch.randn(4, 4) * 50).to(dtype) for name, dtype in types.items()}


def _run(
    tmp_path: Path, case: str, *dtype: str, target: str = "hf", include: tuple[str, ...] = ()
) -> ConvertReport:
    quantization, kept, cast = SCHEMES[case]
    hf = tmp_path / "hf"
    hf.mkdir(exist_ok=True)
    config = {"quantization_config": quantization} if quantization else {}
    (hf / "config.json").write_text(json.dumps(config))
    save_file(_tensors(kept | cast), hf / "model.safetensors", metadata={"format": "pt"})
    options = ConvertOptions(dtype=dtype, include=include)
    return convert(open_source(str(hf)), str(tmp_path / "out"), target, options)


@pytest.mark.parametrize("case", CASES)
def test_scales_and_codes_keep_their_types(tmp_path: Path, case: str) -> None:
    """A global type casts the others only, and the output names what it left."""
    report = _run(tmp_path, case, "bf16")
    _, kept, cast = SCHEMES[case]
    found = load_file(tmp_path / "out" / "model.safetensors")
    expected = _tensors(kept | cast)
    assert all(same_bytes(found[name], expected[name]) for name in kept)
    assert all(found[name].dtype == torch.bfloat16 for name in cast) and report.casts.keys() == cast.keys()
    floats = {name for name, dtype in kept.items() if dtype.is_floating_point}
    assert floats <= set(report.uncast) <= set(kept)
    shown = vescale_convert("to-hf", tmp_path / "hf", tmp_path / "again", "--dtype", "bf16").output
    assert any(name in shown for name in report.uncast) == bool(floats or case == "mxfp4")
    assert report.to_json()["uncast"] == list(report.uncast)


def test_a_pattern_casts_a_scale(tmp_path: Path) -> None:
    """Whoever names it gets it."""
    report = _run(tmp_path, "fp8 static", "bf16", "*.input_scale=bf16")
    assert "attn.q_proj.input_scale" in report.casts and "attn.q_proj.weight_scale" in report.uncast


def test_a_part_of_the_model(tmp_path: Path) -> None:
    """Scales without their weights are scales, since the source has the weights."""
    report = _run(tmp_path, "bitsandbytes 4", "bf16", include=("*.absmax", "*.bias"))
    assert report.casts.keys() == {"up.bias"} and report.uncast == ("up.weight.absmax",)


@pytest.mark.parametrize("target", ["dcp", "torch", "native"])
def test_dtype_dequantizes_for_every_target(tmp_path: Path, target: str) -> None:
    """The same for whatever --dtype is given to."""
    report = _run(tmp_path, "fp8 blocks", "bf16", target=target)
    assert report.casts.keys() == SCHEMES["fp8 blocks"][2].keys()
