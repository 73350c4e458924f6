"""PieceMap: the flat range of a parameter that each rank of its mesh owns, for any kind of tensor.

Optimizers with state per block need to know which rank owns which elements of a parameter:

    parameter                                    pieces
    plain tensor, DTensor all Replicate          one piece, the whole tensor; no mesh axis
    RaggedDTensor                                the pieces of its RaggedShard
    FSDP2's DTensor, Shard(0)                    torch's chunks of rows, contiguous and in rank order
    anything else (Shard(1), TP with FSDP)       None, because a rank owns no contiguous range

All other mesh axes must be Replicate, as in HSDP: ranks along them are *replicas*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor, redistribute
from vescale_fsdp.dtensor.spec import spec_with
from vescale_fsdp.errors import LayoutError
from vescale_fsdp.layout.geometry import Range, RunLengths, chunk_of, numel_of
from vescale_fsdp.layout.placement import RaggedShard
from vescale_fsdp.torch_private import local_of, piece_in


@dataclass(frozen=True)
class PieceMap:
    """The pieces of one parameter: contiguous flat ranges, in the order of the ranks.

    A *shard rank* is a rank's number along the mesh axis that shards the parameter.

    Args:
        shape: global shape.
        numels: number of elements of each shard rank's piece.
        shard_rank: this rank's shard rank.
        cut_over: the mesh, and the number of the mesh axis that shards the parameter; None if no axis does.
    """

    shape: tuple[int, ...]
    numels: RunLengths
    shard_rank: int = 0
    cut_over: tuple[DeviceMesh, int] | None = None

    @property
    def numel(self) -> int:
        """Number of elements of the full tensor."""
        return self.numels.total

    @property
    def num_shards(self) -> int:
        """Number of pieces, including empty ones."""
        return len(self.numels)

    def piece(self, shard_rank: int) -> Range:
        """Return the flat range that a shard rank owns."""
        return Range(self.numels.start(shard_rank), self.numels.start(shard_rank + 1))

    @property
    def own_piece(self) -> Range:
        """The flat range that this rank owns."""
        return self.piece(self.shard_rank)

    def holder_of(self, flat_range: Range) -> int | None:
        """Return the shard rank that owns all of a non-empty range, or None if several ranks own parts of it."""
        holders = self.holders_of(flat_range)
        first = next(holders)
        return first if next(holders, None) is None else None

    def holders_of(self, flat_range: Range) -> Iterator[int]:
        """Yield the shard ranks that own at least one element of a range, in order."""
        return self.numels.holders(*flat_range)

    def count_in_blocks(self, period: int, count: Callable[[Range], int]) -> RunLengths:
        """Return the number of per-block values, such as scales, that belong to each piece.

        Args:
            period: number of elements after which the pattern of block ends repeats in the flat tensor.
            count: returns the number of values for a piece, and raises for a piece that cuts a block.
        """
        runs, first = [], 0
        for num_ranks, numel in self.numels.runs:
            # To be fast on many ranks, count only one of the pieces with equal counts: equal pieces that are a multiple
            # of the period long.
            distinct = 1 if numel % period == 0 else num_ranks
            counts = [count(self.piece(rank)) for rank in range(first, first + distinct)]
            runs += [(num_ranks // distinct, number) for number in counts]
            first += num_ranks
        return RunLengths(tuple(runs))


def pieces_of(tensor: torch.Tensor) -> PieceMap | None:
    """Return the pieces of a parameter, or None if a rank's elements are not one contiguous flat range."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor) or all(p.is_replicate() for p in tensor.placements):
        return PieceMap(shape, RunLengths.of([numel_of(shape)]))
    mesh = tensor.device_mesh
    sharded = [axis for axis, p in enumerate(tensor.placements) if not p.is_replicate()]
    if len(sharded) != 1:
        return None
    axis, placement = sharded[0], tensor.placements[sharded[0]]
    # Exact classes: under a StridedRaggedShard or torch's _StridedShard a rank owns several runs.
    if type(placement) is RaggedShard:
        numels = placement.piece_lengths(shape)
    elif type(placement) is Shard and placement.dim == 0:
        numels = _chunks(shape[0], mesh.size(axis)).map(lambda rows: rows * numel_of(shape[1:]))
    else:
        return None
    return PieceMap(shape, numels, mesh.get_local_rank(axis), (mesh, axis))


def _chunks(size: int, num_chunks: int) -> RunLengths:
    """Return the sizes of torch's chunks of a dim: full chunks, at most one shorter chunk, then empty chunks."""
    chunk = chunk_of(size, num_chunks, 0).numel
    num_full, rest = divmod(size, chunk) if chunk else (0, 0)  # chunk is 0 for an empty dim
    num_rest = int(rest > 0)
    return RunLengths(((num_full, chunk), (num_rest, rest), (num_chunks - num_full - num_rest, 0)))


def name_of(param: torch.Tensor) -> str:
    """Return what errors call a parameter: its name in its unit, if it has one."""
    ref = param.layout_ref if isinstance(param, RaggedDTensor) else None
    return "parameter" if ref is None else ref[1]


