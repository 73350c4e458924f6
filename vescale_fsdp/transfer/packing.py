"""Copies between strided boxes and one contiguous run of memory, with few calls of large operators.

    gather     boxes, one after the other and each in row-major order, into a run: a message that is sent
    scatter    a run into boxes: a message that was received

A call for each small box would cost more than its bytes, so boxes of one shape are copied by one call. A transposed box
is copied in tiles: each is copied into a small contiguous buffer, and transposed from there. ``copy_`` transposes item
by item. `torch.channel_shuffle` of one pixel is a transpose too, and has vectorized kernels for items of 1 and 4 bytes.
Items of 2 bytes are transposed in pairs, which are then cut in two.
"""

from __future__ import annotations

import sys

import torch

from vescale_fsdp.torch_private import foreach_copy_

_TILE_BYTES = 256 << 10  # 256 KiB: the tile, its transpose and its place in the run stay in a CPU cache
_TILE_ROWS = 256  # each row of the run gets this many items of a tile: several cache lines
# Below this size, torch copies a transposed matrix as fast as any strided one, and a tile costs several calls.
_MIN_TRANSPOSED_NUMEL = 1 << 14


def gather(boxes: list[torch.Tensor], run: torch.Tensor) -> None:
    """Copy boxes of one shape, or 1D boxes of any sizes, into a run; cast to its dtype.

    Args:
        boxes: at least one, all of one dtype.
        run: 1D, contiguous.
    """
    if len(boxes) == 1:
        copy_box(boxes[0], run.view(boxes[0].shape))
    elif run.dtype is not boxes[0].dtype:
        foreach_copy_(_split(run, boxes), boxes)
    elif boxes[0].dim() == 1:
        torch.cat(boxes, out=run)
    else:
        torch.stack(boxes, out=run.view(len(boxes), *boxes[0].shape))


def scatter(run: torch.Tensor, boxes: list[torch.Tensor]) -> None:
    """Copy a run into boxes, cast to their dtype: the inverse of `gather`."""
    if len(boxes) == 1:
        boxes[0].copy_(run.view(boxes[0].shape))
    else:
        foreach_copy_(boxes, _split(run, boxes))


def _split(run: torch.Tensor, boxes: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return views of a run, each of the shape of a box."""
    if boxes[0].dim() == 1:
        return run.split([box.numel() for box in boxes])
    return run.view(len(boxes), *boxes[0].shape).unbind()


def copy_box(box: torch.Tensor, out: torch.Tensor) -> None:
    """Copy a strided box into contiguous memory of its shape, cast to the memory's dtype."""
    is_transposed = box.dim() > 1 and box.stride(-1) > 1 and box.stride(-2) == 1
    is_small = box.dim() < 2 or box.shape[-2] * box.shape[-1] < _MIN_TRANSPOSED_NUMEL
    if not is_transposed or is_small or box.device.type != "cpu":
        out.copy_(box)
    elif box.dim() > 2:  # matrix by matrix
        for part, into in zip(box.unbind(), out.unbind(), strict=True):
            copy_box(part, into)
    else:
        _transpose(box.t(), out)


def _transpose(matrix: torch.Tensor, out: torch.Tensor) -> None:
    """Write the transpose of a matrix with contiguous rows, tile by tile.

    Args:
        matrix: 2D [rows, cols].
        out: 2D [cols, rows], contiguous.
    """
    height = min(_TILE_ROWS, len(matrix))
    width = _TILE_BYTES // out.itemsize // height
    buffer = torch.empty(height * width, dtype=out.dtype, device=out.device)
    # `split`, since a slice costs as much as a quarter of a tile's copy.
    for rows, into in zip(matrix.split(height), out.split(height, 1), strict=True):
        for tile, target in zip(rows.split(width, 1), into.split(width), strict=True):
            copied = buffer[: tile.numel()].view(tile.shape)
            copied.copy_(tile)
            _transpose_tile(copied, target)


def _transpose_tile(tile: torch.Tensor, out: torch.Tensor) -> None:
    """Write the transpose of a contiguous matrix [rows, cols] into ``out`` [cols, rows], bit for bit."""
    if tile.itemsize in _VECTORIZED:
        kind = _VECTORIZED[tile.itemsize]
        out.view(kind).copy_(_shuffled(tile.view(kind)))
    elif tile.itemsize == 2 and tile.shape[1] % 2 == 0 and sys.byteorder == "little":
        pairs = _shuffled(tile.view(torch.float32)).view(
            torch.int32
        )  # [cols / 2, rows], two columns in each item
        halves = out.view(torch.int16)
        halves[0::2].copy_(pairs)  # casts of integers keep the low bits
        halves[1::2].copy_(pairs.bitwise_right_shift_(16))
    else:
        out.copy_(tile.t())


_VECTORIZED = {1: torch.uint8, 4: torch.float32}  # dtypes of the vectorized kernels, by bytes of an item


def _shuffled(tile: torch.Tensor) -> torch.Tensor:
    """Return the transpose of a contiguous matrix, contiguous: its items are the channels of one pixel."""
    rows, cols = tile.shape
    numel = tile.numel()
    channels_last = tile.as_strided(
        (1, numel, 1, 1), (numel, 1, numel, numel)
    )  # the layout with such kernels
    return torch.channel_shuffle(channels_last, rows).view(cols, rows)
