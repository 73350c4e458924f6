"""One replica group of torchft's, whose ranks share a model; the group's torchrun job can be killed.

torchrun --nproc-per-node 2 -m tests.stacks.jobs.torchft_job --lighthouse URL --group 0 --out FOLDER [--die-at STEP]

torchft's manager averages gradients between groups and commits steps; `fully_shard` shards within a group.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchft import Manager, ProcessGroupGloo

from tests.support.processes import wait_until
from vescale_fsdp import Rows, fully_shard

STEPS, GROUPS, RANKS = 8, 2, 2
_TIMEOUT = timedelta(seconds=60)
_ALLREDUCE_TIMEOUT = timedelta(seconds=20)


def build() -> nn.Sequential:
    """The same start everywhere."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """One with a state."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_of(model: nn.Module, step: int, group: int, rank: int) -> torch.Tensor:
    """On the batch that is this rank's alone."""
    generator = torch.Generator().manual_seed(100 * step + 10 * group + rank)
    loss: torch.Tensor = model(torch.randn(4, 6, generator=generator)).square().mean()
    return loss


def train(manager: Any, model: nn.Module, group: int, die_at: int | None) -> list[tuple[int, int, bool]]:
    """Step, number of groups, and whether the step was committed, of each attempt."""
    optimizer, attempts = optimizer_of(model), []
    while manager.current_step() < STEPS:
        step = manager.current_step()
        manager.start_quorum()
        optimizer.zero_grad()
        loss_of(model, step, group, dist.get_rank()).backward()
        if step == die_at:
            dist.barrier()  # before it, the other rank is still in its backward
            os.kill(os.getpid(), signal.SIGKILL)
        for param in model.parameters():
            manager.allreduce(param.grad.to_local()).wait()
        groups = manager.num_participants()
        committed = manager.should_commit()
        if committed:
            optimizer.step()
        attempts.append((step, groups, committed))
    return attempts


def main() -> None:
    """One rank of one group."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lighthouse", required=True)
    parser.add_argument("--group", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--die-at", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = build()
    fully_shard(model, granularity=Rows(2))
    manager: Any = Manager(
        pg=ProcessGroupGloo(timeout=_ALLREDUCE_TIMEOUT),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        use_async_quorum=False,
        timeout=_ALLREDUCE_TIMEOUT,
        quorum_timeout=_TIMEOUT,
        connect_timeout=_TIMEOUT,
        store_addr="127.0.0.1",
        lighthouse_addr=options.lighthouse,
        replica_id=f"group{options.group}",
        hostname="127.0.0.1",
        init_sync=False,  # all groups start alike
    )
    # The lighthouse waits for groups that send heartbeats; a group that came first would train alone.
    (options.out / f"ready-{options.group}-{dist.get_rank()}").touch()
    wait_until(lambda: len(list(options.out.glob("ready-*"))) == GROUPS * RANKS, "all ranks", limit_s=120)
    attempts = train(manager, model, options.group, options.die_at)
    weights = [param.full_tensor().tolist() for param in model.parameters()]
    found = {"attempts": attempts, "weights": weights}
    (options.out / f"{options.group}-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # not by a return: torchft's threads outlive its shutdown


if __name__ == "__main__":
    main()
