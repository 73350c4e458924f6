"""Reading this project's own checkpoints: the manifest says which bytes of which rank's file are which
elements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from vescale_fsdp.checkpoint.manifest import MANIFEST_NAME, Manifest
from vescale_fsdp.checkpoint.rankfile import FilePiece, RankFile
from vescale_fsdp.checkpoint.tree import decode
from vescale_fsdp.conversion.dtypes import dtype_from_torch
from vescale_fsdp.conversion.nesting import flatten, name_of
from vescale_fsdp.conversion.source import Source, StoredValue
from vescale_fsdp.conversion.store import Store
from vescale_fsdp.conversion.tensors import StoredChunk, StoredTensor, TensorInfo
from vescale_fsdp.errors import CorruptCheckpointError, explain

__all__ = ["open_native"]


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
    manifest = Manifest.from_bytes(store.read_file(MANIFEST_NAME), where=f"{store.url}/{MANIFEST_NAME}")
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
            values[name] = _constant(leaf)
    facts = {"saved by ranks": str(manifest.world_size), "save id": manifest.save_id}
    layouts = manifest.structure.layouts
    return Source("native", store, tensors, values, paths, facts, omitted=tuple(omitted), layouts=layouts)


def _leaf(node: Mapping[str, Any]) -> Any:
    if node["$"] == "tensor":
        return _TensorLeaf(int(node["i"]))
    return _PerRankLeaf(str(node["name"])) if node["$"] == "per_rank" else None


def _constant(value: Any) -> StoredValue:
    return lambda: value


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
