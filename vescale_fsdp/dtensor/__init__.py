"""Ragged tensors and the rules of their operators. Pickles look up names in this package."""

# Imported for its effect: the module registers the rules of operators.
from vescale_fsdp.dtensor.operators import dispatch_table as _dispatch_table  # noqa: F401
from vescale_fsdp.dtensor.operators.gathered_views import set_implicit_gathers
from vescale_fsdp.dtensor.ragged_dtensor import PendingTensor, redistribute
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor as RaggedDTensor
from vescale_fsdp.dtensor.ragged_dtensor import _rebuild as _rebuild
from vescale_fsdp.dtensor.ragged_dtensor import _rebuild_piece as _rebuild_piece

__all__ = ["PendingTensor", "redistribute", "set_implicit_gathers"]
