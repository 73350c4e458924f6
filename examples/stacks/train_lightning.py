"""Lightning's Trainer with our runtime: a small Llama on Python's own sources, on CPU ranks.

    torchrun --nproc-per-node 2 -m examples.stacks.train_lightning --out demo_output/lightning
    torchrun --nproc-per-node 3 -m examples.stacks.train_lightning --out demo_output/lightning --steps 80 --resume

The one line that is not Lightning's: ``strategy=VescaleStrategy(..)`` in place of ``ModelParallelStrategy(..)``.
``configure_model`` imports ``fully_shard`` from torch, as Lightning's documentation has it.
The losses of rank 0's micro-batches are in OUT/losses.json.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn import functional as F

from examples.corpus import Batches, read_corpus
from examples.llama import Llama, LlamaShape
from examples.stacks.options import write_losses
from vescale_fsdp import Rows
from vescale_fsdp.integrations.lightning import VescaleStrategy

SHAPE = LlamaShape(hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, head_size=32, mlp_size=128)
MICRO_BATCHES = 2


class MicroBatches:
    """What one rank sees, micro-batch by micro-batch; Lightning saves where it is, and any number of ranks goes on."""

    def __init__(self) -> None:
        self._batches = Batches(read_corpus(1 << 20), batch_size=6, seq_len=32)
        self._next = 0

    def __len__(self) -> int:
        return 1_000_000  # said, so that Lightning fetches none in advance

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        while True:
            self._next += 1
            yield self._batches.of_rank(self._next - 1, rank, ranks)

    def state_dict(self) -> dict[str, int]:
        """The next micro-batch."""
        return {"next": self._next}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on there."""
        self._next = state_dict["next"]


class LitLlama(LightningModule):
    """The model as a Lightning user writes it for FSDP2."""

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        self.model = Llama(SHAPE)
        mesh = self.device_mesh["data_parallel"]
        for block in self.model.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def training_step(self, batch: Any, index: int) -> Tensor:
        inputs, targets = batch
        return F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Losses(Callback):
    """Loss of every micro-batch on this rank."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        """Note the loss."""
        # which Lightning has divided by the number of micro-batches
        self.losses.append(outputs["loss"].item() * trainer.accumulate_grad_batches)


def fit(
    strategy: Any,
    steps: int,
    out: Path,
    *,
    resume: Path | None = None,
    model: LightningModule | None = None,
    callbacks: Sequence[Callback] = (),
    **options: Any,
) -> tuple[Trainer, list[float]]:
    """Train up to a step, from the start or from a checkpoint; the losses of this rank.

    Args:
        options: further ones of `Trainer`.
    """
    losses = Losses()
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=strategy,
        max_steps=steps,
        accumulate_grad_batches=MICRO_BATCHES,
        **{"gradient_clip_val": 1.0, **options},
        callbacks=[losses, *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=out,
    )
    trainer.fit(model or LitLlama(), MicroBatches(), ckpt_path=None if resume is None else str(resume))
    return trainer, losses.losses


def main() -> None:
    """One rank of the job."""
    parser = argparse.ArgumentParser(description="train the small Llama with Lightning")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--steps", type=int, default=60, help="train up to this step")
    parser.add_argument("--resume", action="store_true", help="go on from the folder's checkpoint")
    options = parser.parse_args()
    ranks = int(os.environ["WORLD_SIZE"])
    strategy = VescaleStrategy(granularity=Rows(8), data_parallel_size=ranks, tensor_parallel_size=1)
    checkpoint = options.out / "last.ckpt"
    trainer, losses = fit(strategy, options.steps, options.out, resume=checkpoint if options.resume else None)
    trainer.save_checkpoint(checkpoint)
    write_losses(options.out, losses)


if __name__ == "__main__":
    main()
