"""Copies between strided boxes and one contiguous run of memory, with few calls of large operators.

    gather     boxes, one after the other and each in row-major order, into a run: a message that is sent
    scatter    a run into boxes: a message that was received

A call for each small box would cost more than its bytes, so boxes of one shape are copied by one call. A transposed box
is copied in strips: a strip is copied into a small contiguous buffer, and transposed from there. torch transposes a
contiguous matrix block by block, but reads a strided one item by item, and each item from another cache line.
"""

from __future__ import annotations

import torch

from vescale_fsdp.torch_private import foreach_copy_

_STRIP_NUMEL = 1 << 17  # items of a strip: of two bytes, 256 KiB, which stays in a CPU cache
_MIN_STRIP_COLS = 32  # narrower strips would read less than a cache line of each row
# Below this size, torch copies a transposed matrix as fast as any strided one, and a strip costs two calls.
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
    if not is_transposed or box.numel() < _MIN_TRANSPOSED_NUMEL or box.device.type != "cpu":
        out.copy_(box)
    elif box.dim() > 2:  # matrix by matrix
        for part, into in zip(box.unbind(), out.unbind(), strict=True):
            copy_box(part, into)
    else:
        _transpose(box.t(), out)


def _transpose(matrix: torch.Tensor, out: torch.Tensor) -> None:
    """Write the transpose of a matrix with contiguous rows, in strips of columns.

    Args:
        matrix: 2D [rows, cols].
        out: 2D [cols, rows], contiguous.
    """
    rows, cols = matrix.shape
    width = min(max(_STRIP_NUMEL // rows, _MIN_STRIP_COLS), cols)
    buffer = torch.empty(rows, width, dtype=out.dtype, device=out.device)
    # `split`, since a slice costs as much as a quarter of a strip's copy.
    for part, into in zip(matrix.split(width, 1), out.split(width), strict=True):
        # The last strip may be narrower. It needs contiguous memory too.
        strip = buffer if len(into) == width else buffer.view(-1)[: into.numel()].view(rows, len(into))
        strip.copy_(part)
        into.copy_(strip.t())
