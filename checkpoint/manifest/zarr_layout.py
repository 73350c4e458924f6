"""The zarr form of a checkpoint: each tensor's chunks, the rank that writes each chunk, and the metadata of all nodes.

Each tensor is one zarr v3 array. The array's chunk grid follows the tensor's cuts: a boundary between ranks at a whole
row is also a boundary between chunks. If a boundary inside a row divides a chunk, the rank with the chunk's first
element owns the chunk, and receives the remaining elements from other ranks. Replicas take turns as owners. Every chunk
is written by its owner alone.

    path/zarr.json                                      group: the checkpoint's folder
    path/arrays/model/layers.0.weight/zarr.json         array: shape, chunks, dtype, crc32c
    path/arrays/model/layers.0.weight/c/0/0             chunk (0, 0): little-endian bytes, then their crc32c
    path/vescale-checkpoint/zarr.json                   array without elements; next to the manifest and ranks' files

Every rank computes chunks and owners from the manifest alone. A rank's file has the checksums of all chunks that the
rank owns, in the order of `held_chunks`, so that a checksum's position identifies its chunk. The zarr library makes the
metadata; it is imported late, because its import takes half a second that other forms need not wait.
"""

from __future__ import annotations

import json
import math
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple, TypeVar

from vescale_fsdp.checkpoint.manifest.file_names import (
    ARRAYS_NODE,
    CHECKPOINT_NODE,
    FORMAT_NAME,
    ZARR_NAME,
)
from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.manifest.state_tree import Json
from vescale_fsdp.checkpoint.manifest.structure import dump_json
from vescale_fsdp.checkpoint.manifest.torch_dtypes import stored_dtype
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.checksums import CRC_BYTES
from vescale_fsdp.layout.distribution import LayoutCut, ShardCut
from vescale_fsdp.layout.geometry import Box, chunk_of, numel_of, whole_box
from vescale_fsdp.layout.region import Region, overlaps

T = TypeVar("T")
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
    """Return ``zarr.json`` of a tensor's array: compact, whatever indentation the zarr library is configured for."""
    entry = manifest.entries[index]
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
    form = array_form(entry.shape, manifest.chunk_sizes[index], stored_dtype(entry.dtype).zarr_name)
    return dump_json({**form, "attributes": attributes})


@lru_cache(maxsize=1024)  # a model has few shapes; the library takes 1 ms for each
def array_form(shape: tuple[int, ...], chunks: tuple[int, ...], dtype: str) -> dict[str, Any]:
    """Return the library's metadata of an array of regular chunks with crc32c, without attributes."""
    from zarr.api.asynchronous import create_array
    from zarr.codecs import BytesCodec, Crc32cCodec

    files: dict[str, Any] = {}
    run_in_thread(
        create_array(
            files,
            shape=shape,
            chunks=chunks,
            dtype=dtype,
            filters=None,
            serializer=BytesCodec(endian="little"),
            compressors=[Crc32cCodec()],
            fill_value=0,
        )
    )
    return _without_options(files)


@lru_cache(maxsize=1)
def _group_form() -> dict[str, Any]:
    """Return the library's metadata of a group, without attributes."""
    from zarr.api.asynchronous import create_group

    files: dict[str, Any] = {}
    run_in_thread(create_group(store=files))
    return _without_options(files)


def run_in_thread(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of the library in an event loop of its own, in a thread, and return its result.

    The library's own loop runs in a thread that an exiting process waits 0.2 s for. If the machine is busy, that is too
    short, and the library prints a traceback.
    """
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    # In a thread, because the caller's may have a running loop, such as a notebook's.
    with ThreadPoolExecutor(1, thread_name_prefix="checkpoint-zarr") as thread:
        return thread.submit(asyncio.run, coroutine).result()


def _without_options(files: dict[str, Any]) -> dict[str, Any]:
    """Return the document that the library has put into ``files``, without optional fields that are empty."""
    document = json.loads(files[ZARR_NAME].to_bytes())
    return {key: value for key, value in document.items() if value not in ({}, [], None) or key == "shape"}


def node_files(manifest: Manifest) -> dict[str, bytes]:
    """Return name -> content of ``zarr.json``, for all nodes but tensors' arrays; the outermost group is last."""
    parents = {ARRAYS_NODE: None}
    for path in manifest.array_paths:
        parts = path.split("/")
        parents |= dict.fromkeys("/".join(parts[:depth]) for depth in range(2, len(parts)))
    group = dump_json({**_group_form(), "attributes": {}})
    about = "The files in this node's folder are no zarr chunks: the checkpoint's manifest and the files of ranks."
    root = {"format": FORMAT_NAME, "arrays": ARRAYS_NODE, "manifest": manifest.name}
    return {
        **{f"{path}/{ZARR_NAME}": group for path in parents},
        f"{CHECKPOINT_NODE}/{ZARR_NAME}": dump_json(
            {**array_form((0,), (1,), "uint8"), "attributes": {"about": about}}
        ),
        ZARR_NAME: dump_json({**_group_form(), "attributes": root}),
    }


class Chunk(NamedTuple):
    """A box of a tensor that its array stores as one chunk; the box may extend over the tensor's edges."""

    tensor_index: int
    box: Box

    @property
    def region(self) -> Region:
        """All elements of the chunk."""
        return Region.of_box(self.box)


def held_chunks(manifest: Manifest, rank: int) -> Iterator[tuple[Chunk, list[tuple[int, Region]]]]:
    """Yield (chunk, `holders_of` the chunk) for each chunk of which a rank provides elements.

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
                yield Chunk(index, each), [(0, whole)]
            continue
        own = manifest.distributions[index].region(entry.shape, held[0], manifest.structure.layouts)
        for chunk in chunks_of(manifest, index, own):
            holders = holders_of(manifest, chunk)
            if any(holder == rank for holder, _ in holders):
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


def holders_of(manifest: Manifest, chunk: Chunk) -> list[tuple[int, Region]]:
    """Return the ranks that provide a chunk's elements, in element order, each with the rank's region of the tensor.

    One rank is chosen among the replicas of a region. The first rank of the list owns the chunk: it writes the chunk.
    """
    entry, holders = manifest.entries[chunk.tensor_index], manifest.holders_of(chunk.tensor_index)
    # Replicas take turns from chunk to chunk, so that they share the writing.
    turn = sum(offset // size for offset, size in zip(chunk.box.offsets, chunk.box.sizes, strict=True))
    chosen = []
    for coordinates, region in manifest.distributions[chunk.tensor_index].touching(
        entry.shape, chunk.region, manifest.structure.layouts
    ):
        if any(shared.numel for shared in overlaps(region, chunk.region)):
            ranks = holders.ranks_at(coordinates)
            chosen.append((ranks[turn % len(ranks)], region))
    return chosen
