"""Arrays of zarr hierarchies of either version: their metadata files, and the chunks that are stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from vescale_fsdp.checkpoint.checksums import CRC32C, CRC_BYTES
from vescale_fsdp.checkpoint.manifest.zarr_layout import chunk_boxes, clipped
from vescale_fsdp.checkpoint.moves.stored_tensor import UNCHECKED_BYTES, StoredChunk, StoredTensor, TensorInfo
from vescale_fsdp.checkpoint.moves.verified_reads import CheckedRange
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.errors import CorruptCheckpointError
from vescale_fsdp.layout.foreign_json import parse_json
from vescale_fsdp.layout.geometry import Box, contiguous_strides, whole_box

_MANY_CHUNKS = 2**16  # of an array; fewer are looked for one by one
_MOST_ABSENT = 64  # chunks of an array with many for each one that is stored

# Errors of reading metadata that lacks something.
DAMAGE = (AttributeError, IndexError, KeyError, TypeError, ValueError)


def read_metadata(store: Storage, file: str, version: int = 3) -> dict[str, Any]:
    """The content of a metadata file.

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
    """The error for a hierarchy that cannot be read, because of this file."""
    return CorruptCheckpointError(
        "A zarr hierarchy cannot be used.",
        expected="zarr metadata of regular arrays, and chunks that their codecs decode",
        got=f"{type(error).__name__}: {error}",
        where=f"{store.where}/{file}",
        todo="copy the hierarchy again from where it was made",
    )


def chunk_file_name(node: str, separator: str, prefix: tuple[str, ...], chunk: Box) -> str:
    """The file of a chunk of the array in folder ``node``."""
    index = (str(o // c) for o, c in zip(chunk.offsets, chunk.sizes, strict=True))
    key = separator.join((*prefix, *index)) or "0"  # of an array without dims
    return f"{node}/{key}" if node else key


def stored_array(
    store: Storage,
    info: TensorInfo,
    chunk: tuple[int, ...],
    node: str,
    files: Collection[str],
    file_of: Callable[[Box], str],
    *,
    is_plain: bool,
    has_crc: bool = False,
) -> StoredTensor:
    """The chunks of an array.

    Args:
        chunk: sizes of each chunk.
        node: the array's folder.
        files: all files of the hierarchy. A chunk without a file is zeros.
        is_plain: whether chunk files are the items' bytes, row-major; other arrays get one nominal chunk.
        has_crc: whether each chunk is followed by its crc32c.

    Raises:
        ValueError: for chunks without elements, or if nearly all of very many chunks are absent.
        CorruptCheckpointError: if a chunk's file has another size.
    """
    shape = info.shape
    if not info.numel:
        return StoredTensor(info, ())
    if not is_plain:
        nbytes = _present_bytes(info, chunk, node, files)
        return StoredTensor(info, (StoredChunk(whole_box(shape), "", 0, nbytes),))
    if 0 in chunk:
        raise ValueError(f"chunks of shape {chunk}")
    if not _has_chunks(shape, chunk, node, files):
        return StoredTensor(info, (StoredChunk(whole_box(shape), "", 0, 0),))
    nbytes, strides = math.prod(chunk) * info.dtype.itemsize, contiguous_strides(chunk)
    chunks = []
    for box in chunk_boxes(shape, chunk):
        file, inside, checked = file_of(box), clipped(box, shape), None
        if file not in files:
            chunks.append(StoredChunk(inside, "", 0, 0, strides))
            continue
        store.check_size(file, nbytes + (CRC_BYTES if has_crc else 0))
        if has_crc:
            saved = partial(stored_crc, store, file, nbytes)
            checked = CheckedRange(
                file, 0, nbytes, CRC32C, saved, f"tensor {info.name} in {store.where}/{file}"
            )
        chunks.append(StoredChunk(inside, file, 0, nbytes, strides, checked=checked))
    return StoredTensor(info, tuple(chunks))


def stored_crc(store: Storage, file: str, nbytes: int) -> int:
    """The crc32c at the end of a chunk's file."""
    return int.from_bytes(store.read(file, nbytes, CRC_BYTES), "little")


def _has_chunks(shape: tuple[int, ...], chunk: tuple[int, ...], node: str, files: Collection[str]) -> bool:
    """Whether an array may have stored chunks; False only if it is large and has none.

    Raises:
        ValueError: if nearly all of its many chunks are absent: listing them has no bound in what is stored.
    """
    cells = math.prod(-(-size // each) for size, each in zip(shape, chunk, strict=True))
    if cells <= _MANY_CHUNKS:
        return True
    count = _num_files(node, files)
    if cells > _MANY_CHUNKS + _MOST_ABSENT * count and count:
        raise ValueError(f"{cells} chunks of which {count} are stored")
    return count > 0


def _present_bytes(info: TensorInfo, chunk: tuple[int, ...], node: str, files: Collection[str]) -> int:
    """Decoded bytes of an array's stored chunks; of a small array, all its bytes."""
    if info.nbytes <= UNCHECKED_BYTES:
        return info.nbytes
    return min(info.nbytes, _num_files(node, files) * math.prod(chunk) * info.dtype.itemsize)


def _num_files(node: str, files: Collection[str]) -> int:
    """Stored chunks of an array: all files of its folder except its metadata."""
    folder = f"{node}/" if node else ""
    inside = (name for name in files if name.startswith(folder))
    return sum(not name.rpartition("/")[2].startswith(("zarr.json", ".z")) for name in inside)
