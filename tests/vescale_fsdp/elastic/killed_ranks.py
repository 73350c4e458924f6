"""An elastic job whose ranks are processes of their own, killed with SIGKILL where a test says, and replaced.

    launch(folder, deaths, ..)      the launcher: holds the store, starts ranks, and another one for each that dies
    rank(..)                        a rank: trains a small model, and dies where it is told
    reference(..)                   what a job gives that is restarted at the same steps on as many ranks

Every rank is a node: it has a folder in memory of its own. What a rank sees, it appends to ``log-PID``.
"""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.checkpoint.jobs.elastic_job import Data
from tests.support import models
from tests.support.distributed import cpu_mesh, forkserver, run_ranks
from tests.support.processes import stacks_of, wait_until
from vescale_fsdp import fully_shard
from vescale_fsdp.checkpoint import CheckpointManager, EverySteps, RamTier, load, save
from vescale_fsdp.checkpoint.state_dict import get_state_dict
from vescale_fsdp.elastic.job import ElasticJob, TrainingState
from vescale_fsdp.elastic.store_membership import StoreMembership

PLACES = ("forward", "backward", "optimizer", "save", "anywhere", "restore")


class Death(NamedTuple):
    """When a rank is killed: at a step, in a world of this number of ranks."""

    rank: int
    step: int  # "restore": of the first one after this step
    place: str
    world: int


class Seen(NamedTuple):
    """An epoch, as the logs of its ranks have it."""

    world: int
    step: int
    tier: str
    losses: dict[int, dict[int, str]]  # by step, by rank: bits
    last_begun: int  # the last step that any rank began


