"""Describe a stored tensor: its name, shape and dtype, and the file location of each of its chunks.

Every supported format maps to this description: a tensor is tiled by *chunks*. A chunk is a box whose elements are
stored in one file from one offset on, in row-major order or with explicit strides. One reader then serves all formats.
Tensors without such bytes, such as compressed arrays and live shards, have a function each: `Source.readers`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise

from vescale_fsdp.conversion.engine.verified_reads import CheckedRange
from vescale_fsdp.errors import CorruptCheckpointError
from vescale_fsdp.layout.dtypes import DType
from vescale_fsdp.layout.extent import Extent
from vescale_fsdp.layout.foreign_json import MAX_DIMS, tensor_shape, whole_numbers
from vescale_fsdp.layout.geometry import Box, contiguous_strides, run_start

# 4 GiB: tensors up to this size are accepted, however few of their bytes are stored.
UNCHECKED_BYTES = 4 << 30
# Accepted ratio of tensor bytes to stored bytes; decoding 4-bit codes to 64-bit floats gives 16.
MOST_GROWTH = 32
_MAX_GRID_CELLS = 4_000_000  # limits the memory of `_overlap_on_grid` to 32 MB


@dataclass(frozen=True, slots=True)  # slots: a checkpoint may have a hundred thousand of these objects
class TensorInfo:
    """Name, shape and dtype of one tensor, its number of items and its size in bytes.

    For packed dtypes, which have several elements per byte, an item is a byte and the last dim counts bytes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    numel: int = field(init=False, compare=False, repr=False)
    nbytes: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        try:
            numel = math.prod(tensor_shape(self.shape))
            nbytes = numel * self.dtype.itemsize
            if nbytes >= 2**63:  # numpy and file offsets are limited to signed 64-bit integers
                raise ValueError("too many bytes")
            object.__setattr__(self, "numel", numel)  # the class is frozen
            object.__setattr__(self, "nbytes", nbytes)
        except ValueError as error:
            raise CorruptCheckpointError(
                "A tensor cannot have this shape.",
                expected=f"at most {MAX_DIMS} whole numbers, and fewer than 2**63 bytes",
                got=f"{self.shape!r:.80}",
                where=f"tensor {self.name}",
            ) from error


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """The file's side of a copy: a box of a tensor, the extent that stores it, and its strides there.

    Args:
        box: the box of the tensor.
        extent: begins with the box's first element, or is the record in which `Source.locate` finds the element. Its
            size is 0 if only a read shows it. A chunk that is not in a file, such as a box of zeros, has an extent
            without a file name, and the size of its stored data, such as compressed bytes in a pickle.
        strides: strides of the box in the file, in items; None for row-major.
        checked: the byte range with a checksum that contains the chunk; None if there is none, or if only
            `Source.locate` determines it.
        signs: mask of the bits of every item that are stored inverted (see `TensorRef.signs`).
    """

    box: Box
    extent: Extent
    strides: tuple[int, ...] | None = None
    checked: CheckedRange | None = None
    signs: int = 0

    def with_items(
        self, box: Box, first: int, itemsize: int, strides: tuple[int, ...] | None = None
    ) -> StoredChunk:
        """Return the chunk of ``box``, a box of any tensor, whose items are stored here, from item ``first`` on.

        Args:
            strides: strides of the new box in the file, in items; None for row-major.
        """
        extent = Extent(self.extent.file, self.extent.offset + first * itemsize, box.numel * itemsize)
        return replace(self, box=box, extent=extent, strides=strides)

    @property
    def steps(self) -> tuple[int, ...]:
        """Strides in items; computed for row-major boxes."""
        return self.strides or contiguous_strides(self.box.sizes)

    @property
    def is_row_major(self) -> bool:
        """Whether the items are stored contiguously, in row-major order."""
        if self.strides is None:
            return True
        row_major = contiguous_strides(self.box.sizes)
        # In a dim of size 1 (or 0), the stride is never used.
        return all(n < 2 or a == b for n, a, b in zip(self.box.sizes, self.steps, row_major, strict=True))

    def stored_nbytes(self, itemsize: int) -> int:
        """Return the number of stored bytes that the box's items are read from."""
        if not self.extent.file:
            return self.extent.nbytes
        # If a stride of 0 repeats items, fewer items are stored than the box has.
        spanned = 1 + sum((n - 1) * s for n, s in zip(self.box.sizes, self.steps, strict=True))
        items_nbytes = min(self.box.numel, spanned) * itemsize
        return min(items_nbytes, self.extent.nbytes or items_nbytes)  # 0 if only a read shows the size


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor and its chunks, which contain every element exactly once.

    Raises:
        CorruptCheckpointError: if chunks overlap, do not cover the tensor, or are outside of it.
    """

    info: TensorInfo
    chunks: tuple[StoredChunk, ...]

    def __post_init__(self) -> None:
        shape = self.info.shape
        if len(self.chunks) == 1 and _is_whole(self.chunks[0], shape):
            return  # a shortcut: most tensors have one whole chunk, and the checks below are slow
        for chunk in self.chunks:
            box = chunk.box
            try:
                # The numbers come from files, which may contain negative numbers or floats.
                numbers = (*box.offsets, *box.sizes, *(chunk.strides or ()), *chunk.extent[1:])
                whole_numbers(numbers)
            except ValueError as error:
                raise self._bad_tiling(str(error)) from error
            if (box.sizes != shape or any(box.offsets)) and not _is_inside(box, shape):
                raise self._bad_tiling(f"chunk {_text(box)}, which is outside of the tensor")
        if len(self.chunks) == 1 and self.chunks[0].box.sizes == shape:
            return
        filled = [chunk.box for chunk in self.chunks if chunk.box.numel]  # empty boxes overlap nothing
        total = sum(box.numel for box in filled)
        if total != self.info.numel:
            raise self._bad_tiling(f"{len(filled)} chunks with {total} of {self.info.numel} elements")
        if overlap := _first_overlap(shape, filled):
            raise self._bad_tiling(f"chunks that overlap: {_text(overlap[0])} and {_text(overlap[1])}")

    @property
    def stored_nbytes(self) -> int:
        """Number of stored bytes; less than `TensorInfo.nbytes` if strides repeat items or chunks are not stored."""
        return sum(chunk.stored_nbytes(self.info.dtype.itemsize) for chunk in self.chunks if chunk.box.numel)

    @property
    def places(self) -> object:
        """A hashable key that is equal for tensors that are stored as the same bytes."""
        chunks = tuple((c.extent, c.box, c.strides, c.signs) for c in self.chunks)
        return self.info.shape, self.info.dtype, chunks

    def _bad_tiling(self, got: str) -> CorruptCheckpointError:
        """Return the error for chunks that do not contain every element exactly once."""
        return CorruptCheckpointError(
            "The chunks of a tensor do not tile it.",
            expected=f"boxes that contain every element of shape {self.info.shape} exactly once",
            got=got,
            where=f"tensor {self.info.name}",
            todo="save the checkpoint again; the saving program described its sharding wrongly",
        )


def is_inflated(nbytes: int, stored_nbytes: int) -> bool:
    """Return whether tensors are too large for their stored bytes: a small hostile source must not fill a disk."""
    return nbytes > max(UNCHECKED_BYTES, MOST_GROWTH * stored_nbytes)


def _is_whole(chunk: StoredChunk, shape: tuple[int, ...]) -> bool:
    """Return whether a chunk is a complete tensor with valid numbers. Fast; False also if the slow check may pass."""
    sizes, (_, offset, nbytes) = chunk.box.sizes, chunk.extent
    # Exact types: a bool or a float from a file may equal an int. `is` is a shortcut, since `shape` is checked already.
    return (
        (sizes is shape or (sizes == shape and set(map(type, sizes)) <= {int}))
        and chunk.strides is None
        and chunk.box.offsets == (0,) * len(shape)
        and type(offset) is int is type(nbytes)
        and offset >= 0 <= nbytes
    )


def _is_inside(box: Box, shape: tuple[int, ...]) -> bool:
    """Return whether a box, of non-negative numbers, is inside of a tensor of this shape."""
    return len(box.offsets) == len(shape) == len(box.sizes) and all(
        o + n <= full for o, n, full in zip(box.offsets, box.sizes, shape, strict=True)
    )


def _text(box: Box) -> str:
    """Return a box as text, such as ``[0:4, 8:16]``."""
    return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(box.offsets, box.sizes, strict=True)) + "]"


def _first_overlap(shape: tuple[int, ...], boxes: list[Box]) -> tuple[Box, Box] | None:
    """Return two boxes that share an element, or None. The boxes' sizes must add up to the tensor's numel."""
    if len(boxes) < 2:
        return None
    intervals = []
    for box in boxes:
        start = run_start(shape, box)
        if start is None:  # not contiguous in the flattened tensor, so intervals cannot be compared
            return _overlap_on_grid(boxes)
        intervals.append((start, start + box.numel, box))
    intervals.sort(key=lambda interval: interval[0])  # a key, because boxes cannot be compared
    clash = (pair for pair in pairwise(intervals) if pair[1][0] < pair[0][1])
    return next(((left[2], right[2]) for left, right in clash), None)


def _overlap_on_grid(boxes: list[Box]) -> tuple[Box, Box] | None:
    """Return two boxes that share a cell of the grid of all box edges, or None.

    One array look-up per box is faster than comparing all pairs. If the grid is too large, compares pairs.
    """
    import numpy as np

    edges = []
    for dim in range(len(boxes[0].offsets)):
        ends = {e for b in boxes for e in (b.offsets[dim], b.offsets[dim] + b.sizes[dim])}
        edges.append({end: i for i, end in enumerate(sorted(ends))})
    cells = tuple(len(e) - 1 for e in edges)
    if math.prod(cells) > _MAX_GRID_CELLS:
        return _overlap_by_pairs(boxes)
    owner = np.full(cells, -1, dtype=np.int64)  # -1: no box yet
    for number, box in enumerate(boxes):
        where = tuple(slice(e[o], e[o + n]) for e, o, n in zip(edges, box.offsets, box.sizes, strict=True))
        taken = owner[where]
        if (taken >= 0).any():
            return boxes[int(taken.max())], box
        owner[where] = number
    return None


def _overlap_by_pairs(boxes: list[Box]) -> tuple[Box, Box] | None:
    """Return two boxes that share an element, or None; compares boxes whose ranges in the first dim overlap."""
    ordered = sorted(boxes, key=lambda box: box.offsets)
    for i, box in enumerate(ordered):
        for other in ordered[i + 1 :]:
            if other.offsets[0] >= box.offsets[0] + box.sizes[0]:
                break  # boxes are sorted by offset, so no later box can overlap
            if box.intersect(other) is not None:
                return box, other
    return None
