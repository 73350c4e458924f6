"""Nothing is computed from memory that was not written, or was freed; what users' code is given holds zeros there."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import models
from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.faults.nan_memory import nan_memory
from tests.support.units import groups_of
from vescale_fsdp import MixedPrecisionPolicy, Rows
from vescale_fsdp.optim import AdamW8bit, Muon, Shampoo
from vescale_fsdp.quantize import Fp8Blocks, QuantizedGather

CODEC = Fp8Blocks(1, 16)
CASES: dict[str, dict[str, Any]] = {
    "plain": {"granularity": Rows(2)},
    "plain bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "AdamW8bit": {"granularity": AdamW8bit.granularity()},
    "Muon": {"granularity": Rows(2), "reshard_after_forward": False},
    "Shampoo": {"granularity": Shampoo.granularity(block_size=8)},
    "quantized": {"granularity": CODEC.granularity, "mp_policy": QuantizedGather(codecs={"*.weight": CODEC})},
}


def optimizer_of(case: str, model: models.Stack) -> torch.optim.Optimizer:
    matrices = [param for param in model.parameters() if param.ndim == 2]
    rest = [param for param in model.parameters() if param.ndim != 2]
    if case == "AdamW8bit":
        return AdamW8bit(model.parameters(), lr=0.02)
    if case == "Muon":
        return Muon(matrices, lr=0.02, adamw_params=rest)
    if case == "Shampoo":
        return Shampoo(matrices, lr=0.02, block_size=8, adamw_params=rest)
    return torch.optim.AdamW(model.parameters(), lr=0.02)


class SeesShards:
    """A user's all-gather, as of a library that compresses by the largest value: it looks at all it is given."""

    def __init__(self) -> None:
        self.largest = 0.0

    def allocate(self, size: list[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        largest = input_tensor.abs().max().item() if input_tensor.numel() else 0.0
        self.largest = largest if largest != largest or largest > self.largest else self.largest
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def trained(case: str, shape: tuple[int, ...], filled: bool) -> tuple[list[torch.Tensor], int]:
    """Weights after a few steps of two backwards each; how many elements of padding the shards have."""
    with nan_memory() if filled else nullcontext():
        model = models.shard(models.build(2), cpu_mesh(*shape), **CASES[case])
        seen = SeesShards()
        if case.startswith("plain"):
            model.blocks[0].set_custom_all_gather(seen)  # type: ignore[operator]
        optimizer = optimizer_of(case, model)
        for step in range(3):
            with model.no_sync():  # type: ignore[operator]
                models.loss_of(model, models.batch(2 * step, dist.get_rank())).backward()
            models.loss_of(model, models.batch(2 * step + 1, dist.get_rank())).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert seen.largest < 10.0
        padding = 0
        for module in (*model.blocks, model):
            for group in groups_of(module):
                is_padding = torch.ones_like(group.shard, dtype=torch.bool)
                for param in group.params:
                    is_padding[param.local] = False
                padding += int(is_padding.sum())
                assert not group.shard[is_padding].any(), (case, group.label)
        return [param.full_tensor().detach() for param in model.parameters()], padding  # type: ignore[attr-defined]


def compared(case: str, shape: tuple[int, ...]) -> int:
    plain, _ = trained(case, shape, filled=False)
    filled, padding = trained(case, shape, filled=True)
    for left, right in zip(plain, filled, strict=True):
        assert torch.equal(left, right)
    return padding


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.part("numerics") if case == "plain" else ()) for case in CASES],
)
def test_memory_that_was_not_written_is_not_read(case: str) -> None:
    """Training gives the same bits where new and freed memory hold NaN, and the padding of shards stays zero."""
    assert sum(run_ranks(2, compared, case, (2,))) > 0


@pytest.mark.part("numerics")
def test_memory_that_was_not_written_is_not_read_with_replicas() -> None:
    """The same over shards and replicas."""
    assert sum(run_ranks(4, compared, "plain bf16", (2, 2))) > 0
