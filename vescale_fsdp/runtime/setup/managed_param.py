"""ManagedParam: one parameter of a group, in both its forms, and the modules that hold it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import nn

from vescale_fsdp.errors import LifecycleError
from vescale_fsdp.layout.group_layout import TensorSlot
from vescale_fsdp.runtime.setup.tensor_parallel import PriorSharding
from vescale_fsdp.torch_private import DTensorSpec


@dataclass
class ManagedParam:
    """One parameter: where it lies, which modules hold it, and its two Parameter objects."""

    slot: TensorSlot
    owners: list[tuple[nn.Module, str]]  # every module attribute that is this parameter
    local: slice  # of a shard: this rank's piece
    sharded: nn.Parameter  # RaggedDTensor
    spec: DTensorSpec
    piece: torch.Tensor  # the view of the shard that ``sharded`` was given
    prior: PriorSharding  # how tensor or expert parallelism cut it before
    unsharded: nn.Parameter | None = None
    watched: bool = False  # autograd tells us when its unsharded gradient is there

    def __post_init__(self) -> None:
        self.take(self.sharded)

    def take(self, sharded: nn.Parameter) -> None:
        """Have this as the sharded parameter from now on."""
        self.sharded = sharded
        _homes[id(sharded)] = self

    def foreign(self) -> list[nn.Parameter | None]:
        """What owners hold that the group did not give them; None for an owner that has no such parameter now."""
        found: list[nn.Parameter | None] = []
        for module, name in self.owners:
            held = module._parameters.get(name)
            if held is not self.sharded and (held is None or held is not self.unsharded):
                found.append(held)
        return found

    def set_on_modules(self, parameter: nn.Parameter) -> None:
        """Make every owner hold ``parameter``."""
        for module, name in self.owners:
            # Straight into the dict: nn.Module.__setattr__ would re-register, and costs 10 times as much.
            module._parameters[name] = parameter


# By id of the sharded parameter.
_homes: weakref.WeakValueDictionary[int, ManagedParam] = weakref.WeakValueDictionary()


def home_of(parameter: nn.Parameter) -> ManagedParam | None:
    """What has this as its sharded parameter."""
    found = _homes.get(id(parameter))
    return found if found is not None and found.sharded is parameter else None


class GradHook:
    """Called by autograd when an unsharded parameter has its gradient. Holds no cycle alive.

    Args:
        take: a bound method that is given the parameter and its gradient.
    """

    def __init__(self, take: Callable[[ManagedParam, torch.Tensor], None], param: ManagedParam) -> None:
        self._take = weakref.WeakMethod(take)
        self._param = weakref.ref(param)

    def __call__(self, unsharded: torch.Tensor) -> None:
        grad, unsharded.grad = unsharded.grad, None
        take, param = self._take(), self._param()
        if grad is not None and take is not None and param is not None:
            take(param, grad)


def refuse_replaced(fqns: list[str]) -> NoReturn:
    """Of parameters that modules no longer held when their unit was resharded."""
    raise LifecycleError(
        "Parameters were replaced or deleted while their unit was unsharded; the sharded ones are back in place.",
        expected="the unsharded parameters that the gather handed out",
        got=", ".join(fqns[:4]),
        todo="write into the sharded parameters instead: load_state_dict, or copy_ of a tensor that "
        "vescale_fsdp.distribute_tensor made",
    )
