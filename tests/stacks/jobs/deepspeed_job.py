"""Checkpoints that DeepSpeed writes, and what it says of them itself, as one job under torchrun.

DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 -m tests.stacks.jobs.deepspeed_job --out FOLDER

One folder per case, with what DeepSpeed's ds_to_universal makes of it; beside it CASE.expected.pt, the model by its
zero_to_fp32, and CASE.live.pt, the masters that the engine has in memory.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import nn

CASES = {
    "zero1_bf16": (1, "bf16"),
    "zero1_fp32": (1, ""),
    "zero2_bf16": (2, "bf16"),
    "zero2_fp32": (2, ""),
    "zero1_round_robin": (1, "bf16"),
    "zero2_round_robin": (2, "bf16"),
    "zero3_bf16": (3, "bf16"),
    "zero3_fp32": (3, ""),
}
NO_ZERO = "no_zero"


class Net(nn.Module):
    """Odd sizes, ties, buffers, a frozen layer, and parameters of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 7)
        self.frozen = nn.Linear(7, 5, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.norm = nn.LayerNorm(5)
        self.register_buffer("shift", torch.randn(5))
        self.register_buffer("seen", torch.tensor(0))
        self.down = nn.Linear(5, 6, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits."""
        self.seen += 1
        hidden = self.frozen(torch.relu(self.up(self.embed(ids))))
        hidden = hidden + self.shift.to(hidden.dtype)
        return self.head(self.down(self.norm(hidden)) * self.scale).float()


def train(stage: int, dtype: str, *, round_robin: bool = False) -> Any:
    """An engine that has made three steps, of two groups of parameters."""
    torch.manual_seed(3)
    model = Net()
    decayed = [p for n, p in model.named_parameters() if p.requires_grad and p.dim() > 1]
    others = [p for n, p in model.named_parameters() if p.requires_grad and p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}
    config["zero_optimization"]["round_robin_gradients"] = round_robin
    if stage == 3:
        config["zero_optimization"] |= {"stage3_param_persistence_threshold": 0, "sub_group_size": 60}
    if dtype:
        config[dtype] = {"enabled": True}
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        ids = torch.randint(0, 11, (4,))
        engine.backward(nn.functional.cross_entropy(engine(ids), ids.roll(1)))
        engine.step()
    return engine


def universal(folder: Path) -> None:
    """What DeepSpeed's own converter makes of a checkpoint."""
    given = {
        "input_folder": str(folder / "global_step3"),
        "output_folder": str(folder / "global_step3_universal"),
    }
    asked = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    ds_to_universal.main(SimpleNamespace(**given, **asked, inject_missing_state=True))


def main() -> None:
    """All cases."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled, for minutes
    deepspeed.init_distributed(dist_backend="gloo")
    for case, (stage, dtype) in CASES.items():
        engine = train(stage, dtype, round_robin=case.endswith("round_robin"))
        client = {
            "epoch": 7,
            "rank": dist.get_rank(),
            "args": argparse.Namespace(lr=1),
            "seen": torch.arange(4),
        }
        engine.save_checkpoint(str(out / case), client_state=client)
        live = {
            n: safe_get_full_fp32_param(p) for n, p in engine.module.named_parameters() if p.requires_grad
        }
        dist.barrier()
        if dist.get_rank() == 0:
            torch.save(live, out / f"{case}.live.pt")
            rival = get_fp32_state_dict_from_zero_checkpoint(str(out / case))
            torch.save(rival, out / f"{case}.expected.pt")
            universal(out / case)
        dist.barrier()
        engine.destroy()
    engine = train(0, "")
    engine.save_checkpoint(str(out / NO_ZERO))
    if dist.get_rank() == 0:
        torch.save(engine.module.state_dict(), out / f"{NO_ZERO}.expected.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
