"""Tied weights: two names, one storage. Checkpoints forget the tie and store the bytes twice.

A tie is what the config says *and* the bytes confirm. Then the twin is left out, as Hugging Face does. If
the bytes differ (training untied them, or the config is another model's) both are kept and a warning says
so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vescale_fsdp.conversion.views.tensor_view import TensorView, pieces_of

__all__ = ["equal_bytes", "find_tied_twins"]

_COMPARE_BYTES = 4 * 2**20  # 4 MiB per side
# Names of the output projection and of the input embedding it may share, by architecture family.
_PAIRS = (
    ("lm_head.weight", "model.embed_tokens.weight"),
    ("lm_head.weight", "shared.weight"),
    ("lm_head.weight", "transformer.wte.weight"),
    ("embed_out.weight", "gpt_neox.embed_in.weight"),
    ("encoder.embed_tokens.weight", "shared.weight"),
    ("decoder.embed_tokens.weight", "shared.weight"),
    ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    ("cls.predictions.decoder.bias", "cls.predictions.bias"),
)


def find_tied_twins(
    views: Mapping[str, TensorView],
    config: Mapping[str, Any] | None,
    is_equal: Callable[[TensorView, TensorView], bool] | None = None,
) -> tuple[dict[str, str], list[str]]:
    """Names to leave out -> the name that holds their bytes; and warnings about ties that the bytes deny.

    Args:
        is_equal: compares two tensors; None for `equal_bytes`.
    """
    is_equal = is_equal or equal_bytes
    if not config or config.get("tie_word_embeddings") is not True:
        return {}, []
    twins: dict[str, str] = {}
    warnings: list[str] = []
    for twin, kept in _PAIRS:
        if twin in twins or twin not in views or kept not in views:
            continue
        if is_equal(views[twin], views[kept]):
            twins[twin] = kept
        else:
            warnings.append(f"config.json ties {twin} to {kept}, but their bytes differ: both are kept")
    return twins, warnings


def equal_bytes(left: TensorView, right: TensorView) -> bool:
    """Whether two tensors have the same shape, type and bytes; reads a few MiB at a time."""
    import numpy as np

    if (left.info.shape, left.info.dtype) != (right.info.shape, right.info.dtype):
        return False
    pieces = zip(pieces_of(left, _COMPARE_BYTES), pieces_of(right, _COMPARE_BYTES), strict=True)
    return all(np.array_equal(a, b) for a, b in pieces)
