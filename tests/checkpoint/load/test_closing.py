"""Errors of ``close()``: raised on all ranks alike, with everything else closed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.checkpoint_states import assert_equal
from tests.support.distributed import run_ranks
from vescale_fsdp.checkpoint import CheckpointManager, load, read_state, save
from vescale_fsdp.checkpoint.ranks.coordinator import coordinator_for
from vescale_fsdp.checkpoint.ranks.exchange import FileMove, move_files
from vescale_fsdp.checkpoint.storage.base import FileReader, Storage
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.errors import CheckpointError, CorruptCheckpointError, PartialLoadError


class _Reader(FileReader):
    """Reads well, and says as it is closed that it did not."""

    def __init__(self, inner: FileReader) -> None:
        self._inner = inner

    @property
    def size_bytes(self) -> int:
        return self._inner.size_bytes

    def read_at(self, offset_bytes: int, buffers: Any) -> None:
        self._inner.read_at(offset_bytes, buffers)

    def close(self) -> None:
        self._inner.close()
        raise OSError("planted")


class _Storage(LocalStorage):
    """Its files cannot be closed."""

    def child(self, name: str) -> LocalStorage:
        return _Storage(self.root / name)

    def open_file(self, name: str) -> FileReader:
        return _Reader(super().open_file(name))


def _storage(path: Path, bad_rank: int) -> Storage:
    return (_Storage if dist.get_rank() == bad_rank else LocalStorage)(path)


def _state(value: float) -> dict[str, Any]:
    return {"w": torch.full((1000, 300), value), "b": torch.full((7,), value)}


def _saved_by_two(path: Path) -> None:
    save(path, _state(1))


def _loads(path: Path, bad_rank: int, read: Any) -> str:
    with pytest.raises(PartialLoadError) as caught:
        load(_storage(path, bad_rank), _state(0), read=read)
    assert "planted" in str(caught.value)
    links = [Path("/proc/self/fd", number) for number in os.listdir("/proc/self/fd")]
    return f"{sum(link.is_symlink() and path in link.readlink().parents for link in links)} open files"


@pytest.mark.parametrize("read", ["each", "once"])
def test_a_read_that_fails_as_it_is_closed(read: str, tmp_path: Path) -> None:
    """On one rank of two: all raise, and no file of several is left open."""
    run_ranks(2, _saved_by_two, tmp_path / "c")
    for bad_rank in (0, 1):
        assert run_ranks(2, _loads, tmp_path / "c", bad_rank, read) == ["0 open files"] * 2


def test_damage_stays_damage(tmp_path: Path) -> None:
    """What closing raises behind damage is a note of it: ranks decide alike whether to try an older step."""
    save(tmp_path / "c", _state(1))
    file = next((tmp_path / "c").glob("data-*/*"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpointError) as caught:
        load(_Storage(tmp_path / "c"), _state(0))
    assert any("planted" in note for note in caught.value.__notes__)


class _StuckLock(LocalStorage):
    @contextmanager
    def lock(self) -> Iterator[None]:
        with super().lock():
            yield
        raise OSError("planted")


def _saves(path: Path) -> str:
    try:
        save((LocalStorage if dist.get_rank() else _StuckLock)(path), _state(2))
    except (OSError, CheckpointError) as error:
        return f"{type(error).__name__} {error} {getattr(error, '__notes__', ())}"
    return "nothing"


def test_a_lock_that_cannot_be_given_back(tmp_path: Path) -> None:
    """Rank 0 alone holds it; all ranks raise, and the error says that the checkpoint is there."""
    texts = run_ranks(2, _saves, tmp_path / "c")
    assert texts[0].startswith("OSError") and texts[1].startswith("CheckpointError")
    assert all("planted" in text and "durable" in text for text in texts)
    assert_equal(_state(2)["w"], read_state(tmp_path / "c")["w"].read())


def _moves(folder: Path) -> str:
    """Two files each way; the sender on rank 1 fails to close the first."""
    coordinator = coordinator_for()
    rank = coordinator.rank
    here = folder / str(rank)
    here.mkdir()
    for number in range(2):
        (here / f"{number} of {rank}").write_bytes(bytes([rank]) * 5000)
    moves = [
        FileMove(f"{number} of {sender}", sender, 1 - sender) for number in range(2) for sender in range(2)
    ]
    with pytest.raises((OSError, CheckpointError)) as caught:
        move_files(coordinator, _storage(here, 1), moves, "moving")
    assert all(
        (here / f"{number} of {1 - rank}").read_bytes() == bytes([1 - rank]) * 5000 for number in range(2)
    )
    return type(caught.value).__name__


def test_files_between_ranks(tmp_path: Path) -> None:
    """A sender that cannot close its file goes on with the files behind it, so that nobody waits for them."""
    assert run_ranks(2, _moves, tmp_path) == ["CheckpointError", "OSError"]


def test_a_manager_raises_it_too(tmp_path: Path) -> None:
    """`restore` takes an error of closing for what it is: no damage, so no older step is restored in silence."""
    manager = CheckpointManager(tmp_path / "run")
    for step in (1, 2):
        manager.save(step, _state(step))
    with pytest.raises(PartialLoadError, match="planted"):
        CheckpointManager(_Storage(tmp_path / "run")).restore(_state(0))
