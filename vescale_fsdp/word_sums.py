"""Word sums: 16 bytes of a tensor that are equal wherever its bytes are, and that can be added up from its parts.

The bytes of a tensor, in row-major order, are read as 8-byte words x; word j is in row ``r = j >> 15`` and column
``c = j & 32767``. A tensor has two sums, for k = 0 and 1, modulo 2**64:

    H_k = sum over r of B_k[r] * sum over c of (x * A_k[c] + (x >> 32) * A'_k[c])

The sums are linear in the bytes: the sums of a tensor are the sum of those of its parts, in any order and for any cut,
and a change of some bytes changes them by the sums of the difference. Each rank therefore computes its part, and one
all-reduce of 16 bytes gives the sums of the whole tensor. FORMAT.md of `checkpoint` is the specification.

Two sums of 32-bit lanes: with one weight per word, two flipped sign bits always cancel out. With lanes, a change
within one row is missed with a chance of at most 2**-33 per sum, so 2**-66; typical changes with about 2**-128. The
tables are public, so whoever wants to can construct two tensors with equal sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache, lru_cache

import numpy as np
import torch

from vescale_fsdp.layout.region import Copy, Region, overlaps, whole_region

ROW_BYTES = 8 << 15  # 256 KiB: a row has 32,768 words
_MASK = (1 << 64) - 1
_COLUMN, _ROW = ROW_BYTES // 8 - 1, 15  # mask and shift that give the column and the row of a word
# Rows that a device multiplies at a time: 16 MiB, so that few kernels run and temporary memory is bounded. A host
# takes one row at a time, which stays in the cache.
_DEVICE_ROWS = 64
_LONG_RUN_BYTES = (
    64 << 10
)  # runs of at least this size are summed one by one, shorter ones row by row of the tensor


def splitmix64(counters: np.ndarray) -> np.ndarray:
    """Return number ``counters`` of the splitmix64 sequence with seed 0; both arrays are of uint64.

    >>> hex(splitmix64(np.array([0], np.uint64))[0])
    '0xe220a8397b1dcdaf'
    """
    state = (counters + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def _int64(numbers: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(numbers.view(np.int64)).to(device)


@cache
def _columns(device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the tables A_0, A'_0, A_1 and A'_1 of 32,768 weights each: 1 MiB together."""
    tables = splitmix64(np.arange(4 * (_COLUMN + 1), dtype=np.uint64))
    return _int64(tables, device).chunk(4)


@lru_cache(maxsize=64)  # most tensors begin with the same few rows
def _rows(first: int, count: int) -> np.ndarray:
    """Return B_0 and B_1 of ``count`` rows from row ``first`` on, of shape (2, count)."""
    counters = np.arange(first, first + count, dtype=np.uint64)
    return splitmix64(np.stack([counters + np.uint64((k + 1) << 48) for k in range(2)])) | np.uint64(1)


