"""What the ranks of `formation` do: a job that trains, one that goes on without the lost, two jobs that meet."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DataLoader

from tests.vescale_fsdp.elastic.formation import FORMING_S, Spots, SpottedStore
from vescale_fsdp import fully_shard
from vescale_fsdp.checkpoint import CheckpointManager, EverySteps, RamTier
from vescale_fsdp.checkpoint.data import ReshardableLoader, ReshardableSampler, Resharded
from vescale_fsdp.elastic.job import ElasticJob, TrainingState
from vescale_fsdp.elastic.membership import Quorum
from vescale_fsdp.elastic.store_membership import StoreMembership
from vescale_fsdp.transfer import Transfer, describe_states, joint_ranks, plan_transfer

TIMEOUT_S = FORMING_S  # of groups and meetings
PATIENT_S = 600.0  # of groups of elastic jobs, which wait for no time-out: longer than a test
NUM_SAMPLES = 60


def _training(mesh: DeviceMesh) -> TrainingState:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 4))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    return TrainingState(model, torch.optim.AdamW(model.parameters(), lr=0.1))


def _step(training: TrainingState) -> None:
    training.model(torch.ones(2, 4)).square().sum().backward()
    training.optimizer.step()
    training.optimizer.zero_grad()


def _manager(folder: Path, node: int, num_ranks: int) -> CheckpointManager:
    memory = folder / f"memory-{node}"
    memory.mkdir(exist_ok=True)
    ram = RamTier("job", replicas=min(1, num_ranks - 1), folder=memory)
    return CheckpointManager(
        folder / "steps", save_policy=EverySteps(2), retention=2, asynchronous=True, ram=ram
    )


class _Spotted(StoreMembership):
    """A membership whose epochs have stores with spots."""

    spots: Spots

    def wait(self) -> Quorum:
        quorum = super().wait()
        self._kept = SpottedStore(quorum.store, self.spots)  # torch keeps no reference
        return dataclasses.replace(quorum, store=self._kept)


def forms(folder: Path, rank: int, num_ranks: int, store: dist.Store, spots: Spots) -> Any:
    """Members of an epoch that only create its groups."""
    membership = _Spotted(store, num_first=num_ranks, timeout_s=20, max_missed=20)
    membership.spots = spots
    quorum = membership.wait()
    spots.pass_by("agreed")
    timeout = timedelta(seconds=PATIENT_S)
    dist.init_process_group("gloo", None, timeout, len(quorum.members), quorum.rank, quorum.store)
    group = dist.new_group(timeout=timeout)
    spots.pass_by("formed")
    dist.barrier(group)


def trains(folder: Path, rank: int, num_ranks: int, store: dist.Store, spots: Spots) -> Any:
    """A job that ends if a rank is lost: groups, first step, first saves, restore."""
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=TIMEOUT_S)
    )
    spots.pass_by("mesh")
    training = _training(init_device_mesh("cpu", (num_ranks,)))
    spots.pass_by("sharded")
    with _manager(folder, rank, num_ranks) as manager:
        state = {"model": training.model, "optimizer": training.optimizer}
        for step in range(1, 3):
            _step(training)
            spots.pass_by(f"step {step}")
            manager.save(step, state)
            spots.pass_by(f"saved {step}")
        manager.wait()
        assert manager.restore(state) is not None
    dist.destroy_process_group()


def goes_on(folder: Path, rank: int, num_ranks: int, store: dist.Store, spots: Spots) -> Any:
    """An elastic job whose last rank is killed in its third step, whatever else happens.

    Its groups are the default group, a mesh's, the checkpoint manager's, and one of the user's own.

    Each rank notes in ``samples-RANK`` what it takes of the data: epoch, step, samples.
    """
    batches: list[Iterator[torch.Tensor]] = []

    def build(mesh: DeviceMesh) -> TrainingState:
        training = _training(mesh)
        sampler = ReshardableSampler(NUM_SAMPLES, seed=3)
        loader: DataLoader[int] = DataLoader(range(NUM_SAMPLES), batch_size=2, sampler=sampler)  # type: ignore[arg-type]
        data = ReshardableLoader(loader)
        batches[:] = [iter(data)]
        return TrainingState(training.model, training.optimizer, {"data": Resharded(data)})

    def train_step(job: ElasticJob, step: int) -> None:
        assert job.training is not None
        spots.pass_by(f"step {step} of {job.num_ranks}")
        with open(folder / f"samples-{rank}", "a") as file:
            file.write(json.dumps([job.epochs[-1].number, step, next(batches[0]).tolist()]) + "\n")
        _step(job.training)
        if step == 2 and rank == num_ranks - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    membership = _Spotted(store, num_first=num_ranks, timeout_s=20, max_missed=20)
    membership.spots = spots
    job = ElasticJob(
        membership,
        build,
        lambda ranks, nodes: _manager(folder, rank, ranks),
        make_mesh=lambda ranks: init_device_mesh("cpu", (1, ranks), mesh_dim_names=("replicate", "shard")),
        timeout_s=PATIENT_S,
        on_epoch=lambda job: dist.barrier(dist.new_group()),
    )
    job.run(train_step, 6)
    assert job.training is not None
    local = [param.to_local().double().sum().item().hex() for param in job.training.model.parameters()]
    return {"epochs": [(epoch.members, epoch.step, epoch.tier) for epoch in job.epochs], "local": local}


def loses_a_node(folder: Path, rank: int, num_ranks: int, store: dist.Store, spots: Spots) -> Any:
    """An elastic job on two nodes, with the recipe of docs/state_in_motion.md; the second is lost in the third step."""
    node = 2 * rank // num_ranks
    (folder / f"memory-{node}").mkdir(exist_ok=True)

    def checkpoints(num_ranks: int, num_nodes: int) -> CheckpointManager:
        ram = RamTier("job", replicas=1, folder=folder / f"memory-{node}")
        return CheckpointManager(
            folder / "steps", save_policy=EverySteps(50), retention=2, asynchronous=True, ram=ram
        )

    def train_step(job: ElasticJob, step: int) -> None:
        assert job.training is not None
        _step(job.training)
        if step == 2 and node:
            os.kill(os.getpid(), signal.SIGKILL)

    membership = StoreMembership(store, num_first=num_ranks, timeout_s=60, max_missed=20)
    job = ElasticJob(membership, _training, checkpoints, timeout_s=10 * TIMEOUT_S)
    job.run(train_step, 5)
    return [(len(epoch.members), epoch.step, epoch.tier) for epoch in job.epochs]


def meets(folder: Path, rank: int, num_ranks: int, store: dist.Store, spots: Spots) -> Any:
    """Rank 0 trains, the others serve: two jobs, each with a process group of its own; three versions of weights.

    What a rank has is in ``view-RANK`` at all times: the version, and the weights of one that serves.
    """
    is_trainer = rank == 0
    size = 1 if is_trainer else num_ranks - 1
    own = dist.PrefixStore("trainer" if is_trainer else "engine", store)
    dist.init_process_group(
        "gloo", store=own, rank=max(0, rank - 1), world_size=size, timeout=timedelta(seconds=TIMEOUT_S)
    )
    first = 0 if is_trainer else 1
    with joint_ranks(store, first_rank=first, num_ranks=num_ranks, timeout_s=TIMEOUT_S, secret="s") as ranks:
        state = {"w": torch.zeros(8)} if is_trainer else None
        into = None if is_trainer else {"w": torch.full((8,), -1.0)}
        plan = plan_transfer(*describe_states(state, into, ranks=ranks))
        transfer = Transfer(plan, ranks=ranks, keep_old=True)
        for number in range(3):
            spots.pass_by(f"transfer {number}")
            if state is not None:
                state["w"].fill_(number)
            try:
                transfer.run(state, into, version=number if is_trainer else None)
            finally:
                weights = [] if into is None else into["w"].unique().tolist()
                view = {"version": transfer.version, "weights": weights}
                (folder / f"view-{rank}").write_text(json.dumps(view))
    dist.destroy_process_group()
