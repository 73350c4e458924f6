"""Every rank walks an optimizer's state in one order, wherever its memory lies: torch gathers it in that order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.tensor import Replicate

from tests.support import models
from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.optim_cases import full_value
from tests.vescale_fsdp.optim import test_changing_gradients as changing
from tests.vescale_fsdp.optim.test_state_dict import KINDS
from tests.vescale_fsdp.optim.test_state_dict import build as build_structured
from tests.vescale_fsdp.optim.test_state_dict import steps as structured_steps
from vescale_fsdp import fully_shard
from vescale_fsdp.optim import AdamW8bit, step_in_backward

FULL = StateDictOptions(full_state_dict=True)


def compare(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """torch's full state dict, which holds what each parameter's own state gathers to."""
    full: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=FULL)["state"]  # type: ignore[assignment]
    found = {}
    for fqn, param in model.named_parameters():
        for name, value in optimizer.state[param].items():
            key = f"{fqn}/{name}"
            found[key] = torch.as_tensor(full[fqn][name]).clone()
            assert torch.equal(found[key], full_value(torch.as_tensor(value))), key
    return found


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable[[int], torch.Tensor]) -> None:
    for step in range(2):
        loss_of(step).backward()
        optimizer.step()
        optimizer.zero_grad()


def in_backward_run() -> int:
    """Ranks use different experts, so they step the experts' parameters in different orders."""
    model, rank = changing.build(), dist.get_rank()
    for module in (*model.blocks, model.moe, model):
        fully_shard(module, mesh=cpu_mesh())
    optimizer = torch.optim.AdamW(changing.groups_of(dict(model.named_parameters())), lr=0.01)
    step_in_backward(model, optimizer)
    micro = changing.Micro(((3,), (0, 2)), None, None, "")
    train(model, optimizer, lambda step: changing.loss_of(model, step, 0, micro, rank))
    return len(compare(model, optimizer))


def test_full_state_of_steps_in_the_backward() -> None:
    """Three tensors for each of 21 parameters: those of one expert have none."""
    assert run_ranks(2, in_backward_run) == [3 * 21, 3 * 21]


def structured_run(kind: str) -> dict[str, torch.Tensor]:
    model, optimizer = build_structured(kind, dist.get_world_size() > 1, 0, torch.float32)
    structured_steps(model, optimizer, range(2))
    saved = optimizer.state_dict()
    items = list(saved["state"].items())
    saved["state"] = dict(items[:: 1 if dist.get_rank() % 2 else -1])
    optimizer.load_state_dict(saved)
    return compare(model, optimizer)


@pytest.mark.parametrize("kind", KINDS)
def test_full_state_of_structured_optimizers(kind: str) -> None:
    """Muon, Shampoo and AdamW8bit: each tensor is gathered with its own kind and lies under its own name."""
    (one,) = run_ranks(1, structured_run, kind)
    for full in run_ranks(3, structured_run, kind):
        assert full.keys() == one.keys()
        for name, value in one.items():
            torch.testing.assert_close(full[name], value, msg=name)


def replicated_run() -> list[str]:
    """State that lies whole on every rank, loaded from a dict whose order differs between ranks."""
    model = models.shard(models.build())
    optimizer = AdamW8bit([{"params": list(model.parameters()), "state_bits": 32}], lr=0.01)
    train(model, optimizer, lambda step: models.loss_of(model, models.batch(step, dist.get_rank())))
    saved = optimizer.state_dict()
    expected = {number: full_value(parts["exp_avg"]).clone() for number, parts in saved["state"].items()}
    replicated = {
        number: {**parts, "exp_avg": parts["exp_avg"].redistribute(placements=[Replicate()])}
        for number, parts in saved["state"].items()
    }
    turned = list(replicated.items())[:: 1 if dist.get_rank() % 2 else -1]
    optimizer.load_state_dict({**saved, "state": dict(turned)})
    found = optimizer.state_dict()["state"]
    return [
        str(number)
        for number in expected
        if not torch.equal(full_value(found[number]["exp_avg"]), expected[number])
    ]


def test_state_of_other_placements_is_loaded_in_one_order() -> None:
    """Copies between placements are collectives: one rank must not begin with another tensor than the next."""
    assert run_ranks(2, replicated_run) == [[], []]
