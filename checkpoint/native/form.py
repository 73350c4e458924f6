"""`Form`, the argument of `format=` and `export=`: how a state is written to a folder and committed.

    native, zarr       one file per rank, or zarr arrays; and a manifest
    dcp                a folder of stock torch.distributed.checkpoint
    huggingface        a Hugging Face repository; its class is `conversion.HuggingFace`, because it needs key rules

`save` captures the state, compares it between ranks, and calls the form to write it. A form does not read.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import ClassVar, NamedTuple

import torch

from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.manifest.state_tree import Json
from vescale_fsdp.checkpoint.manifest.structure import Structure
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator
from vescale_fsdp.checkpoint.storage.base import ALLOW_WRITES, Storage, bad_root
from vescale_fsdp.checkpoint.storage.progress import Meter
from vescale_fsdp.errors import StorageError

# Errors of the first write to an unusable path, for which `root_errors` explains the path. Not ENOSPC: a full disk says
# nothing about the path.
_UNUSABLE = {errno.EACCES, errno.EEXIST, errno.ENOENT, errno.ENOTDIR, errno.EPERM, errno.EROFS}


class Commit(NamedTuple):
    """The last step of a save, after all ranks have written.

    Attributes:
        num_bytes: bytes of tensors and per-rank values that all ranks have written together.
        run: makes the checkpoint valid; called on rank 0, or, with `RankShare.every_node`, on one rank of every node.
        digest: on rank 0, the state's fingerprint as one text, for the log; else empty.
    """

    num_bytes: int
    run: Callable[[], None]
    digest: str = ""


class RankShare(NamedTuple):
    """The data that one rank writes, and where it writes them.

    Attributes:
        locals_by_name: this rank's tensors; each has the elements of the rank's whole region. `async_save` omits
            tensors that every format drops.
        blob: this rank's `PerRank` values, packed into bytes.
        replace: whether an existing folder may be replaced.
        every_node: whether each node has a storage of its own.
        free_bytes: the least free space that any rank measured before writing; None if unknown.
        meter: counts the bytes that are written.
        sealed: called at the commit; adds to the manifest what is known only then.
    """

    storage: Storage
    coordinator: Coordinator
    locals_by_name: Mapping[str, torch.Tensor]
    blob: bytes
    replace: bool
    every_node: bool
    free_bytes: int | None = None
    meter: Meter = Meter()
    sealed: Callable[[Manifest], Manifest] = lambda manifest: manifest

    def check_room(self, needed_bytes: int) -> None:
        """Raise StorageError if the free space is too small, before anything is written.

        Args:
            needed_bytes: if the ranks share the storage, the size of all files, so that all ranks make the same
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
    """How a save writes a state to a folder and commits it. `save` calls `claim`, `write` and the returned commit.

    Attributes:
        has_manifest: whether the form writes the manifest, which may record fingerprints.
    """

    has_manifest: ClassVar[bool] = False

    @abstractmethod
    def arguments(self) -> Json:
        """Return the form's options, for a comparison between ranks. If an option names a file, include its content.

        Raises:
            VescaleError: for an invalid option; raised on all ranks, before anything is written.
        """

    @abstractmethod
    def claim(self, storage: Storage, held: ExitStack, *, overwrite: bool) -> None:
        """Lock the folder. Called on rank 0, before anything is written.

        Args:
            held: receives the lock; the caller closes this stack after the commit.
            overwrite: whether an existing checkpoint may be replaced; otherwise it is an error.
        """

    def for_exports(self) -> Form:
        """Return the form that writes exports. It may remove the old export before it writes the new one.

        If the save then fails, there is no export. But an export is a second copy: the step itself is saved before.
        """
        return self

    def dropped(self, structure: Structure) -> Collection[str]:
        """Return names of tensors whose values `write` never reads; a save need not copy these tensors."""
        return ()

    @abstractmethod
    def write(self, plan: Callable[[], Manifest], share: RankShare) -> Commit:
        """Write this rank's part, durable on return. A collective: all ranks return, or all ranks raise.

        Args:
            plan: computes the manifest of this save in the native form; the result is equal on all ranks.
        """

    @abstractmethod
    def clear_away(self, storage: Storage, save_id: str) -> None:
        """Remove the files of an attempt that failed after `claim`. Called on rank 0.

        Args:
            save_id: the attempt's id; empty if the attempt failed before the ranks agreed on an id.
        """


@contextmanager
def lock_errors(storage: Storage) -> Iterator[None]:
    """Context manager around `Storage.lock`: raise StorageError if another job holds the lock."""
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
    """Context manager around the first writes to a path: an error says why the path cannot be used.

    Such reasons are a file at the path, a missing permission, or a read-only mount.
    """
    try:
        yield
    except OSError as error:
        # Another problem than the path, such as a full disk. Object stores raise errors without a number.
        if error.errno not in _UNUSABLE and not isinstance(error, FileNotFoundError):
            raise
        problem = storage.check_root() or f"{type(error).__name__}: {error}"
        raise bad_root(storage.where, problem, ALLOW_WRITES) from error
