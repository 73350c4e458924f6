"""step_in_backward: gradients of one unit at a time, and an error for what needs gradients or weights of before."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support import models
from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.grads import reduced_grad
from tests.support.units import groups_of
from vescale_fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, RaggedDTensor, fully_shard
from vescale_fsdp.errors import LifecycleError, MisuseError, UnsupportedOpError
from vescale_fsdp.optim import AdamW8bit, step_in_backward

OPTIONS: dict[str, dict[str, Any]] = {
    "bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    # torch's fused kernel raises no version of what it writes.
    "gathered for the backward": {"reshard_after_forward": False},
    "gathered for good": {"reshard_after_forward": False},
}


def num_grads(model: nn.Module) -> int:
    """How many sharded gradients exist."""
    return sum(
        isinstance(grad := param.sharded.grad, RaggedDTensor) and reduced_grad(param.sharded) is grad
        for group in groups_of(*model.modules())
        for param in group.params
    )


def trained(options: str, in_backward: bool) -> tuple[list[Any], torch.optim.Optimizer, list[int]]:
    """Parameters after three steps of two micro-batches; the number of gradients whenever one is reduced."""
    model: Any = models.shard(models.build(), **OPTIONS[options])
    model.set_reshard_after_backward(options != "gathered for good")
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=0.01, fused=options.startswith("gathered"))
    if in_backward:
        step_in_backward(model, optimizer)
    alive: list[int] = []
    for param in params:
        param.register_post_accumulate_grad_hook(lambda param: alive.append(num_grads(model)))
    for step in range(3):
        for micro in range(2):
            with nullcontext() if micro else model.no_sync():
                models.loss_of(model, models.batch(2 * step + micro, dist.get_rank())).backward()
        assert num_grads(model) == (0 if in_backward else len(params))
        model.state_dict()  # frees what is gathered: old values must not be taken for a user's writes
        optimizer.step()
        assert in_backward is all(param.grad is None for param in params)
        optimizer.zero_grad()
    return params, optimizer, alive


def same_and_fewer(options: str) -> tuple[int, int]:
    behind, first, many = trained(options, False)
    inside, second, few = trained(options, True)
    for one, other in zip(behind, inside, strict=True):
        assert torch.equal(one.to_local(), other.to_local())
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(first.state[one][name].to_local(), second.state[other][name].to_local())
    return max(many), max(few)


@pytest.mark.parametrize("options", OPTIONS)
def test_gradients_of_one_unit_at_a_time(options: str) -> None:
    """The bits of steps behind the backward; 6 parameters in each block, 21 in all."""
    assert run_ranks(2, same_and_fewer, options) == [(21, 6)] * 2


def stepping(
    kind: Any = torch.optim.SGD, shards: Callable[[Any], Any] = models.shard
) -> tuple[Any, torch.optim.Optimizer]:
    model = shards(models.build())
    optimizer = kind(model.parameters(), lr=0.1)
    step_in_backward(model, optimizer)
    return model, optimizer


def backward(model: Any, step: int = 0) -> None:
    models.loss_of(model, models.batch(step, dist.get_rank())).backward()


def unscale(optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


USES: dict[str, Callable[[Any, Any], object]] = {
    "clip": lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "clip foreach": lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True),
    "clip values": lambda model, optimizer: nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "norm": lambda model, optimizer: nn.utils.get_total_norm([p.grad for p in model.parameters()]),
    "unscale": lambda model, optimizer: unscale(optimizer),
    "read": lambda model, optimizer: model.head.weight.grad.abs(),
    "in place": lambda model, optimizer: model.head.weight.grad.mul_(2),
    "add": lambda model, optimizer: 2 * model.head.weight.grad,
}


def uses_refused() -> None:
    """Without steps in the backward, all uses work."""
    model, optimizer = stepping()
    other = models.shard(models.build())
    others = torch.optim.SGD(other.parameters(), lr=0.1)
    backward(model)
    backward(other)
    for use in USES.values():
        with pytest.raises(LifecycleError, check=lambda error: "weight" in str(error.where)):
            use(model, optimizer)
        use(other, others)
    assert "dropped" in repr(model.head.weight.grad)
    optimizer.step()
    assert all(param.grad is None for param in model.parameters())


def test_uses_of_dropped_gradients_are_refused() -> None:
    """A norm of no gradients would be 0: nothing would be clipped, without a word."""
    run_ranks(2, uses_refused)


class Runs(nn.Module):
    """A unit that runs once, twice under checkpoints, or whose weight the module around it reads too."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.way = nn.Sequential(nn.Linear(5, 5), nn.Tanh()), way
        if way != "read before, in one unit":
            fully_shard(self.inner, mesh=cpu_mesh(), reshard_after_forward="read" not in way)
        fully_shard(self, mesh=cpu_mesh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "read before":
            self.inner.unshard()  # type: ignore[operator]
        if self.way in ("read before", "read before, in one unit"):
            x = x + self.inner[0].bias  # saves nothing for the backward, which has freed the unit by then
        for _ in range(2 if "twice" in self.way else 1):
            if "twice" in self.way:
                x = checkpoint(self.inner, x, use_reentrant=self.way == "reentrant twice")
            else:
                x = self.inner(x)
        return x + nn.functional.linear(x, self.inner[0].weight) if self.way == "read after" else x


def trained_by(way: str, in_backward: bool) -> torch.Tensor:
    """This rank's piece of the weight after three steps."""
    model: Any = Runs(way)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if in_backward:
        step_in_backward(model, optimizer)
    x = models.batch(0, dist.get_rank()).requires_grad_()
    if way in ("two backwards", "one under no_sync"):
        with model.no_sync() if way == "one under no_sync" else nullcontext():
            model(x).sum().backward()
    if way == "a graph kept":
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    for _ in range(3):
        model(x).sum().backward()
        if way != "no step":
            optimizer.step()
            optimizer.zero_grad()
    return model.inner[0].weight.to_local()  # type: ignore[no-any-return]


def check_way(way: str) -> None:
    """Steps in the backward raise, or train to the weight of steps behind it."""
    if way == "a graph kept":  # torch's own error: the weight has changed since the forward
        with pytest.raises(RuntimeError):
            trained_by(way, True)
        return
    if way in REFUSED:
        with pytest.raises(
            LifecycleError, check=lambda error: error.where in ("0.weight, 0.bias", "backward")
        ):
            trained_by(way, True)
        return
    inside, behind = trained_by(way, True), trained_by(way, False)
    assert inside.isfinite().all() and torch.equal(inside, behind)


REFUSED = ("two backwards", "no step", "reentrant twice", "read before")
OTHERS = (
    "a graph kept",
    "once",
    "one under no_sync",
    "plain twice",
    "read after",
    "read before, in one unit",
)


@pytest.mark.parametrize("way", [*REFUSED, *OTHERS])
def test_a_second_reduction_is_refused_on_all_ranks(way: str) -> None:
    """Sums of gradients would be stepped in parts. The remedies that the error names train."""
    run_ranks(2, check_way, way)


class _Stop(Exception):
    pass


def after_an_exception() -> float:
    """A backward that broke behind the head's step; the next one trains."""
    model, optimizer = stepping()

    def stop(*unused: Any) -> None:
        raise _Stop

    hook = model.blocks[0].register_full_backward_hook(stop)
    with pytest.raises(_Stop):
        backward(model)
    hook.remove()
    model.reset_iter_state()
    optimizer.zero_grad()
    before = model.head.weight.to_local().clone()
    backward(model)
    optimizer.step()
    return (model.head.weight.to_local() - before).abs().sum().item()


def test_a_backward_that_broke_is_repeated() -> None:
    assert sum(run_ranks(2, after_an_exception)) > 0


def one_step(optimizer: torch.optim.Optimizer, model: Any, closes: bool) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = models.loss_of(model, models.batch(0, dist.get_rank()))
        loss.backward()
        return loss

    if closes:
        assert optimizer.step(closure).detach() > 0  # type: ignore[attr-defined, arg-type]
    else:
        closure()
        optimizer.step()


def hooks_and_schedules() -> list[Any]:
    """Weights after steps with closures, schedules and hooks, on a model with a parameter that is not sharded."""
    found: list[Any] = []
    for in_backward, closes in ((False, False), (True, False), (True, True)):
        model = models.build()
        ignored = model.blocks[1].scale
        for block in model.blocks:
            fully_shard(block, mesh=cpu_mesh(), ignored_params={ignored})
        fully_shard(model, mesh=cpu_mesh(), ignored_params={ignored})
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        counted: list[int] = []
        optimizer.register_step_post_hook(lambda *call, counted=counted: counted.append(1))
        if in_backward:
            step_in_backward(model, optimizer)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3):
                one_step(optimizer, model, closes)
                schedule.step()
        assert len(counted) == 3
        found.append(
            [p.to_local() if isinstance(p, RaggedDTensor) else p.detach() for p in model.parameters()]
        )
    return [torch.equal(one, other) for each in found[1:] for one, other in zip(found[0], each, strict=True)]


