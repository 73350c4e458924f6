"""Demand: the bytes that ranks of a target take from each set of ranks of a source, and the routes of these bytes.

A *set* is all ranks of the source that store one piece of a tensor. A *cell* is the number of a piece: the row-major
index of the piece's coordinates on the axes that cut the tensor. `Distribution.region` computes the region of one cell.
Totals over thousands of ranks need the regions of all cells, and the number of items that each pair of cells shares.
Both have closed formulas, which numpy evaluates without a loop over ranks.

A *route* is ranks of the target that take the same bytes of a set, such as the replicas of an engine. The set sends the
bytes to the first rank of the route, and each rank sends them on to the next rank:

    set (0,), taken by ranks 4 and 6, by 5 and 7, and some bytes by all     routes (4, 6) and (5, 7)

So every rank sends and receives every byte at most once. A route for itself means messages of its own, so the few bytes
that all four ranks take are sent over both routes (`_divided`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vescale_fsdp.layout.distribution import Cut, Distribution, Holders, LayoutCut, ShardCut
from vescale_fsdp.layout.geometry import Box, Range, numel_of
from vescale_fsdp.layout.group_layout import GroupLayout
from vescale_fsdp.layout.region import Region, whole_region
from vescale_fsdp.transfer.description import StateDescription
from vescale_fsdp.transfer.links import Leaf, PlacedLeaf

Ints = npt.NDArray[np.int64]
# Three columns, 1D [pairs]: a cell of the source, a cell of the target, and the number of items that they share.
Overlaps = tuple[Ints, Ints, Ints]
Ranks = tuple[int, ...]
_NO_INTS: Ints = np.zeros(0, np.int64)
_MAX_PAIRS = 1 << 21  # pairs of boxes that are compared at once; bounds a column of int64 to 16 MiB
# Bytes have a route of their own if this saves at least this part of all bytes that the source sends.
_MIN_SAVED = 1 / 16
_MAX_KNOWN = 4  # routes with one first rank that `_divided` compares: bounds its time if all ranks take different bytes


@dataclass(frozen=True, eq=False)
class Demand:
    """The bytes that a source's sets of ranks send over each route of ranks of a target.

    Attributes:
        sets: the sets of source ranks from which bytes are sent, ascending.
        routes: the routes, ascending; all of one rank without relays.
        targets: the ranks of the target, ascending.
        sent: 2D [sets, routes], bytes. No rank of a route is in the set, since it would have the bytes.
        kept: 1D [targets], bytes that each rank copies within its own memory.
        relays: whether ranks that take the same bytes are one route.
        divided: the routes of bytes that the same ranks take, by these ranks, where it is not one route.
    """

    sets: tuple[Ranks, ...]
    routes: tuple[Ranks, ...]
    targets: Ranks
    sent: Ints
    kept: Ints
    relays: bool
    divided: Mapping[Ranks, tuple[Ranks, ...]] = field(repr=False)

    def routes_of(self, receivers: Ranks) -> tuple[Ranks, ...]:
        """Return the routes of bytes that ``receivers``, and no other ranks, take from one set."""
        if not self.relays:
            return tuple((receiver,) for receiver in receivers)
        return self.divided.get(receivers, (receivers,))

    @cached_property
    def row_of(self) -> dict[Ranks, int]:
        """The row of `sent` for each set."""
        return {ranks: row for row, ranks in enumerate(self.sets)}

    @cached_property
    def column_of(self) -> dict[Ranks, int]:
        """The column of `sent` for each route."""
        return {route: column for column, route in enumerate(self.routes)}

    @cached_property
    def starts(self) -> Ints:
        """2D [sets, routes + 1], prefix sums of `sent`: where each route's bytes begin among a set's bytes."""
        return np.pad(np.cumsum(self.sent, axis=1), ((0, 0), (1, 0)))


def demand_of(
    source: StateDescription, target: StateDescription, leaves: Sequence[PlacedLeaf], *, relay: bool = True
) -> Demand:
    """Compute the bytes that each set of ranks of a source sends over each route of ranks of a target."""
    overlaps = _OverlapCache(source, target)
    ranks_at: dict[Holders, list[Ranks]] = {}  # the ranks that store each cell
    # Matrices of bytes, 2D [source cells, target cells]. Each is a sum over all leaves whose cells are on equal ranks.
    # Most tensors of a state share one matrix, so the loop over cells below runs once for most tensors.
    sums: dict[tuple[Holders, Holders], Ints] = {}
    for leaf in leaves:
        key = leaf.source.holders, target.holders_of(leaf.target)
        if key not in sums:
            cuts = leaf.source.distribution, target.distributions[leaf.target]
            for holders, cut in zip(key, cuts, strict=True):
                if holders not in ranks_at:
                    cells = np.ndindex(*(axis.size for axis in cut.axes))
                    ranks_at[holders] = [tuple(holders.ranks_at(at)) for at in cells]
            sums[key] = np.zeros([len(ranks_at[holders]) for holders in key], np.int64)
        stored_at, wanted_at, numels = overlaps.of(leaf)
        pairs = stored_at * sums[key].shape[1] + wanted_at
        # A pair of cells may occur several times. `add.at` adds all values of the pair; ``+=`` would add only one.
        np.add.at(sums[key].reshape(-1), pairs, numels * leaf.itemsize)

    targets = target.all_ranks
    columns = {rank: column for column, rank in enumerate(targets)}
    kept = np.zeros(len(targets), np.int64)
    # All ranks that take the same bytes are *receivers*. For each set: numbers of receivers, and bytes of each.
    numbers: dict[Ranks, int] = {(): 0}  # (): of cells that no rank of the target stores
    taken: dict[Ranks, list[tuple[Ints, Ints]]] = {}
    for (owners, takers), matrix in sums.items():
        cell_of = {rank: cell for cell, ranks in enumerate(ranks_at[takers]) for rank in ranks}
        numbers_at = np.array([numbers.setdefault(ranks, len(numbers)) for ranks in ranks_at[takers]])
        for cell, ranks in enumerate(ranks_at[owners]):
            if not ranks or not matrix[cell].any():
                continue
            numbers_here = numbers_at
            own = [rank for rank in ranks if rank in cell_of and matrix[cell, cell_of[rank]]]
            if own:  # these ranks copy within their memory
                numbers_here = numbers_at.copy()
                for rank in own:
                    kept[columns[rank]] += matrix[cell, cell_of[rank]]
                    others = tuple(each for each in ranks_at[takers][cell_of[rank]] if each not in ranks)
                    numbers_here[cell_of[rank]] = numbers.setdefault(others, len(numbers))
            wanted = np.flatnonzero(matrix[cell])
            taken.setdefault(ranks, []).append((numbers_here[wanted], matrix[cell][wanted]))
    # Sorted, so that all ranks number the sets in the same order.
    sets, known = sorted(taken), list(numbers)
    sent = np.zeros((len(sets), len(known)), np.int64)
    for row, ranks in enumerate(sets):
        for some, nbytes in taken[ranks]:
            np.add.at(sent[row], some, nbytes)
    sent[:, 0] = 0
    divided: dict[Ranks, tuple[Ranks, ...]] = {}
    if relay:
        divided = _divided(dict(zip(known, sent.sum(0).tolist(), strict=True)))
        for receivers, routes in divided.items():
            moved = sent[:, numbers[receivers]].copy()
            sent[:, numbers[receivers]] = 0
            for route in routes:
                sent[:, numbers[route]] += moved
    else:
        direct = np.zeros((len(sets), len(targets)), np.int64)
        for number, receivers in enumerate(known):
            senders = np.flatnonzero(sent[:, number])
            takers_at = np.array([columns[rank] for rank in receivers], np.int64)
            direct[np.ix_(senders, takers_at)] += sent[senders, number][:, None]
        sent, known = direct, [(rank,) for rank in targets]
    order = sorted(np.flatnonzero(sent.any(0)).tolist(), key=known.__getitem__)
    rows = np.flatnonzero(sent.any(1)).tolist()
    used = tuple(sets[row] for row in rows), tuple(known[number] for number in order)
    return Demand(*used, targets, sent[np.ix_(rows, order)], kept, relay, divided)


def _divided(nbytes_of: Mapping[Ranks, int]) -> dict[Ranks, tuple[Ranks, ...]]:
    """Return the routes of bytes that have no route of their own, by the ranks that take the bytes.

    A route of its own means more messages. So few bytes are sent over routes that more bytes have anyway, if these
    routes together have exactly the ranks that take the few bytes.

    Args:
        nbytes_of: bytes by the ranks that take these bytes.
    """
    least = _MIN_SAVED * sum(nbytes_of.values())
    divided: dict[Ranks, tuple[Ranks, ...]] = {}
    # Ranks that take more bytes, by the first of these ranks; most bytes first.
    larger: dict[int, list[Ranks]] = {}
    for receivers in sorted(filter(None, nbytes_of), key=lambda ranks: (-nbytes_of[ranks], ranks)):
        # Two routes instead of one send the bytes once more: the least that a route of its own saves.
        if len(receivers) > 1 and nbytes_of[receivers] < least:
            left, routes = set(receivers), list[Ranks]()
            for rank in receivers:
                known = larger.get(rank, ()) if rank in left else ()
                ranks = next((each for each in known if left.issuperset(each)), ())
                left.difference_update(ranks)
                routes += divided.get(ranks, (ranks,)) if ranks else ()
            if not left and nbytes_of[receivers] * (len(routes) - 1) < least:
                divided[receivers] = tuple(sorted(routes))
        if len(larger.setdefault(receivers[0], [])) < _MAX_KNOWN:
            larger[receivers[0]].append(receivers)
    return divided


class _OverlapCache:
    """Computes overlaps of leaves, once for all leaves that differ only in the names of their tensors.

    The layers of a model usually have equal shapes and cuts, so most leaves are in the cache.
    """

    def __init__(self, source: StateDescription, target: StateDescription) -> None:
        self._target = target
        self._layouts = source.structure.layouts, target.structure.layouts
        self._overlaps: dict[tuple[Any, ...], Overlaps] = {}
        self._tables: dict[tuple[Any, ...], RegionTable] = {}

    def of(self, placed: PlacedLeaf) -> Overlaps:
        """Return the number of items that each cell of the leaf's source shares with each cell of its target."""
        source, leaf = placed.source, placed.leaf
        shape = self._target.entries[placed.target].shape
        cut, layouts = self._target.distributions[placed.target], self._layouts
        source_key = (*source.regions_key, *_cuts_key(source.distribution, layouts[0]))
        target_key = (shape, None, *_cuts_key(cut, layouts[1]))
        key = (source_key, target_key, leaf.box, leaf.corner, leaf.dims)
        if key in self._overlaps:
            return self._overlaps[key]
        if source_key not in self._tables and not source.is_whole:
            # Scales, and boxes of a tensor, have no closed formula.
            cells = enumerate(source.all_coordinates())
            regions = [(cell, region) for cell, at in cells for region, _ in source.regions(at)]
            self._tables[source_key] = RegionTable.of(regions, len(source.shape))
        elif source_key not in self._tables:
            self._tables[source_key] = region_table(source.distribution, source.shape, layouts[0])
        if target_key not in self._tables:
            self._tables[target_key] = region_table(cut, shape, layouts[1])
        tables = self._tables[source_key], self._tables[target_key]
        self._overlaps[key] = overlaps_of_tables(*tables, leaf, source.shape, shape)
        return self._overlaps[key]


