"""`ArrayChunks`: the zarr library encodes and decodes the chunks of the zarr form, on any `Storage`.

The library's own stores are not used: its store of local files has no fsync, and its store of URLs has none of the
retries and checks of `Storage`. The module imports the zarr library, which takes half a second: import it late.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import closing, contextmanager
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import zarr
from zarr.abc.store import Store
from zarr.core.buffer.cpu import NDBuffer
from zarr.storage import StorePath

from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.manifest.zarr_layout import Chunk, array_document, clipped
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.checksums import CRC_BYTES
from vescale_fsdp.layout.geometry import numel_of

T = TypeVar("T")


class ArrayChunks:
    """The chunks of one tensor's array, which the zarr library encodes and decodes. Thread-safe.

    The array's metadata comes from the manifest, not from the array's ``zarr.json``.

    Args:
        threads: threads in which the storage is read and written, while the library's event loop runs codecs.
    """

    def __init__(self, storage: Storage, manifest: Manifest, index: int, threads: Executor) -> None:
        entry = manifest.entries[index]
        nbytes = numel_of(manifest.chunk_sizes[index]) * entry.itemsize
        self._shape = entry.shape
        self._store = _ChunkStore(storage, nbytes + CRC_BYTES, threads)
        document: Any = array_document(manifest, index)
        path = StorePath(self._store, manifest.array_paths[index])
        # Empty chunks are written, because a chunk that is lost would else be read as zeros.
        self._array = zarr.Array(zarr.AsyncArray(document, path, {"order": "C", "write_empty_chunks": True}))

    def write(self, name: str, chunk: Chunk, elements: npt.NDArray[np.uint8]) -> int:
        """Encode and write a chunk; durable on return.

        Args:
            name: the chunk's file.
            elements: bytes of all elements of the chunk's box; elements outside of the tensor are stored as zeros.

        Returns:
            The checksum that the crc32c codec appended.
        """
        values = elements.view(self._array.dtype).reshape(chunk.box.sizes)
        inside = clipped(chunk.box, self._shape)
        with _carried_errors():
            # The ellipsis keeps an array instead of a scalar where a tensor has no dims.
            self._array[(*inside.slices(), ...)] = values[(*inside.slices(inside.offsets), ...)]
        return self._store.checksums.pop(name)

    def read(self, name: str, chunk: Chunk, written: int, out: npt.NDArray[np.uint8]) -> None:
        """Read and decode a chunk.

        Args:
            name: the chunk's file.
            written: the checksum that `write` returned.
            out: memory for the bytes of the chunk's elements inside the tensor; unchanged after an error.

        Raises:
            ValueError: if the size or the checksum of the file is not the expected one.
            FileNotFoundError: if there is no file.
        """
        inside = clipped(chunk.box, self._shape)
        items = NDBuffer.from_numpy_array(out.view(self._array.dtype).reshape(inside.sizes))
        self._store.checksums[name] = written
        with _carried_errors():
            self._array.get_basic_selection(inside.slices(), out=items)


class _ChunkStore(Store):
    """A store of the zarr library over a `Storage`, for the chunks of one array: files of one size.

    Attributes:
        checksums: name -> the last bytes of a chunk, in which the codec stores the crc32c: of a chunk that was written,
            or is to be read.
    """

    supports_writes = True
    supports_partial_writes = False
    supports_deletes = False
    supports_listing = False

    def __init__(self, storage: Storage, nbytes: int, threads: Executor) -> None:
        super().__init__()
        self._storage, self._nbytes, self._threads = storage, nbytes, threads
        self.checksums: dict[str, int] = {}

    def __eq__(self, other: object) -> bool:
        return self is other

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        data: npt.NDArray[np.uint8] = await self._run(lambda: self._read(key))
        return prototype.buffer.from_array_like(data)

    async def set(self, key: str, value: Any) -> None:
        data = value.as_numpy_array()
        await self._run(lambda: self._storage.put(key, [data]))
        self.checksums[key] = _last_bytes(data)

    async def exists(self, key: str) -> bool:
        return await self._run(lambda: self._storage.exists(key))

    def _read(self, name: str) -> npt.NDArray[np.uint8]:
        """Read a chunk's file."""
        with closing(self._storage.open_file(name)) as reader:
            if reader.size_bytes != self._nbytes:  # compared before memory is allocated
                raise ValueError(f"{reader.size_bytes} bytes")
            data = np.empty(self._nbytes, dtype=np.uint8)
            reader.read_at(0, [data])
        stored, written = _last_bytes(data), self.checksums[name]
        # Compared here, because the codec compares the chunk with its own last bytes alone.
        if stored != written:
            raise ValueError(
                f"crc32c {stored:08x} instead of {written:08x}, which the rank's file of this save has: the chunk is "
                "damaged, or another chunk, or the chunk of another save"
            )
        return data

    async def _run(self, work: Callable[[], T]) -> T:
        """Run blocking work in a thread, so that the library's event loop serves other chunks meanwhile.

        Raises:
            _CarriedError: with the error of the work. The library has a meaning of its own for some errors, such as a
                missing file, and a KeyboardInterrupt would end its event loop.
        """

        def attempt() -> tuple[T | None, BaseException | None]:
            try:
                return work(), None
            except BaseException as error:  # noqa: BLE001  raised by `_carried_errors`
                return None, error

        result, error = await asyncio.get_running_loop().run_in_executor(self._threads, attempt)
        if error is not None:
            raise _CarriedError(error)
        return result  # type: ignore[return-value]

    # The library calls these methods for nodes and for parts of chunks, but not for whole chunks.

    async def get_partial_values(self, prototype: Any, key_ranges: Iterable[Any]) -> list[Any]:
        raise NotImplementedError

    async def set_partial_values(
        self, key_start_values: Iterable[Any]
    ) -> None:  # abstract in older versions of zarr
        raise NotImplementedError

    async def delete(self, key: str) -> None:
        raise NotImplementedError

    def list(self) -> AsyncIterator[str]:
        raise NotImplementedError

    def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        raise NotImplementedError

    def list_dir(self, prefix: str) -> AsyncIterator[str]:
        raise NotImplementedError


def _last_bytes(data: npt.NDArray[np.uint8]) -> int:
    """Return the checksum at the end of an encoded chunk."""
    return int.from_bytes(data[-CRC_BYTES:].tobytes(), "little")


class _CarriedError(Exception):
    """Carries an error of a storage through the zarr library."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


@contextmanager
def _carried_errors() -> Iterator[None]:
    """Raise the error of the storage in place of the `_CarriedError` that carries it."""
    try:
        yield
    except _CarriedError as carried:
        raise carried.error from carried.error.__cause__
