"""`RamTier`: newest states in the node's shared memory, which outlives a killed worker.

Same format, same checks, on a memory file system (``/dev/shm``): a save is one copy and costs no disk; a restart
on the same node reads it back at memory speed. When the node is lost, so is this tier, and the disk's newest
step counts. A step in memory is used only if every rank finds it; else all go to disk together.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from vescale_fsdp.checkpoint.agreement import Coordinator
from vescale_fsdp.checkpoint.local import LocalStorage
from vescale_fsdp.checkpoint.manifest import MANIFEST_NAME
from vescale_fsdp.checkpoint.saving import Saver
from vescale_fsdp.checkpoint.storage import Storage
from vescale_fsdp.checkpoint.tree import Json

__all__ = ["RamTier"]

_STEP = re.compile(r"step-(\d{8,})")


class RamTier:
    """Steps kept in shared memory.

    Args:
        name: of the run; restarts of the same run must give the same one.
        interval: steps between two saves to memory.
        keep_last: steps to keep, at least 1; while a step is written, one more is held.
        folder: a memory file system.

    Raises:
        ValueError: if a limit is below 1 or the name is no plain file name.
    """

    def __init__(
        self,
        name: str,
        *,
        interval: int = 1,
        keep_last: int = 1,
        folder: str | os.PathLike[str] = "/dev/shm",
    ) -> None:
        if interval < 1 or keep_last < 1 or not re.fullmatch(r"[\w.-]+", name) or name.startswith("."):
            raise ValueError(
                f"RamTier needs a plain name, interval >= 1 and keep_last >= 1; "
                f"got {name!r}, {interval}, {keep_last}"
            )
        self._interval = interval
        self._keep_last = keep_last
        self._root = LocalStorage(Path(folder) / f"vescale-{name}", durable=False)

    def is_due(self, step: int) -> bool:
        """Whether a step is to be saved."""
        return step % self._interval == 0

    def save(self, coordinator: Coordinator, step: int, state: Any, user: Json) -> None:
        """Save a step and forget older ones; a collective."""
        Saver(self._root.child(f"step-{step:08d}"), coordinator, overwrite=True).save(state, user)
        if coordinator.rank == 0:
            older = [number for number, _ in self.steps() if number < step]
            for number in older[: len(older) + 1 - self._keep_last]:
                self._root.remove(f"step-{number:08d}/{MANIFEST_NAME}")
                self._root.remove(f"step-{number:08d}")

    def steps(self) -> list[tuple[int, Storage]]:
        """Complete steps that this node holds, ascending."""
        found: list[tuple[int, Storage]] = []
        for name in self._root.list_folder(""):
            match = _STEP.fullmatch(name)
            if match and self._root.exists(f"{name}/{MANIFEST_NAME}"):
                found.append((int(match[1]), self._root.child(name)))
        return sorted(found, key=lambda item: item[0])

    def clear(self) -> None:
        """Give the memory back."""
        self._root.remove("")
