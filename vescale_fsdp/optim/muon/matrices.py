"""The matrices of a parameter: what one Newton-Schulz iteration works on. Integers only.

    shape (m, k)                      one matrix, the whole tensor
    shape (m, k), row_splits (q, r)   one per row block: fused projections, each with its own scale
    shape (E, m, k)                   one per expert

Every matrix is one flat range of the tensor, because rows are contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from vescale_fsdp.errors import LayoutError
from vescale_fsdp.layout.geometry import FlatRange


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix of ``rows`` x ``cols`` elements that starts at flat index ``start`` of its parameter."""

    start: int
    rows: int
    cols: int

    @property
    def numel(self) -> int:
        """Elements of the matrix."""
        return self.rows * self.cols

    @property
    def range(self) -> FlatRange:
        """Its flat range in the parameter."""
        return FlatRange(self.start, self.start + self.numel)


def matrices_of(shape: tuple[int, ...], row_splits: tuple[int, ...] | None = None) -> tuple[Matrix, ...]:
    """The matrices of a parameter, in flat order. Empty ones are left out.

    Args:
        shape: global shape, 2-D or 3-D (a stack of matrices).
        row_splits: rows of each block of a fused matrix, such as (q_rows, k_rows, v_rows); None: one block.

    Raises:
        LayoutError: for other numbers of dims, or splits that do not add up to the rows.
    """
    if len(shape) not in (2, 3):
        raise LayoutError(
            "Only matrices and stacks of matrices can be orthogonalised.",
            expected="a shape of 2 dims, or of 3 (experts, rows, columns)",
            got=f"shape {shape}",
            todo="pass this parameter in adamw_params=[...]",
        )
    rows, cols = shape[-2:]
    heights = row_splits if row_splits is not None else (rows,)
    if sum(heights) != rows or min(heights) < 0:
        raise LayoutError(
            "row_splits do not cut the matrix.",
            expected=f"row counts that add up to {rows}",
            got=f"{heights}, which add up to {sum(heights)}",
            where=f"parameter of shape {shape}",
            todo="give the rows of each fused projection, in order",
        )
    tops = (0, *accumulate(heights))
    stack = range(shape[0]) if len(shape) == 3 else range(1)
    return tuple(
        Matrix((index * rows + top) * cols, height, cols)
        for index in stack
        for top, height in zip(tops, heights, strict=False)
        if height * cols
    )
