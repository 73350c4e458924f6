"""Modes of torch that this package detects or exits (fake tensors, transforms, inference, profiling); memory pools.

Most of these names are private to torch. Only this file and `torch_private` use private names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

# torch 2.11-2.15: memory that other ranks can access; it has no public name yet.
import torch.distributed._symmetric_memory as symmetric

# torch 2.11-2.13: tensors without values, which a mode for tracing or for memory estimates creates.
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

Given = ParamSpec("Given")
T = TypeVar("T")

NULL_CONTEXT = nullcontext()  # re-entrant, so one object serves the many uses of a step


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor is fake: it has a shape and a dtype, but no values (torch 2.11-2.13)."""
    return isinstance(tensor, FakeTensor)


def outside_fake_mode() -> AbstractContextManager[Any]:
    """A context that suspends a fake mode, so that operators compute values (torch 2.11-2.15)."""
    return unset_fake_temporarily()


def fake_mode_of(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """The fake mode of a tensor without values, to create more fake tensors; a null context for any other tensor."""
    return tensor.fake_mode if isinstance(tensor, FakeTensor) else NULL_CONTEXT


def in_functorch() -> bool:
    """Whether the caller runs inside a transform of ``torch.func`` (torch 2.11-2.13)."""
    return torch._C._are_functorch_transforms_active()


def outside_modes() -> AbstractContextManager[Any]:
    """A context outside the transforms of ``torch.func`` (torch 2.11-2.13) and outside inference mode."""
    # A transform's wrapped tensors have no storage to resize, and refuse requires_grad_. Tensors created in inference
    # mode have no version counter, and no later forward could save them for its backward.
    no_inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else NULL_CONTEXT
    if not in_functorch():
        return no_inference
    both = ExitStack()
    both.enter_context(no_inference)
    both.enter_context(torch._C._DisableFuncTorch())
    return both


def without_grad() -> AbstractContextManager[Any]:
    """``torch.no_grad()``; a null context if autograd is not recording, since no_grad costs microseconds."""
    return torch.no_grad() if torch.is_grad_enabled() else NULL_CONTEXT


def without_autocast() -> AbstractContextManager[Any]:
    """A context without autocast, in which operators compute in the dtypes of their tensors."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = {"cpu"} if accelerator is None else {"cpu", accelerator.type}
    stack = ExitStack()
    for kind in kinds:
        if torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


def plainly(function: Callable[Given, T]) -> Callable[Given, T]:
    """Decorator: run without gradients, and outside the caller's transforms, inference mode and autocast.

    Use it for functions that create tensors for later calls or other threads, outside the caller's modes.
    """

    @functools.wraps(function)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> T:
        with outside_modes(), torch.no_grad(), without_autocast():
            return function(*args, **kwargs)

    return run


def profiled(label: str, name: str) -> AbstractContextManager[Any]:
    """A profiler range named ``label + name``; a null context while no profiler runs.

    torch 2.11-2.13: ``record_function`` costs microseconds per use even without a profiler.
    """
    if torch.autograd.profiler._is_profiler_enabled:
        return torch.profiler.record_function(label + name)
    return NULL_CONTEXT


def process_group_pool(group: dist.ProcessGroup, device: torch.device) -> Any:
    """A `torch.cuda.MemPool` on the allocator of a group's backend (torch 2.11-2.15: NCCL's has one)."""
    backend: Any = group._get_backend(device)
    return torch.cuda.MemPool(backend.mem_allocator)


def symmetric_pool(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The `torch.cuda.MemPool` of NCCL's symmetric memory (torch 2.13-2.15). A collective of the group."""
    symmetric.set_backend("NCCL")
    dist.barrier(group=group)  # the first collective of a group creates its communicator
    return symmetric.get_mem_pool(device)


def meet_over(buffer: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Exchange the addresses of a symmetric buffer among the ranks of a group (torch 2.11-2.15). A collective."""
    symmetric.rendezvous(buffer, group=group.group_name)
