"""Where bytes that are read go: into a tensor's memory itself, or there by one copy.

A `LoadTarget` is a tensor to fill. A `Sink` is one range of a file's bytes and what becomes of it:

    direct      contiguous in the file and in CPU memory: a file can be read into the tensor itself
    copied      contiguous in both, but on a device: by way of pinned memory of the thread that reads
    patch       a box that is strided on either side: copied box by box
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from vescale_fsdp.checkpoint.manifest.rank_file import FileShare
from vescale_fsdp.checkpoint.manifest.region import SharedPatch, SharedRun, runs_of_box
from vescale_fsdp.checkpoint.manifest.torch_dtypes import bytes_of, carrier_of
from vescale_fsdp.checkpoint.state.host_copies import PinnedSlots, copy_stream_of
from vescale_fsdp.layout.geometry import Box, boxes_of_range, numel_of

Bytes = npt.NDArray[np.uint8]
Deliver = Callable[[int, Bytes], None]

_PINNED_BYTES = 4 << 20  # at a time: a thread has two pieces of it on their way
_slots = PinnedSlots()


class LoadTarget:
    """A tensor to be filled in place, whatever its device and strides.

    Args:
        tensor: this rank's local tensor; its row-major elements are a region of the global tensor.

    Attributes:
        is_overwritten: whether the tensor may hold something of what is read.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.is_overwritten = False
        self._is_lazy = tensor.is_conj() or tensor.is_neg()  # its memory is not what it says
        direct = tensor.is_contiguous() and not self._is_lazy
        self._filled = (
            tensor if direct else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        )
        self.itemsize = tensor.dtype.itemsize
        self.memory: Bytes | None = None  # 1D [nbytes], None on a device
        self.stream = copy_stream_of(tensor.device)
        if self.stream is not None:
            self.stream.wait_for_compute()  # here: threads that read have current streams of their own
        elif tensor.device.type == "cpu":
            self.memory = bytes_of(self._filled).numpy()

    @cached_property
    def flat(self) -> torch.Tensor:
        """1D [numel], under a dtype that every copy kernel knows."""
        return self._filled.view(-1).view(carrier_of(self._filled.dtype))

    def begin(self) -> None:
        """To be called before the first bytes come."""
        self.is_overwritten = self.is_overwritten or self._filled is self._tensor

    def finish(self) -> None:
        """Bring what was read to where it belongs, once all of it is there."""
        self.is_overwritten = self._filled.numel() > 0
        if self.stream is not None:
            self.stream.hold_compute()
        if self._is_lazy:
            self._tensor.copy_(self._filled)
        elif self._filled is not self._tensor:
            self._tensor.view(carrier_of(self._tensor.dtype)).copy_(self.flat.view(self._tensor.shape))


class Sink(NamedTuple):
    """A half-open byte range of a file and its destination.

    Attributes:
        target: the tensor that it fills; None for memory that is nobody's yet.
        memory: the destination itself, as long as the range; None if the bytes must be delivered.
        deliver: called with (first byte's place in the file, bytes) for parts of the range that together
            make it up; bytes hold whole elements, and must be neither changed nor kept.
    """

    start: int
    stop: int
    target: LoadTarget | None
    memory: Bytes | None
    deliver: Deliver | None = None

    def begin(self) -> None:
        """To be called before bytes come into `memory`."""
        if self.target is not None:
            self.target.begin()

    def take(self, at: int, data: Bytes) -> None:
        """Bring bytes from file position ``at`` on to where they belong."""
        self.begin()
        if self.memory is not None:
            self.memory[at - self.start : at - self.start + len(data)] = data
        elif self.deliver is not None:
            self.deliver(at, data)


def sinks_of(stored: FileShare, target: LoadTarget, *, max_gap_bytes: int) -> Iterator[Sink]:
    """The sinks that bring one file's share into a target."""
    itemsize, share = target.itemsize, stored.share
    if isinstance(share, SharedRun):
        start = stored.piece.start_bytes + share.source * itemsize
        stop = start + share.numel * itemsize
        if target.memory is None:
            yield Sink(start, stop, target, None, functools.partial(_copy_run, target, share.target, start))
            return
        first = share.target * itemsize
        yield Sink(start, stop, target, target.memory[first : first + stop - start])
        return
    base = stored.piece.start_bytes + share.source * itemsize
    deliver = functools.partial(_copy_patch, target, share, base)
    for run in runs_of_box(share.source_sizes, share.source_box, max_gap_numel=max_gap_bytes // itemsize):
        yield Sink(base + run.start * itemsize, base + run.stop * itemsize, target, None, deliver)


def _elements(target: LoadTarget, data: Bytes) -> torch.Tensor:
    # Some stores answer with read-only bytes, which torch does not take.
    return torch.from_numpy(data if data.flags.writeable else data.copy()).view(target.flat.dtype)


def _copy_run(target: LoadTarget, place: int, start: int, at: int, data: Bytes) -> None:
    """Bytes from file position ``at`` into the target, whose element ``place`` comes from ``start``."""
    first = place + (at - start) // target.itemsize
    elements, stream = _elements(target, data), target.stream
    if stream is None:
        target.flat[first : first + elements.numel()].copy_(elements)
        return
    for piece in elements.split(_PINNED_BYTES // target.itemsize):
        pinned = _slots.lend(piece.numel() * target.itemsize).view(piece.dtype)
        pinned.copy_(piece)
        with stream.on():
            target.flat[first : first + piece.numel()].copy_(pinned, non_blocking=True)
        _slots.busy_until(stream.record())
        first += piece.numel()


def _copy_patch(target: LoadTarget, patch: SharedPatch, base: int, at: int, data: Bytes) -> None:
    """What a range of the source's elements has in common with the patch, box by box."""
    elements = _elements(target, data)
    first = (at - base) // target.itemsize
    into = target.flat[patch.target : patch.target + numel_of(patch.target_sizes)].view(patch.target_sizes)
    boxes = boxes_of_range(patch.source_sizes, first, first + elements.numel())
    for box, run in zip(boxes, elements.split([box.numel for box in boxes]), strict=True):
        shared = box.intersect(patch.source_box)
        if shared is None:
            continue
        values = run.view(box.sizes)[shared.slices(box.offsets)]
        moved = zip(shared.offsets, patch.source_box.offsets, patch.target_box.offsets, strict=True)
        place = into[Box(tuple(a - b + c for a, b, c in moved), shared.sizes).slices()]
        with nullcontext() if target.stream is None else target.stream.on():
            place.copy_(values)
