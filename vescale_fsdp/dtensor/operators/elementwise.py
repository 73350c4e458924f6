"""Rules of elementwise operators, lists of tensors, copies and views.

These operators run on the flat pieces, and the result is cut like the input. If all tensors are cut alike, nothing is
sent; `combining` brings other tensors to the pieces. Pending sums (Partial on another mesh
axis) are reduced first, because most elementwise operators are not linear.

A view that is one run of the flattened tensor is cut where the tensor is cut, and shares the piece's memory: a write to
the view is a write to the tensor::

    shape (4, 3), pieces [0, 5) [5, 12)     x.view(2, 6)   elements [0, 12)   pieces of 5, 7
                                            x[1]           elements [3, 6)    pieces of 2, 1
                                            x[2:4]         elements [6, 12)   pieces of 0, 6

The whole tensor in another dtype (``view_as_real``, ``view_as_complex``) shares memory too, if each element of the
view consists of elements of one rank.

torch computes the run: the operator runs on a meta tensor, and the result's storage offset is the start of the run.
Other views, such as columns and transposes, are views of a gathered copy, and may only be read (`gathered_views`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from vescale_fsdp.collectives.operations import all_reduce_in_place
from vescale_fsdp.collectives.slice_exchange import wait_for
from vescale_fsdp.dtensor.meeting import Meets, reducing
from vescale_fsdp.dtensor.operators import combining, gathered_views
from vescale_fsdp.dtensor.operators.arguments import (
    Unlike,
    bind,
    check_not_resized,
    check_written,
    first_ragged,
    is_partial,
    keep_grad_placed,
    localize,
    refuse,
    refuse_written,
    wrap_result,
    written_names,
)
from vescale_fsdp.dtensor.operators.replicated_results import STOCK, replicated
from vescale_fsdp.dtensor.ragged_dtensor import Args, Kwargs, Op, RaggedDTensor
from vescale_fsdp.dtensor.spec import inner_box, make_spec, piece_of, ragged_axis, replaced
from vescale_fsdp.layout.geometry import numel_of
from vescale_fsdp.layout.placement import RaggedShard
from vescale_fsdp.torch_modes import NULL_CONTEXT, is_traced
from vescale_fsdp.torch_private import local_of, piece_in

aten = torch.ops.aten


def elementwise(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Run an elementwise operator on the pieces. The result has the placements of the first ragged argument."""
    like = first_ragged((*args, *kwargs.values()))
    assert like is not None  # torch calls a rule only if an argument is ragged
    if func._schema.is_mutable:  # in-place and ``out=`` forms, which return the tensors that they wrote to
        named = bind(func, args, kwargs)
        written = [named[name] for name in written_names(func) if name in named]
        try:
            check_written(func, named, like)
            check_not_resized(func, named, like)
            _on_pieces(func, args, kwargs, like)
        except Unlike:
            _write_combined(func, args, kwargs, written)
        return written[0] if len(written) == 1 else tuple(written)
    if is_partial(like):
        args, kwargs = combining.without_sums(args, kwargs)
        like = first_ragged((*args, *kwargs.values()))
        assert like is not None
    try:
        return wrap_result(func, _on_pieces(func, args, kwargs, like), like)
    except Unlike:
        args, kwargs = combining.without_sums(args, kwargs)
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        home = combining.home_of(tensors)
        if home is None:
            return combining.on_replicas(func, args, kwargs)
        return wrap_result(func, combining.on_home(func, args, kwargs, home), home)


def _on_pieces(func: Op, args: Args, kwargs: Kwargs, like: RaggedDTensor) -> Any:
    """Run an operator with each tensor replaced by this rank's piece, and return its plain result."""
    return func(
        *(localize(func, arg, like) for arg in args),
        **{name: localize(func, value, like) for name, value in kwargs.items()},
    )


