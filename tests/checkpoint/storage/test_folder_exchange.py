"""A folder in the place of another: in one call where the system can, else in two renames that lose nothing."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from vescale_fsdp.checkpoint import save
from vescale_fsdp.checkpoint.storage import file_system
from vescale_fsdp.checkpoint.storage.file_system import move_over
from vescale_fsdp.checkpoint.storage.local import LocalStorage


def _folder(path: Path, text: str) -> Path:
    path.mkdir()
    (path / "file").write_text(text)
    return path


@pytest.mark.parametrize("exchanges", [True, False])
def test_the_new_folder_is_there_and_the_old_one_gone(
    exchanges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over nothing, over an old folder, and over what a killed process has left."""
    if not exchanges:
        monkeypatch.setattr(file_system, "_c_function", lambda *_: None)
    target = LocalStorage(tmp_path / "out")
    for text in ("first", "second"):
        _folder(tmp_path / ".out.saving", text)
        _folder(tmp_path / ".out.before", "half removed")
        target.take_over(target.beside(".out.saving"))

        assert (tmp_path / "out" / "file").read_text() == text
        assert os.listdir(tmp_path) == ["out"]


def test_an_old_folder_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the second of two renames fails, the first is undone."""
    monkeypatch.setattr(file_system, "_c_function", lambda *_: None)
    old = _folder(tmp_path / "out", "old")
    with pytest.raises(FileNotFoundError):
        move_over(tmp_path / "missing", old)

    assert (old / "file").read_text() == "old" and os.listdir(tmp_path) == ["out"]


def test_a_lock_in_a_folder_that_was_renamed_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever gets the lock of a folder that has another name by then holds nothing."""
    storage, real = LocalStorage(tmp_path / "work"), fcntl.flock

    def late(file: int, how: int) -> None:
        if how != fcntl.LOCK_UN:
            os.rename(tmp_path / "work", tmp_path / "done")
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(BlockingIOError), storage.lock():
        pass
    monkeypatch.undo()
    with storage.lock():
        assert (tmp_path / "work").is_dir()


def _without_folder_renames(monkeypatch: pytest.MonkeyPatch) -> None:
    rename = os.rename

    def refused(one: Path, other: Path) -> None:
        if os.path.isdir(one):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        rename(one, other)

    monkeypatch.setattr(file_system, "_c_function", lambda *_: None)
    monkeypatch.setattr(os, "rename", refused)


def test_a_mounted_bucket_renames_no_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A form of several files is saved, replaced and loaded; one line says how."""
    caplog.set_level(logging.INFO)
    _without_folder_renames(monkeypatch)
    for value in (1.0, 2.0):
        save(tmp_path / "c", {"w": torch.full((300,), value)}, format="dcp", overwrite=True)
        state = {"w": torch.zeros(300)}
        dcp.load(state, checkpoint_id=tmp_path / "c")
        assert torch.equal(state["w"], torch.full((300,), value))
        assert os.listdir(tmp_path) == ["c"]
    said = [record for record in caplog.records if record.name == file_system.__name__]
    assert [record.levelno for record in said] == [logging.INFO] * 2


@pytest.mark.parametrize("number", range(4))
def test_the_deciding_file_comes_last(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed behind any file, the folder holds all of the new one or lacks the deciding file."""
    _without_folder_renames(monkeypatch)
    for folder, names in ((".out.saving", ("a", "deep/b", "c")), ("out", ("a", "c", "old"))):
        for name in names:
            path = tmp_path / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(folder)
    replace = os.replace
    calls: list[str] = []

    def killed(one: Path, other: Path) -> None:
        if len(calls) == number:
            raise KeyboardInterrupt
        calls.append(other.name)
        replace(one, other)

    monkeypatch.setattr(os, "replace", killed)
    with suppress(KeyboardInterrupt):
        move_over(tmp_path / ".out.saving", tmp_path / "out", last="a")

    out = tmp_path / "out"
    assert (out / "a").exists() == (number == 3)
    assert calls == ["c", "b", "a"][:number]
    if number == 3:
        found = {f"{path.relative_to(out)}": path.read_text() for path in out.rglob("*") if path.is_file()}
        assert found == dict.fromkeys(("a", "deep/b", "c"), ".out.saving")
