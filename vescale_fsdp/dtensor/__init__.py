"""Ragged tensors and the rules of their operators. Pickles name the first two by this path."""

from vescale_fsdp.dtensor.operators.dispatch_table import is_supported
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor, _rebuild

__all__ = ["RaggedDTensor", "_rebuild", "is_supported"]
