"""Key rules: bits against plain torch operations, both ways."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from tests.support.dtype_zoo import same_bytes
from tests.support.rule_cases import (
    GROUPED_EXPERTS,
    RULES,
    STACKED,
    convert_in_parts,
    deepseek,
    experts,
    hf_folder,
    llama,
)
from vescale_fsdp.conversion.rules.apply_to_tensors import evaluate
from vescale_fsdp.conversion.rules.rule_file import Pattern, load_rules, shipped_rules
from vescale_fsdp.errors import ConversionError


def test_expressions_compute_config_values_and_nothing_else() -> None:
    """Arithmetic over config values; alternatives; and nothing else."""
    config = {"hidden": 96, "heads": 4, "flag": True, "name": "x"}
    lets = {"kv": "num_kv ?? heads", "hd": "head_dim ?? hidden / heads", "loop": "loop"}
    assert evaluate("kv * hd", lets, config) == 96
    assert evaluate("(kv + 2) * hd // 5 - 1", lets, config) == 27
    assert evaluate(7, lets, config) == 7
    bad = (
        "hidden / 5",
        "missing",
        "flag",
        "name",
        "__import__('os')",
        "hidden ** 2",
        "1 - 2",
        "loop",
        "1 / 0",
        "(",
    )
    for text in bad:
        with pytest.raises(ConversionError, check=lambda error: repr(text) in error.got):  # noqa: B023
            evaluate(text, lets, config)


def test_captures_of_a_pattern_are_whole_numbers() -> None:
    """Captures are whole numbers without leading zeros; a name twice must be the same number."""
    pattern = Pattern("layers.{l}.experts.{e}.w")
    assert pattern.match("layers.3.experts.12.w") == {"l": 3, "e": 12}
    assert pattern.match("layers.x.experts.12.w") is None and pattern.match("layers.03.experts.1.w") is None
    assert pattern.fill({"l": 3, "e": 12}) == "layers.3.experts.12.w"
    assert Pattern("a.{i}.b.{i}").match("a.1.b.2") is None


def test_llama_to_torchtitan_and_back(tmp_path: Path) -> None:
    """RoPE rows move per head, with the number of kv heads for k; the way back gives the same file."""
    tensors = llama()
    source = hf_folder(tmp_path / "hf", tensors)
    convert_in_parts(source, tmp_path / "dcp", "dcp", rules="torchtitan-llama", prefix="")
    wk = "layers.1.attention.qkv_linear.wk.weight"
    state = {wk: torch.empty(8, 24), "tok_embeddings.weight": torch.empty(11, 24)}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    k = tensors["model.layers.1.self_attn.k_proj.weight"]
    pairs = k.view(2, 2, 2, 24).transpose(1, 2).reshape(8, 24)  # 2 kv heads of 4 rows: halves -> pairs
    assert torch.equal(state[wk], pairs)
    assert torch.equal(state["tok_embeddings.weight"], tensors["model.embed_tokens.weight"])
    report = convert_in_parts(
        tmp_path / "dcp", tmp_path / "back", "hf", rules="torchtitan-llama", assets=str(source)
    )
    ours, theirs = (tmp_path / p / "model.safetensors" for p in ("back", "hf"))
    assert ours.read_bytes() == theirs.read_bytes()
    assert report.dropped_others == ()


def test_a_tied_weight_is_made_from_its_twin(tmp_path: Path) -> None:
    """Hugging Face leaves lm_head out if tied: torchtitan's output is made of the embedding, and goes
    again."""
    tensors = llama()
    del tensors["lm_head.weight"]
    source = hf_folder(tmp_path / "hf", tensors, tie_word_embeddings=True)
    convert_in_parts(source, tmp_path / "a.pt", "torch", rules="torchtitan-llama")
    made = torch.load(tmp_path / "a.pt", weights_only=True)
    assert torch.equal(made["lm_head.weight"], tensors["model.embed_tokens.weight"])
    convert_in_parts(tmp_path / "a.pt", tmp_path / "back", "hf", rules="torchtitan-llama", assets=str(source))
    assert "lm_head.weight" not in load_file(tmp_path / "back" / "model.safetensors")


def test_experts_grouped_and_taken_apart(tmp_path: Path) -> None:
    """Per-expert tensors <-> the grouped ones transformers 5 holds in memory."""
    path, gate, up, down = names = ("mlp", "gate_proj", "up_proj", "down_proj")
    tensors = experts(*names)
    source = hf_folder(tmp_path / "hf", tensors)
    convert_in_parts(source, tmp_path / "a.pt", "torch", rules=GROUPED_EXPERTS)
    made = torch.load(tmp_path / "a.pt", weights_only=True)
    p = f"model.layers.1.{path}.experts."
    fused = [torch.cat([tensors[f"{p}{e}.{gate}.weight"], tensors[f"{p}{e}.{up}.weight"]]) for e in range(3)]
    assert torch.equal(made["model.layers.1.mlp.experts.gate_up_proj"], torch.stack(fused))
    stacked = torch.stack([tensors[f"{p}{e}.{down}.weight"] for e in range(3)])
    assert torch.equal(made["model.layers.1.mlp.experts.down_proj"], stacked)
    assert "model.layers.1.mlp.gate.weight" in made and len(made) == 7
    convert_in_parts(tmp_path / "a.pt", tmp_path / "back", "hf", rules=GROUPED_EXPERTS, assets=str(source))
    ours, theirs = (tmp_path / q / "model.safetensors" for q in ("back", "hf"))
    assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize("name", shipped_rules())
def test_shipped_rules_invert(tmp_path: Path, name: str) -> None:
    """A model made to fit every pattern of a shipped file goes to the other side and back, bit for bit."""
    rules = load_rules(name)
    torch.manual_seed(2)
    tensors: dict[str, torch.Tensor] = {}
    for rule in rules.rules:
        for pattern in rule.hf:
            for layer in range(2 if "l" in pattern.names else 1):
                for e in range(3 if rule.over_hf else 1):
                    key = pattern.fill({"l": layer, "e": e})
                    is_3d = "gpt-oss" in name and "experts" in key and "bias" not in key
                    down = any(part in key for part in ("down_proj", ".w2."))
                    shape = (
                        (3, 10, 20)
                        if is_3d
                        else (24, 10)
                        if down
                        else (10, 24)
                        if "experts" in key
                        else (24, 24)
                    )
                    tensors[key] = torch.randn(shape)
    tensors |= {f"{hf}0.weight": torch.randn(24, 24) for hf, _ in rules.prefixes}
    own = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 24, "intermediate_size": 24}
    source = hf_folder(tmp_path / "hf", tensors, **({**own, "vocab_size": 24} if "megatron" in name else {}))
    convert_in_parts(source, tmp_path / "ours.pt", "torch", rules=name)
    ours = torch.load(tmp_path / "ours.pt", weights_only=True)
    made = [p for rule in rules.rules for p in rule.ours] + [zeros.ours for zeros in rules.zeros]
    assert len(ours) == sum((2 if "l" in p.names else 1) for p in made) + len(rules.prefixes)
    assert all(f"{prefix}0.weight" in ours for _, prefix in rules.prefixes)
    for zeros in rules.zeros:
        assert same_bytes(ours[zeros.ours.fill({"l": 1})], torch.zeros(3))
    convert_in_parts(tmp_path / "ours.pt", tmp_path / "back", "hf", rules=name, assets=str(source))
    left, right = (tmp_path / p / "model.safetensors" for p in ("back", "hf"))
    assert left.read_bytes() == right.read_bytes()


FUSED = """
format = 1
extends = "torchtitan-llama"
[rename]
"norm.weight" = "final_norm.weight"
[let]
hd = "head_dim ?? hidden_size / num_attention_heads"
[[rule]]
hf = [
    "model.layers.{l}.self_attn.q_proj.weight",
    "model.layers.{l}.self_attn.k_proj.weight",
    "model.layers.{l}.self_attn.v_proj.weight",
]
ours = "layers.{l}.attention.qkv.weight"
ops = [
    { rope = { heads = ["heads", "kv", 0] } },
    { concat = { dim = 0, sizes = ["heads / kv * hd", "hd", "hd"], groups = "kv" } },
]
"""


def test_a_file_that_extends_a_shipped_one(tmp_path: Path) -> None:
    """Its rules take the place of the base's, names are spelled anew; here q, k and v in one tensor, group by
    group, q and k moved for rotary pairs; and all of it backwards."""
    tensors = llama()
    source = hf_folder(tmp_path / "hf", tensors)
    (tmp_path / "r.toml").write_text(FUSED)
    convert_in_parts(source, tmp_path / "a.pt", "torch", rules=str(tmp_path / "r.toml"))
    made = torch.load(tmp_path / "a.pt", weights_only=True)
    assert "final_norm.weight" in made and "norm.weight" not in made
    assert not any("qkv_linear" in name for name in made) and len(made) == len(tensors) - 2 * 2
    q, k, v = (tensors[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv")
    q = q.view(6, 2, 2, 24).transpose(1, 2).reshape(2, 3 * 4, 24)  # two groups of three heads of four rows
    k = k.view(2, 2, 2, 24).transpose(1, 2).reshape(2, 4, 24)
    expected = torch.cat([q, k, v.view(2, 4, 24)], 1).reshape(40, 24)
    assert same_bytes(made["layers.1.attention.qkv.weight"], expected)
    options = {"rules": str(tmp_path / "r.toml"), "assets": str(source)}
    convert_in_parts(tmp_path / "a.pt", tmp_path / "back", "hf", **options)
    ours, theirs = (tmp_path / p / "model.safetensors" for p in ("back", "hf"))
    assert ours.read_bytes() == theirs.read_bytes()


def test_many_experts_in_their_order_and_dims_in_a_ring(tmp_path: Path) -> None:
    """More than ten, whose names sort otherwise than their numbers; an order of dims that is not its own inverse."""
    tensors = {f"e.{e}": torch.full((2, 3), float(e)) + torch.arange(3) / 4 for e in range(12)}
    source = hf_folder(tmp_path / "hf", tensors)
    (tmp_path / "r.toml").write_text(STACKED)
    convert_in_parts(source, tmp_path / "out.pt", "torch", rules=str(tmp_path / "r.toml"))
    made = torch.load(tmp_path / "out.pt", weights_only=True)["w"]
    assert same_bytes(made, torch.stack([tensors[f"e.{e}"] for e in range(12)], 1).permute(1, 2, 0))
    convert_in_parts(tmp_path / "out.pt", tmp_path / "back", "hf", rules=str(tmp_path / "r.toml"))
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == tensors.keys() and all(same_bytes(back[n], t) for n, t in tensors.items())


def test_layers_after_the_last_are_left_out_and_named(tmp_path: Path) -> None:
    """DeepSeek's modules for multi-token prediction: attention and experts of theirs do not pass for a layer."""
    tensors = deepseek(3)
    source = hf_folder(tmp_path / "hf", tensors, num_hidden_layers=2, num_nextn_predict_layers=1)
    report = convert_in_parts(source, tmp_path / "out.pt", "torch", rules="torchtitan-deepseek-v3")
    extra = {name for name in tensors if name.startswith("model.layers.2.")}
    assert set(report.dropped_others) == extra and len(extra) == 23
    assert len(report.warnings) == 1 and "model.layers.2." in report.warnings[0]
    assert not any(".2." in name for name in report.state.views) and len(report.state.views) == 25
    convert_in_parts(
        tmp_path / "out.pt", tmp_path / "back", "hf", rules="torchtitan-deepseek-v3", assets=str(source)
    )
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == tensors.keys() - extra and all(same_bytes(back[n], tensors[n]) for n in back)


def test_unequal_parts_are_joined_and_cut(tmp_path: Path) -> None:
    """q and k of different sizes in one tensor, in a user's own file; drops are reported."""
    tensors = {"a.0.q": torch.randn(4, 2), "a.0.k": torch.randn(2, 2), "old.0": torch.ones(1)}
    source = hf_folder(tmp_path / "hf", tensors)
    (tmp_path / "r.toml").write_text(RULES + '[[drop]]\nhf = "old.{i}"\n')
    report = convert_in_parts(source, tmp_path / "out.pt", "torch", rules=str(tmp_path / "r.toml"))
    assert report.dropped_others == ("old.0",)
    made = torch.load(tmp_path / "out.pt", weights_only=True)
    assert same_bytes(made["b.0.qk"], torch.cat([tensors["a.0.q"], tensors["a.0.k"]])) and len(made) == 1
    convert_in_parts(tmp_path / "out.pt", tmp_path / "back", "hf", rules=str(tmp_path / "r.toml"))
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert same_bytes(back["a.0.q"], tensors["a.0.q"]) and same_bytes(back["a.0.k"], tensors["a.0.k"])
