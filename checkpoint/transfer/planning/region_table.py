"""The regions of all places of a tensor at once, as arrays, and how many items each pair of places shares.

`Distribution.region` answers for one rank; totals over thousands of ranks ask for all of them, and for every pair
of ranks that share items. Both are closed formulas, so numpy answers them without a loop over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vescale_fsdp.checkpoint.manifest.distribution import Cut, Distribution, LayoutCut, ShardCut
from vescale_fsdp.checkpoint.manifest.region import Region
from vescale_fsdp.checkpoint.transfer.planning.links import Leaf
from vescale_fsdp.layout.geometry import Box, FlatRange, numel_of
from vescale_fsdp.layout.group_layout import GroupLayout

Ints = npt.NDArray[np.int64]
_MAX_PAIRS = 1 << 21  # looked at in one go


class RegionTable(NamedTuple):
    """Flat ranges of boxes, one per row.

    Attributes:
        places: 1D [rows], the place of each; of several, where a place has several boxes.
        offsets, sizes: 2D [rows, dims], the boxes.
        starts, stops: 1D [rows], ranges of the boxes' items.
    """

    places: Ints
    offsets: Ints
    sizes: Ints
    starts: Ints
    stops: Ints

    def chosen(self, rows: Any) -> RegionTable:
        """Some of the rows."""
        return RegionTable(*(column[rows] for column in self))

    @classmethod
    def of(cls, items: Sequence[tuple[int, Region]], num_dims: int) -> RegionTable:
        """A table of regions, each with its place."""
        columns = [[], [], [], [], []]  # type: list[list[Any]]
        for place, region in items:
            row = (place, region.box.offsets, region.box.sizes, *region.span)
            for column, value in zip(columns, row, strict=True):
                column.append(value)
        places, offsets, sizes, starts, stops = (np.array(column, dtype=np.int64) for column in columns)
        shape = (len(places), num_dims)
        return cls(places, offsets.reshape(shape), sizes.reshape(shape), starts, stops)

    def boxes(self) -> RegionTable:
        """The same as rows that hold all of their boxes."""
        numels = self.sizes.prod(1)
        whole = (self.starts == 0) & (self.stops == numels)
        if whole.all():
            return self
        found = []
        for row in np.flatnonzero(~whole & (self.starts < self.stops)):
            box = Box(tuple(self.offsets[row].tolist()), tuple(self.sizes[row].tolist()))
            region = Region(box, FlatRange(int(self.starts[row]), int(self.stops[row])))
            for piece, _ in region.pieces():
                found.append((int(self.places[row]), Region(piece, FlatRange(0, piece.numel))))
        cut = RegionTable.of(found, self.offsets.shape[1])
        parts = zip(self.chosen(whole), cut, strict=True)
        return RegionTable(*(np.concatenate(pair) for pair in parts))

    def flat(self, shape: tuple[int, ...]) -> tuple[Ints, Ints] | None:
        """Ranges of the tensor's items, if every row is one."""
        if not shape:
            return self.starts, self.stops
        if (self.sizes[:, 1:] != np.array(shape[1:], dtype=np.int64)).any():
            return None
        base = self.offsets[:, 0] * numel_of(shape[1:])
        return base + self.starts, base + self.stops


def region_table(
    distribution: Distribution, shape: tuple[int, ...], layouts: Sequence[GroupLayout]
) -> RegionTable:
    """The regions of all places; a place is the coordinates on the axes that cut, the first one slowest."""
    dims, numel = len(shape), numel_of(shape)
    table = RegionTable(
        np.zeros(1, np.int64),
        np.zeros((1, dims), np.int64),
        np.array([shape], np.int64).reshape(1, dims),
        np.zeros(1, np.int64),
        np.array([numel], np.int64),
    )
    for axis, cut in zip(distribution.axes, distribution.cuts, strict=True):
        rows = np.repeat(np.arange(len(table.places)), axis.size)
        coordinates = np.tile(np.arange(axis.size), len(table.places))
        table = table.chosen(rows)
        table = table._replace(places=table.places * axis.size + coordinates)
        table = _narrowed(table, cut, coordinates, axis.size, layouts)
    return table


