"""Models with random weights for tests of key rules, and their conversion in small parts."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from vescale_fsdp.conversion import ConvertOptions, ConvertReport, convert, open_source

GROUPED_EXPERTS = str(Path(__file__).parents[1] / "conversion" / "rules" / "grouped_experts.toml")
CONFIG = {
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 10,
    "moe_intermediate_size": 10,
    "num_experts": 3,
    "n_routed_experts": 3,
    "num_local_experts": 3,
}


def convert_in_parts(source: Path, target: Path, kind: str, **options: Any) -> ConvertReport:
    chosen = ConvertOptions(**options, memory_budget_bytes=4 * 2**20, threads=2)
    return convert(open_source(str(source)), str(target), kind, chosen)


def hf_folder(path: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    path.mkdir()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return path


def llama() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {"model.embed_tokens": (11, 24), "model.norm": (24,), "lm_head": (11, 24)}
    for layer in range(2):
        p = f"model.layers.{layer}."
        shapes |= {p + "self_attn.q_proj": (24, 24), p + "self_attn.o_proj": (24, 24)}
        shapes |= {p + f"self_attn.{x}_proj": (8, 24) for x in "kv"}
        shapes |= {p + f"mlp.{x}_proj": (10, 24) for x in ("gate", "up")} | {p + "mlp.down_proj": (24, 10)}
        shapes |= {p + "input_layernorm": (24,), p + "post_attention_layernorm": (24,)}
    return {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}


RULES = """
format = 1
[[rule]]
hf = ["a.{l}.q", "a.{l}.k"]
ours = "b.{l}.qk"
ops = [{ concat = { dim = 0, sizes = ["4", "2"] } }]
"""
STACKED = """
format = 1
[[rule]]
hf = "e.{e}"
ours = "w"
ops = [{ stack = { over = "e", dim = 1, count = 12 } }, { transpose = [1, 2, 0] }]
"""


def experts(path: str, gate: str, up: str, down: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    found = {"model.embed_tokens.weight": torch.randn(11, 24)}
    for layer in range(2):
        for e in range(3):
            p = f"model.layers.{layer}.{path}.experts.{e}."
            found |= {f"{p}{gate}.weight": torch.randn(10, 24), f"{p}{up}.weight": torch.randn(10, 24)}
            found[f"{p}{down}.weight"] = torch.randn(24, 10)
        found[f"model.layers.{layer}.{path}.gate.weight"] = torch.randn(3, 24)
    return found


def deepseek(layers: int) -> dict[str, torch.Tensor]:
    """As many layers as DeepSeek-V3's files hold, the last of which is for multi-token prediction."""
    found = {name: torch.randn(11, 24) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    found["model.norm.weight"] = torch.ones(24)
    for layer in range(layers):
        p = f"model.layers.{layer}."
        for name in ("q_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"):
            found[f"{p}self_attn.{name}.weight"] = torch.randn(24, 24)
        found |= {
            p + f"{name}.weight": torch.ones(24) for name in ("input_layernorm", "post_attention_layernorm")
        }
        found[p + "mlp.gate.weight"] = torch.randn(3, 24)
        for e, name in itertools.product(range(3), ("gate_proj", "up_proj", "down_proj")):
            found[f"{p}mlp.experts.{e}.{name}.weight"] = torch.randn(10, 24)
    for name in ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head"):
        found[f"model.layers.{layers - 1}.{name}.weight"] = torch.randn(24, 24)
    return found
