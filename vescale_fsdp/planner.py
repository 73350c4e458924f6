"""The planner: tensors with blocks in, the smallest shard and every offset out. Integers only.

The problem (veScale-FSDP, arXiv 2602.22437, section on grouped RaggedShard): put tensors into a buffer of
m shards of S elements so that no shard boundary falls inside a block, and make S as small as possible.
It is NP-hard over all orders. For one fixed order and one S, taking the earliest legal start for each
tensor decides feasibility exactly, because ending earlier never hurts what follows. Three cases per tensor:

    1. it lies inside one shard: any start will do
    2. it touches one boundary: the boundary must be a whole number of blocks from its start
    3. it touches several: besides, S must be a whole number of its blocks

Without case 3, a feasible S stays feasible when it grows, so binary search finds the smallest. With
case 3, S must be a multiple of the LCM of the blocks concerned; along those multiples the same holds.
Which tensors are case 3 is guessed by prefixes of a sorted list (largest tensor first, largest block
first, and the empty prefix); every distinct LCM is tried and the best S kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vescale_fsdp.errors import LayoutError, explain
from vescale_fsdp.geometry import numel_of
from vescale_fsdp.layout import GroupLayout, TensorSlot

__all__ = ["ALIGN_NUMEL", "TensorSpec", "plan_group"]

ALIGN_NUMEL = 8
"""Shards and tensor starts lie at multiples of this: 16 bytes in bf16, what NCCL and GEMM kernels want."""


@dataclass(frozen=True)
class TensorSpec:
    """What the planner must know of one tensor."""

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    block_numel: int

    @property
    def numel(self) -> int:
        """Elements of the full tensor."""
        return numel_of(self.shape)


def plan_group(
    tensors: Sequence[TensorSpec], num_shards: int, *, align_numel: int = ALIGN_NUMEL
) -> GroupLayout:
    """Lay tensors into ``num_shards`` equal shards without cutting a block; keep the shards small.

    The same input gives the same layout on every machine: only integers are compared.

    Args:
        tensors: in definition order. Empty tensors are allowed and take no room.
        num_shards: ranks the group is sharded over, at least 1.
        align_numel: shard sizes and tensor starts are multiples of this many elements.

    Returns:
        The layout; its slots are in the order of ``tensors``.

    Raises:
        LayoutError: for no shards, negative sizes or blocks below one element.
    """
    _check_input(tensors, num_shards, align_numel)
    payload = [tensor for tensor in tensors if tensor.numel]
    best_numel: int | None = None
    best_starts: dict[str, int] = {}
    for order in _orders(payload):
        sizes = [(tensor.numel, tensor.block_numel) for tensor in order]
        for step in _candidate_steps(sizes, align_numel):
            found = _smallest_multiple(sizes, num_shards, step, align_numel, best_numel)
            if found is not None:
                best_numel, starts = found
                best_starts = {tensor.fqn: start for tensor, start in zip(order, starts, strict=True)}
    slots = tuple(
        TensorSlot(t.fqn, tuple(t.shape), t.dtype, t.block_numel, best_starts.get(t.fqn, 0)) for t in tensors
    )
    return GroupLayout(num_shards, best_numel or 0, slots)


def _check_input(tensors: Sequence[TensorSpec], num_shards: int, align_numel: int) -> None:
    if num_shards < 1 or align_numel < 1:
        raise LayoutError(
            explain(
                "There must be at least one shard, and a positive alignment.",
                expected="num_shards >= 1 and align_numel >= 1",
                got=f"num_shards={num_shards}, align_numel={align_numel}",
                todo="pass the size of the mesh axis that shards the group",
            )
        )
    for tensor in tensors:
        if min(tensor.shape, default=0) < 0 or tensor.block_numel < 1:
            raise LayoutError(
                explain(
                    "A tensor cannot be laid out.",
                    expected="sizes >= 0 and block_numel >= 1",
                    got=f"shape {tensor.shape}, block_numel {tensor.block_numel}",
                    where=tensor.fqn,
                    todo="take block_numel from Granularity.block_numel(shape)",
                )
            )


def _orders(tensors: Sequence[TensorSpec]) -> Iterable[list[TensorSpec]]:
    """Orders worth trying, definition order first: it is kept unless another one is strictly better."""
    yield list(tensors)
    by_block = sorted(tensors, key=lambda t: (-t.block_numel, -t.numel))
    if by_block != list(tensors):
        yield by_block


def _candidate_steps(sizes: Sequence[tuple[int, int]], align_numel: int) -> list[int]:
    """Distinct values of which S may have to be a multiple: LCMs of blocks over prefixes of sorted lists."""
    steps = {align_numel: None}
    for key in ((lambda size: -size[0]), (lambda size: -size[1])):
        step = align_numel
        for _, block in sorted(sizes, key=key):
            step = math.lcm(step, block)
            steps[step] = None
    return list(steps)


def _smallest_multiple(
    sizes: Sequence[tuple[int, int]], num_shards: int, step: int, align_numel: int, below: int | None
) -> tuple[int, list[int]] | None:
    """Smallest multiple of ``step`` that is feasible and below a known S, with the starts it gives."""
    payload = sum(numel for numel, _ in sizes)
    low = max(1, -(-payload // (num_shards * step)))
    # One shard that holds everything, gaps for aligned starts included, is always feasible.
    high = -(-(payload + len(sizes) * align_numel) // step)
    if below is not None:
        high = min(high, (below - 1) // step)
    if low > high:
        return None
    starts = place_in_order(sizes, num_shards, high * step, align_numel)
    if starts is None:
        return None
    while low < high:
        middle = (low + high) // 2
        found = place_in_order(sizes, num_shards, middle * step, align_numel)
        if found is None:
            low = middle + 1
        else:
            high, starts = middle, found
    return high * step, starts


def place_in_order(
    sizes: Sequence[tuple[int, int]], num_shards: int, shard_numel: int, align_numel: int = 1
) -> list[int] | None:
    """Earliest legal start of each (numel, block_numel) in this order, or None if they do not fit.

    Exact for the given order and S: if this returns None, no placement in this order exists.
    """
    end_of_buffer = num_shards * shard_numel
    cursor = 0
    starts = []
    for numel, block in sizes:
        start = -(-cursor // align_numel) * align_numel
        while True:
            if start + numel > end_of_buffer:
                return None
            boundary = (start // shard_numel + 1) * shard_numel
            if start + numel <= boundary:
                break
            # A start that is aligned and a whole number of blocks before the boundary.
            aligned = start + (boundary - start) % math.lcm(block, align_numel)
            touches_one = aligned + numel <= boundary + shard_numel
            if aligned < boundary and (touches_one or shard_numel % block == 0):
                start = aligned
                break
            start = boundary
        starts.append(start)
        cursor = start + numel
    return starts
