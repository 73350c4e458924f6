"""The tensors that leaves take from: who holds which regions of them, as they are, as codes, or as scales."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from vescale_fsdp.checkpoint.manifest.distribution import Distribution, Holders
from vescale_fsdp.checkpoint.manifest.region import Region
from vescale_fsdp.checkpoint.manifest.structure import Entry
from vescale_fsdp.checkpoint.manifest.torch_dtypes import dtype_name, stored_dtype
from vescale_fsdp.checkpoint.transfer.planning.blocks import hull_of, scale_regions
from vescale_fsdp.checkpoint.transfer.planning.description import StateDescription
from vescale_fsdp.checkpoint.transfer.planning.links import Codec, Coded, Grid, Leaf, Named
from vescale_fsdp.layout.geometry import Box, FlatRange, whole_box


class SourceTensor:
    """A tensor of a source's description, under a leaf's eyes.

    Args:
        description: of the source.
        leaf_source: its name, and what a codec makes of it.
    """

    def __init__(self, description: StateDescription, leaf_source: Named | Coded) -> None:
        self.leaf_source = leaf_source
        self.place = description.places_by_name[leaf_source.name]
        self.distribution: Distribution = description.distributions[self.place]
        self.holders: Holders = description.holders_of(self.place)
        self._entry: Entry = description.entries[self.place]
        self._layouts = description.structure.layouts
        self._regions: dict[tuple[int, ...], list[tuple[Region, int]]] = {}

    @property
    def name(self) -> str:
        """Of the tensor that is read."""
        return self._entry.name

    @property
    def held_shape(self) -> tuple[int, ...]:
        """Of the tensor that is read."""
        return self._entry.shape

    @property
    def codec(self) -> Codec | None:
        """What codes the tensor, if it is coded."""
        return self.leaf_source.codec if isinstance(self.leaf_source, Coded) else None

    @cached_property
    def grid(self) -> Grid | None:
        """Blocks of a coded tensor."""
        return self.codec.grid(self._entry.shape) if self.codec is not None else None

    @property
    def is_scales(self) -> bool:
        """Whether regions are of the tensor's scales, not of the tensor."""
        return isinstance(self.leaf_source, Coded) and self.leaf_source.part == "scales"

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Of what leaves take from."""
        return self.grid.scales_shape if self.grid and self.is_scales else self._entry.shape

    @cached_property
    def dtype(self) -> str:
        """Of what leaves take from."""
        coded = self.leaf_source
        if isinstance(coded, Named):
            return self._entry.dtype
        return dtype_name(coded.codec.scale_dtype if coded.part == "scales" else coded.codec.code_dtype)

    @property
    def key_of_regions(self) -> tuple[Any, ...]:
        """With the distribution, all that regions depend on."""
        grid = self.grid if self.is_scales else None
        return (self._entry.shape, grid and (grid.rows, grid.cols, grid.line_numel))

    def held_region(self, coordinates: tuple[int, ...]) -> Region:
        """What ranks at these coordinates hold of the tensor that is read."""
        return self.distribution.region(self._entry.shape, coordinates, self._layouts)

    def regions(self, coordinates: tuple[int, ...]) -> list[tuple[Region, int]]:
        """What ranks at these coordinates have for leaves, each with its place in one flat memory."""
        found = self._regions.get(coordinates)
        if found is None:
            held = self.held_region(coordinates)
            made = [held]
            if self.grid is not None and self.is_scales:
                made = scale_regions(held, self._entry.shape, self.grid)
            found, base = [], 0
            for region in made:
                found.append((region, base))
                base += region.numel
            self._regions[coordinates] = found
        return found

    def touching(self, wanted: Box) -> Iterator[tuple[int, ...]]:
        """Coordinates whose regions may share items with a box."""
        if self.grid is not None and self.is_scales:
            span = hull_of(wanted, self._entry.shape, self.grid)
            region = Region(whole_box(self._entry.shape), span)
        else:
            region = Region(wanted, FlatRange(0, wanted.numel))
        for coordinates, _ in self.distribution.touching(self._entry.shape, region, self._layouts):
            yield coordinates

    def _all_coordinates(self) -> Iterator[tuple[int, ...]]:
        return np.ndindex(*(axis.size for axis in self.distribution.axes))

    def placed_regions(self) -> Iterator[tuple[int, Region]]:
        """Regions of all places, by the place's number."""
        for place, coordinates in enumerate(self._all_coordinates()):
            for region, _ in self.regions(tuple(coordinates)):
                yield place, region

    def held_regions(self) -> Iterator[Region]:
        """What is held of the tensor that is read, at all places."""
        return map(self.held_region, self._all_coordinates())


class PlacedLeaf(NamedTuple):
    """A leaf of a plan: what it takes from, and which tensor of the target it fills.

    Attributes:
        target: number of the tensor in the target's description.
        wire_dtype: of items on their way: the narrower of both sides'.
        narrowed, widened: whether items are cast to it by the source, from it by the target.
    """

    leaf: Leaf
    source: SourceTensor
    target: int
    wire_dtype: str
    narrowed: bool
    widened: bool

    @property
    def itemsize(self) -> int:
        """Bytes of an item on its way."""
        return stored_dtype(self.wire_dtype).itemsize
