"""What a source knows of its tensors: name, shape, type, and which bytes of which files hold which box.

Every format this package reads comes down to this: a tensor is tiled by *chunks*, boxes whose elements lie
in one file at one offset, row-major (or with explicit strides). Finding bytes is then the same code for all.
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

UNCHECKED_BYTES = 4 << 30  # 4 GiB: so much is read and written, however little of it is stored
MOST_GROWTH = 32  # more than any decoding of codes: 4 bits to 64 are 16
_MAX_GRID_CELLS = 4_000_000  # of the coordinate grid on which overlapping boxes are looked for; 32 MB


@dataclass(frozen=True, slots=True)  # of everything here a checkpoint has a hundred thousand
class TensorInfo:
    """Name, shape (packed types count bytes in the last dim), type, items (not packed elements) and bytes of one
    tensor."""

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
            object.__setattr__(self, "numel", numel)
            object.__setattr__(self, "nbytes", nbytes)
        except ValueError as error:
            raise CorruptCheckpointError(
                "A tensor cannot have this shape.",
                expected=f"at most {MAX_DIMS} whole numbers, and fewer than 2**63 bytes",
                got=f"{self.shape!r:.80}",
                where=f"tensor {self.name}",
                todo="copy the checkpoint again from where it was made",
            ) from error


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """One box of a tensor and where its bytes lie.

    Args:
        box: which part of the tensor.
        file: relative name of the file; empty if the box is all zeros and stored nowhere.
        offset: of the first element's byte, or of what `Source.locate` finds it in.
        nbytes: length of what lies there; without a file, of what is stored elsewhere (in a pickle, compressed).
        strides: in items, of the box in the file; None for row-major.
        checked: the range of bytes with a checksum in which it lies; None if there is none, or `Source.locate` says.
        signs: bits of every item that are stored flipped (`TensorRef.signs`).
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
        """Strides in items, of row-major boxes too."""
        return self.strides or contiguous_strides(self.box.sizes)

    @property
    def is_row_major(self) -> bool:
        """Whether the items lie one after the other."""
        if self.strides is None:
            return True
        row_major = contiguous_strides(self.box.sizes)
        return all(n < 2 or a == b for n, a, b in zip(self.box.sizes, self.steps, row_major, strict=True))

    def stored_nbytes(self, itemsize: int) -> int:
        """Bytes that its items are made of."""
        if not self.file:
            return self.nbytes
        # Fewer than the items where a stride of 0 repeats them.
        spanned = 1 + sum((n - 1) * s for n, s in zip(self.box.sizes, self.steps, strict=True))
        items_nbytes = min(self.box.numel, spanned) * itemsize
        return min(items_nbytes, self.nbytes or items_nbytes)  # some formats find the length when they read


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor and the chunks that tile it; proves on construction that every element is there once."""

    info: TensorInfo
    chunks: tuple[StoredChunk, ...]

    def __post_init__(self) -> None:
        shape = self.info.shape
        if len(self.chunks) == 1 and _is_whole(self.chunks[0], shape):
            return  # as most are
        for chunk in self.chunks:
            box = chunk.box
            try:
                numbers = (*box.offsets, *box.sizes, *(chunk.strides or ()), chunk.offset, chunk.nbytes)
                whole_numbers(numbers)
            except ValueError as error:
                raise self._bad_tiling(str(error)) from error
            if (box.sizes != shape or any(box.offsets)) and not _is_inside(box, shape):
                raise self._bad_tiling(f"chunk {_text(box)} outside of it")
        if len(self.chunks) == 1 and self.chunks[0].box.sizes == shape:
            return  # in one piece, as most are
        filled = [chunk.box for chunk in self.chunks if chunk.box.numel]
        total = sum(box.numel for box in filled)
        if total != self.info.numel:
            raise self._bad_tiling(f"{len(filled)} chunks with {total} of {self.info.numel} elements")
        if overlap := _first_overlap(shape, filled):
            raise self._bad_tiling(f"chunks that overlap: {_text(overlap[0])} and {_text(overlap[1])}")

    @property
    def stored_nbytes(self) -> int:
        """Bytes that its items are made of: less than its own where strides repeat items, or chunks are not stored."""
        return sum(chunk.stored_nbytes(self.info.dtype.itemsize) for chunk in self.chunks if chunk.box.numel)

    @property
    def places(self) -> object:
        """Equal for tensors that are the very same bytes."""
        chunks = tuple((c.file, c.offset, c.box, c.strides, c.signs) for c in self.chunks)
        return self.info.shape, self.info.dtype, chunks

    def _bad_tiling(self, got: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            "The chunks of a tensor do not tile it.",
            expected=f"boxes that hold every element of shape {self.info.shape} exactly once",
            got=got,
            where=f"tensor {self.info.name}",
            todo="save the checkpoint again; its sharding was described wrongly when saving",
        )


def is_inflated(nbytes: int, stored_nbytes: int) -> bool:
    """Whether tensors of so many bytes are far more than what is stored of them, so that reading or writing all of
    them has no bound in the size of the source."""
    return nbytes > max(UNCHECKED_BYTES, MOST_GROWTH * stored_nbytes)


def _is_whole(chunk: StoredChunk, shape: tuple[int, ...]) -> bool:
    """Whether a chunk is surely all of a tensor, in numbers as they should be."""
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
    """Two boxes that share an element, if any. Boxes cover exactly numel elements when this is called."""
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
    """Count boxes per cell of the grid that all box edges span; fall back to pairs for absurd grids."""
    import numpy as np

    edges = []
    for dim in range(len(boxes[0].offsets)):
        ends = {e for b in boxes for e in (b.offsets[dim], b.offsets[dim] + b.sizes[dim])}
        edges.append({end: i for i, end in enumerate(sorted(ends))})
    cells = tuple(len(e) - 1 for e in edges)
    if math.prod(cells) > _MAX_GRID_CELLS:
        return _overlap_by_pairs(boxes)
    owner = np.full(cells, -1, dtype=np.int64)
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
                break
            if box.intersect(other) is not None:
                return box, other
    return None
