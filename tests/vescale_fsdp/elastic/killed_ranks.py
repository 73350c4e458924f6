"""An elastic job whose processes are killed with SIGKILL, phase by phase, and replaced.

    launch(folder, cells)           the launcher: holds the store, starts processes, replaces those that were killed
    process(..)                     trains a small model, and dies where a cell says
    prove_equal(folder, ..)         compares with a job that is restarted at the same steps on as many ranks

Four processes, two on each of two nodes: those of a node share a folder in memory and an address. They train under HSDP
with Muon, an average of the weights and a data loader. What a process sees, it appends to ``log-PID``.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import logging
import os
import random
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import product
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

from tests.checkpoint.jobs.elastic_job import Data
from tests.support import models
from tests.support.distributed import cpu_mesh, forkserver, run_ranks
from tests.support.processes import stacks_of, wait_until
from vescale_fsdp import fully_shard
from vescale_fsdp.checkpoint import CheckpointManager, EverySteps, RamTier, load, save
from vescale_fsdp.checkpoint.data import ReshardableLoader, ReshardableSampler, Resharded
from vescale_fsdp.checkpoint.ranks.stores import BoundedStore, bound_store
from vescale_fsdp.checkpoint.state_dict import get_state_dict
from vescale_fsdp.collectives.slice_exchange import receive_async, send_async, wait_for
from vescale_fsdp.elastic import job as elastic_job
from vescale_fsdp.elastic.job import ElasticJob, TrainingState
from vescale_fsdp.elastic.membership import Quorum
from vescale_fsdp.elastic.store_membership import StoreMembership
from vescale_fsdp.optim import Muon

# Phases of an epoch that begins. "connect": a rank knows the addresses of ranks of a group, and has not connected yet.
RECOVERY = ("wait", "formation", "connect", "renewal", "restore")
# "transit": a large message is on its way to a rank.
PHASES = (*RECOVERY, "forward", "transit", "backward", "optimizer", "save", "finish")
NUM_SLOTS = 4
KEEP_ALIVE_S = 0.5
_NUM_SAMPLES = 4000  # more than a job takes
_MESSAGE_BYTES = 64 << 20  # more than the buffers of a connection


class Cell(NamedTuple):
    """A disturbance: some processes are killed in a phase, at once, and replaced."""

    phase: str
    who: str  # "rank": one process; "node": both of a node, whose memory is lost; "two": one of each node
    is_prompt: bool  # replaced as soon as they are dead; else when the others have done a step

    def victims(self, number: int) -> tuple[int, ...]:
        """Slots of the processes that die in this cell, the ``number``th of its job."""
        first = number % NUM_SLOTS
        other = {"rank": None, "node": first ^ 1, "two": (first + 2) % NUM_SLOTS}[self.who]
        return (first,) if other is None else (first, other)

    def trigger(self, number: int) -> tuple[int, ...]:
        """The slot of a process that dies before, so that there is an epoch that begins."""
        return ((number + 3) % NUM_SLOTS if self.who != "node" else (number ^ 2) % NUM_SLOTS,) * (
            self.phase in RECOVERY
        )


def drawn(seed: int) -> list[list[Cell]]:
    """Ten jobs of ten cells: every phase, victims and replacement, and some twice. A job's last cell is at its end."""
    matrix = [Cell(*each) for each in product(PHASES, ("rank", "node", "two"), (False, True))]
    generator = random.Random(seed)
    middle = [cell for cell in matrix if cell.phase != "finish"]
    middle += generator.sample(middle, 90 - len(middle))
    ends = [cell for cell in matrix if cell.phase == "finish"]
    ends += generator.sample(ends, 10 - len(ends))
    generator.shuffle(middle)
    return [[*middle[9 * job : 9 * job + 9], end] for job, end in enumerate(ends)]


def step_of(number: int) -> int:
    """The step in which a cell is due."""
    return 3 + 5 * number


class Seen(NamedTuple):
    """An epoch, as the logs of its ranks have it."""

    world: int
    step: int
    tier: str
    losses: dict[int, dict[int, str]]  # by step, by rank: bits
    last_begun: int  # the last step that any rank began
    processes: frozenset[str]  # their ids


