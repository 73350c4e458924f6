"""Byte sums: 16 bytes of a tensor that are equal wherever its bytes are, and that can be added up from its parts.

The bytes of a tensor in row-major order are signed numbers x of 8 bits; byte i is in row ``r = i >> 12`` and column
``c = i & 4095``. A tensor has two sums, for k = 0 and 1, modulo 2**64:

    H_k = sum over r of B_k[r] * sum over c of x * W_k[c]

The sums are linear in the bytes: the sums of a tensor are the sum of those of its parts, in any order and for any cut,
and a change of some bytes changes them by the sums of the difference. Each rank therefore computes its part, and one
all-reduce of 16 bytes gives the sums of the whole tensor. FORMAT.md of `checkpoint` is the specification.

The weights W have 8 digits of 7 bits, so that a row's sums are a product of matrices of int8, which processors compute
fast: 16 products per byte, at 6 GiB/s on one core with AVX512-VNNI. A digit is between -64 and 63: kernels for
processors without VNNI add two products in 16 bits, and float32 represents the sums of 2,048 products exactly.

A change within one row is missed by one sum with a chance of at most 2**-56, so by both with 2**-112. For changes of
several rows the bounds are 2**-51 and 2**-102: the B of two rows may cancel out in the upper bits of a column's factor.
The tables are public, so whoever wants to can construct two tensors with equal sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache, lru_cache

import numpy as np
import torch

from vescale_fsdp.layout.region import Copy, Region, overlaps, whole_region
from vescale_fsdp.torch_modes import int8_matmul

ROW_BYTES = 1 << 12  # 4 KiB
_CHUNK_ROWS = 1024  # rows that are multiplied at a time: 4 MiB
_CHUNK_BYTES = _CHUNK_ROWS * ROW_BYTES
_DIGITS, _DIGIT_BITS = 8, 7  # of a weight
_EXACT_BYTES = (
    1 << 11
)  # so many products of a byte and a digit add up to at most 2**24, the last exact float32
_WINDOW_BYTES = {
    "cpu": 1 << 20
}  # stays in the cache; `_CHUNK_BYTES` on a device, which then runs few kernels
_LONG_RUN_BYTES = 64 << 10  # runs of at least this size are summed one by one, shorter ones window by window


def splitmix64(counters: np.ndarray) -> np.ndarray:
    """Return number ``counters`` of the splitmix64 sequence with seed 0; both arrays are of uint64.

    >>> hex(splitmix64(np.array([0], np.uint64))[0])
    '0xe220a8397b1dcdaf'
    """
    state = (counters + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


@cache
def _digits(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return the digits of W_0 and then of W_1, the lowest first, of shape (4096, 16): 64 KiB of int8."""
    mixed = splitmix64(np.arange(2 * ROW_BYTES, dtype=np.uint64)).reshape(2, ROW_BYTES, 1)
    shifts = np.arange(_DIGITS, dtype=np.uint64) * np.uint64(_DIGIT_BITS)
    digits = ((mixed >> shifts) & np.uint64(127)).astype(np.int8) - np.int8(64)
    flat = np.ascontiguousarray(digits.transpose(1, 0, 2)).reshape(ROW_BYTES, 2 * _DIGITS)
    return torch.from_numpy(flat).to(device, dtype)


@cache
def _powers(device: torch.device) -> torch.Tensor:
    """Return the factors of a weight's digits."""
    return torch.tensor([1 << _DIGIT_BITS * j for j in range(_DIGITS)], dtype=torch.int64, device=device)


@cache
def _weights(device: torch.device) -> torch.Tensor:
    """Return W_0 and W_1, of shape (2, 4096): 64 KiB."""
    return _joined(_digits(device, torch.int64)).t().contiguous()


@lru_cache(maxsize=64)  # most tensors have the first rows
def _row_factors(chunk: int, device: torch.device) -> torch.Tensor:
    """Return B_0 and B_1 of the rows of one chunk, of shape (1024, 2)."""
    rows = np.arange(chunk * _CHUNK_ROWS, (chunk + 1) * _CHUNK_ROWS, dtype=np.uint64)
    mixed = splitmix64(np.stack([rows + np.uint64((k + 1) << 48) for k in range(2)], axis=1)) | np.uint64(1)
    return torch.from_numpy(mixed.view(np.int64)).to(device)


