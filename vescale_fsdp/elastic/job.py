"""ElasticJob: training that continues, in the same processes, when ranks are lost or join.

    epoch            agree on the members, create the process group, move model and optimizer to its ranks
    restore          load the newest complete step: from the memory of the members, else from disk
    train            step, save (to memory after every step, to disk now and then), step, save, ..
    a rank is lost   collectives fail; each rank that notices closes its connections, so that all ranks notice
                     -> the next epoch

After an interruption, all ranks go back to a saved step. The saved state replaces everything that the interrupted step
has written into weights, optimizer or data, on ranks that remain and on ranks that join. So the job continues with the
same bits as a job that was restarted from that step on the same number of ranks.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vescale_fsdp.checkpoint.manager import CheckpointManager
from vescale_fsdp.collectives.interruptible import (
    allow_interrupts,
    end_interrupts,
    interrupt,
    interruptibly,
)
from vescale_fsdp.collectives.process_groups import set_hosts
from vescale_fsdp.elastic.connections import close_gloo_connections
from vescale_fsdp.elastic.membership import Membership, Quorum
from vescale_fsdp.elastic.renewal import check_more, check_renewable, renew_data, renew_more, renew_optimizer
from vescale_fsdp.errors import LifecycleError
from vescale_fsdp.runtime.data_mesh import default_mesh
from vescale_fsdp.torch_private import forget_meshes, process_groups, restart_group_names

_logger = logging.getLogger("vescale_fsdp")
_GROUPS_S = 1.0  # longest wait for an epoch's groups to be destroyed


@dataclass(frozen=True)
class TrainingState:
    """The model, the optimizer, and the other state that a job saves and restores.

    Args:
        model: a sharded model. Each unit must be sharded over the mesh that ``build`` receives.
        optimizer: the optimizer of the model's parameters.
        more: the other state to save, as for `vescale_fsdp.checkpoint.save`: data loaders, schedulers, counters,
            `PerRank` values. State that is not included is not rolled back after an interrupted step. A
            `ReshardableSampler` or `ReshardableLoader` in a `Resharded` value is adapted to the ranks of each epoch.
            Sharded modules, their optimizers, and tensors that are sharded like parameters (averages of the weights)
            move to the ranks of each epoch; other DTensors are refused when the job starts.

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
    """A record of the start of an epoch.

    Attributes:
        number: the epoch's `Quorum.epoch`.
        members: names of the processes, in the order of their ranks.
        step: the number of finished steps from which training continued.
        tier: where the state of that step was stored: "ram", "disk", or "start" if no state was saved.
        agreed_at_s: when the processes had agreed on the members, as given by `time.time`.
        ready_at_s: when training could start, as given by `time.time`.
    """

    number: int
    members: tuple[str, ...]
    step: int
    tier: str
    agreed_at_s: float
    ready_at_s: float


