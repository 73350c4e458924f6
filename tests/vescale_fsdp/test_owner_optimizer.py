"""Optimizers that need whole matrices: each rank steps those that it owns, with the bits of one process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from transformers.optimization import Adafactor

from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.optim_cases import counted, full_tensors, laid_like
from vescale_fsdp import checkpoint as native
from vescale_fsdp import fully_shard
from vescale_fsdp.checkpoint.state_dict import set_optimizer_state_dict
from vescale_fsdp.errors import CheckpointError, LayoutError, UnsupportedOpError
from vescale_fsdp.optim import OwnerOptimizer


class InLists(torch.optim.Optimizer):
    """Momentum of matrices, with state in a list, a dict and a text, the first of it before any step."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        for param in (p for group in self.param_groups for p in group["params"]):
            self.state[param]["form"] = "momentum"

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if "parts" not in state:
                    state["parts"], state["counts"] = [torch.zeros_like(param), None, ()], {"steps": 0}
                state["counts"]["steps"] += 1
                state["parts"][0].mul_(0.9).add_(param.grad)
                param.sub_(state["parts"][0], alpha=group["lr"] / state["counts"]["steps"])


# torch's, with tensors as state; transformers', with numbers, vectors and a scheduled learning rate of its own.
KINDS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "muon": (torch.optim.Muon, {"lr": 0.02}),
    "adafactor": (Adafactor, {"beta1": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "lists": (InLists, {"lr": 0.01}),
}
Values = dict[str, torch.Tensor]


def build(seed: int) -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in ((7, 9), (9, 16), (16, 5), (5, 5))))
    shapes = [tuple(p.shape) for p in model.parameters()]
    for param, value in zip(model.parameters(), full_tensors(shapes, seed).values(), strict=True):
        param.data = value.clone()
    return model


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> Values:
    """Steps with the gradients of these numbers, and the parameters after them."""
    params = list(model.parameters())
    for number in numbers:
        grads = full_tensors([tuple(p.shape) for p in params], 100 + number)
        for param, grad in zip(params, grads.values(), strict=True):
            param.grad = laid_like(grad, param)
        optimizer.step()
    return {name: getattr(p, "full_tensor", lambda p=p: p)().detach() for name, p in model.named_parameters()}


def sharded(kind: str, seed: int, mesh: Any = None) -> tuple[nn.Module, OwnerOptimizer]:
    model = fully_shard(build(seed), mesh=mesh or cpu_mesh(), granularity="whole")
    cls, options = KINDS[kind]
    return model, OwnerOptimizer(cls, model.parameters(), **options)  # type: ignore[arg-type]


def run(kind: str, folder: str, form: str) -> tuple[Values, int]:
    """Three steps and a save; the values after two more, and the number of parameters that this rank owns."""
    model, optimizer = sharded(kind, 0)
    steps(model, optimizer, range(3))
    if form == "native":
        native.save(folder, {"model": model, "optimizer": optimizer})
    else:
        dcp.save(
            {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)},
            checkpoint_id=folder,
        )
    return steps(model, optimizer, range(3, 5)), sum(p.to_local().numel() > 0 for p in model.parameters())  # type: ignore[attr-defined]


def resume(kind: str, folder: str, form: str, stepped_before: bool) -> Values:
    """The values after two steps of another model that has loaded the state."""
    model, optimizer = sharded(kind, 7)
    if stepped_before:
        steps(model, optimizer, range(1))
    if form == "native":
        native.load(folder, {"model": model, "optimizer": optimizer})
    else:
        state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=folder)
        set_optimizer_state_dict(model, optimizer, state["optim"])
    return steps(model, optimizer, range(3, 5))


def plainly(kind: str) -> Values:
    cls, options = KINDS[kind]
    model = build(0)
    return steps(model, cls(model.parameters(), **options), range(5))


def check(every: list[Values], kind: str) -> None:
    for values in every:
        for name, expected in plainly(kind).items():
            assert torch.equal(values[name], expected), name


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("lists", "native"),
        pytest.param("muon", "dcp", marks=pytest.mark.part("numerics")),
        pytest.param("lists", "dcp", marks=pytest.mark.part("numerics")),
        pytest.param("muon", "native", marks=pytest.mark.part("numerics")),
        pytest.param("adafactor", "native", marks=pytest.mark.part("numerics")),
        pytest.param("adafactor", "dcp", marks=pytest.mark.part("numerics")),
        pytest.param("adamw", "native", marks=pytest.mark.part("numerics")),
    ],
)
def test_the_bits_of_one_process_on_any_number_of_ranks(kind: str, form: str, tmp_path: Path) -> None:
    """Saved on two ranks, which own some matrices each, and continued on three and on one."""
    runs = run_ranks(2, run, kind, str(tmp_path), form)

    check([values for values, _ in runs], kind)
    assert all(0 < owned < 4 for _, owned in runs)
    check(run_ranks(3, resume, kind, str(tmp_path), form, False), kind)
    check(run_ranks(1, resume, kind, str(tmp_path), form, True), kind)


