"""A unit whose blocks do not go together: two groups that train, save, load and move as one does."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.support.distributed import run_ranks
from vescale_fsdp import FSDPModule, Rows, fully_shard
from vescale_fsdp.checkpoint import load, save
from vescale_fsdp.elastic.renewal import renew_model
from vescale_fsdp.layout import GroupLayout, TensorSpec, plan_group


class Towers(nn.Module):
    """Two wide layers whose rows, 25,600 and 16,000 elements long, stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(25600, 7)
        self.narrow = nn.Linear(16000, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(x).sum() + self.narrow(x[:, :16000]).pow(2).sum()


RULES = {"*.weight": Rows(1)}


def trained(model: nn.Module, steps: int = 2) -> dict[str, torch.Tensor]:
    """Full weights after some steps on the same rows on every rank."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        model(torch.randn(2, 25600, generator=torch.Generator().manual_seed(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: getattr(p, "full_tensor", lambda p=p: p)().detach() for name, p in model.named_parameters()}


def layouts_of(model: nn.Module) -> list[GroupLayout]:
    assert isinstance(model, FSDPModule)
    return [layout for _, layout in model.model_layout().groups]


def made(mesh: DeviceMesh) -> Towers:
    torch.manual_seed(0)
    model = Towers()
    fully_shard(model, mesh=mesh, granularity=RULES)
    return model


def train_save_and_move(path: Path) -> list[int]:
    mesh = init_device_mesh("cpu", (4,))
    torch.manual_seed(0)
    plain = trained(Towers())
    model = made(mesh)
    before = layouts_of(model)
    assert all(layout.copied_numel == 0 for layout in before)

    found = trained(model)
    assert found.keys() == plain.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, plain[name])
    pieces = {name: (p.to_local().numel(), p.grad) for name, p in model.named_parameters()}
    assert sum(numel for numel, _ in pieces.values()) > 0

    save(path, {"model": model})
    one = Towers()
    fully_shard(one, mesh=mesh)
    assert len(layouts_of(one)) == 1
    load(path, {"model": one})
    for name, p in one.named_parameters():
        assert torch.equal(p.full_tensor(), found[name])

    # On two ranks the blocks go together: both ways there must lead to the same groups, and back again.
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))["shard"]
    counts = [len(before)]
    for moved_to in (pairs, mesh):
        renew_model(model, moved_to)
        assert layouts_of(model) == layouts_of(made(moved_to))
        counts.append(len(layouts_of(model)))
        load(path, {"model": model})
        for name, p in model.named_parameters():
            assert torch.equal(p.full_tensor(), found[name])
    trained(model, 1)
    dist.barrier()
    return counts


def test_two_buffers_train_save_load_and_move_as_one(tmp_path: Path) -> None:
    """Values are a plain model's; a checkpoint fits any layout; on other ranks there are as many as these need."""
    specs = [TensorSpec(f"t{i}", s, "float32", s[-1]) for i, s in enumerate([(7, 25600), (8, 16000)])]
    assert plan_group(specs, 4, scatter="never").padding_ratio > 0.3

    assert run_ranks(4, train_save_and_move, tmp_path / "saved") == [[2, 1, 2]] * 4
