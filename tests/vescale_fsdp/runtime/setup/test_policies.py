"""Policies are followed as this torch's FSDP2 follows them, or refused by name; nothing of them is ignored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp import fully_shard as stock_fully_shard

from tests.support import models
from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.models import refused
from vescale_fsdp import fully_shard
from vescale_fsdp.errors import ArgumentError, UnsupportedOpError
from vescale_fsdp.runtime import group_plan, param_group
from vescale_fsdp.runtime.group_plan import check_policies
from vescale_fsdp.torch_private import REDUCES_AS_STORED

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Overriding(MixedPrecisionPolicy):
    """torch 2.15's policy on every torch."""

    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = None


@dataclass
class OnDisk(OffloadPolicy):
    """A way to offload that is not known here."""


def test_unknown_policies_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fields of a newer torch's policies, and kinds of policy, unless they hold their default."""
    check_policies(MixedPrecisionPolicy(BF16, output_dtype=BF16), CPUOffloadPolicy(pin_memory=False))
    with refused(UnsupportedOpError, got="OnDisk"):
        check_policies(MixedPrecisionPolicy(), OnDisk())
    known = {
        **group_plan._FOLLOWED,
        MixedPrecisionPolicy: {"param_dtype", "reduce_dtype", "cast_forward_inputs"},
    }
    monkeypatch.setattr(group_plan, "_FOLLOWED", known)
    check_policies(MixedPrecisionPolicy(BF16), OffloadPolicy())
    with refused(UnsupportedOpError, got="output_dtype=torch.bfloat16"):
        check_policies(MixedPrecisionPolicy(output_dtype=BF16), OffloadPolicy())


class Routed(nn.Module):
    """A router that stays in fp32 beside experts in bf16; it casts what goes through it itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.expert = nn.Linear(5, 7)
        self.router = nn.Linear(7, 3)
        self.seen: set[torch.dtype] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen |= {self.expert.weight.dtype, self.router.weight.dtype}
        return self.router(self.expert(x.to(BF16)).float())


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        models.loss_of(model, models.batch(step, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.full_tensor().detach() for param in model.parameters()]  # type: ignore[attr-defined]


def router_in_fp32() -> None:
    stock, ours = Routed(), Routed()
    policy: dict[str, Any] = {"reduce_dtype": torch.float32, "cast_forward_inputs": False}
    for module, dtype in ((stock.expert, BF16), (stock.router, torch.float32)):
        stock_fully_shard(module, mesh=cpu_mesh(), mp_policy=MixedPrecisionPolicy(dtype, **policy))
    stock_fully_shard(stock, mesh=cpu_mesh())
    routers = set(ours.router.parameters())
    choose = Overriding(BF16, param_dtype_override_fn=lambda p: p.dtype if p in routers else None, **policy)
    fully_shard(ours, mesh=cpu_mesh(), mp_policy=choose)
    for left, right in zip(weights_of(ours), weights_of(stock), strict=True):
        assert torch.equal(left, right)
    assert ours.seen == {BF16, torch.float32}
    other = Overriding(BF16, param_dtype_override_fn=lambda p: torch.float16)
    with refused(ArgumentError, got="torch.float16", where="expert.weight"):
        fully_shard(Routed(), mesh=cpu_mesh(), mp_policy=other)


def unsaid_reduce_dtype() -> None:
    def trained(shard: Callable[..., Any], policy: MixedPrecisionPolicy) -> list[torch.Tensor]:
        return weights_of(shard(models.build(), mesh=cpu_mesh(), mp_policy=policy))

    unsaid, as_stored, as_computed = (
        MixedPrecisionPolicy(BF16, reduce_dtype=dtype) for dtype in (None, torch.float32, BF16)
    )
    said = trained(stock_fully_shard, as_stored), trained(stock_fully_shard, as_computed)
    assert not all(map(torch.equal, *said))
    for newer, expected in zip((True, False), said, strict=True):
        with mock.patch.object(param_group, "REDUCES_AS_STORED", newer):
            assert all(map(torch.equal, trained(fully_shard, unsaid), expected))
    assert all(map(torch.equal, trained(stock_fully_shard, unsaid), said[not REDUCES_AS_STORED]))


def wide_gradients() -> None:
    model = nn.Linear(3, 3, dtype=BF16)
    model.weight.grad_dtype = torch.float32  # type: ignore[attr-defined]
    with refused(UnsupportedOpError, got="grad_dtype torch.float32", where="weight"):
        fully_shard(model, mesh=cpu_mesh())
    model.weight.grad_dtype = BF16
    fully_shard(model, mesh=cpu_mesh())
    with refused(UnsupportedOpError, got="grad_dtype torch.float32", where="(3, 3)"):
        model.weight.grad_dtype = torch.float32
    assert model.weight.grad_dtype is BF16
    given = nn.Parameter(torch.ones(3, 3, dtype=BF16))
    given.grad_dtype = None
    model.weight = given
    with refused(UnsupportedOpError, got="grad_dtype None", where="weight"):
        model(torch.ones(2, 3, dtype=BF16))


def kept_in_place() -> None:
    model = models.build()
    for block in model.blocks:
        fully_shard(block, mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    model.set_keep_unsharded_storage(True)  # type: ignore[operator]
    addresses: list[set[int]] = [set(), set()]
    for place, block in enumerate(model.blocks[:2]):
        block.up.register_forward_hook(lambda m, *_, at=place: addresses[at].add(m.weight.data_ptr()))
    got = weights_of(model)
    stock = models.build()
    for block in stock.blocks:
        stock_fully_shard(block, mesh=cpu_mesh())
    for left, right in zip(got, weights_of(stock_fully_shard(stock, mesh=cpu_mesh())), strict=True):
        assert torch.equal(left, right)
    assert [len(seen) for seen in addresses] == [1, 1] and addresses[0] != addresses[1]
    full = fully_shard.state(model.blocks[0]).groups[0].full.flat  # type: ignore[attr-defined]
    assert full.untyped_storage().nbytes() > 0  # though it is sharded
    model.set_keep_unsharded_storage(False)  # type: ignore[operator]
    weights_of(model)
    assert full.untyped_storage().nbytes() == 0


def test_policies_of_torch_2_15() -> None:
    """Compute dtypes per parameter, the reduction's dtype where nothing is said, and what is kept or refused."""
    for fact in (router_in_fp32, unsaid_reduce_dtype, wide_gradients, kept_in_place):
        run_ranks(2, fact)
