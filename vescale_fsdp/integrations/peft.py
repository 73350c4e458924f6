"""peft: `merge_and_unload` of a sharded model, and loading of adapters into a sharded model.

    merged = merge_and_unload(trainer.model)
    get_model_state_dict(merged, options=StateDictOptions(full_state_dict=True, cpu_offload=True))

peft multiplies an adapter's two matrices and adds the product to the base weight, which does not work on ragged pieces.
`merge_and_unload` gathers one layer at a time in its stored dtype, lets peft merge the layer, and shards it again. So
every rank needs memory for one full layer in addition to its shards.

Under `as_fsdp2`, peft's ``load_adapter`` and ``set_peft_model_state_dict`` fill shards from whole tensors, as they do
under FSDP2.
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

from vescale_fsdp.dtensor.meeting import one_meeting
from vescale_fsdp.dtensor.piece_map import local_part_of
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor
from vescale_fsdp.integrations.replaced_names import StandIn
from vescale_fsdp.integrations.transformers import ragged_like
from vescale_fsdp.integrations.tried_versions import check_version
from vescale_fsdp.runtime.fsdp_module import FSDPModule


def merge_and_unload(model: PeftModel, *, safe_merge: bool = False) -> nn.Module:
    """Merge the adapters of a sharded peft model into its weights, as peft's ``merge_and_unload``. A collective.

    Args:
        model: a peft model whose modules are sharded.
        safe_merge: as in peft: check each layer for NaN before it is changed.

    Returns:
        The base model without adapters, still sharded, for saving. To run a forward, call ``model``, not the result.

    Examples:
        >>> def save_merged(model, folder):
        ...     from vescale_fsdp.checkpoint import save
        ...     save(folder, {"model": merge_and_unload(model)})
    """
    check_version("peft")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # parameters must be ragged, since `_gathered` gathers ragged ones only
    with one_meeting("merge_and_unload"):
        for layer in [module for module in model.modules() if isinstance(module, BaseTunerLayer)]:
            with _gathered(layer):
                layer.merge(safe_merge=safe_merge)
    return model.unload()


@contextmanager
@torch.no_grad()
def _gathered(module: nn.Module) -> Iterator[None]:
    """Context manager: replace a module's ragged parameters by full plain parameters.

    At the end, the changed values are copied into the shards, unless the block has raised an exception.
    """
    ragged: list[tuple[nn.Module, str, Any]] = [
        (owner, name, param)
        for owner in module.modules()
        for name, param in owner._parameters.items()
        if isinstance(param, RaggedDTensor)
    ]
    sharded = list(dict.fromkeys(param for _, _, param in ragged))  # a tied parameter only once
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


_peft_local_like = peft_integrations.dtensor_from_local_like  # peft's function, before the name is replaced


def _local_like(local_tensor: torch.Tensor, ref: Any) -> Any:
    """Replace peft's ``dtensor_from_local_like``, which cannot make ragged tensors."""
    return (
        ragged_like(local_tensor, ref)
        if isinstance(ref, RaggedDTensor)
        else _peft_local_like(local_tensor, ref)
    )


# The functions of peft that `install` replaces.
ADAPTERS = (StandIn(_peft_local_like, _local_like, ("peft.utils.integrations", "peft.utils.save_and_load")),)
