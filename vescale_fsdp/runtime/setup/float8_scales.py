"""The scales of a unit's float8 weights, in one reduction.

A weight travels in float8 by a scale that all ranks must have: the largest value of the dtype by the largest of the
whole weight. On its own every weight's hook reduces that largest value, one small collective each and per gather.
torchao's weights take a scale that somebody has computed before (``_precomputed_scale``; usually
``precompute_float8_dynamic_scale_for_fsdp``, after a step); where nobody has, `scaled_together` does it for a gather.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
import torch.distributed as dist

from vescale_fsdp.collectives import all_reduce_in_place, wait_for
from vescale_fsdp.runtime.setup.all_gather_hooks import inner_of
from vescale_fsdp.torch_private import foreach_norm_of

_LEAST = 1e-12  # torchao's: what the largest value of a weight counts at least


@runtime_checkable
class TakesScale(Protocol):
    """A float8 weight whose hook asks for its scale before it computes one, as torchao's does."""

    _precomputed_scale: torch.Tensor | None
    _dtype: torch.dtype


def takes_scale(tensor: object) -> TypeGuard[TakesScale]:
    """Whether a tensor is such a weight. Asked once: torch's subclasses answer slowly."""
    return isinstance(tensor, TakesScale) and tensor._dtype.is_floating_point and tensor._dtype.itemsize == 1


@contextmanager
def scaled_together(weights: Sequence[TakesScale], ranks: dist.ProcessGroup) -> Iterator[None]:
    """Give weights without a scale theirs for the hooks called inside; those that have one keep it.

    Args:
        weights: of a unit, this rank's rows of them; the same ones, and as many without a scale, on every rank.
        ranks: that hold the other rows.
    """
    without = [weight for weight in weights if weight._precomputed_scale is None]
    for dtype in {weight._dtype: None for weight in without}:  # of one model as a rule one
        alike = [weight for weight in without if weight._dtype is dtype]
        for weight, scale in zip(alike, _scales(alike, dtype, ranks), strict=True):
            weight._precomputed_scale = scale
    try:
        yield
    finally:
        for weight in without:  # the next gather may come behind an optimizer's step
            weight._precomputed_scale = None


def _scales(weights: Sequence[Any], dtype: torch.dtype, ranks: dist.ProcessGroup) -> Sequence[torch.Tensor]:
    """torchao's scales, 0-d each, bit for bit."""
    rows = [inner_of(weight) for weight in weights]
    held = [each for each in rows if each.numel()]  # torch has no largest value of nothing
    found = iter(foreach_norm_of(held, math.inf) if held else ())
    of_nothing = rows[0].new_zeros(())
    largest = torch.stack([next(found) if each.numel() else of_nothing for each in rows])
    largest = largest.to(torch.promote_types(largest.dtype, torch.float32))
    wait_for(all_reduce_in_place(largest, dist.ReduceOp.MAX, ranks))
    scales = torch.finfo(dtype).max / largest.double().clamp(min=_LEAST)
    return scales.float().unbind()
