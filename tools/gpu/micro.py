"""Figures of one device: its allocator, the kernels of a step by stream, staging, alignment, optimizers, checkpoints.

    python -m tools.gpu.micro allocator trace --device cuda

On other devices than GPUs sizes are small, and facts that only a GPU can show are left out. The trace of a step and
checkpoints are written to ``--folder``.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from tools.bench.rows import Row, print_table, write_json
from tools.gpu.devices import KINDS, open_device, synchronize
from tools.gpu.step import group_for
from vescale_fsdp import fully_shard
from vescale_fsdp.checkpoint.state.host_copies import Stager
from vescale_fsdp.optim import AdamW8bit
from vescale_fsdp.torch_private import storage_id

OFFSETS = (0, 8, 16, 32, 64, 128, 256)  # in elements of two bytes


def _milliseconds(device: torch.device, work: Callable[[], object], rounds: int = 5) -> float:
    """Median milliseconds of a call, until the device has finished."""
    found = []
    for _ in range(rounds + 2):
        synchronize(device)
        start_s = time.perf_counter()
        work()
        synchronize(device)
        found.append(1000 * (time.perf_counter() - start_s))
    return statistics.median(found[2:])


def alignment(device: torch.device, size: int) -> Iterator[Row]:
    """Time of a matrix product by the offset at which its weight starts."""
    left = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    aligned = 0.0
    for offset in OFFSETS:
        flat = torch.randn(size * size + 512, device=device, dtype=torch.bfloat16)
        right = flat[offset : offset + size * size].view(size, size)
        found = _milliseconds(device, lambda right=right: torch.mm(left, right.t()))  # type: ignore[misc]
        aligned = aligned or found
        yield Row(f"product of {size}", f"weight at {2 * offset} bytes", "ms", found, aligned, "aligned")


def storages() -> Iterator[Row]:
    """Freed and reallocated memory: views see it, and it comes from the active pool."""
    flat = torch.empty(1 << 24, device="cuda")
    view, storage = flat[:10], flat.untyped_storage()
    with torch.cuda.stream(torch.cuda.Stream()):
        storage.resize_(0)
        storage.resize_(4 << 24)
    torch.cuda.synchronize()
    flat.fill_(1)
    yield Row(
        "storage", "a view sees memory that came back", "bool", float(view.sum().item() == 10), target=">= 1"
    )
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        pooled = torch.empty(1 << 22, device="cuda")
    address = pooled.data_ptr()
    pooled.untyped_storage().resize_(0)
    with torch.cuda.use_mem_pool(pool):
        pooled.untyped_storage().resize_(4 << 22)
    same = float(pooled.data_ptr() == address)
    yield Row("storage", "memory taken inside a pool is the pool's", "bool", same, target=">= 1")


def staging(device: torch.device, mebibytes: int) -> Iterator[Row]:
    """Time that `async_save` blocks the trainer, with and without an optimizer that reports its writes."""
    tensors = [torch.ones(mebibytes * 2**20 // 4 // 64, device=device) for _ in range(64)]
    stager, stepped = Stager(), frozenset(storage_id(tensor) for tensor in tensors)
    for case, can_wait in (("", frozenset[int]()), (", optimizer given", stepped)):
        stalls = []
        for _ in range(5):
            synchronize(device)
            start_s = time.perf_counter()
            _, copying = stager.stage(tensors, can_wait=can_wait)
            stalls.append(1000 * (time.perf_counter() - start_s))
            copying.finish()
        yield Row(
            f"{mebibytes} MiB of state{case}", "stall of async_save", "ms", statistics.median(stalls[2:])
        )


def checkpoints(device: torch.device, mebibytes: int, folder: Path) -> Iterator[Row]:
    """`save` and `load` of tensors on the device, through pinned memory."""
    from vescale_fsdp.checkpoint import load, save  # needs packages that a bare machine lacks

    numel = mebibytes * 2**20 // 4 // 16
    state = {str(number): torch.ones(numel, device=device) for number in range(16)}
    title, path = f"{mebibytes} MiB of state", folder / "checkpoint"
    yield Row(title, "save", "ms", _milliseconds(device, lambda: save(path, state, overwrite=True), 1))
    yield Row(title, "load", "ms", _milliseconds(device, lambda: load(path, state), 1))
    shutil.rmtree(path)


def _num_layers(device: torch.device) -> int:
    return 8 if device.type == "cuda" else 2


def _sharded(device: torch.device, function: Any, width: int) -> nn.Module:
    torch.manual_seed(0)
    with device:
        layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(_num_layers(device))]
        model = nn.Sequential(*layers)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for module in (*model, model):
        function(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    return model


def _backward(model: nn.Module, device: torch.device, width: int) -> None:
    model(torch.ones(16, width, device=device)).float().square().mean().backward()


def steps(device: torch.device, width: int) -> Iterator[Row]:
    """Clipping and optimizer steps of one rank of 64, whose collectives send nothing, against FSDP2's."""
    title = f"{_num_layers(device)} layers of {width}, rank of 64"
    kinds: dict[str, Any] = {
        "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-4, foreach=True),
        "fused AdamW": lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True),
        "AdamW8bit": lambda params: AdamW8bit(params, lr=1e-4),
    }
    taken: dict[str, dict[str, float]] = {"ours": {}, "FSDP2": {}}
    for name, function in (("ours", fully_shard), ("FSDP2", torch_fully_shard)):
        rule = {"granularity": AdamW8bit.granularity()} if name == "ours" else {}
        model = _sharded(device, partial(function, **rule), width)
        _backward(model, device, width)
        params = list(model.parameters())
        taken[name]["clip_grad_norm_"] = _milliseconds(
            device,
            lambda params=params: nn.utils.clip_grad_norm_(params, 1.0),  # type: ignore[misc]
        )
        for kind, make in kinds.items():
            if name == "ours" or kind == "AdamW":
                taken[name][f"step of {kind}"] = _milliseconds(device, make(params).step)
    for metric, found in taken["ours"].items():
        rival = taken["FSDP2"].get(metric, taken["FSDP2"]["step of AdamW"])
        yield Row(title, metric, "ms", found, rival, "FSDP2")


