"""A dense training step on one device as one rank of 64: one reduce-scatter, the narrow reduction, and FSDP2.

    python -m tools.gpu.step --device cuda --rows 4 --seq 2048
    python -m tools.gpu.step --device cuda --ranks 8      one rank per GPU over NCCL: with waits

Without ``--ranks``, collectives send nothing, so other ranks' slices contain garbage; times and memory are those of a
real rank without its waits for the network. Memory is measured first, one runtime after another; then all three
alternate, step by step.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tools.bench.parts.simulated_accelerator import fake_group
from tools.bench.rows import Row, print_table, write_json
from tools.bench.step import NARROW, Settings, Trainer, launch, time_rank
from tools.gpu.devices import KINDS, module_of, open_device
from tools.mirror import mirrored

WORLD_SIZE = 64
RIVALS = ("ours", NARROW, "fsdp2")


def peaks(rival: str, settings: Settings, mesh: DeviceMesh, device: torch.device) -> dict[str, int]:
    """Return the peak bytes of a few steps of one runtime, which is alone in memory."""
    module: Any = module_of(device)
    gc.collect()
    module.empty_cache()
    module.reset_peak_memory_stats()
    trainer = Trainer(rival, "dense", settings, mesh)
    for _ in range(3):
        trainer.step()
    return {
        "peak allocated": module.max_memory_allocated(),
        "peak reserved": module.max_memory_reserved(),
    }


def measure(settings: Settings, device: torch.device) -> Iterator[Row]:
    """Rows of memory (where the device counts it) and of time, beside FSDP2."""
    mesh = init_device_mesh(device.type, (WORLD_SIZE,))
    case = f"dense, {settings.rows * settings.seq} tokens, rank of {WORLD_SIZE}"
    if device.type == "cuda":
        memory = {rival: peaks(rival, settings, mesh, device) for rival in RIVALS}
        for rival in RIVALS[:-1]:
            for metric, value in memory[rival].items():
                scale = 2**20
                yield Row(
                    f"{case}: {rival}",
                    metric,
                    "MiB",
                    value / scale,
                    memory["fsdp2"][metric] / scale,
                    "FSDP2",
                    "<= 1.0",
                )
    gc.collect()  # of the last trainer
    trainers = {rival: Trainer(rival, "dense", settings, mesh) for rival in RIVALS}
    seconds: dict[str, list[float]] = {rival: [] for rival in RIVALS}
    for number in range(settings.steps + 2):
        for place in range(
            len(RIVALS)
        ):  # the order rotates, so that no runtime always follows the same other
            rival = RIVALS[(number + place) % len(RIVALS)]
            taken_s = trainers[rival].step()
            if number >= 2:
                seconds[rival].append(taken_s)
    yield from times(case, seconds)


def times(case: str, seconds: dict[str, list[float]]) -> Iterator[Row]:
    """Rows of the median times of steps, beside FSDP2's."""
    median_ms = {rival: 1000 * statistics.median(each) for rival, each in seconds.items()}
    for rival in RIVALS[:-1]:
        yield Row(f"{case}: {rival}", "step time", "ms", median_ms[rival], median_ms["fsdp2"], "FSDP2")


def measure_ranks(settings: Settings) -> list[Row]:
    """Rows of time of ranks with a device each."""
    figures = launch(settings, time_rank, "dense", RIVALS)
    case = f"dense, {settings.rows * settings.seq} tokens, {settings.ranks} ranks"
    return list(times(case, figures.seconds))


def group_for(device: torch.device) -> AbstractContextManager[Any]:
    """Return the context of a group of `WORLD_SIZE` ranks, of which this process is one."""
    # torch's fake group knows no other devices than its own list.
    return fake_group(WORLD_SIZE) if device.type == "cuda" else mirrored(WORLD_SIZE, device)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="a dense step beside FSDP2's")
    parser.add_argument("--device", choices=KINDS, default="cuda")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=1, help="processes, each with a device of its own")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    size = (given.steps, given.rows, given.seq, "small")
    if given.ranks > 1:
        rows = measure_ranks(Settings(given.device, given.ranks, 0, *size))
    else:
        device = open_device(given.device)
        with group_for(device):
            rows = list(measure(Settings(given.device, 1, WORLD_SIZE, *size), device))
    print_table(rows)
    if given.json:
        write_json(given.json, rows)


if __name__ == "__main__":
    main()