def _cuts_key(distribution: Distribution, layouts: Sequence[GroupLayout]) -> tuple[Any, ...]:
    """Return a hashable key that is equal for distributions with equal regions.

    Not the distribution itself: layouts of different layers often differ only in names, which do not change regions.
    """

    def key(cut: Cut) -> Any:
        """Return the cut itself; for a cut by layout, the fields that determine its regions."""
        if not isinstance(cut, LayoutCut):
            return cut
        layout, slot = layouts[cut.layout], layouts[cut.layout].slots[cut.slot]
        return layout.shard_numel, slot.offset, slot.runs

    sizes = tuple(axis.size for axis in distribution.axes)
    return sizes, tuple(map(key, distribution.cuts))


class RegionTable(NamedTuple):
    """A table of regions. Each row is a flat range of the items of a box.

    Attributes:
        cells: 1D [rows], the cell of each row; a cell with several boxes has several rows.
        offsets, sizes: 2D [rows, dims], the box of each row.
        starts, stops: 1D [rows], the range of each row, in items of its box in row-major order.
    """

    cells: Ints
    offsets: Ints
    sizes: Ints
    starts: Ints
    stops: Ints

    @classmethod
    def of(cls, items: Sequence[tuple[int, Region]], num_dims: int) -> RegionTable:
        """Make a table from (cell, region) pairs of a tensor with ``num_dims`` dims."""
        rows = [(cell, region.box.offsets, region.box.sizes, *region.span) for cell, region in items]
        columns = zip(*rows, strict=True) if rows else [()] * 5  # `zip` of no rows would give no columns
        cells, offsets, sizes, starts, stops = (np.array(column, dtype=np.int64) for column in columns)
        shape = (len(rows), num_dims)
        return cls(cells, offsets.reshape(shape), sizes.reshape(shape), starts, stops)

    def chosen(self, rows: Any) -> RegionTable:
        """Return the table of the rows that a mask, a slice or an array of indices selects."""
        return RegionTable(*(column[rows] for column in self))

    def box(self, row: int) -> Box:
        """Return the box of one row."""
        return Box(tuple(self.offsets[row].tolist()), tuple(self.sizes[row].tolist()))

    def boxes(self) -> RegionTable:
        """Return a table of equal items, in which the range of every row is the whole box of the row."""
        whole = (self.starts == 0) & (self.stops == self.sizes.prod(1))
        if whole.all():
            return self
        pieces = []
        for row in np.flatnonzero(~whole & (self.starts < self.stops)).tolist():
            region = Region(self.box(row), Range(int(self.starts[row]), int(self.stops[row])))
            for piece, _ in region.pieces():
                pieces.append((int(self.cells[row]), Region(piece, Range(0, piece.numel))))
        cut = RegionTable.of(pieces, self.offsets.shape[1])
        parts = zip(self.chosen(whole), cut, strict=True)
        return RegionTable(*(np.concatenate(pair) for pair in parts))

    def flat(self, shape: tuple[int, ...]) -> RegionTable | None:
        """Return a table of equal items, as 1D boxes of the flattened tensor of ``shape``.

        Returns:
            None if the items of some row are not contiguous in the flattened tensor.
        """
        # Boxes with all indices of all dims but the first are contiguous in the tensor.
        if (self.sizes[:, 1:] != np.array(shape[1:], dtype=np.int64)).any():
            return None
        first = self.offsets[:, 0] * numel_of(shape[1:]) if shape else np.zeros_like(self.starts)
        numels = self.stops - self.starts
        offsets, sizes = (first + self.starts)[:, None], numels[:, None]
        return RegionTable(self.cells, offsets, sizes, np.zeros_like(numels), numels)


