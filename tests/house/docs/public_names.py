"""What users may import: the public names of the packages, and those of the modules that are a stack's front door."""

from __future__ import annotations

import importlib
from typing import Any

# Packages, and public modules for special subjects, each with an `__all__`.
PACKAGES = (
    "vescale_fsdp",
    "vescale_fsdp.checkpoint",
    "vescale_fsdp.transfer",
    "vescale_fsdp.conversion",
    "vescale_fsdp.dtensor",
    "vescale_fsdp.elastic",
    "vescale_fsdp.integrations",
    "vescale_fsdp.layout",
    "vescale_fsdp.optim",
    "vescale_fsdp.quantize",
)
MODULES = (
    "vescale_fsdp.checkpoint.data",
    "vescale_fsdp.checkpoint.dcp",
    "vescale_fsdp.checkpoint.state_dict",
    "vescale_fsdp.conversion.testing",
    "vescale_fsdp.transfer.links",
)
# Classes that only methods take or return. They have no public name, but a page.
OF_METHODS = (
    "vescale_fsdp.checkpoint.native.read_state.CheckpointTensor",  # CheckpointReader.Tensor
    "vescale_fsdp.checkpoint.steps.retention.StepRecord",  # CheckpointManager.Record
    "vescale_fsdp.checkpoint.steps.save_policy.SaveContext",  # SavePolicy.Context
    "vescale_fsdp.layout.group_layout.ModelLayout",
    "vescale_fsdp.layout.group_layout.Piece",
    "vescale_fsdp.layout.group_layout.PieceRun",
    "vescale_fsdp.layout.group_layout.TensorSlot",
    "vescale_fsdp.layout.placement.StridedRaggedShard",
)
# Names of modules that need a stack installed: importing some of them needs the stack.
OF_STACKS = (
    "vescale_fsdp.integrations.accelerate.VescalePlugin",
    "vescale_fsdp.integrations.lightning.VescaleFabricStrategy",
    "vescale_fsdp.integrations.lightning.VescaleStrategy",
    "vescale_fsdp.integrations.nemo_automodel.automodel_with_vescale",
    "vescale_fsdp.integrations.peft.merge_and_unload",
    "vescale_fsdp.integrations.torchtitan.VescaleCheckpoints",
    "vescale_fsdp.integrations.torchtitan.parallelize_with",
    "vescale_fsdp.integrations.torchtitan.with_vescale",
    "vescale_fsdp.integrations.weight_sync.ChangedItems",
    "vescale_fsdp.integrations.weight_sync.WholeTensors",
    "vescale_fsdp.integrations.weight_sync.sglang_bucket",
    "vescale_fsdp.integrations.weight_sync.vllm_patches",
    "vescale_fsdp.integrations.weight_sync.vllm_source",
)


def public_names() -> dict[str, Any]:
    """Full name -> object, of all packages and public modules; those of stacks are not imported."""
    found = {}
    for package in (*PACKAGES, *MODULES):
        module = importlib.import_module(package)
        found.update({f"{package}.{name}": getattr(module, name) for name in module.__all__})
    return found


PUBLIC = public_names()


def is_ours(value: Any) -> bool:
    """Whether an object's docstring is ours to write: not torch's, no stand-in for a newer torch's, and no table."""
    module = getattr(value, "__module__", "")
    return module.startswith("vescale_fsdp") and module != "vescale_fsdp.torch_private"
