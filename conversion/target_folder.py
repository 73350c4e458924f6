"""A folder that a conversion fills: nothing in it has a final name until everything is written.

    state                     data files          other files
    before                    absent, or the old ones if overwriting
    while converting          .NAME.partial       -
    failed                    (removed)           -
    done                      NAME                old weights removed, index last

Object stores cannot rename: there each object appears whole when its upload ends, the index last; after a
failure the objects that did appear are removed again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from vescale_fsdp.conversion.store import LocalStore, OutputFile, Store, open_store
from vescale_fsdp.errors import ConversionError, explain

__all__ = ["TargetFolder"]


class TargetFolder:
    """An output folder, refused at once if writing there could harm anything.

    Args:
        url: local path or fsspec URL.
        source_url: where the source is, which the target must not touch.
        overwrite: whether a folder that has files already may be written to.

    Raises:
        ConversionError: if the target is over, inside or around the source, or not empty.
    """

    def __init__(self, url: str, *, source_url: str, overwrite: bool) -> None:
        self.url = url
        _refuse_overlap(url, source_url)
        self.store: Store = open_store(url)
        if isinstance(self.store, LocalStore) and self.store.root.is_file():
            raise ConversionError(_refusal(url, "a folder", "a file", "choose another target"))
        self.old_files = self.store.list_files()
        if self.old_files and not overwrite:
            some = ", ".join(self.old_files[:3])
            raise ConversionError(
                _refusal(
                    url,
                    "an empty or new folder",
                    f"{len(self.old_files)} files, such as {some}",
                    "choose another folder, or pass --overwrite to replace the weights in it",
                )
            )
        self._outputs: dict[str, OutputFile] = {}
        self._committed: list[str] = []

    def create(self, name: str) -> OutputFile:
        """Start a file of the result."""
        self._outputs[name] = self.store.create(name)
        return self._outputs[name]

    def add_file(self, name: str, data: bytes) -> None:
        """A small file of the result, whole."""
        out = self.create(name)
        out.write_at(0, data)
        out.finish()

    def commit(self, is_stale: Callable[[str], bool]) -> None:
        """Publish all files in the order of creation, after removing old ones that ``is_stale`` names."""
        for name in self.old_files:
            if is_stale(name) and (name not in self._outputs or isinstance(self.store, LocalStore)):
                self.store.remove(name)
        for name in self._outputs:
            self.store.commit(name)
            self._committed.append(name)

    def abort(self) -> None:
        """Leave nothing of the result behind."""
        for name, out in self._outputs.items():
            out.abort()
            if not isinstance(self.store, LocalStore) and name not in self.old_files:
                self.store.remove(name)
        for name in self._committed:
            self.store.remove(name)


def _refusal(url: str, expected: str, got: str, todo: str) -> str:
    return explain("cannot write the result there", expected=expected, got=got, where=url, todo=todo)


def _refuse_overlap(url: str, source_url: str) -> None:
    target, source = _parts(url), _parts(source_url)
    shared = min(len(target), len(source))
    if target[:shared] == source[:shared]:
        raise ConversionError(
            _refusal(
                url,
                "a place outside of the source, and not around it",
                f"the source is {source_url}",
                "choose another target",
            )
        )


def _parts(url: str) -> tuple[str, ...]:
    """Comparable components; symbolic links resolved for local paths."""
    if "://" in url and not url.startswith("file://"):
        return tuple(part for part in url.split("/") if part)
    return Path(os.path.realpath(url.removeprefix("file://"))).parts
