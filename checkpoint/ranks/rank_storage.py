"""The storage that a rank works with: those on its machine share the cores."""

from __future__ import annotations

import os

import torch.distributed as dist

from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.open import open_storage

__all__ = ["open_rank_storage"]


def open_rank_storage(path: str | os.PathLike[str] | Storage) -> Storage:
    """`open_storage` for one rank of many; which are on this machine is not known, so all are counted."""
    is_one_of_many = dist.is_available() and dist.is_initialized()
    return open_storage(path, neighbours=dist.get_world_size() if is_one_of_many else 1)
