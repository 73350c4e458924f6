"""Gradients that look differentiable and refuse to be: those of sharded parameters under ``create_graph=True``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vescale_fsdp.errors import UnsupportedOpError


def first_order(source: torch.Tensor, make: Callable[[], torch.Tensor], where: str) -> torch.Tensor:
    """Return a gradient whose graph leads to ``source`` and whose backward is refused.

    Without a graph autograd's error would speak of "element 0 of tensors", and name no parameter.
    A class that asks whether its gradients have a graph would step otherwise than on one process, without a word.

    Args:
        source: the parameter.
        make: returns the gradient's values.
        where: the parameter, for the error.
    """
    with torch.enable_grad():
        gradient: torch.Tensor = _FirstOrder.apply(source, make, where)
    return gradient


class _FirstOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, make: Callable[[], torch.Tensor], where: str) -> torch.Tensor:
        ctx.where = where
        return make()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> None:  # type: ignore[override]
        raise UnsupportedOpError(
            "The gradient of a sharded parameter cannot be differentiated.",
            expected="derivatives of first order: ranks reduce gradients without a graph, as under FSDP2",
            got="a backward through a gradient that create_graph=True has made",
            where=f"gradient of {ctx.where}",
            todo="use an optimizer of first derivatives. A product of the Hessian and a vector is also the difference "
            "of two gradients: at p + eps * vector and at p, divided by eps",
        )
