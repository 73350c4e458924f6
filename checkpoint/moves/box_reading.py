"""Reading a box of a tensor from wherever its chunks lie.

The part each chunk holds is read straight into the caller's array where it is one run in the file, and
through a small covering read where it is not, so that memory stays bounded by what is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from vescale_fsdp.checkpoint.moves.stored_tensor import StoredChunk, StoredTensor
from vescale_fsdp.layout.geometry import Box, contiguous_strides

Locate = Callable[[StoredChunk], StoredChunk]
ReadBytes = Callable[[str, int, memoryview], None]  # (file, offset, buffer to fill)

_GAP_BYTES = 64 * 2**10  # 64 KiB: reading over a gap of this size costs less than asking twice
_COVER_BYTES = 4 * 2**20  # 4 MiB: largest scratch read for items that are not one run in the file


def read_box(tensor: StoredTensor, box: Box, out: np.ndarray, locate: Locate, read: ReadBytes) -> None:
    """Fill ``out`` (shape ``box.sizes``, raw type of the tensor, any strides).

    Args:
        tensor: what is read.
        box: which part of it.
        out: where to.
        locate: gives a chunk with the place of its own items.
        read: fills a buffer from a file.
    """
    for chunk in tensor.chunks:
        part = box.intersect(chunk.box)
        if part is not None:
            # The ellipsis keeps the part of a 0-d tensor an array.
            index: tuple[Any, ...] = (*part.slices(box.offsets), ...)
            _read_part(locate(chunk) if chunk.file else chunk, part, out[index], read)


def _read_part(chunk: StoredChunk, part: Box, view: np.ndarray, read: ReadBytes) -> None:
    if not chunk.file:
        view[...] = np.zeros((), dtype=view.dtype)
        return
    first = sum((o - c) * s for o, c, s in zip(part.offsets, chunk.box.offsets, chunk.steps, strict=True))
    offset = chunk.offset + first * view.dtype.itemsize
    _read_strided(partial(read, chunk.file), offset, part.sizes, chunk.steps, view)
    if chunk.signs:
        _flip(view, chunk.signs)


def _flip(view: np.ndarray, signs: int) -> None:
    """Flip these bits of every item, 64 at a time."""
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
    """Read items ``offset + sum(i * stride)`` into ``view`` of shape ``sizes``."""
    itemsize = view.dtype.itemsize
    is_run = all(n == 1 or s == c for n, s, c in zip(sizes, strides, contiguous_strides(sizes), strict=True))
    if is_run and view.flags.c_contiguous:
        read(offset, _bytes_of(view))
        return
    cover = (1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))) * itemsize
    dim = max(range(len(sizes)), key=lambda d: (sizes[d] - 1) * strides[d])
    step = strides[dim] * itemsize
    if sizes[dim] > 1 and step - (cover - (sizes[dim] - 1) * step) > _GAP_BYTES:
        parts = [(index, index + 1) for index in range(sizes[dim])]
        _read_parts(read, offset, dim, parts, strides, view)
        return
    # Twice as much of a run, which has no gaps that are read in vain.
    if cover <= _COVER_BYTES or (is_run and cover <= 2 * _COVER_BYTES):
        scratch = np.empty(cover // itemsize, dtype=view.dtype)
        read(offset, _bytes_of(scratch))
        byte_strides = tuple(s * itemsize for s in strides)
        view[...] = np.lib.stride_tricks.as_strided(scratch, sizes, byte_strides, writeable=False)
        return
    # Cut the dim that spans most of the file, so that few wide reads remain instead of many narrow ones.
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
    """Read ranges of one dim, each by itself."""
    for start, stop in parts:
        part = view[(slice(None),) * dim + (slice(start, stop),)]
        _read_strided(read, offset + start * strides[dim] * view.dtype.itemsize, part.shape, strides, part)


def _bytes_of(array: np.ndarray) -> memoryview:
    """The array's memory, one byte per item."""
    return array.reshape(-1).view(np.uint8).data
