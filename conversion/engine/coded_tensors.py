"""Views that dequantize codes and scales, or quantize floats, block by block while tensors are streamed.

    fp8        weight [n, k]          ScaledView(DecodedView(codes), scales, blocks of 128 x 128)
    mxfp4      blocks [e, n, k/32, 16]   the same with [e, n, k/2] bytes of two values, and a scale per 32 values
    bnb nf4    bytes [n * k / 2]      the same with flat bytes, and bitsandbytes' own tables and scales
    gptq       words [k / 8, n]       UnpackedView(words) gives the codes; IndexedView(scales, g_idx) gives the scale
                                      of each row, if rows of a group are not adjacent
    gguf       blocks of bytes        BlocksView(bytes), decoded by the functions of the package gguf

A requested box is processed in tiles of at most 2^18 values, which keeps memory use at a few MiB. Codes are computed
from complete blocks: if a box begins inside a block, the whole block is read. Pieces of a small matrix for many ranks
are a few rows each, so `BlockCache` keeps the codes of a block until all its pieces have been read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any

from vescale_fsdp.conversion.engine.stored_tensor import TensorInfo
from vescale_fsdp.conversion.engine.tensor_view import SourceView, TensorView
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError, as_pattern, option
from vescale_fsdp.layout.dtypes import DType, dtype_from_torch
from vescale_fsdp.layout.geometry import Box, whole_box

if TYPE_CHECKING:
    import numpy as np

    from vescale_fsdp.conversion.quantization.bit_packing import BitPacking
    from vescale_fsdp.conversion.quantization.float_codes import Fp8Encoding, Mxfp4Encoding

_TILE_NUMEL = 2**18  # 1 MiB as float32
_F32 = dtype_from_torch("float32")
_U8 = dtype_from_torch("uint8")


class _ComputedView(TensorView):
    """Base of tensors whose values are computed from the fields that are views; none of their bytes are stored."""

    @property
    def operands(self) -> tuple[TensorView, ...]:
        values = (getattr(self, each.name) for each in fields(self))  # type: ignore[arg-type]  # of subclasses
        return tuple(value for value in values if isinstance(value, TensorView))

    def over(self, leaf: Callable[[SourceView], TensorView]) -> TensorView:
        raise ConversionError(
            "Quantized weights cannot be assembled from the memory of several ranks.",
            expected="a saved checkpoint of the weights",
            got=self.info.name,
            todo="save a checkpoint first, and convert it",
        )


@dataclass(frozen=True, eq=False)
class RawBytesView(_ComputedView):
    """The bytes of a 1D tensor as uint8 [numel * itemsize], for codes that are stored with another dtype."""

    items: TensorView

    @cached_property
    def info(self) -> TensorInfo:
        return TensorInfo(self.items.info.name, (self.items.info.nbytes,), _U8)

    def read_into(self, box: Box, out: np.ndarray) -> None:
        import numpy as np

        items, skipped = _groups_of(box, 0, self.items.info.dtype.itemsize)
        out[...] = self.items.read(items).view(np.uint8)[skipped : skipped + box.sizes[0]]

    def parts(self, box: Box) -> Iterator[tuple[SourceView, Box]]:
        return self.items.parts(_groups_of(box, 0, self.items.info.dtype.itemsize)[0])

    def identity(self) -> str:
        return f"bytes of {self.items.identity()}"


@dataclass(frozen=True, eq=False)  # eq=False: an array can be neither hashed nor compared to a bool
class DecodedView(_ComputedView):
    """Codes decoded by a table, as float32.

    Args:
        codes: a tensor with one byte per item.
        table: array [256, n] with the n values that each byte encodes; they are adjacent in the last dim of the result.
        kind: text that identifies the table, for `identity`.
    """

    codes: TensorView
    table: np.ndarray
    kind: str

    @cached_property
    def info(self) -> TensorInfo:
        codes = self.codes.info
        # A 0-d scale is one value: it has no last dim to widen.
        shape = (*codes.shape[:-1], codes.shape[-1] * self.table.shape[1]) if codes.shape else ()
        return TensorInfo(codes.name, shape, _F32)

    def read_into(self, box: Box, out: np.ndarray) -> None:
        inner, skipped = self._bytes_of(box)
        values = self.table[self.codes.read(inner)]
        if box.sizes:
            values = values.reshape(*inner.sizes[:-1], -1)[..., skipped : skipped + box.sizes[-1]]
        out[...] = values.view(out.dtype).reshape(box.sizes)

    def _bytes_of(self, box: Box) -> tuple[Box, int]:
        """Return the bytes that encode a box, and how many values of the first byte precede the box."""
        each = self.table.shape[1]
        return _groups_of(box, len(box.sizes) - 1, each) if box.sizes else (box, 0)

    def parts(self, box: Box) -> Iterator[tuple[SourceView, Box]]:
        return self.codes.parts(self._bytes_of(box)[0])

    def identity(self) -> str:
        return f"{self.kind} values of {self.codes.identity()}"


@dataclass(frozen=True)
class BlocksView(_ComputedView):
    """Blocks of bytes along the last dim, each decoded to a fixed number of float32 values.

    Args:
        blocks: the bytes, uint8; the last dim is a multiple of ``block_bytes``.
        block_bytes, block_values: bytes and values of a block.
        decode: returns the values of rows of whole blocks: float32 [.., n * block_values] for uint8
            [.., n * block_bytes].
        kind: text that identifies the function, for `identity`.
    """

    blocks: TensorView
    block_bytes: int
    block_values: int
    decode: Callable[[np.ndarray], np.ndarray]
    kind: str

    @cached_property
    def info(self) -> TensorInfo:
        *lead, nbytes = self.blocks.info.shape
        return TensorInfo(
            self.blocks.info.name, (*lead, nbytes // self.block_bytes * self.block_values), _F32
        )

    def read_into(self, box: Box, out: np.ndarray) -> None:
        import numpy as np

        for tile in _tiles(box, (1,) * len(box.sizes)):
            raw = self.blocks.read(self._bytes_of(tile))
            skipped = tile.offsets[-1] % self.block_values
            values = self.decode(raw).reshape(*raw.shape[:-1], -1)[..., skipped : skipped + tile.sizes[-1]]
            out[tile.slices(box.offsets)] = np.ascontiguousarray(values).view(out.dtype)

    def _bytes_of(self, box: Box) -> Box:
        """Return the bytes of the blocks that a box overlaps."""
        last = len(box.sizes) - 1
        blocks, _ = _groups_of(box, last, self.block_values)
        return _times(blocks, (*(1,) * last, self.block_bytes))

    def parts(self, box: Box) -> Iterator[tuple[SourceView, Box]]:
        return self.blocks.parts(self._bytes_of(box)) if box.numel else iter(())

    def identity(self) -> str:
        return f"{self.kind} blocks of {self.blocks.identity()}"


@dataclass(frozen=True)
class UnpackedView(_ComputedView):
    """Codes of a few bits that are packed in words along a dim, as uint8.

    Args:
        words: the words, integers of as many bits as ``packing`` names.
        packing: how words store codes.
        dim: the dim that is packed.
        size: number of codes in this dim; the words must be as many as these codes need.
    """

    words: TensorView
    packing: BitPacking
    dim: int
    size: int

    def __post_init__(self) -> None:
        info = self.words.info
        assert info.shape[self.dim] == self.packing.num_words(self.size), (info, self.size)
        assert info.dtype.itemsize * 8 == self.packing.word_bits, (info, self.packing)

    @cached_property
    def info(self) -> TensorInfo:
        words = self.words.info
        return TensorInfo(
            words.name, (*words.shape[: self.dim], self.size, *words.shape[self.dim + 1 :]), _U8
        )

    def read_into(self, box: Box, out: np.ndarray) -> None:
        import numpy as np

        if not box.numel:
            return
        inner, skipped = self._words_of(box)
        words = np.moveaxis(self.words.read(inner), self.dim, -1)
        if missing := -words.shape[-1] % self.packing.words:  # the last period may be cut off
            words = np.concatenate([words, np.zeros((*words.shape[:-1], missing), words.dtype)], axis=-1)
        codes = self.packing.unpack(words)[..., skipped : skipped + box.sizes[self.dim]]
        out[...] = np.moveaxis(codes, -1, self.dim)

    def _words_of(self, box: Box) -> tuple[Box, int]:
        """Return the words of the periods that a box overlaps, and how many codes of the first period precede it."""
        periods, skipped = _groups_of(box, self.dim, self.packing.codes)
        first, count = (n * self.packing.words for n in (periods.offsets[self.dim], periods.sizes[self.dim]))
        left = self.words.info.shape[self.dim] - first  # the last period may be cut off
        return box.with_range(self.dim, first, min(count, left)), skipped

    def parts(self, box: Box) -> Iterator[tuple[SourceView, Box]]:
        return self.words.parts(self._words_of(box)[0]) if box.numel else iter(())

    def identity(self) -> str:
        return f"{self.packing} along {self.dim} to {self.size} of {self.words.identity()}"


@dataclass(frozen=True)
class IndexedView(_ComputedView):
    """Slices of a tensor in the order of an index tensor: slice i along ``dim`` is slice ``index[i]`` of ``values``.

    Args:
        values: the tensor.
        index: a 1D integer tensor.
        dim: the dim along which slices are taken.

    Raises:
        CorruptCheckpointError: by reads, if an index is not one of a slice.
    """

    values: TensorView
    index: TensorView
    dim: int

    @cached_property
    def info(self) -> TensorInfo:
        values, (count,) = self.values.info, self.index.info.shape
        shape = (*values.shape[: self.dim], count, *values.shape[self.dim + 1 :])
        return TensorInfo(values.name, shape, values.dtype)

    def read_into(self, box: Box, out: np.ndarray) -> None:
        import numpy as np

        if not box.numel:
            return
        count = self.values.info.shape[self.dim]
        index = self.index.read(self._index_of(box)).view(self.index.info.dtype.name)
        low, high = int(index.min()), int(index.max())
        if low < 0 or high >= count:
            raise CorruptCheckpointError(
                "An index is not one of a group of scales.",
                expected=f"numbers from 0 to {count - 1}",
                got=f"{low} to {high}",
                where=f"tensor {self.index.info.name}",
            )
        inner = box.with_range(self.dim, low, high + 1 - low)
        out[...] = np.take(self.values.read(inner), index - low, axis=self.dim)

    def _index_of(self, box: Box) -> Box:
        return Box((box.offsets[self.dim],), (box.sizes[self.dim],))

    def parts(self, box: Box) -> Iterator[tuple[SourceView, Box]]:
        yield from self.index.parts(self._index_of(box))
        # The indices are not read for this, so all slices count.
        yield from self.values.parts(box.with_range(self.dim, 0, self.values.info.shape[self.dim]))

    def identity(self) -> str:
        return f"{self.values.identity()} by {self.index.identity()} along {self.dim}"


@dataclass(frozen=True, eq=False)  # eq=False: a dict cannot be hashed
class ScaledView(_ComputedView):
    """Values multiplied by the scale of their block: ``(values - zeros) * scales * factor + offset``.

    Args:
        values: a float32 tensor.
        scales: a float32 tensor with one scale per block, and with as many dims as the values.
        block: size of a block in each dim; the last block of a dim may be smaller.
        dtype: dtype of the result.
        factor, offset: constants for all values; None to skip the multiplication or addition.
        zeros: a float32 tensor of zero points, of the scales' shape; None to skip the subtraction.
        shifts: a float32 tensor of the scales' shape, added after the multiplication; None to skip it.
        divides: whether to divide by the scales.
        lost: filled by reads: tile -> number of its finite values that became infinite in the result's dtype.
    """

    values: TensorView
    scales: TensorView
    block: tuple[int, ...]
    dtype: DType = _F32
    factor: float | None = None
    offset: float | None = None
    zeros: TensorView | None = None
    shifts: TensorView | None = None
    divides: bool = False
    lost: dict[Box, int] = field(default_factory=dict, repr=False)

    @property
    def _by_block(self) -> tuple[TensorView, ...]:
        """The tensors that have one item per block."""
        return tuple(view for view in (self.scales, self.zeros, self.shifts) if view is not None)

    @cached_property
    def info(self) -> TensorInfo:
        values = self.values.info
        return TensorInfo(values.name, values.shape, self.dtype)

    def read_into(self, box: Box, out: np.ndarray) -> None:
        import numpy as np

        from vescale_fsdp.conversion.quantization.float_codes import cast_into

        for tile in _tiles(box, (1,) * len(box.sizes)):
            values = _floats(self.values, tile)
            if self.zeros is not None:
                values -= self._per_item(self.zeros, tile)
            scales = self._per_item(self.scales, tile)
            # Infinities and NaNs are results like any other; numpy would warn.
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                if self.divides:
                    values /= scales
                else:
                    values *= scales
            if self.shifts is not None:
                values += self._per_item(self.shifts, tile)
            if self.factor is not None:
                values *= np.float32(self.factor)
            if self.offset is not None:
                values += np.float32(self.offset)
            # The ellipsis makes indexing of a 0-d array return an array instead of a scalar.
            index: tuple[Any, ...] = (*tile.slices(box.offsets), ...)
            if lost := cast_into(values.view(np.uint32), _F32, out[index], self.dtype):
                self.lost[tile] = lost  # by tile, so that a second read of a tile is not counted again

    @property
    def overflows(self) -> int:
        return sum(self.lost.values()) + super().overflows

    def _per_item(self, view: TensorView, tile: Box) -> np.ndarray:
        """Return the item of its block for each value in a tile, as an array that broadcasts to the tile."""
        import numpy as np

        part = _blocks_of(tile, self.block)
        scales = _floats(view, part)
        for dim, size in enumerate(self.block):
            if size > 1 and part.sizes[dim] > 1:  # a single scale broadcasts without a copy
                skipped = tile.offsets[dim] - part.offsets[dim] * size
                wide = np.repeat(scales, size, axis=dim)
                scales = wide[(slice(None),) * dim + (slice(skipped, skipped + tile.sizes[dim]),)]
        return scales

    def parts(self, box: Box) -> Iterator[tuple[SourceView, Box]]:
        yield from self.values.parts(box)
        if box.numel:
            for view in self._by_block:
                yield from view.parts(_blocks_of(box, self.block))

    def identity(self) -> str:
        views = ", ".join(view.identity() for view in self._by_block)
        kinds = (self.zeros is not None, self.shifts is not None, self.divides)
        by = f"{views} {kinds} per {self.block}, {self.factor}, {self.offset}, as {self.dtype.name}"
        return f"{self.values.identity()} times {by}"


@dataclass
class _KeptBlock:
    """The codes of a block, and how many of its items have not been read yet."""

    codes: np.ndarray
    num_left: int


class BlockCache:
    """Codes of blocks that were read in part, for the other parts; shared by all views and threads of a conversion.

    A block is dropped when all its items have been read, since the pieces of a conversion do not overlap.

    Args:
        max_bytes: limit for the total size of the codes. Blocks beyond it are encoded again for each piece.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._nbytes = 0
        self._lock = threading.Lock()  # protects `_nbytes` and `_blocks`
        # By view, and the block's box in the result.
        self._blocks: dict[tuple[EncodedView, Box], _KeptBlock] = {}
        # Threads that need the same blocks at the same time wait for the first. Others seldom share a lock.
        self._row_locks = tuple(threading.Lock() for _ in range(64))

    def lock_for(self, view: EncodedView, start: Sequence[int]) -> threading.Lock:
        """Return the lock to hold while blocks of the row that begins at ``start`` are encoded."""
        return self._row_locks[hash((view, *start[:-1])) % len(self._row_locks)]

    def get(self, view: EncodedView, block: Box) -> np.ndarray | None:
        """Return the codes of a block; None if they are not kept."""
        with self._lock:
            kept = self._blocks.get((view, block))
            return None if kept is None else kept.codes

    def add_read(self, view: EncodedView, block: Box, codes: np.ndarray, numel: int) -> None:
        """Record that ``numel`` items of a block were read: keep its codes until all were, if there is room."""
        key = (view, block)
        with self._lock:
            kept = self._blocks.get(key)
            if kept is None:
                if self._nbytes + codes.nbytes > self._max_bytes:
                    return
                self._nbytes += codes.nbytes
                kept = self._blocks[key] = _KeptBlock(codes.copy(), block.numel)  # not a view of a whole tile
            kept.num_left -= numel
            if kept.num_left <= 0:
                self._nbytes -= self._blocks.pop(key).codes.nbytes


