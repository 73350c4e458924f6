"""What one rank sends, receives and keeps: strided boxes, found by arithmetic on the plan. Nothing is exchanged.

Both ends of every stream find the same shares in the same order, since both ask the same questions of the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from vescale_fsdp.checkpoint.manifest.region import Region
from vescale_fsdp.checkpoint.transfer.planning.shares import Share, ShareStream, shares_between
from vescale_fsdp.checkpoint.transfer.planning.sources import PlacedLeaf
from vescale_fsdp.checkpoint.transfer.planning.transfer_plan import TransferPlan
from vescale_fsdp.layout.geometry import Box, FlatRange

Ranks = tuple[int, ...]
Streams = dict[Ranks, dict[int, list[Share]]]  # by set of ranks that hold the same, then by rank that takes


class RankTransfers:
    """One rank's part of a plan.

    Args:
        rank: its number in the world of the plan's descriptions.
    """

    def __init__(self, plan: TransferPlan, rank: int) -> None:
        self.plan = plan
        self.rank = rank
        self._target_regions: dict[tuple[int, tuple[int, ...]], Region] = {}

    @cached_property
    def sends(self) -> dict[int, ShareStream]:
        """What goes to each other rank, by its number."""
        found: dict[int, list[Share]] = {}
        for ranks, by_rank in sorted(self._outgoing.items()):
            for taker, shares in by_rank.items():
                found.setdefault(taker, []).extend(self._part(ranks, self.rank, taker, shares))
        return {taker: ShareStream(found[taker]) for taker in sorted(found) if found[taker]}

    @cached_property
    def receives(self) -> dict[int, ShareStream]:
        """What comes from each other rank, by its number."""
        found: dict[int, list[Share]] = {}
        for ranks, by_rank in sorted(self._incoming.items()):
            for sender in ranks:
                part = self._part(ranks, sender, self.rank, by_rank[self.rank])
                found.setdefault(sender, []).extend(part)
        return {sender: ShareStream(found[sender]) for sender in sorted(found) if found[sender]}

    @cached_property
    def kept(self) -> list[Share]:
        """What this rank takes from itself."""
        return [
            share
            for ranks, by_rank in self._wanted.items()
            if self.rank in ranks
            for share in by_rank[self.rank]
        ]

    @cached_property
    def _incoming(self) -> Streams:
        return {ranks: by_rank for ranks, by_rank in self._wanted.items() if self.rank not in ranks}

    def _part(self, ranks: Ranks, sender: int, taker: int, shares: list[Share]) -> Iterator[Share]:
        """Of what a rank takes from a set, what one rank of the set sends."""
        if len(ranks) == 1:
            yield from shares
            return
        stream = ShareStream(shares)
        assert stream.nbytes == self.plan.wanted_bytes(ranks, taker)
        low, high = self.plan.stretch(ranks, sender, taker)
        if low < high:
            yield from stream.between(low, high)

    @cached_property
    def _wanted(self) -> Streams:
        """What this rank takes from each set, itself among them or not."""
        found: Streams = {}
        for number, placed in enumerate(self.plan.leaves):
            position = self.plan.target.holders_of(placed.target).position(self.rank)
            if position is None:
                continue
            target = self._target_region(placed.target, position[0])
            for coordinates in self._sources_of(placed, target):
                ranks = tuple(placed.source.holders.ranks_at(coordinates))
                held = placed.source.regions(coordinates)
                shares = list(shares_between(number, placed.itemsize, held, target, placed.leaf))
                if shares:
                    found.setdefault(ranks, {}).setdefault(self.rank, []).extend(shares)
        return found

    @cached_property
    def _outgoing(self) -> Streams:
        """What others take from each set that this rank is of."""
        found: Streams = {}
        for number, placed in enumerate(self.plan.leaves):
            position = placed.source.holders.position(self.rank)
            if position is None:
                continue
            held = placed.source.regions(position[0])
            ranks = tuple(placed.source.holders.ranks_at(position[0]))
            takers = self.plan.target.holders_of(placed.target)
            for coordinates in self._targets_of(placed, [region for region, _ in held]):
                others = [rank for rank in takers.ranks_at(coordinates) if rank not in ranks]
                if not others:
                    continue
                target = self._target_region(placed.target, coordinates)
                shares = list(shares_between(number, placed.itemsize, held, target, placed.leaf))
                for taker in others if shares else ():
                    found.setdefault(ranks, {}).setdefault(taker, []).extend(shares)
        return found

    def _target_region(self, place: int, coordinates: tuple[int, ...]) -> Region:
        key = (place, coordinates)
        found = self._target_regions.get(key)
        if found is None:
            target = self.plan.target
            shape, layouts = target.entries[place].shape, target.structure.layouts
            found = self._target_regions[key] = target.distributions[place].region(
                shape, coordinates, layouts
            )
        return found

    def _sources_of(self, placed: PlacedLeaf, target: Region) -> list[tuple[int, ...]]:
        """Coordinates in the source that may hold what a region of the target wants."""
        boxes = [placed.leaf.to_source(box) for box, _ in target.pieces()]
        found = {
            coordinates for box in boxes if box is not None for coordinates in placed.source.touching(box)
        }
        return sorted(found)

    def _targets_of(self, placed: PlacedLeaf, held: list[Region]) -> list[tuple[int, ...]]:
        """Coordinates in the target that may want what regions of the source hold."""
        target, place = self.plan.target, placed.target
        shape, layouts = target.entries[place].shape, target.structure.layouts
        boxes: list[Box | None] = [
            placed.leaf.to_target(box) for region in held for box, _ in region.pieces()
        ]
        found: set[tuple[int, ...]] = set()
        for box in boxes:
            if box is not None:
                wanted = Region(box, FlatRange(0, box.numel))
                touching = target.distributions[place].touching(shape, wanted, layouts)
                found.update(coordinates for coordinates, _ in touching)
        return sorted(found)
