"""A folder that ranks write together, and that becomes valid in one step.

Loaders refuse a folder without its *decisive* file, such as `config.json` or `.metadata`.

    local disk     written as .name.saving/, which is renamed to name/ after all ranks have written
    object store   written as name/ without its decisive file, which is written last

On disks, an old folder stays complete until the rename, even if ranks are killed. Where folders cannot be renamed,
files are moved one by one, the decisive file last (`checkpoint.storage.file_system`). Object stores cannot rename:
there, an old folder is invalid from the first written byte on, or must not be replaced (``in_place``). If this
package's readers would accept a folder without its decisive file, a marker file makes them refuse the folder while it
is written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property

from vescale_fsdp.checkpoint.native.form import lock_errors
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.local import LOCK_NAMES
from vescale_fsdp.errors import CheckpointError, some

Pieces = Callable[[], Iterable[bytes]]  # the content of a small file


@dataclass(frozen=True)
class WrittenFolder:
    """The folder to which a form writes its files.

    Args:
        final: the folder when it is complete.
        kind: the kind of folder, for messages.
        decisive: name of the file without which loaders refuse the folder.
        is_ours: takes a file's name; returns whether this kind of folder may contain the file. A folder with any other
            file is never replaced.
        marker: name of a file that exists while the folder is written; empty if a missing ``decisive`` is enough.
        others: decisive files of the kinds of folders that this kind may replace.
        in_place: whether a valid folder in an object store, which cannot rename, may be replaced file by file.
        may_lose_old: whether such a folder is removed before the new files are written, if not ``in_place``; otherwise
            it is not replaced.
    """

    final: Storage
    kind: str
    decisive: str
    is_ours: Callable[[str], bool]
    marker: str = ""
    others: tuple[str, ...] = ()
    in_place: bool = True
    may_lose_old: bool = False

    @cached_property
    def working(self) -> Storage:
        """The storage that files are written to: `final` itself in an object store, which cannot rename."""
        return self.final if self.final.in_order else self.final.beside(f".{self.final.location[-1]}.saving")

    def claim(self, held: ExitStack, *, overwrite: bool) -> None:
        """Lock the folder. Raises CheckpointError if the folder must not be replaced."""
        self._prove_free(overwrite)  # before the lock, so that a refused folder gets no lock file
        self.working.check_not_planted()  # another user may have put a link at this predictable name
        with lock_errors(self.final):
            held.enter_context(self.working.lock())
        self._prove_free(overwrite)  # again: another job may have written before the lock was taken

    def _prove_free(self, overwrite: bool) -> None:
        """Raise CheckpointError if the folder must not be replaced."""
        if self.final.info("") is not None:
            raise self._refusal("a folder", "a file", "save to another path")
        names = [name for name in self.final.list_files() if name not in LOCK_NAMES]
        foreign = [name for name in names if name != self.marker and not self.is_ours(name)]
        if foreign:
            todo = "save to another path, or move the other files away: the whole folder is replaced"
            raise self._refusal(f"nothing, or only files of {self.kind}", some(foreign), todo)
        # The incomplete folder of a killed save may be replaced.
        is_torn = (
            self.marker in names if self.marker else not {self.decisive, *self.others}.intersection(names)
        )
        is_kept = self.final.in_order and not self.in_place and not self.may_lose_old
        if is_kept and not is_torn and names:
            got = "a checkpoint in a store that cannot rename folders: it would be lost if the save failed"
            todo = "save to another path, and remove this checkpoint afterward"
            raise self._refusal("a path without a checkpoint", got, todo)
        if names and not overwrite and not is_torn:
            todo = "save to another path, or pass overwrite=True"
            shown = sorted(names, key=lambda name: name not in (self.decisive, *self.others))
            raise self._refusal("an empty or new path", some(shown), todo)

    def _refusal(self, expected: str, got: str, todo: str) -> CheckpointError:
        """Return the error for a folder that must not be replaced."""
        return CheckpointError(
            "The path already holds files.", expected=expected, got=got, where=self.final.where, todo=todo
        )

    def begin(self) -> None:
        """Remove files of a killed attempt; in an object store, invalidate an old folder. Called before all writes."""
        if not self.final.in_order or not self.in_place:
            for name in (
                self.decisive,
                *self.others,
            ):  # first: without them, the files that are left are no checkpoint
                self.working.remove(name)
            self._empty()
        if self.marker:
            # Before the removal below: an incomplete folder must never lack both the marker and the decisive file.
            self.working.commit(self.marker, b"", replace=True)
        self.working.remove(self.decisive)

    def _empty(self) -> None:
        """Remove all files of the folder that is written."""
        for name in self.working.list_folder(""):
            if name not in LOCK_NAMES:  # these are the lock that this save holds
                self.working.remove(name)

    def commit(self, closing: Mapping[str, Pieces], data_files: Sequence[str]) -> None:
        """Write the small files and make the folder valid. Called after all ranks have written.

        Args:
            closing: name -> content of the small files.
            data_files: names of the files that ranks have written, except files in folders that ranks have synced.
        """
        try:
            for name, pieces in closing.items():
                if name != self.decisive:
                    _put(self.working, name, pieces)
            if self.final.in_order and self.in_place:
                self._remove_stale({*data_files, *closing, self.marker})
            # After all other changes, because this file makes the folder valid.
            _put(self.working, self.decisive, closing[self.decisive])
            if self.marker:  # removed last: at no time does an incomplete folder lack both files
                self.working.remove(self.marker)
            if self.final.in_order:
                return
            # File names must be durable before the rename makes the folder valid.
            for folder in {name.rpartition("/")[0] for name in (*closing, *data_files)} | {""}:
                self.working.sync_folder(folder)
        except BaseException as error:  # Ctrl-C too: the note says what the path contains
            error.add_note(f"nothing was committed; {self._left()}")
            if not self.final.in_order:
                self.working.remove("")
            raise
        try:
            self.final.take_over(self.working, self.decisive)
            self.final.sync_folder("")
            for name in LOCK_NAMES:  # the lock's files were renamed together with the folder
                self.final.remove(name)
        except BaseException as error:  # Ctrl-C too, as above
            error.add_note(
                f"{self.final.where} has all old files or all new files, or it has no {self.decisive}"
            )
            raise

    def _left(self) -> str:
        """Return the state of the path after a failed save, for messages."""
        if self.final.in_order:
            return f"{self.final.where} cannot be loaded until a save succeeds"
        return f"{self.final.where} is unchanged"

    def _remove_stale(self, new: Collection[str]) -> None:
        """Remove files of an old folder of the same kind whose names are not in ``new``."""
        for name in self.final.list_files():
            if name not in new and self.is_ours(name):
                self.final.remove(name)

    def clear_away(self) -> None:
        """Remove the written files after a failure.

        In an object store in which the written files have replaced an old folder, these files stay, as a folder that
        loaders refuse.
        """
        if not self.final.in_order:
            self.working.remove("")
        elif not self.in_place:
            self._empty()


def _put(storage: Storage, name: str, pieces: Pieces) -> None:
    """Write a small file; durable on return."""

    def write() -> None:
        with storage.create(name, 0) as out:  # 0: the size is unknown until the pieces are computed
            offset = 0
            for piece in pieces():
                out.write_at(offset, [piece])
                offset += len(piece)

    storage.retrying(write)
