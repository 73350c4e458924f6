"""Suggested rules: a checkpoint under other names becomes MODEL's file, byte for byte, or what is open is listed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.command import vescale_convert
from tests.support.dtype_zoo import same_bytes
from tests.support.rule_cases import convert_in_parts, experts, hf_folder, llama
from vescale_fsdp.conversion import open_source
from vescale_fsdp.conversion.rules.rule_file import load_rules, shipped_rules
from vescale_fsdp.conversion.suggest import suggest
from vescale_fsdp.errors import ConversionError

Tensors = dict[str, torch.Tensor]
CLASS = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
SEVERAL = pytest.mark.part("formats")


def _renamed(tensors: Tensors, *pairs: tuple[str, str]) -> Tensors:
    """The tensors under new names: each pair replaces a part of every name."""
    renamed = {}
    for name, tensor in tensors.items():
        for old, new in pairs:
            name = name.replace(old, new)
        renamed[name] = tensor
    return renamed


def _joined(tensors: Tensors, pattern: str, names: tuple[str, ...], new: str) -> Tensors:
    """The tensors with those that ``pattern.format(name)`` matches joined along their first dim, in both layers."""
    joined = dict(tensors)
    for layer in range(2):
        parts = [joined.pop(f"model.layers.{layer}.{pattern.format(name)}") for name in names]
        joined[f"model.layers.{layer}.{pattern.format(new)}"] = torch.cat(parts)
    return joined


def _fused() -> Tensors:
    """Phi-3's layout."""
    tensors = _joined(llama(), "self_attn.{}.weight", ("q_proj", "k_proj", "v_proj"), "qkv_proj")
    return _joined(tensors, "mlp.{}.weight", ("gate_proj", "up_proj"), "gate_up_proj")


MEGATRON = (
    ("model.layers", "decoder.layers"),
    ("model.embed_tokens", "embedding.word_embeddings"),
    ("model.norm", "decoder.final_layernorm"),
    ("lm_head", "output_layer"),
    ("post_attention_layernorm", "pre_mlp_layernorm"),
    ("self_attn.o_proj", "self_attention.linear_proj"),
    ("self_attn.", "self_attention.linear_"),
    ("q_proj", "q"),
    ("k_proj", "k"),
    ("v_proj", "v"),
    ("mlp.down_proj", "mlp.linear_fc2"),
)


def _megatron() -> Tensors:
    """Megatron-LM's own GPT: rows of q, k and v by groups of heads, norms inside of the linear layers."""
    ours = {}
    for name, tensor in _renamed(llama(), *MEGATRON[:4], MEGATRON[5], MEGATRON[-1]).items():
        if "self_attn.q_proj" in name:
            q, k, v = (llama()[f"model.layers.{name.split('.')[2]}.self_attn.{x}_proj.weight"] for x in "qkv")
            rows = torch.cat([q.view(2, 12, 24), k.view(2, 4, 24), v.view(2, 4, 24)], 1)
            ours[name.replace("self_attn.q_proj", "self_attention.linear_qkv")] = rows.reshape(40, 24)
        elif "mlp.gate_proj" in name:
            up = llama()[f"model.layers.{name.split('.')[2]}.mlp.up_proj.weight"]
            ours[name.replace("gate_proj", "linear_fc1")] = torch.cat([tensor, up])
        elif not any(part in name for part in ("k_proj", "v_proj", "up_proj")):
            ours[name] = tensor
    return _renamed(
        ours,
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        ("post_attention_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
    )


def _moe() -> Tensors:
    return experts("mlp", "gate_proj", "up_proj", "down_proj")


def _stacked(*, joined: bool) -> Tensors:
    """The experts of `_moe` as transformers has them in memory: one tensor of all, gate and up joined or not."""
    tensors = {name: tensor for name, tensor in _moe().items() if ".experts." not in name}
    for layer in range(2):
        path = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([_moe()[f"{path}{e}.{name}_proj.weight"] for e in range(3)])
            for name in ("gate", "up", "down")
        )
        tensors[f"{path}down_proj"] = down
        tensors |= (
            {f"{path}gate_up_proj": torch.cat([gate, up], 1)}
            if joined
            else {
                f"{path}gate_proj": gate,
                f"{path}up_proj": up,
            }
        )
    return tensors


