"""grad_dtype: gradients of ragged tensors have the tensor's own dtype, and whoever asks for another is told."""

from __future__ import annotations

import torch

from vescale_fsdp.errors import UnsupportedOpError


def check_grad_dtype(wanted: torch.dtype | None, dtype: torch.dtype, where: str) -> None:
    """Refuse a ``grad_dtype`` other than the tensor's own dtype.

    Raises:
        UnsupportedOpError: naming the tensor.
    """
    if wanted is not dtype:
        raise UnsupportedOpError(
            "Gradients of another dtype than the parameter's are not supported.",
            expected=f"grad_dtype {dtype}",
            got=f"grad_dtype {wanted}",
            where=where,
            todo="leave grad_dtype alone; reduce_dtype of MixedPrecisionPolicy says what gradients are summed in",
        )
