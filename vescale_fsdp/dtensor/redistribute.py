r"""Redistribute a tensor between placements: the data sent over one mesh axis, and the order of the axes.

One axis (`_move_axis`) of n ranks, for a tensor of N elements whose largest piece has P elements:

    from \ to     RaggedShard                         Replicate                Shard(d)
    RaggedShard   all-to-all of moved elements        all-gather (n * P), or   all-to-all of moved
                                                      one broadcast per owner  elements
    Replicate     local slice                         -                        torch's own
    Shard(d)      all-to-all of moved elements        torch's own              torch's own
    Partial       reduce-scatter (n * P), or one      torch's own              torch's own
                  reduce per owner

Padding to the largest piece is cheap if pieces have similar sizes. If padding would more than double the traffic,
because few ranks own the tensor, one broadcast or reduction per owner sends N elements without padding.

Several axes (`_move`), in an order in which each step handles the least data:

    1. the ragged axis is gathered, or moved to its Shard, if its target is not ragged or the other axes' cut changes
    2. torch's own redistribution changes the cut of the other axes
    3. the ragged axis is cut into its new pieces (by a reduce-scatter, if it was Partial)
    4. other axes that change from Partial to Replicate are all-reduced, on pieces

The functions take and return local tensors; `vescale_fsdp.dtensor.ragged_dtensor` wraps the tensors and adds autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Partial, Placement, Shard

from vescale_fsdp.collectives.operations import (
    all_gather_into,
    all_reduce_in_place,
    all_to_all_into,
    broadcast_in_place,
    reduce_in_place,
    reduce_scatter_into,
    traced_operator,
)
from vescale_fsdp.collectives.slice_exchange import Work, wait_for
from vescale_fsdp.dtensor.meeting import explained, meet
from vescale_fsdp.dtensor.spec import (
    inner_box,
    is_ragged_spec,
    local_shape,
    make_spec,
    ragged_axis,
    replaced,
    shape_of_local,
    spec_with,
)
from vescale_fsdp.errors import PlacementError
from vescale_fsdp.layout.geometry import Box, boxes_of_range, numel_of, whole_box
from vescale_fsdp.layout.placement import RaggedShard
from vescale_fsdp.torch_modes import is_traced, real_object
from vescale_fsdp.torch_private import DTensorSpec, local_of

# A redistribution as a generator: it yields each collective that the caller must wait for, and returns the new local
# tensor.
_Steps = Generator[Work | None, None, torch.Tensor]

_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # `_divide_average` divides, because gloo's reduce and all-reduce have no AVG
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


class Redistribution:
    """A redistribution in progress. The constructor starts the first collective, and `wait` does all other steps.

    A redistribution over one mesh axis has one collective, which overlaps with other work. All ranks must start their
    redistributions in the same order, and wait for them in the same order.

    Args:
        steps: yields each collective that must complete before the next step; returns the new local tensor.
    """

    def __init__(self, steps: _Steps) -> None:
        self._steps = steps
        self._work: Work | None = None
        self._result: torch.Tensor | None = None
        self._advance()

    def wait(self) -> torch.Tensor:
        """Wait for all steps and return the local tensor under the target placements, the same one on every call."""
        while self._result is None:
            wait_for(self._work)
            self._advance()
        return self._result

    def _advance(self) -> None:
        """Run the next step, up to the collective that it starts or to the result."""
        try:
            self._work = next(self._steps)
        except StopIteration as end:  # contains the value that the generator returns
            self._result = end.value


def start_redistribution(local: torch.Tensor, source: DTensorSpec, target: DTensorSpec) -> Redistribution:
    """Start to redistribute a tensor from ``source`` to ``target``.

    Args:
        local: this rank's part of the tensor under ``source``. It must not be written before `Redistribution.wait`.
        source, target: specs with the same mesh and the same global shape.

    Raises:
        PlacementError: if the meshes or shapes differ, or if ``target`` has a Partial where ``source`` has none.
    """
    if source.mesh != target.mesh or source.shape != target.shape:
        raise PlacementError(
            "Redistribution keeps the mesh and the shape of a tensor.",
            expected=f"shape {tuple(source.shape)} on {source.mesh}",
            got=f"shape {tuple(target.shape)} on {target.mesh}",
            todo="gather it with full_tensor() and distribute it again",
        )
    for axis, (have, want) in enumerate(zip(source.placements, target.placements, strict=True)):
        if want.is_partial() and have != want:
            raise PlacementError(
                "A tensor cannot be redistributed to Partial.",
                expected="Replicate, Shard or RaggedShard",
                got=want,
                where=f"mesh axis {axis} of {target.placements}",
            )
    return Redistribution(_move(local.detach(), source, target))  # autograd is in `ragged_dtensor`


def groups_of_move(source: DTensorSpec, target: DTensorSpec) -> list[dist.ProcessGroup]:
    """Return the process groups over which a redistribution communicates, in the order of mesh axes."""
    pairs = list(enumerate(zip(source.placements, target.placements, strict=True)))
    # Replicas cut their own part. Every other change sends.
    axes = {axis for axis, (have, want) in pairs if have != want and not have.is_replicate()}
    if source.placements != target.placements and is_ragged_spec(source.placements):
        axis, _ = ragged_axis(source.placements)
        if not _same_cut(source, target, axis):  # the ragged axis is gathered, and cut again
            axes.add(axis)
    # If several axes shard one dim, torch moves all of them together.
    dims = {
        placement.dim
        for _, (have, want) in pairs
        for placement in (have, want)
        if have != want and type(placement) is Shard
    }
    axes |= {axis for axis, (have, _) in pairs if type(have) is Shard and have.dim in dims}
    return [source.mesh.get_group(axis) for axis in sorted(axes)]


def move_text(call: str, source: DTensorSpec, target: DTensorSpec) -> str:
    """Return a call that redistributes a tensor as text, the same on all ranks."""
    have, want = (", ".join(map(str, spec.placements)) for spec in (source, target))
    return f"{call} on shape {tuple(source.shape)} from ({have}) to ({want})"


def redistribute_local(
    local: torch.Tensor, source: DTensorSpec, target: DTensorSpec, call: str
) -> torch.Tensor:
    """Redistribute a tensor from ``source`` to ``target``.

    Args:
        local: this rank's part of the tensor under ``source``.
        source, target: specs with the same mesh and the same global shape.
        call: the function that communicates. Its ranks meet first (see the module `meeting`); while torch.compile
            records, the graph has them meet.

    Returns:
        The local tensor under ``target``. It shares no memory with ``local``, unless nothing changes.

    Raises:
        PlacementError: as for `start_redistribution`.
    """
    if is_traced(local) and source.placements != target.placements:
        return _traced_redistribution()(local, _registered(source, target, call))
    groups = groups_of_move(source, target)
    meet(groups, move_text(call, source, target))
    with explained(groups):
        return start_redistribution(local, source, target).wait()


# Arguments of `redistribute_local` by the text that stands for them in graphs of torch.compile.
_registry: dict[str, tuple[DTensorSpec, DTensorSpec, str]] = {}


def _registered(source: DTensorSpec, target: DTensorSpec, call: str) -> str:
    """Return a text that stands for two specs in a graph, which cannot contain them."""
    meta, mesh = source.tensor_meta, real_object(source.mesh)
    assert meta is not None
    source, target = (make_spec(mesh, spec.placements, meta.shape, meta.dtype) for spec in (source, target))
    names = [group.group_name for group in mesh.get_all_groups()]
    text = f"{tuple(meta.shape)} {meta.dtype} {source.placements} to {target.placements} on {names} {call}"
    _registry[text] = source, target, call
    return text


@cache
def _traced_redistribution() -> Callable[..., torch.Tensor]:
    def compute(local: torch.Tensor, arguments: str) -> torch.Tensor:
        return redistribute_local(local, *_registry[arguments])

    def shape(local: torch.Tensor, arguments: str) -> torch.Tensor:
        return local.new_empty(shape_of_local(_registry[arguments][1]))

    return traced_operator("redistributed", compute, shape)


def _move(local: torch.Tensor, source: DTensorSpec, target: DTensorSpec) -> _Steps:
    """Redistribute from ``source`` to ``target`` in the four steps of the module docstring."""
    now = source  # the spec of `local` between steps
    if is_ragged_spec(now.placements) and now.placements != target.placements:
        axis, _ = ragged_axis(now.placements)
        if not isinstance(target.placements[axis], RaggedShard) or not _same_cut(now, target, axis):
            # Reduce before the gather, because a piece is less data than the tensor.
            local, now = yield from _reduce_others(local, now, target)
            # One exchange leads from pieces to a Shard if the cut of the other axes stays, and if none of them shards
            # the same dim: torch cuts such a dim in the order of mesh axes, but the ragged axis is cut last. Otherwise
            # the ragged axis is gathered.
            want = target.placements[axis]
            others = [p for other, p in enumerate(target.placements) if other != axis]
            one_move = type(want) is Shard and not any(_cuts(p, want.dim) for p in others)
            step = _with(now, axis, want if one_move and _same_cut(now, target, axis) else Replicate())
            local = yield from _move_axis(local, now, step, axis)
            now = step
    if not is_ragged_spec(now.placements):
        step = _before_pieces(now, target)
        if step.placements != now.placements:
            meta = now.tensor_meta
            assert meta is not None
            # run_check would broadcast the tensor.
            stock = DTensor.from_local(
                local, now.mesh, now.placements, run_check=False, shape=meta.shape, stride=meta.stride
            )
            # torch may return a strided view, but pieces are flat.
            local = local_of(stock.redistribute(placements=step.placements)).contiguous()
        now = step
    if now.placements != target.placements:
        axis, placement = ragged_axis(target.placements)
        step = _with(now, axis, placement)
        local = yield from _move_axis(local, now, step, axis)
        local, _ = yield from _reduce_others(local, step, target)
    return local


def _with(spec: DTensorSpec, axis: int, placement: Placement) -> DTensorSpec:
    """Return the spec with another placement on one mesh axis."""
    return spec_with(spec, placements=replaced(spec.placements, axis, placement))


def _same_cut(source: DTensorSpec, target: DTensorSpec, axis: int) -> bool:
    """Return whether the axes other than ``axis`` give every rank the same box under both specs."""
    pairs = zip(source.placements, target.placements, strict=True)
    return all(
        other == axis or have == want or not (have.is_shard() or want.is_shard())
        for other, (have, want) in enumerate(pairs)
    )


def _before_pieces(source: DTensorSpec, target: DTensorSpec) -> DTensorSpec:
    """Return the spec of step 2: ``target``, except for the ragged axis, which is not ragged yet.

    From this spec, one move over the ragged axis and the reductions of step 4 lead to ``target``. If ``target`` is not
    ragged, this is ``target``.
    """
    if not is_ragged_spec(target.placements):
        return target
    axis, _ = ragged_axis(target.placements)
    placements = [
        # A Partial that becomes Replicate is reduced in step 4, because a piece is less data than the tensor.
        have if have.is_partial() and want.is_replicate() else want
        for have, want in zip(source.placements, target.placements, strict=True)
    ]
    have = source.placements[axis]
    # If two axes shard one dim, torch cuts it in the order of mesh axes, but the ragged axis is always cut last. So no
    # single exchange leads from this Shard to pieces, and torch gathers the axis instead.
    shares_dim = type(have) is Shard and any(
        _cuts(p, have.dim)
        for spec in (source, target)
        for other, p in enumerate(spec.placements)
        if other != axis
    )
    movable = (type(have) is Shard and not shares_dim) or _is_reducible(have)
    placements[axis] = have if movable else Replicate()
    return spec_with(source, placements=placements)


def _cuts(placement: Placement, dim: int) -> bool:
    """Return whether a placement of torch's shards this dim."""
    return not isinstance(placement, RaggedShard) and placement.is_shard(dim)


