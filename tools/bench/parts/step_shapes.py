"""Step time against FSDP2's for many shapes and switches: `python tools/bench/step.py --shapes`.

A shape is a stack of equal blocks; a switch is a way to shard or to train it. Both runtimes alternate in the same
processes, step by step. The ratio is that of the medians, and must not exceed 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils.checkpoint import checkpoint

from vescale_fsdp import fully_shard


@dataclass(frozen=True)
class Case:
    """A stack of ``depth`` blocks of two linear layers [width -> hidden -> width], and its training options."""

    name: str
    depth: int
    width: int
    hidden: int
    rows: int = 64
    half: bool = True  # bf16 compute, fp32 reduction
    ranks: tuple[int, ...] = (2, 4)
    hybrid: bool = False  # two replicas
    part: int | None = None  # reshard_after_forward=<int>
    frozen: bool = False  # all but the biases of every second block
    microbatches: int = 1  # only the last one communicates
    recompute: bool = False
    matrices: int = 1  # hidden layers per block, in parallel


CASES = (
    Case("tiny units", 32, 8, 8, 4),
    Case("tiny units, fp32", 32, 8, 8, 4, half=False),
    Case("many small units", 32, 128, 256),
    Case("many small units, fp32", 32, 128, 256, half=False),
    Case("few large units", 2, 1024, 2048),
    Case("few large units, fp32", 2, 1024, 2048, half=False),
    Case("many parameters per unit", 4, 128, 128, matrices=24),
    Case("many parameters per unit, fp32", 4, 128, 128, half=False, matrices=24),
    Case("uneven", 6, 517, 333),
    Case("uneven, fp32", 6, 517, 333, half=False),
    Case("frozen", 6, 384, 768, frozen=True),
    Case("accumulation over 3", 6, 384, 768, microbatches=3),
    Case("recompute", 6, 384, 768, recompute=True),
    Case("replicas", 6, 384, 768, ranks=(4,), hybrid=True),
    Case("replicas, fp32", 6, 384, 768, ranks=(4,), hybrid=True, half=False),
    Case("kept over 2 ranks", 6, 384, 768, ranks=(4,), part=2),
    Case("kept over 2 ranks, fp32", 6, 384, 768, ranks=(4,), part=2, half=False),
)


class Block(nn.Module):
    """x + sum of down_i(gelu(up_i(x)))."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(case.width, case.hidden) for _ in range(case.matrices))
        self.down = nn.ModuleList(nn.Linear(case.hidden, case.width) for _ in range(case.matrices))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(nn.functional.gelu(up(x)))
        return x


class Stack(nn.Module):
    """An input layer, the blocks, and a head; the input layer and the head are in the root's unit."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.first = nn.Linear(case.width, case.width)
        self.blocks = nn.ModuleList(Block(case) for _ in range(case.depth))
        self.head = nn.Linear(case.width, 8)
        self.recompute = case.recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


def sharded(case: Case, mesh: DeviceMesh, function: Callable[..., Any]) -> Stack:
    """The case's model, sharded by one of the runtimes."""
    torch.manual_seed(0)
    model = Stack(case)
    if case.frozen:
        for block in list(model.blocks)[::2]:
            for name, param in block.named_parameters():
                param.requires_grad_(name.endswith("bias"))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if case.half else MixedPrecisionPolicy()
    for block in model.blocks:
        # FSDP2 requires one requires_grad per unit's reduction; both runtimes get the same mix of frozen and trained.
        function(block, mesh=mesh, mp_policy=policy, reshard_after_forward=case.part or True)
    function(model, mesh=mesh, mp_policy=policy)
    return model


def steps(case: Case, model: Any, optimizer: torch.optim.Optimizer) -> Iterator[float]:
    """Train without end; yields the seconds of each step."""
    batch = torch.randn(case.rows, case.width, generator=torch.Generator().manual_seed(dist.get_rank()))
    while True:
        start_s = time.perf_counter()
        for micro in range(case.microbatches):
            if case.microbatches > 1:
                model.set_requires_gradient_sync(micro == case.microbatches - 1)
            model(batch).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield time.perf_counter() - start_s


def time_case(case: Case, num_steps: int) -> dict[str, list[float]]:
    """Seconds per step of both runtimes on this rank, after warm-up."""
    world = dist.get_world_size()
    mesh = (
        init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        if case.hybrid
        else None
    )
    mesh = mesh or init_device_mesh("cpu", (world,))
    running = {}
    for rival, function in (("ours", fully_shard), ("fsdp2", torch_fully_shard)):
        model = sharded(case, mesh, function)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
        running[rival] = steps(case, model, optimizer)
    seconds: dict[str, list[float]] = {rival: [] for rival in running}
    for number in range(num_steps + 3):
        order = list(running) if number % 2 else list(running)[::-1]
        for rival in order:
            dist.barrier()
            elapsed = next(running[rival])
            if number >= 3:
                seconds[rival].append(elapsed)
    return seconds
