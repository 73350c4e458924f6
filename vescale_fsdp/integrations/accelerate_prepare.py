"""What accelerate's ``prepare`` needs beside torch's names: optimizers of models that are sharded already."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator

from vescale_fsdp.integrations.names.replaced_names import StandIn
from vescale_fsdp.runtime.fsdp_module import FSDPModule

__all__ = ["PREPARE"]

_their_prepare = Accelerator._prepare_fsdp2


def _prepare_fsdp2(self: Accelerator, *args: Any) -> Any:
    """accelerate's own, and the optimizer of a model that was sharded by hand keeps its parameters.

    accelerate gives optimizers the sharded parameters by the address of the full ones. Where the model is sharded
    already these are the pieces' addresses, of which all empty ones are 0, so that one would stand for all.
    """
    is_sharded = any(isinstance(each, FSDPModule) for each in args)
    optimizers = [each for each in args if isinstance(each, torch.optim.Optimizer)] if is_sharded else []
    kept = [[list(group["params"]) for group in optimizer.param_groups] for optimizer in optimizers]
    prepared = _their_prepare(self, *args)
    for optimizer, groups in zip(optimizers, kept, strict=True):
        # accelerate has made the dicts anew
        for group, params in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = params
    return prepared


# What of accelerate is replaced.
PREPARE = StandIn(_their_prepare, _prepare_fsdp2, ("accelerate.accelerator:Accelerator",))
