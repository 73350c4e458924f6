"""How many bytes each rank of a target takes from each set of ranks of a source that hold the same.

All ranks at once, by arithmetic on the places of tensors: a matrix of sets and ranks. From it follow the loads of
all ranks, and where in the line of a set's bytes each rank's begin (see `balance`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from vescale_fsdp.checkpoint.manifest.distribution import Cut, Distribution, Holders, LayoutCut
from vescale_fsdp.checkpoint.transfer.planning.description import StateDescription
from vescale_fsdp.checkpoint.transfer.planning.region_table import (
    Ints,
    Overlaps,
    RegionTable,
    overlaps_of_tables,
    region_table,
)
from vescale_fsdp.checkpoint.transfer.planning.sources import PlacedLeaf, SourceTensor
from vescale_fsdp.layout.group_layout import GroupLayout


@dataclass(frozen=True, eq=False)
class Demand:
    """Bytes that ranks take from sets of ranks.

    Attributes:
        sets: ranks that hold the same, ascending.
        targets: ranks that take, ascending.
        sent: 2D [sets, targets]; none where a rank is of the set itself.
        kept: 1D [targets], bytes that ranks take from themselves.
        looked_at: pairs of places that were compared, the work of finding this.
    """

    sets: tuple[tuple[int, ...], ...]
    targets: tuple[int, ...]
    sent: Ints
    kept: Ints
    looked_at: int

    @cached_property
    def row_of(self) -> dict[tuple[int, ...], int]:
        """Row of each set."""
        return {ranks: row for row, ranks in enumerate(self.sets)}

    @cached_property
    def column_of(self) -> dict[int, int]:
        """Column of each rank."""
        return {rank: column for column, rank in enumerate(self.targets)}

    @cached_property
    def starts(self) -> Ints:
        """Where each rank's bytes begin in the line of each set's, and where the line ends: 2D [sets, targets + 1]."""
        return np.pad(np.cumsum(self.sent, axis=1), ((0, 0), (1, 0)))


def demand_of(source: StateDescription, target: StateDescription, leaves: Sequence[PlacedLeaf]) -> Demand:
    """What every rank of a target takes from every set of a source."""
    counter = _Counter(source, target)
    for leaf in leaves:
        counter.add(leaf)
    return counter.demand()


class _Counter:
    """Bytes by pairs of places, summed over tensors whose places are the same ranks."""

    def __init__(self, source: StateDescription, target: StateDescription) -> None:
        self._source = source
        self._target = target
        self._sums: dict[tuple[int, int], Ints] = {}
        self._holders: dict[int, tuple[Holders, Distribution]] = {}
        self._known: dict[tuple[Any, ...], Overlaps] = {}
        self._tables: dict[tuple[Any, ...], RegionTable] = {}
        self._looked_at = 0

    def add(self, leaf: PlacedLeaf) -> None:
        """Count what a leaf moves."""
        source, place = leaf.source, leaf.target
        holders = self._target.holders_of(place)
        distributions = source.distribution, self._target.distributions[place]
        found = self._overlaps(leaf)
        key = id(source.holders), id(holders)
        for number, pair in zip(
            key, ((source.holders, distributions[0]), (holders, distributions[1])), strict=True
        ):
            self._holders[number] = pair
        sums = self._sums.get(key)
        if sums is None:
            shape = tuple(_num_places(distribution) for distribution in distributions)
            sums = self._sums[key] = np.zeros(shape, np.int64)
        pairs = found.source * sums.shape[1] + found.target
        np.add.at(sums.reshape(-1), pairs, found.numels * leaf.itemsize)

    def _overlaps(self, placed: PlacedLeaf) -> Overlaps:
        source, leaf = placed.source, placed.leaf
        entry = self._target.entries[placed.target]
        distribution = self._target.distributions[placed.target]
        layouts = self._target.structure.layouts
        theirs = (entry.shape, *_cuts_key(distribution, layouts))
        key = (
            source.key_of_regions,
            *_cuts_key(source.distribution, self._source.structure.layouts),
            *theirs,
            leaf.box,
            leaf.corner,
            leaf.dims,
        )
        found = self._known.get(key)
        if found is None:
            table = self._tables.get(theirs)
            if table is None:
                table = self._tables[theirs] = region_table(distribution, entry.shape, layouts)
            shapes = source.shape, entry.shape
            found = self._known[key] = overlaps_of_tables(self._source_table(source), table, leaf, *shapes)
            self._looked_at += found.looked_at
        return found

    def _source_table(self, source: SourceTensor) -> RegionTable:
        key = (source.key_of_regions, *_cuts_key(source.distribution, self._source.structure.layouts))
        table = self._tables.get(key)
        if table is None:
            if source.is_scales:
                table = RegionTable.of(list(source.placed_regions()), len(source.shape))
            else:
                table = region_table(source.distribution, source.shape, self._source.structure.layouts)
            self._tables[key] = table
        return table

    def demand(self) -> Demand:
        """The sums by sets and ranks."""
        targets = self._target.all_ranks
        rows: dict[tuple[int, ...], Ints] = {}
        kept = np.zeros(len(targets), np.int64)
        columns = {rank: column for column, rank in enumerate(targets)}
        for (source, target), sums in self._sums.items():
            place_of = np.full(len(targets), -1)
            for place, ranks in _ranks_by_place(*self._holders[target]):
                place_of[[columns[rank] for rank in ranks]] = place
            is_there = place_of >= 0
            for place, ranks in _ranks_by_place(*self._holders[source]):
                if not sums[place].any():
                    continue
                wanted = np.where(is_there, sums[place][place_of], 0)
                own = [columns[rank] for rank in ranks if rank in columns]
                kept[own] += wanted[own]
                wanted[own] = 0
                row = rows.setdefault(ranks, np.zeros(len(targets), np.int64))
                row += wanted
        sets = tuple(sorted(ranks for ranks, row in rows.items() if row.any()))
        sent = np.array([rows[ranks] for ranks in sets], np.int64).reshape(len(sets), len(targets))
        return Demand(sets, targets, sent, kept, self._looked_at)


def _num_places(distribution: Distribution) -> int:
    return int(np.prod([axis.size for axis in distribution.axes], dtype=np.int64))


def _ranks_by_place(holders: Holders, distribution: Distribution) -> list[tuple[int, tuple[int, ...]]]:
    """The ranks at each place that has any."""
    sizes = tuple(axis.size for axis in distribution.axes)
    found = ((place, tuple(holders.ranks_at(where))) for place, where in enumerate(np.ndindex(*sizes)))
    return [(place, ranks) for place, ranks in found if ranks]


def _cuts_key(distribution: Distribution, layouts: Sequence[GroupLayout]) -> tuple[Any, ...]:
    """What the regions of a distribution depend on: layouts of many layers differ in names alone."""

    def key(cut: Cut) -> Any:
        if not isinstance(cut, LayoutCut):
            return cut
        layout, slot = layouts[cut.layout], layouts[cut.layout].slots[cut.slot]
        return layout.shard_numel, slot.offset, slot.runs

    sizes = tuple(axis.size for axis in distribution.axes)
    return sizes, tuple(map(key, distribution.cuts))
