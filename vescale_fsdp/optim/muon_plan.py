"""The plan of a Muon step: which rank orthogonalizes each matrix, and the exchange of matrices that are cut over ranks.

Newton-Schulz needs a whole matrix. A matrix is one flat range of its parameter, because rows are contiguous:

    shape (m, k)                      one matrix, the whole tensor
    shape (m, k), row_splits (q, r)   one matrix per projection of a fused weight: each gets its own scale
    shape (E, m, k)                   one matrix per expert

A plan depends on the parameters that have a gradient, their shapes and their pieces. Every rank computes the same plan,
including the owners of matrices, so planning needs no communication. A plan is reused while these inputs stay the same.
It is never saved: after a load, perhaps on another number of ranks, it is computed again.

One collective per bucket sends the updates of cut matrices to their owners, and another one sends the results back.
With 2 ranks and matrices a (owner 0), b (owner 1)::

    gather     rank 0 sends  [its part of a        | its part of b        ] ->  rank 0 has all of a, rank 1 all of b
    scatter    rank 0 sends  [rank 0's part of a   | rank 1's part of a   ] ->  every rank has its parts of a and b

In an HSDP mesh all replicas have the same values. So a matrix is gathered only inside its owner's replica, and the
result is sent to every rank of every replica. In this way the replicas share the work. Elements are sent in bf16:
Newton-Schulz begins with a cast to bf16 and ends in bf16, so no precision is lost.
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

from vescale_fsdp.collectives.operations import all_to_all_into
from vescale_fsdp.collectives.process_groups import new_group
from vescale_fsdp.collectives.slice_exchange import Work
from vescale_fsdp.dtensor.meeting import Meets, explained, meet
from vescale_fsdp.dtensor.piece_map import PieceMap
from vescale_fsdp.dtensor.spec import ranks_by_group_rank
from vescale_fsdp.errors import LayoutError
from vescale_fsdp.layout.geometry import Range
from vescale_fsdp.torch_private import foreach_copy_


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix of ``rows`` x ``cols`` elements that starts at flat index ``start`` of its parameter."""

    start: int
    rows: int
    cols: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.rows * self.cols

    @property
    def range(self) -> Range:
        """The flat range of the matrix in its parameter."""
        return Range(self.start, self.start + self.numel)


def matrices_of(shape: tuple[int, ...], row_splits: tuple[int, ...] | None = None) -> tuple[Matrix, ...]:
    """Return the non-empty matrices of a parameter, in flat order.

    Args:
        shape: global shape, 2-D or 3-D (a stack of matrices).
        row_splits: rows of each matrix in a fused matrix, such as (q_rows, k_rows, v_rows); None: not fused.

    Raises:
        LayoutError: for other numbers of dims, or splits that do not add up to the rows.
    """
    if len(shape) not in (2, 3):
        raise LayoutError(
            "Muon supports only matrices and stacks of matrices.",
            expected="a shape of 2 dims, or of 3 (experts, rows, columns)",
            got=f"shape {shape}",
            todo="pass this parameter in adamw_params=[...]",
        )
    rows, cols = shape[-2:]
    heights = row_splits if row_splits is not None else (rows,)
    if sum(heights) != rows or min(heights) < 0:
        raise LayoutError(
            "row_splits do not add up to the rows of the matrix.",
            expected=f"row counts that add up to {rows}",
            got=f"{heights}, which add up to {sum(heights)}",
            where=f"parameter of shape {shape}",
            todo="pass the number of rows of each fused projection, in order",
        )
    tops = (0, *accumulate(heights))
    stack = range(shape[0]) if len(shape) == 3 else range(1)
    return tuple(
        Matrix((index * rows + top) * cols, height, cols)
        for index in stack
        for top, height in zip(tops, heights, strict=False)  # `tops` has one more entry, the end
        if height * cols  # an empty matrix has no update
    )


@dataclass(frozen=True)
class SteppedParam:
    """A parameter with a gradient, as input of `plan_step`."""

    pieces: PieceMap | None  # None: the parameter's placements give no contiguous pieces
    matrices: tuple[Matrix, ...]
    steps: int  # Newton-Schulz iterations of each matrix


