"""Gradients of a group from autograd to a reduced shard, and the flags of parameters that any rank has used.

Unsharded gradients since the last reduction (`UnshardedGrads`):

    kept      as autograd computed them, on an accelerator
    buffer    1-D [m*S] DBuffer, once there is one: the sum of the gradients written into it; the reduction reads it

On an accelerator gradients are kept until the unit's backward has ended. Then its full parameters are freed, and so is
the buffer that was reduced before; only now the buffer is allocated, and filled with one fused copy. So a memory peak
contains gradients or a buffer, not both next to full parameters, and the buffer belongs to the stream that starts the
reduction, whichever streams computed the gradients. On the CPU each gradient is written as it appears, and dropped: the
CPU allocates memory by the page, and the buffer of the layer before is available with its pages.

Every rank reduces all parameters of a unit, unused ones as zeros, so that no rank waits for another one. But a gradient
of zeros is not the same as none: Adam's momentum and weight decay would change the weight. So all ranks exchange flags
(`UsedFlags`), one small message per mesh after the last reduction of a backward:

    a parameter was used    on this rank     its gradient is set with the reduction, without reading the message
                            elsewhere        its gradient, from other ranks, is set once the message is read
                            nowhere          its ``.grad`` stays as it was, None after zero_grad

The message is always sent, but only a rank with an unused parameter reads it: on an accelerator the host waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from vescale_fsdp.collectives import Work, all_reduce_in_place, wait_for
from vescale_fsdp.layout.group_layout import GroupLayout, TensorSlot
from vescale_fsdp.runtime.comm.dbuffer import DBuffer
from vescale_fsdp.runtime.comm.streams import Stream, Streams
from vescale_fsdp.torch_modes import is_fake, outside_modes
from vescale_fsdp.torch_private import foreach_copy_, foreach_zero_


class UnshardedGrads:
    """Unsharded gradients of a group.

    Args:
        layout: of the group.
        new_buffer: makes a buffer of a dtype.
        dtype: returns the dtype of the next buffer.
    """

    def __init__(
        self,
        layout: GroupLayout,
        new_buffer: Callable[[torch.dtype], DBuffer],
        dtype: Callable[[], torch.dtype],
    ) -> None:
        self.layout = layout
        self.buffer: DBuffer | None = None
        self.spare: dict[torch.dtype, list[DBuffer]] = {}  # unused buffers
        # Called before a buffer is allocated.
        self.take_spare: Callable[[list[DBuffer]], DBuffer | None] = lambda spares: (
            spares.pop() if spares else None
        )
        self.streams: Streams | None = None  # of the accelerator, where gradients are kept
        self._new_buffer, self._dtype = new_buffer, dtype
        self._written: set[str] = set()  # parameters whose gradients are in the buffer
        self._kept: dict[str, torch.Tensor] = {}
        self._made_on: dict[Stream, None] = {}  # streams that computed the kept gradients

    def __bool__(self) -> bool:
        """Whether any parameter has a gradient."""
        return bool(self._written or self._kept)

    def take(self, slot: TensorSlot, grad: torch.Tensor) -> None:
        """Take a gradient from autograd.

        Args:
            slot: of its parameter.
            grad: full, dense, of any dtype; the caller drops it.
        """
        if self.streams is None:
            self._write(slot, grad)
            return
        if slot.fqn in self._kept:  # a second one before the reduction: the buffer sums them
            self.write_kept()
        self._kept[slot.fqn] = grad
        self._made_on[self.streams.current()] = None

    def write_kept(self) -> None:
        """Write the kept gradients into the buffer, with as few kernels as possible."""
        if self.streams is None or not self._kept:
            return
        here = self.streams.current()
        others = [stream for stream in self._made_on if stream != here]
        for stream in others:
            here.wait_stream(stream)
        self._write_all([(self.layout.slot(fqn), grad) for fqn, grad in self._kept.items()])
        self._kept, self._made_on = {}, {}
        for stream in others:  # they own the memory of the kept gradients
            stream.wait_stream(here)

    def _write(self, slot: TensorSlot, grad: torch.Tensor) -> None:
        """Write a gradient, or add it to an earlier one: the only pass over it."""
        buffer = self._filled()
        if slot.fqn in self._written:
            buffer.add(slot, grad)
        else:
            buffer.put(slot, grad)
            self._written.add(slot.fqn)

    def _write_all(self, given: Sequence[tuple[TensorSlot, torch.Tensor]]) -> None:
        """The same for many, the new ones in one kernel."""
        buffer = self._filled()
        new = [each for each in given if each[0].fqn not in self._written]
        if new:
            foreach_copy_(*buffer.places(new))
        for slot, grad in given:
            if slot.fqn in self._written:
                buffer.add(slot, grad)
        self._written.update(slot.fqn for slot, _ in new)

    def complete(self) -> DBuffer:
        """The buffer with all gradients; zeros where a parameter has none.

        So ranks that left some parameters unused still send the same bytes as the others.
        """
        self.write_kept()
        buffer = self._filled()
        missing = [
            piece
            for slot in self.layout.slots
            if slot.fqn not in self._written
            for piece in buffer.pieces(slot)
        ]
        if missing:
            foreach_zero_(missing)
        return buffer

    def hand_over(self) -> frozenset[str]:
        """Leave the buffer to the reduction; returns the names of parameters that have a gradient in it."""
        used, self._written = frozenset(self._written), set()
        self.buffer = None  # a late gradient must not change the buffer that is being reduced
        return used

    def drop(self) -> None:
        """Drop all gradients (after an exception)."""
        self.buffer = None
        self._written, self._kept, self._made_on = set(), {}, {}

    def _filled(self) -> DBuffer:
        """The buffer that is being filled."""
        if self.buffer is None:
            dtype = self._dtype()
            buffer = self.take_spare(self.spare.setdefault(dtype, []))
            self.buffer = buffer or self._new_buffer(dtype)
            self.buffer.allocate()
        return self.buffer


class ReducedShard(NamedTuple):
    """A reduction in flight: its result, its source, and the work object to wait on."""

    shard: torch.Tensor  # 1-D [S], reduce dtype
    source: DBuffer  # kept until the reduction has read it
    work: Work | None
    used: frozenset[str]  # parameters that have a gradient on this rank

    def wait(self) -> None:
        """Wait until ``shard`` is written and ``source`` read (on an accelerator: the current stream waits)."""
        if self.work is not None:
            self.work.wait()


class UsedFlags:
    """A message in flight: which parameters ranks have used. Its construction is a collective of the mesh's ranks.

    Args:
        mesh: the ranks that exchange flags.
        used: whether this rank has used each parameter, in an order that all ranks share.
        device: where the collective runs.
    """

    def __init__(self, mesh: DeviceMesh, used: Sequence[bool], device: torch.device) -> None:
        self._used = used
        with outside_modes():
            self._flags = torch.ones(len(used), dtype=torch.uint8, device=device)
            unused = [index for index, flag in enumerate(used) if not flag]
            if unused:
                self._flags[unused] = 0
            self._work: Work | None = None
            for axis in range(mesh.ndim):
                if mesh.size(axis) > 1:
                    wait_for(self._work)
                    self._work = all_reduce_in_place(self._flags, dist.ReduceOp.MAX, mesh.get_group(axis))

    def wait(self) -> None:
        """Wait for the message (on an accelerator: the current stream waits)."""
        wait_for(self._work)
        self._work = None

    def anywhere(self) -> list[bool]:
        """Whether any rank has used each parameter; the host waits for the message."""
        self.wait()
        return list(map(bool, self._used if is_fake(self._flags) else self._flags.tolist()))
