"""Modes of torch that this package detects or exits (fake tensors, transforms, inference, profiling); memory pools;
functions that are compiled where there is a compiler.

Most of these names are private to torch. Only this file and `torch_private` use private names. A tag such as
"torch 2.11-2.13" gives the versions in which the private name was checked.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

# torch 2.11-2.15: memory that other ranks can access; it has no public name yet.
import torch.distributed._symmetric_memory as symmetric

# torch 2.11-2.15: what torch.compile records in place of a device mesh.
from torch._library.fake_class_registry import FakeScriptObject

# torch 2.11-2.13: tensors without values, which FakeTensorMode creates to trace a model or to estimate its memory.
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

# torch 2.11-2.15: the tensors that torch.compile records operators with.
from torch._subclasses.functional_tensor import FunctionalTensor

Given = ParamSpec("Given")
T = TypeVar("T")

NULL_CONTEXT = nullcontext()  # re-entrant, so one object can be entered everywhere; steps enter it many times


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a FakeTensor, which has a shape and a dtype but no values (torch 2.11-2.13)."""
    return isinstance(tensor, FakeTensor)


def is_traced(tensor: torch.Tensor) -> bool:
    """Return whether operators on a tensor are recorded, or have no values (torch 2.11-2.15)."""
    return isinstance(tensor, (FakeTensor, FunctionalTensor))


def real_object(recorded: T) -> T:
    """Return the object that torch.compile has replaced while it records a graph, or the object itself."""
    return recorded.real_obj if isinstance(recorded, FakeScriptObject) else recorded  # type: ignore[no-any-return]


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


# A kernel for the CPU is compiled only for tensors of at least this many elements. For fewer, the compilation, which
# takes seconds, would cost more than it saves in a long training.
_COMPILED_NUMEL = 1 << 22
# Elements per chunk where nothing is compiled. On the CPU, temporary tensors then stay in a core's cache.
_CHUNK_NUMEL = {"cpu": 1 << 18}
_LARGE_CHUNK_NUMEL = 1 << 24  # on an accelerator, to launch few kernels


class CompiledByRows:
    """A function of tensors that treats every row alike. It runs as one compiled kernel (Triton, or C++ on the CPU).

    It runs as written on a limited number of rows at a time, so that temporary tensors stay small, if there is no
    compiler, for small tensors on the CPU, for fake tensors, and inside any other dispatch mode, which must see the
    operators. Both ways give the same bits.

    Args:
        function: called as ``function(*rows, *others)`` without gradients; writes its results into its arguments.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        self._compiled: Callable[..., None] | None = (
            None  # created at the first use, because torch.compile is slow
        )
        self._cannot_compile = False

    def __call__(self, rows: Sequence[torch.Tensor], *others: torch.Tensor) -> None:
        """Run the function.

        Args:
            rows: tensors with the same number of rows, which the function may be given in parts.
            others: tensors that the function is given whole.
        """
        first = rows[0]
        with torch.no_grad(), without_autocast():
            if self._compiles(first) and self._run_compiled(*rows, *others):
                return
            chunk_numel = _CHUNK_NUMEL.get(first.device.type, _LARGE_CHUNK_NUMEL)
            num_rows = max(1, chunk_numel // max(1, first[:1].numel()))
            for parts in zip(*(tensor.split(num_rows) for tensor in rows), strict=True):
                self._function(*parts, *others)

    def _compiles(self, tensor: torch.Tensor) -> bool:
        if self._cannot_compile or tensor.is_meta or torch._C._len_torch_dispatch_stack():  # torch 2.11-2.13
            return False
        return tensor.device.type != "cpu" or tensor.numel() >= _COMPILED_NUMEL

    def _run_compiled(self, *tensors: torch.Tensor) -> bool:
        """Run the compiled function; return False if it cannot be compiled here."""
        if self._compiled is None:
            # Dynamic sizes, because units of all sizes use one kernel.
            self._compiled = torch.compile(self._function, dynamic=True)
        try:
            self._compiled(*tensors)
        except RuntimeError as error:
            from torch._dynamo.exc import TorchDynamoException  # torch 2.11-2.13; loaded by torch.compile

            if not isinstance(error, TorchDynamoException):
                raise
            self._cannot_compile = True
            warnings.warn(
                f"{self._function.__qualname__} runs uncompiled, because torch.compile failed: {error}",
                stacklevel=2,
            )
            return False
        return True


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
