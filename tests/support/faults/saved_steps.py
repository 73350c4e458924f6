"""Steps of a few tensors whose values are their numbers, what restoring them ends in, and a root that is watched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from vescale_fsdp.checkpoint import CheckpointManager
from vescale_fsdp.checkpoint.ranks.coordinator import SoloCoordinator
from vescale_fsdp.checkpoint.save import Saver
from vescale_fsdp.checkpoint.storage.base import Buffer, FileReader
from vescale_fsdp.checkpoint.storage.local import LocalStorage


def state_of(value: float) -> dict[str, Any]:
    return {"w": torch.full((50, 40), value), "v": torch.full((9,), value), "step": int(value)}


def save_steps(root: Path, steps: Iterable[int]) -> None:
    """Steps of one process, whose values are their numbers."""
    for step in steps:
        Saver(LocalStorage(root / f"step-{step:08d}"), SoloCoordinator(), overwrite=True).save(state_of(step))


def value_of(state: dict[str, Any]) -> float:
    """The one value that a state holds everywhere."""
    values = {*state["w"].unique().tolist(), *state["v"].unique().tolist(), state["step"]}
    (value,) = values
    return float(value)


def outcome_of(manager: CheckpointManager, **options: Any) -> tuple[Any, str]:
    """The step that was restored, None, or the kind of the error with its text; and what the state holds."""
    state = state_of(0)
    try:
        restored = manager.restore(state, **options)
    except BaseException as error:  # noqa: BLE001  whatever it is, the test looks at it
        return type(error), f"{error}"
    assert value_of(state) == (0 if restored is None else restored.step)
    return (None, "") if restored is None else (restored.step, str(restored.skipped))


class WatchedRoot(LocalStorage):
    """A root that calls a hook before every operation that reads, its steps' included."""

    def __init__(self, root: Path, before: Callable[[str], None]) -> None:
        super().__init__(root)
        self.before = before

    def child(self, name: str) -> LocalStorage:
        return WatchedRoot(self.root / name, self.before)

    def list_folder(self, name: str) -> list[str]:
        self.before("list_folder")
        return super().list_folder(name)

    def exists(self, name: str) -> bool:
        self.before("exists")
        return super().exists(name)

    def read_small(self, name: str, *, limit_bytes: int) -> bytes:
        self.before("read_small")
        return super().read_small(name, limit_bytes=limit_bytes)

    def open_file(self, name: str) -> FileReader:
        self.before("open_file")
        return _WatchedReader(super().open_file(name), self.before)


class _WatchedReader(FileReader):
    looks_in_place = True

    def __init__(self, inner: FileReader, before: Callable[[str], None]) -> None:
        self._inner, self._before = inner, before

    @property
    def size_bytes(self) -> int:
        return self._inner.size_bytes

    def read_at(self, offset_bytes: int, buffers: Sequence[Buffer]) -> None:
        self._before("read_at")
        self._inner.read_at(offset_bytes, buffers)

    def view(self, start_bytes: int, stop_bytes: int) -> memoryview:
        self._before("view")
        return self._inner.view(start_bytes, stop_bytes)

    def close(self) -> None:
        self._inner.close()
