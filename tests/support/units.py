"""The parameter groups of units, for tests that read their buffers, layouts or settings."""

from __future__ import annotations

from torch import nn

from vescale_fsdp.runtime.fsdp_state import state_of
from vescale_fsdp.runtime.param_group import ParamGroup


def groups_of(*modules: nn.Module) -> list[ParamGroup]:
    """Groups of the units of these modules, each once, in the modules' order; a module without a unit has none."""
    units = dict.fromkeys(state for module in modules if (state := state_of(module)) is not None)
    return [group for unit in units for group in unit.groups]