class _Reaper:
    """Kills this process where cells say."""

    def __init__(self, folder: Path, slot: int, cells: Sequence[Cell], num_steps: int) -> None:
        self.folder, self.slot, self.cells, self.num_steps = folder, slot, cells, num_steps
        self.job: ElasticJob | None = None
        self.step = self.first_step = 0  # finished ones of the job, and at the start of this epoch

    def pass_by(self, phase: str) -> None:
        """Kill this process if the next cell is due here, together with the other process of the cell."""
        number = self._next()
        if number is None or self.job is None or not self.job.epochs:
            return
        cell = self.cells[number]
        trigger = cell.trigger(number)
        if trigger and not self._is_marked(number, trigger[0]):
            if phase == "forward" and self.slot in trigger and self._is_due(number):
                self._die(number, ())
        elif phase == cell.phase and self.slot in cell.victims(number) and (trigger or self._is_due(number)):
            self._die(number, cell.victims(number))

    def _is_due(self, number: int) -> bool:
        """Whether all ranks are here, and have done a step of whose state each node has a copy."""
        assert self.job is not None
        if self.cells[number].phase == "finish":
            return True
        has_copies = self.step >= self.first_step + 2
        return self.job.num_ranks == NUM_SLOTS and self.step >= step_of(number) and has_copies

    def _die(self, number: int, together: Sequence[int]) -> None:
        (self.folder / f"cell-{number}-{self.slot}").touch()
        # The end of one would be an error for the other before it comes here.
        wait_until(lambda: all(self._is_marked(number, slot) for slot in together), f"those of cell {number}")
        os.kill(os.getpid(), signal.SIGKILL)

    def _is_marked(self, number: int, slot: int) -> bool:
        return (self.folder / f"cell-{number}-{slot}").exists()

    def _next(self) -> int | None:
        """The number of the first cell of which a process still lives."""
        for number, cell in enumerate(self.cells):
            slots = (*cell.trigger(number), *cell.victims(number))
            if not all(self._is_marked(number, slot) for slot in slots):
                return number
        return None

    def exchange(self) -> None:
        """Send a large message to the next rank, and receive one, if processes die meanwhile in the next cell."""
        number = self._next()
        if number is None or self.cells[number].phase != "transit" or not self._is_due(number):
            return
        world = dist.group.WORLD
        assert world is not None
        rank, size = world.rank(), world.size()
        sent = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
        works = [
            receive_async(torch.empty_like(sent), world, (rank - 1) % size),
            send_async(sent, world, (rank + 1) % size),
        ]
        threading.Event().wait(0.01)  # a part of each message is sent
        self.pass_by("transit")
        wait_for(*works)

    def lacks_ranks(self) -> bool:
        """Whether the next cell is due in a few steps, and ranks are missing."""
        number = self._next()
        is_soon = number is not None and step_of(number) - self.step <= 2
        return is_soon and self.job is not None and self.job.num_ranks < NUM_SLOTS


class _MortalJob(ElasticJob):
    """A job that passes by its reaper in the phases between steps."""

    reaper: _Reaper

    def _form(self, quorum: Quorum) -> None:
        self.reaper.pass_by("formation")
        super()._form(quorum)

    def _finish(self) -> None:
        self.reaper.pass_by("finish")
        super()._finish()


class _MortalStore(BoundedStore):
    """The store of an epoch, in which gloo's ranks find each other's addresses."""

    def __init__(self, store: dist.Store, reaper: _Reaper) -> None:
        super().__init__(store, 600)
        self._reaper = reaper

    def get(self, key: str) -> bytes:
        value = super().get(key)
        # Of a group of the epoch that is not its default group, whose addresses have shorter keys.
        if re.fullmatch(r"0/.+//cpu//0/[0-9]+", key):
            self._reaper.pass_by("connect")
        return value


class _MortalMembership(StoreMembership):
    reaper: _Reaper

    def wait(self) -> Quorum:
        self.reaper.pass_by("wait")
        quorum = super().wait()
        self._kept = _MortalStore(quorum.store, self.reaper)  # torch keeps no reference
        return dataclasses.replace(quorum, store=self._kept)


