"""Parameters that sharded modules no longer hold, and the optimizers that still do.

`fully_shard` puts sharded parameters in place of the original ones. An optimizer built before it keeps the originals;
they never get a gradient, so torch's optimizers skip them and train nothing, without a word. Here its first step says
so. torch calls a global hook before every step; it is set while such parameters are alive, and only then: where the
optimizer is built after sharding, nobody holds the originals, and no hook is left.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from vescale_fsdp.errors import LifecycleError


class _Replaced:
    """The replaced parameters that somebody still holds, each with its name in the unit that took it."""

    def __init__(self) -> None:
        self._alive: dict[
            int, tuple[weakref.ref[torch.Tensor], str]
        ] = {}  # by id; entries go with their tensors
        self._hook: RemovableHandle | None = None

    def add(self, param: torch.Tensor, fqn: str) -> None:
        key = id(param)
        self._alive[key] = (weakref.ref(param, lambda _: self._gone(key)), fqn)
        if self._hook is None:
            self._hook = register_optimizer_step_pre_hook(_check_step)

    def _gone(self, key: int) -> None:
        self._alive.pop(key, None)
        if not self._alive and self._hook is not None:
            self._hook.remove()
            self._hook = None

    def name_of(self, param: torch.Tensor) -> str | None:
        found = self._alive.get(id(param))
        return found[1] if found is not None and found[0]() is param else None


_replaced = _Replaced()


def note_replaced(param: torch.Tensor, fqn: str) -> None:
    """Remember that a sharded parameter stands in place of this one."""
    _replaced.add(param, fqn)


def replaced_as(param: torch.Tensor) -> str | None:
    """The name under which a unit took this parameter, or None."""
    return _replaced.name_of(param)


def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Called by torch before every optimizer's step."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    stale = [name for param in params if (name := replaced_as(param)) is not None]
    if stale:
        raise LifecycleError(
            "The optimizer holds parameters that the model no longer has: its step would train nothing.",
            expected="an optimizer of the sharded parameters",
            got=f"{len(stale)} of {len(params)} replaced since it was built: {', '.join(stale[:4])}",
            where=type(optimizer).__name__,
            todo="build the optimizer after fully_shard (and after tensors were assigned to the model), from "
            "model.parameters()",
        )
