"""The faults of saves and restores: every storage call there is, times every kind of error, on every rank.

The calls are those that fault-free runs make, recorded by `WatchedStorage`; nothing lists them by hand. A cell is one
call of one rank in one setting (what is done, form, mode, store), one error, raised before or after the call has done
its work. Of each cell must hold:

    together    within the group's time-out all ranks return, or all raise
    who         the rank that was hit raises what it met, or a `CheckpointError` because of it; the others a
                `CheckpointError` that names the rank and what it met
    kept        what readers find then is a state that was saved, bit for bit: the new one if the save returned, else
                the new one or the last that was acknowledged; folders that others read may be refused after a
                failure on object stores, which rename nothing
    again       the next save and the next restore go well
"""

from __future__ import annotations

import errno
import faulthandler
import shutil
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from botocore.exceptions import ConnectionClosedError
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.faults.watched_storage import Call, Fault, Watch, WatchedStorage
from vescale_fsdp import RaggedDTensor, RaggedShard
from vescale_fsdp.checkpoint import (
    CheckpointManager,
    EverySteps,
    PerRank,
    RamTier,
    SourceOptions,
    async_save,
    load,
    save,
)
from vescale_fsdp.checkpoint.load import Read
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.checkpoint.storage.remote import RemoteStorage
from vescale_fsdp.conversion import HuggingFace
from vescale_fsdp.conversion.formats import detect
from vescale_fsdp.conversion.formats.dcp.source import open_dcp
from vescale_fsdp.conversion.formats.huggingface.read import open_hf_folder
from vescale_fsdp.errors import CheckpointError, VescaleError
from vescale_fsdp.layout.geometry import whole_box

WORLD = 2
_GROUP_TIMEOUT_S = 30.0
_CELL_DEADLINE_S = 90.0
_MARK = "injected fault"

ERRORS: dict[str, Callable[[], BaseException]] = {
    "disk full": lambda: OSError(errno.ENOSPC, _MARK),
    "broken disk": lambda: OSError(errno.EIO, _MARK),
    "stale handle": lambda: OSError(errno.ESTALE, _MARK),
    "forbidden": lambda: OSError(errno.EACCES, _MARK),
    "too slow": lambda: OSError(errno.ETIMEDOUT, _MARK),
    "reset": lambda: OSError(errno.ECONNRESET, _MARK),
    "memory": lambda: MemoryError(_MARK),
    "runtime": lambda: RuntimeError(_MARK),
    "botocore": lambda: ConnectionClosedError(endpoint_url=_MARK),
    "ctrl-c": lambda: KeyboardInterrupt(_MARK),
}


class Setting(NamedTuple):
    """What is done, and where."""

    action: str  # save or restore
    through: str  # a manager of steps, one in nodes' memory, one path that is overwritten, or one of another format
    form: str  # native, zarr, hf or dcp
    mode: str  # a save's: sync or async; a restore's: once or each, as ranks read what both want
    store: str  # local, s3, or far: local, and not in the page cache


SETTINGS = [
    Setting("save", through, form, mode, store)
    for through, form, mode in (
        ("manager", "native", "sync"),
        ("manager", "native", "async"),
        ("path", "native", "sync"),
        ("path", "native", "async"),
        ("path", "zarr", "sync"),
        ("path", "hf", "sync"),
        ("path", "hf", "async"),
        ("path", "dcp", "sync"),
        ("memory", "native", "sync"),  # partners' copies; of one node all is lost before each restore
    )
    for store in ("local", "s3")
    # Object stores do not replace a checkpoint of the zarr form.
    if (through != "memory" and form != "zarr") or store == "local"
] + [
    Setting("restore", through, form, read, store)
    for through, form, read, stores in (
        ("manager", "native", "each", ("local", "s3")),
        ("manager", "native", "once", ("local", "s3")),
        ("memory", "native", "each", ("local",)),
        ("path", "native", "each", ("local", "s3", "far")),
        ("path", "zarr", "each", ("local", "s3")),  # the zarr form is read by each rank in any case
        ("live", "hf", "each", ("local", "s3")),  # which opens the source itself
        ("live", "dcp", "each", ("local",)),
        ("live", "native", "each", ("local",)),
    )
    for store in stores
]
# Of `make test`: every action, way, form, mode and store at least once.
CORE_SETTINGS = [
    Setting("save", "manager", "native", "async", "local"),
    Setting("save", "path", "zarr", "sync", "local"),
    Setting("save", "path", "hf", "sync", "s3"),
    Setting("save", "path", "dcp", "sync", "local"),
    Setting("restore", "manager", "native", "once", "local"),
    Setting("restore", "memory", "native", "each", "local"),
    Setting("restore", "path", "native", "each", "far"),
    Setting("restore", "live", "hf", "each", "s3"),
]


