"""A folder in the place of another: in one call where the system can, else in two renames that lose nothing."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from vescale_fsdp.checkpoint.storage import folder_exchange
from vescale_fsdp.checkpoint.storage.folder_exchange import move_over
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
        monkeypatch.setattr(folder_exchange, "_renameat2", lambda: None)
    target = LocalStorage(tmp_path / "out")
    for text in ("first", "second"):
        _folder(tmp_path / ".out.saving", text)
        (tmp_path / ".out.before").mkdir()
        target.take_over(target.beside(".out.saving"))

        assert (tmp_path / "out" / "file").read_text() == text
        assert os.listdir(tmp_path) == ["out"]


def test_an_old_folder_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the second of two renames fails, the first is undone."""
    monkeypatch.setattr(folder_exchange, "_renameat2", lambda: None)
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
    with pytest.raises(BlockingIOError, match="renamed"), storage.lock():
        pass
    monkeypatch.undo()
    with storage.lock():
        assert (tmp_path / "work").is_dir()
