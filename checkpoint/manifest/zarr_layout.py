"""The zarr form of a checkpoint: each tensor's chunks, the rank that writes each chunk, and the JSON of arrays.

Each tensor is one zarr v3 array. The array's chunk grid follows the tensor's cuts: a boundary between ranks at a whole
row is also a boundary between chunks. If a boundary inside a row divides a chunk, the rank with the chunk's first
element owns the chunk, and receives the remaining elements from other ranks. Replicas take turns as owners. Every chunk
is written by its owner alone.

    path/data-<save_id>/model/layers.0.weight/zarr.json     array: shape, chunks, dtype, crc32c
    path/data-<save_id>/model/layers.0.weight/c/0/0         chunk (0, 0): little-endian bytes, then their crc32c

Every rank computes chunks and owners from the manifest alone. A rank's file has the checksums of all chunks that the
rank owns, in the order of `held_chunks`, so that a checksum's position identifies its chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from vescale_fsdp.checkpoint.manifest.file_names import MANIFEST_NAME
from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.manifest.state_tree import Json
from vescale_fsdp.checkpoint.manifest.structure import dump_json
from vescale_fsdp.checkpoint.manifest.torch_dtypes import stored_dtype
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.checksums import CRC_BYTES
from vescale_fsdp.layout.distribution import LayoutCut, ShardCut
from vescale_fsdp.layout.geometry import Box, chunk_of, numel_of, whole_box
from vescale_fsdp.layout.region import Region, overlaps

_TARGET_BYTES = 4 << 20  # 4 MiB per chunk, unless one row is larger


def as_arrays(manifest: Manifest, chunks: Sequence[tuple[int, ...]] | None = None) -> Manifest:
    """Return the manifest of the same state in the zarr form.

    Args:
        chunks: chunk sizes of each tensor; None for those of `chunk_shape`.
    """
    if chunks is None:
        chunks = [chunk_shape(manifest, index) for index in range(len(manifest.entries))]
    return replace(manifest, chunks=tuple(chunks))


def chunk_shape(manifest: Manifest, index: int) -> tuple[int, ...]:
    """Return the sizes of a tensor's chunks: whole rows of about 4 MiB, and at most a shard along dims that are cut."""
    entry = manifest.entries[index]
    sizes = [max(1, size) for size in entry.shape]  # zarr has no chunks of size 0
    limit_rows = None
    for axis, cut in zip(manifest.structure.axes[entry.axes], entry.cuts, strict=True):
        if isinstance(cut, ShardCut):
            sizes[cut.dim] = max(1, chunk_of(sizes[cut.dim], axis.size, 0).numel)
        # After another cut, the layout divides a part of the tensor, whose rows differ from the tensor's.
        elif isinstance(cut, LayoutCut) and sizes and len(entry.cuts) == 1:
            limit_rows = _aligned_rows(manifest, index, cut)
    if not sizes:
        return ()
    row_bytes = max(1, numel_of(sizes[1:]) * entry.itemsize)
    wanted = max(1, min(sizes[0], _TARGET_BYTES // row_bytes))  # at least 1, for a row above the target size
    if limit_rows is not None:
        # The largest number of rows, up to `wanted`, that divides the row number of every rank boundary.
        wanted = next(rows for rows in range(min(wanted, limit_rows), 0, -1) if limit_rows % rows == 0)
    sizes[0] = wanted
    return tuple(sizes)


def _aligned_rows(manifest: Manifest, index: int, cut: LayoutCut) -> int | None:
    """Return the largest number of rows that divides the row number of every rank boundary.

    Returns None if there is no boundary, or if a boundary is inside a row.
    """
    entry = manifest.entries[index]
    layout = manifest.structure.layouts[cut.layout]
    slot = layout.slots[cut.slot]
    row_numel = numel_of(entry.shape[1:])
    if slot.is_scattered or not entry.numel:  # scattered: the boundaries are not at equal distances
        return None
    # Elements of the tensor before the first rank boundary; later boundaries follow at distances of `shard_numel`.
    first = (slot.offset // layout.shard_numel + 1) * layout.shard_numel - slot.offset
    if first >= entry.numel:
        return None
    steps = [first] + ([layout.shard_numel] if first + layout.shard_numel < entry.numel else [])
    common = math.gcd(*steps)
    return common // row_numel if common % row_numel == 0 else None


def chunk_boxes(shape: tuple[int, ...], chunks: tuple[int, ...], within: Box | None = None) -> Iterator[Box]:
    """Yield the boxes of all chunks, or only of chunks that overlap ``within``. A box may end outside the tensor."""
    if any(size == 0 for size in shape):  # an empty tensor has no chunks
        return
    ranges = [range(-(-size // chunk)) for size, chunk in zip(shape, chunks, strict=True)]
    if within is not None:
        ranges = [
            range(start // chunk, min(len(grid), -(-(start + size) // chunk)))
            for grid, start, size, chunk in zip(ranges, within.offsets, within.sizes, chunks, strict=True)
        ]
    for index in product(*ranges):
        yield Box(tuple(i * chunk for i, chunk in zip(index, chunks, strict=True)), chunks)


def clipped(box: Box, shape: tuple[int, ...]) -> Box:
    """Return the part of a chunk's box that is inside the tensor."""
    if box.sizes == shape and not any(box.offsets):  # a shortcut: the chunk is the tensor
        return box
    sizes = tuple(
        min(size, full - start) for start, size, full in zip(box.offsets, box.sizes, shape, strict=True)
    )
    return Box(box.offsets, sizes)


def chunk_file(manifest: Manifest, index: int, box: Box) -> str:
    """Return the name of a chunk's file, relative to the checkpoint's folder."""
    coordinates = (str(o // c) for o, c in zip(box.offsets, box.sizes, strict=True))
    return "/".join([manifest.array_paths[index], "c", *coordinates])


def stored_crc(store: Storage, file: str, nbytes: int) -> int:
    """Read the crc32c that follows a chunk's ``nbytes`` bytes in the chunk's file."""
    return int.from_bytes(store.read(file, nbytes, CRC_BYTES), "little")


def array_json(manifest: Manifest, index: int) -> bytes:
    """Return the content of ``zarr.json`` for a tensor's array."""
    entry = manifest.entries[index]
    stored = stored_dtype(entry.dtype).zarr_name
    fill_value: Json = 0.0 if stored.startswith("float") else 0
    if stored == "bool":
        fill_value = False
    elif stored.startswith("complex"):
        fill_value = [0.0, 0.0]
    attributes: dict[str, Json] = {"logical_dtype": entry.dtype, "name": entry.name}
    cut = entry.cuts[-1] if entry.cuts else None  # a layout's cut is applied last
    if isinstance(cut, LayoutCut):
        layout = manifest.structure.layouts[cut.layout]
        attributes["block_numel"] = layout.slots[cut.slot].block_numel
        attributes["layout"] = {
            "num_shards": layout.num_shards,
            "shard_numel": layout.shard_numel,
            "slot": layout.slots[cut.slot].to_json(),
        }
    grid = {"name": "regular", "configuration": {"chunk_shape": list(manifest.chunk_sizes[index])}}
    return dump_json(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(entry.shape),
            "data_type": stored,
            "chunk_grid": grid,
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": fill_value,
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
            "attributes": attributes,
        }
    )


def group_files(manifest: Manifest) -> dict[str, bytes]:
    """Return name -> content of each group's ``zarr.json``: parents first, the checkpoint's own group last."""
    data = f"data-{manifest.save_id}"
    paths = {data: None}
    for path in manifest.array_paths:
        parts = path.split("/")
        paths |= dict.fromkeys("/".join(parts[:depth]) for depth in range(2, len(parts)))
    groups = dict.fromkeys((f"{path}/zarr.json" for path in paths), _group_json({}))
    return {**groups, "zarr.json": _group_json({"arrays": data, "manifest": MANIFEST_NAME})}


def _group_json(attributes: dict[str, Json]) -> bytes:
    """Return the content of ``zarr.json`` for a group."""
    return dump_json({"zarr_format": 3, "node_type": "group", "attributes": attributes})


class Chunk(NamedTuple):
    """A chunk of a tensor's array; ``box`` may extend over the tensor's edges."""

    tensor_index: int
    box: Box

    @property
    def region(self) -> Region:
        """All elements of the chunk."""
        return Region.of_box(self.box)


class Holder(NamedTuple):
    """A rank that provides a part of a chunk; one rank is chosen among the replicas of the part.

    Attributes:
        rank: the rank.
        region: the rank's region of the tensor.
        numel: number of elements that the region and the chunk share.
    """

    rank: int
    region: Region
    numel: int


def held_chunks(manifest: Manifest, rank: int) -> Iterator[tuple[Chunk, list[Holder]]]:
    """Yield (chunk, holders) for each chunk of which a rank provides a part.

    Tensors are in the manifest's order, the chunks of a tensor in row-major order.
    """
    for indices in manifest.indices_by_name.values():
        index = indices[0]  # a tensor with several descriptions is stored once, as the first describes it
        entry = manifest.entries[index]
        held = manifest.holders_of(index).position(rank)
        if held is None or not entry.numel:
            continue
        # As after a conversion, which may have very many tensors: the rank holds each as a whole.
        if manifest.world_size == 1 and not entry.cuts:
            box, sizes = whole_box(entry.shape), manifest.chunk_sizes[index]
            whole = Region.of_box(box)
            # Most tensors are one chunk.
            for each in (box,) if sizes == entry.shape else chunk_boxes(entry.shape, sizes):
                yield Chunk(index, each), [Holder(0, whole, clipped(each, entry.shape).numel)]
            continue
        own = manifest.distributions[index].region(entry.shape, held[0], manifest.structure.layouts)
        for chunk in chunks_of(manifest, index, own):
            holders = holders_of(manifest, chunk)
            if any(holder.rank == rank for holder in holders):
                yield chunk, holders


def chunks_of(manifest: Manifest, index: int, region: Region) -> list[Chunk]:
    """Return the chunks that overlap a region of a tensor, in row-major order."""
    shape, sizes = manifest.entries[index].shape, manifest.chunk_sizes[index]
    # A set, because several boxes of the region may be in one chunk.
    boxes = {
        box
        for part, _ in region.pieces()
        for box in chunk_boxes(shape, sizes, part)
        if box.intersect(part) is not None or not shape  # a 0-d tensor has one chunk
    }
    return [Chunk(index, box) for box in sorted(boxes, key=lambda box: box.offsets)]


def holders_of(manifest: Manifest, chunk: Chunk) -> list[Holder]:
    """Return the ranks that provide a chunk's elements, in element order. The first of these ranks writes the chunk."""
    entry, holders = manifest.entries[chunk.tensor_index], manifest.holders_of(chunk.tensor_index)
    # Replicas take turns from chunk to chunk, so that they share the writing.
    turn = sum(offset // size for offset, size in zip(chunk.box.offsets, chunk.box.sizes, strict=True))
    chosen = []
    for coordinates, region in manifest.distributions[chunk.tensor_index].touching(
        entry.shape, chunk.region, manifest.structure.layouts
    ):
        numel = sum(share.numel for share in overlaps(region, chunk.region))
        if numel:
            ranks = holders.ranks_at(coordinates)
            chosen.append(Holder(ranks[turn % len(ranks)], region, numel))
    return chosen
