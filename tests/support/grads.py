"""Gradients as tests read them: reduced ones, and whether others wait for their reduction."""

from __future__ import annotations

import torch
from torch import nn

from vescale_fsdp.dtensor.waiting_grad import waiting_in


def reduced_grad(param: torch.Tensor) -> torch.Tensor | None:
    """What reductions have left in ``.grad``; of FSDP2's parameters, ``.grad``."""
    waiting = waiting_in(param.grad)
    return param.grad if waiting is None else waiting.reduced


def all_wait(model: nn.Module) -> bool:
    """Whether all gradients wait for their first reduction."""
    return all(param.grad is not None and reduced_grad(param) is None for param in model.parameters())
