"""States of several models and several optimizers: nothing is lost, nothing goes to the wrong model, and what
can hold one model only asks which."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from tests.support.processes import run_command
from vescale_fsdp.checkpoint import load as load_native
from vescale_fsdp.checkpoint import save as save_native
from vescale_fsdp.checkpoint import verify
from vescale_fsdp.conversion import open_source
from vescale_fsdp.conversion.convert import ConvertOptions, convert
from vescale_fsdp.conversion.diff import diff
from vescale_fsdp.errors import ConversionError, option

TARGETS = ("torch", "dcp", "zarr", "native")
RULES = """
format = 1
[[rule]]
hf = "layers.{l}.kernel"
ours = "{l}.weight"
ops = [{ transpose = [1, 0] }]
[[rule]]
hf = "layers.{l}.bias"
ours = "{l}.bias"
"""


def _model(seed: int, wide: int = 4) -> dict[str, torch.Tensor]:
    """Equal inner names, other values; shapes by ``wide``."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, wide), torch.nn.Linear(wide, 2)).state_dict()


def _optimizer(model: dict[str, torch.Tensor], seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    state = {
        fqn: {"exp_avg": torch.randn_like(value), "step": torch.tensor(float(seed))}
        for fqn, value in model.items()
    }
    return {"state": state, "param_groups": [{"lr": float(seed), "params": list(model)}]}


def _flat(optimizer: dict[str, Any]) -> dict[str, Any]:
    """The same in the form that torch flattens it to."""
    state = {
        f"state.{fqn}.{kind}": value
        for fqn, kinds in optimizer["state"].items()
        for kind, value in kinds.items()
    }
    (group,) = optimizer["param_groups"]
    return state | {f"param_groups.{fqn}.lr": group["lr"] for fqn in group["params"]}


def _states() -> dict[str, dict[str, Any]]:
    """States of two models by how they are nested."""
    g, d, wide = _model(1), _model(2), _model(3, wide=6)
    of_g, of_d, of_wide = _optimizer(g, 11), _optimizer(d, 12), _optimizer(wide, 13)
    return {
        "bare": {"generator": g, "discriminator": d},
        "with counter": {"generator": g, "discriminator": d, "step": torch.tensor(7)},
        "named": {"generator": g, "discriminator": d, "optim_g": of_g, "optim_d": of_d, "epoch": 3},
        "named long": {
            "netG": g,
            "netD": d,
            "optimizerD": of_d,
            "optimizerG": of_g,
            "train_state": {"step": torch.tensor(1)},
        },
        "beside": {
            "generator": {"model": g, "optimizer": of_g},
            "discriminator": {"model": d, "optimizer": of_d},
        },
        "by shape": {"generator": g, "discriminator": wide, "first": of_wide, "second": of_g},
        "flat": {"generator": g, "discriminator": d, "optim_g": _flat(of_g), "optim_d": _flat(of_d)},
        "accelerate": {
            "pytorch_model_fsdp_0": g,
            "pytorch_model_fsdp_1": d,
            "optimizer_1": of_d,
            "optimizer_0": of_g,
        },
        "list": {"models": [g, d]},
    }


STATES = _states()
_OPTIMIZER_OF_FIRST = {
    "named": ("optim_g",),
    "named long": ("optimizerG",),
    "beside": ("generator", "optimizer"),
    "by shape": ("second",),
    "flat": ("optim_g",),
    "accelerate": ("optimizer_0",),
}
_FIRST = {
    "named long": "netG",
    "beside": "generator.model",
    "accelerate": "pytorch_model_fsdp_0",
    "list": "models.0",
}


def _leaves(state: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    if isinstance(state, (dict, list)):
        items = state.items() if isinstance(state, dict) else enumerate(state)
        return {k: v for key, inner in items for k, v in _leaves(inner, (*path, key)).items()}
    return {path: state.tolist() if isinstance(state, torch.Tensor) else state}


def _nested(folder: Path, kind: str) -> Any:
    """A result as its nested state, read as torch or the library would."""
    if kind != "torch":
        convert(open_source(str(folder)), f"{folder}.back.pt", "torch")
        return torch.load(f"{folder}.back.pt", weights_only=True)
    return torch.load(folder, weights_only=True)


def _save(kind: str, state: dict[str, Any], folder: Path) -> str:
    if kind == "dcp":
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    elif kind == "native":
        save_native(folder, state)
    else:
        torch.save(state, f"{folder}.pt")
        return f"{folder}.pt"
    return str(folder)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", sorted(STATES))
def test_whole_states_go_everywhere(tmp_path: Path, name: str, target: str) -> None:
    """Every tensor and value of every model and optimizer arrives under its own name."""
    source = open_source(_save("torch", STATES[name], tmp_path / "src"))
    out = tmp_path / ("out.pt" if target == "torch" else "out")
    report = convert(source, str(out), target, ConvertOptions(ranks=2))
    assert report.dropped_optimizer == 0 and report.dropped_others == ()
    assert _leaves(_nested(out, target)) == _leaves(STATES[name])
    assert not verify(open_source(str(out))).problems
    found, compared = diff(source, open_source(str(out)))
    assert found == () and compared == len(source.tensors) >= 8


@pytest.mark.parametrize("source", ["dcp", "native"])
def test_models_are_found_in_what_torch_and_the_library_wrote(tmp_path: Path, source: str) -> None:
    """What torch and the library wrote themselves."""
    state = STATES["named"]
    opened = open_source(_save(source, state, tmp_path / "src"))
    convert(opened, str(tmp_path / "a.pt"), "torch")
    assert _leaves(torch.load(tmp_path / "a.pt", weights_only=True)) == _leaves(state)
    convert(opened, str(tmp_path / "n"), "native", ConvertOptions(ranks=3))
    target = {"generator": {k: torch.zeros_like(v) for k, v in state["generator"].items()}}
    load_native(tmp_path / "n", target, strict=False)
    assert _leaves(target) == _leaves({"generator": state["generator"]})


@pytest.mark.parametrize("form", ["nested", "flattened"])
@pytest.mark.parametrize("name", ["named", "flat", "beside"])
def test_forms_of_several_optimizers(tmp_path: Path, name: str, form: str) -> None:
    """Each optimizer changes its form alone, and is the same again after the way back."""
    source = open_source(_save("torch", STATES[name], tmp_path / "src"))
    convert(source, str(tmp_path / "a.pt"), "torch", ConvertOptions(optimizer=form))
    there = torch.load(tmp_path / "a.pt", weights_only=True)
    home = there
    for part in _OPTIMIZER_OF_FIRST[name]:
        home = home[part]
    assert ("state" in home) == (form == "nested")
    original = "flattened" if name == "flat" else "nested"
    convert(
        open_source(str(tmp_path / "a.pt")),
        str(tmp_path / "b.pt"),
        "torch",
        ConvertOptions(optimizer=original),
    )
    assert _leaves(torch.load(tmp_path / "b.pt", weights_only=True)) == _leaves(STATES[name])


@pytest.mark.parametrize("name", sorted(STATES))
def test_a_repository_holds_one(tmp_path: Path, name: str) -> None:
    """Without a choice there is none; with one it is that model."""
    source = open_source(_save("torch", STATES[name], tmp_path / "src"))
    first = _FIRST.get(name, "generator")
    with pytest.raises(ConversionError, check=lambda error: option("model_prefix", first) in error.todo):
        convert(source, str(tmp_path / "hf"), "hf")
    assert not (tmp_path / "hf").exists()
    convert(source, str(tmp_path / "hf"), "hf", ConvertOptions(model_prefix=first))
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert _leaves(found) == _leaves(dict(_model(1)))
    assert diff(source, open_source(str(tmp_path / "hf")), model_prefix=first)[1] == 4
    assert diff(source, open_source(str(tmp_path / "hf")), model_prefix=first)[0] == ()


def test_all_as_one_model(tmp_path: Path) -> None:
    """Parts of one model that lie in dicts of their own: an empty prefix says so."""
    source = open_source(_save("torch", STATES["bare"], tmp_path / "src"))
    convert(source, str(tmp_path / "hf"), "hf", ConvertOptions(model_prefix=""))
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert sorted(found) == sorted(f"{m}.{k}" for m, sd in STATES["bare"].items() for k in sd)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", sorted({*STATES} - {"list"}))
def test_rules_change_the_chosen_model_alone(tmp_path: Path, name: str, target: str) -> None:
    """The model and its own optimizer take the rules; the other model and its optimizer stay as they were."""
    (tmp_path / "r.toml").write_text(RULES)
    first = _FIRST.get(name, "generator")
    source = open_source(_save("torch", STATES[name], tmp_path / "src"))
    out = tmp_path / ("out.pt" if target == "torch" else "out")
    rules: dict[str, Any] = {"rules": str(tmp_path / "r.toml"), "rules_to": "hf"}
    with pytest.raises(ConversionError, check=lambda error: option("model_prefix", first) in error.todo):
        convert(source, str(out), target, ConvertOptions(**rules))
    report = convert(source, str(out), target, ConvertOptions(**rules, model_prefix=first))
    assert len(report.warnings) == 1
    expected: dict[tuple[Any, ...], Any] = {}
    changed = [(*first.split("."),), *([_OPTIMIZER_OF_FIRST[name]] if name in _OPTIMIZER_OF_FIRST else [])]
    for path, leaf in _leaves(STATES[name]).items():
        mine = any(path[: len(home)] == home for home in changed)
        expected |= dict([_renamed(path, leaf)]) if mine else {path: leaf}
    found = _leaves(_nested(out, target))
    assert found == expected and found != _leaves(STATES[name])


def _renamed(path: tuple[Any, ...], leaf: Any) -> tuple[tuple[Any, ...], Any]:
    def new(text: str) -> str:
        for layer in "01":
            text = text.replace(f"{layer}.weight", f"layers.{layer}.kernel")
            text = text.replace(f"{layer}.bias", f"layers.{layer}.bias")
        return text

    is_matrix = isinstance(leaf, list) and leaf and isinstance(leaf[0], list)
    value = torch.tensor(leaf).t().tolist() if is_matrix else new(leaf) if isinstance(leaf, str) else leaf
    return tuple(new(part) if isinstance(part, str) else part for part in path), value


@pytest.mark.parametrize("others", [{"optimizer": "g"}, {"first": "g", "second": "d"}])
def test_an_optimizer_of_nobody_is_refused(tmp_path: Path, others: dict[str, str]) -> None:
    """Equal names and shapes, and nothing in place or name: rules are not applied by guess."""
    (tmp_path / "r.toml").write_text(RULES)
    models = {"g": _model(1), "d": _model(2)}
    state = {
        "generator": models["g"],
        "discriminator": models["d"],
        **{name: _optimizer(models[key], 1) for name, key in others.items()},
    }
    source = open_source(_save("torch", state, tmp_path / "src"))
    options: dict[str, Any] = {
        "rules": str(tmp_path / "r.toml"),
        "rules_to": "hf",
        "model_prefix": "generator",
    }
    with pytest.raises(ConversionError, check=lambda error: option("optimizer", "drop") in error.todo):
        convert(source, str(tmp_path / "o.pt"), "torch", ConvertOptions(**options))
    convert(source, str(tmp_path / "o.pt"), "torch", ConvertOptions(**options, optimizer="drop"))
    assert sorted(torch.load(tmp_path / "o.pt", weights_only=True)) == ["discriminator", "generator"]


def test_numbered_parameters_and_rules(tmp_path: Path) -> None:
    """What torch's own optimizer saves says no names: moments would stay as they were beside changed weights."""
    (tmp_path / "r.toml").write_text(RULES)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    for momentum, match in ((0.9, "number 0"), (0.0, "parameters that the model lacks")):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        source = open_source(_save("torch", state, tmp_path / "src"))
        options = ConvertOptions(rules=str(tmp_path / "r.toml"), rules_to="hf")
        with pytest.raises(ConversionError, match=match):
            convert(source, str(tmp_path / "o.pt"), "torch", options)


def test_two_sources_of_one_name(tmp_path: Path) -> None:
    """Rules whose outcome meets another entry's name, or each other's, name both."""

    def run(state: dict[str, Any], *pairs: tuple[str, str], **options: str) -> None:
        text = "format = 1\n" + "".join(f'[[rule]]\nhf = "{hf}"\nours = "{ours}"\n' for hf, ours in pairs)
        (tmp_path / "r.toml").write_text(text)
        chosen = ConvertOptions(rules=str(tmp_path / "r.toml"), rules_to="hf", **options)
        convert(open_source(_save("torch", state, tmp_path / "src")), str(tmp_path / "o.pt"), "torch", chosen)

    state = {"generator": {"a": torch.ones(2), "b": torch.ones(3)}, "generator.c": torch.ones(1)}
    with pytest.raises(ConversionError, check=lambda error: error.got.split()[0] == "x"):
        run(state, ("x", "a"), ("x", "b"), ("y", "c"), model_prefix="generator")
    state = {"a": torch.ones(2), "train_state": {"step": torch.ones(4)}}
    with pytest.raises(ConversionError, match=r"\ba\b.*\btrain_state\.step\b"):
        run(state, ("train_state.step", "a"))


def test_modules_that_nest_their_state(tmp_path: Path) -> None:
    """A dict inside a model's dict has names of its own, which may be those outside of it."""
    state = {"model": {"a": torch.ones(2), "extra": {"a": torch.zeros(2)}}, "optimizer": {}}
    (tmp_path / "r.toml").write_text('format = 1\nkeep_others = true\n[[rule]]\nhf = "b"\nours = "a"\n')
    source = open_source(_save("torch", state, tmp_path / "src"))
    convert(source, str(tmp_path / "n"), "native", ConvertOptions(ranks=2))
    convert(open_source(str(tmp_path / "n")), str(tmp_path / "o.pt"), "torch")
    assert _leaves(torch.load(tmp_path / "o.pt", weights_only=True)) == _leaves(state)
    options = ConvertOptions(rules=str(tmp_path / "r.toml"), rules_to="hf")
    convert(source, str(tmp_path / "r.pt"), "torch", options)
    found = torch.load(tmp_path / "r.pt", weights_only=True)["model"]
    assert {name: value.tolist() for name, value in found.items()} == {"b": [1, 1], "extra.a": [0, 0]}


def test_commands_name_the_models(tmp_path: Path) -> None:
    """inspect lists them, --prefix asks which, and the refusal is one message with exit code 1."""
    path = _save("torch", STATES["bare"], tmp_path / "src")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "vescale_fsdp.conversion", *arguments]
        return run_command(command)

    found = json.loads(run("inspect", path, "--json").stdout)
    assert found["models"] == ["generator.", "discriminator."] and found["model_prefix"] is None
    assert "generator., discriminator." in run("inspect", path).stdout
    for arguments in (("to-hf",), ("to-torch", "--prefix", "m")):
        failed = run(arguments[0], path, str(tmp_path / "o"), *arguments[1:])
        assert failed.returncode == 1 and re.search(r"\bgenerator\b.*\bdiscriminator\b", failed.stderr)
    out = run("to-hf", path, str(tmp_path / "hf"), "--model-prefix", "generator")
    assert out.returncode == 0, out.stderr
    both = run("diff", path, str(tmp_path / "hf"), "--model-prefix", "generator")
    assert both.returncode == 0 and ["4", "0"] in [
        re.findall(r"\d+", line) for line in both.stdout.splitlines()
    ]
