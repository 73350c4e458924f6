"""Shampoo's arithmetic on a stack of blocks of one size: statistics, inverse roots, grafted directions.

With gradient G of a block: L <- b2 L + (1 - b2) G G', R <- b2 R + (1 - b2) G' G (b2 = 1: plain sums); the direction is
L^(-1/4) M R^(-1/4) with M the averaged gradient (vectors: L^(-1/2) M). Gupta et al., arXiv 1802.09568; grafting and
the choice of roots as in arXiv 2309.06497.
"""

from __future__ import annotations

import warnings

import torch

from vescale_fsdp.torch_private import foreach_norm_of


def accumulate(factors: torch.Tensor, grads: torch.Tensor, beta2: float) -> None:
    """Add ``grad @ grad.T`` of each block to its factor, in place: [n, side, side] and [n, side, other side]."""
    products = torch.bmm(grads, grads.mT)
    if beta2 == 1.0:
        factors.add_(products)
    else:
        factors.mul_(beta2).add_(products, alpha=1 - beta2)


def inverse_roots(
    factors: torch.Tensor, last: torch.Tensor, root: int, eps: float, relative_eps: float
) -> torch.Tensor:
    """``factor ** (-1 / root)`` of symmetric positive semi-definite matrices [n, side, side], by their eigenvalues.

    Eigenvalues below ``max(eps, relative_eps * largest)`` are raised to that floor; larger ones are not changed.

    Args:
        factors: the matrices.
        last: the roots that a matrix keeps if its decomposition does not converge (with a warning).
        root: degree of the inverse root.
        eps: absolute floor of the eigenvalues, for matrices of zeros.
        relative_eps: floor of the eigenvalues as a fraction of the matrix' largest.

    Returns:
        The roots; NaN for a matrix that is not finite, so that a bad gradient shows as it does in AdamW.
    """
    finite = factors.isfinite().flatten(1).all(1).view(-1, 1, 1)
    # One matrix that is not finite would fail the decomposition of all. Nothing here waits for the device.
    identity = torch.eye(factors.shape[-1], dtype=factors.dtype, device=factors.device)
    solvable = torch.where(finite, factors, identity)
    try:
        roots = _roots(solvable, root, eps, relative_eps)
    except torch.linalg.LinAlgError:
        pairs = zip(solvable.split(1), last.split(1), strict=True)
        roots = torch.cat([_root_or_last(factor, kept, root, eps, relative_eps) for factor, kept in pairs])
    return torch.where(finite, roots, torch.nan)


def _roots(factors: torch.Tensor, root: int, eps: float, relative_eps: float) -> torch.Tensor:
    # In fp32 the decomposition moves every eigenvalue by about 1e-7 of the largest. In the null space of a factor
    # without full rank that is all there is, and the power of -1/4 makes it the largest entry of the root: the results
    # of two BLAS libraries differed by 100 %. Hence fp64, and one floor to which such eigenvalues are raised (a shift
    # would keep their rounding). What is left is the rounding of the factor itself.
    values, vectors = torch.linalg.eigh(factors.double())
    floor = (values[:, -1:] * relative_eps).clamp_min(eps)
    values = torch.maximum(values, floor)
    return torch.bmm(vectors * values.pow(-1.0 / root).unsqueeze(1), vectors.mT).to(factors.dtype)


def _root_or_last(
    factor: torch.Tensor, last: torch.Tensor, root: int, eps: float, relative_eps: float
) -> torch.Tensor:
    try:
        return _roots(factor, root, eps, relative_eps)
    except torch.linalg.LinAlgError:
        warnings.warn("Shampoo: eigh did not converge; the block keeps its last inverse root", stacklevel=2)
        return last


def graft(directions: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Directions with the norms of another update of the same blocks, [n, height, width] both."""
    # One norm per block over all its elements: a norm over two dims rounds otherwise, and by how many there are.
    norms, wanted = (torch.stack(foreach_norm_of(list(each.unbind()))) for each in (directions, like))
    return directions * (wanted / (norms + 1e-16)).view(-1, 1, 1)
