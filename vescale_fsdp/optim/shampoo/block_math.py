"""Shampoo's arithmetic on one block: statistics, inverse roots, the preconditioned and grafted direction.

With gradient G of a block: L <- b2 L + (1 - b2) G G', R <- b2 R + (1 - b2) G' G (b2 = 1: plain sums); the direction is
L^(-1/4) M R^(-1/4) with M the averaged gradient (vectors: L^(-1/2) M). Gupta et al., arXiv 1802.09568; grafting and
the choice of roots as in arXiv 2309.06497.
"""

from __future__ import annotations

import warnings

import torch

__all__ = ["accumulate", "graft", "inverse_root"]


def accumulate(factor: torch.Tensor, grad: torch.Tensor, beta2: float) -> None:
    """Add ``grad @ grad.T`` to a factor, in place."""
    product = grad @ grad.mT
    if beta2 == 1.0:
        factor.add_(product)
    else:
        factor.mul_(beta2).add_(product, alpha=1 - beta2)


def inverse_root(factor: torch.Tensor, root: int, eps: float) -> torch.Tensor | None:
    """``factor ** (-1 / root)`` of a symmetric positive semi-definite matrix, by its eigenvalues.

    If the least eigenvalue is below ``eps``, all are shifted so that it becomes ``eps``; else none is touched.

    Returns:
        The root; NaN if the factor is not finite, so that a bad gradient shows as it does in AdamW; None (with
        a warning) if no decomposition converged, in fp32 nor in fp64.
    """
    if not factor.isfinite().all():
        return torch.full_like(factor, torch.nan)
    for dtype in (torch.float32, torch.float64):
        try:
            values, vectors = torch.linalg.eigh(factor.to(dtype))
        except torch.linalg.LinAlgError:
            continue
        least = values[0]
        values = values + torch.where(least < eps, eps - least, torch.zeros_like(least))
        return ((vectors * values.pow(-1.0 / root)) @ vectors.mT).to(factor.dtype)
    warnings.warn("Shampoo: eigh did not converge; the block keeps its last inverse root", stacklevel=2)
    return None


def graft(direction: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A direction with the norm of another update of the same block."""
    return direction * (like.norm() / (direction.norm() + 1e-16))
