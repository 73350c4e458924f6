"""Marks on memory that a failed load has partly overwritten. Loads set marks; the runtime refuses marked parameters.

Marks are kept per storage, because all views of a shard share it: a parameter, its entry in `state_dict`, an empty
piece. A mark goes away with its storage, or when a successful load has filled its span.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch

_Span = tuple[int, int]  # half-open, bytes of the storage
_marks: WeakKeyDictionary[torch.UntypedStorage, dict[_Span, str]] = WeakKeyDictionary()


def _span(tensor: torch.Tensor) -> _Span:
    start = int(tensor.storage_offset()) * tensor.itemsize
    return start, start + tensor.numel() * tensor.itemsize


def mark_half_loaded(tensor: torch.Tensor, name: str) -> None:
    """Mark a contiguous local tensor, because this rank or another rank has filled only part of the tensor."""
    _marks.setdefault(tensor.untyped_storage(), {})[_span(tensor)] = name


def mark_whole(tensor: torch.Tensor) -> None:
    """Remove the marks within a contiguous local tensor, because all of it has been filled."""
    if not _marks:
        return
    spans = _marks.get(tensor.untyped_storage())
    if spans is None:
        return
    start, stop = _span(tensor)
    for span in [span for span in spans if start <= span[0] and span[1] <= stop]:  # a list: the loop deletes
        del spans[span]
    if not spans:
        del _marks[tensor.untyped_storage()]


def half_loaded_in(tensor: torch.Tensor) -> list[str]:
    """Names of the marked tensors in a tensor's storage. Costs nothing while there are no marks."""
    return list(_marks.get(tensor.untyped_storage(), {}).values()) if _marks else []