@dataclass(frozen=True)
class MuonPlan:
    """The work of this rank in a step. Parameters are identified by their index in ``params``.

    Args:
        params: the parameters with a gradient.
        here: (parameter, matrix) pairs of matrices that are whole on this rank and need no communication.
        buckets: the cut matrices, in buckets with two collectives each; the same on all ranks of a mesh.
        gathered: parameters without contiguous pieces. Every rank gathers them, which is slower.
    """

    params: tuple[SteppedParam, ...]
    here: tuple[tuple[int, Matrix], ...]
    buckets: tuple[Bucket, ...]
    gathered: tuple[int, ...]


def plan_step(
    params: Sequence[SteppedParam], bucket_bytes: int, ranks_of: dict[tuple[DeviceMesh, int], Ranks]
) -> MuonPlan:
    """Plan a step.

    Args:
        params: the parameters with a gradient, in the same order on every rank.
        bucket_bytes: approximate bytes that a rank receives per bucket and direction.
        ranks_of: a cache: the ranks of each (mesh, axis). Adding a missing entry is a collective of the mesh's ranks.
    """
    here: list[tuple[int, Matrix]] = []
    gathered: list[int] = []
    cut: dict[tuple[DeviceMesh, int], list[tuple[int, Matrix, PieceMap]]] = {}
    whole: dict[tuple[DeviceMesh, int], list[tuple[int, Matrix, int]]] = {}
    for index, param in enumerate(params):
        pieces = param.pieces
        if pieces is None:
            gathered.append(index)
            continue
        key = pieces.cut_over
        for matrix in param.matrices:
            holder = pieces.holder_of(matrix.range)
            if holder is None:
                assert key is not None  # a matrix that is cut has an axis that cuts it
                cut.setdefault(key, []).append((index, matrix, pieces))
                continue
            if key is not None:  # work that its rank has anyway, for the balance of owners
                whole.setdefault(key, []).append((index, matrix, holder))
            if holder == pieces.shard_rank:
                here.append((index, matrix))
    # Creating a group is a collective: all ranks have the same keys in the same order.
    for key in cut:
        if key not in ranks_of:
            ranks_of[key] = _make_ranks(*key)
    buckets = [
        bucket
        for key, matrices in cut.items()
        for bucket in _buckets(params, matrices, whole.get(key, []), ranks_of[key], bucket_bytes)
    ]
    return MuonPlan(tuple(params), tuple(here), tuple(buckets), tuple(gathered))


