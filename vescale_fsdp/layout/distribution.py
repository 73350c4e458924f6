"""`Distribution`: a rule for each rank's region of a tensor. The rule's size does not grow with the number of ranks.

A distribution has *axes* and *cuts*. An axis computes a rank's coordinate on a mesh axis from the rank's number. A cut
defines how one sharding axis divides the tensor; cuts are listed in order of application. Axes that replicate are left
out: ranks with equal coordinates on all axes that cut are replicas of each other.

    8 ranks, mesh (replicate=2, shard=4), ragged        axes: (size 4, stride 1)     coordinate = rank % 4
    8 ranks, FSDP=4 on dim 0 over TP=2 on dim 1         axes: (4, 2), (2, 1)         rank // 2 % 4, rank % 2
    a plain tensor                                      axes: none                   all ranks are replicas

Strided shards, such as FSDP inside TP on one dim, need no separate kind of cut: TP's cut is applied before FSDP's.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from vescale_fsdp.errors import CorruptCheckpointError
from vescale_fsdp.layout.geometry import Range, RunLengths, chunk_of, contiguous_strides
from vescale_fsdp.layout.group_layout import GroupLayout
from vescale_fsdp.layout.region import Region, whole_region

if TYPE_CHECKING:
    from vescale_fsdp.layout.placement import RaggedShard


class RankRun(NamedTuple):
    """The ranks ``start + i * outer_step + j * step`` for i < outer, j < num_ranks."""

    start: int
    num_ranks: int
    step: int = 1
    outer: int = 1
    outer_step: int = 0


@dataclass(frozen=True)
class RankSet:
    """A set of ranks, as runs in ascending order of start."""

    runs: tuple[RankRun, ...]

    @classmethod
    def of(cls, ranks: Iterable[int]) -> RankSet:
        """Return the set of these ranks, as runs with two levels of repetition."""
        return cls(tuple(_repeat(_runs(sorted(set(ranks))))))

    @classmethod
    def world(cls, world_size: int) -> RankSet:
        """Return the set of all ranks of a world."""
        return cls((RankRun(0, world_size),))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks in ascending order."""
        return tuple(
            sorted(
                start + i * outer_step + j * step
                for start, count, step, outer, outer_step in self.runs
                for i in range(outer)
                for j in range(count)
            )
        )

    def __contains__(self, rank: int) -> bool:
        index = bisect_left(self.ranks, rank)
        return index < len(self.ranks) and self.ranks[index] == rank

    def union(self, other: RankSet) -> RankSet:
        """Return the set of the ranks in either set."""
        return RankSet.of([*self.ranks, *other.ranks])

    def to_json(self) -> list[list[int]]:
        """Return plain values for JSON; `from_json` reads them back without loss."""
        return [list(run) for run in self.runs]

    @classmethod
    def from_json(cls, data: Any) -> RankSet:
        """Return the value that `to_json` has described."""
        return cls(tuple(RankRun(int(a), int(b), int(c), int(d), int(e)) for a, b, c, d, e in data))


def _runs(ranks: Sequence[int]) -> list[RankRun]:
    """Divide ascending ranks greedily into runs of one level."""
    runs: list[RankRun] = []
    at = 0
    while at < len(ranks):
        step = ranks[at + 1] - ranks[at] if at + 1 < len(ranks) else 1
        stop = at + 1
        while stop < len(ranks) and ranks[stop] - ranks[stop - 1] == step:
            stop += 1
        # Two ranks with a gap between them are usually the end of one run and the start of the next, not a run.
        if stop - at == 2 and step > 1 and stop < len(ranks):
            stop, step = at + 1, 1
        runs.append(RankRun(ranks[at], stop - at, step if stop - at > 1 else 1))
        at = stop
    return runs


def _repeat(runs: Sequence[RankRun]) -> Iterator[RankRun]:
    """Join runs of as many ranks and of equal step, at equal distances, into runs of two levels."""
    at = 0
    while at < len(runs):
        first = runs[at]
        stop = at + 1
        distance = runs[stop].start - first.start if stop < len(runs) else 0
        while stop < len(runs) and runs[stop] == first._replace(start=first.start + (stop - at) * distance):
            stop += 1
        yield first._replace(outer=stop - at, outer_step=distance if stop - at > 1 else 0)
        at = stop


