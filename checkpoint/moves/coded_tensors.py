"""Views that dequantize codes and scales, or quantize floats, block by block while tensors are streamed.

    fp8        weight [n, k]          ScaledView(DecodedView(codes), scales, blocks of 128 x 128)
    mxfp4      blocks [e, n, k/32, 16]   the same with [e, n, k/2] bytes of two values, and a scale per 32 values
    bnb nf4    bytes [n * k / 2]      the same with flat bytes, and bitsandbytes' own tables and scales

A requested box is processed in tiles of at most 2^18 values, which keeps memory use at a few MiB. Codes are computed
from complete blocks: if a box begins inside a block, the whole block is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vescale_fsdp.checkpoint.moves.source import Source
from vescale_fsdp.checkpoint.moves.stored_tensor import TensorInfo
from vescale_fsdp.checkpoint.moves.tensor_view import SourceView, TensorView
from vescale_fsdp.errors import ConversionError
from vescale_fsdp.layout.dtypes import DType, dtype_from_torch
from vescale_fsdp.layout.geometry import Box, whole_box

if TYPE_CHECKING:
    import numpy as np

    from vescale_fsdp.views.float_codes import Fp8Encoding, Mxfp4Encoding

_TILE_NUMEL = 2**18  # 1 MiB as float32
_F32 = dtype_from_torch("float32")
_U8 = dtype_from_torch("uint8")


class _ComputedView(TensorView):
    """Base of tensors whose values are computed from other views, so that none of their bytes are stored."""

    inputs: tuple[TensorView, ...]

    def sources(self) -> Iterator[tuple[Source, str]]:
        for view in self.inputs:
            yield from view.sources()

    def over(self, leaf: Callable[[SourceView], TensorView]) -> TensorView:
        raise ConversionError(
            "Quantized weights cannot be assembled from the memory of several ranks.",
            expected="a saved checkpoint of the weights",
            got=self.info.name,
            todo="save a checkpoint first, and convert it",
        )

    @property
    def overflows(self) -> int:
        return sum(view.overflows for view in self.inputs)


@dataclass(frozen=True, eq=False)
class RawBytesView(_ComputedView):
    """The bytes of a 1D tensor as uint8 [numel * itemsize], for codes that are stored with another dtype."""

    items: TensorView

    @property
    def inputs(self) -> tuple[TensorView, ...]:  # type: ignore[override]
        return (self.items,)

    @cached_property
    def info(self) -> TensorInfo:
        return TensorInfo(self.items.info.name, (self.items.info.nbytes,), _U8)

    def read_into(self, box: Box, out: np.ndarray) -> None:
        import numpy as np

        inner = self._items_of(box)
        raw = np.empty(inner.sizes, dtype=self.items.info.dtype.raw)
        self.items.read_into(inner, raw)
        skipped = box.offsets[0] - inner.offsets[0] * raw.itemsize
        out[...] = raw.view(np.uint8)[skipped : skipped + box.sizes[0]]

    def _items_of(self, box: Box) -> Box:
        """Return the box of items that contain a box of bytes."""
        each = self.items.info.dtype.itemsize
        first, stop = box.offsets[0] // each, -(-(box.offsets[0] + box.sizes[0]) // each)
        return Box((first,), (stop - first,))

    def parts(self, box: Box) -> Iterator[tuple[SourceView, Box]]:
        return self.items.parts(self._items_of(box))

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

    @property
    def inputs(self) -> tuple[TensorView, ...]:  # type: ignore[override]
        return (self.codes,)

    @cached_property
    def info(self) -> TensorInfo:
        codes = self.codes.info
        # A 0-d scale is one value: it has no last dim to widen.
        shape = (*codes.shape[:-1], codes.shape[-1] * self.table.shape[1]) if codes.shape else ()
        return TensorInfo(codes.name, shape, _F32)

    def read_into(self, box: Box, out: np.ndarray) -> None:
        import numpy as np

        inner, skipped = self._bytes_of(box)
        raw = np.empty(inner.sizes, dtype=np.uint8)
        self.codes.read_into(inner, raw)
        values = self.table[raw]
        if box.sizes:
            values = values.reshape(*inner.sizes[:-1], -1)[..., skipped : skipped + box.sizes[-1]]
        out[...] = values.view(out.dtype).reshape(box.sizes)

    def _bytes_of(self, box: Box) -> tuple[Box, int]:
        """Return the bytes that encode a box, and how many values of the first byte precede the box."""
        each = self.table.shape[1]
        if not box.sizes or each == 1:
            return box, 0
        first, stop = box.offsets[-1] // each, -(-(box.offsets[-1] + box.sizes[-1]) // each)
        inner = Box((*box.offsets[:-1], first), (*box.sizes[:-1], stop - first))
        return inner, box.offsets[-1] - first * each

    def parts(self, box: Box) -> Iterator[tuple[SourceView, Box]]:
        return self.codes.parts(self._bytes_of(box)[0])

    def identity(self) -> str:
        return f"{self.kind} values of {self.codes.identity()}"


@dataclass(frozen=True, eq=False)  # eq=False: a dict cannot be hashed
class ScaledView(_ComputedView):
    """Values multiplied by the scale of their block: ``values * scales * factor + offset``.

    Args:
        values: a float32 tensor.
        scales: a float32 tensor with one scale per block, and with as many dims as the values.
        block: size of a block in each dim; the last block of a dim may be smaller.
        dtype: dtype of the result.
        factor, offset: constants for all values; None to skip the multiplication or addition.
        lost: filled by reads: tile -> number of its finite values that became infinite in the result's dtype.
    """

    values: TensorView
    scales: TensorView
    block: tuple[int, ...]
    dtype: DType = _F32
    factor: float | None = None
    offset: float | None = None
    lost: dict[Box, int] = field(default_factory=dict, repr=False)

    @property
    def inputs(self) -> tuple[TensorView, ...]:  # type: ignore[override]
        return (self.values, self.scales)

    @cached_property
    def info(self) -> TensorInfo:
        values = self.values.info
        return TensorInfo(values.name, values.shape, self.dtype)

    def read_into(self, box: Box, out: np.ndarray) -> None:
        import numpy as np

        from vescale_fsdp.views.float_codes import cast_into

        for tile in _tiles(box, (1,) * len(box.sizes)):
            values = _floats(self.values, tile)
            values *= self._scales_of(tile)
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

    def _scales_of(self, tile: Box) -> np.ndarray:
        """Return the scale of each value in a tile, as an array that broadcasts to the tile."""
        import numpy as np

        part = _blocks_of(tile, self.block)
        scales = _floats(self.scales, part)
        for dim, size in enumerate(self.block):
            if size > 1 and part.sizes[dim] > 1:  # a single scale broadcasts without a copy
                skipped = tile.offsets[dim] - part.offsets[dim] * size
                wide = np.repeat(scales, size, axis=dim)
                scales = wide[(slice(None),) * dim + (slice(skipped, skipped + tile.sizes[dim]),)]
        return scales

    def parts(self, box: Box) -> Iterator[tuple[SourceView, Box]]:
        yield from self.values.parts(box)
        if box.numel:
            yield from self.scales.parts(_blocks_of(box, self.block))

    def identity(self) -> str:
        by = f"{self.scales.identity()} per {self.block}, {self.factor}, {self.offset}, as {self.dtype.name}"
        return f"{self.values.identity()} times {by}"


@dataclass(frozen=True, eq=False)
class EncodedView(_ComputedView):
    """The codes or the scales of a quantized tensor, whose last two dims must be divisible by the block size.

    Args:
        values: the float32 tensor to quantize.
        encoding: the quantization scheme.
        name: name of the result.
        wants_scales: whether this view is the scales or the codes.
    """

    values: TensorView
    encoding: Fp8Encoding | Mxfp4Encoding
    name: str
    wants_scales: bool = False

    @property
    def inputs(self) -> tuple[TensorView, ...]:  # type: ignore[override]
        return (self.values,)

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

        for tile in _tiles(self._whole_blocks(box), self._block):
            # Blocks are encoded as a whole, and then clipped to the box.
            encoded, result_box = self._encoded(_floats(self.values, tile)), _blocks_of(tile, self._cell)
            if (wanted := result_box.intersect(box)) is not None:
                out[wanted.slices(box.offsets)] = encoded[wanted.slices(result_box.offsets)].view(out.dtype)

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
        return ConversionError(
            "A weight with infinities or NaNs cannot be quantized in blocks.",
            expected="finite values",
            got=f"{sum(counts)} of {self.values.info.numel} values that are not finite",
            where=f"tensor {name}",
            todo=f"keep this tensor with --quantize '{name}=keep' before other patterns, or repair the source",
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

    raw = np.empty(box.sizes, dtype=_F32.raw)  # views read raw bits
    view.read_into(box, raw)
    return raw.view(np.float32)


def _blocks_of(box: Box, block: tuple[int, ...]) -> Box:
    """Return the box of block numbers that a box of items overlaps."""
    first = tuple(o // b for o, b in zip(box.offsets, block, strict=True))
    stop = tuple(-(-(o + n) // b) for o, n, b in zip(box.offsets, box.sizes, block, strict=True))
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
                offsets, sizes = list(box.offsets), list(box.sizes)
                offsets[dim], sizes[dim] = box.offsets[dim] + start, count
                yield from _tiles(Box(tuple(offsets), tuple(sizes)), block)
            return
    yield box  # a single block
