"""Moving a tensor between placements: what travels over one mesh axis, and in which order the axes go.

What one axis does (`_axis_moves`), n ranks, P elements in the largest piece, N in the tensor:

    from \\ to    RaggedShard                         Replicate                Shard(d)
    RaggedShard   all-to-all of what changes owner    all-gather (n * P), or   all-to-all of what
                                                      one broadcast per owner  changes owner
    Replicate     local slice                         -                        torch's own
    Shard(d)      all-to-all of what changes owner    torch's own              torch's own
    Partial       reduce-scatter (n * P), or one      torch's own              torch's own
                  reduce per owner

Padding to the largest piece is cheap while pieces are alike; when it would more than double the traffic
(a tensor held by few ranks), broadcasts or reductions per owner carry N elements and no padding.

Several axes (`_moves`), each step on the smallest data it can have:

    1. the ragged axis leaves its pieces, if its target is not ragged or the other axes change their cut
    2. torch's own redistribution changes the cut of the other axes
    3. the ragged axis takes its pieces (a reduce-scatter, if it was Partial)
    4. other axes that are Partial and shall be Replicate are reduced, piece by piece

Functions take and return local tensors; `vescale_fsdp.dtensor.ragged_dtensor` wraps them and gives them gradients.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Partial, Placement, Shard

from vescale_fsdp.collectives import (
    Work,
    all_gather_into,
    all_reduce_in_place,
    all_to_all_into,
    broadcast_in_place,
    reduce_in_place,
    reduce_scatter_into,
    wait_for,
)
from vescale_fsdp.dtensor.spec import (
    inner_box,
    is_ragged_spec,
    local_shape,
    ragged_axis,
    spec_with,
)
from vescale_fsdp.errors import PlacementError
from vescale_fsdp.layout.geometry import Box, boxes_of_range, numel_of, whole_box
from vescale_fsdp.layout.placement import RaggedShard
from vescale_fsdp.torch_private import DTensorSpec, local_of

# The steps of a move: each work that has to end before it can go on is yielded; the new local is returned.
_Steps = Generator[Work | None, None, torch.Tensor]

_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # divided afterwards: gloo has no AVG for all of them
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


def redistribute_local(local: torch.Tensor, source: DTensorSpec, target: DTensorSpec) -> torch.Tensor:
    """The local tensor under ``target`` of the tensor that has ``local`` under ``source``.

    Args:
        local: this rank's part of the tensor under ``source``.
        source, target: specs with the same mesh and the same global shape.

    Returns:
        A tensor that shares no memory with ``local``, unless nothing changes.

    Raises:
        PlacementError: if the meshes differ, or the target has a Partial that the source has not.
    """
    return start_redistribution(local, source, target).wait()


def start_redistribution(local: torch.Tensor, source: DTensorSpec, target: DTensorSpec) -> Redistribution:
    """Start `redistribute_local`. ``local`` must not be written before `Redistribution.wait`."""
    _check_reachable(source, target)
    return Redistribution(_moves(local.detach(), source, target))


class Redistribution:
    """A redistribution under way: its first collective runs from the start, `wait` does the rest.

    A move over one mesh axis has one collective, so all of it overlaps with what is computed meanwhile.
    All ranks must start and wait for their moves in the same order.

    Args:
        steps: each work that has to end before the move can go on; they return the new local tensor.
    """

    def __init__(self, steps: _Steps) -> None:
        self._steps = steps
        self._work: Work | None = None
        self._result: torch.Tensor | None = None
        self._advance()

    def wait(self) -> torch.Tensor:
        """The local tensor under the target, once it is here; the same tensor each time."""
        while self._result is None:
            wait_for(self._work)
            self._advance()
        return self._result

    def _advance(self) -> None:
        try:
            self._work = next(self._steps)
        except StopIteration as end:
            self._result = end.value


def _check_reachable(source: DTensorSpec, target: DTensorSpec) -> None:
    if source.mesh != target.mesh or source.shape != target.shape:
        raise PlacementError(
            "A tensor keeps its mesh and its shape when it is redistributed.",
            expected=f"shape {tuple(source.shape)} on {source.mesh}",
            got=f"shape {tuple(target.shape)} on {target.mesh}",
            todo="gather it with full_tensor() and distribute it anew",
        )
    for axis, (have, want) in enumerate(zip(source.placements, target.placements, strict=True)):
        if want.is_partial() and have != want:
            raise PlacementError(
                "A tensor cannot be redistributed to Partial.",
                expected="Replicate, Shard or RaggedShard",
                got=want,
                where=f"mesh axis {axis} of {target.placements}",
            )


def _moves(local: torch.Tensor, source: DTensorSpec, target: DTensorSpec) -> _Steps:
    """All steps from one spec to the other; see the table above."""
    now = source
    if is_ragged_spec(now.placements) and now.placements != target.placements:
        axis, _ = ragged_axis(now.placements)
        if not isinstance(target.placements[axis], RaggedShard) or not _same_cut(now, target, axis):
            local, now = yield from _reduce_others(local, now, target)
            step = _with(now, axis, _stop_over(now, target, axis))
            local = yield from _axis_moves(local, now, step, axis)
            now = step
    if not is_ragged_spec(now.placements):
        step = _before_ragged(now, target)
        local = _torch_redistribute(local, now, step)
        now = step
    if now.placements != target.placements:
        axis, placement = ragged_axis(target.placements)
        step = _with(now, axis, placement)
        local = yield from _axis_moves(local, now, step, axis)
        local, _ = yield from _reduce_others(local, step, target)
    return local


def _with(spec: DTensorSpec, axis: int, placement: Placement) -> DTensorSpec:
    return spec_with(
        spec, placements=[placement if other == axis else p for other, p in enumerate(spec.placements)]
    )


def _same_cut(source: DTensorSpec, target: DTensorSpec, axis: int) -> bool:
    """Whether the axes but ``axis`` leave every rank the same box under both specs."""
    pairs = zip(source.placements, target.placements, strict=True)
    return all(
        other == axis
        or have == want
        or not (have.is_shard() or want.is_shard() or isinstance(want, RaggedShard))
        for other, (have, want) in enumerate(pairs)
    )


def _stop_over(source: DTensorSpec, target: DTensorSpec, axis: int) -> Placement:
    """What the ragged axis becomes when it gives up its pieces: its target, if one move leads there."""
    want = target.placements[axis]
    if type(want) is not Shard or not _same_cut(source, target, axis):
        return Replicate()
    alone = not any(p.is_shard(want.dim) for other, p in enumerate(target.placements) if other != axis)
    return want if alone else Replicate()


def _before_ragged(source: DTensorSpec, target: DTensorSpec) -> DTensorSpec:
    """The spec without ragged axes from which ``target`` is one move over its ragged axis away."""
    if not is_ragged_spec(target.placements):
        return target
    axis, _ = ragged_axis(target.placements)
    placements = [
        have if have.is_partial() and want.is_replicate() else want
        for have, want in zip(source.placements, target.placements, strict=True)
    ]
    have = source.placements[axis]
    shares_dim = type(have) is Shard and any(
        p.is_shard(have.dim)
        for spec in (source, target)
        for other, p in enumerate(spec.placements)
        if other != axis
    )
    movable = (type(have) is Shard and not shares_dim) or _reducible(have)
    placements[axis] = have if movable else Replicate()
    return spec_with(source, placements=placements)


def _reducible(placement: Placement) -> bool:
    """Whether it is a Partial that plain collectives reduce (the norms of torch need more)."""
    return type(placement) is Partial and placement.reduce_op in _REDUCE_OPS


def _torch_redistribute(local: torch.Tensor, source: DTensorSpec, target: DTensorSpec) -> torch.Tensor:
    if source.placements == target.placements:
        return local
    meta = source.tensor_meta
    assert meta is not None
    stock = DTensor.from_local(
        local, source.mesh, source.placements, run_check=False, shape=meta.shape, stride=meta.stride
    )
    return local_of(stock.redistribute(placements=target.placements)).contiguous()


def _reduce_others(
    local: torch.Tensor, source: DTensorSpec, target: DTensorSpec
) -> Generator[Work | None, None, tuple[torch.Tensor, DTensorSpec]]:
    """All-reduce the pieces over the axes that are Partial in ``source`` and not in ``target``, and the spec then."""
    now = source
    for axis, (have, want) in enumerate(zip(source.placements, target.placements, strict=True)):
        if have.is_partial() and not want.is_partial():
            if not _reducible(have):
                raise PlacementError(
                    "This Partial cannot be reduced on ragged pieces.",
                    expected=f"Partial of one of {sorted(_REDUCE_OPS)}",
                    got=have,
                    where=f"mesh axis {axis} of {source.placements}",
                )
            local = local.clone()
            yield all_reduce_in_place(local, _op_of(have), source.mesh.get_group(axis))
            _divide_average(local, have, source.mesh.size(axis))
            now = _with(now, axis, Replicate())
    return local, now


def _op_of(partial: Placement) -> dist.ReduceOp.RedOpType:
    assert isinstance(partial, Partial)
    return _REDUCE_OPS[partial.reduce_op]


def _divide_average(tensor: torch.Tensor, partial: Placement, num_ranks: int) -> None:
    assert isinstance(partial, Partial)
    if partial.reduce_op == "avg":
        tensor.div_(num_ranks)


# -- one axis -----------------------------------------------------------------------------------------


def _axis_moves(local: torch.Tensor, source: DTensorSpec, target: DTensorSpec, axis: int) -> _Steps:
    """Steps between two specs that differ on one mesh axis, on which at least one of them is ragged."""
    have, want = source.placements[axis], target.placements[axis]
    if have == want:
        return local
    group, rank = source.mesh.get_group(axis), source.mesh.get_local_rank(axis)
    inner = inner_box(_with(source, axis, Replicate())).sizes
    if isinstance(have, RaggedShard) and want.is_replicate():
        full = yield from _gather_steps(local, have.piece_numels(inner), group)
        return full.view(inner)
    if isinstance(want, RaggedShard) and have.is_replicate():
        start, stop = want.piece(inner, rank)
        return local.reshape(-1)[start:stop].clone().view(local_shape(want, inner, rank))
    if isinstance(want, RaggedShard) and have.is_partial():
        return (yield from _reduce_scatter_steps(local, have, want, inner, group, rank))
    return (yield from exchange(local, have, want, inner, group))


def _worth_padding(piece_numels: Sequence[int]) -> bool:
    return len(piece_numels) * max(piece_numels) <= 2 * sum(piece_numels)


def _gather_steps(local: torch.Tensor, piece_numels: tuple[int, ...], group: dist.ProcessGroup) -> _Steps:
    rank, flat = dist.get_rank(group), local.reshape(-1)
    if sum(piece_numels) == 0:
        return flat.new_empty(0)
    if not _worth_padding(piece_numels):
        full = flat.new_empty(sum(piece_numels))
        slices = full.split(list(piece_numels))
        slices[rank].copy_(flat)
        works = [
            broadcast_in_place(slices[owner], group, owner)
            for owner, numel in enumerate(piece_numels)
            if numel
        ]
        yield from works
        return full
    longest = max(piece_numels)
    padded = flat.new_empty(len(piece_numels) * longest)
    mine = padded[rank * longest : (rank + 1) * longest]
    mine[: flat.numel()].copy_(flat)
    yield all_gather_into(padded, mine, group)
    if min(piece_numels) == longest:
        return padded
    return torch.cat([row[:numel] for row, numel in zip(padded.view(-1, longest), piece_numels, strict=True)])


def _reduce_scatter_steps(
    local: torch.Tensor,
    have: Placement,
    want: RaggedShard,
    inner: tuple[int, ...],
    group: dist.ProcessGroup,
    rank: int,
) -> _Steps:
    """Every rank gets its piece of the reduced tensor, and nothing else of it."""
    piece_numels = want.piece_numels(inner)
    slices = local.reshape(-1).split(list(piece_numels))
    if _worth_padding(piece_numels) and _op_of(have) == dist.ReduceOp.SUM:
        longest = max(piece_numels)
        padded = local.new_zeros(len(piece_numels), longest)
        for row, part in zip(padded, slices, strict=True):
            row[: part.numel()].copy_(part)
        shard = local.new_empty(longest)
        yield reduce_scatter_into(shard, padded.view(-1), dist.ReduceOp.SUM, group)
        result = shard[: piece_numels[rank]].clone()
    else:
        copies = [part.clone() for part in slices]
        works = [
            reduce_in_place(copy, _op_of(have), group, owner)
            for owner, copy in enumerate(copies)
            if copy.numel()
        ]
        yield from works
        result = copies[rank]
    _divide_average(result, have, len(piece_numels))
    return result.view(local_shape(want, inner, rank))


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
