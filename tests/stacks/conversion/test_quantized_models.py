"""Whole models that are quantized: as floats, every weight is the one that transformers makes when it dequantizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    CompressedTensorsConfig,
    FineGrainedFP8Config,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mxfp4Config,
)

from tests.support.dtype_zoo import same_bytes
from vescale_fsdp.conversion import ConvertOptions, convert, open_source

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own

Weights = dict[str, torch.Tensor]


def _llama(base: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=2, **sizes)).bfloat16().save_pretrained(
        base
    )


def _gpt_oss(base: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = GptOssConfig(vocab_size=128, num_hidden_layers=2, head_dim=16, **sizes, **experts)
    GptOssForCausalLM(config).bfloat16().save_pretrained(base)


def _bitsandbytes(base: Path, folder: Path, **settings: object) -> Weights:
    config = BitsAndBytesConfig(**settings)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16, quantization_config=config)
    model.save_pretrained(folder)
    weights: Weights = model.dequantize(dtype=torch.bfloat16).state_dict()
    return weights


def _int8(base: Path, folder: Path) -> Weights:
    return _bitsandbytes(base, folder, load_in_8bit=True)


def _nf4(base: Path, folder: Path) -> Weights:
    return _bitsandbytes(
        base, folder, load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )


def _fp8(base: Path, folder: Path) -> Weights:
    convert(open_source(base), folder, "hf", ConvertOptions(quantize=["fp8-128x128"]))
    return _read(folder, FineGrainedFP8Config(dequantize=True))


def _mxfp4(base: Path, folder: Path) -> Weights:
    convert(open_source(base), folder, "hf", ConvertOptions(quantize=["mxfp4"]))
    return _read(folder, Mxfp4Config(dequantize=True))


def _compressed_tensors(base: Path, folder: Path) -> Weights:
    model = AutoModelForCausalLM.from_pretrained(base)
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(num_bits=8, type="float", strategy="channel", symmetric=True),
    )
    settings = {"format": "float-quantized", "quantization_status": "frozen"}
    config = QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"], **settings)
    apply_quantization_config(model, config)
    for layer in model.modules():
        if "weight_scale" in dict(layer.named_parameters(recurse=False)):
            layer.weight_scale.data = (layer.weight.abs().amax(1, keepdim=True) / 448).to(
                layer.weight_scale.dtype
            )
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    found = _read(folder, CompressedTensorsConfig(run_compressed=False))
    return {name: tensor for name, tensor in found.items() if not name.endswith("_scale")}


def _read(folder: Path, config: object = None) -> Weights:
    more = {} if config is None else {"quantization_config": config}
    weights: Weights = AutoModelForCausalLM.from_pretrained(folder, **more).state_dict()
    return weights


@pytest.mark.parametrize("quantized", [_int8, _nf4, _fp8, _mxfp4, _compressed_tensors])
def test_floats_are_those_of_transformers(tmp_path: Path, quantized: Callable[[Path, Path], Weights]) -> None:
    """The result is an ordinary model: its config.json speaks of no codes, and transformers loads it so."""
    torch.manual_seed(0)
    (_gpt_oss if quantized is _mxfp4 else _llama)(tmp_path / "base")
    expected = quantized(tmp_path / "base", tmp_path / "codes")
    report = convert(
        open_source(tmp_path / "codes"), tmp_path / "floats", "hf", ConvertOptions(dequantize="bf16")
    )
    assert report.warnings == ()
    found, before = _read(tmp_path / "floats"), _read(tmp_path / "base")
    assert "quantization_config" not in (tmp_path / "floats" / "config.json").read_text()
    assert found.keys() == expected.keys() == before.keys()
    assert [name for name in found if not same_bytes(found[name], expected[name])] == []
    changed = [name for name in found if not torch.equal(found[name], before[name])]
    assert len(changed) > 3 and "model.norm.weight" not in changed