@dataclass(frozen=True)
class Axis:
    """How a rank's coordinate on one mesh axis follows from the rank's number.

    Args:
        size: number of ranks along the axis.
        stride: the coordinate is ``(rank - base) // stride % size``.
        base: lowest rank of the mesh, for meshes that do not start at a multiple of their extent; else 0.
        table: (rank, coordinate) of every rank, for a mesh that follows no formula; else None.
        minor: (size, stride) of the coordinate's faster digit, in a hybrid cut: (nodes, ranks per node). With (n, s)
            the coordinate is ``(rank - base) // stride % (size // n) * n + (rank - base) // s % n``.
    """

    size: int
    stride: int
    base: int = 0
    table: tuple[tuple[int, int], ...] | None = None
    minor: tuple[int, int] = (1, 1)

    def coordinates(self, ranks: Sequence[int]) -> list[int]:
        """Return the coordinate of each rank; -1 for ranks that the table leaves out."""
        if self.table is None:
            base, stride, (faster, step) = self.base, self.stride, self.minor
            slower = self.size // faster
            return [
                (rank - base) // stride % slower * faster + (rank - base) // step % faster for rank in ranks
            ]
        known = dict(self.table)
        return [known.get(rank, -1) for rank in ranks]

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON; `from_json` reads them back without loss."""
        data: dict[str, Any] = {"size": self.size, "stride": self.stride}
        if self.base:
            data["base"] = self.base
        if self.table is not None:
            data["table"] = [list(pair) for pair in self.table]
        if self.minor != (1, 1):
            data["minor"] = list(self.minor)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Axis:
        """Return the value that `to_json` has described."""
        table = data.get("table")
        pairs = None if table is None else tuple((int(rank), int(coordinate)) for rank, coordinate in table)
        faster, step = data.get("minor", (1, 1))
        return cls(
            int(data["size"]), int(data["stride"]), int(data.get("base", 0)), pairs, (int(faster), int(step))
        )


Axes = tuple[Axis, ...]
Layouts = Sequence[GroupLayout]  # the manifest's table of layouts; `LayoutCut.layout` is an index of it


class Cut(ABC):
    """How one sharding axis divides the region that earlier cuts leave."""

    __slots__ = ()  # without it, subclasses with slots would have a ``__dict__`` too

    @abstractmethod
    def narrow(self, region: Region, coordinate: int, size: int, layouts: Layouts) -> Region:
        """Return the part of ``region`` that belongs to ranks at ``coordinate`` on an axis of ``size`` ranks."""

    @abstractmethod
    def touching(self, region: Region, size: int, wanted: Region, layouts: Layouts) -> Iterator[int]:
        """Yield the coordinates whose part of ``region`` may overlap ``wanted``."""

    @abstractmethod
    def to_json(self) -> list[Any]:
        """Return plain values for JSON; `cut_from_json` reads them back without loss."""


@dataclass(frozen=True, slots=True)
class ShardCut(Cut):
    """Cut a dim into chunks of ceil(n / size) elements, like ``Shard(dim)``; the last chunks may be short or empty."""

    dim: int

    def narrow(self, region: Region, coordinate: int, size: int, layouts: Layouts) -> Region:
        return Region.of_box(region.box.chunk(self.dim, size, coordinate))

    def touching(self, region: Region, size: int, wanted: Region, layouts: Layouts) -> Iterator[int]:
        # At least 1, because an empty dim would make the divisions below fail.
        chunk = max(1, chunk_of(region.box.sizes[self.dim], size, 0).numel)
        corner = region.box.offsets[self.dim]
        boxes = [box for box, _ in wanted.pieces()]
        if not boxes:
            return
        first = min(box.offsets[self.dim] for box in boxes) - corner
        last = max(box.offsets[self.dim] + box.sizes[self.dim] for box in boxes) - corner - 1
        yield from range(max(0, first // chunk), min(size - 1, last // chunk) + 1)

    def to_json(self) -> list[Any]:
        return ["shard", self.dim]


class _FlatCut(Cut):
    """A cut of the region's flat elements into one range per coordinate."""

    __slots__ = ()

    @abstractmethod
    def flat_range(self, region: Region, coordinate: int, size: int, layouts: Layouts) -> Range:
        """Return the range of the box's flat elements that belongs to a coordinate."""

    @abstractmethod
    def coordinates_of(self, region: Region, size: int, flat: Range, layouts: Layouts) -> Iterator[int]:
        """Yield the coordinates whose ranges share elements with ``flat``."""

    def narrow(self, region: Region, coordinate: int, size: int, layouts: Layouts) -> Region:
        return Region(region.box, self.flat_range(region, coordinate, size, layouts))

    def touching(self, region: Region, size: int, wanted: Region, layouts: Layouts) -> Iterator[int]:
        if region.box == wanted.box:
            flat = wanted.span
        else:
            # The smallest flat range of the region's box that covers the wanted elements; the range may cover others.
            strides = contiguous_strides(region.box.sizes)
            ranges = []
            for box, _ in wanted.pieces():
                shared = box.intersect(region.box)
                if shared is not None:
                    first = sum(
                        (a - b) * s
                        for a, b, s in zip(shared.offsets, region.box.offsets, strides, strict=True)
                    )
                    last = first + sum((n - 1) * s for n, s in zip(shared.sizes, strides, strict=True))
                    ranges.append((first, last + 1))
            if not ranges:
                return
            flat = Range(min(a for a, _ in ranges), max(b for _, b in ranges))
        if flat.numel:
            yield from self.coordinates_of(region, size, flat, layouts)