def run_sums(raw: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Return what a run of consecutive bytes adds to the two sums of its tensor.

    Temporary memory is 128 KiB on a processor with AVX2, and 16 MiB elsewhere. Nothing waits for a device.

    Args:
        raw: the bytes, 1D contiguous uint8 on any device, at any address.
        start: offset of the first byte in the tensor's row-major bytes; any number.

    Returns:
        Two int64 numbers, on the device of ``raw``: the sums modulo 2**64, as signed numbers.
    """
    numbers, stop = raw.view(torch.int8), start + raw.numel()
    total = torch.zeros(2, dtype=torch.int64, device=raw.device)
    at = start
    while at < stop:
        row, column = divmod(at, ROW_BYTES)
        if column or stop - at < ROW_BYTES:
            end = min(stop, at - column + ROW_BYTES)
            lines = _part_sums(numbers[at - start : end - start], column)
        else:
            end = min(at - at % _CHUNK_BYTES + _CHUNK_BYTES, stop - stop % ROW_BYTES)
            lines = _row_sums(numbers[at - start : end - start].view(-1, ROW_BYTES))
        chunk, first = divmod(row, _CHUNK_ROWS)
        total += (lines * _row_factors(chunk, raw.device)[first : first + lines.shape[0]]).sum(0)
        at = end
    return total


def _part_sums(numbers: torch.Tensor, column: int) -> torch.Tensor:
    """Return the two sums over c of a part of one row, before the multiplication by B, of shape (1, 2)."""
    weights = _weights(numbers.device)[:, column : column + numbers.numel()]
    return (weights * numbers.to(torch.int64)).sum(1).view(1, 2)


def bytes_sums(raw: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return what single bytes, such as those of changed items, add to the two sums of their tensor.

    Args:
        raw: the bytes, 1D uint8.
        places: int64, offset of each byte in the tensor's row-major bytes, in any order.

    Returns:
        As `run_sums`.
    """
    if not raw.numel():
        return torch.zeros(2, dtype=torch.int64, device=raw.device)
    rows, columns = places // ROW_BYTES, places % ROW_BYTES
    first, last = (int(row) // _CHUNK_ROWS for row in rows.aminmax())
    factors = torch.cat([_row_factors(chunk, raw.device) for chunk in range(first, last + 1)])
    products = _weights(raw.device).index_select(1, columns) * raw.view(torch.int8).to(torch.int64)
    return (products * factors.index_select(0, rows - first * _CHUNK_ROWS).t()).sum(1)


@cache
def _has_int8_kernels() -> bool:
    """Return whether the host's processor multiplies matrices of int8 fast; torch has a plain loop for others."""
    return torch.backends.mkldnn.is_available() and "AVX" in torch.backends.cpu.get_cpu_capability()


def _row_sums(rows: torch.Tensor) -> torch.Tensor:
    """Return the two sums over c of whole rows, before the multiplication by B, of shape (number of rows, 2)."""
    device = rows.device
    if device.type == "cpu" and _has_int8_kernels():
        return _joined(int8_matmul(rows, _digits(device, torch.int8)))
    digits, total = _digits(device, torch.float32), None
    for start in range(0, ROW_BYTES, _EXACT_BYTES):
        columns = slice(start, start + _EXACT_BYTES)
        part = torch.empty((rows.shape[0], digits.shape[1]), dtype=torch.float32, device=device)
        # With ``out``, autocast does not round the result to 16 bits. Rounded factors would be exact.
        torch.mm(rows[:, columns].to(torch.float32), digits[columns], out=part)
        total = part.to(torch.int64) if total is None else total.add_(part.to(torch.int64))
    assert total is not None
    return _joined(total)


def _joined(digits: torch.Tensor) -> torch.Tensor:
    """Return the int64 numbers with these digits, of shape (any, 2)."""
    return (digits.view(-1, 2, _DIGITS) * _powers(digits.device)).sum(2)


def region_sums(raw: torch.Tensor, region: Region, shape: tuple[int, ...], itemsize: int) -> torch.Tensor:
    """Return what a region adds to the two sums of its tensor.

    A region that is strided in the tensor, such as one of ``Shard(1)``, is copied window by window between zeros.

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
    step = _WINDOW_BYTES.get(raw.device.type, _CHUNK_BYTES)
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
