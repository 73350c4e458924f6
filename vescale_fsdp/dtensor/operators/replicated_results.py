"""Results that every rank has whole: totals, norms, and what is computed from gathered tensors.

A `ReplicatedResult` is a replicated DTensor on which operators run on the local value. torch's own DTensor refuses two
habits of optimizers, which are defined here::

    d.add_(p.abs().sum())          a plain tensor is written: it stays plain
    p.norm().pow_(2)               a norm whose sum over ranks is pending is written: it is reduced first

So are results on different meshes, such as the norms of parameters with and without tensor parallelism.

A plain tensor of several elements next to such a result raises, as next to a ragged tensor.

`to_local` and `full_tensor` lead to plain tensors, such as a loss, which may differ between ranks. So their backward
takes the mean over the ranks, as the reduction of `fully_shard` does::

    loss = cross_entropy(model(x), y) + 0.1 * p.norm().full_tensor()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp.collectives.operations import all_reduce_in_place
from vescale_fsdp.collectives.slice_exchange import wait_for
from vescale_fsdp.dtensor.meeting import Meets, reducing
from vescale_fsdp.dtensor.operators.arguments import OUTSIDE_FORWARD, bind, is_partial, refuse, written_names
from vescale_fsdp.dtensor.ragged_dtensor import Args, Kwargs, Op, set_as_whole
from vescale_fsdp.dtensor.spec import make_spec
from vescale_fsdp.torch_modes import NULL_CONTEXT, is_traced
from vescale_fsdp.torch_private import DTensorSpec, TensorMeta, dispatch_to_subclass, local_of, local_slot

# The operator of gradient clipping that keeps norms pending, so that the norms of all tensors cost one collective.
_KEEPS_PENDING = torch.ops.aten.stack.default


class ReplicatedTensor(DTensor):
    """A DTensor that every rank has whole, or a pending norm: a gathered tensor, or the result of an operator.

    Attributes:
        meets: whether ranks meet before a pending norm is reduced.
    """

    meets: Meets = Meets.FIRST

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:  # type: ignore[override]
        """Return the result under other placements, as torch's DTensor."""
        with _reduction_of(self):
            return super().redistribute(*args, **kwargs)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return the plain value, in shared memory. Differentiable. A collective if a norm is pending.

        Args:
            grad_placements: placements of the incoming gradient; None: the mean over the ranks, a collective.
        """
        if is_partial(self):
            _reduce_in_place(self)
        if grad_placements is not None or not torch.is_grad_enabled() or not self.requires_grad:
            return super().to_local(grad_placements=grad_placements)
        return _ToPlain.apply(self)  # type: ignore[no-any-return]

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return the plain value; see `to_local`."""
        return self.to_local(grad_placements=grad_placements)


class _ToPlain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: ReplicatedTensor) -> torch.Tensor:
        ctx.mesh = whole.device_mesh
        return local_of(whole).view_as(local_of(whole))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> DTensor:  # type: ignore[override]
        mesh: DeviceMesh = ctx.mesh
        mean = grad.clone(memory_format=torch.contiguous_format)  # the all-reduces are in place
        groups = [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1]
        call = f"backward of a result of shape {tuple(grad.shape)} that every rank has"
        with reducing(groups, call, Meets.EACH):
            for group in groups:
                wait_for(all_reduce_in_place(mean, dist.ReduceOp.SUM, group))
        return as_result(
            mean.div_(mesh.size()), make_spec(mesh, (Replicate(),) * mesh.ndim, mean.shape, mean.dtype)
        )


