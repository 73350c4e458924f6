"""The blocks of many parameters in one step, those of one size as a stack: an operator is one launch for all of them.

    lines      of a parameter, [lines of the piece, cols]: gradient, averaged gradient, grafted direction, update
    area       blocks of one size side by side in them (`factor_grid`), cut so that a stack is of bounded size
    stack      [n, height, width] copies of all areas of one size: what the arithmetic works on (`block_math`)

Copies into and out of stacks are what is left per parameter. On the CPU a stack is one block: no operator has to be
launched there, and how many matrices are multiplied at once may show in the last bit, so also on how many ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from vescale_fsdp.optim.shampoo.block_math import accumulate, graft, inverse_roots
from vescale_fsdp.optim.shampoo.factor_grid import BlockArea
from vescale_fsdp.optim.structured_optimizer import batches_of, launches
from vescale_fsdp.torch_private import foreach_copy_

_STACK_NUMEL = 4 << 20
"""Elements of a stack of factors, 16 MiB in fp32; about a dozen such are there at once, eigenvectors and all."""


class BlockJob(NamedTuple):
    """One parameter in one step."""

    areas: Sequence[BlockArea]
    lines: tuple[torch.Tensor, ...]  # gradient, averaged gradient, grafted direction: [lines, cols] each
    update: torch.Tensor  # the same, to be written
    factors: Mapping[
        str, tuple[torch.Tensor, torch.Tensor]
    ]  # by side: factors, roots [bands, columns, side, side]


def write_directions(jobs: Sequence[BlockJob], step: int, group: Mapping[str, Any]) -> None:
    """Update the factors of all blocks and, when due, their roots; write the blocks' directions."""
    found = (
        ((len(job.factors), part.height, part.width), part.numel, (job, part))
        for job in jobs
        for area in job.areas
        for part in area.parts(_blocks_at_once(area, job.update.device))
    )
    for alike in batches_of(found, _STACK_NUMEL if launches(jobs[0].update.device) else 0):
        _write_alike(alike, step, group)


def _blocks_at_once(area: BlockArea, device: torch.device) -> int:
    return max(1, _STACK_NUMEL // area.side_numel) if launches(device) else 1


def _write_alike(alike: Sequence[tuple[BlockJob, BlockArea]], step: int, group: Mapping[str, Any]) -> None:
    beta2, start, every = group["betas"][1], group["start_step"], group["update_every"]
    due = step == start or (step > start and step % every == 0)
    grads, averages, plain = (
        _stacked([_blocks_of(job.lines[which], area) for job, area in alike]) for which in range(3)
    )
    directions = averages
    sides = tuple(alike[0][0].factors)
    for side in sides:
        factors, roots = (
            [_factors_of(job.factors[side][which], area, side) for job, area in alike] for which in range(2)
        )
        stack = _stacked(factors)
        accumulate(stack, grads if side == "left" else grads.mT, beta2)
        foreach_copy_(factors, _as_areas(stack, factors))
        if step < start:
            continue
        current = _stacked(roots)
        if due:
            unbiased = stack.div_(1 - beta2**step) if beta2 < 1 else stack
            degree = 2 * len(sides)
            current = inverse_roots(unbiased, current, degree, group["eps"], group["relative_eps"])
            foreach_copy_(roots, _as_areas(current, roots))
        directions = torch.bmm(current, directions) if side == "left" else torch.bmm(directions, current)
    if step < start:
        directions = plain
    elif group["grafting"] == "adam":
        directions = graft(directions, plain)
    updates = [_blocks_of(job.update, area) for job, area in alike]
    foreach_copy_(updates, _as_areas(directions, updates))


# -- areas as [bands, columns, height, width] views, and stacks of them ------------------------------------


def _blocks_of(lines: torch.Tensor, area: BlockArea) -> torch.Tensor:
    rows = lines.narrow(0, area.top, area.bands * area.height)
    cut = rows.narrow(1, area.left, area.columns * area.width)
    return (
        cut.unflatten(1, (area.columns, area.width)).unflatten(0, (area.bands, area.height)).transpose(1, 2)
    )


def _factors_of(factors: torch.Tensor, area: BlockArea, side: str) -> torch.Tensor:
    size = area.height if side == "left" else area.width
    cut = factors.narrow(0, area.band, area.bands).narrow(1, area.column, area.columns)
    return cut[..., :size, :size]


def _stacked(areas: Sequence[torch.Tensor]) -> torch.Tensor:
    """Contiguous copies: matrix products may round otherwise for other strides, and these depend on the cut."""
    stack = areas[0].new_empty(sum(each.shape[0] * each.shape[1] for each in areas), *areas[0].shape[2:])
    foreach_copy_(_as_areas(stack, areas), list(areas))
    return stack


def _as_areas(stack: torch.Tensor, areas: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The parts of a stack that belong to areas, shaped as they are."""
    counts = [each.shape[0] * each.shape[1] for each in areas]
    return [part.view(each.shape) for part, each in zip(stack.split(counts), areas, strict=True)]