def messages_and_costs(kind: str) -> tuple[list[str], float]:
    """The collectives of two steps of two transformer layers, and what this rank's matrices cost per step."""
    shapes = [(8, 8)] * 4 + [(24, 8)] * 2 + [(8, 24)]
    model = nn.Sequential(*(nn.Linear(b, a, bias=False) for _ in range(2) for a, b in shapes))
    fully_shard(model, mesh=cpu_mesh(), granularity="whole")
    cls, options = KINDS[kind]
    optimizer = OwnerOptimizer(cls, model.parameters(), **options)  # type: ignore[arg-type]
    for param in model.parameters():
        param.grad = laid_like(torch.ones(param.shape), param)
    with counted() as wire:
        optimizer.step()
        optimizer.step()
    owned = [p for p in model.parameters() if p.to_local().numel()]
    return wire.names, float(sum(p.numel() * min(p.shape) for p in owned))


@pytest.mark.parametrize(
    "kind",
    ["muon", *(pytest.param(kind, marks=pytest.mark.part("numerics")) for kind in ("adafactor", "adamw"))],
)
def test_a_step_sends_nothing_and_costs_all_ranks_the_same(kind: str) -> None:
    """Neither the first step nor a later one; a matrix costs its elements times its shorter side, as by Muon."""
    names, costs = zip(*run_ranks(2, messages_and_costs, kind), strict=True)

    assert names == ([], [])
    assert max(costs) <= 1.1 * sum(costs) / 2


class ByPlainRows(torch.optim.SGD):
    """Adds a plain vector to a matrix, which ragged parameters refuse."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            param.data.add_(torch.ones(param.shape[1]))


class CutByTorch(torch.optim.SGD):
    """Cuts a full update by torch's own redistribute."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            full = DTensor.from_local(param.grad.full_tensor(), param.device_mesh)
            param.data.add_(full.redistribute(placements=param.placements))


def named_as_the_way_out() -> None:
    model = fully_shard(nn.Linear(8, 64, bias=False), mesh=cpu_mesh())
    for kind in (torch.optim.Muon, ByPlainRows, CutByTorch):
        optimizer = kind(model.parameters(), lr=0.1)
        model(torch.ones(1, 8)).sum().backward()
        with pytest.raises(UnsupportedOpError) as caught:
            optimizer.step()
        assert "OwnerOptimizer" in caught.value.todo
        optimizer.zero_grad()


def test_an_optimizer_that_needs_whole_matrices_is_refused_with_the_way_out() -> None:
    """By the hook before the step of torch's own, by the first operator that is refused, or by the placement."""
    run_ranks(2, named_as_the_way_out)


def copied_and_refused() -> None:
    model, optimizer = sharded("adafactor", 0, cpu_mesh(2, 1))
    steps(model, optimizer, range(3))
    model, optimizer = copy.deepcopy((list(model.parameters()), optimizer))  # type: ignore[assignment]
    for number in (3, 4):
        params: list[Any] = [p for group in optimizer.param_groups for p in group["params"]]
        grads = full_tensors([tuple(p.shape) for p in params], 100 + number)
        for param, grad in zip(params, grads.values(), strict=True):
            param.grad = laid_like(grad, param)
        optimizer.step()
    expected = list(plainly("adafactor").values())
    assert all(torch.equal(p.full_tensor().detach(), e) for p, e in zip(params, expected, strict=True))
    other = sharded("adamw", 0)[1]
    with pytest.raises(CheckpointError):
        other.load_state_dict(optimizer.state_dict())
    cut = fully_shard(nn.Linear(8, 64, bias=False), mesh=cpu_mesh())
    with pytest.raises(LayoutError, check=lambda error: "(64, 8)" in error.where):
        OwnerOptimizer(torch.optim.Muon, cut.parameters())


def test_copies_continue_and_cut_matrices_are_refused() -> None:
    """Replicas step alike; state of another class, or a matrix that is cut, raises."""
    run_ranks(2, copied_and_refused)


class OfAllNorms(torch.optim.SGD):
    """Divides by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"]]
        total = torch.stack([p.grad.norm() for p in params]).norm()
        for param in params:
            param.sub_(param.grad / total, alpha=0.1)


class OfAllRanks(torch.optim.SGD):
    """Reduces gradients by itself."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            torch.distributed.all_reduce(param.grad)


class OfSecondOrder(torch.optim.SGD):
    """Divides by the diagonal of the Hessian."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        grads = [p.grad for p in params]
        products = torch.autograd.grad(grads, params, grad_outputs=[torch.ones_like(p) for p in params])
        with torch.no_grad():
            for param, product in zip(params, products, strict=True):
                param.sub_(param.grad / product.abs().clamp_min(1e-3))


class ThatChecksItself(torch.optim.SGD):
    """Asks for gradients with a graph, in its own words."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert all(p.grad.grad_fn is not None for p in self.param_groups[0]["params"])