class ReplicatedResult(ReplicatedTensor):
    """A `ReplicatedTensor` that may be written to."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Op, types: tuple[type, ...], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        named = bind(func, args, kwargs or {})
        leaves = _leaves(named.values())
        dtensors = [leaf for leaf in leaves if isinstance(leaf, DTensor)]
        if any(type(each) not in STOCK for each in dtensors):
            return NotImplemented  # a ragged tensor's rule decides
        mesh = dtensors[0].device_mesh
        is_one_mesh = all(t.device_mesh is mesh or t.device_mesh == mesh for t in dtensors)
        if func is _KEEPS_PENDING and is_one_mesh and all(map(is_partial, dtensors)):
            meets = Meets.NEVER if any(_meets(each) is Meets.NEVER for each in dtensors) else Meets.FIRST
            return _mapped(partial(_ours, meets=meets), _by_torch(func, args, kwargs))
        for each in dtensors:
            if isinstance(each, ReplicatedResult) and is_partial(each):
                _reduce_in_place(each)
        written = _leaves(named.get(name) for name in written_names(func))
        if not is_one_mesh:
            mesh = _common_mesh(dtensors)
            to_mesh = partial(_on_mesh, mesh=mesh, kept=[*map(id, written)])
            args = tuple(_mapped(to_mesh, value) for value in args)
            kwargs = {name: _mapped(to_mesh, value) for name, value in (kwargs or {}).items()}
            leaves = _leaves((*args, *kwargs.values()))
            dtensors = [leaf for leaf in leaves if isinstance(leaf, DTensor)]
        is_local = all(placement.is_replicate() for t in dtensors for placement in t.placements)
        # torch gives all ranks the same random values, and changes the shape of a DTensor with its local tensor.
        if not is_local or {torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view} & set(func.tags):
            return _by_torch(func, args, kwargs)
        is_plain_written = any(isinstance(t, torch.Tensor) and not isinstance(t, DTensor) for t in written)
        if not is_plain_written:
            _check_plain(func, leaves, dtensors[0])
        result = func(
            *(_mapped(_local, value) for value in args),
            **{name: _mapped(_local, value) for name, value in (kwargs or {}).items()},
        )
        if is_plain_written:
            return result
        originals = {id(local_of(t)): t for t in written if isinstance(t, DTensor)}

        def wrap(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return originals[id(value)] if id(value) in originals else _with_value(value, mesh)

        return _mapped(wrap, result)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _stock(self).__reduce_ex__(protocol)  # files name torch's class


STOCK = (DTensor, ReplicatedResult)  # the classes whose operators need no rule for ragged tensors

dispatch_to_subclass(ReplicatedResult)  # torch 2.11 would not call the subclass's `__torch_dispatch__`


def replicated(full: torch.Tensor, like: DTensor) -> DTensor:
    """Return a replicated DTensor of a tensor that is the same on all ranks of the mesh of ``like``."""
    mesh = like.device_mesh
    spec = make_spec(mesh, [Replicate()] * mesh.ndim, full.shape, full.dtype)
    return as_result(full.contiguous(), spec)  # `make_spec` describes a contiguous tensor


def as_result(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Return a result with a local tensor and a spec without shards; torch's own class while a graph is recorded."""
    if is_traced(local):
        return DTensor(local, spec, requires_grad=False)  # type: ignore[call-arg]
    return with_spec(local, spec)


set_as_whole(as_result)


def with_spec(local: torch.Tensor, spec: DTensorSpec, meets: Meets = Meets.FIRST) -> ReplicatedResult:
    """Return a result with a local tensor and a spec without shards."""
    result: Any = ReplicatedResult.__new__(ReplicatedResult, local, spec, requires_grad=False)
    if meets is not Meets.FIRST:
        result.meets = meets
    return result  # type: ignore[no-any-return]


def _meets(result: DTensor) -> Meets:
    return result.meets if isinstance(result, ReplicatedResult) else Meets.FIRST


def _reduction_of(pending: ReplicatedTensor) -> AbstractContextManager[None]:
    """Return the context in which a pending norm is reduced; a null context for any other result."""
    groups = [
        pending.device_mesh.get_group(axis)
        for axis, placement in enumerate(pending.placements)
        if placement.is_partial()
    ]
    if not groups or is_traced(local_of(pending)):
        return NULL_CONTEXT
    return reducing(groups, f"norm with a result of shape {tuple(pending.shape)}", pending.meets)


