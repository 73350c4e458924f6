"""Moving a tensor between placements of one mesh axis: what travels, and the collectives that carry it.

    from \\ to     RaggedShard                      Replicate                 anything else
    RaggedShard   all-to-all of what changes owner  broadcasts or all-gather  through Replicate
    Replicate     local slice                       -                         torch's own
    Partial       through Replicate                 torch's own               torch's own
    other         through Replicate                 torch's own               torch's own

Functions take and return local tensors; `vescale_fsdp.dtensor` wraps them and gives them gradients.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp.errors import PlacementError, explain
from vescale_fsdp.geometry import numel_of
from vescale_fsdp.placement import RaggedShard
from vescale_fsdp.torch_private import DTensorSpec, TensorMeta, local_of

__all__ = ["all_gather_into", "gather_pieces", "local_shape", "redistribute_local", "reduce_scatter_into"]


# torch 2.13 renamed these two and warns about the old names; 2.11 and 2.12 have only those.
_all_gather = vars(dist).get("all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = vars(dist).get("reduce_scatter_single", dist.reduce_scatter_tensor)


def all_gather_into(full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Gather equal shards into ``full``, rank-major; ``shard`` may be this rank's slice of ``full``.

    The one place that knows how torch spells this collective.

    Args:
        full: 1-D [num_ranks * shard_numel], written.
        shard: 1-D [shard_numel], read.
        group: the ranks that take part.

    Returns:
        The work to wait on.
    """
    return _all_gather(full, shard, group=group, async_op=True)


def reduce_scatter_into(
    shard: torch.Tensor, full: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup
) -> dist.Work | None:
    """Reduce ``full`` over the ranks and leave this rank's part in ``shard``.

    Args:
        shard: 1-D [shard_numel], written.
        full: 1-D [num_ranks * shard_numel], read.
        op: SUM or AVG.
        group: the ranks that take part.

    Returns:
        The work to wait on.
    """
    return _reduce_scatter(shard, full, op=op, group=group, async_op=True)


def local_shape(placement: RaggedShard, shape: torch.Size, rank: int) -> tuple[int, ...]:
    """Shape of a rank's local tensor: 1-D, except that ``dims=()`` keeps the owner's tensor whole."""
    numel = placement.piece(shape, rank).numel
    return tuple(shape) if not placement.dims and numel else (numel,)


def redistribute_local(local: torch.Tensor, source: DTensorSpec, target: DTensorSpec) -> torch.Tensor:
    """The local tensor under ``target`` of the tensor that has ``local`` under ``source``.

    Args:
        local: this rank's part of the tensor under ``source``.
        source, target: specs with the same mesh and the same global shape.

    Returns:
        A tensor that shares no memory with ``local``, unless nothing changes.

    Raises:
        PlacementError: if the meshes differ, or a RaggedShard meets a sharded axis beside it.
    """
    if source.mesh != target.mesh:
        raise PlacementError(
            explain(
                "A tensor cannot be moved to another mesh.",
                expected=source.mesh,
                got=target.mesh,
                todo="gather it with full_tensor() and distribute it anew",
            )
        )
    if source.placements == target.placements:
        return local
    shape, mesh = source.shape, source.mesh
    axis = _only_ragged_to_ragged(source.placements, target.placements)
    if axis is not None:
        return _ragged_to_ragged(local, shape, mesh, axis, source.placements[axis], target.placements[axis])
    full = _replicate(local, shape, mesh, source.placements)
    return _distribute(full, shape, mesh, target.placements)


def _only_ragged_to_ragged(source: tuple[Placement, ...], target: tuple[Placement, ...]) -> int | None:
    """The axis that goes from RaggedShard to RaggedShard, if nothing else changes."""
    changed = [axis for axis, (a, b) in enumerate(zip(source, target, strict=True)) if a != b]
    if len(changed) != 1:
        return None
    axis = changed[0]
    both = isinstance(source[axis], RaggedShard) and isinstance(target[axis], RaggedShard)
    return axis if both else None


def _check_alone(placements: tuple[Placement, ...]) -> int | None:
    """The axis of the RaggedShard, which for now stands beside Replicate only."""
    ragged = [axis for axis, p in enumerate(placements) if isinstance(p, RaggedShard)]
    if not ragged:
        return None
    others = [p for axis, p in enumerate(placements) if axis != ragged[0]]
    if len(ragged) > 1 or not all(p.is_replicate() for p in others):
        raise PlacementError(
            explain(
                "This combination of placements cannot be redistributed.",
                expected="one RaggedShard, Replicate on every other axis",
                got=placements,
                todo="redistribute the other axes to Replicate first",
            )
        )
    return ragged[0]


