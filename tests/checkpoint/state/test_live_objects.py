"""Live modules and optimizers in a state: what is stored of them, and training that goes on with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from tests.support import models
from tests.support.distributed import cpu_mesh, run_ranks
from vescale_fsdp import Rows, fully_shard
from vescale_fsdp.checkpoint import async_save, load, read_state, save
from vescale_fsdp.checkpoint.state_dict import get_model_state_dict
from vescale_fsdp.errors import CheckpointError, PartialLoadError
from vescale_fsdp.optim import AdamW8bit, Muon, Shampoo

Make = Callable[[nn.Module], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True),
    "AdamW tensor lr": lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.01), foreach=False),
    "AdamW named": lambda m: torch.optim.AdamW(m.named_parameters(), lr=0.01),
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.01),
    "SGD dampening": lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9, dampening=0.3),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.01, initial_accumulator_value=0.1),
    "Adadelta": lambda m: torch.optim.Adadelta(m.parameters()),
    "Adamax": lambda m: torch.optim.Adamax(m.parameters(), lr=0.01),
    "ASGD": lambda m: torch.optim.ASGD(m.parameters(), lr=0.01, t0=2, lambd=0.1),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters(), lr=0.01),
    "RAdam": lambda m: torch.optim.RAdam(m.parameters(), lr=0.01),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, momentum=0.5, centered=True),
    "Rprop": lambda m: torch.optim.Rprop(m.parameters(), lr=0.01),
    "AdamW8bit": lambda m: AdamW8bit(m.parameters(), lr=0.01),
}
PLAIN_ONLY: dict[str, Make] = {
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.01),
    "LBFGS": lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=3),
    "Muon of torch": lambda m: torch.optim.Muon([p for p in m.parameters() if p.ndim == 2], lr=0.01),
}


class Net(nn.Module):
    """Two layers, one parameter that no step uses, one that is frozen, and a tied head."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b, self.tied = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.unused, self.frozen = nn.Linear(3, 3), nn.Linear(6, 6).requires_grad_(False)
        self.tied.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(self.frozen(torch.tanh(self.b(torch.tanh(self.a(x))))))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))

        def loss_of(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            return loss

        losses.append(optimizer.step(loss_of).item())
    return losses


@pytest.mark.parametrize("kind", [*OPTIMIZERS, *PLAIN_ONLY])
def test_a_fresh_optimizer_goes_on_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    """Losses and parameters after a restart are those of the run that went on; at step 0 and at step 3."""
    make = {**OPTIMIZERS, **PLAIN_ONLY}[kind]
    for steps in (0, 3):
        model = Net(1)
        optimizer = make(model)
        train(model, optimizer, range(steps))
        save(tmp_path / f"{steps}", {"model": model, "optimizer": optimizer})
        expected = train(model, optimizer, range(steps, 6))

        again = Net(2)
        other = make(again)
        untouched = make(Net(2))
        load(tmp_path / f"{steps}", {"model": again, "optimizer": other})
        assert train(again, other, range(steps, 6)) == expected
        for name, param in model.named_parameters():
            assert torch.equal(param, again.get_parameter(name)), name
        load(tmp_path / f"{steps}", {"model": model, "optimizer": optimizer})  # back to the step, in place
        assert train(model, optimizer, range(steps, 6)) == expected
        assert train(Net(1), untouched, range(0)) == []  # negative control: other moments give other losses
        if steps and kind not in ("SGD", "LBFGS", "Adafactor", "Rprop"):
            load(tmp_path / f"{steps}", {"model": again}, strict=False)
            assert train(again, make(again), range(steps, 6)) != expected


def test_a_new_run_begins_at_step_zero(tmp_path: Path) -> None:
    """A restore that finds nothing, and a save of a new optimizer, leave its step count alone."""
    model = Net(1)
    optimizer = torch.optim.Adam(model.parameters())
    save(tmp_path / "new", {"model": model, "optimizer": optimizer})
    assert not optimizer.state
    train(model, optimizer, range(4))
    save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    state = read_state(tmp_path / "c")
    assert state["optimizer.state.a.weight.step"].read().item() == 4
    assert not any("unused" in name or "frozen" in name for name in state.names() if "/state/" in name)
    load(tmp_path / "new", {"model": model, "optimizer": optimizer})
    assert not optimizer.state


def _sharded(
    path: Path, kind: str, rows: int | None, steps: range, restore: bool
) -> tuple[list[float], float]:
    make = {
        **OPTIMIZERS,
        "LBFGS": PLAIN_ONLY["LBFGS"],
        "Muon": lambda m: Muon(
            [p for p in m.parameters() if p.ndim == 2], adamw_params=[p for p in m.parameters() if p.ndim < 2]
        ),
        "Shampoo": lambda m: Shampoo(
            [p for p in m.parameters() if p.ndim == 2],
            adamw_params=[p for p in m.parameters() if p.ndim < 2],
            eps=1e-3,
        ),
    }[kind]
    model = models.build(2 if restore else 1)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=cpu_mesh(), granularity=None if rows is None else Rows(rows))
    optimizer = make(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    if restore:
        load(path, state)
    losses = []
    for step in steps:
        if step == 3 and not restore:
            async_save(path, state).wait()
        batch = torch.cat([models.batch(step, part, rows=2) for part in range(6)])

        def loss_of(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = models.loss_of(model, batch)
            loss.backward()
            return loss

        losses.append(optimizer.step(loss_of).item())
        scheduler.step()
    return losses, sum(param.to_local().numel() for param in model.parameters())


@pytest.mark.parametrize(
    "kind",
    [
        *("AdamW tensor lr", "AdamW8bit", "Shampoo"),
        *(
            pytest.param(kind, marks=pytest.mark.part("numerics"))
            for kind in ("SGD dampening", "ASGD", "Muon", "LBFGS")
        ),
    ],
)
def test_other_ranks_go_on(kind: str, tmp_path: Path) -> None:
    """Sharded state of live objects is loaded on another number of ranks, in other shards."""
    rows = 4 if kind in ("AdamW8bit", "Muon", "Shampoo") else 3
    expected, _ = run_ranks(2, _sharded, tmp_path / "c", kind, rows, range(6), False)[0]
    for world in (2, 3):
        found = run_ranks(world, _sharded, tmp_path / "c", kind, rows, range(3, 6), True)
        assert min(numel for _, numel in found) > 0
        torch.testing.assert_close(found[0][0], expected[3:], rtol=2e-5, atol=1e-6)


def test_states_of_torchs_functions_load_and_the_reverse(tmp_path: Path) -> None:
    """Live objects take nested and flattened state, by number too; dicts of torch's functions take theirs."""
    model = Net(1)
    optimizer = torch.optim.AdamW(
        [
            {"params": [*model.a.parameters()], "lr": 0.02},
            {"params": [*model.b.parameters(), model.tied.bias]},
        ]
    )
    train(model, optimizer, range(3))
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    forms: dict[str, Any] = {
        "live": optimizer,
        "nested": get_optimizer_state_dict(model, optimizer),
        "flat": get_optimizer_state_dict(model, optimizer, options=flat),
        "number": optimizer.state_dict(),
    }
    for form, value in forms.items():
        save(tmp_path / form, {"model": model, "optimizer": value})
    expected = train(model, optimizer, range(3, 6))

    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net(2)
        groups = [{"params": [*model.a.parameters()]}, {"params": [*model.b.parameters(), model.tied.bias]}]
        return model, torch.optim.AdamW(groups, lr=0.5)

    for form in forms:
        again, other = fresh()
        load(tmp_path / form, {"model": again, "optimizer": other})
        assert other.param_groups[0]["lr"] == 0.02
        assert train(again, other, range(3, 6)) == expected, form

        again, other = fresh()
        load(tmp_path / form, {"model": again, "optimizer": other})
        assert train(again, other, range(3, 6)) == expected, form

        for options in (None, flat):
            again, other = fresh()
            if form == "number" and options is not None:
                continue
            state = {"model": again, "optimizer": get_optimizer_state_dict(again, other, options=options)}
            load(tmp_path / form, state)
            moments = other.state[again.a.weight]
            assert moments["step"].item() == 3
            assert moments["exp_avg"].abs().sum() > 0


def test_a_flat_key_may_have_parts_within_a_kind(tmp_path: Path) -> None:
    """The parameter is the longest known name that begins the key, not all but the last part."""
    model = nn.Linear(2, 1, bias=False)
    flat = {"state.weight.extra.sums": torch.ones(1, 2)}
    save(tmp_path / "c", {"model": model, "optimizer": flat})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    load(tmp_path / "c", {"model": model, "optimizer": optimizer}, include="optimizer.state.*")
    assert torch.equal(optimizer.state[model.weight]["extra"]["sums"], torch.ones(1, 2))


def test_an_option_that_was_a_tensor_becomes_the_number_it_is(tmp_path: Path) -> None:
    """A schedule of the new run computes with numbers, whatever the saved run had."""
    model = nn.Linear(2, 1)
    saved = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25), foreach=False)
    save(tmp_path / "c", {"model": model, "optimizer": saved})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    load(tmp_path / "c", {"model": model, "optimizer": optimizer})
    lr = optimizer.param_groups[0]["lr"]
    assert type(lr) is float and lr == 0.25


