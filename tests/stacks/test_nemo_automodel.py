"""NeMo Automodel's own sharding functions with our runtime, against stock FSDP2, on CPU ranks.

Its recipes and its model classes need CUDA kernels; its parallelizers, which are what changes, do not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import MixedPrecisionPolicy

from examples.tiny_llm import Sequences, tiny_llama
from tests.stacks.against_stock import converted
from tests.support.distributed import cpu_mesh, run_ranks
from vescale_fsdp import FSDPModule, Rows
from vescale_fsdp.checkpoint import get_state_dict, load, save, set_state_dict

STEPS, HALF, CLIP = 50, 25, 0.05


def parallelized(with_ours: bool) -> nn.Module:
    """A tiny Llama that Automodel's parallelizer has sharded."""
    from nemo_automodel.components.distributed.parallelizer import (
        ModelParallelizer,
        apply_fsdp2_sharding_recursively,
    )

    from vescale_fsdp.integrations.nemo_automodel import automodel_with_vescale

    model, mesh = tiny_llama(), cpu_mesh(names=("dp",))
    with automodel_with_vescale(granularity=Rows(4)) if with_ours else contextlib.nullcontext():
        apply_fsdp2_sharding_recursively(model, mesh, MixedPrecisionPolicy(), None)
        ModelParallelizer()._fully_shard_module(model, mesh=mesh, mp_policy=MixedPrecisionPolicy())
    sharded = [module for module in model.modules() if isinstance(module, TorchFSDPModule)]
    assert len(sharded) == 3 and all(isinstance(module, FSDPModule) is with_ours for module in sharded)
    return model


def train(
    with_ours: bool, folder: str, *, resume: bool = False, spoil: Callable[[nn.Module], None] | None = None
) -> list[float]:
    """Losses over two micro-batches a step, the largest gradient clipped, with a save in the middle."""
    model = parallelized(with_ours)
    if spoil is not None:
        spoil(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, foreach=True)
    state: dict[str, Any] = {}
    if resume:
        state["model"], state["optimizer"] = get_state_dict(model, optimizer)
        load(folder, state)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    data, losses = Sequences(10_000), []
    for step in range(HALF if resume else 0, STEPS):
        for micro in range(2):
            batch = {
                name: torch.stack([data[(step * 2 + micro) * 6 + row][name] for row in own_rows()])
                for name in ("input_ids", "labels")
            }
            loss = model(**batch).loss / 2
            loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(mean.item() / dist.get_world_size())
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP, norm_type=float("inf"))
        assert step or norm.full_tensor() > CLIP
        optimizer.step()
        optimizer.zero_grad()
        if spoil is None and step == HALF - 1 and not resume:
            keep(model, optimizer, folder, with_ours)
    return losses


def keep(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str, with_ours: bool) -> None:
    """Our checkpoint; of stock FSDP2 the whole model."""
    if with_ours:
        own, others = get_state_dict(model, optimizer)
        save(folder, {"model": own, "optimizer": others})
        return
    full = {name: value.full_tensor() for name, value in model.state_dict().items()}
    if dist.get_rank() == 0:
        torch.save(full, f"{folder}.stock.pt")


def own_rows() -> range:
    """This rank's rows of a micro-batch of six."""
    share = 6 // dist.get_world_size()
    return range(dist.get_rank() * share, (dist.get_rank() + 1) * share)


def leave_divided(model: nn.Module) -> None:
    """The control: gradients divided by the number of ranks once more."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(float(dist.get_world_size() ** 2))


def all_runs(folder: str) -> dict[str, list[float]]:
    """Stock FSDP2, ours, ours resumed, and the control."""
    return {
        "stock": train(False, folder),
        "ours": train(True, folder),
        "resumed": train(True, folder, resume=True),
        "control": train(True, folder, spoil=leave_divided),
    }


def through_the_argument() -> bool:
    """Whether `fully_shard_fn`, called as Automodel calls it, gives what `fully_shard` gives."""
    from vescale_fsdp.integrations.nemo_automodel import fully_shard_fn

    shard = fully_shard_fn(granularity=Rows(4))
    model = nn.Linear(8, 6)
    shard(model, mesh=cpu_mesh(), mp_policy=None, offload_policy=None, reshard_after_forward=None)
    return isinstance(model, FSDPModule) and model.model_layout().groups[0][1].slots[0].block_numel % 4 == 0


def test_losses_are_stock_fsdp2s(tmp_path: Path) -> None:
    """Fifty steps and a resume: the same bits; the control differs; three ranks go on; the converter opens the save."""
    folder = str(tmp_path / "checkpoint")
    for found in run_ranks(2, all_runs, folder, timeout_s=300.0):
        assert len(found["stock"]) == 100 and found["stock"][-1] < found["stock"][0] / 2
        assert found["ours"] == found["stock"]
        assert found["resumed"] == found["stock"][50:]
        assert found["control"][2:] != found["stock"][2:]
    wanted = found["stock"][50:]
    for losses in run_ranks(3, _resume_on_three, folder, timeout_s=300.0):
        assert losses == pytest.approx(wanted, rel=1e-4)

    model = converted(tmp_path / "checkpoint", tmp_path / "model.pt")
    expected = torch.load(f"{folder}.stock.pt")
    assert len(expected) > 10 and model.keys() == expected.keys()
    assert all(torch.equal(model[name], expected[name]) for name in expected)


def _resume_on_three(folder: str) -> list[float]:
    return train(True, folder, resume=True)


def test_the_argument() -> None:
    """Releases that take the function as an argument get ours, policies not chosen included."""
    assert all(run_ranks(2, through_the_argument))
