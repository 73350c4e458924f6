"""Optimizers of torch that look beyond single elements: refused before their step, which would end halfway.

An operator that pieces cannot answer raises where it stands; by then momenta and step counts have changed. So a hook
that torch calls before every step looks at the optimizer's class.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor
from vescale_fsdp.errors import UnsupportedOpError

_INSTEAD: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.Adafactor: "use vescale_fsdp.optim.AdamW8bit, whose state is small too, or torch.optim.AdamW",
    torch.optim.Muon: "use vescale_fsdp.optim.Muon, which brings each matrix together on one rank",
}


def refuse_before_steps() -> None:
    """Check every optimizer of this process before its steps from now on."""
    register_optimizer_step_pre_hook(_check_step)


def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    instead = next((text for kind, text in _INSTEAD.items() if isinstance(optimizer, kind)), None)
    if instead is None:
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    ragged = [param for param in params if isinstance(param, RaggedDTensor) and param.ndim > 1]
    if ragged:
        raise UnsupportedOpError(
            f"torch.optim.{type(optimizer).__name__} cannot step on ragged parameters: it needs whole matrices.",
            expected="parameters that every rank holds whole, or an optimizer that works element by element",
            got=f"{len(ragged)} of {len(params)} parameters are ragged, the first of shape {tuple(ragged[0].shape)}",
            todo=instead,
        )