def test_groups_are_matched_by_name(tmp_path: Path) -> None:
    """Groups in another order, split or in part take their own options; those that disagree are refused."""
    model = Net(1)
    a, b = [*model.a.parameters()], [*model.b.parameters()]
    optimizer = torch.optim.SGD([{"params": a, "lr": 0.1}, {"params": b, "lr": 0.2}], momentum=0.9)
    train(model, optimizer, range(2))
    save(tmp_path / "c", {"model": model, "optimizer": optimizer})

    again = Net(2)
    groups = [{"params": [*again.b.parameters()]}, {"params": [again.a.bias]}, {"params": [again.a.weight]}]
    other = torch.optim.SGD(groups, lr=0.5, momentum=0.9)
    load(tmp_path / "c", {"model": again, "optimizer": other})
    assert [group["lr"] for group in other.param_groups] == [0.2, 0.1, 0.1]
    assert torch.equal(
        other.state[again.a.bias]["momentum_buffer"], optimizer.state[model.a.bias]["momentum_buffer"]
    )

    merged = torch.optim.SGD([*again.a.parameters(), *again.b.parameters()], lr=0.5, momentum=0.9)
    before = again.a.weight.detach().clone()
    with pytest.raises(CheckpointError):
        load(tmp_path / "c", {"model": again, "optimizer": merged})
    assert not merged.state and torch.equal(again.a.weight, before)
    load(tmp_path / "c", {"model": again, "optimizer": merged}, include=["model/*", "optimizer/state/*"])
    assert merged.param_groups[0]["lr"] == 0.5 and len(merged.state) == 4