@dataclass(frozen=True, eq=False)
class EncodedView(_ComputedView):
    """The codes or the scales of a quantized tensor, whose last two dims must be divisible by the block size.

    Args:
        values: the float32 tensor to quantize.
        encoding: the quantization scheme.
        name: name of the result.
        wants_scales: whether this view is the scales or the codes.
        cache: keeps blocks that are read in part; None to encode them again.
    """

    values: TensorView
    encoding: Fp8Encoding | Mxfp4Encoding
    name: str
    wants_scales: bool = False
    cache: BlockCache | None = None

    @property
    def _cell(self) -> tuple[int, ...]:
        """Number of values, in each dim, that become one item of the result."""
        lead = (1,) * (len(self.values.info.shape) - 2)
        each = self.encoding
        return (*lead, each.rows, each.cols) if self.wants_scales else (*lead, 1, each.values_per_byte)

    @cached_property
    def info(self) -> TensorInfo:
        shape = tuple(n // c for n, c in zip(self.values.info.shape, self._cell, strict=True))
        each = self.encoding
        return TensorInfo(
            self.name, shape, dtype_from_torch(each.scale_name if self.wants_scales else each.code_name)
        )

    @property
    def _block(self) -> tuple[int, ...]:
        """Number of values, in each dim, that share a scale."""
        return (*(1,) * (len(self._cell) - 2), self.encoding.rows, self.encoding.cols)

    def _whole_blocks(self, box: Box) -> Box:
        """Return the box of complete blocks of values that a box of the result is computed from."""
        return _times(_blocks_of(_times(box, self._cell), self._block), self._block)

    def read_into(self, box: Box, out: np.ndarray) -> None:
        for rows in self._by_block_rows(box):
            whole = self._whole_blocks(rows)
            is_cut = rows.sizes[-2] * self._cell[-2] < whole.sizes[-2]
            part = out[rows.slices(box.offsets)]
            for tile in _tiles(whole, self._block):
                # Blocks are encoded as a whole, and then clipped to the box.
                wanted = _blocks_of(tile, self._cell).intersect(rows)
                if wanted is None:
                    continue
                if is_cut and self.cache is not None:
                    self._read_cached(self.cache, tile, wanted, part[wanted.slices(rows.offsets)])
                else:
                    self._copy_encoded(tile, wanted, part[wanted.slices(rows.offsets)])

    def _by_block_rows(self, box: Box) -> Iterator[Box]:
        """Split a box of the result into the rows of its first block row, those of its last, and those between."""
        dim = len(box.sizes) - 2
        each = self._block[-2] // self._cell[-2]  # rows of the result per block
        start, stop = box.offsets[dim], box.offsets[dim] + box.sizes[dim]
        first, last = min(-(-start // each) * each, stop), stop // each * each
        for low, high in ((start, first), (first, last), (max(first, last), stop)):
            if low < high:
                yield box.with_range(dim, low, high - low)

    def _copy_encoded(self, tile: Box, wanted: Box, out: np.ndarray) -> None:
        """Encode a tile of values, and copy the wanted box of the result."""
        encoded = self._encoded(_floats(self.values, tile))
        out[...] = encoded[wanted.slices(_blocks_of(tile, self._cell).offsets)].view(out.dtype)

    def _read_cached(self, cache: BlockCache, tile: Box, wanted: Box, out: np.ndarray) -> None:
        """Copy the wanted box of the result from the cache; encode the blocks of the tile that are not there."""
        with cache.lock_for(self, tile.offsets):
            codes = {block: cache.get(self, _blocks_of(block, self._cell)) for block in self._blocks_in(tile)}
            missing = [block for block, kept in codes.items() if kept is None]
            if missing:
                run = _hull(missing)  # one read, since blocks side by side share the rows of the source
                encoded, result = self._encoded(_floats(self.values, run)), _blocks_of(run, self._cell)
                for block in missing:
                    codes[block] = encoded[_blocks_of(block, self._cell).slices(result.offsets)]
            for block, kept in codes.items():
                result = _blocks_of(block, self._cell)
                if kept is not None and (part := result.intersect(wanted)) is not None:
                    out[part.slices(wanted.offsets)] = kept[part.slices(result.offsets)].view(out.dtype)
                    cache.add_read(self, result, kept, part.numel)

    def _blocks_in(self, tile: Box) -> Iterator[Box]:
        """Return the blocks of a tile."""
        numbers = _blocks_of(tile, self._block)
        for index in product(*(range(o, o + n) for o, n in zip(numbers.offsets, numbers.sizes, strict=True))):
            yield _times(Box(index, (1,) * len(index)), self._block)

    def _encoded(self, values: np.ndarray) -> np.ndarray:
        """Return the codes or the scales of an array of complete blocks; may write into the array."""
        import numpy as np

        each, (*lead, rows, cols) = self.encoding, values.shape
        tiled = values.reshape(*lead, rows // each.rows, each.rows, cols // each.cols, each.cols)
        # Warnings are off, because the check of `largest` finds infinities and NaNs with less work.
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            largest = np.abs(tiled).max(axis=(-3, -1))
            if not np.isfinite(largest).all():
                raise self._refusal()
            factors, scales = each.scales(largest)
            if self.wants_scales:
                return scales
            tiled *= factors[..., :, None, :, None]
            return each.codes(values)

    def _refusal(self) -> ConversionError:
        """Return the error for infinities or NaNs: one such value would spoil the scale of its whole block."""
        import numpy as np

        shape = self.values.info.shape
        tiles = _tiles(whole_box(shape), (1,) * len(shape))
        counts = (int(np.count_nonzero(~np.isfinite(_floats(self.values, tile)))) for tile in tiles)
        name = self.values.info.name
        keep = as_pattern(name) + "=keep"
        return ConversionError(
            "A weight with infinities or NaNs cannot be quantized in blocks.",
            expected="finite values",
            got=f"{sum(counts)} of {self.values.info.numel} values that are not finite",
            where=f"tensor {name}",
            todo=f"keep this tensor with {option('quantize', keep)} before other patterns, or "
            "repair the source",
        )

    def parts(self, box: Box) -> Iterator[tuple[SourceView, Box]]:
        return self.values.parts(self._whole_blocks(box)) if box.numel else iter(())

    def identity(self) -> str:
        return (
            f"{'scales' if self.wants_scales else 'codes'} of {self.encoding!r} of {self.values.identity()}"
        )


def _floats(view: TensorView, box: Box) -> np.ndarray:
    """Read a box of a float32 view as an array of floats."""
    import numpy as np

    return view.read(box).view(np.float32)  # views read raw bits


def _groups_of(box: Box, dim: int, size: int) -> tuple[Box, int]:
    """Return the groups of ``size`` items of a dim that a box overlaps, and how many items of the first precede it."""
    start = box.offsets[dim]
    first, stop = start // size, -(-(start + box.sizes[dim]) // size)
    return box.with_range(dim, first, stop - first), start - first * size


def _blocks_of(box: Box, block: tuple[int, ...]) -> Box:
    """Return the box of block numbers that a box of items overlaps."""
    first = tuple(o // b for o, b in zip(box.offsets, block, strict=True))
    stop = tuple(-(-(o + n) // b) for o, n, b in zip(box.offsets, box.sizes, block, strict=True))
    return Box(first, tuple(b - a for a, b in zip(first, stop, strict=True)))


def _hull(boxes: Sequence[Box]) -> Box:
    """Return the smallest box that contains all boxes."""
    first = tuple(map(min, zip(*(box.offsets for box in boxes), strict=True)))
    stops = ([o + n for o, n in zip(box.offsets, box.sizes, strict=True)] for box in boxes)
    stop = tuple(map(max, zip(*stops, strict=True)))
    return Box(first, tuple(b - a for a, b in zip(first, stop, strict=True)))


def _times(box: Box, block: tuple[int, ...]) -> Box:
    """Return the box of all items in a box of block numbers."""
    offsets = tuple(o * b for o, b in zip(box.offsets, block, strict=True))
    return Box(offsets, tuple(n * b for n, b in zip(box.sizes, block, strict=True)))


def _tiles(box: Box, block: Sequence[int]) -> Iterator[Box]:
    """Split a box at block boundaries into tiles of at most `_TILE_NUMEL` items; a single block is never split.

    The box must begin at a block boundary.
    """
    if box.numel <= _TILE_NUMEL:
        if box.numel:
            yield box
        return
    for dim, size in enumerate(block):
        half = -(-box.sizes[dim] // size) // 2 * size  # half of the blocks
        if half:  # the first dim with at least two blocks
            for start, count in ((0, half), (half, box.sizes[dim] - half)):
                yield from _tiles(box.with_range(dim, box.offsets[dim] + start, count), block)
            return
    yield box  # a single block
