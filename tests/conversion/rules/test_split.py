"""Rules that split what Hugging Face joins, next to rules that join what it splits, with sizes of nested configs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.conversion.rules.multimodal_models import build_multimodal
from tests.support.dtype_zoo import same_bytes
from tests.support.rule_cases import convert_in_parts, hf_folder
from vescale_fsdp.errors import ConversionError

Tensors = dict[str, torch.Tensor]

# Phi-3 joins q, k and v, and gate and up; our MLP joins up and gate, in this order.
PHI3 = """
format = 1
keep_others = true
[let]
head = "hidden_size / num_attention_heads"
kv = "num_key_value_heads * head"
width = "intermediate_size"
[[rule]]
hf = "model.layers.{l}.self_attn.qkv_proj.weight"
ours = [
    "model.layers.{l}.self_attn.q.weight",
    "model.layers.{l}.self_attn.k.weight",
    "model.layers.{l}.self_attn.v.weight",
]
ops = [{ split = { dim = 0, sizes = ["num_attention_heads * head", "kv", "kv"] } }]
[[rule]]
hf = "model.layers.{l}.mlp.gate_up_proj.weight"
ours = ["model.layers.{l}.mlp.gate.weight", "model.layers.{l}.mlp.up.weight"]
ops = [{ split = { dim = 0, sizes = ["width", "width"] } }]
"""
# Qwen-VL joins q, k and v in its vision tower only; ours does so in the language model only, by groups of heads.
QWEN_VL = """
format = 1
keep_others = true
[let]
vision = "vision_config.embed_dim ?? vision_config.hidden_size"
heads = "text_config.num_attention_heads"
head = "text_config.hidden_size / heads"
kv = "text_config.num_key_value_heads"
"""
for _kind in ("weight", "bias"):
    QWEN_VL += f"""
[[rule]]
hf = "visual.blocks.{{l}}.attn.qkv.{_kind}"
ours = [
    "visual.blocks.{{l}}.attn.q.{_kind}",
    "visual.blocks.{{l}}.attn.k.{_kind}",
    "visual.blocks.{{l}}.attn.v.{_kind}",
]
ops = [{{ split = {{ dim = 0, sizes = ["vision", "vision", "vision"] }} }}]
[[rule]]
hf = [
    "model.layers.{{l}}.self_attn.q_proj.{_kind}",
    "model.layers.{{l}}.self_attn.k_proj.{_kind}",
    "model.layers.{{l}}.self_attn.v_proj.{_kind}",
]
ours = "model.layers.{{l}}.self_attn.qkv.{_kind}"
ops = [{{ concat = {{ dim = 0, sizes = ["heads / kv * head", "head", "head"], groups = "kv" }} }}]
"""
# Qwen3-VL-MoE stacks its experts as (expert, in, out); ours has one Linear per expert.
QWEN3_VL_MOE = """
format = 1
keep_others = true
[let]
experts = "text_config.num_experts ?? text_config.num_local_experts"
width = "text_config.moe_intermediate_size"
[[rule]]
hf = "model.language_model.layers.{l}.mlp.experts.gate_up_proj"
ours = [
    "model.language_model.layers.{l}.mlp.experts.{e}.gate.weight",
    "model.language_model.layers.{l}.mlp.experts.{e}.up.weight",
]
ops = [
    { transpose = [0, 2, 1] },
    { split = { dim = 1, sizes = ["width", "width"] } },
    { unstack = { over = "e", dim = 0, count = "experts" } },
]
[[rule]]
hf = "model.language_model.layers.{l}.mlp.experts.down_proj"
ours = "model.language_model.layers.{l}.mlp.experts.{e}.down.weight"
ops = [{ transpose = [0, 2, 1] }, { unstack = { over = "e", dim = 0, count = "experts" } }]
"""


def _phi3(_: str) -> Any:
    config = transformers.Phi3Config(
        vocab_size=16,
        hidden_size=24,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.Phi3ForCausalLM(config)


def _separate(stored: Tensors) -> Tensors:
    """Phi-3's weights with q, k, v, gate and up as tensors of their own."""
    ours = dict(stored)
    for layer in range(2):
        attention, mlp = (f"model.layers.{layer}.{name}." for name in ("self_attn", "mlp"))
        q, k, v = ours.pop(f"{attention}qkv_proj.weight").split((24, 8, 8))
        gate, up = ours.pop(f"{mlp}gate_up_proj.weight").chunk(2)
        ours |= {f"{attention}q.weight": q, f"{attention}k.weight": k, f"{attention}v.weight": v}
        ours |= {f"{mlp}gate.weight": gate, f"{mlp}up.weight": up}
    return ours


