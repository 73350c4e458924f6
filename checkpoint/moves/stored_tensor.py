"""Description of a stored tensor: name, shape, dtype, and the file location of each of its chunks.

Every supported format maps to this description: a tensor is tiled by *chunks*. A chunk is a box whose elements are
stored in one file from one offset on, in row-major order or with explicit strides. One reader then serves all formats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

from vescale_fsdp.checkpoint.moves.verified_reads import CheckedRange
from vescale_fsdp.errors import CorruptCheckpointError
from vescale_fsdp.layout.dtypes import DType
from vescale_fsdp.layout.foreign_json import MAX_DIMS, tensor_shape, whole_numbers
from vescale_fsdp.layout.geometry import Box, contiguous_strides, run_start

UNCHECKED_BYTES = 4 << 30  # tensors up to this size are accepted, however few bytes of them are stored
MOST_GROWTH = 32  # accepted ratio of tensor bytes to stored bytes; decoding 4 bits to 64 gives 16
_MAX_GRID_CELLS = 4_000_000  # largest coordinate grid for the search for overlapping boxes: 32 MB


@dataclass(frozen=True, slots=True)  # slots: a checkpoint may have a hundred thousand of these objects
class TensorInfo:
    """Name, shape and dtype of one tensor, its number of items and its size in bytes.

    For packed dtypes an item is a byte: the last dim counts bytes, not elements.
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
            if nbytes >= 2**63:
                raise ValueError("more bytes than there are")
            object.__setattr__(self, "numel", numel)  # the class is frozen
            object.__setattr__(self, "nbytes", nbytes)
        except ValueError as error:
            raise CorruptCheckpointError(
                "A tensor cannot have this shape.",
                expected=f"at most {MAX_DIMS} whole numbers, and fewer than 2**63 bytes",
                got=f"{self.shape!r:.80}",
                where=f"tensor {self.name}",
                todo="copy the checkpoint again from its original location",
            ) from error


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """One box of a tensor and its location in a file.

    Args:
        box: the part of the tensor.
        file: relative name of the file; empty if the chunk is not in a file, such as a box of zeros.
        offset: byte offset of the first element, or of the record in which `Source.locate` locates it.
        nbytes: number of bytes from ``offset`` on; for a chunk without a file, the size of its stored data, such as
            compressed bytes in a pickle.
        strides: strides of the box in the file, in items; None for row-major.
        checked: the byte range with a checksum that contains the chunk; None if there is none, or if only
            `Source.locate` determines it.
        signs: mask of the bits that are stored flipped in every item (`TensorRef.signs`).
    """

    box: Box
    file: str
    offset: int
    nbytes: int
    strides: tuple[int, ...] | None = None
    checked: CheckedRange | None = None
    signs: int = 0

    @property
    def steps(self) -> tuple[int, ...]:
        """The strides in items, also for row-major boxes."""
        return self.strides or contiguous_strides(self.box.sizes)

    @property
    def is_row_major(self) -> bool:
        """Whether the items are stored contiguously, in row-major order."""
        if self.strides is None:
            return True
        row_major = contiguous_strides(self.box.sizes)
        return all(n < 2 or a == b for n, a, b in zip(self.box.sizes, self.steps, row_major, strict=True))

    def stored_nbytes(self, itemsize: int) -> int:
        """Number of stored bytes that the items consist of."""
        if not self.file:
            return self.nbytes
        # If a stride of 0 repeats items, fewer items are stored than the box has.
        spanned = 1 + sum((n - 1) * s for n, s in zip(self.box.sizes, self.steps, strict=True))
        items_nbytes = min(self.box.numel, spanned) * itemsize
        return min(items_nbytes, self.nbytes or items_nbytes)  # nbytes is 0 if only reading shows the size


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor and its chunks. The constructor checks that the chunks contain every element exactly once."""

    info: TensorInfo
    chunks: tuple[StoredChunk, ...]

    def __post_init__(self) -> None:
        shape = self.info.shape
        if len(self.chunks) == 1 and _is_whole(self.chunks[0], shape):
            return  # a shortcut for most tensors
        for chunk in self.chunks:
            box = chunk.box
            try:
                numbers = (*box.offsets, *box.sizes, *(chunk.strides or ()), chunk.offset, chunk.nbytes)
                whole_numbers(numbers)
            except ValueError as error:
                raise self._bad_tiling(str(error)) from error
            if (box.sizes != shape or any(box.offsets)) and not _is_inside(box, shape):
                raise self._bad_tiling(f"chunk {_text(box)}, which is outside of the tensor")
        if len(self.chunks) == 1 and self.chunks[0].box.sizes == shape:
            return
        filled = [chunk.box for chunk in self.chunks if chunk.box.numel]
        total = sum(box.numel for box in filled)
        if total != self.info.numel:
            raise self._bad_tiling(f"{len(filled)} chunks with {total} of {self.info.numel} elements")
        if overlap := _first_overlap(shape, filled):
            raise self._bad_tiling(f"chunks that overlap: {_text(overlap[0])} and {_text(overlap[1])}")

    @property
    def stored_nbytes(self) -> int:
        """Number of stored bytes: fewer than `TensorInfo.nbytes` if strides repeat items, or chunks are not stored."""
        return sum(chunk.stored_nbytes(self.info.dtype.itemsize) for chunk in self.chunks if chunk.box.numel)

    @property
    def places(self) -> object:
        """A key that is equal for tensors stored as the same bytes."""
        chunks = tuple((c.file, c.offset, c.box, c.strides, c.signs) for c in self.chunks)
        return self.info.shape, self.info.dtype, chunks

    def _bad_tiling(self, got: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            "The chunks of a tensor do not tile it.",
            expected=f"boxes that contain every element of shape {self.info.shape} exactly once",
            got=got,
            where=f"tensor {self.info.name}",
            todo="save the checkpoint again; the saving program described its sharding wrongly",
        )


def is_inflated(nbytes: int, stored_nbytes: int) -> bool:
    """Whether tensors are so much larger than their stored bytes that a small source could need unbounded output."""
    return nbytes > max(UNCHECKED_BYTES, MOST_GROWTH * stored_nbytes)


def _is_whole(chunk: StoredChunk, shape: tuple[int, ...]) -> bool:
    """A fast check that a chunk is a complete tensor with valid numbers; False if unsure."""
    sizes, offset, nbytes = chunk.box.sizes, chunk.offset, chunk.nbytes
    return (
        (sizes is shape or (sizes == shape and set(map(type, sizes)) <= {int}))
        and chunk.strides is None
        and chunk.box.offsets == (0,) * len(shape)
        and type(offset) is int is type(nbytes)
        and offset >= 0 <= nbytes
    )


def _is_inside(box: Box, shape: tuple[int, ...]) -> bool:
    return len(box.offsets) == len(shape) == len(box.sizes) and all(
        o + n <= full for o, n, full in zip(box.offsets, box.sizes, shape, strict=True)
    )


def _text(box: Box) -> str:
    return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(box.offsets, box.sizes, strict=True)) + "]"


def _first_overlap(shape: tuple[int, ...], boxes: list[Box]) -> tuple[Box, Box] | None:
    """Two boxes that share an element, or None. The boxes' sizes must add up to the tensor's numel."""
    if len(boxes) < 2:
        return None
    intervals = []
    for box in boxes:
        start = run_start(shape, box)
        if start is None:
            return _overlap_on_grid(boxes)
        intervals.append((start, start + box.numel, box))
    intervals.sort(key=lambda interval: interval[0])  # boxes themselves have no order
    clash = (pair for pair in pairwise(intervals) if pair[1][0] < pair[0][1])
    return next(((left[2], right[2]) for left, right in clash), None)


def _overlap_on_grid(boxes: list[Box]) -> tuple[Box, Box] | None:
    """Two boxes that share a cell of the grid of all box edges, or None. If the grid is too large, compares pairs."""
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
    ordered = sorted(boxes, key=lambda box: box.offsets)
    for i, box in enumerate(ordered):
        for other in ordered[i + 1 :]:
            if other.offsets[0] >= box.offsets[0] + box.sizes[0]:
                break  # sorted by offset: no later box can overlap
            if box.intersect(other) is not None:
                return box, other
    return None