class Cell(NamedTuple):
    """One fault."""

    setting: Setting
    rank: int
    call: Call
    after: bool
    error: str

    @property
    def factors(self) -> tuple[tuple[str, object], ...]:
        """Of which every pair is to be met."""
        setting = self.setting
        return (
            ("call", (setting.action, self.call.operation)),
            ("way", (setting.through, setting.form, setting.mode)),
            ("store", setting.store),
            ("rank", self.rank),
            ("after", self.after),
            ("error", self.error),
        )


def all_cells(calls: dict[Setting, list[list[Call]]]) -> list[Cell]:
    """Every fault of recorded calls, by setting and rank."""
    return [
        Cell(setting, rank, call, after, error)
        for setting, ranks in calls.items()
        for rank, own in enumerate(ranks)
        for call in own
        for after in (False, True)
        for error in ERRORS
    ]


class _Stage:
    """What one rank works with: a storage under watch for each store and way, and a group of short patience."""

    def __init__(self, folder: Path, endpoint: str, run: str) -> None:
        self.watch = Watch()
        self._folder, self._endpoint, self._run = folder, endpoint, run
        self._assets = folder / "assets"
        self._assets.mkdir(exist_ok=True)
        (self._assets / "config.json").write_text("{}")
        self._num_groups = 0
        self._saved: dict[tuple[str, ...], int] = {}  # last state that was acknowledged, by place
        self.regroup()

    def regroup(self) -> None:
        """A new group, and new places: the old ones are spoilt."""
        self.group = dist.new_group(timeout=timedelta(seconds=_GROUP_TIMEOUT_S))
        self._num_groups += 1
        self._saved.clear()
        self.watch.begin(None)

    def storage(self, setting: Setting) -> Storage:
        """Where a setting's checkpoints lie."""
        name = f"{self._run}-{self._num_groups}-{setting.through}-{setting.form}"
        inner: Storage
        if setting.store != "s3":
            inner = LocalStorage(self._folder / name)
        else:
            inner = RemoteStorage(
                f"s3://bucket/{name}",
                endpoint_url=self._endpoint,
                key="any",
                secret="any",
                client_kwargs={"region_name": "us-east-1"},
            )
        return WatchedStorage(inner, self.watch, is_far=setting.store == "far")

    def place(self, setting: Setting) -> tuple[str, ...]:
        """What tells places apart."""
        return setting.through, setting.form, setting.store

    def save(self, setting: Setting, step: int) -> None:
        """Save a state; returns when it is acknowledged."""
        storage, state = self.storage(setting), _state(step, setting.form)
        form: Any = setting.form
        if form == "hf":
            form = HuggingFace(assets=self._assets)
        if setting.through == "memory":
            with self._in_memory(setting) as manager:
                manager.save(step, state)
                manager.wait()
        elif setting.through == "manager":
            manager = self._manager(setting)
            manager.save(step, state)
            manager.wait()
        elif setting.mode == "async":
            async_save(storage, state, overwrite=True, format=form, process_group=self.group).wait()
        else:
            if (
                form == "zarr" and setting.store == "s3"
            ):  # object stores do not replace a checkpoint of this form
                dist.barrier()
                storage.remove("")
                dist.barrier()
            save(storage, state, overwrite=True, format=form, process_group=self.group)
        self._saved[self.place(setting)] = step

    def restore(self, setting: Setting) -> int | None:
        """Load what is there; returns which state it is, after every element has been compared.

        None for a folder of an object store that readers refuse, as it was not written to its end.
        """
        if setting.through == "live":
            return self._loaded_live(setting)
        if setting.form in ("hf", "dcp"):
            try:
                return _proven_folder(setting.form, self.storage(setting))
            except VescaleError:
                if setting.store == "local":
                    raise
                return None
        state = _state(0)
        if setting.through == "memory":
            with self._in_memory(setting) as manager:
                if setting.action == "restore" and dist.get_rank() == 1:
                    shutil.rmtree(self._memory(setting), ignore_errors=True)
                dist.barrier()
                restored = manager.restore(state)
                manager.wait()  # for the copies that are made anew
            assert restored is not None and restored.tier == "ram"
        elif setting.through == "manager":
            restored = self._manager(setting).restore(state, read=_read_of(setting))
            assert restored is not None
        else:
            load(self.storage(setting), state, read=_read_of(setting), process_group=self.group)
        return _proven(state)

    def _loaded_live(self, setting: Setting) -> int:
        state = _state(0, setting.form)
        state.pop("seed", None)  # values of ranks are for as many ranks, and stay with `load`
        with pytest.MonkeyPatch.context() as patched:
            for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):  # settings are looked for by URL
                patched.setenv(name, "any")
            patched.setenv("AWS_ENDPOINT_URL", self._endpoint)
            patched.setattr(detect, "open_store", lambda url: self.storage(setting))
            patched.setattr(
                import_module("vescale_fsdp.checkpoint.load"),
                "open_storage",
                lambda path, neighbors: self.storage(setting),
            )
            load("the source", state, source=SourceOptions(), process_group=self.group)
        return _proven(state, setting.form)

    def _memory(self, setting: Setting) -> Path:
        """This rank's memory: each rank is a node of its own."""
        return self._folder / f"{self._run}-{self._num_groups}-node{dist.get_rank()}"

    @contextmanager
    def _in_memory(self, setting: Setting) -> Iterator[CheckpointManager]:
        """A manager whose steps go to memory alone, with a copy on the partner, which waits with its save for those."""
        tier = RamTier("run", folder=self._memory(setting), keep_last=2, replicas=1)
        tier._root = WatchedStorage(tier._root, self.watch)
        disk = self._folder / f"{self._run}-{self._num_groups}-disk"
        never = EverySteps(1 << 40)
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("LOCAL_RANK", "0")
            yield CheckpointManager(disk, save_policy=never, ram=tier, process_group=self.group)

    def _manager(self, setting: Setting) -> CheckpointManager:
        return CheckpointManager(
            self.storage(setting), retention=2, asynchronous=setting.mode == "async", process_group=self.group
        )

    def last(self, setting: Setting) -> int:
        """The last acknowledged state of a place, which is made if there is none yet."""
        place = self.place(setting)
        if place not in self._saved:
            for step in (1, 2, 3):  # the third makes a manager remove the first
                self.save(setting, step)
        return self._saved[place]

    def take_for_saved(self, setting: Setting, step: int) -> None:
        """Count a state as acknowledged that has been found."""
        self._saved[self.place(setting)] = step


