"""Reading this project's own checkpoints: the manifest says which bytes of which file are which elements.

Files are those of ranks, or the chunks of zarr arrays with ranks' files for their checksums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from vescale_fsdp.checkpoint.loading.verified_rank_file import OpenRankFile
from vescale_fsdp.checkpoint.manifest.chunk_owners import Chunk
from vescale_fsdp.checkpoint.manifest.manifest import MANIFEST_NAME, Manifest
from vescale_fsdp.checkpoint.manifest.rank_file import RankFile
from vescale_fsdp.checkpoint.manifest.region import Region
from vescale_fsdp.checkpoint.manifest.state_tree import decode, split_name
from vescale_fsdp.checkpoint.manifest.zarr_layout import chunk_boxes, chunk_file, clipped
from vescale_fsdp.checkpoint.storage.base import Buffer, FileReader
from vescale_fsdp.conversion.source.checked_runs import CheckedRun
from vescale_fsdp.conversion.source.crc import CRC32C
from vescale_fsdp.conversion.source.source import Source, StoredValue, constant
from vescale_fsdp.conversion.source.stored_tensor import StoredChunk, StoredTensor, TensorInfo
from vescale_fsdp.conversion.state.nesting import flatten, name_of
from vescale_fsdp.conversion.store import Store
from vescale_fsdp.errors import CorruptCheckpointError
from vescale_fsdp.layout.dtypes import dtype_from_torch
from vescale_fsdp.layout.geometry import contiguous_strides, numel_of

if TYPE_CHECKING:
    from vescale_fsdp.checkpoint.loading.zarr_chunks import ChunkTables

__all__ = ["array_problems", "open_native", "rank_files", "read_manifest"]

_MAX_OPEN_FILES = 64
_CRC_BYTES = 4


class _TensorLeaf(NamedTuple):
    place: int


class _PerRankLeaf(NamedTuple):
    name: str


def open_native(store: Store) -> Source:
    """Open a native checkpoint; reads the manifest and file sizes.

    Raises:
        CheckpointError: if a newer version wrote it.
        CorruptCheckpointError: if the manifest is damaged or a file is missing or has another size.
    """
    manifest = read_manifest(store)
    chunks = _pieces(store, manifest) if manifest.chunks is None else _array_chunks(store, manifest)
    state = decode(manifest.structure.tree, _leaf, store.url)
    nested = state if isinstance(state, Mapping) else {"state": state}
    tensors: dict[str, StoredTensor] = {}
    values: dict[str, StoredValue] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    omitted: list[str] = []
    for path, leaf in flatten(nested, lambda value: isinstance(value, (_TensorLeaf, _PerRankLeaf))).items():
        name = name_of(path)
        paths[name] = path
        if isinstance(leaf, _TensorLeaf):
            entry = manifest.entries[leaf.place]
            info = TensorInfo(name, entry.shape, dtype_from_torch(entry.dtype))
            tensors[name] = StoredTensor(info, tuple(chunks[leaf.place]))
        elif isinstance(leaf, _PerRankLeaf):
            omitted.append(name)
        else:
            values[name] = constant(leaf)
    form = "native" if manifest.chunks is None else "zarr"
    facts = {"saved by ranks": str(manifest.world_size), "save id": manifest.save_id, "form": form}
    # Files are opened when read; few are kept, since each holds its header and checksums.
    files = rank_files(store, manifest)
    checked = lru_cache(maxsize=_MAX_OPEN_FILES)(lambda name: files[name]() if name in files else None)
    return Source(
        "native",
        store,
        tensors,
        values,
        paths,
        facts,
        omitted=tuple(omitted),
        layouts=manifest.structure.layouts,
        checked=checked,
    )


def read_manifest(store: Store) -> Manifest:
    """The manifest of a native checkpoint; raises as `open_native`."""
    return Manifest.from_bytes(store.read_file(MANIFEST_NAME), where=f"{store.url}/{MANIFEST_NAME}")


def rank_files(store: Store, manifest: Manifest) -> dict[str, Callable[[], OpenRankFile]]:
    """Every rank's file by name, and how to open it: proven against the manifest, able to prove stripes."""

    def open_rank(rank: int) -> OpenRankFile:
        return OpenRankFile(_Files(store), RankFile(manifest, rank))

    return {manifest.file_name(rank): partial(open_rank, rank) for rank in range(manifest.world_size)}


def array_problems(store: Store, manifest: Manifest) -> Iterator[tuple[str, str | None, int]]:
    """Every file of the zarr form's arrays, what is wrong with it, and bytes that were checked; nothing for the native
    form."""
    if manifest.chunks is not None:
        from vescale_fsdp.checkpoint.loading.zarr_chunks import verify_arrays

        yield from verify_arrays(_tables(store, manifest))


