"""Reads that gather: whole tensors from all ranks, and views of them, such as ``p.t()`` and ``p[:, 0]``.

A view that is not one run of the flattened tensor cannot share memory with the pieces. So it is a view of a gathered
copy, on every rank: a `GatheredView`, which operators read as a replicated DTensor. A write to it would change the copy
alone, so it raises.

Gathering sends the whole tensor to every rank. So the first gather of each operator gives a `GatherWarning` with its
cost, all ranks meet first (see `dtensor.meeting`), and ``set_implicit_gathers(False)`` refuses all of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor, Replicate

from vescale_fsdp.dtensor.operators import combining
from vescale_fsdp.dtensor.operators.arguments import IN_OPTIMIZER, OUTSIDE_FORWARD, refuse, written_names
from vescale_fsdp.dtensor.operators.replicated_results import ReplicatedTensor, as_result
from vescale_fsdp.dtensor.ragged_dtensor import Args, Kwargs, Op, RaggedDTensor
from vescale_fsdp.errors import GatherWarning, UnsupportedOpError, callers_level, explain, format_bytes
from vescale_fsdp.lazy import set_module
from vescale_fsdp.torch_private import DTensorSpec, TensorMeta, dispatch_to_subclass, local_of, pytree

_is_allowed = True
_warned: set[Op] = set()


@set_module("vescale_fsdp.dtensor")
def set_implicit_gathers(allowed: bool) -> bool:
    """Set whether operators that need a whole sharded tensor gather it; if not, they raise `UnsupportedOpError`.

    Elementwise operators, reductions and calls of ``full_tensor`` and ``redistribute`` are not concerned.

    Args:
        allowed: the same on all ranks. The default is True.

    Returns:
        The earlier setting.

    Examples:
        >>> earlier = set_implicit_gathers(False)  # p.t() and p @ q raise from now on
        >>> set_implicit_gathers(earlier)
        False
    """
    global _is_allowed
    earlier, _is_allowed = _is_allowed, allowed
    return earlier


def gather_all(func: Op, tensors: Sequence[DTensor], like: RaggedDTensor) -> list[torch.Tensor]:
    """Return DTensors as whole plain tensors, which are the same on all ranks. A collective, unless all are replicated.

    Raises:
        UnsupportedOpError: if implicit gathers are not allowed.
        LifecycleError: if not all ranks call the operator.
    """
    parted = [tensor for tensor in tensors if not all(p.is_replicate() for p in tensor.placements)]
    if parted:
        _announce(func, parted, like)
    moves = [combining.Sending(tensor, [Replicate()] * tensor.device_mesh.ndim) for tensor in parted]
    arrived = iter(combining.carry_out(func, moves))
    parted_ids = set(map(id, parted))
    return [next(arrived) if id(tensor) in parted_ids else local_of(tensor) for tensor in tensors]


def _announce(func: Op, tensors: Sequence[DTensor], like: RaggedDTensor) -> None:
    """Warn about the first gather of an operator, or refuse it."""
    if not _is_allowed:
        raise refuse(
            func,
            like,
            "it needs the whole tensor, and set_implicit_gathers(False) was called",
            todo=f"{OUTSIDE_FORWARD}. Elsewhere: .full_tensor(), on all ranks, gathers it; .to_local() is this rank's "
            "flat piece",
        )
    if func in _warned or like.device_mesh.size() == 1:
        return
    nbytes = sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors)
    warnings.warn(
        explain(
            f"{func} gathers {format_bytes(nbytes)} on every rank, each time it is called.",
            expected="operators that compute on the pieces",
            got=f"{func}, which needs whole tensors; its later gathers are not reported",
            where=f"tensor of shape {tuple(like.shape)} placed ({', '.join(map(str, like.placements))})",
            todo="call .full_tensor() once if several operators need it. vescale_fsdp.dtensor."
            "set_implicit_gathers(False) makes such operators raise",
        ),
        GatherWarning,
        stacklevel=callers_level(),
    )
    _warned.add(func)  # after the warning, which a filter may turn into an error


# -- views ----------------------------------------------------------------------------------------------


# What errors about writes to views expected.
READING = "an operator that reads the view"


class GatheredView(ReplicatedTensor):
    """A view of the gathered copy of a ragged tensor: a replicated DTensor that may only be read.

    Attributes:
        source: shape and placements of the ragged tensor, as text.
    """

    source: str

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Op, types: tuple[type, ...], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        leaves, tree = pytree.tree_flatten((args, kwargs or {}))
        views = [leaf for leaf in leaves if isinstance(leaf, GatheredView)]
        _check_not_written(func, args, kwargs or {})
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor) and leaf.ndim:
                _refuse(
                    func,
                    views[0],
                    f"it is combined with a plain tensor of shape {tuple(leaf.shape)}, which may differ between ranks",
                    f"{OUTSIDE_FORWARD}. Elsewhere: .full_tensor() is the plain tensor",
                )
        stock = [_stock(leaf) if isinstance(leaf, GatheredView) else leaf for leaf in leaves]
        result = func(*(found := pytree.tree_unflatten(stock, tree))[0], **found[1])
        if not func.is_view or any(isinstance(leaf, RaggedDTensor) for leaf in leaves):
            return result
        return pytree.tree_map_only(DTensor, lambda view: _wrapped(view, view._spec, views[0].source), result)


dispatch_to_subclass(GatheredView)  # torch 2.11 would not call the subclass's `__torch_dispatch__`


def _wrapped(local: torch.Tensor, spec: DTensorSpec, source: str) -> GatheredView:
    view: Any = GatheredView.__new__(GatheredView, local_of(local), spec, requires_grad=False)
    view.source = source
    return view  # type: ignore[no-any-return]


def _stock(view: GatheredView) -> DTensor:
    return as_result(local_of(view), view._spec)


def _check_not_written(func: Op, args: Args, kwargs: Kwargs) -> None:
    """Raise if an operator writes to a `GatheredView`, alone or in a list."""
    if not func._schema.is_mutable:
        return
    named = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **kwargs}
    for name in written_names(func):
        for written in pytree.tree_leaves(named.get(name)):
            if isinstance(written, GatheredView):
                _refuse(
                    func,
                    written,
                    "it writes to a view of a gathered copy, and the sharded tensor would not change",
                    "change the whole tensor and cut it again: full = p.full_tensor(), write to full, then "
                    "p.copy_(vescale_fsdp.distribute_tensor(full, p.device_mesh, p.placements))",
                )


def _refuse(func: Op, view: GatheredView, why: str, todo: str) -> NoReturn:
    raise UnsupportedOpError(
        f"{func} cannot be computed on a view of a sharded tensor: {why}.",
        expected=READING,
        got=str(func),
        where=f"view of shape {tuple(view.shape)} of a {view.source}",
        todo=f"{todo}. {IN_OPTIMIZER}",
    )


def view_of_copy(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Gather a ragged tensor, and return views of the copy."""
    tensor: RaggedDTensor = args[0]
    (full,) = gather_all(func, [tensor], tensor)
    source = f"tensor of shape {tuple(tensor.shape)} placed ({', '.join(map(str, tensor.placements))})"
    placements = (Replicate(),) * tensor.device_mesh.ndim

    def wrap(view: torch.Tensor) -> GatheredView:
        view = view.resolve_conj().resolve_neg()  # a DTensor has no such flags
        meta = TensorMeta(view.shape, view.stride(), view.dtype)
        return _wrapped(view, DTensorSpec(tensor.device_mesh, placements, tensor_meta=meta), source)

    return pytree.tree_map_only(torch.Tensor, wrap, func(full, *args[1:], **kwargs))
