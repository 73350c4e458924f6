"""Tensors that a load makes, because the object that takes them does not have them yet."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Replicate

from vescale_fsdp.errors import CheckpointError

_PER_PARAMETER = ("step", "eta", "mu", "mu_product")  # one number for each parameter in torch's optimizers

# Optimizers of torch whose state has the shape of the parameter, except for single numbers.
_SHAPED_AS_PARAMETERS = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)


@dataclass(eq=False)
class NewTensor:
    """A tensor that is made and filled from the checkpoint.

    Attributes:
        name: of the leaf.
        place: number of the tensor in the checkpoint.
        param: the parameter that it is state of, if any.
        kind: which state, such as ``exp_avg``.
        optimizer: of the parameter.
        value: the tensor, once it is made.
    """

    name: str
    place: int
    param: torch.Tensor | None = None
    kind: str = ""
    optimizer: torch.optim.Optimizer | None = None
    value: torch.Tensor | None = None

    def make(
        self, shape: tuple[int, ...], dtype: torch.dtype, *, is_sharded: bool, where: str
    ) -> torch.Tensor:
        """Memory for it: sharded as the parameter where it has the parameter's shape, else whole.

        Args:
            shape, dtype: in the checkpoint.
            is_sharded: whether ranks that saved had parts of it.
            where: the checkpoint.

        Raises:
            CheckpointError: if nothing says how it is to be sharded, or it is not the state of this parameter.
        """
        param = self.param
        if param is None:
            if is_sharded:
                raise CheckpointError(
                    "An object lacks a sharded tensor that the checkpoint has for it.",
                    expected="its state_dict() to hold the tensor, sharded as it is to be loaded",
                    got="nothing under that name",
                    where=f"{self.name} in {where}",
                    todo="for an optimizer, put the optimizer itself and its module into the state",
                )
            self.value = torch.empty(shape, dtype=dtype, device="cpu")
        elif tuple(param.shape) == shape and (shape or self.kind not in _PER_PARAMETER):
            self.value = torch.empty_like(param, dtype=dtype, requires_grad=False)
        elif not shape and not isinstance(self.optimizer, torch.optim.LBFGS):
            self.value = torch.empty((), dtype=dtype, device="cpu")
        elif isinstance(self.optimizer, _SHAPED_AS_PARAMETERS):
            raise CheckpointError(
                "Optimizer state in the checkpoint has another shape than its parameter.",
                expected=f"{list(param.shape)}, the parameter's",
                got=list(shape),
                where=f"{self.name} in {where}",
                todo="build the model as it was when it was saved",
            )
        elif not isinstance(param, DTensor):
            self.value = torch.empty(shape, dtype=dtype, device=param.device)
        elif is_sharded:
            raise CheckpointError(
                "Sharded optimizer state has another shape than its parameter, and the optimizer has none yet.",
                expected="state that says how it is to be sharded",
                got=f"{list(shape)} for a parameter of {list(param.shape)}",
                where=f"{self.name} in {where}",
                todo="use an optimizer that makes its state when it is built, or load as many ranks as saved it",
            )
        else:  # LBFGS computes its numbers too from the gradients of all parameters, so they are DTensors
            whole = torch.empty(shape, dtype=dtype, device=param.to_local().device)
            replicated = [Replicate()] * param.device_mesh.ndim
            self.value = DTensor.from_local(whole, param.device_mesh, replicated, run_check=False)
        return self.value
