"""Let accelerate run stock FSDP2 on CPUs, which the examples compare with. `as_fsdp2` and `VescalePlugin` do without.

accelerate 1.15 sets FSDP up for a list of distributed types which CPUs (``MULTI_CPU``) are not in, without a reason in
its code. It reads the type once; said to be of the list, all else works: device and backend have been chosen before.
"""

from __future__ import annotations

from accelerate import PartialState
from accelerate.utils import DistributedType


def allow_fsdp_on_cpu() -> None:
    """Call it before ``Accelerator(...)``, or between ``TrainingArguments(...)`` and ``Trainer(...)``."""
    state = PartialState(cpu=True)
    if state.distributed_type is DistributedType.MULTI_CPU:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
