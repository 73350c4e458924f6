"""An FSDP runtime for PyTorch whose layout is data.

Use `fully_shard` in place of ``torch.distributed.fsdp.fully_shard``. Parameters are cut into equal shards
without ever cutting a block, gathered and reduced without copies, and saved with their layout, so that any
number of ranks can load them.
"""

from typing import TYPE_CHECKING

from vescale_fsdp import pickled_paths
from vescale_fsdp.lazy import lazily_export

if TYPE_CHECKING:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

    from vescale_fsdp.checkpoint.formats.dcp.form import DCP
    from vescale_fsdp.checkpoint.transfer.description import StateDescription, describe_states
    from vescale_fsdp.checkpoint.transfer.joint_ranks import joint_ranks
    from vescale_fsdp.checkpoint.transfer.plan import TransferPlan, plan_transfer
    from vescale_fsdp.checkpoint.transfer.transfer import Transfer, TransferHandle
    from vescale_fsdp.conversion.live.hf_form import HuggingFace
    from vescale_fsdp.dtensor.dcp_hooks import check_storage_writer
    from vescale_fsdp.dtensor.operators.dispatch_table import is_supported
    from vescale_fsdp.dtensor.operators.random_values import get_rng_state, manual_seed, set_rng_state
    from vescale_fsdp.dtensor.ragged_dtensor import (
        PendingTensor,
        RaggedDTensor,
        distribute_tensor,
        is_ragged,
        redistribute,
        redistribute_async,
    )
    from vescale_fsdp.elastic.job import ElasticJob, TrainingState
    from vescale_fsdp.elastic.membership import Membership, Quorum
    from vescale_fsdp.elastic.store_membership import StoreMembership
    from vescale_fsdp.elastic.torchft_membership import TorchftMembership
    from vescale_fsdp.layout.granularity import Element, Flat, Granularity, Rows, Tiles, Whole
    from vescale_fsdp.layout.group_layout import GroupLayout, ModelLayout, TensorSlot
    from vescale_fsdp.layout.padding import PaddingPolicy, PaddingWarning
    from vescale_fsdp.layout.placement import RaggedShard, StridedRaggedShard
    from vescale_fsdp.layout.plan_report import PlanReport, plan_report
    from vescale_fsdp.layout.planner import TensorSpec, plan_group
    from vescale_fsdp.runtime.data_mesh import DataParallelMeshDims
    from vescale_fsdp.runtime.fsdp_module import (
        FSDPModule,
        UnshardHandle,
        share_comm_ctx,
    )
    from vescale_fsdp.runtime.fsdp_state import register_fsdp_forward_method
    from vescale_fsdp.runtime.fully_shard import fully_shard
    from vescale_fsdp.torch_private import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult

__all__ = [
    "DCP",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "ElasticJob",
    "Element",
    "FSDPMeshInfo",
    "FSDPModule",
    "Flat",
    "Granularity",
    "GroupLayout",
    "HSDPMeshInfo",
    "HuggingFace",
    "Membership",
    "MixedPrecisionPolicy",
    "ModelLayout",
    "OffloadPolicy",
    "PaddingPolicy",
    "PaddingWarning",
    "PendingTensor",
    "PlanReport",
    "Quorum",
    "RaggedDTensor",
    "RaggedShard",
    "Rows",
    "ShardPlacementResult",
    "StateDescription",
    "StoreMembership",
    "StridedRaggedShard",
    "TensorSlot",
    "TensorSpec",
    "Tiles",
    "TorchftMembership",
    "TrainingState",
    "Transfer",
    "TransferHandle",
    "TransferPlan",
    "UnshardHandle",
    "Whole",
    "check_storage_writer",
    "describe_states",
    "distribute_tensor",
    "fully_shard",
    "get_rng_state",
    "is_ragged",
    "is_supported",
    "joint_ranks",
    "manual_seed",
    "plan_group",
    "plan_report",
    "plan_transfer",
    "redistribute",
    "redistribute_async",
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
        "vescale_fsdp.runtime.data_mesh": "DataParallelMeshDims",
        "vescale_fsdp.checkpoint.formats.dcp.form": "DCP",
        "vescale_fsdp.conversion.live.hf_form": "HuggingFace",
        "vescale_fsdp.dtensor.dcp_hooks": "check_storage_writer",
        "vescale_fsdp.dtensor.ragged_dtensor": (
            "PendingTensor RaggedDTensor distribute_tensor is_ragged redistribute redistribute_async"
        ),
        "vescale_fsdp.elastic.job": "ElasticJob TrainingState",
        "vescale_fsdp.elastic.membership": "Membership Quorum",
        "vescale_fsdp.elastic.store_membership": "StoreMembership",
        "vescale_fsdp.elastic.torchft_membership": "TorchftMembership",
        "vescale_fsdp.runtime.fully_shard": "fully_shard",
        "vescale_fsdp.layout.granularity": "Element Flat Granularity Rows Tiles Whole",
        "vescale_fsdp.layout.group_layout": "GroupLayout ModelLayout TensorSlot",
        "vescale_fsdp.runtime.fsdp_module": "FSDPModule UnshardHandle share_comm_ctx",
        "vescale_fsdp.runtime.fsdp_state": "register_fsdp_forward_method",
        "vescale_fsdp.dtensor.operators.dispatch_table": "is_supported",
        "vescale_fsdp.layout.padding": "PaddingPolicy PaddingWarning",
        "vescale_fsdp.layout.placement": "RaggedShard StridedRaggedShard",
        "vescale_fsdp.layout.planner": "TensorSpec plan_group",
        "vescale_fsdp.torch_private": "FSDPMeshInfo HSDPMeshInfo ShardPlacementResult",
        "vescale_fsdp.dtensor.operators.random_values": "get_rng_state manual_seed set_rng_state",
        "vescale_fsdp.layout.plan_report": "PlanReport plan_report",
        "vescale_fsdp.checkpoint.transfer.joint_ranks": "joint_ranks",
        "vescale_fsdp.checkpoint.transfer.description": "StateDescription describe_states",
        "vescale_fsdp.checkpoint.transfer.plan": "TransferPlan plan_transfer",
        "vescale_fsdp.checkpoint.transfer.transfer": "Transfer TransferHandle",
    },
)
