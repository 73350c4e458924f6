"""FlatOptimizer: the same bits as torch's optimizer per parameter, in few kernels, and the same checkpoints."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import models
from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.optim_cases import everything, full_value
from vescale_fsdp import checkpoint as native
from vescale_fsdp import fully_shard
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor
from vescale_fsdp.errors import UnsupportedOpError
from vescale_fsdp.optim import FlatOptimizer

KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "plain SGD": (torch.optim.SGD, {"lr": 0.05}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "AdamW foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True, "maximize": True}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.01}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}),
}

# With and without state, one and several step counts per parameter, and the fused kernel; the rest is arithmetic.
EACH_FORM_OF_STATE = ("plain SGD", "AdamW fused", "ASGD")
MORE = pytest.mark.part("numerics")


def build(*, shard: bool = True, **options: Any) -> models.Stack:
    model = models.build()
    if shard:
        for module in (*model.blocks, model):
            fully_shard(module, mesh=cpu_mesh(), **options)
    return model


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Biases without weight decay, as people do."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    return [{"params": matrices}, {"params": [p for p in model.parameters() if p.ndim == 1], "lr": 0.02}]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, *, clip: bool = True) -> None:
    for number in steps:
        for micro in range(2):
            models.loss_of(model, models.batch(2 * number + micro, dist.get_rank())).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=number % 2 == 0)


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def trained_alike(name: str) -> list[str]:
    kind, options = KINDS[name]
    mine, plain = build(), build()
    ours, theirs = FlatOptimizer(kind, groups_of(mine), **options), kind(groups_of(plain), **options)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (ours, theirs)]
    start = full_value(mine.head.weight).clone()
    for steps in (range(2), range(2, 4)):
        train(mine, ours, steps)
        train(plain, theirs, steps)
        for schedule in schedules:
            schedule.step()
    assert (start - full_value(mine.head.weight)).norm() > 0
    return differing(everything(mine, ours), everything(plain, theirs))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in EACH_FORM_OF_STATE else MORE) for name in KINDS]
)
def test_same_bits_as_per_parameter(name: str) -> None:
    """Every element-wise optimizer: weights and state after 4 steps, groups, accumulation, clipping, schedule."""
    assert run_ranks(2, trained_alike, name) == [[], []]


class Count(TorchDispatchMode):
    """Counts operators that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is not torch.Tensor and kind is not nn.Parameter for kind in types):
            return NotImplemented
        if not any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):
            self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def kernels() -> tuple[int, int, int, int]:
    counts = []
    for flat in (True, False):
        model = build()
        params = list(model.parameters())
        optimizer = FlatOptimizer(torch.optim.AdamW, params) if flat else torch.optim.AdamW(params)
        train(model, optimizer, range(1), clip=False)
        models.loss_of(model, models.batch(1, 0)).backward()
        with Count() as counter:
            optimizer.step()
        counts.append(sum(counter.calls.values()))
        if flat:
            runs = optimizer._runs  # type: ignore[union-attr]
            grads = [run.flat_grad().untyped_storage()._cdata for run in runs]
            own = {local._local_tensor.untyped_storage()._cdata for local in (p.grad for p in params)}
            assert set(grads) <= own  # the reduced shards themselves, no copies
    return counts[0], counts[1], len(runs), len(params)


def test_one_step_per_unit() -> None:
    """A run per unit, its gradients where they are, kernels as for that many parameters, and one for padding."""
    for flat, per_param, runs, params in run_ranks(2, kernels):
        assert (runs, params) == (4, 21)
        assert 0 < flat <= per_param * runs / params * 1.1 + runs


def some_without_gradients() -> list[str]:
    """Parameters left out at first, in between, and given back."""
    results = []
    for flat in (True, False):
        model = build()
        params = list(model.parameters())
        optimizer: torch.optim.Optimizer = (
            FlatOptimizer(torch.optim.AdamW, params) if flat else torch.optim.AdamW(params)
        )
        for number in range(6):
            models.loss_of(model, models.batch(number, dist.get_rank())).backward()
            left_out = {0: params[2:5], 2: params[4:9], 3: params[:1], 4: params}.get(number, [])
            for param in left_out:
                param.grad = None
            if number == 5:  # gradients somewhere else
                for param in params:
                    param.grad = param.grad.clone()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        results.append(everything(model, optimizer))
    assert {results[0][name].item() for name in results[0] if name.endswith("/step")} == {3.0, 4.0, 5.0}
    return differing(*results)


