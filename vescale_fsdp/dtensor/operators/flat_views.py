"""Views of ragged tensors: other dims, one row, some rows. They share the piece's memory: what is written to a view
is written to the tensor.

A view that is one run of the tensor's flat order is cut where the tensor is cut::

    shape (4, 3), pieces [0, 5) [5, 12)     x.view(2, 6)   elements [0, 12)   pieces of 5, 7
                                            x[1]           elements [3, 6)    pieces of 2, 1
                                            x[2:4]         elements [6, 12)   pieces of 0, 6

Which run it is torch says itself: the operator is run on a tensor without values, and its result tells where it
begins. Others, such as columns and transposes, have no run, and no memory on any rank that they could be: refused.
"""

from __future__ import annotations

from typing import Any

import torch

from vescale_fsdp.dtensor.operators.arguments import refuse, wrap_result
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor
from vescale_fsdp.dtensor.spec import inner_box, make_spec, piece_of, ragged_axis
from vescale_fsdp.layout.placement import RaggedShard


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
