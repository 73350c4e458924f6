"""Replacement for `torch.distributed.checkpoint.state_dict`, with the same names.

The getters are torch's own. The setters have torch's signatures; unlike torch's setters, they can also load a full
state dict into ragged shards.
"""

from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
)

from vescale_fsdp.checkpoint.formats.dcp.state_dict import (
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
