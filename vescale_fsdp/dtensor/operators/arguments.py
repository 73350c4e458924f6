"""Convert an operator's arguments to this rank's pieces, and the operator's result to a ragged tensor.

All rules of `operators.dispatch_table` use these functions, so each check exists once: ragged arguments must have the
same placements (`combining` brings others to them), replicated arguments are cut to match, and plain tensors raise
unless they have one element.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, partial
from operator import methodcaller
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor, Replicate

from vescale_fsdp.dtensor.ragged_dtensor import Args, Kwargs, Op, RaggedDTensor, redistribute
from vescale_fsdp.dtensor.spec import boxes_of, spec_with
from vescale_fsdp.errors import UnsupportedOpError
from vescale_fsdp.layout.placement import OWNER_OPTIMIZER
from vescale_fsdp.torch_modes import is_traced
from vescale_fsdp.torch_private import DTensorSpec, local_of, piece_in

OUTSIDE_FORWARD = (
    "in a method of a sharded module other than forward: vescale_fsdp.register_fsdp_forward_method(module, name), or "
    "module.unshard() before it"
)

# For the parameters of two models, of which one is gathered, as by unshard() or by reshard_after_forward=False.
GATHERED = (
    "if the plain tensor is a parameter of a gathered module: call module.reshard(), then take the parameter from the "
    "module again"
)

# The remedy if an optimizer has called an operator that is refused.
IN_OPTIMIZER = f"In an optimizer's step, step whole matrices: {OWNER_OPTIMIZER}"

# What errors about ``out=`` tensors expected.
SAME_SHAPE = "an out= tensor of the result's shape"


def refuse(
    func: Op,
    tensor: DTensor | None,
    why: str,
    todo: str | None = None,
    expected: str = "an operator of the table in vescale_fsdp/dtensor/operators/OPERATORS.md",
) -> UnsupportedOpError:
    """Return the error for an operator that cannot be computed on this tensor. The caller raises it."""
    where = "a ragged tensor"
    if tensor is not None:
        where = f"tensor of shape {tuple(tensor.shape)} placed ({', '.join(map(str, tensor.placements))})"
    if todo is None:
        todo = (
            f"{OUTSIDE_FORWARD}. Elsewhere: .full_tensor(), on all ranks, gathers it; .to_local() is this rank's flat "
            "piece"
        )
    return UnsupportedOpError(
        f"{func} cannot be computed on ragged pieces: {why}.",
        expected=expected,
        got=str(func),
        where=where,
        todo=f"{todo}. {IN_OPTIMIZER}",
    )


def name_of(func: Op) -> str:
    """Return an operator's name without namespace and overload, such as ``add_``."""
    return func._schema.name.partition("::")[2]


def bind(func: Op, args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """Return the passed arguments by their names in the operator's schema."""
    # strict=False, because callers may leave out trailing arguments.
    return {**dict(zip(_argument_names(func), args, strict=False)), **kwargs}


@cache  # `bind` calls this for every call of an operator
def _argument_names(func: Op) -> tuple[str, ...]:
    return tuple(argument.name for argument in func._schema.arguments)


@cache
def written_names(func: Op) -> tuple[str, ...]:
    """Return the names of the arguments that an operator writes to."""
    arguments = func._schema.arguments
    return tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)


def first_ragged(values: Iterable[Any]) -> RaggedDTensor | None:
    """Return the first ragged tensor among arguments and lists of arguments, or None."""
    for value in values:
        if isinstance(value, RaggedDTensor):
            return value
        if isinstance(value, (list, tuple)):
            nested = first_ragged(value)
            if nested is not None:
                return nested
    return None


# A methodcaller runs in C, which matters because it is called for every tensor of every step.
_placement_is_partial = methodcaller("is_partial")


def is_partial(tensor: DTensor) -> bool:
    """Return whether the tensor is Partial on a mesh axis, so that a sum over ranks is pending."""
    return any(map(_placement_is_partial, tensor._spec.placements))


def summed(value: Any) -> Any:
    """Return a ragged tensor after its pending sums are all-reduced; return any other value unchanged."""
    if not isinstance(value, RaggedDTensor) or not is_partial(value):
        return value
    return value.redistribute(placements=[Replicate() if p.is_partial() else p for p in value.placements])


def check_written(func: Op, named: dict[str, Any], like: RaggedDTensor) -> None:
    """Check that an operator writes only to ragged tensors without pending sums.

    Raises:
        Unlike: if it writes to a stock DTensor.
        UnsupportedOpError: if it writes to another tensor.
    """
    for name in written_names(func):
        if name not in named:
            continue
        value = named[name]
        for written in value if isinstance(value, (list, tuple)) else (value,):
            if not isinstance(written, RaggedDTensor):
                if isinstance(written, DTensor):
                    raise Unlike
                raise refuse_written(func, like, name)
            if written.is_expanded:
                raise refuse(
                    func, written, f"it writes to {name!r}, which expand() has made", "clone() it first"
                )
            if is_partial(written):
                raise refuse(func, written, f"it writes to {name!r}, which has pending sums")


def refuse_written(func: Op, like: RaggedDTensor | None, name: str) -> UnsupportedOpError:
    """Return the error for an operator that writes a ragged value to another tensor. The caller raises it."""
    return refuse(
        func,
        like,
        f"it writes to {name!r}, which is not ragged",
        todo=f"{GATHERED}; {OUTSIDE_FORWARD}. If the moments of an optimizer are full tensors: shard them with "
        "vescale_fsdp.checkpoint.load, or set_optimizer_state_dict(full_state_dict=True) of "
        "vescale_fsdp.checkpoint.state_dict. Elsewhere: gather first with .full_tensor(), on all ranks: it is plain",
    )


