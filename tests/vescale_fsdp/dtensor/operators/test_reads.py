"""Reads that gather: views, products and slices of sharded parameters are those of plain tensors; so are gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.support.distributed import cpu_mesh, run_ranks, run_threads
from tests.support.dtensor_conformance import plain
from tests.vescale_fsdp.dtensor.operators.test_combining import SHAPE, cuts
from vescale_fsdp import RaggedDTensor, RaggedShard, distribute_tensor

READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum of a transpose": lambda p: p.T.sum(0),
    "transpose": lambda p: p.t() * 2,
    "column": lambda p: p[:, 0],
    "columns": lambda p: p[:, 1:3].abs().amax(1),
    "element": lambda p: p[3, 4] * 2,
    "trace of a product": lambda p: (p @ p.T).trace(),
    "halves of columns": lambda p: torch.cat(list(p.chunk(2, dim=1))[::-1], dim=1),
    "diagonal": lambda p: p.diagonal().square().sum(),
    "reshaped transpose": lambda p: p.t().reshape(4, 12),
    "with itself": lambda p: p.t()[:, :6] + p[:6],
    "square": lambda p: p[:6] + p[:6].t(),
    "steps": lambda p: p[::2].norm(),
    "expanded": lambda p: p.unsqueeze(0).expand(2, *SHAPE).sum((0, 1)),
}
# Terms of a loss written by hand, next to those above.
TERMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "decay": lambda p: p.square().sum(),
    "norms of rows": lambda p: p.norm(dim=1),
    "norms of columns": lambda p: p.norm(dim=0),
    "orthogonality": lambda p: (p.T @ p - p.new_ones((6, 6))).square().mean(),
    "largest of rows": lambda p: p.amax(1),
    "largest of columns": lambda p: p.amax(0),
    "mean of rows": lambda p: (p - p.mean(1, keepdim=True)).square(),
    "normalized columns": lambda p: p / p.norm(dim=0, keepdim=True),
    "normalized rows": lambda p: p / p.norm(dim=1, keepdim=True),
    "softmax": lambda p: p.softmax(1)[:, 2],
    "spread": lambda p: p.std(0) + p.var(0),
    "smooth maximum": lambda p: p.logsumexp(0),
    "used twice": lambda p: p[:, 0] * p.sum(1) + p.square().mean(1),
}


# torch's own DTensors have no backward of trace.
VALUES_ALONE = {"trace of a product"}


def whole(value: Any) -> torch.Tensor:
    found = value.full_tensor() if isinstance(value, DTensor) else value
    assert isinstance(found, torch.Tensor)
    return found


def read(num_ranks: int) -> int:
    """Values and gradients of every read and term, for every cut."""
    mesh, compared = cpu_mesh(), 0
    for name, fn in {**READS, **TERMS}.items():
        for cut in cuts(num_ranks).values():
            p = torch.nn.Parameter(distribute_tensor(plain(SHAPE), mesh, [cut]))
            q = torch.nn.Parameter(plain(SHAPE))
            for attempt in range(2):  # the second gradient is added to the first
                got, want = fn(p), fn(q)
                torch.testing.assert_close(
                    whole(got).detach(), want.detach(), msg=lambda t, n=name: f"{n}: {t}"
                )
                if name in VALUES_ALONE:
                    continue
                weight = plain(tuple(want.shape), attempt).cos()
                (whole(got) * weight).sum().backward()
                (want * weight).sum().backward()
            compared += 1
            if name in VALUES_ALONE:
                continue
            assert isinstance(p.grad, RaggedDTensor) and p.grad.placements == p.placements, name
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=lambda t, n=name: f"{n}: {t}")
    return compared


@pytest.mark.filterwarnings("ignore::vescale_fsdp.errors.GatherWarning")
@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.part("numerics"))])
def test_reads_are_those_of_plain_tensors(num_ranks: int) -> None:
    """Values are equal, and gradients are equal and cut like the parameter, whatever its cut."""
    assert run_ranks(num_ranks, read, num_ranks) == [4 * (len(READS) + len(TERMS))] * num_ranks


def integer_extremes() -> tuple[int, int]:
    cut = RaggedShard.from_piece_numels((4,), [4, 0])
    x = distribute_tensor(torch.tensor([-3, -2, -7, -5]), cpu_mesh(), [cut])
    y = distribute_tensor(torch.tensor([3, 2, 7, 5]), cpu_mesh(), [cut])
    return int(x.max().full_tensor()), int(y.min().full_tensor())


def test_an_empty_piece_does_not_change_an_integer_extreme() -> None:
    """A rank without elements adds the least or the largest integer, not a zero."""
    assert run_threads(2, integer_extremes) == [(-2, 2)] * 2
