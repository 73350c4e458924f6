"""File systems that lack hard links, renames, fsync of folders or flock: saves succeed, and one line says how."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vescale_fsdp.checkpoint import CheckpointManager, load, save, verify
from vescale_fsdp.checkpoint.storage import file_system
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.errors import CheckpointError

REFUSALS = {
    "hard links": ("link", (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV)),
    "renames": ("replace", (errno.EPERM, errno.ENOSYS, errno.ENOTSUP)),
    "fsync of folders": ("fsync", (errno.EINVAL, errno.EBADF, errno.ENOTSUP)),
    "flock": ("flock", (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)),
}
CASES = [(kind, number) for kind, (_, numbers) in REFUSALS.items() for number in numbers]


def _inject(monkeypatch: pytest.MonkeyPatch, kind: str, number: int) -> None:
    """Let one kind of call fail as it does on a file system that lacks it."""
    name, _ = REFUSALS[kind]
    module: Any = fcntl if name == "flock" else os
    real: Callable[..., Any] = getattr(module, name)

    def refused(*arguments: Any, **options: Any) -> Any:
        if name == "fsync" and not stat.S_ISDIR(os.fstat(arguments[0]).st_mode):
            return real(*arguments, **options)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(module, name, refused)


def _state(value: float) -> dict[str, Any]:
    return {"w": torch.full((300,), float(value))}


def _value(path: Path) -> float:
    state = _state(-1.0)
    load(path, state)
    assert state["w"].unique().numel() == 1
    return float(state["w"][0])


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize(("kind", "number"), CASES)
def test_what_a_file_system_lacks(
    kind: str,
    number: int,
    atomic: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Steps are saved, replaced only if asked, kept and restored; the root's line is logged once, at INFO."""
    caplog.set_level(logging.INFO)
    _inject(monkeypatch, kind, number)
    if not atomic:  # neither is there a rename that refuses to replace
        monkeypatch.setattr(file_system, "_c_function", lambda *_: None)
    manager = CheckpointManager(tmp_path, retention=2)
    for step in (1, 2, 3):
        manager.save(step, _state(step))
    said = [record for record in caplog.records if kind in record.getMessage()]
    assert [record.levelno for record in said] == [logging.INFO]
    assert str(tmp_path) in said[0].getMessage()
    assert manager.steps() == [2, 3] and verify(tmp_path / "step-00000003").ok
    state = _state(0.0)
    restored = manager.restore(state)
    assert restored is not None and restored.step == 3 and torch.equal(state["w"], _state(3)["w"])

    path = tmp_path / "step-00000003"
    with pytest.raises(CheckpointError, check=lambda error: error.got == "manifest.json"):
        save(path, _state(4))
    with pytest.raises(FileExistsError):
        LocalStorage(path).commit("manifest.json", b"{}", replace=False)
    assert _value(path) == 3
    save(path, _state(5), overwrite=True)
    assert _value(path) == 5
    manager.close()  # until then it holds the root
    hidden = [found.name for found in tmp_path.rglob(".*") if found.name != ".lock"]
    assert hidden == []


def test_a_complete_file_system_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where all of it works there is nothing to say."""
    caplog.set_level(logging.INFO)
    save(tmp_path / "c", _state(1))
    assert not [record for record in caplog.records if record.name.endswith(".file_system")]


@pytest.mark.parametrize("name", ["link", "replace", "fsync"])
def test_other_errors_still_end_a_save(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing disk is not taken for one that lacks something."""
    save(tmp_path / "c", _state(1))

    def broken(*arguments: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, name, broken)
    with pytest.raises(OSError, check=lambda error: error.errno == errno.EIO):
        save(tmp_path / "c", _state(2), overwrite=True)
    monkeypatch.undo()
    assert _value(tmp_path / "c") == 1


@pytest.mark.parametrize("given", ["", "0", "1", "many"])
def test_any_number_of_ranks_per_machine_is_read(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some launchers leave LOCAL_WORLD_SIZE empty or 0: saves and loads go on with the ranks that are known."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", given)
    save(tmp_path / "c", {"w": torch.arange(5)})
    found = {"w": torch.zeros(5, dtype=torch.int64)}
    load(tmp_path / "c", found)
    assert found["w"].tolist() == [0, 1, 2, 3, 4]