def test_parameters_without_gradients_are_left_alone() -> None:
    """No decay, no step count: exactly what torch's optimizer does to each parameter."""
    assert run_ranks(2, some_without_gradients) == [[], []]


def save_run(folder: Path, flat: bool, form: str) -> None:
    model = build()
    optimizer: torch.optim.Optimizer = (
        FlatOptimizer(torch.optim.AdamW, groups_of(model), lr=0.01)
        if flat
        else torch.optim.AdamW(groups_of(model), lr=0.01)
    )
    train(model, optimizer, range(3))
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    if form == "native":
        native.save(folder / "checkpoint", state)
    else:
        dcp.save(state, checkpoint_id=str(folder / "checkpoint"))
    train(model, optimizer, range(3, 5))
    full = everything(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(full, folder / "full.pt")


def resume_run(folder: Path, flat: bool, form: str) -> bool:
    """Whether two more steps come close to those of the run that saved (its batches are another world's)."""
    model = build()
    optimizer: torch.optim.Optimizer = (
        FlatOptimizer(torch.optim.AdamW, groups_of(model), lr=0.3)
        if flat
        else torch.optim.AdamW(groups_of(model), lr=0.3)
    )
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    if form == "native":
        native.load(folder / "checkpoint", state)
    else:
        dcp.load(state, checkpoint_id=str(folder / "checkpoint"))
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])
    train(model, optimizer, range(3, 5))
    assert optimizer.param_groups[0]["lr"] == 0.01
    expected, got = torch.load(folder / "full.pt"), everything(model, optimizer)
    return not differing(got, expected)


@pytest.mark.parametrize(
    ("form", "saved_flat", "loaded_flat"),
    [
        ("dcp", True, False),
        pytest.param("native", False, True, marks=MORE),
        pytest.param("dcp", False, True, marks=MORE),
        pytest.param("native", True, False, marks=MORE),
        pytest.param("dcp", True, True, marks=MORE),
        pytest.param("native", True, True, marks=MORE),
    ],
)
def test_checkpoints_interchange_with_torchs_optimizer(
    tmp_path: Path, form: str, saved_flat: bool, loaded_flat: bool
) -> None:
    """Saved by one kind, resumed by the other: the same bits as without the break."""
    run_ranks(2, save_run, tmp_path, saved_flat, form)
    assert all(run_ranks(2, resume_run, tmp_path, loaded_flat, form))


def load_at_another_world(folder: Path, form: str) -> dict[str, torch.Tensor]:
    model = build()
    optimizer = FlatOptimizer(torch.optim.AdamW, groups_of(model), lr=0.01)
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    if form == "native":
        native.load(folder / "checkpoint", state)
    else:
        dcp.load(state, checkpoint_id=str(folder / "checkpoint"))
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])
    assert len(optimizer._current_runs()) > 0
    return {name: value.clone() for name, value in everything(model, optimizer).items()}


def test_state_moves_to_another_number_of_ranks(tmp_path: Path) -> None:
    """What 2 ranks saved, 3 ranks and 1 rank hold, value for value."""
    run_ranks(2, save_run, tmp_path, True, "native")
    (one,) = run_ranks(1, load_at_another_world, tmp_path, "native")
    for three in run_ranks(3, load_at_another_world, tmp_path, "native"):
        assert not differing(one, three)
    assert any(value.abs().max() > 0 for name, value in one.items() if name.endswith("/exp_avg_sq"))


