"""`open_native`: opens a native checkpoint, in the native or the zarr form, as a `Source`.

The file and byte offset of every element follow from the manifest. In the native form, tensors are stored in the ranks'
files; in the zarr form, in the chunks of arrays, and ranks' files have the checksums of the chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial

from vescale_fsdp.checkpoint.manifest.file_names import MANIFEST_NAME, manifest_file
from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.manifest.rank_file import RankFile
from vescale_fsdp.checkpoint.manifest.structure import Structure
from vescale_fsdp.checkpoint.manifest.zarr_layout import (
    Chunk,
    chunk_boxes,
    chunk_file,
    clipped,
    holders_of,
)
from vescale_fsdp.checkpoint.native.leaves import NativeLeaves
from vescale_fsdp.checkpoint.native.rank_file_reader import RankFileReader
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.checksums import CRC32C, CRC_BYTES
from vescale_fsdp.conversion.engine.source import Source, StoredValue, constant
from vescale_fsdp.conversion.engine.stored_tensor import StoredChunk, StoredTensor, TensorInfo
from vescale_fsdp.conversion.engine.verified_reads import CheckedRange
from vescale_fsdp.layout.dtypes import dtype_from_torch
from vescale_fsdp.layout.extent import Extent
from vescale_fsdp.layout.geometry import contiguous_strides, numel_of
from vescale_fsdp.layout.region import Region

_MAX_OPEN_FILES = 64  # limits memory: pieces, header and checksums of each open file


def open_native(store: Storage, *, checks_files: bool = True) -> Source:
    """Open a native checkpoint as a `Source`. Reads the manifest and the sizes of files.

    Args:
        checks_files: False opens a checkpoint that lacks files, too; `Source.check_files` then checks those of the
            chosen tensors.

    Raises:
        CheckpointError: if a newer version of this library wrote the checkpoint.
        CorruptCheckpointError: if the manifest is damaged, or a file is missing or has another size.
    """
    name = manifest_file(store) or MANIFEST_NAME  # if there is none, its absence is the error of the read
    manifest = Manifest.from_bytes(store.read(name), where=f"{store.where}/{name}")
    # Fails early if the last rank's file is missing, before work and memory for each rank. If `split_bytes` is None,
    # files may be missing: see `_pieces`.
    if checks_files and manifest.split_bytes is not None:
        store.required_info(manifest.file_name(manifest.world_size - 1))
    pieces = manifest.pieces
    files = [RankFile(manifest, rank, its_pieces) for rank, its_pieces in enumerate(pieces)]
    unchecked: dict[str, dict[str, int]] = {}
    chunks = (_array_chunks if manifest.is_zarr else _pieces)(
        store, manifest, files, None if checks_files else unchecked
    )
    ranks = {file.name: file.rank for file in files}
    del files  # frees the pieces and headers of all files, which `chunks` no longer needs
    leaves = NativeLeaves(manifest.structure, store.where)
    layouts = manifest.structure.layouts
    infos = infos_of(manifest.structure, leaves)
    tensors = {
        name: StoredTensor(infos[name], tuple(chunks[place])) for name, place in leaves.tensors.items()
    }
    # Without the state tree, whose memory is freed: its content is in `leaves`.
    manifest = replace(manifest, structure=replace(manifest.structure, tree=None))
    sums = manifest.sums
    form = "zarr" if manifest.is_zarr else "native"
    facts = {"saved by ranks": str(manifest.world_size), "save id": manifest.save_id, "form": form}

    # A file is opened when it is read first; few stay open, since the pieces, header and checksums of each use memory.
    @lru_cache(maxsize=_MAX_OPEN_FILES)
    def checked(name: str) -> RankFileReader | None:
        """Open a rank's file for its checksums; None for other files."""
        rank = ranks.get(name)
        return None if rank is None else RankFileReader(store, RankFile(manifest, rank, pieces[rank]))

    return Source(
        "native",
        store,
        tensors,
        constants_of(leaves),
        leaves.paths,
        facts,
        unsupported=tuple(leaves.per_rank),
        layouts=layouts,
        checked=checked,
        metadata=manifest.metadata,
        sums={} if sums is None else {name: sums[place] for name, place in leaves.tensors.items()},
        unchecked=unchecked,
    )


