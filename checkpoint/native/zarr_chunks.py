"""`read_chunk`: reads and verifies a chunk of the zarr form.

The checksum at the end of a chunk's file shows that the chunk is intact. The chunk table in the rank's file of the
chunk's owner (the rank that wrote it) shows that this is the right chunk, of this save. The module imports no torch, so
that conversions and `verify` start fast.
"""

from __future__ import annotations

import struct
import threading
from contextlib import closing

import numpy as np
import numpy.typing as npt

from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.manifest.rank_file import RankFile
from vescale_fsdp.checkpoint.manifest.zarr_layout import Chunk, chunk_file, holders_of
from vescale_fsdp.checkpoint.native.open_rank_file import OpenRankFile
from vescale_fsdp.checkpoint.storage.base import ALL_PROBLEMS, Storage
from vescale_fsdp.checkpoint.storage.checksums import CRC32C, CRC_BYTES
from vescale_fsdp.errors import CorruptCheckpointError
from vescale_fsdp.layout.geometry import numel_of

_SCRATCH_BYTES = 1 << 20  # 1 MiB: hashed while it is in the processor's cache


class ChunkTables:
    """The checksums of all chunks, from the ranks' files; each file is read once, when first needed. Thread-safe."""

    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        self.storage = storage
        self.manifest = manifest
        self._lock = threading.Lock()
        self._tables: dict[int, dict[Chunk, int]] = {}  # rank -> crc32c of each chunk that it wrote

    def checksum(self, chunk: Chunk) -> int:
        """Return the crc32c with which a chunk was saved.

        Raises:
            CorruptCheckpointError: if the rank's file of the chunk's owner is missing or damaged.
        """
        owner = holders_of(self.manifest, chunk)[0].rank
        with self._lock:  # held during the read, so that other threads do not read the same table
            if owner not in self._tables:
                self._tables[owner] = self._read(RankFile(self.manifest, owner))
            return self._tables[owner][chunk]

    def _read(self, file: RankFile) -> dict[Chunk, int]:
        """Read and verify the chunk table in a rank's file."""
        opened = OpenRankFile(self.storage, file)
        try:
            # Only the stripes that contain the header and the chunk table, not those of per-rank values.
            for index in range(-(-file.blob_start // opened.stripe_bytes)):
                opened.verify_stripe(index, opened.hash_stripe(index, bytearray(_SCRATCH_BYTES)))
            table = bytearray(CRC_BYTES * len(file.chunks))
            opened.reader.read_at(len(file.header), [table])
        except EOFError as error:  # the file became shorter after it was opened
            raise opened.corrupt("A file ended early.", f"{file.total_bytes} bytes", str(error)) from error
        finally:
            opened.reader.close()
        return dict(zip(file.chunks, struct.unpack(f"<{len(file.chunks)}I", table), strict=True))


def read_chunk(tables: ChunkTables, chunk: Chunk) -> npt.NDArray[np.uint8]:
    """Read a chunk, verify it, and return its bytes.

    Raises:
        CorruptCheckpointError: if the chunk is missing or damaged, has another size, or belongs to another save; names
            the file and the tensor.
    """
    storage, manifest = tables.storage, tables.manifest
    entry = manifest.entries[chunk.tensor_index]
    name = chunk_file(manifest, *chunk)
    nbytes = numel_of(chunk.box.sizes) * entry.itemsize

    def corrupt(expected: str, got: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"A chunk of tensor {entry.label} differs from what was saved.",
            expected=expected,
            got=got,
            where=f"{storage.where}/{name}",
            todo=f"restore an older step{ALL_PROBLEMS}",
        )

    size = f"{nbytes + CRC_BYTES} bytes"
    try:
        with closing(storage.open_file(name)) as reader:
            if reader.size_bytes != nbytes + CRC_BYTES:
                raise corrupt(size, f"{reader.size_bytes} bytes")
            data = np.empty(nbytes, dtype=np.uint8)
            checksum = bytearray(CRC_BYTES)
            reader.read_at(0, [data, checksum])
    except (FileNotFoundError, NotADirectoryError) as error:
        raise corrupt(size, "no file") from error
    # EOFError: the file became shorter meanwhile. ValueError: the path is no regular file.
    except (EOFError, ValueError) as error:
        raise corrupt(size, str(error)) from error
    (stored,) = struct.unpack("<I", checksum)
    actual = CRC32C.of(data)
    if actual != stored:
        raise corrupt(f"crc32c {stored:08x}", f"{actual:08x}")
    written = tables.checksum(chunk)
    if actual != written:
        raise corrupt(
            f"crc32c {written:08x}, from the rank's file of this save",
            f"{actual:08x}: intact, but another chunk, or the chunk of another save",
        )
    return data
