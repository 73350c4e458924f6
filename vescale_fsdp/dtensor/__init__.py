"""Ragged tensors. The class stands under this name, which pickles know, and its operators' rules come in with it."""

from vescale_fsdp.dtensor import ragged_dtensor
from vescale_fsdp.dtensor.ragged_dtensor import *  # noqa: F403

__all__ = ragged_dtensor.__all__
