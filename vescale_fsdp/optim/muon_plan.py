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
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from vescale_fsdp.collectives.operations import all_to_all_into
from vescale_fsdp.collectives.process_groups import new_group
from vescale_fsdp.collectives.slice_exchange import Work, wait_for
from vescale_fsdp.dtensor.meeting import Meets, explained, meet
from vescale_fsdp.dtensor.piece_map import PieceMap
from vescale_fsdp.dtensor.spec import ranks_by_group_rank
from vescale_fsdp.errors import LayoutError
from vescale_fsdp.layout.geometry import Range
from vescale_fsdp.torch_private import foreach_copy_


@dataclass(frozen=True, slots=True)
class Matrix:
    """A range of a parameter, from flat index ``start`` on, that is a matrix of ``rows`` x ``cols`` elements.

    ``param`` is the index of the parameter among the parameters of a step.
    """

    start: int
    rows: int
    cols: int
    param: int = 0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.rows * self.cols

    @property
    def range(self) -> Range:
        """The flat range of the matrix in its parameter."""
        return Range(self.start, self.start + self.numel)

    def flops(self, steps: int) -> int:
        """Return the number of floating-point operations of ``steps`` quintic iterations of Newton-Schulz.

        With s the short and l the long side, a step computes X X' and B X (2 s s l each), and A A (2 s s s).
        """
        short, long = sorted((self.rows, self.cols))
        return steps * (4 * short * short * long + 2 * short**3)


def matrices_of(
    shape: tuple[int, ...], row_splits: tuple[int, ...] | None = None, param: int = 0
) -> tuple[Matrix, ...]:
    """Return the non-empty matrices of a parameter, in flat order.

    Args:
        shape: global shape, 2-D or 3-D (a stack of matrices).
        row_splits: rows of each matrix in a fused matrix, such as (q_rows, k_rows, v_rows); None: not fused.
        param: index of the parameter.

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
        Matrix((index * rows + top) * cols, height, cols, param)
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
        here: the matrices that are whole on this rank and need no communication.
        buckets: the cut matrices, in buckets with two collectives each; the same on all ranks of a mesh.
        gathered: parameters without contiguous pieces. Every rank gathers them, which is slower.
    """

    params: tuple[SteppedParam, ...]
    here: tuple[Matrix, ...]
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
    here: list[Matrix] = []
    gathered: list[int] = []
    pieces_of: dict[int, PieceMap] = {}
    cut: dict[tuple[DeviceMesh, int], list[Matrix]] = {}
    # Work that ranks have anyway, for the balance of owners: shard rank -> operations of its whole matrices.
    loads: dict[tuple[DeviceMesh, int], Counter[int]] = {}
    for index, param in enumerate(params):
        pieces = param.pieces
        if pieces is None:
            gathered.append(index)
            continue
        pieces_of[index] = pieces
        key = pieces.cut_over
        for matrix in param.matrices:
            holder = pieces.holder_of(matrix.range)
            if holder is None:
                assert key is not None  # a matrix that is cut has an axis that cuts it
                cut.setdefault(key, []).append(matrix)
                continue
            if key is not None:
                loads.setdefault(key, Counter())[holder] += matrix.flops(param.steps)
            if holder == pieces.shard_rank:
                here.append(matrix)
    # Creating a group is a collective: all ranks have the same keys in the same order.
    for key in cut:
        if key not in ranks_of:
            ranks_of[key] = _make_ranks(*key)
    buckets: list[Bucket] = []
    for key, matrices in cut.items():
        flops = [matrix.flops(params[matrix.param].steps) for matrix in matrices]
        buckets += _buckets(
            matrices, flops, pieces_of, loads.get(key, Counter()), ranks_of[key], bucket_bytes
        )
    return MuonPlan(tuple(params), tuple(here), tuple(buckets), tuple(gathered))