def test_closures_schedules_and_hooks() -> None:
    """Hooks count the user's steps, and a closure's backward is one as any other."""
    for equal in run_ranks(2, hooks_and_schedules):
        assert all(equal) and len(equal) == 42


def two_optimizers() -> list[bool]:
    """One in the backward for the blocks, one behind it for the rest, which gets a block later."""
    found: list[Any] = []
    for in_backward in (False, True):
        model = models.shard(models.build())
        last = list(model.blocks[2].parameters())
        body = torch.optim.SGD(model.blocks[:2].parameters(), lr=0.1, momentum=0.9)
        ends = torch.optim.SGD([*model.embed.parameters(), *model.head.parameters()], lr=0.1)
        if in_backward:
            step_in_backward(model, body)
        for step in range(4):
            if step == 2:
                ends.add_param_group({"params": last, "lr": 0.01})
            backward(model, step)
            nn.utils.clip_grad_norm_([*model.embed.parameters(), *model.head.parameters()], 0.1)
            body.step()
            ends.step()
            model.zero_grad()
        found.append([param.to_local() for param in model.parameters()])  # type: ignore[attr-defined]
    return [torch.equal(one, other) for one, other in zip(*found, strict=True)]


def test_other_optimizers_step_behind_the_backward() -> None:
    """Their gradients stay, and may be clipped."""
    for equal in run_ranks(2, two_optimizers):
        assert all(equal) and len(equal) == 21


class Own(torch.optim.SGD):
    """A user's subclass, whose step is not known."""


@pytest.mark.parametrize("kind", [Own, torch.optim.Adafactor, torch.optim.LBFGS, AdamW8bit])
def test_other_classes_are_refused(kind: Any) -> None:
    with pytest.raises(UnsupportedOpError) as caught:
        step_in_backward(nn.Linear(2, 2), kind(nn.Linear(2, 2).parameters(), lr=0.1))
    assert kind.__name__ in str(caught.value.got)


def made_before() -> str:
    model = models.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    models.shard(model)
    with pytest.raises(MisuseError) as caught:
        step_in_backward(model, optimizer)
    return str(caught.value.got)


def test_optimizers_without_sharded_parameters_are_refused() -> None:
    """Made before fully_shard, or for a model that is not sharded."""
    assert run_ranks(1, made_before) == ["FSDPStack with 4 groups of sharded parameters"]
    model = nn.Linear(2, 2)
    with pytest.raises(MisuseError) as caught:
        step_in_backward(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert "Linear" in str(caught.value.got)