@pytest.mark.parametrize("odd", ["another model", "fewer", "more", "another kind", "numbers", "shapes"])
def test_what_does_not_fit_is_refused_before_anything_changes(odd: str, tmp_path: Path) -> None:
    """An optimizer of other parameters, of another class or with groups that numbers do not fit."""
    model = Net(1)
    optimizer = torch.optim.Adam([*model.a.parameters(), *model.b.parameters()], lr=0.1)
    train(model, optimizer, range(2))
    stored = optimizer.state_dict() if odd == "numbers" else optimizer
    save(tmp_path / "c", {"model": model, "optimizer": stored})

    again, params = Net(2), lambda m: [*m.a.parameters(), *m.b.parameters()]
    other: torch.optim.Optimizer = torch.optim.Adam(params(again))
    include = None
    if odd == "another model":
        other = torch.optim.Adam(params(Net(2)))
    elif odd == "fewer":
        other = torch.optim.Adam(again.a.parameters())
    elif odd == "more":
        other = torch.optim.Adam([*params(again), again.tied.bias])
    elif odd == "another kind":
        other = torch.optim.SGD(params(again), momentum=0.9)
    elif odd == "numbers":
        other = torch.optim.Adam([{"params": params(again)[:1]}, {"params": params(again)[1:]}])
    elif odd == "shapes":
        again.a = nn.Linear(6, 5)
        other, include = torch.optim.Adam(params(again)), "optimizer/*"
    before = again.b.weight.detach().clone()
    with pytest.raises(CheckpointError) as raised:
        load(tmp_path / "c", {"model": again, "optimizer": other}, include=include)
    assert not isinstance(raised.value, PartialLoadError)
    assert not other.state and torch.equal(again.b.weight, before)


