"""Adapters that peft wrote: merged to the bits of its merge_and_unload, and exported to the bits of its save."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from peft import IA3Config, LoraConfig, PeftModel, TrainableTokensConfig, get_peft_model
from safetensors.torch import load_file
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from tests.conversion.rules.multimodal_models import FAMILIES, build_multimodal
from vescale_fsdp.checkpoint import load
from vescale_fsdp.conversion import ConvertOptions, convert, open_source

pytestmark = pytest.mark.filterwarnings("ignore")  # peft's and transformers' own


def _llama() -> Any:
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=97, num_key_value_heads=2, attention_bias=True, **sizes)
    return LlamaForCausalLM(config)


def _gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=48, n_layer=2, n_head=4, n_positions=16))


CASES: dict[str, tuple[Any, Any]] = {
    "patterns": (
        _llama,
        LoraConfig(
            r=5,
            lora_alpha=7,
            target_modules=["q_proj", "down_proj"],
            rank_pattern={"q_proj": 3, "layers.1.mlp.down_proj": 2},
            alpha_pattern={"^model.layers.0.self_attn.q_proj": 11},
        ),
    ),
    "rslora": (
        _llama,
        LoraConfig(r=5, use_rslora=True, target_modules="all-linear", modules_to_save=["lm_head"]),
    ),
    "dora": (_llama, LoraConfig(r=4, use_dora=True, target_modules=["v_proj", "embed_tokens"])),
    "embeddings": (_llama, LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"])),
    "all at once": (
        _llama,
        LoraConfig(
            r=6,
            lora_alpha=5,
            use_rslora=True,
            use_dora=True,
            target_modules=["k_proj", "up_proj"],
            rank_pattern={"up_proj": 2},
            alpha_pattern={"layers.0.self_attn.k_proj": 3},
        ),
    ),
    "lora_bias": (_llama, LoraConfig(r=4, lora_bias=True, target_modules=["q_proj"])),
    "biases": (_llama, LoraConfig(r=4, bias="all", target_modules=["q_proj"])),
    "ia3": (_llama, IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])),
    "conv1d": (_gpt2, LoraConfig(r=4, fan_in_fan_out=True, target_modules=["c_attn", "mlp.c_proj"])),
    "conv1d dora": (_gpt2, LoraConfig(r=4, use_dora=True, fan_in_fan_out=True, target_modules=["c_attn"])),
    "conv1d ia3": (
        _gpt2,
        IA3Config(
            target_modules=["c_attn", "mlp.c_proj"], feedforward_modules=["mlp.c_proj"], fan_in_fan_out=True
        ),
    ),
}


def _mixtral() -> Any:
    sizes = {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4}
    return MixtralForCausalLM(
        MixtralConfig(vocab_size=67, num_key_value_heads=2, num_local_experts=4, **sizes)
    )


def _tied() -> Any:
    return LlamaForCausalLM(LlamaConfig(**_llama().config.to_dict() | {"tie_word_embeddings": True}))


# What is copied, and merged by peft alone.
COPIED: dict[str, tuple[Any, Any]] = {
    **CASES,
    "experts": (
        _mixtral,
        LoraConfig(
            r=3,
            target_modules=["q_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        ),
    ),
    "tokens beside": (_llama, LoraConfig(r=3, target_modules=["q_proj"], trainable_token_indices=[1, 5])),
    "tokens of two": (
        _llama,
        LoraConfig(
            r=3, target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [1, 5], "lm_head": [2]}
        ),
    ),
    "tokens, tied": (_tied, LoraConfig(r=3, target_modules=["q_proj"], trainable_token_indices=[1, 5])),
    "tokens": (_llama, TrainableTokensConfig(token_indices=[0, 3], target_modules=["embed_tokens"])),
    "pissa": (_llama, LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights="pissa")),
    "olora": (_llama, LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights="olora")),
    "replication": (_llama, LoraConfig(r=3, target_modules=["q_proj"], layer_replication=[[0, 1], [0, 2]])),
}


@pytest.mark.parametrize("case", COPIED)
def test_export_and_load(tmp_path: Path, case: str) -> None:
    """The bytes of peft's folder from a training state, and from the folder into another model with the adapter."""
    make, config = COPIED[case]
    torch.manual_seed(0)
    model = get_peft_model(make(), copy.deepcopy(config))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    adapter = tmp_path / "adapter"
    model.save_pretrained(adapter)
    torch.save({"model": model.state_dict()}, tmp_path / "run.pt")
    options = ConvertOptions(assets=str(adapter))
    convert(open_source(str(tmp_path / "run.pt")), str(tmp_path / "out"), "adapter", options)
    saved = load_file(adapter / "adapter_model.safetensors")
    saved = {name: tensor for name, tensor in saved.items() if not name.endswith(".base_layer.weight")}
    _equal(saved, load_file(tmp_path / "out" / "adapter_model.safetensors"))

    torch.manual_seed(1)
    other = get_peft_model(make(), copy.deepcopy(config))
    assert load(tmp_path / "out", other).missing == ()
    found, expected = other.state_dict(), model.state_dict()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and [name for name in trained if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_merge_and_export(tmp_path: Path, case: str, dtype: torch.dtype) -> None:
    """Every tensor of both folders."""
    make, config = CASES[case]
    torch.manual_seed(0)
    model = make().to(dtype)
    base, adapter = str(tmp_path / "base"), str(tmp_path / "adapter")
    model.save_pretrained(base)
    model = get_peft_model(model, copy.deepcopy(config))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(adapter)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)

    convert(
        open_source(str(tmp_path / "dcp")), str(tmp_path / "out"), "adapter", ConvertOptions(assets=adapter)
    )
    saved = load_file(f"{adapter}/adapter_model.safetensors")
    # peft adds an embedding that it did not train, in case the caller made it larger.
    saved = {name: tensor for name, tensor in saved.items() if not name.endswith(".base_layer.weight")}
    _equal(saved, load_file(tmp_path / "out" / "adapter_model.safetensors"))

    fresh = type(model.get_base_model()).from_pretrained(base, dtype=dtype)
    PeftModel.from_pretrained(fresh, adapter).merge_and_unload().save_pretrained(tmp_path / "expected")
    convert(open_source(base), str(tmp_path / "merged"), "hf", ConvertOptions(merge=adapter))
    found = load_file(tmp_path / "merged" / "model.safetensors")
    _equal(load_file(tmp_path / "expected" / "model.safetensors"), found)
    before = load_file(f"{base}/model.safetensors")
    assert any((before[name] - found[name]).norm() > 0 for name in found)


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_text_and_images(tmp_path: Path, family: str) -> None:
    """An adapter has the names of the model in memory; where the base's files have others, rules lead there."""
    torch.manual_seed(0)
    model = build_multimodal(family)
    base, adapter = str(tmp_path / "base"), str(tmp_path / "adapter")
    model.save_pretrained(base)
    config = LoraConfig(r=3, target_modules=r".*(q_proj|attn\.qkv|attn\.proj|o_proj|fc1)")
    model = get_peft_model(model, config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(adapter)
    names = load_file(f"{adapter}/adapter_model.safetensors").keys()
    assert any("language_model" in name for name in names) and any(
        "vision" in n or "visual" in n for n in names
    )
    model.merge_and_unload().save_pretrained(tmp_path / "expected")

    source, out = open_source(base), str(tmp_path / "merged")
    convert(source, out, "hf", ConvertOptions(merge=adapter))
    _equal(load_file(tmp_path / "expected" / "model.safetensors"), load_file(f"{out}/model.safetensors"))


def _equal(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
