"""Native checkpoints: saved at disk speed, planned without communication, restored anywhere.

    save(path, state)       load(path, state)       read_state(path)       verify(path)       PerRank(value)

See FORMAT.md for what lies on disk.
"""

from vescale_fsdp.checkpoint.async_saving import SaveHandle, async_save
from vescale_fsdp.checkpoint.dcp import RaggedLoadPlanner, RaggedReader, RaggedSavePlanner, RaggedWriter
from vescale_fsdp.checkpoint.loading import LoadReport, load
from vescale_fsdp.checkpoint.manager import CheckpointManager, Restored
from vescale_fsdp.checkpoint.per_rank import PerRank
from vescale_fsdp.checkpoint.ram_tier import RamTier
from vescale_fsdp.checkpoint.reader import CheckpointReader, StoredTensor, read_state
from vescale_fsdp.checkpoint.saving import save
from vescale_fsdp.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from vescale_fsdp.checkpoint.verifying import Problem, VerifyReport, verify

__all__ = [
    "CheckpointManager",
    "CheckpointReader",
    "LoadReport",
    "PerRank",
    "Problem",
    "RaggedLoadPlanner",
    "RaggedReader",
    "RaggedSavePlanner",
    "RaggedWriter",
    "RamTier",
    "Restored",
    "SaveHandle",
    "StoredTensor",
    "VerifyReport",
    "async_save",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "load",
    "read_state",
    "save",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
    "verify",
]
