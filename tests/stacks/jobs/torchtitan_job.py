"""What `test_torchtitan` asks of torchtitan, as one job under torchrun: results as JSON, one file per rank.

torchrun --nproc-per-node 2 -m tests.stacks.jobs.torchtitan_job --out FOLDER            against stock FSDP2
torchrun --nproc-per-node 3 -m tests.stacks.jobs.torchtitan_job --out FOLDER --resume   what 2 ranks saved, on 3
"""

# ruff: noqa: E402  torchtitan's modules bind the device when they are imported
from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from examples.stacks.torchtitan.cpu_device import use_cpu

use_cpu()

from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.distributed import fsdp as titan_fsdp
from torchtitan.distributed import utils as dist_utils

from examples.stacks.torchtitan.configs import stock, stock_moe, vescale, vescale_moe

STEPS, HALF, FEW = 50, 25, 8
LOOSE = {"training.max_norm": 1e9}  # a norm adds up in the order of the layout: this one's factor is 1


class Run:
    """One trainer of torchtitan's, from a configuration to its losses."""

    def __init__(self, config: Any, folder: Path, changes: dict[str, Any]) -> None:
        config.dump_folder = str(folder)
        for name, value in changes.items():
            section, _, field = name.rpartition(".")
            setattr(getattr(config, section) if section else config, field, value)
        self.losses: list[float] = []
        with one_process_group():
            self.trainer = config.build()
        self.trainer.metrics_processor.log = self._log

    def _log(self, step: int, mean: float, most: float, norm: float, extra_metrics: Any = None) -> None:
        self.losses.append(mean)

    def train(self) -> list[float]:
        """Train to the end; the mean losses over all ranks."""
        with patch("torchtitan.trainer.time.sleep"):
            self.trainer.train()
        return self.losses

    def weights(self) -> str:
        """A digest of the whole model."""
        digest = hashlib.sha256()
        for name, value in sorted(self.trainer.model_parts[0].state_dict().items()):
            full = value.full_tensor() if isinstance(value, DTensor) else value
            digest.update(name.encode() + full.detach().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def close(self) -> None:
        """End its threads."""
        self.trainer.close()


@contextmanager
def one_process_group() -> Iterator[None]:
    """Let torchtitan start torch.distributed once; torchrun's store does not bear a second time."""
    if dist.is_initialized():
        with patch.object(dist_utils, "init_distributed", lambda *_, **__: dist.get_world_size()):
            yield
    else:
        yield


def train(config: Any, folder: Path, **changes: Any) -> list[float]:
    """The losses of one run."""
    run = Run(config, folder, changes)
    losses = run.train()
    run.close()
    return losses


def divide_by_sum(model: nn.Module) -> None:
    """torchtitan's switch; stock FSDP2 on gloo has no other operator for it than the sum."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def seed(config: Any, folder: Path) -> str:
    """Start weights of stock FSDP2, as DCP wrote them: random values are drawn otherwise by ours."""
    run = Run(config, folder, {"checkpoint.last_save_model_only": True})
    run.trainer.checkpointer.save(0, last_step=True)
    run.close()
    return str(folder / "checkpoint" / "step-0")


def both(
    found: dict[str, Any], name: str, out: Path, configs: tuple[Any, Any], steps: int, **changes: Any
) -> None:
    """Losses of stock FSDP2 and of ours from the same start; how many frames dynamo compiled for ours."""
    make_stock, make_ours = configs
    with patch.object(titan_fsdp, "disable_fsdp_gradient_division", divide_by_sum):
        start = seed(make_stock(), out / f"{name}_seed")
        options = {"checkpoint.initial_load_path": start, **changes, "training.steps": steps}
        found[f"stock_{name}"] = train(make_stock(), out / f"{name}_stock", **options)
    torch.compiler.reset()  # what stock has compiled fits ours too
    counters.clear()
    found[f"our_{name}"] = train(make_ours(), out / f"{name}_ours", **options)
    found[f"frames_{name}"] = counters["frames"]["ok"]


def compare(out: Path) -> dict[str, Any]:
    """Llama with a resume, clipped norms, the control, experts, compiled blocks, Hugging Face in and out."""
    found: dict[str, Any] = {}
    half = {"checkpoint.interval": HALF, "checkpoint.async_mode": "async", **LOOSE}
    both(found, "llama", out, (stock, vescale), STEPS, **half)
    start = str(out / "llama_seed" / "checkpoint" / "step-0")
    again = {"checkpoint.load_step": HALF, "training.steps": STEPS, **LOOSE}
    found["resumed"] = train(vescale(), out / "llama_ours", **again)
    both(found, "clipped", out, (stock, vescale), FEW)
    with patch.object(titan_fsdp, "disable_fsdp_gradient_division", lambda model: None):
        options = {"checkpoint.initial_load_path": start, "training.steps": FEW, **LOOSE}
        found["control"] = train(vescale(), out / "control", **options)
    both(found, "moe", out, (stock_moe, vescale_moe), STEPS, **half)
    found["resumed_moe"] = train(vescale_moe(), out / "moe_ours", **again)
    compiled(found, out)
    found["hugging_face"] = hugging_face(out)
    return found


def compiled(found: dict[str, Any], out: Path) -> None:
    """torchtitan compiles each block before it is sharded; both save the last step in Hugging Face's form."""
    # Inductor's code for CPUs takes minutes to compile; what dynamo and autograd trace is the same.
    compile_ = {"compile.enable": True, "compile.backend": "aot_eager", "hf_assets_path": str(out / "assets")}
    last = {"checkpoint.last_save_in_hf": True, "checkpoint.last_save_model_only": True}
    # The learning rates of the run that losses are compared with: by itself, a run of few steps decays sooner.
    rates = {"lr_scheduler.total_steps": STEPS}
    both(found, "compiled", out, (stock, vescale), FEW, **compile_, **last, **rates, **LOOSE)


def hugging_face(out: Path) -> list[str]:
    """Digests of a model that is saved in Hugging Face's form, and of one that is read from there."""
    config = vescale()
    config.hf_assets_path = str(out / "assets")
    last = {"checkpoint.last_save_in_hf": True, "checkpoint.last_save_model_only": True, "training.steps": 2}
    saved = Run(config, out / "saved", last)
    saved.train()
    digests = [saved.weights()]
    saved.close()
    config = vescale()
    config.hf_assets_path = str(out / "saved" / "checkpoint" / "step-2")
    read = Run(config, out / "read", {"checkpoint.initial_load_in_hf": True})
    digests.append(read.weights())
    read.trainer.checkpointer.load()
    digests.append(read.weights())
    read.close()
    return digests


def resume(out: Path) -> dict[str, Any]:
    """What the other job saved, on this number of ranks."""
    options = {"checkpoint.load_step": HALF, "checkpoint.load_only": True, "training.steps": STEPS, **LOOSE}
    return {
        "resumed": train(vescale(), out / "llama_ours", **options),
        "resumed_moe": train(vescale_moe(), out / "moe_ours", **options),
    }


def main() -> None:
    """One rank of the job."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    found = (resume if options.resume else compare)(options.out)
    name = f"{'resumed' if options.resume else 'compared'}-{os.environ['RANK']}.json"
    (options.out / name).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
