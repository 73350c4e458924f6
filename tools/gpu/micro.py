"""What the runtime relies on of CUDA's memory, and what alignment and staging cost; a table, and JSON.

python -m tools.gpu.micro --device cuda        (cpu: the same code in small, where there is something to measure)
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tools.bench.rows import Row, print_table, write_json
from vescale_fsdp.checkpoint.saving.staging import Stager
from vescale_fsdp.torch_private import storage_id

OFFSETS = (0, 8, 16, 32, 64, 128, 256)  # elements of two bytes


def _milliseconds(device: torch.device, work: Callable[[], object], rounds: int = 5) -> float:
    """Until the device is done; the median."""
    found = []
    for _ in range(rounds + 2):
        _synchronize(device)
        start_s = time.perf_counter()
        work()
        _synchronize(device)
        found.append(1000 * (time.perf_counter() - start_s))
    return statistics.median(found[2:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def alignment(device: torch.device, size: int) -> Iterator[Row]:
    """Whether a matrix product minds where its weight starts."""
    left = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    aligned = 0.0
    for offset in OFFSETS:
        flat = torch.randn(size * size + 512, device=device, dtype=torch.bfloat16)
        right = flat[offset : offset + size * size].view(size, size)
        found = _milliseconds(device, lambda right=right: torch.mm(left, right.t()))  # type: ignore[misc]
        aligned = aligned or found
        yield Row(f"product of {size}", f"weight at {2 * offset} bytes", "ms", found, aligned, "aligned")


def storages() -> Iterator[Row]:
    """Memory that is given back and taken again: views see it, and it comes from the pool that is entered."""
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
    """How long `async_save` stops the trainer, with and without an optimizer that tells when it writes."""
    tensors = [torch.ones(mebibytes * 2**20 // 4 // 64, device=device) for _ in range(64)]
    stager, stepped = Stager(), frozenset(storage_id(tensor) for tensor in tensors)
    for case, can_wait in (("", frozenset[int]()), (", optimizer given", stepped)):
        stalls = []
        for _ in range(5):
            _synchronize(device)
            start_s = time.perf_counter()
            _, copying = stager.stage(tensors, can_wait=can_wait)
            stalls.append(1000 * (time.perf_counter() - start_s))
            copying.finish()
        yield Row(
            f"{mebibytes} MiB of state{case}", "stall of async_save", "ms", statistics.median(stalls[2:])
        )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="CUDA's memory, alignment, staging")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    device = torch.device(given.device)
    is_gpu = device.type == "cuda"
    rows = [*(storages() if is_gpu else ()), *alignment(device, 4096 if is_gpu else 64)]
    rows += staging(device, 4096 if is_gpu else 8)
    print_table(rows)
    if given.json:
        write_json(given.json, rows)


if __name__ == "__main__":
    main()