def trace(device: torch.device, width: int, folder: Path) -> Iterator[Row]:
    """Write a trace of a step; returns the number of kernels of each stream (without a GPU: of operators)."""
    model = _sharded(device, fully_shard, width)
    _backward(model, device, width)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if device.type == "cuda" else []
    with torch.profiler.profile(activities=kinds) as seen:
        _backward(model, device, width)
        synchronize(device)
    path = folder / "trace.json.gz"
    seen.export_chrome_trace(str(path))
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    kind = "kernel" if device.type == "cuda" else "cpu_op"
    streams: Counter[str] = Counter()
    names: dict[str, Counter[str]] = {}
    for event in events:
        if event.get("cat") == kind:
            stream = str(event["args"].get("stream", "host"))
            streams[stream] += 1
            names.setdefault(stream, Counter())[event["name"].split("<")[0]] += 1
    for stream, count in sorted(streams.items()):
        print(f"stream {stream}: {names[stream].most_common(6)}", flush=True)
        yield Row("forward and backward", f"kernels on stream {stream}", "", float(count))


def checks(device: torch.device, folder: Path) -> dict[str, Callable[[], Iterator[Row]]]:
    """The groups of figures by name, each with the function that measures it."""
    is_gpu = device.type == "cuda"
    width, mebibytes = (4096, 4096) if is_gpu else (64, 8)

    def of_64_ranks(measure: Callable[..., Iterator[Row]], *options: Any) -> Iterator[Row]:
        with group_for(device):
            yield from measure(device, width, *options)

    return {
        "allocator": lambda: storages() if is_gpu else iter(()),
        "alignment": lambda: alignment(device, width),
        "trace": lambda: of_64_ranks(trace, folder),
        "staging": lambda: staging(device, mebibytes),
        "optimizers": lambda: of_64_ranks(steps),
        "checkpoints": lambda: checkpoints(device, mebibytes, folder),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="figures of one device")
    parser.add_argument("names", nargs="*", help="groups of figures; default: all")
    parser.add_argument("--device", choices=KINDS, default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("gpu_report"))
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    measures = checks(open_device(given.device), given.folder)
    rows: list[Row] = []
    for name in given.names or measures:
        try:
            rows += measures[name]()
        except ModuleNotFoundError as error:  # of a package that is only needed where files are written
            print(f"{name}: left out, because there is no package {error.name}", flush=True)
    print_table(rows)
    if given.json:
        write_json(given.json, rows)


if __name__ == "__main__":
    main()
