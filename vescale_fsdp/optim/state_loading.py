"""Optimizer state that survives: loading into existing tensors without casts, and refusing what does not fit.

`torch.optim.Optimizer.load_state_dict` casts floating-point state to the parameter's dtype: an fp32 scale
or counter beside a bf16 parameter would lose its value (a bf16 counter stops at 256). Here state tensors
are made once, when the optimizer is built, and loading copies values into them:

    saved value            this rank's state tensor      what happens
    DTensor                DTensor, same placements      copy of the local part
    DTensor                DTensor, other placements     redistribute, then copy
    plain, global shape    DTensor                       copy of this rank's piece
    plain or a number      plain                         copy
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from vescale_fsdp.dtensor.piece_map import local_part_of, local_tensor, pieces_of
from vescale_fsdp.dtensor.ragged_dtensor import redistribute
from vescale_fsdp.errors import CheckpointError
from vescale_fsdp.torch_private import local_of


@dataclass(frozen=True, eq=False)
class Held:
    """A saved value that passes through torch's loading untouched, because it is not a tensor."""

    value: Any


def check_state(saved: Mapping[str, Any], state: Mapping[str, Any], where: str) -> None:
    """Prove that saved state can be copied into a parameter's state.

    Raises:
        CheckpointError: if names, shapes or kinds of dtype differ.
    """
    check_parts(saved, state, where)
    for name, target in state.items():
        value = saved[name]
        kind = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        got_shape = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
        exact = isinstance(value, torch.Tensor) and not target.is_floating_point()
        if got_shape != tuple(target.shape) or (exact and value.dtype != target.dtype):
            raise CheckpointError(
                "A saved optimizer state tensor does not fit.",
                expected=f"{name} of shape {tuple(target.shape)}, {target.dtype}",
                got=f"shape {got_shape}, {kind}",
                where=where,
                todo="load a checkpoint of the same model and the same optimizer options",
            )


def check_parts(saved: Iterable[str], state: Iterable[str], where: str) -> None:
    """Prove that saved state has the parts that a parameter's state has.

    Raises:
        CheckpointError: if their names differ.
    """
    if set(saved) != set(state):
        raise CheckpointError(
            "The saved optimizer state has other parts than this optimizer keeps.",
            expected=sorted(state),
            got=sorted(saved),
            where=where,
            todo="build the optimizer with the param groups and options it was saved with; state is "
            "never quantised or dequantised in silence",
        )


def copy_state(saved: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Copy checked values into the tensors of ``state``. Collective where placements differ."""
    for name, target in state.items():
        _copy_value(saved[name], target)


def _copy_value(value: Any, target: torch.Tensor) -> None:
    if value is target:
        return
    if not isinstance(value, torch.Tensor):
        target.fill_(value)
        return
    if not isinstance(target, DTensor):
        target.copy_(value.full_tensor() if isinstance(value, DTensor) else value)
        return
    local = local_of(target)
    if isinstance(value, DTensor):
        if value.placements != target.placements:
            value = redistribute(value, target.placements)  # torch's own does not know ragged targets
        local.copy_(local_of(value).view(local.shape))
        return
    pieces = pieces_of(target)
    if pieces is None:
        local.copy_(local_part_of(value.to(local.device), target))
        return
    piece = pieces.own_piece
    local_tensor(target, "state").copy_(value.reshape(-1)[piece.start : piece.stop])
