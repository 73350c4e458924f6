"""Folders that were made on disk: a conversion that leaves nothing else takes them away again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_TRIES = 5  # another part that fails may remove a folder between our making and using it


class MadeFolders:
    """The folders of a store, and those it lies in, that were not there before.

    Args:
        root: the store's folder; None where there are no folders.
        sync: makes the names in a folder durable.
    """

    def __init__(self, root: Path | None = None, sync: Callable[[Path], object] = lambda _: None) -> None:
        self._root, self._sync = root, sync
        self._made: set[Path] = set()

    @property
    def levels(self) -> int:
        """How many of them are the root and those it lies in."""
        return len(self._made.intersection(self._upwards()))

    def adopt_levels(self, levels: int) -> None:
        """Count so many, from the root upwards, as made by us: an interrupted run did."""
        self._made.update(self._upwards()[:levels])

    def adopt_parents(self, files: Iterable[str]) -> None:
        """Count the folders between the root and these files as made by us."""
        if self._root:
            for file in files:
                self._made.update((self._root / file).parents[: file.count("/")])

    def _upwards(self) -> list[Path]:
        return [self._root, *self._root.parents] if self._root else []

    def using(self, folder: Path, action: Callable[[], T]) -> T:
        """Make the folder, with those it lies in, and call ``action``, which makes a file in it."""
        for _ in range(_TRIES - 1):
            with contextlib.suppress(FileNotFoundError):
                self.make(folder)
                return action()
        self.make(folder)
        return action()

    def make(self, folder: Path | None = None) -> None:
        """Make a folder, else the root, and those it lies in; the names of new ones are durable on return."""
        missing, at = [], folder or self._root
        while at is not None and not at.is_dir():
            missing.append(at)
            at = at.parent
        for absent in reversed(missing):
            try:
                absent.mkdir()
            except FileExistsError:
                if not absent.is_dir():
                    raise
            else:
                self._made.add(absent)
            self._sync(absent.parent)  # also where another process has made it and not synced yet

    def remove_empty(self) -> None:
        """Remove those that hold nothing."""
        for folder in sorted(self._made, key=lambda path: -len(path.parts)):
            with contextlib.suppress(OSError):  # it holds something, or another part removed it
                folder.rmdir()
