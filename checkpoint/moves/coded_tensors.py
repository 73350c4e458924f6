"""Tensors behind codes and scales, and codes and scales of tensors, block by block while they stream.

    fp8        weight [n, k]          ScaledView(DecodedView(codes), scales, blocks of 128 x 128)
    mxfp4      blocks [e, n, k/32, 16]   the same of [e, n, k/2] bytes, two values each; scales for 32 in a row
    bnb nf4    bytes [n * k / 2]      the same, flat; tables and scales of its own

Whatever is asked for is worked through in tiles of 2^18 values, so that memory stays at some MiB, and codes are made of
whole blocks: where a box begins inside one, all of it is read.
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
    """A tensor whose values are computed of others': nothing of it lies anywhere as it is."""

    inputs: tuple[TensorView, ...]

    def sources(self) -> Iterator[tuple[Source, str]]:
        for view in self.inputs:
            yield from view.sources()

    def over(self, leaf: Callable[[SourceView], TensorView]) -> TensorView:
        raise ConversionError(
            "Quantised weights cannot be put together from the memory of several ranks.",
            expected="a checkpoint of them",
            got=self.info.name,
            todo="save first, and convert what was saved",
        )

    @property
    def overflows(self) -> int:
        return sum(view.overflows for view in self.inputs)


@dataclass(frozen=True, eq=False)
class RawBytesView(_ComputedView):
    """The bytes of a one-dimensional tensor, as uint8 [numel * itemsize]: codes that are stored under another dtype."""

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
        """The items that hold some bytes."""
        each = self.items.info.dtype.itemsize
        first, stop = box.offsets[0] // each, -(-(box.offsets[0] + box.sizes[0]) // each)
        return Box((first,), (stop - first,))

    def parts(self, box: Box) -> Iterator[tuple[SourceView, Box]]:
        return self.items.parts(self._items_of(box))

    def identity(self) -> str:
        return f"bytes of {self.items.identity()}"


@dataclass(frozen=True, eq=False)
class DecodedView(_ComputedView):
    """What bytes stand for, as float32.

    Args:
        codes: of one byte per item.
        table: [256, n] what a byte stands for: n neighbours in the last dim.
        kind: of the table, for its identity.
    """

    codes: TensorView
    table: np.ndarray
    kind: str

    @property
    def inputs(self) -> tuple[TensorView, ...]:  # type: ignore[override]
        return (self.codes,)

    @cached_property
    def info(self) -> TensorInfo:
        found = self.codes.info
        shape = (*found.shape[:-1], found.shape[-1] * self.table.shape[1]) if found.shape else ()
        return TensorInfo(found.name, shape, _F32)

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
        """The bytes that hold a box, and how many values of the first come before it."""
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