class _MortalMuon(Muon):
    """Dies in a step, between the parameters of Muon and those of AdamW."""

    reaper: _Reaper | None = None

    def _step_adamw(self) -> None:
        if self.reaper is not None:
            self.reaper.pass_by("optimizer")
        super()._step_adamw()


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


class _Samples(ReshardableLoader[torch.Tensor]):
    """A loader with one iterator for the life of its process."""

    def __init__(self) -> None:
        sampler = ReshardableSampler(_NUM_SAMPLES, seed=5)
        super().__init__(DataLoader(range(_NUM_SAMPLES), batch_size=2, sampler=sampler))  # type: ignore[arg-type]
        self._iterator: Iterator[torch.Tensor] | None = None

    def next(self) -> torch.Tensor:
        """The next samples of this rank."""
        self._iterator = self._iterator or iter(self)
        return next(self._iterator)


def mesh_of(num_ranks: int) -> DeviceMesh:
    """Two replicas of an even number of ranks, else one."""
    replicas = 2 - num_ranks % 2
    return cpu_mesh(replicas, num_ranks // replicas, names=("replicate", "shard"))


def training_on(mesh: DeviceMesh) -> TrainingState:
    """The model, sharded, with an optimizer that steps matrices and vectors apart, an average, and data."""
    model = models.build(1)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, granularity=Muon.granularity())
    matrices, rest = Muon.split_params(model)
    optimizer = _MortalMuon(matrices, lr=0.02, adamw_params=rest)
    average = {name: param.detach().clone() for name, param in model.named_parameters()}
    more = {"data": _MortalData(), "samples": Resharded(_Samples()), "average": average}
    return TrainingState(model, optimizer, more)


def train_one(training: TrainingState, rank: int, world: int) -> str:
    """One step; the loss's bits."""
    inputs = training.more["data"].batch().chunk(world)[rank]
    inputs = inputs + training.more["samples"].value.next().float().mean() / _NUM_SAMPLES
    loss = models.loss_of(training.model, inputs)
    loss.backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    for name, param in training.model.named_parameters():
        training.more["average"][name].lerp_(param.detach(), 0.1)
    return loss.item().hex()


def digest(training: TrainingState) -> list[str]:
    """Bits of all parameters, of their averages and of the optimizer's state."""
    states = [get_state_dict(training.model, training.optimizer), training.more["average"]]
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


