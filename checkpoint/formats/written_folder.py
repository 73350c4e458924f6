"""A folder that ranks write together and that becomes valid in one step: by a rename, or by its decisive file.

    local          .name.saving/..       renamed to `name` after all ranks have written
    object store   name/.. and a marker  without `config.json` (or `.metadata`), which is written last

On disks, an old folder stays whole until the rename, even if ranks are killed. Where folders cannot be renamed, files
are moved one by one, the decisive one last (`checkpoint.storage.file_system`). Object stores rename nothing: an old
folder there is no longer valid once the first byte is written. Where our own readers
would accept a folder without its decisive file, a marker makes them refuse the folder.
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
    """The folder of a form's files.

    Args:
        final: the folder.
        kind: its kind, for messages.
        decisive: name of the file without which loaders refuse the folder.
        is_ours: takes a file's name; tells whether this kind of folder may contain it, so that it may be replaced.
        marker: name of a file that exists while the folder is written; empty if a missing ``decisive`` is enough.
    """

    final: Storage
    kind: str
    decisive: str
    is_ours: Callable[[str], bool]
    marker: str = ""

    @cached_property
    def working(self) -> Storage:
        """The storage that files are written to."""
        return self.final if self.final.in_order else self.final.beside(f".{self.final.location[-1]}.saving")

    def claim(self, held: ExitStack, *, overwrite: bool) -> None:
        """Refuse a folder that must not be replaced, then lock it."""
        self._prove_free(overwrite)
        self.working.check_not_planted()  # the name is predictable: another user may have made a link there
        with lock_errors(self.final):
            held.enter_context(self.working.lock())
        self._prove_free(overwrite)  # again: another job may have written before the lock was taken

    def _prove_free(self, overwrite: bool) -> None:
        if self.final.info("") is not None:
            raise self._refusal("a folder", "a file", "save to another path")
        names = [name for name in self.final.list_files() if name not in LOCK_NAMES]
        foreign = [name for name in names if name != self.marker and not self.is_ours(name)]
        if foreign:
            todo = "save to another path, or move the other files away: the whole folder is replaced"
            raise self._refusal(f"nothing, or only files of {self.kind}", some(foreign), todo)
        # A folder that a killed save left may be replaced.
        is_torn = self.marker in names if self.marker else self.decisive not in names
        if names and not overwrite and not is_torn:
            todo = "save to another path, or pass overwrite=True"
            raise self._refusal("an empty or new path", some(names), todo)

    def _refusal(self, expected: str, got: str, todo: str) -> CheckpointError:
        return CheckpointError(
            "The path already holds files.", expected=expected, got=got, where=self.final.where, todo=todo
        )

    def begin(self) -> None:
        """Before any rank writes: remove files of a killed attempt; in an object store, invalidate an old folder."""
        if not self.final.in_order:
            for name in self.working.list_folder(""):
                if name not in LOCK_NAMES:  # this save has locked the folder
                    self.working.remove(name)
        if self.marker:
            # Before the removal: our readers must not find a folder with neither marker nor decisive file.
            self.working.commit(self.marker, b"", replace=True)
        self.working.remove(self.decisive)

    def commit(self, closing: Sequence[ClosingFile], data_files: Sequence[str]) -> None:
        """After all ranks have written: write the small files and make the folder valid.

        Args:
            data_files: names of the files that ranks have written.
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
                _put(self.working, last)  # last: it makes the folder valid
                return
            # Durable before the rename.
            for folder in {name.rpartition("/")[0] for name in self.working.list_files()} | {""}:
                self.working.sync_folder(folder)
        except BaseException as error:  # Ctrl-C too: the note says what the path has
            error.add_note(f"nothing was committed; {self._left()}")
            if not self.final.in_order:
                self.working.remove("")
            raise
        try:
            self.final.take_over(self.working, self.decisive)
            self.final.sync_folder("")
            for name in LOCK_NAMES:  # renamed together with the folder
                self.final.remove(name)
        except BaseException as error:  # as above
            error.add_note(
                f"{self.final.where} has all old files or all new files, or it has no {self.decisive}"
            )
            raise

    def _left(self) -> str:
        """The state of the path after a failed save, for messages."""
        if self.final.in_order:
            return f"{self.final.where} has no {self.decisive}, and cannot be loaded, until a save succeeds"
        return f"{self.final.where} is unchanged"

    def _remove_stale(self, new: Collection[str]) -> None:
        """Remove old files of the same kind that are not in the new folder."""
        for name in self.final.list_files():
            if name not in new and self.is_ours(name):
                self.final.remove(name)

    def clear_away(self) -> None:
        """After a failure: remove written files from disks; in object stores they stay, and lack ``decisive``."""
        if not self.final.in_order:
            self.working.remove("")


def _put(storage: Storage, file: ClosingFile) -> None:
    """Write a small file, durably."""

    def write() -> None:
        with storage.create(file.name, 0) as out:  # 0: its size is not known yet
            offset = 0
            for piece in file.pieces():
                out.write_at(offset, [piece])
                offset += len(piece)

    storage.retrying(write)
