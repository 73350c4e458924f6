"""Rules of operators that need whole tensors: gather the tensors, then let torch compute.

    matmul, sort, qr ..    every DTensor among the arguments is gathered; the result is a replicated DTensor
    triu_, mm(out=) ..     the arguments are gathered, and each rank keeps its piece of the written tensor
    eye (out=)             each rank creates the whole matrix and keeps its piece
    dot, dist, mse_loss    rewritten as other operators, which have rules; nothing is gathered
    foreach max            rewritten as the maximum of each tensor

These operators are collectives: all ranks must call them (see `gathered_views.gather_all`). A plain tensor next to a
ragged tensor raises, because it may differ between ranks, and mostly is the input of a module whose parameters were not
gathered. Operators that return views are in `elementwise.flat_view`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from vescale_fsdp.dtensor.operators.arguments import (
    OUTSIDE_FORWARD,
    bind,
    check_written,
    first_ragged,
    has_out,
    is_partial,
    name_of,
    refuse,
    refuse_resize,
    refuse_written,
    written_names,
)
from vescale_fsdp.dtensor.operators.gathered_views import gather_all
from vescale_fsdp.dtensor.operators.replicated_results import replicated
from vescale_fsdp.dtensor.ragged_dtensor import Args, Kwargs, Op, RaggedDTensor
from vescale_fsdp.torch_private import local_of, piece_in, pytree

# Arguments that batch norms write to, although some of their schemas do not declare it.
STATISTICS = ("running_mean", "running_var")


def gathered(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Run an operator on the gathered tensors, and return its results as replicated DTensors."""
    like = first_ragged((*args, *kwargs.values()))
    assert like is not None  # torch calls a rule only if an argument is ragged
    args, kwargs = _whole(func, (args, kwargs), like)
    result = func(*args, **kwargs)
    return pytree.tree_map_only(torch.Tensor, lambda full: replicated(full, like), result)


def written_back(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Run an operator that writes to some arguments on the gathered tensors; each rank keeps its pieces of them."""
    named = bind(func, args, kwargs)
    declared = [name for name in written_names(func) if name in named]
    names = [
        *declared,
        *(name for name in STATISTICS if named.get(name) is not None and name not in declared),
    ]
    names = [name for name in names if named[name] is not None]
    written = [named[name] for name in names]
    like = first_ragged((*args, *kwargs.values()))
    assert like is not None
    for name, target in zip(names, written, strict=True):
        if not isinstance(target, DTensor):
            raise refuse_written(func, like, name)
        if is_partial(target):
            raise refuse(func, like, f"it writes to {name!r}, which has pending sums")
        if isinstance(target, RaggedDTensor) and target.is_expanded:
            raise refuse(func, target, f"it writes to {name!r}, which expand() has made", "clone() it first")
    if has_out(func):  # what `out=` tensors contain is not read, so it is not gathered
        for name, target in zip(names, written, strict=True):
            named[name] = torch.zeros(target.shape, dtype=target.dtype, device=local_of(target).device)
        read = {name: value for name, value in named.items() if name not in names}
        whole = {**named, **_whole(func, read, like)}
    else:
        whole = _whole(func, named, like)
        whole.update({name: whole[name].clone() for name in names})  # `func` writes to them
    result = func(**whole)  # by name, because callers may leave out arguments
    for name, target in zip(names, written, strict=True):
        if whole[name].shape != target.shape:
            raise refuse_resize(func, like, whole[name].shape)
        target.copy_(replicated(whole[name], like))
    if any(value.alias_info is None for value in func._schema.returns):  # it returns more than it writes
        return pytree.tree_map_only(torch.Tensor, lambda full: replicated(full, like), result)
    return written[0] if len(written) == 1 else tuple(written)


def _whole(func: Op, values: Any, like: RaggedDTensor) -> Any:
    """Return arguments, nested or not, with each tensor replaced by a plain tensor that is the same on all ranks.

    Raises:
        UnsupportedOpError: for a plain tensor of several elements, which may differ between ranks, and for a DTensor on
            another mesh.
    """
    leaves, tree = pytree.tree_flatten(values)
    dtensors = []
    for leaf in leaves:
        if isinstance(leaf, DTensor):
            if leaf.device_mesh != like.device_mesh:
                raise refuse(func, like, f"it is combined with a DTensor on another mesh, {leaf.device_mesh}")
            dtensors.append(leaf)
        elif isinstance(leaf, torch.Tensor) and leaf.numel() != 1:  # one element counts as a scalar
            raise refuse(
                func,
                like,
                f"it is combined with a plain tensor of shape {tuple(leaf.shape)}",
                OUTSIDE_FORWARD,
            )
    arrived = iter(gather_all(func, dtensors, like))
    return pytree.tree_unflatten(
        [next(arrived) if isinstance(leaf, DTensor) else leaf for leaf in leaves], tree
    )


def eye(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Run ``torch.eye(n, m, out=tensor)``, which ``torch.nn.init.eye_`` calls, and return the tensor."""
    named = bind(func, args, kwargs)
    out: RaggedDTensor = named["out"]
    check_written(func, named, out)
    full = torch.eye(named["n"], named.get("m", named["n"]), dtype=out.dtype, device=piece_in(out).device)
    if full.shape != out.shape:
        raise refuse(func, out, f"a matrix of shape {tuple(full.shape)} would resize it")
    return out.copy_(replicated(full, out))


def rewritten(func: Op, args: Args, kwargs: Kwargs) -> Any:
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
