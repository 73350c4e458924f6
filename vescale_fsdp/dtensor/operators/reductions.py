"""Rules of operators along dims: reductions, softmax, cumulative sums, sorting, and comparisons of whole tensors.

    over all dims     each rank computes the result of its piece; all results are gathered and combined into a
                      replicated DTensor. So a nan on one rank gives nan on all ranks (an all-reduce with MAX may lose
                      the nan)
    over whole dims   every piece contains these dims whole: each rank computes its rows, and the result is ragged
    over cut dims     reductions to one number all-reduce what each rank's boxes contribute. Those that return indices,
                      and operators such as a sort or softmax over rows that are cut in the middle, gather the tensor

No sum stays Partial: torch 2.13 adds a plain scalar to a Partial DTensor once per rank, so the next operator would
return a wrong sum (seen in cosine_embedding_loss). Norms of a finite order may stay Partial, because torch reduces
these norms correctly. So gradient clipping costs one collective for all gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from vescale_fsdp.collectives.operations import all_reduce_in_place, gathered
from vescale_fsdp.collectives.slice_exchange import wait_for
from vescale_fsdp.dtensor.meeting import Meets, one_meeting, reducing
from vescale_fsdp.dtensor.operators import combining, whole_tensors
from vescale_fsdp.dtensor.operators.arguments import (
    bind,
    first_ragged,
    is_partial,
    keep_grad_placed,
    name_of,
    refuse,
    summed,
)
from vescale_fsdp.dtensor.operators.replicated_results import replicated, with_spec
from vescale_fsdp.dtensor.ragged_dtensor import Args, Kwargs, Op, RaggedDTensor
from vescale_fsdp.dtensor.spec import inner_box, make_spec, ragged_axis, replaced
from vescale_fsdp.layout.geometry import RunLengths, numel_of
from vescale_fsdp.layout.placement import RaggedShard
from vescale_fsdp.torch_modes import NULL_CONTEXT, is_traced
from vescale_fsdp.torch_private import NormPartial, foreach_norm_of, piece_in


class _Call(NamedTuple):
    """The arguments of an operator along dims."""

    func: Op
    tensor: RaggedDTensor  # without pending sums
    dims: tuple[int, ...]  # non-negative and sorted; all dims if the caller passed none
    keepdim: bool
    options: dict[str, Any]  # all other arguments by name


def _call_of(func: Op, args: Args, kwargs: Kwargs) -> _Call:
    """Return a call's arguments, with dims checked and pending sums reduced."""
    named = bind(func, args, kwargs)
    tensor: RaggedDTensor = named.pop("self")
    defaults = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    dims = named.pop("dim", defaults.get("dim"))
    keepdim = bool(named.pop("keepdim", False))
    listed = [dims] if isinstance(dims, int) else list(dims or ())  # None means all dims
    # A dim out of range is not wrapped around, so that the check below sees it.
    positive = tuple(sorted({d % tensor.ndim if -tensor.ndim <= d < tensor.ndim else d for d in listed}))
    if positive and (positive[0] < 0 or positive[-1] >= tensor.ndim):
        raise IndexError(f"{func}: dims {listed} do not exist in shape {tuple(tensor.shape)}")  # as torch
    if tensor.requires_grad:
        keep_grad_placed(tensor)
    tensor = summed(tensor)
    return _Call(func, tensor, positive or tuple(range(tensor.ndim)), keepdim, named)


