"""Modes of torch that this package detects or exits (fake tensors, transforms, inference, profiling);
functions that are compiled where there is a compiler; an operator that needs few other modules.

Most of these names are private to torch. Only this file and `torch_private` use private names. A tag such as
"torch 2.11-2.13" gives the versions in which the private name was checked.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch

# torch 2.11-2.15: what torch.compile records in place of a device mesh.
from torch._library.fake_class_registry import FakeScriptObject

# torch 2.11-2.13: tensors without values, which FakeTensorMode creates to trace a model or to estimate its memory.
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

# torch 2.11-2.15: the tensors that torch.compile records operators with.
from torch._subclasses.functional_tensor import FunctionalTensor

# torch 2.11-2.15: sees every operator of a thread.
# torch 2.11-2.15: detects tensors that contain other tensors.
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from vescale_fsdp.errors import callers_level

Given = ParamSpec("Given")
T = TypeVar("T")

# torch 2.11-2.15: the product of two matrices of int8 as int32. Its only name is private.
int8_matmul = torch._int_mm

NULL_CONTEXT = nullcontext()  # re-entrant, so one object can be entered everywhere; steps enter it many times


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a FakeTensor, which has a shape and a dtype but no values (torch 2.11-2.13)."""
    return isinstance(tensor, FakeTensor)


def is_wrapper_subclass(value: object) -> bool:
    """Return whether a value is a tensor that contains plain tensors, with ``__tensor_flatten__`` (torch 2.11-2.15)."""
    return is_traceable_wrapper_subclass(value)


def eager(function: Callable[Given, T]) -> Callable[Given, T]:
    """Return a function that torch.compile does not trace: it breaks the graph, as a unit's hooks do."""
    return torch.compiler.disable(function)  # type: ignore[no-any-return]


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
    if not (enabled := [kind for kind in kinds if torch.is_autocast_enabled(kind)]):
        return NULL_CONTEXT
    stack = ExitStack()
    for kind in enabled:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


class _Silent(TorchDispatchMode):
    def __init__(self, error: Callable[[str], Exception]) -> None:
        super().__init__()
        self._error = error

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let steps compile: torch.compile refuses functions under any other mode, as of torchao's optimizers."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise self._error(str(func))
        return func(*args, **(kwargs or {}))


def without_collectives(error: Callable[[str], Exception]) -> AbstractContextManager[Any]:
    """Return a context in which a collective raises ``error(operator)``, before anything is sent (torch 2.11-2.15)."""
    return _Silent(error)


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


# A kernel for the CPU is compiled only for tensors of at least this many elements, unless the caller decides otherwise.
# For fewer, the compilation, which takes seconds, would cost more than it saves in a long training.
_COMPILED_NUMEL = 1 << 22
# Elements per chunk where nothing is compiled. On the CPU, temporary tensors then stay in a core's cache.
_CHUNK_NUMEL = {"cpu": 1 << 18}
_LARGE_CHUNK_NUMEL = 1 << 24  # on an accelerator, to launch few kernels
_OWN_PID = os.getpid()  # differs from the process id after a fork


def compiles_on(device_type: str) -> bool:
    """Return whether torch.compile works in this process for a device type. If not, the first call warns why.

    It needs a C++ compiler, on GPUs Triton too, and a device with a backend of Inductor. A child after a fork does not
    compile, because it would share the parent's compiler processes.
    """
    return _compiles(device_type, os.getpid() == _OWN_PID)


@functools.lru_cache(
    maxsize=16
)  # one entry per device type; a fork, which inherits the entries, needs others
def _compiles(device_type: str, is_own: bool) -> bool:
    reason = why_not_compiled(device_type) if is_own else "the process is a fork"
    if reason is not None:
        warnings.warn(f"functions on {device_type} run uncompiled: {reason}", stacklevel=callers_level())
    return reason is None


def why_not_compiled(device_type: str) -> str | None:
    """Return why `torch.compile` cannot compile for a device type on this machine (torch 2.11-2.13); None if it can."""
    # Imported here, since the compiler's modules take a second to import.
    from torch._inductor.codegen.common import get_scheduling_for_device, init_backend_registration
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch._inductor.utils import is_gpu
    from torch.utils._triton import has_triton

    init_backend_registration()
    if get_scheduling_for_device(device_type) is None:
        return f"torch.compile has no backend for {device_type}"
    if is_gpu(device_type) and not has_triton():
        return "Triton is not installed, or does not support this device"
    try:
        get_cpp_compiler()  # GPUs too: Triton compiles the code that launches its kernels
    except InvalidCxxCompiler:
        return "there is no C++ compiler; install one, or name it in the environment variable CXX"
    return None


