"""Allocate a tensor that the state lacks, such as optimizer state before the first step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Replicate

from vescale_fsdp.checkpoint.manifest.torch_dtypes import dtype_named
from vescale_fsdp.checkpoint.state.matching.catalogue import Catalogue
from vescale_fsdp.errors import CheckpointError
from vescale_fsdp.torch_private import ELEMENTWISE_OPTIMIZERS

# Kinds of state that are single numbers, even where the parameter is 0-d and its other state has the same shape.
_PER_PARAMETER = ("step", "eta", "mu", "mu_product")


@dataclass(eq=False)
class NewTensor:
    """A tensor that the state lacks, to be allocated and filled from the checkpoint.

    Attributes:
        name: name of the leaf.
        number: number of the tensor in the catalogue.
        param: for optimizer state, the parameter; else None.
        kind: for optimizer state, its kind, such as ``exp_avg``.
        optimizer: for optimizer state, the optimizer.
        value: the tensor after `make`; None before.
    """

    name: str
    number: int
    param: torch.Tensor | None = None
    kind: str = ""
    optimizer: torch.optim.Optimizer | None = None
    value: torch.Tensor | None = None

    def make(self, catalogue: Catalogue) -> torch.Tensor:
        """Allocate the tensor: sharded like the parameter if it has the parameter's shape, else unsharded.

        Raises:
            CheckpointError: if the sharding is unknown, or the shape does not fit the parameter.
        """
        where, stored = catalogue.where, catalogue.stored(self.number, None)
        shape = stored.shape
        param = self.param
        is_like_param = param is not None and tuple(param.shape) == shape
        is_like_param = is_like_param and (bool(shape) or self.kind not in _PER_PARAMETER)
        # A load that casts gives new state its parameter's dtype, as optimizers do; counts keep theirs.
        if param is not None and is_like_param:
            stored = catalogue.stored(self.number, param.dtype)
        dtype = dtype_named(stored.dtype)
        if param is None:
            if stored.is_sharded:
                raise CheckpointError(
                    "An object of the state lacks a sharded tensor of the checkpoint.",
                    expected="a tensor of that name in its state_dict(), which defines the sharding",
                    got="no such tensor",
                    where=f"{self.name} in {where}",
                    todo="for an optimizer, put the optimizer itself and its module into the state",
                )
            self.value = torch.empty(shape, dtype=dtype, device="cpu")
        elif is_like_param:
            self.value = torch.empty_like(param, dtype=dtype, requires_grad=False)
        # Single numbers, such as step counts, are on the CPU as in torch. Those of LBFGS are created below.
        elif not shape and not isinstance(self.optimizer, torch.optim.LBFGS):
            self.value = torch.empty((), dtype=dtype, device="cpu")
        elif isinstance(self.optimizer, ELEMENTWISE_OPTIMIZERS):
            raise CheckpointError(
                "Optimizer state in the checkpoint has another shape than its parameter.",
                expected=f"{list(param.shape)}, the parameter's",
                got=list(shape),
                where=f"{self.name} in {where}",
                todo="build the model as it was at the save",
            )
        elif not isinstance(param, DTensor):
            self.value = torch.empty(shape, dtype=dtype, device=param.device)
        elif stored.is_sharded:
            raise CheckpointError(
                "The sharding of optimizer state is unknown: the state has another shape than its parameter.",
                expected="state in the optimizer, which defines the sharding",
                got=f"{list(shape)} for a parameter of {list(param.shape)}, and no state in the optimizer",
                where=f"{self.name} in {where}",
                todo="use an optimizer that creates its state when it is built",
            )
        else:
            # Replicated DTensors, also for numbers: LBFGS computes them from the gradients of all parameters.
            whole = torch.empty(shape, dtype=dtype, device=param.to_local().device)
            replicated = [Replicate()] * param.device_mesh.ndim
            # `run_check` would communicate.
            self.value = DTensor.from_local(whole, param.device_mesh, replicated, run_check=False)
        return self.value
