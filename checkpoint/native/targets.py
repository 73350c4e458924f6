"""Destinations of the bytes that a load reads.

A `LoadTarget` is a tensor to fill. A `Sink` is one byte range of a file and its destination:

    direct      contiguous in the file and in CPU memory: the file is read into the tensor's memory
    copied      contiguous in the file, for a tensor on a device: copied through pinned memory of the reading thread
    strided     strided in the file or in the tensor: copied from a buffer
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from vescale_fsdp.checkpoint.manifest.torch_dtypes import bytes_of, carrier_of
from vescale_fsdp.checkpoint.state.host_copies import PinnedSlots, copy_stream_of
from vescale_fsdp.layout.region import Copy

Bytes = npt.NDArray[np.uint8]
Deliver = Callable[[int, Bytes], None]

_PINNED_BYTES = 4 << 20  # 4 MiB per copy to a device; each thread has two such buffers in turn
_slots = PinnedSlots()


class LoadTarget:
    """A tensor to fill in place, on any device and with any strides.

    Args:
        tensor: this rank's local tensor; its row-major elements are a region of the global tensor.

    Attributes:
        is_overwritten: whether a read may have changed the tensor.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.is_overwritten = False
        # The memory of a lazily conjugated or negated tensor does not contain its values.
        self._is_lazy = tensor.is_conj() or tensor.is_neg()
        direct = tensor.is_contiguous() and not self._is_lazy
        self._filled = (
            tensor if direct else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        )
        self.itemsize = tensor.dtype.itemsize
        self.memory: Bytes | None = None  # the bytes to fill, 1D; None if the tensor is on a device
        self.stream = copy_stream_of(tensor.device)
        if self.stream is not None:
            # Queued kernels may still use the memory. Called on this thread: other threads have other current streams.
            self.stream.wait_for_compute()
        elif tensor.device.type == "cpu":
            self.memory = bytes_of(self._filled).numpy()

    @cached_property
    def flat(self) -> torch.Tensor:
        """The memory to fill, 1D [numel], under a dtype that every copy kernel supports."""
        return self._filled.view(-1).view(carrier_of(self._filled.dtype))

    def begin(self) -> None:
        """Note that the tensor is overwritten from now on. Call it before the first bytes are written."""
        # A temporary buffer leaves the tensor unchanged until `finish`.
        self.is_overwritten = self.is_overwritten or self._filled is self._tensor

    def finish(self) -> None:
        """Complete the tensor after the last read: copy the temporary buffer into it, if there is one."""
        self.is_overwritten = self._filled.numel() > 0  # an empty tensor has nothing to overwrite
        if self.stream is not None:
            self.stream.hold_compute()  # kernels that are queued later must see the copied values
        if self._is_lazy:
            self._tensor.copy_(self._filled)
        elif self._filled is not self._tensor:  # as integers, because some dtypes have no copy kernel
            self._tensor.view(carrier_of(self._tensor.dtype)).copy_(self.flat.view(self._tensor.shape))


class Sink(NamedTuple):
    """A half-open byte range of a file and its destination.

    Attributes:
        target: the tensor to fill; None for plain memory.
        memory: the destination, of the range's length; None if the bytes must be copied.
        deliver: function that copies a part of the range, called with (offset in the file, bytes). The bytes must be
            whole elements; the function neither changes nor keeps them. None if ``memory`` is given.
    """

    start: int
    stop: int
    target: LoadTarget | None
    memory: Bytes | None
    deliver: Deliver | None = None

    def begin(self) -> None:
        """Note that the target is overwritten from now on. Call it before bytes are written into `memory`."""
        if self.target is not None:
            self.target.begin()

    def take(self, at: int, data: Bytes) -> None:
        """Copy bytes from file offset ``at`` on to their destination."""
        self.begin()
        if self.memory is not None:
            self.memory[at - self.start : at - self.start + len(data)] = data
        elif self.deliver is not None:
            self.deliver(at, data)


def sinks_of(copy: Copy, start_bytes: int, target: LoadTarget, *, max_gap_bytes: int) -> Iterator[Sink]:
    """Yield the sinks of a copy from a stored piece to a target.

    Args:
        start_bytes: offset of the piece in its file.
        max_gap_bytes: ranges of a strided copy with smaller gaps between them become one sink.
    """
    itemsize = target.itemsize
    if not copy.is_run:
        deliver = partial(_copy_strided, target, copy, start_bytes)
        for first, end in copy.source_ranges(max_gap_bytes // itemsize):
            yield Sink(start_bytes + first * itemsize, start_bytes + end * itemsize, target, None, deliver)
        return
    start = start_bytes + copy.source * itemsize
    stop = start + copy.numel * itemsize
    if target.memory is None:
        yield Sink(start, stop, target, None, partial(_copy_run, target, copy.target, start))
    else:
        first = copy.target * itemsize
        yield Sink(start, stop, target, target.memory[first : first + stop - start])


def _elements(target: LoadTarget, data: Bytes) -> torch.Tensor:
    """Return bytes as elements of the target."""
    # A copy of read-only bytes, which some stores return: torch does not accept them.
    return torch.from_numpy(data if data.flags.writeable else data.copy()).view(target.flat.dtype)


def _copy_run(target: LoadTarget, index: int, start: int, at: int, data: Bytes) -> None:
    """Copy bytes from file offset ``at`` on; the target's element ``index`` is stored at file offset ``start``."""
    first = index + (at - start) // target.itemsize
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


def _copy_strided(target: LoadTarget, copy: Copy, start_bytes: int, at: int, data: Bytes) -> None:
    """Copy the items of a copy that ``data``, the bytes from file offset ``at`` on, contains."""
    elements = _elements(target, data)
    first = (at - start_bytes) // target.itemsize  # the stored piece's item that is the first in `elements`
    with nullcontext() if target.stream is None else target.stream.on():
        for part in copy.within(first, first + elements.numel()):
            values = part._replace(source=part.source - first).source_view(elements)
            part.target_view(target.flat).copy_(values)
