"""ManagedParam: one parameter of a group, in both its forms, and the modules that hold it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from vescale_fsdp.layout.group_layout import TensorSlot
from vescale_fsdp.runtime.setup.tensor_parallel import PriorSharding
from vescale_fsdp.torch_private import DTensorSpec

__all__ = ["ManagedParam"]


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
    has_grad: bool = False  # its unsharded gradient is in the gradient buffer

    def foreign(self) -> list[nn.Parameter | None]:
        """What owners hold that the group did not give them; None for an owner that has no such parameter now."""
        held = [module._parameters.get(name) for module, name in self.owners]
        return [
            each for each in held if each is not self.sharded and (each is None or each is not self.unsharded)
        ]

    def set_on_modules(self, parameter: nn.Parameter) -> None:
        """Make every owner hold ``parameter``."""
        for module, name in self.owners:
            # Straight into the dict: nn.Module.__setattr__ would re-register, and costs 10 times as much.
            module._parameters[name] = parameter
