"""Gradients that wait for a reduction: tensors without values that can be zeroed, and refuse everything else by name.

Under ``no_sync`` a parameter's gradients are summed in the runtime's buffer. Its ``.grad`` must then be something:
``zero_grad`` does nothing where ``.grad`` is None, so the sum would survive it. torch's main branch has such a class,
too (FSDPGrad). `WaitingValues` is also ``.grad`` of a gathered parameter whose sharded parameter has a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vescale_fsdp.errors import LifecycleError
from vescale_fsdp.torch_private import local_of, wrapper_like

aten = torch.ops.aten


class WaitingValues(torch.Tensor):
    """The values of a gradient that is not reduced: a tensor with shape, dtype and device, but without memory.

    Args:
        like: a tensor of the gradient's shape, dtype and device.
        parameter: its name, for the error.
        zero: called by ``zero_()``.
        is_gathered: whether the parameter is a gathered one, whose reduced gradient is at the sharded parameter.
        reduced: the gradient that earlier reductions have left, to which this one will be added.

    Attributes:
        added: the gradient that autograd has added, which the runtime takes.
        is_added_to: whether autograd has added a gradient.
    """

    parameter: str
    zero: Callable[[], None]
    reduced: torch.Tensor | None
    added: torch.Tensor | None
    is_added_to: bool
    is_gathered: bool

    @staticmethod
    def __new__(
        cls: type[WaitingValues],
        like: torch.Tensor,
        parameter: str,
        zero: Callable[[], None],
        reduced: torch.Tensor | None = None,
        *,
        is_gathered: bool = False,
    ) -> WaitingValues:
        values: WaitingValues = wrapper_like(cls, like)
        values.parameter, values.zero, values.reduced = parameter, zero, reduced
        values.added, values.is_added_to, values.is_gathered = None, False, is_gathered
        return values

    def __repr__(self, **unused: Any) -> str:  # type: ignore[override]
        return f"waits for a reduction, shape={tuple(self.shape)}"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = args[0]
        if func in (aten.detach.default, aten.alias.default):
            return WaitingValues(
                first, first.parameter, first.zero, first.reduced, is_gathered=first.is_gathered
            )
        if func is aten.zero_.default:
            first.zero()
            return first
        if func is aten._foreach_zero_.default:
            for each in first:
                each.zero_()
            return None
        if func in (aten.add.Tensor, aten.add_.Tensor) and len(args) == 2 and not kwargs:  # by autograd
            first.added = args[1] if first.added is None else first.added + args[1]
            first.is_added_to = True
            return args[1]
        given = (*args, *(kwargs or {}).values())
        flat = [each for value in given for each in (value if isinstance(value, (list, tuple)) else (value,))]
        waiting = next(each for each in flat if isinstance(each, WaitingValues))
        raise waiting.refusal(f"{func}")

    def refusal(self, reader: str) -> LifecycleError:
        """Return the error for an operator or optimizer that reads the gradient."""
        if self.is_gathered:
            return LifecycleError(
                "Gradients are at the sharded parameters, and cannot be read at gathered ones.",
                expected="module.reshard() before gradients are read or clipped",
                got=reader,
                where=f"gradient of {self.parameter}",
                todo="call module.reshard(), and look the parameters up again",
            )
        return LifecycleError(
            "Gradients are read that are not reduced yet: the last backward ran without gradient synchronization.",
            expected="a backward with synchronization before gradients are read, clipped or stepped",
            got=reader,
            where=f"gradient of {self.parameter}",
            todo="run the last micro-batch's backward outside of no_sync(), or after "
            "set_requires_gradient_sync(True) and set_requires_all_reduce(True); zero_grad() drops the sums",
        )


def waiting_in(grad: torch.Tensor | None) -> WaitingValues | None:
    """Return the values of a ``.grad`` that waits for a reduction; None for any other."""
    local = None if grad is None else local_of(grad)
    return local if isinstance(local, WaitingValues) else None