def test_a_state_dict_has_no_room_for_moments(tmp_path: Path) -> None:
    """`optimizer.state_dict()` of a new optimizer is refused, with strict=False too, and the cure works."""
    model = Net(1)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, range(2))
    for form, value in {"number": optimizer.state_dict(), "live": optimizer}.items():
        save(tmp_path / form, {"model": model, "optimizer": value})
        again = Net(2)
        other = torch.optim.Adam(again.parameters())
        for strict in (True, False):
            with pytest.raises(CheckpointError):
                load(tmp_path / form, {"model": again, "optimizer": other.state_dict()}, strict=strict)
        load(tmp_path / form, {"model": again, "optimizer": other.state_dict()}, include="model/*")
        load(tmp_path / form, {"model": again, "optimizer": other})
        assert other.state[again.a.weight]["step"].item() == 2


def test_several_models_and_optimizers(tmp_path: Path) -> None:
    """One optimizer of two models with equal names, two of one model, and a list of them."""

    def make(seed: int) -> dict[str, Any]:
        actor, critic = Net(seed), Net(seed + 10)
        return {
            "actor": actor,
            "critic": critic,
            "both": torch.optim.Adam([*actor.a.parameters(), *critic.a.parameters()], lr=0.01),
            "list": [torch.optim.SGD(net.b.parameters(), lr=0.01, momentum=0.9) for net in (actor, critic)],
            "scaler": torch.amp.GradScaler("cpu", init_scale=float(seed)),
        }

    def run(state: dict[str, Any], steps: range) -> list[float]:
        for step in steps:
            batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            loss = (state["actor"](batch) - state["critic"](batch)).square().mean()
            loss.backward()
            for optimizer in (state["both"], *state["list"]):
                optimizer.step()
                optimizer.zero_grad()
        return [loss.item()]

    state = make(1)
    run(state, range(3))
    save(tmp_path / "c", state)
    assert "both.state.critic.a.weight.exp_avg" in read_state(tmp_path / "c").names()
    expected = run(state, range(3, 6))
    again = make(2)
    load(tmp_path / "c", again)
    assert run(again, range(3, 6)) == expected
    assert again["scaler"].get_scale() == 1.0

    merged = {**make(3), "list": get_optimizer_state_dict(state["actor"], state["list"][:1])}
    save(tmp_path / "m", {"actor": state["actor"], "list": merged["list"]})
    third = make(3)
    load(tmp_path / "m", {"actor": third["actor"], "list": third["list"][:1]})
    assert len(third["list"][0].state) == 2


def _compiled(model: nn.Module) -> nn.Module:
    outer = torch.compile(model, backend="eager")
    assert isinstance(outer, nn.Module)
    return outer


