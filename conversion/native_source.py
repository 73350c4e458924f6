"""Reading this project's own checkpoints: the manifest says which bytes of which rank's file are which
elements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

from vescale_fsdp.checkpoint.manifest import MANIFEST_NAME, Manifest
from vescale_fsdp.checkpoint.open_rank_file import OpenRankFile
from vescale_fsdp.checkpoint.rankfile import FilePiece, RankFile
from vescale_fsdp.checkpoint.storage import Buffer, FileReader
from vescale_fsdp.checkpoint.tree import decode
from vescale_fsdp.conversion.dtypes import dtype_from_torch
from vescale_fsdp.conversion.nesting import flatten, name_of
from vescale_fsdp.conversion.source import CheckedFile, Source, StoredValue, constant
from vescale_fsdp.conversion.store import Store
from vescale_fsdp.conversion.tensors import StoredChunk, StoredTensor, TensorInfo
from vescale_fsdp.errors import CorruptCheckpointError, explain

__all__ = ["open_native", "rank_files"]


_MAX_OPEN_FILES = 64


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
    manifest = _manifest(store)
    chunks = _chunks_by_place(store, manifest)
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
    facts = {"saved by ranks": str(manifest.world_size), "save id": manifest.save_id}
    layouts = manifest.structure.layouts
    return Source(
        "native",
        store,
        tensors,
        values,
        paths,
        facts,
        omitted=tuple(omitted),
        layouts=layouts,
        checked=_checked(store, manifest),
    )


def _manifest(store: Store) -> Manifest:
    return Manifest.from_bytes(store.read_file(MANIFEST_NAME), where=f"{store.url}/{MANIFEST_NAME}")


def rank_files(store: Store, manifest: Manifest | None = None) -> dict[str, Callable[[], OpenRankFile]]:
    """Every rank's file by name, and how to open it: proven against the manifest, able to prove stripes.

    Raises:
        CheckpointError, CorruptCheckpointError: as `open_native`; from the callables also.
    """
    found = manifest or _manifest(store)

    def open_rank(rank: int) -> OpenRankFile:
        return OpenRankFile(_Files(store), RankFile(found, rank))

    return {found.file_name(rank): partial(open_rank, rank) for rank in range(found.world_size)}


def _checked(store: Store, manifest: Manifest) -> Callable[[str], CheckedFile | None]:
    """Rank files by name, opened when read; few are kept, since each holds its header and checksums."""
    files = rank_files(store, manifest)
    return lru_cache(maxsize=_MAX_OPEN_FILES)(lambda name: files[name]())


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


def _chunks_by_place(store: Store, manifest: Manifest) -> list[list[StoredChunk]]:
    found: list[list[StoredChunk]] = [[] for _ in manifest.entries]
    for rank in range(manifest.world_size):
        file = RankFile(manifest, rank)
        size = store.required_size(file.name)
        if size != file.total_bytes:
            raise CorruptCheckpointError(
                explain(
                    "a rank's file has the wrong size",
                    expected=f"{file.total_bytes} bytes",
                    got=f"{size} bytes",
                    where=f"{store.url}/{file.name}",
                    todo="copy the file again from where it was saved, or use an older checkpoint",
                )
            )
        for piece in file.pieces:
            found[piece.place] += _chunks_of(manifest, file.name, piece)
    return found


def _chunks_of(manifest: Manifest, file: str, piece: FilePiece) -> Iterator[StoredChunk]:
    """The boxes of one piece; in the file they follow each other."""
    itemsize = manifest.entries[piece.place].itemsize
    for box, first in piece.region.pieces():
        yield StoredChunk(box, file, piece.start_bytes + first * itemsize, box.numel * itemsize)
