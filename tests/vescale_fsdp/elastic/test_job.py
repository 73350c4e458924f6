"""Epochs of an `ElasticJob` on ranks that agree by a script: data of other ranks, open files."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

from tests.support.distributed import run_ranks
from vescale_fsdp import fully_shard
from vescale_fsdp.checkpoint import CheckpointManager, EverySteps, PerRank, RamTier
from vescale_fsdp.checkpoint.data import ReshardableLoader, ReshardableSampler, Resharded
from vescale_fsdp.elastic.job import ElasticJob, TrainingState
from vescale_fsdp.elastic.membership import Quorum
from vescale_fsdp.errors import LifecycleError


class Scripted:
    """Epochs with given numbers of ranks and steps; ranks that are not in an epoch leave the job."""

    def __init__(self, rank: int, folder: Path, epochs: Sequence[tuple[int, int]]) -> None:
        self._rank, self._folder, self._epochs = rank, folder, list(epochs)
        self._number, self._left = -1, 0

    def wait(self) -> Quorum:
        self._number += 1
        num_ranks, self._left = self._epochs[self._number]
        if self._rank >= num_ranks:
            raise EOFError
        store = dist.FileStore(str(self._folder / f"store{self._number}"), num_ranks)
        return Quorum(self._number, tuple(map(str, range(num_ranks))), self._rank, store)

    def has_changed(self) -> bool:
        self._left -= 1
        return self._left < 0

    def end_epoch(self) -> None:
        pass

    def leave(self) -> None:
        pass


def _run(
    folder: Path, epochs: Sequence[tuple[int, int]], kind: str
) -> tuple[list[list[int]], list[tuple[int, int, int]]]:
    """Samples of the steps that this rank has done; its open files, threads and groups in each epoch."""
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    taken: list[list[int]] = []
    kept: list[tuple[int, int, int]] = []
    batches: list[Iterator[torch.Tensor]] = []
    num_samples = 2 * sum(num_ranks * steps for num_ranks, steps in epochs)

    def build(mesh: DeviceMesh) -> TrainingState:
        ranks = (mesh.get_local_rank(), mesh.size()) if kind == "given" else (None, None)
        sampler = ReshardableSampler(num_samples, seed=3, rank=ranks[0], world_size=ranks[1])
        loader: DataLoader[int] = DataLoader(
            range(num_samples), batch_size=2, sampler=sampler, num_workers=int(kind == "workers")
        )  # type: ignore[arg-type]
        data = ReshardableLoader(loader)
        batches[:] = [iter(data)]  # one for the whole job
        model = fully_shard(torch.nn.Linear(4, 4), mesh=mesh)
        return TrainingState(
            model, torch.optim.SGD(model.parameters(), lr=0.1), {"deep": [{"data": Resharded(data)}]}
        )

    def train_step(job: ElasticJob, step: int) -> None:
        assert job.training is not None
        if len(kept) < len(job.epochs) and sys.platform == "linux":
            files, threads = (len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task"))
            kept.append((files, threads, len(dist.distributed_c10d._world.pg_map)))
        taken.append(next(batches[0]).tolist())
        job.training.model(torch.ones(1, 4)).sum().backward()
        job.training.optimizer.step()

    def checkpoints(num_ranks: int, num_nodes: int) -> CheckpointManager:
        return CheckpointManager(folder / "steps", retention=2)

    job = ElasticJob(Scripted(rank, folder, epochs), build, checkpoints, timeout_s=60, max_retries=0)
    try:
        job.run(train_step, sum(steps for _, steps in epochs))
    except EOFError:
        assert rank >= epochs[-1][0]
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # `run_ranks` ends one
    return taken, kept


@pytest.mark.parametrize("kind", ["default", "given"])
def test_data_goes_on_with_other_ranks(tmp_path: Path, kind: str) -> None:
    """3 ranks, then 2, then 1: every sample once, by one iterator per process."""
    epochs = [(3, 2), (2, 2), (1, 2)]
    found = run_ranks(3, _run, tmp_path, epochs, kind)

    assert [len(taken) for taken, _ in found] == [6, 4, 2]
    samples = [sample for taken, _ in found for batch in taken for sample in batch]
    assert sorted(samples) == list(range(24))


class Draws:
    """A random generator with a state to save."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def state_dict(self) -> torch.Tensor:
        return self.generator.get_state()

    def load_state_dict(self, state: torch.Tensor) -> None:
        self.generator.set_state(state)

    def next(self) -> float:
        return torch.rand((), generator=self.generator).item()


