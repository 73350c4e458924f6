"""Processors round sums of products in orders of their own. Here the order is taken out of a test, or varied in it.

    exact_products()     products are summed in fp64 and rounded once, so that their bits depend neither on the
                         processor nor on how many are computed at once: what a test of equal bits is to run under
    RoundingNoise        another processor, simulated: results of products and decompositions move by one unit in the
                         last place. As on a real one, equal inputs give equal results, and shapes decide the order of
                         sums: the change is a function of a value's bits and of the result's shape

``pytest --rounding-noise 1 tests/vescale_fsdp/optim`` runs every test there, and every rank, under such noise.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

ROUNDING_NOISE = "VESCALE_FSDP_TEST_ROUNDING_NOISE"  # set in the environment of workers

ATEN = torch.ops.aten
ROUNDED = {
    each.default for each in (ATEN.mm, ATEN.bmm, ATEN.addmm, ATEN.baddbmm, ATEN.addbmm, ATEN._linalg_eigh)
}
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_MULTIPLIER = 2654435761  # Knuth's, of multiplicative hashing


PRODUCTS = ROUNDED - {ATEN._linalg_eigh.default}


class _ExactProducts(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it computes by local tensors, which come here again
        if func not in PRODUCTS or args[0].device.type != "cpu":
            return func(*args, **(kwargs or {}))
        wide = (each.double() if isinstance(each, torch.Tensor) else each for each in args)
        return func(*wide, **(kwargs or {})).to(args[0].dtype)


@contextmanager
def exact_products() -> Iterator[None]:
    """Sum products in fp64 inside, or inside of the function that this decorates."""
    with _ExactProducts():
        yield


class RoundingNoise(TorchDispatchMode):
    """Moves every value that a product or a decomposition returns by -1, 0 or 1 units in the last place.

    Args:
        seed: another one is another processor.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self.num_changed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it computes by local tensors, which come here again
        results = func(*args, **(kwargs or {}))
        if func in ROUNDED:
            for result in results if isinstance(results, tuple) else (results,):
                if type(result) is torch.Tensor and result.device.type == "cpu" and result.numel():
                    result.copy_(_moved(result, self._seed))
                    self.num_changed += 1
        return results


def _moved(result: torch.Tensor, seed: int) -> torch.Tensor:
    bits = result.contiguous().view(_BITS[result.itemsize]).to(torch.int64)
    shape = sum(size * 31**place for place, size in enumerate(result.shape, 1))
    drawn = (bits + seed + shape) * _MULTIPLIER >> 16
    units = drawn % 3 - 1
    if result.itemsize == 2:  # summed in fp32: few sums lie so that another order rounds them otherwise
        units.masked_fill_(drawn // 3 % 64 != 0, 0)
    units.masked_fill_((result == 0) | ~result.isfinite(), 0)
    return (bits + units).to(_BITS[result.itemsize]).view(result.dtype)


def noise_if_asked() -> AbstractContextManager[Any]:
    """The noise that ``pytest --rounding-noise`` has asked for, or none."""
    seed = os.environ.get(ROUNDING_NOISE)
    return RoundingNoise(int(seed)) if seed else nullcontext()
