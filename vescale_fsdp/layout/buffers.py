"""Buffers: the tensors of one dtype in one buffer, or in two where their blocks do not go together.

Where two long tensors have blocks with a large common multiple, one buffer pays: by padding up to that multiple, or by
scattering some tensors and copying them out of every gather. Two buffers, each with blocks that go together, pay with
one more message instead, which travels in the same launch as the first (coalesced)::

    rows of 5,120, 8,192 and 16,384, blocks of 128 rows, 768 shards

    one buffer      S a multiple of 128 * lcm(5,120, 16,384)    48 % padding
    two buffers     5,120 alone | 8,192 and 16,384               3 % padding, nothing copied

`plan_buffers` asks the planner for each way and takes the cheapest by the planner's own prices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from operator import itemgetter

from vescale_fsdp.layout.group_layout import GroupLayout
from vescale_fsdp.layout.planner import Scatter, TensorSpec, plan_group, price_of
from vescale_fsdp.layout.shard_search import Sizes, least_shard, pack_contiguous

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