def _regrouped(stored: Tensors) -> Tensors:
    """Qwen-VL's weights: q, k and v separate in the vision tower, joined by groups of heads in the language model."""
    ours = dict(stored)
    for kind in ("weight", "bias"):
        for name, part in zip("qkv", ours.pop(f"visual.blocks.0.attn.qkv.{kind}").chunk(3), strict=True):
            ours[f"visual.blocks.0.attn.{name}.{kind}"] = part
        for layer in range(2):
            path = f"model.layers.{layer}.self_attn."
            parts = [ours.pop(f"{path}{name}_proj.{kind}") for name in "qkv"]
            groups = [part.reshape(2, part.shape[0] // 2, *part.shape[1:]) for part in parts]
            ours[f"{path}qkv.{kind}"] = torch.cat(groups, 1).flatten(0, 1)
    return ours


def _by_expert(stored: Tensors) -> Tensors:
    """Qwen3-VL-MoE's weights with one Linear per expert."""
    ours = dict(stored)
    for layer in range(2):
        path = f"model.language_model.layers.{layer}.mlp.experts."
        gate_up, down = (ours.pop(f"{path}{name}_proj") for name in ("gate_up", "down"))
        for expert in range(3):
            gate, up = gate_up[expert].T.chunk(2)
            ours |= {f"{path}{expert}.gate.weight": gate, f"{path}{expert}.up.weight": up}
            ours[f"{path}{expert}.down.weight"] = down[expert].T
    return ours


class Case(NamedTuple):
    """A model, rules for it, and the tensors that the rules should make."""

    build: Callable[[str], Any]
    rules: str
    expected: Callable[[Tensors], Tensors]


CASES = {
    "phi3": Case(_phi3, PHI3, _separate),
    "qwen2-vl": Case(build_multimodal, QWEN_VL, _regrouped),
    "qwen2.5-vl": Case(build_multimodal, QWEN_VL, _regrouped),
    "qwen3-vl-moe": Case(build_multimodal, QWEN3_VL_MOE, _by_expert),
}


@pytest.mark.parametrize(
    "name", ["phi3", *(pytest.param(name, marks=pytest.mark.part("formats")) for name in [*CASES][1:])]
)
def test_joined_tensors_are_split_and_joined_again(tmp_path: Path, name: str) -> None:
    """A model of transformers, its weights in the other layout by torch's own operations, and the same file again."""
    torch.manual_seed(0)
    case, hf = CASES[name], tmp_path / "hf"
    case.build(name).save_pretrained(hf)
    rules = tmp_path / "r.toml"
    rules.write_text(case.rules)
    convert_in_parts(hf, tmp_path / "ours.pt", "torch", rules=str(rules), assets=str(hf))
    ours = torch.load(tmp_path / "ours.pt", weights_only=True)
    expected = case.expected(load_file(hf / "model.safetensors"))
    aliases = ours.keys() - expected.keys()  # tied weights, which only the file omits
    assert aliases <= {"lm_head.weight"} and expected.keys() <= ours.keys()
    assert all(same_bytes(ours[key], tensor.contiguous()) for key, tensor in expected.items())
    convert_in_parts(tmp_path / "ours.pt", tmp_path / "back", "hf", rules=str(rules), assets=str(hf))
    left, right = (tmp_path / place / "model.safetensors" for place in ("back", "hf"))
    assert left.read_bytes() == right.read_bytes()


REGROUPED = """
format = 1
[[rule]]
hf = "qkv.{l}"
ours = "grouped.{l}"
ops = [
    { split = { dim = 0, sizes = ["6 * head", "2 * head", "2 * head"] } },
    { concat = { dim = 0, sizes = ["3 * head", "head", "head"], groups = 2 } },
]
[let]
head = "text_config.attention.head_dim"
"""


def test_a_rule_splits_and_joins(tmp_path: Path) -> None:
    """Joined q, k and v become joined groups of heads, with a size that is nested two levels deep; and back."""
    tensors = {"qkv.0": torch.randn(40, 3)}
    source = hf_folder(tmp_path / "hf", tensors, text_config={"attention": {"head_dim": 4}})
    (tmp_path / "r.toml").write_text(REGROUPED)
    convert_in_parts(source, tmp_path / "ours.pt", "torch", rules=str(tmp_path / "r.toml"))
    q, k, v = (part.view(2, -1, 3) for part in tensors["qkv.0"].split((24, 8, 8)))
    made = torch.load(tmp_path / "ours.pt", weights_only=True)["grouped.0"]
    assert same_bytes(made, torch.cat([q, k, v], 1).reshape(40, 3))
    options = {"rules": str(tmp_path / "r.toml"), "assets": str(source)}
    convert_in_parts(tmp_path / "ours.pt", tmp_path / "back", "hf", **options)
    left, right = (tmp_path / place / "model.safetensors" for place in ("back", "hf"))
    assert left.read_bytes() == right.read_bytes()


UNORDERED = """
format = 1
[[rule]]
hf = "a.{e}"
ours = "b.{f}"
ops = [{ unstack = { over = "f", dim = 0, count = 2 } }, { stack = { over = "e", dim = 0, count = 2 } }]
"""


def test_a_rule_that_unstacks_what_is_not_stacked_yet_is_refused(tmp_path: Path) -> None:
    """The operation is named by what it counts."""
    source = hf_folder(tmp_path / "hf", {f"a.{e}": torch.ones(2) for e in range(2)})
    (tmp_path / "r.toml").write_text(UNORDERED)
    with pytest.raises(ConversionError) as caught:
        convert_in_parts(source, tmp_path / "out.pt", "torch", rules=str(tmp_path / "r.toml"))
    assert (
        caught.value.where.split(", ")[0].endswith(" f")
        and caught.value.got == "a list of tensors"
        and caught.value.todo
    )


SPLIT = '{{ split = {{ dim = 0, sizes = ["{size}", "{size}"] }} }}'


@pytest.mark.parametrize(
    ("ops", "got", "where"),
    [
        (SPLIT.format(size="text_config.half"), "shape (8, 3)", "joined"),  # 3 + 3 rows
        (SPLIT.format(size="text_config.missing"), "text_config.missing is None", None),
        (SPLIT.format(size="text_config"), "text_config is a table", None),
        (SPLIT.format(size="half.text_config"), "half.text_config is None", None),
        ("{ unstack = { over = 'e', dim = 0, count = 8 } }", "['joined']", None),  # no pattern has {e}
        (f"{SPLIT.format(size=4)}, {SPLIT.format(size=2)}", "2 tensors", None),
    ],
)
def test_a_split_that_does_not_fit_is_refused(tmp_path: Path, ops: str, got: str, where: str | None) -> None:
    """Sizes that config.json does not have, or that the joined tensor does not have, are named."""
    source = hf_folder(tmp_path / "hf", {"joined": torch.ones(8, 3)}, text_config={"half": 3})
    (tmp_path / "r.toml").write_text(
        f'format = 1\n[[rule]]\nhf = "joined"\nours = ["a", "b"]\nops = [{ops}]\n'
    )
    with pytest.raises(ConversionError) as caught:
        convert_in_parts(source, tmp_path / "out.pt", "torch", rules=str(tmp_path / "r.toml"))
    assert got in caught.value.got and caught.value.todo
    assert where is None or caught.value.where.split(", ")[0] == where


def test_rules_that_make_one_name_are_both_named(tmp_path: Path) -> None:
    """Each of the two rules, the tensors that they were applied to, and the file."""
    source = hf_folder(tmp_path / "hf", {"a.0": torch.ones(2), "b.0": torch.ones(2)})
    rules = tmp_path / "r.toml"
    rules.write_text(
        'format = 1\n[[rule]]\nhf = "a.{l}"\nours = "c.{l}"\n[[rule]]\nhf = "b.{l}"\nours = "c.{l}"\n'
    )
    with pytest.raises(ConversionError) as caught:
        convert_in_parts(source, tmp_path / "out.pt", "torch", rules=str(rules))
    assert all(
        text in caught.value.got for text in ("c.0", "a.0", "b.0", "a.{l} <-> c.{l}", "b.{l} <-> c.{l}")
    )
    assert str(rules) in caught.value.where and caught.value.todo and caught.value.expected
