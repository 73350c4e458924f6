"""Megatron's torch_dist checkpoints as sources, by hand-made folders: DCP's own writer with Megatron's names and files.
Those that Megatron-core wrote are in tests/stacks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor

from tests.support.dtype_zoo import same_bytes
from vescale_fsdp.checkpoint import verify
from vescale_fsdp.conversion import ConvertOptions, convert, open_source
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError

LAYERS, HIDDEN, HEADS, KV, SIZE, WIDTH, VOCAB, EXPERTS = 3, 12, 6, 2, 4, 10, 11, 3
CONFIG = {
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": SIZE,
    "intermediate_size": WIDTH,
    "moe_intermediate_size": WIDTH,
    "vocab_size": VOCAB,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "tie_word_embeddings": False,
}


def hf_weights(family: str) -> dict[str, Tensor]:
    """A model of Hugging Face's."""
    torch.manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (VOCAB, HIDDEN), "lm_head": (VOCAB, HIDDEN)}
    shapes["model.norm"] = (HIDDEN,)
    for layer in range(LAYERS):
        p = f"model.layers.{layer}."
        shapes |= {
            p + "self_attn.q_proj": (HEADS * SIZE, HIDDEN),
            p + "self_attn.o_proj": (HIDDEN, HEADS * SIZE),
        }
        shapes |= {p + f"self_attn.{x}_proj": (KV * SIZE, HIDDEN) for x in "kv"}
        shapes |= {p + "input_layernorm": (HIDDEN,), p + "post_attention_layernorm": (HIDDEN,)}
        if family == "qwen":
            shapes |= {p + f"self_attn.{x}_norm": (SIZE,) for x in "qk"}
        if family == "mixtral":
            shapes[p + "block_sparse_moe.gate"] = (EXPERTS, HIDDEN)
            for e in range(EXPERTS):
                q = f"{p}block_sparse_moe.experts.{e}."
                shapes |= {q + "w1": (WIDTH, HIDDEN), q + "w3": (WIDTH, HIDDEN), q + "w2": (HIDDEN, WIDTH)}
        else:
            shapes |= {p + f"mlp.{x}_proj": (WIDTH, HIDDEN) for x in ("gate", "up")}
            shapes |= {p + "mlp.down_proj": (HIDDEN, WIDTH)}
    found = {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    if family == "qwen":
        for layer in range(LAYERS):
            for x, rows in {"q": HEADS, "k": KV, "v": KV}.items():
                found[f"model.layers.{layer}.self_attn.{x}_proj.bias"] = torch.randn(rows * SIZE)
    return found


def megatron_weights(hf: dict[str, Tensor], family: str) -> dict[str, Tensor]:
    """The same under Megatron's names: loops, as one would write it down."""

    def padded(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, torch.zeros(5, HIDDEN)])

    found = {
        "embedding.word_embeddings.weight": padded(hf["model.embed_tokens.weight"]),
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
        "output_layer.weight": padded(hf["lm_head.weight"]),
    }
    for layer in range(LAYERS):
        old, new = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        for kind in ("weight", "bias") if family == "qwen" else ("weight",):
            q, k, v = (hf[f"{old}self_attn.{x}_proj.{kind}"] for x in "qkv")
            rows: list[Tensor] = []
            for group in range(KV):
                heads = range(group * HEADS // KV, (group + 1) * HEADS // KV)
                rows += [q[h * SIZE : (h + 1) * SIZE] for h in heads]
                rows += [x[group * SIZE : (group + 1) * SIZE] for x in (k, v)]
            found[f"{new}self_attention.linear_qkv.{kind}"] = torch.cat(rows)
        found[f"{new}self_attention.linear_qkv.layer_norm_weight"] = hf[f"{old}input_layernorm.weight"]
        found[f"{new}self_attention.linear_proj.weight"] = hf[f"{old}self_attn.o_proj.weight"]
        norm = "pre_mlp_layernorm.weight" if family == "mixtral" else "mlp.linear_fc1.layer_norm_weight"
        found[new + norm] = hf[f"{old}post_attention_layernorm.weight"]
        if family == "qwen":
            for x in "qk":
                found[f"{new}self_attention.{x}_layernorm.weight"] = hf[f"{old}self_attn.{x}_norm.weight"]
        if family == "mixtral":
            experts = [f"{old}block_sparse_moe.experts.{e}." for e in range(EXPERTS)]
            found[f"{new}mlp.router.weight"] = hf[f"{old}block_sparse_moe.gate.weight"]
            gate_up = [torch.cat([hf[f"{e}w1.weight"], hf[f"{e}w3.weight"]]) for e in experts]
            found[f"{new}mlp.experts.experts.linear_fc1.weight"] = torch.stack(gate_up)
            down = torch.stack([hf[f"{e}w2.weight"] for e in experts])
            found[f"{new}mlp.experts.experts.linear_fc2.weight"] = down
        else:
            gate, up = (hf[f"{old}mlp.{x}_proj.weight"] for x in ("gate", "up"))
            found[f"{new}mlp.linear_fc1.weight"] = torch.cat([gate, up])
            found[f"{new}mlp.linear_fc2.weight"] = hf[f"{old}mlp.down_proj.weight"]
    return found


def stacked(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Layers in one tensor, as Megatron stored them before it named them one by one."""
    found = {}
    for name, tensor in weights.items():
        if ".layers.0." in name:
            rows = [weights[name.replace(".0.", f".{layer}.", 1)] for layer in range(LAYERS)]
            found[name.replace(".0.", ".", 1)] = torch.stack(rows)
        elif ".layers." not in name:
            found[name] = tensor
    return found


OPTIONS = {"lr": 0.1, "betas": (0.9, 0.95), "wd_mult": 1.0}


def write(
    folder: Path, weights: dict[str, Tensor], *, is_stacked: bool, wd_mult: float = 1.0, **more: Tensor
) -> Path:
    """A checkpoint in bf16 with masters and moments (the negated weights), and an optimizer of two groups."""
    named = stacked(weights) if is_stacked else weights
    state: dict[str, Any] = {name: tensor.bfloat16() for name, tensor in named.items()}
    for name, tensor in named.items():
        prefix = "chained_1.optimizer" if "experts" in name else "optimizer"
        state |= {f"{prefix}.state.fp32_param.{name}": tensor, f"{prefix}.state.exp_avg.{name}": -tensor}
    dcp.save({**state, **more}, checkpoint_id=str(folder), no_dist=True)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    optimizer = {
        "optimizer": {
            "param_groups": [{**OPTIONS, "step": 7}, {**OPTIONS, "wd_mult": wd_mult}],  # without params
            "state": {"common_step": torch.tensor(7.0)},
        }
    }
    torch.save(
        {"optimizer": optimizer, "iteration": 10, "seen": torch.arange(3), "args": Path("x")},
        folder / "common.pt",
    )
    return folder


@pytest.mark.parametrize("is_stacked", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen", "mixtral"])
def test_to_hugging_face_with_the_optimizer(tmp_path: Path, family: str, is_stacked: bool) -> None:
    """Masters are the model; moments follow them through the rules; layers of one chunk are told apart; and back."""
    hf = hf_weights(family)
    source = open_source(str(write(tmp_path / "run", megatron_weights(hf, family), is_stacked=is_stacked)))
    assert source.kind == "megatron" and source.ties == {} and not verify(source).problems
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets/config.json").write_text(json.dumps(CONFIG))
    rules = ConvertOptions(rules=f"megatron-{family}", rules_to="hf", assets=str(tmp_path / "assets"))
    report = convert(source, str(tmp_path / "out.pt"), "torch", rules)
    assert sum("padding" in text for text in report.warnings) == 2 and "args" in source.unsupported
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert (
        found["model"].keys() == found["optimizer"]["state"].keys() == hf.keys() and found["iteration"] == 10
    )
    for name, tensor in hf.items():
        assert same_bytes(found["model"][name], tensor)
        state = found["optimizer"]["state"][name]
        assert same_bytes(state["exp_avg"], -tensor) and state["step"] == 7
    (group,) = found["optimizer"]["param_groups"]
    assert sorted(group.pop("params")) == sorted(hf) and group == OPTIONS
    convert(
        source, str(tmp_path / "hf"), "hf", ConvertOptions(rules=f"megatron-{family}", assets=rules.assets)
    )
    convert(
        open_source(str(tmp_path / "hf")),
        str(tmp_path / "back.pt"),
        "torch",
        ConvertOptions(rules=f"megatron-{family}"),
    )
    again = torch.load(tmp_path / "back.pt", weights_only=True)
    expected = {
        n.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"): t
        for n, t in megatron_weights(hf, family).items()
    }
    assert again.keys() == expected.keys()
    assert all(same_bytes(tensor, expected[name][: len(tensor)]) for name, tensor in again.items())
    assert same_bytes(load_file(tmp_path / "hf/model.safetensors")["lm_head.weight"], hf["lm_head.weight"])


def test_optimizers_by_ranges_of_buffers(tmp_path: Path) -> None:
    """The distributed optimizer's other forms are left out, and said; the model is what is stored."""
    hf = hf_weights("llama")
    name = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_torch.bfloat16.bucket_idx_0.exp_avg"
    folder = write(tmp_path / "run", megatron_weights(hf, "llama"), is_stacked=True, **{name: torch.ones(4)})
    source = open_source(str(folder))
    assert any("--dist-ckpt-optim-fully-reshardable" in text for text in source.warnings)
    assert name in source.unsupported and not any(n.startswith("optimizer") for n in source.tensors)
    assert source.info("model.output_layer.weight").dtype.name == "bfloat16"


def test_groups_that_differ_are_named(tmp_path: Path) -> None:
    """Nobody can tell which parameters have which options: none are carried, and all are in the warning."""
    folder = write(
        tmp_path / "run", megatron_weights(hf_weights("llama"), "llama"), is_stacked=True, wd_mult=0.0
    )
    source = open_source(str(folder))
    (told,) = source.warnings
    assert re.search(r"\bwd_mult 1\.0\b.*\b0\.0\b", told) and "lr 0.1, betas (0.9, 0.95)" in told
    assert not any("param_groups" in name for name in (*source.tensors, *source.values))
    assert any(name.endswith("exp_avg") for name in source.tensors)


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    """A lost data file, an optimizer alone, sizes of another model."""
    folder = write(tmp_path / "run", megatron_weights(hf_weights("llama"), "llama"), is_stacked=False)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 40}))
    options = ConvertOptions(rules="megatron-llama", assets=str(tmp_path))
    with pytest.raises(ConversionError, match=r"\b40\b|vocab_size"):
        convert(open_source(str(folder)), str(tmp_path / "hf"), "hf", options)
    dcp.save({"optimizer.state.exp_avg.w": torch.ones(2)}, checkpoint_id=str(tmp_path / "bare"), no_dist=True)
    torch.save({}, tmp_path / "bare/common.pt")
    with pytest.raises(ConversionError, check=lambda error: error.where == str(tmp_path / "bare")):
        open_source(str(tmp_path / "bare"))
    for file in folder.glob("*.distcp"):
        file.unlink()
    with pytest.raises(CorruptCheckpointError, match="missing"):
        open_source(str(folder))
