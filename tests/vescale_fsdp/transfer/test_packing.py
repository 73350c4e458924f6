"""Copies between strided boxes and runs: the values, and how many operators they take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vescale_fsdp.transfer.packing import gather, scatter


class Counted(TorchDispatchMode):
    """Counts operators that copy."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.copies += any(word in str(func) for word in ("copy", "cat", "stack"))
        return func(*args, **(kwargs or {}))


def box(sizes: tuple[int, ...], strides: tuple[int, ...], start: int, dtype: torch.dtype) -> torch.Tensor:
    """A box of a tensor that has other items around it."""
    items = torch.arange(start + sum(size * step for size, step in zip(sizes, strides, strict=True)) + 1)
    return (items % 251).to(dtype).as_strided(sizes, strides, start)


CASES = {
    "rows": ((300, 70), (100, 1)),
    "transposed": ((300, 170), (1, 400)),
    "transposed, a tile and a part of one": ((4101, 265), (1, 4200)),
    "transposed experts": ((3, 200, 150), (70_000, 1, 300)),
    "transposed and high": ((40, 9000), (1, 40)),
    "every second item": ((300, 70), (200, 2)),
    "small": ((3, 4), (1, 3)),
    "vector": ((500,), (3,)),
}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_all_bits_are_kept(case: str, dtype: torch.dtype) -> None:
    """Items of any width, of random bits: NaN with payloads, subnormal numbers and negative zero included."""
    sizes, strides = CASES[case]
    numel = 1 + sum(size * step for size, step in zip(sizes, strides, strict=True))
    bits = torch.randint(256, (numel * dtype.itemsize,), dtype=torch.uint8)
    one = bits.view(dtype).as_strided(sizes, strides)
    run = torch.zeros(one.numel(), dtype=dtype)
    gather([one], run)
    numbers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    assert run.view(numbers).equal(one.view(numbers).reshape(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_boxes_and_runs(case: str, dtype: torch.dtype) -> None:
    """One box or several, to a run of another dtype or of the same one, and back."""
    sizes, strides = CASES[case]
    for count in (1, 3):
        boxes = [box(sizes, strides, number, torch.bfloat16) for number in range(count)]
        run = torch.full((count * boxes[0].numel(),), -1, dtype=dtype)
        gather(boxes, run)
        assert run.equal(torch.cat([one.reshape(-1) for one in boxes]).to(dtype))
        back = [torch.zeros_like(one) if one.is_contiguous() else one * 0 for one in boxes]
        scatter(run, back)
        assert all(map(torch.equal, back, boxes))


def test_runs_of_any_sizes() -> None:
    """1D boxes of one message may differ in size."""
    boxes = [box((size,), (1,), 2, torch.int16) for size in (5, 1, 9)]
    run = torch.zeros(15, dtype=torch.int16)
    gather(boxes, run)
    assert run.tolist() == [item for one in boxes for item in one.tolist()]
    back = [one * 0 for one in boxes]
    scatter(run, back)
    assert all(map(torch.equal, back, boxes))


@pytest.mark.parametrize("copy", [gather, lambda boxes, run: scatter(run, boxes)])
def test_a_thousand_boxes_take_one_copy(copy: Callable[..., None]) -> None:
    """The number of operators does not grow with the number of boxes."""
    boxes = [box((8, 4), (6, 1), 0, torch.bfloat16) for _ in range(1000)]
    with Counted() as counted:
        copy(boxes, torch.zeros(1000 * 32, dtype=torch.bfloat16))
    assert 1 <= counted.copies <= 2
