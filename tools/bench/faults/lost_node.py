"""Restoring after the loss of a node: from the memory of its partner, against the same step from disk.

    python tools/bench/faults/lost_node.py                                 2 ranks, a node each, 1 GiB
    python tools/bench/faults/lost_node.py --megabytes 4096 --json lost_node.json

Alternating: the memory of rank 1's node is cleared and the step is restored from its partner's copy; then the same step
is restored from disk, after its pages were dropped from the cache (`posix_fadvise`). Bytes read are counted by the
kernel for the process (Linux). Both restores verify checksums of all bytes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[3]))

from tools.bench.parts.shards import Settings, Shards, spawn, start_rank
from tools.bench.rows import Row, print_table, write_json
from vescale_fsdp.checkpoint import CheckpointManager, RamTier


def _bytes_read() -> int:
    """Bytes that this process has read from storage so far; 0 on systems that do not count them."""
    counts = Path("/proc/self/io")
    if not counts.exists():
        return 0
    lines = dict(line.split(": ") for line in counts.read_text().splitlines())
    return int(lines["read_bytes"])


def _drop_pages(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def _worker(rank: int, settings: Settings) -> None:
    """Worker: save one step to memory, with a copy, and to disk; then restore it from each, alternating."""
    os.environ["LOCAL_RANK"] = "0"  # each rank acts as the first rank of its own node
    shards = Shards(settings, start_rank(rank, settings.ranks, settings.port))
    root = Path(settings.folder)
    memory = Path("/dev/shm") / root.name / f"node{rank}"
    tier = RamTier("run", folder=memory, replicas=1)
    both = CheckpointManager(root / "steps", ram=tier)
    disk = CheckpointManager(root / "steps")
    both.save(1, shards.state)
    both.wait()
    seconds: dict[str, list[float]] = {"memory": [], "disk": []}
    read = {"memory": 0, "disk": 0}

    def turn(name: str, manager: CheckpointManager) -> None:
        dist.barrier()
        before, start_s = _bytes_read(), time.perf_counter()
        restored = manager.restore(shards.state, verify="while")
        dist.barrier()
        seconds[name].append(time.perf_counter() - start_s)
        read[name] += _bytes_read() - before
        assert restored is not None and restored.tier == ("ram" if name == "memory" else "disk")

    try:
        for _ in range(settings.repeats + 1):  # the first turn warms up
            if rank == 1:
                shutil.rmtree(memory)
            turn("memory", both)
            dist.barrier()
            if rank == 0:
                _drop_pages(root / "steps")
            turn("disk", disk)
    finally:
        shutil.rmtree(memory, ignore_errors=True)
    torch.save({"seconds": seconds, "read": read, "bytes": shards.num_bytes}, f"{settings.out}{rank}")
    dist.destroy_process_group()


def measure(settings: Settings) -> list[Row]:
    """Rows of both restores: time, and bytes read from storage."""
    found: list[dict[str, Any]] = spawn(_worker, settings.ranks, settings)
    case = f"{settings.ranks} nodes, {settings.megabytes} MiB, one lost"
    ours, rival = (statistics.median(found[0]["seconds"][name][1:]) for name in ("memory", "disk"))
    ours_bytes, rival_bytes = (sum(one["read"][name] for one in found) / 1e6 for name in ("memory", "disk"))
    return [
        Row(case, "restore, its part from its partner", "s", ours, rival, "all from disk, cold", "< 1"),
        Row(case, "read from storage meanwhile", "MB", ours_bytes, None, None, "<= 0"),
        Row(case, "read from storage by the rival", "MB", rival_bytes),
    ]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1024, help="state of all ranks together")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to compare with")
    parser.add_argument("--json", type=Path, default=None)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder, prefix="bench-lost-node-") as folder:
        rows = measure(Settings(2, 2, chosen.megabytes, chosen.repeats, folder))
    shutil.rmtree(Path("/dev/shm") / Path(folder).name, ignore_errors=True)
    print_table(rows)
    if chosen.json is not None:
        write_json(chosen.json, rows)


if __name__ == "__main__":
    main()
