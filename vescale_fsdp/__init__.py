"""An FSDP runtime for PyTorch with an explicit, serializable sharding layout.

Use `fully_shard` in place of ``torch.distributed.fsdp.fully_shard``. Parameters are cut into equal shards
without ever cutting a block, gathered and reduced without copies, and saved with their layout, so that any
number of ranks can load them.
"""

from typing import TYPE_CHECKING

from vescale_fsdp import pickled_paths
from vescale_fsdp.lazy import lazily_export

if TYPE_CHECKING:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

    from vescale_fsdp.dtensor.operators.random_values import get_rng_state, manual_seed, set_rng_state
    from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor, distribute_tensor
    from vescale_fsdp.layout.granularity import Element, Flat, Granularity, Rows, Tiles, Whole
    from vescale_fsdp.layout.padding import PaddingPolicy
    from vescale_fsdp.layout.placement import RaggedShard
    from vescale_fsdp.layout.plan_report import PlanReport, plan_report
    from vescale_fsdp.runtime.data_mesh import DataParallelMeshDims
    from vescale_fsdp.runtime.fsdp_module import FSDPModule, UnshardHandle, share_comm_ctx
    from vescale_fsdp.runtime.fsdp_state import register_fsdp_forward_method
    from vescale_fsdp.runtime.fully_shard import fully_shard
    from vescale_fsdp.torch_private import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "Element",
    "FSDPMeshInfo",
    "FSDPModule",
    "Flat",
    "Granularity",
    "HSDPMeshInfo",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "PaddingPolicy",
    "PlanReport",
    "RaggedDTensor",
    "RaggedShard",
    "Rows",
    "ShardPlacementResult",
    "Tiles",
    "UnshardHandle",
    "Whole",
    "distribute_tensor",
    "fully_shard",
    "get_rng_state",
    "manual_seed",
    "plan_report",
    "register_fsdp_forward_method",
    "set_rng_state",
    "share_comm_ctx",
]

__version__ = (
    "0.1.0"  # pyproject.toml reads it here; importlib.metadata alone would cost more than this package
)

pickled_paths.install()
lazily_export(
    __name__,
    {
        "torch.distributed.fsdp": "CPUOffloadPolicy MixedPrecisionPolicy OffloadPolicy",
        "vescale_fsdp.dtensor.operators.random_values": "get_rng_state manual_seed set_rng_state",
        "vescale_fsdp.dtensor.ragged_dtensor": "RaggedDTensor distribute_tensor",
        "vescale_fsdp.layout.granularity": "Element Flat Granularity Rows Tiles Whole",
        "vescale_fsdp.layout.padding": "PaddingPolicy",
        "vescale_fsdp.layout.placement": "RaggedShard",
        "vescale_fsdp.layout.plan_report": "PlanReport plan_report",
        "vescale_fsdp.runtime.data_mesh": "DataParallelMeshDims",
        "vescale_fsdp.runtime.fsdp_module": "FSDPModule UnshardHandle share_comm_ctx",
        "vescale_fsdp.runtime.fsdp_state": "register_fsdp_forward_method",
        "vescale_fsdp.runtime.fully_shard": "fully_shard",
        "vescale_fsdp.torch_private": "FSDPMeshInfo HSDPMeshInfo ShardPlacementResult",
    },
)
