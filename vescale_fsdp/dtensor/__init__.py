"""Ragged tensors: the class and, behind it, the rules of its operators. Pickles know both names below here."""

from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor, _rebuild

__all__ = ["RaggedDTensor", "_rebuild"]