def _narrowed(
    table: RegionTable, cut: Cut, coordinates: Ints, size: int, layouts: Sequence[GroupLayout]
) -> RegionTable:
    """`Cut.narrow` of every row at its coordinate."""
    if isinstance(cut, ShardCut):
        full = table.sizes[:, cut.dim]
        chunk = -(-full // size)
        start = np.minimum(chunk * coordinates, full)
        offsets, sizes = table.offsets.copy(), table.sizes.copy()
        offsets[:, cut.dim] += start
        sizes[:, cut.dim] = np.minimum(start + chunk, full) - start
        return table._replace(offsets=offsets, sizes=sizes, starts=np.zeros_like(start), stops=sizes.prod(1))
    if isinstance(cut, LayoutCut) and not layouts[cut.layout].slots[cut.slot].is_scattered:
        layout, slot = layouts[cut.layout], layouts[cut.layout].slots[cut.slot]
        edges = coordinates * layout.shard_numel - slot.offset
        numel = numel_of(slot.shape)
        starts, stops = np.clip(edges, 0, numel), np.clip(edges + layout.shard_numel, 0, numel)
        return table._replace(starts=starts, stops=stops)
    spans = []
    for row, coordinate in enumerate(coordinates.tolist()):
        box = Box(tuple(table.offsets[row].tolist()), tuple(table.sizes[row].tolist()))
        region = Region(box, FlatRange(0, box.numel))
        spans.append(cut.narrow(region, coordinate, size, layouts).span)
    starts, stops = np.array(spans, dtype=np.int64).reshape(-1, 2).T
    return table._replace(starts=starts, stops=stops)


class Overlaps(NamedTuple):
    """How many items a place of a source gives to a place of a target; pairs may occur several times.

    Attributes:
        source, target, numels: 1D [pairs].
        looked_at: pairs that were asked for, the work of finding them.
    """

    source: Ints
    target: Ints
    numels: Ints
    looked_at: int


def overlaps_of_tables(
    source: RegionTable,
    target: RegionTable,
    leaf: Leaf,
    shape: tuple[int, ...],
    target_shape: tuple[int, ...],
) -> Overlaps:
    """All pairs of places that share items of a leaf.

    Args:
        shape, target_shape: of the source tensor and of the target tensor.
    """
    source = source.chosen(source.starts < source.stops)
    target = target.chosen(target.starts < target.stops)
    if leaf.is_identity and shape == target_shape and leaf.box.sizes == shape:
        flat, target_flat = source.flat(shape), target.flat(shape)
        if flat is not None and target_flat is not None:
            return _of_ranges(source.places, flat, target.places, target_flat)
        if flat is None and target_flat is not None:  # what is cut into boxes below is the lesser number
            found = _of_boxes(target, _mapped(source.boxes(), leaf))
            return Overlaps(found.target, found.source, found.numels, found.looked_at)
    return _of_boxes(source, _mapped(target.boxes(), leaf))


def _of_ranges(
    places: Ints, ranges: tuple[Ints, Ints], target_places: Ints, target_ranges: tuple[Ints, Ints]
) -> Overlaps:
    """Pairs of two sets of disjoint ranges: every stretch between two edges lies in at most one of each."""
    edges = np.unique(np.concatenate((*ranges, *target_ranges)))
    lows, numels = edges[:-1], np.diff(edges)

    def owner(starts: Ints, stops: Ints, names: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
        order = np.argsort(starts, kind="stable")
        row = order[np.maximum(np.searchsorted(starts[order], lows, "right") - 1, 0)]
        return names[row], (starts[row] <= lows) & (lows < stops[row])

    if not len(places) or not len(target_places):
        nothing = np.zeros(0, np.int64)
        return Overlaps(nothing, nothing, nothing, 0)
    owners, is_held = owner(*ranges, places)
    wanting, is_wanted = owner(*target_ranges, target_places)
    both = is_held & is_wanted
    return Overlaps(owners[both], wanting[both], numels[both], len(edges))


def _mapped(target: RegionTable, leaf: Leaf) -> RegionTable:
    """Boxes of the target as the boxes of the source that fill them; rows without any are left out."""
    rows, dims = len(target.places), len(leaf.box.sizes)
    offsets = np.tile(np.array(leaf.box.offsets, np.int64).reshape(1, dims), (rows, 1))
    sizes = np.ones((rows, dims), np.int64)
    meets = np.ones(rows, bool)
    filled = leaf.target_box
    for place, dim in enumerate(leaf.dims):
        low = np.maximum(target.offsets[:, place], filled.offsets[place])
        stops = target.offsets[:, place] + target.sizes[:, place]
        high = np.minimum(stops, filled.offsets[place] + filled.sizes[place])
        meets &= low < high
        if dim >= 0:
            offsets[:, dim] += low - filled.offsets[place]
            sizes[:, dim] = high - low
    numels = sizes.prod(1)
    return RegionTable(target.places, offsets, sizes, np.zeros_like(numels), numels).chosen(meets)


def _of_boxes(source: RegionTable, wanted: RegionTable) -> Overlaps:
    """Pairs of flat ranges of boxes and whole boxes of the same tensor."""
    found: list[tuple[Ints, Ints, Ints]] = []
    looked_at = 0
    for held, want in _candidates(source, wanted):
        numels = _shared_numels(source.chosen(held), wanted.offsets[want], wanted.sizes[want])
        some = numels > 0
        found.append((source.places[held][some], wanted.places[want][some], numels[some]))
        looked_at += len(held)
    if not found:
        nothing = np.zeros(0, np.int64)
        return Overlaps(nothing, nothing, nothing, looked_at)
    held, want, numels = (np.concatenate(column) for column in zip(*found, strict=True))
    return Overlaps(held, want, numels, looked_at)


def _candidates(source: RegionTable, wanted: RegionTable) -> Iterator[tuple[Ints, Ints]]:
    """Rows of both whose extents along the first dim meet, a bounded number at a time."""
    if not len(source.places) or not len(wanted.places):
        return
    if not source.offsets.shape[1]:
        held, want = np.indices((len(source.places), len(wanted.places))).reshape(2, -1)
        yield held, want
        return
    step = np.maximum(source.sizes[:, 1:].prod(1), 1)
    lows = source.offsets[:, 0] + source.starts // step
    highs = source.offsets[:, 0] + -(-source.stops // step)
    order = np.argsort(lows, kind="stable")
    lows, highs = lows[order], np.maximum.accumulate(highs[order])
    low, high = wanted.offsets[:, 0], wanted.offsets[:, 0] + wanted.sizes[:, 0]
    first, last = np.searchsorted(highs, low, "right"), np.searchsorted(lows, high, "left")
    counts = np.maximum(last - first, 0)
    row = 0
    while row < len(counts):
        many = np.cumsum(counts[row:])
        taken = max(1, int(np.searchsorted(many, _MAX_PAIRS, "right")))
        part = counts[row : row + taken]
        want = np.repeat(np.arange(row, row + taken), part)
        within = np.arange(len(want)) - np.repeat(np.cumsum(part) - part, part)
        yield order[np.repeat(first[row : row + taken], part) + within], want
        row += taken


def _shared_numels(source: RegionTable, offsets: Ints, sizes: Ints) -> Ints:
    """Items that flat ranges of boxes share with other boxes, row by row."""
    low = np.maximum(source.offsets, offsets) - source.offsets
    high = np.minimum(source.offsets + source.sizes, offsets + sizes) - source.offsets
    high = np.maximum(high, low)
    numels = (high - low).prod(1)
    cut = np.flatnonzero((numels > 0) & ((source.starts > 0) | (source.stops < source.sizes.prod(1))))
    if len(cut):
        within = (source.sizes[cut], low[cut], high[cut])
        numels[cut] = _before(source.stops[cut], *within) - _before(source.starts[cut], *within)
    return numels


def _before(flat: Ints, sizes: Ints, low: Ints, high: Ints) -> Ints:
    """Items of boxes [low, high) whose flat index in row-major tensors of these sizes is below ``flat``."""
    count = np.zeros_like(flat)
    inside = np.ones(len(flat), bool)
    rest = flat
    for dim in range(sizes.shape[1]):
        step = sizes[:, dim + 1 :].prod(1)
        index = rest // step
        rest = rest - index * step
        inner = (high[:, dim + 1 :] - low[:, dim + 1 :]).prod(1)
        passed = np.clip(index, low[:, dim], high[:, dim]) - low[:, dim]
        count += np.where(inside, passed * inner, 0)
        inside &= (index >= low[:, dim]) & (index < high[:, dim])
    return count
