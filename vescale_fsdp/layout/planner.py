"""The planner computes the smallest shard, and the offset of every tensor in the buffer. Integers only.

Layouts are created by `plan_group`, `plan_buffers` and `plan_by_rows`. `packing` searches for the smallest shard. This
module checks the input, caches plans (equal lists of sizes, such as the layers of a model, are planned once) and
compares padding with its two alternatives, scattering and a second buffer, by prices.

Scattering. The shard size may have to be a multiple of the LCM of several blocks. One tensor with an unrelated row
length can raise this LCM far above a rank's share of the payload. With ``scatter="auto"`` the planner also tries to
leave such tensors, smallest first, out of the contiguous order and to put their pieces into gaps between the other
tensors. Scattered tensors are copied out of the buffer after each gather.

Two buffers. If the blocks of two long tensors have a large common multiple, these tensors may be put into different
buffers, together with tensors of matching blocks. Nothing is copied; the price is one more message in the same launch
(coalesced)::

    rows of 5,120, 8,192 and 16,384, blocks of 128 rows, 768 shards

    one buffer      S a multiple of 128 * lcm(5,120, 16,384)    48 % padding
    two buffers     5,120 alone | 8,192 and 16,384               3 % padding, nothing copied

There are other ways to reduce padding: fewer rows per block, fewer shards, larger units. They change the user's
request, so `padding.check_padding` names them, but the planner never chooses them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter
from typing import Literal

from vescale_fsdp.errors import LayoutError
from vescale_fsdp.layout.dtypes import itemsize_of
from vescale_fsdp.layout.geometry import chunk_of, numel_of, round_up
from vescale_fsdp.layout.group_layout import GroupLayout, PieceRun, TensorSlot
from vescale_fsdp.layout.packing import (
    Packing,
    Position,
    Sizes,
    TensorSize,
    least_shard,
    pack_contiguous,
    pack_scattered,
)
from vescale_fsdp.lazy import set_module

ALIGN_BYTES = 128
"""Shards and tensors start at multiples of this: a GPU cache line, and more than NCCL, TMA or any GEMM requires."""

# Prices. To send one element in a collective costs 100, and to keep one element in memory costs 100: time and memory
# have equal weight. Prices are integers, so that every machine makes the same decision.
PADDED_WIRE_PRICE = 100  # a padded element is sent in every gather and reduction of its group
PADDED_MEMORY_PRICE = 100  # a padded element is in the gathered buffer; sharded states are not counted
COPIED_TIME_PRICE = 13  # copies take about 13 % of the time of the collective: arXiv 2602.22437, table 1
COPIED_MEMORY_PRICE = 100  # a copied tensor is in memory twice while its unit is unsharded
MESSAGE_PRICE = 100 << 17  # a second message takes as long as 128 Ki elements: about 5 us at 50 GB/s in bf16
# Gain per element of the payload that a second buffer must exceed: to save half a percent of padding (0.005 * 200) is
# not worth a search.
LEAST_GAIN_PRICE = 1
MAX_COPIED_TENSORS = 64  # each scattered tensor needs its own copy kernel after a gather
# A block class is all tensors with equal blocks. Transformer layers have three to five classes.
MAX_SCATTERED_CLASSES = 8  # limits the searches per plan
MAX_CLASSES = 6  # all splits of the largest classes into two buffers are tried: at most 2**6

Scatter = Literal["never", "auto"]


@set_module("vescale_fsdp.layout")
@dataclass(frozen=True)
class TensorSpec:
    """The planner's input for one tensor. If ``block_numel`` exceeds the tensor's size, the tensor stays on one rank.

    Examples:
        >>> TensorSpec("w", (6, 4), "float32", block_numel=4).numel
        24
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    block_numel: int

    @property
    def numel(self) -> int:
        """Elements of the full tensor."""
        return numel_of(self.shape)


def align_numel_of(dtype: str) -> int:
    """Return how many elements of the dtype of this name fill `ALIGN_BYTES`.

    >>> align_numel_of("float8_e4m3fn"), align_numel_of("bfloat16"), align_numel_of("float32")
    (128, 64, 32)
    """
    return ALIGN_BYTES // itemsize_of(dtype)


