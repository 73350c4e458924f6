"""The planner: tensors with blocks in, the smallest shard and every offset out. Integers only.

`plan_group` is the only way to a layout. The search for the smallest shard is in `shard_search`; here are
the checks of what comes in, the cache (equal lists of sizes, such as the layers of a model, are planned
once) and the decision whether to scatter. Whether two buffers cost less than one is asked in `buffers`.

Scattering. One tensor whose row length is unrelated to the others' can force the LCM far above what the
payload needs. With ``scatter="auto"`` the planner also tries to take such tensors out, smallest first, and
to put their pieces wherever the others leave room; they are then copied out after each gather. Whether
that is worth it is decided by the two prices below. Other cures (fewer rows per block for that tensor, a
smaller shard size, larger units) change what the user asked for: `padding.check_padding` names them, the
planner never takes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter
from typing import Literal

from vescale_fsdp.errors import LayoutError
from vescale_fsdp.layout.dtypes import itemsize_of
from vescale_fsdp.layout.geometry import chunk_of, numel_of
from vescale_fsdp.layout.group_layout import GroupLayout, PieceRun, TensorSlot
from vescale_fsdp.layout.packing import Packing, Sizes, least_shard, pack_contiguous, pack_scattered

ALIGN_BYTES = 128
"""Shards and tensor starts lie at multiples of this: a cache line, and more than NCCL, TMA or any GEMM wants."""

# Prices per element, in hundredths of "one element moved by a collective" or "one element held in memory"
# (time and memory weigh the same). They are whole numbers so that every machine decides alike.
PADDED_WIRE_PRICE = 100  # a padded element travels in every gather and reduction of its group
PADDED_MEMORY_PRICE = 100  # and lies in the gathered buffer; its share of the sharded states is not counted
COPIED_TIME_PRICE = 13  # copies take about 13 % of the time of the collective: arXiv 2602.22437, table 1
COPIED_MEMORY_PRICE = 100  # a copied tensor lies in memory a second time while its unit is unsharded
MAX_COPIED_TENSORS = 64  # each is a copy kernel of its own
MAX_SCATTERED_CLASSES = 8  # sets of tensors that are tried; layers of transformers have three to five blocks

Scatter = Literal["never", "auto"]


@dataclass(frozen=True)
class TensorSpec:
    """What the planner must know of one tensor.

    ``block_numel`` may exceed the tensor: it then stays whole, as if its one block were its size.

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
    """Elements of this dtype (a name) that make up `ALIGN_BYTES`.

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
    """Lay tensors into ``num_shards`` equal shards without cutting a block; keep the shards small.

    The same input gives the same layout on every machine: only integers are compared.

    Examples:
        >>> layout = plan_group([TensorSpec("w", (6, 32), "float32", 32), TensorSpec("b", (6,), "float32", 1)], 2)
        >>> layout.shard_numel, layout.piece_numels(layout.slot("w"))
        (128, (128, 64))

    Args:
        tensors: in definition order, all of one dtype. Empty tensors are allowed and take no room.
        num_shards: ranks the group is sharded over, at least 1.
        align_numel: shard sizes and tensor starts are multiples of this many elements; None: of as many as
            make up `ALIGN_BYTES`.
        scatter: ``"auto"`` scatters tensors where that costs less than the padding it avoids; ``"never"``
            keeps every tensor one run of the buffer, so that no gather ever copies.

    Returns:
        The layout; its slots are in the order of ``tensors``.

    Raises:
        LayoutError: for no shards, negative sizes, blocks below one element, names that repeat or dtypes
            that differ.
    """
    align_numel = _check_input(tensors, num_shards, align_numel, scatter)
    numels = [tensor.numel for tensor in tensors]
    blocks = [max(1, min(t.block_numel, numel)) for t, numel in zip(tensors, numels, strict=True)]
    sizes = tuple((numel, block) for numel, block in zip(numels, blocks, strict=True) if numel)
    found = _plan_sizes(sizes, num_shards, align_numel, scatter)
    places = iter(found.places)
    slots = []
    for tensor, numel, block in zip(tensors, numels, blocks, strict=True):
        place = next(places) if numel else 0
        start, runs = (place, ()) if isinstance(place, int) else (_offset(place, found.shard_numel), place)
        slots.append(TensorSlot(tensor.fqn, tuple(tensor.shape), tensor.dtype, block, start, runs))
    return GroupLayout(num_shards, found.shard_numel, tuple(slots), align_numel)


def plan_by_rows(
    tensors: Sequence[TensorSpec], num_shards: int, *, align_numel: int | None = None
) -> GroupLayout:
    """Cut every tensor along its first dim as ``torch.chunk`` does, for code that expects FSDP2's shards.

    Rank r holds rows ``[r * c, (r + 1) * c)`` of each tensor, ``c = ceil(rows / num_shards)``; the last ranks
    fewer or none. Every shard has room for c rows of each, so padding is FSDP2's, and all tensors are scattered.

    Args:
        tensors: as for `plan_group`, of at least one dim each.
        num_shards: ranks the group is sharded over, at least 1.
        align_numel: shard sizes and pieces are multiples of this many elements; None: as for `plan_group`.

    Raises:
        LayoutError: as `plan_group`, and if c rows are not whole blocks.
    """
    align_numel = _check_input(tensors, num_shards, align_numel, "never")
    slots, end = [], 0
    for tensor in tensors:
        rows, numel = tensor.shape[0], tensor.numel
        chunk = chunk_of(rows, num_shards, 0).numel
        row_numel = numel // rows if rows else 0
        block = max(1, min(math.lcm(tensor.block_numel, max(1, row_numel)), numel))
        if chunk < rows and (chunk * row_numel) % block:
            raise LayoutError(
                "Cutting rows evenly, as all-gather hooks need them, would cut a block.",
                expected=f"blocks that divide {chunk} rows of {row_numel}, {rows} over {num_shards} ranks",
                got=f"blocks of {block} elements",
                where=tensor.fqn,
                todo="choose smaller blocks for this parameter, or a number of ranks that fits",
            )
        runs = []
        if numel:
            runs.append(PieceRun(0, rows // chunk, chunk * row_numel, end))
            if rows % chunk:
                runs.append(PieceRun(rows // chunk, 1, rows % chunk * row_numel, end))
        slots.append(TensorSlot(tensor.fqn, tensor.shape, tensor.dtype, block, end, tuple(runs)))
        end += -(-chunk * row_numel // align_numel) * align_numel
    if num_shards == 1:
        slots = [replace(slot, runs=()) for slot in slots]  # a tensor in one piece is not scattered
    return GroupLayout(num_shards, end, tuple(slots), align_numel)


def _offset(runs: Sequence[PieceRun], shard_numel: int) -> int:
    return runs[0].first_rank * shard_numel + runs[0].local_offset


def _check_input(
    tensors: Sequence[TensorSpec], num_shards: int, align_numel: int | None, scatter: Scatter
) -> int:
    """The alignment, once all is known to be valid."""
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
            todo="'auto' lets the planner copy small tensors where that avoids padding",
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
    return align_numel or min((align_numel_of(dtype) for dtype in dtypes), default=1)


@lru_cache(maxsize=256)
def _plan_sizes(sizes: Sizes, num_shards: int, align_numel: int, scatter: Scatter) -> Packing:
    """The packing of non-empty tensors; cached, because the layers of a model are alike."""
    if not sizes:
        return Packing(0, ())
    best = pack_contiguous(sizes, num_shards, align_numel)
    return _cheapest_scattered(sizes, num_shards, align_numel, best) if scatter == "auto" else best


def _cheapest_scattered(sizes: Sizes, num_shards: int, align_numel: int, best: Packing) -> Packing:
    """The packing with scattered tensors that undercuts ``best``, or ``best`` itself.

    Tensors that share a block are scattered together, the smallest such class first; those that fit
    after all are put back by `pack_scattered`.
    """
    payload = sum(numel for numel, _ in sizes)
    best_price = _price(best, sizes, num_shards, payload)
    scattered: set[int] = set()
    for members in _block_classes(sizes)[:MAX_SCATTERED_CLASSES]:
        numel = sum(sizes[index][0] for index in members)
        scattered.update(members)
        too_many = len(scattered) > MAX_COPIED_TENSORS
        if too_many or numel * (COPIED_TIME_PRICE + COPIED_MEMORY_PRICE) >= best_price:
            break  # later classes are larger still
        found = pack_scattered(sizes, frozenset(scattered), num_shards, align_numel, best.shard_numel)
        if found is not None:
            price = _price(found, sizes, num_shards, payload)
            if price < best_price:
                best, best_price = found, price
    return best


def _price(packing: Packing, sizes: Sizes, num_shards: int, payload_numel: int) -> int:
    copied = sum(
        numel for (numel, _), place in zip(sizes, packing.places, strict=True) if type(place) is tuple
    )
    return _price_of(num_shards * packing.shard_numel - payload_numel, copied)


def _price_of(padded_numel: int, copied_numel: int) -> int:
    return padded_numel * (PADDED_WIRE_PRICE + PADDED_MEMORY_PRICE) + copied_numel * (
        COPIED_TIME_PRICE + COPIED_MEMORY_PRICE
    )


def price_of(layout: GroupLayout) -> int:
    """What a layout costs by the prices above: its padding, and the tensors it scatters."""
    return _price_of(layout.numel - layout.payload_numel, layout.copied_numel)


def _block_classes(sizes: Sizes) -> list[list[int]]:
    """Indices of tensors that can be cut in blocks larger than an element, by block, smallest class first."""
    classes: dict[int, list[int]] = {}
    for index, (numel, block) in enumerate(sizes):
        if 1 < block < numel:
            classes.setdefault(block, []).append(index)
    return sorted(
        classes.values(), key=lambda members: (sum(sizes[i][0] for i in members), sizes[members[0]])
    )


MESSAGE_PRICE = 100 << 17
"""Of a second message in a launch, in the planner's hundredths of an element: it takes about as long as 128 Ki
elements of a running one (some 5 us at 50 GB/s in bf16)."""
LEAST_GAIN_PRICE = (
    1  # per element of the payload: what saves less than half a percent of padding is not worth a search
)
MAX_CLASSES = 6  # kinds of blocks of which every split is tried, 31 of them; layers have three to five


def plan_buffers(
    tensors: Sequence[TensorSpec],
    num_shards: int,
    *,
    align_numel: int | None = None,
    scatter: Scatter = "auto",
) -> tuple[GroupLayout, ...]:
    """Lay tensors into one buffer or two, whichever costs less; the arguments are those of `plan_group`.

    >>> grouped = [TensorSpec(f"w{row}", (65536, row), "bfloat16", 128 * row) for row in (5120, 8192)]
    >>> [[slot.fqn for slot in layout.slots] for layout in plan_buffers(grouped, 96)]
    [['w5120'], ['w8192']]
    >>> [[slot.fqn for slot in layout.slots] for layout in plan_buffers(grouped, 2)]
    [['w5120', 'w8192']]

    Returns:
        The layouts, the one with the first tensor first; the slots of each in the order of ``tensors``.

    Raises:
        LayoutError: as `plan_group`.
    """
    whole = plan_group(tensors, num_shards, align_numel=align_numel, scatter=scatter)
    worth = MESSAGE_PRICE + whole.payload_numel * LEAST_GAIN_PRICE
    if price_of(whole) <= worth:
        return (whole,)
    filled = [slot for slot in whole.slots if slot.numel]
    sizes = tuple((slot.numel, slot.block_numel) for slot in filled)
    apart = {filled[index].fqn for index in _best_split(sizes, num_shards, whole.align_numel)}
    if not apart:
        return (whole,)
    parts = [[tensor for tensor in tensors if (tensor.fqn in apart) is side] for side in (False, True)]
    split = [plan_group(part, num_shards, align_numel=align_numel, scatter=scatter) for part in parts]
    return tuple(split) if sum(map(price_of, split)) + worth < price_of(whole) else (whole,)


def padding_ratio(layouts: Sequence[GroupLayout]) -> float:
    """Padding of all buffers as a fraction of their payload (0.0 for empty ones)."""
    payload = sum(layout.payload_numel for layout in layouts)
    return (sum(layout.numel for layout in layouts) - payload) / payload if payload else 0.0


@lru_cache(maxsize=256)
def _best_split(sizes: Sizes, num_shards: int, align_numel: int) -> frozenset[int]:
    """The tensors of the second buffer where two, neither with scattered tensors, are smallest.

    None where one is as small. Cached, because the layers of a model are alike.
    """

    def total(of_part: Callable[[Sizes, int, int], int], apart: frozenset[int]) -> int:
        parts = [
            tuple(size for i, size in enumerate(sizes) if (i in apart) is side) for side in (False, True)
        ]
        return sum(of_part(part, num_shards, align_numel) for part in parts if part)

    best, least_numel = frozenset[int](), _shard_numel(sizes, num_shards, align_numel)
    # What no packing can undercut is mostly met, so few splits are packed before the others are out.
    bounds = [(total(least_shard, apart), apart) for apart in _splits(sizes)]
    for bound, apart in sorted(bounds, key=itemgetter(0)):
        if bound >= least_numel:
            break
        numel = total(_shard_numel, apart)
        if numel < least_numel:
            best, least_numel = apart, numel
    return best


def _shard_numel(sizes: Sizes, num_shards: int, align_numel: int) -> int:
    return pack_contiguous(sizes, num_shards, align_numel).shard_numel


def _splits(sizes: Sizes) -> Iterator[frozenset[int]]:
    """Every way to keep tensors of some kinds of blocks apart from the first one's."""
    kinds: dict[int, list[int]] = {}
    for index, (numel, block) in enumerate(sizes):
        kinds.setdefault(block if 1 < block < numel else 1, []).append(index)
    largest = sorted(kinds.values(), key=lambda members: (-sum(sizes[i][0] for i in members), members))
    movable = [members for members in largest[:MAX_CLASSES] if 0 not in members]
    for choice in range(1, 1 << len(movable)):
        yield frozenset(i for place, members in enumerate(movable) if choice >> place & 1 for i in members)
