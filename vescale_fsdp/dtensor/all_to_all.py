"""One all-to-all between two cuts of a tensor: each rank sends every other just what that one will own.

A cut gives every rank some boxes of the tensor. What rank s sends to rank r are the
intersections of s's old boxes with r's new ones, in that order, which both sides can list. What stays on
its rank is copied and never enters the collective.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor.placement_types import Placement, Shard

from vescale_fsdp.collectives import Work, all_to_all_into
from vescale_fsdp.dtensor.spec import local_shape
from vescale_fsdp.layout.geometry import Box, boxes_of_range, numel_of, whole_box
from vescale_fsdp.layout.placement import RaggedShard


def _shard_box(placement: Placement, shape: Sequence[int], num_ranks: int, rank: int) -> Box:
    assert type(placement) is Shard
    return whole_box(shape).chunk(placement.dim, num_ranks, rank)


def _common(mine: Sequence[Box], theirs: Sequence[Box]) -> Iterator[tuple[int, int, Box]]:
    for i, a in enumerate(mine):
        for j, b in enumerate(theirs):
            box = a.intersect(b)
            if box is not None:
                yield i, j, box


def _views(flat: torch.Tensor, boxes: Sequence[Box]) -> list[torch.Tensor]:
    """The boxes of a local tensor as n-d views of it."""
    parts = flat.split([box.numel for box in boxes])
    return [part.view(box.sizes) for part, box in zip(parts, boxes, strict=True)]


def exchange(
    local: torch.Tensor,
    have: Placement,
    want: Placement,
    shape: tuple[int, ...],
    group: dist.ProcessGroup,
) -> Generator[Work | None, None, torch.Tensor]:
    """Steps of the all-to-all from one cut to the other.

    Args:
        local: what this rank holds under ``have``.
        have, want: RaggedShard or Shard, each over all ranks of ``group``.
        shape: of the tensor that they cut.
        group: the ranks.

    Returns:
        What this rank holds under ``want``, in new memory.
    """
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    both_ragged = isinstance(have, RaggedShard) and isinstance(want, RaggedShard)
    # Two ragged cuts are both runs of the flat tensor: one box per rank instead of several.
    seen_as = (numel_of(shape),) if both_ragged else shape

    def held(placement: Placement, r: int) -> tuple[Box, ...]:
        if isinstance(placement, RaggedShard):
            return boxes_of_range(seen_as, *placement.piece(shape, r))
        box = _shard_box(placement, shape, num_ranks, r)
        return (box,) if box.numel else ()

    old, new = held(have, rank), held(want, rank)
    result = local.new_empty(sum(box.numel for box in new))
    sources, targets = _views(local.reshape(-1), old), _views(result, new)
    for i, j, box in _common(old, new):
        targets[j][box.slices(new[j].offsets)].copy_(sources[i][box.slices(old[i].offsets)])
    others = [r for r in range(num_ranks) if r != rank]
    outgoing = {r: [(i, box) for i, _, box in _common(old, held(want, r))] for r in others}
    incoming = {r: [(j, box) for _, j, box in _common(held(have, r), new)] for r in others}
    leaving = [sources[i][box.slices(old[i].offsets)].reshape(-1) for r in others for i, box in outgoing[r]]
    sent = torch.cat(leaving) if leaving else local.new_empty(0)
    arriving = [(j, box) for r in others for j, box in incoming[r]]
    received = local.new_empty(sum(box.numel for _, box in arriving))
    yield all_to_all_into(received, sent, _numels(incoming, num_ranks), _numels(outgoing, num_ranks), group)
    for (j, box), part in zip(arriving, _views(received, [box for _, box in arriving]), strict=True):
        targets[j][box.slices(new[j].offsets)].copy_(part)
    if isinstance(want, RaggedShard):
        return result.view(local_shape(want, shape, rank))
    return result.view(_shard_box(want, shape, num_ranks, rank).sizes)


def _numels(boxes: dict[int, list[tuple[int, Box]]], num_ranks: int) -> list[int]:
    return [sum(box.numel for _, box in boxes.get(r, [])) for r in range(num_ranks)]
