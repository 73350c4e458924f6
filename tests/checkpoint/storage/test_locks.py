"""Locks: not inherited by forked children, released when an owner is gone, and respected by whoever removes steps."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from vescale_fsdp.checkpoint import CheckpointManager, read_state, save
from vescale_fsdp.checkpoint.storage import lock_file
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.errors import CheckpointError


@contextmanager
def forked(work: Callable[[], None] = lambda: None) -> Iterator[int]:
    """A child forked now, as a DataLoader's worker is; it stays until the block ends."""
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work()
            os.write(ready[1], b"y")
        finally:
            os.close(done[1])
            os.read(done[0], 1)  # ends when the parent closes its end
            os._exit(0)
    os.close(done[0])
    try:
        assert os.read(ready[0], 1) == b"y"
        yield child
    finally:
        os.close(done[1])
        os.waitpid(child, 0)
        os.close(ready[0])
        os.close(ready[1])


def _no_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(file: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refused)


@pytest.mark.parametrize("kind", ["flock", "lock file"])
def test_a_forked_child_inherits_no_lock(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that is forked while a folder is locked, and lives on, keeps nobody out of it."""
    if kind == "lock file":
        _no_flock(monkeypatch)
    storage = LocalStorage(tmp_path / "c")
    with storage.lock():
        worker = forked()
        worker.__enter__()
        with pytest.raises(BlockingIOError), LocalStorage(tmp_path / "c").lock():
            pass
    try:
        with LocalStorage(tmp_path / "c").lock():
            pass
    finally:
        worker.__exit__(None, None, None)


def test_the_children_of_a_killed_owner_hold_nothing(tmp_path: Path) -> None:
    """A job is killed while it saves; its workers outlive it, and the job that restarts can save."""
    told, told_to = os.pipe()
    owner = os.fork()
    if owner == 0:
        with LocalStorage(tmp_path).lock():
            if os.fork() == 0:
                os.write(told_to, os.getpid().to_bytes(4, "little"))  # what runs in a forked child has run
                signal.pause()
            signal.pause()
    worker = int.from_bytes(os.read(told, 4), "little")
    try:
        with pytest.raises(BlockingIOError), LocalStorage(tmp_path).lock():
            pass
        os.kill(owner, signal.SIGKILL)
        os.waitpid(owner, 0)
        os.kill(worker, 0)  # it is there
        with LocalStorage(tmp_path).lock():
            pass
    finally:
        os.kill(worker, signal.SIGKILL)
        os.close(told)
        os.close(told_to)


@pytest.mark.parametrize("kind", ["flock", "lock file"])
def test_a_child_that_leaves_the_block_releases_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forked child that unwinds its copy of the block does not unlock its parent."""
    if kind == "lock file":
        _no_flock(monkeypatch)
    parent = os.getpid()
    try:
        with LocalStorage(tmp_path).lock():
            child = os.fork()
            if child != 0:
                os.waitpid(child, 0)
                with pytest.raises(BlockingIOError), LocalStorage(tmp_path).lock():
                    pass
    finally:
        if os.getpid() != parent:
            os._exit(0)


def test_saves_beside_workers(tmp_path: Path) -> None:
    """Workers are forked between the saves of a run to one path: each save succeeds."""
    state = {"w": torch.arange(4.0)}
    save(tmp_path / "c", state)
    with LocalStorage(tmp_path / "c").lock():
        worker = forked()
        worker.__enter__()
    try:
        for value in (1.0, 2.0, 3.0):
            state["w"].fill_(value)
            save(tmp_path / "c", state, overwrite=True)
            assert read_state(tmp_path / "c")["w"].read().tolist() == [value] * 4
    finally:
        worker.__exit__(None, None, None)


def _foreign(path: Path, age_s: float) -> None:
    owner = {"host": "elsewhere", "pid": 1, "boot": "b", "pid_namespace": "n", "started": "1", "lease_s": 120}
    path.write_text(json.dumps(owner))
    then_s = time.time() - age_s
    os.utime(path, (then_s, then_s))


def test_a_lease_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock file of another host is free when nobody has touched it for its lease, and not before."""
    _no_flock(monkeypatch)
    path = tmp_path / lock_file.LOCK_FILE_NAME
    _foreign(path, age_s=60)
    with pytest.raises(BlockingIOError), LocalStorage(tmp_path).lock():
        pass
    assert "elsewhere" in path.read_text()
    _foreign(path, age_s=600)
    with LocalStorage(tmp_path).lock():
        assert json.loads(path.read_text())["pid"] == os.getpid()
    assert not path.exists()


def test_an_owner_renews_its_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its owner lives a lock file does not grow old; one that was taken is not removed by its former owner."""
    _no_flock(monkeypatch)
    monkeypatch.setattr(lock_file, "_LEASE_S", 0.4)
    path = tmp_path / lock_file.LOCK_FILE_NAME
    with LocalStorage(tmp_path).lock():
        os.utime(path, (1.0, 1.0))
        end_s = time.monotonic() + 20
        while path.stat().st_mtime < 2:
            assert time.monotonic() < end_s, "the lease was not renewed"
            threading.Event().wait(0.01)
        _foreign(path, age_s=0)
    assert "elsewhere" in path.read_text()


@pytest.mark.parametrize("kind", ["flock", "lock file"])
def test_a_step_that_another_job_writes_is_not_removed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention, `remove` and `clean` leave a step alone while another live job holds it."""
    if kind == "lock file":
        _no_flock(monkeypatch)
    ours, state = CheckpointManager(tmp_path, retention=1), {"w": torch.arange(8.0)}
    ours.save(1, state)
    held, torn = LocalStorage(tmp_path / "step-00000001"), LocalStorage(tmp_path / "step-00000002")
    with held.lock(), torn.lock():
        (tmp_path / "step-00000002" / "data-being-written").mkdir()
        with pytest.warns(UserWarning, match="step-00000001"):
            ours.save(3, state)
        assert ours.clean(older_than_s=0) == []
        assert ours.steps() == [1, 3] and (tmp_path / "step-00000002" / "data-being-written").is_dir()
        with pytest.raises(CheckpointError):
            ours.remove(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours.save(4, state)
    assert ours.steps() == [4] and not (tmp_path / "step-00000002").exists()
    ours.remove(4)
    assert ours.steps() == []
