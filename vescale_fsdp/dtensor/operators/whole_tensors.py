"""Rules of operators that have an answer only for whole tensors, and give new ones: gather, and let torch compute.

    cat, qr, median ..  every ragged argument is gathered; the result is a replicated DTensor
    eye (out=)          the matrix is made whole, each rank keeps its piece
    dot, dist, mse_loss said in operators that have rules of their own; nothing is gathered
    foreach max         the maximum of each tensor

Collectives, as norms are: all ranks call them. What returns views or writes in place is not here: a write to what was
gathered would be lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from vescale_fsdp.dtensor.operators.arguments import (
    OUTSIDE_FORWARD,
    bind,
    check_written,
    first_ragged,
    refuse,
)
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor
from vescale_fsdp.dtensor.spec import make_spec

__all__ = ["REWRITTEN", "eye", "gathered", "rewritten"]

aten = torch.ops.aten


def gathered(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on the whole tensors; its results are replicated."""
    like = first_ragged((*args, *kwargs.values()))
    assert like is not None

    def whole(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [whole(each) for each in value]
        if isinstance(value, RaggedDTensor):
            return value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            raise refuse(
                func,
                like._spec,
                f"a plain tensor of shape {tuple(value.shape)} is beside it",
                OUTSIDE_FORWARD,
            )
        return value

    return func(*map(whole, args), **{name: whole(value) for name, value in kwargs.items()})


def eye(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.eye(n, m, out=tensor)``, which ``torch.nn.init.eye_`` calls."""
    named = bind(func, args, kwargs)
    out: RaggedDTensor = named["out"]
    check_written(func, named, out)
    full = torch.eye(named["n"], named.get("m", named["n"]), dtype=out.dtype, device=out._local_tensor.device)
    if full.shape != out.shape:
        raise refuse(func, out._spec, f"a matrix of shape {tuple(full.shape)} would resize it")
    mesh = out.device_mesh
    spec = make_spec(mesh, [Replicate()] * mesh.ndim, full.shape, full.dtype)
    return out.copy_(DTensor(full, spec, requires_grad=False))  # type: ignore[call-arg]


def rewritten(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator as others that mean the same."""
    return REWRITTEN[func._schema.name.removeprefix("aten::")](*args, **kwargs)


def _mse_loss(given: torch.Tensor, target: torch.Tensor, reduction: int = 1) -> torch.Tensor:
    squares = (given - target).square()
    return (lambda x: x, torch.mean, torch.sum)[reduction](squares)


REWRITTEN: dict[str, Callable[..., Any]] = {
    "_foreach_max": lambda tensors: [tensor.max() for tensor in tensors],
    "dist": lambda left, right, p=2: torch.linalg.vector_norm(left - right, p),
    "dot": lambda left, right: (left * right).sum(),
    "mse_loss": _mse_loss,
    "vdot": lambda left, right: (left.conj() * right).sum(),
}
