"""Rules of reductions, and of comparisons that end in one answer for a whole tensor.

    over all dims     each rank's answer for its piece, gathered and combined: a replicated DTensor. A nan on
                      one rank is a nan for all (an all-reduce with MAX may lose it)
    over some dims    every piece holds these dims whole (its cuts lie between them): see `along_dims`
    over cut dims     sums, means and norms: an all-reduce of what each rank's boxes add to the result. Others, such
                      as a maximum over rows that are cut in the middle: the tensor is gathered

No sum is left Partial: torch 2.13 adds a plain scalar to a Partial DTensor once per rank, so sums would come
out wrong in the next operator (seen in cosine_embedding_loss). Norms of a finite order may: torch gets those
right, and so clipping costs one collective for all gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from vescale_fsdp.collectives import all_reduce_in_place, gathered, wait_for
from vescale_fsdp.dtensor.operators import whole_tensors
from vescale_fsdp.dtensor.operators.arguments import bind, first_ragged, is_partial, localise, refuse, summed
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor
from vescale_fsdp.dtensor.spec import inner_box, make_spec, ragged_axis
from vescale_fsdp.layout.geometry import RunLengths, numel_of
from vescale_fsdp.layout.placement import RaggedShard
from vescale_fsdp.torch_private import NormPartial, foreach_norm_of


class CallAlongDims(NamedTuple):
    """An operator along dims as it was asked for."""

    func: torch._ops.OpOverload
    tensor: RaggedDTensor
    dims: tuple[int, ...]  # positive and sorted; all of them where none was given
    keepdim: bool
    options: dict[str, Any]  # the other arguments by name


def call_of(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallAlongDims:
    """The tensor with its sums done, the dims it is to be run along, and the other arguments."""
    named = bind(func, args, kwargs)
    tensor: RaggedDTensor = named.pop("self")
    defaults = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    dims = named.pop("dim", defaults.get("dim"))
    keepdim = bool(named.pop("keepdim", False))
    listed = [dims] if isinstance(dims, int) else list(dims or ())
    positive = tuple(sorted({d % tensor.ndim if -tensor.ndim <= d < tensor.ndim else d for d in listed}))
    if positive and (positive[0] < 0 or positive[-1] >= tensor.ndim):
        raise IndexError(f"{func}: dims {listed} do not exist in shape {tuple(tensor.shape)}")
    tensor = summed(tensor)
    return CallAlongDims(func, tensor, positive or tuple(range(tensor.ndim)), keepdim, named)


def _cut_numels(tensor: RaggedDTensor) -> tuple[tuple[int, ...], RunLengths]:
    """The shape that the ragged placement cuts, and the elements it gives to each rank."""
    _, placement = ragged_axis(tensor.placements)
    inner = inner_box(tensor._spec).sizes
    return inner, placement.piece_lengths(inner)


def holds_whole(tensor: RaggedDTensor, dim: int) -> bool:
    """Whether every rank's piece holds all of the dims ``dim``, ``dim + 1``, .. whole."""
    inner, numels = _cut_numels(tensor)
    if inner[dim:] != tuple(tensor.shape[dim:]):
        return False
    run = numel_of(inner[dim:])
    return run > 0 and all(numel % run == 0 for numel in numels.distinct)


def run_along(
    func: torch._ops.OpOverload,
    tensor: RaggedDTensor,
    dims: tuple[int, ...],
    keepdim: bool | None,
    options: dict[str, Any],
) -> Any:
    """Run an operator on the pieces seen as [some rows, *whole dims]; the rows stay where they are."""
    first = dims[0]
    rows = tensor._local_tensor.reshape(-1, *tensor.shape[first:])
    shifted = [dim - first + 1 for dim in dims]
    schema = {argument.name: argument for argument in func._schema.arguments}
    takes_list = "List" in str(schema["dim"].type) or "[]" in str(schema["dim"].type)
    named = {**options, "self": rows, "dim": shifted if takes_list else shifted[0]}
    if keepdim is not None and "keepdim" in schema:
        named["keepdim"] = keepdim
    result = func(**named)
    if isinstance(result, (list, tuple)):
        return tuple(_of_rows(func, value, tensor, first) for value in result)
    return _of_rows(func, result, tensor, first)


