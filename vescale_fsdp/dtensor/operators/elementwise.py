"""Rules of operators that need each element alone: on single tensors, on lists, and as fused optimizer steps.

They run on the flat pieces, and the result is cut like the input. Sums that are not done yet (Partial on
another mesh axis) are done first, because most elementwise operators are not linear.
"""

from __future__ import annotations

import operator
from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from vescale_fsdp.collectives import all_reduce_in_place, wait_for
from vescale_fsdp.dtensor.operators.arguments import (
    bind,
    check_not_resized,
    check_written,
    first_ragged,
    is_partial,
    localise,
    refuse,
    summed,
    wrap_result,
    written_names,
)
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor
from vescale_fsdp.dtensor.spec import inner_box, make_spec, piece_of, ragged_axis
from vescale_fsdp.layout.placement import RaggedShard
from vescale_fsdp.torch_private import local_of, piece_in

aten = torch.ops.aten


def elementwise(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on the pieces; the result keeps the placement."""
    like = first_ragged((*args, *kwargs.values()))
    assert like is not None
    if func._schema.is_mutable:  # in-place and ``out=`` forms: what was written comes back itself
        named = bind(func, args, kwargs)
        check_written(func, named, like)
        check_not_resized(func, named, like)
        _on_pieces(func, args, kwargs, like)
        written = [named[name] for name in written_names(func) if name in named]
        return written[0] if len(written) == 1 else tuple(written)
    if is_partial(like):
        args = tuple(summed(arg) for arg in args)
        kwargs = {name: summed(value) for name, value in kwargs.items()}
        like = first_ragged((*args, *kwargs.values()))
        assert like is not None
    return wrap_result(func, _on_pieces(func, args, kwargs, like), like)


def _on_pieces(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], like: RaggedDTensor
) -> Any:
    return func(
        *(localise(func, arg, like) for arg in args),
        **{name: localise(func, value, like) for name, value in kwargs.items()},
    )


def like_factory(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copies and zeros_like's family: a piece of the same size, in the one memory format a flat piece has."""
    tensor: RaggedDTensor = args[0]
    kwargs = {**kwargs, "memory_format": torch.contiguous_format} if "memory_format" in kwargs else kwargs
    return wrap_result(func, func(tensor._local_tensor, *args[1:], **kwargs), tensor)


def masked_put(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x[mask] = value`` with a mask of x's own shape and cut, and one value for all."""
    named = bind(func, args, kwargs)
    tensor, indices, value = named["self"], named["indices"], named["values"]
    mask = indices[0] if len(indices) == 1 else None
    whole = isinstance(mask, RaggedDTensor) and mask.dtype == torch.bool and mask.shape == tensor.shape
    if not whole or value.ndim or named.get("accumulate", False) or not isinstance(tensor, RaggedDTensor):
        like = first_ragged((tensor, *indices, value))
        raise refuse(func, like._spec if like is not None else None, "indexing other than x[mask] = number")
    return elementwise(aten.masked_fill_.Tensor, (tensor, mask, value), {})


def new_factory(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """new_zeros and its family: ragged for the tensor's own shape, replicated for others."""
    tensor: RaggedDTensor = args[0]
    shape, local = torch.Size(args[1]), tensor._local_tensor
    if func is aten.new_empty_strided.default:  # a piece is flat, and what is replicated may lie as it likes
        func, args = aten.new_empty.default, (*args[:2], *args[3:])
    if shape == tensor.shape:
        return wrap_result(func, func(local, list(local.shape), *args[2:], **kwargs), tensor)
    if func is aten.new_empty.default:
        func = aten.new_zeros.default  # what happens to lie in memory would differ between the ranks
    full = func(local, list(shape), *args[2:], **kwargs)
    mesh = tensor.device_mesh
    return DTensor(full, make_spec(mesh, [Replicate()] * mesh.ndim, shape, full.dtype), requires_grad=False)  # type: ignore[call-arg]


def foreach(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a foreach or fused optimizer operator on lists of pieces; lists may mix ragged and others."""
    named = bind(func, args, kwargs)
    lists = [v for v in named.values() if isinstance(v, (list, tuple)) and v and _is_tensor(v[0])]
    length = len(lists[0])
    likes = _likes(lists, length)
    stock = {
        i for i, like in enumerate(likes) if like is None and any(map(_is_dtensor, _at(lists, length, i)))
    }
    if stock:
        return _apart(func, args, kwargs, stock, length)
    _check_lists_written(func, named, likes)
    some = first_ragged(likes)

    def local(value: Any) -> Any:
        if isinstance(value, (list, tuple)) and len(value) == length:
            return _local_list(func, value, likes)
        if isinstance(value, RaggedDTensor):
            raise refuse(func, value._spec, "one ragged tensor stands beside a list of tensors")
        return localise(func, value, some) if isinstance(value, DTensor) and some is not None else value

    result = func(*map(local, args), **{name: local(value) for name, value in kwargs.items()})
    if not isinstance(result, (list, tuple)):
        return result
    return [
        value if like is None else wrap_result(func, value, like)
        for value, like in zip(result, likes, strict=True)
    ]


# Asked for every tensor of every call of an optimizer's step: what runs in C takes a tenth of the time.
_RAGGED = {RaggedDTensor}
_spec, _placements, _sums = attrgetter("_spec"), attrgetter("_spec.placements"), methodcaller("is_partial")


def _apart(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], stock: set[int], length: int
) -> Any:
    """A call on lists in which some tensors are torch's own DTensors: torch does these, beside ours."""

    def of(places: list[int]) -> Any:
        def some(value: Any) -> Any:
            is_list = isinstance(value, (list, tuple)) and len(value) == length
            return [value[place] for place in places] if is_list else value

        return func(*map(some, args), **{name: some(value) for name, value in kwargs.items()})

    order = [*sorted(stock), *(place for place in range(length) if place not in stock)]
    results = [of(order[: len(stock)]), of(order[len(stock) :])]
    if not all(isinstance(result, (list, tuple)) for result in results):
        return results[0]
    found = dict(zip(order, [*results[0], *results[1]], strict=True))
    return [found[place] for place in range(length)]


def _local_list(func: torch._ops.OpOverload, values: Any, likes: list[RaggedDTensor | None]) -> list[Any]:
    if values and not _is_tensor(values[0]):  # a scalar for each
        return values  # type: ignore[no-any-return]
    # The usual case: gradients and states bear their parameters' very specs.
    ragged = set(map(type, values)) == _RAGGED == set(map(type, likes))
    if ragged and all(map(operator.is_, map(_spec, values), map(_spec, likes))):
        return list(map(piece_in, values))
    return [
        item if like is None else localise(func, item, like) for item, like in zip(values, likes, strict=True)
    ]


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _is_dtensor(value: object) -> bool:
    return isinstance(value, DTensor)


def _at(lists: list[Any], length: int, place: int) -> Any:
    return (values[place] for values in lists if len(values) == length)


def _likes(lists: list[Any], length: int) -> list[RaggedDTensor | None]:
    """For every place in the lists, a ragged tensor that stands there, if any does."""
    first = lists[0]
    if set(map(type, first)) == _RAGGED:  # the usual case: parameters' own, or their gradients, come first
        return list(first)
    return [first_ragged(_at(lists, length, place)) for place in range(length)]


def _check_lists_written(
    func: torch._ops.OpOverload, named: dict[str, Any], likes: list[RaggedDTensor | None]
) -> None:
    """Refuse lists in which a ragged value would be written to a tensor that is not ragged."""
    ragged = [like for like in likes if like is not None]
    if any(map(_sums, chain.from_iterable(map(_placements, ragged)))):
        unsummed = next(filter(is_partial, ragged))
        raise refuse(func, unsummed._spec, "a tensor of the list holds sums that are not done")
    for name in written_names(func):
        written = named.get(name)
        if not isinstance(written, (list, tuple)) or len(written) != len(likes):
            continue
        if all(map(operator.is_, written, likes)):
            continue
        for item, like in zip(written, likes, strict=True):
            # Step counters are 0-d and plain on every rank; each rank counts for itself.
            plain_scalar = _is_tensor(item) and item.ndim == 0 and not isinstance(item, DTensor)
            if like is not None and not plain_scalar and (item is not like):
                check_written(func, {name: item}, like)


def non_finite_check(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """GradScaler's check: unscale the pieces, and let all ranks know if any of them met inf or nan."""
    tensors, found_inf, inverse_scale = args
    func([local_of(t) for t in tensors], found_inf, inverse_scale)
    cut_axes: dict[DeviceMesh, set[int]] = {}
    for t in tensors:
        if isinstance(t, DTensor):
            axes = {axis for axis, p in enumerate(t.placements) if not p.is_replicate()}
            cut_axes.setdefault(t.device_mesh, set()).update(axes)
    for mesh, axes in cut_axes.items():
        for axis in sorted(axes):
            wait_for(all_reduce_in_place(found_inf, dist.ReduceOp.MAX, mesh.get_group(axis)))


def flat_view(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view, or several as of ``split``, each of one run of the tensor's flat order."""
    tensor: RaggedDTensor = args[0]
    found = func(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), *args[1:], **kwargs)
    if isinstance(found, (list, tuple)):
        return type(found)(_view_of(func, tensor, view) for view in found)
    return _view_of(func, tensor, found)


def _view_of(func: torch._ops.OpOverload, tensor: RaggedDTensor, view: torch.Tensor) -> RaggedDTensor:
    """The view that lies in a contiguous tensor of the global shape as ``view``, which has no values, does."""
    if view.is_conj() or view.is_neg() or view.dtype != tensor.dtype:
        raise refuse(func, tensor._spec, "such a view shows other values than those that are stored")
    if view.shape == tensor.shape and view.is_contiguous():
        local = tensor._local_tensor
        return wrap_result(func, local.view_as(local), tensor)  # type: ignore[no-any-return]
    _check_run(func, tensor, view)
    start = int(view.storage_offset())
    stop = start + view.numel()
    axis, placement = ragged_axis(tensor.placements)
    cut = RaggedShard.from_piece_numels(view.shape, placement.piece_lengths(tensor.shape).within(start, stop))
    placements = [cut if other == axis else p for other, p in enumerate(tensor.placements)]
    own = piece_of(tensor._spec)
    first, last = (min(max(edge, own.start), own.stop) - own.start for edge in (start, stop))
    return RaggedDTensor.wrap(
        tensor._local_tensor.view(-1)[first:last],
        make_spec(tensor.device_mesh, placements, view.shape, tensor.dtype),
    )


def _check_run(func: torch._ops.OpOverload, tensor: RaggedDTensor, view: torch.Tensor) -> None:
    """Refuse a view that is not one run of the tensor's elements."""
    if not view.ndim:
        why, todo = "0-d tensors are not ragged", "take a range of one element, x[i : i + 1]"
    elif not view.is_contiguous():
        why, todo = "its elements do not lie side by side, as those of whole rows do", None
    elif inner_box(tensor._spec).sizes != tuple(tensor.shape):
        why, todo = "another mesh axis cuts the tensor's dims", None
    else:
        return
    raise refuse(func, tensor._spec, f"a view of shape {tuple(view.shape)}: {why}", todo)
