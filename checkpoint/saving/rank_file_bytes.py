"""The bytes of a rank's file, taken from live memory piece by piece, without a copy where memory allows.

`FileImage.buffers(start, stop)` gives any range of the file as a list of buffers: views of the tensors
themselves if they are contiguous on the CPU, small copies (never larger than the range) if not. What lies on a device
is copied to pinned memory of the thread that asks, behind what the device was given before.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import accumulate

import numpy as np
import torch

from vescale_fsdp.checkpoint.manifest.rank_file import RankFile
from vescale_fsdp.checkpoint.manifest.torch_dtypes import bytes_of, carrier_of
from vescale_fsdp.checkpoint.state.host_copies import CopyStream, PinnedSlots, copy_stream_of
from vescale_fsdp.checkpoint.storage.base import Buffer
from vescale_fsdp.layout.geometry import boxes_of_range

__all__ = ["FileImage"]

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
        wanted = list(self._parts_between(start, stop))
        sizes = [self._room_for(*each) for each in wanted]
        room = self._slots.lend(sum(sizes)) if any(sizes) else None
        used: dict[CopyStream, None] = {}
        for (part, first, last), size, end in zip(wanted, sizes, accumulate(sizes), strict=True):
            if not isinstance(part, torch.Tensor):
                found.append(part[first:last])
            elif room is None or not size:
                found.append(_copied(part, first, last, None))
            else:
                stream = self._streams[part.device]
                used[stream] = None
                with stream.on():
                    found.append(_copied(part, first, last, room[end - size : end]))
        for stream in used:
            stream.record().synchronize()
        return found

    def _parts_between(self, start: int, stop: int) -> Iterator[tuple[Buffer | torch.Tensor, int, int]]:
        """What makes up the bytes [start, stop): parts, and which of their own bytes."""
        at = bisect_right(self._starts, start) - 1
        while start < stop:
            part, skip = self._parts[at]
            end = min(stop, self._stops[at])
            yield part, start - self._starts[at] + skip, end - self._starts[at] + skip
            start = end
            at += 1

    def _room_for(self, part: Buffer | torch.Tensor, first: int, last: int) -> int:
        """Bytes of pinned memory that a copy of a part takes: whole elements, with room to begin at one."""
        if not isinstance(part, torch.Tensor) or part.device not in self._streams:
            return 0
        itemsize = part.dtype.itemsize
        return -(-(-(-last // itemsize) - first // itemsize) * itemsize // _ALIGN_BYTES) * _ALIGN_BYTES


def _copied(tensor: torch.Tensor, start_bytes: int, stop_bytes: int, room: torch.Tensor | None) -> Buffer:
    """Bytes of a tensor on another device or with strides: the range asked for is copied, nothing more.

    Args:
        room: pinned memory for it, where the copy is to be work of the current stream.
    """
    itemsize = tensor.dtype.itemsize
    first, last = start_bytes // itemsize, -(-stop_bytes // itemsize)
    if room is None:
        out = torch.empty(last - first, dtype=tensor.dtype)
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
