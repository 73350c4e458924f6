"""peft: `merge_and_unload` of a sharded model, and loading of adapters into one.

    merged = merge_and_unload(trainer.model)
    get_model_state_dict(merged, options=StateDictOptions(full_state_dict=True, cpu_offload=True))

peft multiplies an adapter's two matrices and adds the product to the base weight, which does not work on ragged pieces.
`merge_and_unload` gathers one layer at a time in its stored dtype, lets peft merge it, and shards it again. So every
rank needs memory for one full layer next to its shards.

Under `as_fsdp2`, ``set_peft_model_state_dict``, which ``load_adapter`` calls, fills shards from whole tensors, as under
FSDP2.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import integrations as peft_integrations
from torch import nn

from vescale_fsdp.dtensor.piece_map import local_part_of
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor
from vescale_fsdp.integrations.replaced_names import StandIn
from vescale_fsdp.integrations.transformers import ragged_like
from vescale_fsdp.integrations.tried_versions import check_version
from vescale_fsdp.runtime.fsdp_module import FSDPModule


def merge_and_unload(model: PeftModel, *, safe_merge: bool = False) -> nn.Module:
    """peft's ``merge_and_unload`` for a model whose modules are sharded. A collective call.

    Args:
        model: peft's model, sharded.
        safe_merge: as peft's: check each layer for NaN before it is changed.

    Returns:
        The model without adapters, still sharded, to be saved. Only ``model`` itself can run forward.

    Examples:
        >>> def save_merged(model, folder):
        ...     from vescale_fsdp.checkpoint import save
        ...     save(folder, {"model": merge_and_unload(model)})
    """
    check_version("peft")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # `_gathered` gathers ragged parameters only
    for layer in [module for module in model.modules() if isinstance(module, BaseTunerLayer)]:
        with _gathered(layer):
            layer.merge(safe_merge=safe_merge)
    return model.unload()


@contextmanager
@torch.no_grad()
def _gathered(module: nn.Module) -> Iterator[None]:
    """A context in which full plain parameters replace ragged ones. At its end, the shards get the changed values,
    unless an exception was raised.
    """
    ragged: list[tuple[nn.Module, str, Any]] = [
        (owner, name, param)
        for owner in module.modules()
        for name, param in owner._parameters.items()
        if isinstance(param, RaggedDTensor)
    ]
    sharded = list(dict.fromkeys(param for _, _, param in ragged))  # a tied parameter once
    full = {param: nn.Parameter(param.full_tensor(), param.requires_grad) for param in sharded}
    for owner, name, param in ragged:
        owner._parameters[name] = full[param]
    try:
        yield
        for param in sharded:
            param.to_local().copy_(local_part_of(full[param].detach(), param))
    finally:
        for owner, name, param in ragged:
            owner._parameters[name] = param


_peft_local_like = peft_integrations.dtensor_from_local_like  # read before it is replaced


def _local_like(local_tensor: torch.Tensor, ref: Any) -> Any:
    return (
        ragged_like(local_tensor, ref)
        if isinstance(ref, RaggedDTensor)
        else _peft_local_like(local_tensor, ref)
    )


# The replaced functions of peft.
ADAPTERS = (StandIn(_peft_local_like, _local_like, ("peft.utils.integrations", "peft.utils.save_and_load")),)
