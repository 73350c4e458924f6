"""The smallest shard that holds a list of tensors with blocks. Integers only.

The problem (veScale-FSDP, arXiv 2602.22437, section on grouped RaggedShard): put tensors into a buffer of m shards of S
elements so that no shard boundary is inside a block, and make S as small as possible. It is NP-hard over all orders.

For one order and one S (`place_in_order`) the earliest legal start of each tensor decides feasibility exactly, because
ending earlier never hurts later tensors. Three cases per tensor:

    1. it is inside one shard: any start is legal
    2. it crosses one boundary: the boundary must be a whole number of blocks from its start
    3. it crosses several: in addition, S must be a whole number of its blocks

Without case 3, any S above a feasible one is feasible, so binary search finds the smallest. With case 3, S must be a
multiple of the LCM of the blocks concerned; among these multiples, again, any above a feasible one is feasible. The
search does not know which tensors are case 3. It sorts the tensors by size and by block, largest first, tries the LCM
of every prefix of both lists (the empty prefix included), and keeps the best S.

Three things make it fast. A tensor longer than two shards *must* be case 3, which gives a lower bound on S that is
nearly always reached (`least_shard`), so the search mostly ends at its first attempt. Lists of sizes that repeat, such
as those of experts, are placed as one. And placements are runs of ranks, so time does not depend on m.

A *scattered* tensor (`place_scattered`) has one piece per rank, in rank order, wherever contiguous tensors leave room.
Pieces are whole blocks, so the tensor has holes and must be copied out after a gather.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple, TypeVar

from vescale_fsdp.layout.geometry import round_up
from vescale_fsdp.layout.group_layout import PieceRun, runs_between

MAX_PERIOD = 8  # sizes in a repeated list; an expert has at most three matrices and three biases
ANY_NUMBER = 1 << 62  # stands for no limit

MAX_SCAN = 64  # up to this many multiples, the search tries each
PRECISION = 1_000_000  # the search stops within one part in this many of the smallest S
# Another order is tried only if it may make S smaller by more than one part in this many: definition order is easier to
# debug.
WORTH_REORDERING = 1000
MAX_PUT_BACK = 16  # scattered tensors for which the search tries, one by one, a contiguous position

Size = tuple[int, int]
"""(numel, block_numel) of a tensor."""

Sizes = tuple[Size, ...]
"""Sizes of all tensors, none of them empty."""

Placed = TypeVar("Placed")


class RepeatedSizes(NamedTuple):
    """A list of sizes that occurs ``repeats`` times in a row: the matrices of one expert, for 256 experts."""

    sizes: tuple[Size, ...]
    repeats: int


class PlacedSizes(NamedTuple):
    """Sizes placed without gaps on [start, stop) of the buffer."""

    start: int
    stop: int
    sizes: tuple[Size, ...]


class Gap(NamedTuple):
    """Free room: elements [start, stop) of the shard of each of ``num_ranks`` ranks."""

    first_rank: int
    num_ranks: int
    start: int
    stop: int

    def piece_numel(self, block_numel: int) -> int:
        """Elements that fit on each rank, in whole blocks."""
        return (self.stop - self.start) // block_numel * block_numel

    @property
    def ranks(self) -> range:
        """The ranks with this gap."""
        return range(self.first_rank, self.first_rank + self.num_ranks)


def fold_repeats(sizes: Sequence[Size], align_numel: int) -> list[RepeatedSizes]:
    """Sizes in order, with repetitions of short lists of aligned sizes folded."""
    repeated: list[RepeatedSizes] = []
    index = 0
    while index < len(sizes):
        best = RepeatedSizes((sizes[index],), 1)
        for period in range(1, MAX_PERIOD + 1):
            part = tuple(sizes[index : index + period])
            if any(numel % align_numel for numel, _ in part):  # folded sizes follow each other without gaps
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
            cursor = round_up(cursor, align_numel)
            fitting = _repeats_at(cursor, sizes, period, shard_numel) if left > 1 else 0
            if fitting:
                fitting = min(fitting, left)
                placed.append(PlacedSizes(cursor, cursor + fitting * period, sizes))
                cursor += fitting * period
                left -= fitting
            else:
                for numel, block in sizes:
                    start = _legal_start(
                        round_up(cursor, align_numel), numel, block, shard_numel, align_numel
                    )
                    if start is None:
                        return None
                    cursor = start + numel
                    placed.append(PlacedSizes(start, cursor, ((numel, block),)))
                left -= 1
            if cursor > end_of_buffer:
                return None
    return placed


def _repeats_at(start: int, sizes: tuple[Size, ...], period_numel: int, shard_numel: int) -> int:
    """Number of repetitions that fit from an aligned start: any number, or as many as the rest of this shard holds."""
    room = shard_numel - start % shard_numel
    offset = 0
    for numel, block in sizes:
        # If all three are whole blocks, every boundary is whole blocks from every start, in any number of repetitions.
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
    """First aligned position from ``start`` (aligned) at which no block is cut, in an endless buffer."""
    room = shard_numel - start % shard_numel
    # Whole blocks that keep the start aligned.
    step = block if block % align_numel == 0 else math.lcm(block, align_numel)
    for _ in range(2):  # in this shard or the next; later shards are like the next
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
    """The gaps of at least ``least_numel`` elements per rank that half-open, disjoint spans of the buffer leave."""
    gaps: list[Gap] = []
    cursor = 0
    # An empty span at the end of the buffer closes the last gap.
    for start, stop in (*sorted(spans), (num_shards * shard_numel,) * 2):
        cursor = round_up(cursor, align_numel)
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
        The pieces and the remaining gaps; None if there is not enough room.
    """
    needed_blocks = -(-numel // block_numel)
    chosen: set[Gap] = set()
    # Negative numbers of blocks sort the largest gaps first, so that there are few runs of pieces.
    room = [(-gap.num_ranks * ((gap.stop - gap.start) // block_numel), gap) for gap in gaps]
    for minus_blocks, gap in sorted(pair for pair in room if pair[0]):
        if needed_blocks <= 0:
            break
        # One piece per rank: a gap is usable if no chosen gap has a rank in common.
        if all(gap.ranks.stop <= other.first_rank or other.ranks.stop <= gap.first_rank for other in chosen):
            chosen.add(gap)
            needed_blocks += minus_blocks
    if needed_blocks > 0:
        return None
    runs: list[PieceRun] = []
    remaining = [gap for gap in gaps if gap not in chosen]
    left = numel
    for gap in sorted(chosen):  # pieces are in rank order
        taken = _take(gap, left, block_numel)
        remaining.extend(_leave(gap, taken, align_numel))
        left -= sum(run.numel for run in taken)
        runs.extend(taken)
    return tuple(runs), remaining


def _take(gap: Gap, left_numel: int, block_numel: int) -> list[PieceRun]:
    """Pieces of a tensor's remaining ``left_numel`` elements on the first ranks of a gap."""
    piece_numel = gap.piece_numel(block_numel)
    num_ranks = min(gap.num_ranks, left_numel // piece_numel)
    taken = [PieceRun(gap.first_rank, num_ranks, piece_numel, gap.start)] if num_ranks else []
    left_numel -= num_ranks * piece_numel
    if left_numel and num_ranks < gap.num_ranks:  # the last piece is smaller, and may end in a short block
        taken.append(PieceRun(gap.first_rank + num_ranks, 1, left_numel, gap.start))
    return taken


def _leave(gap: Gap, taken: Sequence[PieceRun], align_numel: int) -> Iterable[Gap]:
    """The gaps that remain after pieces at the start of a gap are taken on some of its ranks."""
    rank = gap.first_rank
    for run in taken:
        start = round_up(gap.start + run.piece_numel, align_numel)
        if start < gap.stop:
            yield Gap(run.first_rank, run.num_ranks, start, gap.stop)
        rank = run.ranks.stop
    if rank < gap.ranks.stop:
        yield gap._replace(first_rank=rank, num_ranks=gap.ranks.stop - rank)


class Position(NamedTuple):
    """The start of a tensor in the buffer, and its pieces if it is scattered."""

    start: int
    runs: tuple[PieceRun, ...] = ()


class Packing(NamedTuple):
    """An S, and the positions of the tensors."""

    shard_numel: int
    positions: tuple[Position, ...]


def pack_contiguous(sizes: Sizes, num_shards: int, align_numel: int) -> Packing:
    """The smallest shard for tensors that are each one run of the buffer, and their starts."""
    # A shard that holds everything, gaps for aligned starts included, is always feasible. + align_numel, because the
    # search ends below the bound.
    bound = sum(round_up(numel, align_numel) for numel, _ in sizes) + align_numel
    low = _volume_bound(sizes, num_shards, align_numel)
    least = least_shard(sizes, num_shards, align_numel)
    best: Packing | None = None
    # Definition order comes first. The other order is tried only if it may be worth it, and must be strictly better.
    defined = tuple(range(len(sizes)))
    by_block = tuple(sorted(defined, key=lambda index: (-sizes[index][1], -sizes[index][0])))
    for order in dict.fromkeys((defined, by_block)):  # once, if both orders are equal
        repeated = fold_repeats([sizes[index] for index in order], align_numel)
        place = partial(place_in_order, repeated, num_shards, align_numel=align_numel)
        smallest = _smallest_shard(sizes, place, low, bound, align_numel)
        if smallest is not None:
            bound, placed = smallest
            starts = dict(zip(order, starts_of(placed), strict=True))
            best = Packing(bound, tuple(Position(starts[index]) for index in range(len(sizes))))
        if bound - least <= bound // WORTH_REORDERING:
            break
    assert best is not None  # one shard that holds everything is feasible, and the first bound is larger
    return best


def least_shard(sizes: Sizes, num_shards: int, align_numel: int) -> int:
    """A lower bound on the shard size for any order of the tensors; mostly it is feasible."""
    low = _volume_bound(sizes, num_shards, align_numel)
    for start, stop, step in _possible(sizes, low, align_numel):
        first = round_up(start, step)
        if stop is None or first < stop:
            return first
    raise AssertionError("the last interval has no end")


def _volume_bound(sizes: Sizes, num_shards: int, align_numel: int) -> int:
    """A shard holds at least its part of the payload, and at least the largest block."""
    low = max(-(-sum(numel for numel, _ in sizes) // num_shards), max(block for _, block in sizes))
    return round_up(low, align_numel)


def _possible(sizes: Sizes, low: int, align_numel: int) -> Iterator[tuple[int, int | None, int]]:
    """Possible values of S: intervals [start, stop) from ``low`` up, each with a step that divides S.

    If S is not a whole number of a tensor's blocks b, the tensor crosses at most one boundary, with whole blocks before
    it: it has at most S // b * b + S elements. So every tensor longer than that forces b | S. The last interval has
    no end.
    """
    ends = sorted((_least_cut_once(*size), size[1]) for size in set(sizes))
    ends = [(end, block) for end, block in ends if end > low]
    # forced[i]: the LCM of the blocks of tensors i and later, which all cross several boundaries below ends[i].
    forced = list(accumulate((block for _, block in reversed(ends)), math.lcm, initial=align_numel))[::-1]
    for (end, _), step in zip(ends, forced, strict=False):
        if low < end:
            yield low, end, step
            low = end
    yield low, None, align_numel


def _least_cut_once(numel: int, block_numel: int) -> int:
    """The smallest S with ``numel <= S // block * block + S``."""
    # For k whole blocks per shard, S is in [k*b, (k+1)*b) and at least numel - k*b.
    blocks = max(0, -(-(numel + 1) // block_numel) // 2 - 1)  # an estimate from below
    while numel - blocks * block_numel >= (blocks + 1) * block_numel:
        blocks += 1
    return max(blocks * block_numel, numel - blocks * block_numel)


def _smallest_shard(
    sizes: Sizes, place: Callable[[int], Placed | None], low: int, below: int, align_numel: int
) -> tuple[int, Placed] | None:
    """The smallest feasible S in [low, below) that the search finds, and its placement.

    Args:
        sizes: the tensors that must be contiguous.
        place: returns the placement for one S, or None if it is not feasible.
    """
    # Candidates for the step of S: LCMs of blocks over prefixes of the sizes, sorted by numel and sorted by block.
    steps = {align_numel}
    for key in (0, 1):
        descending = sorted(set(sizes), key=lambda size: (-size[key], -size[1 - key]))
        steps.update(accumulate((block for _, block in descending), math.lcm))
    for start, stop, forced in _possible(sizes, low, align_numel):
        end = below if stop is None else min(stop, below)
        first = round_up(start, forced)  # the lower bound, which is mostly feasible
        placed = place(first) if first < end else None
        if placed is not None:
            return first, placed
        best: tuple[int, Placed] | None = None
        # Coarse steps first: their result bounds the many multiples of fine steps.
        for step in sorted({math.lcm(step, forced) for step in steps}, reverse=True):
            better = _smallest_multiple(place, step, start, end)
            if better is not None:
                best, end = better, better[0]
        if best is not None or end == below:  # below: later intervals are above the limit
            return best
    return None


def _smallest_multiple(
    place: Callable[[int], Placed | None], step: int, low: int, below: int
) -> tuple[int, Placed] | None:
    """The smallest feasible multiple of ``step`` in [low, below), and its placement.

    If there are few multiples, all are tried. If there are many, all above a feasible one are assumed feasible, and
    the result is the smallest to one part in `PRECISION`.
    """
    first, last = -(-low // step), (below - 1) // step
    probe, reach = first, 1 if last - first < MAX_SCAN else 1 + (last - first) // PRECISION
    infeasible, placed = first - 1, None
    while probe <= last:
        placed = place(probe * step)
        if placed is not None or probe == last:
            break
        infeasible = probe
        probe = min(probe + reach, last)
        if last - first >= MAX_SCAN:  # gallop: the first feasible multiple may be far away
            reach *= 4
    if placed is None:
        return None
    best = (probe, placed)
    while best[0] - infeasible > 1 + best[0] // PRECISION:
        middle = (infeasible + best[0]) // 2
        placed = place(middle * step)
        if placed is None:
            infeasible = middle
        else:
            best = (middle, placed)
    return best[0] * step, best[1]


def pack_scattered(
    sizes: Sizes, scattered: frozenset[int], num_shards: int, align_numel: int, below_numel: int
) -> Packing | None:
    """The smallest shard below a limit if some tensors may be scattered; where there is room, they stay contiguous.

    Args:
        sizes: all tensors, non-empty.
        scattered: indices of the tensors that may be scattered.
        num_shards, align_numel: as for `place_in_order`.
        below_numel: larger shards are rejected.
    """
    kept = tuple(size for index, size in enumerate(sizes) if index not in scattered)

    place = partial(_place_mixed, sizes, scattered, num_shards, align_numel=align_numel)
    low = _volume_bound(sizes, num_shards, align_numel)
    smallest = _smallest_shard(kept, place, low, below_numel, align_numel)
    if smallest is None:
        return None
    shard_numel, positions = smallest
    # Scattered tensors that have a legal contiguous position for this S, if there is room.
    maybe_whole = [
        index
        for index in scattered
        if shard_numel % sizes[index][1] == 0 or _least_cut_once(*sizes[index]) <= shard_numel
    ]
    for index in sorted(maybe_whole, key=lambda index: (-sizes[index][0], index))[:MAX_PUT_BACK]:
        fewer = _place_mixed(sizes, scattered - {index}, num_shards, shard_numel, align_numel)
        if fewer is not None:
            positions, scattered = fewer, scattered - {index}
    return Packing(shard_numel, positions)


def _place_mixed(
    sizes: Sizes, scattered: frozenset[int], num_shards: int, shard_numel: int, align_numel: int
) -> tuple[Position, ...] | None:
    """Positions of contiguous tensors in definition order, then of scattered ones, largest block first, in the gaps."""
    repeated = fold_repeats([size for i, size in enumerate(sizes) if i not in scattered], align_numel)
    placed = place_in_order(repeated, num_shards, shard_numel, align_numel)
    if placed is None:
        return None
    # Without scattered tensors no gap is needed: the default is larger than any gap.
    least_numel = min((sizes[index][1] for index in scattered), default=num_shards * shard_numel)
    spans = [(start, stop) for start, stop, _ in placed]
    gaps = free_gaps(spans, num_shards, shard_numel, align_numel, least_numel)
    positions: dict[int, Position] = {}
    for index in sorted(scattered, key=lambda index: (-sizes[index][1], index)):
        pieces_and_gaps = place_scattered(*sizes[index], gaps, align_numel)
        if pieces_and_gaps is None:
            return None
        runs, gaps = pieces_and_gaps
        start = stop = runs[0].first_rank * shard_numel + runs[0].local_offset
        has_hole = False
        for run in runs:
            has_hole |= run.first_rank * shard_numel + run.local_offset != stop
            # Pieces shorter than a shard leave holes between ranks.
            has_hole |= run.num_ranks > 1 and run.piece_numel != shard_numel
            stop += run.numel
        positions[index] = Position(start, runs if has_hole else ())  # without holes the tensor is contiguous
    starts = starts_of(placed)
    return tuple(
        positions[index] if index in scattered else Position(next(starts)) for index in range(len(sizes))
    )