def _of_rows(
    func: torch._ops.OpOverload, rows: torch.Tensor, tensor: RaggedDTensor, first: int
) -> RaggedDTensor:
    """A ragged tensor from its rows, cut between the same rows as the tensor they came from."""
    shape = (*tensor.shape[:first], *rows.shape[1:])
    if not shape:  # every dim was reduced, and one rank held them all
        raise refuse(func, tensor._spec, "its result would be a 0-d ragged tensor")
    axis, _ = ragged_axis(tensor.placements)
    inner, numels = _cut_numels(tensor)
    per_row, run = numel_of(rows.shape[1:]), numel_of(inner[first:])
    cut = numels.map(lambda numel: numel // run * per_row)
    ragged = RaggedShard.from_piece_numels((*inner[:first], *rows.shape[1:]), cut)
    placements = [ragged if other == axis else p for other, p in enumerate(tensor.placements)]
    spec = make_spec(tensor.device_mesh, placements, shape, rows.dtype)
    same = shape == tuple(tensor.shape)
    return RaggedDTensor.wrap(
        rows.contiguous().view(-1), spec, layout_ref=tensor.layout_ref if same else None
    )


def along_dims(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Softmax, cumulative sums, sorting and the like, along one dim."""
    call = call_of(func, args, kwargs)
    if call.tensor.numel() == 0 or not holds_whole(call.tensor, call.dims[0]):
        return whole_tensors.gathered(func, args, kwargs)
    return run_along(func, call.tensor, call.dims, None, call.options)


aten = torch.ops.aten


# -- over all dims ------------------------------------------------------------------------------------

_Total = Callable[[CallAlongDims], Any]


def reduction(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A reduction, over whichever dims."""
    call = call_of(func, args, kwargs)
    name = func._schema.name.removeprefix("aten::")
    if call.tensor.numel() == 0 and name in _NEED_ELEMENTS:
        raise refuse(func, call.tensor._spec, "the tensor has no elements")
    if len(call.dims) == call.tensor.ndim and name in TOTALS and not _needs_all(call, name):
        result = TOTALS[name](call)
        keep = (1,) * call.tensor.ndim if call.keepdim else ()
        if not keep:
            return result
        return type(result)(r.view(keep) for r in result) if isinstance(result, tuple) else result.view(keep)
    if holds_whole(call.tensor, call.dims[0]):
        return run_along(call.func, call.tensor, call.dims, call.keepdim, call.options)
    if name in _SUMMABLE and len(call.dims) < call.tensor.ndim and not _needs_all(call, name):
        return _over_cut_dims(call)
    return whole_tensors.gathered(func, args, kwargs)


def _needs_all(call: CallAlongDims, name: str) -> bool:
    """Whether the answers of the pieces do not tell that of the whole."""
    if name in ("argmax", "argmin"):  # of another mesh axis' parts nobody knows the places in flat order
        return inner_box(call.tensor._spec).sizes != tuple(call.tensor.shape)
    if name in ("linalg_vector_norm", "norm"):
        order = _order(call.options)
        over_some = len(call.dims) < call.tensor.ndim
        return (order < 0 and not math.isinf(order)) or (over_some and not 0 < order < math.inf)
    return name.startswith(("std", "var")) and call.tensor.is_complex()


def _replicated(local: torch.Tensor, tensor: RaggedDTensor) -> DTensor:
    """A stock DTensor that every rank holds whole."""
    mesh = tensor.device_mesh
    spec = make_spec(mesh, [Replicate()] * mesh.ndim, local.shape, local.dtype)
    return DTensor(local.contiguous(), spec, requires_grad=False)  # type: ignore[call-arg]


def _gather_answers(answer: torch.Tensor, tensor: RaggedDTensor) -> torch.Tensor:
    """[num_ranks, *answer.shape]: the answers of all ranks that hold different parts of the tensor."""
    answers = answer.unsqueeze(0)
    for axis, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            answers = gathered(answers, tensor.device_mesh.get_group(axis)).flatten(0, 1)
    return answers


def _sum(call: CallAlongDims) -> DTensor:
    total = torch.nansum if call.func._schema.name == "aten::nansum" else torch.sum
    local = total(call.tensor._local_tensor, dtype=call.options.get("dtype"))
    answers = _gather_answers(local, call.tensor)
    return _replicated(answers.sum(0, dtype=local.dtype), call.tensor)


def _mean(call: CallAlongDims) -> DTensor:
    local = torch.sum(call.tensor._local_tensor, dtype=call.options.get("dtype"))
    if not (local.is_floating_point() or local.is_complex()):
        call.func(call.tensor._local_tensor)  # raises torch's own error for integers
    total = _gather_answers(local, call.tensor).sum(0)
    return _replicated(total / call.tensor.numel(), call.tensor)


def _of_parts(part: Callable[..., torch.Tensor], whole: Callable[..., torch.Tensor]) -> _Total:
    """A reduction whose answer for the whole is that of ``whole`` for the answers of ``part``."""

    def total(call: CallAlongDims) -> DTensor:
        answer = part(call.tensor._local_tensor.reshape(-1), **call.options)
        return _replicated(whole(_gather_answers(answer, call.tensor)), call.tensor)

    return total


def _identity(dtype: torch.dtype, largest: bool) -> Any:
    """The value that loses against every other when the largest (or smallest) is asked for."""
    if dtype == torch.bool:
        return not largest
    if dtype.is_floating_point:
        return -math.inf if largest else math.inf
    return torch.iinfo(dtype).min if largest else torch.iinfo(dtype).max


def _extreme(call: CallAlongDims, *, largest: bool) -> DTensor:
    local = call.tensor._local_tensor
    if local.numel():
        answer = local.max() if largest else local.min()
    else:
        answer = torch.full((), _identity(local.dtype, largest), dtype=local.dtype, device=local.device)
    answers = _gather_answers(answer, call.tensor)
    return _replicated(answers.max() if largest else answers.min(), call.tensor)


_log_sum_exp = partial(torch.logsumexp, dim=0)
_max, _min = partial(_extreme, largest=True), partial(_extreme, largest=False)


def _aminmax(call: CallAlongDims) -> tuple[DTensor, DTensor]:
    return _min(call), _max(call)


def _arg_extreme(call: CallAlongDims, *, largest: bool) -> DTensor:
    """argmax and argmin: the first place, in flat order, of the extreme value (a nan counts as extreme)."""
    tensor, local = call.tensor, call.tensor._local_tensor.reshape(-1)
    fill = _identity(local.dtype, largest)
    index = torch.full((), torch.iinfo(torch.int64).max, dtype=torch.int64, device=local.device)
    value = torch.full((), fill, dtype=local.dtype, device=local.device)
    if local.numel():
        index = local.argmax() if largest else local.argmin()
        value, index = local[index], index + tensor.piece.start
    values, indices = _gather_answers(value, tensor), _gather_answers(index, tensor)
    best = values.max() if largest else values.min()
    hits = (values == best) | (values.isnan() & best.isnan())
    owned = indices != torch.iinfo(torch.int64).max
    return _replicated(indices[hits & owned].min(), tensor)


def _moments(call: CallAlongDims) -> tuple[torch.Tensor, torch.Tensor]:
    """Variance and mean of all elements, from each rank's count, mean and squared distances."""
    local = call.tensor._local_tensor
    wide = local.to(torch.float64)
    count = torch.tensor(float(local.numel()), dtype=torch.float64, device=local.device)
    mean = wide.mean() if local.numel() else count
    answers = _gather_answers(torch.stack([count, mean, (wide - mean).square().sum()]), call.tensor)
    counts, means, squares = answers.unbind(-1)
    total = counts.sum()
    grand = (counts * means).sum() / total
    squares_all = squares.sum() + (counts * (means - grand).square()).sum()
    given = call.options.get("correction", call.options.get("unbiased", 1))
    correction = 1.0 if given is None else float(given)
    return squares_all / (total - correction).clamp_min(0.0), grand


def _spread(call: CallAlongDims, *, root: bool = False, with_mean: bool = False) -> Any:
    """Variance or standard deviation, on its own or before the mean."""
    variance, mean = _moments(call)
    found = (variance.sqrt() if root else variance, mean)
    results = tuple(_replicated(moment.to(call.tensor.dtype), call.tensor) for moment in found)
    return results if with_mean else results[0]


# -- norms --------------------------------------------------------------------------------------------


def _order(options: dict[str, Any]) -> float:
    given = options.get("ord", options.get("p", 2))
    return 2.0 if given is None else float(given)


def _local_norm(local: torch.Tensor, order: float, dtype: torch.dtype | None) -> torch.Tensor:
    if local.numel() or not math.isinf(order):
        return torch.linalg.vector_norm(local, order, dtype=dtype)
    # torch has no infinity norm of nothing; a piece of nothing must lose against every other
    return torch.full((), 0.0 if order > 0 else math.inf, dtype=dtype or local.dtype, device=local.device)


def _local_norms(
    pieces: Sequence[torch.Tensor], order: float, dtype: torch.dtype | None
) -> list[torch.Tensor]:
    """`_local_norm` of pieces of one dtype, in one kernel."""
    if not math.isinf(order):
        return list(foreach_norm_of(list(pieces), order, dtype))
    given = [piece for piece in pieces if piece.numel()]
    found = iter(foreach_norm_of(given, order, dtype) if given else ())
    empty = next((piece for piece in pieces if not piece.numel()), None)
    of_nothing = None if empty is None else _local_norm(empty, order, dtype)
    return [next(found) if piece.numel() or of_nothing is None else of_nothing for piece in pieces]


def _norm_of_norms(norms: torch.Tensor, order: float) -> torch.Tensor:
    """The norm of a whole from the norms of its parts: [num_parts, ..] -> [..]."""
    if order == 0:
        return norms.sum(0)  # counts of elements that are not zero
    return torch.linalg.vector_norm(norms, order, dim=0)


def _norm(call: CallAlongDims) -> DTensor:
    order, dtype = _order(call.options), call.options.get("dtype")
    if call.tensor.numel() == 0 and math.isinf(order):
        raise refuse(call.func, call.tensor._spec, "the tensor has no elements")
    if 0 < order < math.inf:
        return _unreduced_norm(call.tensor, order, dtype)
    answers = _gather_answers(_local_norm(call.tensor._local_tensor, order, dtype), call.tensor)
    return _replicated(_norm_of_norms(answers, order), call.tensor)


def _unreduced_norm(tensor: RaggedDTensor, order: float, dtype: torch.dtype | None) -> DTensor:
    """A norm whose collective waits until it is needed: clipping a hundred gradients costs one, not a hundred.

    torch's NormPartial of a finite order is brought to Replicate by every operator that needs it (seen for
    adding scalars, powers, logarithms and reductions on torch 2.13), unlike a Partial sum.
    """
    local = torch.linalg.vector_norm(tensor._local_tensor, order, dtype=dtype)
    return _unreduced([local], tensor, order)[0]


def _unreduced(norms: Sequence[torch.Tensor], like: RaggedDTensor, order: float) -> list[DTensor]:
    """Local norms of tensors that are all cut like this one."""
    placements = [p if p.is_replicate() else NormPartial(order) for p in like.placements]
    spec = make_spec(like.device_mesh, placements, norms[0].shape, norms[0].dtype)
    return [DTensor(norm, spec, requires_grad=False) for norm in norms]  # type: ignore[call-arg]


def foreach_norm(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Norms of a list of tensors. Where all are cut over the same mesh axes, the collective waits as for one.

    Otherwise those cut alike share one collective, and all norms come back on the mesh of the first ragged tensor,
    where they are as replicated as on their own: tensors beside and without tensor parallelism can then be clipped
    together, which torch's stack of DTensors on different meshes refuses.
    """
    named = bind(func, args, kwargs)
    tensors, order, dtype = named["self"], _order(named), named.get("dtype")
    norms: list[Any] = [None] * len(tensors)
    together: dict[Any, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, RaggedDTensor):
            norms[index] = torch.linalg.vector_norm(tensor, order, dtype=dtype)
        elif is_partial(tensor):
            raise refuse(func, tensor._spec, "a tensor of the list holds sums that are not done")
        else:
            if order < 0 and not math.isinf(order):
                why = f"a norm of order {order} has no neutral part for an empty piece"
                raise refuse(func, tensor._spec, why)
            cut = tuple(not p.is_replicate() for p in tensor.placements)
            together.setdefault((tensor.device_mesh, cut, dtype or tensor.dtype), []).append(index)
    home = first_ragged(tensors)
    for indices in together.values():
        local_norms = _local_norms([tensors[i]._local_tensor for i in indices], order, dtype)
        if len(indices) == len(tensors) and 0 < order < math.inf:
            return _unreduced(local_norms, tensors[0], order)
        own = torch.stack(local_norms)
        whole = _norm_of_norms(_gather_answers(own, tensors[indices[0]]), order).unbind()
        assert home is not None
        first = _replicated(whole[0], home)
        for index, value in zip(indices, whole, strict=True):
            norms[index] = DTensor(value, first._spec, requires_grad=False)  # type: ignore[call-arg]
    return norms


TOTALS: dict[str, _Total] = {
    "all": _of_parts(torch.all, torch.all),
    "amax": _max,
    "amin": _min,
    "aminmax": _aminmax,
    "any": _of_parts(torch.any, torch.any),
    "argmax": partial(_arg_extreme, largest=True),
    "argmin": partial(_arg_extreme, largest=False),
    "count_nonzero": _of_parts(torch.count_nonzero, torch.sum),
    "linalg_vector_norm": _norm,
    "logsumexp": _of_parts(_log_sum_exp, _log_sum_exp),
    "max": _max,
    "mean": _mean,
    "min": _min,
    "nansum": _sum,
    "norm": _norm,
    "prod": _of_parts(torch.prod, torch.prod),
    "std": partial(_spread, root=True),
    "std_mean": partial(_spread, root=True, with_mean=True),
    "sum": _sum,
    "var": _spread,
    "var_mean": partial(_spread, with_mean=True),
}


_NEED_ELEMENTS = ("amax", "amin", "aminmax", "argmax", "argmin", "max", "min")
_SUMMABLE = ("sum", "mean", "linalg_vector_norm", "norm")


def _over_cut_dims(call: CallAlongDims) -> DTensor:
    """Sums, means and norms over any dims, however the pieces cut them: the parts of every box, summed over ranks."""
    tensor, dims, dtype = call.tensor, call.dims, call.options.get("dtype")
    name = call.func._schema.name.removeprefix("aten::")
    order = None if name in ("sum", "mean") else _order(call.options)
    local, start = tensor._local_tensor.reshape(-1), 0
    kept = [1 if dim in dims else size for dim, size in enumerate(tensor.shape)]
    total = local.new_zeros(kept, dtype=local[:0].sum(dtype=dtype).dtype if order is None else dtype)
    for box in tensor.boxes:
        values = local[start : start + box.numel].view(box.sizes)
        start += box.numel
        if order is None:
            part = values.sum(dims, keepdim=True, dtype=dtype)
        else:
            part = torch.linalg.vector_norm(values, order, dim=dims, keepdim=True, dtype=dtype) ** order
        total[tuple(slice(None) if d in dims else at for d, at in enumerate(box.slices()))] += part
    total = _summed_over_ranks(total, tensor)
    if name == "mean":
        total = total / numel_of([tensor.shape[dim] for dim in dims])
    elif order is not None:
        total = total ** (1 / order)
    return _replicated(total if call.keepdim else total.squeeze(dims), tensor)


def _summed_over_ranks(local: torch.Tensor, tensor: RaggedDTensor) -> torch.Tensor:
    total = local.clone(memory_format=torch.contiguous_format)
    for axis, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            wait_for(all_reduce_in_place(total, dist.ReduceOp.SUM, tensor.device_mesh.get_group(axis)))
    return total


# -- comparisons of whole tensors -----------------------------------------------------------------------


def equal(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """torch.equal: true only if the pieces of all ranks are equal. A collective."""
    return args[0].shape == args[1].shape and all_close(func, args, kwargs)


def all_close(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """torch.allclose, over the pieces of all ranks. A collective."""
    left, right, *rest = args
    like = left if isinstance(left, RaggedDTensor) else right
    if is_partial(like):
        raise refuse(func, like._spec, "its sums are not done")
    same = func(localise(func, left, like), localise(func, right, like), *rest, **kwargs)
    verdict = torch.tensor(int(same), dtype=torch.int64, device=like._local_tensor.device)
    return bool(_gather_answers(verdict, like).all().item())
