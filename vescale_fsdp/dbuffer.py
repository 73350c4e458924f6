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

import torch
import torch.distributed as dist

from vescale_fsdp.layout import GroupLayout, TensorSlot
from vescale_fsdp.redistribute import all_gather_into, reduce_scatter_into
from vescale_fsdp.torch_private import restore_version

__all__ = ["DBuffer"]


class DBuffer:
    """The global buffer of one group on one rank.

    Args:
        layout: where each tensor lies; the buffer is given it and never makes one up.
        rank: this rank's index among the layout's shards.
        dtype, device: of the whole buffer.

    Attributes:
        flat: 1-D [layout.numel], the whole buffer.
        shard: 1-D [layout.shard_numel], this rank's slice of ``flat``.
    """

    def __init__(self, layout: GroupLayout, rank: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self.flat = torch.empty(layout.numel, dtype=dtype, device=device)
        start, stop = layout.shard_range(rank)
        self.shard = self.flat[start:stop]
        self._gather: dist.Work | None = None
        self._version = self.flat._version
        self._nbytes = self.flat.untyped_storage().nbytes()

    @property
    def allocated(self) -> bool:
        """Whether the storage is there."""
        return self._nbytes == 0 or self.flat.untyped_storage().nbytes() > 0

    def allocate(self) -> None:
        """Bring the storage back, on the current stream; contents are undefined."""
        if not self.allocated:
            self.flat.untyped_storage().resize_(self._nbytes)

    def free(self) -> None:
        """Give the storage back. The caller sees to it that no stream still uses it."""
        self.flat.untyped_storage().resize_(0)

    def view(self, slot: TensorSlot) -> torch.Tensor:
        """The full tensor of a slot: an n-d view of the buffer."""
        return self.flat[slot.offset : slot.offset + slot.numel].view(slot.shape)

    def start_all_gather(self, shard: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Start filling the buffer with every rank's shard. One cast if the dtypes differ, else no copy.

        Args:
            shard: 1-D [shard_numel], this rank's shard, in any dtype.
            group: the ranks that share the buffer.
        """
        with torch.no_grad():
            if shard.dtype != self.flat.dtype or shard.device != self.flat.device:
                self.shard.copy_(shard, non_blocking=True)
                shard = self.shard
            self._gather = all_gather_into(self.flat, shard, group)

    def wait_all_gather(self) -> None:
        """Wait for the all-gather.

        Autograd may have saved views of the buffer. Refilling it with the same values is no modification,
        so its version counter is what it was at the start; some backends count up only here.
        """
        if self._gather is not None:
            self._gather.wait()
            self._gather = None
        restore_version(self.flat, self._version)

    def reduce_scatter(
        self, shard: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup
    ) -> dist.Work | None:
        """Reduce the buffer over the ranks into ``shard`` (1-D [shard_numel]); read where it was written."""
        return reduce_scatter_into(shard, self.flat, op, group)