class _Reaper:
    """Kills this process at the points of its deaths."""

    def __init__(self, folder: Path, deaths: Sequence[Death]) -> None:
        self.folder, self.deaths = folder, deaths
        self.job: ElasticJob | None = None
        self.step = self.first_step = 0  # of all, and of this epoch

    def pass_by(self, place: str) -> None:
        """Kill this process if a death is due here, once per death, together with other ranks of the same step."""
        for number, death in enumerate(self.deaths):
            here = self.job is not None and (death.rank, death.world) == (self.job.rank, self.job.num_ranks)
            if here and death.place == place and self._is_due(death) and self._is_first(number):
                others = [n for n, other in enumerate(self.deaths) if other[1:] == death[1:]]
                # The first one's end would be an error for the others before they come here.
                wait_until(
                    lambda others=others: all((self.folder / f"death-{n}").exists() for n in others),
                    f"ranks that die together with {death}",
                )
                os.kill(os.getpid(), signal.SIGKILL)

    def _is_due(self, death: Death) -> bool:
        """From the death's step on, once this epoch has done steps whose copies its own cliques keep."""
        has_copies = self.step >= self.first_step + 2
        return self.step >= death.step and (has_copies or death.place == "restore")

    def _is_first(self, number: int) -> bool:
        try:
            (self.folder / f"death-{number}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def lacks_ranks(self) -> bool:
        """Whether a death comes in a few steps, before which those who are to die have steps to save."""
        return self.job is not None and any(
            death.step - self.step <= 4
            and death.place != "restore"
            and death.world > self.job.num_ranks
            and not (self.folder / f"death-{number}").exists()
            for number, death in enumerate(self.deaths)
        )

    def pass_later(self, seed: int) -> None:
        """Pass by "anywhere" at a moment of the step that is as good as random."""
        delay_s = torch.rand((), generator=torch.Generator().manual_seed(seed)).item() * 0.1
        threading.Timer(delay_s, self.pass_by, ("anywhere",)).start()


class _MortalAdamW(torch.optim.AdamW):
    """Dies between its two param groups, when the first has been stepped."""

    reaper: _Reaper

    def _init_group(self, group: dict[str, Any], *args: Any) -> Any:
        if group is self.param_groups[1]:
            self.reaper.pass_by("optimizer")
        return super()._init_group(group, *args)  # type: ignore[misc]


class _MortalData(Data):
    """Dies while its state is saved, or restored."""

    reaper: _Reaper | None = None

    def state_dict(self) -> dict[str, Any]:
        if self.reaper is not None:
            self.reaper.pass_by("save")
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.reaper is not None:
            self.reaper.pass_by("restore")
        super().load_state_dict(state)


def training_on(mesh: DeviceMesh) -> TrainingState:
    """The model, sharded, with an optimizer of two param groups, and data."""
    model = models.build(1)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    weights = [param for param in model.parameters() if param.ndim > 1]
    rest = [param for param in model.parameters() if param.ndim == 1]
    optimizer = _MortalAdamW([{"params": weights}, {"params": rest, "weight_decay": 0.0}], lr=0.02)
    optimizer.reaper = _Reaper(Path(), ())
    return TrainingState(model, optimizer, {"data": _MortalData()})


def train_one(training: TrainingState, rank: int, world: int) -> str:
    """One step; the loss's bits."""
    loss = models.loss_of(training.model, training.more["data"].batch().chunk(world)[rank])
    loss.backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    return loss.item().hex()


def digest(training: TrainingState) -> list[str]:
    """Bits of all parameters and of the optimizer's state."""
    states = get_state_dict(training.model, training.optimizer)
    found = []
    for name, value in sorted(_tensors("", states)):
        full = value.full_tensor() if isinstance(value, torch.distributed.tensor.DTensor) else value
        found.append(f"{name} {full.double().sum().item().hex()} {full.double().norm().item().hex()}")
    return found


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(f"{name}/{key}", item)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _tensors(f"{name}/{number}", item)


def rank(folder: Path, port: int, num_first: int, num_steps: int, deaths: Sequence[Death]) -> None:
    """A rank's life."""
    stacks = open(_stack_file(folder, os.getpid()), "w")  # noqa: SIM115  for life
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    torch.set_num_threads(1)
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    memory = folder / "memory" / str(os.getpid())
    reaper = _Reaper(folder, deaths)
    log = open(folder / f"log-{os.getpid()}", "a", buffering=1)  # noqa: SIM115  for life

    def build(mesh: DeviceMesh) -> TrainingState:
        training = training_on(mesh)
        training.model.blocks[1].register_forward_pre_hook(lambda *_: reaper.pass_by("forward"))
        training.model.blocks[0].register_full_backward_hook(lambda *_: reaper.pass_by("backward"))
        training.optimizer.reaper = training.more["data"].reaper = reaper  # type: ignore[attr-defined]
        return training

    def checkpoints(num_ranks: int) -> CheckpointManager:
        ram = RamTier("job", replicas=min(1, num_ranks - 1), folder=memory)
        return CheckpointManager(
            folder / "steps", save_policy=EverySteps(4), retention=2, asynchronous=True, ram=ram
        )

    def train_step(job: ElasticJob, step: int) -> None:
        assert job.training is not None
        epoch = job.epochs[-1]
        reaper.step, reaper.first_step = step, epoch.step
        begun = {"epoch": epoch.number, "begun": step, "from": epoch.step, "tier": epoch.tier}
        log.write(json.dumps({**begun, "world": job.num_ranks}) + "\n")
        reaper.pass_later(step)
        loss = train_one(job.training, job.rank, job.num_ranks)
        log.write(json.dumps({"epoch": epoch.number, "rank": job.rank, "step": step, "loss": loss}) + "\n")
        # Else a slow machine's job would be over before they come.
        wait_until(lambda: not reaper.lacks_ranks() or membership.has_changed(), "ranks that are to die")
        if step == num_steps - 1:
            log.write(
                json.dumps({"digest": digest(job.training), "files": len(os.listdir("/proc/self/fd"))}) + "\n"
            )

    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    membership = StoreMembership(store, num_first=num_first, timeout_s=60)
    reaper.job = job = ElasticJob(membership, build, checkpoints, timeout_s=60)
    job.run(train_step, num_steps)
    shutil.rmtree(memory, ignore_errors=True)


def launch(
    folder: Path, num_ranks: int, num_steps: int, deaths: Sequence[Death], *, limit_s: float = 240
) -> int:
    """Run a job to its end; the number of ranks that were killed. Nothing of it is left running.

    Once those that are left have done a step, others are started in place of the dead, as long as deaths are to come.
    """
    context = forkserver()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    living: list[BaseProcess] = []
    num_killed, deadline_s = 0, time.monotonic() + limit_s
    try:
        while time.monotonic() < deadline_s:
            is_short = len(living) < num_ranks and num_killed < len(deaths)
            if is_short and (not num_killed or _num_going_on(folder) == len(living)):
                for _ in range(num_ranks - len(living)):
                    arguments = (folder, store.port, num_ranks, num_steps, deaths)
                    living.append(context.Process(target=rank, args=arguments, daemon=True))
                    living[-1].start()
            wait([process.sentinel for process in living], 0.05)
            for process in [process for process in living if process.exitcode is not None]:
                assert process.exitcode in (0, -signal.SIGKILL), f"a rank ended with {process.exitcode}"
                living.remove(process)
                if process.exitcode:
                    num_killed += 1
                    shutil.rmtree(
                        folder / "memory" / str(process.pid), ignore_errors=True
                    )  # the node is gone
            if not living:
                return num_killed
        pids = [process.pid for process in living if process.pid is not None]
        stacks = stacks_of((pid, _stack_file(folder, pid)) for pid in pids)
        raise AssertionError(f"the job took longer than {limit_s} s\n{stacks}")
    finally:
        for process in living:
            process.kill()
            process.join()


def _stack_file(folder: Path, pid: int) -> Path:
    return folder / f"stacks-{pid}"


def _num_going_on(folder: Path) -> int:
    """Ranks of the newest epoch, once it has done a step; 0 before."""
    begun = [line for line in lines_of(folder) if "begun" in line]
    newest = max(line["epoch"] for line in begun)
    steps = {line["begun"] for line in begun if line["epoch"] == newest}
    return next(line["world"] for line in begun if line["epoch"] == newest) if len(steps) > 1 else 0


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """All that ranks have logged; a line torn by a kill is not counted."""
    texts = [text for file in folder.glob("log-*") for text in file.read_text().splitlines(keepends=True)]
    return [json.loads(text) for text in texts if text.endswith("\n")]


def epochs_of(folder: Path) -> list[Seen]:
    """What ranks have seen, epoch by epoch."""
    by_number: dict[int, list[dict[str, Any]]] = {}
    for line in lines_of(folder):
        if "epoch" in line:
            by_number.setdefault(line["epoch"], []).append(line)
    found = []
    for _, lines in sorted(by_number.items()):
        begun = [line for line in lines if "begun" in line]
        assert len({(line["from"], line["tier"]) for line in begun}) == 1, (
            "ranks went on from different steps"
        )
        losses: dict[int, dict[int, str]] = {}
        for line in lines:
            if "loss" in line:
                losses.setdefault(line["step"], {})[line["rank"]] = line["loss"]
        last = max(line["begun"] for line in begun)
        found.append(Seen(begun[0]["world"], begun[0]["from"], begun[0]["tier"], losses, last))
    return found


def _segment(folder: Path, start: int, stop: int, is_last: bool) -> tuple[list[str], list[str]]:
    """Restart from a step's checkpoint on the disk, train, save; losses, and the digest at the end of all."""
    training = training_on(cpu_mesh())
    state = {"model": training.model, "optimizer": training.optimizer, "more": training.more}
    if start:
        load(folder / str(start), state)
    losses = [train_one(training, dist.get_rank(), dist.get_world_size()) for _ in range(start, stop)]
    if is_last:
        return losses, digest(training)
    save(folder / str(stop), state, overwrite=True)
    return losses, []


def prove_equal(folder: Path, num_steps: int) -> list[Seen]:
    """Compare a job's losses and final state with a job that is restarted at the same steps on as many ranks."""
    epochs = epochs_of(folder)
    end: list[str] = []
    for number, seen in enumerate(epochs):
        stop = min(
            (later.step for later in epochs[number + 1 :]), default=num_steps
        )  # what came later counts
        if stop <= seen.step:
            continue
        found = run_ranks(seen.world, _segment, folder / "reference", seen.step, stop, stop == num_steps)
        for offset, step in enumerate(range(seen.step, stop)):
            expected = {number: losses[offset] for number, (losses, _) in enumerate(found)}
            assert seen.losses[step].items() <= expected.items(), (number, step)  # the dead tell no tales
            assert seen.losses[step]
        end = found[0][1]
    digests = [line["digest"] for line in lines_of(folder) if "digest" in line]
    assert digests and end and all(each == end for each in digests)
    return epochs
