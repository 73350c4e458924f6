"""What `format=` and `export=` take: how the tensors of a state lie in a folder, and how that folder becomes valid.

    manifest_form      ranks' files (native) or zarr arrays, which a manifest makes a checkpoint
    conversion/live    a Hugging Face repository, a folder of stock DCP: forms that others read

`save` takes the state, lets the ranks agree and calls a form; a form knows nothing of how that is done. Reading is the
business of whoever knows the format: `checkpoint.loading` for forms with a manifest.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch

from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.manifest.state_tree import Json
from vescale_fsdp.checkpoint.manifest.structure import Structure
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator
from vescale_fsdp.checkpoint.storage.base import ALLOW_WRITES, Storage, StorageError, bad_root
from vescale_fsdp.checkpoint.storage.progress import Meter

_UNUSABLE = (
    errno.EACCES,
    errno.EEXIST,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
)  # what making files and folders raises where a path is unfit for it; a full disk is not among them


class Commit(NamedTuple):
    """What is to be done when all ranks have written.

    Attributes:
        num_bytes: of tensors and values that all ranks together have written.
        run: makes them valid; called on one rank (or one of every node).
        save_id: of the manifest, in forms that have one.
    """

    num_bytes: int
    run: Callable[[], None]
    save_id: str = ""


class RankShare(NamedTuple):
    """What one rank brings to a save, and where to.

    Attributes:
        locals_by_name: this rank's tensors, but perhaps those that the form leaves out; each holds the elements of the
            rank's whole region.
        blob: its per-rank values, packed.
        replace: whether a folder that is there already may be replaced.
        every_node: whether the storage is each node's own.
        free_bytes: the least that any rank found free before anybody wrote; None where that is not known.
        meter: is told of bytes that have been written.
    """

    storage: Storage
    coordinator: Coordinator
    locals_by_name: Mapping[str, torch.Tensor]
    blob: bytes
    replace: bool
    every_node: bool
    free_bytes: int | None = None
    meter: Meter = Meter()

    def prove_room(self, needed_bytes: int) -> None:
        """Refuse what surely does not fit, before it is written.

        Args:
            needed_bytes: of a storage that all ranks share, of all of them, which then decide alike; else of this one.
        """
        if self.free_bytes is not None and needed_bytes > self.free_bytes:
            raise StorageError(
                "There is no room for this checkpoint.",
                expected=f"{needed_bytes} bytes free",
                got=f"{self.free_bytes}",
                where=self.storage.where,
                todo="remove what is not needed, or save to another disk; nothing was written",
            )


class Form(ABC):
    """A way in which the tensors of a state lie in a folder."""

    @abstractmethod
    def arguments(self) -> Json:
        """What of this form must be the same on all ranks; files that it depends on are read for it.

        Raises:
            VescaleError: if an argument cannot be. All ranks hear of it, before anything is written.
        """

    @abstractmethod
    def claim(self, storage: Storage, held: ExitStack, *, overwrite: bool) -> None:
        """On rank 0, before anything is written: keep other jobs out, and refuse to replace what is there unasked.

        Args:
            held: gets the lock; closed after the commit.
        """

    def left_out(self, structure: Structure) -> Collection[str]:
        """Names of tensors whose values `write` never reads, so that nobody need copy them."""
        return ()

    @abstractmethod
    def write(self, plan: Callable[[], Manifest], share: RankShare) -> Commit:
        """Write what is this rank's, durably; called on all ranks together, which all leave in the same way.

        Args:
            plan: what this save writes, in the native form; every rank computes the same from the same input.
        """

    @abstractmethod
    def clear_away(self, storage: Storage, save_id: str) -> None:
        """On rank 0, after an attempt that failed behind `claim`: remove what it has left.

        Args:
            save_id: of the attempt; empty if the ranks have not agreed.
        """


@contextmanager
def told_if_busy(storage: Storage) -> Iterator[None]:
    """Around `Storage.lock`: another job that holds the folder is an error of the checkpoint."""
    try:
        yield
    except BlockingIOError as busy:
        raise StorageError(
            "Another job is saving to this path.",
            expected="one job per path",
            got=f"a lock held by another process: {busy}",
            where=storage.where,
            todo="wait for it, or save to another path",
        ) from busy


@contextmanager
def told_if_unusable(storage: Storage) -> Iterator[None]:
    """Around first writes to a path: a file in its place, no permission or a read-only mount is named with a cure."""
    try:
        yield
    except OSError as error:
        if error.errno not in _UNUSABLE:
            raise
        problem = storage.check_root() or f"{type(error).__name__}: {error}"
        raise bad_root(storage.where, problem, ALLOW_WRITES) from error
