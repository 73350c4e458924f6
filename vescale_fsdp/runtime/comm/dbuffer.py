"""DBuffer: one flat allocation with all tensors of a group at full size, a view per tensor, and collectives in place.

The buffer *is* the storage of its tensors: an all-gather writes full parameters where the matmuls read them, and a
reduce-scatter reads gradients from where they were written. There are two copies at most: mixed precision casts the
shard into the buffer, and on gloo a rank copies its own slice into the buffer, from which the slice is broadcast.

    storage      freed: the tensors exist without memory     allocated: the tensors have memory
    allocate()   freed -> allocated (contents undefined)
    free()       allocated -> freed (the views stay the same objects, because autograd may have saved them)

A scattered tensor is an exception: its pieces are not adjacent in the buffer, so the full tensor has its own storage,
which is filled from the pieces when a gather ends. A gradient is written to the pieces directly (`places`).

Tensor objects are created once. Only their storage is freed and allocated (``resize_``), so a view that autograd saved
in the forward is valid again once the buffer is gathered for the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from vescale_fsdp.collectives.slice_exchange import Work, wait_for
from vescale_fsdp.layout.geometry import Range
from vescale_fsdp.layout.group_layout import GroupLayout, TensorSlot
from vescale_fsdp.torch_modes import without_grad

Pool = Callable[[], AbstractContextManager[Any]]
Gather = Callable[[torch.Tensor, torch.Tensor], Work | None]
"""``gather(full, shard)`` starts to fill 1-D ``full`` with all ranks' shards; returns the work to wait for."""