def _buckets(
    params: Sequence[SteppedParam],
    cut: Sequence[tuple[int, Matrix, PieceMap]],
    whole: Sequence[tuple[int, Matrix, int]],
    ranks: Ranks,
    bucket_bytes: int,
) -> list[Bucket]:
    """Choose the owners of the cut matrices of one mesh, and divide the matrices into buckets of bounded size.

    Args:
        cut: (parameter, matrix, pieces) of matrices that are cut over ranks.
        whole: (parameter, matrix, shard rank) of matrices that are whole on a rank, whose work is balanced too.
    """
    num_shards = len(ranks.numbers[0])
    loads = [0] * num_shards
    for index, matrix, holder in whole:  # the rank that stores a whole matrix iterates it, in every replica
        loads[holder] += newton_schulz_flops(matrix.rows, matrix.cols, params[index].steps)
    flops = [newton_schulz_flops(matrix.rows, matrix.cols, params[index].steps) for index, matrix, _ in cut]
    replicas = len(ranks.numbers)
    # For each matrix, the elements on each rank. Ranks are numbered replica by replica.
    parts = [
        {
            replica * num_shards + shard: matrix.range.intersect(pieces.piece(shard)).numel
            for shard in pieces.holders_of(matrix.range)
            for replica in range(replicas)
        }
        for _, matrix, pieces in cut
    ]
    owners = assign_owners(flops, parts, loads * replicas)  # all replicas have the same loads so far
    cuts = [CutMatrix(*each, divmod(owner, num_shards)) for each, owner in zip(cut, owners, strict=True)]
    # `bucket_bytes` is what one rank receives. Owners are on all ranks, so each receives a similar part of the bucket.
    limit_numel = max(1, bucket_bytes * replicas * num_shards // WIRE_DTYPE.itemsize)
    buckets: list[list[CutMatrix]] = []
    free_numel = 0  # elements that still fit into the last bucket
    for each in cuts:
        if not buckets or each.matrix.numel > free_numel:
            buckets.append([])
            free_numel = limit_numel
        buckets[-1].append(each)
        free_numel -= each.matrix.numel
    return [Bucket(ranks, tuple(bucket)) for bucket in buckets]


def _make_ranks(mesh: DeviceMesh, axis: int) -> Ranks:
    """Make or find a process group of all ranks of a mesh. ``axis`` shards; the mesh's other axes replicate."""
    # Global ranks, one row per replica.
    table = ranks_by_group_rank(mesh).movedim(axis, -1).reshape(-1, mesh.size(axis)).tolist()
    # An existing group with exactly these ranks is reused, since it has a communicator already.
    if len(table) == 1:
        group: dist.ProcessGroup | None = mesh.get_group(axis)
    elif sorted(rank for row in table for rank in row) == list(range(dist.get_world_size())):
        group = dist.group.WORLD
    else:
        # Sorted: all ranks must pass the members in the same order.
        group = new_group(mesh.get_group(axis), sorted(rank for row in table for rank in row))
    assert group is not None
    numbers = tuple(tuple(dist.get_group_rank(group, rank) for rank in row) for row in table)
    me = dist.get_rank()
    replica, shard = next((r, s) for r, row in enumerate(table) for s, rank in enumerate(row) if rank == me)
    return Ranks(group, mesh.get_group(axis), numbers, replica, shard)


# -- assignment of matrices to ranks, by integers only ---------------------------------------------------


def newton_schulz_flops(rows: int, cols: int, steps: int) -> int:
    """Return the number of floating-point operations of ``steps`` quintic iterations on a rows x cols matrix.

    With s the short and l the long side, a step computes X X' and B X (2 s s l each), and A A (2 s s s).
    """
    short, long = sorted((rows, cols))
    return steps * (4 * short * short * long + 2 * short**3)


def assign_owners(
    flops: Sequence[int], owned_numels: Sequence[Mapping[int, int]], fixed_loads: Sequence[int]
) -> list[int]:
    """Choose the owner of each matrix, from the most work to the least: the rank with the least work so far.

    Args:
        flops: work of each matrix.
        owned_numels: for each matrix, the number of elements that each rank stores. Among the ranks with the least
            work, the rank with the most elements becomes the owner, because it need not send its part.
        fixed_loads: for each rank, the work for matrices that are whole on this rank.

    Returns:
        The owner of each matrix.
    """
    loads = list(fixed_loads)
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    owners = [0] * len(flops)
    # Matrices with equal work are ordered by index, and ranks with equal work by number: all ranks choose alike.
    for index in sorted(range(len(flops)), key=lambda i: (-flops[i], i)):
        # Drop outdated entries: assigning a matrix adds an entry for its owner, and keeps the old one.
        while heap[0][0] != loads[heap[0][1]]:
            heapq.heappop(heap)
        least, owner = heap[0]
        numels = owned_numels[index]
        idle_holders = [rank for rank in numels if loads[rank] == least]
        if idle_holders:
            owner = min(idle_holders, key=lambda rank: (-numels[rank], rank))
        owners[index] = owner
        loads[owner] += flops[index]
        heapq.heappush(heap, (loads[owner], owner))
    return owners


WIRE_DTYPE = torch.bfloat16  # matrices are sent and iterated in this dtype, as in torch's Newton-Schulz


@dataclass(frozen=True)
class Ranks:
    """The ranks of a mesh: ``numbers[replica][shard]`` is a rank of ``group``. This rank is at (replica, shard).

    Attributes:
        shard_group: the ranks of this rank's replica, whose log of collectives contains the exchanges too.
    """

    group: dist.ProcessGroup
    shard_group: dist.ProcessGroup
    numbers: tuple[tuple[int, ...], ...]
    replica: int
    shard: int


class CutMatrix(NamedTuple):
    """A matrix that is cut over ranks, with its parameter's index and pieces, and its owner's (replica, shard)."""

    param: int
    matrix: Matrix
    pieces: PieceMap
    owner: tuple[int, int]

    def part(self, shard: int) -> Range:
        """Return the part of this matrix that shard rank ``shard`` stores, as a flat range of the parameter."""
        return self.matrix.range.intersect(self.pieces.piece(shard))


@dataclass(frozen=True)
class Bucket:
    """Cut matrices that are exchanged together."""

    ranks: Ranks
    cuts: tuple[CutMatrix, ...]

    @cached_property
    def everyone(self) -> tuple[tuple[int, int], ...]:
        """(replica, shard) of all ranks, in the order of their numbers in the process group."""
        numbers = self.ranks.numbers
        ranks = ((replica, shard) for replica, row in enumerate(numbers) for shard in range(len(row)))
        return tuple(sorted(ranks, key=lambda rank: numbers[rank[0]][rank[1]]))

    @cached_property
    def _by_owner(self) -> dict[tuple[int, int], list[CutMatrix]]:
        """The matrices of each owner (replica, shard); empty lists for ranks that own none."""
        by_owner: dict[tuple[int, int], list[CutMatrix]] = {rank: [] for rank in self.everyone}
        for cut in self.cuts:
            by_owner[cut.owner].append(cut)
        return by_owner

    @property
    def owned(self) -> list[CutMatrix]:
        """The matrices that this rank orthogonalizes."""
        return self._by_owner[self.ranks.replica, self.ranks.shard]

    @cached_property
    def outbound(self) -> list[list[CutMatrix]]:
        """For each rank of the group, the matrices whose parts this rank sends to it in the gather."""
        return [self._by_owner[r, s] if r == self.ranks.replica else [] for r, s in self.everyone]

    @cached_property
    def inbound(self) -> list[CutMatrix]:
        """The matrices whose parts this rank receives in the scatter, in the order in which they arrive: by owner."""
        return [cut for owner in self.everyone for cut in self._by_owner[owner]]

    @cached_property
    def gather_numels(self) -> tuple[list[int], list[int]]:
        """For the gather: the numbers of elements to send to, and to receive from, each rank of the group."""
        mine = self.ranks.shard
        sends = [sum(t.part(mine).numel for t in cuts) for cuts in self.outbound]
        receives = [
            sum(t.part(s).numel for t in self.owned) if r == self.ranks.replica else 0
            for r, s in self.everyone
        ]
        return sends, receives

    @cached_property
    def scatter_numels(self) -> tuple[list[int], list[int]]:
        """For the scatter: the numbers of elements to send to, and to receive from, each rank of the group."""
        mine = self.ranks.shard
        sends = [sum(t.part(s).numel for t in self.owned) for _, s in self.everyone]
        receives = [sum(t.part(mine).numel for t in self._by_owner[owner]) for owner in self.everyone]
        return sends, receives


class Pending(NamedTuple):
    """A collective in flight. It refers to ``sent``, which must not be freed while the collective reads it."""

    ranks: Ranks
    received: torch.Tensor  # 1D [sum(receive_numels)], bf16
    sent: torch.Tensor
    work: Work | None

    def wait(self) -> torch.Tensor:
        """Wait for the collective; returns the received elements in the order of the sending ranks."""
        if self.work is not None:
            with explained([self.ranks.shard_group]):
                self.work.wait()
        return self.received


def start_exchange(
    parts: Sequence[torch.Tensor],
    numels: tuple[list[int], list[int]],
    ranks: Ranks,
    device: torch.device,
) -> Pending:
    """Copy 1-D parts into one bf16 buffer, and start to send each part to its rank: an all-to-all.

    Args:
        parts: the non-empty parts, in the order of destination ranks.
        numels: numbers of elements to send to, and to receive from, each rank of the group.
        ranks: the ranks that exchange parts.
        device: device of the buffers.
    """
    sends, receives = numels
    sent = torch.empty(sum(sends), dtype=WIRE_DTYPE, device=device)
    if parts:  # foreach refuses empty lists
        foreach_copy_(list(sent.split([part.numel() for part in parts])), list(parts))
    received = torch.empty(sum(receives), dtype=WIRE_DTYPE, device=device)
    meet([ranks.group, ranks.shard_group], "exchange of updates", Meets.NEVER)
    work = all_to_all_into(received, sent, receives, sends, ranks.group)
    return Pending(ranks, received, sent, work)