class CompiledFunction:
    """A function of tensors that torch.compile fuses into a few kernels (Triton, or C++ on the CPU).

    It is compiled once for each kind of arguments: dtypes, devices, and all sizes but those of first dims. It runs as
    written where the process cannot compile (`compiles_on`), for meta and fake tensors, and inside any other dispatch
    mode, which must see the operators.

    Args:
        function: called as ``function(*sized, *fixed)``, without gradients and autocast. Its arguments are tensors, or
            tuples and lists of tensors: for another Python number it would be compiled again. It writes its results
            into its arguments. Indices of look-ups must be in bounds: compiled code does not check them.
        num_split: how many arguments have one number of rows, with all rows treated alike. The function is given some
            rows at a time where it runs as written, so that temporary tensors stay small. 0: it is given all.
        for_small: whether it is compiled for small tensors on the CPU too.
    """

    def __init__(self, function: Callable[..., None], *, num_split: int = 0, for_small: bool = False) -> None:
        self._function = function
        self._num_split = num_split
        self._for_small = for_small
        # The last `fixed` arguments with their kind: a step has the same for all its calls.
        self._fixed: tuple[Sequence[Any], Hashable] = ((), ())
        # Created at the first use, because torch.compile imports the compiler.
        self._compiled: Callable[..., None] | None = None
        self._kinds: set[Hashable] = set()  # for which it has been compiled
        self._cannot_compile = False

    def __call__(self, *sized: Any, fixed: Sequence[Any] = ()) -> None:
        """Run the function.

        Args:
            sized: arguments whose tensors have any number of rows. The first one is a tensor.
            fixed: further arguments. Another shape is another kind.
        """
        with without_grad(), without_autocast():
            if self._compiles(sized[0]) and self._run_compiled(sized, fixed):
                return
            if not self._num_split:
                self._function(*sized, *fixed)
                return
            rows, others = sized[: self._num_split], sized[self._num_split :]
            chunk_numel = _CHUNK_NUMEL.get(sized[0].device.type, _LARGE_CHUNK_NUMEL)
            num_rows = max(1, chunk_numel // max(1, sized[0][:1].numel()))
            for parts in zip(*(tensor.split(num_rows) for tensor in rows), strict=True):
                self._function(*parts, *others, *fixed)

    def _compiles(self, tensor: torch.Tensor) -> bool:
        if self._cannot_compile or tensor.is_meta or torch._C._len_torch_dispatch_stack():  # torch 2.11-2.13
            return False
        is_small = tensor.device.type == "cpu" and tensor.numel() < _COMPILED_NUMEL
        return (self._for_small or not is_small) and compiles_on(tensor.device.type)

    def _run_compiled(self, sized: Sequence[Any], fixed: Sequence[Any]) -> bool:
        """Run the compiled function; return False if its compilation fails."""
        if self._compiled is None:
            # In one graph: a compilation that fails then has not run a part of the function.
            # Its guards have compared the sizes of all arguments, so the generated code need not do so again.
            options: dict[str, Any] = {"assert_indirect_indexing": False, "size_asserts": False}
            self._compiled = torch.compile(self._function, fullgraph=True, options=options)
        if fixed is not self._fixed[0]:
            self._fixed = fixed, tuple([(each.dtype, each.device, each.shape) for each in _tensors(fixed)])
        any_size = _tensors(sized)
        # A first dim of 1 is never dynamic.
        kind = (
            tuple([(each.dtype, each.device, each.shape[1:], each.shape[0] == 1) for each in any_size]),
            self._fixed[1],
        )
        if kind in self._kinds:
            self._compiled(*sized, *fixed)
            return True
        for tensor in any_size:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)  # torch 2.11-2.13; no effect on sizes of 0 and 1
        try:
            # torch counts the compilations of a function, and gives up at 8. There is one for each kind.
            with torch._dynamo.utils.disable_cache_limit():  # torch 2.11-2.13
                self._compiled(*sized, *fixed)
        except RuntimeError as error:
            from torch._dynamo.exc import TorchDynamoException  # torch 2.11-2.13; loaded by torch.compile

            if not isinstance(error, TorchDynamoException):
                raise
            self._cannot_compile = True
            warnings.warn(
                f"{self._function.__qualname__} runs uncompiled, because torch.compile failed: {error}",
                stacklevel=callers_level(),
            )
            return False
        self._kinds.add(kind)
        return True


def _tensors(tree: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors in tuples and lists."""
    found = []
    for each in tree:
        if isinstance(each, torch.Tensor):
            found.append(each)
        else:
            found += _tensors(each)
    return found
