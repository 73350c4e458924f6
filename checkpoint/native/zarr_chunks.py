"""`ChunkReader`: reads and verifies chunks of the zarr form.

The checksum that the crc32c codec appends to a chunk shows that the chunk is intact. The chunk table in the rank's file
of the chunk's owner (the rank that wrote it) shows that this is the right chunk, of this save. The module imports no
torch, so that conversions and `verify` start fast.
"""

from __future__ import annotations

import struct
import threading

import numpy as np
import numpy.typing as npt

from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.manifest.rank_file import RankFile
from vescale_fsdp.checkpoint.manifest.zarr_layout import Chunk, chunk_file, clipped, holders_of
from vescale_fsdp.checkpoint.native.rank_file_reader import RankFileReader
from vescale_fsdp.checkpoint.storage.base import ALL_PROBLEMS, RESTORE_OLDER, Storage
from vescale_fsdp.checkpoint.storage.checksums import CRC_BYTES
from vescale_fsdp.errors import CorruptCheckpointError

_SCRATCH_BYTES = 1 << 20  # 1 MiB: hashed while it is in the processor's cache


class ChunkTables:
    """The checksums of all chunks, from the ranks' files; each file is read once, when first needed. Thread-safe."""

    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        self.storage = storage
        self.manifest = manifest
        self._lock = threading.Lock()
        self._checksums: dict[Chunk, int] = {}  # of all chunks of the ranks whose files have been read

    def checksum(self, chunk: Chunk) -> int:
        """Return the crc32c with which a chunk was saved.

        Raises:
            CorruptCheckpointError: if the rank's file of the chunk's owner is missing or damaged.
        """
        with self._lock:  # held during the read, so that other threads do not read the same table
            if chunk not in self._checksums:
                owner, _ = holders_of(self.manifest, chunk)[0]
                self._checksums |= self._read(RankFile(self.manifest, owner))
            return self._checksums[chunk]

    def _read(self, file: RankFile) -> dict[Chunk, int]:
        """Read and verify the chunk table in a rank's file."""
        opened = RankFileReader(self.storage, file)
        try:
            # Only the stripes that contain the header and the chunk table, not those of per-rank values.
            for index in range(-(-file.blob_start // opened.stripe_bytes)):
                opened.verify_stripe(index, opened.hash_stripe(index, bytearray(_SCRATCH_BYTES)))
            table = bytearray(CRC_BYTES * len(file.chunks))
            opened.file.read_at(len(file.header), [table])
        except EOFError as error:  # the file became shorter after it was opened
            raise opened.corrupt("A file ended early.", f"{file.total_bytes} bytes", str(error)) from error
        finally:
            opened.file.close()
        return dict(zip(file.chunks, struct.unpack(f"<{len(file.chunks)}I", table), strict=True))


class ChunkReader:
    """Reads and verifies chunks. Thread-safe."""

    def __init__(self, tables: ChunkTables) -> None:
        # Imports the zarr library, which takes half a second that users of the tables alone need not wait.
        from vescale_fsdp.checkpoint.native.zarr_codec import ArrayChunks

        self._tables = tables
        self._arrays = ArrayChunks(tables.storage, tables.manifest)

    def read(self, chunk: Chunk, out: npt.NDArray[np.uint8] | None = None) -> npt.NDArray[np.uint8]:
        """Read a chunk, verify it, and return the bytes of its elements inside the tensor, row-major.

        Args:
            out: memory for the bytes, unchanged after an error; None to allocate memory.

        Raises:
            CorruptCheckpointError: if the chunk is missing or damaged, has another size, or belongs to another save;
                names the file and the tensor.
        """
        tables, manifest = self._tables, self._tables.manifest
        entry = manifest.entries[chunk.tensor_index]
        name = chunk_file(manifest, *chunk)
        if out is None:
            out = np.empty(clipped(chunk.box, entry.shape).numel * entry.itemsize, dtype=np.uint8)
        written = tables.checksum(chunk)
        try:
            self._arrays.read(chunk, written, out)
        # EOFError: the file became shorter meanwhile. ValueError: the path is no regular file, or has another size or
        # checksum.
        except (FileNotFoundError, NotADirectoryError, EOFError, ValueError) as error:
            absent = isinstance(error, FileNotFoundError | NotADirectoryError)
            raise CorruptCheckpointError(
                f"A chunk of tensor {entry.label} differs from what was saved.",
                expected=f"{chunk.box.numel * entry.itemsize + CRC_BYTES} bytes with crc32c {written:08x}",
                got="no file" if absent else str(error),
                where=f"{tables.storage.where}/{name}",
                todo=RESTORE_OLDER + ALL_PROBLEMS,
            ) from error
        return out

    def close(self) -> None:
        """Close what the zarr library needs."""
        self._arrays.close()