@dataclass(frozen=True, eq=False)
class ScaledView(_ComputedView):
    """Values times the scale of their block, and perhaps times and plus a number of all.

    Args:
        values: float32.
        scales: float32, one per block; as many dims.
        block: its size in each dim; the last ones may be short.
        dtype: of the result.
        factor, offset: for all.
        lost: gets, by tile, how many finite values became infinite in the result's type.
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
        found = self.values.info
        return TensorInfo(found.name, found.shape, self.dtype)

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
            place: tuple[Any, ...] = (
                *tile.slices(box.offsets),
                ...,
            )  # the ellipsis keeps a 0-d tensor an array
            if lost := cast_into(values.view(np.uint32), _F32, out[place], self.dtype):
                self.lost[tile] = lost

    @property
    def overflows(self) -> int:
        return sum(self.lost.values()) + super().overflows

    def _scales_of(self, tile: Box) -> np.ndarray:
        """Of each value, or broadcast over a dim of one scale."""
        import numpy as np

        part = _blocks_of(tile, self.block)
        scales = _floats(self.scales, part)
        for dim, size in enumerate(self.block):
            if size > 1 and part.sizes[dim] > 1:
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
    """Codes, or scales, of a tensor whose last two dims are cut into whole blocks.

    Args:
        values: float32.
        encoding: how.
        name: of the result.
        wants_scales: whether these are the scales.
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
        """Values that become one item of the result, by dim."""
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
        return (*(1,) * (len(self._cell) - 2), self.encoding.rows, self.encoding.cols)

    def _whole_blocks(self, box: Box) -> Box:
        """The values that a box of the result is made of."""
        return _times(_blocks_of(_times(box, self._cell), self._block), self._block)

    def read_into(self, box: Box, out: np.ndarray) -> None:

        for tile in _tiles(self._whole_blocks(box), self._block):
            made, place = self._encoded(_floats(self.values, tile)), _blocks_of(tile, self._cell)
            if (wanted := place.intersect(box)) is not None:
                out[wanted.slices(box.offsets)] = made[wanted.slices(place.offsets)].view(out.dtype)

    def _encoded(self, values: np.ndarray) -> np.ndarray:
        import numpy as np

        each, (*lead, rows, cols) = self.encoding, values.shape
        tiled = values.reshape(*lead, rows // each.rows, each.rows, cols // each.cols, each.cols)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):  # checked below, once per block
            largest = np.abs(tiled).max(axis=(-3, -1))
            if not np.isfinite(largest).all():
                raise self._refusal()
            factors, scales = each.scales(largest)
            if self.wants_scales:
                return scales
            tiled *= factors[..., :, None, :, None]
            return each.codes(values)

    def _refusal(self) -> ConversionError:
        """One scale stands for a block: an infinity or NaN would take all of its values along."""
        import numpy as np

        shape = self.values.info.shape
        tiles = _tiles(whole_box(shape), (1,) * len(shape))
        counts = (int(np.count_nonzero(~np.isfinite(_floats(self.values, tile)))) for tile in tiles)
        name = self.values.info.name
        return ConversionError(
            "A weight with infinities or NaNs cannot be quantised in blocks.",
            expected="finite values",
            got=f"{sum(counts)} of {self.values.info.numel} that are not",
            where=f"tensor {name}",
            todo=f"leave it as it is: --quantize '{name}=keep' before other patterns; or mend the source",
        )

    def parts(self, box: Box) -> Iterator[tuple[SourceView, Box]]:
        return self.values.parts(self._whole_blocks(box)) if box.numel else iter(())

    def identity(self) -> str:
        return (
            f"{'scales' if self.wants_scales else 'codes'} of {self.encoding!r} of {self.values.identity()}"
        )


def _floats(view: TensorView, box: Box) -> np.ndarray:
    """A box of a float32 tensor."""
    import numpy as np

    raw = np.empty(box.sizes, dtype=_F32.raw)  # views speak of bits
    view.read_into(box, raw)
    return raw.view(np.float32)


def _blocks_of(box: Box, block: tuple[int, ...]) -> Box:
    """The blocks that a box touches, by number in each dim."""
    first = tuple(o // b for o, b in zip(box.offsets, block, strict=True))
    stop = tuple(-(-(o + n) // b) for o, n, b in zip(box.offsets, box.sizes, block, strict=True))
    return Box(first, tuple(b - a for a, b in zip(first, stop, strict=True)))


def _times(box: Box, block: tuple[int, ...]) -> Box:
    """All of some blocks, in their items."""
    offsets = tuple(o * b for o, b in zip(box.offsets, block, strict=True))
    return Box(offsets, tuple(n * b for n, b in zip(box.sizes, block, strict=True)))


def _tiles(box: Box, block: Sequence[int]) -> Iterator[Box]:
    """A box in tiles of at most some items, cut between blocks; it begins with one."""
    if box.numel <= _TILE_NUMEL:
        if box.numel:
            yield box
        return
    for dim, size in enumerate(block):
        half = -(-box.sizes[dim] // size) // 2 * size  # half of the blocks
        if half:
            for start, count in ((0, half), (half, box.sizes[dim] - half)):
                offsets, sizes = list(box.offsets), list(box.sizes)
                offsets[dim], sizes[dim] = box.offsets[dim] + start, count
                yield from _tiles(Box(tuple(offsets), tuple(sizes)), block)
            return
    yield box
