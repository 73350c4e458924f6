"""Running an operator along dims that every piece holds whole: softmax, cumulative sums, sorting, and reductions.

The cuts then lie between rows of these dims, and the result is ragged, with the tensor's own cut. Where a row is cut
in the middle it needs its neighbours: the tensor is gathered, and the result is replicated.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from vescale_fsdp.dtensor.operators.arguments import bind, refuse, summed
from vescale_fsdp.dtensor.operators.whole_tensors import gathered
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor
from vescale_fsdp.dtensor.spec import inner_box, make_spec, ragged_axis
from vescale_fsdp.layout.geometry import numel_of
from vescale_fsdp.layout.placement import RaggedShard
from vescale_fsdp.layout.run_lengths import RunLengths


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
        return gathered(func, args, kwargs)
    return run_along(func, call.tensor, call.dims, None, call.options)
