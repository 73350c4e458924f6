"""Reading a box of a tensor from wherever its chunks lie.

The part each chunk holds is read straight into the caller's array where it is one run in the file, and
through a small covering read where it is not, so that memory stays bounded by what is asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from vescale_fsdp.conversion.source.stored_tensor import StoredChunk, StoredTensor, TensorInfo
from vescale_fsdp.layout.geometry import Box, contiguous_strides

if TYPE_CHECKING:
    from vescale_fsdp.conversion.source.source import Source

__all__ = ["read_box"]

_COVER_BYTES = 4 * 2**20  # 4 MiB: largest scratch read for items that are not one run in the file


def read_box(source: Source, tensor: StoredTensor, box: Box, out: np.ndarray) -> None:
    """Fill ``out`` (shape ``box.sizes``, raw type of the tensor, any strides); raises as `Source.read_into`."""
    for chunk in tensor.chunks:
        part = box.intersect(chunk.box)
        if part is not None:
            # The ellipsis keeps the part of a 0-d tensor an array.
            index: tuple[Any, ...] = (*part.slices(box.offsets), ...)
            _read_part(source, tensor.info, chunk, part, out[index])


def _read_part(source: Source, info: TensorInfo, chunk: StoredChunk, part: Box, view: np.ndarray) -> None:
    if not chunk.file:
        view[...] = np.zeros((), dtype=view.dtype)
        return
    offset, strides, signs = source.locate(info, chunk)
    first = sum((o - c) * s for o, c, s in zip(part.offsets, chunk.box.offsets, strides, strict=True))
    itemsize = info.dtype.itemsize
    _read_strided(source, chunk.file, offset + first * itemsize, part.sizes, strides, view)
    if signs:
        _flip(view, signs)


def _flip(view: np.ndarray, signs: int) -> None:
    """Flip these bits of every item, 64 at a time."""
    if view.dtype.itemsize <= 8:
        view ^= view.dtype.type(signs)
        return
    halves = view.view(np.dtype([("low", "<u8"), ("high", "<u8")]))
    halves["low"] ^= np.uint64(signs % 2**64)
    halves["high"] ^= np.uint64(signs >> 64)


def _read_strided(
    source: Source, file: str, offset: int, sizes: tuple[int, ...], strides: tuple[int, ...], view: np.ndarray
) -> None:
    """Read items ``offset + sum(i * stride)`` into ``view`` of shape ``sizes``."""
    itemsize = view.dtype.itemsize
    is_run = all(n == 1 or s == c for n, s, c in zip(sizes, strides, contiguous_strides(sizes), strict=True))
    if is_run and view.flags.c_contiguous:
        source.read_bytes(file, offset, _bytes_of(view))
        return
    cover = (1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))) * itemsize
    if cover <= _COVER_BYTES or (is_run and cover <= 2 * _COVER_BYTES):
        scratch = np.empty(cover // itemsize, dtype=view.dtype)
        source.read_bytes(file, offset, _bytes_of(scratch))
        byte_strides = tuple(s * itemsize for s in strides)
        view[...] = np.lib.stride_tricks.as_strided(scratch, sizes, byte_strides, writeable=False)
        return
    # Cut the dim that spans most of the file, so that few wide reads remain instead of many narrow ones.
    dim = max(range(len(sizes)), key=lambda d: (sizes[d] - 1) * strides[d])
    half = sizes[dim] // 2
    low, high = (
        (*sizes[:dim], half, *sizes[dim + 1 :]),
        (*sizes[:dim], sizes[dim] - half, *sizes[dim + 1 :]),
    )
    whole = (slice(None),) * dim
    _read_strided(source, file, offset, low, strides, view[(*whole, slice(0, half))])
    _read_strided(
        source,
        file,
        offset + half * strides[dim] * itemsize,
        high,
        strides,
        view[(*whole, slice(half, None))],
    )


def _bytes_of(array: np.ndarray) -> memoryview:
    """The array's memory, one byte per item."""
    return array.reshape(-1).view(np.uint8).data
