"""Key rules on a training state: the optimizer's tensors and options follow their parameters, or are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.dtype_zoo import same_bytes
from tests.support.rule_cases import GROUPED_EXPERTS, convert_in_parts, experts, hf_folder, llama
from vescale_fsdp.conversion import ConvertOptions, convert, open_source
from vescale_fsdp.conversion.rules.apply_to_state import _flat_entry
from vescale_fsdp.errors import ConversionError


@pytest.mark.parametrize("flat", [False, True])
def test_moments_follow_their_parameters(tmp_path: Path, flat: bool) -> None:
    """Optimizer state takes the same rules, steps and groups the new names, nested and flattened."""
    source = hf_folder(tmp_path / "hf", llama())
    convert_in_parts(source, tmp_path / "ours.pt", "torch", rules="torchtitan-llama")
    model = torch.load(tmp_path / "ours.pt", weights_only=True)
    moments = {name: torch.randn_like(value) for name, value in model.items()}
    if flat:
        optimizer: dict[str, Any] = {}
        for name in model:
            optimizer |= {f"state.{name}.exp_avg": moments[name], f"state.{name}.step": torch.tensor(5.0)}
            optimizer[f"param_groups.{name}.lr"] = 0.5
    else:
        state = {name: {"exp_avg": moments[name], "step": torch.tensor(5.0)} for name in model}
        optimizer = {"state": state, "param_groups": [{"lr": 0.5, "params": list(model)}]}
    dcp.save(
        {"model": model, "optimizer": optimizer, "epoch": 3}, checkpoint_id=tmp_path / "dcp", no_dist=True
    )
    options = {"rules": "torchtitan-llama", "rules_to": "hf", "assets": str(source)}
    convert_in_parts(tmp_path / "dcp", tmp_path / "out.pt", "torch", **options)
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert sorted(loaded["model"]) == sorted(llama()) and loaded["epoch"] == 3
    key = "model.layers.0.self_attn.q_proj.weight"
    expected = (
        moments["layers.0.attention.qkv_linear.wq.weight"].view(6, 2, 2, 24).transpose(1, 2).reshape(24, 24)
    )
    if flat:
        assert torch.equal(loaded["optimizer"][f"state.{key}.exp_avg"], expected)
        assert (
            loaded["optimizer"][f"state.{key}.step"] == 5
            and loaded["optimizer"][f"param_groups.{key}.lr"] == 0.5
        )
        assert len(loaded["optimizer"]) == 3 * len(model)
    else:
        assert torch.equal(loaded["optimizer"]["state"][key]["exp_avg"], expected)
        assert loaded["optimizer"]["state"][key]["step"] == 5
        (group,) = loaded["optimizer"]["param_groups"]
        assert group["lr"] == 0.5 and sorted(group["params"]) == sorted(llama())


@pytest.mark.parametrize("form", ["nested", "flattened"])
def test_a_tied_parameter_is_optimized_once(tmp_path: Path, form: str) -> None:
    """Its twin comes back as a weight, without a step or a group; options follow the rules in either form."""
    weights = {name: value for name, value in llama().items() if name != "lm_head.weight"}
    assets = hf_folder(tmp_path / "hf", weights, tie_word_embeddings=True)
    state = {name: {"exp_avg": value + 1, "step": torch.tensor(5.0)} for name, value in weights.items()}
    optimizer = {"state": state, "param_groups": [{"lr": 0.5, "params": list(weights)}]}
    torch.save({"model": weights, "optimizer": optimizer}, tmp_path / "hf.pt")
    options = {"rules": "torchtitan-llama", "rules_to": "ours", "assets": str(assets), "optimizer": form}
    convert_in_parts(tmp_path / "hf.pt", tmp_path / "ours.pt", "torch", **options)
    loaded = torch.load(tmp_path / "ours.pt", weights_only=True)
    names = set(loaded["model"]) - {"lm_head.weight"}
    assert len(names) == len(weights) == len(loaded["model"]) - 1
    if form == "nested":
        assert set(loaded["optimizer"]["state"]) == names
        assert set(loaded["optimizer"]["param_groups"][0]["params"]) == names
    else:
        kinds = ("state.{}.exp_avg", "state.{}.step", "param_groups.{}.lr")
        assert set(loaded["optimizer"]) == {kind.format(name) for name in names for kind in kinds}


def test_moments_of_experts_are_taken_apart_and_grouped(tmp_path: Path) -> None:
    """Moments of a grouped tensor go to its experts, every one with its step and options; grouped again they are the
    same state."""
    source = hf_folder(tmp_path / "hf", experts("mlp", "gate_proj", "up_proj", "down_proj"))
    convert_in_parts(source, tmp_path / "grouped.pt", "torch", rules=GROUPED_EXPERTS)
    model = torch.load(tmp_path / "grouped.pt", weights_only=True)
    moments = {name: torch.randn_like(value) for name, value in model.items()}
    state = {name: {"exp_avg": moments[name], "step": torch.tensor(4.0)} for name in model}
    optimizer = {"state": state, "param_groups": [{"lr": 0.5, "params": list(model)}]}
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    options = {"rules": GROUPED_EXPERTS, "assets": str(source)}
    convert_in_parts(tmp_path / "dcp", tmp_path / "apart.pt", "torch", rules_to="hf", **options)
    apart = torch.load(tmp_path / "apart.pt", weights_only=True)
    prefix = "model.layers.1.mlp.experts."
    up = apart["optimizer"]["state"][f"{prefix}2.up_proj.weight"]
    assert same_bytes(up["exp_avg"], moments[f"{prefix}gate_up_proj"][2, 10:]) and up["step"] == 4
    assert len(apart["model"]) == len(apart["optimizer"]["state"]) == 2 * (3 * 3 + 1) + 1
    assert sorted(apart["optimizer"]["param_groups"][0]["params"]) == sorted(apart["model"])
    convert_in_parts(tmp_path / "apart.pt", tmp_path / "again.pt", "torch", rules_to="ours", **options)
    again = torch.load(tmp_path / "again.pt", weights_only=True)
    assert sorted(again["optimizer"]["param_groups"][0]["params"]) == sorted(model)
    for name, value in state.items():
        assert same_bytes(again["model"][name], model[name])
        assert same_bytes(again["optimizer"]["state"][name]["exp_avg"], value["exp_avg"])
        assert again["optimizer"]["state"][name]["step"] == 4


def test_counters_of_parameters_of_one_item(tmp_path: Path) -> None:
    """A parameter with a single item (a scale) is no reason to take steps for moments, nor moments for steps."""
    weights = {"scale": torch.ones(1), "w": torch.ones(3)}
    state = {name: {"exp_avg": torch.rand_like(w), "step": torch.tensor(5.0)} for name, w in weights.items()}
    for number, kept in enumerate((["scale", "w"], ["scale"])):
        mine = {name: state[name] for name in kept}
        folder = tmp_path / str(number)
        dcp.save({"model": weights, "optimizer": {"state": mine}}, checkpoint_id=folder, no_dist=True)
        rules = 'format = 1\nkeep_others = true\n[[rule]]\nhf = "scale"\nours = "s"\n'
        (tmp_path / "r.toml").write_text(rules)
        options = {"rules": str(tmp_path / "r.toml"), "rules_to": "ours"}
        convert_in_parts(folder, tmp_path / f"{number}.pt", "torch", **options)
        made = torch.load(tmp_path / f"{number}.pt", weights_only=True)["optimizer"]["state"]
        assert sorted(made) == ["s", "w"][: len(kept)]
        assert same_bytes(made["s"]["exp_avg"], state["scale"]["exp_avg"]) and made["s"]["step"] == 5


def test_state_that_cannot_follow_is_refused(tmp_path: Path) -> None:
    """Row-factored state is not guessed at."""
    source = hf_folder(tmp_path / "hf", llama())
    state = {name: {"row": torch.ones(value.shape[0], 1)} for name, value in llama().items()}
    dcp.save({"model": llama(), "optimizer": {"state": state}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(ConversionError, check=lambda error: error.where.endswith(".row")):
        convert_in_parts(
            tmp_path / "dcp", tmp_path / "x.pt", "torch", rules="torchtitan-llama", assets=str(source)
        )


def test_a_cast_is_for_weights_not_for_moments(tmp_path: Path) -> None:
    """Every other operation moves items; a cast would spoil what the optimizer keeps in float32."""
    state = {"model": {"a": torch.ones(2)}, "optimizer": {"state": {"a": {"exp_avg": torch.rand(2)}}}}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    cast = 'ops = [{ cast = { to = "bfloat16", back = "float32" } }]'
    (tmp_path / "r.toml").write_text(f'format = 1\n[[rule]]\nhf = "a"\nours = "b"\n{cast}\n')
    options = {"rules": str(tmp_path / "r.toml"), "rules_to": "ours"}
    convert_in_parts(tmp_path / "dcp", tmp_path / "out.pt", "torch", **options)
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert loaded["model"]["b"].dtype == torch.bfloat16
    assert same_bytes(
        loaded["optimizer"]["state"]["b"]["exp_avg"], state["optimizer"]["state"]["a"]["exp_avg"]
    )


JOIN = """
format = 1
keep_others = true
[[rule]]
hf = ["q.weight", "k.weight"]
ours = "qk.weight"
ops = [{ concat = { dim = 0, sizes = [2, 3] } }]
"""


@pytest.mark.parametrize("form", ["nested", "flattened"])
@pytest.mark.parametrize("differs", ["nothing", "step", "lr", "group", "state"])
def test_parameters_that_are_joined_must_agree(tmp_path: Path, differs: str, form: str) -> None:
    """Steps, options and groups of the parts are one value in the result: refused where they differ, unless the first
    is asked for."""
    names = {"q.weight": 2, "k.weight": 3}
    steps = {"q.weight": 5.0, "k.weight": 6.0 if differs == "step" else 5.0}
    states = {
        name: {"exp_avg": torch.full((rows, 4), 1.0), "step": torch.tensor(steps[name])}
        for name, rows in names.items()
    }
    if differs == "state":
        del states["k.weight"]["step"]
    lrs = {"q.weight": 0.1, "k.weight": 0.2 if differs == "lr" else 0.1}
    if form == "nested":
        apart = differs in ("lr", "group")
        groups = (
            [{"lr": lrs[name], "params": [name]} for name in names]
            if apart
            else [{"lr": 0.1, "params": [*names]}]
        )
        optimizer: dict[str, object] = {"state": states, "param_groups": groups}
    else:
        optimizer = {f"state.{n}.{key}": value for n, state in states.items() for key, value in state.items()}
        optimizer |= {f"param_groups.{name}.lr": lrs[name] for name in names}
    model = {name: torch.randn(rows, 4) for name, rows in names.items()}
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "in", no_dist=True)
    (tmp_path / "rules.toml").write_text(JOIN)
    options = ConvertOptions(rules=str(tmp_path / "rules.toml"), rules_to="ours")
    source = open_source(str(tmp_path / "in"))
    is_refused = differs != "nothing" and not (form == "flattened" and differs == "group")
    if is_refused:
        with pytest.raises(ConversionError) as refused:
            convert(source, str(tmp_path / "out"), "dcp", options)
        if differs == "step":
            assert refused.value.got == "q.weight: 5.0, k.weight: 6.0"  # numbers, whatever stores them
        assert not (tmp_path / "out").exists()
    first = replace(options, on_disagreement="first" if is_refused else "refuse")
    convert(source, str(tmp_path / "out"), "dcp", first)
    found = open_source(str(tmp_path / "out"))
    assert found.info("optimizer.state.qk.weight.exp_avg").shape == (5, 4)
    step = {"optimizer.state.qk.weight.step": torch.zeros(())}
    dcp.load(step, checkpoint_id=tmp_path / "out", no_dist=True)
    assert step["optimizer.state.qk.weight.step"].item() == 5.0


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("name", ["state", "lr", "params", "state.w"])
def test_parameters_with_names_of_the_optimizers_keys(tmp_path: Path, name: str, flat: bool) -> None:
    """The optimizer's own keys keep their names, whatever parameters are called."""
    weights = {name: torch.rand(2, 3), "w": torch.rand(2, 3)}
    state = {each: {"exp_avg": value + 1} for each, value in weights.items()}
    groups = [{"lr": 0.5, "params": [*weights]}]
    optimizer: dict[str, Any] = {"state": state, "param_groups": groups}
    if flat:
        optimizer = {f"state.{each}.exp_avg": value + 1 for each, value in weights.items()}
        optimizer |= {f"param_groups.{each}.lr": 0.5 for each in weights}
    torch.save({"model": weights, "optimizer": optimizer}, tmp_path / "in.pt")
    rules = "format = 1\n"
    for number, each in enumerate(weights):
        rules += f'[[rule]]\nhf = "{each}"\nours = "new{number}"\nops = [{{ transpose = [1, 0] }}]\n'
    (tmp_path / "r.toml").write_text(rules)
    options = {"rules": str(tmp_path / "r.toml"), "rules_to": "ours"}
    convert_in_parts(tmp_path / "in.pt", tmp_path / "out.pt", "torch", **options)
    made = torch.load(tmp_path / "out.pt", weights_only=True)["optimizer"]
    moments = {f"new{number}": value.T + 1 for number, value in enumerate(weights.values())}
    if flat:
        assert sorted(made) == [
            f"{kind}.{new}.{key}"
            for kind, key in (("param_groups", "lr"), ("state", "exp_avg"))
            for new in moments
        ]
    else:
        assert made["param_groups"] == [{"lr": 0.5, "params": [*moments]}] and sorted(made["state"]) == [
            *moments
        ]
    for new, expected in moments.items():
        found = made[f"state.{new}.exp_avg"] if flat else made["state"][new]["exp_avg"]
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("last", "name", "renamed"),
    [
        ("state.s.exp_avg", "s", "state.new.exp_avg"),
        ("s.exp_avg", "s", "new.exp_avg"),
        ("state.a.s.step", "a.s", "state.new.step"),
        ("state.state.step", "state", "state.new.step"),
    ],
)
def test_a_short_name_is_found_between_dots(last: str, name: str, renamed: str) -> None:
    """A parameter's name may be the beginning of the word "state" in a flattened entry."""
    entry = _flat_entry(("optimizer", last), last, name)
    assert entry.rebuild("new") == ("optimizer", renamed)