def _is_reducible(placement: Placement) -> bool:
    """Return whether a plain collective reduces this Partial. torch's NormPartial, a subclass, needs more."""
    return type(placement) is Partial and placement.reduce_op in _REDUCE_OPS


def _reduce_others(
    local: torch.Tensor, source: DTensorSpec, target: DTensorSpec
) -> Generator[Work | None, None, tuple[torch.Tensor, DTensorSpec]]:
    """All-reduce the pieces over axes that are Partial in ``source`` only, and return the pieces and their spec."""
    now = source
    for axis, (have, want) in enumerate(zip(source.placements, target.placements, strict=True)):
        if have.is_partial() and not want.is_partial():
            if not _is_reducible(have):
                raise PlacementError(
                    "This Partial cannot be reduced on ragged pieces.",
                    expected=f"Partial of one of {sorted(_REDUCE_OPS)}",
                    got=have,
                    where=f"mesh axis {axis} of {source.placements}",
                )
            local = local.clone()  # the all-reduce is in place, and must not change the caller's tensor
            yield all_reduce_in_place(local, _op_of(have), source.mesh.get_group(axis))
            _divide_average(local, have, source.mesh.size(axis))
            now = _with(now, axis, Replicate())
    return local, now


def _op_of(partial: Placement) -> dist.ReduceOp.RedOpType:
    """Return the operation that reduces a Partial; the caller divides an average by `_divide_average`."""
    assert isinstance(partial, Partial)
    return _REDUCE_OPS[partial.reduce_op]


