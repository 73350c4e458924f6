"""Pointers of git-lfs: the hundred bytes that stand for a file until git-lfs fetches it."""

from __future__ import annotations

from collections.abc import Iterable

from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.errors import ConversionError, some

_POINTER = b"version https://git-lfs.github.com/spec/"
_POINTER_BYTES = range(100, 301)


def refuse_pointers(store: Storage, files: Iterable[str], cause: Exception | None = None) -> None:
    """Refuse files whose contents git-lfs has not fetched yet.

    Args:
        cause: what such a file was taken for.

    Raises:
        ConversionError: naming them, and what fetches them.
    """
    small = (file for file in files if (store.size(file) or 0) in _POINTER_BYTES)
    pointers = [file for file in small if store.read(file, 0, len(_POINTER)) == _POINTER]
    if pointers:
        raise ConversionError(
            "These files are pointers of git-lfs, not what they point to.",
            expected="the files themselves",
            got=some(pointers),
            where=store.where,
            todo="fetch them with: git lfs pull, or download the repository with: hf download",
        ) from cause
