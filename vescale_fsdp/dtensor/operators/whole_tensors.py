"""Rules of operators that have an answer only for whole tensors: gather, and let torch compute.

    matmul, sort, qr ..    every DTensor among the arguments is gathered; the result is a replicated DTensor
    triu_, index_fill_ ..  the same, and then each rank keeps its piece of what was written
    eye (out=)             the matrix is made whole, each rank keeps its piece
    dot, dist, mse_loss    said in operators that have rules of their own; nothing is gathered
    foreach max            the maximum of each tensor

Collectives, as norms are: all ranks call them. Plain tensors beside a ragged one are refused: they may differ between
ranks, and are most often the inputs of a module whose parameters nobody gathered. What returns a view is not here: a
write to a view of what was gathered would be lost (see `flat_views`).
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
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor, redistribute
from vescale_fsdp.dtensor.spec import make_spec
from vescale_fsdp.torch_private import local_of, pytree

aten = torch.ops.aten


def gathered(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on the whole tensors; its results are replicated."""
    like = first_ragged((*args, *kwargs.values()))
    assert like is not None
    result = func(*_whole(func, args, like), **_whole(func, kwargs, like))
    return pytree.tree_map_only(torch.Tensor, lambda whole: _replicated(whole, like), result)


def written_back(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator that writes to its first argument on the whole tensor; each rank keeps its piece of it."""
    written, *rest = args
    check_written(func, bind(func, args, kwargs), written)
    full = _whole(func, written, written).clone()
    func(full, *_whole(func, rest, written), **_whole(func, kwargs, written))
    return written.copy_(_replicated(full, written))


def _whole(func: torch._ops.OpOverload, given: Any, like: RaggedDTensor) -> Any:
    """Arguments as plain tensors that all ranks hold alike.

    Raises:
        UnsupportedOpError: for a plain tensor, which may differ between ranks, and for one on another mesh.
    """

    def whole(value: torch.Tensor) -> torch.Tensor:
        if isinstance(value, DTensor):
            if value.device_mesh != like.device_mesh:
                raise refuse(
                    func, like._spec, f"a DTensor on another mesh, {value.device_mesh}, is beside it"
                )
            return local_of(redistribute(value, [Replicate()] * value.device_mesh.ndim))
        if value.ndim == 0:
            return value
        raise refuse(
            func, like._spec, f"a plain tensor of shape {tuple(value.shape)} is beside it", OUTSIDE_FORWARD
        )

    return pytree.tree_map_only(torch.Tensor, whole, given)


def _replicated(full: torch.Tensor, like: RaggedDTensor) -> DTensor:
    mesh = like.device_mesh
    spec = make_spec(mesh, [Replicate()] * mesh.ndim, full.shape, full.dtype)
    return DTensor(full.contiguous(), spec, requires_grad=False)  # type: ignore[call-arg]


def eye(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.eye(n, m, out=tensor)``, which ``torch.nn.init.eye_`` calls."""
    named = bind(func, args, kwargs)
    out: RaggedDTensor = named["out"]
    check_written(func, named, out)
    full = torch.eye(named["n"], named.get("m", named["n"]), dtype=out.dtype, device=out._local_tensor.device)
    if full.shape != out.shape:
        raise refuse(func, out._spec, f"a matrix of shape {tuple(full.shape)} would resize it")
    return out.copy_(_replicated(full, out))


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
