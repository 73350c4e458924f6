"""Reading the zarr form: whole chunks, their crc32c compared, then copied to where they belong."""

from __future__ import annotations

import struct
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import google_crc32c
import numpy as np

from vescale_fsdp.checkpoint.manifest import Manifest
from vescale_fsdp.checkpoint.rankfile import FilePiece
from vescale_fsdp.checkpoint.reading import Reads
from vescale_fsdp.checkpoint.region import Region, overlaps
from vescale_fsdp.checkpoint.sinks import Bytes, Target, sinks_of
from vescale_fsdp.checkpoint.sources import Source
from vescale_fsdp.checkpoint.storage import Storage
from vescale_fsdp.checkpoint.zarr_layout import array_json, array_path, chunk_boxes, chunk_name, group_files
from vescale_fsdp.errors import CorruptCheckpointError, explain
from vescale_fsdp.geometry import Box, FlatRange, numel_of

__all__ = ["ZarrReads", "verify_arrays"]

_CRC_BYTES = 4


class _ChunkRead(NamedTuple):
    """A chunk and what is wanted of it."""

    place: int
    box: Box
    wanted: Region
    target: Target


class ZarrReads(Reads):
    """Chunks to be read; `prove` checks them, `run` reads and copies them."""

    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        self._storage = storage
        self._manifest = manifest
        self._reads: list[_ChunkRead] = []

    def add(self, place: int, wanted: Region, target: Target) -> None:
        """Ask for a region of a tensor."""
        manifest = self._manifest
        place = manifest.places_by_name[manifest.entries[place].name][0]
        assert manifest.chunks is not None
        for box in _boxes(manifest, place, wanted):
            self._reads.append(_ChunkRead(place, box, wanted, target))

    def prove(self) -> None:
        """Read and check every chunk once; nothing is copied."""
        chunks = {(read.place, read.box): None for read in self._reads}
        self._map(lambda chunk: read_chunk(self._storage, self._manifest, *chunk), list(chunks))

    def run(self) -> None:
        """Read, check and copy."""
        self._map(self._read, self._reads)

    def _map(self, work, items) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
        with ThreadPoolExecutor(self._storage.read_threads, thread_name_prefix="checkpoint-zarr") as pool:
            for _ in pool.map(work, items):
                pass

    def _read(self, read: _ChunkRead) -> None:
        data = read_chunk(self._storage, self._manifest, read.place, read.box)
        whole = Region(read.box, FlatRange(0, read.box.numel))
        piece = FilePiece(read.place, whole, 0, 0, len(data))
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


def read_chunk(storage: Storage, manifest: Manifest, place: int, box: Box) -> Bytes:
    """A chunk's bytes, proven by its checksum.

    Raises:
        CorruptCheckpointError: if it is missing, of another size, or damaged; names file and tensor.
    """
    assert manifest.chunks is not None
    entry = manifest.entries[place]
    name = f"{array_path(manifest, place)}/{chunk_name(box, manifest.chunks[place])}"
    nbytes = numel_of(box.sizes) * entry.itemsize

    def corrupt(expected: str, got: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            explain(
                f"A chunk of tensor {entry.name} is not what was written.",
                expected=expected,
                got=got,
                where=f"{storage.where}/{name}",
                todo="restore an older step; verify(path) lists all that is wrong",
            )
        )

    try:
        reader = storage.open_file(name)
    except FileNotFoundError as error:
        raise corrupt(f"{nbytes + _CRC_BYTES} bytes", "no file") from error
    try:
        if reader.size_bytes != nbytes + _CRC_BYTES:
            raise corrupt(f"{nbytes + _CRC_BYTES} bytes", f"{reader.size_bytes} bytes")
        data = np.empty(nbytes, dtype=np.uint8)
        checksum = bytearray(_CRC_BYTES)
        reader.read_at(0, [data, checksum])
    finally:
        reader.close()
    (stored,) = struct.unpack("<I", checksum)
    found = google_crc32c.value(data.tobytes())
    if found != stored:
        raise corrupt(f"crc32c {stored:08x}", f"{found:08x}")
    return data


def verify_arrays(storage: Storage, manifest: Manifest) -> tuple[list[tuple[str, str]], int]:
    """(file, problem) of all arrays, and how many bytes were checked."""
    problems: list[tuple[str, str]] = []
    checked = 0

    def compare(name: str, expected: bytes, of: str) -> bool:
        try:
            if storage.read_small(name, limit_bytes=len(expected)) != expected:
                raise ValueError(f"{name} is not the metadata that follows from the manifest")
        except (OSError, ValueError) as error:
            problems.append((name, f"{of}: {error}"))
            return False
        return True

    for name, expected in group_files(manifest).items():
        compare(name, expected, "a group")
    for places in manifest.places_by_name.values():
        place = places[0]
        name = f"{array_path(manifest, place)}/zarr.json"
        if not compare(name, array_json(manifest, place), f"tensor {manifest.entries[place].name}"):
            continue  # which chunks it has is what is wrong
        assert manifest.chunks is not None
        for box in chunk_boxes(manifest.entries[place].shape, manifest.chunks[place]):
            try:
                checked += len(read_chunk(storage, manifest, place, box))
            except (CorruptCheckpointError, OSError) as error:
                problems.append((name, str(error)))
    return problems, checked