def _gpt2(*, is_conv: bool) -> Tensors:
    """Matrices that one side stores as [in, out]."""
    torch.manual_seed(3)
    weights = {
        f"h.{layer}.mlp.{name}.weight": torch.randn(size)
        for layer in range(2)
        for name, size in (("c_fc", (8, 32)), ("c_proj", (32, 8)))
    }
    return {name: t.T.contiguous() for name, t in weights.items()} if is_conv else weights


# MODEL's tensors, SRC's tensors.
CASES: dict[str, Callable[[], tuple[Tensors, Tensors]]] = {
    "Megatron-like names": lambda: (llama(), _renamed(llama(), *MEGATRON)),
    "Megatron": lambda: (llama(), _megatron()),
    "module.": lambda: (llama(), {f"module.{name}": tensor for name, tensor in llama().items()}),
    "policy.": lambda: (llama(), {f"policy.{name}": tensor for name, tensor in llama().items()}),
    "without model.": lambda: (
        {name: tensor for name, tensor in llama().items() if name.startswith("model.")},
        {name.removeprefix("model."): t for name, t in llama().items() if name.startswith("model.")},
    ),
    "joined": lambda: (llama(), _fused()),
    "separate": lambda: (_fused(), llama()),
    "stacked": lambda: (_moe(), _stacked(joined=False)),
    "stacked and joined": lambda: (_moe(), _stacked(joined=True)),
    "unstacked": lambda: (_stacked(joined=False), _moe()),
    "unstacked and split": lambda: (_stacked(joined=True), _renamed(_moe(), ("model.layers", "blocks"))),
    "transposed": lambda: ((_gpt2(is_conv=True)), _gpt2(is_conv=False)),
}
CORE = ("Megatron-like names", "separate", "stacked and joined")


def _files(tmp_path: Path, model: Tensors, source: Tensors, **config: Any) -> tuple[Path, Path]:
    torch.manual_seed(0)
    torch.save(source, tmp_path / "ours.pt")
    return hf_folder(tmp_path / "hf", model, vocab_size=11, **config), tmp_path / "ours.pt"


def _check_both_ways(tmp_path: Path, model: Path, source: Path, text: str) -> None:
    """Rules of this text make MODEL's file of SRC, byte for byte, and SRC's tensors of this file."""
    rules = tmp_path / "suggested.toml"
    rules.write_text(text)
    settings: dict[str, Any] = {"rules": str(rules), "assets": str(model)}
    convert_in_parts(source, tmp_path / "made", "hf", **settings)
    left, right = (tmp_path / place / "model.safetensors" for place in ("made", "hf"))
    assert left.read_bytes() == right.read_bytes()
    convert_in_parts(tmp_path / "made", tmp_path / "back.pt", "torch", **settings)
    back, ours = (torch.load(path, weights_only=True) for path in (tmp_path / "back.pt", source))
    ours = {name.removeprefix("module."): tensor for name, tensor in ours.items()}  # which `to-hf` removes
    assert back.keys() == ours.keys() and all(same_bytes(back[name], ours[name]) for name in ours)


@pytest.mark.parametrize("case", [*CORE, *(pytest.param(c, marks=SEVERAL) for c in CASES if c not in CORE)])
def test_suggested_rules_convert_both_ways(tmp_path: Path, case: str) -> None:
    """Without a change to the suggested file."""
    torch.manual_seed(0)
    model, source = _files(tmp_path, *CASES[case]())
    _check_both_ways(tmp_path, model, source, suggest(open_source(str(source)), str(model)))


@SEVERAL
def test_a_shipped_file_that_fits_is_extended(tmp_path: Path) -> None:
    """Megatron's rows of q, k and v cannot be seen in shapes; the shipped rules know them."""
    model, source = _files(tmp_path, llama(), _megatron())
    (tmp_path / "r.toml").write_text(suggest(open_source(str(source)), str(model)))
    assert {rule.text for rule in load_rules(str(tmp_path / "r.toml")).rules} == {
        rule.text for rule in load_rules("megatron-llama").rules
    }