def moved_and_copied() -> list[str]:
    """Shards that are made anew, and copies of the optimizer."""
    results = []
    for flat in (True, False):
        model = build()
        params = list(model.parameters())
        optimizer: torch.optim.Optimizer = (
            FlatOptimizer(torch.optim.AdamW, params) if flat else torch.optim.AdamW(params)
        )
        train(model, optimizer, range(2))
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
        for group, param in zip([optimizer.param_groups[0]], [list(model.parameters())], strict=True):
            old = dict(zip(group["params"], param, strict=True))
            optimizer.state = type(optimizer.state)(dict, {old[k]: v for k, v in optimizer.state.items()})
            group["params"] = param
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(model, optimizer, range(2, 4))
        results.append(everything(model, optimizer))
    return differing(*results)


def test_parameters_that_move_are_found() -> None:
    """After `load_state_dict(assign=True)` the runs are made anew from the state there is."""
    assert run_ranks(2, moved_and_copied) == [[], []]


def state_is_of_views() -> bool:
    model = build()
    optimizer = FlatOptimizer(torch.optim.AdamW, model.parameters())
    train(model, optimizer, range(1))
    values = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
    assert all(isinstance(value, RaggedDTensor) and value.layout_ref is not None for value in values)
    storages = {value._local_tensor.untyped_storage()._cdata for value in values}
    return len(storages) == len(optimizer._runs or ())


def test_state_is_views_of_flat_tensors() -> None:
    """Each run's moments are one allocation; what `state` holds are ragged views of it."""
    assert all(run_ranks(2, state_is_of_views))


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon])
def test_other_optimizers_are_refused_by_name(kind: type[torch.optim.Optimizer]) -> None:
    """An update that looks at whole matrices cannot be taken on a flat shard."""
    with pytest.raises(UnsupportedOpError) as caught:
        FlatOptimizer(kind, [torch.zeros(3, 3)])
    assert caught.value.got == f"{kind.__module__}.{kind.__name__}"


def test_plain_parameters_and_closures() -> None:
    """Without sharding every parameter is a run; a closure's loss comes back."""
    torch.manual_seed(0)
    one, other = nn.Linear(3, 4), nn.Linear(3, 4)
    other.load_state_dict(one.state_dict())
    x = torch.randn(5, 3)
    for model, optimizer in (
        (one, FlatOptimizer(torch.optim.Adam, one.parameters(), lr=0.1)),
        (other, torch.optim.Adam(other.parameters(), lr=0.1)),
    ):

        def closure(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(3)]
        assert losses == sorted(losses, reverse=True)
    assert torch.equal(one.weight, other.weight)


def neighbors() -> list[torch.Tensor]:
    """Two plain parameters, one behind the other in one allocation: a run."""
    both = torch.arange(8.0)
    return [nn.Parameter(both[:4]), nn.Parameter(both[4:])]


def test_gradients_of_two_allocations_are_not_taken_for_one() -> None:
    """That their offsets fit is not enough: they are copied together."""
    params = neighbors()
    optimizer = FlatOptimizer(torch.optim.SGD, params, lr=1.0)
    params[0].grad, params[1].grad = torch.full((8,), 1.0)[:4], torch.full((8,), 2.0)[4:]
    optimizer.step()
    assert len(optimizer._runs or ()) == 1
    assert torch.cat(params).tolist() == [-1.0, 0.0, 1.0, 2.0, 2.0, 3.0, 4.0, 5.0]


def test_loaded_step_counts_part_a_run() -> None:
    """Neighbors that have taken different numbers of steps are stepped apart, with the bits of one by one."""
    params, twins = neighbors(), neighbors()
    saved = torch.optim.AdamW(twins, lr=0.1)
    for present in ([0, 1], [0]):
        for index, twin in enumerate(twins):
            twin.grad = torch.full((4,), index + 1.0) if index in present else None
        saved.step()
    optimizer = FlatOptimizer(torch.optim.AdamW, params, lr=0.1)
    optimizer.load_state_dict(copy.deepcopy(saved.state_dict()))
    with torch.no_grad():
        for param, twin in zip(params, twins, strict=True):
            param.copy_(twin)
    for param in (*params, *twins):
        param.grad = torch.ones(4)
    saved.step()
    optimizer.step()
    assert len(optimizer._runs or ()) == 2
    assert [float(optimizer.state[param]["step"]) for param in params] == [3.0, 2.0]
    assert all(torch.equal(param, twin) for param, twin in zip(params, twins, strict=True))
