"""Destinations of the bytes that a load reads.

A `LoadTarget` is a tensor to fill. A `FileCopy` is a copy from a file to a target; its bytes reach the tensor

    directly            if the copy is a run and the tensor is in CPU memory: the file is read into the tensor's memory
    through a buffer    if the copy is strided in the file or in the tensor
    through pinned      if the copy is a run and the tensor is on a device; the reading thread has pinned memory
    memory
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from vescale_fsdp.checkpoint.manifest.torch_dtypes import bytes_of, carrier_of
from vescale_fsdp.checkpoint.state.host_copies import PinnedSlots, copy_stream_of
from vescale_fsdp.layout.region import Copy
from vescale_fsdp.torch_private import increment_versions

Bytes = npt.NDArray[np.uint8]

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
        """Note that the tensor is overwritten from now on. To be called before the first bytes are written."""
        # A temporary buffer leaves the tensor unchanged until `finish`.
        self.is_overwritten = self.is_overwritten or self._filled is self._tensor

    def fill(self, items: torch.Tensor, copy: Copy) -> None:
        """Copy ``items``, which are in CPU memory and 1D, to the memory to fill."""
        if self.stream is None:
            copy.target_view(self.flat).copy_(copy.source_view(items))
            return
        if not copy.is_run:
            with self.stream.on():
                copy.target_view(self.flat).copy_(copy.source_view(items))
            return
        at = copy.target
        for values in copy.source_view(items).split(_PINNED_BYTES // self.itemsize):
            pinned = _slots.lend(values.numel() * self.itemsize).view(values.dtype)
            pinned.copy_(values)
            with self.stream.on():
                self.flat[at : at + values.numel()].copy_(pinned, non_blocking=True)
            _slots.busy_until(self.stream.record())
            at += values.numel()

    def finish(self) -> None:
        """Complete the tensor after the last read: copy the temporary buffer, if there is one, into the tensor."""
        self.is_overwritten = self._filled.numel() > 0  # an empty tensor has nothing to overwrite
        if self.memory is not None and not self._tensor.is_inference():
            increment_versions([self._tensor])  # the memory was filled without an operator of torch
        if self.stream is not None:
            self.stream.hold_compute()  # kernels that are queued later must see the copied values
        if self._is_lazy:
            self._tensor.copy_(self._filled)
        elif self._filled is not self._tensor:  # as integers, because some dtypes have no copy kernel
            self._tensor.view(carrier_of(self._tensor.dtype)).copy_(self.flat.view(self._tensor.shape))


class FileCopy(NamedTuple):
    """A copy from bytes [start, stop) of a file to a tensor.

    Attributes:
        target: the tensor to fill.
        copy: its source is the file, from byte 0 on, as items of the tensor's dtype. Items outside of [start, stop) are
            copied by another `FileCopy`.
    """

    target: LoadTarget
    copy: Copy
    start: int
    stop: int

    @property
    def is_direct(self) -> bool:
        """Whether the file can be read into the tensor's memory; else its bytes must be copied."""
        return self.target.memory is not None and self.copy.is_run

    def memory(self, start: int, stop: int) -> Bytes:
        """Return the memory for bytes [start, stop) of the file; needs `is_direct`."""
        assert self.target.memory is not None
        origin = (self.copy.target - self.copy.source) * self.target.itemsize
        return self.target.memory[origin + start : origin + stop]

    def take(self, start: int, data: Bytes) -> None:
        """Copy ``data``, the bytes from file offset ``start`` on, to the tensor.

        The data must be inside of [start, stop) and whole elements. The data is neither changed nor kept.
        """
        self.target.begin()
        if self.is_direct:
            self.memory(start, start + len(data))[:] = data
            return
        # Read-only bytes, which some stores return, are copied, because torch does not accept them.
        items = torch.from_numpy(data if data.flags.writeable else data.copy())
        items, first = items.view(self.target.flat.dtype), start // self.target.itemsize
        for copy in self.copy.within(first, first + items.numel()):
            self.target.fill(items, copy.shift(-first))


def file_copies(copy: Copy, target: LoadTarget, *, max_gap_bytes: int) -> Iterator[FileCopy]:
    """Yield the copies from a file to a target, one for each byte range to read.

    Args:
        copy: its source is the file, as items of the target's dtype.
        max_gap_bytes: byte ranges with smaller gaps between them are joined.
    """
    itemsize = target.itemsize
    for first, last in copy.source_ranges(max_gap_bytes // itemsize):
        yield FileCopy(target, copy, first * itemsize, last * itemsize)
