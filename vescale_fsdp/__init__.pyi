"""The public names of the package. Type checkers and `vescale_fsdp.lazy` read this list."""

from torch.distributed.fsdp import (
    CPUOffloadPolicy as CPUOffloadPolicy,
    MixedPrecisionPolicy as MixedPrecisionPolicy,
    OffloadPolicy as OffloadPolicy,
)

from vescale_fsdp.dtensor.operators.random_values import (
    get_rng_state as get_rng_state,
    manual_seed as manual_seed,
    set_rng_state as set_rng_state,
)
from vescale_fsdp.dtensor.ragged_dtensor import (
    RaggedDTensor as RaggedDTensor,
    distribute_tensor as distribute_tensor,
)
from vescale_fsdp.layout.granularity import (
    Element as Element,
    Flat as Flat,
    Granularity as Granularity,
    Rows as Rows,
    Tiles as Tiles,
    Whole as Whole,
)
from vescale_fsdp.layout.padding import PaddingPolicy as PaddingPolicy
from vescale_fsdp.layout.placement import RaggedShard as RaggedShard
from vescale_fsdp.layout.plan_report import PlanReport as PlanReport, plan_report as plan_report
from vescale_fsdp.planning.cluster import Cluster as Cluster
from vescale_fsdp.planning.training_plan import TrainingPlan as TrainingPlan, plan_training as plan_training
from vescale_fsdp.runtime.data_mesh import DataParallelMeshDims as DataParallelMeshDims
from vescale_fsdp.runtime.fsdp_module import (
    FSDPModule as FSDPModule,
    UnshardHandle as UnshardHandle,
    share_comm_ctx as share_comm_ctx,
)
from vescale_fsdp.runtime.fsdp_state import register_fsdp_forward_method as register_fsdp_forward_method
from vescale_fsdp.runtime.fully_shard import fully_shard as fully_shard
from vescale_fsdp.torch_private import (
    FSDPMeshInfo as FSDPMeshInfo,
    HSDPMeshInfo as HSDPMeshInfo,
    ShardPlacementResult as ShardPlacementResult,
)

__version__: str
