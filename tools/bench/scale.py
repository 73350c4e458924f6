"""Time and memory of one rank as the number of ranks grows, in one process with torch's fake group.

    python tools/bench/scale.py                                     1,000 parameters, 64 to 16,384 ranks
    python tools/bench/scale.py --parameters 1000,36000 --ranks 16384 --rival-ranks 0
    python tools/bench/scale.py --json scale.json

The model has units of small square matrices on the meta device, so that the sharding itself dominates:

    fully_shard     of all units and the root; memory is the growth of the resident set's peak
    first step      forward, backward and AdamW's step, with all lazy initialization; its collectives send nothing, but
                    the fake group's own cost grows with the ranks
    take_state      the first part of `save`: collecting weights and both moments (also for FSDP2's tensors)

Seconds are CPU time: nothing waits here, and other load on the machine matters little. Each case runs in its own
process. FSDP2 runs up to ``--rival-ranks`` ranks: at 16,384 it takes minutes and gigabytes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

sys.path.insert(0, str(Path(__file__).parents[2]))

from tools.bench.rows import Row, print_table, write_json
from tools.bench.step import _high_water_bytes, _reset_high_water, _resident_bytes
from vescale_fsdp import fully_shard
from vescale_fsdp.checkpoint.state.capture import take_state

SIDE = 24  # rows and columns of a matrix: a unit of 600 matrices then has more elements than there are ranks
UNITS = {1000: 100, 36_000: 60}  # 10 matrices each; 600 as in a layer of 200 experts
METRICS = {
    "fully_shard": "s",
    "fully_shard memory": "MiB",
    "first step": "s",
    "take_state": "s",
    "peak": "MiB",
}
TARGETS = {
    (1000, "fully_shard"): "<= 0.5",
    (1000, "fully_shard memory"): "<= 100",
    (36_000, "fully_shard"): "<= 20",
    (36_000, "fully_shard memory"): "<= 1024",
}


class Chain(nn.Module):
    """A unit: matrices that are applied one after another."""

    def __init__(self, num_matrices: int) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(nn.Parameter(torch.empty(SIDE, SIDE)) for _ in range(num_matrices))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, SIDE] -> [rows, SIDE]."""
        for matrix in self.matrices:
            rows = rows @ matrix
        return rows


def measure(parameters: int, ranks: int, rival: bool) -> dict[str, float]:
    """Worker: the figures of one case."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=ranks // 3, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    units = UNITS[parameters]
    with torch.device("meta"):
        model = nn.Sequential(*(Chain(parameters // units) for _ in range(units)))
    function = cast(Callable[..., Any], torch_fully_shard if rival else fully_shard)
    figures = {}
    _reset_high_water()
    before, start = _resident_bytes(), time.process_time()
    for module in (*model, model):
        function(module, mesh=mesh)
    figures["fully_shard"] = time.process_time() - start
    figures["fully_shard memory"] = (_high_water_bytes() - before) / 2**20
    model.to_empty(device="cpu")
    start = time.process_time()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, SIDE)).sum().backward()
    optimizer.step()
    figures["first step"] = time.process_time() - start
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}
    start = time.process_time()
    taken = take_state(state)
    figures["take_state"] = time.process_time() - start
    assert len(taken.locals_by_name) == 4 * parameters  # weights, two moments and the step of each
    figures["peak"] = (_high_water_bytes() - before) / 2**20
    return figures


def in_own_process(*case: Any) -> dict[str, float]:
    """The figures of a case, measured in a new process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, case)


def rows_of(parameters: int, ranks: int, rival_ranks: int) -> list[Row]:
    """Measure one case, and FSDP2 if it takes a reasonable time."""
    ours = in_own_process(parameters, ranks, False)
    theirs = in_own_process(parameters, ranks, True) if ranks <= rival_ranks else {}
    case = f"{parameters} parameters, {ranks} ranks"
    return [
        Row(case, metric, unit, ours[metric], theirs.get(metric), "FSDP2" if theirs else None, target)
        for metric, unit in METRICS.items()
        # Targets are for this package's own figures, at the largest number of ranks.
        for target in [TARGETS.get((parameters, metric)) if ranks == 16_384 and not theirs else None]
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="cost of many ranks, one process under a fake group")
    parser.add_argument("--parameters", default="1000", help=f"comma-separated, of {list(UNITS)}")
    parser.add_argument("--ranks", default="64,1024,16384")
    parser.add_argument("--rival-ranks", type=int, default=1024, help="FSDP2 up to so many ranks")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = []
    for parameters in map(int, given.parameters.split(",")):
        for ranks in map(int, given.ranks.split(",")):
            rows += rows_of(parameters, ranks, given.rival_ranks)
    print_table(rows)
    if given.json:
        write_json(given.json, rows)


if __name__ == "__main__":
    main()
