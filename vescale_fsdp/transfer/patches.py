"""Patches: the positions and the new values of the items of a message whose bits have changed.

A message has *segments*: its items of one width. A patch has one row of a table per segment, then the segments' data:

    whole       all values
    sparse      values of whole blocks of 32 items; values of single items; positions of blocks; positions of items

Positions are encoded in the smallest of three ways: the gaps between them in bytes, the gaps in 16 bits, or a bitmap. A
gap that does not fit is continued: 255 (65,535) means so many unchanged items, and that the gap continues.

A block is sent whole where its positions would take more bytes than its unchanged items. So the codes of a quantization
block whose scale has changed, most of which change too, cost one byte each instead of two.

Bits are compared, not values: 0.0 differs from -0.0, and equal NaNs are equal. Sizes of patches therefore depend only
on bits, and the receiver stores exactly the bits that a whole message would have had.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

import torch

from vescale_fsdp.layout.geometry import round_up
from vescale_fsdp.layout.region import Copy
from vescale_fsdp.transfer.rank_transfers import Batch, LeafCopy

ROW_BYTES = 16  # of a segment's row in the table of a patch: four numbers of 4 bytes
_BLOCK_NUMEL = 32  # the smallest block of the codecs (`Mxfp8`); parts of larger ones, line by line
_WHOLE = -1  # in a row, in place of the number of blocks
_BYTE_GAPS, _SHORT_GAPS, _BITMAP = 0, 1, 2  # the first byte of encoded positions
# For each kind of gaps: the mark that continues a gap, and the dtype.
_GAPS = {_BYTE_GAPS: (0xFF, torch.uint8), _SHORT_GAPS: (0xFFFF, torch.int16)}
# dtypes of items as bits, by width. Items of 16 bytes are compared as two words.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_WORD_BYTES = 8  # bits are compared by words first, and by items only where words differ


class Segment(NamedTuple):
    """The items of one width in a message.

    Attributes:
        itemsize: bytes per item.
        numel: number of items.
        copies: the items, in order.
        batches: the jobs that copy the items to or from a run of bytes, on this rank.
        run: the items as one run, if this rank stores them exactly as they are sent, in one tensor.
    """

    itemsize: int
    numel: int
    copies: tuple[LeafCopy, ...]
    batches: tuple[Batch, ...]
    run: LeafCopy | None

    @property
    def nbytes(self) -> int:
        """Bytes of all items."""
        return self.numel * self.itemsize


class Change(NamedTuple):
    """Changed items of one copy.

    Attributes:
        copy: the copy, with its leaf.
        positions: int64, ascending: numbers of the items in the row-major order of the copy.
        values: the new bits, 1D, of a dtype of `_BITS`.
    """

    copy: LeafCopy
    positions: torch.Tensor
    values: torch.Tensor


def bits_of(items: torch.Tensor) -> torch.Tensor:
    """Return a view of a contiguous tensor's items as bits, of a dtype of `_BITS`."""
    return items.view(_BITS[items.itemsize])


def width_of(item: LeafCopy) -> int:
    """Return the bytes of an item of a copy, as it is sent."""
    return item[0].itemsize