def plan_group(
    tensors: Sequence[TensorSpec],
    num_shards: int,
    *,
    align_numel: int | None = None,
    scatter: Scatter = "auto",
) -> GroupLayout:
    """Lay out tensors in ``num_shards`` equal shards, as small as possible, without cutting a block.

    The same input gives the same layout on every machine, because only integers are compared.

    Args:
        tensors: in definition order, all of one dtype. Empty tensors occupy no part of the buffer.
        num_shards: ranks that shard the group, at least 1.
        align_numel: the shard size and all tensor starts are multiples of this number of elements; None: as many
            elements as fill `ALIGN_BYTES`.
        scatter: ``"auto"`` scatters tensors where that costs less than the padding it avoids; ``"never"`` keeps every
            tensor one run of the buffer, so that no gather copies.

    Returns:
        The layout; its slots are in the order of ``tensors``.

    Raises:
        LayoutError: for no shards, negative sizes, blocks below one element, repeated names or different dtypes.

    Examples:
        >>> layout = plan_group([TensorSpec("w", (6, 32), "float32", 32), TensorSpec("b", (6,), "float32", 1)], 2)
        >>> layout.shard_numel, layout.piece_numels(layout.slot("w"))
        (128, (128, 64))
    """
    align_numel = _check_input(tensors, num_shards, align_numel, scatter)
    # A block is no larger than its tensor. For an empty tensor it is 1, because the code below divides by it.
    sizes = [TensorSize(tensor.numel, max(1, min(tensor.block_numel, tensor.numel))) for tensor in tensors]
    filled = tuple(size for size in sizes if size.numel)
    shard_numel, positions = _plan_sizes(filled, num_shards, align_numel, scatter)
    remaining = iter(positions)
    slots = []
    for tensor, (numel, block) in zip(tensors, sizes, strict=True):
        start, runs = next(remaining) if numel else Position(0)
        slots.append(TensorSlot(tensor.fqn, tuple(tensor.shape), tensor.dtype, block, start, runs))
    return GroupLayout(num_shards, shard_numel, tuple(slots), align_numel)