@dataclass(frozen=True, slots=True)
class LayoutCut(_FlatCut):
    """The pieces of a group layout's slot; ``layout`` and ``slot`` are indices into the manifest's tables."""

    layout: int
    slot: int

    def flat_range(self, region: Region, coordinate: int, size: int, layouts: Layouts) -> Range:
        layout = layouts[self.layout]
        return layout.piece(layout.slots[self.slot], coordinate).range

    def coordinates_of(self, region: Region, size: int, flat: Range, layouts: Layouts) -> Iterator[int]:
        layout = layouts[self.layout]
        slot = layout.slots[self.slot]
        # The slot's elements are in several runs of the buffer, each with its own ranks.
        if slot.is_scattered:
            start = 0
            for run in slot.runs:
                shared = flat.intersect(Range(start, start + run.numel)).shift(-start)
                if shared.numel:
                    first, last = shared.start // run.piece_numel, (shared.stop - 1) // run.piece_numel
                    yield from range(run.first_rank + first, run.first_rank + last + 1)
                start += run.numel
            return
        first, last = slot.offset + flat.start, slot.offset + flat.stop - 1
        yield from range(first // layout.shard_numel, last // layout.shard_numel + 1)

    def to_json(self) -> list[Any]:
        return ["layout", self.layout, self.slot]


@dataclass(frozen=True)
class UnitsCut(_FlatCut):
    """The pieces of a `RaggedShard` whose layout is unknown.

    Attributes:
        dims: the placement's dims.
        runs: run lengths (count, units): ``count`` consecutive ranks have ``units`` units each.
    """

    dims: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]

    @cached_property
    def placement(self) -> RaggedShard:
        """The `RaggedShard` with these dims and units."""
        # Imported here, because the module imports torch, which other cuts do not need.
        from vescale_fsdp.layout.placement import RaggedShard

        return RaggedShard.of_runs(self.dims, RunLengths(self.runs))

    def flat_range(self, region: Region, coordinate: int, size: int, layouts: Layouts) -> Range:
        return self.placement.piece(region.box.sizes, coordinate)

    def coordinates_of(self, region: Region, size: int, flat: Range, layouts: Layouts) -> Iterator[int]:
        yield from self.placement.piece_lengths(region.box.sizes).holders(*flat)

    def to_json(self) -> list[Any]:
        return ["units", list(self.dims), [list(run) for run in self.runs]]


def cut_from_json(data: Sequence[Any]) -> Cut:
    """Return the cut that a ``to_json`` method of a cut has described.

    Raises:
        CorruptCheckpointError: for an unknown kind of cut.
    """
    kind, *values = data
    if kind == "shard":
        return ShardCut(int(values[0]))
    if kind == "layout":
        return LayoutCut(int(values[0]), int(values[1]))
    if kind == "units":
        return UnitsCut(tuple(values[0]), tuple((int(count), int(units)) for count, units in values[1]))
    raise CorruptCheckpointError(
        "The manifest has a cut of an unknown kind.", expected="shard, layout or units", got=kind
    )


