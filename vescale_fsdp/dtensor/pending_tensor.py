"""Tensors on their way to other placements, while the program goes on."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp.dtensor.ragged_dtensor import wrap_like
from vescale_fsdp.dtensor.redistribute import start_redistribution
from vescale_fsdp.dtensor.spec import make_spec
from vescale_fsdp.torch_private import local_of


class PendingTensor:
    """A tensor on its way to other placements; `wait` returns it. Not differentiable.

    Examples:
        >>> import torch
        >>> from torch.distributed.tensor import Replicate
        >>> from vescale_fsdp import fully_shard
        >>> model = fully_shard(torch.nn.Linear(2, 4))
        >>> pending = PendingTensor(model.weight, [Replicate()])
        >>> pending.wait().to_local().shape
        torch.Size([4, 2])
    """

    def __init__(self, tensor: DTensor, placements: Sequence[Placement]) -> None:
        self._source = tensor
        self._target = make_spec(tensor.device_mesh, placements, tensor.shape, tensor.dtype)
        self._move = start_redistribution(local_of(tensor), tensor._spec, self._target)

    def wait(self) -> DTensor:
        """The tensor under its new placements, once it is here."""
        return wrap_like(self._move.wait(), self._target, like=self._source)


def redistribute_async(tensor: DTensor, placements: Sequence[Placement]) -> PendingTensor:
    """Start `redistribute` and go on computing; `PendingTensor.wait` gives the result.

    All ranks start and wait in the same order. Between mesh axes that change their cut too, only the first
    collective overlaps. The tensor must not be written before the wait.

    Examples:
        >>> import torch
        >>> from torch.distributed.tensor import Replicate
        >>> from vescale_fsdp import fully_shard
        >>> model = fully_shard(torch.nn.Linear(2, 4))
        >>> pending = redistribute_async(model.weight, [Replicate()])  # ... other work meanwhile ...
        >>> pending.wait().to_local().shape
        torch.Size([4, 2])
    """
    return PendingTensor(tensor, placements)
