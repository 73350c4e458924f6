"""accelerate: FSDP on machines without an accelerator, and models and optimizers that `Accelerator.prepare` gets.

What decides whether accelerate (1.15) shards is the distributed type that ``AcceleratorState`` chooses:

    machine, and what the user says                   accelerate alone                    under an installation
    ------------------------------------------------  ----------------------------------  ---------------------
    GPUs                                              FSDP                                FSDP
    CPUs, ``cpu=True``, ``use_cpu=True`` or a setting  MULTI_CPU: DistributedDataParallel  FSDP
    CPUs, nothing said                                NO: each rank trains for itself     FSDP
    one process that no launcher started              NO                                  NO, and a warning

Only this choice is changed, while the state is constructed for a user who has asked for FSDP.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate.accelerator import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, parse_flag_from_env
from torch import nn

from vescale_fsdp.dtensor.ragged_dtensor import identified_by_address
from vescale_fsdp.errors import UnshardedWarning, callers_level, explain
from vescale_fsdp.integrations.replaced_names import StandIn
from vescale_fsdp.integrations.stand_ins import ACTIVE, has_shards, settle

_own_init = AcceleratorState.__init__
_own_prepare = Accelerator.prepare


@functools.wraps(_own_init)
def _construct(self: AcceleratorState, *args: Any, **kwargs: Any) -> None:
    """Construct accelerate's state. If FSDP was asked for, it is chosen on CPUs too."""
    given = inspect.signature(_own_init).bind(self, *args, **kwargs).arguments
    is_read = bool(AcceleratorState._shared_state)  # constructed before: this call only reads it
    if is_read or not ACTIVE or given.get("fsdp_plugin") is None:
        return _own_init(self, *args, **kwargs)
    # As `_own_init` does. A trainer's arguments may have made this part of the state already.
    cpu = given.get("cpu", False) or parse_flag_from_env("ACCELERATE_USE_CPU")
    state = PartialState(cpu, **given.get("kwargs", {}))
    if state.distributed_type is DistributedType.NO and not torch.accelerator.is_available():
        PartialState._reset_state()
        state = PartialState(cpu=True, **given.get("kwargs", {}))
    with _listed(self) if state.distributed_type is DistributedType.MULTI_CPU else nullcontext():
        return _own_init(self, *args, **kwargs)


@contextmanager
def _listed(state: AcceleratorState) -> Iterator[None]:
    """Context manager: the distributed type is one of those for which accelerate chooses FSDP."""
    # Device and backend, which follow from the type, have been chosen.
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    try:
        yield
    finally:
        for each in (PartialState._shared_state, AcceleratorState._shared_state):
            if each.get("distributed_type") is DistributedType.MULTI_GPU:  # after an error
                each["distributed_type"] = DistributedType.MULTI_CPU


@functools.wraps(_own_prepare)
def _prepare(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
    """Prepare models and optimizers, and warn if a model is not sharded.

    accelerate (1.15) gives an optimizer the parameters of a model that is sharded already by their addresses.
    """
    with identified_by_address():
        prepared = _own_prepare(self, *args, **kwargs)
    results = prepared if isinstance(prepared, tuple) else (prepared,)
    models = [each for each in results if isinstance(each, nn.Module)]
    if ACTIVE and models and not any(map(has_shards, models)):
        warnings.warn(_unsharded(self, models[0]), UnshardedWarning, stacklevel=callers_level())
    if models:
        settle()
    return prepared


def _unsharded(accelerator: Accelerator, model: nn.Module) -> str:
    """Return the text of a warning: which model is not sharded, and what to change."""
    if accelerator.state.distributed_type is DistributedType.NO:
        todo = "start one process per device, with torchrun or accelerate launch"
    else:
        todo = "Accelerator(fsdp_plugin=VescalePlugin()), TrainingArguments(fsdp=True, fsdp_config={'version': 2}), or "
        todo += "fsdp_version: 2 in the configuration of accelerate launch"
    return explain(
        "Accelerator.prepare was called to shard a model by vescale_fsdp, and has not sharded it.",
        expected="FSDP with fsdp_version 2",
        got=f"{accelerator.state.distributed_type}, {accelerator.num_processes} processes",
        where=type(model).__name__,
        todo=todo,
    )


CHOICE = StandIn(_own_init, _construct, ("accelerate.state:AcceleratorState",))
PREPARATION = StandIn(_own_prepare, _prepare, ("accelerate.accelerator:Accelerator",))
