"""Unsharded gradients of a group until their reduction, and flags of the parameters that ranks have used.

The reduction itself is elsewhere: `ParamGroup.start_reduce` starts it, `GroupComm.reduce_scatter` chooses operator and
divisor, and `vescale_fsdp.collectives.operations.reduce_scatter_into` exchanges and sums.

Unsharded gradients since the last reduction (`UnshardedGrads`):

    kept      on an accelerator: the gradients as autograd computed them
    buffer    1-D [m*S] DBuffer, if allocated: the sums of all gradients written so far, which the reduction reads

On an accelerator gradients are kept until the unit's backward has ended. Then the unit's full parameters and the
previous reduction's buffer are freed; after that the buffer is allocated, and filled with one fused copy. So at the
memory peak there are full parameters and gradients, or gradients and a buffer, but never all three. The buffer's
memory belongs to the stream that starts the reduction, whichever streams computed the gradients.

On the CPU each gradient is written into the buffer at once and then dropped. Equal layers use the same buffer, one
after another, so its memory is not allocated again.

Every rank reduces all parameters of a unit, unused parameters as zeros, so that all ranks issue the same collectives.
But a gradient of zeros differs from no gradient: Adam's momentum and weight decay would change the weight. So all ranks
exchange flags (`UsedFlags`), one small message per mesh after the last reduction of a backward:

    used on this rank          the gradient is set when its reduction ends, without reading the message
    used on other ranks only   the gradient, computed by other ranks, is set once the message is read
    used on no rank            ``.grad`` is not changed (None after zero_grad)

The message is always sent. Only ranks with unused parameters read it, because on an accelerator the host must wait.
On an accelerator the message runs on the gather stream, on which it is created; no stream waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from vescale_fsdp.collectives.operations import all_reduce_at_once, all_reduce_in_place
from vescale_fsdp.collectives.slice_exchange import Work, runs_beside, wait_for
from vescale_fsdp.layout.group_layout import GroupLayout, TensorSlot
from vescale_fsdp.runtime.comm.dbuffer import DBuffer
from vescale_fsdp.runtime.comm.streams import Stream, Streams
from vescale_fsdp.torch_modes import is_fake, outside_modes
from vescale_fsdp.torch_private import foreach_copy_, foreach_zero_


class UnshardedGrads:
    """The unsharded gradients of a group since its last reduction.

    Args:
        layout: the group's layout.
        new_buffer: called as ``new_buffer(dtype)``, creates a gradient buffer.
        dtype: returns the dtype of the next buffer, which settings may change.
    """

    def __init__(
        self,
        layout: GroupLayout,
        new_buffer: Callable[[torch.dtype], DBuffer],
        dtype: Callable[[], torch.dtype],
    ) -> None:
        self.layout = layout
        self.buffer: DBuffer | None = None
        self.spare: dict[torch.dtype, list[DBuffer]] = {}  # unused; groups of equal layout share them
        # Takes one of the spare buffers, or returns None. `CommContext` sets a method that also waits for reductions.
        self.take_spare: Callable[[list[DBuffer]], DBuffer | None] = lambda spares: (
            spares.pop() if spares else None
        )
        self.streams: Streams | None = None  # None on the CPU, where gradients are not kept
        self._new_buffer, self._dtype = new_buffer, dtype
        self._written: set[str] = set()  # names of parameters whose gradients are in the buffer
        self._kept: dict[str, torch.Tensor] = {}  # by name of the parameter
        self._made_on: dict[Stream, None] = {}  # streams that computed the kept gradients

    def __bool__(self) -> bool:
        """Return whether any parameter has a gradient."""
        return bool(self._written or self._kept)

    def take(self, slot: TensorSlot, grad: torch.Tensor) -> None:
        """Take a gradient from autograd.

        Args:
            slot: slot of the parameter.
            grad: full, dense, of any dtype. The caller keeps no reference to it.
        """
        if self.streams is None:
            self._write(slot, grad)
            return
        if slot.fqn in self._kept:  # a second gradient before the reduction is added in the buffer
            self.write_kept()
        self._kept[slot.fqn] = grad
        self._made_on[self.streams.current()] = None

    def write_kept(self) -> None:
        """Write the kept gradients into the buffer: all first gradients with one fused copy, others by addition."""
        if self.streams is None or not self._kept:
            return
        here = self.streams.current()
        others = [stream for stream in self._made_on if stream != here]
        for stream in others:  # wait until these streams have computed the gradients
            here.wait_stream(stream)
        buffer = self._allocated()
        kept = [(self.layout.slot(fqn), grad) for fqn, grad in self._kept.items()]
        new = [each for each in kept if each[0].fqn not in self._written]
        if new:  # foreach operators refuse an empty list
            foreach_copy_(*buffer.places(new))  # copied, not added: the buffer's contents are undefined
        for slot, grad in kept:
            if slot.fqn in self._written:
                buffer.add(slot, grad)
        self._written.update(slot.fqn for slot, _ in new)
        self._kept, self._made_on = {}, {}
        # These streams own the gradients' memory, and must not reuse it before the copy.
        for stream in others:
            stream.wait_stream(here)

    def _write(self, slot: TensorSlot, grad: torch.Tensor) -> None:
        """Write a gradient into the buffer, or add it to an earlier gradient of the same parameter."""
        buffer = self._allocated()
        write = buffer.add if slot.fqn in self._written else buffer.put
        write(slot, grad)
        self._written.add(slot.fqn)

    def complete(self) -> DBuffer:
        """Return the buffer with all gradients, and zeros for parameters without one: ranks reduce all parameters."""
        self.write_kept()
        buffer = self._allocated()
        missing = [
            piece
            for slot in self.layout.slots
            if slot.fqn not in self._written
            for piece in buffer.pieces(slot)
        ]
        if missing:  # foreach operators refuse an empty list
            foreach_zero_(missing)
        return buffer

    def hand_over(self) -> frozenset[str]:
        """Give up the buffer, which the reduction reads; return the names of parameters with a gradient in it."""
        used, self._written = frozenset(self._written), set()
        self.buffer = None  # a late gradient must not be written into the buffer that is being reduced
        return used

    @property
    def names(self) -> set[str]:
        """Names of the parameters that have a gradient."""
        return self._written | self._kept.keys()

    def drop_one(self, fqn: str) -> None:
        """Drop the gradient of one parameter."""
        self._written.discard(fqn)
        self._kept.pop(fqn, None)

    def zero(self, slot: TensorSlot) -> None:
        """Set the gradient of one parameter to zeros."""
        if slot.fqn in self._kept:
            self._kept[slot.fqn] = torch.zeros_like(self._kept[slot.fqn])
        if slot.fqn in self._written and self.buffer is not None:
            for piece in self.buffer.pieces(slot):
                piece.zero_()

    def drop(self) -> None:
        """Drop all gradients, after an exception."""
        self.buffer = None
        self._written, self._kept, self._made_on = set(), {}, {}

    def _allocated(self) -> DBuffer:
        """Return the buffer of the next reduction, after allocating it if necessary."""
        if self.buffer is None:
            dtype = self._dtype()
            buffer = self.take_spare(self.spare.setdefault(dtype, []))
            self.buffer = buffer or self._new_buffer(dtype)
            self.buffer.allocate()
        return self.buffer


class ReducedShard(NamedTuple):
    """The reduction of one gradient buffer: its result, its source, and the work object to wait on."""

    # Result of the reduction over shards, in the reduce dtype: ``shard``; in a hybrid cut 1-D [S * nodes], reduced over
    # one node.
    part: torch.Tensor
    shard: torch.Tensor  # 1-D [S], reduce dtype, the result
    home: torch.Tensor  # 1-D [S], the shard's dtype, what becomes gradients; ``shard`` if dtypes are equal
    source: DBuffer  # the gradient buffer, which must live until the reduction has read it
    work: Work | None  # None: the current stream has run the collective
    used: frozenset[str]  # names of parameters that have a gradient on this rank
    due: frozenset[str]  # names of parameters that were trained; the same on all ranks

    def wait(self) -> None:
        """Wait until ``part`` is written and ``source`` is read. On an accelerator the current stream waits."""
        wait_for(self.work)


class UsedFlags:
    """A message in flight with flags of used parameters. To create it is a collective call of the mesh's ranks.

    On an accelerator all of its work, and its memory, belong to the stream on which it is created. So it can be dropped
    at any time, and no other stream waits for it. It is read on the same stream.

    Args:
        mesh: the ranks that exchange flags.
        used: whether this rank has used each parameter, in the same order on all ranks.
        device: device of the collective.
    """

    def __init__(self, mesh: DeviceMesh, used: Sequence[bool], device: torch.device) -> None:
        self._used = used
        with outside_modes():  # a backward under torch.func must not wrap this tensor
            # uint8, not bool: gloo and NCCL both reduce it
            self._flags = torch.ones(len(used), dtype=torch.uint8, device=device)
            unused = [index for index, flag in enumerate(used) if not flag]
            if unused:  # usually there are none, and nothing is copied to the device
                self._flags[unused] = 0
            self._work: Work | None = None
            for group in mesh.get_all_groups():  # MAX over each axis in turn is MAX over the mesh
                if group.size() > 1 and runs_beside(self._flags):
                    wait_for(self._work)
                    self._work = all_reduce_in_place(self._flags, dist.ReduceOp.MAX, group)
                elif group.size() > 1:
                    all_reduce_at_once(self._flags, dist.ReduceOp.MAX, group)

    def wait(self) -> None:
        """Wait for the message on the CPU, where a process must not end before its messages; else a no-op."""
        wait_for(self._work)
        self._work = None

    def anywhere(self) -> list[bool]:
        """Return for each parameter whether any rank has used it; the host waits for the message."""
        self.wait()
        # A FakeTensor has no values: assume that other ranks have used the same parameters.
        return list(map(bool, self._used if is_fake(self._flags) else self._flags.tolist()))