def shard_order(shards: Mapping[int, tuple[int, int]], sizes: Sequence[int]) -> list[int] | None:
    """Return the mesh axes in the order in which they cut a tensor; None if the split factors give no order.

    torch represents an axis that cuts after later axes of the mesh as a strided shard, whose split factor is the
    product of the sizes of these later axes. Other split factors occur too: if a tensor is cut by columns and then
    flattened, each rank has scattered elements, and no order of cuts produces them.

    Args:
        shards: axis -> (tensor dim, split factor), for each axis that cuts; the factor is 1 for a plain shard.
        sizes: the sizes of all axes of the mesh.
    """
    orders: dict[int, list[int]] = {}
    # From the last axis to the first, because a split factor is a product of the sizes of later axes.
    for axis in sorted((axis for axis in shards if sizes[axis] > 1), reverse=True):
        dim, split_factor = shards[axis]
        order = orders.setdefault(dim, [])
        parts = list(accumulate((sizes[other] for other in order), operator.mul, initial=1))
        if split_factor not in parts:
            return None
        order.insert(parts.index(split_factor), axis)
    # Cuts of different dims may be in any order; sorted, so that equal tensors have equal descriptions.
    return [axis for order in sorted(orders.values(), key=min) for axis in order]


@dataclass(frozen=True)
class Distribution:
    """The axes and cuts of one tensor, in order of application: cut i divides the tensor along axis i."""

    axes: Axes
    cuts: tuple[Cut, ...]

    def region(self, shape: tuple[int, ...], coordinates: Sequence[int], layouts: Layouts) -> Region:
        """Return the region that ranks at these coordinates have of a tensor of this shape."""
        region = whole_region(shape)
        for axis, cut, coordinate in zip(self.axes, self.cuts, coordinates, strict=True):
            region = cut.narrow(region, coordinate, axis.size, layouts)
        return region

    def touching(
        self, shape: tuple[int, ...], wanted: Region | None, layouts: Layouts
    ) -> Iterator[tuple[tuple[int, ...], Region]]:
        """Yield (coordinates, region) for each region that may overlap ``wanted``; None for all non-empty regions."""
        whole = whole_region(shape)
        target = whole if wanted is None else wanted

        def descend(region: Region, coordinates: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Region]]:
            depth = len(coordinates)
            if depth == len(self.cuts):
                yield coordinates, region
                return
            cut, size = self.cuts[depth], self.axes[depth].size
            for coordinate in cut.touching(region, size, target, layouts):
                part = cut.narrow(region, coordinate, size, layouts)
                if part.numel:
                    yield from descend(part, (*coordinates, coordinate))

        return descend(whole, ())


class Holders:
    """The coordinates of each rank of a set, and the order of replicas.

    A *cell* is the row-major index of a tuple of coordinates in the mesh; ranks in one cell are replicas.
    """

    def __init__(self, ranks: RankSet, axes: Axes) -> None:
        self._sizes = tuple(axis.size for axis in axes)
        members = ranks.ranks
        cells = [0] * len(members)
        for axis in axes:
            coordinates = axis.coordinates(members)
            # Coordinate -1: the rank is outside of the mesh. Its cell is then -1, whatever later axes say.
            cells = [
                cell * axis.size + coordinate if cell >= 0 <= coordinate else -1
                for cell, coordinate in zip(cells, coordinates, strict=True)
            ]
        self._cell_of = {rank: cell for rank, cell in zip(members, cells, strict=True) if cell >= 0}
        self._ranks_at: dict[int, list[int]] = {}  # replicas in rank order
        for rank, cell in self._cell_of.items():
            self._ranks_at.setdefault(cell, []).append(rank)

    def ranks_at(self, coordinates: Sequence[int]) -> list[int]:
        """Return the replicas at these coordinates, in rank order."""
        cell = 0
        for size, coordinate in zip(self._sizes, coordinates, strict=True):
            cell = cell * size + coordinate
        return self._ranks_at.get(cell, [])

    def position(self, rank: int) -> tuple[tuple[int, ...], int, int] | None:
        """Return (coordinates, index among the replicas, number of replicas) of a rank; None if it has no part."""
        cell = self._cell_of.get(rank)
        if cell is None:
            return None
        replicas = self._ranks_at[cell]
        coordinates = []
        for size in reversed(self._sizes):
            cell, coordinate = divmod(cell, size)
            coordinates.append(coordinate)
        return tuple(reversed(coordinates)), replicas.index(rank), len(replicas)

    def missing_cell(self) -> int | None:
        """Return the first cell without a rank, or None if every cell has a rank."""
        if len(self._ranks_at) == prod(self._sizes):
            return None  # at once, as it is asked for every tensor
        return next((cell for cell in range(prod(self._sizes)) if cell not in self._ranks_at), None)