def along_dims(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Run an operator along one dim, such as softmax, a cumulative sum or a sort."""
    call = _call_of(func, args, kwargs)
    if call.tensor.numel() == 0 or not _are_whole_from(call.tensor, call.dims[0]):
        return whole_tensors.gathered(func, args, kwargs)
    return _on_rows(call)


def reduction(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Run a reduction over any dims."""
    call, name = _call_of(func, args, kwargs), name_of(func)
    if call.tensor.numel() == 0 and name in _NEED_ELEMENTS:
        raise refuse(func, call.tensor, "the tensor has no elements")
    over_all = len(call.dims) == call.tensor.ndim
    combines = not _needs_whole_tensor(call, name)
    if over_all and combines and name in _TOTALS:
        total = _TOTALS[name](call)
        # keepdim: the total has one element in each dim
        return total.view((1,) * call.tensor.ndim) if call.keepdim else total
    if not over_all and _are_whole_from(call.tensor, call.dims[0]):
        return _on_rows(call)
    if combines and name in (_OVER_ALL if over_all else _OVER_CUT):
        return _over_cut_dims(call)
    return whole_tensors.gathered(func, args, kwargs)


def _needs_whole_tensor(call: _Call, name: str) -> bool:
    """Return whether the result cannot be combined from the results of the pieces."""
    if name in ("argmax", "argmin"):
        # If another mesh axis cuts the tensor, too, an index in a piece does not give the flat position in the tensor.
        return inner_box(call.tensor._spec).sizes != tuple(call.tensor.shape)
    if name in ("linalg_vector_norm", "norm"):
        order = _order(call.options)
        # `_over_cut_dims` sums powers, which orders 0 and infinity do not allow, and starts from 0.
        return len(call.dims) < call.tensor.ndim and not 0 < order < math.inf
    # `_cut_spread` computes in float64, which would drop imaginary parts. Complex numbers have no largest, and no
    # all-reduce multiplies them.
    return name.startswith(("std", "var", "logsumexp", "prod")) and call.tensor.is_complex()


# -- over whole dims ------------------------------------------------------------------------------------


def _cut_numels(tensor: RaggedDTensor) -> tuple[tuple[int, ...], RunLengths]:
    """Return the shape that the ragged placement cuts, and the number of elements on each rank."""
    _, placement = ragged_axis(tensor.placements)
    inner = inner_box(tensor._spec).sizes
    return inner, placement.piece_lengths(inner)


def _are_whole_from(tensor: RaggedDTensor, dim: int) -> bool:
    """Return whether every rank's piece contains ``dim`` and all later dims whole."""
    inner, numels = _cut_numels(tensor)
    if inner[dim:] != tuple(tensor.shape[dim:]):  # another mesh axis cuts one of these dims
        return False
    run = numel_of(inner[dim:])
    return run > 0 and all(numel % run == 0 for numel in numels.distinct)  # run is 0 if a dim is empty


def _on_rows(call: _Call) -> Any:
    """Run the operator on this rank's piece in the shape [rows of this rank, *whole dims]; return a ragged tensor."""
    tensor, first = call.tensor, call.dims[0]
    shifted = [dim - first + 1 for dim in call.dims]
    schema = {argument.name: argument for argument in call.func._schema.arguments}
    # Some overloads take one dim, and some take a list of dims.
    takes_list = "List" in str(schema["dim"].type) or "[]" in str(schema["dim"].type)
    rows = piece_in(tensor).reshape(-1, *tensor.shape[first:])
    # torch warns about the spread of no rows, so a rank without rows computes one that it drops.
    has_none = rows.shape[0] == 0
    named = {
        **call.options,
        "self": rows.new_zeros(1, *rows.shape[1:]) if has_none else rows,
        "dim": shifted if takes_list else shifted[0],
    }
    if "keepdim" in schema:
        named["keepdim"] = call.keepdim
    result = call.func(**named)
    if isinstance(result, (list, tuple)):
        return tuple(_from_rows(call, each[:0] if has_none else each) for each in result)
    return _from_rows(call, result[:0] if has_none else result)


def _from_rows(call: _Call, rows: torch.Tensor) -> RaggedDTensor:
    """Return a ragged tensor from this rank's rows, cut between the same rows as the tensor of the call."""
    tensor, first = call.tensor, call.dims[0]
    shape = (*tensor.shape[:first], *rows.shape[1:])
    axis, _ = ragged_axis(tensor.placements)
    inner, numels = _cut_numels(tensor)
    run, row_numel = numel_of(inner[first:]), numel_of(rows.shape[1:])
    ragged = RaggedShard.from_piece_numels(
        (*inner[:first], *rows.shape[1:]), numels.map(lambda numel: numel // run * row_numel)
    )
    spec = make_spec(tensor.device_mesh, replaced(tensor.placements, axis, ragged), shape, rows.dtype)
    ref = tensor.layout_ref if shape == tuple(tensor.shape) else None
    # A result may be strided, but pieces are contiguous.
    return RaggedDTensor.wrap(rows.contiguous().view(-1), spec, layout_ref=ref)


# -- over cut dims --------------------------------------------------------------------------------------

# Dims that pieces may cut: each rank reduces its boxes into a small tensor of the result's shape, with ``keepdim``, and
# these tensors are all-reduced. The tensor itself is not sent.


def _over_cut_dims(call: _Call) -> Any:
    """Run a reduction over some dims that pieces may cut; its results are replicated."""
    result = _OVER_ALL[name_of(call.func)](call)

    def as_asked(total: torch.Tensor) -> DTensor:
        return replicated(total if call.keepdim else total.squeeze(call.dims), call.tensor)

    return tuple(map(as_asked, result)) if isinstance(result, tuple) else as_asked(result)


def _kept_shape(call: _Call) -> list[int]:
    """Return the shape of the result with ``keepdim``."""
    return [1 if dim in call.dims else size for dim, size in enumerate(call.tensor.shape)]


def _merged(
    call: _Call,
    total: torch.Tensor,
    part: Callable[[torch.Tensor, tuple[slice, ...]], torch.Tensor],
    merge: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.add,
) -> torch.Tensor:
    """Merge the reductions of this rank's boxes into ``total`` and return it.

    Args:
        call: the reduction.
        total: the neutral value of ``merge``, in the shape of the result with ``keepdim``.
        part: reduces the values of a box, with ``keepdim``. It also gets the box's place in ``total``.
        merge: combines the reductions of two boxes.
    """
    local, start = piece_in(call.tensor).reshape(-1), 0
    for box in call.tensor.boxes:
        values = local[start : start + box.numel].view(box.sizes)
        start += box.numel
        place = tuple(slice(None) if d in call.dims else at for d, at in enumerate(box.slices()))
        total[place] = merge(total[place], part(values, place))
    return total


def _all_reduced(call: _Call, total: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
    """Reduce a tensor in place over the ranks that own different parts of the call's tensor, and return it."""
    groups = _groups_of(call.tensor)
    with _meeting(groups, call.func, total):
        for group in groups:
            wait_for(all_reduce_in_place(total, op, group))
    return total


def _groups_of(tensor: RaggedDTensor) -> list[dist.ProcessGroup]:
    """Return the groups of ranks that own different parts. Replicas have equal parts, which must be counted once."""
    return [
        tensor.device_mesh.get_group(axis)
        for axis, placement in enumerate(tensor.placements)
        if not placement.is_replicate()
    ]


def _meeting(
    groups: Sequence[dist.ProcessGroup], func: Op, answer: torch.Tensor, meets: Meets = Meets.FIRST
) -> AbstractContextManager[None]:
    """Return the context in which an operator reduces ``answer``, which has the same shape on all ranks."""
    if is_traced(answer):
        return NULL_CONTEXT
    return reducing(groups, f"{func} with a result of shape {tuple(answer.shape)}", meets)


def _cut_sum(call: _Call) -> torch.Tensor:
    """Compute sum, nansum or mean."""
    local, name = piece_in(call.tensor), name_of(call.func)
    # torch sums integers in a wider dtype, and raises for their mean. The result for no elements has this dtype.
    dtype = getattr(torch, name)(local[:0], dtype=call.options.get("dtype")).dtype
    add = torch.nansum if name == "nansum" else torch.sum
    zeros = torch.zeros(_kept_shape(call), dtype=dtype, device=local.device)
    total = _merged(call, zeros, lambda values, _: add(values, call.dims, keepdim=True, dtype=dtype))
    total = _all_reduced(call, total, dist.ReduceOp.SUM)
    return total / _count(call) if name == "mean" else total


def _count(call: _Call) -> int:
    """Return the number of elements per element of the result."""
    return numel_of([call.tensor.shape[dim] for dim in call.dims])


def _cut_norm(call: _Call) -> torch.Tensor:
    """Compute a norm of finite positive order, from sums of powers."""
    dims, dtype, order = call.dims, call.options.get("dtype"), _order(call.options)

    def powers(values: torch.Tensor, _: tuple[slice, ...]) -> torch.Tensor:
        return torch.linalg.vector_norm(values, order, dim=dims, keepdim=True, dtype=dtype) ** order

    zeros = torch.linalg.vector_norm(piece_in(call.tensor).new_zeros(1), order, dtype=dtype)
    total = _merged(call, zeros.expand(_kept_shape(call)).clone(), powers)
    return _all_reduced(call, total, dist.ReduceOp.SUM) ** (1 / order)


def _cut_extreme(call: _Call, *, largest: bool) -> torch.Tensor:
    """Compute amax or amin. A nan gives nan, as in torch."""
    local = piece_in(call.tensor)
    reduce = torch.amax if largest else torch.amin
    neutral = _identity(local.dtype, largest)
    total = _merged(
        call,
        local.new_full(_kept_shape(call), neutral),
        lambda values, _: reduce(values, call.dims, keepdim=True),
        torch.maximum if largest else torch.minimum,
    )
    op = dist.ReduceOp.MAX if largest else dist.ReduceOp.MIN
    if not total.is_floating_point():  # int64, because gloo has no MAX of all integer dtypes
        return _all_reduced(call, total.to(torch.int64), op).to(total.dtype)
    # An all-reduce may lose a nan, so a second row marks where there is one.
    is_nan, mark = total.isnan(), 1.0 if largest else -1.0
    rows = torch.stack([total.masked_fill(is_nan, neutral), is_nan.to(total.dtype) * mark])
    values, marks = _all_reduced(call, rows, op).unbind()
    return values.masked_fill(marks != 0, math.nan)


def _cut_truth(call: _Call, *, every: bool) -> torch.Tensor:
    """Compute all (``every``) or any."""
    reduce = torch.all if every else torch.any
    local = piece_in(call.tensor)

    def truth(values: torch.Tensor, _: tuple[slice, ...]) -> torch.Tensor:
        return reduce(values != 0, dim=call.dims, keepdim=True).to(torch.uint8)

    total = torch.full(_kept_shape(call), int(every), dtype=torch.uint8, device=local.device)
    total = _merged(call, total, truth, torch.minimum if every else torch.maximum)
    op = dist.ReduceOp.MIN if every else dist.ReduceOp.MAX
    return _all_reduced(call, total, op).to(reduce(local[:0]).dtype)


def _cut_prod(call: _Call) -> torch.Tensor:
    """Compute prod, over one dim or over all."""
    local = piece_in(call.tensor)
    dtype = torch.prod(local[:0], dtype=call.options.get("dtype")).dtype
    ones = torch.ones(_kept_shape(call), dtype=dtype, device=local.device)

    def product(values: torch.Tensor, _: tuple[slice, ...]) -> torch.Tensor:
        for dim in call.dims:
            values = values.prod(dim, keepdim=True, dtype=dtype)
        return values

    total = _merged(call, ones, product, torch.mul)
    return _all_reduced(call, total, dist.ReduceOp.PRODUCT)


def _cut_nonzero(call: _Call) -> torch.Tensor:
    """Compute count_nonzero."""
    zeros = torch.zeros(_kept_shape(call), dtype=torch.int64, device=piece_in(call.tensor).device)
    total = _merged(call, zeros, lambda values, _: (values != 0).sum(call.dims, keepdim=True))
    return _all_reduced(call, total, dist.ReduceOp.SUM)


def _cut_spread(call: _Call, *, root: bool = False, with_mean: bool = False) -> Any:
    """Compute var or std (``root``) in float64: the mean first, then the sum of squared distances from it."""
    local, dims = piece_in(call.tensor), call.dims
    zeros = torch.zeros(_kept_shape(call), dtype=torch.float64, device=local.device)
    total = _merged(call, zeros.clone(), lambda values, _: values.double().sum(dims, keepdim=True))
    mean = _all_reduced(call, total, dist.ReduceOp.SUM) / _count(call)
    squares = _merged(
        call, zeros, lambda values, place: (values.double() - mean[place]).square().sum(dims, keepdim=True)
    )
    correction = call.options.get("correction", call.options.get("unbiased", 1))
    # The divisor is at least 0, as in torch: a correction above the count gives inf or NaN, not a negative variance.
    divisor = max(0.0, _count(call) - (1.0 if correction is None else float(correction)))
    variance = _all_reduced(call, squares, dist.ReduceOp.SUM) / divisor
    moments = (variance.sqrt() if root else variance, mean)
    results = tuple(moment.to(local.dtype) for moment in moments)
    return results if with_mean else results[0]


def _cut_log_sum_exp(call: _Call) -> torch.Tensor:
    """Compute logsumexp, relative to the largest values, so that exp does not overflow."""
    local = piece_in(call.tensor)
    largest = _cut_extreme(call, largest=True)
    base = largest.masked_fill(largest.isinf(), 0.0)  # inf - inf would be nan
    zeros = local.new_zeros(_kept_shape(call))
    total = _merged(
        call, zeros, lambda values, place: (values - base[place]).exp().sum(call.dims, keepdim=True)
    )
    return _all_reduced(call, total, dist.ReduceOp.SUM).log() + base


_OVER_CUT: dict[str, Callable[[_Call], Any]] = {
    "all": partial(_cut_truth, every=True),
    "amax": partial(_cut_extreme, largest=True),
    "amin": partial(_cut_extreme, largest=False),
    "aminmax": lambda call: (_cut_extreme(call, largest=False), _cut_extreme(call, largest=True)),
    "any": partial(_cut_truth, every=False),
    "count_nonzero": _cut_nonzero,
    "linalg_vector_norm": _cut_norm,
    "logsumexp": _cut_log_sum_exp,
    "mean": _cut_sum,
    "nansum": _cut_sum,
    "norm": _cut_norm,
    "prod": _cut_prod,
    "std": partial(_cut_spread, root=True),
    "std_mean": partial(_cut_spread, root=True, with_mean=True),
    "sum": _cut_sum,
    "var": _cut_spread,
    "var_mean": partial(_cut_spread, with_mean=True),
}
# Along a dim, max and min also return indices.
_OVER_ALL = {**_OVER_CUT, "max": _OVER_CUT["amax"], "min": _OVER_CUT["amin"]}


# -- over all dims ------------------------------------------------------------------------------------


def _gather_answers(
    answer: torch.Tensor, tensor: RaggedDTensor, func: Op, meets: Meets = Meets.FIRST
) -> torch.Tensor:
    """Gather ``answer`` from all ranks that own different parts of the tensor: [num_ranks, *answer.shape].

    Args:
        func: the operator, for `dtensor.meeting`.
        meets: which of several such calls meet.
    """
    answers, groups = answer.unsqueeze(0), _groups_of(tensor)
    with _meeting(groups, func, answer, meets):
        for group in groups:
            answers = gathered(answers, group).flatten(0, 1)
    return answers


def _identity(dtype: torch.dtype, largest: bool) -> Any:
    """Return the value that does not change a maximum (``largest``) or a minimum."""
    if dtype == torch.bool:
        return not largest
    if dtype.is_floating_point:
        return -math.inf if largest else math.inf
    return torch.iinfo(dtype).min if largest else torch.iinfo(dtype).max


def _arg_extreme(call: _Call, *, largest: bool) -> DTensor:
    """Run argmax or argmin over all dims: the first flat position of the extreme value. A nan counts as extreme."""
    tensor, local = call.tensor, piece_in(call.tensor).reshape(-1)
    no_index = torch.iinfo(torch.int64).max  # stands for the index of an empty piece
    index = torch.full((), no_index, dtype=torch.int64, device=local.device)
    value = torch.full((), _identity(local.dtype, largest), dtype=local.dtype, device=local.device)
    if local.numel():
        index = local.argmax() if largest else local.argmin()
        value, index = local[index], index + tensor.piece.start
    values, indices = (_gather_answers(each, tensor, call.func) for each in (value, index))
    best = values.max() if largest else values.min()
    hits = (values == best) | (values.isnan() & best.isnan())
    # The neutral value of an empty piece may equal the best value, but an empty piece has no index.
    return replicated(indices[hits & (indices != no_index)].min(), tensor)


# -- norms --------------------------------------------------------------------------------------------


def _order(options: dict[str, Any]) -> float:
    """Return the order of a norm, which ``linalg_vector_norm`` calls ord and ``norm`` calls p; 2 by default."""
    order = options.get("ord", options.get("p", 2))
    return 2.0 if order is None else float(order)


def _local_norm(local: torch.Tensor, order: float, dtype: torch.dtype | None) -> torch.Tensor:
    """Return the norm of a piece. For an empty piece, return a value that does not change the norm of all pieces."""
    if local.numel() or 0 <= order < math.inf:
        return torch.linalg.vector_norm(local, order, dtype=dtype)
    # torch raises for these norms of an empty tensor. 0 does not change a largest magnitude. inf does not change a
    # smallest one, nor a sum of negative powers.
    return torch.full((), 0.0 if order > 0 else math.inf, dtype=dtype or local.dtype, device=local.device)


def _local_norms(
    pieces: Sequence[torch.Tensor], order: float, dtype: torch.dtype | None
) -> list[torch.Tensor]:
    """Return the `_local_norm` of each of several pieces of one dtype, computed in one kernel."""
    if 0 <= order < math.inf:
        return list(foreach_norm_of(list(pieces), order, dtype))
    # The kernel raises for these norms of an empty tensor, so it gets the other pieces only.
    filled = [piece for piece in pieces if piece.numel()]
    norms = iter(foreach_norm_of(filled, order, dtype) if filled else ())
    return [next(norms) if piece.numel() else _local_norm(piece, order, dtype) for piece in pieces]


def _norm_of_norms(norms: torch.Tensor, order: float) -> torch.Tensor:
    """Return the norm of the whole from the norms of its parts: [num_parts, ..] -> [..]."""
    if order == 0:
        return norms.sum(0)  # a norm of order 0 is the number of elements that are not zero
    return torch.linalg.vector_norm(norms, order, dim=0)


def _pending_norms(
    norms: Sequence[torch.Tensor], like: RaggedDTensor, order: float, meets: Meets = Meets.FIRST
) -> list[DTensor]:
    """Return the norms of tensors cut like ``like`` as DTensors that are still Partial.

    The next operator on the norms runs the collective, so clipping a hundred gradients costs one collective. This is
    safe, because every operator first redistributes torch's NormPartial of a finite order to Replicate, unlike a
    Partial sum (verified on torch 2.13 for adding scalars, powers, logarithms and reductions).
    """
    placements = [p if p.is_replicate() else NormPartial(order) for p in like.placements]
    spec = make_spec(like.device_mesh, placements, norms[0].shape, norms[0].dtype)
    return [with_spec(norm, spec, meets) for norm in norms]


def _norm(call: _Call) -> DTensor:
    """Run a norm over all dims. A norm of finite positive order stays Partial."""
    tensor, order, dtype = call.tensor, _order(call.options), call.options.get("dtype")
    if tensor.numel() == 0 and math.isinf(order):
        raise refuse(call.func, tensor, "the tensor has no elements")
    local = _local_norm(piece_in(tensor), order, dtype)
    if 0 < order < math.inf:
        return _pending_norms([local], tensor, order)[0]
    return replicated(_norm_of_norms(_gather_answers(local, tensor, call.func), order), tensor)


def foreach_norm(func: Op, args: Args, kwargs: Kwargs) -> list[Any]:
    """Return the norms of a list of tensors.

    If all tensors are cut over the same mesh axes, the norms are Partial, and the next operator runs the collective.
    Otherwise tensors with equal dtype that are cut over the same mesh axes share one collective, and all norms are
    replicated on the mesh of the first ragged tensor. So gradients with and without tensor parallelism can be clipped
    together, although torch cannot stack DTensors on different meshes.
    """
    named = bind(func, args, kwargs)
    tensors, order, dtype = named["self"], _order(named), named.get("dtype")
    norms: list[Any] = [None] * len(tensors)
    together: dict[Any, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, RaggedDTensor):  # torch computes the norm of any other tensor
            norms[index] = torch.linalg.vector_norm(tensor, order, dtype=dtype)
            continue
        if is_partial(tensor):
            raise refuse(func, tensor, "a tensor of the list has pending sums")
        cut = tuple(not p.is_replicate() for p in tensor.placements)  # the axes of the collective
        together.setdefault((tensor.device_mesh, cut, dtype or tensor.dtype), []).append(index)
    home = first_ragged(tensors)
    for indices in together.values():
        local_norms = _local_norms([piece_in(tensors[i]) for i in indices], order, dtype)
        if len(indices) == len(tensors) and 0 < order < math.inf:
            return _pending_norms(local_norms, tensors[0], order, Meets.NEVER)
        answers = _gather_answers(torch.stack(local_norms), tensors[indices[0]], func, Meets.NEVER)
        whole_norms = _norm_of_norms(answers, order).unbind()
        assert home is not None
        spec = replicated(whole_norms[0], home)._spec
        for index, norm in zip(indices, whole_norms, strict=True):
            norms[index] = with_spec(norm, spec)
    return norms


_TOTALS: dict[str, Callable[[_Call], DTensor]] = {
    "argmax": partial(_arg_extreme, largest=True),
    "argmin": partial(_arg_extreme, largest=False),
    "linalg_vector_norm": _norm,
    "norm": _norm,
}
NAMES = _TOTALS.keys() | _OVER_ALL.keys()
# Reductions that have no result for a tensor without elements; torch raises, too.
_NEED_ELEMENTS = ("amax", "amin", "aminmax", "argmax", "argmin", "max", "min")


# -- comparisons of whole tensors -----------------------------------------------------------------------


def equal(func: Op, args: Args, kwargs: Kwargs) -> bool:
    """Run torch.equal: return True only if the pieces of all ranks are equal. A collective."""
    # The shapes are compared here, because `all_close` calls ``func`` on pieces, which are flat.
    return args[0].shape == args[1].shape and all_close(func, args, kwargs)


def all_close(func: Op, args: Args, kwargs: Kwargs) -> bool:
    """Run ``func``, allclose or equal, on the pieces, and return whether it is True on all ranks. A collective."""
    left, right, *rest = args
    like = left if isinstance(left, RaggedDTensor) else right
    if is_partial(like):
        raise refuse(func, like, "the tensor has pending sums")
    with one_meeting(str(func)):
        # The pieces of the right tensor are brought to those of the left one, or the reverse.
        is_same = func(*combining.brought(func, [(left, like), (right, like)]), *rest, **kwargs)
        answer = torch.tensor(int(is_same), dtype=torch.int64, device=piece_in(like).device)
        return bool(_gather_answers(answer, like, func).all().item())
