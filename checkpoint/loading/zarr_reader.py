"""Reading the zarr form: whole chunks, their crc32c compared, then copied to where they belong."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from vescale_fsdp.checkpoint.loading.locate import Source
from vescale_fsdp.checkpoint.loading.read_plan import Reads
from vescale_fsdp.checkpoint.loading.targets import Target, sinks_of
from vescale_fsdp.checkpoint.loading.zarr_chunks import ChunkTables, read_chunk
from vescale_fsdp.checkpoint.manifest.chunk_owners import Chunk
from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.manifest.rank_file import FilePiece
from vescale_fsdp.checkpoint.manifest.region import Region, overlaps
from vescale_fsdp.checkpoint.manifest.zarr_layout import chunk_boxes
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.layout.geometry import Box, FlatRange

__all__ = ["ZarrReads"]


class _ChunkRead(NamedTuple):
    """A chunk and what is wanted of it."""

    chunk: Chunk
    wanted: Region
    target: Target


class ZarrReads(Reads):
    """Chunks to be read; `prove` checks them, `run` reads and copies them."""

    def __init__(self, storage: Storage, tables: ChunkTables) -> None:
        self._storage = storage
        self._tables = tables
        self._reads: list[_ChunkRead] = []

    def add(self, place: int, wanted: Region, target: Target) -> None:
        """Ask for a region of a tensor."""
        manifest = self._tables.manifest
        place = manifest.places_by_name[manifest.entries[place].name][0]
        assert manifest.chunks is not None
        for box in _boxes(manifest, place, wanted):
            self._reads.append(_ChunkRead(Chunk(place, box), wanted, target))

    def prove(self) -> None:
        """Read and check every chunk once; nothing is copied."""
        chunks = dict.fromkeys(read.chunk for read in self._reads)
        self._map(lambda chunk: read_chunk(self._tables, chunk), list(chunks))

    def run(self) -> None:
        """Read, check and copy."""
        self._map(self._read, self._reads)

    def _map(self, work, items) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
        with ThreadPoolExecutor(self._storage.read_threads, thread_name_prefix="checkpoint-zarr") as pool:
            for _ in pool.map(work, items):
                pass

    def _read(self, read: _ChunkRead) -> None:
        data = read_chunk(self._tables, read.chunk)
        place, box = read.chunk
        whole = Region(box, FlatRange(0, box.numel))
        piece = FilePiece(place, whole, 0, 0, len(data))
        for share in overlaps(whole, read.wanted):
            for sink in sinks_of(Source(0, piece, share), read.target, max_gap_bytes=0):
                sink.take(sink.start, data[sink.start : sink.stop])


def _boxes(manifest: Manifest, place: int, wanted: Region) -> list[Box]:
    """Chunks that share an element with a region, each once."""
    assert manifest.chunks is not None
    entry, chunks = manifest.entries[place], manifest.chunks[place]
    found: dict[Box, None] = {}
    for part, _ in wanted.pieces():
        for box in chunk_boxes(entry.shape, chunks, part):
            if box.intersect(part) is not None or not entry.shape:
                found[box] = None
    return list(found)