class DBuffer:
    """The global buffer of one group on one rank.

    Args:
        layout: the offset of each tensor.
        flat: 1-D [layout.numel], the memory. If its storage cannot be resized, as memory of some communication
            libraries, it is never freed.
        pool: returns a context that is entered around each allocation.
    """

    def __init__(self, layout: GroupLayout, flat: torch.Tensor, pool: Pool = nullcontext) -> None:
        self.layout = layout
        self.flat = flat
        self._pool = pool
        self._views: dict[str, torch.Tensor] = {}
        # Scattered tensors by name: 1-D, full, with their own storage.
        self._copies: dict[str, torch.Tensor] = {}
        self._padding: list[torch.Tensor] | None = None  # created at the first use
        self._work: Work | None = None
        self._storage = flat.untyped_storage()
        self._nbytes = self._storage.nbytes()  # to allocate the storage again, because `free` resizes it to 0

    def allocate(self) -> None:
        """Allocate the storage, on the current stream, if it is not allocated. New contents are undefined."""
        if self._storage.nbytes() != self._nbytes:  # equal: the storage is allocated or was never freed
            with self._pool():
                self._storage.resize_(self._nbytes)
        for copy in self._copies.values():  # scattered tensors have storage of their own
            copy.untyped_storage().resize_(copy.numel() * copy.element_size())

    def free(self) -> None:
        """Free the storage. The caller must ensure that no stream still uses it."""
        if self._storage.resizable():  # memory of a communication library may not be
            self._storage.resize_(0)
        for copy in self._copies.values():  # scattered tensors have storage of their own
            copy.untyped_storage().resize_(0)

    def view(self, slot: TensorSlot) -> torch.Tensor:
        """Return the full tensor of a slot, an n-d view of the buffer: the same object at each call.

        For a scattered slot, it has its own storage, which is filled from the pieces now and after every gather.
        """
        view = self._views.get(slot.fqn)
        if view is None:
            if slot.is_scattered:
                copy = self._copies[slot.fqn] = self.flat.new_empty(slot.numel)
                self._copy_out(slot, copy)
                view = copy.view(slot.shape)
            else:
                view = self.flat[slot.offset : slot.offset + slot.numel].view(slot.shape)
            self._views[slot.fqn] = view
        return view

    def pieces(self, slot: TensorSlot) -> list[torch.Tensor]:
        """Return views of the buffer that together have all elements of a slot, in the tensor's order.

        A contiguous slot has one n-d view; a scattered slot has a 2-D view [ranks, piece_numel] for each of its runs.
        """
        if not slot.is_scattered:
            return [self.view(slot)]
        size = self.layout.shard_numel
        return [
            # A strided view, because neighboring pieces of a run are one shard apart.
            self.flat[run.first_rank * size + run.local_offset :].as_strided(
                (run.num_ranks, run.piece_numel), (size, 1)
            )
            for run in slot.runs
        ]

    def padding(self) -> list[torch.Tensor]:
        """Return the parts of the buffer outside all tensors: 1-D views, in order."""
        if self._padding is None:
            size = self.layout.shard_numel
            filled = sorted(  # slots are in definition order, not in buffer order
                [(slot.offset, slot.numel) for slot in self.layout.slots if not slot.is_scattered]
                + [
                    (rank * size + run.local_offset, run.piece_numel)
                    for slot in self.layout.slots
                    for run in slot.runs
                    for rank in range(run.first_rank, run.first_rank + run.num_ranks)
                ]
            )
            starts = [0, *(start + numel for start, numel in filled)]
            stops = [*(start for start, _ in filled), self.layout.numel]
            self._padding = [
                self.flat[start:stop] for start, stop in zip(starts, stops, strict=True) if start < stop
            ]
        return self._padding

    def places(
        self, given: Sequence[tuple[TensorSlot, torch.Tensor]]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return views of the buffer to write full tensors to, and the tensors' values split into the views' shapes."""
        targets: list[torch.Tensor] = []
        parts: list[torch.Tensor] = []
        for slot, values in given:
            pieces = self.pieces(slot)
            targets += pieces
            # reshape, not view: the strides of autograd's gradients may not be row-major.
            parts += [values] if not slot.is_scattered else _split(values.reshape(-1), pieces)
        return targets, parts

    def put(self, slot: TensorSlot, values: torch.Tensor) -> None:
        """Write the values of a full tensor into the buffer."""
        if not slot.is_scattered:  # without lists: on the CPU this runs for every gradient
            self.view(slot).copy_(values)
            return
        for piece, part in zip(*self.places([(slot, values)]), strict=True):
            piece.copy_(part)

    def add(self, slot: TensorSlot, values: torch.Tensor) -> None:
        """Add the values of a full tensor to the values in the buffer."""
        for piece, part in zip(*self.places([(slot, values)]), strict=True):
            piece.add_(part)

    def start_gather(
        self,
        own: torch.Tensor,
        gather: Gather,
        *,
        copy_to: Range | None = None,
        before: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
    ) -> None:
        """Start to fill the buffer with the contributions of all ranks.

        Args:
            own: 1-D, this rank's contribution.
            gather: the collective, called as ``gather(full, own)``.
            copy_to: if the dtype or device of ``own`` differs from the buffer's, the range of the buffer into which it
                is first copied; None: the collective reads ``own`` itself.
            before: called with the buffer and this rank's converted contribution before the collective starts.
        """
        with without_grad():
            if copy_to is not None:
                mine = self.flat[copy_to.start : copy_to.stop]
                mine.copy_(own, non_blocking=True)  # does not block if ``own`` is in pinned memory
                own = mine
            if before is not None:
                before(self.flat, own)
            self._work = gather(self.flat, own)

    def wait_gather(self) -> None:
        """Wait until the buffer is filled."""
        wait_for(self._work)
        self._work = None  # a second wait is a no-op
        for fqn, copy in self._copies.items():
            self._copy_out(self.layout.slot(fqn), copy)

    @torch.no_grad()
    def _copy_out(self, slot: TensorSlot, copy: torch.Tensor) -> None:
        """Fill a scattered tensor from its pieces."""
        pieces = self.pieces(slot)
        for piece, part in zip(pieces, _split(copy, pieces), strict=True):
            part.copy_(piece)


def _split(flat: torch.Tensor, pieces: list[torch.Tensor]) -> list[torch.Tensor]:
    """Split a 1-D tensor into parts with the shapes of the pieces."""
    parts = flat.split([piece.numel() for piece in pieces])
    return [part.view(piece.shape) for part, piece in zip(parts, pieces, strict=True)]
