"""NeMo Automodel's parallelizers; the one line for this package is ``with automodel_with_vescale(...)``.

    torchrun --nproc-per-node 2 -m examples.stacks.train_automodel --out /tmp/run            on CPUs, a few seconds
    torchrun --nproc-per-node 3 -m examples.stacks.train_automodel --out /tmp/run2 --resume /tmp/run/step_25
    vescale-convert inspect /tmp/run/step_25

Two micro-batches per step, clipping, a save in the middle; OUT/losses.json has each step's loss and norm of gradients.
``--runtime fsdp2`` is the same with stock FSDP2. Automodel's recipes and its own model classes need CUDA
kernels; its parallelizers, which the line is for, do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from nemo_automodel.components.distributed.parallelizer import (
    ModelParallelizer,
    apply_fsdp2_sharding_recursively,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from examples.stacks.options import GLOBAL_BATCH, MICRO_BATCHES, Options, parse_options, write_losses
from examples.stacks.tiny_llm import Sequences, tiny_llama
from vescale_fsdp import Rows
from vescale_fsdp.checkpoint import load, save
from vescale_fsdp.integrations.nemo_automodel import automodel_with_vescale


def runtime(options: Options) -> AbstractContextManager[Any]:
    """The user's one line, or nothing."""
    return nullcontext() if options.runtime == "fsdp2" else automodel_with_vescale(granularity=Rows(4))


def parallelized(options: Options) -> nn.Module:
    """A tiny Llama that Automodel has sharded."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model, policy = tiny_llama(), MixedPrecisionPolicy()
    with runtime(options):
        apply_fsdp2_sharding_recursively(model, mesh, policy, None)
        ModelParallelizer()._fully_shard_module(model, mesh=mesh, mp_policy=policy)
    return model


def train(
    options: Options, *, prepared: Callable[[nn.Module], None] = lambda model: None
) -> list[tuple[float, float]]:
    """Train, save once in the middle; return loss and norm of the gradients per step.

    Args:
        options: what to run.
        prepared: called with the sharded model before the first step.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = parallelized(options)
    prepared(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    first = 0
    if options.resume is not None:
        resume(model, optimizer, options)
        first = int(options.resume.name.rpartition("_")[2])
    history: list[tuple[float, float]] = []
    for step in range(first, options.steps):
        total = torch.zeros(())
        for batch in micro_batches(step):
            loss = model(**batch).loss / MICRO_BATCHES
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        norm = nn.utils.clip_grad_norm_(model.parameters(), options.max_norm, norm_type=options.norm_type)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        optimizer.step()
        optimizer.zero_grad()
        history.append((total.item() / dist.get_world_size(), norm.item()))
        if step + 1 == options.save_at:
            save(str(options.out / f"step_{step + 1}"), {"model": model, "optimizer": optimizer})
    return history


def resume(model: nn.Module, optimizer: torch.optim.Optimizer, options: Options) -> None:
    """Fill both with what was saved, on any number of ranks."""
    load(str(options.resume), {"model": model, "optimizer": optimizer})


def micro_batches(step: int) -> Iterator[dict[str, torch.Tensor]]:
    """This rank's rows of a step's micro-batches."""
    data, rows = Sequences(GLOBAL_BATCH * (step + 1)), GLOBAL_BATCH // MICRO_BATCHES
    share = rows // dist.get_world_size()
    for micro in range(MICRO_BATCHES):
        start = step * GLOBAL_BATCH + micro * rows + dist.get_rank() * share
        own = [data[index] for index in range(start, start + share)]
        yield {name: torch.stack([each[name] for each in own]) for name in ("input_ids", "labels")}


def main() -> None:
    """Train and write the losses."""
    options = parse_options("NeMo Automodel's parallelizers with vescale_fsdp, on CPUs")
    write_losses(options.out, train(options))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
