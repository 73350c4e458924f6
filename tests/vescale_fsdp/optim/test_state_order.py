"""Every rank walks an optimizer's state in one order, wherever its memory lies: torch gathers it in that order."""

from __future__ import annotations

from collections import defaultdict
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
from tests.vescale_fsdp.optim.test_flat_optimizer import groups_of
from tests.vescale_fsdp.optim.test_state_dict import KINDS
from tests.vescale_fsdp.optim.test_state_dict import build as build_structured
from tests.vescale_fsdp.optim.test_state_dict import steps as structured_steps
from vescale_fsdp import fully_shard
from vescale_fsdp.optim import AdamW8bit, FlatOptimizer
from vescale_fsdp.runtime.fsdp_state import state_of

FULL = StateDictOptions(full_state_dict=True)


def shard_addresses(model: nn.Module) -> list[int]:
    """Where the shards of the units lie, in the order of the model."""
    states = [state for module in model.modules() if (state := state_of(module)) is not None]
    return [group.shard.untyped_storage()._cdata for state in states for group in state.groups]


def scramble(model: nn.Module) -> None:
    """Move shards about until those of even ranks lie in rising order at the ends, those of odd ranks in falling."""
    junk = []
    for number in range(1000):
        addresses = shard_addresses(model)
        if (addresses[0] < addresses[-1]) is (dist.get_rank() % 2 == 0):
            return
        junk += [torch.empty(1 + number % 7) for _ in range(number)]
        model._apply(torch.clone)
        del junk[:: 2 + number % 3]
    raise AssertionError("the shards lie as they lay")


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


def train(model: nn.Module, optimizer: torch.optim.Optimizer, world: int, first: int = 0) -> None:
    """Two steps over the batches of ``world`` ranks, each of which has its own."""
    for step in range(first, first + 2):
        ranks = [dist.get_rank()] if dist.get_world_size() == world else range(world)
        for rank in ranks:
            (models.loss_of(model, models.batch(step, rank)) / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()


def flat_run(kind: type[torch.optim.Optimizer], world: int, variant: str) -> dict[str, torch.Tensor]:
    model = models.build()
    for name, param in model.named_parameters():
        param.requires_grad_(not (variant == "frozen" and "tiny" in name))
    model = shard(model)
    if dist.get_world_size() > 1:
        scramble(model)
    groups = groups_of(model)
    if variant == "reversed":
        groups = [{**group, "params": group["params"][::-1]} for group in groups[::-1]]
    optimizer = FlatOptimizer(kind, groups, lr=0.01)
    train(model, optimizer, world)
    if variant == "reloaded":  # from a dict whose order is this rank's
        saved = optimizer.state_dict()
        items = list(saved["state"].items())
        saved["state"] = dict(items[:: 1 if dist.get_rank() % 2 else -1])
        optimizer = FlatOptimizer(kind, groups_of(model), lr=0.01)
        optimizer.load_state_dict(saved)
        train(model, optimizer, world, first=2)
    elif variant == "state kept in another order":
        optimizer.state = defaultdict(dict, reversed(optimizer.state.items()))
        model._apply(torch.clone)
        train(model, optimizer, world, first=2)
    return compare(model, optimizer)


def shard(model: models.Stack) -> models.Stack:
    for module in (*model.blocks, model):
        fully_shard(module, mesh=cpu_mesh())
    return model


@pytest.mark.parametrize(
    ("variant", "world"),
    [
        pytest.param(variant, world, marks=() if world == core else pytest.mark.part("numerics"))
        for variant, core in (
            ("plain", 2),
            ("frozen", 3),
            ("reversed", 2),
            ("reloaded", 3),
            ("state kept in another order", 2),
        )
        for world in (2, 3)
    ],
)
def test_full_state_of_a_flat_optimizer(world: int, variant: str) -> None:
    """Each moment is gathered with its own kind and lies under its own name, as one process has it."""
    (one,) = run_ranks(1, flat_run, torch.optim.AdamW, world, variant)
    assert any(value.abs().max() > 0 for name, value in one.items() if name.endswith("exp_avg"))
    for full in run_ranks(world, flat_run, torch.optim.AdamW, world, variant):
        assert full.keys() == one.keys()
        for name, value in one.items():
            torch.testing.assert_close(full[name], value, msg=name)


def structured_run(kind: str) -> dict[str, torch.Tensor]:
    model, optimizer = build_structured(kind, dist.get_world_size() > 1, 0, torch.float32)
    if dist.get_world_size() > 1:
        scramble(model)
    structured_steps(model, optimizer, range(2))
    saved = optimizer.state_dict()
    items = list(saved["state"].items())
    saved["state"] = dict(items[:: 1 if dist.get_rank() % 2 else -1])
    optimizer.load_state_dict(saved)
    return compare(model, optimizer)


@pytest.mark.parametrize("kind", KINDS)
def test_full_state_of_structured_optimizers(kind: str) -> None:
    """The same of Muon, Shampoo and AdamW8bit, whose state one process has with the same bits or nearly so."""
    (one,) = run_ranks(1, structured_run, kind)
    for full in run_ranks(3, structured_run, kind):
        assert full.keys() == one.keys()
        for name, value in one.items():
            torch.testing.assert_close(full[name], value, msg=name)


def replicated_run(flat: bool) -> list[str]:
    """State that lies whole on every rank, loaded from a dict whose order differs between ranks."""
    model = shard(models.build())
    scramble(model)
    optimizer: torch.optim.Optimizer = (
        FlatOptimizer(torch.optim.AdamW, model.parameters(), lr=0.01)
        if flat
        else AdamW8bit([{"params": list(model.parameters()), "state_bits": 32}], lr=0.01)
    )
    train(model, optimizer, dist.get_world_size())
    saved = optimizer.state_dict()
    expected = {number: full_value(parts["exp_avg"]).clone() for number, parts in saved["state"].items()}
    replicated = {
        number: {**parts, "exp_avg": parts["exp_avg"].redistribute(placements=[Replicate()])}
        for number, parts in saved["state"].items()
    }
    turned = list(replicated.items())[:: 1 if dist.get_rank() % 2 else -1]
    optimizer.load_state_dict({**saved, "state": dict(turned)})
    model.zero_grad()
    optimizer.step()  # takes the loaded state over; without gradients it changes nothing
    found = optimizer.state_dict()["state"]
    return [
        str(number)
        for number in expected
        if not torch.equal(full_value(found[number]["exp_avg"]), expected[number])
    ]


@pytest.mark.parametrize("flat", [True, False])
def test_state_of_other_placements_is_loaded_in_one_order(flat: bool) -> None:
    """Copies between placements are collectives: one rank must not begin with another tensor than the next."""
    assert run_ranks(2, replicated_run, flat) == [[], []]
