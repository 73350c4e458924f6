"""Memory filled with NaN: whatever is read before it is written, or after it was freed, shows in the values.

    torch.empty and its relatives, in Python and inside of operators    torch fills them under deterministic algorithms
    storages that grow from nothing, or shrink to nothing (`DBuffer`)   filled with bytes 0xFF, which are NaN in every
                                                                        floating dtype and -1 in integers

``pytest --nan-memory`` runs tests so, in the workers of `run_ranks` too.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

NAN_MEMORY = "VESCALE_FSDP_TEST_NAN_MEMORY"  # set in the environment of workers

_ONES = 0xFF


@contextmanager
def nan_memory() -> Iterator[None]:
    """Fill new and freed memory of this process inside."""
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
        before = storage.nbytes()
        # Not by an operator: recorders of operators and of streams would take it for the runtime's.
        if nbytes == 0 < before and storage.device.type == "cpu":
            ctypes.memset(storage.data_ptr(), _ONES, before)
        result = resize(storage, nbytes)
        if before == 0 < nbytes and storage.device.type == "cpu":
            ctypes.memset(storage.data_ptr(), _ONES, nbytes)
        return result

    is_on, warns = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings(), mock.patch.object(torch.UntypedStorage, "resize_", resized):
            warnings.filterwarnings("ignore", message=".*deterministic")
            yield
    finally:
        torch.use_deterministic_algorithms(is_on, warn_only=warns)


@contextmanager
def nan_memory_if_asked() -> Iterator[None]:
    """`nan_memory`, where ``pytest --nan-memory`` has asked for it."""
    if NAN_MEMORY not in os.environ:
        yield
        return
    with nan_memory():
        yield