def _write_combined(func: Op, args: Args, kwargs: Kwargs, written: Sequence[Any]) -> None:
    """Run an operator that writes, after its other arguments were brought to what it writes to."""
    home = written[0]
    same = all(
        isinstance(other, type(home)) and other._spec.placements == home._spec.placements for other in written
    )
    if not same or any(other.shape != home.shape for other in written):
        raise refuse(func, first_ragged(written), "it writes to tensors that are cut differently")
    if isinstance(home, RaggedDTensor):
        combining.on_home(func, args, kwargs, home)
    else:
        combining.on_replicas(func, args, kwargs, home)


def like_factory(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Run copies and the family of zeros_like. The result is cut like the input, and its piece is contiguous."""
    tensor: RaggedDTensor = args[0]
    # A format such as channels_last needs 4 dims, and a piece has one.
    kwargs = {**kwargs, "memory_format": torch.contiguous_format} if "memory_format" in kwargs else kwargs
    return wrap_result(func, func(piece_in(tensor), *args[1:], **kwargs), tensor)


def new_factory(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Run new_zeros and its family. The result is ragged if it has the tensor's shape, else replicated."""
    tensor: RaggedDTensor = args[0]
    shape, local = torch.Size(args[1]), piece_in(tensor)
    if func is aten.new_empty_strided.default:  # drop the strides, which have no meaning for a flat piece
        func, args = aten.new_empty.default, (*args[:2], *args[3:])
    if shape == tensor.shape:
        return wrap_result(func, func(local, list(local.shape), *args[2:], **kwargs), tensor)
    if func is aten.new_empty.default:
        func = aten.new_zeros.default  # uninitialized memory would differ between ranks
    return replicated(func(local, list(shape), *args[2:], **kwargs), tensor)


def masked_put(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Run ``x[mask] = value`` with a single value, and a mask of the shape and placements of x."""
    named = bind(func, args, kwargs)
    tensor, indices, value = named["self"], named["indices"], named["values"]
    mask = indices[0] if len(indices) == 1 else None
    is_mask = isinstance(mask, RaggedDTensor) and mask.dtype == torch.bool and mask.shape == tensor.shape
    if not is_mask or value.ndim or named.get("accumulate", False) or not isinstance(tensor, RaggedDTensor):
        raise refuse(func, first_ragged((tensor, *indices, value)), "indexing other than x[mask] = number")
    return elementwise(aten.masked_fill_.Tensor, (tensor, mask, value), {})


def flat_view(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Return a view, or several views for operators such as ``split``.

    Views that are each one run of the flattened tensor are ragged. All others are views of a gathered copy.
    """
    tensor: RaggedDTensor = args[0]
    if tensor.requires_grad:
        keep_grad_placed(tensor)
    # On the meta device, because only the views' offsets, shapes and strides are used.
    views = func(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), *args[1:], **kwargs)
    if isinstance(views, (list, tuple)):
        found = [_view_of(func, tensor, view) for view in views]
        if None not in found:
            return type(views)(found)
    else:
        one = _view_of(func, tensor, views)
        if one is None and func is aten.expand.default:
            one = _expanded(tensor, views)
        if one is not None:
            return one
    return gathered_views.view_of_copy(func, args, kwargs)


def _view_of(func: Op, tensor: RaggedDTensor, view: torch.Tensor) -> RaggedDTensor | None:
    """Return a ragged view of ``tensor``; None if the view is not one run of the tensor's elements.

    Args:
        view: the same view of a contiguous meta tensor of the global shape.
    """
    if view.is_conj() or view.is_neg() or not view.is_contiguous():
        return None
    if view.dtype != tensor.dtype:
        found = _view_as(tensor, view)
        if found is None:
            return None
    elif view.shape == tensor.shape:
        local = piece_in(tensor)
        # Allowed under any placements, because the piece stays the same.
        found = wrap_result(func, local.view_as(local), tensor)
    elif not view.ndim or inner_box(tensor._spec).sizes != tuple(tensor.shape):
        return None
    else:
        start = int(view.storage_offset())
        stop = start + view.numel()
        axis, placement = ragged_axis(tensor.placements)
        lengths = placement.piece_lengths(tensor.shape).within(start, stop)
        cut = RaggedShard.from_piece_numels(view.shape, lengths)
        own = piece_of(tensor._spec)
        # The view may begin or end on another rank, so its edges are moved into this rank's piece.
        first, last = (min(max(edge, own.start), own.stop) - own.start for edge in (start, stop))
        found = RaggedDTensor.wrap(
            piece_in(tensor).view(-1)[first:last],
            make_spec(tensor.device_mesh, replaced(tensor.placements, axis, cut), view.shape, tensor.dtype),
        )
    if tensor.is_expanded:
        found.is_expanded = True
    return found


def _view_as(tensor: RaggedDTensor, view: torch.Tensor) -> RaggedDTensor | None:
    """Return the whole tensor in another dtype, such as ``view_as_real(x)``; None if it must be gathered.

    Each element of the view must consist of elements of one rank.
    """
    kept = min(
        tensor.ndim, view.ndim - (view.ndim == tensor.ndim)
    )  # leading dims that the view does not change
    inner, (axis, placement) = inner_box(tensor._spec).sizes, ragged_axis(tensor.placements)
    lengths = placement.piece_lengths(inner)
    size, view_size = tensor.dtype.itemsize, view.dtype.itemsize
    if (
        tensor.numel() * size != view.numel() * view_size  # a view of a part
        or any(type(p) is Shard and p.dim >= kept for p in tensor.placements)
        or any(numel * size % view_size for numel in lengths.distinct)
    ):
        return None
    cut = RaggedShard.from_piece_numels(
        (*inner[:kept], *view.shape[kept:]), lengths.map(lambda numel: numel * size // view_size)
    )
    spec = make_spec(tensor.device_mesh, replaced(tensor.placements, axis, cut), view.shape, view.dtype)
    return RaggedDTensor.wrap(piece_in(tensor).view(-1).view(view.dtype), spec)


def _expanded(tensor: RaggedDTensor, view: torch.Tensor) -> RaggedDTensor | None:
    """Return the result of ``expand`` with every row on the rank that owns it; None if ranks own parts of rows.

    The backward of a sum over rows expands a gradient like this. The elements are copies, so they may not be written;
    torch refuses writes to expanded tensors, too.
    """
    spec = tensor._spec
    if is_partial(tensor) or not view.numel() or inner_box(spec).sizes != tuple(tensor.shape):
        return None
    axis, placement = ragged_axis(spec.placements)
    lengths = placement.piece_lengths(tensor.shape)
    shape = (1,) * (view.ndim - tensor.ndim) + tuple(tensor.shape)
    kept = next((d for d, (n, m) in enumerate(zip(view.shape, shape, strict=True)) if n != m), 0)
    rows, out_rows = numel_of(shape[kept:]), numel_of(view.shape[kept:])
    if any(numel % rows for numel in lengths.distinct):
        return None
    cut = RaggedShard.from_piece_numels(view.shape, lengths.map(lambda numel: numel // rows * out_rows))
    own = piece_in(tensor).reshape(-1, *shape[kept:])
    local = own.expand(own.shape[0], *view.shape[kept:]).reshape(-1)
    found = RaggedDTensor.wrap(
        local, make_spec(spec.mesh, replaced(tensor.placements, axis, cut), view.shape, tensor.dtype)
    )
    found.is_expanded = True
    return found


# -- lists ----------------------------------------------------------------------------------------------

# These run in C, in a tenth of the time: they are called for every tensor of every call in an optimizer's step.
_RAGGED = {RaggedDTensor}
_spec, _placements, _is_partial = (
    attrgetter("_spec"),
    attrgetter("_spec.placements"),
    methodcaller("is_partial"),
)


def foreach(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Run a foreach or fused optimizer operator on lists of pieces. Lists may contain ragged and other tensors."""
    named = bind(func, args, kwargs)
    lists = [
        v for v in named.values() if isinstance(v, (list, tuple)) and v and isinstance(v[0], torch.Tensor)
    ]
    length = len(lists[0])

    def column(index: int) -> Iterator[Any]:
        """Return the items at one index of all lists of the call's length."""
        return (values[index] for values in lists if len(values) == length)

    # For each index in the lists, a ragged tensor at this index, or None. In the usual case all tensors of the first
    # list are ragged, and no other list has to be searched.
    likes: list[RaggedDTensor | None]
    if set(map(type, lists[0])) == _RAGGED:
        likes = list(lists[0])
    else:
        likes = [first_ragged(column(index)) for index in range(length)]
    stock = {
        index
        for index, like in enumerate(likes)
        if like is None and any(isinstance(value, DTensor) for value in column(index))
    }
    if stock:
        return _separate_calls(func, args, kwargs, stock, length)
    try:
        _check_lists_written(func, named, likes)
    except Unlike:
        return _write_stock(func, args, kwargs, length)
    some_ragged = first_ragged(likes)

    def local(value: Any) -> Any:
        """Return an argument with its ragged tensors replaced by pieces."""
        if isinstance(value, (list, tuple)) and len(value) == length:
            return _local_list(func, value, likes)
        if isinstance(value, RaggedDTensor):
            raise refuse(func, value, "one ragged tensor is combined with a list of tensors")
        if isinstance(value, DTensor) and some_ragged is not None:
            return localize(func, value, some_ragged)
        return value

    try:
        result = func(*map(local, args), **{name: local(value) for name, value in kwargs.items()})
    except Unlike:
        if not func._schema.is_mutable:
            likes = [
                None if like is None else _home(func, list(column(index))) for index, like in enumerate(likes)
            ]
        pairs = [
            pair for values in lists if len(values) == length for pair in zip(values, likes, strict=True)
        ]
        pieces = iter(combining.brought(func, pairs))

        def combined(value: Any) -> Any:
            """Return an argument as `local` does, with the next pieces in place of a list."""
            is_list = isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor)
            return [next(pieces) for _ in value] if is_list and len(value) == length else local(value)

        result = func(*map(combined, args), **{name: combined(value) for name, value in kwargs.items()})
    if not isinstance(result, (list, tuple)):  # in-place operators return None
        return result
    return [
        value if like is None else wrap_result(func, value, like)
        for value, like in zip(result, likes, strict=True)
    ]


def _home(func: Op, values: list[Any]) -> RaggedDTensor:
    """Return the ragged tensor at one index of the lists that has the shape of the result."""
    home = combining.home_of([value for value in values if isinstance(value, torch.Tensor)])
    if home is None:
        raise refuse(
            func,
            first_ragged(values),
            "tensors of a list broadcast to a shape that none of them has",
            todo="combine these tensors one by one",
        )
    return home


def _write_stock(func: Op, args: Args, kwargs: Kwargs, length: int) -> Any:
    """Run a call that writes ragged tensors to stock DTensors of the first list."""
    homes = {index: home for index, home in enumerate(args[0]) if type(home) in STOCK}
    if not homes:  # it writes to stock DTensors of another list
        raise refuse_written(func, first_ragged(args[0]), "lists")

    def is_list(value: Any) -> bool:
        return isinstance(value, (list, tuple)) and len(value) == length

    lists = [value for value in (*args, *kwargs.values()) if is_list(value)]
    arrived = iter(
        combining.as_stock(func, [(v[index], home) for v in lists for index, home in homes.items()])
    )

    def brought(value: Any) -> Any:
        if not is_list(value):
            return value
        return [next(arrived) if index in homes else item for index, item in enumerate(value)]

    return func(*map(brought, args), **{name: brought(value) for name, value in kwargs.items()})


def _separate_calls(func: Op, args: Args, kwargs: Kwargs, stock: set[int], length: int) -> Any:
    """Run a call whose lists contain stock DTensors as two calls: torch runs the stock DTensors, then the rest runs.

    Args:
        stock: indices in the lists with a stock DTensor and no ragged tensor.
        length: length of the lists.
    """

    def call_on(indices: list[int]) -> Any:
        def some(value: Any) -> Any:
            """Return the items of a list at ``indices``; return another argument unchanged."""
            is_list = isinstance(value, (list, tuple)) and len(value) == length
            return [value[index] for index in indices] if is_list else value

        return func(*map(some, args), **{name: some(value) for name, value in kwargs.items()})

    order = [*sorted(stock), *(index for index in range(length) if index not in stock)]
    results = [call_on(order[: len(stock)]), call_on(order[len(stock) :])]
    if not all(isinstance(result, (list, tuple)) for result in results):  # in-place operators return None
        return results[0]
    by_index = dict(zip(order, [*results[0], *results[1]], strict=True))
    return [by_index[index] for index in range(length)]


def _local_list(func: Op, values: Any, likes: list[RaggedDTensor | None]) -> list[Any]:
    """Return a list's tensors as pieces, each to be combined with the piece of the ragged tensor in ``likes``."""
    if values and not isinstance(values[0], torch.Tensor):  # one scalar per tensor
        return values  # type: ignore[no-any-return]
    # The usual case is fast: gradients and states share the spec objects of their parameters, so comparing identities
    # is enough.
    all_ragged = set(map(type, values)) == _RAGGED == set(map(type, likes))
    if all_ragged and all(map(operator.is_, map(_spec, values), map(_spec, likes))):
        return list(map(piece_in, values))
    return [
        item if like is None else localize(func, item, like) for item, like in zip(values, likes, strict=True)
    ]


def _check_lists_written(func: Op, named: dict[str, Any], likes: list[RaggedDTensor | None]) -> None:
    """Raise for pending sums, and for lists in which a ragged value would be written to a tensor that is not ragged."""
    ragged = [like for like in likes if like is not None]
    if any(map(_is_partial, chain.from_iterable(map(_placements, ragged)))):
        raise refuse(func, next(filter(is_partial, ragged)), "a tensor of the list has pending sums")
    for name in written_names(func):
        written = named.get(name)
        if not isinstance(written, (list, tuple)) or len(written) != len(likes):
            continue
        if all(map(operator.is_, written, likes)):  # fast, and the usual case: every written tensor is ragged
            continue
        for item, like in zip(written, likes, strict=True):
            # Step counters are plain 0-d tensors, which every rank updates in the same way.
            is_counter = isinstance(item, torch.Tensor) and item.ndim == 0 and not isinstance(item, DTensor)
            if like is not None and not is_counter and item is not like:
                check_written(func, {name: item}, like)


def non_finite_check(func: Op, args: Args, kwargs: Kwargs) -> None:
    """Run GradScaler's check: unscale the pieces, and set ``found_inf`` on all ranks if any piece has inf or nan."""
    tensors, found_inf, inverse_scale = args
    func([local_of(t) for t in tensors], found_inf, inverse_scale)
    # Replicas have equal gradients, so only axes that cut a tensor need a collective.
    cut_axes: dict[DeviceMesh, set[int]] = {}
    for t in tensors:
        if isinstance(t, DTensor):
            axes = {axis for axis, p in enumerate(t.placements) if not p.is_replicate()}
            cut_axes.setdefault(t.device_mesh, set()).update(axes)
    for mesh, axes in cut_axes.items():
        # Sorted, so that all ranks run the collectives in the same order.
        groups = [mesh.get_group(axis) for axis in sorted(axes)]
        # No meeting: a gradient scaler runs this in every step.
        with NULL_CONTEXT if is_traced(found_inf) else reducing(groups, str(func), Meets.NEVER):
            for group in groups:
                wait_for(all_reduce_in_place(found_inf, dist.ReduceOp.MAX, group))
