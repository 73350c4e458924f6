"""The plan of a Muon step: what is orthogonalised where it lies, what travels, in which buckets.

A plan depends on the parameters that have a gradient, on their shapes and how they lie; every rank computes
the same one, owners of matrices included, so nothing of it is communicated. It is kept until those change, and never
saved: after a load, on another number of ranks perhaps, it is computed anew.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from vescale_fsdp.collectives import Work, all_to_all_into, new_group
from vescale_fsdp.dtensor.mesh_order import ranks_by_place
from vescale_fsdp.dtensor.piece_map import PieceMap
from vescale_fsdp.errors import LayoutError
from vescale_fsdp.layout.geometry import FlatRange
from vescale_fsdp.torch_private import foreach_copy_


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix of ``rows`` x ``cols`` elements that starts at flat index ``start`` of its parameter."""

    start: int
    rows: int
    cols: int

    @property
    def numel(self) -> int:
        """Elements of the matrix."""
        return self.rows * self.cols

    @property
    def range(self) -> FlatRange:
        """Its flat range in the parameter."""
        return FlatRange(self.start, self.start + self.numel)


def matrices_of(shape: tuple[int, ...], row_splits: tuple[int, ...] | None = None) -> tuple[Matrix, ...]:
    """The matrices of a parameter, in flat order. Empty ones are left out.

    Args:
        shape: global shape, 2-D or 3-D (a stack of matrices).
        row_splits: rows of each block of a fused matrix, such as (q_rows, k_rows, v_rows); None: one block.

    Raises:
        LayoutError: for other numbers of dims, or splits that do not add up to the rows.
    """
    if len(shape) not in (2, 3):
        raise LayoutError(
            "Only matrices and stacks of matrices can be orthogonalised.",
            expected="a shape of 2 dims, or of 3 (experts, rows, columns)",
            got=f"shape {shape}",
            todo="pass this parameter in adamw_params=[...]",
        )
    rows, cols = shape[-2:]
    heights = row_splits if row_splits is not None else (rows,)
    if sum(heights) != rows or min(heights) < 0:
        raise LayoutError(
            "row_splits do not cut the matrix.",
            expected=f"row counts that add up to {rows}",
            got=f"{heights}, which add up to {sum(heights)}",
            where=f"parameter of shape {shape}",
            todo="give the rows of each fused projection, in order",
        )
    tops = (0, *accumulate(heights))
    stack = range(shape[0]) if len(shape) == 3 else range(1)
    return tuple(
        Matrix((index * rows + top) * cols, height, cols)
        for index in stack
        for top, height in zip(tops, heights, strict=False)
        if height * cols
    )


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
    table = ranks_by_place(mesh).movedim(axis, -1).reshape(-1, mesh.size(axis)).tolist()  # global ranks
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


WIRE_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Ranks:
    """Who takes part: ``numbers[replica][shard]`` is a rank of ``group``; this rank is (replica, shard)."""

    group: dist.ProcessGroup
    numbers: tuple[tuple[int, ...], ...]
    replica: int
    shard: int

    @property
    def num_ranks(self) -> int:
        """Ranks of all replicas together."""
        return len(self.numbers) * len(self.numbers[0])


class Travel(NamedTuple):
    """A cut matrix: its parameter's index, how that parameter lies, the owner's (replica, shard)."""

    param: int
    matrix: Matrix
    pieces: PieceMap
    owner: tuple[int, int]

    def part(self, shard: int) -> FlatRange:
        """The range of the parameter that a shard rank holds of this matrix."""
        return self.matrix.range.intersect(self.pieces.piece(shard))


class BucketTransfer(NamedTuple):
    """One direction of an exchange for this rank: numels per rank of the group."""

    send_numels: list[int]
    receive_numels: list[int]


@dataclass(frozen=True)
class Bucket:
    """Matrices that travel together."""

    ranks: Ranks
    travels: tuple[Travel, ...]

    @cached_property
    def everyone(self) -> tuple[tuple[int, int], ...]:
        """(replica, shard) of all ranks in the order in which the collective lists them."""
        numbers = self.ranks.numbers
        places = ((replica, shard) for replica, row in enumerate(numbers) for shard in range(len(row)))
        return tuple(sorted(places, key=lambda place: numbers[place[0]][place[1]]))

    @cached_property
    def _by_owner(self) -> dict[tuple[int, int], list[Travel]]:
        by_owner: dict[tuple[int, int], list[Travel]] = {place: [] for place in self.everyone}
        for travel in self.travels:
            by_owner[travel.owner].append(travel)
        return by_owner

    @property
    def owned(self) -> list[Travel]:
        """The matrices that this rank orthogonalises."""
        return self._by_owner[self.ranks.replica, self.ranks.shard]

    @cached_property
    def outbound(self) -> list[list[Travel]]:
        """Per rank of the group: the matrices whose parts go there on the way in."""
        return [self._by_owner[r, s] if r == self.ranks.replica else [] for r, s in self.everyone]

    @cached_property
    def inbound(self) -> list[Travel]:
        """The matrices whose parts come here on the way back, in the order of their owners."""
        return [travel for place in self.everyone for travel in self._by_owner[place]]

    @cached_property
    def gather_transfer(self) -> BucketTransfer:
        """Numels on the way to the owners."""
        mine = self.ranks.shard
        sends = [sum(t.part(mine).numel for t in travels) for travels in self.outbound]
        receives = [
            sum(t.part(s).numel for t in self.owned) if r == self.ranks.replica else 0
            for r, s in self.everyone
        ]
        return BucketTransfer(sends, receives)

    @cached_property
    def scatter_transfer(self) -> BucketTransfer:
        """Numels on the way back."""
        mine = self.ranks.shard
        sends = [sum(t.part(s).numel for t in self.owned) for _, s in self.everyone]
        receives = [sum(t.part(mine).numel for t in self._by_owner[place]) for place in self.everyone]
        return BucketTransfer(sends, receives)


class Pending(NamedTuple):
    """A collective on its way. ``sent`` is kept because the collective reads it until it is done."""

    received: torch.Tensor  # 1D [sum(receive_numels)], bf16
    sent: torch.Tensor
    work: Work | None

    def wait(self) -> torch.Tensor:
        """What arrived, in order of the sending ranks."""
        if self.work is not None:
            self.work.wait()
        return self.received


def start_exchange(
    parts: Sequence[torch.Tensor], transfer: BucketTransfer, group: dist.ProcessGroup, device: torch.device
) -> Pending:
    """Pack 1-D parts, in order of their destinations, into one bf16 buffer and start the collective."""
    sent = torch.empty(sum(transfer.send_numels), dtype=WIRE_DTYPE, device=device)
    if parts:
        foreach_copy_(list(sent.split([part.numel() for part in parts])), list(parts))
    received = torch.empty(sum(transfer.receive_numels), dtype=WIRE_DTYPE, device=device)
    work = all_to_all_into(received, sent, transfer.receive_numels, transfer.send_numels, group)
    return Pending(received, sent, work)
