"""The bytes that training sends between nodes, by the counters of their links; and how ranks of benchmarks end."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from click.testing import CliRunner
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.distributed import run_ranks
from tools.bench import network, step
from tools.bench.network import main
from tools.lab import Traffic

# Bytes between nodes do not depend on tokens, whose computation in bf16 on a CPU takes minutes.
BYTES_ALONE = ["--models", "dense", "--rates", "1", "--steps", "0", "--seq", "4"]


@pytest.mark.lab
@pytest.mark.part("jobs")
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_step_sends_the_least_between_nodes(dtype: str, tmp_path: Path) -> None:
    """Two nodes of two ranks: a slice crosses once, a node's gradients as their sum or unsummed."""
    file = tmp_path / "rows.json"
    arguments = ["--cases", "2x2", "--dtypes", dtype, *BYTES_ALONE]
    done = CliRunner().invoke(main, [*arguments, "--json", str(file)], catch_exceptions=False)
    assert done.exit_code == 0
    rows = [row for row in json.loads(file.read_text()) if row.get("unit") == "bytes per parameter"]
    assert {row["rival_name"]: row["met"] for row in rows} == {"least": True, "fsdp2": True, "ddp": None}


@pytest.mark.lab
@pytest.mark.part("jobs")
def test_a_step_with_the_optimizer_over_nodes_sends_the_least(tmp_path: Path) -> None:
    """However many micro-batches: parameters once, and sums of gradients once. Our FSDP sends both for each of them."""
    file = tmp_path / "rows.json"
    arguments = ["--cases", "2x2s4", "--dtypes", "bf16", *BYTES_ALONE]
    done = CliRunner().invoke(main, [*arguments, "--json", str(file)], catch_exceptions=False)
    assert done.exit_code == 0
    rows = [row for row in json.loads(file.read_text()) if row.get("unit") == "bytes per parameter"]
    ratios = {row["rival_name"]: row["ratio"] for row in rows}
    assert ratios["least"] <= 1.02 and ratios["our FSDP"] < 0.25 and ratios["our HSDP"] < 0.8


def replicas_at_the_end(run: Callable[[int, str], Any], file: str) -> tuple[int, list[int]]:
    """How many DDP models a rank has made, and how many of them were alive when it destroyed its process group."""
    made: list[weakref.ref[nn.Module]] = []
    alive: list[int] = []

    class Replica(DistributedDataParallel):
        def __init__(self, model: nn.Module) -> None:
            super().__init__(model)
            made.append(weakref.ref(self))

    def destroyed() -> None:
        alive.append(sum(each() is not None for each in made))

    with (
        mock.patch.object(network, "DistributedDataParallel", Replica),
        mock.patch.object(step, "DistributedDataParallel", Replica),
        mock.patch.object(network, "traffic_of", return_value=Traffic(0, 0, 0, 0)),
        mock.patch.object(network, "_Exchange"),
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group", destroyed),
    ):
        run(dist.get_rank(), file)
    return len(made), alive


def run_network(rank: int, file: str) -> None:
    network.worker(network.Case(2, 1, False, "dense", "bf16", 1, file))


def run_step(rank: int, file: str) -> None:
    settings = step.Settings("cpu", 2, 0, 1, 1, 8, "small", out=file)
    step._run_rank(rank, step.time_rank, settings, "dense", step.RIVALS)


@pytest.mark.part("jobs")
@pytest.mark.parametrize("run", [run_network, run_step])
def test_no_ddp_model_outlives_the_process_group(run: Callable[[int, str], Any], tmp_path: Path) -> None:
    """Else its end may wait for gloo's thread, which waits for the GIL: ranks of the benchmark then never ended."""
    for made, alive in run_ranks(2, replicas_at_the_end, run, str(tmp_path / "figures")):
        assert made == 1 and alive == [0]
