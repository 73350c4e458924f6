"""Native checkpoints: saved at disk speed, planned without communication, restored anywhere.

    save(path, state)       load(path, state)       read_state(path)       verify(path)       PerRank(value)

See FORMAT.md for what lies on disk.
"""

from typing import TYPE_CHECKING

from vescale_fsdp.lazy import lazily_export

if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    from vescale_fsdp.checkpoint.formats.dcp.state_dict import (
        get_model_state_dict,
        get_optimizer_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
        set_state_dict,
    )
    from vescale_fsdp.checkpoint.formats.dcp.storage import (
        RaggedLoadPlanner,
        RaggedReader,
        RaggedSavePlanner,
        RaggedWriter,
    )
    from vescale_fsdp.checkpoint.loading.load import LoadReport, SourceOptions, load
    from vescale_fsdp.checkpoint.loading.read_state import CheckpointReader, CheckpointTensor, read_state
    from vescale_fsdp.checkpoint.loading.verify import Problem, VerifyReport, verify
    from vescale_fsdp.checkpoint.manager import CheckpointManager, Restored
    from vescale_fsdp.checkpoint.memory.ram_tier import RamTier
    from vescale_fsdp.checkpoint.saving.async_save import SaveHandle, async_save
    from vescale_fsdp.checkpoint.saving.save import save
    from vescale_fsdp.checkpoint.state.per_rank import PerRank, Reshardable, Resharded
    from vescale_fsdp.checkpoint.state.reshardable_data import ReshardableLoader, ReshardableSampler
    from vescale_fsdp.checkpoint.steps.retention import RetentionPolicy, StepRecord
    from vescale_fsdp.checkpoint.steps.save_policy import (
        AllOf,
        AnyOf,
        BeforeDeadline,
        BestOf,
        EveryMinutes,
        EverySteps,
        OnSignal,
        SaveContext,
        SavePolicy,
    )
    from vescale_fsdp.checkpoint.steps.step_folders import latest
    from vescale_fsdp.checkpoint.storage.progress import ProgressReport

__all__ = [
    "AllOf",
    "AnyOf",
    "BeforeDeadline",
    "BestOf",
    "CheckpointManager",
    "CheckpointReader",
    "CheckpointTensor",
    "EveryMinutes",
    "EverySteps",
    "LoadReport",
    "OnSignal",
    "PerRank",
    "Problem",
    "ProgressReport",
    "RaggedLoadPlanner",
    "RaggedReader",
    "RaggedSavePlanner",
    "RaggedWriter",
    "RamTier",
    "Reshardable",
    "ReshardableLoader",
    "ReshardableSampler",
    "Resharded",
    "Restored",
    "RetentionPolicy",
    "SaveContext",
    "SaveHandle",
    "SavePolicy",
    "SourceOptions",
    "StepRecord",
    "VerifyReport",
    "async_save",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "latest",
    "load",
    "read_state",
    "save",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
    "verify",
]

lazily_export(
    __name__,
    {
        "torch.distributed.checkpoint.state_dict": "get_state_dict",
        "vescale_fsdp.checkpoint.saving.async_save": "SaveHandle async_save",
        "vescale_fsdp.checkpoint.formats.dcp.storage": "RaggedLoadPlanner RaggedReader RaggedSavePlanner "
        "RaggedWriter",
        "vescale_fsdp.checkpoint.loading.load": "LoadReport SourceOptions load",
        "vescale_fsdp.checkpoint.manager": "CheckpointManager Restored",
        "vescale_fsdp.checkpoint.state.per_rank": "PerRank Reshardable Resharded",
        "vescale_fsdp.checkpoint.state.reshardable_data": "ReshardableLoader ReshardableSampler",
        "vescale_fsdp.checkpoint.memory.ram_tier": "RamTier",
        "vescale_fsdp.checkpoint.steps.retention": "RetentionPolicy StepRecord",
        "vescale_fsdp.checkpoint.steps.save_policy": "AllOf AnyOf BeforeDeadline BestOf EveryMinutes "
        "EverySteps OnSignal SaveContext SavePolicy",
        "vescale_fsdp.checkpoint.steps.step_folders": "latest",
        "vescale_fsdp.checkpoint.storage.progress": "ProgressReport",
        "vescale_fsdp.checkpoint.loading.read_state": "CheckpointReader CheckpointTensor read_state",
        "vescale_fsdp.checkpoint.saving.save": "save",
        "vescale_fsdp.checkpoint.formats.dcp.state_dict": "get_model_state_dict get_optimizer_state_dict "
        "set_model_state_dict set_optimizer_state_dict set_state_dict",
        "vescale_fsdp.checkpoint.loading.verify": "Problem VerifyReport verify",
    },
)
