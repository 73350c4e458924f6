"""Memory that a load left half overwritten: marked by who loads, refused by who would compute with it.

Marks lie on storages, which all views of a shard share: a parameter, what `state_dict` made of it, an empty piece. They
go with the storage, or when a good load has filled what they stand for.
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
    """Say that a contiguous local tensor holds values of two states, or that another rank's part of it does."""
    _marks.setdefault(tensor.untyped_storage(), {})[_span(tensor)] = name


def mark_whole(tensor: torch.Tensor) -> None:
    """Say that all of a contiguous local tensor has been filled."""
    if not _marks:
        return
    spans = _marks.get(tensor.untyped_storage())
    if spans is None:
        return
    start, stop = _span(tensor)
    for span in [span for span in spans if start <= span[0] and span[1] <= stop]:
        del spans[span]
    if not spans:
        del _marks[tensor.untyped_storage()]


def half_loaded_in(tensor: torch.Tensor) -> list[str]:
    """Names of what is half loaded in a tensor's storage. Costs nothing while there is no mark at all."""
    return list(_marks.get(tensor.untyped_storage(), {}).values()) if _marks else []