def process(folder: Path, port: int, slot: int, num_steps: int, cells: Sequence[Cell]) -> None:
    """The life of a process."""
    stacks = open(_stack_file(folder, os.getpid()), "w")  # noqa: SIM115  for life
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    os.dup2(os.open(folder / f"err-{os.getpid()}", os.O_WRONLY | os.O_CREAT), 2)
    logging.basicConfig(format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    node = slot // 2
    memory = folder / "memory" / str(node)
    reaper = _Reaper(folder, slot, cells, num_steps)
    log = open(folder / f"log-{os.getpid()}", "a", buffering=1)  # noqa: SIM115  for life
    renew = elastic_job.renew_optimizer

    def renew_and_pass_by(optimizer: torch.optim.Optimizer) -> None:
        reaper.pass_by("renewal")
        renew(optimizer)

    elastic_job.renew_optimizer = renew_and_pass_by

    def build(mesh: DeviceMesh) -> TrainingState:
        training = training_on(mesh)
        training.model.blocks[1].register_forward_pre_hook(lambda *_: reaper.pass_by("forward"))
        training.model.blocks[0].register_full_backward_hook(lambda *_: reaper.pass_by("backward"))
        training.optimizer.reaper = training.more["data"].reaper = reaper  # type: ignore[attr-defined]
        return training

    def checkpoints(num_ranks: int, num_nodes: int) -> CheckpointManager:
        ram = RamTier("job", replicas=1, folder=memory)
        return CheckpointManager(
            folder / "steps", save_policy=EverySteps(4), retention=2, asynchronous=True, ram=ram
        )

    def train_step(job: ElasticJob, step: int) -> None:
        assert job.training is not None
        epoch = job.epochs[-1]
        reaper.step, reaper.first_step = step, epoch.step
        begun = {
            "epoch": epoch.number,
            "begun": step,
            "from": epoch.step,
            "tier": epoch.tier,
            "at": time.time(),
            "queued": queued_s(),
        }
        log.write(json.dumps({**begun, "world": job.num_ranks}) + "\n")
        reaper.exchange()
        loss = train_one(job.training, job.rank, job.num_ranks)
        done = {"epoch": epoch.number, "rank": job.rank, "step": step, "loss": loss}
        log.write(json.dumps({**done, "at": time.time(), "queued": queued_s()}) + "\n")
        # Else the job would be over before they come.
        wait_until(lambda: not reaper.lacks_ranks() or membership.has_changed(), "ranks that are to die")
        if step == num_steps - 1:
            log.write(json.dumps({"digest": digest(job.training), "of": epoch.number}) + "\n")

    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    # A loaded machine may stop a process for seconds; only kills count here.
    membership = _MortalMembership(
        store,
        num_first=NUM_SLOTS,
        timeout_s=60,
        keep_alive_s=KEEP_ALIVE_S,
        max_missed=60,
        host=f"127.0.0.{1 + node}",
        secret="kills",
    )
    # Longer than a job of the tests may take: nothing waits for it.
    job = _MortalJob(membership, build, checkpoints, make_mesh=mesh_of, timeout_s=900)
    membership.reaper = job.reaper = reaper
    reaper.job = job
    job.run(train_step, num_steps)


def launch(folder: Path, cells: Sequence[Cell], num_steps: int, *, limit_s: float = 240) -> None:
    """Run a job to its end, in which each cell is carried out. Nothing of it is left running.

    After the second cell the store is lost. A new, empty one takes its place when ranks have begun another step.
    """
    context = forkserver()
    store: dist.TCPStore | None = bound_store("127.0.0.1", 0, timedelta(seconds=60))
    port = store.port
    step_without_store = -1  # the step in which the store was lost
    living: dict[int, BaseProcess] = {}
    epochs_before: list[int] = []  # the newest epoch when each process was started
    missing = dict.fromkeys(range(NUM_SLOTS), -1)  # slot -> number of the cell in which its process died

    def start(slot: int) -> None:
        living[slot] = context.Process(
            target=process, args=(folder, port, slot, num_steps, cells), daemon=True
        )
        living[slot].start()
        del missing[slot]
        epochs_before.append(_newest_epoch(folder))

    deadline_s = time.monotonic() + limit_s
    try:
        for slot in range(NUM_SLOTS):
            start(slot)
        while living:
            if time.monotonic() > deadline_s:
                pids = [each.pid for each in living.values() if each.pid is not None]
                stacks = stacks_of((pid, _stack_file(folder, pid)) for pid in pids)
                raise AssertionError(f"the job took longer than {limit_s} s\n{stacks}")
            wait([each.sentinel for each in living.values()], 0.05)
            for slot, each in list(living.items()):
                if each.exitcode is None:
                    continue
                assert each.exitcode in (0, -signal.SIGKILL), f"slot {slot} ended with {each.exitcode}"
                del living[slot]
                if each.exitcode:
                    missing[slot] = max(
                        int(mark.name.split("-")[1]) for mark in folder.glob(f"cell-*-{slot}")
                    )
            if step_without_store < 0 and not missing and (folder / "cell-1-1").exists():
                is_replaced = len(epochs_before) == NUM_SLOTS + len(list(folder.glob("cell-*")))
                is_new = _newest_epoch(folder) > epochs_before[-1]
                if is_replaced and is_new and _num_going_on(folder) == NUM_SLOTS:
                    store, step_without_store = None, _last_begun(folder)
            elif store is None and _last_begun(folder) > step_without_store:
                store = bound_store("127.0.0.1", port, timedelta(seconds=60))
            # Of all at once: those that were started would wait for the others, before they do another step.
            others_go_on = bool(missing) and _num_going_on(folder) == len(living)
            for slot, number in list(missing.items()):
                if slot not in missing:
                    continue  # started with the other process of its node
                node = {slot, slot ^ 1}
                if cells[number].who == "node" and slot in cells[number].victims(number):
                    if not node <= set(missing):
                        continue  # the other process of the node still lives
                    shutil.rmtree(folder / "memory" / str(slot // 2), ignore_errors=True)
                is_last = number == len(cells) - 1
                if (
                    living
                    and store is not None
                    and (cells[number].is_prompt or (not is_last and others_go_on))
                ):
                    for each_slot in node & set(missing) if cells[number].who == "node" else {slot}:
                        start(each_slot)
    finally:
        for each in living.values():
            each.kill()
            each.join()


def _stack_file(folder: Path, pid: int) -> Path:
    return folder / f"stacks-{pid}"


def _newest_epoch(folder: Path) -> int:
    """The number of the newest epoch in which a step was begun."""
    return max((line["epoch"] for line in lines_of(folder) if "begun" in line), default=-1)


def _last_begun(folder: Path) -> int:
    """The last step that any rank has begun."""
    return max((line["begun"] for line in lines_of(folder) if "begun" in line), default=-1)


def _num_going_on(folder: Path) -> int:
    """Ranks of the newest epoch, once it has done a step; 0 before."""
    begun = [line for line in lines_of(folder) if "begun" in line]
    newest = max(line["epoch"] for line in begun)
    steps = {line["begun"] for line in begun if line["epoch"] == newest}
    return next(line["world"] for line in begun if line["epoch"] == newest) if len(steps) > 1 else 0


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """All that ranks have logged; a line torn by a kill is not counted."""
    return [
        {**json.loads(text), "process": file.name.removeprefix("log-")}
        for file in folder.glob("log-*")
        for text in file.read_text().splitlines(keepends=True)
        if text.endswith("\n")
    ]


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
        processes = frozenset(line["process"] for line in begun)
        found.append(Seen(begun[0]["world"], begun[0]["from"], begun[0]["tier"], losses, last, processes))
    return found


def _segment(folder: Path, start: int, stop: int, is_last: bool) -> tuple[list[str], list[str]]:
    """Restart from a step's checkpoint on the disk, train, save; losses, and the digest at the end of all."""
    training = training_on(mesh_of(dist.get_world_size()))
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
    lines = [line for line in lines_of(folder) if "digest" in line]
    newest = max(line["of"] for line in lines)  # a kill after the last step may have made others do it again
    assert end and all(line["digest"] == end for line in lines if line["of"] == newest)
    return epochs


def queued_s() -> float:
    """Return for how long this process's main thread has waited for a processor; 0 where the system does not tell."""
    file = Path("/proc/self/schedstat")
    return int(file.read_text().split()[1]) / 1e9 if file.exists() else 0.0


class Recovery(NamedTuple):
    """The time from the last death of a cell to the end of the first step of the next epoch."""

    cell: Cell
    seconds: float
    queued: float  # share of its time for which a rank that remained waited for a processor; the largest


def recoveries(folder: Path, cells: Sequence[Cell]) -> list[Recovery]:
    """How long each cell kept the other processes from their next step. A cell at the end of a job has no next step."""
    lines = sorted((line for line in lines_of(folder) if "at" in line), key=lambda line: line["at"])
    began: dict[int, float] = {}
    for line in lines:
        began.setdefault(line["epoch"], line["at"])
    found = []
    for number, cell in enumerate(cells):
        died_s = max((folder / f"cell-{number}-{slot}").stat().st_mtime for slot in cell.victims(number))
        # The last line of each process counts.
        before = {line["process"]: line for line in lines if line["at"] < died_s}
        later = [line for line in lines if "loss" in line and began[line["epoch"]] > died_s]
        if later:
            first = later[0]["epoch"], later[0]["step"]
            pairs = [
                (before[line["process"]], line)
                for line in later
                if (line["epoch"], line["step"]) == first and line["process"] in before
            ]
            shares = [(new["queued"] - old["queued"]) / (new["at"] - old["at"]) for old, new in pairs]
            found.append(Recovery(cell, later[0]["at"] - died_s, max(shares, default=0.0)))
    return found
