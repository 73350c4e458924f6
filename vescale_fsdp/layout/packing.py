"""Packing: do these tensors fit into m shards of S elements without a cut block, and where? Integers only.

The planner guesses S; this module answers for one S and one order of tensors. Two ways to place a tensor:

    contiguous   one run of the global buffer. Its earliest legal start is taken; that is exact, because
                 ending earlier never hurts what follows.
    scattered    one piece per rank, wherever the contiguous tensors left room, in rank order. Pieces are
                 whole blocks, so the tensor has holes and must be copied out after a gather.

Both work on runs of ranks and on repetitions of sizes, so their time does not depend on m, and hardly on how
often a layer repeats the sizes of an expert.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from vescale_fsdp.layout.group_layout import PieceRun, runs_between

MAX_PERIOD = 8  # sizes in a repeated list; an expert has at most three matrices and three biases
ANY_NUMBER = 1 << 62

Size = tuple[int, int]
"""(numel, block_numel) of a tensor."""


class RepeatedSizes(NamedTuple):
    """A list of sizes that stands ``repeats`` times in a row: the matrices of one expert, for 256 experts."""

    sizes: tuple[Size, ...]
    repeats: int


class PlacedSizes(NamedTuple):
    """Sizes placed without gaps on [start, stop) of the buffer."""

    start: int
    stop: int
    sizes: tuple[Size, ...]


class Gap(NamedTuple):
    """Room for pieces: elements [start, stop) of the shard of each of ``num_ranks`` ranks."""

    first_rank: int
    num_ranks: int
    start: int
    stop: int

    def piece_numel(self, block_numel: int) -> int:
        """Elements in whole blocks that fit on each rank."""
        return (self.stop - self.start) // block_numel * block_numel

    def is_apart(self, other: Gap) -> bool:
        """Whether no rank has a part in both gaps."""
        return (
            self.first_rank + self.num_ranks <= other.first_rank
            or other.first_rank + other.num_ranks <= self.first_rank
        )


def fold_repeats(sizes: Sequence[Size], align_numel: int) -> list[RepeatedSizes]:
    """Sizes in order, with repetitions of short lists of aligned sizes folded."""
    repeated: list[RepeatedSizes] = []
    index = 0
    while index < len(sizes):
        best = RepeatedSizes((sizes[index],), 1)
        for period in range(1, MAX_PERIOD + 1):
            part = tuple(sizes[index : index + period])
            if any(numel % align_numel for numel, _ in part):
                break
            repeats = 1
            while tuple(sizes[index + repeats * period : index + (repeats + 1) * period]) == part:
                repeats += 1
            if repeats > 1 and repeats * period > best.repeats * len(best.sizes):
                best = RepeatedSizes(part, repeats)
        repeated.append(best)
        index += best.repeats * len(best.sizes)
    return repeated


def place_in_order(
    repeated: Sequence[RepeatedSizes], num_shards: int, shard_numel: int, align_numel: int
) -> list[PlacedSizes] | None:
    """Earliest legal start of every tensor in this order, or None if they do not fit.

    Exact for the given order and S: if this returns None, no placement in this order exists.

    Args:
        repeated: non-empty tensors in order.
        num_shards, shard_numel: m and S; S must be a multiple of the alignment.
        align_numel: every start is a multiple of this.
    """
    end_of_buffer = num_shards * shard_numel
    cursor = 0
    placed: list[PlacedSizes] = []
    for sizes, repeats in repeated:
        period = sum(numel for numel, _ in sizes)
        left = repeats
        while left:
            cursor += -cursor % align_numel
            fitting = _repeats_at(cursor, sizes, period, shard_numel) if left > 1 else 0
            if fitting:
                fitting = min(fitting, left)
                placed.append(PlacedSizes(cursor, cursor + fitting * period, sizes))
                cursor += fitting * period
                left -= fitting
            else:
                for size in sizes:
                    numel, block = size
                    start = _legal_start(
                        cursor + -cursor % align_numel, numel, block, shard_numel, align_numel
                    )
                    if start is None:
                        return None
                    cursor = start + numel
                    placed.append(PlacedSizes(start, cursor, (size,)))
                left -= 1
            if cursor > end_of_buffer:
                return None
    return placed


def _repeats_at(start: int, sizes: tuple[Size, ...], period_numel: int, shard_numel: int) -> int:
    """How often the sizes go without a gap from an aligned start: any number, or as many as this shard holds."""
    room = shard_numel - start % shard_numel
    offset = 0
    for numel, block in sizes:
        # Every start stays a number of blocks away from every boundary.
        if shard_numel % block or period_numel % block or (room - offset) % block:
            return room // period_numel
        offset += numel
    return ANY_NUMBER


def starts_of(placed: Iterable[PlacedSizes]) -> Iterator[int]:
    """Start of every tensor, in the order in which they were placed."""
    for start, stop, sizes in placed:
        while start < stop:
            for numel, _ in sizes:
                yield start
                start += numel


def _legal_start(start: int, numel: int, block: int, shard_numel: int, align_numel: int) -> int | None:
    """First aligned start >= an aligned ``start`` at which no block is cut, were the buffer endless."""
    room = shard_numel - start % shard_numel
    step = block if block % align_numel == 0 else math.lcm(block, align_numel)
    for _ in range(2):  # in this shard, else in the next: all later ones are alike
        if numel <= room:
            return start
        shift = room % step  # to a whole number of blocks before the boundary
        if shift < room and (numel <= room - shift + shard_numel or shard_numel % block == 0):
            return start + shift
        start += room
        room = shard_numel
    return None


def free_gaps(
    spans: Iterable[tuple[int, int]], num_shards: int, shard_numel: int, align_numel: int, least_numel: int
) -> list[Gap]:
    """What half-open, disjoint spans of the buffer leave free per rank, where it is ``least_numel`` or more."""
    gaps: list[Gap] = []
    cursor = 0
    for start, stop in (*sorted(spans), (num_shards * shard_numel,) * 2):
        cursor += -cursor % align_numel
        if start - cursor >= least_numel:
            for first_rank, num_ranks, numel, offset in runs_between(cursor, start, shard_numel):
                if numel >= least_numel:
                    gaps.append(Gap(first_rank, num_ranks, offset, offset + numel))
        cursor = max(cursor, stop)
    return gaps


def place_scattered(
    numel: int, block_numel: int, gaps: Sequence[Gap], align_numel: int
) -> tuple[tuple[PieceRun, ...], list[Gap]] | None:
    """Put one tensor into gaps: at most one piece per rank, whole blocks, in rank order.

    Returns:
        The pieces and the gaps that remain, or None if the room does not suffice.
    """
    needed_blocks = -(-numel // block_numel)
    chosen: set[Gap] = set()
    # The roomiest gaps first: few runs of pieces.
    room = [(-gap.num_ranks * ((gap.stop - gap.start) // block_numel), gap) for gap in gaps]
    for minus_blocks, gap in sorted(pair for pair in room if pair[0]):
        if needed_blocks <= 0:
            break
        if all(gap.is_apart(other) for other in chosen):
            chosen.add(gap)
            needed_blocks += minus_blocks
    if needed_blocks > 0:
        return None
    runs: list[PieceRun] = []
    remaining = [gap for gap in gaps if gap not in chosen]
    left = numel
    for gap in sorted(chosen):
        taken = _take(gap, left, block_numel)
        remaining.extend(_leave(gap, taken, align_numel))
        left -= sum(run.numel for run in taken)
        runs.extend(taken)
    return tuple(runs), remaining


def _take(gap: Gap, left_numel: int, block_numel: int) -> list[PieceRun]:
    """Pieces of a tensor with ``left_numel`` elements to go, on the first ranks of a gap."""
    piece_numel = gap.piece_numel(block_numel)
    num_ranks = min(gap.num_ranks, left_numel // piece_numel)
    taken = [PieceRun(gap.first_rank, num_ranks, piece_numel, gap.start)] if num_ranks else []
    left_numel -= num_ranks * piece_numel
    if left_numel and num_ranks < gap.num_ranks:  # the last piece is smaller, and may end in a short block
        taken.append(PieceRun(gap.first_rank + num_ranks, 1, left_numel, gap.start))
    return taken


def _leave(gap: Gap, taken: Sequence[PieceRun], align_numel: int) -> Iterable[Gap]:
    """What remains of a gap when pieces at its start are taken on some of its ranks."""
    rank = gap.first_rank
    for run in taken:
        start = gap.start + run.piece_numel
        start += -start % align_numel
        if start < gap.stop:
            yield Gap(run.first_rank, run.num_ranks, start, gap.stop)
        rank = run.first_rank + run.num_ranks
    if rank < gap.first_rank + gap.num_ranks:
        yield gap._replace(first_rank=rank, num_ranks=gap.first_rank + gap.num_ranks - rank)
