"""Read a box of a tensor from the chunks that store it.

A part that is contiguous in a chunk's file is read directly into the caller's array. Other parts are read through a
bounded scratch buffer, gaps included.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from vescale_fsdp.conversion.engine.stored_tensor import StoredChunk, StoredTensor
from vescale_fsdp.layout.geometry import Box, contiguous_strides

Locate = Callable[[StoredChunk], StoredChunk]
ReadBytes = Callable[[str, int, memoryview], None]  # (file, offset, buffer to fill)

# 64 KiB: gaps up to this size are read and discarded, since a second read would cost more.
_GAP_BYTES = 64 * 2**10
# 4 MiB: maximum size of a scratch buffer for items that are not contiguous in the file.
_COVER_BYTES = 4 * 2**20


def read_box(tensor: StoredTensor, box: Box, out: np.ndarray, locate: Locate, read: ReadBytes) -> None:
    """Read a box of a tensor into ``out``.

    Args:
        tensor: the stored tensor.
        box: the part of the tensor to read.
        out: the destination: shape ``box.sizes``, the tensor's raw dtype, any strides.
        locate: returns the chunk with the file offset of its items, see `Source.located`.
        read: fills a buffer from a file.
    """
    for chunk in tensor.chunks:
        part = box.intersect(chunk.box)
        if part is not None:
            # The ellipsis makes indexing of a 0-d array return an array instead of a scalar.
            index: tuple[Any, ...] = (*part.slices(box.offsets), ...)
            _read_part(locate(chunk) if chunk.extent.file else chunk, part, out[index], read)


def _read_part(chunk: StoredChunk, part: Box, view: np.ndarray, read: ReadBytes) -> None:
    """Read a part of one chunk into ``view``."""
    if not chunk.extent.file:  # a chunk of zeros, which is not stored
        view[...] = np.zeros((), dtype=view.dtype)
        return
    first = sum((o - c) * s for o, c, s in zip(part.offsets, chunk.box.offsets, chunk.steps, strict=True))
    offset = chunk.extent.offset + first * view.dtype.itemsize
    _read_strided(partial(read, chunk.extent.file), offset, part.sizes, chunk.steps, view)
    if chunk.signs:
        _flip(view, chunk.signs)


def _flip(view: np.ndarray, signs: int) -> None:
    """XOR every item with ``signs``. Items of 16 bytes are two halves, because numpy has no integers of that size."""
    if view.dtype.itemsize <= 8:
        view ^= view.dtype.type(signs)
        return
    halves = view.view(np.dtype([("low", "<u8"), ("high", "<u8")]))
    halves["low"] ^= np.uint64(signs % 2**64)
    halves["high"] ^= np.uint64(signs >> 64)


def _read_strided(
    read: Callable[[int, memoryview], None],
    offset: int,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    view: np.ndarray,
) -> None:
    """Read a strided array of shape ``sizes`` from a file into ``view``.

    The item at ``index`` is at byte ``offset + sum(index * strides) * itemsize`` of the file.
    """
    itemsize = view.dtype.itemsize
    is_run = all(n == 1 or s == c for n, s, c in zip(sizes, strides, contiguous_strides(sizes), strict=True))
    if is_run and view.flags.c_contiguous:  # no scratch buffer, and no copy
        read(offset, _bytes_of(view))
        return
    # Bytes from the first to the last item.
    cover = (1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))) * itemsize
    # The dim that spans most of the file.
    dim = max(range(len(sizes)), key=lambda d: (sizes[d] - 1) * strides[d])
    step = strides[dim] * itemsize
    # If the gap between two slices along this dim is large, each slice is read separately.
    if sizes[dim] > 1 and step - (cover - (sizes[dim] - 1) * step) > _GAP_BYTES:
        parts = [(index, index + 1) for index in range(sizes[dim])]
        _read_parts(read, offset, dim, parts, strides, view)
        return
    # The limit is twice as large for a contiguous run, because no byte of it is read in vain.
    if cover <= _COVER_BYTES or (is_run and cover <= 2 * _COVER_BYTES):
        scratch = np.empty(cover // itemsize, dtype=view.dtype)
        read(offset, _bytes_of(scratch))
        byte_strides = tuple(s * itemsize for s in strides)
        # Not writeable: it is only read, and items of a strided view may share memory.
        view[...] = np.lib.stride_tricks.as_strided(scratch, sizes, byte_strides, writeable=False)
        return
    # Split the dim that spans most of the range, to get few wide reads instead of many narrow ones.
    half = sizes[dim] // 2
    _read_parts(read, offset, dim, [(0, half), (half, sizes[dim])], strides, view)


def _read_parts(
    read: Callable[[int, memoryview], None],
    offset: int,
    dim: int,
    parts: list[tuple[int, int]],
    strides: tuple[int, ...],
    view: np.ndarray,
) -> None:
    """Read several ranges of one dim separately."""
    for start, stop in parts:
        part = view[(slice(None),) * dim + (slice(start, stop),)]
        _read_strided(read, offset + start * strides[dim] * view.dtype.itemsize, part.shape, strides, part)


def _bytes_of(array: np.ndarray) -> memoryview:
    """Return the memory of a contiguous array as bytes, without a copy."""
    return array.reshape(-1).view(np.uint8).data