@SEVERAL
def test_a_tied_weight_is_made_from_its_twin(tmp_path: Path) -> None:
    """SRC stores both, MODEL's folder one of them."""
    model_tensors = llama()
    model_tensors.pop("lm_head.weight")
    ours = _renamed(llama(), *MEGATRON)
    ours["output_layer.weight"] = ours["embedding.word_embeddings.weight"]
    model, source = _files(tmp_path, model_tensors, ours, tie_word_embeddings=True)
    _check_both_ways(tmp_path, model, source, suggest(open_source(str(source)), str(model)))


@SEVERAL
@pytest.mark.parametrize("of", ["config.json", ""])
def test_a_class_has_names_without_weights(tmp_path: Path, of: str) -> None:
    """MODEL is a folder with a config.json only, or this file: the same rules as from the weights."""
    model, source = _files(tmp_path, llama(), _renamed(llama(), *MEGATRON))
    config = json.loads((model / "config.json").read_text()) | CLASS
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text(json.dumps(config))
    expected = suggest(open_source(str(source)), str(model))
    assert suggest(open_source(str(source)), f"{tmp_path / 'bare'}/{of}".rstrip("/")) == expected
    assert suggest(open_source(str(source)), str(model / "model.safetensors")) == expected


@SEVERAL
def test_a_config_without_a_known_class_is_refused(tmp_path: Path) -> None:
    """No names can be found out: what is missing, and where."""
    _, source = _files(tmp_path, {"w": torch.ones(2)}, {"v": torch.ones(2)})
    (tmp_path / "bare").mkdir()
    for config in ({"architectures": ["NoSuchModel"]}, {}):
        (tmp_path / "bare" / "config.json").write_text(json.dumps(config))
        with pytest.raises(ConversionError) as caught:
            suggest(open_source(str(source)), str(tmp_path / "bare"))
        assert caught.value.where == str(tmp_path / "bare") and caught.value.todo


def _with_choice(text: str, *lines: str) -> str:
    """The text without the comment sign of the lines that begin so."""
    return "".join(
        line.removeprefix("# ").removeprefix("or: ")
        if line.startswith(tuple(f"# {each}" for each in lines))
        else line
        for line in text.splitlines(keepends=True)
    )


def test_what_is_not_certain_is_a_comment_with_the_candidates(tmp_path: Path) -> None:
    """Rows of a joined q, k and v may be in two orders. The conversion is refused until the user has chosen."""
    ours = _fused()
    for layer in range(2):
        path = f"model.layers.{layer}.self_attn."
        q, k, v = ours.pop(f"{path}qkv_proj.weight").split((24, 8, 8))
        groups = [part.view(2, -1, 24) for part in (q, k, v)]
        ours[f"{path}query_key_value.weight"] = torch.cat(groups, 1).reshape(40, 24)
    model, source = _files(tmp_path, llama(), ours)
    text = suggest(open_source(str(source)), str(model))
    assert "query_key_value" not in re.sub("#.*", "", text)
    with pytest.raises(ConversionError, check=lambda error: "query_key_value" in error.got):
        _check_both_ways(tmp_path, model, source, text)
    chosen = _with_choice(text, "[[rule]]", "hf = ", "ours = ", "or: ops")
    _check_both_ways(tmp_path, model, source, chosen)


@SEVERAL
def test_candidates_have_the_numbers_and_the_shape(tmp_path: Path) -> None:
    """Two norms with names that say nothing; each has both of MODEL's as candidates, no other tensor."""
    ours = _renamed(
        llama(),
        ("input_layernorm", "alpha"),
        ("post_attention_layernorm", "beta"),
        ("lm_head", "lm_head.extra"),
    )
    ours["model.more.weight"] = torch.ones(5)
    model, source = _files(tmp_path, llama(), ours)
    text = suggest(open_source(str(source)), str(model))
    norms = {"model.layers.{l}.input_layernorm.weight", "model.layers.{l}.post_attention_layernorm.weight"}
    choices = [
        set(re.findall('"([^"]+)"', line))
        for line in text.splitlines()
        if line.split()[1:2] == ["hf"] and line.count('"') > 2
    ]
    assert choices == [norms, norms]
    assert '# ours = "model.more.weight"' in text  # nothing in MODEL has this shape
    certain = {p.text for rule in _parsed(tmp_path, text).rules for p in rule.ours}
    assert "lm_head.extra.weight" in certain  # the only pair with this shape, although the names differ
    assert not any("alpha" in each or "beta" in each or "more" in each for each in certain)


