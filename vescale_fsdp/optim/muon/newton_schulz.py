"""Newton-Schulz orthogonalisation of one matrix, by torch's own function, and of many equal ones at once.

The batched form repeats torch's operations in torch's order on a stack. On CPU its result equals the
one-by-one result bit for bit (tests hold this); on accelerators batched and single matrix products may
round differently, which no optimizer promises otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vescale_fsdp.torch_private import (
    MUON_COEFFICIENTS,
    MUON_EPS,
    MUON_STEPS,
    foreach_norm_of,
    zeropower_via_newtonschulz,
)


@dataclass(frozen=True)
class NewtonSchulz:
    """The iteration's constants; torch's defaults.

    Args:
        coefficients: (a, b, c) of the quintic X <- a X + (b A + c A A) X with A = X X'.
        steps: number of iterations.
        eps: least norm a matrix is divided by.
    """

    coefficients: tuple[float, float, float] = MUON_COEFFICIENTS
    steps: int = MUON_STEPS
    eps: float = MUON_EPS

    def __call__(self, stack: torch.Tensor) -> torch.Tensor:
        """Orthogonalise every matrix of a bf16 stack [n, rows, cols]; the stack may be overwritten."""
        if len(stack) == 1:
            return zeropower_via_newtonschulz(stack[0], self.coefficients, self.steps, self.eps).unsqueeze(0)
        a, b, c = self.coefficients
        tall = stack.size(-2) > stack.size(-1)
        x = stack.mT if tall else stack
        # One norm per matrix over all its elements, as torch takes it: a norm over two dims rounds otherwise.
        norms = torch.stack(foreach_norm_of(list(x.unbind()))).clamp(min=self.eps)
        x = x / norms.view(-1, 1, 1)
        for _ in range(self.steps):
            gram = torch.bmm(x, x.mT)
            update = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            x = torch.baddbmm(x, update, x, beta=a)
        return x.mT if tall else x
