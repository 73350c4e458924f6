"""Ragged tensors and the rules of their operators. Pickles name `RaggedDTensor` and `_rebuild` by this path."""

from vescale_fsdp.dtensor.dcp_hooks import check_storage_writer
from vescale_fsdp.dtensor.operators.dispatch_table import is_supported
from vescale_fsdp.dtensor.ragged_dtensor import PendingTensor, is_ragged, redistribute, redistribute_async
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor as RaggedDTensor
from vescale_fsdp.dtensor.ragged_dtensor import _rebuild as _rebuild

__all__ = [
    "PendingTensor",
    "check_storage_writer",
    "is_ragged",
    "is_supported",
    "redistribute",
    "redistribute_async",
]
