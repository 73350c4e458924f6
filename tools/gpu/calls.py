"""The collectives that training uses, on a group of one rank: results, and the stream on which each runs.

    python -m tools.gpu.calls --device cuda

A group of one rank bypasses the backend in training. Here the backend's functions are called directly. The profiler
tells on which streams a call's device work ran: all of it must be on the caller's stream, because the runtime orders
streams by its own events alone. The asynchronous device checks this by itself.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tools.bench.rows import Row, print_table, write_json
from tools.gpu.devices import KINDS, SIM, hazards, module_of, open_device, synchronize
from vescale_fsdp.collectives.operations import all_to_all_into, backend_of
from vescale_fsdp.collectives.slice_exchange import wait_for

NUMEL = 1 << 20
Call = tuple[str, Callable[[], bool]]
"""A name, and a function that makes the call and returns a check of its result."""


def calls(device: torch.device, group: dist.ProcessGroup) -> Iterator[Call]:
    """The collectives of forward, backward, and narrow reductions."""
    backend = backend_of(group, device.type)
    values = torch.arange(NUMEL, device=device) % 251

    def gather_in_place() -> bool:
        full = values.bfloat16()
        wait_for(backend.all_gather(full, full[:], group))
        return torch.equal(full, values.bfloat16())

    def gathers_of_mixed_dtypes() -> bool:
        shards = [values.to(dtype) for dtype in (torch.bfloat16, torch.float32, torch.uint8)]
        pairs = [(torch.empty_like(shard), shard) for shard in shards]
        wait_for(backend.all_gather_each(pairs, group))
        return all(torch.equal(full, shard) for full, shard in pairs)

    def mean(dtype: torch.dtype) -> bool:
        full, shard = values.to(dtype), torch.empty(NUMEL, dtype=dtype, device=device)
        wait_for(backend.reduce_scatter(shard, full, dist.ReduceOp.AVG, group))
        return torch.equal(shard, values.to(dtype))

    def narrow_sum() -> bool:
        full, shard = values.bfloat16(), torch.empty(NUMEL, device=device)
        wait_for(backend.reduce_scatter(shard, full, dist.ReduceOp.SUM, group))
        return torch.equal(shard, values.bfloat16().float())

    def all_to_all() -> bool:
        sent = values.float()
        received = torch.empty_like(sent)
        wait_for(all_to_all_into(received, sent, [NUMEL], [NUMEL], group))
        return torch.equal(received, sent)

    yield "all-gather, in place", gather_in_place
    yield "all-gathers of three dtypes, coalesced", gathers_of_mixed_dtypes
    yield "reduce-scatter, AVG, fp32", lambda: mean(torch.float32)
    yield "reduce-scatter, AVG, bf16", lambda: mean(torch.bfloat16)
    yield "all-to-all by slices, summed in fp32", narrow_sum
    yield "all-to-all of one buffer", all_to_all


def streams_used(device: torch.device, work: Callable[[], object]) -> dict[int, list[str]]:
    """Return the names of a call's kernels and copies by the number of their stream, as the profiler saw them."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        work()
        synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json.gz"
        profile.export_chrome_trace(str(path))
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    found: dict[int, list[str]] = {}
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            found.setdefault(event["args"]["stream"], []).append(event["name"])
    return found


def check(device: torch.device, group: dist.ProcessGroup) -> Iterator[Row]:
    """Make each call on a stream of its own; yields whether the result and the stream are right."""
    module = module_of(device)
    for name, call in calls(device, group):
        if module is None:
            yield Row(name, "right", "bool", float(call()), target=">= 1")
            continue
        call()  # the first call of a kind creates the communicator
        synchronize(device)
        stream = module.Stream()
        with module.stream(stream):
            if device.type == "cuda":
                used = streams_used(device, call)
                yield Row(name, "streams used", "", float(len(used)), target="<= 1")
                print(name, {number: sorted(set(names)) for number, names in used.items()}, flush=True)
            is_right = call()
            stream.synchronize()
        yield Row(name, "right", "bool", float(is_right), target=">= 1")
        if device.type == SIM:
            yield Row(name, "hazards", "", float(len(hazards(device))), target="<= 0")


def main() -> int:
    """Command line; 1 if a result or a stream is wrong."""
    parser = argparse.ArgumentParser(description="collectives of a group of one rank")
    parser.add_argument("--device", choices=KINDS, default="cuda")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    device = open_device(given.device)
    backends: dict[str, Any] = {
        "cuda": "cpu:gloo,cuda:nccl",
        SIM: f"cpu:gloo,{SIM}:async_device",
        "cpu": "gloo",
    }
    dist.init_process_group(backends[given.device], store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    rows = list(check(device, group))
    dist.destroy_process_group()
    print_table(rows)
    if given.json:
        write_json(given.json, rows)
    return int(any(row.met is False for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
