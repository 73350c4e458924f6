"""FlatOptimizer.step_in_backward: the bits of steps behind the backward, and no gradients of a unit that is through."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.support import models
from tests.support.distributed import cpu_mesh, run_ranks
from vescale_fsdp import fully_shard
from vescale_fsdp.errors import MisuseError
from vescale_fsdp.optim import FlatOptimizer, flat_optimizer
from vescale_fsdp.runtime.fsdp_state import state_of
from vescale_fsdp.runtime.param_group import ParamGroup


def trained(in_backward: bool) -> tuple[models.Stack, FlatOptimizer, list[int]]:
    """A model after four steps, one without a block, one without a parameter; gradients there at each delivery."""
    model: Any = models.build()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=cpu_mesh(), mp_policy=policy)
    optimizer = FlatOptimizer(torch.optim.AdamW, model.parameters(), lr=0.01)
    alive: list[int] = []
    if in_backward:
        optimizer.step_in_backward(model)
        for module in (*model.blocks, model):
            for group in state_of(module).groups:  # type: ignore[union-attr]
                group.comm.change(on_delivery=counting(group, model, alive))
    blocks = model.blocks
    for number in range(4):
        model.blocks = nn.ModuleList([blocks[0], blocks[2]]) if number == 1 else blocks
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + number)
        blocks[0].tiny.weight.requires_grad_(number != 2)  # one of a unit, in the midst of its run
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            models.loss_of(model, models.batch(2 * number + micro, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, alive


def counting(group: ParamGroup, model: nn.Module, alive: list[int]) -> Any:
    step = group.comm.settings.on_delivery
    assert step is not None

    def delivered(params: list[nn.Parameter]) -> None:
        alive.append(sum(param.sharded.grad is not None for g in groups_of(model) for param in g.params))
        step(params)
        assert all(param.grad is None for param in params)

    return delivered


def groups_of(model: nn.Module) -> list[ParamGroup]:
    return [group for module in model.modules() if (state := state_of(module)) for group in state.groups]


def compare() -> None:
    usual, first, _ = trained(False)
    stepped, second, alive = trained(True)
    moments = 0
    for before, after in zip(usual.parameters(), stepped.parameters(), strict=True):
        assert torch.equal(before.to_local(), after.to_local())  # type: ignore[attr-defined]
        assert first.state[before].keys() == second.state[after].keys()
        for name, value in first.state[before].items():
            other = second.state[after][name]
            local, same = (each.to_local() if name != "step" else each for each in (value, other))
            assert torch.equal(local, same)
            moments += local.count_nonzero().item()
    assert moments > 100
    most = max(len(group.params) for group in groups_of(stepped))
    assert alive and max(alive) <= most < len(list(stepped.parameters()))
    looks_at_each_run_once(stepped, second)


def looks_at_each_run_once(model: models.Stack, optimizer: FlatOptimizer) -> None:
    """Whatever the number of units, a delivery is the affair of its own runs."""
    run = flat_optimizer._FlatRun
    with mock.patch.object(run, "is_current", autospec=True, side_effect=run.is_current) as looked:
        models.loss_of(model, models.batch(9, dist.get_rank())).backward()
    seen = [call.args[0] for call in looked.call_args_list]
    runs = optimizer._runs or []
    assert len(seen) == len(runs) > 3 and all(any(run is each for each in seen) for run in runs)


def test_bits_are_those_of_steps_behind_the_backward() -> None:
    """Parameters, moments and step counts; two micro-batches a step, and a block that a step leaves out."""
    run_ranks(2, compare)


def test_a_model_that_is_not_sharded() -> None:
    model = nn.Linear(2, 2)
    optimizer = FlatOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    with pytest.raises(MisuseError) as caught:
        optimizer.step_in_backward(model)
    assert caught.value.got == "Linear"
