"""Sharded training against a plain model, under every switch of `fully_shard`, on any device and backend.

    python -m tools.gpu.parity                                          one rank on the CPU
    python -m tools.gpu.parity --device cuda --backend gloo --ranks 2   two ranks on one GPU
    torchrun --nproc-per-node 8 -m tools.gpu.parity --device cuda --backend nccl      one rank per GPU; as --ranks 8

Every rank trains on its own rows; a plain model on each rank trains on all rows. Weights must be equal up to the order
of sums, and must have changed by far more than that. ``--control`` runs the first case again and changes one weight, by
a half and to NaN (as memory that is freed too early may do), which must be detected.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from tools.gpu.switches import CASES, INDUCTOR, Case
from vescale_fsdp import FSDPModule, fully_shard
from vescale_fsdp.optim import step_in_backward

CONTROLS = (1.5, math.nan)

WIDTH, HIDDEN, STEPS = 64, 192, 3


class Block(nn.Module):
    """A normalized two-layer network with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks, and a head in the root's unit."""

    def __init__(self, *, recompute: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 8)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


@dataclass(frozen=True)
class Found:
    """The largest differences of weights: from the plain model's, and from the initial ones."""

    case: str
    apart: float
    moved: float
    bound: float

    @property
    def is_right(self) -> bool:
        """Whether both models have equal weights, which training has changed."""
        return self.apart <= self.bound < self.moved / 4


def _rows(step: int, rank: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    # Without a wait of the host, which would order the next forward behind the optimizer's step.
    return torch.randn(4, WIDTH, generator=generator).to(device, non_blocking=True)


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, case: Case, ranks: list[int], device: torch.device
) -> Iterator[None]:
    """Train on the rows of these ranks."""
    for step in range(STEPS):
        for micro in range(case.microbatches):
            if isinstance(model, FSDPModule):
                case.before_backward(model, micro == case.microbatches - 1)
            for rank in ranks:
                rows = _rows(case.microbatches * step + micro, rank, device)
                (model(rows).float().square().mean() / len(ranks)).backward()
            if isinstance(model, FSDPModule) and case.after_backward is not None:
                case.after_backward(model)
        if not case.in_backward:  # a step in the backward does not clip
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(model, FSDPModule) and case.after_step is not None:
            case.after_step(model)
        yield


def _sharded(model: Any, case: Case, device: torch.device) -> list[FSDPModule]:
    """Shard a model by the case's options; returns its units."""
    options = {"mesh": init_device_mesh(device.type, (dist.get_world_size(),)), **case.options}
    if case.of_model is not None:
        options |= case.of_model(model)
    inner = [layer for block in model.blocks for layer in (block.up, block.down)] if case.inner else []
    units: list[FSDPModule] = [fully_shard(module, **options) for module in (*inner, *model.blocks, model)]
    if case.set_up is not None:
        case.set_up(units[-1])
    if case.compiled:
        for block in model.blocks:
            block.compile(backend=case.compiled)
    return units


def compare(case: Case, device: torch.device, *, sabotage: float | None = None) -> Found:
    """Train both models on all ranks of the default group; returns the same result on each rank.

    Args:
        sabotage: factor for one weight of the sharded model after the first step.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Stack(recompute=case.recompute).to(device))
        if case.prepare is not None:
            case.prepare(models[-1])
    plain, model = models
    start = [param.detach().clone() for param in plain.parameters()]
    sharded = _sharded(model, case, device)
    # Not Adam: it would amplify the rounding of small gradients.
    kind: Any = torch.optim.AdamW if case.in_backward else torch.optim.SGD
    rate = 0.05 if case.in_backward else 2.0
    optimizer = kind(model.parameters(), lr=rate)
    if case.in_backward:
        step_in_backward(model, optimizer)
    steps = _train(model, optimizer, case, [rank], device)
    next(steps)
    if sabotage is not None:
        with torch.no_grad():
            next(model.parameters()).mul_(sabotage)
    for _ in steps:
        pass
    for _ in _train(plain, kind(plain.parameters(), lr=rate), case, list(range(world)), device):
        pass
    for unit in sharded:
        unit.reshard()
    trained = [
        param.full_tensor().to(device) if isinstance(param, DTensor) else param
        for param in model.parameters()
    ]
    apart, moved = largest_difference(trained, list(plain.parameters())), largest_difference(trained, start)
    return Found(case.name, apart, moved, case.apart)


@torch.no_grad()
def largest_difference(values: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    """The largest absolute difference of two lists of tensors; NaN if any is NaN (Python's ``max`` ignores it)."""
    pairs = zip(values, others, strict=True)
    return torch.stack([(one - other).abs().max() for one, other in pairs]).max().item()


def backend_for(device_type: str, backend: str) -> str:
    """The backends of the process group: offloaded tensors are on the host, where others do not work."""
    return backend if device_type == "cpu" or backend == "gloo" else f"cpu:gloo,{device_type}:{backend}"


@contextmanager
def _ranks(backend: str) -> Iterator[None]:
    if dist.is_initialized():
        pass
    elif "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def main() -> int:
    """Command line; 0 if every case is right and, with ``--control``, the cases with a changed weight are wrong."""
    parser = argparse.ArgumentParser(description="sharded training beside a plain model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--only", default="", help="part of a case's name")
    parser.add_argument("--inductor", action="store_true", help="compile blocks by Inductor, too")
    parser.add_argument(
        "--control", action="store_true", help="the first case again, with a changed weight: must be wrong"
    )
    parser.add_argument("--ranks", type=int, default=1, help="processes to start, this one aside")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    given.backend = backend_for(given.device, given.backend)
    if given.ranks == 1:
        return _compare_cases(given)
    # Forked after torch is imported and before it starts threads: saves half a minute compared with a launcher.
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/ranks"
        ranks = [context.Process(target=_be_rank, args=(given, rank, meeting)) for rank in range(given.ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    return int(any(process.exitcode for process in ranks))


def _be_rank(given: argparse.Namespace, rank: int, meeting: str) -> None:
    dist.init_process_group(given.backend, init_method=meeting, rank=rank, world_size=given.ranks)
    sys.exit(_compare_cases(given))


def _wanted(given: argparse.Namespace) -> list[Case]:
    cases = [*CASES, *([INDUCTOR] if given.inductor else [])]
    return [case for case in cases if given.only in case.name]


def _compare_cases(given: argparse.Namespace) -> int:
    device = torch.device(given.device)
    found: list[Found] = []
    controls: list[Found] = []
    with _ranks(given.backend):
        if device.type != "cpu":
            module = torch.get_device_module(device)
            device = torch.device(device.type, dist.get_rank() % module.device_count())
            module.set_device(device)
        for case in _wanted(given):
            found.append(compare(case, device))
            if dist.get_rank() == 0:
                print(found[-1], flush=True)
            if given.control and not controls:
                controls = [compare(case, device, sabotage=factor) for factor in CONTROLS]
                if dist.get_rank() == 0:
                    print(f"a weight changed: {controls}", flush=True)
        if given.json and dist.get_rank() == 0:
            given.json.write_text(json.dumps([{**vars(each), "is_right": each.is_right} for each in found]))
    is_blind = given.control and (not controls or any(each.is_right for each in controls))
    return 0 if found and all(each.is_right for each in found) and not is_blind else 1


if __name__ == "__main__":
    sys.exit(main())
