"""Watch a run in TensorBoard or W&B: loss, tokens per second, padding, and what the saves cost.

    torchrun --nproc-per-node 2 -m examples.watched --out watched --to tensorboard
    WANDB_MODE=offline torchrun --nproc-per-node 2 -m examples.watched --out watched --to wandb

All numbers are in one dict per step, which either logger takes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from examples.corpus import Batches, read_corpus
from examples.train import Trainer, start_process_group
from vescale_fsdp import FSDPModule
from vescale_fsdp.checkpoint import CheckpointManager, EverySteps

Log = Callable[[int, dict[str, float]], None]


def tensorboard(folder: Path) -> Log:
    """Log to event files: ``tensorboard --logdir FOLDER`` shows them."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder))

    def log(step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log


def wandb(folder: Path) -> Log:
    """Log to W&B; with ``WANDB_MODE=offline`` to files, which ``wandb sync`` uploads."""
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    run = wandb.init(project="veScale-FSDP", dir=str(folder))
    return lambda step, values: run.log(values, step=step)


def main() -> None:
    """One rank of the job."""
    parser = argparse.ArgumentParser(description="train, and log to TensorBoard or W&B")
    parser.add_argument("--out", type=Path, required=True, help="folder of checkpoints and logs")
    parser.add_argument("--to", choices=["tensorboard", "wandb"], default="tensorboard")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    trainer = Trainer(start_process_group(), Batches(read_corpus()), num_steps=options.steps)
    model, batches = trainer.model, trainer.batches
    assert isinstance(model, FSDPModule)
    log = {"tensorboard": tensorboard, "wandb": wandb}[options.to] if dist.get_rank() == 0 else None
    write = log(options.out / "logs") if log else None
    state = {"model": model, "optimizer": trainer.optimizer}
    with CheckpointManager(
        options.out / "run", save_policy=EverySteps(10), asynchronous=True, progress=True
    ) as manager:
        for step in range(1, options.steps + 1):
            start_s = time.perf_counter()
            loss = trainer.step()
            seconds = time.perf_counter() - start_s
            manager.save(step, state)
            values = {
                "train/loss": loss,
                "train/tokens_per_second": batches.batch_size * batches.seq_len / seconds,
                "layout/padding": model.model_layout().padding_ratio,  # of the parameters' elements
                **manager.metrics(),
            }
            if write is not None:
                write(step, values)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
