"""Gather and reduction of a group's buffer on gloo: this package's, in place, against gloo's own collectives.

    python tools/bench/collectives.py                     2 ranks, 30 MB
    python tools/bench/collectives.py --ranks 4 --numel 4000000 --json collectives.json

Medians over alternating calls; all ranks on this machine, one thread per rank. Extra memory is the growth of
the resident set's high-water mark during a call (glibc's mmap threshold fixed, so that freed blocks leave it).
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parents[2]))

from tools.bench.rows import Row, print_table, write_json
from tools.bench.step import _high_water_bytes, _reset_high_water, _resident_bytes
from vescale_fsdp.collectives.operations import all_gather_into, reduce_scatter_into


def measure(rank: int, ranks: int, numel: int, rounds: int, port: int, out: str) -> None:
    """Worker: time both ways, alternating."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    group = dist.group.WORLD
    assert group is not None
    full, shard = torch.randn(ranks * numel), torch.empty(numel)
    own = full[rank * numel : (rank + 1) * numel]

    def ours(work: object) -> None:
        if work is not None:
            work.wait()  # type: ignore[attr-defined]

    ways: dict[str, Callable[[], object]] = {
        "gather ours": lambda: ours(all_gather_into(full, own, group)),
        "gather gloo": lambda: dist.all_gather_into_tensor(full, own),
        "reduce ours": lambda: ours(reduce_scatter_into(shard, full, dist.ReduceOp.AVG, group)),
        "reduce gloo": lambda: dist.reduce_scatter_tensor(shard, full, op=dist.ReduceOp.AVG),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    extra = dict.fromkeys(ways, 0)
    for turn in range(rounds + 1):
        for name, way in ways.items():
            dist.barrier()
            _reset_high_water()
            before, start_s = _resident_bytes(), time.perf_counter()
            way()
            if turn:
                seconds[name].append(time.perf_counter() - start_s)
                extra[name] = max(extra[name], _high_water_bytes() - before)
    if rank == 0:
        torch.save((seconds, extra), out)
    dist.destroy_process_group()


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description="gather and reduction on gloo")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--numel", type=int, default=3_750_000, help="elements per rank")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(64 * 1024)  # 64 KiB
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        out = f"{folder}/figures"
        mp.spawn(measure, (given.ranks, given.numel, given.rounds, port, out), nprocs=given.ranks)
        seconds, extra = torch.load(out)
    rows = []
    case = f"{given.ranks} ranks, {given.ranks * given.numel * 4 / 1e6:.0f} MB"
    for verb in ("gather", "reduce"):
        mine, theirs = f"{verb} ours", f"{verb} gloo"
        ours_ms, gloo_ms = (1000 * statistics.median(seconds[name]) for name in (mine, theirs))
        rows.append(Row(case, f"{verb} time", "ms", ours_ms, gloo_ms, "gloo"))
        rows.append(Row(case, f"{verb} extra memory", "MB", extra[mine] / 1e6, extra[theirs] / 1e6, "gloo"))
    print_table(rows)
    if given.json:
        write_json(given.json, rows)


if __name__ == "__main__":
    main()