@cache
def has_out(func: Op) -> bool:
    """Return whether an operator is an ``out=`` form."""
    return any(argument.is_out for argument in func._schema.arguments)


def check_not_resized(func: Op, named: dict[str, Any], like: RaggedDTensor) -> None:
    """Check that the result of an ``out=`` form has the shape of the ragged tensor that it is written to.

    Raises:
        UnsupportedOpError: if the shapes differ. torch would resize the tensor, but pieces would silently broadcast.
    """
    if not has_out(func):
        return
    written = written_names(func)
    read = [
        value.shape
        for name, value in named.items()
        if name not in written and isinstance(value, torch.Tensor)
    ]
    result, target = torch.broadcast_shapes(*read) if read else None, named[written[0]]
    if result is not None and result != target.shape:
        raise refuse_resize(func, like, result)


class Unlike(Exception):
    """Arguments have other placements or shapes than the tensor that they are combined with (see `combining`)."""


def refuse_resize(func: Op, like: RaggedDTensor, shape: Sequence[int]) -> UnsupportedOpError:
    """Return the error for an ``out=`` tensor of another shape than the result. The caller raises it."""
    return refuse(
        func,
        like,
        f"its result of shape {tuple(shape)} would resize the tensor that it is written to",
        todo="pass an out= tensor of the result's shape, or none",
        expected=SAME_SHAPE,
    )


def localize(func: Op, value: Any, like: RaggedDTensor) -> Any:
    """Return an argument as this rank's piece, to be combined with the piece of ``like``. No communication.

    Raises:
        Unlike: if the argument has other placements or another shape; `combining` then brings it to those of ``like``.
        UnsupportedOpError: for a plain tensor of more than one element.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, RaggedDTensor):
        have, want = value._spec, like._spec
        # Gradients and optimizer state share the spec object of their parameter, so the usual case is fast.
        if have is want:
            return local_of(value)
        if have.shape == want.shape and have.placements == want.placements and have.mesh == want.mesh:
            return local_of(value)
        raise Unlike
    if isinstance(value, DTensor):
        # Pending sums are reduced first, because most operators on a sum are not the sum of operators on its parts.
        if value.ndim == 0:
            # Detached: autograd is above this call. torch 2.11 would detach the result in place, which DTensors refuse.
            detached = cast(DTensor, value.detach())
            return local_of(detached.redistribute(placements=[Replicate()] * value.device_mesh.ndim))
        if is_partial(value) or not all(p.is_replicate() for p in value.placements):
            raise Unlike
        return cut_like(func, local_of(value), like)
    if value.ndim > 0 and value.numel() != 1:
        raise refuse_plain(func, value, like)
    if value.ndim > 0:
        raise Unlike
    return value


def refuse_plain(func: Op, value: torch.Tensor, like: RaggedDTensor | None) -> UnsupportedOpError:
    """Return the error for a plain tensor next to a ragged one. The caller raises it."""
    return refuse(
        func,
        like,
        f"it is combined with a plain tensor of shape {tuple(value.shape)}, which may differ between ranks",
        todo=f"{OUTSIDE_FORWARD}; {GATHERED}. Elsewhere: vescale_fsdp.distribute_tensor(tensor, mesh, placements) "
        "makes it ragged",
    )


def cut_like(func: Op, full: torch.Tensor, like: RaggedDTensor) -> torch.Tensor:
    """Return this rank's piece of a replicated tensor, after it is broadcast to the shape of ``like``.

    Raises:
        Unlike: if it does not broadcast to that shape.
    """
    shape, local = like.shape, piece_in(like)
    # Broadcasting aligns dims from the last one.
    pairs = zip(reversed(full.shape), reversed(shape), strict=False)
    if full.ndim > len(shape) or any(n not in (1, m) for n, m in pairs):
        raise Unlike
    expanded = full.expand(shape)
    parts = [expanded[box.slices()].reshape(-1) for box in boxes_of(like._spec)]
    if not parts:
        return full.new_empty(local.shape)
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(local.shape)


def keep_grad_placed(tensor: torch.Tensor) -> None:
    """Let autograd bring the tensor's gradient to the tensor's own placements.

    The backward of an operator on gathered or moved tensors returns a gradient with the placements of the result. It
    would be correct, but a parameter's gradient must be cut like the parameter.
    """
    if not torch.is_grad_enabled() or not tensor.requires_grad:
        return
    if isinstance(tensor, RaggedDTensor) and not tensor.keeps_grad_placed and not is_traced(local_of(tensor)):
        tensor.keeps_grad_placed = True
        tensor.register_hook(partial(_placed_as, tensor._spec))


def _placed_as(spec: DTensorSpec, grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient under the placements of ``spec``; a Partial there means Replicate for the gradient."""
    wanted = tuple(Replicate() if p.is_partial() else p for p in spec.placements)
    if not isinstance(grad, DTensor) or tuple(grad.placements) == wanted or grad.device_mesh != spec.mesh:
        return grad
    return redistribute(grad, wanted)


def wrap_result(func: Op, result: Any, like: RaggedDTensor) -> Any:
    """Return the result of an operator on pieces as ragged tensors with the placements of ``like``.

    Raises:
        UnsupportedOpError: if a result has another shape than the piece.
    """
    if isinstance(result, (list, tuple)):
        return type(result)(wrap_result(func, value, like) for value in result)
    if not isinstance(result, torch.Tensor):
        return result
    if result.shape != local_of(like).shape:
        raise refuse(func, like, "its result has another shape than the tensor")
    return RaggedDTensor.wrap(result, spec_with(like._spec, dtype=result.dtype), layout_ref=like.layout_ref)