def _with_value(local: torch.Tensor, mesh: Any) -> ReplicatedResult:
    if local.is_conj() or local.is_neg():  # flags that a DTensor does not have
        local = local.resolve_conj().resolve_neg()
    meta = TensorMeta(local.shape, local.stride(), local.dtype)
    return with_spec(local, DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta))


def _check_plain(func: Op, leaves: Sequence[Any], like: DTensor) -> None:
    """Raise if a plain tensor of several elements is among the arguments, since it may differ between ranks."""
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor) and leaf.numel() != 1:
            raise refuse(
                func,
                like,
                f"it is combined with a plain tensor of shape {tuple(leaf.shape)}, which may differ between ranks",
                todo=f"{OUTSIDE_FORWARD}. Elsewhere: .full_tensor() is the plain value, also for a loss: "
                "loss + p.norm().full_tensor()",
            )


def _reduce_in_place(pending: ReplicatedTensor) -> None:
    """All-reduce a pending norm, and keep the result."""
    mesh = pending.device_mesh
    with _reduction_of(pending):
        reduced = _stock(pending).redistribute(placements=[Replicate()] * mesh.ndim)
    local_slot.__set__(pending, local_of(reduced))
    pending._spec = reduced._spec


def _common_mesh(dtensors: Sequence[DTensor]) -> DeviceMesh:
    """Return the mesh on which tensors of several meshes are combined: that of shards, else the largest.

    Such tensors are norms of parameters with and without tensor parallelism. Each rank of a mesh has the value.
    """
    cut = [t.device_mesh for t in dtensors if any(placement.is_shard() for placement in t.placements)]
    return cut[0] if cut else max((t.device_mesh for t in dtensors), key=lambda mesh: mesh.size())


def _on_mesh(leaf: Any, mesh: DeviceMesh, kept: Sequence[int]) -> Any:
    """Return a whole or pending DTensor of another mesh as a result on ``mesh``; other values, and ``kept``, as given.

    Args:
        leaf: an argument of an operator.
        mesh: a mesh that this rank is in.
        kept: ids of the arguments that the operator writes to.
    """
    if not isinstance(leaf, DTensor) or leaf.device_mesh == mesh or id(leaf) in kept:
        return leaf
    if any(placement.is_shard() for placement in leaf.placements):
        return leaf
    if is_partial(leaf):
        leaf = leaf.redistribute(placements=[Replicate()] * leaf.device_mesh.ndim)
    return _with_value(local_of(leaf), mesh)


def _by_torch(func: Op, args: Args, kwargs: Kwargs | None) -> Any:
    """Run an operator by torch's rules for DTensors."""
    originals: dict[int, Any] = {}

    def stock(leaf: Any) -> Any:
        if not isinstance(leaf, ReplicatedResult):
            return leaf
        each = _stock(leaf)
        originals[id(each)] = leaf
        return each

    arguments = [_mapped(stock, value) for value in args]
    options = {name: _mapped(stock, value) for name, value in (kwargs or {}).items()}
    return _mapped(lambda value: originals.get(id(value), value), func(*arguments, **options))


# Arguments and results of operators are values and lists of values. torch's pytree, which takes any nesting, takes
# longer for them than a small operator itself.


def _leaves(values: Iterable[Any]) -> list[Any]:
    """Return the values, with the elements of lists in place of the lists."""
    return [leaf for value in values for leaf in (value if isinstance(value, (list, tuple)) else (value,))]


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Return a changed value, or a list or tuple of changed elements."""
    if isinstance(value, list):
        return [change(each) for each in value]
    return tuple(change(each) for each in value) if isinstance(value, tuple) else change(value)


def _local(leaf: Any) -> Any:
    return local_of(leaf) if isinstance(leaf, DTensor) else leaf


def _stock(result: ReplicatedTensor) -> DTensor:
    return DTensor(local_of(result), result._spec, requires_grad=result.requires_grad)  # type: ignore[call-arg]


def _ours(result: Any, meets: Meets) -> Any:
    is_stock = isinstance(result, DTensor) and not isinstance(result, ReplicatedResult)
    return with_spec(local_of(result), result._spec, meets) if is_stock else result
