"""Interoperation with `torch.distributed.checkpoint` (DCP), in both directions.

save(path, state, format="dcp")                                               writes a folder that dcp.load reads
dcp.save(state, storage_writer=RaggedWriter(path), planner=RaggedSavePlanner())   writes a native checkpoint
dcp.load(state, storage_reader=RaggedReader(path), planner=RaggedLoadPlanner())   reads a native checkpoint
"""

from vescale_fsdp.checkpoint.dcp_storage import (
    RaggedLoadPlanner,
    RaggedReader,
    RaggedSavePlanner,
    RaggedWriter,
)
from vescale_fsdp.dtensor.dcp_hooks import check_storage_writer

__all__ = ["RaggedLoadPlanner", "RaggedReader", "RaggedSavePlanner", "RaggedWriter", "check_storage_writer"]