def _divide_average(tensor: torch.Tensor, partial: Placement, num_ranks: int) -> None:
    """Divide a sum in place if the Partial is an average; `_REDUCE_OPS` maps averages to SUM."""
    if isinstance(partial, Partial) and partial.reduce_op == "avg":
        tensor.div_(num_ranks)


# -- one axis -----------------------------------------------------------------------------------------


def _move_axis(local: torch.Tensor, source: DTensorSpec, target: DTensorSpec, axis: int) -> _Steps:
    """Redistribute over one mesh axis, the only one on which the specs differ; at least one of the specs is ragged."""
    have, want = source.placements[axis], target.placements[axis]
    if have == want:
        return local
    group, rank = source.mesh.get_group(axis), source.mesh.get_local_rank(axis)
    inner = inner_box(_with(source, axis, Replicate())).sizes
    if isinstance(have, RaggedShard) and want.is_replicate():
        return (yield from _gather(local, have.piece_numels(inner), group)).view(inner)
    if isinstance(want, RaggedShard) and have.is_replicate():
        start, stop = want.piece(inner, rank)
        # Cloned, because a view would keep the whole tensor in memory.
        return local.reshape(-1)[start:stop].clone().view(local_shape(want, inner, rank))
    if isinstance(want, RaggedShard) and have.is_partial():
        piece = yield from _reduce_scatter(local, have, want.piece_numels(inner), group)
        return piece.view(local_shape(want, inner, rank))
    return (yield from exchange(local, have, want, inner, group))