def plan_by_rows(tensors: Sequence[TensorSpec], num_shards: int) -> GroupLayout:
    """Cut every tensor along dim 0 as ``torch.chunk`` does, for all-gather hooks that expect FSDP2's shards.

    Rank r owns rows ``[r * c, (r + 1) * c)`` of each tensor, where ``c = ceil(rows / num_shards)``; the last ranks own
    fewer rows or none. Every shard has room for c rows of each tensor, so the padding equals FSDP2's, and the tensors
    are scattered slots.

    Args:
        tensors: as for `plan_group`; each must have at least one dim.
        num_shards: ranks that shard the group, at least 1.

    Raises:
        LayoutError: as for `plan_group`, and if c rows are not whole blocks.
    """
    align_numel = _check_input(tensors, num_shards, None, "never")
    slots, end = [], 0
    for tensor in tensors:
        rows, numel = tensor.shape[0], tensor.numel
        chunk = chunk_of(rows, num_shards, 0).numel
        row_numel = numel // rows if rows else 0  # an empty tensor may have no rows
        # The LCM of the tensor's block and a row, because chunks have whole rows.
        block = max(1, min(math.lcm(tensor.block_numel, max(1, row_numel)), numel))
        if chunk < rows and (chunk * row_numel) % block:  # chunk == rows: the tensor is whole on rank 0
            raise LayoutError(
                "Even chunks of rows, which all-gather hooks need, would cut a block.",
                expected=f"blocks that divide {chunk} rows of {row_numel}, {rows} over {num_shards} ranks",
                got=f"blocks of {block} elements",
                where=tensor.fqn,
                todo="choose smaller blocks for this parameter, or a number of ranks that fits",
            )
        runs = []
        if numel:
            runs.append(PieceRun(0, rows // chunk, chunk * row_numel, end))
            if rows % chunk:  # the last chunk is shorter
                runs.append(PieceRun(rows // chunk, 1, rows % chunk * row_numel, end))
        slots.append(TensorSlot(tensor.fqn, tensor.shape, tensor.dtype, block, end, tuple(runs)))
        end += round_up(chunk * row_numel, align_numel)
    if num_shards == 1:
        # A tensor in one piece is contiguous, and needs no copy.
        slots = [replace(slot, runs=()) for slot in slots]
    return GroupLayout(num_shards, end, tuple(slots), align_numel)


def _check_input(
    tensors: Sequence[TensorSpec], num_shards: int, align_numel: int | None, scatter: Scatter
) -> int:
    """Check the planner's arguments and return the alignment in elements."""
    if num_shards < 1 or (align_numel is not None and align_numel < 1):
        raise LayoutError(
            "There must be at least one shard, and a positive alignment.",
            expected="num_shards >= 1 and align_numel >= 1",
            got=f"num_shards={num_shards}, align_numel={align_numel}",
            todo="pass the size of the mesh axis that shards the group",
        )
    if scatter not in ("never", "auto"):
        raise LayoutError(
            "This scatter mode does not exist.",
            expected="'never' or 'auto'",
            got=repr(scatter),
            where="plan_group(scatter=...)",
            todo="pass 'auto' to let the planner copy small tensors where that avoids padding",
        )
    for tensor in tensors:
        if tensor.block_numel < 1 or (tensor.shape and min(tensor.shape) < 0):
            raise LayoutError(
                "This tensor cannot be laid out.",
                expected="sizes >= 0 and block_numel >= 1",
                got=f"shape {tensor.shape}, block_numel {tensor.block_numel}",
                where=tensor.fqn,
                todo="take block_numel from Granularity.block_numel(shape)",
            )
    dtypes = {tensor.dtype: tensor.fqn for tensor in tensors}
    if len(dtypes) > 1:
        raise LayoutError(
            "The tensors of one group differ in dtype.",
            expected="one dtype per group",
            got=", ".join(f"{dtype} ({fqn})" for dtype, fqn in sorted(dtypes.items())),
            todo="plan one group per dtype; fully_shard does so by itself",
        )
    # The default is for a group without tensors, which has no dtype.
    return align_numel or min((align_numel_of(dtype) for dtype in dtypes), default=1)


@lru_cache(maxsize=256)
def _plan_sizes(sizes: Sizes, num_shards: int, align_numel: int, scatter: Scatter) -> Packing:
    """Return the cheapest packing of non-empty tensors. Cached, because the layers of a model have equal sizes."""
    if not sizes:  # the bounds in `packing` need a tensor
        return Packing(0, ())
    best = pack_contiguous(sizes, num_shards, align_numel)
    if scatter == "never":
        return best
    payload_numel = sum(numel for numel, _ in sizes)

    def price(packing: Packing) -> int:
        pairs = zip(sizes, packing.positions, strict=True)
        copied_numel = sum(numel for (numel, _), position in pairs if position.runs)
        return _price(num_shards * packing.shard_numel - payload_numel, copied_numel)

    # Tensors with equal blocks form a class. Classes are scattered as a whole, because S must be a multiple of their
    # block as long as one long tensor of the class is contiguous. The smallest class is tried first: it costs least.
    by_block: dict[int, list[int]] = {}
    for index, (numel, block) in enumerate(sizes):
        # A tensor of one block, or one that may be cut anywhere, never forces S to be a multiple of its block.
        if 1 < block < numel:
            by_block.setdefault(block, []).append(index)
    classes = [(sum(sizes[index][0] for index in members), members) for members in by_block.values()]
    # Equal classes are ordered by the size and block of their first member, so that the result is the same everywhere.
    classes.sort(key=lambda numel_and_members: (numel_and_members[0], sizes[numel_and_members[1][0]]))
    scattered: set[int] = set()
    for numel, members in classes[:MAX_SCATTERED_CLASSES]:
        scattered.update(members)
        if len(scattered) > MAX_COPIED_TENSORS or _price(0, numel) >= price(best):
            break  # later classes are larger, and so cost more
        packing = pack_scattered(sizes, frozenset(scattered), num_shards, align_numel, best.shard_numel)
        if packing is not None and price(packing) < price(best):
            best = packing
    return best


def _price(padded_numel: int, copied_numel: int) -> int:
    """Return the cost of padding and copies, by the prices above."""
    padding_price = PADDED_WIRE_PRICE + PADDED_MEMORY_PRICE
    return padded_numel * padding_price + copied_numel * (COPIED_TIME_PRICE + COPIED_MEMORY_PRICE)


def price_of(layout: GroupLayout) -> int:
    """Return the cost of a layout's padding and scattered tensors, by the prices above."""
    return _price(layout.numel - layout.payload_numel, layout.copied_numel)


def plan_buffers(
    tensors: Sequence[TensorSpec],
    num_shards: int,
    *,
    scatter: Scatter = "auto",
) -> tuple[GroupLayout, ...]:
    """Lay out tensors in one buffer or two, whichever costs less. The arguments are those of `plan_group`.

    >>> grouped = [TensorSpec(f"w{row}", (65536, row), "bfloat16", 128 * row) for row in (5120, 8192)]
    >>> [[slot.fqn for slot in layout.slots] for layout in plan_buffers(grouped, 96)]
    [['w5120'], ['w8192']]
    >>> [[slot.fqn for slot in layout.slots] for layout in plan_buffers(grouped, 2)]
    [['w5120', 'w8192']]

    Returns:
        One layout or two. The first tensor is in the first layout; slots are in the order of ``tensors``.

    Raises:
        LayoutError: as for `plan_group`.
    """
    whole = plan_group(tensors, num_shards, scatter=scatter)
    least_gain = MESSAGE_PRICE + whole.payload_numel * LEAST_GAIN_PRICE
    if price_of(whole) <= least_gain:  # even two buffers without any padding would not gain enough
        return (whole,)
    filled = [slot for slot in whole.slots if slot.numel]
    sizes = tuple(TensorSize(slot.numel, slot.block_numel) for slot in filled)
    second = {filled[index].fqn for index in _best_split(sizes, num_shards, whole.align_numel)}
    if not second:
        return (whole,)
    parts = [[tensor for tensor in tensors if (tensor.fqn in second) is side] for side in (False, True)]
    split = [plan_group(part, num_shards, scatter=scatter) for part in parts]
    return tuple(split) if sum(map(price_of, split)) + least_gain < price_of(whole) else (whole,)


def padding_ratio(layouts: Sequence[GroupLayout]) -> float:
    """Return the padding of all buffers as a fraction of their payload (0.0 if they contain no elements)."""
    payload = sum(layout.payload_numel for layout in layouts)
    return (sum(layout.numel for layout in layouts) - payload) / payload if payload else 0.0


@lru_cache(maxsize=256)
def _best_split(sizes: Sizes, num_shards: int, align_numel: int) -> frozenset[int]:
    """Return the indices of the tensors to put into a second buffer, so that both buffers are smallest.

    Returns an empty set if one buffer is as small. No tensor is scattered. Cached, because the layers of a model have
    equal sizes.
    """

    # Tensors with equal blocks form a class. Each choice of classes for the second buffer is a split. The class of the
    # first tensor stays in the first buffer, since swapped buffers would be the same split.
    by_block: dict[int, list[int]] = {}
    for index, (numel, block) in enumerate(sizes):
        # A tensor of one block, or one that may be cut anywhere, never forces S to be a multiple of its block. All such
        # tensors form one class.
        by_block.setdefault(block if 1 < block < numel else 1, []).append(index)
    # Largest class first; indices break ties, so that the result is the same everywhere.
    largest = sorted(by_block.values(), key=lambda members: (-sum(sizes[i][0] for i in members), members))
    movable = [members for members in largest[:MAX_CLASSES] if 0 not in members]
    splits = [
        frozenset(i for bit, members in enumerate(movable) if choice >> bit & 1 for i in members)
        for choice in range(1, 1 << len(movable))  # one bit per class; 0 would move nothing
    ]

    def parts_of(second: frozenset[int]) -> tuple[Sizes, Sizes]:
        return (
            tuple(size for i, size in enumerate(sizes) if i not in second),
            tuple(size for i, size in enumerate(sizes) if i in second),
        )

    # At first, the best result is one buffer. A split must be smaller.
    best, least_numel = frozenset[int](), pack_contiguous(sizes, num_shards, align_numel).shard_numel
    # Packing a split is slow, its lower bound is not. Bounds are mostly feasible, so after a few packed splits in the
    # order of their bounds, the bounds of the remaining splits exceed the best result.
    bounds = [
        (sum(least_shard(part, num_shards, align_numel) for part in parts_of(split)), split)
        for split in splits
    ]
    for bound, split in sorted(bounds, key=itemgetter(0)):  # by the bound alone, because sets have no order
        if bound >= least_numel:  # this split and all later ones cannot be better
            break
        numel = sum(pack_contiguous(part, num_shards, align_numel).shard_numel for part in parts_of(split))
        if numel < least_numel:
            best, least_numel = split, numel
    return best
