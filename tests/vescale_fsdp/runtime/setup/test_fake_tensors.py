"""Models without values (FakeTensorMode): sharded, trained and measured by torch's tools for memory estimation."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

from vescale_fsdp import Rows, fully_shard
from vescale_fsdp.torch_private import local_of

RANKS, WIDTH, LAYERS = 8, 512, 4


@pytest.fixture(autouse=True)
def _fake_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=3, world_size=RANKS, store=FakeStore())
    yield
    dist.destroy_process_group()


def _built() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def _sharded(model: nn.Sequential, mesh: DeviceMesh | None = None) -> nn.Sequential:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy, granularity={"weight": Rows(2)})
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        model(torch.randn(4, WIDTH)).sum().backward()
        assert all(param.grad is not None for param in model.parameters())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def _prove_fake(model: nn.Module) -> None:
    locals_ = [local_of(param) for param in model.parameters()]
    assert all(isinstance(local, FakeTensor) for local in locals_)
    assert sum(local.numel() for local in locals_) >= LAYERS * WIDTH * WIDTH // RANKS


@pytest.mark.parametrize("shape", [None, (RANKS,), (2, RANKS // 2)])
def test_models_are_made_and_trained_under_the_mode(shape: tuple[int, ...] | None) -> None:
    """On a mesh of one's own, of the caller's and with replicas: as many steps as one likes, nothing computed."""
    mesh = None if shape is None else init_device_mesh("cpu", shape)
    with FakeTensorMode():
        model = _sharded(_built(), mesh)
        _train(model, torch.optim.AdamW(model.parameters()))
        assert model.state_dict().keys() == dict(model.named_parameters()).keys()
    _prove_fake(model)


def test_parameters_without_values_are_sharded_outside_the_mode() -> None:
    """Their shards belong to the mode that they do."""
    mode = FakeTensorMode()
    with mode:
        model = _built()
    _sharded(model)
    _prove_fake(model)
    with mode:
        _train(model, torch.optim.AdamW(model.parameters()))


def test_memory_is_estimated() -> None:
    """torch's MemTracker finds a rank's share of weights and optimizer states, and one unit's gathered weights."""
    with FakeTensorMode():
        model = _sharded(_built())
        optimizer = torch.optim.AdamW(model.parameters())
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            _train(model, optimizer, steps=1)
    (after,), (peak,) = (tracker.get_tracker_snapshot(kind).values() for kind in ("current", "peak"))
    found = {kind.name if isinstance(kind, Enum) else kind: size for kind, size in after.items()}

    share = 4 * LAYERS * WIDTH * (WIDTH + 1) // RANKS
    assert share <= found["PARAM"] < 1.1 * share
    assert 2 * share <= found["OPT"] < 2.3 * share
    assert found["Total"] + 2 * WIDTH * WIDTH < max(peak.values()) < 4 * 4 * LAYERS * WIDTH * WIDTH
