"""A small training job for torchrun that can be killed at any moment and goes on at any world size.

    torchrun --standalone --nproc-per-node 2 -m tests.checkpoint.jobs.elastic_job ROOT STEPS [RAM_NAME]

What a run leaves in ROOT: ``steps/`` the checkpoints, ``log`` a line "step loss world" per step, ``saved`` a line per
step once `save` has returned, ``pids/RANK``.
The order of the data and the noise come from one generator whose state, like the cursor, is part of the
checkpoint; each rank sees its share of one global batch, so the losses do not depend on the number of ranks.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support import models
from tests.support.distributed import cpu_mesh
from vescale_fsdp import fully_shard
from vescale_fsdp.checkpoint import CheckpointManager, EverySteps, PerRank, RamTier
from vescale_fsdp.checkpoint.state_dict import get_state_dict, set_state_dict

GLOBAL_ROWS = 12


class Data:
    """An endless stream of batches in random order; its state is a cursor and a generator."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(17)
        self.seen = 0

    def batch(self) -> torch.Tensor:
        """The next global batch, with noise."""
        order = torch.randperm(100, generator=self.generator)[:GLOBAL_ROWS]
        noise = torch.randn(GLOBAL_ROWS, 5, generator=self.generator)
        self.seen += GLOBAL_ROWS
        return torch.sin(order[:, None] * torch.arange(1.0, 6.0)) + 0.1 * noise

    def state_dict(self) -> dict[str, Any]:
        """Cursor and generator."""
        return {"generator": self.generator.get_state(), "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved cursor and generator."""
        self.generator.set_state(state["generator"])
        self.seen = state["seen"]


def train(root: Path, num_steps: int, ram_name: str | None) -> None:
    """Train to the end from the newest complete step. For all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    (root / "pids").mkdir(parents=True, exist_ok=True)
    (root / "pids" / str(rank)).write_text(str(os.getpid()))
    torch.set_num_threads(1)
    model = models.build(1)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=cpu_mesh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    data = Data()
    ram = RamTier(ram_name, keep_last=2) if ram_name is not None else None
    interval = 1 if ram is None else 4
    manager = CheckpointManager(
        root / "steps", retention=3, asynchronous=True, save_policy=EverySteps(interval), ram=ram
    )

    def state() -> dict[str, Any]:
        model_state, optim_state = get_state_dict(model, optimizer)
        counts = PerRank({"steps": 0}, merge=lambda values, rank, world: values[0])
        return {
            "model": model_state,
            "optim": optim_state,
            "scheduler": scheduler,
            "data": data,
            "mine": counts,
        }

    resumed = state()
    restored = manager.restore(resumed)
    first = 0
    if restored is not None:
        set_state_dict(model, optimizer, model_state_dict=resumed["model"], optim_state_dict=resumed["optim"])
        first = restored.step + 1
        if rank == 0:
            with open(root / "restored", "a") as file:
                file.write(f"{restored.step} {restored.tier} {world}\n")
    for step in range(first, num_steps):
        loss = models.loss_of(model, data.batch().chunk(world)[rank])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        mean = models.mean_over_ranks(loss)
        if rank == 0:  # first: a job that is killed once this step is saved never comes by it again
            with open(root / "log", "a") as file:
                file.write(f"{step} {mean!r} {world}\n")
        manager.save(step, state())
        if rank == 0:
            with open(root / "saved", "a") as file:
                file.write(f"{step}\n")
    manager.wait()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None)
    dist.destroy_process_group()
