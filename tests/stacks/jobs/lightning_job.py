"""What `test_lightning` asks of Lightning and Fabric, as one job under torchrun: results as JSON, one file per rank.

torchrun --nproc-per-node 2 -m tests.stacks.jobs.lightning_job --out FOLDER            both stacks against stock FSDP2
torchrun --nproc-per-node 3 -m tests.stacks.jobs.lightning_job --out FOLDER --resume   what 2 ranks saved, on 3 or 1
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallelStrategy
from lightning.pytorch import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn

from examples.stacks.train_fabric import Run, parallelize
from examples.stacks.train_lightning import LitLlama, fit
from vescale_fsdp import FSDPModule, Rows
from vescale_fsdp.integrations.lightning import VescaleFabricStrategy, VescaleStrategy

STEPS, HALF = 50, 25
# A sum of squares adds up in the order of the layout; values are clipped alike under any.
CLIP = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}
CLIP_FABRIC = {"clip_val": 1e-3}


def sizes() -> dict[str, int]:
    """All ranks share the model."""
    return {"data_parallel_size": int(os.environ["WORLD_SIZE"]), "tensor_parallel_size": 1}


def ours() -> VescaleStrategy:
    """The example's strategy."""
    return VescaleStrategy(granularity=Rows(8), **sizes())


def our_fabric() -> VescaleFabricStrategy:
    """The example's strategy for Fabric."""
    return VescaleFabricStrategy(parallelize, granularity=Rows(8), **sizes())


class Opaque:
    """What no checkpoint of ours can hold without pickling it."""

    def __init__(self, name: str) -> None:
        self.name = name


class Remembered(Callback):
    """A callback with a state that differs between ranks, and cannot be plain."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Rank 0's counts."""
        return {"opaque": Opaque(f"rank {dist.get_rank()}"), "best": torch.tensor(1.5)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep what was saved."""
        self.state = state_dict


class LeftAtHalf(LitLlama):
    """The control: gradients left divided by the number of ranks once more."""

    def configure_model(self) -> None:
        """Shard, then spoil."""
        super().configure_model()
        spoil(self.model)


def compare(out: Path) -> dict[str, Any]:
    """Both stacks with our runtime and with stock FSDP2."""
    found: dict[str, Any] = {}
    _, found["stock"] = fit(ModelParallelStrategy(**sizes()), STEPS, out, **CLIP)
    trainer, first = fit(ours(), HALF, out, callbacks=[Remembered()], **CLIP)
    trainer.save_checkpoint(out / "half.ckpt")
    again = Remembered()
    with torch.serialization.safe_globals([Opaque]):  # Lightning does not hand weights_only=False on (2.6.6)
        _, rest = fit(ours(), STEPS, out, resume=out / "half.ckpt", callbacks=[again], **CLIP)
    found["ours"] = [*first, *rest]
    found["remembered"] = [again.state["opaque"].name, again.state["best"].item()]
    _, found["control"] = fit(ours(), HALF, out, model=LeftAtHalf(), **CLIP)
    found["steps_of_adam"] = steps_of_adam(trainer.optimizers[0])
    fresh, _ = fit(ours(), 0, out)
    fresh.save_checkpoint(out / "fresh.ckpt")
    found["fresh"] = [steps_of_adam(fresh.optimizers[0])]
    resumed, _ = fit(ours(), 1, out, resume=out / "fresh.ckpt")
    found["fresh"].append(steps_of_adam(resumed.optimizers[0]))
    found["single_file"] = single_file(out)
    return found | compare_fabric(out)


def compare_fabric(out: Path) -> dict[str, Any]:
    """Fabric's own loop, and the control."""
    found: dict[str, Any] = {}
    stock = Run(FabricModelParallelStrategy(parallelize, **sizes()), **CLIP_FABRIC)
    first = stock.train(HALF)
    keep_whole(stock.model, out / "stock_fabric.pt")
    found["stock_fabric"] = [*first, *stock.train(STEPS)]
    loose = Run(FabricModelParallelStrategy(parallelize, **sizes()), clip_val=1e9)
    found["loose_fabric"] = loose.train(2)
    run = CountingRun(our_fabric(), **CLIP_FABRIC)
    run.save(out / "fresh_fabric")
    found["fresh_fabric"] = [steps_of_adam(run.optimizer)]
    run.load(out / "fresh_fabric")
    found["fresh_fabric"].append(steps_of_adam(run.optimizer))
    found["reduced"] = run.reduced_by_micro_batch()
    first = run.train(HALF)
    run.save(out / "fabric")
    again = Run(our_fabric(), **CLIP_FABRIC)
    again.load(out / "fabric")
    found["our_fabric"] = [*first, *again.train(STEPS)]
    control = Run(our_fabric(), **CLIP_FABRIC)
    spoil(control.model)
    found["fabric_control"] = control.train(HALF)
    return found


def steps_of_adam(optimizer: torch.optim.Optimizer) -> list[float]:
    """The numbers of steps that the parameters' states count."""
    return sorted({float(int(state["step"])) for state in optimizer.state.values()})


def keep_whole(model: nn.Module, path: Path) -> None:
    """Rank 0 writes the full weights of a sharded model."""
    full = {name: value.full_tensor() for name, value in model.state_dict().items()}
    if dist.get_rank() == 0:
        torch.save(full, path)


def spoil(model: nn.Module) -> None:
    """The control: gradients left divided by the number of ranks once more."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(float(dist.get_world_size() ** 2))


class CountingRun(Run):
    """A run that can say when its gradients are reduced."""

    def reduced_by_micro_batch(self) -> list[bool]:
        """Whether parameters have gradients after the backward without, and after the one with synchronization."""
        found = []
        for enabled in (True, False):
            with self.fabric.no_backward_sync(self.model, enabled=enabled):
                self.fabric.backward(self.model(torch.zeros(1, 4, dtype=torch.int64)).sum())
            found.append(any(param.grad is not None for param in self.model.parameters()))
        self.optimizer.zero_grad()
        return found


def single_file(out: Path) -> list[float]:
    """Losses after a resume from Lightning's own single file, which stock FSDP2 wrote."""
    strategy = ModelParallelStrategy(save_distributed_checkpoint=False, **sizes())
    trainer, _ = fit(strategy, HALF, out, **CLIP)
    trainer.save_checkpoint(out / "single.ckpt")
    _, losses = fit(ours(), STEPS, out, resume=out / "single.ckpt", **CLIP)
    return losses


def resume(out: Path) -> dict[str, Any]:
    """What the other job saved, on this number of ranks."""
    with torch.serialization.safe_globals([Opaque]):
        _, losses = fit(ours(), STEPS, out, resume=out / "half.ckpt", **CLIP)
    run = Run(our_fabric(), **CLIP_FABRIC)
    run.load(out / "fabric")
    return {"ours": losses, "our_fabric": run.train(STEPS)}


def main() -> None:
    """One rank of the job."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = (resume if options.resume else compare)(options.out)
    name = f"{'resumed' if options.resume else 'compared'}-{dist.get_rank()}.json"
    (options.out / name).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
