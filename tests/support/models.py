"""Small models and the plain one-process reference that sharded training is compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.distributed import cpu_mesh
from vescale_fsdp import RaggedDTensor, distribute_tensor, fully_shard
from vescale_fsdp.errors import VescaleError


class MLP(nn.Module):
    """Uneven sizes: nothing divides by 2, 3 or 4; the bias of ``tiny`` is smaller than the world."""

    def __init__(self, dim: int = 7) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 15)
        self.tiny = nn.Linear(15, 1)
        self.down = nn.Linear(15, dim, bias=False)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.up(x))
        return self.down(hidden * torch.sigmoid(self.tiny(hidden))) * self.scale.sum() + x


class TensorParallelLayer(nn.Module):
    """A pair for tensor parallelism with a norm before; sizes that only an axis of two ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(7)
        self.up = nn.Linear(7, 10)
        self.down = nn.Linear(10, 7, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    """An input layer, blocks, and a head; the root owns the outer two."""

    def __init__(self, num_blocks: int = 3, dim: int = 7) -> None:
        super().__init__()
        self.embed = nn.Linear(5, dim)
        self.blocks = nn.ModuleList(MLP(dim) for _ in range(num_blocks))
        self.head = nn.Linear(dim, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(seed: int = 1, **sizes: int) -> Stack:
    """The same model on every rank."""
    torch.manual_seed(seed)
    return Stack(**sizes)


def batch(step: int, rank: int, rows: int = 4) -> torch.Tensor:
    """A rank's inputs of a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(rows, 5, generator=generator)


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """A loss that every output takes part in."""
    return model(x).float().pow(2).mean()


def reference_grads(model: nn.Module, step: int, world: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean loss and mean gradients over all ranks' batches, in one process."""
    model.zero_grad()
    total = torch.stack([loss_of(model, batch(step, rank)) for rank in range(world)]).mean()
    total.backward()
    return total.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def mean_over_ranks(value: torch.Tensor) -> float:
    """A scalar's mean over the world."""
    value = value.detach().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def twin(model: nn.Module) -> nn.Module:
    """An independent copy."""
    return copy.deepcopy(model)


def shard(model: Stack, mesh: Any = None, **options: Any) -> Stack:
    """The model with each of its blocks a unit."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh or cpu_mesh(), **options)
    fully_shard(model, mesh=mesh or cpu_mesh(), **options)
    return model


@contextmanager
def refused(error: type[VescaleError], **parts: object) -> Iterator[None]:
    """``error`` is raised; each given part (expected, got, where, todo) contains that name, number or option."""
    with pytest.raises(error) as caught:
        yield
    for part, value in parts.items():
        assert str(value) in str(getattr(caught.value, part)), f"{part} has no {value}: {caught.value}"


def assert_is_piece(
    ours: torch.Tensor | None, full: torch.Tensor | None, name: str = "", **close: float
) -> None:
    """What this rank holds of a sharded tensor is its part of ``full``.

    Nothing is sent, while `full_tensor` broadcasts from every rank. All ranks together compare every element.
    """
    assert isinstance(ours, RaggedDTensor) and full is not None, name
    mine = distribute_tensor(full, ours.device_mesh, ours.placements)
    torch.testing.assert_close(ours.to_local(), mine.to_local(), **close, msg=lambda text: f"{name}: {text}")


def check_steps(model: nn.Module, reference: nn.Module, steps: int = 3, scale: float = 1.0) -> None:
    """Gradients of a few SGD steps equal one process's, times ``scale``."""
    world, rank = dist.get_world_size(), dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / scale)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(steps):
        _, grads = reference_grads(reference, step, world)
        loss_of(model, batch(step, rank)).backward()
        for name, param in model.named_parameters():
            assert_is_piece(param.grad, grads[name] * scale, f"{step} {name}", rtol=1e-4, atol=1e-6)
        optimizer.step()
        plain.step()
        optimizer.zero_grad()
