"""Fabric with our runtime: the loop is the user's, the strategy's ``parallelize_fn`` shards the model.

torchrun --nproc-per-node 2 -m examples.stacks.train_fabric --out demo_output/fabric
torchrun --nproc-per-node 3 -m examples.stacks.train_fabric --out demo_output/fabric --steps 80 --resume

The losses of rank 0's micro-batches are in OUT/losses.json.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from examples.llama import Llama
from examples.stacks.options import write_losses
from examples.stacks.train_lightning import MICRO_BATCHES, SHAPE, MicroBatches
from vescale_fsdp import Rows
from vescale_fsdp.integrations.lightning import VescaleFabricStrategy


def parallelize(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Shard the blocks and the root, as a Fabric user writes it for FSDP2."""
    from torch.distributed.fsdp import fully_shard

    for block in model.model.layers:
        fully_shard(block, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    return model


class Run:
    """A model, its optimizer and the steps it has done.

    Args:
        strategy: Fabric's.
        clip: as Fabric's ``clip_gradients`` takes it.
    """

    def __init__(self, strategy: Any, **clip: float) -> None:
        self._clip = clip or {"max_norm": 1.0}
        self.fabric = Fabric(
            accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy=strategy
        )
        self.fabric.launch()
        torch.manual_seed(0)
        model = self.fabric.setup_module(Llama(SHAPE))
        self.optimizer = self.fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))
        self.model, self.next_step = model, 0
        self.data = MicroBatches()
        self.batches = iter(self.data)

    def train(self, until: int) -> list[float]:
        """Losses of this rank's micro-batches, up to a step."""
        losses = []
        for _ in range(self.next_step, until):
            for micro in range(MICRO_BATCHES):
                inputs, targets = next(self.batches)
                with self.fabric.no_backward_sync(self.model, enabled=micro < MICRO_BATCHES - 1):
                    loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
                    self.fabric.backward(loss / MICRO_BATCHES)
                losses.append(loss.item())
            self.fabric.clip_gradients(self.model, self.optimizer, **self._clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.next_step = until
        return losses

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        data = self.data.state_dict()
        return {"model": self.model, "optimizer": self.optimizer, "step": self.next_step, "data": data}

    def save(self, path: Path) -> None:
        """Write a checkpoint."""
        self.fabric.save(path, self.state())

    def load(self, path: Path) -> None:
        """Go on from a checkpoint of any number of ranks."""
        state = self.state()
        self.fabric.load(path, state)
        self.next_step = state["step"]
        self.data.load_state_dict(state["data"])


def main() -> None:
    """One rank of the job."""
    parser = argparse.ArgumentParser(description="train the small Llama with Fabric")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--steps", type=int, default=60, help="train up to this step")
    parser.add_argument("--resume", action="store_true", help="go on from the folder's checkpoint")
    options = parser.parse_args()
    ranks = int(os.environ["WORLD_SIZE"])
    run = Run(
        VescaleFabricStrategy(
            parallelize, granularity=Rows(8), data_parallel_size=ranks, tensor_parallel_size=1
        )
    )
    if options.resume:
        run.load(options.out / "checkpoint")
    losses = run.train(options.steps)
    run.save(options.out / "checkpoint")
    write_losses(options.out, losses)


if __name__ == "__main__":
    main()
