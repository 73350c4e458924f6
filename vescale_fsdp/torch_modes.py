"""Modes of torch that this package detects or exits (fake tensors, transforms, inference, profiling); memory pools.

Most of these names are private to torch. Only this file and `torch_private` use private names. A tag such as
"torch 2.11-2.13" gives the versions in which the private name was checked.
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

# torch 2.11-2.13: tensors without values, which FakeTensorMode creates to trace a model or to estimate its memory.
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

Given = ParamSpec("Given")
T = TypeVar("T")

NULL_CONTEXT = nullcontext()  # re-entrant, so one object can be entered everywhere; steps enter it many times


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a FakeTensor, which has a shape and a dtype but no values (torch 2.11-2.13)."""
    return isinstance(tensor, FakeTensor)


def outside_fake_mode() -> AbstractContextManager[Any]:
    """Return a context that suspends FakeTensorMode, so that operators compute values (torch 2.11-2.15)."""
    return unset_fake_temporarily()


def fake_mode_of(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Return a context that creates fake tensors if ``tensor`` is fake; a null context otherwise."""
    return tensor.fake_mode if isinstance(tensor, FakeTensor) else NULL_CONTEXT


def in_functorch() -> bool:
    """Return whether the caller runs inside a transform of ``torch.func`` (torch 2.11-2.13)."""
    return torch._C._are_functorch_transforms_active()


def outside_modes() -> AbstractContextManager[Any]:
    """Return a context that suspends the transforms of ``torch.func`` (torch 2.11-2.13) and inference mode."""
    # The tensors that transforms wrap have no storage to resize, and refuse requires_grad_. Tensors created in
    # inference mode have no version counter, and autograd cannot save them for a backward.
    no_inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else NULL_CONTEXT
    if not in_functorch():
        return no_inference
    both = ExitStack()
    both.enter_context(no_inference)
    both.enter_context(torch._C._DisableFuncTorch())
    return both


def without_grad() -> AbstractContextManager[Any]:
    """Return ``torch.no_grad()``, or a null context if gradients are off already, since no_grad costs microseconds."""
    return torch.no_grad() if torch.is_grad_enabled() else NULL_CONTEXT


def without_autocast() -> AbstractContextManager[Any]:
    """Return a context without autocast, in which operators compute in the dtypes of their tensors."""
    # Autocast is on or off per device type, so it is switched off for the host and for the accelerator.
    accelerator = torch.accelerator.current_accelerator()
    kinds = {"cpu"} if accelerator is None else {"cpu", accelerator.type}
    stack = ExitStack()
    for kind in kinds:
        if torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


def plainly(function: Callable[Given, T]) -> Callable[Given, T]:
    """Decorate a function to run without gradients, and outside the caller's transforms, inference mode and autocast.

    Use it for functions whose tensors are used later or by other threads, where the caller's modes do not hold.
    """

    @functools.wraps(function)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> T:
        with outside_modes(), torch.no_grad(), without_autocast():
            return function(*args, **kwargs)

    return run


def profiled(label: str, name: str) -> AbstractContextManager[Any]:
    """Return a profiler range named ``label + name``, or a null context while no profiler runs.

    ``record_function`` costs microseconds per use even without a profiler (torch 2.11-2.13).
    """
    if torch.autograd.profiler._is_profiler_enabled:
        return torch.profiler.record_function(label + name)
    return NULL_CONTEXT


def process_group_pool(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return a memory pool that uses the allocator of a group's NCCL backend (torch 2.11-2.15)."""
    backend: Any = group._get_backend(device)
    return torch.get_device_module(device).MemPool(backend.mem_allocator)


def symmetric_pool(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the memory pool of NCCL's symmetric memory (torch 2.13-2.15). A collective of the group."""
    symmetric.set_backend("NCCL")
    dist.barrier(group=group)  # the first collective of a group creates its communicator
    return symmetric.get_mem_pool(device)


def meet_over(buffer: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Exchange a symmetric buffer's addresses between the ranks of a group (torch 2.11-2.15). A collective."""
    symmetric.rendezvous(buffer, group=group.group_name)
