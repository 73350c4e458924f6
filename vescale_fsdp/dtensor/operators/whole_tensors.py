"""Rules of operators that need whole tensors: gather the tensors, then let torch compute.

    matmul, sort, qr ..    every DTensor among the arguments is gathered; the result is a replicated DTensor
    triu_, index_fill_ ..  the arguments are gathered, and each rank keeps its piece of the written tensor
    eye (out=)             each rank creates the whole matrix and keeps its piece
    dot, dist, mse_loss    rewritten as other operators, which have rules; nothing is gathered
    foreach max            rewritten as the maximum of each tensor

These operators are collectives: all ranks must call them. A plain tensor next to a ragged tensor raises, because it may
differ between ranks, and mostly is the input of a module whose parameters were not gathered. Operators that return
views have no rule here, because a write to a view of a gathered copy would be lost (see `elementwise.flat_view`).
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
    name_of,
    refuse,
    replicated,
)
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor, redistribute
from vescale_fsdp.torch_private import local_of, pytree


def gathered(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on the gathered tensors, and return its results as replicated DTensors."""
    like = first_ragged((*args, *kwargs.values()))
    assert like is not None  # torch calls a rule only if an argument is ragged
    result = func(*_whole(func, args, like), **_whole(func, kwargs, like))
    return pytree.tree_map_only(torch.Tensor, lambda full: replicated(full, like), result)


def written_back(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator that writes to its first argument on the gathered tensors; each rank keeps its piece."""
    written, *rest = args
    check_written(func, bind(func, args, kwargs), written)
    full = _whole(func, written, written).clone()  # `func` writes to it
    func(full, *_whole(func, rest, written), **_whole(func, kwargs, written))
    return written.copy_(replicated(full, written))


def _whole(func: torch._ops.OpOverload, values: Any, like: RaggedDTensor) -> Any:
    """Return arguments, nested or not, with each tensor replaced by a plain tensor that is the same on all ranks.

    Raises:
        UnsupportedOpError: for a plain tensor, which may differ between ranks, and for a DTensor on another mesh.
    """

    def whole(value: torch.Tensor) -> torch.Tensor:
        if isinstance(value, DTensor):
            mesh = value.device_mesh
            if mesh != like.device_mesh:
                raise refuse(func, like, f"it is combined with a DTensor on another mesh, {mesh}")
            return local_of(redistribute(value, [Replicate()] * mesh.ndim))
        if value.ndim == 0:  # a 0-d tensor counts as a scalar
            return value
        why = f"it is combined with a plain tensor of shape {tuple(value.shape)}"
        raise refuse(func, like, why, OUTSIDE_FORWARD)

    return pytree.tree_map_only(torch.Tensor, whole, values)


def eye(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``torch.eye(n, m, out=tensor)``, which ``torch.nn.init.eye_`` calls, and return the tensor."""
    named = bind(func, args, kwargs)
    out: RaggedDTensor = named["out"]
    check_written(func, named, out)
    full = torch.eye(named["n"], named.get("m", named["n"]), dtype=out.dtype, device=out._local_tensor.device)
    if full.shape != out.shape:
        raise refuse(func, out, f"a matrix of shape {tuple(full.shape)} would resize it")
    return out.copy_(replicated(full, out))


def rewritten(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator by its equivalent in `REWRITTEN`, and return the result."""
    return REWRITTEN[name_of(func)](*args, **kwargs)


REWRITTEN: dict[str, Callable[..., Any]] = {
    "_foreach_max": lambda tensors: [tensor.max() for tensor in tensors],
    "dist": lambda left, right, p=2: torch.linalg.vector_norm(left - right, p),
    "dot": lambda left, right: (left * right).sum(),
    # torch passes the reduction as a number: 0 none, 1 mean, 2 sum
    "mse_loss": lambda values, target, reduction=1: (lambda x: x, torch.mean, torch.sum)[reduction](
        (values - target).square()
    ),
    "vdot": lambda left, right: (left.conj() * right).sum(),
}