def run_sums(raw: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Return what a run of consecutive bytes adds to the two sums of its tensor.

    Temporary memory is one row on the host, and some 64 MiB on a device. Nothing waits for a device.

    Args:
        raw: the bytes, 1D contiguous uint8 on any device.
        start: offset of the first byte in the tensor's row-major bytes; any number.

    Returns:
        Two int64 numbers, on the device of ``raw``: the sums modulo 2**64, as signed numbers.
    """
    on_host = raw.device.type == "cpu"
    first_row = start // ROW_BYTES
    factors = _rows(first_row, (start + raw.numel() - 1) // ROW_BYTES + 1 - first_row)
    host_total = [0, 0]
    total = torch.zeros(2, dtype=torch.int64, device=raw.device)
    on_device = None if on_host else _int64(factors, raw.device)
    for first, words in _words(raw, start, 1 if on_host else _DEVICE_ROWS):
        row, column = (first >> _ROW) - first_row, first & _COLUMN
        if on_device is None:
            for k, line in enumerate(_line_sums_on_host(words, column)):
                host_total[k] += int(factors[k, row]) * line
        else:
            total += _sums_on_device(words, column, on_device[:, row:])
    if on_host:
        total[0], total[1] = map(_signed, host_total)
    return total


def _signed(number: int) -> int:
    """Return a number modulo 2**64, as an int64."""
    return ((number + (1 << 63)) & _MASK) - (1 << 63)


def _words(raw: torch.Tensor, start: int, most_rows: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the run's words in parts: part of one row, or up to ``most_rows`` whole rows.

    Bytes of a word that are not in the run are zeros.

    Yields:
        (number of the first word, words); valid until the next part.
    """
    stop = start + raw.numel()
    buffer: torch.Tensor | None = None
    at = start
    while at < stop:
        if at % ROW_BYTES or stop - at < ROW_BYTES:
            end = min(stop, (at // ROW_BYTES + 1) * ROW_BYTES)
        else:
            end = min(at + most_rows * ROW_BYTES, stop - stop % ROW_BYTES)
        before, after = at % 8, -end % 8
        part = raw[at - start : end - start]
        if before or after or part.storage_offset() % 8 or part.data_ptr() % 8:  # words would not be aligned
            numel = before + part.numel() + after
            if buffer is None or buffer.numel() < numel:
                buffer = torch.empty(numel, dtype=torch.uint8, device=raw.device)
            padded = buffer[:numel]
            padded[:before] = 0
            padded[numel - after :] = 0
            padded[before : numel - after].copy_(part)
            part = padded
        yield at // 8, part.view(torch.int64)
        at = end


def _line_sums_on_host(words: torch.Tensor, column: int) -> list[int]:
    """Return the sums over c of a part of one row, before the multiplication by B."""
    upper = words >> 32  # of a signed word, so that no bits above it are set for a second time
    a0, b0, a1, b1 = (table[column : column + words.numel()] for table in _columns(words.device))
    return [int(torch.dot(words, low)) + int(torch.dot(upper, high)) for low, high in ((a0, b0), (a1, b1))]


def _sums_on_device(words: torch.Tensor, column: int, factors: torch.Tensor) -> torch.Tensor:
    """Return the two sums of a part of one row, or of whole rows; multiplies and sums up, since dot needs floats.

    Args:
        factors: B_0 and B_1 from the first of the rows on, of shape (2, any).
    """
    count = max(1, words.numel() >> _ROW)
    lines = words.view(count, -1)
    upper = lines >> 32
    tables = [table[column : column + lines.shape[1]] for table in _columns(words.device)]
    sums = [(lines * tables[2 * k]).sum(1).add_((upper * tables[2 * k + 1]).sum(1)) for k in range(2)]
    return (torch.stack(sums) * factors[:, :count]).sum(1)


def region_sums(raw: torch.Tensor, region: Region, shape: tuple[int, ...], itemsize: int) -> torch.Tensor:
    """Return what a region adds to the two sums of its tensor.

    A region that is strided in the tensor, such as one of ``Shard(1)``, is copied row by row of 256 KiB between zeros.

    Args:
        raw: the bytes of the region's items in its order, 1D contiguous uint8 on any device.
        region: the region.
        shape: shape of the whole tensor.
        itemsize: bytes per item.

    Returns:
        As `run_sums`.
    """
    return copies_sums(raw, overlaps(whole_region(shape), region), itemsize)


def copies_sums(raw: torch.Tensor, copies: Iterable[Copy], itemsize: int) -> torch.Tensor:
    """Return what the items of copies add to the two sums of a tensor.

    Args:
        raw: the bytes of the copies' target memory, 1D contiguous uint8 on any device.
        copies: copies from the row-major items of the tensor to that memory; nested strides of the tensor.
        itemsize: bytes per item.

    Returns:
        As `run_sums`.
    """
    total = torch.zeros(2, dtype=torch.int64, device=raw.device)
    for copy in copies:
        in_bytes = Copy.of(
            (*copy.sizes, itemsize),
            copy.source * itemsize,
            (*(step * itemsize for step in copy.source_strides), 1),
            copy.target * itemsize,
            (*(step * itemsize for step in copy.target_strides), 1),
        )
        if in_bytes.is_run or (_ends_in_a_run(in_bytes) and in_bytes.sizes[-1] >= _LONG_RUN_BYTES):
            for run in _runs_of(in_bytes):
                total += run_sums(raw[run.target : run.target + run.numel], run.source)
        else:
            total += _strided_sums(raw, in_bytes)
    return total


def _ends_in_a_run(copy: Copy) -> bool:
    """Return whether the last dim is contiguous on both sides."""
    return copy.source_strides[-1] == copy.target_strides[-1] == 1


def _runs_of(copy: Copy) -> Iterator[Copy]:
    """Yield the runs of a copy whose last dim is contiguous on both sides."""
    *outer, numel = copy.sizes
    for index in np.ndindex(*outer):
        source, target = (
            first + sum(a * step for a, step in zip(index, strides, strict=False))
            for first, strides in (
                (copy.source, copy.source_strides),
                (copy.target, copy.target_strides),
            )
        )
        yield Copy.run(source, target, numel)


def _strided_sums(raw: torch.Tensor, copy: Copy) -> torch.Tensor:
    """Return what the bytes of a copy, whose source is the tensor and whose target is ``raw``, add to the sums."""
    total = torch.zeros(2, dtype=torch.int64, device=raw.device)
    step = ROW_BYTES * (1 if raw.device.type == "cpu" else _DEVICE_ROWS)
    last = copy.source + sum(
        (n - 1) * stride for n, stride in zip(copy.sizes, copy.source_strides, strict=True)
    )
    window = torch.empty(step, dtype=torch.uint8, device=raw.device)
    for start in range(copy.source // step * step, last + 1, step):
        stop = min(start + step, last + 1)
        parts = list(copy.within(start, stop))
        if parts:
            filled = window[: stop - start].zero_()
            for part in parts:
                shifted = part.shift(-start)
                shifted.source_view(filled).copy_(shifted.target_view(raw))
            total += run_sums(filled, start)
    return total


def pack_sums(sums: torch.Tensor) -> bytes:
    """Return two sums as 16 bytes: H_0, then H_1, little-endian.

    >>> pack_sums(torch.tensor([1, -1])).hex()
    '0100000000000000ffffffffffffffff'
    """
    return sums.cpu().numpy().astype("<i8").tobytes()
