"""Replacement for `torch.distributed.checkpoint.state_dict`, with the same names.

The functions have torch's signatures. In the getters, ranks compare their calls once for all tensors. Unlike torch's
setters, those here can also load a full state dict into ragged shards, and keep the dtypes of optimizer state and the
state of frozen parameters. The getters take no step of an optimizer.
"""

from torch.distributed.checkpoint.state_dict import StateDictOptions

from vescale_fsdp.checkpoint.state.torch_state_dicts import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

__all__ = [
    "StateDictOptions",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]
