"""Crashes and errors in the middle of a save: old or new, never a mix; all ranks hear of it; nothing hangs."""

from __future__ import annotations

import errno
import fcntl
import gc
import json
import logging
import os
import random
import re
import resource
import signal
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.checkpoint_states import assert_equal, erase, mixed_state, plain
from tests.support.distributed import RankError, forkserver, run_ranks
from tests.support.faults.faulty_storage import FaultyStorage, disk_full, read_only
from tests.support.processes import join, receive
from vescale_fsdp.checkpoint import CheckpointManager, async_save, load, read_state, save, verify
from vescale_fsdp.checkpoint.manifest.structure import Structure
from vescale_fsdp.checkpoint.ranks.coordinator import SoloCoordinator, coordinator_for
from vescale_fsdp.checkpoint.save import Format, Saver
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.checkpoint.storage.lock_file import LOCK_FILE_NAME
from vescale_fsdp.errors import CheckpointError, StorageError


def _state(value: float) -> dict[str, Any]:
    return {"w": torch.full((1000, 100), value), "b": torch.full((7,), value), "step": int(value)}


def _fails(saver: Saver, state: Any, number: int | None) -> bool:
    """Whether a save raises, and if so, the storage's error, as it is or with a cure."""
    try:
        saver.save(state)
    except (OSError, StorageError) as error:
        met = error.__cause__ if isinstance(error, StorageError) else error
        if not isinstance(met, OSError) or met.errno != number:
            raise
        return True
    return False