def _follows(folder: Path, epochs: Sequence[tuple[int, int]]) -> tuple[list[tuple[int, float, float]], int]:
    """Step, learning rate and random number of all steps of this rank; its count of steps in the end."""
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    seen: list[tuple[int, float, float]] = []

    def build(mesh: DeviceMesh) -> TrainingState:
        model = fully_shard(torch.nn.Linear(4, 4), mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        more = {
            "schedule": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
            "draws": PerRank(Draws(rank)),
            "steps": PerRank(0, merge=lambda saved, rank, world: sum(saved) if rank == 0 else 0),
        }
        return TrainingState(model, optimizer, more)

    def train_step(job: ElasticJob, step: int) -> None:
        assert job.training is not None
        more, (group,) = job.training.more, job.training.optimizer.param_groups
        seen.append((step, group["lr"], more["draws"].value.next()))
        job.training.model(torch.ones(1, 4)).sum().backward()
        job.training.optimizer.step()
        more["schedule"].step()
        more["steps"].value += 1

    def checkpoints(num_ranks: int, num_nodes: int) -> CheckpointManager:
        return CheckpointManager(folder / "steps", save_policy=EverySteps(2))

    job = ElasticJob(Scripted(rank, folder, epochs), build, checkpoints, timeout_s=60, max_retries=0)
    try:
        job.run(train_step, 6)
    except EOFError:
        assert rank >= epochs[-1][0]
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # `run_ranks` ends one
    assert job.training is not None
    return seen, job.training.more["steps"].value


def test_what_a_job_saves_goes_on_with_other_ranks(tmp_path: Path) -> None:
    """Schedules, random generators and values of each rank go back to the saved step, and on from there."""
    found = run_ranks(3, _follows, tmp_path, [(3, 3), (2, 3), (1, 2)])

    steps = [[step for step, _, _ in seen] for seen, _ in found]
    assert steps == [[0, 1, 2, 2, 3, 4, 4, 5], [0, 1, 2, 2, 3, 4], [0, 1, 2]]  # saved: 2 and 4
    for rank, (seen, _) in enumerate(found):
        draws = Draws(rank)
        drawn = [draws.next() for _ in range(6)]
        assert seen == [(step, 0.5 * 0.5**step, drawn[step]) for step in steps[rank]]
    assert found[0][1] == 3 * 2 + 2 * 2 + 1 * 2  # of all ranks: those that left are in the count of rank 0


def _on_disk(folder: Path) -> list[int]:
    """The committed steps of a job."""
    return sorted(int(file.parent.name[-8:]) for file in folder.glob("steps/step-*/manifest.json"))


def _ends_in_memory(folder: Path) -> tuple[str, list[int], list[int]]:
    """Tier of the step from which a finished job goes on without its last step on disk; steps on disk before, after."""
    dist.destroy_process_group()
    (folder / "memory").mkdir()

    def build(mesh: DeviceMesh) -> TrainingState:
        model = fully_shard(torch.nn.Linear(4, 4), mesh=mesh)
        return TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.5))

    def train_step(job: ElasticJob, step: int) -> None:
        assert job.training is not None
        job.training.model(torch.ones(1, 4)).sum().backward()
        job.training.optimizer.step()

    def checkpoints(num_ranks: int, num_nodes: int) -> CheckpointManager:
        ram = RamTier("job", replicas=0, folder=folder / "memory")
        return CheckpointManager(folder / "steps", save_policy=EverySteps(2), ram=ram)

    jobs = []
    for number in range(2):
        (folder / str(number)).mkdir()
        jobs.append(ElasticJob(Scripted(0, folder / str(number), [(1, 9)]), build, checkpoints, timeout_s=60))
        jobs[-1].run(train_step, 4)
        if number == 0:  # as if the job had lost a rank while it saved
            shutil.rmtree(folder / "steps/step-00000004")
            before = _on_disk(folder)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # `run_ranks` ends one
    return jobs[-1].epochs[-1].tier, before, _on_disk(folder)


def test_the_last_step_is_on_disk_though_its_save_was_lost(tmp_path: Path) -> None:
    """It is restored from memory, and saved again."""
    ((tier, before, after),) = run_ranks(1, _ends_in_memory, tmp_path)
    assert tier == "ram" and 4 not in before and set(after) == {*before, 4}


class Failing(dist.Store):
    """A store over which no group can be created."""

    def set(self, key: str, value: Any) -> None:
        raise RuntimeError("made to fail")