def _read_of(setting: Setting) -> Read:
    return "once" if setting.mode == "once" else "each"


def _state(step: int, form: str = "native") -> dict[str, Any]:
    """A state whose every value tells its step; tensors cut inside rows, so that ranks share zarr's chunks, and by
    columns, so that they share segments of files."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (WORLD,))
    ragged = torch.arange(30.0)[:17] if rank == 0 else torch.arange(30.0)[17:]
    placement = RaggedShard.from_piece_numels((5, 6), [17, 13])
    state = {
        "ragged": RaggedDTensor.from_local(ragged + 100 * step, mesh, [placement], shape=(5, 6)),
        "cut": distribute_tensor(torch.arange(12.0).view(4, 3) + step, mesh, [Shard(form == "hf")]),
        "plain": torch.full((4,), float(step)),
        "step": step,
        "seed": PerRank(10 * step + rank),
    }
    unheld = {"native": (), "zarr": (), "dcp": ("seed",), "hf": ("seed", "step")}
    return {name: value for name, value in state.items() if name not in unheld[form]}


def _proven_folder(form: str, storage: Storage) -> int:
    """Which state a folder that others read holds, every element of it compared."""
    source = open_hf_folder(storage) if form == "hf" else open_dcp(storage)
    found = {name: np.empty(tensor.info.shape, dtype=np.float32) for name, tensor in source.tensors.items()}
    for name, into in found.items():
        source.read_into(name, whole_box(into.shape), into)
    step = int(found["plain"][0])
    assert np.array_equal(found["plain"], np.full(4, step))
    assert np.array_equal(found["ragged"], np.arange(30).reshape(5, 6) + 100 * step)
    assert np.array_equal(found["cut"], np.arange(12).reshape(4, 3) + step)
    return step


def _proven(state: dict[str, Any], form: str = "native") -> int:
    """Which state this is, bit for bit."""
    step = int(state["plain"][0])
    wanted = _state(step, form)
    for name in ("ragged", "cut"):
        found = state[name].to_local()
        assert found.numel() and torch.equal(found, wanted[name].to_local()), name
    assert torch.equal(state["plain"], wanted["plain"])
    for name in ("step", "seed"):
        if name in state:
            assert _value(state[name]) == _value(wanted[name]), name
    return step


def _value(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, PerRank) else leaf


def record(folder: Path, endpoint: str, settings: list[Setting]) -> dict[Setting, list[list[Call]]]:
    """The calls that fault-free runs make, by setting and rank. For all ranks."""
    stage = _Stage(folder, endpoint, "record")
    found = {}
    for setting in settings:
        step = stage.last(setting)
        calls = []
        for _ in range(2):  # what a first run alone does is no part of it
            stage.watch.begin(None)
            if setting.action == "save":
                step += 1
                stage.save(setting, step)
            else:
                assert stage.restore(setting) == step
            calls.append(sorted(set(stage.watch.calls)))
        ranks: list[list[Call]] = [[] for _ in range(WORLD)]
        dist.all_gather_object(ranks, calls[1])
        found[setting] = ranks
    return found


class Outcome(NamedTuple):
    """How one rank's part of a faulty run ended."""

    error: str | None  # kind of the error, None if it returned
    text: str
    is_injected: bool  # the error is the injected one, or one of a checkpoint because of it
    step: int  # that a restore found
    fired: bool
    took_s: float


