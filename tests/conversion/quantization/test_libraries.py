"""Quantized weights as floats, to the bits of torchao and transformers, which quantize and dequantize on the CPU.

Other libraries need an environment of their own: `tests/stacks/conversion/test_quantized_files.py`.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from tests.conversion.quantization.coded_weights import rows
from tests.support.dtype_zoo import same_bytes
from vescale_fsdp.conversion import ConvertOptions, convert, open_source
from vescale_fsdp.errors import ConversionError

pytestmark = pytest.mark.part("formats")
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def _subclass(kind: str, weight: torch.Tensor) -> torch.Tensor:
    """The weight, quantized by torchao."""
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerGroup,
        PerRow,
        quantize_,
    )

    if kind.startswith("mx"):
        elem = torch.float8_e4m3fn if kind == "mxfp8" else torch.float4_e2m1fn_x2
        return MXTensor.to_mx(weight, elem, 32)
    if kind == "nvfp4":
        return NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=torch.tensor(0.01))
    configs = {
        "int8": lambda: Int8WeightOnlyConfig(version=2),
        "int8 per group": lambda: Int8WeightOnlyConfig(version=2, granularity=PerGroup(32)),
        "int4 in int8": lambda: IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
        "float8": lambda: Float8WeightOnlyConfig(),
        "float8 per row": lambda: Float8WeightOnlyConfig(granularity=PerRow()),
    }
    module = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    module.weight = torch.nn.Parameter(weight)
    quantize_(module, configs[kind]())
    return module.weight


_KINDS = ("int8", "int8 per group", "int4 in int8", "float8", "float8 per row", "mxfp8", "mxfp4", "nvfp4")


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_torchao(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    """The classes that its safetensors support flattens, from a weight of either dtype to each requested dtype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's own
        from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

        torch.manual_seed(0)
        made = _subclass(kind, torch.randn(96, 128, dtype=dtype))
        tensors, metadata = flatten_tensor_state_dict({"model.q.weight": made, "model.norm": torch.ones(3)})
        expected: Any = made.dequantize()  # type: ignore[no-untyped-call]
    save_file(tensors, tmp_path / "model.safetensors", metadata)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "torchao"}}))
    for wanted, short in _NAMES.items():
        convert(open_source(str(tmp_path)), f"{tmp_path}-{short}", "hf", ConvertOptions(dequantize=short))
        found = load_file(f"{tmp_path}-{short}/model.safetensors")
        assert found.keys() == {"model.q.weight", "model.norm"}
        assert expected.dtype == dtype and same_bytes(found["model.q.weight"], expected.to(wanted))
    for target in ("dcp", "native"):
        report = convert(
            open_source(str(tmp_path)), f"{tmp_path}-{target}", target, ConvertOptions(dequantize="bf16")
        )
        assert report.state.views["model.q.weight"].info.dtype.name == "bfloat16"


@pytest.mark.parametrize("name", [name for name in rows() if name.startswith("transformers_fp8")])
@pytest.mark.parametrize("dtype", list(_NAMES))
def test_fine_grained_fp8(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Every grid of scales and every kind of codes, as `Fp8Dequantize` computes them."""
    torch.manual_seed(0)
    made = rows()[name]()
    quantizer: Any = SimpleNamespace(quantization_config=FineGrainedFP8Config())
    codes, scales = made.tensors["q.weight"], made.tensors["q.weight_scale_inv"]
    expected = Fp8Dequantize(quantizer)._dequantize_one(codes, scales, dtype)
    folder = made.write(tmp_path / "model")
    convert(open_source(str(folder)), str(tmp_path / "out"), "hf", ConvertOptions(dequantize=_NAMES[dtype]))
    found = load_file(tmp_path / "out" / "model.safetensors")["q.weight"]
    kept = ~expected.isnan()
    assert torch.equal(found.isnan(), ~kept) and same_bytes(found[kept], expected[kept])


I32 = torch.int32
_GPTQ = {"q.qweight": torch.zeros(4, 32, dtype=I32), "q.qzeros": torch.zeros(1, 4, dtype=I32)}
_GPTQ["q.scales"] = torch.ones(1, 32)
_NVFP4 = {
    "q.weight": torch.zeros(4, 16, dtype=torch.uint8),
    "q.weight_scale": torch.ones(4, 2).to(torch.float8_e4m3fn),
    "q.weight_scale_2": torch.ones(()),
}
_INT8 = {"q._weight_qdata": torch.zeros(4, 4, dtype=torch.int8), "q._weight_scale": torch.ones(4, 1)}


def _entry(kind: str, *parts: str, **facts: Any) -> dict[str, str]:
    data = {"block_size": [1, 4], "dtype": {"_type": "torch.dtype", "_data": "float32"}, **facts}
    return {
        "q.weight": json.dumps(
            {"_type": kind, "_data": data, "_tensor_data_names": ["qdata", "scale", *parts]}
        )
    }


# What is refused -> (tensors, quantization config, metadata, a word that the error must name).
REFUSED: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, str], str]] = {
    "gptq without a config": (_GPTQ, {}, {}, "no quantization_config"),
    "gptq for marlin": (_GPTQ, {"quant_method": "gptq", "checkpoint_format": "marlin"}, {}, "marlin"),
    "awq for gemv": (_GPTQ, {"quant_method": "awq", "version": "gemv"}, {}, "gemv"),
    "another library": (_GPTQ, {"quant_method": "aqlm"}, {}, "aqlm"),
    "2:4 sparsity": (_NVFP4, {"quant_method": "compressed-tensors", "format": "marlin-24"}, {}, "marlin-24"),
    "transforms": (
        _NVFP4,
        {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {}}},
        {},
        "transform_config",
    ),
    "integer awq of modelopt": (
        {"q.weight": _NVFP4["q.weight"], "q.weight_scale": torch.ones(8, 1)},
        {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"},
        {},
        "W4A16_AWQ",
    ),
    "scaled inputs": (_NVFP4 | {"q.pre_quant_scale": torch.ones(32)}, {}, {}, "q.pre_quant_scale"),
    "tiles of torchao": (_INT8, {}, _entry("Int4TilePackedTo4dTensor"), "Int4TilePackedTo4dTensor"),
    "scaled inputs of torchao": (
        _INT8 | {"q._weight_act_pre_scale": torch.ones(4)},
        {},
        _entry("Int8Tensor", "act_pre_scale"),
        "act_pre_scale",
    ),
    "swizzled scales": (
        {"q._weight_qdata": _NVFP4["q.weight"], "q._weight_scale": _NVFP4["q.weight_scale"]},
        {},
        _entry("NVFP4Tensor", is_swizzled_scales=True, block_size=16),
        "swizzled",
    ),
    "torchao without metadata": (_INT8, {}, {}, "q._weight_qdata"),
    "torchao with parts missing": (_INT8, {}, _entry("Int8Tensor", "zero_point"), "zero_point"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named(tmp_path: Path, name: str) -> None:
    """With the name of what is not read; a copy without --dequantize works."""
    tensors, settings, metadata, word = REFUSED[name]
    config = {"quantization_config": settings} if settings else {}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt", **metadata})
    with pytest.raises(ConversionError, check=lambda error: word in str(error.got)):
        convert(open_source(str(tmp_path)), f"{tmp_path}-out", "hf", ConvertOptions(dequantize="bf16"))
    convert(open_source(str(tmp_path)), f"{tmp_path}-copy", "hf", ConvertOptions())
    copy = load_file(f"{tmp_path}-copy/model.safetensors")
    assert all(same_bytes(copy[part], tensor) for part, tensor in tensors.items())
