"""Packing: the smallest shard for a list of tensors with blocks. Integers only.

The problem (veScale-FSDP, arXiv 2602.22437, section on grouped RaggedShard): put tensors into a buffer of m shards of S
elements so that no shard boundary is inside a block, and make S as small as possible. If the order of the tensors is
free, the problem is NP-hard.

For one order and one S, `place_in_order` puts each tensor at its earliest legal start. This decides feasibility
exactly, because an earlier end of one tensor never hurts later tensors. There are three cases per tensor:

    1. the tensor is inside one shard: any start is legal
    2. it crosses one boundary: the boundary must be a whole number of blocks after the tensor's start
    3. it crosses several boundaries: in addition, S must be a whole number of its blocks

Without case 3, any S above a feasible S is feasible, so binary search finds the smallest. With case 3, S must be a
multiple of the LCM of the blocks of these tensors; among these multiples, too, any S above a feasible S is feasible.
The search does not know which tensors are case 3. It sorts the tensors by size and by block, largest first, tries the
LCM of every prefix of both lists (including the empty prefix), and keeps the best S.

Three things make the search fast. A tensor longer than two shards *must* be case 3, which gives a lower bound on S that
is nearly always feasible (`least_shard`), so the search mostly ends at its first attempt. Repeated lists of sizes, such
as the matrices of each expert, are placed as one. And placements are runs of ranks, so time does not depend on m.

A *scattered* tensor (`place_scattered`) has at most one piece per rank, in rank order, in gaps between contiguous
tensors. Pieces are whole blocks, so the tensor has holes and must be copied out after a gather.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple, TypeVar

from vescale_fsdp.layout.geometry import round_up
from vescale_fsdp.layout.group_layout import PieceRun, runs_between

# The longest list of sizes whose repetitions are found; an expert has up to three matrices and three biases.
MAX_PERIOD = 8
ANY_NUMBER = 1 << 62  # "no limit"; larger than any number of repetitions

MAX_SCAN = 64  # up to this many multiples, the search tries each; above, it gallops and bisects
PRECISION = 1_000_000  # bisection stops when S is within 1 / PRECISION of the smallest
# Another order than definition order is tried only if it may make S smaller by more than 1 / WORTH_REORDERING, because
# layouts in definition order are easier to debug.
WORTH_REORDERING = 1000
# At most this many scattered tensors are tried as contiguous ones; each try is a full placement.
MAX_PUT_BACK = 16

Placed = TypeVar("Placed")


class TensorSize(NamedTuple):
    """Number of elements of a tensor that is not empty, and of one of its blocks."""

    numel: int
    block_numel: int


Sizes = tuple[TensorSize, ...]


class RepeatedSizes(NamedTuple):
    """A list of sizes that occurs ``repeats`` times in a row, such as the matrices of one expert, for 256 experts."""

    sizes: Sizes
    repeats: int

    @property
    def numel(self) -> int:
        """Number of elements of all repetitions."""
        return self.repeats * sum([numel for numel, _ in self.sizes])  # a list: faster than a generator


PlacedSizes = dict[int, RepeatedSizes]
"""Start in the buffer -> the sizes that follow each other from there without gaps; in ascending order."""


def fold_repeats(sizes: Sequence[TensorSize], align_numel: int) -> list[RepeatedSizes]:
    """Return the sizes in order, with repetitions of short lists of aligned sizes folded into one item each."""
    repeated: list[RepeatedSizes] = []
    index = 0
    while index < len(sizes):
        best = RepeatedSizes((sizes[index],), 1)
        # A list that occurs twice ends at most in the middle of the remaining sizes.
        for period in range(1, min(MAX_PERIOD, (len(sizes) - index) // 2) + 1):
            stop = index + period
            # Folded sizes are placed without gaps, which an unaligned size would need before the next tensor.
            if sizes[stop - 1].numel % align_numel:
                break
            if sizes[stop] != sizes[index]:  # a shortcut
                continue
            part, repeats = sizes[index:stop], 1
            while sizes[index + repeats * period : stop + repeats * period] == part:
                repeats += 1
            if repeats > 1 and repeats * period > best.repeats * len(best.sizes):
                best = RepeatedSizes(tuple(part), repeats)
        repeated.append(best)
        index += best.repeats * len(best.sizes)
    return repeated


def place_in_order(
    repeated: Sequence[RepeatedSizes], num_shards: int, shard_numel: int, align_numel: int
) -> PlacedSizes | None:
    """Place every tensor at its earliest legal start, in this order.

    Args:
        repeated: non-empty tensors in order.
        num_shards, shard_numel: m and S; S must be a multiple of ``align_numel``.
        align_numel: every start is a multiple of this.

    Returns:
        The placement; None if no placement in this order exists for this S.
    """
    end_of_buffer = num_shards * shard_numel
    cursor = 0
    placed: PlacedSizes = {}
    for sizes, repeats in repeated:
        period = sum(numel for numel, _ in sizes)
        left = repeats
        while left:
            cursor = round_up(cursor, align_numel)
            # A single repetition is placed tensor by tensor.
            fitting = _repeats_at(cursor, sizes, period, shard_numel) if left > 1 else 0
            if fitting:
                fitting = min(fitting, left)
                placed[cursor] = RepeatedSizes(sizes, fitting)
                cursor += fitting * period
                left -= fitting
            else:  # place one repetition, tensor by tensor, then try to fold again
                for size in sizes:
                    numel, block = size
                    start = _legal_start(
                        round_up(cursor, align_numel), numel, block, shard_numel, align_numel
                    )
                    if start is None:
                        return None
                    placed[start] = RepeatedSizes((size,), 1)
                    cursor = start + numel
                left -= 1
            if cursor > end_of_buffer:
                return None
    return placed


def _repeats_at(start: int, sizes: Sizes, period_numel: int, shard_numel: int) -> int:
    """Return how many repetitions fit without gaps from an aligned start.

    The result is `ANY_NUMBER` if no boundary can cut a block, otherwise as many as fit into the rest of this shard.
    """
    room = shard_numel - start % shard_numel
    offset = 0
    for numel, block in sizes:
        # If the shard, the period and the distance to the next boundary are whole blocks, then every boundary is whole
        # blocks from the start of this tensor in every repetition.
        if shard_numel % block or period_numel % block or (room - offset) % block:
            return room // period_numel
        offset += numel
    return ANY_NUMBER


def starts_of(placed: PlacedSizes) -> Iterator[int]:
    """Yield the start of every tensor, in the order of placement."""
    for start, (sizes, repeats) in placed.items():
        for numel, _ in sizes * repeats:
            yield start
            start += numel


def _legal_start(start: int, numel: int, block: int, shard_numel: int, align_numel: int) -> int | None:
    """Return the first aligned position at or after ``start`` at which no boundary cuts a block of the tensor.

    ``start`` is aligned; the buffer has no end. Returns None if no position is legal.
    """
    room = shard_numel - start % shard_numel
    # The distance of the start from the next boundary must be whole blocks and aligned.
    step = block if block % align_numel == 0 else math.lcm(block, align_numel)
    for _ in range(2):  # this shard and the next one; every later shard is like the next one
        if numel <= room:
            return start
        shift = room % step  # moves the start to a whole number of steps before the boundary
        # Legal if the tensor crosses only this boundary, or if S is whole blocks.
        if shift < room and (numel <= room - shift + shard_numel or shard_numel % block == 0):
            return start + shift
        start += room
        room = shard_numel
    return None


def free_gaps(
    placed: PlacedSizes, num_shards: int, shard_numel: int, align_numel: int, least_numel: int
) -> list[PieceRun]:
    """Return the gaps between placed tensors. A gap has at least ``least_numel`` elements on each of its ranks."""
    gaps: list[PieceRun] = []
    cursor = 0
    # An empty list at the end of the buffer closes the last gap.
    for start, repeated in (*placed.items(), (num_shards * shard_numel, RepeatedSizes((), 0))):
        cursor = round_up(cursor, align_numel)
        if start - cursor >= least_numel:
            runs = runs_between(cursor, start, shard_numel)
            gaps += [run for run in runs if run.piece_numel >= least_numel]
        cursor = max(cursor, start + repeated.numel)
    return gaps


def place_scattered(
    numel: int, block_numel: int, gaps: Sequence[PieceRun], align_numel: int
) -> tuple[tuple[PieceRun, ...], list[PieceRun]] | None:
    """Put one tensor into gaps: at most one piece per rank, of whole blocks, in rank order.

    Returns:
        The pieces and the remaining gaps; None if the gaps are too small.
    """
    needed_blocks = -(-numel // block_numel)  # rounded up: the last block may be short
    chosen: set[PieceRun] = set()
    # Numbers of blocks are negated, so that sorting puts the largest gaps first: fewer gaps give fewer runs of pieces.
    room = [(-gap.num_ranks * (gap.piece_numel // block_numel), gap) for gap in gaps]
    for minus_blocks, gap in sorted(pair for pair in room if pair[0]):  # gaps below one block are useless
        if needed_blocks <= 0:
            break
        # A rank may own only one piece, so chosen gaps must not have a rank in common.
        if all(gap.ranks.stop <= other.first_rank or other.ranks.stop <= gap.first_rank for other in chosen):
            chosen.add(gap)
            needed_blocks += minus_blocks
    if needed_blocks > 0:
        return None
    runs: list[PieceRun] = []
    remaining = [gap for gap in gaps if gap not in chosen]
    left = numel
    for gap in sorted(chosen):  # by first rank, because pieces must be in rank order
        taken = _take(gap, left, block_numel)
        remaining.extend(_leave(gap, taken, align_numel))
        left -= sum(run.numel for run in taken)
        runs.extend(taken)
    return tuple(runs), remaining


def _take(gap: PieceRun, left_numel: int, block_numel: int) -> list[PieceRun]:
    """Return the pieces that put a tensor's remaining ``left_numel`` elements on the first ranks of a gap."""
    piece_numel = gap.piece_numel // block_numel * block_numel
    num_ranks = min(gap.num_ranks, left_numel // piece_numel)
    taken = [PieceRun(gap.first_rank, num_ranks, piece_numel, gap.local_offset)] if num_ranks else []
    left_numel -= num_ranks * piece_numel
    # The tensor's last piece is smaller than the gap, and may end in a short block.
    if left_numel and num_ranks < gap.num_ranks:
        taken.append(PieceRun(gap.first_rank + num_ranks, 1, left_numel, gap.local_offset))
    return taken


def _leave(gap: PieceRun, taken: Sequence[PieceRun], align_numel: int) -> Iterator[PieceRun]:
    """Yield what remains of a gap after the pieces in ``taken`` occupy its start on some of its ranks."""
    rank = gap.first_rank
    for run in taken:
        start = round_up(gap.local_offset + run.piece_numel, align_numel)
        left_numel = gap.local_offset + gap.piece_numel - start
        if left_numel > 0:
            yield PieceRun(run.first_rank, run.num_ranks, left_numel, start)
        rank = run.ranks.stop
    if rank < gap.ranks.stop:  # ranks without a piece keep the whole gap
        yield gap._replace(first_rank=rank, num_ranks=gap.ranks.stop - rank)


class Position(NamedTuple):
    """The start of a tensor's range of the buffer; the first piece's start, and the pieces, of a scattered tensor."""

    start: int
    runs: tuple[PieceRun, ...] = ()


class Packing(NamedTuple):
    """A shard size S, and the position of each tensor for it."""

    shard_numel: int
    positions: tuple[Position, ...]


def pack_contiguous(sizes: Sizes, num_shards: int, align_numel: int) -> Packing:
    """Return the smallest shard, and the starts, for tensors that are each one run of the buffer."""
    # One shard that contains all tensors, including gaps for aligned starts, is always feasible. The search stays below
    # `bound`, so + align_numel makes this size a candidate.
    bound = sum(round_up(numel, align_numel) for numel, _ in sizes) + align_numel
    low = _volume_bound(sizes, num_shards, align_numel)
    least = least_shard(sizes, num_shards, align_numel)
    best: Packing | None = None
    # Definition order comes first, because it is easier to debug. The order by block, largest first, must be strictly
    # better: it is searched below the S of definition order.
    defined = tuple(range(len(sizes)))
    by_block = tuple(sorted(defined, key=lambda index: (-sizes[index][1], -sizes[index][0])))
    for order in dict.fromkeys((defined, by_block)):  # drops the second order if it equals the first
        repeated = fold_repeats([sizes[index] for index in order], align_numel)
        place = partial(place_in_order, repeated, num_shards, align_numel=align_numel)
        smallest = _smallest_shard(sizes, place, low, bound, align_numel)
        if smallest is not None:
            bound, placed = smallest
            starts = dict(zip(order, starts_of(placed), strict=True))
            best = Packing(bound, tuple(Position(starts[index]) for index in range(len(sizes))))
        if bound - least <= bound // WORTH_REORDERING:  # no order can be much better
            break
    assert best is not None  # one shard with all tensors is feasible and below the first bound
    return best


def least_shard(sizes: Sizes, num_shards: int, align_numel: int) -> int:
    """Return a lower bound on the shard size for any order of the tensors. The bound is nearly always feasible."""
    low = _volume_bound(sizes, num_shards, align_numel)
    for start, stop, step in _possible(sizes, low, align_numel):
        first = round_up(start, step)
        if stop is None or first < stop:
            return first
    raise AssertionError("the last interval has no end")


def _volume_bound(sizes: Sizes, num_shards: int, align_numel: int) -> int:
    """Return a simple lower bound: a shard contains its part of the payload, and at least the largest block."""
    low = max(-(-sum(numel for numel, _ in sizes) // num_shards), max(block for _, block in sizes))
    return round_up(low, align_numel)


def _possible(sizes: Sizes, low: int, align_numel: int) -> Iterator[tuple[int, int | None, int]]:
    """Yield the possible values of S from ``low`` up, as (start, stop, step): multiples of step in [start, stop).

    If S is not a whole number of a tensor's blocks b, the tensor crosses at most one boundary, with whole blocks before
    the boundary: it has at most S // b * b + S elements. So every longer tensor forces S to be a multiple of b. The
    stop of the last interval is None.
    """
    ends = sorted((_least_cut_once(*size), size[1]) for size in set(sizes))
    ends = [(end, block) for end, block in ends if end > low]
    # forced[i]: the LCM of the blocks of tensors i and later. If S < ends[i], all of them cross several boundaries.
    forced = list(accumulate((block for _, block in reversed(ends)), math.lcm, initial=align_numel))[::-1]
    for (end, _), step in zip(ends, forced, strict=False):  # forced has one more item, for S above all ends
        if low < end:  # equal ends would give an empty interval
            yield low, end, step
            low = end
    yield low, None, align_numel


def _least_cut_once(numel: int, block_numel: int) -> int:
    """Return the smallest S for which the tensor may cross a single boundary: ``numel <= S // block * block + S``."""
    # With k whole blocks of b elements per shard, S is in [k*b, (k+1)*b) and at least numel - k*b. ``blocks`` is k,
    # estimated from below so that the loop is short.
    blocks = max(0, -(-(numel + 1) // block_numel) // 2 - 1)
    while numel - blocks * block_numel >= (blocks + 1) * block_numel:
        blocks += 1
    return max(blocks * block_numel, numel - blocks * block_numel)


def _smallest_shard(
    sizes: Sizes, place: Callable[[int], Placed | None], low: int, below: int, align_numel: int
) -> tuple[int, Placed] | None:
    """Return the smallest feasible S in [low, below) that the search finds, and its placement; None if there is none.

    Args:
        sizes: the tensors that must be contiguous.
        place: returns the placement for one S, or None if S is not feasible.
        low, below: the range of S.
        align_numel: S must be a multiple of this.
    """
    # It is unknown which tensors cross several boundaries and so force S to be a multiple of their block. Probably the
    # largest: candidates for the step are the LCMs of blocks over prefixes of the sizes, by numel and by block.
    steps = {align_numel}
    for key in (0, 1):
        descending = sorted(set(sizes), key=lambda size: (-size[key], -size[1 - key]))
        steps.update(accumulate((block for _, block in descending), math.lcm))
    for start, stop, forced in _possible(sizes, low, align_numel):
        end = below if stop is None else min(stop, below)
        # Try the lower bound of this interval first, because it is mostly feasible.
        first = round_up(start, forced)
        placed = place(first) if first < end else None
        if placed is not None:
            return first, placed
        best: tuple[int, Placed] | None = None
        # Coarse steps first: they have few multiples, and their result limits how many multiples of fine steps to try.
        for step in sorted({math.lcm(step, forced) for step in steps}, reverse=True):
            better = _smallest_multiple(place, step, start, end)
            if better is not None:
                best, end = better, better[0]
        if best is not None or end == below:  # later intervals contain larger S, or only S above the limit
            return best
    return None


def _smallest_multiple(
    place: Callable[[int], Placed | None], step: int, low: int, below: int
) -> tuple[int, Placed] | None:
    """Return the smallest feasible multiple of ``step`` in [low, below), and its placement; None if there is none.

    Up to `MAX_SCAN` multiples are all tried. If there are more, the search assumes that every multiple above a feasible
    one is feasible, and the result is the smallest to one part in `PRECISION`.
    """
    first, last = -(-low // step), (below - 1) // step
    # Few multiples are tried one by one. For many, the first distance is the precision of the result.
    probe, reach = first, 1 if last - first < MAX_SCAN else 1 + (last - first) // PRECISION
    infeasible, placed = first - 1, None  # the largest multiple known to be infeasible, or below the range
    while probe <= last:
        placed = place(probe * step)
        if placed is not None or probe == last:
            break
        infeasible = probe
        probe = min(probe + reach, last)
        if last - first >= MAX_SCAN:  # gallop, because the first feasible multiple may be far away
            reach *= 4
    if placed is None:
        return None
    best = (probe, placed)
    # Bisect. After a scan of each multiple the condition is false at once: probe - 1 is infeasible.
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
    """Return the smallest shard if some tensors may be scattered, or None if it is not smaller than a limit.

    A tensor that also fits contiguously is not scattered; the search tries the `MAX_PUT_BACK` largest ones.

    Args:
        sizes: all tensors, non-empty.
        scattered: indices of the tensors that may be scattered.
        num_shards, align_numel: as for `place_in_order`.
        below_numel: the limit; the shard must be smaller.
    """
    kept = tuple(size for index, size in enumerate(sizes) if index not in scattered)

    place = partial(_place_mixed, sizes, scattered, num_shards, align_numel=align_numel)
    low = _volume_bound(sizes, num_shards, align_numel)
    smallest = _smallest_shard(kept, place, low, below_numel, align_numel)
    if smallest is None:
        return None
    shard_numel, positions = smallest
    # A contiguous tensor needs no copy after a gather. So try to make scattered tensors contiguous, largest first, if
    # this S allows it: S is whole blocks, or the tensor crosses one boundary only.
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
    """Return the positions of all tensors for one S, or None if they do not fit.

    Contiguous tensors are placed first, in definition order; then scattered tensors are put into the gaps, largest
    block first.
    """
    kept = [size for i, size in enumerate(sizes) if i not in scattered]
    placed = place_in_order(fold_repeats(kept, align_numel), num_shards, shard_numel, align_numel)
    if placed is None:
        return None
    gaps: list[PieceRun] = []
    if scattered:
        # Gaps below the smallest block are useless.
        least_numel = min(sizes[index].block_numel for index in scattered)
        gaps = free_gaps(placed, num_shards, shard_numel, align_numel, least_numel)
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
        # Pieces without holes happen to be one run of the buffer: such a tensor is contiguous and needs no copy.
        positions[index] = Position(start, runs if has_hole else ())
    starts = starts_of(placed)
    return tuple(
        positions[index] if index in scattered else Position(next(starts)) for index in range(len(sizes))
    )
