"""`RamTier`: newest states in the node's shared memory, which outlives a killed worker.

Same format, same checks, on a memory file system (``/dev/shm``): a save is one copy and costs no disk; a restart
on the same nodes reads it back at memory speed. Every rank stores all that it holds and every node has its own
manifest, so no node needs another's memory at the same world size. When a node is lost, so is its part, and the
disk's newest step counts: a step in memory is used only if every rank finds the same attempt of it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from vescale_fsdp.checkpoint.loading.read_state import read_manifest
from vescale_fsdp.checkpoint.manifest.file_names import step_name
from vescale_fsdp.checkpoint.manifest.manifest import NoCheckpointError
from vescale_fsdp.checkpoint.manifest.state_tree import Json
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator
from vescale_fsdp.checkpoint.saving.save import Saver, is_node_leader
from vescale_fsdp.checkpoint.step_folders import committed_steps, no_longer_kept, retire
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.errors import CheckpointError

__all__ = ["RamTier"]


class RamTier:
    """Steps kept in shared memory.

    Args:
        name: of the run; restarts of the same run must give the same one.
        interval: steps between two saves to memory.
        keep_last: steps to keep, at least 1; while a step is written, one more is held.
        folder: a memory file system.

    Raises:
        ValueError: if a limit is below 1 or the name is not a plain file name.
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
        storage = self._root.child(step_name(step))
        Saver(storage, coordinator, overwrite=True, every_node=True).save(state, user)
        with coordinator.together(f"removing older steps from {self._root.where}", f"step {step} is saved"):
            if coordinator.rank == 0 or is_node_leader():
                retire(self._root, lambda found: no_longer_kept(found, step, keep_last=self._keep_last))

    def steps(self) -> list[tuple[int, Storage, str]]:
        """Complete steps that this node holds, ascending, each with the name of the attempt that wrote it."""
        found: list[tuple[int, Storage, str]] = []
        for number in committed_steps(self._root):
            storage = self._root.child(step_name(number))
            try:
                found.append((number, storage, read_manifest(storage).save_id))
            except NoCheckpointError:
                continue
            except CheckpointError:
                found.append((number, storage, "unreadable"))  # whoever loads it hears why
        return found

    def clear(self) -> None:
        """Give the memory back."""
        self._root.remove("")
