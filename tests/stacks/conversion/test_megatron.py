"""Checkpoints that Megatron-core itself wrote on two tensor-parallel ranks: as Hugging Face models they answer what
Megatron's answered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.dtype_zoo import same_bytes
from tools.torchrun_job import Job
from vescale_fsdp.checkpoint import verify
from vescale_fsdp.conversion import ConvertOptions, convert, open_source

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
MORE: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
RULES = {"qwen2": "megatron-qwen", "qwen3": "megatron-qwen"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all cases."""
    out = tmp_path_factory.mktemp("megatron")
    Job("tests.stacks.jobs.megatron_job", 2, ["--out", str(out)], out / "logs", timeout_s=900).wait()
    return out


@pytest.mark.parametrize("form", ["stacked", "by_layer"])
@pytest.mark.parametrize("case", MORE)
def test_logits_are_megatrons(saved: Path, tmp_path: Path, case: str, form: str) -> None:
    """Grouped q, k and v, gate and up, experts and a padded vocabulary all come out right."""
    folder = saved / case / form / "iter_0000010"
    config = AutoConfig.for_model(case, **SIZES, **MORE[case])
    config.save_pretrained(tmp_path / "assets")
    settings = json.loads((tmp_path / "assets/config.json").read_text())
    (tmp_path / "assets/config.json").write_text(json.dumps({**settings, **SIZES, **MORE[case]}))
    source = open_source(str(folder))
    assert source.kind == "megatron" and not verify(source).problems
    rules = RULES.get(case, f"megatron-{case}")
    options = ConvertOptions(rules=rules, assets=str(tmp_path / "assets"))
    report = convert(source, str(tmp_path / "hf"), "hf", options)
    assert any("padding" in text for text in report.warnings)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    ids = (torch.arange(24).view(2, 12) * 7) % 61
    with torch.no_grad():
        logits = model(ids).logits
    expected = torch.load(saved / f"{case}.logits.pt", weights_only=True)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert (logits.roll(1, 1) - expected).abs().max() > 1e-2


def _by_layer(plain: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Layers one by one, norms as Transformer Engine names them."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in plain.items():
        name = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
        name = name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
        before, is_layer, after = name.partition(".layers.")
        if is_layer and not after[0].isdigit():
            found |= {f"{before}.layers.{number}.{after}": layer for number, layer in enumerate(tensor)}
        else:
            found[name] = tensor
    return found


@pytest.mark.parametrize("form", ["stacked", "by_layer"])
@pytest.mark.parametrize("case", MORE)
def test_equal_to_megatrons_own_reader(saved: Path, tmp_path: Path, case: str, form: str) -> None:
    """Every weight, master and moment, to the bit."""
    plain = _by_layer(torch.load(saved / case / form / "plain.pt", weights_only=True))
    convert(open_source(str(saved / case / form / "iter_0000010")), str(tmp_path / "out.pt"), "torch")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    weights = {name: tensor for name, tensor in plain.items() if not name.startswith("optimizer.")}
    assert found["model"].keys() == weights.keys() == found["optimizer"]["state"].keys() and len(weights) > 18
    for name in weights:
        states = found["optimizer"]["state"][name]
        assert same_bytes(found["model"][name], plain[f"optimizer.state.fp32_param.{name}"]), name
        for kind in ("exp_avg", "exp_avg_sq"):
            assert same_bytes(states[kind], plain[f"optimizer.state.{kind}.{name}"]), name
            assert bool(states[kind].any())


@pytest.mark.parametrize("form", ["stacked", "by_layer"])
def test_moments_follow(saved: Path, tmp_path: Path, form: str) -> None:
    """Of weights w Adam was given gradients sin(100 w): its moments say so of every weight of Hugging Face's."""
    folder = saved / "llama" / form / "iter_0000010"
    AutoConfig.for_model("llama", **SIZES).save_pretrained(tmp_path / "assets")
    options = ConvertOptions(rules="megatron-llama", rules_to="hf", assets=str(tmp_path / "assets"))
    convert(open_source(str(folder)), str(tmp_path / "out.pt"), "torch", options)
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert found["iteration"] == 10 and len(found["model"]) == 3 + 3 * 9
    (group,) = found["optimizer"]["param_groups"]
    assert sorted(group["params"]) == sorted(found["model"]) and group["betas"] == (0.9, 0.999)
    for name, weight in found["model"].items():
        state = found["optimizer"]["state"][name]
        torch.testing.assert_close(state["exp_avg"], 0.1 * torch.sin(100 * weight), rtol=1e-3, atol=1e-5)
        assert state["step"] == 5 and state["exp_avg_sq"].shape == weight.shape
