"""shard_placement_fn: a mesh of its own for a parameter, blocks by RaggedShard, and what it cannot say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
)
from torch.distributed.tensor import Replicate, Shard

from tests.support import models
from tests.support.distributed import cpu_mesh, run_ranks
from vescale_fsdp import RaggedDTensor, RaggedShard, Rows, fully_shard
from vescale_fsdp.errors import LayoutError, MisuseError, PlacementError, VescaleError
from vescale_fsdp.runtime.fsdp_state import state_of
from vescale_fsdp.torch_private import ShardPlacementResult, newer_class

WITH_RESULTS = pytest.mark.skipif(
    ShardPlacementResult.__module__ == newer_class.__module__, reason="this torch has no ShardPlacementResult"
)


class Block(nn.Module):
    """Three weights that will live on three meshes."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(5, 7)
        self.hybrid = nn.Linear(7, 7, bias=False)
        self.expert = nn.Linear(7, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.expert(torch.tanh(self.hybrid(torch.relu(self.dense(x)))))


class Model(nn.Module):
    """Two such blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def build() -> Model:
    torch.manual_seed(11)
    return Model()


def shard(shard_fn: Any, reshard: bool | int | None) -> Model:
    """``hybrid`` is replicated over pairs and sharded in them, ``expert`` known to a pair only."""
    model = build()
    pairs = cpu_mesh(2, 2, names=("replicate", "shard"))
    hybrid = HSDPMeshInfo(pairs, shard_mesh_dim=1, replicate_mesh_dim=0)
    expert = FSDPMeshInfo(pairs["shard"], shard_mesh_dim=0)
    mesh = cpu_mesh(4, names=("dp",))
    for block in model.blocks:
        own = {block.hybrid.weight: hybrid, block.expert.weight: expert}

        def place(param: nn.Parameter, own: dict[nn.Parameter, Any] = own) -> Any:
            return ShardPlacementResult(Shard(0), own[param]) if param in own else None

        shard_fn(block, mesh=mesh, shard_placement_fn=place, reshard_after_forward=reshard)
    shard_fn(model, mesh=mesh)
    return model


def inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def train(reshard: bool | int | None) -> list[tuple[int, int | None]]:
    """Beside FSDP2 and one process per set of ranks; the groups' (shards, part size)."""
    ours, theirs = shard(fully_shard, reshard), shard(torch_fully_shard, None)
    reference = build()
    rank = dist.get_rank()
    for step in range(3):
        losses = [m(inputs(step, rank)).pow(2).mean() for m in (ours, theirs)]
        for loss in losses:
            loss.backward()
        grads: dict[str, list[torch.Tensor]] = {}
        for other in range(4):
            reference.zero_grad()
            reference(inputs(step, other)).pow(2).mean().backward()
            for name, param in reference.named_parameters():
                assert param.grad is not None
                grads.setdefault(name, []).append(param.grad)
        for (name, param), twin in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert isinstance(param, RaggedDTensor) and isinstance(param.grad, RaggedDTensor)
            mine = [2 * (rank // 2), 2 * (rank // 2) + 1] if "expert" in name else [0, 1, 2, 3]
            if step == 0:  # later the pairs' experts differ
                expected = torch.stack([grads[name][r] for r in mine]).mean(0)
                torch.testing.assert_close(param.grad.full_tensor(), expected, msg=name)
            torch.testing.assert_close(param.grad.full_tensor(), twin.grad.full_tensor(), msg=name)  # type: ignore[union-attr]
        for model in (ours, theirs):
            for param in model.parameters():
                with torch.no_grad():
                    param.sub_(param.grad, alpha=0.1)  # type: ignore[arg-type]
                param.grad = None
    state = state_of(ours.blocks[0])
    assert state is not None
    return [(group.comm.num_shards, group.comm.part_size) for group in state.groups]


@WITH_RESULTS
@pytest.mark.parametrize("reshard, parts", [(None, (None, None, None)), (2, (2, None, None))])
def test_parameters_with_meshes_of_their_own(reshard: int | None, parts: tuple[int | None, ...]) -> None:
    """One group per set of ranks; gradients are averaged over exactly those, as by FSDP2."""
    for groups in run_ranks(4, train, reshard):
        assert groups == list(zip((4, 2, 2), parts, strict=True))


def ragged_blocks() -> None:
    model = nn.Linear(6, 8, bias=False)

    def two_rows(param: nn.Parameter) -> RaggedShard:
        return RaggedShard((0,), (3, 1))  # 4 units of 2 rows; which rank gets how many is the planner's

    before = model.weight.detach().clone()
    fully_shard(model, mesh=cpu_mesh(), shard_placement_fn=two_rows)
    (group,) = state_of(model).groups  # type: ignore[union-attr]
    assert group.layout.slots[0].block_numel == 12
    assert isinstance(model.weight, RaggedDTensor)
    assert model.weight.to_local().numel() % 12 == 0 and 0 < model.weight.to_local().numel() < 48
    assert torch.equal(model.weight.full_tensor(), before)
    whole = nn.Linear(6, 8, bias=False)
    fully_shard(whole, mesh=cpu_mesh(), shard_placement_fn=lambda p: RaggedShard((), (1, 0)))
    assert whole.weight.to_local().numel() in (0, 48)  # type: ignore[operator]


def test_a_ragged_shard_says_what_stays_whole() -> None:
    """What one unit of the placement holds is not cut; dims=() keeps the parameter whole."""
    run_ranks(2, ragged_blocks)


def refusals() -> None:
    pairs = cpu_mesh(1, 2, names=("replicate", "shard"))
    mesh = cpu_mesh(2, names=("dp",))
    info = FSDPMeshInfo(pairs["shard"], shard_mesh_dim=0)

    def refused(
        error: type[VescaleError], got: Any, place: Callable[[nn.Parameter], Any], **options: Any
    ) -> None:
        model = nn.Linear(4, 6)
        with models.refused(error, got=got):
            fully_shard(model, mesh=mesh, shard_placement_fn=place, **options)
        assert type(model) is nn.Linear and not isinstance(model.weight, RaggedDTensor)

    refused(PlacementError, "DDPMeshInfo", lambda p: ShardPlacementResult(None, DDPMeshInfo(mesh, None, 0)))  # type: ignore[arg-type]
    refused(PlacementError, "mesh", lambda p: ShardPlacementResult(None, "mesh"))  # type: ignore[arg-type]
    refused(PlacementError, "HSDPMeshInfo", lambda p: ShardPlacementResult(None, HSDPMeshInfo(pairs, 0, 1)))
    refused(MisuseError, repr(Shard(2)), lambda p: ShardPlacementResult(Shard(p.ndim), info))
    refused(MisuseError, Replicate(), lambda p: Replicate())
    fresh = lambda p: ShardPlacementResult(None, FSDPMeshInfo(pairs["shard"], shard_mesh_dim=0))  # noqa: E731
    refused(PlacementError, "shard=2", fresh)
    default_too = lambda p: ShardPlacementResult(None, info) if p.ndim == 2 else None  # noqa: E731
    refused(PlacementError, "dp=2", default_too)
    refused(LayoutError, Rows(2), lambda p: RaggedShard((0,), (1, 1)), granularity=Rows(2))
    refused(PlacementError, (6, 4), lambda p: RaggedShard((0,), (3, 4)))


@WITH_RESULTS
def test_meshes_and_placements_that_cannot_be_are_refused() -> None:
    """Meshes that do not say what shards, two objects for the same ranks, placements that cannot be."""
    run_ranks(2, refusals)
