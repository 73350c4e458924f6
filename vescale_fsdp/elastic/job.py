"""ElasticJob: training that goes on, in the same processes, when ranks are lost or join.

    epoch            wait for a quorum, make the process group, put model and optimizer on its ranks
    restore          the newest step that is whole: memory of the ranks that are here, then the disk
    train            step, save (memory every step, disk now and then), step, save, ..
    a rank is lost   collectives fail; whoever notices closes its connections, so that all notice
                     -> the next epoch

A step that is saved is the only state that counts. Whatever a step that was broken off has written, into weights,
optimizer or data, is replaced by what was saved, on survivors as on those who join: so the job goes on with the very
bits of one that was restarted on as many ranks from that step.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vescale_fsdp.checkpoint.manager import CheckpointManager
from vescale_fsdp.elastic.connections import close_gloo_connections
from vescale_fsdp.elastic.membership import Membership, Quorum
from vescale_fsdp.elastic.renewal import check_renewable, renew_data, renew_model, renew_optimizer
from vescale_fsdp.runtime.data_mesh import default_mesh
from vescale_fsdp.torch_private import forget_meshes

_logger = logging.getLogger("vescale_fsdp")
_POLL_S = 0.02


@dataclass(frozen=True)
class TrainingState:
    """What a job trains.

    Args:
        model: sharded, each unit over the mesh that `build` was given.
        optimizer: of its parameters.
        more: what a checkpoint must hold besides, as `vescale_fsdp.checkpoint.save` takes it: data loaders, schedulers,
            counters, `PerRank` values. What is not in it is what it was when a step was broken off. A
            `ReshardableSampler` or `ReshardableLoader` in a `Resharded` value is renewed for the ranks of each epoch.

    Examples:
        >>> model = nn.Linear(4, 4)
        >>> TrainingState(model, torch.optim.SGD(model.parameters()), {"step": 0}).more
        {'step': 0}
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Epoch:
    """How an epoch began.

    Attributes:
        number: of the quorum.
        members: processes, in the order of their ranks.
        step: the step it went on from.
        tier: where that came from: "ram", "disk", or "start".
        agreed_at_s, ready_at_s: when the quorum was there and when training could go on, by `time.time`.
    """

    number: int
    members: tuple[str, ...]
    step: int
    tier: str
    agreed_at_s: float
    ready_at_s: float


