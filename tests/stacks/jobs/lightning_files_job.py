"""Checkpoints as stock Lightning and Fabric save them under FSDP2: sharded folders, one file, and what they hold.

torchrun --nproc-per-node 2 -m tests.stacks.jobs.lightning_files_job --out FOLDER
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallelStrategy
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader


class TwoLayers(lightning.LightningModule):
    """Two layers that stock FSDP2 shards."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.first, self.second = nn.Linear(8, width), nn.Linear(width, 8)

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
        for layer in (self.first, self.second, self):
            fully_shard(layer, mesh=mesh)  # type: ignore[arg-type]

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss = self.second(self.first(batch)).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def keep_full(out: Path, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """The state whole, by torch itself, to compare with."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, moments = get_state_dict(model, optimizer, options=options)
    if rank == 0:
        torch.save({"model": weights, "optimizer": moments}, out)


def train(out: Path, name: str, *, sharded: bool) -> None:
    """Three steps of Lightning's Trainer, and a save."""
    sizes = {"data_parallel_size": int(os.environ["WORLD_SIZE"]), "tensor_parallel_size": 1}
    torch.manual_seed(0)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=ModelParallelStrategy(save_distributed_checkpoint=sharded, **sizes),
        max_steps=3,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(dirpath=out / f"kept-{name}", monitor="loss", every_n_train_steps=1)],
    )
    model = TwoLayers()
    trainer.fit(model, DataLoader(torch.randn(16, 8), batch_size=2))
    trainer.save_checkpoint(out / name)
    keep_full(out / f"{name}.full.pt", model, trainer.optimizers[0], trainer.global_rank)


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard each layer, then the root."""
    for layer in (*model.children(), model):
        fully_shard(layer, mesh=mesh["data_parallel"])
    return model


def run_fabric(out: Path) -> None:
    """A step in Fabric's own way, and a save."""
    sizes = {"data_parallel_size": int(os.environ["WORLD_SIZE"]), "tensor_parallel_size": 1}
    strategy = FabricModelParallelStrategy(parallelize, **sizes)
    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=int(os.environ["WORLD_SIZE"]))
    fabric.launch()
    model = fabric.setup_module(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))
    fabric.backward(model(torch.randn(2, 8)).sum())
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "step": 7, "rng": torch.arange(5, dtype=torch.uint8)}
    fabric.save(out / "fabric", state)
    keep_full(out / "fabric.full.pt", model.module, optimizer.optimizer, fabric.global_rank)


def main() -> None:
    """All three."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    train(out, "sharded.ckpt", sharded=True)
    train(out, "single.ckpt", sharded=False)
    run_fabric(out)


if __name__ == "__main__":
    main()
