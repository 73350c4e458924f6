"""Read arrays of zarr that Orbax keeps in OCDBT, a B-tree of all arrays in few files, through the package tensorstore.

    manifest.ocdbt                     the root of the tree; nodes and values are in d/
    ocdbt.process_0/d/                 nodes and values that one host wrote; the root refers to them
    ocdbt.process_0/manifest.ocdbt     one host's tree; it alone is not the checkpoint

    key                                value
    params.dense.kernel/.zarray        metadata of version 2; .../zarr.json in version 3
    params.dense.kernel/0.1            a chunk; .../c/0/1 in version 3

An array is read chunk by chunk, because tensorstore reads all chunks of a box at the same time, in memory that nobody
counts.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from typing import Any

import numpy as np

from vescale_fsdp.checkpoint.manifest.file_names import ZARR_NAME
from vescale_fsdp.checkpoint.manifest.zarr_layout import chunk_boxes, clipped
from vescale_fsdp.checkpoint.state.nesting import Path, name_of
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.conversion.engine.entries import Entries
from vescale_fsdp.conversion.engine.stored_tensor import (
    UNCHECKED_BYTES,
    StoredChunk,
    StoredTensor,
    TensorInfo,
)
from vescale_fsdp.conversion.formats.zarr.arrays import ARRAY_FILE, DAMAGE, LastChunk
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError
from vescale_fsdp.layout.dtypes import dtype_from_torch
from vescale_fsdp.layout.extent import Extent
from vescale_fsdp.layout.geometry import Box, whole_box

ROOT_FILE = "manifest.ocdbt"

_CACHE_BYTES = 8 << 20  # 8 MiB: nodes of the B-tree, which each chunk's read passes
_COPIES = 3  # of a chunk while it is read: as stored, decoded, and as tensorstore returns it
_READ_S = 600.0  # bound on one read, of a chunk or of the list of keys: a network file system may hang
_ERRORS = (*DAMAGE, OSError, RuntimeError)  # raised by tensorstore for damaged files


class OcdbtArrays:
    """The arrays of one OCDBT folder.

    Args:
        store: the storage of the checkpoint.
        folder: the folder of ``manifest.ocdbt`` in it: a path that ends in a slash, or "".

    Raises:
        ConversionError: if tensorstore is not installed, or the folder is not on a local disk.
        CorruptCheckpointError: if the tree cannot be read.
    """

    def __init__(self, store: Storage, folder: str) -> None:
        self.where = f"{store.where}/{folder}".rstrip("/")
        self._tensorstore = _package(self.where)
        self._last = LastChunk()
        if "://" in store.where:
            raise ConversionError(
                "OCDBT is read from local folders only.",
                expected="a local folder",
                got=store.where,
                where=self.where,
                todo="copy the checkpoint to a local disk",
            )
        base = {"driver": "file", "path": os.path.abspath(self.where) + "/"}
        self._tree = {"driver": "ocdbt", "base": base}
        self._context = self._tensorstore.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
        try:
            opened = self._tensorstore.KvStore.open(self._tree, context=self._context).result(_READ_S)
            self._keys = sorted(key.decode() for key in opened.list().result(_READ_S))
        except _ERRORS as error:
            raise _damaged(f"{self.where}/{ROOT_FILE}", error) from error

    def add(self, entries: Entries, node: str, path: Path) -> None:
        """Add an array to ``entries``.

        Args:
            node: the array's folder in the tree.
            path: keys in the nested state.

        Raises:
            ConversionError: if its dtype is unknown.
            CorruptCheckpointError: if the array is missing or damaged.
        """
        low, high = (bisect_left(self._keys, node + end) for end in ("/", "0"))  # "0" follows "/"
        keys = self._keys[low:high]
        where = f"{node} in {self.where}"
        try:
            driver = {f"{node}/{ARRAY_FILE}": "zarr", f"{node}/{ZARR_NAME}": "zarr3"}
            spec = {
                "driver": next(driver[key] for key in keys if key in driver),
                "kvstore": {**self._tree, "path": f"{node}/"},
                "cache_pool": {"total_bytes_limit": 0},  # of decoded chunks, which `_last` keeps instead
            }
            opened = self._tensorstore.open(spec, open=True, read=True, context=self._context).result(_READ_S)
            array = _ChunkedArray(opened, name_of(path), where, self._last)
        except StopIteration:
            raise _damaged(where, KeyError(node)) from None
        except _ERRORS as error:
            raise _damaged(where, error) from error
        entries.add_tensor(path, array.stored(len(keys)), array.read)
        entries.decoded[array.info.name] = _COPIES * array.chunk_bytes


class _ChunkedArray:
    """An array that tensorstore has opened. ``last`` is the chunk that a thread read last, of any array."""

    def __init__(self, opened: Any, name: str, where: str, last: LastChunk) -> None:
        self._opened, self._where, self._last = opened, where, last
        self.info = TensorInfo(name, tuple(opened.shape), dtype_from_torch(opened.dtype.name))
        self._chunk = tuple(opened.chunk_layout.read_chunk.shape or self.info.shape)  # None without dims
        self.chunk_bytes = math.prod(self._chunk) * self.info.dtype.itemsize

    def stored(self, num_keys: int) -> StoredTensor:
        """Return the tensor as one chunk without a file. ``num_keys`` is the number of keys below the array."""
        if not self.info.numel:
            return StoredTensor(self.info, ())
        nbytes = self.info.nbytes
        if nbytes > UNCHECKED_BYTES:  # metadata can claim any size
            written = self._opened.chunk_layout.write_chunk.shape or ()
            nbytes = min(nbytes, (num_keys - 1) * math.prod(written) * self.info.dtype.itemsize)
        return StoredTensor(self.info, (StoredChunk(whole_box(self.info.shape), Extent("", 0, nbytes)),))

    def read(self, box: Box) -> np.ndarray:
        """Read a box, chunk by chunk. Returns raw bits.

        Raises:
            CorruptCheckpointError: if a chunk cannot be read.
        """
        out = np.zeros(box.sizes, dtype=self.info.dtype.raw)
        for chunk in chunk_boxes(self.info.shape, self._chunk, box) if box.numel else ():
            inside = clipped(chunk, self.info.shape)
            if (part := inside.intersect(box)) is not None:
                # With the ellipsis, indexing a 0-d array returns an array instead of a scalar.
                target: tuple[Any, ...] = (*part.slices(box.offsets), ...)
                out[target] = self._read_chunk(inside)[part.slices(inside.offsets)]
        return out

    def _read_chunk(self, chunk: Box) -> np.ndarray:
        """Return a chunk; reads it unless this thread has read it last."""
        key, last = f"{self._where} {chunk.offsets}", self._last
        if last.file != key or last.values is None:
            last.file, last.values = "", None  # frees the memory before the next chunk is read
            try:
                values = self._opened[chunk.slices()].read().result(_READ_S)
            except _ERRORS as error:
                raise _damaged(self._where, error) from error
            # numpy cannot view a 0-d array as another dtype.
            flat = np.ascontiguousarray(values).reshape(-1).view(self.info.dtype.raw)
            last.values = flat.reshape(chunk.sizes)
            last.file = key  # set last, so that an error leaves nothing to reuse
        return last.values


def _package(where: str) -> Any:
    try:
        import tensorstore
    except ImportError as error:
        raise ConversionError(
            "This Orbax checkpoint is in the format OCDBT, which only the package tensorstore reads.",
            expected="the package tensorstore",
            got=f"{type(error).__name__}: {error}",
            where=where,
            todo="install it: pip install 'vescale-fsdp[orbax]'",
        ) from error
    return tensorstore


def _damaged(where: str, error: Exception) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        "An OCDBT checkpoint cannot be read.",
        expected="a tree of zarr arrays whose chunks tensorstore decodes",
        got=f"{type(error).__name__}: {error}",
        where=where,
    )
