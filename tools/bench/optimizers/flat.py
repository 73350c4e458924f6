"""Time, kernels and memory of AdamW's step: on flat shards, against the same AdamW per parameter.

    python tools/bench/optimizers/flat.py   one rank of 64 (torch's fake process group), both models
    python tools/bench/optimizers/flat.py --world 8 --json flat.json

One process has one rank's shards and gradients; the optimizers alternate on them. Kernels are the computing operators
that a dispatch mode sees. Memory is what a step needs besides weights, gradients and state, as growth of the
resident set's high-water mark (set MALLOC_MMAP_THRESHOLD_=65536, so that glibc gives freed blocks back).
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[3]))

from tools.bench.rows import Row, print_table, write_json
from tools.bench.step import Settings, Trainer, _high_water_bytes, _reset_high_water, _resident_bytes, start
from vescale_fsdp.optim import FlatOptimizer

VARIANTS: dict[str, dict[str, Any]] = {"default": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}


class CountKernels(TorchDispatchMode):
    """Counts operators other than views."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is not torch.Tensor and kind is not nn.Parameter for kind in types):
            return NotImplemented
        returns = func._schema.returns
        self.calls += not any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        return func(*args, **(kwargs or {}))


def measure(name: str, settings: Settings, mesh: DeviceMesh) -> list[Row]:
    """Rows of one model."""
    world, steps = settings.fake_world, settings.steps
    trainer = Trainer("ours", name, settings, mesh)
    params = list(trainer.model.parameters())
    trainer.model(trainer.batch).float().pow(2).mean().backward()
    optimizers: dict[str, torch.optim.Optimizer] = {}
    for variant, options in VARIANTS.items():
        optimizers[f"flat {variant}"] = FlatOptimizer(torch.optim.AdamW, params, lr=1e-4, **options)
        optimizers[f"each {variant}"] = torch.optim.AdamW(params, lr=1e-4, **options)
    seconds: dict[str, list[float]] = {key: [] for key in optimizers}
    grown: dict[str, int] = {}
    kernels: dict[str, int] = {}
    for number in range(steps + 2):
        for key, optimizer in optimizers.items():
            gc.collect()
            _reset_high_water()
            before, start_s = _resident_bytes(), time.perf_counter()
            optimizer.step()
            if number > 1:
                seconds[key].append(time.perf_counter() - start_s)
                grown[key] = max(grown.get(key, 0), _high_water_bytes() - before)
    for key, optimizer in optimizers.items():
        with CountKernels() as counter:
            optimizer.step()
        kernels[key] = counter.calls
    rows = []
    for variant in VARIANTS:
        case, (flat, each) = f"{name}, rank of {world}, {variant}", (f"flat {variant}", f"each {variant}")
        ms = {key: 1000 * statistics.median(seconds[key]) for key in (flat, each)}
        rows.append(Row(case, "AdamW step", "ms", ms[flat], ms[each], "per parameter"))
        rows.append(Row(case, "kernels", "per step", kernels[flat], kernels[each], "per parameter"))
        mib = {key: grown[key] / 2**20 for key in (flat, each)}
        rows.append(Row(case, "memory of the step", "MiB", mib[flat], mib[each], "per parameter"))
    return rows


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description="AdamW on flat shards and per parameter")
    parser.add_argument("--models", default="dense,moe")
    parser.add_argument("--world", type=int, default=64, help="one rank of this many")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    settings = Settings("cpu", 1, given.world, given.steps, 2, 64, "small")
    mesh = start(0, settings)
    rows = [row for name in given.models.split(",") for row in measure(name, settings, mesh)]
    print_table(rows)
    if given.json:
        write_json(given.json, rows)


if __name__ == "__main__":
    main()
