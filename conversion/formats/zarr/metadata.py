"""JSON of zarr hierarchies, and the one error for what cannot be used of them."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from vescale_fsdp.checkpoint.moves.stored_tensor import UNCHECKED_BYTES, TensorInfo
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.errors import CorruptCheckpointError
from vescale_fsdp.layout.foreign_json import parse_json

_MANY_CHUNKS = 2**16  # of an array; fewer are looked for one by one
_MOST_ABSENT = 64  # chunks of an array with many for each one that is stored

DAMAGE = (AttributeError, IndexError, KeyError, TypeError, ValueError)
"""What metadata that lacks something makes its readers raise."""


def read_metadata(store: Storage, file: str, version: int = 3) -> dict[str, Any]:
    """What a metadata file says.

    Raises:
        CorruptCheckpointError: if it is no JSON, or of another version.
    """
    try:
        found = parse_json(store.read(file))
        if not isinstance(found, dict) or found.get("zarr_format") != version:
            raise ValueError(f"zarr_format is not {version} but {found!r:.60}")
    except ValueError as error:
        raise damaged(store, file, error) from error
    return found


def damaged(store: Storage, file: str, error: Exception) -> CorruptCheckpointError:
    """A hierarchy that cannot be used, because of this file."""
    return CorruptCheckpointError(
        "A zarr hierarchy cannot be used.",
        expected="zarr metadata of regular arrays, and chunks that their codecs decode",
        got=f"{type(error).__name__}: {error}",
        where=f"{store.where}/{file}",
        todo="copy the hierarchy again from where it was made",
    )


def has_chunks(shape: tuple[int, ...], chunk: tuple[int, ...], node: str, files: Collection[str]) -> bool:
    """Whether an array may have chunks that are stored; False only if it is large and has none.

    Raises:
        ValueError: if nearly all of its many chunks are absent: listing them has no bound in what is stored.
    """
    cells = _num_chunks(shape, chunk)
    if cells <= _MANY_CHUNKS:
        return True
    count = _num_files(node, files)
    if cells > _MANY_CHUNKS + _MOST_ABSENT * count and count:
        raise ValueError(f"{cells} chunks of which {count} are stored")
    return count > 0


def present_bytes(info: TensorInfo, chunk: tuple[int, ...], node: str, files: Collection[str]) -> int:
    """Bytes of an array that its stored chunks decode to; of a small array all of them."""
    if info.nbytes <= UNCHECKED_BYTES:
        return info.nbytes
    return min(info.nbytes, _num_files(node, files) * math.prod(chunk) * info.dtype.itemsize)


def _num_chunks(shape: tuple[int, ...], chunk: tuple[int, ...]) -> int:
    return math.prod(-(-size // each) for size, each in zip(shape, chunk, strict=True))


def _num_files(node: str, files: Collection[str]) -> int:
    """Chunks of an array that are stored: all files of its folder but those with its metadata."""
    folder = f"{node}/" if node else ""
    inside = (name for name in files if name.startswith(folder))
    return sum(not name.rpartition("/")[2].startswith(("zarr.json", ".z")) for name in inside)
