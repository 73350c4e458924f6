"""`Form`, the argument of `format=` and `export=`: how a state is written to a folder and committed.

    native, zarr       files of ranks, or zarr arrays, and a manifest
    dcp                a folder of stock torch.distributed.checkpoint
    huggingface        a Hugging Face repository; the class is `conversion.HuggingFace`, since it needs key rules

`save` captures the state, compares it between ranks and calls a form. A form only writes; readers are separate.
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

# Errors of creating files and folders at an unusable path; a full disk is not among them.
_UNUSABLE = {errno.EACCES, errno.EEXIST, errno.ENOENT, errno.ENOTDIR, errno.EPERM, errno.EROFS}


class Commit(NamedTuple):
    """The last step of a save, after all ranks have written.

    Attributes:
        num_bytes: bytes of tensors and values that all ranks together have written.
        run: makes the checkpoint valid; called on one rank, or on one rank of every node.
        save_id: the save id in the manifest; empty in forms without a manifest.
    """

    num_bytes: int
    run: Callable[[], None]
    save_id: str = ""


class RankShare(NamedTuple):
    """The data that one rank writes, and its destination.

    Attributes:
        locals_by_name: this rank's tensors, except those that the form leaves out; each has the elements of the
            rank's whole region.
        blob: this rank's per-rank values, packed.
        replace: whether an existing folder may be replaced.
        every_node: whether each node has a storage of its own.
        free_bytes: the least free space that any rank measured before writing; None if unknown.
        meter: counts the bytes that are written.
    """

    storage: Storage
    coordinator: Coordinator
    locals_by_name: Mapping[str, torch.Tensor]
    blob: bytes
    replace: bool
    every_node: bool
    free_bytes: int | None = None
    meter: Meter = Meter()

    def check_room(self, needed_bytes: int) -> None:
        """Refuse a checkpoint that does not fit, before anything is written.

        Args:
            needed_bytes: the size of all ranks' files if the ranks share the storage, so that all make the same
                decision; else the size of this rank's file.
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
    """A layout of a state's tensors in a folder."""

    @abstractmethod
    def arguments(self) -> Json:
        """The options that must be equal on all ranks, including the content of files that options name.

        Raises:
            VescaleError: for an invalid option; raised on all ranks, before anything is written.
        """

    @abstractmethod
    def claim(self, storage: Storage, held: ExitStack, *, overwrite: bool) -> None:
        """On rank 0, before anything is written: lock the folder.

        Without ``overwrite``, refuse to replace an existing checkpoint.

        Args:
            held: the lock is added to this stack, which the caller closes after the commit.
        """

    def left_out(self, structure: Structure) -> Collection[str]:
        """Names of tensors whose values `write` never reads; a save need not copy these tensors."""
        return ()

    @abstractmethod
    def write(self, plan: Callable[[], Manifest], share: RankShare) -> Commit:
        """Write this rank's part, durably; a collective that returns or raises on all ranks alike.

        Args:
            plan: computes the manifest of this save, in the native form; equal on all ranks.
        """

    @abstractmethod
    def clear_away(self, storage: Storage, save_id: str) -> None:
        """On rank 0, after an attempt that failed after `claim`: remove its files.

        Args:
            save_id: the attempt's id; empty if it failed before the ranks agreed on one.
        """


@contextmanager
def lock_errors(storage: Storage) -> Iterator[None]:
    """Around `Storage.lock`: turns the lock of another job into an error of the checkpoint."""
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
def root_errors(storage: Storage) -> Iterator[None]:
    """Around the first writes to a path: names a file at the path, a missing permission or a read-only mount."""
    try:
        yield
    except OSError as error:
        if error.errno not in _UNUSABLE:  # not about the path, such as a full disk
            raise
        problem = storage.check_root() or f"{type(error).__name__}: {error}"
        raise bad_root(storage.where, problem, ALLOW_WRITES) from error