def changed_positions(new: torch.Tensor, old: torch.Tensor, itemsize: int) -> torch.Tensor:
    """Return the numbers of the items whose bits differ, ascending, int64.

    Args:
        new, old: equally many bytes, 1D contiguous uint8.
    """
    if new.numel() < _WORD_BYTES:
        return _differing(new, old, itemsize)
    head = -new.storage_offset() % _WORD_BYTES
    if head and not (new.storage_offset() - old.storage_offset()) % _WORD_BYTES:
        first = _differing(new[:head], old[:head], itemsize)
        return torch.cat([first, changed_positions(new[head:], old[head:], itemsize).add_(head // itemsize)])
    if any(each.storage_offset() % _WORD_BYTES or each.data_ptr() % _WORD_BYTES for each in (new, old)):
        new, old = new.clone(), old.clone()  # else words would not be aligned
    stop = new.numel() // _WORD_BYTES * _WORD_BYTES
    found = _in_words(new[:stop], old[:stop], itemsize)
    if stop == new.numel():
        return found
    tail = _differing(new[stop:], old[stop:], itemsize)
    return torch.cat([found, tail.add_(stop // itemsize)])


def _differing(new: torch.Tensor, old: torch.Tensor, itemsize: int) -> torch.Tensor:
    """Compare item by item. The items have at most 8 bytes, because wider ones are not integers."""
    kind = _BITS[itemsize]
    return (new.view(kind) != old.view(kind)).nonzero().view(-1)


def _in_words(new: torch.Tensor, old: torch.Tensor, itemsize: int) -> torch.Tensor:
    """Compare aligned words, and where they differ items: `nonzero` reads one flag at a time."""
    words = new.view(torch.int64), old.view(torch.int64)
    flags = torch.zeros(round_up(words[0].numel(), 8), dtype=torch.bool, device=new.device)
    torch.ne(*words, out=flags[: words[0].numel()])
    groups = flags.view(torch.int64).nonzero().view(-1)  # eight flags each
    if itemsize < _WORD_BYTES and 2 * groups.numel() > flags.numel() // 8:
        return _differing(new, old, itemsize)
    at = flags.view(-1, 8).index_select(0, groups).view(-1).nonzero().view(-1)
    found = (groups.index_select(0, at >> 3) << 3).add_(at & 7)
    if itemsize > _WORD_BYTES:
        return (found >> 1).unique_consecutive()
    if itemsize == _WORD_BYTES:
        return found
    items = [each.index_select(0, found).view(_BITS[itemsize]) for each in words]
    at = (items[0] != items[1]).nonzero().view(-1)
    shift = (_WORD_BYTES // itemsize).bit_length() - 1  # items per word, as a power of two
    return (found.index_select(0, at >> shift) << shift).add_(at & ((1 << shift) - 1))


def encoded(new: torch.Tensor, old: torch.Tensor, itemsize: int) -> tuple[list[int], list[torch.Tensor]]:
    """Encode the items of a segment whose bits differ.

    Args:
        new, old: the bytes of all items, as they are sent now and as they were sent before; 1D contiguous uint8.

    Returns:
        The segment's row of the table, and its data, tensors of bytes. The data never have more bytes than ``new``.
    """
    positions = changed_positions(new, old, itemsize)
    if not positions.numel():
        return [0, 0, 0, 0], []
    numel = new.numel() // itemsize
    blocks, single = _in_blocks(positions, numel, itemsize)
    at_blocks, at_single = _encode(blocks, numel // _BLOCK_NUMEL), _encode(single, numel)
    num_values = _BLOCK_NUMEL * blocks.numel() + single.numel()
    if num_values * itemsize + at_blocks.numel() + at_single.numel() >= new.numel():
        return [_WHOLE, 0, 0, 0], [new.clone()]  # the caller's buffer gets the next segment
    values = new.view(_BITS[itemsize]).index_select(0, torch.cat([_expanded(blocks), single]))
    row = [blocks.numel(), at_blocks.numel(), single.numel(), at_single.numel()]
    return row, [values.view(torch.uint8), at_blocks, at_single]


def data_bytes(row: Sequence[int], segment: Segment) -> int:
    """Return the bytes of a segment's data."""
    num_blocks, at_blocks, num_single, at_single = row
    if num_blocks == _WHOLE:
        return segment.nbytes
    return (num_blocks * _BLOCK_NUMEL + num_single) * segment.itemsize + at_blocks + at_single


def decoded(
    data: torch.Tensor, row: Sequence[int], segment: Segment
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Undo `encoded`.

    Returns:
        The positions, ascending; None if the segment is whole. And the values, of a dtype of `_BITS`.
    """
    num_blocks, at_blocks, _, at_single = row
    bits = _BITS[segment.itemsize]
    # `clone`, because the items of a view must be aligned.
    if num_blocks == _WHOLE:
        return None, data.clone().view(bits)
    stop = data.numel() - at_blocks - at_single
    values = data[:stop].clone().view(bits)
    blocks = _decode(data[stop : stop + at_blocks], segment.numel // _BLOCK_NUMEL)
    single = _decode(data[stop + at_blocks :], segment.numel)
    if not num_blocks:
        return single, values
    positions, order = torch.cat([_expanded(blocks), single]).sort()
    return positions, values.index_select(0, order)


def _in_blocks(positions: torch.Tensor, numel: int, itemsize: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers of the blocks that are sent whole, and the positions in all other blocks."""
    # A position takes about a byte: so many changes in a block take more bytes than the whole block and its position.
    least = (_BLOCK_NUMEL * itemsize + 1) // (itemsize + 1) + 1
    spans = positions[least - 1 :] - positions[: max(positions.numel() - least + 1, 0)]
    if not (spans < _BLOCK_NUMEL).any():
        return positions[:0], positions
    blocks, counts = torch.unique_consecutive(positions // _BLOCK_NUMEL, return_counts=True)
    # The items behind the last whole block have no block.
    is_whole = (counts >= least) & (blocks < numel // _BLOCK_NUMEL)
    return blocks[is_whole], positions[~is_whole.repeat_interleave(counts)]


def _expanded(blocks: torch.Tensor) -> torch.Tensor:
    """Return the positions of all items of blocks."""
    within = torch.arange(_BLOCK_NUMEL, dtype=torch.int64, device=blocks.device)
    return (blocks[:, None] * _BLOCK_NUMEL + within).view(-1)


def _encode(positions: torch.Tensor, numel: int) -> torch.Tensor:
    """Encode ascending positions below ``numel`` in as few bytes as possible; empty without positions."""
    if not positions.numel():
        return positions.to(torch.uint8)
    bitmap_bytes = round_up(numel, 8) // 8
    chosen, least, gaps, num_marks = _BITMAP, bitmap_bytes, positions, positions
    for kind, (mark, dtype) in _GAPS.items() if positions.numel() < bitmap_bytes else ():
        if kind == _BYTE_GAPS:
            first = positions.new_full((1,), -1)
            gaps = torch.diff(positions, prepend=first).sub_(1).to(torch.int32)  # divided faster than int64
        marks = gaps // mark
        total = int(marks.sum())
        nbytes = (gaps.numel() + total) * dtype.itemsize
        if nbytes < least:
            chosen, least, num_marks = kind, nbytes, marks
        if total <= gaps.numel():
            break  # gaps of 16 bits take as many bytes, or more
    if chosen == _BITMAP:
        bits = torch.zeros(8 * bitmap_bytes, dtype=torch.uint8, device=positions.device)
        bits.index_fill_(0, positions, 1)
        data = (bits.view(-1, 8) << _shifts(bits)).sum(1, dtype=torch.uint8)
    else:
        mark, dtype = _GAPS[chosen]
        wide = gaps
        if least > gaps.numel() * dtype.itemsize:
            wide = torch.full((least // dtype.itemsize,), mark, dtype=torch.int32, device=gaps.device)
            # Where each gap ends, behind the marks of this and of all earlier gaps.
            wide[(num_marks + 1).cumsum(0).sub_(1)] = gaps - num_marks * mark
        data = wide.to(dtype).view(torch.uint8)  # a cast to 16 bits keeps the low bits
    return torch.cat([data.new_full((1,), chosen), data])


def _decode(data: torch.Tensor, numel: int) -> torch.Tensor:
    """Undo `_encode`."""
    if not data.numel():
        return data.to(torch.int64)
    chosen, data = int(data[0]), data[1:]
    if chosen == _BITMAP:
        return ((data[:, None] >> _shifts(data)) & 1).view(-1)[:numel].nonzero().view(-1)
    mark, dtype = _GAPS[chosen]
    gaps = data.clone().view(dtype).to(torch.int64).bitwise_and_(mark)
    is_end = gaps != mark
    behind = gaps.add_(is_end).cumsum(0)
    return (behind if is_end.all() else behind[is_end]).sub_(1)


def _shifts(like: torch.Tensor) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)


def changes(copies: Sequence[LeafCopy], positions: torch.Tensor, values: torch.Tensor) -> Iterator[Change]:
    """Yield the changed items by copy.

    Args:
        positions: ascending, counted through the items of all copies.
    """
    if len(copies) == 1:
        yield Change(copies[0], positions, values)
        return
    stops = list(accumulate(copy.numel for _, copy in copies))
    edges = torch.tensor(stops, dtype=torch.int64, device=positions.device)
    first = 0
    for item, start, last in zip(
        copies, (0, *stops), torch.searchsorted(positions, edges).tolist(), strict=False
    ):
        if first < last:
            yield Change(item, positions[first:last] - start, values[first:last])
        first = last


def indices_in(
    sizes: Sequence[int], strides: Sequence[int], start: int, positions: torch.Tensor
) -> torch.Tensor:
    """Return where items of a strided box are in flat memory.

    Args:
        positions: numbers of the items, in the row-major order of the box.
        strides, start: the strides of the box in the memory, and the index of its first item.
    """
    index, left = torch.full_like(positions, start), positions
    for size, stride in zip(reversed(sizes[1:]), reversed(strides[1:]), strict=True):
        outer = left // size
        index += (left - outer * size) * stride
        left = outer
    return index.add_(left * strides[0])


def put(change: Change, flat: torch.Tensor, values: torch.Tensor, *, is_source: bool) -> None:
    """Write changed items into the source's or the target's memory.

    Args:
        flat: the memory, 1D. Copies that stand for several reach beyond it, into the memory behind.
        values: in the dtype of ``flat``.
    """
    copy = change.copy[1]
    start, strides = _side(copy, is_source)
    stop = start + sum((size - 1) * stride for size, stride in zip(copy.sizes, strides, strict=True)) + 1
    memory = flat.as_strided((stop,), (1,), flat.storage_offset())
    memory.scatter_(0, indices_in(copy.sizes, strides, start, change.positions), values)


def _side(copy: Copy, is_source: bool) -> tuple[int, tuple[int, ...]]:
    return (copy.source, copy.source_strides) if is_source else (copy.target, copy.target_strides)


def by_width(items: Sequence[LeafCopy]) -> Iterator[tuple[int, tuple[LeafCopy, ...]]]:
    """Divide the copies of a message, whose widest items come first, by the width of items."""
    for itemsize, group in groupby(items, width_of):
        yield itemsize, tuple(group)