def region_table(
    distribution: Distribution, shape: tuple[int, ...], layouts: Sequence[GroupLayout]
) -> RegionTable:
    """Return the table of the regions of all cells of a tensor, in the order of the cells."""
    table = RegionTable.of([(0, whole_region(shape))], len(shape))
    for axis, cut in zip(distribution.axes, distribution.cuts, strict=True):
        # Each axis splits every row into one row per coordinate, so the first axis changes slowest.
        rows = np.repeat(np.arange(len(table.cells)), axis.size)
        coordinates = np.tile(np.arange(axis.size), len(table.cells))
        table = table.chosen(rows)
        table = table._replace(cells=table.cells * axis.size + coordinates)
        table = _narrowed(table, cut, coordinates, axis.size, layouts)
    return table


def _narrowed(
    table: RegionTable, cut: Cut, coordinates: Ints, size: int, layouts: Sequence[GroupLayout]
) -> RegionTable:
    """Cut every row at its coordinate, as `Cut.narrow` does for one region, for all rows at once.

    Args:
        coordinates: 1D [rows], the coordinate of each row on the axis of ``cut``.
        size: size of this axis.
    """
    if isinstance(cut, ShardCut):  # chunks as torch's Shard makes them: equal, except at the end
        full = table.sizes[:, cut.dim]
        chunk = -(-full // size)
        start = np.minimum(chunk * coordinates, full)
        offsets, sizes = table.offsets.copy(), table.sizes.copy()  # the caller's table must not change
        offsets[:, cut.dim] += start
        sizes[:, cut.dim] = np.minimum(start + chunk, full) - start
        return table._replace(offsets=offsets, sizes=sizes, starts=np.zeros_like(start), stops=sizes.prod(1))
    # A tensor in a slot that is not scattered is one range of its group's buffer.
    if isinstance(cut, LayoutCut) and not layouts[cut.layout].slots[cut.slot].is_scattered:
        layout, slot = layouts[cut.layout], layouts[cut.layout].slots[cut.slot]
        edges = coordinates * layout.shard_numel - slot.offset
        numel = numel_of(slot.shape)
        # Shards that end before the tensor or start after it get an empty range.
        starts, stops = np.clip(edges, 0, numel), np.clip(edges + layout.shard_numel, 0, numel)
        return table._replace(starts=starts, stops=stops)
    spans = []  # row by row: the remaining kinds of cuts have no closed formula, and are rare
    for row, coordinate in enumerate(coordinates.tolist()):
        box = table.box(row)
        spans.append(cut.narrow(Region(box, Range(0, box.numel)), coordinate, size, layouts).span)
    starts, stops = np.array(spans, dtype=np.int64).reshape(-1, 2).T
    return table._replace(starts=starts, stops=stops)


def overlaps_of_tables(
    source: RegionTable,
    target: RegionTable,
    leaf: Leaf,
    shape: tuple[int, ...],
    target_shape: tuple[int, ...],
) -> Overlaps:
    """Return all pairs of cells that share items of a leaf. A pair of cells may occur several times.

    Args:
        shape: shape of the leaf's source tensor.
        target_shape: shape of the leaf's target tensor.
    """
    # Without empty rows.
    source = source.chosen(source.starts < source.stops)
    target = target.chosen(target.starts < target.stops)
    if leaf.is_identity and shape == target_shape and leaf.box.sizes == shape:
        flat, target_flat = source.flat(shape), target.flat(shape)
        if flat is not None and target_flat is not None:
            return _shared(flat, target_flat)
        # `_shared` needs whole boxes as its second argument. The target's rows are flat ranges here, so the sides are
        # swapped: cutting the source's rows into boxes gives fewer boxes.
        if target_flat is not None:
            takers, owners, numels = _shared(target, _mapped(source.boxes(), leaf))
            return owners, takers, numels
    return _shared(source, _mapped(target.boxes(), leaf))


def _mapped(target: RegionTable, leaf: Leaf) -> RegionTable:
    """Replace boxes of the target with the boxes of the source from which the leaf fills them.

    Rows that the leaf does not fill are dropped. Each row of ``target`` must be a whole box.
    """
    rows, dims = len(target.cells), len(leaf.box.sizes)
    offsets = np.tile(np.array(leaf.box.offsets, np.int64).reshape(1, dims), (rows, 1))
    sizes = np.ones((rows, dims), np.int64)
    meets = np.ones(rows, bool)  # whether the leaf fills items of the row
    filled = leaf.target_box
    for target_dim, dim in enumerate(leaf.dims):
        low = np.maximum(target.offsets[:, target_dim], filled.offsets[target_dim])
        stops = target.offsets[:, target_dim] + target.sizes[:, target_dim]
        high = np.minimum(stops, filled.offsets[target_dim] + filled.sizes[target_dim])
        meets &= low < high
        if dim >= 0:  # -1: the source lacks this dim
            offsets[:, dim] += low - filled.offsets[target_dim]
            sizes[:, dim] = high - low
    numels = sizes.prod(1)
    return RegionTable(target.cells, offsets, sizes, np.zeros_like(numels), numels).chosen(meets)


def _shared(source: RegionTable, wanted: RegionTable) -> Overlaps:
    """Return the overlaps of the rows of ``source`` and of ``wanted``, which must be whole boxes of one tensor."""
    parts: list[Overlaps] = [(_NO_INTS, _NO_INTS, _NO_INTS)]
    for row, wanted_row in _candidates(source, wanted):
        numels = shared_numels(source.chosen(row), wanted.offsets[wanted_row], wanted.sizes[wanted_row])
        some = numels > 0  # rows that overlap along the first dim may still share no item
        parts.append((source.cells[row][some], wanted.cells[wanted_row][some], numels[some]))
    owners, takers, numels = (np.concatenate(column) for column in zip(*parts, strict=True))
    return owners, takers, numels


def _candidates(source: RegionTable, wanted: RegionTable) -> Iterator[tuple[Ints, Ints]]:
    """Yield pairs of rows, one of each table, whose boxes may overlap, since their extents along the first dim do.

    Yields:
        Indices into ``source`` and into ``wanted``, at most `_MAX_PAIRS` pairs at a time if possible.
    """
    if not len(source.cells) or not len(wanted.cells):
        return
    if not source.offsets.shape[1]:  # scalars: all pairs overlap
        row, wanted_row = np.indices((len(source.cells), len(wanted.cells))).reshape(2, -1)
        yield row, wanted_row
        return
    step = np.maximum(source.sizes[:, 1:].prod(1), 1)  # at least 1: no division by zero for empty boxes
    lows = source.offsets[:, 0] + source.starts // step
    highs = source.offsets[:, 0] + -(-source.stops // step)
    order = np.argsort(lows, kind="stable")
    # Both ascending, for `searchsorted`. Running maxima of the upper ends may add candidates, but lose none.
    lows, highs = lows[order], np.maximum.accumulate(highs[order])
    low, high = wanted.offsets[:, 0], wanted.offsets[:, 0] + wanted.sizes[:, 0]
    first, last = np.searchsorted(highs, low, "right"), np.searchsorted(lows, high, "left")
    counts = np.maximum(last - first, 0)
    start = 0
    while start < len(counts):
        totals = np.cumsum(counts[start:])
        # At least one row of ``wanted``, even if the pairs of one row exceed the limit: the loop must advance.
        stop = start + max(1, int(np.searchsorted(totals, _MAX_PAIRS, "right")))
        chosen = counts[start:stop]
        wanted_row = np.repeat(np.arange(start, stop), chosen)
        # 0, 1, .. for each row of ``wanted``: the number of the candidate.
        within = np.arange(len(wanted_row)) - np.repeat(np.cumsum(chosen) - chosen, chosen)
        yield order[np.repeat(first[start:stop], chosen) + within], wanted_row
        start = stop


def shared_numels(source: RegionTable, offsets: Ints, sizes: Ints) -> Ints:
    """Count, for each row, the items that ``source`` shares with the box of ``offsets`` and ``sizes`` in this row."""
    low = np.maximum(source.offsets, offsets) - source.offsets
    high = np.minimum(source.offsets + source.sizes, offsets + sizes) - source.offsets
    high = np.maximum(high, low)  # size 0 instead of a negative one where boxes are disjoint
    numels = (high - low).prod(1)
    # Of rows that are not their whole box: shared items before the row's stop, minus shared items before its start.
    cut = np.flatnonzero((numels > 0) & ((source.starts > 0) | (source.stops < source.sizes.prod(1))))
    if len(cut):
        within = (source.sizes[cut], low[cut], high[cut])
        numels[cut] = _before(source.stops[cut], *within) - _before(source.starts[cut], *within)
    return numels


def _before(flat: Ints, sizes: Ints, low: Ints, high: Ints) -> Ints:
    """Count the items of each box [low, high) that come before the flat index ``flat``, in row-major order.

    Args:
        flat: 1D [rows], an index in a tensor with the row's ``sizes``.
        sizes, low, high: 2D [rows, dims].
    """
    # Dim by dim: count the items whose index in this dim is smaller, while all indices in earlier dims are equal.
    count = np.zeros_like(flat)
    inside = np.ones(len(flat), bool)  # whether the item at ``flat`` is inside the box in all dims so far
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
