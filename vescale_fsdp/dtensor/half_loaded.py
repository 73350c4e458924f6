"""Marks on memory that a failed load has partly overwritten. Loads set marks; the runtime refuses marked parameters.

Marks are stored per storage, because a shard has many views on one storage: a parameter, its entry in `state_dict`, an
empty piece. A mark ends with its storage, or when a later load has filled the marked bytes.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch

# Weak keys, so that marks do not keep a storage in memory. The values are ranges of bytes in the storage, by name.
_marks: WeakKeyDictionary[torch.UntypedStorage, dict[str, range]] = WeakKeyDictionary()


def _bytes_of(tensor: torch.Tensor) -> range:
    """Return the bytes of its storage that a contiguous tensor occupies."""
    start = int(tensor.storage_offset()) * tensor.itemsize
    return range(start, start + tensor.numel() * tensor.itemsize)


def mark_half_loaded(tensor: torch.Tensor, name: str) -> None:
    """Mark a contiguous local tensor, because this rank or another rank has filled only part of the tensor."""
    _marks.setdefault(tensor.untyped_storage(), {})[name] = _bytes_of(tensor)


def mark_whole(tensor: torch.Tensor) -> None:
    """Remove the marks within a contiguous local tensor, because all of it has been filled."""
    if not _marks:
        return
    marked = _marks.get(tensor.untyped_storage())
    if marked is None:
        return
    filled = _bytes_of(tensor)
    # Listed first, because the loop deletes from the dict.
    for name in [name for name, at in marked.items() if filled.start <= at.start and at.stop <= filled.stop]:
        del marked[name]
    if not marked:
        del _marks[tensor.untyped_storage()]


def half_loaded_in(tensor: torch.Tensor) -> list[str]:
    """Return the names of the marked tensors in a tensor's storage."""
    # The runtime calls this for every group, so the usual case, no marks at all, must cost nothing.
    return list(_marks.get(tensor.untyped_storage(), {})) if _marks else []