@pytest.mark.parametrize(
    ("form", "error"),
    [
        ("native", disk_full),
        ("zarr", disk_full),
        pytest.param("native", read_only, marks=pytest.mark.part("faults")),
    ],
)
def test_every_operation_may_fail(form: Format, error: Any, tmp_path: Path) -> None:
    """Whichever operation of a save fails, the path holds the old or the new checkpoint, whole, and no file is open."""
    save(
        tmp_path / "first", _state(1.0), format=form
    )  # the zarr library opens the files of its event loop once
    save(tmp_path / "c", _state(1.0))
    outcomes = set()
    gc.collect()  # may close files of tests before
    num_open = len(os.listdir("/proc/self/fd"))
    for fail_at in range(1000):
        storage = FaultyStorage(LocalStorage(tmp_path / "c"), fail_at=fail_at, error=error)
        saver = Saver(storage, SoloCoordinator(), overwrite=True, stripe_bytes=64 << 10, format=form)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            failed = _fails(saver, _state(2.0 + fail_at), error().errno)
        reader = read_state(tmp_path / "c")
        value = float(reader["w"].read()[0, 0])
        assert torch.equal(torch.full((1000, 100), value), reader["w"].read())
        assert torch.equal(torch.full((7,), value), reader["b"].read())
        assert verify(tmp_path / "c").ok
        outcomes.add((failed, value == 2.0 + fail_at))
        # Fewer are files of tests before; from then on, no more than these.
        num_before, num_open = num_open, len(os.listdir("/proc/self/fd"))
        assert num_open <= num_before
        assert not told or (not failed and str(tmp_path / "c") in str(told[0].message))
        if not failed and not told:
            break
    assert outcomes >= {(True, False), (False, True)}
    assert fail_at > 12
    assert len(list((tmp_path / "c").glob("data-*"))) == (form == "native")


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    """The system itself refuses to write on (a limit on file sizes): the error surfaces, the old step stays."""
    save(tmp_path / "c", _state(1.0))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for limit in (0, 1000, 64 << 10, 390_000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
            with pytest.raises(OSError, check=lambda error: error.errno in (errno.EFBIG, errno.ENOSPC)):
                save(tmp_path / "c", _state(2.0), overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert torch.equal(_state(1.0)["w"], read_state(tmp_path / "c")["w"].read())
    assert len(list((tmp_path / "c").glob("data-*"))) == 1
    save(tmp_path / "c", _state(2.0), overwrite=True)
    assert verify(tmp_path / "c").ok


def test_a_folder_that_is_really_read_only(tmp_path: Path) -> None:
    """Modes do not stop root, so a file system that is read-only by nature stands in where root runs this."""
    if os.geteuid():
        (tmp_path / "c").mkdir(mode=0o500)
        folder = tmp_path / "c"
    else:
        folder = Path("/proc/self/c")
    with pytest.raises(StorageError) as caught:
        save(folder, _state(1.0))
    assert str(folder) in str(caught.value.where)
    assert not (folder / "manifest.json").exists()


class _Elsewhere(LocalStorage):
    """A folder in which one rank's files do not arrive: a disk that ranks do not share."""

    def list_folder(self, name: str) -> list[str]:
        return [found for found in super().list_folder(name) if not found.startswith("00000-of")]

    def exists(self, name: str) -> bool:
        return "/00000-of" not in name and super().exists(name)


def test_files_that_do_not_arrive_are_missed(tmp_path: Path) -> None:
    """Before the commit every rank's file is looked for."""
    with pytest.raises(CheckpointError, check=lambda error: "00000-of-00001.safetensors" in str(error.got)):
        Saver(_Elsewhere(tmp_path / "c"), SoloCoordinator()).save(_state(1.0))
    assert not (tmp_path / "c" / "manifest.json").exists()


def _fails_on_one_rank(path: Path, cases: list[tuple[str, int]]) -> list[tuple[str, str]]:
    """Type and text of the error that each case ends in: what goes wrong, and on which rank."""
    found = []
    for kind, bad_rank in cases:
        storage: Any = LocalStorage(path / f"{kind}-{bad_rank}")
        state = mixed_state()
        if dist.get_rank() == bad_rank:
            if kind == "raises":
                state["bad"] = _Explodes()
            elif kind == "mute":
                state["bad"] = 10**5000
            else:
                storage = FaultyStorage(storage, fail_at=1)
        elif kind == "raises":
            state["bad"] = torch.optim.lr_scheduler.LambdaLR(
                torch.optim.SGD([torch.zeros(1, requires_grad=True)]), lambda step: 1.0
            )
        try:
            Saver(storage, coordinator_for(), overwrite=False).save(state)
            found.append(("", "saved"))
        except Exception as error:  # noqa: BLE001  whatever it is, the test looks at it
            found.append((type(error).__name__, str(error)))
    return found


class _Explodes:
    def state_dict(self) -> dict[str, Any]:
        raise KeyError("half a state")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("never called")


_SAID = {"raises": "half a state", "mute": "A number is too long", "disk full": "No space left"}
_MET = {"raises": "KeyError", "mute": "CheckpointError", "disk full": "OSError"}


def test_one_rank_fails_and_all_hear_of_it(tmp_path: Path) -> None:
    """The rank raises what it met, the others an error that names it, and nothing is committed."""
    cases = [(kind, bad_rank) for kind in _SAID for bad_rank in range(3)]
    by_rank = run_ranks(3, _fails_on_one_rank, tmp_path, cases)

    for (kind, bad_rank), *outcomes in zip(cases, *by_rank, strict=True):
        for rank, (error, text) in enumerate(outcomes):
            assert _SAID[kind] in text
            assert error == (_MET[kind] if rank == bad_rank else "CheckpointError"), text
            assert rank == bad_rank or f"rank {bad_rank}" in text
        folder = tmp_path / f"{kind}-{bad_rank}"
        assert not (folder / "manifest.json").exists() and not list(folder.glob("data-*"))


def _async_fails(path: Path) -> str:
    storage: Any = LocalStorage(path)
    if dist.get_rank() == 1:
        storage = FaultyStorage(storage, fail_at=1)
    handle = async_save(storage, mixed_state())
    try:
        handle.wait(30)
    except (OSError, CheckpointError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_errors_of_an_async_save_surface(tmp_path: Path) -> None:
    """An error behind training is raised by wait() on every rank."""
    texts = run_ranks(2, _async_fails, tmp_path / "c")

    assert texts[0].startswith("CheckpointError") and "rank 1: OSError" in texts[0]
    assert texts[1].startswith("OSError") and all("[Errno 28]" in text for text in texts)
    assert not (tmp_path / "c" / "manifest.json").exists()


def _disagree(path: Path, kind: str) -> str:
    state = mixed_state(block_rows=2 if kind == "layout" and dist.get_rank() == 1 else 1)
    if kind == "value":
        state["step"] = dist.get_rank()
    if kind == "dtype" and dist.get_rank() == 1:
        state["stock"]["plain"] = state["stock"]["shared"] = state["stock"]["plain"].float()
    try:
        save(path, state, format="zarr" if kind == "form" and dist.get_rank() == 1 else "native")
    except CheckpointError as error:
        return str(error.where)
    return "no error"


@pytest.mark.parametrize(
    ("kind", "names"),
    [("layout", "model."), ("value", "step"), ("dtype", "stock.plain"), ("form", "the argument `format`")],
)
def test_ranks_that_disagree_are_told_where(kind: str, names: str, tmp_path: Path) -> None:
    """Ranks with different layouts, values or arguments get an error that names the first difference."""
    for where in run_ranks(2, _disagree, tmp_path / "c", kind):
        assert where.startswith(names)
    assert not (tmp_path / "c").exists() or not list((tmp_path / "c").glob("data-*"))


def _nearly_alike() -> list[int]:
    """How many kinds of structure ranks find that differ in one 32-bit word of their digests."""
    found = []
    for word in range(4):
        structure = Structure({"rank": dist.get_rank()}, (), (), ())
        digest = bytearray(16)
        digest[4 * word] = dist.get_rank()
        structure.__dict__["digest"] = bytes(digest)  # where its cache lies
        found.append(len(coordinator_for().agree(structure, 0, None).classes))
    return found


def test_every_word_of_the_digest_counts() -> None:
    """Ranks whose digests differ anywhere exchange their structures."""
    assert run_ranks(2, _nearly_alike) == [[2] * 4] * 2


def test_a_commit_does_not_replace_unasked(tmp_path: Path) -> None:
    """Of two jobs that found no manifest, the second one's commit is refused by the file system itself."""
    storage = LocalStorage(tmp_path)
    storage.commit("manifest.json", b"first", replace=False)
    with pytest.raises(FileExistsError):
        storage.commit("manifest.json", b"second", replace=False)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("manifest.json", b"first")]
    storage.commit("manifest.json", b"third", replace=True)
    assert (tmp_path / "manifest.json").read_bytes() == b"third"


_SIZE = (256, 4096)  # 4 MiB


def _save_for_ever(root: str, pipe: Connection, first: int) -> None:
    manager = CheckpointManager(root, retention=2)
    for step in range(first, first + 10_000):
        pipe.send(step)
        manager.save(step, {"w": torch.full(_SIZE, float(step)), "v": torch.full((9,), float(step))})


@pytest.mark.parametrize("num_kills", [4, pytest.param(50, marks=pytest.mark.part("faults"))])
def test_a_save_killed_at_any_moment_costs_no_committed_step(num_kills: int, tmp_path: Path) -> None:
    """The newest committed step restores whole, and it is the one before."""
    context = forkserver()
    moments = random.Random(0)
    first, torn, killed = 0, 0, 0
    while killed < num_kills or torn <= num_kills // 5:
        assert killed < 4 * num_kills, "the moments are not inside saves"
        ours, theirs = context.Pipe()
        process = context.Process(target=_save_for_ever, args=(str(tmp_path / "run"), theirs, first))
        process.start()
        theirs.close()
        started = receive(ours, "the first step")
        target = started + moments.randint(1, 3)
        while started < target:
            started = receive(ours, f"a step after {started}")
        time.sleep(moments.uniform(0, 0.02))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        join(process)
        while ours.poll():
            try:
                started = ours.recv()
            except EOFError:
                break
        manager = CheckpointManager(tmp_path / "run")
        state = {"w": torch.zeros(_SIZE), "v": torch.zeros(9)}
        restored = manager.restore(state)
        assert restored is not None and not restored.skipped
        assert restored.step in (started - 1, started)
        assert torch.equal(state["w"], torch.full(_SIZE, float(restored.step)))
        assert torch.equal(state["v"], torch.full((9,), float(restored.step)))
        torn += restored.step == started - 1
        first = restored.step + 1
        killed += 1


def _die_while_saving(path: Path) -> str:
    state = mixed_state()
    save(path / "good", state)
    if dist.get_rank() == 1:
        storage = FaultyStorage(LocalStorage(path / "torn"), fail_at=1, error=_kill_self)
    else:
        storage = FaultyStorage(LocalStorage(path / "torn"))
    try:
        Saver(storage, coordinator_for()).save(state)
    except Exception as error:  # noqa: BLE001  gloo and we both may be first to notice
        (path / f"rank{dist.get_rank()}").write_text(type(error).__name__)
    return "alive"


def _kill_self() -> Exception:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def test_a_rank_that_dies_ends_the_save_of_the_others(tmp_path: Path) -> None:
    """When one rank is killed in a save, the others get an error, and the step is not committed."""
    with pytest.raises(RankError, match=r"-9\b", check=lambda error: error.rank == 1):
        run_ranks(2, _die_while_saving, tmp_path, timeout_s=40)

    assert (tmp_path / "rank0").read_text()
    assert not (tmp_path / "torn" / "manifest.json").exists()
    run_ranks(3, _load_good, tmp_path / "good")


def _load_good(path: Path) -> None:
    state = mixed_state()
    expected = plain(state)
    erase(state)
    load(path, state)
    assert assert_equal(expected, plain(state)) > 1000


def test_everything_is_durable_before_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data, its folders and the manifest's bytes are synced before the manifest appears, its name after."""
    events: list[str] = []
    fsync, link, replace = os.fsync, os.link, os.replace

    def name_of(path: str | os.PathLike[str]) -> str:
        name = re.sub(r"(\.json)\.[0-9a-f]{16}", r"\1", Path(path).name)  # temporary names are random
        return "data folder" if name.startswith("data-") else "root" if name == "c" else name

    def watched_fsync(file: int) -> None:
        fsync(file)
        events.append(f"sync {name_of(os.readlink(f'/proc/self/fd/{file}'))}")

    def watched_link(source: Path, target: Path) -> None:
        if not source.name.startswith(".probe-"):
            events.append(f"publish {name_of(target)}")
        link(source, target)

    def watched_replace(source: Path, target: Path) -> None:
        if not source.name.startswith(".probe-"):
            events.append(f"publish {name_of(target)}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "link", watched_link)
    monkeypatch.setattr(os, "replace", watched_replace)
    for overwrite in (False, True):
        events.clear()
        save(tmp_path / "runs" / "run" / "c", _state(1.0), overwrite=overwrite)
        new_folders = [] if overwrite else [f"sync {tmp_path.name}", "sync runs", "sync run"]
        assert sorted(events[:-9]) == sorted(
            [*new_folders, "sync root"]
        )  # the last asks whether that is possible
        assert events[-9:] == [
            "sync root",
            "sync 00000-of-00001.safetensors",
            "sync data folder",
            "sync root",
            "sync run",
            "sync .manifest.json.tmp",
            "publish manifest.json",
            "sync root",
            "sync run",
        ]


def _is_new(path: Path) -> bool:
    """Whether readers find the second state rather than the first, or nothing."""
    return (path / "manifest.json").exists() and float(read_state(path)["w"].read()[0, 0]) == 2.0


def _os_error(path: Path, overwrite: bool) -> OSError | None:
    """How a save of the second state fails, if it does."""
    try:
        save(path, _state(2.0), overwrite=overwrite)
    except OSError as error:
        return error
    return None


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_an_error_of_fsync_says_is_so(
    overwrite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every fsync of a save fails in turn: the error says that the new checkpoint is there exactly where it is."""
    fsync = os.fsync
    left = [-1]  # calls that still go well; below 0: all

    def failing(file: int) -> None:
        left[0] -= 1
        if left[0] == -1:
            raise OSError(errno.EIO, "Input/output error")
        fsync(file)

    monkeypatch.setattr(os, "fsync", failing)
    seen = []
    for fail_at in range(100):
        path = tmp_path / f"{fail_at}" / "c"
        if overwrite:
            save(path, _state(1.0))
        left[0] = fail_at
        error = _os_error(path, overwrite)
        if error is not None:
            assert error.errno == errno.EIO
            text = "\n".join([str(error), *getattr(error, "__notes__", [])])
            new = _is_new(path)
            assert ("complete" in str(error)) == new
            assert not (new and "committed" in text)
            seen.append(new)
            left[0] = -1
            save(path, _state(2.0), overwrite=True)
        assert _is_new(path) and verify(path).ok
        if left[0] >= 0:
            break
    assert seen == sorted(seen) and seen.count(True) == 2 and seen.count(False) > 4


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_flock(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file holds the folder instead: against another job, and not beyond the life of its owner."""
    caplog.set_level(logging.INFO)

    def no_flock(file: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", no_flock)
    path = tmp_path / "c"
    lock = path / LOCK_FILE_NAME
    save(path, _state(1.0))
    assert "flock" in caplog.text and not lock.exists()

    with LocalStorage(path).lock():
        owner = json.loads(lock.read_text())
        assert owner["pid"] == os.getpid()
        with pytest.raises(StorageError, match=f'"pid": {os.getpid()}'):
            save(path, _state(2.0), overwrite=True)
    assert not _is_new(path) and not lock.exists()

    elsewhere = json.dumps({**owner, "host": "elsewhere", "boot": "another", "started": "1"})
    lock.write_text(elsewhere)
    with pytest.raises(StorageError, match="elsewhere"):
        save(path, _state(2.0), overwrite=True)
    assert lock.read_text() == elsewhere
    # A later process of the same number, and one that is gone.
    for stale in ({"started": "1"}, {"pid": 2**22 + 1}):
        lock.write_text(json.dumps({**owner, **stale}))
        save(path, _state(2.0), overwrite=True)
        assert _is_new(path) and sorted(found.name[:5] for found in path.iterdir()) == [
            ".lock",
            "data-",
            "manif",
        ]


def test_an_error_of_flock_that_means_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a missing flock is replaced: any other error of it ends the save."""

    def broken(file: int, operation: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", broken)
    with pytest.raises(OSError, check=lambda error: error.errno == errno.EIO):
        save(tmp_path / "c", _state(1.0))
    assert not (tmp_path / "c" / LOCK_FILE_NAME).exists()