def _forms_late(folder: Path) -> list[int]:
    """Rank 0 is in an epoch whose group cannot be created, before both ranks are in one."""
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    membership = Scripted(rank, folder, [(2, 3)])
    failing, real = Failing(), membership.wait
    quorums = [Quorum(-1, ("0", "1"), 0, failing)] * (rank == 0)
    membership.wait = lambda: quorums.pop() if quorums else real()  # type: ignore[method-assign]

    def build(mesh: DeviceMesh) -> TrainingState:
        model = fully_shard(torch.nn.Linear(4, 4), mesh=mesh)
        return TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1))

    job = ElasticJob(
        membership,
        build,
        lambda *_: CheckpointManager(folder / "steps"),
        timeout_s=20,
        max_retries=1,
    )
    try:
        job.run(lambda job, step: None, 3)
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # `run_ranks` ends one
    return [epoch.number for epoch in job.epochs]


def test_a_group_that_could_not_be_made_changes_no_names(tmp_path: Path) -> None:
    """Ranks that were in the failed epoch connect to ranks that were not."""
    assert run_ranks(2, _forms_late, tmp_path) == [[0], [0]]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists open files in /proc")
def test_epochs_leave_no_files_threads_or_groups(tmp_path: Path) -> None:
    """Open files, threads and process groups do not grow with the number of epochs."""
    num_epochs = 100 if os.environ.get("FAULTS") == "all" else 8
    found = run_ranks(2, _run, tmp_path, [(2, 1)] * num_epochs, "default")

    for _, kept in found:
        files, threads, groups = zip(*kept, strict=True)
        assert len(kept) == num_epochs and len(set(groups)) == 1, kept
        assert max(files[3:]) <= files[2] + 1 and max(threads[3:]) <= threads[2] + 1, kept


def _loses_its_steps(folder: Path) -> tuple[str, list[tuple[int, int, int, bool]]]:
    """Epochs that do not find the steps of the last one. The error, and what the job's hooks were told."""
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    told: list[tuple[int, int, int, bool]] = []
    nodes: list[int] = []

    def build(mesh: DeviceMesh) -> TrainingState:
        model = fully_shard(torch.nn.Linear(4, 4), mesh=mesh)
        return TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def checkpoints(num_ranks: int, num_nodes: int) -> CheckpointManager:
        nodes.append(num_nodes)
        return CheckpointManager(folder / f"steps-{len(nodes)}")  # another folder in each epoch

    def on_epoch(job: ElasticJob) -> None:
        told.append((job.num_ranks, nodes[-1], job.epochs[-1].step, job.mesh is not None))

    membership = Scripted(rank, folder, [(2, 2), *([(2, 2)] * 3)])
    job = ElasticJob(membership, build, checkpoints, timeout_s=20, max_retries=1, on_epoch=on_epoch)
    try:
        job.run(lambda job, step: None, 4)
    except LifecycleError as error:
        return str(error.got), told
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # `run_ranks` ends one
    return "", told


def test_a_job_that_lost_its_steps_does_not_start_again(tmp_path: Path) -> None:
    """All ranks get an error, instead of training from step 0 on; hooks are told of the first epoch alone."""
    for got, told in run_ranks(2, _loses_its_steps, tmp_path):
        assert re.search(r"\brank [01]\b", got) and told == [(2, 1, 0, True)]


def _fails_once(folder: Path, second: tuple[str, ...]) -> bool:
    """An error in the first step of the first of two epochs. Whether it ends a job without retries."""
    folder.mkdir(exist_ok=True)
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    membership = Scripted(rank, folder, [(2, 2), (2, 2)])
    real = membership.wait
    names = [("0", "1"), second]

    def wait() -> Quorum:
        quorum = real()
        return Quorum(quorum.epoch, names[quorum.epoch], quorum.rank, quorum.store)

    membership.wait = wait  # type: ignore[method-assign]

    def build(mesh: DeviceMesh) -> TrainingState:
        model = fully_shard(torch.nn.Linear(4, 4), mesh=mesh)
        return TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def train_step(job: ElasticJob, step: int) -> None:
        if len(job.epochs) == 1:
            raise RuntimeError("made to fail")

    job = ElasticJob(
        membership, build, lambda *_: CheckpointManager(folder / "steps"), timeout_s=20, max_retries=0
    )
    try:
        job.run(train_step, 2)
    except RuntimeError:
        return True
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # `run_ranks` ends one
    return False


def test_deaths_of_others_are_no_retries(tmp_path: Path) -> None:
    """An error counts if the same members go on, and not if one of them was lost."""
    assert run_ranks(2, _fails_once, tmp_path / "lost", ("0", "2")) == [False, False]
    assert run_ranks(2, _fails_once, tmp_path / "same", ("0", "1")) == [True, True]