def run_cells(folder: Path, endpoint: str, cells: list[Cell], run: str) -> list[str]:
    """What is wrong with which cells. For all ranks, which return the same."""
    warnings.simplefilter("ignore")  # of damage and of what could not be removed: told, and no error
    stage = _Stage(folder, endpoint, run)
    problems = []
    stacks = open(folder / f"stacks-{run}-{dist.get_rank()}", "w")  # noqa: SIM115  open while the process lives
    try:
        for cell in cells:
            (folder / f"cell-{run}-{dist.get_rank()}").write_text(repr(cell))
            # A hang ends this process, which the parent sees at once; the stacks say where it was.
            faulthandler.dump_traceback_later(_CELL_DEADLINE_S, exit=True, file=stacks)
            found = _run_cell(stage, cell)
            faulthandler.cancel_dump_traceback_later()
            if found:
                problems += [f"{cell}: {text}" for text in found]
                stage.regroup()
    finally:
        faulthandler.cancel_dump_traceback_later()
        stacks.close()
    return problems


def _run_cell(stage: _Stage, cell: Cell) -> list[str]:
    """What is wrong with one cell, the same on all ranks."""
    setting = cell.setting
    try:
        last = stage.last(setting)
        hit = cell.rank == dist.get_rank()
        stage.watch.begin(Fault(cell.call, cell.after, ERRORS[cell.error]()) if hit else None)
        mine = _attempt(stage, setting, last + 1)
        stage.watch.begin(None)
    except BaseException:  # noqa: BLE001  what is no part of the fault must go well
        return _all_texts(f"before the fault:\n{traceback.format_exc()}")
    outcomes: list[Any] = [None] * WORLD
    dist.all_gather_object(outcomes, mine)
    problems = judged(cell, outcomes, last)
    if problems:
        return problems
    returned = mine.error is None
    try:
        found = stage.restore(setting)
        if setting.action == "restore":
            allowed = {last}
        else:
            # A fault of memory is a warning: the step may not be there.
            returned &= setting.through != "memory"
            allowed = {last + 1} if returned else {last, last + 1, None}
        assert found in allowed, f"found {found}, allowed {allowed}"
        found = last if found is None else found
        stage.take_for_saved(setting, found)
        if setting.action == "save" and not returned:
            stage.save(setting, found + 1)
            assert stage.restore(setting) == found + 1
            stage.take_for_saved(setting, found + 1)
    except BaseException:  # noqa: BLE001  whatever it is, it is wrong
        return _all_texts(f"after the fault:\n{traceback.format_exc()}")
    return _all_texts("")


