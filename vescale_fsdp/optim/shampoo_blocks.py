"""Blocks of Shampoo: the grid of a parameter, the arithmetic of a stack of blocks, and copies into and out of stacks.

A matrix is divided into blocks of at most b x b. A *band* is one row of blocks. A tensor of factors is indexed by the
block's band and column, so the factor of block (i, j) has the same index for any number of ranks::

    shape (5, 7), b = 4                left (2, 2, 4, 4)      right (2, 2, 4, 4)
      band 0   A A A A B B B           A: 4 x 4   B: 4 x 4    A: 4 x 4   B: 3 x 3
               ...4 rows                (only the corner of the block's height or width is used, the rest stays 0)
      band 1   C C C C D D D           C: 1 x 1   D: 1 x 1    C: 4 x 4   D: 3 x 3

Stacks (E, m, k) have ceil(m / b) bands per matrix. A vector is a matrix of one column, with blocks of b rows and left
factors only.

For the gradient G of a block, the factors are L <- b2 L + (1 - b2) G G' and R <- b2 R + (1 - b2) G' G (b2 = 1: plain
sums). The direction is L^(-1/4) M R^(-1/4), where M is the averaged gradient (for vectors: L^(-1/2) M). See Gupta et
al., arXiv 1802.09568; grafting and the choice of roots are those of arXiv 2309.06497.

Blocks of one size, over all parameters of a step, are computed as a stack, so that an operator is one launch for all
blocks:

    lines      [lines of the piece, cols] of a parameter: gradient, averaged gradient, Adam's direction, update
    area       adjacent blocks of one size in the lines, no more than fit into a stack
    stack      [n, height, width], copies of the blocks of all areas with this block size

Only copies into and out of stacks are launched per parameter. On the CPU a stack is one block. There are no launches to
save, and the number of matrices in a product may change the last bit, which would then depend on the number of ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch

from vescale_fsdp.errors import LayoutError, callers_level
from vescale_fsdp.layout.geometry import Range
from vescale_fsdp.layout.granularity import Flat, Granularity, Rows, Whole
from vescale_fsdp.optim.structured_optimizer import batches_of, launches
from vescale_fsdp.torch_private import foreach_copy_, foreach_norm_of


class BlockArea(NamedTuple):
    """A box of a piece's lines and columns: adjacent blocks of one size, with their factors' indices in the state."""

    top: int  # first line, counted from the start of the piece
    left: int  # first column
    height: int  # rows of a block
    width: int  # columns of a block
    band: int  # the area's first band, counted from the first band of the piece
    column: int  # the area's first column of blocks
    bands: int = 1  # number of bands
    columns: int = 1  # number of columns of blocks

    @property
    def side_numel(self) -> int:
        """Number of elements of the larger of a block's two factors; at least that of the block."""
        return max(self.height, self.width) ** 2

    @property
    def numel(self) -> int:
        """Number of elements of the larger factors of all blocks, which bounds the memory of a stack."""
        return self.bands * self.columns * self.side_numel

    def parts(self, most_blocks: int) -> Iterator[BlockArea]:
        """Split the area into areas of at most ``most_blocks`` blocks."""
        # As many whole bands as fit, or a part of one band.
        columns = min(self.columns, most_blocks)
        bands = most_blocks // columns
        for band in range(0, self.bands, bands):
            for column in range(0, self.columns, columns):
                yield self._replace(
                    top=self.top + band * self.height,
                    left=self.left + column * self.width,
                    band=self.band + band,
                    column=self.column + column,
                    bands=min(bands, self.bands - band),
                    columns=min(columns, self.columns - column),
                )