def _replicate(
    local: torch.Tensor, shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> torch.Tensor:
    axis = _check_alone(placements)
    if axis is not None:
        placement = placements[axis]
        assert isinstance(placement, RaggedShard)
        return gather_pieces(local, placement.piece_numels(shape), mesh.get_group(axis)).view(shape)
    stock = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=_strides(shape))
    return local_of(stock.redistribute(placements=[Replicate()] * mesh.ndim))


def _distribute(
    full: torch.Tensor, shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> torch.Tensor:
    axis = _check_alone(placements)
    if axis is not None:
        placement = placements[axis]
        assert isinstance(placement, RaggedShard)
        rank = mesh.get_local_rank(axis)
        start, stop = placement.piece(shape, rank)
        return full.reshape(-1)[start:stop].clone().view(local_shape(placement, shape, rank))
    stock = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return local_of(stock.redistribute(placements=placements))


def _strides(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def gather_pieces(
    local: torch.Tensor, piece_numels: tuple[int, ...], group: dist.ProcessGroup
) -> torch.Tensor:
    """All pieces of a tensor, one after the other, on every rank.

    Few owners broadcast straight into their slice of the result, so that a tensor held by one of a
    thousand ranks costs its own size. Many owners share one all-gather, padded to the longest piece.

    Args:
        local: this rank's piece, any shape, ``piece_numels[rank]`` elements.
        piece_numels: elements per rank of the group.
        group: the ranks, in the order of the pieces.

    Returns:
        1-D, sum(piece_numels) elements.
    """
    full = local.new_empty(sum(piece_numels))
    slices = full.split(list(piece_numels))
    rank = dist.get_rank(group)
    flat = local.detach().reshape(-1)
    owners = [r for r, numel in enumerate(piece_numels) if numel]
    if len(owners) <= 2:
        for owner in owners:
            if owner == rank:
                slices[owner].copy_(flat)
            dist.broadcast(slices[owner], group=group, group_src=owner)
        return full
    longest = max(piece_numels)
    padded = local.new_empty(len(piece_numels) * longest)
    mine = padded[rank * longest : (rank + 1) * longest]
    mine[: flat.numel()].copy_(flat)
    work = all_gather_into(padded, mine, group)
    if work is not None:
        work.wait()
    for piece, row in zip(slices, padded.view(-1, longest), strict=True):
        piece.copy_(row[: piece.numel()])
    return full


def _ragged_to_ragged(
    local: torch.Tensor,
    shape: torch.Size,
    mesh: DeviceMesh,
    axis: int,
    source: Placement,
    target: Placement,
) -> torch.Tensor:
    """One all-to-all in which each rank sends every other rank just what that rank will own."""
    assert isinstance(source, RaggedShard) and isinstance(target, RaggedShard)
    rank = mesh.get_local_rank(axis)
    ranks = range(source.num_shards)
    have, want = source.piece(shape, rank), target.piece(shape, rank)
    send = [have.intersect(target.piece(shape, r)).numel for r in ranks]
    receive = [want.intersect(source.piece(shape, r)).numel for r in ranks]
    # What stays here needs no trip through the collective.
    kept = have.intersect(want)
    sent = local.detach().reshape(-1)
    result = local.new_empty(want.numel)
    if kept.numel:
        result[kept.start - want.start : kept.stop - want.start].copy_(
            sent[kept.start - have.start : kept.stop - have.start]
        )
    parts = [part for r, part in zip(ranks, sent.split(send), strict=False) if r != rank] if sum(send) else []
    away = torch.cat(parts) if parts else sent[:0]
    send[rank] = receive[rank] = 0
    arrived = local.new_empty(sum(receive))
    dist.all_to_all_single(arrived, away, receive, send, group=mesh.get_group(axis))
    before = sum(receive[:rank])  # pieces arrive in rank order, which is flat order
    result[:before].copy_(arrived[:before])
    result[before + kept.numel :].copy_(arrived[before:])
    return result.view(local_shape(target, shape, rank))


def spec_with(
    spec: DTensorSpec, *, placements: tuple[Placement, ...] | None = None, dtype: torch.dtype | None = None
) -> DTensorSpec:
    """The same spec with other placements or another dtype."""
    meta = spec.tensor_meta
    assert meta is not None
    return DTensorSpec(
        spec.mesh,
        placements if placements is not None else spec.placements,
        tensor_meta=TensorMeta(meta.shape, meta.stride, dtype if dtype is not None else meta.dtype),
    )


def make_spec(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size, dtype: torch.dtype
) -> DTensorSpec:
    """A spec of a row-major tensor of this global shape."""
    assert numel_of(shape) >= 0
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), _strides(shape), dtype))