def _buckets(
    cut: Sequence[Matrix],
    flops: Sequence[int],
    pieces_of: Mapping[int, PieceMap],
    loads: Counter[int],
    ranks: Ranks,
    bucket_bytes: int,
) -> list[Bucket]:
    """Choose the owners of the cut matrices of one mesh, and divide the matrices into buckets of bounded size.

    Args:
        flops: work of each matrix.
        loads: shard rank -> work for matrices that are whole on this rank, in every replica.
    """
    replicas, num_shards = len(ranks.numbers), len(ranks.numbers[0])
    # For each matrix, the elements on each rank. Ranks are numbered replica by replica.
    numels = [
        {
            replica * num_shards + shard: matrix.range.intersect(pieces.piece(shard)).numel
            for shard in pieces.holders_of(matrix.range)
            for replica in range(replicas)
        }
        for matrix in cut
        for pieces in (pieces_of[matrix.param],)
    ]
    # All replicas have the same loads so far.
    owners = assign_owners(flops, numels, [loads[shard] for shard in range(num_shards)] * replicas)
    # `bucket_bytes` is what one rank receives. Owners are on all ranks, so each receives a similar part of the bucket.
    limit_numel = max(1, bucket_bytes * replicas * num_shards // WIRE_DTYPE.itemsize)
    buckets: list[dict[Matrix, MeshRank]] = []
    free_numel = 0  # elements that still fit into the last bucket
    for matrix, owner in zip(cut, owners, strict=True):
        if not buckets or matrix.numel > free_numel:
            buckets.append({})
            free_numel = limit_numel
        buckets[-1][matrix] = MeshRank(*divmod(owner, num_shards))
        free_numel -= matrix.numel
    return [Bucket(ranks, pieces_of, owner_of) for owner_of in buckets]


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
        group: all ranks; None in a plan of memory, which sends nothing.
        shard_group: the ranks of this rank's replica, whose log of collectives contains the exchanges too; or None.
    """

    group: dist.ProcessGroup | None
    shard_group: dist.ProcessGroup | None
    numbers: tuple[tuple[int, ...], ...]
    replica: int
    shard: int


class MeshRank(NamedTuple):
    """A rank's position in a mesh."""

    replica: int
    shard: int


@dataclass(frozen=True)
class Bucket:
    """Cut matrices that are exchanged together.

    Args:
        pieces_of: index of a parameter -> the parameter's pieces.
        owner_of: matrix -> the rank that orthogonalizes it.
    """

    ranks: Ranks
    pieces_of: Mapping[int, PieceMap]
    owner_of: Mapping[Matrix, MeshRank]

    def part(self, matrix: Matrix, shard: int) -> Range:
        """Return the part of a matrix that shard rank ``shard`` stores, as a flat range of the parameter."""
        return matrix.range.intersect(self.pieces_of[matrix.param].piece(shard))

    def _numel(self, matrices: Iterable[Matrix], shard: int) -> int:
        """Return how many elements of these matrices shard rank ``shard`` stores."""
        return sum(self.part(matrix, shard).numel for matrix in matrices)

    @cached_property
    def everyone(self) -> tuple[MeshRank, ...]:
        """All ranks, in the order of their numbers in the process group."""
        numbers = self.ranks.numbers
        ranks = (MeshRank(replica, shard) for replica, row in enumerate(numbers) for shard in range(len(row)))
        return tuple(sorted(ranks, key=lambda rank: numbers[rank.replica][rank.shard]))

    @cached_property
    def _by_owner(self) -> dict[MeshRank, list[Matrix]]:
        """The matrices of each owner; empty lists for ranks that own none."""
        by_owner: dict[MeshRank, list[Matrix]] = {rank: [] for rank in self.everyone}
        for matrix, owner in self.owner_of.items():
            by_owner[owner].append(matrix)
        return by_owner

    @property
    def owned(self) -> list[Matrix]:
        """The matrices that this rank orthogonalizes."""
        return self._by_owner[MeshRank(self.ranks.replica, self.ranks.shard)]

    @cached_property
    def outbound(self) -> list[list[Matrix]]:
        """For each rank of the group, the matrices whose parts this rank sends to it in the gather."""
        return [self._by_owner[rank] if rank.replica == self.ranks.replica else [] for rank in self.everyone]

    @cached_property
    def inbound(self) -> list[Matrix]:
        """The matrices whose parts this rank receives in the scatter, in the order in which they arrive: by owner."""
        return [matrix for owner in self.everyone for matrix in self._by_owner[owner]]

    @cached_property
    def gather_numels(self) -> tuple[list[int], list[int]]:
        """For the gather: the numbers of elements to send to, and to receive from, each rank of the group."""
        sends = [self._numel(matrices, self.ranks.shard) for matrices in self.outbound]
        receives = [
            self._numel(self.owned, rank.shard) if rank.replica == self.ranks.replica else 0
            for rank in self.everyone
        ]
        return sends, receives

    @cached_property
    def scatter_numels(self) -> tuple[list[int], list[int]]:
        """For the scatter: the numbers of elements to send to, and to receive from, each rank of the group."""
        sends = [self._numel(self.owned, rank.shard) for rank in self.everyone]
        receives = [self._numel(self._by_owner[owner], self.ranks.shard) for owner in self.everyone]
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
            assert self.ranks.shard_group is not None
            with explained([self.ranks.shard_group]):
                wait_for(self.work)
        return self.received


def start_exchange(
    parts: Sequence[torch.Tensor], numels: tuple[list[int], list[int]], ranks: Ranks, device: torch.device
) -> Pending:
    """Copy 1-D parts into one bf16 buffer, and start to send each part to its rank: an all-to-all.

    Args:
        parts: the non-empty parts, in the order of destination ranks.
        numels: numbers of elements to send to, and to receive from, each rank of the group.
        ranks: the ranks that exchange parts.
        device: device of the buffers.
    """
    sends, receives = numels
    group, shard_group = ranks.group, ranks.shard_group
    sent = torch.empty(sum(sends), dtype=WIRE_DTYPE, device=device)
    if parts:  # foreach refuses empty lists
        foreach_copy_(list(sent.split([part.numel() for part in parts])), list(parts))
    received = torch.empty(sum(receives), dtype=WIRE_DTYPE, device=device)
    if group is None or shard_group is None:
        return Pending(ranks, received, sent, None)
    meet([group, shard_group], "exchange of updates", Meets.NEVER)
    work = all_to_all_into(received, sent, receives, sends, group)
    return Pending(ranks, received, sent, work)
