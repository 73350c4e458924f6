"""The bytes of a rank's file, taken from live memory piece by piece, without a copy where memory allows.

`FileImage.buffers(start, stop)` gives any range of the file as a list of buffers: views of the tensors
themselves if they are contiguous on the CPU, small copies (never larger than the range) if not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping

import numpy as np
import torch

from vescale_fsdp.checkpoint.manifest.rank_file import RankFile
from vescale_fsdp.checkpoint.manifest.torch_dtypes import bytes_of, carrier_of
from vescale_fsdp.checkpoint.storage.base import Buffer
from vescale_fsdp.layout.geometry import boxes_of_range

__all__ = ["ElementSource", "FileImage", "element_source"]


class ElementSource(ABC):
    """The row-major elements of a tensor as bytes."""

    @abstractmethod
    def buffer(self, start_bytes: int, stop_bytes: int) -> Buffer:
        """Bytes of a range, counted from the first element; valid until the tensor changes."""


class _Viewed(ElementSource):
    """A contiguous CPU tensor: its own memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._bytes = bytes_of(tensor).numpy()

    def buffer(self, start_bytes: int, stop_bytes: int) -> Buffer:
        return self._bytes[start_bytes:stop_bytes]


class _Copied(ElementSource):
    """A tensor on another device or with strides: the range asked for is copied, nothing more."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.view(carrier_of(tensor.dtype))
        self._itemsize = tensor.dtype.itemsize

    def buffer(self, start_bytes: int, stop_bytes: int) -> Buffer:
        first, last = start_bytes // self._itemsize, -(-stop_bytes // self._itemsize)
        out = torch.empty(last - first, dtype=self._tensor.dtype)
        shape = tuple(self._tensor.shape)
        if self._tensor.is_contiguous():
            out.copy_(self._tensor.view(-1)[first:last])
        else:
            boxes = boxes_of_range(shape, first, last)
            for box, part in zip(boxes, out.split([box.numel for box in boxes]), strict=True):
                part.view(box.sizes).copy_(self._tensor[box.slices()])
        skip = start_bytes - first * self._itemsize
        return out.view(torch.uint8).numpy()[skip : skip + stop_bytes - start_bytes]


def element_source(tensor: torch.Tensor) -> ElementSource:
    """The bytes of a tensor, by view where possible."""
    # Lazy conjugation and negation are flags on a view; the bytes must be what the tensor says.
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        return _Viewed(tensor)
    return _Copied(tensor)


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
        self._parts: list[tuple[Buffer | ElementSource, int]] = [(file.header, 0)]
        for piece in file.pieces:
            entry = file.manifest.entries[piece.place]
            source = element_source(locals_by_name[entry.name])
            self._add(piece.start_bytes, piece.stop_bytes, source, piece.local_start * entry.itemsize)
        if file.chunks:
            self._add(len(file.header), file.blob_start, np.frombuffer(chunk_table, dtype=np.uint8), 0)
        if file.manifest.blob_bytes:
            padded = np.zeros(file.manifest.blob_bytes, dtype=np.uint8)
            padded[: len(blob)] = np.frombuffer(blob, dtype=np.uint8)
            self._add(file.blob_start, file.table_start, padded, 0)

    def _add(self, start: int, stop: int, part: Buffer | ElementSource, skip: int) -> None:
        self._starts.append(start)
        self._stops.append(stop)
        self._parts.append((part, skip))

    def buffers(self, start: int, stop: int) -> list[Buffer]:
        """The bytes [start, stop) of the file, in order."""
        found: list[Buffer] = []
        at = bisect_right(self._starts, start) - 1
        while start < stop:
            part, skip = self._parts[at]
            end = min(stop, self._stops[at])
            first = start - self._starts[at] + skip
            last = end - self._starts[at] + skip
            found.append(part.buffer(first, last) if isinstance(part, ElementSource) else part[first:last])
            start = end
            at += 1
        return found
