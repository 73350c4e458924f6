"""Marks on memory that a failed load has partly overwritten. Loads set marks; the runtime refuses marked parameters.

Marks are stored per storage, because a shard has many views on one storage: a parameter, its entry in `state_dict`, an
empty piece. A mark ends with its storage, or when a later load has filled the marked bytes.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch

_Span = tuple[int, int]  # half-open range of bytes in the storage
# Weak keys, so that marks do not keep a storage in memory. The values are names by span.
_marks: WeakKeyDictionary[torch.UntypedStorage, dict[_Span, str]] = WeakKeyDictionary()


def _span(tensor: torch.Tensor) -> _Span:
    """Return the bytes of its storage that a contiguous tensor occupies."""
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
    # The spans are listed first, because the loop deletes from the dict.
    for span in [span for span in spans if start <= span[0] and span[1] <= stop]:
        del spans[span]
    if not spans:
        del _marks[tensor.untyped_storage()]


def half_loaded_in(tensor: torch.Tensor) -> list[str]:
    """Return the names of the marked tensors in a tensor's storage."""
    # The runtime calls this for every group, so the usual case, no marks at all, must cost nothing.
    return list(_marks.get(tensor.untyped_storage(), {}).values()) if _marks else []