class ElasticJob:
    """A training job in one of its processes; each has one, started by a launcher of its own.

    torchrun's agent stops all workers when one fails, so it cannot be that launcher: start each process by itself, or
    with Slurm's ``srun --no-kill``.

        def build(mesh):
            model = Model()
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
            return TrainingState(model, torch.optim.AdamW(model.parameters()), {"data": data})

        def checkpoints(num_ranks):
            ram = RamTier("run", replicas=1)
            return CheckpointManager(root, save_policy=EverySteps(100), ram=ram)

        def train_step(job, step):
            batch = data.next().chunk(job.num_ranks)[job.rank]
            ...

        job = ElasticJob(StoreMembership(dist.TCPStore("node0", 29500), num_first=4), build, checkpoints)
        job.run(train_step, num_steps=1000)

    Args:
        membership: who takes part.
        build: makes the model and its optimizer; called once in each process, so it must not communicate, and must
            give the same weights in all of them. Called again only where no step at all is left.
        checkpoints: makes the manager of an epoch, for its number of ranks; with a RAM tier of interval 1 and
            ``replicas=1``, the loss of a node costs the step under way and no more.
        make_mesh: the mesh of an epoch, for its number of ranks; default: 1-D over all of them.
        backend: of process groups; default: torch's choice.
        timeout_s: of process groups: how long ranks wait for one that is lost without its connections being closed (a
            machine without power, a process that hangs). No step may take longer.
        max_retries: errors in a row, with no step finished in between, after which the last one is raised.

    Attributes:
        rank, num_ranks: of this epoch.
        mesh: likewise.
        training: what `build` made.
        epochs: how each has begun.

    Examples:
        >>> def main(membership, build, checkpoints, train_step):
        ...     job = ElasticJob(membership, build, checkpoints, timeout_s=30)
        ...     job.run(train_step, num_steps=10_000)
    """

    def __init__(
        self,
        membership: Membership,
        build: Callable[[DeviceMesh], TrainingState],
        checkpoints: Callable[[int], CheckpointManager],
        *,
        make_mesh: Callable[[int], DeviceMesh] | None = None,
        backend: str | None = None,
        timeout_s: float = 60.0,
        max_retries: int = 5,
    ) -> None:
        self._membership, self._build, self._checkpoints = membership, build, checkpoints
        self._make_mesh = make_mesh or _default_mesh
        self._backend, self._timeout_s, self._max_retries = backend, timeout_s, max_retries
        self._manager: CheckpointManager | None = None
        self._store: dist.Store | None = None
        self.training: TrainingState | None = None
        self.mesh: DeviceMesh | None = None
        self.rank, self.num_ranks = 0, 0
        self.epochs: list[Epoch] = []

    def run(self, train_step: Callable[[ElasticJob, int], None], num_steps: int) -> None:
        """Train to the end, through as many epochs as it takes.

        Args:
            train_step: one step, given this job and the number of steps before it. An error of a lost connection is
                nothing to it; any other than a RuntimeError ends this process's part in the job, and is raised.
            num_steps: of the whole job.

        Raises:
            LifecycleError: if too few processes come for an epoch.
            RuntimeError: one that comes back ``max_retries`` times with no step finished in between.
        """
        num_failures = 0
        try:
            while True:
                quorum = self._membership.wait()
                try:
                    step = self._begin_epoch(quorum)
                    while step < num_steps and not self._membership.has_changed():
                        train_step(self, step)
                        step += 1
                        self._save(step)
                        num_failures = 0
                    if step >= num_steps:
                        return self._finish()
                except RuntimeError as error:
                    num_failures += 1
                    if num_failures > self._max_retries:
                        raise
                    _logger.warning("rank %d leaves its epoch: %s", self.rank, error)
                self._end_epoch()
        finally:
            self._end_epoch()
            self._membership.leave()

    # -- epochs ---------------------------------------------------------------------------------------

    def _begin_epoch(self, quorum: Quorum) -> int:
        """Meet the others and restore; the number of steps that are done."""
        agreed_at_s = time.time()
        self.rank, self.num_ranks, self._store = quorum.rank, len(quorum.members), quorum.store
        try:
            dist.init_process_group(
                self._backend,
                store=quorum.store,
                rank=quorum.rank,
                world_size=len(quorum.members),
                timeout=timedelta(seconds=self._timeout_s),
            )
        except RuntimeError:
            _restart_group_names()
            raise
        self.mesh = mesh = self._make_mesh(self.num_ranks)
        if self.training is None:
            self._build_on(mesh)
        else:
            renew_model(self.training.model, mesh)
            renew_optimizer(self.training.optimizer)
            renew_data(self.training.more, self.rank, self.num_ranks)
        self._manager = self._checkpoints(self.num_ranks)
        step, tier = self._restore(self._manager, mesh)
        epoch = Epoch(quorum.epoch, quorum.members, step, tier, agreed_at_s, time.time())
        self.epochs.append(epoch)
        _logger.log(
            logging.INFO if self.rank == 0 else logging.DEBUG,
            "epoch %d: %d ranks, from step %d (%s), %.2f s after they agreed",
            epoch.number,
            self.num_ranks,
            step,
            tier,
            epoch.ready_at_s - agreed_at_s,
        )
        return step

    def _build_on(self, mesh: DeviceMesh) -> None:
        training = self._build(mesh)
        check_renewable(training.model, mesh)
        self.training = training

    def _restore(self, manager: CheckpointManager, mesh: DeviceMesh) -> tuple[int, str]:
        """Fill model, optimizer and the rest from the newest step there is; its number, and where it was."""
        restored = manager.restore(self._state())
        if restored is None:
            self._build_on(mesh)  # anew: it may have been trained, or be zeros since its ranks changed
            manager.save(0, self._state(), force=True)
            return 0, "start"
        return restored.step, restored.tier

    def _state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        training = self.training
        assert training is not None
        return {"model": training.model, "optimizer": training.optimizer, "more": training.more}

    def _save(self, step: int) -> None:
        assert self._manager is not None
        self._manager.save(step, self._state())

    def _finish(self) -> None:
        """Wait until all have saved their last step: who leaves earlier breaks off what others still copy."""
        assert self._manager is not None
        self._manager.wait()
        with suppress(RuntimeError):  # the store has gone, with a process that was through
            self._wait_for_all()

    def _wait_for_all(self) -> None:
        assert self._store is not None
        if self._store.add("finished", 1) == self.num_ranks:
            self._store.set("all-finished", "")
        deadline_s = time.monotonic() + self._timeout_s  # for one that is lost behind its last step
        while not self._store.check(["all-finished"]) and time.monotonic() < deadline_s:
            if self._membership.has_changed():
                return
            time.sleep(_POLL_S)

    def _end_epoch(self) -> None:
        """Leave the process group, so that nobody waits for this rank, and wait for what goes on behind training."""
        close_gloo_connections()
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.abandon()
        if dist.is_initialized():
            dist.destroy_process_group()
        self.mesh = self._store = None
        del manager
        forget_meshes()
        gc.collect()  # groups that nobody holds keep their threads and files until then


def _restart_group_names() -> None:
    """Number groups from 0 again, where making a default group has failed.

    Numbers are part of the keys under which ranks meet. torch (2.11-2.15) counts a group that could not be made, and
    begins anew when a default group is destroyed: this rank would look for others where none of them is.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()


def _default_mesh(num_ranks: int) -> DeviceMesh:
    return default_mesh()
