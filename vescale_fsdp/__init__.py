"""An FSDP runtime for PyTorch whose layout is data.

Use `fully_shard` in place of ``torch.distributed.fsdp.fully_shard``. Parameters are cut into equal shards
without ever cutting a block, gathered and reduced without copies, and saved with their layout, so that any
number of ranks can load them.
"""

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from vescale_fsdp.dtensor import RaggedDTensor, distribute_tensor, is_ragged
from vescale_fsdp.fully_shard import fully_shard
from vescale_fsdp.granularity import Element, Flat, Granularity, Rows, Tiles, Whole
from vescale_fsdp.layout import GroupLayout, ModelLayout, TensorSlot
from vescale_fsdp.module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx
from vescale_fsdp.placement import RaggedShard
from vescale_fsdp.planner import TensorSpec, plan_group

__all__ = [
    "CPUOffloadPolicy",
    "Element",
    "FSDPModule",
    "Flat",
    "Granularity",
    "GroupLayout",
    "MixedPrecisionPolicy",
    "ModelLayout",
    "OffloadPolicy",
    "RaggedDTensor",
    "RaggedShard",
    "Rows",
    "TensorSlot",
    "TensorSpec",
    "Tiles",
    "UnshardHandle",
    "Whole",
    "distribute_tensor",
    "fully_shard",
    "is_ragged",
    "plan_group",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