def _parsed(tmp_path: Path, text: str) -> Any:
    (tmp_path / "parsed.toml").write_text(text)
    return load_rules(str(tmp_path / "parsed.toml"))


@SEVERAL
def test_a_role_in_both_names_decides_over_the_only_shape(tmp_path: Path) -> None:
    """down is not paired with up because nothing else is left, and a square matrix not if others are transposed."""
    square = {"h.0.attn.c_proj.weight": torch.ones(8, 8)}
    model, source = _files(tmp_path, _gpt2(is_conv=True) | square, _gpt2(is_conv=False) | square)
    rules = _parsed(tmp_path, suggest(open_source(str(source)), str(model)))
    assert {p.text for rule in rules.rules for p in rule.ours} == {
        "h.{l}.mlp.c_fc.weight",
        "h.{l}.mlp.c_proj.weight",
    }
    save_file({"w1": torch.ones(3, 3)}, model / "model.safetensors")
    torch.save({"w2": torch.ones(3, 3)}, source)
    assert not _parsed(tmp_path, suggest(open_source(str(source)), str(model))).rules
    torch.save({"wq": torch.ones(3, 3)}, source)  # Meta's name: rows may be in pairs
    save_file({"q_proj": torch.ones(3, 3)}, model / "model.safetensors")
    assert not _parsed(tmp_path, suggest(open_source(str(source)), str(model))).rules


@SEVERAL
def test_the_text_does_not_depend_on_the_order_of_names(tmp_path: Path) -> None:
    """Both sides in reverse order, with ambiguous names among them."""
    ours = _renamed(_fused(), ("input_layernorm", "alpha"), ("post_attention_layernorm", "beta"))
    model, source = _files(tmp_path, llama(), ours)
    first = suggest(open_source(str(source)), str(model))
    torch.save(dict(reversed(ours.items())), source)
    assert suggest(open_source(str(source)), str(model)) == first


@SEVERAL
def test_hostile_names_do_not_break_the_file(tmp_path: Path) -> None:
    """Quotes, line ends, braces and stars: what a pattern can hold is in a rule, the rest in a comment."""
    hard = ['a"b\\c', "a'b", "d\n[[drop]]", "e{l}", "f*", "g\x7f", "h.٣", "i.007", "j\ud800"]
    names = {name: torch.ones(place + 2) for place, name in enumerate(hard)}
    _, source = _files(tmp_path, {"w": torch.ones(1)}, names)
    torch.save(
        {f"x.{name}": tensor for name, tensor in names.items()} | {"more": torch.ones(40)}, tmp_path / "m.pt"
    )
    rules = _parsed(tmp_path, suggest(open_source(str(source)), str(tmp_path / "m.pt")))
    assert {p.text for rule in rules.rules for p in rule.ours} == {hard[0], hard[1], hard[6], hard[7]}
    assert not rules.drops_hf and not rules.drops_ours


@SEVERAL
def test_the_command_lists_shipped_files_and_prints_suggestions(tmp_path: Path) -> None:
    """What it prints is the file; without --suggest, names for --rules."""
    model, source = _files(tmp_path, llama(), _renamed(llama(), *MEGATRON))
    listed = vescale_convert("rules")
    assert listed.stdout.split() == list(shipped_rules())
    printed = vescale_convert("rules", "--suggest", str(source), str(model))
    assert printed.exit_code == 0 and printed.stdout == suggest(open_source(str(source)), str(model))
    assert load_file(model / "model.safetensors").keys() == llama().keys()
