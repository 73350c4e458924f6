"""A folder that ranks write together and that appears whole: beside its place and renamed, or its deciding file last.

    local          .name.saving/..                     until all have written; then it is `name`, at once
    object store   name/..  and its marker             while `config.json` (or `.metadata`) is gone; it comes last

What was there stays whole on disks until the rename, whoever dies when. Disks that rename no folders get the files one
by one, the deciding one last (`checkpoint.storage.file_system`). Object stores rename nothing: an old folder there
is no longer valid once the first byte is written. A marker tells our own readers so, where they would take files
without the deciding one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property

from vescale_fsdp.checkpoint.formats.form import lock_errors
from vescale_fsdp.checkpoint.moves.plan import ClosingFile
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.local import LOCK_NAMES
from vescale_fsdp.errors import CheckpointError, some


@dataclass(frozen=True)
class WrittenFolder:
    """Where a form's files go.

    Args:
        final: the folder.
        kind: what it is to be, for messages.
        decisive: the file without which loaders refuse it.
        is_ours: whether a file may be part of such a folder, and so be replaced with it.
        marker: a file that is there while the folder is written; empty where ``decisive`` says enough.
    """

    final: Storage
    kind: str
    decisive: str
    is_ours: Callable[[str], bool]
    marker: str = ""

    @cached_property
    def working(self) -> Storage:
        """Where files are written."""
        return self.final if self.final.in_order else self.final.beside(f".{self.final.location[-1]}.saving")

    def claim(self, held: ExitStack, *, overwrite: bool) -> None:
        """Refuse a folder that must not be replaced, then keep other jobs out."""
        self._prove_free(overwrite)
        self.working.check_not_planted()
        with lock_errors(self.final):
            held.enter_context(self.working.lock())
        self._prove_free(overwrite)  # another job may have been at work

    def _prove_free(self, overwrite: bool) -> None:
        if self.final.info("") is not None:
            raise self._refusal("a folder", "a file", "save to another path")
        names = [name for name in self.final.list_files() if name not in LOCK_NAMES]
        foreign = [name for name in names if name != self.marker and not self.is_ours(name)]
        if foreign:
            todo = "save to another path, or move what is not of it away: the whole folder is replaced"
            raise self._refusal(f"nothing, or only files of {self.kind}", some(foreign), todo)
        is_torn = self.marker in names if self.marker else self.decisive not in names
        if names and not overwrite and not is_torn:
            todo = "save to another path, or pass overwrite=True"
            raise self._refusal("an empty or new path", some(names), todo)

    def _refusal(self, expected: str, got: str, todo: str) -> CheckpointError:
        return CheckpointError(
            "The path already holds something.", expected=expected, got=got, where=self.final.where, todo=todo
        )

    def begin(self) -> None:
        """Before any rank writes: nothing of an attempt that was killed is left, and what is old no longer counts."""
        if not self.final.in_order:
            for name in self.working.list_folder(""):
                if name not in LOCK_NAMES:
                    self.working.remove(name)
        if self.marker:
            self.working.commit(self.marker, b"", replace=True)
        self.working.remove(self.decisive)

    def commit(self, closing: Sequence[ClosingFile], data_files: Sequence[str]) -> None:
        """When all have written: the small files, and the folder is what it was written to be.

        Args:
            data_files: names of those that ranks have written.
        """
        try:
            *others, last = sorted(closing, key=lambda file: file.name == self.decisive)  # False sorts first
            assert last.name == self.decisive, f"{self.kind} is made valid by {self.decisive}"
            for file in others:
                _put(self.working, file)
            if self.final.in_order:
                self._remove_stale({*data_files, *(file.name for file in closing), self.marker})
            else:
                _put(self.working, last)
            if self.marker:
                self.working.remove(self.marker)
            if self.final.in_order:
                _put(self.working, last)
                return
            for folder in {name.rpartition("/")[0] for name in self.working.list_files()} | {""}:
                self.working.sync_folder(folder)
        except BaseException as error:
            error.add_note(f"nothing was committed; {self._left()}")
            if not self.final.in_order:
                self.working.remove("")
            raise
        try:
            self.final.take_over(self.working, self.decisive)
            self.final.sync_folder("")
            for name in LOCK_NAMES:  # renamed together with the folder
                self.final.remove(name)
        except BaseException as error:
            error.add_note(
                f"{self.final.where} is the old folder or the new one, whole, or holds no {self.decisive}"
            )
            raise

    def _left(self) -> str:
        """What has become of the path if a save fails."""
        if self.final.in_order:
            return f"{self.final.where} holds no {self.decisive}, without which nobody loads it, until a save succeeds"
        return f"{self.final.where} is as it was before"

    def _remove_stale(self, new: Collection[str]) -> None:
        """Old files of the same kind that the new folder does not have."""
        for name in self.final.list_files():
            if name not in new and self.is_ours(name):
                self.final.remove(name)

    def clear_away(self) -> None:
        """After a failure: nothing that was written is left on disks; on object stores nothing that counts."""
        if not self.final.in_order:
            self.working.remove("")


def _put(storage: Storage, file: ClosingFile) -> None:
    """Write a small file, durably."""

    def write() -> None:
        with storage.create(file.name, 0) as out:
            offset = 0
            for piece in file.pieces():
                out.write_at(offset, [piece])
                offset += len(piece)

    storage.retrying(write)