def _attempt(stage: _Stage, setting: Setting, step: int) -> Outcome:
    start_s = time.monotonic()
    error: BaseException | None = None
    found = 0
    try:
        if setting.action == "save":
            stage.save(setting, step)
        else:
            found = stage.restore(setting) or 0
    except BaseException as caught:  # noqa: BLE001  Ctrl-C is one of the faults
        error = caught
    took_s = time.monotonic() - start_s
    if error is None:
        return Outcome(None, "", False, found, stage.watch.fired, took_s)
    notes = getattr(error, "__notes__", [])
    text = "\n".join([str(error), *notes])
    return Outcome(type(error).__name__, text, _is_injected(error), 0, stage.watch.fired, took_s)


def _is_injected(error: BaseException) -> bool:
    """Whether an error is the fault itself (restated or not), or one of a checkpoint that comes from it."""
    if type(error) in {type(make()) for make in ERRORS.values()}:
        return _MARK in str(error)
    cause = error.__cause__
    return isinstance(error, CheckpointError) and cause is not None and _is_injected(cause)


def judged(cell: Cell, outcomes: list[Outcome], last: int) -> list[str]:
    """What is wrong with how the ranks ended; the same on all."""
    told = "\n".join(f"rank {rank}: {outcome}" for rank, outcome in enumerate(outcomes))
    if not outcomes[cell.rank].fired:
        return [f"the call was not made\n{told}"]
    failed = [outcome.error is not None for outcome in outcomes]
    if any(failed) != all(failed):
        return [f"some ranks returned, others raised\n{told}"]
    if not any(failed):
        if cell.error == "ctrl-c":
            return [f"Ctrl-C was lost\n{told}"]
        steps = {outcome.step for outcome in outcomes}
        if cell.setting.action == "restore" and (len(steps) != 1 or steps - {last, last - 1}):
            return [f"ranks restored {steps}\n{told}"]
        return []
    if max(outcome.took_s for outcome in outcomes) > _GROUP_TIMEOUT_S:
        return [f"took longer than the time-out\n{told}"]
    kind = type(ERRORS[cell.error]()).__name__
    for rank, outcome in enumerate(outcomes):
        if rank == cell.rank and not outcome.is_injected:
            return [f"rank {rank} raised another error than it met\n{told}"]
        named = f"rank {cell.rank}" in outcome.text and _MARK in outcome.text and kind in outcome.text
        is_ours = str(outcome.error).endswith(("CheckpointError", "LoadError"))  # of whichever kind
        if rank != cell.rank and not (is_ours and named):
            return [f"rank {rank} was not told who met what\n{told}"]
    return []


def _all_texts(mine: str) -> list[str]:
    """Complaints of all ranks, empty ones left out."""
    texts: list[str] = [""] * WORLD
    dist.all_gather_object(texts, mine)
    return [f"rank {rank} {text}" for rank, text in enumerate(texts) if text]
