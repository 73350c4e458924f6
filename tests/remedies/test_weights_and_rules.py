"""Remedies of conversions that change weights: types, quantization, adapters, key rules, model classes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.remedies.applied import argument, command, commands, flag, refused, runs, text_in
from tests.remedies.made import (
    MODEL,
    PAIR,
    ROOT,
    adapter_folder,
    hf_folder,
    in_training,
    native_tensors,
    same,
    torch_file,
    written,
)
from tests.support.rule_cases import hf_folder as model_folder
from tests.support.rule_cases import llama
from vescale_fsdp.checkpoint import SourceOptions, load, save
from vescale_fsdp.conversion import ConvertOptions, HuggingFace, convert, open_source

# Types


@pytest.mark.parametrize("option", ["--dtype bf16", "--dtype '*.bias=float32'"])
@runs("conversion/engine/casting.py::CastRules.parse")
def test_an_empty_pattern(option: str, tmp_path: Path) -> None:
    """Both options as the remedy writes them."""
    source = torch_file(tmp_path / "a.pt", {"a.bias": torch.ones(2, dtype=torch.float16)})
    remedy = refused(command, "to-hf", source, tmp_path / "out", "--dtype", "=bf16")
    assert option in remedy
    command("to-hf", source, tmp_path / "out", *flag(option, "--dtype"))
    wanted = torch.bfloat16 if "bf16" in option else torch.float32
    assert written(tmp_path / "out")["a.bias"].dtype == wanted


@runs("conversion/engine/casting.py::require_one_rule_each")
def test_two_options_for_one_tensor(tmp_path: Path) -> None:
    """One of them."""
    source = torch_file(tmp_path / "a.pt", MODEL)
    refused(command, "to-hf", source, tmp_path / "out", "--dtype", "bf16", "--dtype", "fp16")
    command("to-hf", source, tmp_path / "out", "--dtype", "bf16")
    assert written(tmp_path / "out")["norm.weight"].dtype == torch.bfloat16


@runs("conversion/engine/casting.py::float_type")
def test_a_type_with_fewer_bits(tmp_path: Path) -> None:
    """The option that computes scales."""
    source = torch_file(tmp_path / "a.pt", {"a.weight": torch.ones(128, 128)})
    remedy = refused(command, "to-hf", source, tmp_path / "out", "--dtype", "fp8")
    name = text_in(remedy, r"--quantize")
    command("to-hf", source, tmp_path / "out", name, "fp8-128x128")
    assert written(tmp_path / "out")["a.weight"].dtype == torch.float8_e4m3fn


_QUANTIZE = "conversion/quantization/quantize.py::"


@runs(f"{_QUANTIZE}newly_quantized")
def test_weights_that_are_quantized_already(tmp_path: Path) -> None:
    """The option of the remedy beside the one that was passed."""
    weights = {"a.weight": torch.ones(128, 128), "b.weight": torch.ones(3)}
    command("to-hf", torch_file(tmp_path / "a.pt", weights), tmp_path / "q", "--quantize", "fp8-128x128")
    again = ["--quantize", "fp8-128x128", "--no-assets"]
    remedy = refused(command, "to-hf", tmp_path / "q", tmp_path / "out", *again)
    command("to-hf", tmp_path / "q", tmp_path / "out", *again, *flag(remedy, "--dequantize"))
    assert same(written(tmp_path / "out"), written(tmp_path / "q"))


@runs(f"{_QUANTIZE}newly_quantized[2]")
def test_no_usual_weights(tmp_path: Path) -> None:
    """They are named."""
    source = torch_file(tmp_path / "a.pt", {"odd": torch.ones(128, 128)})
    remedy = refused(command, "to-hf", source, tmp_path / "out", "--quantize", "fp8-128x128")
    option = flag(remedy, "--quantize")
    value = option[1].replace("PATTERN", "odd").replace("SCHEME", "fp8-128x128")
    command("to-hf", source, tmp_path / "out", option[0], value)
    assert written(tmp_path / "out")["odd"].dtype == torch.float8_e4m3fn


@runs(f"{_QUANTIZE}QuantizeRules.includes")
def test_a_weight_that_does_not_fit(tmp_path: Path) -> None:
    """``=keep`` before the pattern."""
    source = torch_file(tmp_path / "a.pt", {"a.weight": torch.ones(128, 128), "b.weight": torch.ones(3, 3)})
    remedy = refused(command, "to-hf", source, tmp_path / "out", "--quantize", "*.weight=fp8-128x128")
    assert "=keep" in remedy
    options = ("--quantize", "b.weight=keep", "--quantize", "*.weight=fp8-128x128")
    command("to-hf", source, tmp_path / "out", *options)
    assert written(tmp_path / "out")["b.weight"].dtype == torch.float32


@runs(f"{_QUANTIZE}QuantizeRules.parse", f"{_QUANTIZE}QuantizeRules.parse[1]")
def test_schemes(tmp_path: Path) -> None:
    """One, of those that there are."""
    source = torch_file(tmp_path / "a.pt", {"a.weight": torch.ones(128, 128)})
    for options in (("x",), ("fp8-128x128", "*.b=mxfp4")):
        given = [word for each in options for word in ("--quantize", each)]
        refused(command, "to-hf", source, tmp_path / "out", *given)
    command("to-hf", source, tmp_path / "out", "--quantize", "fp8-128x128")
    assert written(tmp_path / "out")["a.weight"].dtype == torch.float8_e4m3fn


@runs("conversion/engine/coded_tensors.py::EncodedView._refusal")
@pytest.mark.parametrize("name", ["a.weight", "a[0].weight"])
def test_infinities(name: str, tmp_path: Path) -> None:
    """The option that the remedy writes, before the one that was passed."""
    weights = {name: torch.full((128, 128), torch.inf), "b.weight": torch.ones(128, 128)}
    source = torch_file(tmp_path / "a.pt", weights)
    given = ["--quantize", "fp8-128x128"]
    remedy = refused(command, "to-hf", source, tmp_path / "out", *given)
    command("to-hf", source, tmp_path / "out", *flag(remedy, "--quantize"), *given)
    found = written(tmp_path / "out")
    assert torch.equal(found[name], weights[name]) and found["b.weight"].dtype == torch.float8_e4m3fn


@runs("conversion/quantization/dequantize.py::dequantized")
def test_nothing_to_dequantize(tmp_path: Path) -> None:
    """The option that casts floats."""
    source = torch_file(tmp_path / "a.pt", MODEL)
    remedy = refused(command, "to-hf", source, tmp_path / "out", "--dequantize", "bf16")
    assert "--dtype" in remedy
    command("to-hf", source, tmp_path / "out", "--dtype", "bf16")
    assert written(tmp_path / "out")["norm.weight"].dtype == torch.bfloat16


# Adapters


@runs("conversion/convert.py::_check_is_model")
@pytest.mark.parametrize("way", [0, 1])
def test_an_adapter_is_no_model(way: int, tmp_path: Path) -> None:
    """Both commands of the remedy."""
    base, adapter, out = (
        hf_folder(tmp_path / "base", MODEL),
        adapter_folder(tmp_path / "adapter"),
        tmp_path / "out",
    )
    remedy = refused(command, "to-hf", adapter, out)
    if way == 0:
        command(*commands(remedy, BASE=base, OUT=out), "--no-assets")
    else:
        assert "to-hf --adapter" in remedy
        command("to-hf", adapter, out, "--adapter", *flag(remedy, "--assets"))
    merged = MODEL | {
        "up.weight": MODEL["up.weight"] + 2 * PAIR["up.lora_B.weight"] @ PAIR["up.lora_A.weight"]
    }
    assert same(written(out), merged if way == 0 else {ROOT + name: value for name, value in PAIR.items()})


@runs("conversion/formats/peft.py::require_adapter")
def test_a_training_checkpoint_is_no_adapter(tmp_path: Path) -> None:
    """Its adapter is written by the command of the remedy, then merged."""
    base, run = hf_folder(tmp_path / "base", MODEL), torch_file(tmp_path / "run.pt", in_training("default"))
    (tmp_path / "run").mkdir()
    remedy = refused(command, "merge-adapter", base, tmp_path / "run", tmp_path / "out", "--no-assets")
    settings = adapter_folder(tmp_path / "settings")
    assert "to-hf --adapter" in remedy
    command("to-hf", run, tmp_path / "adapter", "--adapter", "--assets", settings)
    command("merge-adapter", base, tmp_path / "adapter", tmp_path / "out", "--no-assets")
    added = 2 * PAIR["up.lora_B.weight"] @ PAIR["up.lora_A.weight"]
    assert torch.equal(written(tmp_path / "out")["up.weight"], MODEL["up.weight"] + added)


@runs("conversion/formats/peft.py::_settings", "conversion/formats/peft.py::PeftConfig.read")
def test_an_adapter_without_its_settings(tmp_path: Path) -> None:
    """The option of the remedy, with the folder of them."""
    run, settings = (
        torch_file(tmp_path / "run.pt", in_training("default")),
        adapter_folder(tmp_path / "settings"),
    )
    remedy = refused(command, "to-hf", run, tmp_path / "out", "--adapter")
    option = flag(remedy, "--assets")
    (tmp_path / "empty").mkdir()
    remedy = refused(command, "to-hf", run, tmp_path / "out", "--adapter", option[0], tmp_path / "empty")
    assert option[0] in remedy
    command("to-hf", run, tmp_path / "out", "--adapter", option[0], settings)
    assert same(written(tmp_path / "out"), {ROOT + name: value for name, value in PAIR.items()})


@runs("conversion/formats/peft.py::one_adapter", "conversion/formats/peft.py::one_adapter[1]")
def test_which_adapter(tmp_path: Path) -> None:
    """The option that the remedy completes; without an adapter, the whole model."""
    settings, out = adapter_folder(tmp_path / "settings"), tmp_path / "out"
    run = torch_file(tmp_path / "run.pt", in_training("x", "y"))
    given = ["--adapter", "--assets", settings]
    remedy = refused(command, "to-hf", run, out, *given)
    command("to-hf", run, out, *given, *flag(remedy, "--adapter-name"))
    assert same(written(out), {ROOT + name: value for name, value in PAIR.items()})
    plain = torch_file(tmp_path / "a.pt", MODEL)
    refused(command, "to-hf", plain, tmp_path / "plain", *given)
    command("to-hf", plain, tmp_path / "plain")
    assert same(written(tmp_path / "plain"), MODEL)


@runs("conversion/formats/peft.py::_check_ranks")
def test_settings_of_another_adapter(tmp_path: Path) -> None:
    """Those of this one."""
    run = torch_file(tmp_path / "run.pt", in_training("default"))
    other, own = adapter_folder(tmp_path / "other", r=3), adapter_folder(tmp_path / "own")
    refused(command, "to-hf", run, tmp_path / "out", "--adapter", "--assets", other)
    command("to-hf", run, tmp_path / "out", "--adapter", "--assets", own)
    assert same(written(tmp_path / "out"), {ROOT + name: value for name, value in PAIR.items()})


@runs("conversion/merge_adapter.py::_Merge._is_transposed")
def test_a_square_weight(tmp_path: Path) -> None:
    """The class that the remedy adds to config.json says which way it lies."""
    weights = llama()
    base = model_folder(tmp_path / "base", weights, model_type="llama", vocab_size=11)
    name = "model.layers.0.self_attn.q_proj"
    b, a = torch.eye(24)[:, :2].clone(), torch.ones(2, 24)
    adapter = adapter_folder(tmp_path / "adapter", {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b})
    remedy = refused(command, "merge-adapter", base, adapter, tmp_path / "out")
    added = text_in(remedy, r'"architectures": (\[".*?"\])')
    assets = tmp_path / "assets"
    assets.mkdir()
    config = json.loads((base / "config.json").read_text()) | {"architectures": json.loads(added)}
    (assets / "config.json").write_text(json.dumps(config))
    command("merge-adapter", base, adapter, tmp_path / "out", *flag(remedy, "--assets")[:1], assets)
    merged = written(tmp_path / "out")[f"{name}.weight"]
    assert torch.equal(merged, weights[f"{name}.weight"] + 2 * b @ a)


# Optimizers and key rules


def _optimizer(**kinds: torch.Tensor) -> dict[str, Any]:
    return {"state": {"up.weight": kinds}, "param_groups": [{"lr": 0.1, "params": ["up.weight"]}]}


RULES = 'format = 1\nkeep_others = true\n[[prefix]]\nhf = "up."\nours = "down."\n'


@pytest.mark.parametrize(
    ("site", "state"),
    [
        (
            "conversion/rules/apply_to_state.py::_apply_to_slot",
            _optimizer(exp_avg=torch.ones(3), exp_avg_sq=torch.ones(8, 6)),
        ),
        (
            "conversion/rules/apply_to_state.py::_check_has_name",
            {"state": {0: {"exp_avg": torch.ones(8, 6)}}, "param_groups": [{"params": [0]}]},
        ),
    ],
)
@runs(
    "conversion/rules/apply_to_state.py::_apply_to_slot",
    "conversion/rules/apply_to_state.py::_check_has_name",
)
def test_optimizers_that_rules_cannot_rename(site: str, state: dict[str, Any], tmp_path: Path) -> None:
    """The option that leaves them out."""
    source = torch_file(tmp_path / "a.pt", {"model": MODEL, "optimizer": state})
    (tmp_path / "rules.toml").write_text(RULES)
    given = ["--rules", tmp_path / "rules.toml", "--rules-to", "ours"]
    remedy = refused(command, "to-native", source, tmp_path / "out", *given)
    command("to-native", source, tmp_path / "out", *given, *flag(remedy, "--optimizer"))
    found = native_tensors(tmp_path / "out")
    assert torch.equal(found["model.down.weight"], MODEL["up.weight"]) and len(found) == 2


@runs("conversion/rules/apply_to_state.py::_disagreement")
@pytest.mark.parametrize("way", ["--on-disagreement", "--optimizer"])
def test_parameters_that_are_joined(way: str, tmp_path: Path) -> None:
    """The value of the first, or no optimizer."""
    model = {"q": torch.ones(2, 2), "k": torch.zeros(2, 2)}
    state = {
        name: {"step": torch.tensor(float(at)), "exp_avg": torch.ones(2, 2)} for at, name in enumerate(model)
    }
    optimizer = {"state": state, "param_groups": [{"params": [*model]}]}
    source = torch_file(tmp_path / "a.pt", {"model": model, "optimizer": optimizer})
    rule = '[[rule]]\nhf = ["q", "k"]\nours = "qk"\nops = [{ concat = { dim = 0, sizes = ["2", "2"] } }]\n'
    (tmp_path / "rules.toml").write_text(f"format = 1\n{rule}")
    given = ["--rules", tmp_path / "rules.toml", "--rules-to", "ours"]
    remedy = refused(command, "to-native", source, tmp_path / "out", *given)
    command("to-native", source, tmp_path / "out", *given, *flag(remedy, way))
    found = native_tensors(tmp_path / "out")
    assert torch.equal(found["model.qk"], torch.cat([model["q"], model["k"]]))
    assert ("optimizer.state.qk.exp_avg" in found) == (way == "--on-disagreement")


@runs("conversion/engine/carried_state.py::_with_form")
@pytest.mark.parametrize("way", ["keep", "drop"])
def test_an_optimizer_entry_of_no_parameter(way: str, tmp_path: Path) -> None:
    """Both values of the option."""
    state = {"state": {"other": {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": ["other"]}]}
    flat = {f"state.{name}.exp_avg": torch.ones(2) for name in ("up.weight", "x.y")}
    source = torch_file(tmp_path / "a.pt", {"model": MODEL, "optimizer": flat if way else state})
    remedy = refused(command, "to-native", source, tmp_path / "out", "--optimizer", "nested")
    first, second = remedy.split("; or ")
    command("to-native", source, tmp_path / "out", *flag(first if way == "keep" else second, "--optimizer"))
    assert len(native_tensors(tmp_path / "out")) == (4 if way == "keep" else 2)


@runs("conversion/rules/apply_to_tensors.py::_Application.run")
def test_rules_in_the_other_direction(tmp_path: Path) -> None:
    """The option of the remedy: a flag in the command, an argument in Python."""
    source = torch_file(tmp_path / "a.pt", {"ours.w": torch.ones(2)})
    rules = tmp_path / "rules.toml"
    rules.write_text('format = 1\n[[rule]]\nhf = "hf.w"\nours = "ours.w"\n')
    given = ["--rules", rules, "--rules-to", "ours"]
    remedy = refused(command, "to-native", source, tmp_path / "out", *given)
    command("to-native", source, tmp_path / "out", "--rules", rules, *flag(remedy, "--rules-to"))
    assert same(native_tensors(tmp_path / "out"), {"hf.w": torch.ones(2)})
    wrong = ConvertOptions(rules=str(rules), rules_to="ours")
    remedy = refused(convert, open_source(str(source)), str(tmp_path / "python"), "native", wrong)
    options = ConvertOptions(rules=str(rules), **argument(remedy, "rules_to"))
    convert(open_source(str(source)), str(tmp_path / "python"), "native", options)
    assert same(native_tensors(tmp_path / "python"), {"hf.w": torch.ones(2)})


@runs("conversion/engine/carried_state.py::whole_state")
def test_a_prefix_that_is_taken(tmp_path: Path) -> None:
    """Another one."""
    source = torch_file(tmp_path / "a.pt", {"model": MODEL, "step.norm.weight": 3})
    remedy = refused(command, "to-native", source, tmp_path / "out", "--prefix", "step")
    assert "--prefix" in remedy
    command("to-native", source, tmp_path / "out", "--prefix", "net")
    assert same(native_tensors(tmp_path / "out"), {f"net.{name}": value for name, value in MODEL.items()})


@runs("conversion/formats/huggingface/repository.py::Assets.__init__")
def test_no_settings_in_the_assets(tmp_path: Path) -> None:
    """The option that the remedy names, with a folder that has them."""
    source, good = torch_file(tmp_path / "a.pt", MODEL), hf_folder(tmp_path / "hf", MODEL)
    (tmp_path / "empty").mkdir()
    remedy = refused(command, "to-hf", source, tmp_path / "out", "--assets", tmp_path / "empty")
    command("to-hf", source, tmp_path / "out", *re.findall(r"--[\w-]+", remedy), good)
    assert same(written(tmp_path / "out"), MODEL)


# The Python call that writes a repository


@runs("conversion/live/huggingface.py::HuggingFace._planned")
def test_a_repository_of_a_training_state(tmp_path: Path) -> None:
    """The argument of the remedy."""
    assets = hf_folder(tmp_path / "hf", MODEL)
    state = {"model": dict(MODEL), "data": {"x": 3}}
    remedy = refused(save, tmp_path / "out", state, format=HuggingFace(assets=str(assets)))
    form = HuggingFace(assets=str(assets), **argument(remedy, "model_prefix"))
    save(tmp_path / "out", state, format=form)
    assert same(written(tmp_path / "out"), MODEL)


@runs("conversion/live/huggingface.py::HuggingFace.arguments")
def test_assets_without_a_config(tmp_path: Path) -> None:
    """A path that has one."""
    assets = hf_folder(tmp_path / "hf", MODEL)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/readme.md").write_text("x")
    refused(save, tmp_path / "out", dict(MODEL), format=HuggingFace(assets=str(tmp_path / "empty")))
    save(tmp_path / "out", dict(MODEL), format=HuggingFace(assets=str(assets)))
    assert same(written(tmp_path / "out"), MODEL)


@runs("conversion/formats/peft.py::names_in_training")
def test_an_adapter_name_for_no_adapter(tmp_path: Path) -> None:
    """Without the argument that the remedy names."""
    torch.save(MODEL, tmp_path / "a.pt")
    state = {name: torch.zeros_like(value) for name, value in MODEL.items()}
    remedy = refused(load, tmp_path / "a.pt", state, source=SourceOptions(adapter_name="x"))
    assert "adapter_name" in remedy
    load(tmp_path / "a.pt", state, source=SourceOptions())
    assert same(state, MODEL)


def _rule(hf: str, ours: str, ops: str = "", more: str = "") -> str:
    """One [[rule]]; names as TOML."""
    return f"[[rule]]\nhf = {hf}\nours = {ours}\nops = [{ops}]\n{more}\n"


_APPLY, _OPS = "conversion/rules/apply_to_tensors.py::_Application.", "conversion/rules/operations.py::"
_QK = '["q", "k"]'
# site -> (rules that are refused, rules after its remedy; "" for none) for tensors q, k [4, 2] and n [2]
RULES_OF_SITE: dict[str, tuple[str, str]] = {
    f"{_APPLY}run[1]": (
        _rule('"q"', '"x"'),
        _rule('"q"', '"x"') + '[[drop]]\nhf = "k"\n[[drop]]\nhf = "n"\n',
    ),
    f"{_APPLY}run[2]": (
        "keep_others = true\n" + _rule('"c"', '"x"'),
        "keep_others = true\n" + _rule('"c"', '"x"', more="optional = true"),
    ),
    f"{_APPLY}_rename": ('keep_others = true\n[[prefix]]\nhf = "k"\nours = "q"\n', ""),
    f"{_APPLY}_groups": (
        "keep_others = true\n" + _rule('"q"', '"y"') + _rule('"q"', '"z"'),
        "keep_others = true\n" + _rule('"q"', '"z"'),
    ),
    f"{_APPLY}_apply_to_group[1]": (
        "keep_others = true\n" + _rule(_QK, '"qk"'),
        "keep_others = true\n" + _rule(_QK, '"qk"', '{ concat = { dim = 0, sizes = ["4", "4"] } }'),
    ),
    f"{_APPLY}_add": (
        "keep_others = true\n" + _rule('"q"', '"z"') + _rule('"k"', '"z"'),
        "keep_others = true\n" + _rule('"q"', '"z"') + _rule('"k"', '"y"'),
    ),
    f"{_APPLY}_raise_errors": (
        "keep_others = true\n" + _rule('"c"', '"x"') + _rule('"q"', '"z"') + _rule('"k"', '"z"'),
        "keep_others = true\n" + _rule('"q"', '"z"') + _rule('"k"', '"y"'),
    ),
    "conversion/engine/tensor_view.py::MappedView._refused": (
        "keep_others = true\n" + _rule('"q"', '"x"', "{ transpose = [1, 2, 0] }"),
        "keep_others = true\n" + _rule('"q"', '"x"', "{ transpose = [1, 0] }"),
    ),
    f"{_OPS}_check_size": (
        "keep_others = true\n" + _rule(_QK, '"qk"', '{ concat = { dim = 0, sizes = ["4", "5"] } }'),
        "keep_others = true\n" + _rule(_QK, '"qk"', '{ concat = { dim = 0, sizes = ["4", "4"] } }'),
    ),
    f"{_OPS}_Concat.forward": (
        "keep_others = true\n" + _rule(_QK, '"qk"', '{ concat = { dim = 0, sizes = ["4"] } }'),
        "keep_others = true\n" + _rule(_QK, '"qk"', '{ concat = { dim = 0, sizes = ["4", "4"] } }'),
    ),
    f"{_OPS}_Interleave.make": (
        "keep_others = true\n" + _rule('["q", "k", "n"]', '["a", "b", "c"]', "{ rope = { heads = [1, 1] } }"),
        "keep_others = true\n"
        + _rule('["q", "k", "n"]', '["a", "b", "c"]', "{ rope = { heads = [1, 1, 0] } }"),
    ),
    f"{_OPS}parse_operation": (
        "keep_others = true\n" + _rule('"q"', '"x"', "{ permute = [1, 0] }"),
        "keep_others = true\n" + _rule('"q"', '"x"', "{ transpose = [1, 0] }"),
    ),
    "conversion/rules/rule_file.py::KeyRule.__post_init__": (
        "keep_others = true\n" + _rule('"q"', '"x.{l}"'),
        "keep_others = true\n" + _rule('"q"', '"x"'),
    ),
    "conversion/rules/rule_file.py::_bad": ("keep = true\n", "keep_others = true\n" + _rule('"q"', '"x"')),
}


@pytest.mark.parametrize("site", RULES_OF_SITE)
@runs(*RULES_OF_SITE)
def test_rules_that_are_corrected(site: str, tmp_path: Path) -> None:
    """As the remedy says; every value is in the result."""
    bad, good = RULES_OF_SITE[site]
    tensors = {"q": torch.arange(8.0).view(4, 2), "k": -torch.arange(8.0).view(4, 2), "n": torch.ones(2)}
    source, rules = torch_file(tmp_path / "a.pt", tensors), tmp_path / "rules.toml"
    given = ["--rules", rules, "--rules-to", "ours"]
    rules.write_text(f"format = 1\n{bad}")
    refused(command, "to-torch", source, tmp_path / "b.pt", *given)
    rules.write_text(f"format = 1\n{good}")
    command("to-torch", source, tmp_path / "b.pt", *(given if good else ()))
    found = torch.cat([value.flatten() for value in torch.load(tmp_path / "b.pt").values()])
    kept = [value for name, value in tensors.items() if f'[[drop]]\nhf = "{name}"' not in good]
    assert found.sort().values.equal(torch.cat([value.flatten() for value in kept]).sort().values)


@runs(f"{_APPLY}_apply")
def test_a_rule_that_fails_in_each_layer(tmp_path: Path) -> None:
    """One error for all layers, whose remedy corrects them all."""
    tensors = {f"{layer}.{name}": torch.full((4, 2), 1.0 + layer) for layer in range(3) for name in "qk"}
    source, rules = torch_file(tmp_path / "a.pt", tensors), tmp_path / "r.toml"
    given = ["--rules", rules, "--rules-to", "ours"]
    rule = _rule('["{l}.q", "{l}.k"]', '"{l}.qk"', '{ concat = { dim = 0, sizes = ["4", "SIZE"] } }')
    rules.write_text("format = 1\n" + rule.replace("SIZE", "5"))
    refused(command, "to-torch", source, tmp_path / "b.pt", *given)
    rules.write_text("format = 1\n" + rule.replace("SIZE", "4"))
    command("to-torch", source, tmp_path / "b.pt", *given)
    wanted = {f"{layer}.qk": torch.full((8, 2), 1.0 + layer) for layer in range(3)}
    assert same(torch.load(tmp_path / "b.pt"), wanted)


@runs("conversion/rules/apply_to_tensors.py::_bad")
@pytest.mark.parametrize("target", ["to-torch", "to-native", "to-hf", "to-fsdp2", "to-zarr"])
def test_rules_with_sizes_of_the_config(target: str, tmp_path: Path) -> None:
    """Every command has the option that the remedy names."""
    source, rules = (
        torch_file(tmp_path / "a.pt", {"q": torch.ones(4, 2), "k": torch.zeros(4, 2)}),
        tmp_path / "r.toml",
    )
    rules.write_text(
        "format = 1\n" + _rule(_QK, '"qk"', '{ concat = { dim = 0, sizes = ["size", "size"] } }')
    )
    given = [source, tmp_path / "out", "--rules", rules, "--rules-to", "ours"]
    remedy = refused(command, target, *given)
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets/config.json").write_text('{"size": 4}')
    command(target, *given, *flag(remedy, "--assets")[:1], tmp_path / "assets")
    assert open_source(str(tmp_path / "out")).tensors["qk"].info.shape == (8, 2)


@runs("conversion/rules/apply_to_state.py::_renamed")
def test_a_group_of_unknown_parameters(tmp_path: Path) -> None:
    """The option that leaves the optimizer out."""
    state = _optimizer(exp_avg=torch.ones(8, 6))
    state["param_groups"][0]["params"].append("other")
    source = torch_file(tmp_path / "a.pt", {"model": MODEL, "optimizer": state})
    (tmp_path / "rules.toml").write_text(RULES)
    given = ["--rules", tmp_path / "rules.toml", "--rules-to", "ours"]
    remedy = refused(command, "to-native", source, tmp_path / "out", *given)
    command("to-native", source, tmp_path / "out", *given, *flag(remedy, "--optimizer"))
    assert len(native_tensors(tmp_path / "out")) == 2


@runs("conversion/engine/carried_state.py::own_optimizer")
def test_an_optimizer_of_two_models(tmp_path: Path) -> None:
    """The option that leaves it out."""
    state = {"student": MODEL, "teacher": MODEL, "optimizer": _optimizer(exp_avg=torch.ones(8, 6))}
    source, rules = torch_file(tmp_path / "a.pt", state), tmp_path / "rules.toml"
    rules.write_text(RULES)
    given = ["--rules", rules, "--rules-to", "ours", "--model-prefix", "student"]
    remedy = refused(command, "to-native", source, tmp_path / "out", *given)
    command("to-native", source, tmp_path / "out", *given, *flag(remedy, "--optimizer"))
    assert torch.equal(native_tensors(tmp_path / "out")["student.down.weight"], MODEL["up.weight"])


# Merges


@runs("conversion/merge_adapter.py::_Merge.add", "conversion/merge_adapter.py::_Merge.find_root")
def test_bases_that_an_adapter_does_not_fit(tmp_path: Path) -> None:
    """A quantized base is dequantized; rules lead to the names that the adapter has."""
    weight = torch.ones(128, 256)
    base = hf_folder(tmp_path / "base", {"up.weight": weight})
    command("to-hf", base, tmp_path / "q", "--quantize", "fp8-128x128")
    pair = {"up.lora_A.weight": torch.ones(2, 256), "up.lora_B.weight": torch.ones(128, 2)}
    adapter = adapter_folder(tmp_path / "adapter", pair)
    given = [tmp_path / "q", adapter, tmp_path / "out"]
    remedy = refused(command, "merge-adapter", *given)
    command("merge-adapter", *given, *flag(remedy, "--dequantize"))
    assert torch.equal(written(tmp_path / "out")["up.weight"].float(), weight + 4)

    base = hf_folder(tmp_path / "renamed", {"old.weight": weight})
    given = [base, adapter, tmp_path / "other"]
    remedy = refused(command, "merge-adapter", *given)
    option, value = flag(remedy, "--rules")
    assert value == "FILE:" and "(hf)" in remedy and "(ours)" in remedy
    (tmp_path / "rules.toml").write_text('format = 1\n[[rule]]\nhf = "old.weight"\nours = "up.weight"\n')
    command("merge-adapter", *given, option, tmp_path / "rules.toml")
    assert torch.equal(written(tmp_path / "other")["old.weight"], weight + 4)


# Codes


def _codes(**config: object) -> dict[str, torch.Tensor]:
    return {
        "a.weight": torch.ones(4, 8).to(torch.float8_e4m3fn),
        "a.weight_scale_inv": torch.full((2, 3), 2.0),
    }


@runs("conversion/quantization/blocks.py::_grid_of")
def test_blocks_of_an_unknown_size(tmp_path: Path) -> None:
    """The config that the remedy asks for, by its option."""
    source = torch_file(tmp_path / "a.pt", _codes())
    given = [source, tmp_path / "out", "--dequantize", "fp32"]
    remedy = refused(command, "to-torch", *given)
    settings = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [2, 3]}}
    assets = tmp_path / "assets"
    assets.mkdir()
    (assets / "config.json").write_text(json.dumps(settings))
    command("to-torch", *given, *flag(remedy, "--assets")[:1], assets)
    assert torch.equal(torch.load(tmp_path / "out")["a.weight"], torch.full((4, 8), 2.0))


# Classes


@runs("conversion/convert.py::_check_is_whole")
def test_a_folder_without_all_of_its_class(tmp_path: Path) -> None:
    """The option that the remedy writes."""
    weights = llama()
    weights.pop("model.norm.weight")
    names = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 11}
    source = model_folder(tmp_path / "hf", weights, **names)
    remedy = refused(command, "to-torch", source, tmp_path / "a.pt")
    command("to-torch", source, tmp_path / "a.pt", *flag(remedy, "--include"))
    assert same(torch.load(tmp_path / "a.pt"), weights)


@runs("conversion/formats/huggingface/class_check.py::ClassCheck.require")
@pytest.mark.parametrize("way", ["--no-assets", "--assets"])
def test_a_result_that_its_class_does_not_load(way: str, tmp_path: Path) -> None:
    """Without a config.json, or with that of the model."""
    weights = llama()
    names = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 11}
    own = model_folder(tmp_path / "own", weights, **names)
    source = model_folder(tmp_path / "hf", weights, **names, num_hidden_layers=3)
    remedy = refused(command, "to-hf", source, tmp_path / "out")
    assert way in remedy
    command("to-hf", source, tmp_path / "out", way, *([own] if way == "--assets" else []))
    assert same(written(tmp_path / "out"), weights)


@runs("conversion/formats/huggingface/class_check.py::ClassCheck._require_no_adapter")
def test_a_base_with_its_adapter(tmp_path: Path) -> None:
    """Both commands of the remedy: the adapter is written, and added to the base."""
    state = {name.replace("up.weight", "up.base_layer.weight"): value for name, value in MODEL.items()}
    run = torch_file(
        tmp_path / "run.pt",
        {ROOT + name: value for name, value in state.items()}
        | {name: value for name, value in in_training("default").items() if "lora" in name},
    )
    base, settings = hf_folder(tmp_path / "base", MODEL), adapter_folder(tmp_path / "settings")
    remedy = refused(command, "to-hf", run, tmp_path / "out", "--assets", base)
    assert "to-hf --adapter" in remedy and "merge-adapter" in remedy
    command("to-hf", run, tmp_path / "adapter", "--adapter", "--assets", settings)
    command("merge-adapter", base, tmp_path / "adapter", tmp_path / "out")
    added = 2 * PAIR["up.lora_B.weight"] @ PAIR["up.lora_A.weight"]
    assert torch.equal(written(tmp_path / "out")["up.weight"], MODEL["up.weight"] + added)


@runs("conversion/formats/huggingface/class_check.py::ClassCheck.require[1]")
def test_a_check_that_cannot_be_made(tmp_path: Path) -> None:
    """Without the option that the remedy names."""
    source = torch_file(tmp_path / "a.pt", MODEL)
    remedy = refused(command, "to-hf", source, tmp_path / "out", "--require-check")
    assert flag(remedy, "--require-check") == ["--require-check"]
    command("to-hf", source, tmp_path / "out")
    assert same(written(tmp_path / "out"), MODEL)


@runs("conversion/live/huggingface.py::HuggingFace._class_warnings")
def test_a_required_check_in_a_job(tmp_path: Path) -> None:
    """Without the argument; the command of the remedy runs the class."""
    assets = hf_folder(tmp_path / "hf", MODEL)
    remedy = refused(
        save, tmp_path / "out", dict(MODEL), format=HuggingFace(assets=assets, require_check=True)
    )
    assert argument(remedy, "require_check") == {"require_check": True}
    save(tmp_path / "out", dict(MODEL), format=HuggingFace(assets=assets))
    save(tmp_path / "native", dict(MODEL))
    command(*commands(remedy.replace(",", ";")), tmp_path / "native", tmp_path / "hf2", "--assets", assets)
    assert same(written(tmp_path / "out"), MODEL) and same(written(tmp_path / "hf2"), MODEL)


@runs("conversion/suggest.py::_unknown")
def test_rules_to_unknown_names(tmp_path: Path) -> None:
    """A folder with the weights."""
    source = torch_file(tmp_path / "a.pt", MODEL)
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config.json").write_text("{}")
    refused(command, "rules", "--suggest", source, tmp_path / "config")
    named = {f"model.{name}": value for name, value in MODEL.items()}
    assert "model." in command("rules", "--suggest", source, hf_folder(tmp_path / "hf", named))


# Plans


@runs(
    "conversion/formats/huggingface/meta_model.py::meta_model",
    "conversion/formats/huggingface/meta_model.py::meta_model[1]",
)
def test_a_plan_without_settings(tmp_path: Path) -> None:
    """Layouts alone, or the name of a class, as the remedies write them."""
    folder = tmp_path / "hf"
    hf_folder(folder, MODEL)
    (folder / "config.json").unlink()
    remedy = refused(command, "plan", folder, "--gpus", 8)
    assert "rank" in command("plan", folder, *flag(remedy, "--shards"))
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    (folder / "config.json").write_text(json.dumps(sizes))
    remedy = refused(command, "plan", folder, "--gpus", 8)
    classes = json.loads(text_in(remedy, r'\["\w+"\]'))
    (folder / "config.json").write_text(json.dumps(sizes | {"architectures": classes}))
    assert "LlamaForCausalLM" in command("plan", folder, "--gpus", 8, "--tokens", 16)
