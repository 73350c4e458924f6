"""Which rank writes which chunk of a zarr array: computed by everybody alike, from the manifest alone.

The rank that holds a chunk's first element owns it; replicas take turns. Its file holds the checksums of all
chunks that it owns, in the order of `owned_chunks`, so that a chunk is known by its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.manifest.region import Region, overlaps
from vescale_fsdp.checkpoint.manifest.zarr_layout import chunk_boxes, clipped
from vescale_fsdp.layout.geometry import Box, FlatRange

__all__ = ["Chunk", "Holder", "chunk_holders", "hull", "owned_chunks", "owner_of", "turn_of", "wanted_of"]


class Chunk(NamedTuple):
    """A chunk of tensor number ``place``; ``box`` may reach over the tensor's edges."""

    place: int
    box: Box


class Holder(NamedTuple):
    """Ranks that hold one region of a tensor."""

    region: Region
    ranks: list[int]


def owned_chunks(manifest: Manifest, rank: int) -> Iterator[Chunk]:
    """Chunks that a rank writes: tensors in the order of the manifest, of each the chunks row by row."""
    assert manifest.chunks is not None
    for places in manifest.places_by_name.values():
        place = places[0]  # further descriptions of a tensor have the same values
        entry = manifest.entries[place]
        held = manifest.holders_of(place).position(rank)
        if held is None or not entry.numel:
            continue
        own = manifest.distribution(place).region(entry.shape, held[0], manifest.structure.layouts)
        for box in chunk_boxes(entry.shape, manifest.chunks[place], hull(own)):
            chunk = Chunk(place, box)
            if overlaps(own, wanted_of(manifest, chunk)) and owner_of(manifest, chunk) == rank:
                yield chunk


def owner_of(manifest: Manifest, chunk: Chunk) -> int:
    """The rank that writes a chunk."""
    ranks = chunk_holders(manifest, chunk)[0].ranks
    return ranks[turn_of(manifest, chunk) % len(ranks)]


def turn_of(manifest: Manifest, chunk: Chunk) -> int:
    """Whose turn it is among replicas, counted without end."""
    assert manifest.chunks is not None
    sizes = manifest.chunks[chunk.place]
    return sum(offset // size for offset, size in zip(chunk.box.offsets, sizes, strict=True))


def wanted_of(manifest: Manifest, chunk: Chunk) -> Region:
    """The elements of a chunk that lie inside the tensor."""
    inside = clipped(chunk.box, manifest.entries[chunk.place].shape)
    return Region(inside, FlatRange(0, inside.numel))


def chunk_holders(manifest: Manifest, chunk: Chunk) -> list[Holder]:
    """Who holds a chunk's elements, in order of place; the first holds its first element."""
    entry, wanted = manifest.entries[chunk.place], wanted_of(manifest, chunk)
    holders = manifest.holders_of(chunk.place)
    touching = manifest.distribution(chunk.place).touching(entry.shape, wanted, manifest.structure.layouts)
    return [
        Holder(region, holders.ranks_at(coordinates))
        for coordinates, region in touching
        if overlaps(region, wanted)
    ]


def hull(region: Region) -> Box | None:
    """The smallest box around a region."""
    boxes = [box for box, _ in region.pieces()]
    if not boxes:
        return Box(region.box.offsets, (0,) * len(region.box.sizes)) if region.box.sizes else None
    starts = tuple(min(offsets) for offsets in zip(*(box.offsets for box in boxes), strict=True))
    stops = [[o + n for o, n in zip(box.offsets, box.sizes, strict=True)] for box in boxes]
    return Box(starts, tuple(max(s) - a for s, a in zip(zip(*stops, strict=True), starts, strict=True)))