def _is_worth_padding(piece_numels: Sequence[int]) -> bool:
    """Return whether a collective of pieces padded to the largest one sends at most twice the tensor's elements."""
    return len(piece_numels) * max(piece_numels) <= 2 * sum(piece_numels)


def _gather(local: torch.Tensor, piece_numels: tuple[int, ...], group: dist.ProcessGroup) -> _Steps:
    """Gather the pieces of all ranks, 1-D, in rank order."""
    rank, flat = dist.get_rank(group), local.reshape(-1)
    if sum(piece_numels) == 0:  # true on all ranks or on none, so no rank starts a collective alone
        return flat.new_empty(0)
    if not _is_worth_padding(piece_numels):
        full = flat.new_empty(sum(piece_numels))
        slices = full.split(list(piece_numels))
        slices[rank].copy_(flat)
        # A list, not a generator, so that all broadcasts start before the caller waits for the first.
        yield from [
            broadcast_in_place(part, group, owner) for owner, part in enumerate(slices) if part.numel()
        ]
        return full
    longest = max(piece_numels)
    padded = flat.new_empty(len(piece_numels) * longest)
    own = padded[rank * longest : (rank + 1) * longest]
    own[: flat.numel()].copy_(flat)
    yield all_gather_into(padded, own, group)
    if min(piece_numels) == longest:  # no padding to remove
        return padded
    # Drops the padding of each rank.
    return torch.cat([row[:numel] for row, numel in zip(padded.view(-1, longest), piece_numels, strict=True)])


def _reduce_scatter(
    local: torch.Tensor, have: Placement, piece_numels: tuple[int, ...], group: dist.ProcessGroup
) -> _Steps:
    """Reduce the tensors of all ranks, and return this rank's piece of the result, 1-D."""
    rank = dist.get_rank(group)
    slices = local.reshape(-1).split(list(piece_numels))
    # `reduce_scatter_into` computes sums and averages only. (An average is a sum here, divided below.)
    if _is_worth_padding(piece_numels) and _op_of(have) == dist.ReduceOp.SUM:
        longest = max(piece_numels)
        padded = local.new_zeros(len(piece_numels), longest)  # zeros, because the padding is reduced, too
        for row, part in zip(padded, slices, strict=True):
            row[: part.numel()].copy_(part)
        shard = local.new_empty(longest)
        yield reduce_scatter_into(shard, padded.view(-1), dist.ReduceOp.SUM, group)
        piece = shard[: piece_numels[rank]].clone()  # a view would keep the padding in memory
    else:
        # Reductions are in place, and must not change the caller's tensor.
        copies = [part.clone() for part in slices]
        yield from [
            reduce_in_place(copy, _op_of(have), group, owner)
            for owner, copy in enumerate(copies)
            if copy.numel()
        ]
        piece = copies[rank]
    _divide_average(piece, have, len(piece_numels))
    return piece


