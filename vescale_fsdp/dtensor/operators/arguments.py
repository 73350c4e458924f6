"""How an operator's arguments become this rank's pieces, and how its result becomes a tensor again.

Every rule in `operators.dispatch_table` goes through these functions, so each check stands in one place: ragged
arguments must be cut alike, replicated ones are cut to match, plain ones are refused unless they are
0-d, and what an operator writes to must be ragged itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from operator import methodcaller
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor
from vescale_fsdp.dtensor.spec import boxes_of, spec_with
from vescale_fsdp.errors import PlacementError, UnsupportedOpError
from vescale_fsdp.torch_private import DTensorSpec, local_of

OUTSIDE_FORWARD = (
    "in a method of a sharded module other than forward: vescale_fsdp.register_fsdp_forward_method(module, name), or "
    "module.unshard() before it"
)


def refuse(
    func: torch._ops.OpOverload, spec: DTensorSpec | None, why: str, todo: str | None = None
) -> UnsupportedOpError:
    """The error for an operator that has no right answer here: raise what this returns."""
    placement = ", ".join(map(str, spec.placements)) if spec is not None else "RaggedShard"
    return UnsupportedOpError(
        f"{func} cannot be computed on ragged pieces: {why}.",
        expected="an operator of the table in vescale_fsdp/dtensor/operators/OPERATORS.md",
        got=str(func),
        where=f"tensor of shape {tuple(spec.shape) if spec is not None else '?'} placed ({placement})",
        todo=todo
        or f"{OUTSIDE_FORWARD}. Elsewhere: .full_tensor() gathers it, .to_local() is this rank's flat piece",
    )


def bind(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments that were given, by their names in the operator's schema."""
    return {**dict(zip(_argument_names(func), args, strict=False)), **kwargs}


@cache
def _argument_names(func: torch._ops.OpOverload) -> tuple[str, ...]:
    return tuple(argument.name for argument in func._schema.arguments)


@cache
def written_names(func: torch._ops.OpOverload) -> tuple[str, ...]:
    """Names of the arguments that an operator writes to."""
    arguments = func._schema.arguments
    return tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)


def first_ragged(values: Iterable[Any]) -> RaggedDTensor | None:
    """The first ragged tensor among arguments and lists of arguments."""
    for value in values:
        if isinstance(value, RaggedDTensor):
            return value
        if isinstance(value, (list, tuple)):
            found = first_ragged(value)
            if found is not None:
                return found
    return None


_sums = methodcaller("is_partial")  # asked for every tensor of every step


def is_partial(tensor: DTensor) -> bool:
    """Whether some mesh axis still has to be summed."""
    return any(map(_sums, tensor._spec.placements))


def summed(value: Any) -> Any:
    """A ragged tensor whose sums are done, by an all-reduce of the pieces; anything else as it is."""
    if not isinstance(value, RaggedDTensor) or not is_partial(value):
        return value
    return value.redistribute(placements=[Replicate() if p.is_partial() else p for p in value.placements])


def check_written(func: torch._ops.OpOverload, named: dict[str, Any], like: RaggedDTensor) -> None:
    """Refuse an operator that would write ragged values into a tensor that is not cut the same way.

    Raises:
        UnsupportedOpError: if a written argument is not a ragged tensor or holds unreduced sums.
    """
    for name in written_names(func):
        if name not in named:
            continue
        value = named[name]
        for written in value if isinstance(value, (list, tuple)) else (value,):
            if not isinstance(written, RaggedDTensor):
                raise refuse(
                    func,
                    like._spec,
                    f"it writes to {name!r}, which is not ragged",
                    todo=f"{OUTSIDE_FORWARD}. In an optimizer's step: it was given full moments, which "
                    "vescale_fsdp.checkpoint.load and set_optimizer_state_dict(full_state_dict=True) cut. Elsewhere: "
                    "write to a ragged tensor cut the same way, or gather first with .full_tensor()",
                )
            if is_partial(written):
                raise refuse(func, written._spec, f"it writes to {name!r}, whose sums are not done")


@cache
def _has_out(func: torch._ops.OpOverload) -> bool:
    return any(argument.is_out for argument in func._schema.arguments)


