"""Open native checkpoints as a `Source`; the manifest maps every element to its file and byte offset.

Tensors are stored in ranks' files, or in chunks of zarr arrays, whose checksums are in ranks' files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from vescale_fsdp.checkpoint.formats.native.open_rank_file import OpenRankFile
from vescale_fsdp.checkpoint.manifest.file_names import MANIFEST_NAME
from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.manifest.rank_file import RankFile
from vescale_fsdp.checkpoint.manifest.region import Region
from vescale_fsdp.checkpoint.manifest.state_tree import decode
from vescale_fsdp.checkpoint.manifest.structure import Structure
from vescale_fsdp.checkpoint.manifest.zarr_layout import Chunk, chunk_boxes, chunk_file, clipped, stored_crc
from vescale_fsdp.checkpoint.moves.source import Source, StoredValue, constant
from vescale_fsdp.checkpoint.moves.stored_tensor import StoredChunk, StoredTensor, TensorInfo
from vescale_fsdp.checkpoint.moves.verified_reads import CheckedRange
from vescale_fsdp.checkpoint.state.nesting import flatten, name_of
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.checksums import CRC32C, CRC_BYTES
from vescale_fsdp.layout.dtypes import dtype_from_torch
from vescale_fsdp.layout.geometry import contiguous_strides, numel_of

if TYPE_CHECKING:
    from vescale_fsdp.checkpoint.formats.zarr.chunks import ChunkTables

_MAX_OPEN_FILES = 64  # each holds its pieces, header and checksums in memory


class _NumberedTensor(NamedTuple):
    place: int


class _PerRankLeaf(NamedTuple):
    name: str


def open_native(store: Storage) -> Source:
    """Open a native checkpoint; reads the manifest and file sizes.

    Raises:
        CheckpointError: if a newer version wrote it.
        CorruptCheckpointError: if the manifest is damaged or a file is missing or has another size.
    """
    manifest = Manifest.from_bytes(store.read(MANIFEST_NAME), where=f"{store.where}/{MANIFEST_NAME}")
    if manifest.split_bytes is not None:  # fail early, before anything is computed for each rank
        store.required_info(manifest.file_name(manifest.world_size - 1))
    shares = manifest.shares
    files = [RankFile(manifest, rank, its_shares) for rank, its_shares in enumerate(shares)]
    chunks = (_array_chunks if manifest.is_zarr else _pieces)(store, manifest, files)
    ranks = {file.name: file.rank for file in files}
    del files  # frees the pieces and headers of all files
    leaves = NativeLeaves(manifest.structure, store.where)
    layouts = manifest.structure.layouts
    tensors = {
        name: StoredTensor(leaves.infos[name], tuple(chunks[place])) for name, place in leaves.tensors.items()
    }
    # The tree is freed: its content is in the leaves.
    manifest = replace(manifest, structure=replace(manifest.structure, tree=None))
    form = "zarr" if manifest.is_zarr else "native"
    facts = {"saved by ranks": str(manifest.world_size), "save id": manifest.save_id, "form": form}

    # Files are opened when read; few are kept, since each holds its pieces, header and checksums.
    @lru_cache(maxsize=_MAX_OPEN_FILES)
    def checked(name: str) -> OpenRankFile | None:
        rank = ranks.get(name)
        return None if rank is None else OpenRankFile(store, RankFile(manifest, rank, shares[rank]))

    return Source(
        "native",
        store,
        tensors,
        leaves.values,
        leaves.paths,
        facts,
        omitted=tuple(leaves.per_rank),
        layouts=layouts,
        checked=checked,
    )


class NativeLeaves:
    """The leaves of a native state by flattened name.

    Args:
        structure: contains the state's tree.
        where: the checkpoint's path, for messages.

    Attributes:
        tensors: number of each tensor in the structure.
        infos: shape and dtype of each tensor.
        values: leaves that are not tensors.
        paths: path of each leaf in the nested state.
        per_rank: names of per-rank values, which only the native format can store.
    """

    def __init__(self, structure: Structure, where: str) -> None:
        self.tensors: dict[str, int] = {}
        self.infos: dict[str, TensorInfo] = {}
        self.values: dict[str, StoredValue] = {}
        self.paths: dict[str, tuple[str | int, ...]] = {}
        self.per_rank: list[str] = []
        state = decode(structure.tree, _leaf, where)
        # A list or a single tensor needs a key, so that its leaves have names.
        nested = state if isinstance(state, Mapping) else {"state": state}
        for path, leaf in flatten(
            nested, lambda value: isinstance(value, (_NumberedTensor, _PerRankLeaf))
        ).items():
            name = name_of(path)
            self.paths[name] = path
            if isinstance(leaf, _NumberedTensor):
                entry = structure.entries[leaf.place]
                self.tensors[name] = leaf.place
                self.infos[name] = TensorInfo(name, entry.shape, dtype_from_torch(entry.dtype))
            elif isinstance(leaf, _PerRankLeaf):
                self.per_rank.append(name)
            else:
                self.values[name] = constant(leaf)


def _leaf(node: Mapping[str, Any]) -> Any:
    if node["$"] == "tensor":
        return _NumberedTensor(int(node["i"]))
    return _PerRankLeaf(str(node["name"])) if node["$"] == "per_rank" else None


def _pieces(store: Storage, manifest: Manifest, files: Sequence[RankFile]) -> list[list[StoredChunk]]:
    """The pieces of every tensor in ranks' files; a piece that several replicas store is listed once.

    If every replica stores its whole region (storage that ranks do not share), one replica suffices, and other ranks'
    files may be missing.
    """
    found: list[dict[Region, list[StoredChunk]]] = [{} for _ in manifest.entries]
    itemsizes = [entry.itemsize for entry in manifest.entries]
    lost: list[RankFile] = []
    for file in files:
        if manifest.split_bytes is None and store.size(file.name) is None:
            lost.append(file)
            continue
        store.check_size(file.name, file.total_bytes)
        for place, region, _, start, _ in file.pieces:
            if region not in found[place]:  # else another replica stores it too
                itemsize = itemsizes[place]
                # The boxes of a piece follow each other in the file.
                found[place][region] = [
                    StoredChunk(box, file.name, start + first * itemsize, box.numel * itemsize)
                    for box, first in region.pieces()
                ]
    for file in lost:
        if any(piece.region not in found[piece.tensor_index] for piece in file.pieces):
            store.required_info(file.name)  # raises the error for a missing file
    return [[chunk for part in parts.values() for chunk in part] for parts in found]


def _array_chunks(store: Storage, manifest: Manifest, files: Sequence[RankFile]) -> list[list[StoredChunk]]:
    """The chunks of every tensor's array."""
    from vescale_fsdp.checkpoint.formats.zarr.chunks import (
        ChunkTables,
    )  # here: imports numpy, which the native form does not need

    found: list[list[StoredChunk]] = [[] for _ in manifest.entries]
    for file in files:
        store.check_size(file.name, file.total_bytes)
    tables = ChunkTables(store, manifest)
    for places in manifest.indices_by_name.values():
        entry, sizes = manifest.entries[places[0]], manifest.chunk_sizes[places[0]]
        nbytes = numel_of(sizes) * entry.itemsize
        for box in chunk_boxes(entry.shape, sizes):
            name = chunk_file(manifest, places[0], box)
            store.check_size(name, nbytes + CRC_BYTES)
            where = f"tensor {entry.label} in {store.where}/{name}"
            saved = partial(_saved_crc, tables, store, Chunk(places[0], box), nbytes)
            checked_range = CheckedRange(name, 0, nbytes, CRC32C, saved, where)
            strides = contiguous_strides(sizes)
            found[places[0]].append(
                StoredChunk(clipped(box, entry.shape), name, 0, nbytes, strides, checked=checked_range)
            )
        for place in places[1:]:  # further descriptions of the same tensor
            found[place] = found[places[0]]
    return found


def _saved_crc(tables: ChunkTables, store: Storage, chunk: Chunk, nbytes: int) -> int:
    """The crc32c with which a chunk was saved: from its owner's file; in version 1, from the end of its file."""
    written = tables.checksum(chunk)
    if written is None:
        written = stored_crc(store, chunk_file(tables.manifest, *chunk), nbytes)
    return written
