"""The bytes of a rank's file, taken from live memory piece by piece, without a copy where memory allows.

`FileImage.buffers(start, stop)` gives any range of the file as a list of buffers: views of the tensors
themselves if they are contiguous on the CPU, small copies (never larger than the range) if not. What lies on a device
is copied to pinned memory of the thread that asks, behind what the device was given before.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from vescale_fsdp.checkpoint.manifest.rank_file import RankFile
from vescale_fsdp.checkpoint.manifest.torch_dtypes import bytes_of, carrier_of
from vescale_fsdp.checkpoint.state.host_copies import CopyStream, PinnedSlots, copy_stream_of
from vescale_fsdp.checkpoint.storage.base import Buffer
from vescale_fsdp.layout.geometry import boxes_of_range

_ALIGN_BYTES = 64


class FileImage:
    """The content of a rank's file up to its checksums.

    Args:
        file: where everything lies.
        locals_by_name: this rank's tensors; each holds the elements of the rank's whole region.
        blob: per-rank values, at most as long as the file has room for.
        chunk_table: checksums of the rank's chunks, in the zarr form.
    """

    def __init__(
        self,
        file: RankFile,
        locals_by_name: Mapping[str, torch.Tensor],
        blob: bytes,
        chunk_table: bytes = b"",
    ) -> None:
        self.file = file
        self._starts: list[int] = [0]
        self._stops: list[int] = [len(file.header)]
        self._parts: list[tuple[Buffer | torch.Tensor, int]] = [(file.header, 0)]
        devices = {tensor.device for tensor in locals_by_name.values()}
        streams = {device: copy_stream_of(device) for device in devices}
        self._streams = {device: stream for device, stream in streams.items() if stream is not None}
        self._slots = PinnedSlots()
        for stream in self._streams.values():
            stream.wait_for_compute()  # here: threads that write have current streams of their own
        for piece in file.pieces:
            entry = file.manifest.entries[piece.place]
            # Lazy conjugation and negation are flags on a view; the bytes must be what the tensor says.
            tensor = locals_by_name[entry.name].detach().resolve_conj().resolve_neg()
            in_place = tensor.is_contiguous() and tensor.device not in self._streams
            source = bytes_of(tensor).numpy() if in_place else tensor.view(carrier_of(tensor.dtype))
            self._add(piece.start_bytes, piece.stop_bytes, source, piece.local_start * entry.itemsize)
        if file.chunks:
            self._add(len(file.header), file.blob_start, np.frombuffer(chunk_table, dtype=np.uint8), 0)
        if file.manifest.blob_bytes:
            padded = np.zeros(file.manifest.blob_bytes, dtype=np.uint8)
            padded[: len(blob)] = np.frombuffer(blob, dtype=np.uint8)
            self._add(file.blob_start, file.table_start, padded, 0)

    def _add(self, start: int, stop: int, part: Buffer | torch.Tensor, skip: int) -> None:
        self._starts.append(start)
        self._stops.append(stop)
        self._parts.append((part, skip))

    def buffers(self, start: int, stop: int) -> list[Buffer]:
        """The bytes [start, stop) of the file, in order; valid until the tensors change, or the thread asks again."""
        found: list[Buffer] = []
        to_copy: list[_ToCopy] = []
        at = bisect_right(self._starts, start) - 1
        while start < stop:
            part, skip = self._parts[at]
            end = min(stop, self._stops[at])
            first = start - self._starts[at] + skip
            last = end - self._starts[at] + skip
            if isinstance(part, torch.Tensor):
                to_copy.append(_ToCopy(len(found), part, first, last))
                found.append(b"")
            else:
                found.append(part[first:last])
            start = end
            at += 1
        if to_copy:
            self._copy(to_copy, found)
        return found

    def _copy(self, to_copy: Sequence[_ToCopy], found: list[Buffer]) -> None:
        """Put copies of parts where they belong: in pinned memory of this thread's, where the parts lie on a device."""
        sizes = [each.num_bytes if each.tensor.device in self._streams else 0 for each in to_copy]
        room = self._slots.lend(sum(sizes)) if any(sizes) else None
        used: dict[CopyStream, None] = {}
        for each, size, end in zip(to_copy, sizes, accumulate(sizes), strict=True):
            if room is None or not size:
                found[each.place] = _copied(each.tensor, each.start_bytes, each.stop_bytes, None)
                continue
            stream = self._streams[each.tensor.device]
            used[stream] = None
            with stream.on():
                found[each.place] = _copied(
                    each.tensor, each.start_bytes, each.stop_bytes, room[end - size : end]
                )
        for stream in used:
            stream.record().synchronize()


class _ToCopy(NamedTuple):
    """A part of a file that is no view of the host's memory: which of its own bytes, and its place among the parts."""

    place: int
    tensor: torch.Tensor
    start_bytes: int
    stop_bytes: int

    @property
    def num_bytes(self) -> int:
        """Of a copy: whole elements, and room for the next one to begin at one."""
        itemsize = self.tensor.dtype.itemsize
        whole = (-(-self.stop_bytes // itemsize) - self.start_bytes // itemsize) * itemsize
        return -(-whole // _ALIGN_BYTES) * _ALIGN_BYTES


def _copied(tensor: torch.Tensor, start_bytes: int, stop_bytes: int, room: torch.Tensor | None) -> Buffer:
    """Bytes of a tensor on another device or with strides: the range asked for is copied, nothing more.

    Args:
        room: pinned memory for it, where the copy is to be work of the current stream.
    """
    itemsize = tensor.dtype.itemsize
    first, last = start_bytes // itemsize, -(-stop_bytes // itemsize)
    if room is None:
        out = torch.empty(last - first, dtype=tensor.dtype, device="cpu")
    else:
        out = room[: (last - first) * itemsize].view(tensor.dtype)
    if tensor.is_contiguous():
        out.copy_(tensor.view(-1)[first:last], non_blocking=room is not None)
    else:
        boxes = boxes_of_range(tuple(tensor.shape), first, last)
        for box, part in zip(boxes, out.split([box.numel for box in boxes]), strict=True):
            part.view(box.sizes).copy_(tensor[box.slices()], non_blocking=room is not None)
    skip = start_bytes - first * itemsize
    return out.view(torch.uint8).numpy()[skip : skip + stop_bytes - start_bytes]