class ThatPrefersAGraph(torch.optim.SGD):
    """Divides by the diagonal of the Hessian where gradients have a graph, and steps as SGD elsewhere."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if all(p.grad.requires_grad for p in self.param_groups[0]["params"]):
            OfSecondOrder.step(self, closure)  # type: ignore[arg-type]
        else:
            super().step(closure)


class OfAModel(torch.optim.SGD):
    """Takes a model."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        super().__init__(dict(model.named_parameters()).values(), lr)


class OfAnOptimizer(torch.optim.SGD):
    """Takes another optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, lr: float) -> None:
        super().__init__(optimizer.param_groups, lr)


class OfTwoSteps(torch.optim.SGD):
    """Moves up before it evaluates the model again, as SAM does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        assert closure is not None
        moves = [0.01 * p.grad.sign() for p in params]
        for param, move in zip(params, moves, strict=True):
            param.add_(move)
        with torch.enable_grad():
            closure()
        for param, move in zip(params, moves, strict=True):
            param.sub_(move)
        super().step()


# The class's own error, if its trial fails by one.
REFUSED: dict[type[torch.optim.Optimizer], type[Exception] | None] = {
    OfAllNorms: None,
    OfAllRanks: None,
    OfSecondOrder: RuntimeError,
    ThatChecksItself: AssertionError,
    torch.optim.LBFGS: TypeError,
    OfTwoSteps: AssertionError,
    torch.optim.SparseAdam: RuntimeError,
}


def refused_before_training() -> list[str]:
    model = fully_shard(build(0), mesh=cpu_mesh(), granularity="whole")
    got = []
    for kind, cause in REFUSED.items():
        with pytest.raises(
            UnsupportedOpError, check=lambda error, kind=kind: kind.__name__ in error.where
        ) as caught:
            OwnerOptimizer(kind, model.parameters(), lr=0.1)
        assert type(caught.value.__cause__) is (cause or type(None))
        got.append(str(caught.value.got))
    for kind, options, own in (
        (torch.optim.AdamW, {"lr": -1.0}, ValueError),
        (OfAModel, {"lr": 0.1}, AttributeError),
        (OfAnOptimizer, {"lr": 0.1}, AttributeError),
    ):
        with pytest.raises(own, check=lambda error: not isinstance(error, UnsupportedOpError)):
            OwnerOptimizer(kind, model.parameters(), **options)
    return got


def test_a_class_that_would_step_otherwise_is_refused_before_training() -> None:
    """On all ranks: if it needs other parameters, messages, a graph, a closure, sparse gradients, a model."""
    first, second = run_ranks(2, refused_before_training)

    assert first == second


def steps_with_a_graph() -> None:
    """A class that uses a graph is refused when there is one, and steps first derivatives when there is none."""
    model = fully_shard(build(0), mesh=cpu_mesh(), granularity="whole")
    plain = build(0)
    for create_graph, kind in (
        (False, ThatPrefersAGraph),
        (True, torch.optim.SGD),
        (True, ThatPrefersAGraph),
    ):
        optimizer = OwnerOptimizer(kind, model.parameters(), lr=0.1)
        reference = kind(plain.parameters(), lr=0.1)
        for each in (model, plain):
            each.zero_grad()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*create_graph=True.*")
                each(torch.ones(2, 7)).square().sum().backward(create_graph=create_graph)
        if create_graph and kind is ThatPrefersAGraph:
            with pytest.raises(UnsupportedOpError, check=lambda error: "gradient of" in error.where):
                optimizer.step()
        else:
            optimizer.step()
            reference.step()
            for own, wanted in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(own.full_tensor(), wanted)


def test_a_class_that_uses_a_graph_where_there_is_one_does_not_step_without() -> None:
    """It would silently step otherwise than on one process."""
    run_ranks(2, steps_with_a_graph)


def sparse_and_two_steps() -> None:
    model = fully_shard(nn.Embedding(16, 4, sparse=True), mesh=cpu_mesh())
    sparse = torch.optim.SparseAdam(model.parameters())
    model(torch.tensor([3, 5])).sum().backward()
    with pytest.raises(UnsupportedOpError, check=lambda error: "torch.optim.Adam" in error.todo):
        sparse.step()

    # As it is, a class with a closure sees all parameters.
    values = []
    for net in (build(0), fully_shard(build(0), mesh=cpu_mesh())):
        optimizer = OfTwoSteps(net.parameters(), lr=1e-6)

        def closure(net: nn.Module = net, optimizer: torch.optim.Optimizer = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = net(torch.ones(3, 7)).square().mean()
            loss.backward()
            return loss

        for _ in range(2):
            closure()
            optimizer.step(closure)
        values.append([getattr(p, "full_tensor", lambda p=p: p)().detach() for p in net.parameters()])
    assert all(torch.equal(got, expected) for expected, got in zip(*values, strict=True))


def test_sparse_steps_are_refused_and_a_class_that_evaluates_twice_steps_as_it_is() -> None:
    """SparseAdam by name; two steps around a second evaluation with the bits of one process."""
    run_ranks(2, sparse_and_two_steps)