def label_of(param: torch.Tensor) -> str:
    """Return the name of a parameter, and its shape, for errors."""
    return f"{name_of(param)} of shape {tuple(param.shape)}"


def contiguous_pieces_of(param: torch.Tensor, otherwise: str) -> PieceMap:
    """Return the pieces of a parameter.

    Args:
        param: the parameter.
        otherwise: an alternative for the user, which the error names.

    Raises:
        LayoutError: if a rank's elements are not one contiguous flat range.
    """
    pieces = pieces_of(param)
    if pieces is None:
        assert isinstance(param, DTensor)  # a plain tensor always has a piece
        raise LayoutError(
            "Block state needs parameters that are cut into one contiguous run per rank.",
            expected="plain tensors, RaggedShard, Shard(0) or Replicate",
            got=param.placements,
            where=label_of(param),
            todo=f"shard this parameter by rows, or use {otherwise}",
        )
    return pieces


def zeros_sharded_with(
    param: torch.Tensor,
    pieces: PieceMap,
    shape: tuple[int, ...],
    piece_numels: RunLengths,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return zeros for state, such as scales or factors, whose shape differs from the parameter's.

    Each rank gets the elements that belong to its piece of the parameter.

    Args:
        param: the parameter.
        pieces: the pieces of the parameter.
        shape: global shape of the new tensor.
        piece_numels: number of elements of the new tensor on each shard rank.
        dtype: dtype of the new tensor.

    Returns:
        A plain tensor for a plain parameter, else a DTensor on the parameter's mesh.
    """
    local = torch.zeros(piece_numels[pieces.shard_rank], dtype=dtype, device=param.device)
    if not isinstance(param, DTensor):
        return local.view(shape)
    mesh = param.device_mesh
    placements: list[Placement] = [Replicate()] * mesh.ndim
    if pieces.cut_over is None:
        # run_check would broadcast the zeros, which all ranks have.
        return DTensor.from_local(local.view(shape), mesh, placements, run_check=False)
    placements[pieces.cut_over[1]] = RaggedShard.from_piece_numels(shape, piece_numels)
    return RaggedDTensor.from_local(local, mesh, placements, shape=shape)


def local_part_of(full: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Return this rank's part, under the placements of ``like``, of a tensor that all ranks have in full.

    No communication.
    """
    mesh = like.device_mesh
    # run_check would broadcast the tensor.
    replicated = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return local_of(redistribute(replicated, like.placements))


def local_tensor(tensor: torch.Tensor, what: str = "parameter") -> torch.Tensor:
    """Return this rank's elements of a parameter or state tensor as a writable 1-D view.

    Raises:
        LayoutError: if the elements are not contiguous in memory.
    """
    local = local_of(tensor)
    if local.requires_grad:
        local = local.detach()  # so that autograd does not record writes to the view
    if not local.is_contiguous():
        raise LayoutError(
            f"A {what} is not contiguous in memory.",
            expected="row-major strides",
            got=f"shape {tuple(local.shape)}, strides {local.stride()}",
            todo="call .contiguous() on it before the model is sharded and the optimizer is made",
        )
    return local.view(-1)


def local_grad(param: torch.Tensor) -> torch.Tensor:
    """Return this rank's elements of a parameter's gradient, 1-D, under the parameter's placements.

    Raises:
        LayoutError: for sparse or complex gradients, which no optimizer here supports.
    """
    grad = param.grad
    assert grad is not None
    if grad.is_sparse or grad.is_complex():
        raise LayoutError(
            "This gradient cannot be used.",
            expected="a dense real tensor",
            got=f"layout {grad.layout}, dtype {grad.dtype}",
            where=label_of(param),
            todo="use torch.optim.SparseAdam for sparse embeddings, or sparse=False",
        )
    if not isinstance(grad, DTensor):
        # `reshape`, not `view`: the gradient's strides may differ from the parameter's.
        return grad.detach().reshape(-1)
    if isinstance(param, DTensor) and grad.placements != param.placements:
        grad = redistribute(grad, param.placements)
    return local_of(grad).reshape(-1)


def move_to(tensor: RaggedDTensor, other: RaggedDTensor, local: torch.Tensor) -> None:
    """Change ``tensor`` in place: the spec and layout of ``other``, and ``local`` as the local tensor."""
    # The global shape and dtype of a tensor cannot change in place.
    assert other._spec.tensor_meta == tensor._spec.tensor_meta
    tensor._local_tensor, tensor._spec, tensor.layout_ref = local, other._spec, other.layout_ref


def become_zeros_like(tensor: RaggedDTensor, other: RaggedDTensor) -> None:
    """Change ``tensor`` in place to zeros with the mesh, placements and layout of ``other``, in its own dtype."""
    local = torch.zeros_like(piece_in(other), dtype=tensor.dtype, device=piece_in(tensor).device)
    tensor._local_tensor, tensor._spec = local, spec_with(other._spec, dtype=tensor.dtype)
    tensor.layout_ref = other.layout_ref
