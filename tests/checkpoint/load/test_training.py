"""Checkpoints of sharded training: models, optimizers, schedulers, loaded into other worlds and runtimes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from tests.support import models
from tests.support.distributed import cpu_mesh, run_ranks
from vescale_fsdp import Rows, fully_shard
from vescale_fsdp.checkpoint import load, read_state, save
from vescale_fsdp.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def make(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A sharded model and its optimizer; ``fsdp2`` is torch's own."""
    model = models.build(seed)
    mesh = cpu_mesh()
    for module in (*model.blocks, model):
        if kind == "fsdp2":
            torch_fully_shard(module, mesh=mesh)
        else:
            fully_shard(module, mesh=mesh, granularity=Rows(3) if kind == "rows" else None)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Losses over a global batch that does not depend on the world size."""
    losses = []
    for step in steps:
        rows = torch.cat([models.batch(step, part, rows=2) for part in range(6)])
        loss = models.loss_of(model, rows.chunk(dist.get_world_size())[dist.get_rank()])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(models.mean_over_ranks(loss))
    return losses


def _state(model: nn.Module, optimizer: torch.optim.Optimizer, flat: bool) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model_state, optim_state = get_state_dict(model, optimizer, options=options)
    return {"model": model_state, "optim": optim_state}


def _save(path: Path, kind: str, flat: bool) -> list[float]:
    model, optimizer = make(kind, seed=1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    train(model, optimizer, range(3))
    scheduler.step()
    save(path, {**_state(model, optimizer, flat), "scheduler": scheduler})
    return train(model, optimizer, range(3, 6))


def _resume(path: Path, kind: str, flat: bool) -> list[float]:
    model, optimizer = make(kind, seed=2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    state = _state(model, optimizer, flat)
    load(path, {**state, "scheduler": scheduler})
    assert scheduler.last_epoch == 1
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"], options=options
    )
    return train(model, optimizer, range(3, 6))


@pytest.mark.parametrize("flat", [True, pytest.param(False, marks=pytest.mark.part("formats"))])
def test_training_goes_on_elsewhere(flat: bool, tmp_path: Path) -> None:
    """Losses after a restart on other ranks, layouts and runtimes follow the uninterrupted run."""
    expected = run_ranks(2, _save, tmp_path / "c", "element", flat)[0]

    assert run_ranks(2, _resume, tmp_path / "c", "element", flat)[0] == expected
    for world, kind in ((3, "rows"), (1, "fsdp2"), (2, "fsdp2")):
        found = run_ranks(world, _resume, tmp_path / "c", kind, flat)[0]
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-6)


def test_a_layout_is_stored_once_for_weights_and_moments(tmp_path: Path) -> None:
    """Optimizer state points at its group's layout, and the manifest names each layout once."""
    run_ranks(2, _save, tmp_path / "c", "rows", False)

    manifest = read_state(tmp_path / "c").manifest

    cuts = {entry.name: entry.cuts for entry in manifest.entries if entry.cuts}
    assert len(manifest.structure.layouts) == 2  # one of the root, one that all blocks have
    assert len(cuts) == 3 * len(dict(models.build().named_parameters()))
    for name in dict(models.build().named_parameters()):
        assert cuts[f"model/{name}"] == cuts[f"optim/state/{name}/exp_avg"]


def _full_both_ways(options_name: str) -> int:
    options = {"full": FULL, "rank0": FROM_RANK0}[options_name]
    model, optimizer = make("rows", seed=1)
    train(model, optimizer, range(2))
    full_model = get_model_state_dict(model, options=FULL)
    # A copy, because step counters in it are the live ones.
    full_optim = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=FULL))
    whole = {name: param.full_tensor() for name, param in model.named_parameters()}
    expected = train(model, optimizer, range(2, 4))
    if options_name == "full":  # torch gives the values to rank 0 only when it offloads to the CPU
        shared = [full_model, full_optim]
        dist.broadcast_object_list(shared, src=0)
        full_model, full_optim = shared
    elif dist.get_rank():
        full_model, full_optim = {}, {}

    other, other_optimizer = make("element", seed=2)
    set_model_state_dict(other, full_model, options=options)
    set_optimizer_state_dict(other, other_optimizer, full_optim, options=options)

    for name, param in other.named_parameters():
        assert torch.equal(whole[name], param.full_tensor()), name
    torch.testing.assert_close(train(other, other_optimizer, range(2, 4)), expected)
    return sum(param.to_local().numel() for param in other.parameters())


@pytest.mark.parametrize("options", ["full", "rank0"])
def test_full_state_into_ragged_parameters(options: str) -> None:
    """What torch's setters refuse: full tensors, on every rank or on rank 0, into ragged parameters."""
    assert min(run_ranks(3, _full_both_ways, options)) > 0
