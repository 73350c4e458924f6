"""`ArrayChunks`: the zarr library encodes and decodes the chunks of the zarr form, on any `Storage`.

The library's own stores are not used: its store of local files has no fsync, and its store of URLs has none of the
retries and checks of `Storage`. The module imports the zarr library, which takes half a second: import it late.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import closing
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import zarr
from zarr.abc.store import Store
from zarr.core.buffer import default_buffer_prototype
from zarr.core.buffer.cpu import NDBuffer
from zarr.storage import MemoryStore, StorePath

from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.manifest.torch_dtypes import stored_dtype
from vescale_fsdp.checkpoint.manifest.zarr_layout import (
    Chunk,
    array_form,
    chunk_file,
    clipped,
    run_in_thread,
)
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.checksums import CRC_BYTES
from vescale_fsdp.layout.geometry import whole_box

T = TypeVar("T")


class ArrayChunks:
    """The chunks of a checkpoint's arrays, which the zarr library encodes and decodes. Thread-safe.

    Chunks go through the library's codec pipeline, not through its arrays, whose indexing takes as long as the codecs
    of a small chunk. The metadata come from the manifest, not from the arrays' ``zarr.json``.
    """

    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        self._storage, self._manifest = storage, manifest
        self._loops = _EventLoops()

    def write(self, chunk: Chunk, elements: npt.NDArray[np.uint8]) -> int:
        """Encode and write a chunk; durable on return.

        Args:
            elements: bytes of all elements of the chunk's box; elements outside of the tensor are zeros.

        Returns:
            The checksum that the crc32c codec appended.
        """
        array, file = self._array(chunk), _ChunkFile(self._storage)
        values = NDBuffer.from_numpy_array(elements.view(array.dtype).reshape(chunk.box.sizes))
        whole = whole_box(chunk.box.sizes).slices()
        self._loops.run(
            array.codec_pipeline.write([(*self._source(array, file, chunk), whole, whole, True)], values)
        )
        return file.checksum

    def read(self, chunk: Chunk, checksum: int, out: npt.NDArray[np.uint8]) -> None:
        """Read and decode a chunk.

        Args:
            checksum: the checksum that `write` returned.
            out: memory for the bytes of the chunk's elements inside the tensor; unchanged after an error.

        Raises:
            ValueError: if the size or the checksum of the file is not the expected one.
            FileNotFoundError: if there is no file.
        """
        array = self._array(chunk)
        file = _ChunkFile(self._storage, chunk.box.numel * array.dtype.itemsize + CRC_BYTES, checksum)
        inside = clipped(chunk.box, self._manifest.entries[chunk.tensor_index].shape).sizes
        items = NDBuffer.from_numpy_array(out.view(array.dtype).reshape(inside))
        slices = whole_box(inside).slices()
        self._loops.run(
            array.codec_pipeline.read([(*self._source(array, file, chunk), slices, slices, True)], items)
        )

    def close(self) -> None:
        """Close the event loops."""
        self._loops.close()

    def _array(self, chunk: Chunk) -> zarr.AsyncArray[Any]:
        """Return an array that has the codecs and the dtype of a chunk."""
        dtype = stored_dtype(self._manifest.entries[chunk.tensor_index].dtype)
        return _array_of_one_chunk(chunk.box.sizes, dtype.zarr_name)

    def _source(self, array: zarr.AsyncArray[Any], file: _ChunkFile, chunk: Chunk) -> tuple[StorePath, Any]:
        """Return the path and the description of a chunk, as the library's codec pipeline takes them."""
        path = StorePath(file, chunk_file(self._manifest, *chunk))
        first = (0,) * len(chunk.box.sizes)
        return path, array.metadata.get_chunk_spec(first, array.config, default_buffer_prototype())


@lru_cache(maxsize=1024)  # a model has few shapes; the library takes 1 ms for each
def _array_of_one_chunk(sizes: tuple[int, ...], dtype: str) -> zarr.AsyncArray[Any]:
    """Return an array of one chunk."""
    document: Any = array_form(sizes, sizes, dtype)
    # Empty chunks are written, because a chunk that is lost would else be read as zeros.
    options: Any = {"order": "C", "write_empty_chunks": True}
    return zarr.AsyncArray(document, StorePath(MemoryStore()), options)


class _EventLoops:
    """Event loops for the library's coroutines, in the threads that call `run`. Thread-safe.

    The library's own event loop runs in one thread. Two threads that wait for each other at every chunk take several
    times as long as the codecs of a small chunk.
    """

    def __init__(self) -> None:
        self._idle: deque[asyncio.AbstractEventLoop] = deque()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end."""
        if _is_in_event_loop():
            return run_in_thread(coroutine)
        try:
            loop = self._idle.pop()
        except IndexError:
            # No `asyncio.Runner`, which sets a signal handler for each coroutine: in the main thread, this takes 1 ms.
            loop = asyncio.new_event_loop()
        try:
            return loop.run_until_complete(coroutine)
        except BaseException:  # Ctrl-C too, which leaves tasks
            if left := asyncio.all_tasks(loop):
                for task in left:
                    task.cancel()
                loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            raise
        finally:
            self._idle.append(loop)

    def close(self) -> None:
        """Close all loops. No thread is in `run`."""
        while self._idle:
            self._idle.pop().close()


def _is_in_event_loop() -> bool:
    """Return whether an event loop runs in this thread, such as a notebook's."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class _ChunkFile(Store):
    """A store of the zarr library over a `Storage`, for one chunk of an array.

    Attributes:
        nbytes: size of the file.
        checksum: the last bytes of the file, in which the codec stores the crc32c. Both are of the chunk that was
            written, or is to be read.
    """

    supports_writes = True
    supports_partial_writes = False
    supports_deletes = False
    supports_listing = False

    def __init__(self, storage: Storage, nbytes: int = 0, checksum: int = 0) -> None:
        super().__init__()
        self._storage, self.nbytes, self.checksum = storage, nbytes, checksum

    def __eq__(self, other: object) -> bool:
        return self is other

    # Storage is read and written in the event loop's thread: each loop runs a single coroutine.

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        return prototype.buffer.from_array_like(self._read(key))

    async def set(self, key: str, value: Any) -> None:
        data = value.as_numpy_array()
        self._storage.put(key, [data])
        self.nbytes, self.checksum = len(data), _last_bytes(data)

    async def exists(self, key: str) -> bool:
        return self._storage.exists(key)

    def _read(self, name: str) -> npt.NDArray[np.uint8]:
        """Read the chunk's file."""
        with closing(self._storage.open_file(name)) as reader:
            if reader.size_bytes != self.nbytes:  # compared before memory is allocated
                raise ValueError(f"{reader.size_bytes} bytes")
            data = np.empty(self.nbytes, dtype=np.uint8)
            reader.read_at(0, [data])
        stored = _last_bytes(data)
        # Compared here, because the codec compares the chunk with its own last bytes alone.
        if stored != self.checksum:
            raise ValueError(
                f"crc32c {stored:08x} instead of {self.checksum:08x}, which the rank's file of this save has: the "
                "chunk is damaged, or another chunk, or the chunk of another save"
            )
        return data

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
