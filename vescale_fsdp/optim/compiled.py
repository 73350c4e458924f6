"""Steps that `torch.compile` fuses into a few kernels, in processes that can compile.

A process cannot compile without a C++ compiler (CPU) or Triton (GPUs), on a device for which Inductor has no backend,
or after a fork. Then the function runs eagerly, and a warning names the reason once per process and device type. A
child after a fork does not compile, because it would share the parent's compiler processes.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any

import torch

from vescale_fsdp.torch_private import any_number_of_compilations, mark_dynamic, why_not_compiled

_OWN_PID = os.getpid()  # differs from the process id after a fork


def compiles_on(device_type: str) -> bool:
    """Return whether this process compiles steps for a device type. If not, the first call warns with the reason."""
    return _compiles(device_type, os.getpid() == _OWN_PID)


@lru_cache(maxsize=16)  # one entry per device type; a fork, which inherits the entries, needs others
def _compiles(device_type: str, is_own: bool) -> bool:
    reason = why_not_compiled(device_type) if is_own else "the process is a fork"
    if reason is not None:
        warnings.warn(
            f"compiled=True: steps on {device_type} are not compiled, but eager: {reason}", stacklevel=2
        )
    return reason is None


class CompiledFunction:
    """A function that is compiled at the first call of each kind, and never again for this kind.

    Args:
        function: changes tensors in place. Its arguments are tensors, or tuples and lists of tensors: for another
            Python number it would be compiled again.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        # Made at the first call, since it imports the compiler.
        self._compiled: Callable[..., None] | None = None
        self._kinds: set[Hashable] = set()

    def __call__(self, kind: Hashable, sized: Sequence[torch.Tensor], *args: Any) -> None:
        """Call the function with ``args``.

        Args:
            kind: a key for everything on which compiled code depends, except the sizes of first dims: dtypes, devices,
                other dims, and whether a first dim is 1, which is never dynamic.
            sized: the tensors in ``args`` whose first dim has any size.
        """
        if self._compiled is None:
            self._compiled = torch.compile(self._function, fullgraph=True)
        if kind in self._kinds:
            self._compiled(*args)
            return
        for tensor in sized:
            mark_dynamic(tensor, 0)
        # torch counts the compilations of a function, and gives up at 8. There is one for each kind.
        with any_number_of_compilations():
            self._compiled(*args)
        self._kinds.add(kind)