@pytest.mark.parametrize("wrapped", [_compiled, nn.DataParallel, lambda m: nn.DataParallel(_compiled(m))])
def test_wrappers_do_not_change_names(wrapped: Callable[[nn.Module], nn.Module], tmp_path: Path) -> None:
    """Names are those of the bare module, on both sides, and of states that were saved with prefixes."""
    model = Net(1)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, range(2))
    outer = wrapped(model)
    save(tmp_path / "wrapped", {"model": outer, "optimizer": optimizer})
    save(tmp_path / "raw", {"model": outer.state_dict(), "optimizer": optimizer.state_dict()})
    save(tmp_path / "bare", {"model": model, "optimizer": optimizer})
    assert read_state(tmp_path / "wrapped").names() == read_state(tmp_path / "bare").names()
    assert not {"model.a.weight"} & set(read_state(tmp_path / "raw").names())
    for saved in ("wrapped", "raw", "bare"):
        again = Net(2)
        other = torch.optim.Adam(again.parameters())
        load(tmp_path / saved, {"model": wrapped(again), "optimizer": other})
        assert torch.equal(again.a.weight, model.a.weight)
        assert other.state[again.a.weight]["step"].item() == 2
        third = Net(3)
        load(tmp_path / saved, {"model": get_model_state_dict(third)}, include="model/*")
        assert torch.equal(third.b.weight, model.b.weight)


def test_a_module_of_other_parts_is_named_and_loaded_in_part(tmp_path: Path) -> None:
    """Missing and unexpected parts of a live module are leaves: refused, or left out with strict=False."""
    save(tmp_path / "c", {"model": Net(1)})
    small = nn.ModuleDict({"a": nn.Linear(6, 6), "new": nn.Linear(2, 2)})
    before = small["a"].weight.detach().clone()
    with pytest.raises(CheckpointError):
        load(tmp_path / "c", {"model": small})
    assert torch.equal(small["a"].weight, before)
    report = load(tmp_path / "c", {"model": small}, strict=False)
    assert "model.new.weight" in report.missing and "model.b.weight" in report.unexpected
    assert torch.equal(small["a"].weight, Net(1).a.weight)


@pytest.mark.parametrize(
    ("saved", "own", "renaming"),
    [
        (
            lambda m: {"model": {f"backbone.{k}": v for k, v in m.state_dict().items()}},
            "model",
            ("model.", "model.backbone."),
        ),
        (lambda m: {"model": m}, "wrapped", ("model.backbone.", "model.")),
        (lambda m: {"model": m, "step": 1}, "net", ("net.", "model.")),
        (lambda m: {"student": m, "teacher": m.state_dict()}, "bare", ("", "student.")),
        (lambda m: m, "two", ("model.", "")),
    ],
)
def test_the_prefix_that_maps_names_is_named(
    saved: Callable[[nn.Module], Any], own: str, renaming: tuple[str, str], tmp_path: Path
) -> None:
    """The error shows names of both sides, and the prefix; what it proposes loads, into memory of the live module."""
    save(tmp_path / "c", saved(Net(1)))
    net = Net(2)
    state = {
        "model": {"model": net},
        "wrapped": {"model": nn.ModuleDict({"backbone": net})},
        "net": {"net": net},
        "bare": net,
        "two": {"model": net, "other": nn.Linear(1, 1)},
    }[own]
    with pytest.raises(CheckpointError) as error:
        load(tmp_path / "c", state)
    for side in renaming:
        assert f"{side}a.weight" in str(error.value.got) and repr(side) in str(error.value.todo)
    key, _, inner = renaming[1].partition(".")
    values = {f"{inner}{name}": value for name, value in net.state_dict().items()}
    load(tmp_path / "c", {key: values} if key else values, strict=False)
    assert torch.equal(net.a.weight, Net(1).a.weight) and torch.equal(net.b.weight, Net(1).b.weight)


@pytest.mark.parametrize("options", [{}, {"dtype": "state"}, {"init": lambda module: None}])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_without_a_key_is_the_only_one(device: str, options: dict[str, Any], tmp_path: Path) -> None:
    """On either side, whoever reads the bytes; what is stored beside it is left out, and what the state has stays."""
    whole = Net(1)
    save(tmp_path / "with", {"app": {"model": whole}, "step": 7, "seed": torch.ones(1)})
    save(tmp_path / "without", whole)
    for path, own in (("with", lambda net: net), ("without", lambda net: {"app": {"model": net}})):
        with torch.device(device):
            net = Net(2)
        report = load(tmp_path / path, own(net), **options)
        assert torch.equal(net.a.weight, whole.a.weight) and torch.equal(net.b.weight, whole.b.weight)
        assert sorted(report.ignored) == (["seed", "step"] if path == "with" else [])
    tensors = {name: torch.zeros_like(value) for name, value in whole.state_dict().items()}
    state = {**tensors, "step": 0}
    assert load(tmp_path / "with", state, **options).ignored == ("seed",)
    assert state["step"] == 7 and torch.equal(tensors["a.weight"], whole.a.weight)


