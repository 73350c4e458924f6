"""The plan of a Muon step: what is orthogonalised where it lies, what travels, in which buckets.

A plan depends on the parameters that have a gradient, on their shapes and how they lie; every rank computes
the same one, owners of matrices included, so nothing of it is communicated. It is kept until those change, and never
saved: after a load, on another number of ranks perhaps, it is computed anew.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from vescale_fsdp.collectives import new_group
from vescale_fsdp.dtensor.piece_map import PieceMap
from vescale_fsdp.dtensor.spec import ranks_by_group_rank
from vescale_fsdp.optim.muon.bucket_exchange import WIRE_DTYPE, Bucket, Ranks, Travel
from vescale_fsdp.optim.muon.matrices import Matrix


@dataclass(frozen=True)
class SteppedParam:
    """One parameter that takes part in a step: how it lies, its matrices, the iterations of each."""

    pieces: PieceMap | None
    matrices: tuple[Matrix, ...]
    steps: int


@dataclass(frozen=True)
class MuonPlan:
    """A step's work for this rank; parameters are named by their index in the list the plan was made for.

    Args:
        params: the parameters.
        here: matrices that this rank holds whole. They cost no communication.
        buckets: cut matrices, two collectives per bucket; the same on all ranks of a mesh.
        gathered: parameters without contiguous pieces, gathered to every rank (correct, slower).
    """

    params: tuple[SteppedParam, ...]
    here: tuple[tuple[int, Matrix], ...]
    buckets: tuple[Bucket, ...]
    gathered: tuple[int, ...]


def plan_step(
    wanted: Sequence[SteppedParam], bucket_bytes: int, ranks_of: dict[tuple[DeviceMesh, int], Ranks]
) -> MuonPlan:
    """Make the plan.

    Args:
        wanted: the parameters with a gradient, in the same order on every rank.
        bucket_bytes: upper bound of a bucket's bytes on the wire, per rank and direction.
        ranks_of: ranks of each (mesh, axis), filled as meshes appear. Filling is collective over the mesh.
    """
    here: list[tuple[int, Matrix]] = []
    gathered: list[int] = []
    cut: dict[tuple[DeviceMesh, int], list[tuple[int, Matrix, PieceMap]]] = {}
    held: dict[tuple[DeviceMesh, int], list[tuple[int, Matrix, int]]] = {}
    for index, param in enumerate(wanted):
        pieces = param.pieces
        if pieces is None:
            gathered.append(index)
            continue
        key = pieces.cut_over
        for matrix in param.matrices:
            holder = pieces.holder_of(matrix.range)
            if holder is None:
                assert key is not None
                cut.setdefault(key, []).append((index, matrix, pieces))
                continue
            if key is not None:
                held.setdefault(key, []).append((index, matrix, holder))
            if holder == pieces.shard_rank:
                here.append((index, matrix))
    for key in cut:
        if key not in ranks_of:
            ranks_of[key] = _make_ranks(*key)
    buckets = [
        bucket
        for key, matrices in cut.items()
        for bucket in _buckets(wanted, matrices, held.get(key, []), ranks_of[key], bucket_bytes)
    ]
    return MuonPlan(tuple(wanted), tuple(here), tuple(buckets), tuple(gathered))


def _buckets(
    wanted: Sequence[SteppedParam],
    cut: Sequence[tuple[int, Matrix, PieceMap]],
    held: Sequence[tuple[int, Matrix, int]],
    ranks: Ranks,
    bucket_bytes: int,
) -> list[Bucket]:
    """Cut matrices of one mesh, with owners, in buckets of bounded size."""
    num_shards = len(ranks.numbers[0])
    loads = [0] * num_shards
    for index, matrix, holder in held:  # every replica does these: they are whole there too
        loads[holder] += newton_schulz_flops(matrix.rows, matrix.cols, wanted[index].steps)
    flops = [newton_schulz_flops(matrix.rows, matrix.cols, wanted[index].steps) for index, matrix, _ in cut]
    replicas = len(ranks.numbers)
    parts = [
        {
            replica * num_shards + shard: matrix.range.intersect(pieces.piece(shard)).numel
            for shard in pieces.holders_of(matrix.range)
            for replica in range(replicas)
        }
        for _, matrix, pieces in cut
    ]
    owners = assign_owners(flops, parts, loads * replicas)
    travels = [Travel(*each, divmod(owner, num_shards)) for each, owner in zip(cut, owners, strict=True)]
    limit_numel = max(1, bucket_bytes * ranks.num_ranks // WIRE_DTYPE.itemsize)
    buckets: list[list[Travel]] = []
    room = 0
    for travel in travels:
        if not buckets or travel.matrix.numel > room:
            buckets.append([])
            room = limit_numel
        buckets[-1].append(travel)
        room -= travel.matrix.numel
    return [Bucket(ranks, tuple(bucket)) for bucket in buckets]


def _make_ranks(mesh: DeviceMesh, axis: int) -> Ranks:
    """The ranks of a mesh whose ``axis`` shards and whose other axes replicate."""
    table = ranks_by_group_rank(mesh).movedim(axis, -1).reshape(-1, mesh.size(axis)).tolist()  # global ranks
    if len(table) == 1:
        group: dist.ProcessGroup | None = mesh.get_group(axis)
    elif sorted(rank for row in table for rank in row) == list(range(dist.get_world_size())):
        group = dist.group.WORLD
    else:
        group = new_group(mesh.get_group(axis), sorted(rank for row in table for rank in row))
    assert group is not None
    numbers = tuple(tuple(dist.get_group_rank(group, rank) for rank in row) for row in table)
    me = dist.get_rank()
    replica, shard = next((r, s) for r, row in enumerate(table) for s, rank in enumerate(row) if rank == me)
    return Ranks(group, numbers, replica, shard)


# -- who orthogonalises which matrix: integers only ------------------------------------------------------


def newton_schulz_flops(rows: int, cols: int, steps: int) -> int:
    """Floating-point operations of ``steps`` quintic iterations on a rows x cols matrix.

    With s the short and l the long side, a step is X X' and B X (2 s s l each) and one A A (2 s s s).
    """
    short, long = sorted((rows, cols))
    return steps * (4 * short * short * long + 2 * short**3)


def assign_owners(
    flops: Sequence[int], held_numels: Sequence[Mapping[int, int]], fixed_loads: Sequence[int]
) -> list[int]:
    """The owner of each matrix: the heaviest first, each to the rank with the least work so far.

    Args:
        flops: work of each matrix.
        held_numels: for each matrix the elements that its holders have already, by rank; among ranks with equally
            little work the one that holds most of the matrix takes it, because what it holds need not travel.
        fixed_loads: work that each rank has anyway (matrices it holds whole).

    Returns:
        One rank per matrix.
    """
    loads = list(fixed_loads)
    idlest = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(idlest)
    owners = [0] * len(flops)
    for index in sorted(range(len(flops)), key=lambda i: (-flops[i], i)):
        while idlest[0][0] != loads[idlest[0][1]]:  # out of date: it has taken a matrix since
            heapq.heappop(idlest)
        least, owner = idlest[0]
        held = held_numels[index]
        idle_holders = [rank for rank in held if loads[rank] == least]
        if idle_holders:
            owner = min(idle_holders, key=lambda rank: (-held[rank], rank))
        owners[index] = owner
        loads[owner] += flops[index]
        heapq.heappush(idlest, (loads[owner], owner))
    return owners