def _tables(store: Store, manifest: Manifest) -> ChunkTables:
    from vescale_fsdp.checkpoint.loading.zarr_chunks import ChunkTables  # numpy, which others do without

    return ChunkTables(_Files(store), manifest)


class _Files:
    """A store as `OpenRankFile` wants it."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def where(self) -> str:
        return self._store.url

    def open_file(self, name: str) -> FileReader:
        return _Reader(self._store, name)


class _Reader(FileReader):
    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name = store, name
        self._size_bytes = store.required_size(name)

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def read_at(self, offset_bytes: int, buffers: Sequence[Buffer]) -> None:
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            self._store.read_into(self._name, offset_bytes, view)
            offset_bytes += len(view)

    def close(self) -> None:
        """The store keeps what is open."""


def _leaf(node: Mapping[str, Any]) -> Any:
    if node["$"] == "tensor":
        return _TensorLeaf(int(node["i"]))
    return _PerRankLeaf(str(node["name"])) if node["$"] == "per_rank" else None


def _pieces(store: Store, manifest: Manifest) -> list[list[StoredChunk]]:
    """The pieces of every tensor in ranks' files, each once.

    Where every replica stores all (a node's memory), one does, and files of other nodes may be elsewhere.
    """
    found: list[dict[Region, list[StoredChunk]]] = [{} for _ in manifest.entries]
    lost: list[RankFile] = []
    for rank in range(manifest.world_size):
        file = RankFile(manifest, rank)
        if manifest.split_bytes is None and store.size(file.name) is None:
            lost.append(file)
            continue
        if store.required_size(file.name) != file.total_bytes:
            raise _wrong_size(store, file.name, file.total_bytes)
        for piece in file.pieces:
            itemsize = manifest.entries[piece.place].itemsize
            if piece.region not in found[piece.place]:  # the boxes of a piece follow each other in the file
                found[piece.place][piece.region] = [
                    StoredChunk(box, file.name, piece.start_bytes + first * itemsize, box.numel * itemsize)
                    for box, first in piece.region.pieces()
                ]
    for file in lost:
        if any(piece.region not in found[piece.place] for piece in file.pieces):
            store.required_size(file.name)  # says that it is missing
    return [[chunk for part in parts.values() for chunk in part] for parts in found]


def _wrong_size(store: Store, name: str, nbytes: int) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        "A file of the checkpoint has the wrong size.",
        expected=f"{nbytes} bytes",
        got=f"{store.size(name)} bytes",
        where=f"{store.url}/{name}",
        todo="copy the file again from where it was saved, or use an older checkpoint",
    )


def _array_chunks(store: Store, manifest: Manifest) -> list[list[StoredChunk]]:
    """The chunks of every tensor's array."""
    assert manifest.chunks is not None
    found: list[list[StoredChunk]] = [[] for _ in manifest.entries]
    for file in map(partial(RankFile, manifest), range(manifest.world_size)):
        if store.required_size(file.name) != file.total_bytes:
            raise _wrong_size(store, file.name, file.total_bytes)
    tables = _tables(store, manifest)
    for places in manifest.places_by_name.values():
        entry, sizes = manifest.entries[places[0]], manifest.chunks[places[0]]
        nbytes = numel_of(sizes) * entry.itemsize
        for box in chunk_boxes(entry.shape, sizes):
            name = chunk_file(manifest, places[0], box)
            if store.required_size(name) != nbytes + _CRC_BYTES:
                raise _wrong_size(store, name, nbytes + _CRC_BYTES)
            where = f"tensor {name_of(split_name(entry.name))} in {store.url}/{name}"
            saved = partial(_saved_crc, tables, store, Chunk(places[0], box), nbytes)
            run = CheckedRun(name, 0, nbytes, CRC32C, saved, where)
            strides = contiguous_strides(sizes)
            found[places[0]].append(
                StoredChunk(clipped(box, entry.shape), name, 0, nbytes, strides, checked=run)
            )
        for place in places[1:]:  # further descriptions of the same tensor
            found[place] = found[places[0]]
    return found


def _saved_crc(tables: ChunkTables, store: Store, chunk: Chunk, nbytes: int) -> int:
    """What a chunk was written with: as its owner's file says, else as it says itself."""
    written = tables.checksum(chunk)
    if written is None:
        file = chunk_file(tables.manifest, *chunk)
        written = int.from_bytes(store.read(file, nbytes, _CRC_BYTES), "little")
    return written
