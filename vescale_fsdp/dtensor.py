"""RaggedDTensor: a DTensor whose ranks hold flat pieces of any length, and the rules of its operations.

Stock DTensor dispatch does not know `RaggedShard`: it would try to redistribute to Replicate and fail.
So a ragged tensor is a subclass with its own ``__torch_dispatch__``. Users see a DTensor: ``.shape`` is
global, ``.to_local()``, ``.full_tensor()``, ``.redistribute()``, ``.device_mesh``, ``.placements`` hold.

What is allowed follows from what a flat piece can answer alone (`rule_of` decides, per operator):

    elementwise   tags say pointwise, or a listed name: run on the pieces, same placement out
    foreach       lists of the above, and the fused optimizer kernels
    reduction     over all dims: the piece's part, as a stock DTensor that is Partial over the ragged axis
    whole         equality: the piece's answer, agreed over the mesh
    refused       everything else: UnsupportedOpError names the operator, the placement and the way out

Nothing here ever returns a wrong value in silence: an operator without a rule raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp.dcp_hooks import chunk_list, tensor_shard, write_items
from vescale_fsdp.errors import PlacementError, UnsupportedOpError, explain
from vescale_fsdp.geometry import FlatRange, boxes_of_range
from vescale_fsdp.layout import GroupLayout
from vescale_fsdp.placement import RaggedShard
from vescale_fsdp.redistribute import local_shape, make_spec, redistribute_local, spec_with
from vescale_fsdp.torch_private import DTensorSpec, NormPartial, local_of, register_foreach_type

__all__ = ["RaggedDTensor", "distribute_tensor", "is_ragged"]

aten = torch.ops.aten


def is_ragged(tensor: object) -> bool:
    """Whether a tensor is sharded by RaggedShard."""
    return isinstance(tensor, RaggedDTensor)


class RaggedDTensor(DTensor):
    """A DTensor with one `RaggedShard` among its placements; the local tensor is this rank's flat piece.

    Make one with `distribute_tensor`, `RaggedDTensor.from_local` or `fully_shard`, not by the constructor.

    Attributes:
        layout_ref: the layout of the group this tensor lies in and its name there, where a planner made
            it. Elementwise results inherit it, so optimizer state knows its layout too.
    """

    layout_ref: tuple[GroupLayout, str] | None = None

    @staticmethod
    def wrap(
        local: torch.Tensor,
        spec: DTensorSpec,
        *,
        layout_ref: tuple[GroupLayout, str] | None = None,
        requires_grad: bool = False,
    ) -> RaggedDTensor:
        """A ragged tensor over ``local`` (shared, not copied) as ``spec`` describes it."""
        tensor = RaggedDTensor(local, spec, requires_grad=requires_grad)  # type: ignore[call-arg]
        tensor.layout_ref = layout_ref
        return tensor

    @staticmethod
    def from_local(  # type: ignore[override]
        local_tensor: torch.Tensor,
        device_mesh: DeviceMesh,
        placements: Sequence[Placement],
        *,
        shape: Sequence[int],
    ) -> RaggedDTensor:
        """A ragged tensor from this rank's piece. No communication; differentiable.

        Args:
            local_tensor: the piece, contiguous, as many elements as the placement gives this rank.
            device_mesh: the mesh.
            placements: one per mesh axis, exactly one of them a RaggedShard.
            shape: global shape, which a piece alone does not tell.

        Raises:
            PlacementError: if the piece has another size than the placement says.
        """
        spec = make_spec(device_mesh, tuple(placements), torch.Size(shape), local_tensor.dtype)
        axis, placement = ragged_axis(spec.placements)
        expected = local_shape(placement, torch.Size(shape), device_mesh.get_local_rank(axis))
        if tuple(local_tensor.shape) != expected or not local_tensor.is_contiguous():
            raise PlacementError(
                explain(
                    "The local tensor is not this rank's piece.",
                    expected=f"a contiguous tensor of shape {expected}",
                    got=f"shape {tuple(local_tensor.shape)}, strides {local_tensor.stride()}",
                    where=f"rank {device_mesh.get_local_rank(axis)} of {placement}",
                    todo="flatten the piece: tensor.reshape(-1)[range]",
                )
            )
        return _FromLocal.apply(local_tensor, spec)  # type: ignore[no-any-return]

    @property
    def piece(self) -> FlatRange:
        """Half-open range of the flattened global tensor that this rank holds."""
        return piece_of(self._spec)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's piece, 1-D (shares memory). Differentiable; its gradient has the same placement."""
        if not torch.is_grad_enabled() or not self.requires_grad:
            return self._local_tensor
        return _ToLocal.apply(self)  # type: ignore[no-any-return]

    def redistribute(  # type: ignore[override]
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """The same tensor under other placements of the same mesh. Differentiable.

        Raises:
            PlacementError: for another mesh, or combinations that cannot be reached.
            UnsupportedOpError: for the options that only stock DTensor has.
        """
        if async_op or forward_dtype is not None or backward_dtype is not None:
            raise UnsupportedOpError(
                explain(
                    "redistribute of a ragged tensor takes no options.",
                    expected="async_op=False, forward_dtype=None, backward_dtype=None",
                    got=f"async_op={async_op}, forward_dtype={forward_dtype}, backward_dtype={backward_dtype}",
                    todo="cast with .to(dtype) before or after",
                )
            )
        if device_mesh is not None and device_mesh != self.device_mesh:
            raise PlacementError(
                explain("A tensor stays on its mesh.", expected=self.device_mesh, got=device_mesh)
            )
        if placements is None:
            raise PlacementError(
                explain("redistribute needs placements.", expected="one placement per mesh axis", got=None)
            )
        return _Redistribute.apply(self, spec_with(self._spec, placements=tuple(placements)))  # type: ignore[no-any-return]

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole tensor on every rank (a collective; new memory)."""
        replicated = self.redistribute(placements=[Replicate()] * self.device_mesh.ndim)
        return replicated.to_local(grad_placements=grad_placements)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        start, stop = self.piece
        placements = ", ".join(str(placement) for placement in self.placements)
        return (
            f"RaggedDTensor(shape={tuple(self.shape)}, dtype={self.dtype}, placements=({placements}), "
            f"this rank [{start}:{stop}) = {self._local_tensor}"
            f"{', requires_grad=True' if self.requires_grad else ''})"
        )

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, Any], flatten_spec: tuple[Any, ...], outer_size: Any, outer_stride: Any
    ) -> RaggedDTensor:
        placements, meta, requires_grad = flatten_spec[0], flatten_spec[1], flatten_spec[-1]
        spec = make_spec(inner_tensors["device_mesh"], placements, torch.Size(outer_size), meta.dtype)
        return RaggedDTensor.wrap(inner_tensors["_local_tensor"], spec, requires_grad=requires_grad)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: torch._ops.OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return rule_of(func)(func, args, kwargs or {})

    # -- DCP (torch/distributed/_checkpointable.py): rank-local arithmetic, nothing for an empty piece.
    # Methods of the class, because hooks set on an instance vanish when DCP copies it.

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        return write_items(fqn, self)

    def __create_chunk_list__(self) -> list[Any]:
        return chunk_list(self)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return tensor_shard(self, index)


register_foreach_type(RaggedDTensor)


def ragged_axis(placements: Sequence[Placement]) -> tuple[int, RaggedShard]:
    """The mesh axis that is sharded raggedly, and its placement.

    Raises:
        PlacementError: unless exactly one placement is a RaggedShard.
    """
    found = [(axis, p) for axis, p in enumerate(placements) if isinstance(p, RaggedShard)]
    if len(found) != 1:
        raise PlacementError(
            explain("A ragged tensor has one RaggedShard.", expected="exactly one", got=tuple(placements))
        )
    return found[0]


def piece_of(spec: DTensorSpec) -> FlatRange:
    """Range of the flattened tensor that this rank holds under a ragged spec."""
    axis, placement = ragged_axis(spec.placements)
    return placement.piece(spec.shape, spec.mesh.get_local_rank(axis))


def wrap_like(local: torch.Tensor, spec: DTensorSpec, like: DTensor | None = None) -> DTensor:
    """A ragged or stock DTensor, as the placements of ``spec`` ask."""
    if not any(isinstance(p, RaggedShard) for p in spec.placements):
        return DTensor(local, spec, requires_grad=False)  # type: ignore[call-arg]
    ref = like.layout_ref if isinstance(like, RaggedDTensor) and like.placements == spec.placements else None
    return RaggedDTensor.wrap(local, spec, layout_ref=ref)


def distribute_tensor(
    tensor: torch.Tensor, device_mesh: DeviceMesh, placements: Sequence[Placement]
) -> RaggedDTensor:
    """Shard a tensor that every rank holds in full: each rank keeps a copy of its piece. No communication.

    Args:
        tensor: the full tensor, equal on all ranks (broadcast it first where it is not).
        device_mesh: the mesh.
        placements: one per mesh axis, exactly one of them a RaggedShard.
    """
    spec = make_spec(device_mesh, tuple(placements), tensor.shape, tensor.dtype)
    axis, placement = ragged_axis(spec.placements)
    rank = device_mesh.get_local_rank(axis)
    start, stop = placement.piece(tensor.shape, rank)
    piece = tensor.detach().reshape(-1)[start:stop].clone()
    wrapped = RaggedDTensor.wrap(piece.view(local_shape(placement, tensor.shape, rank)), spec)
    wrapped.requires_grad_(tensor.requires_grad)
    return wrapped


# -- autograd -----------------------------------------------------------------------------------------


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, spec: DTensorSpec) -> RaggedDTensor:
        ctx.spec = spec
        return RaggedDTensor.wrap(local.view_as(local), spec, requires_grad=local.requires_grad)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return redistribute_local(local_of(grad), grad._spec, ctx.spec), None


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: RaggedDTensor) -> torch.Tensor:
        ctx.spec = tensor._spec
        return tensor._local_tensor.view_as(tensor._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> RaggedDTensor:  # type: ignore[override]
        return RaggedDTensor.wrap(grad.contiguous(), spec_with(ctx.spec, dtype=grad.dtype))


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor, target: DTensorSpec) -> DTensor:
        ctx.spec = tensor._spec
        local = redistribute_local(local_of(tensor), tensor._spec, target)
        if local is local_of(tensor):
            local = local.view_as(local)
        return wrap_like(local, target, like=tensor)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None]:  # type: ignore[override]
        target = spec_with(ctx.spec, dtype=grad.dtype)
        return wrap_like(redistribute_local(local_of(grad), grad._spec, target), target), None


# -- operators ----------------------------------------------------------------------------------------

Rule = Callable[[torch._ops.OpOverload, tuple[Any, ...], dict[str, Any]], Any]


def _refuse(func: torch._ops.OpOverload, spec: DTensorSpec | None, why: str) -> UnsupportedOpError:
    placement = ", ".join(map(str, spec.placements)) if spec is not None else "RaggedShard"
    return UnsupportedOpError(
        explain(
            f"{func} cannot be computed on ragged pieces: {why}.",
            expected="an elementwise operator, a foreach or fused optimizer step, or a reduction over all dims",
            got=str(func),
            where=f"tensor of shape {tuple(spec.shape) if spec is not None else '?'} placed ({placement})",
            todo="gather it with .full_tensor(), or work on this rank's flat piece with .to_local()",
        )
    )


def _localise(func: torch._ops.OpOverload, value: Any, reference: DTensorSpec | None) -> Any:
    """An argument as the piece-wise operator wants it, checked against the ragged tensor beside it."""
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, RaggedDTensor):
        if reference is not None and not _same_layout(value._spec, reference):
            raise PlacementError(
                explain(
                    f"{func} met two ragged tensors that are cut differently.",
                    expected=f"shape {tuple(reference.shape)} placed {tuple(map(str, reference.placements))}",
                    got=f"shape {tuple(value.shape)} placed {tuple(map(str, value.placements))}",
                    todo="redistribute one to the placements of the other",
                )
            )
        return value._local_tensor
    if isinstance(value, DTensor):
        if value.ndim == 0 or any(p.is_partial() for p in value.placements):
            value = value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)
        if not all(p.is_replicate() for p in value.placements):
            raise _refuse(func, reference, f"it is combined with a DTensor placed {value.placements}")
        value = local_of(value)
    elif value.ndim > 0 and reference is not None:
        raise _refuse(func, reference, "it is combined with a plain tensor, which may differ between ranks")
    return value if value.ndim == 0 or reference is None else _cut(func, value, reference)


def _cut(func: torch._ops.OpOverload, full: torch.Tensor, reference: DTensorSpec) -> torch.Tensor:
    """This rank's piece of a replicated tensor that broadcasts to the ragged tensor's shape."""
    shape = reference.shape
    if torch.broadcast_shapes(full.shape, shape) != shape:
        raise _refuse(func, reference, f"shape {tuple(full.shape)} does not broadcast to it")
    piece = piece_of(reference)
    if full.shape == shape and full.is_contiguous():
        return full.view(-1)[piece.start : piece.stop]
    expanded = full.expand(shape)
    boxes = boxes_of_range(tuple(shape), *piece)
    return torch.cat([expanded[box.slices()].reshape(-1) for box in boxes]) if boxes else full.new_empty(0)


def _same_layout(a: DTensorSpec, b: DTensorSpec) -> bool:
    return a.shape == b.shape and a.placements == b.placements and a.mesh == b.mesh


def _first_ragged(values: Any) -> RaggedDTensor | None:
    for value in values:
        if isinstance(value, RaggedDTensor):
            return value
        if isinstance(value, (list, tuple)):
            found = _first_ragged(value)
            if found is not None:
                return found
    return None


def _wrap_result(result: Any, like: RaggedDTensor) -> Any:
    if not isinstance(result, torch.Tensor):
        return result
    return RaggedDTensor.wrap(result, spec_with(like._spec, dtype=result.dtype), layout_ref=like.layout_ref)


def _elementwise(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on the pieces; the result keeps the placement."""
    like = _first_ragged((*args, *kwargs.values()))
    assert like is not None
    spec = like._spec
    result = func(
        *(_localise(func, arg, spec) for arg in args),
        **{name: _localise(func, value, spec) for name, value in kwargs.items()},
    )
    if func._schema.is_mutable:
        return kwargs["out"] if "out" in kwargs else args[0]
    return _wrap_result(result, like)


def _like_factory(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """zeros_like and its family: a piece of the same size; memory formats mean nothing to a flat piece."""
    kwargs = {**kwargs, "memory_format": torch.contiguous_format} if "memory_format" in kwargs else kwargs
    return _elementwise(func, args, kwargs)


def _same_shape_view(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view or new tensor of the very same global shape; every other shape is refused."""
    tensor: RaggedDTensor = args[0]
    wanted = torch.Size(args[1])
    if wanted != tensor.shape:
        raise _refuse(func, tensor._spec, f"shape {tuple(wanted)} is not the tensor's own")
    local = tensor._local_tensor
    if func in (aten.view.default, aten._unsafe_view.default):
        return _wrap_result(local.view_as(local), tensor)
    return _wrap_result(func(local, list(local.shape), **kwargs), tensor)


def _foreach(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a foreach or fused optimizer operator on lists of pieces."""
    first = next(arg for arg in args if isinstance(arg, (list, tuple)))
    specs = [t._spec if isinstance(t, RaggedDTensor) else None for t in first]

    def localise(arg: Any) -> Any:
        if isinstance(arg, (list, tuple)) and len(arg) == len(specs):
            return [_localise(func, value, spec) for value, spec in zip(arg, specs, strict=True)]
        if isinstance(arg, torch.Tensor) and arg.ndim == 0:
            return _localise(func, arg, None)
        return arg

    result = func(*map(localise, args), **{name: localise(value) for name, value in kwargs.items()})
    if not isinstance(result, (list, tuple)):
        return result
    return [
        _wrap_result(value, like) if isinstance(like, RaggedDTensor) else value
        for value, like in zip(result, first, strict=True)
    ]


def _reduced(local: torch.Tensor, tensor: RaggedDTensor, partial: Partial) -> DTensor:
    """A 0-d stock DTensor: Partial over the ragged axis, as the tensor was on the others."""
    placements = tuple(partial if isinstance(p, RaggedShard) else p for p in tensor.placements)
    spec = make_spec(tensor.device_mesh, placements, torch.Size(()), local.dtype)
    return DTensor(local, spec, requires_grad=False)  # type: ignore[call-arg]


def _local_norm(tensor: RaggedDTensor, order: float, dtype: torch.dtype | None = None) -> DTensor:
    local = tensor._local_tensor
    if local.numel():
        value = torch.linalg.vector_norm(local, order, dtype=dtype)
    else:  # torch has no infinity norm of nothing; a piece of nothing adds nothing
        neutral = float("inf") if order == float("-inf") else 0.0
        value = torch.full((), neutral, dtype=dtype or local.dtype, device=local.device)
    return _reduced(value, tensor, NormPartial(order))


def _vector_norm(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor: RaggedDTensor = args[0]
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dims = args[2] if len(args) > 2 else kwargs.get("dim")
    keepdim = args[3] if len(args) > 3 else kwargs.get("keepdim", False)
    if (dims is not None and len(dims) not in (0, tensor.ndim)) or keepdim:
        raise _refuse(func, tensor._spec, "a norm over some dims needs them whole")
    return _local_norm(tensor, float(order), kwargs.get("dtype"))


def _foreach_norm(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    order = float(args[1] if len(args) > 1 else kwargs.get("ord", 2))
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    return [
        _local_norm(t, order, dtype)
        if isinstance(t, RaggedDTensor)
        else torch.linalg.vector_norm(t, order, dtype=dtype)
        for t in args[0]
    ]


def _sum(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor: RaggedDTensor = args[0]
    return _reduced(func(tensor._local_tensor, **kwargs), tensor, Partial("sum"))


def _mean(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor: RaggedDTensor = args[0]
    total = torch.sum(tensor._local_tensor, **kwargs) / tensor.numel()
    return _reduced(total, tensor, Partial("sum"))


def _extremum(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor: RaggedDTensor = args[0]
    largest = func is aten.max.default
    local = tensor._local_tensor
    if local.numel():
        value = func(local)
    else:
        info = torch.finfo(local.dtype) if local.is_floating_point() else torch.iinfo(local.dtype)
        value = torch.full((), info.min if largest else info.max, dtype=local.dtype, device=local.device)
    return _reduced(value, tensor, Partial("max" if largest else "min"))


def _equal(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """torch.equal: true only if all ranks' pieces are equal. A collective."""
    left, right = args
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    like = _first_ragged(args)
    assert like is not None
    same = torch.equal(*(_localise(func, side, like._spec) for side in args))
    verdict = torch.tensor(int(same), device=like._local_tensor.device)
    axis, _ = ragged_axis(like.placements)
    dist.all_reduce(verdict, dist.ReduceOp.MIN, group=like.device_mesh.get_group(axis))
    return bool(verdict.item())


_LISTED: dict[torch._ops.OpOverload, Rule] = {
    **dict.fromkeys(
        (
            aten.alias.default,
            aten.copy_.default,
            aten.detach.default,
            aten.fill_.Scalar,
            aten.fill_.Tensor,
            aten.zero_.default,
            aten.is_pinned.default,
        ),
        _elementwise,
    ),
    **dict.fromkeys(
        (
            aten._to_copy.default,
            aten.clone.default,
            aten.empty_like.default,
            aten.full_like.default,
            aten.ones_like.default,
            aten.zeros_like.default,
        ),
        _like_factory,
    ),
    **dict.fromkeys(
        (
            aten.view.default,
            aten._unsafe_view.default,
            aten.new_empty.default,
            aten.new_zeros.default,
            aten.new_ones.default,
        ),
        _same_shape_view,
    ),
    **dict.fromkeys(
        (
            aten._fused_adam_.default,
            aten._fused_adam_.tensor_lr,
            aten._fused_adamw_.default,
            aten._fused_adamw_.tensor_lr,
            aten._fused_adagrad_.default,
            aten._fused_sgd_.default,
            aten._fused_sgd_.tensor_lr,
        ),
        _foreach,
    ),
    aten.linalg_vector_norm.default: _vector_norm,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten.sum.default: _sum,
    aten.mean.default: _mean,
    aten.max.default: _extremum,
    aten.min.default: _extremum,
    aten.equal.default: _equal,
}

_FOREACH_REDUCTIONS = ("_foreach_norm", "_foreach_max", "_foreach_powsum")


def rule_of(func: torch._ops.OpOverload) -> Rule:
    """The function that carries out an operator on ragged tensors; one that raises if there is none."""
    listed = _LISTED.get(func)
    if listed is not None:
        return listed
    name = func._schema.name.removeprefix("aten::")
    if name.startswith("_foreach_") and name not in _FOREACH_REDUCTIONS:
        return _foreach
    if torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags:
        return _elementwise
    return _unsupported


def _unsupported(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    like = _first_ragged((*args, *kwargs.values()))
    raise _refuse(func, like._spec if like is not None else None, "it needs more than each element alone")
