"""PieceMap: the flat range of a parameter that each rank of its mesh owns, for any kind of tensor.

Optimizers with block state need to know which rank owns which elements of a parameter:

    parameter                                    pieces
    plain tensor, DTensor all Replicate          one shard, the whole tensor, no mesh axis
    RaggedDTensor                                the pieces of its RaggedShard
    FSDP2's DTensor, Shard(0)                    torch's chunks of rows, contiguous and in rank order
    anything else (Shard(1), TP with FSDP)       None: no contiguous pieces; the caller decides

Replicate on every other mesh axis is allowed (HSDP): those ranks are *replicas*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor, redistribute
from vescale_fsdp.errors import LayoutError
from vescale_fsdp.layout.geometry import FlatRange, RunLengths, chunk_of, numel_of
from vescale_fsdp.layout.placement import RaggedShard
from vescale_fsdp.torch_private import local_of


@dataclass(frozen=True)
class PieceMap:
    """The pieces of one parameter: contiguous flat ranges, in the order of the ranks.

    Args:
        shape: global shape.
        numels: elements of each shard rank's piece.
        shard_rank: this rank's number among the shards.
        cut_over: the mesh, and the number of the mesh axis that shards the parameter; None if none does.
    """

    shape: tuple[int, ...]
    numels: RunLengths
    shard_rank: int = 0
    cut_over: tuple[DeviceMesh, int] | None = None

    @property
    def numel(self) -> int:
        """Elements of the full tensor."""
        return self.numels.total

    @property
    def num_shards(self) -> int:
        """Number of ranks that share the tensor."""
        return len(self.numels)

    def piece(self, shard_rank: int) -> FlatRange:
        """The range of a shard rank."""
        return FlatRange(self.numels.start(shard_rank), self.numels.start(shard_rank + 1))

    @property
    def own_piece(self) -> FlatRange:
        """The range of this rank."""
        return self.piece(self.shard_rank)

    def holder_of(self, flat_range: FlatRange) -> int | None:
        """The shard rank that owns all of a non-empty range; None if several ranks own parts of the range."""
        holders = self.holders_of(flat_range)
        first = next(holders)
        return first if next(holders, None) is None else None

    def holders_of(self, flat_range: FlatRange) -> Iterator[int]:
        """The shard ranks that own any element of a range, in order."""
        return self.numels.holders(*flat_range)

    def count_in_blocks(self, period: int, count: Callable[[FlatRange], int]) -> RunLengths:
        """Number of per-block values, such as scales, that belong to each piece.

        Args:
            period: number of elements after which the pattern of block ends repeats in the flat tensor.
            count: the number of values for a piece; it raises for pieces that cut a block.
        """
        runs, first = [], 0
        for num_ranks, numel in self.numels.runs:
            # Pieces that are a multiple of the period apart have equal counts, so one piece represents them.
            distinct = 1 if numel % period == 0 else num_ranks
            counts = [count(self.piece(rank)) for rank in range(first, first + distinct)]
            runs += [(num_ranks // distinct, number) for number in counts]
            first += num_ranks
        return RunLengths(tuple(runs))


def pieces_of(tensor: torch.Tensor) -> PieceMap | None:
    """The pieces of a parameter; None if ranks do not own contiguous flat ranges of it."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor) or all(p.is_replicate() for p in tensor.placements):
        return PieceMap(shape, RunLengths.of([numel_of(shape)]))
    mesh = tensor.device_mesh
    sharded = [axis for axis, p in enumerate(tensor.placements) if not p.is_replicate()]
    if len(sharded) != 1:
        return None
    axis, placement = sharded[0], tensor.placements[sharded[0]]
    if type(placement) is RaggedShard:  # a StridedRaggedShard has one run per chunk
        numels = placement.piece_lengths(shape)
    elif type(placement) is Shard and placement.dim == 0:  # strided shards own several runs
        numels = _chunks(shape[0], mesh.size(axis)).map(lambda rows: rows * numel_of(shape[1:]))
    else:
        return None
    return PieceMap(shape, numels, mesh.get_local_rank(axis), (mesh, axis))


def _chunks(size: int, num_chunks: int) -> RunLengths:
    """Sizes of torch's chunks of a dim: full chunks, at most one shorter chunk, empty chunks."""
    chunk = chunk_of(size, num_chunks, 0).numel
    num_full, rest = divmod(size, chunk) if chunk else (0, 0)  # no chunk: an empty dim
    num_rest = int(rest > 0)
    return RunLengths(((num_full, chunk), (num_rest, rest), (num_chunks - num_full - num_rest, 0)))


def contiguous_pieces_of(param: torch.Tensor, otherwise: str) -> PieceMap:
    """The pieces of a parameter whose ranks must own contiguous runs.

    Args:
        param: the parameter.
        otherwise: the alternative that the error names.

    Raises:
        LayoutError: if ranks own other parts than contiguous runs.
    """
    pieces = pieces_of(param)
    if pieces is None:
        assert isinstance(param, DTensor)
        raise LayoutError(
            "Block state needs parameters that are cut into one contiguous run per rank.",
            expected="plain tensors, RaggedShard, Shard(0) or Replicate",
            got=param.placements,
            where=f"parameter of shape {tuple(param.shape)}",
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
    """Zeros of another shape than a parameter, sharded with it: scales, factors, ...

    Args:
        param: the parameter.
        pieces: its pieces.
        shape: global shape of the new tensor.
        piece_numels: elements of the new tensor that belong to each shard's piece of the parameter.
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
        # No check: it would broadcast zeros that all ranks have.
        return DTensor.from_local(local.view(shape), mesh, placements, run_check=False)
    placements[pieces.cut_over[1]] = RaggedShard.from_piece_numels(shape, piece_numels)
    return RaggedDTensor.from_local(local, mesh, placements, shape=shape)


def local_part_of(full: torch.Tensor, like: DTensor) -> torch.Tensor:
    """This rank's part of a tensor that all ranks have in full, sharded as ``like``. No communication."""
    mesh = like.device_mesh
    replicated = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return local_of(redistribute(replicated, like.placements))


def local_tensor(tensor: torch.Tensor, what: str = "parameter") -> torch.Tensor:
    """This rank's elements of a parameter or state tensor: a writable 1-D view.

    Raises:
        LayoutError: if the elements are not contiguous in memory.
    """
    local = local_of(tensor).detach()  # written without autograd
    if not local.is_contiguous():
        raise LayoutError(
            f"A {what} is not contiguous in memory.",
            expected="row-major strides",
            got=f"shape {tuple(local.shape)}, strides {local.stride()}",
            todo="call .contiguous() on it before the model is sharded and the optimizer is made",
        )
    return local.view(-1)


def local_grad(param: torch.Tensor) -> torch.Tensor:
    """This rank's elements of a parameter's gradient, 1-D, sharded as the parameter.

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
            where=f"parameter of shape {tuple(param.shape)}",
            todo="use torch.optim.SparseAdam for sparse embeddings, or sparse=False",
        )
    if not isinstance(grad, DTensor):
        return grad.detach().reshape(-1)  # autograd may give other strides than the parameter's
    if isinstance(param, DTensor) and grad.placements != param.placements:
        grad = redistribute(grad, param.placements)
    return local_of(grad).reshape(-1)


def move_to(tensor: RaggedDTensor, other: RaggedDTensor, local: torch.Tensor) -> None:
    """Give ``tensor`` the spec and the layout of ``other``, and ``local`` as its local tensor, in place."""
    assert other._spec.tensor_meta == tensor._spec.tensor_meta
    tensor._local_tensor, tensor._spec, tensor.layout_ref = local, other._spec, other.layout_ref