@dataclass(frozen=True)
class FactorGrid:
    """The division of ``stack`` matrices of ``rows`` x ``cols`` into blocks of at most ``block`` x ``block``.

    Args:
        order: number of factors per block: 2 for matrices, 1 for vectors.
    """

    stack: int
    rows: int
    cols: int
    block: int
    order: int

    @property
    def bands_per_matrix(self) -> int:
        """Number of bands in one matrix."""
        return -(-self.rows // self.block)

    @property
    def period(self) -> int:
        """Number of elements after which band boundaries repeat: a band, or a matrix if its last band is short."""
        # With a single matrix, a short last band is followed by no other band.
        even = self.stack == 1 or self.rows % self.block == 0
        return (self.block if even else self.rows) * self.cols

    @property
    def num_columns(self) -> int:
        """Number of blocks in a band."""
        return -(-self.cols // self.block)

    @property
    def factor_shapes(self) -> dict[str, tuple[int, int, int, int]]:
        """Shapes of the tensors of left factors and, for matrices, right factors: [band, column, side, side]."""
        lines = {"left": self.rows, "right": self.cols} if self.order == 2 else {"left": self.rows}
        blocks = (self.stack * self.bands_per_matrix, self.num_columns)
        # A factor is never larger than the matrix.
        return {side: (*blocks, min(self.block, n), min(self.block, n)) for side, n in lines.items()}

    def band_start(self, band: int) -> int:
        """Return the flat index of a band's first element; for the band after the last one, the end of the tensor."""
        matrix, index = divmod(band, self.bands_per_matrix)
        return (matrix * self.rows + index * self.block) * self.cols

    def bands_in(self, piece: Range) -> range:
        """Return the numbers of the bands of a piece.

        Raises:
            LayoutError: if the piece begins or ends inside a band.
        """
        if not piece.numel:
            return range(0)
        first, last = self._band_at(piece.start), self._band_at(piece.stop)
        if self.band_start(first) != piece.start or self.band_start(last) != piece.stop:
            raise LayoutError(
                "A rank boundary cuts a Shampoo block.",
                expected=f"cuts between blocks of {self.block} rows of {self.cols}",
                got=f"[{piece.start}, {piece.stop})",
                where=f"{self.stack} matrices of {self.rows} x {self.cols}",
                todo="keep blocks whole when sharding: fully_shard(model, granularity="
                f"Shampoo.granularity(block_size={self.block})), or pass the parameter in adamw_params=[...]",
            )
        return range(first, last)

    def _band_at(self, start: int) -> int:
        """Return the last band that begins at or before a flat index."""
        matrix, line = divmod(start // self.cols, self.rows)
        return matrix * self.bands_per_matrix + line // self.block

    def areas_in(self, piece: Range) -> Iterator[BlockArea]:
        """Yield the areas that cover the blocks of a piece. Adjacent blocks of equal height and width form one area."""
        top = first = 0
        last_height = self.rows - (self.bands_per_matrix - 1) * self.block
        heights = (
            last_height if band % self.bands_per_matrix == self.bands_per_matrix - 1 else self.block
            for band in self.bands_in(piece)
        )
        for height, alike in groupby(heights):
            bands = len(list(alike))
            whole, rest = divmod(self.cols, self.block)
            # Blocks of full width, then the last column of blocks if it is narrower.
            for column, width, columns in ((0, self.block, whole), (whole, rest, min(1, rest))):
                if columns:
                    yield BlockArea(top, column * self.block, height, width, first, column, bands, columns)
            top, first = top + bands * height, first + bands


def factor_grid_of(shape: tuple[int, ...], block: int) -> FactorGrid:
    """Return the grid of blocks of a parameter with this global shape.

    Raises:
        LayoutError: if the shape does not have 1, 2 or 3 dims, or is empty.
    """
    if len(shape) not in (1, 2, 3) or 0 in shape:
        raise LayoutError(
            "Shampoo supports only non-empty vectors, matrices and stacks of matrices.",
            expected="a non-empty shape of 1, 2 or 3 dims",
            got=f"shape {shape}",
            todo="pass this parameter in adamw_params=[...]",
        )
    if len(shape) == 1:
        return FactorGrid(1, shape[0], 1, block, 1)
    return FactorGrid(shape[0] if len(shape) == 3 else 1, shape[-2], shape[-1], block, 2)


def granularity_of(shape: tuple[int, ...], block: int) -> Granularity:
    """Return the granularity that keeps the bands of a parameter whole."""
    if len(shape) == 1:
        return Flat(block)
    # Rows(b) counts rows across all matrices of a stack. So if b does not divide a matrix's rows, its cuts would be
    # inside of bands.
    if len(shape) == 3 and shape[-2] % block:
        return Whole("matrix")
    return Rows(block)


def inverse_roots(
    factors: torch.Tensor, last: torch.Tensor, root: int, eps: float, relative_eps: float
) -> torch.Tensor:
    """Compute ``factor ** (-1 / root)`` of symmetric positive semi-definite matrices by their eigenvalues.

    Eigenvalues below ``max(eps, relative_eps * largest)`` are raised to this bound; larger eigenvalues do not change.

    Args:
        factors: the matrices, [n, side, side].
        last: the previous roots. A matrix whose decomposition does not converge keeps its previous root, with a
            warning.
        root: degree of the inverse root.
        eps: absolute lower bound of the eigenvalues, for matrices of zeros.
        relative_eps: lower bound of the eigenvalues, as a fraction of the largest eigenvalue of the matrix.

    Returns:
        The roots; NaN for a matrix that is not finite, so that a bad gradient is as visible as in AdamW.
    """
    finite = factors.isfinite().flatten(1).all(1).view(-1, 1, 1)
    # A matrix that is not finite would make the decomposition of the whole stack fail, so an identity replaces it. By
    # torch.where, because selecting such matrices by an index would make the host wait for the device.
    identity = torch.eye(factors.shape[-1], dtype=factors.dtype, device=factors.device)
    solvable = torch.where(finite, factors, identity)
    try:
        roots = _roots(solvable, root, eps, relative_eps)
    except torch.linalg.LinAlgError:  # decompose one by one, to know which matrices do not converge
        each_root = []
        for factor, last_root in zip(solvable.split(1), last.split(1), strict=True):
            try:
                each_root.append(_roots(factor, root, eps, relative_eps))
            except torch.linalg.LinAlgError:
                warnings.warn(
                    "Shampoo: eigh did not converge; the block keeps its last inverse root",
                    stacklevel=callers_level(),
                )
                each_root.append(last_root)
        roots = torch.cat(each_root)
    return torch.where(finite, roots, torch.nan)


def _roots(factors: torch.Tensor, root: int, eps: float, relative_eps: float) -> torch.Tensor:
    """Compute inverse roots of finite matrices; raises LinAlgError if any decomposition does not converge."""
    # In fp32 the decomposition has an error of about 1e-7 of the largest eigenvalue. The eigenvalues of a factor's null
    # space consist of this error, and the power of -1/4 makes them the largest entries of the root: with two BLAS
    # libraries, results differed by 100 %. So the decomposition is in fp64, and such eigenvalues are raised to one
    # bound (adding a constant instead would keep their rounding). Only the factor's own rounding remains.
    values, vectors = torch.linalg.eigh(factors.double())
    floor = (values[:, -1:] * relative_eps).clamp_min(eps)
    values = torch.maximum(values, floor)
    return torch.bmm(vectors * values.pow(-1.0 / root).unsqueeze(1), vectors.mT).to(factors.dtype)


_STACK_NUMEL = 4 << 20
"""Maximum elements of a stack of factors, 16 MiB in fp32. A step has about a dozen such tensors at a time."""


class BlockJob(NamedTuple):
    """This rank's blocks of a parameter in one step, with the tensors to read and to write."""

    areas: Sequence[BlockArea]
    lines: tuple[torch.Tensor, ...]  # gradient, averaged gradient, Adam's direction: [lines, cols] each
    update: torch.Tensor  # [lines, cols], the blocks' directions; written by `write_directions`
    # For each side, "left" and, for matrices, "right": factors and roots, [bands, columns, side, side] each.
    factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]]


def write_directions(jobs: Sequence[BlockJob], step: int, group: Mapping[str, Any]) -> None:
    """Update the factors of all blocks and, every ``update_every`` steps, their roots; write the blocks' directions.

    Args:
        step: number of this step, from 1.
        group: the param group, whose options all jobs share.
    """
    # On the CPU a stack is one block (limits 1 and 0 below), so that bits do not depend on the number of ranks.
    items = (
        ((len(job.factors), part.height, part.width), part.numel, (job, part))
        for job in jobs
        for area in job.areas
        for part in area.parts(max(1, _STACK_NUMEL // area.side_numel) if launches(job.update.device) else 1)
    )
    for alike in batches_of(items, _STACK_NUMEL if launches(jobs[0].update.device) else 0):
        _write_alike(alike, step, group)


def _write_alike(alike: Sequence[tuple[BlockJob, BlockArea]], step: int, group: Mapping[str, Any]) -> None:
    """Do the work of `write_directions` for areas whose blocks have one size, as one stack."""
    beta2, start, every = group["betas"][1], group["start_step"], group["update_every"]
    # At `start` too, which need not be a multiple of `every`.
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
        rows = grads if side == "left" else grads.mT
        products = torch.bmm(rows, rows.mT)
        if beta2 == 1.0:
            stack.add_(products)
        else:
            stack.mul_(beta2).add_(products, alpha=1 - beta2)
        foreach_copy_(factors, _as_areas(stack, factors))
        if step < start:  # factors are collected, but not used yet
            continue
        current = _stacked(roots)
        if due:
            # In place, since the factors were already copied back from the stack.
            unbiased = stack.div_(1 - beta2**step) if beta2 < 1 else stack
            degree = 2 * len(sides)  # 4 for matrices, 2 for vectors
            current = inverse_roots(unbiased, current, degree, group["eps"], group["relative_eps"])
            foreach_copy_(roots, _as_areas(current, roots))
        directions = torch.bmm(current, directions) if side == "left" else torch.bmm(directions, current)
    if step < start:
        directions = plain
    elif group["grafting"] == "adam":
        # One norm per block, over all its elements: the rounding of a norm of the stack over two dims would depend on
        # the size of the stack. 1e-16 avoids a division by zero.
        norms, targets = (torch.stack(foreach_norm_of(list(each.unbind()))) for each in (directions, plain))
        directions = directions * (targets / (norms + 1e-16)).view(-1, 1, 1)
    updates = [_blocks_of(job.update, area) for job, area in alike]
    foreach_copy_(updates, _as_areas(directions, updates))


# -- views of areas, and stacks of their blocks ------------------------------------------------------------


def _blocks_of(lines: torch.Tensor, area: BlockArea) -> torch.Tensor:
    """Return a view of the blocks of an area, [bands, columns, height, width]."""
    rows = lines.narrow(0, area.top, area.bands * area.height)
    cut = rows.narrow(1, area.left, area.columns * area.width)
    return (
        cut.unflatten(1, (area.columns, area.width)).unflatten(0, (area.bands, area.height)).transpose(1, 2)
    )


def _factors_of(factors: torch.Tensor, area: BlockArea, side: str) -> torch.Tensor:
    """Return a view of the factors of an area's blocks: for small blocks, only the used corner of each factor."""
    size = area.height if side == "left" else area.width
    cut = factors.narrow(0, area.band, area.bands).narrow(1, area.column, area.columns)
    return cut[..., :size, :size]


def _stacked(areas: Sequence[torch.Tensor]) -> torch.Tensor:
    """Copy the blocks of all areas to a contiguous stack. With views, rounding would depend on the shards' strides."""
    stack = areas[0].new_empty(sum(each.shape[0] * each.shape[1] for each in areas), *areas[0].shape[2:])
    foreach_copy_(_as_areas(stack, areas), list(areas))
    return stack


def _as_areas(stack: torch.Tensor, areas: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of a stack's blocks, one per area and with the area's shape."""
    counts = [each.shape[0] * each.shape[1] for each in areas]
    return [part.view(each.shape) for part, each in zip(stack.split(counts), areas, strict=True)]
