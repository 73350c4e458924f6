"""DBuffer: one flat allocation of a group's global size, a view per tensor, collectives in place.

The buffer *is* the storage of the tensors in it: an all-gather writes full parameters where the matmuls
read them, and a reduce-scatter reads gradients from where they were written. Nothing is copied in or out.

    storage      freed: the tensors exist, their memory does not     allocated: it does
    allocate()   freed -> allocated (contents undefined)
    free()       allocated -> freed (views keep their identity, autograd may hold them)

Tensor objects are made once. What comes and goes is the storage beneath them (``resize_``), so a view that
autograd saved in the forward is valid again once the buffer is gathered for the backward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from vescale_fsdp.collectives import Work
from vescale_fsdp.geometry import FlatRange
from vescale_fsdp.layout import GroupLayout, TensorSlot
from vescale_fsdp.torch_private import restore_version

__all__ = ["DBuffer"]

Gather = Callable[[torch.Tensor, torch.Tensor], Work | None]


class DBuffer:
    """The global buffer of one group on one rank.

    Args:
        layout: where each tensor lies; the buffer is given it and never makes one up.
        flat: 1-D [layout.numel], the memory. Where its storage cannot be resized (a communication
            library's own memory), it stays for good.
    """

    def __init__(self, layout: GroupLayout, flat: torch.Tensor) -> None:
        self.layout = layout
        self.flat = flat
        self._views: dict[str, torch.Tensor] = {}
        self._work: Work | None = None
        self._version = flat._version
        self._nbytes = flat.untyped_storage().nbytes()

    def allocate(self) -> None:
        """Bring the storage back, on the current stream; contents are undefined."""
        storage = self.flat.untyped_storage()
        if storage.nbytes() != self._nbytes:
            storage.resize_(self._nbytes)

    def free(self) -> None:
        """Give the storage back. The caller sees to it that no stream still uses it."""
        storage = self.flat.untyped_storage()
        if storage.resizable():
            storage.resize_(0)

    def view(self, slot: TensorSlot) -> torch.Tensor:
        """The full tensor of a slot: an n-d view of the buffer, the same object each time."""
        found = self._views.get(slot.fqn)
        if found is None:
            found = self.flat[slot.offset : slot.offset + slot.numel].view(slot.shape)
            self._views[slot.fqn] = found
        return found

    def start_gather(self, own: torch.Tensor, gather: Gather, *, at: FlatRange | None) -> None:
        """Start filling the buffer with what each rank holds. One cast if the dtypes differ, else no copy.

        Args:
            own: 1-D, this rank's contribution, in any dtype and on any device.
            gather: the collective, as ``gather(full, own)``.
            at: where the contribution lies in the buffer; None: the gather takes it as it is, without a cast.
        """
        with torch.no_grad():
            if at is not None and (own.dtype != self.flat.dtype or own.device != self.flat.device):
                mine = self.flat[at.start : at.stop]
                mine.copy_(own, non_blocking=True)
                own = mine
            self._work = gather(self.flat, own)

    def wait_gather(self) -> None:
        """Wait until the buffer is full.

        Autograd may have saved views of the buffer. Refilling it with the same values is no modification,
        so its version counter is what it was at the start; some backends count up only here.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
        restore_version(self.flat, self._version)
