"""Reading the zarr form: whole chunks, whose crc32c is compared before they are copied into tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch

from vescale_fsdp.checkpoint.formats.native.read import Reads
from vescale_fsdp.checkpoint.formats.native.targets import LoadTarget, sinks_of
from vescale_fsdp.checkpoint.formats.zarr.chunks import ChunkTables, read_chunk
from vescale_fsdp.checkpoint.manifest.region import Region, overlaps
from vescale_fsdp.checkpoint.manifest.zarr_layout import Chunk, chunks_of
from vescale_fsdp.checkpoint.storage.base import Storage


class _ChunkRead(NamedTuple):
    """A chunk and a region that it has a part of."""

    chunk: Chunk
    wanted: Region
    target: LoadTarget


class ZarrReads(Reads):
    """Reads of the zarr form, chunk by chunk."""

    def __init__(self, storage: Storage, tables: ChunkTables) -> None:
        super().__init__(storage)
        self._tables = tables
        self._reads: list[_ChunkRead] = []

    def ask(self, index: int, region: Region, tensor: torch.Tensor) -> LoadTarget:
        target, manifest = LoadTarget(tensor), self._tables.manifest
        index = manifest.indices_by_name[manifest.entries[index].name][0]
        self._reads += [_ChunkRead(chunk, region, target) for chunk in chunks_of(manifest, index, region)]
        return target

    def open(self) -> None:
        """A chunk's file is opened when it is read."""

    def verify(self) -> None:
        chunks = dict.fromkeys(read.chunk for read in self._reads)
        size = sum(map(self._size, chunks))
        self._map("verifying", lambda chunk: len(read_chunk(self._tables, chunk)), list(chunks), size)

    def run(self, *, verify: bool) -> None:
        """Whole chunks are read, so they are verified in any case."""
        size = sum(self._size(read.chunk) for read in self._reads)
        self._map("loading", self._read, self._reads, size)

    def close(self) -> None:
        """A chunk's file is closed when it has been read."""

    def _size(self, chunk: Chunk) -> int:
        return chunk.box.numel * self._tables.manifest.entries[chunk.tensor_index].itemsize

    def _read(self, read: _ChunkRead) -> int:
        data, whole = read_chunk(self._tables, read.chunk), read.chunk.region
        for share in overlaps(whole, read.wanted):
            for sink in sinks_of(share, 0, read.target, max_gap_bytes=0):
                sink.take(sink.start, data[sink.start : sink.stop])
        return len(data)
