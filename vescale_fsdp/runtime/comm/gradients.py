"""Gradients of a group from autograd to a reduced shard, and flags of the parameters that ranks have used.

The reduction itself is not here: `ParamGroup.start_reduce` starts it, `GroupComm.reduce_scatter` chooses operator and
divisor, and `vescale_fsdp.collectives.reduce_scatter_into` exchanges and sums.

Unsharded gradients since the last reduction (`UnshardedGrads`):

    kept      on an accelerator: the gradients as autograd computed them
    buffer    1-D [m*S] DBuffer, if allocated: the sum of the gradients written into it, which the reduction reads

On an accelerator gradients are kept until the unit's backward has ended. Then the unit's full parameters and the
previous reduction's buffer are freed. Only then is the buffer allocated, and filled with one fused copy. So at the
memory peak there are full parameters and gradients, or gradients and a buffer, but never all three. The buffer's
memory belongs to the stream that starts the reduction, whichever streams computed the gradients. On the CPU each
gradient is written into the buffer at once and then dropped; the buffer and its memory pages are those of the previous
layer.

Every rank reduces all parameters of a unit, unused ones as zeros, so that no rank waits for another one. But a gradient
of zeros differs from no gradient: Adam's momentum and weight decay would change the weight. So all ranks exchange flags
(`UsedFlags`), one small message per mesh after the last reduction of a backward:

    used on this rank          the gradient is set with the reduction, without reading the message
    used on other ranks only   the gradient, computed by other ranks, is set once the message is read
    used on no rank            ``.grad`` is not changed (None after zero_grad)

The message is always sent, but only ranks with unused parameters read it: on an accelerator the host waits for it.
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
        layout: the group's layout.
        new_buffer: creates a buffer of the given dtype.
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
        # Returns a spare buffer or None. `CommContext` replaces it by a method that also waits for reductions.
        self.take_spare: Callable[[list[DBuffer]], DBuffer | None] = lambda spares: (
            spares.pop() if spares else None
        )
        self.streams: Streams | None = None  # None on the CPU, where gradients are not kept
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
            slot: slot of the parameter.
            grad: full, dense, of any dtype. The caller keeps no reference to it.
        """
        if self.streams is None:
            self._write(slot, grad)
            return
        if slot.fqn in self._kept:  # a second gradient before the reduction: only the buffer can sum them
            self.write_kept()
        self._kept[slot.fqn] = grad
        self._made_on[self.streams.current()] = None

    def write_kept(self) -> None:
        """Write the kept gradients into the buffer, with as few kernels as possible."""
        if self.streams is None or not self._kept:
            return
        here = self.streams.current()
        others = [stream for stream in self._made_on if stream != here]
        for stream in others:  # wait until these streams have computed the gradients
            here.wait_stream(stream)
        buffer = self._allocated()
        kept = [(self.layout.slot(fqn), grad) for fqn, grad in self._kept.items()]
        new = [each for each in kept if each[0].fqn not in self._written]
        if new:
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
        """Write a gradient into the buffer, or add it to an earlier one."""
        buffer = self._allocated()
        if slot.fqn in self._written:
            buffer.add(slot, grad)
        else:
            buffer.put(slot, grad)
            self._written.add(slot.fqn)

    def complete(self) -> DBuffer:
        """The buffer with all gradients, and zeros for parameters without one: all ranks reduce all parameters."""
        self.write_kept()
        buffer = self._allocated()
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
        """Give up the buffer, which the reduction reads; returns the names of parameters with a gradient in it."""
        used, self._written = frozenset(self._written), set()
        self.buffer = None  # a late gradient must not be written into the buffer that is being reduced
        return used

    def drop(self) -> None:
        """After an exception: drop all gradients."""
        self.buffer = None
        self._written, self._kept, self._made_on = set(), {}, {}

    def _allocated(self) -> DBuffer:
        """The buffer of the next reduction, allocated."""
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
    used: frozenset[str]  # names of parameters that have a gradient on this rank

    def wait(self) -> None:
        """Wait until ``shard`` is written and ``source`` is read. On an accelerator the current stream waits."""
        if self.work is not None:
            self.work.wait()


class UsedFlags:
    """A message in flight with flags of used parameters. The constructor is a collective of the mesh's ranks.

    Args:
        mesh: the ranks that exchange flags.
        used: whether this rank has used each parameter, in the same order on all ranks.
        device: device of the collective.
    """

    def __init__(self, mesh: DeviceMesh, used: Sequence[bool], device: torch.device) -> None:
        self._used = used
        with outside_modes():  # a backward under torch.func must not wrap this tensor
            # uint8, which gloo and NCCL both reduce
            self._flags = torch.ones(len(used), dtype=torch.uint8, device=device)
            unused = [index for index, flag in enumerate(used) if not flag]
            if unused:  # usually empty, which saves a copy to the device
                self._flags[unused] = 0
            self._work: Work | None = None
            for axis in range(mesh.ndim):
                if mesh.size(axis) > 1:  # MAX over one axis after the other is MAX over the mesh
                    wait_for(self._work)
                    self._work = all_reduce_in_place(self._flags, dist.ReduceOp.MAX, mesh.get_group(axis))

    def wait(self) -> None:
        """Wait for the message. On an accelerator the current stream waits."""
        wait_for(self._work)
        self._work = None

    def anywhere(self) -> list[bool]:
        """Whether any rank has used each parameter; the host waits for the message."""
        self.wait()
        # A FakeTensor has no values: assume that other ranks have used the same parameters.
        return list(map(bool, self._used if is_fake(self._flags) else self._flags.tolist()))