def check_not_resized(func: torch._ops.OpOverload, named: dict[str, Any], like: RaggedDTensor) -> None:
    """Refuse an ``out=`` form whose result has another shape than the ragged tensor it is written to.

    Raises:
        UnsupportedOpError: torch would resize the tensor, and pieces would take what broadcasts to their shape.
    """
    if not _has_out(func):
        return
    written = written_names(func)
    read = [
        value.shape
        for name, value in named.items()
        if name not in written and isinstance(value, torch.Tensor)
    ]
    if read and torch.broadcast_shapes(*read) != like.shape:
        raise refuse(
            func, like._spec, f"its result of shape {tuple(torch.broadcast_shapes(*read))} would resize it"
        )


def localise(func: torch._ops.OpOverload, value: Any, like: RaggedDTensor) -> Any:
    """An argument as the piece-wise operator wants it, checked against the ragged tensor beside it.

    Raises:
        UnsupportedOpError: if its pieces do not lie where those of ``like`` do.
        PlacementError: if it has the same shape, but is cut differently.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, RaggedDTensor):
        _check_same_cut(func, value._spec, like._spec)
        return local_of(value)
    if isinstance(value, DTensor):
        if value.ndim == 0 or is_partial(value):
            value = value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)
        if not all(p.is_replicate() for p in value.placements):
            raise refuse(
                func,
                like._spec,
                f"it is combined with a DTensor placed {value.placements}",
                todo="bring both to the same placements: vescale_fsdp.redistribute(dtensor, placements)",
            )
        value = local_of(value)
    elif value.ndim > 0:
        raise refuse(
            func,
            like._spec,
            f"the plain tensor of shape {tuple(value.shape)} beside it may differ between ranks",
            todo=f"{OUTSIDE_FORWARD}. Elsewhere: vescale_fsdp.distribute_tensor(tensor, mesh, placements) makes it "
            "ragged",
        )
    return value if value.ndim == 0 else _cut(func, value, like)


def _check_same_cut(func: torch._ops.OpOverload, have: DTensorSpec, want: DTensorSpec) -> None:
    if have is want:  # the usual case: a gradient bears its parameter's spec, optimizer state too
        return
    if have.shape != want.shape:
        raise refuse(func, want, f"it is combined with a ragged tensor of shape {tuple(have.shape)}")
    if have.placements != want.placements or have.mesh != want.mesh:
        raise PlacementError(
            f"{func} met two ragged tensors that are cut differently.",
            expected=f"shape {tuple(want.shape)} placed {tuple(map(str, want.placements))}",
            got=f"shape {tuple(have.shape)} placed {tuple(map(str, have.placements))}",
            todo="redistribute one to the placements of the other",
        )


def _cut(func: torch._ops.OpOverload, full: torch.Tensor, like: RaggedDTensor) -> torch.Tensor:
    """This rank's piece of a replicated tensor that broadcasts to the ragged tensor's shape."""
    shape, local = like.shape, like._local_tensor
    pairs = zip(reversed(full.shape), reversed(shape), strict=False)
    if full.ndim > len(shape) or any(n not in (1, m) for n, m in pairs):
        raise refuse(func, like._spec, f"shape {tuple(full.shape)} does not broadcast to it")
    expanded = full.expand(shape)
    parts = [expanded[box.slices()].reshape(-1) for box in boxes_of(like._spec)]
    if not parts:
        return full.new_empty(local.shape)
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(local.shape)


def wrap_result(func: torch._ops.OpOverload, result: Any, like: RaggedDTensor) -> Any:
    """What a piece-wise operator returned, as ragged tensors cut like ``like``.

    Raises:
        UnsupportedOpError: if the result has another number of elements than the piece.
    """
    if isinstance(result, (list, tuple)):
        return type(result)(wrap_result(func, value, like) for value in result)
    if not isinstance(result, torch.Tensor):
        return result
    if result.shape != local_of(like).shape:
        raise refuse(func, like._spec, "its result has another shape than the tensor")
    return RaggedDTensor.wrap(result, spec_with(like._spec, dtype=result.dtype), layout_ref=like.layout_ref)