# -- all-to-all ---------------------------------------------------------------------------------------


def exchange(
    local: torch.Tensor, have: Placement, want: Placement, shape: tuple[int, ...], group: dist.ProcessGroup
) -> _Steps:
    """Redistribute by one all-to-all, in which each rank sends every other rank the elements that change owner.

    Rank s sends to rank r the intersections of s's old boxes with r's new boxes, in an order that both ranks compute.
    Elements that stay on their rank are copied and are not sent.

    Args:
        local: this rank's elements under ``have``.
        have, want: the old and the new placement: RaggedShard or Shard, each over all ranks of ``group``.
        shape: shape of the tensor that both placements cut.
        group: the ranks.

    Returns:
        This rank's elements under ``want``, in new memory.
    """
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    both_ragged = isinstance(have, RaggedShard) and isinstance(want, RaggedShard)
    # Pieces of two ragged placements are runs of the flat tensor: one 1-D box per rank replaces several n-d boxes.
    box_shape = (numel_of(shape),) if both_ragged else shape

    def owned(placement: Placement, r: int) -> tuple[Box, ...]:
        """Return the boxes of rank ``r``, in the order of its elements."""
        if isinstance(placement, RaggedShard):
            return boxes_of_range(box_shape, *placement.piece(shape, r))
        box = _shard_box(placement, shape, num_ranks, r)
        return (box,) if box.numel else ()

    old, new = owned(have, rank), owned(want, rank)
    result = local.new_empty(sum(box.numel for box in new))
    sources, targets = _box_views(local.reshape(-1), old), _box_views(result, new)
    for i, j, box in _intersections(old, new):
        targets[j][box.slices(new[j].offsets)].copy_(sources[i][box.slices(old[i].offsets)])
    others = [r for r in range(num_ranks) if r != rank]
    outgoing = {r: [(i, box) for i, _, box in _intersections(old, owned(want, r))] for r in others}
    incoming = {r: [(j, box) for _, j, box in _intersections(owned(have, r), new)] for r in others}
    parts = [sources[i][box.slices(old[i].offsets)].reshape(-1) for r in others for i, box in outgoing[r]]
    sent = torch.cat(parts) if parts else local.new_empty(0)
    arriving = [(j, box) for r in others for j, box in incoming[r]]
    received = local.new_empty(sum(box.numel for _, box in arriving))
    received_numels, sent_numels = (
        [sum(box.numel for _, box in boxes.get(r, [])) for r in range(num_ranks)]
        for boxes in (incoming, outgoing)
    )
    yield all_to_all_into(received, sent, received_numels, sent_numels, group)
    for (j, box), part in zip(arriving, _box_views(received, [box for _, box in arriving]), strict=True):
        targets[j][box.slices(new[j].offsets)].copy_(part)
    if isinstance(want, RaggedShard):
        return result.view(local_shape(want, shape, rank))
    return result.view(_shard_box(want, shape, num_ranks, rank).sizes)


def _shard_box(placement: Placement, shape: Sequence[int], num_ranks: int, rank: int) -> Box:
    """Return the box of ``rank`` under a Shard."""
    assert type(placement) is Shard
    return whole_box(shape).chunk(placement.dim, num_ranks, rank)


def _intersections(left: Sequence[Box], right: Sequence[Box]) -> Iterator[tuple[int, int, Box]]:
    """Yield (index in left, index in right, intersection) for each pair of boxes that intersect."""
    for i, a in enumerate(left):
        for j, b in enumerate(right):
            box = a.intersect(b)
            if box is not None:
                yield i, j, box


def _box_views(flat: torch.Tensor, boxes: Sequence[Box]) -> list[torch.Tensor]:
    """Return an n-d view for each box of a flat local tensor, whose elements are those of the boxes in order."""
    parts = flat.split([box.numel for box in boxes])
    return [part.view(box.sizes) for part, box in zip(parts, boxes, strict=True)]
