"""Combine tensors that are not cut alike: bring every operand of an operator to the pieces of one of them.

The operator runs on the pieces of one ragged operand, which never travels: the tensor that is written, or the first
ragged operand of the result's shape. All other operands are brought to its pieces::

    operand                                     on the 8 x 6 tensor w           travels
    the same shape and cut                      w * other                       nothing
    replicated                                  w * scale                       nothing: each rank cuts its part
    the same shape, cut differently             w.add_(q)                       the elements that change owner
    broadcast, every rank has what it needs     w / w.norm(dim=1, keepdim=True) nothing: w is cut between rows
    broadcast otherwise                         the same                        the operand: it is small next to w

If no operand has the result's shape (a column times a row), all operands are small next to the result: they are
gathered, and the result is replicated. What is written to a replicated tensor is gathered too.

`arguments.localize` handles the first two rows, which cost no message; for all others it raises `Unlike`, and the rules
call this module. An operator that sends something is a collective: the ranks meet first (see `dtensor.meeting`), once
per call. A log entry (INFO) names each new pair of placements.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp.dtensor.meeting import explained, meet
from vescale_fsdp.dtensor.operators.arguments import (
    cut_like,
    first_ragged,
    is_partial,
    keep_grad_placed,
    refuse,
    refuse_plain,
    summed,
)
from vescale_fsdp.dtensor.operators.replicated_results import replicated
from vescale_fsdp.dtensor.ragged_dtensor import Args, Kwargs, Op, RaggedDTensor
from vescale_fsdp.dtensor.redistribute import (
    groups_of_move,
    move_text,
    redistribute_local,
    start_redistribution,
)
from vescale_fsdp.dtensor.spec import inner_box, ragged_axis, ranks_in, spec_with
from vescale_fsdp.errors import format_bytes
from vescale_fsdp.layout.geometry import RunLengths, numel_of
from vescale_fsdp.torch_modes import is_traced
from vescale_fsdp.torch_private import DTensorSpec, local_of, pytree

_log = logging.getLogger(__name__)


# -- messages -------------------------------------------------------------------------------------------


class Sending(NamedTuple):
    """A tensor that has to be sent to other placements before an operator can run.

    Args:
        tensor: any DTensor.
        placements: where it goes, on its own mesh.
        finish: makes the operand from the new local tensor.
    """

    tensor: DTensor
    placements: Sequence[Placement]
    finish: Callable[[torch.Tensor], torch.Tensor] = lambda local: local


def carry_out(func: Op, moves: Sequence[Sending]) -> list[torch.Tensor]:
    """Send tensors to their placements, after the ranks have met once; return what `Sending.finish` makes of them."""
    if not moves:
        return []
    pairs = [(m.tensor._spec, spec_with(m.tensor._spec, placements=m.placements)) for m in moves]
    calls = [_described(func, source, target) for source, target in pairs]
    locals_ = [local_of(move.tensor) for move in moves]
    if any(map(is_traced, locals_)):
        # Recorded one by one: each recorded message meets where the graph runs.
        arrived = [
            redistribute_local(local, *pair, str(func)) for local, pair in zip(locals_, pairs, strict=True)
        ]
    else:
        groups = [group for pair in pairs for group in groups_of_move(*pair)]
        # Lists have equal entries by the dozen, and only distinct ones tell ranks apart.
        meet(groups, f"{'; '.join(dict.fromkeys(calls))} x {len(calls)}")
        with explained(groups):
            started = [start_redistribution(local, *pair) for local, pair in zip(locals_, pairs, strict=True)]
            arrived = [each.wait() for each in started]
    for move in moves:
        keep_grad_placed(move.tensor)
    return [move.finish(local) for move, local in zip(moves, arrived, strict=True)]


_logged: set[tuple[tuple[Placement, ...], tuple[Placement, ...]]] = set()


def _described(func: Op, source: DTensorSpec, target: DTensorSpec) -> str:
    """Return a message of an operator as text, and log it if no other had these placements."""
    meta = source.tensor_meta
    assert meta is not None
    text = move_text(str(func), source, target)
    if (source.placements, target.placements) not in _logged:
        _logged.add((source.placements, target.placements))
        nbytes = format_bytes(numel_of(meta.shape) * meta.dtype.itemsize)
        _log.info(
            "Each call of %s costs a message (of a tensor of %s). It needs none if both tensors are cut alike.",
            text,
            nbytes,
        )
    return text


# -- operands -------------------------------------------------------------------------------------------


def brought(func: Op, pairs: Sequence[tuple[Any, RaggedDTensor | None]]) -> list[Any]:
    """Return arguments as pieces, to be combined with the pieces of other tensors.

    Args:
        func: the operator.
        pairs: (argument, the ragged tensor with whose piece it is combined). Anything that is not a tensor, or has no
            such ragged tensor, is returned unchanged.

    Raises:
        UnsupportedOpError: if an argument cannot be combined.
    """
    results: list[Any] = []
    moves: list[Sending] = []
    indices: list[int] = []
    for value, like in pairs:
        if like is not None and isinstance(value, torch.Tensor):
            value = _as_piece(func, value, like)
        if isinstance(value, Sending):
            indices.append(len(results))
            moves.append(value)
        results.append(value)
    for index, piece in zip(indices, carry_out(func, moves), strict=True):
        results[index] = piece
    return results


def _as_piece(func: Op, value: torch.Tensor, like: RaggedDTensor) -> torch.Tensor | Sending:
    """Return an operand as a piece, or what has to be sent for it."""
    if not isinstance(value, DTensor):
        if value.numel() != 1 or value.ndim > like.ndim:
            raise refuse_plain(func, value, like)
        return value if value.ndim == 0 else value.reshape(1)
    shape = tuple(value.shape)
    if value.device_mesh != like.device_mesh:
        return _of_other_mesh(func, value, like)
    if value.ndim == 0:  # torch's own: 0-d tensors are not ragged
        # Detached as in `localize`.
        return local_of(cast(DTensor, value.detach()).redistribute(placements=_everywhere(value)))
    if value._spec.placements == like._spec.placements and shape == tuple(like.shape):
        return local_of(value)
    if all(p.is_replicate() for p in value.placements):
        return cut_like(func, local_of(value), like)
    _check_broadcasts(func, shape, like)
    if isinstance(value, RaggedDTensor) and not is_partial(value):
        local = _own_rows(value, like)
        if local is not None:
            keep_grad_placed(value)
            return local
    if shape == tuple(like.shape):
        return Sending(value, like.placements)
    return Sending(value, _everywhere(value), lambda full: cut_like(func, full, like))


def _everywhere(tensor: DTensor) -> list[Placement]:
    return [Replicate()] * tensor.device_mesh.ndim


def _check_broadcasts(func: Op, shape: Sequence[int], like: RaggedDTensor) -> None:
    """Raise if a shape does not broadcast to the shape of ``like``."""
    pairs = zip(
        reversed(shape), reversed(like.shape), strict=False
    )  # broadcasting aligns dims from the last one
    if len(shape) > like.ndim or any(n not in (1, m) for n, m in pairs):
        raise refuse(func, like, f"shape {tuple(shape)} does not broadcast to it")


def _of_other_mesh(func: Op, value: DTensor, like: RaggedDTensor) -> torch.Tensor | Sending:
    """Return an operand from another mesh of the same ranks, such as one with replicas: gathered there, then cut."""
    ours, theirs = (set(_numbers(ranks_in(tensor.device_mesh))) for tensor in (like, value))
    if ours != theirs:
        raise refuse(
            func,
            like,
            f"it is combined with a tensor on a mesh of other ranks, {value.device_mesh}",
            todo="shard both over meshes of the same ranks, or send it with vescale_fsdp.transfer",
        )
    if all(p.is_replicate() for p in value.placements):
        return cut_like(func, local_of(value), like)
    _check_broadcasts(func, value.shape, like)
    return Sending(value, _everywhere(value), lambda full: cut_like(func, full, like))


def _numbers(nested: Any) -> Iterable[int]:
    return (number for part in nested for number in _numbers(part)) if isinstance(nested, list) else (nested,)


def _own_rows(value: RaggedDTensor, like: RaggedDTensor) -> torch.Tensor | None:
    """Return an operand as a piece, if every rank's piece of it has what the rank's piece of ``like`` needs.

    This is so if, for some number of leading dims, both tensors are cut between the same rows: the leading dims are
    equal, and every rank owns equally many whole rows of both. None otherwise, on all ranks.
    """
    depth = _common_depth(value._spec, like._spec)
    if depth is None:
        return None
    local, shape = local_of(like), inner_box(like._spec).sizes
    own = (1,) * (len(shape) - value.ndim) + inner_box(value._spec).sizes
    rows = local_of(value).reshape(-1, *own[depth:])
    return rows.expand(rows.shape[0], *shape[depth:]).reshape(local.shape)


def _common_depth(value: DTensorSpec, like: DTensorSpec) -> int | None:
    """Return after how many leading dims both tensors are cut between the same rows; None if there is no such dim."""
    axis, placement = ragged_axis(like.placements)
    other_axis, other_placement = ragged_axis(value.placements)
    rest = [
        (p, q) for i, (p, q) in enumerate(zip(value.placements, like.placements, strict=True)) if i != axis
    ]
    shares_dims = value.ndim == like.ndim  # a Shard of another axis names the same dim of both
    if axis != other_axis or any(p != q or not (shares_dims or p.is_replicate()) for p, q in rest):
        return None
    shape, own = inner_box(like).sizes, inner_box(value).sizes
    numels, own_numels = placement.piece_lengths(shape), other_placement.piece_lengths(own)
    own = (1,) * (len(shape) - len(own)) + own
    for depth in range(len(shape) + 1):
        if own[:depth] != shape[:depth]:
            return None
        rows, own_rows = _rows(numels, numel_of(shape[depth:])), _rows(own_numels, numel_of(own[depth:]))
        if rows is not None and rows == own_rows:
            return depth
    return None


def _rows(numels: RunLengths, row_numel: int) -> RunLengths | None:
    """Return the number of whole rows on each rank; None if a rank owns part of a row, or if rows are empty."""
    if row_numel == 0 or any(numel % row_numel for numel in numels.distinct):
        return None
    return numels.map(lambda numel: numel // row_numel)


# -- operators ------------------------------------------------------------------------------------------


def home_of(tensors: Sequence[torch.Tensor]) -> RaggedDTensor | None:
    """Return the first ragged tensor that has the shape to which all tensors broadcast; None if none has it."""
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    return next((t for t in tensors if isinstance(t, RaggedDTensor) and t.shape == shape), None)


def on_home(func: Op, args: Args, kwargs: Kwargs, home: RaggedDTensor) -> Any:
    """Run an elementwise operator on the pieces of ``home``, and return its plain result."""
    leaves, tree = pytree.tree_flatten((args, kwargs))
    pieces = brought(func, [(leaf, home) for leaf in leaves])
    args, kwargs = pytree.tree_unflatten(pieces, tree)
    return func(*args, **kwargs)


def on_replicas(func: Op, args: Args, kwargs: Kwargs, written: DTensor | None = None) -> Any:
    """Run an elementwise operator by torch's own DTensor rules, with every ragged argument brought to them.

    Args:
        written: the stock DTensor that the operator writes to; None if it returns a new tensor.
    """
    leaves, tree = pytree.tree_flatten((args, kwargs))
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor) and leaf.ndim:
            raise refuse_plain(func, leaf, first_ragged(leaves))
    args, kwargs = pytree.tree_unflatten(as_stock(func, [(leaf, written) for leaf in leaves]), tree)
    return func(*args, **kwargs)


def as_stock(func: Op, pairs: Sequence[tuple[Any, DTensor | None]]) -> list[Any]:
    """Return arguments with ragged tensors replaced by stock DTensors.

    Args:
        func: the operator.
        pairs: (argument, the stock DTensor that it is written to, or None). An argument of the shape of what is written
            gets its placements. Any other is gathered: it is small next to the result.
    """
    moves = []
    for value, written in pairs:
        if isinstance(value, RaggedDTensor):
            is_alike = written is not None and (written.shape, written.device_mesh) == (
                value.shape,
                value.device_mesh,
            )
            goes_there = is_alike and written is not None and not is_partial(written)
            moves.append(
                Sending(
                    value, written.placements if goes_there and written is not None else _everywhere(value)
                )
            )
    arrived = iter(zip(moves, carry_out(func, moves), strict=True))
    return [_as_stock(*next(arrived)) if isinstance(value, RaggedDTensor) else value for value, _ in pairs]


def _as_stock(move: Sending, local: torch.Tensor) -> DTensor:
    """Return a tensor that was moved to placements of torch."""
    if all(p.is_replicate() for p in move.placements):
        return replicated(local, move.tensor)
    return DTensor(local, spec_with(move.tensor._spec, placements=move.placements), requires_grad=False)  # type: ignore[call-arg]


def without_sums(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Return arguments with the pending sums of ragged tensors reduced."""
    return tuple(map(summed, args)), {name: summed(value) for name, value in kwargs.items()}