def infos_of(structure: Structure, leaves: NativeLeaves) -> dict[str, TensorInfo]:
    """Return the name, shape and dtype of every tensor leaf, by its name."""
    entries = {name: structure.entries[place] for name, place in leaves.tensors.items()}
    return {
        name: TensorInfo(name, entry.shape, dtype_from_torch(entry.dtype)) for name, entry in entries.items()
    }


def constants_of(leaves: NativeLeaves) -> dict[str, StoredValue]:
    """Return the leaves that are not tensors, by name, as a `Source` has them."""
    return {name: constant(leaf) for name, leaf in leaves.values.items()}


def _pieces(
    store: Storage,
    manifest: Manifest,
    files: Sequence[RankFile],
    unchecked: dict[str, dict[str, int]] | None,
) -> list[list[StoredChunk]]:
    """Return the pieces of every tensor in ranks' files; a piece that several replicas store is listed once.

    In storage that ranks do not share, every replica stores its whole region. One replica is then enough, and files of
    the others may be missing.

    Args:
        unchecked: gets the sizes of files, as in `Source`; None to check the files.
    """
    found: list[dict[Region, list[StoredChunk]]] = [{} for _ in manifest.entries]
    itemsizes = [entry.itemsize for entry in manifest.entries]
    has_copies = manifest.split_bytes is None
    if has_copies:  # the good files first, so that pieces are read from them
        files = sorted(files, key=lambda file: store.size(file.name) != file.total_bytes)
    for file in files:
        pieces = [
            (place, region, start)
            for (place, region), start in zip(file.pieces.items(), file.starts.values(), strict=True)
            if region not in found[place]  # else listed already: an earlier replica stores it too
        ]
        if unchecked is not None:
            unchecked[file.name] = {file.name: file.total_bytes}
        elif pieces or not has_copies or store.size(file.name) is not None:
            store.check_size(file.name, file.total_bytes)
        for place, region, start in pieces:
            itemsize = itemsizes[place]
            # A piece consists of boxes that follow each other in the file.
            found[place][region] = [
                StoredChunk(box, Extent(file.name, start + first * itemsize, box.numel * itemsize))
                for box, first in region.pieces()
            ]
    return [[chunk for part in parts.values() for chunk in part] for parts in found]


def _array_chunks(
    store: Storage,
    manifest: Manifest,
    files: Sequence[RankFile],
    unchecked: dict[str, dict[str, int]] | None,
) -> list[list[StoredChunk]]:
    """Return the chunks of every tensor's array; ``unchecked`` as in `_pieces`."""
    # Imported here, because it imports numpy, which the native form does not need.
    from vescale_fsdp.checkpoint.native.zarr_chunks import ChunkTables

    found: list[list[StoredChunk]] = [[] for _ in manifest.entries]
    for file in files if unchecked is None else ():
        store.check_size(file.name, file.total_bytes)
    tables = ChunkTables(store, manifest)
    for places in manifest.indices_by_name.values():
        entry, sizes = manifest.entries[places[0]], manifest.chunk_sizes[places[0]]
        nbytes = numel_of(sizes) * entry.itemsize
        for box in chunk_boxes(entry.shape, sizes):
            chunk = Chunk(places[0], box)
            name = chunk_file(manifest, *chunk)
            if unchecked is None:
                store.check_size(name, nbytes + CRC_BYTES)
            else:
                owner = files[holders_of(manifest, chunk)[0][0]]  # its file has the chunk's checksum
                unchecked[name] = {name: nbytes + CRC_BYTES, owner.name: owner.total_bytes}
            where = f"tensor {entry.label} in {store.where}/{name}"
            checked_range = CheckedRange(name, 0, nbytes, CRC32C, partial(tables.checksum, chunk), where)
            strides = contiguous_strides(sizes)
            found[places[0]].append(
                StoredChunk(clipped(box, entry.shape), Extent(name, 0, nbytes), strides, checked_range)
            )
        for place in places[1:]:  # other descriptions (cuts) of the same tensor share its array
            found[place] = found[places[0]]
    return found