def test_the_error_proposes_what_loads(tmp_path: Path) -> None:
    """A part of a checkpoint: a pattern, which loads it strictly. Leaves renamed in many places: a renamed copy."""
    stored = {f"{layer}.a.weight": torch.ones(2) for layer in range(3)}
    save(tmp_path / "c", {"model": {**stored, "3.a.weight": torch.ones(2)}})
    part = {"model": {name: torch.zeros(2) for name in stored}}
    with pytest.raises(CheckpointError) as error:
        load(tmp_path / "c", part)
    assert "include=" in str(error.value.todo) and "--rules" not in str(error.value.todo)
    assert load(tmp_path / "c", part, include="model.[0-2]*").missing == ()
    assert torch.equal(part["model"]["2.a.weight"], torch.ones(2))
    with pytest.raises(CheckpointError) as error:
        load(tmp_path / "c", {"model": {f"{layer}.c.weight": torch.zeros(2) for layer in range(3)}})
    assert "to-native" in str(error.value.todo) and "--rules" in str(error.value.todo)


def test_unexpected_state_is_named_as_it_is_stored(tmp_path: Path) -> None:
    """Of an optimizer of a larger model, the names of `read_state`; a name pattern loads part of a live module."""
    large = Net(1)
    optimizer = torch.optim.Adam(large.parameters())
    train(large, optimizer, range(1))
    save(tmp_path / "c", {"model": large, "optimizer": optimizer})
    small = nn.ModuleDict({"a": nn.Linear(6, 6)})
    state = {"model": small, "optimizer": torch.optim.Adam(small.parameters())}
    report = load(tmp_path / "c", state, strict=False)
    kinds = [name for name in report.unexpected if name.startswith("optimizer.state.b.weight.")]
    assert not report.missing and len(kinds) == 3
    assert set(kinds) < set(read_state(tmp_path / "c").names())
    part = Net(2)
    load(tmp_path / "c", {"model": part}, include="model.a.*")
    assert torch.equal(part.a.weight, large.a.weight) and torch.equal(part.b.weight, Net(2).b.weight)


@pytest.mark.parametrize("is_there", [True, False])
def test_state_of_no_parameter_is_loaded(tmp_path: Path, is_there: bool) -> None:
    """Tensors and values that an optimizer keeps beside its parameters' state come back, unless `include` leaves
    them out."""
    net = Net(1)
    optimizer = torch.optim.Adam(net.parameters())
    train(net, optimizer, range(1))
    optimizer.state["extra"] = {"sums": torch.arange(3.0), "count": 5, "list": [torch.ones(2)]}  # type: ignore[index]
    save(tmp_path / "c", {"model": net, "optimizer": optimizer})

    other = Net(2)
    target = torch.optim.Adam(other.parameters())
    if is_there:
        target.state["extra"] = {"sums": torch.zeros(3), "count": 0, "list": [torch.zeros(2)]}  # type: ignore[index]
    load(tmp_path / "c", {"model": other, "optimizer": target}, include="model.*")
    assert ("extra" in target.state) == is_there
    assert not is_there or target.state["extra"]["count"] == 0  # type: ignore[index]

    load(tmp_path / "c", {"model": other, "optimizer": target})
    extra = target.state["extra"]  # type: ignore[index]
    assert torch.equal(extra["sums"], torch.arange(3.0)) and extra["count"] == 5
    assert torch.equal(extra["list"][0], torch.ones(2))
