"""Which rank writes which chunk of a zarr array: computed by everybody alike, from the manifest alone.

The rank that holds a chunk's first element owns it; replicas take turns. Its file holds the checksums of all
chunks that it owns, in the order of `held_chunks`, so that a chunk is known by its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.manifest.region import Region, overlaps
from vescale_fsdp.checkpoint.manifest.zarr_layout import chunk_boxes
from vescale_fsdp.layout.geometry import Box, FlatRange


class Chunk(NamedTuple):
    """A chunk of tensor number ``place``; ``box`` may reach over the tensor's edges."""

    place: int
    box: Box

    @property
    def region(self) -> Region:
        """All elements of the chunk."""
        return Region(self.box, FlatRange(0, self.box.numel))


class Holder(NamedTuple):
    """Who brings a part of a chunk: of the ranks that hold a region of the tensor the one whose turn it is."""

    rank: int
    region: Region
    numel: int  # of the part


def held_chunks(manifest: Manifest, rank: int) -> Iterator[tuple[Chunk, list[Holder]]]:
    """Chunks of which a rank brings a part: tensors in the order of the manifest, of each the chunks row by row."""
    for places in manifest.places_by_name.values():
        place = places[0]  # further descriptions of a tensor have the same values
        entry = manifest.entries[place]
        held = manifest.holders_of(place).position(rank)
        if held is None or not entry.numel:
            continue
        own = manifest.distributions[place].region(entry.shape, held[0], manifest.structure.layouts)
        for chunk in chunks_of(manifest, place, own):
            holders = holders_of(manifest, chunk)
            if any(holder.rank == rank for holder in holders):
                yield chunk, holders


def chunks_of(manifest: Manifest, place: int, region: Region) -> list[Chunk]:
    """Chunks that share an element with a region of a tensor, each once, row by row."""
    shape, sizes = manifest.entries[place].shape, manifest.chunk_sizes[place]
    found = {
        box
        for part, _ in region.pieces()
        for box in chunk_boxes(shape, sizes, part)
        if box.intersect(part) is not None or not shape
    }
    return [Chunk(place, box) for box in sorted(found, key=lambda box: box.offsets)]


def holders_of(manifest: Manifest, chunk: Chunk) -> list[Holder]:
    """Who brings a chunk's elements, in order of place; the first holds its first element, and writes it."""
    entry, holders = manifest.entries[chunk.place], manifest.holders_of(chunk.place)
    turn = sum(offset // size for offset, size in zip(chunk.box.offsets, chunk.box.sizes, strict=True))
    found = []
    for coordinates, region in manifest.distributions[chunk.place].touching(
        entry.shape, chunk.region, manifest.structure.layouts
    ):
        numel = sum(share.numel for share in overlaps(region, chunk.region))
        if numel:
            ranks = holders.ranks_at(coordinates)
            found.append(Holder(ranks[turn % len(ranks)], region, numel))
    return found
