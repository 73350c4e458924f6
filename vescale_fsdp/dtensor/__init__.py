"""Ragged tensors: the class, and with it the rules of its operators. Pickles know the first two names by this path."""

from vescale_fsdp.dtensor.operators.dispatch_table import is_supported
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor, _rebuild, refuse_before_steps

__all__ = ["RaggedDTensor", "_rebuild", "is_supported"]

refuse_before_steps()