class ElasticJob:
    """One process of an elastic training job.

    Start each process by itself, or with Slurm's ``srun --no-kill``. torchrun cannot be used: its agent stops all
    workers when one worker fails.

        def build(mesh):
            model = Model()
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
            return TrainingState(model, torch.optim.AdamW(model.parameters()), {"data": data})

        def checkpoints(num_ranks, num_nodes):
            ram = RamTier("run", replicas=1)
            return CheckpointManager(root, save_policy=EverySteps(100), ram=ram)

        def train_step(job, step):
            batch = data.next().chunk(job.num_ranks)[job.rank]
            ...

        job = ElasticJob(StoreMembership(dist.TCPStore("node0", 29500), num_first=4), build, checkpoints)
        job.run(train_step, num_steps=1000)

    Args:
        membership: how processes agree on the members of an epoch.
        build: makes the model and its optimizer. It must not communicate, since it is called in the first epoch of each
            process, which other processes may have passed. It must give the same weights in all processes. It is called
            again in every epoch that finds no saved step, to start from initial weights: in a new job, twice at first.
        checkpoints: makes the checkpoint manager of an epoch, for a number of ranks and a number of machines. With a
            RAM tier of interval 1 and ``replicas=1``, the loss of a node costs only the current step. On one node, the
            tier keeps no copies, and warns.
        make_mesh: makes the mesh of an epoch, for a number of ranks. Default: a 1-D mesh of all ranks.
        backend: the backend of process groups. Default: torch's choice.
        timeout_s: the time-out of process groups: how long ranks wait for a rank whose connections stay open (a machine
            without power, a process that hangs). No step may take longer.
        on_renewal: called with this job in every epoch but the first one of a process, when model, optimizer and
            ``TrainingState.more`` have moved to the epoch's ranks, before the newest step is restored into them: for
            sharded tensors that the job does not move. It must not communicate outside of the job's ranks.
        on_epoch: called with this job in every epoch, when its state is restored, before its first step: for what
            depends on the ranks and is not in ``TrainingState.more``. It may communicate.
        max_retries: maximum number of errors without a finished step or a lost member between them. The next error is
            raised.

    Attributes:
        rank: the rank of this process in the current epoch.
        num_ranks: the number of ranks in the current epoch.
        mesh: the mesh of the current epoch; None between epochs.
        training: the newest result of ``build``; None before the first epoch.
        epochs: the start of each epoch of this process, oldest first.

    Examples:
        >>> def main(membership, build, checkpoints, train_step):
        ...     job = ElasticJob(membership, build, checkpoints, timeout_s=30)
        ...     job.run(train_step, num_steps=10_000)
    """

    def __init__(
        self,
        membership: Membership,
        build: Callable[[DeviceMesh], TrainingState],
        checkpoints: Callable[[int, int], CheckpointManager],
        *,
        make_mesh: Callable[[int], DeviceMesh] | None = None,
        backend: str | None = None,
        timeout_s: float = 60.0,
        on_renewal: Callable[[ElasticJob], None] | None = None,
        on_epoch: Callable[[ElasticJob], None] | None = None,
        max_retries: int = 5,
    ) -> None:
        self._membership, self._build, self._checkpoints = membership, build, checkpoints
        # The argument is not needed: the default mesh has all ranks of the epoch's default group.
        self._make_mesh = make_mesh or (lambda num_ranks: default_mesh())
        self._backend, self._timeout_s, self._max_retries = backend, timeout_s, max_retries
        self._on_renewal, self._on_epoch = on_renewal, on_epoch
        self._has_trained = False  # whether this process has finished a step
        self._manager: CheckpointManager | None = None
        self._excepthook = sys.excepthook
        self.training: TrainingState | None = None
        self.mesh: DeviceMesh | None = None
        self.rank, self.num_ranks = 0, 0
        self.epochs: list[Epoch] = []

    def run(self, train_step: Callable[[ElasticJob, int], None], num_steps: int) -> None:
        """Train until ``num_steps`` steps are finished, in as many epochs as needed.

        Args:
            train_step: trains one step; called with this job and the number of finished steps. A RuntimeError, such as
                a lost connection, ends the epoch. Any other error ends the job in this process, and is raised.
            num_steps: number of steps of the whole job.

        Raises:
            LifecycleError: if too few processes join an epoch, or the membership's store is lost and does not come
                back in time.
            RuntimeError: the last error, after more than ``max_retries`` errors without a finished step or a lost
                member between them.
        """
        num_failures = 0
        members: tuple[str, ...] = ()  # of the last epoch
        failure: RuntimeError | None = None  # the error that ended the last epoch
        # `_end_epoch` collects the cycles of an epoch. The imported modules are not part of any: leaving them out makes
        # that ten times faster, while the other ranks wait.
        gc.collect()
        gc.freeze()
        try:
            while True:
                quorum = self._membership.wait()
                # If a member was lost, the error was not this rank's.
                num_failures = num_failures + 1 if failure is not None and members == quorum.members else 0
                if failure is not None and num_failures > self._max_retries:
                    raise failure
                members, failure = quorum.members, None
                try:
                    step = self._begin_epoch(quorum)
                    if step >= num_steps and self.epochs[-1].tier == "ram":
                        # Its save to disk may have ended with the last epoch, and no later one follows.
                        self._save(step)
                    while step < num_steps and not self._membership.has_changed():
                        train_step(self, step)
                        step += 1
                        self._save(step)
                        num_failures, self._has_trained = 0, True
                    if step >= num_steps:
                        return self._finish()
                # torch raises RuntimeError if a connection is lost. Other errors end the job.
                except RuntimeError as error:
                    failure = error
                    traceback.clear_frames(
                        error.__traceback__
                    )  # else it keeps groups, and so their files, alive
                    lines = [line.strip() for line in str(error).splitlines()]
                    _logger.warning("rank %d leaves its epoch: %s", self.rank, "; ".join(lines[:3]))
                self._end_epoch()
        finally:  # also after the last step and after an error; ending an epoch twice does no harm
            self._end_epoch()
            gc.unfreeze()
            self._membership.leave()

    def _form(self, quorum: Quorum) -> None:
        """Create the default process group of an epoch."""
        restart_group_names()  # the store is the epoch's, so numbers need not differ between epochs
        dist.init_process_group(
            self._backend,
            store=quorum.store,
            rank=quorum.rank,
            world_size=len(quorum.members),
            timeout=timedelta(seconds=self._timeout_s),
        )

    def _begin_epoch(self, quorum: Quorum) -> int:
        """Create the process group, move the model to its ranks, and restore the newest saved step.

        Returns:
            The number of finished steps.
        """
        agreed_at_s = time.time()
        self.rank, self.num_ranks = quorum.rank, len(quorum.members)
        set_hosts(quorum.hosts)
        self._form(quorum)
        self.mesh = mesh = self._make_mesh(self.num_ranks)
        if mesh.device_type == "cpu":
            allow_interrupts()  # on accelerators, a wait belongs to the stream of the thread that waits
        if self.training is None:
            self._build_on(mesh)
        else:  # Parameter objects stay, since hooks and other code may refer to them
            renew_more(self.training.model, self.training.more, mesh)
            renew_optimizer(self.training.optimizer)
            renew_data(self.training.more, self.rank, self.num_ranks)
            if self._on_renewal is not None:
                self._on_renewal(self)
        self._manager = self._checkpoints(self.num_ranks, quorum.num_nodes)
        restored = self._manager.restore(self._state())
        step, tier = (0, "start") if restored is None else (restored.step, restored.tier)
        if restored is None:
            self._check_new(quorum.store)
            # Build a model with initial weights. A model of an earlier epoch has zeros as weights after `renew_more`.
            self._build_on(mesh)
            # `force`, whatever the manager's policy says: a later epoch needs a step to restore.
            self._manager.save(0, self._state(), force=True)
        epoch = Epoch(quorum.epoch, quorum.members, step, tier, agreed_at_s, time.time())
        self.epochs.append(epoch)
        # One line per epoch instead of one per rank. Later epochs are warnings, like the losses that precede them.
        level = logging.INFO if len(self.epochs) == 1 else logging.WARNING
        _logger.log(
            level if self.rank == 0 else logging.DEBUG,
            "epoch %d: %d ranks continue from step %d (%s), %.2f s after the processes agreed",
            epoch.number,
            self.num_ranks,
            step,
            tier,
            epoch.ready_at_s - agreed_at_s,
        )
        if self._on_epoch is not None:
            self._on_epoch(self)
        return step

    def _check_new(self, store: dist.Store) -> None:
        """Check, where no saved step was found, that no rank has trained before: the job must not start again silently.

        A collective of all ranks.

        Raises:
            LifecycleError: on all ranks.
        """
        if self._has_trained:
            store.set("has-trained", str(self.rank))
        interruptibly(dist.barrier)
        if store.check(["has-trained"]):
            raise LifecycleError(
                "No saved step can be restored, but steps were finished before.",
                expected="a complete step in memory or on disk",
                got=f"none; rank {store.get('has-trained').decode()} has finished steps",
                where=f"rank {self.rank} of {self.num_ranks}",
                todo="check the folders of the checkpoint manager, and its warnings; to start from the beginning, "
                "start the job again",
            )

    def _build_on(self, mesh: DeviceMesh) -> None:
        """Call the user's ``build``, and check that later epochs can move the model to other ranks."""
        training = self._build(mesh)
        check_renewable(training.model, mesh)
        check_more(training.model, training.more, mesh)
        self.training = training

    def _state(self) -> dict[str, Any]:
        """Return the state to save and to restore."""
        training = self.training
        assert training is not None
        return {"model": training.model, "optimizer": training.optimizer, "more": training.more}

    def _save(self, step: int) -> None:
        """Save after ``step`` finished steps, if the manager's policy says so."""
        assert self._manager is not None
        self._manager.save(step, self._state())

    def _finish(self) -> None:
        """Wait until all ranks have saved their last step, since other ranks may still copy files from this rank."""
        assert self._manager is not None
        self._manager.wait()
        interruptibly(dist.barrier)

    def _end_epoch(self) -> None:
        """Leave the process group, so that no rank waits for this one, and end the manager's background work."""
        self._membership.end_epoch()
        # Before the group is destroyed, since that waits for pending collectives, which wait for lost ranks.
        close_gloo_connections()
        interrupt()  # waits of background work
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.abandon()
        end_interrupts()
        groups: list[dist.ProcessGroup] = []
        if dist.is_initialized():
            groups = process_groups()
            dist.destroy_process_group()
        set_hosts(())
        sys.excepthook = self._excepthook  # torch wraps it once per default group
        self.mesh = None
        # A group closes its threads and files when its last reference is gone: those of the manager and of torch's
        # cached meshes, and those in reference cycles.
        del manager
        forget_meshes()
        gc.collect()
        # In a thread: the end of a group waits for its collectives, of which one whose message gloo has lost ends with
        # its time-out.
        ending = Thread(target=groups.clear, name="elastic-groups", daemon=True)
        ending.start()
        ending.join(_GROUPS_S)
