"""Modes of torch that what we do must know of, or step out of: tensors without values, transforms, inference.

Torch keeps most of these names to itself; beside `torch_private` this is the one file that has them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

# torch 2.11-2.13: tensors of a mode that traces or estimates memory; their values cannot be asked for.
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

__all__ = ["fake_mode_of", "in_functorch", "is_fake", "outside_fake_mode", "outside_modes"]


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no values, because a mode that computes shapes only is active (torch 2.11-2.13)."""
    return isinstance(tensor, FakeTensor)


def outside_fake_mode() -> AbstractContextManager[Any]:
    """Compute what is inside with values although a mode that computes shapes only is active (torch 2.11-2.15)."""
    return unset_fake_temporarily()


def fake_mode_of(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """The mode that a tensor without values belongs to, so that others are made like it; nothing for any other."""
    return tensor.fake_mode if isinstance(tensor, FakeTensor) else nullcontext()


def in_functorch() -> bool:
    """Whether the caller runs inside a transform of ``torch.func`` (torch 2.11-2.13)."""
    return torch._C._are_functorch_transforms_active()


def outside_modes() -> AbstractContextManager[Any]:
    """Do what is inside as if no transform of ``torch.func`` (torch 2.11-2.13) nor inference mode were active."""
    # A transform's wrapped tensors have no storage to resize, and refuse requires_grad_. Tensors made in inference
    # mode have no version counter, and no later forward could save them for its backward.
    left = nullcontext() if not torch.is_inference_mode_enabled() else torch.inference_mode(False)
    if not in_functorch():
        return left
    both = ExitStack()
    both.enter_context(left)
    both.enter_context(torch._C._DisableFuncTorch())
    return both
