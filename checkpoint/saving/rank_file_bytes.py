"""The bytes of a rank's file, taken from live memory piece by piece, without a copy where memory allows.

`FileImage.buffers(start, stop)` gives any range of the file as a list of buffers: views of the tensors
themselves if they are contiguous on the CPU, small copies (never larger than the range) if not.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

import numpy as np
import torch

from vescale_fsdp.checkpoint.manifest.rank_file import RankFile
from vescale_fsdp.checkpoint.manifest.torch_dtypes import bytes_of, carrier_of
from vescale_fsdp.checkpoint.storage.base import Buffer
from vescale_fsdp.layout.geometry import boxes_of_range

__all__ = ["FileImage"]


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
        for piece in file.pieces:
            entry = file.manifest.entries[piece.place]
            # Lazy conjugation and negation are flags on a view; the bytes must be what the tensor says.
            tensor = locals_by_name[entry.name].detach().resolve_conj().resolve_neg()
            in_place = tensor.is_cpu and tensor.is_contiguous()
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
        """The bytes [start, stop) of the file, in order; valid until the tensors change."""
        found: list[Buffer] = []
        at = bisect_right(self._starts, start) - 1
        while start < stop:
            part, skip = self._parts[at]
            end = min(stop, self._stops[at])
            first = start - self._starts[at] + skip
            last = end - self._starts[at] + skip
            found.append(_copied(part, first, last) if isinstance(part, torch.Tensor) else part[first:last])
            start = end
            at += 1
        return found


def _copied(tensor: torch.Tensor, start_bytes: int, stop_bytes: int) -> Buffer:
    """Bytes of a tensor on another device or with strides: the range asked for is copied, nothing more."""
    itemsize = tensor.dtype.itemsize
    first, last = start_bytes // itemsize, -(-stop_bytes // itemsize)
    out = torch.empty(last - first, dtype=tensor.dtype)
    if tensor.is_contiguous():
        out.copy_(tensor.view(-1)[first:last])
    else:
        boxes = boxes_of_range(tuple(tensor.shape), first, last)
        for box, part in zip(boxes, out.split([box.numel for box in boxes]), strict=True):
            part.view(box.sizes).copy_(tensor[box.slices()])
    skip = start_bytes - first * itemsize
    return out.view(torch.uint8).numpy()[skip : skip + stop_bytes - start_bytes]
