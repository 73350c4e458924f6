"""How the tensors of a checkpoint lie: in ranks' files (native), or one zarr array for each (zarr).

`save` plans, agrees and commits; a form writes what is this rank's. What `format=` may name stands in `save`; the
other side, reading, is `checkpoint.loading.reads`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch

from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.progress import Meter

__all__ = ["Form", "RankShare"]


class RankShare(NamedTuple):
    """What one rank brings to a save, and where to.

    Attributes:
        locals_by_name: this rank's tensors; each holds the elements of the rank's whole region.
        blob: its per-rank values, packed.
        meter: is told of bytes that have been written.
    """

    storage: Storage
    coordinator: Coordinator
    locals_by_name: Mapping[str, torch.Tensor]
    blob: bytes
    meter: Meter = Meter()


class Form(Protocol):
    """A way in which tensors lie in a checkpoint."""

    name: str

    def write(self, plan: Callable[[], Manifest], share: RankShare) -> Manifest:
        """Write what is this rank's, durably; called on all ranks together, which all leave in the same way.

        Args:
            plan: what this save writes, in the native form; every rank computes the same from the same input.

        Returns:
            What is to be committed.
        """

    def finish(self, storage: Storage, manifest: Manifest) -> None:
        """On one rank, when all have written: what is left to write before the manifest is published."""
