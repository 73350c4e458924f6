"""Modes of torch that what we do must know of, or step out of: no values, transforms, inference, profiling.

And pools that memory is taken from: process groups' own, and the symmetric memory of ranks.

Torch keeps most of these names to itself; beside `torch_private` this is the one file that has them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

# torch 2.11-2.15: memory that ranks reach into; there is no public name for it yet.
import torch.distributed._symmetric_memory as symmetric

# torch 2.11-2.13: tensors of a mode that traces or estimates memory; their values cannot be asked for.
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

Given = ParamSpec("Given")
T = TypeVar("T")

NULL_CONTEXT = nullcontext()  # may be entered again inside itself: one for all uses, of which a step has many


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no values, because a mode that computes shapes only is active (torch 2.11-2.13)."""
    return isinstance(tensor, FakeTensor)


def outside_fake_mode() -> AbstractContextManager[Any]:
    """Compute what is inside with values although a mode that computes shapes only is active (torch 2.11-2.15)."""
    return unset_fake_temporarily()


def fake_mode_of(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """The mode that a tensor without values belongs to, so that others are made like it; nothing for any other."""
    return tensor.fake_mode if isinstance(tensor, FakeTensor) else NULL_CONTEXT


def in_functorch() -> bool:
    """Whether the caller runs inside a transform of ``torch.func`` (torch 2.11-2.13)."""
    return torch._C._are_functorch_transforms_active()


def outside_modes() -> AbstractContextManager[Any]:
    """Do what is inside as if no transform of ``torch.func`` (torch 2.11-2.13) nor inference mode were active."""
    # A transform's wrapped tensors have no storage to resize, and refuse requires_grad_. Tensors made in inference
    # mode have no version counter, and no later forward could save them for its backward.
    left = torch.inference_mode(False) if torch.is_inference_mode_enabled() else NULL_CONTEXT
    if not in_functorch():
        return left
    both = ExitStack()
    both.enter_context(left)
    both.enter_context(torch._C._DisableFuncTorch())
    return both


def without_grad() -> AbstractContextManager[Any]:
    """``torch.no_grad()`` where autograd records: entering it costs microseconds, and hooks run where it does not."""
    return torch.no_grad() if torch.is_grad_enabled() else NULL_CONTEXT


def without_autocast() -> AbstractContextManager[Any]:
    """Compute what is inside in the dtypes of its tensors."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = {"cpu"} if accelerator is None else {"cpu", accelerator.type}
    left = ExitStack()
    for kind in kinds:
        if torch.is_autocast_enabled(kind):
            left.enter_context(torch.autocast(kind, enabled=False))
    return left


def plainly(function: Callable[Given, T]) -> Callable[Given, T]:
    """A function that runs without gradients, and outside the caller's transforms, inference mode and autocast.

    Tensors that it makes and keeps are used later, elsewhere and by other threads, which know nothing of such modes.
    """

    @functools.wraps(function)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> T:
        with outside_modes(), torch.no_grad(), without_autocast():
            return function(*args, **kwargs)

    return run


def profiled(label: str, name: str) -> AbstractContextManager[Any]:
    """A profiler range called ``label + name``; nothing at all while no profiler runs.

    torch 2.11-2.13: ``record_function`` costs microseconds per use even without a profiler.
    """
    if torch.autograd.profiler._is_profiler_enabled:
        return torch.profiler.record_function(label + name)
    return NULL_CONTEXT


def process_group_pool(group: dist.ProcessGroup, device: torch.device) -> Any:
    """A `torch.cuda.MemPool` of the allocator that a group's backend brings (torch 2.11-2.15: NCCL's)."""
    backend: Any = group._get_backend(device)
    return torch.cuda.MemPool(backend.mem_allocator)


def symmetric_pool(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The `torch.cuda.MemPool` of NCCL's symmetric memory (torch 2.13-2.15). A collective of the group."""
    symmetric.set_backend("NCCL")
    dist.barrier(group=group)  # a group makes its communicator at its first collective
    return symmetric.get_mem_pool(device)


def meet_over(buffer: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Tell the ranks of a group where each other's symmetric buffers lie (torch 2.11-2.15). A collective."""
    symmetric.rendezvous(buffer, group=group.group_name)
