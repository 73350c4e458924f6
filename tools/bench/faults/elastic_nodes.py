"""Bytes that an elastic job sends between nodes, before and after the loss of a node, and on nodes of different sizes.

    python -m tools.bench.faults.elastic_nodes                         as root (tools/lab); two minutes
    python -m tools.bench.faults.elastic_nodes --nodes 2,2,2 --json elastic_nodes.json

The ranks learn from the membership which of them share a node; LOCAL_WORLD_SIZE is not set. ``2,2,2`` are three nodes
of two ranks, of which the last is lost; ``2,1,1`` are uneven nodes, of which none is lost.

Bytes are those of `tools.bench.network`: received payload per node and step, of the node with the most; FSDP2 on the
same mesh beside them. The least possible for a node: per gather, the parameters that its ranks do not have, and for its
own parameters a sum of gradients from each other node.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from tools.bench.network import batch_of, build, least_received, step_of
from tools.bench.rows import Row, print_table, write_json
from tools.bench.step import blocks_of
from tools.lab import Lab, Run, host_of
from vescale_fsdp import fully_shard
from vescale_fsdp.checkpoint import CheckpointManager
from vescale_fsdp.elastic import ElasticJob, StoreMembership, TrainingState

_PORT, _MODEL = 29500, "dense"
_WARM_STEPS = 3  # of an epoch; the next one measures
_FP32_BYTES = 4


def least_bytes(sizes: Sequence[int]) -> float:
    """The least bytes that the node with the most must receive per step, in fp32, for numbers of ranks by node."""
    model = build(_MODEL)
    total = sum(p.numel() for p in model.parameters())
    again = sum(p.numel() for block in blocks_of(model) for p in block.parameters())
    shares = [size / sum(sizes) for size in sizes]
    needed = [(again + total) * (1 - share) + total * share * (len(sizes) - 1) for share in shares]
    return _FP32_BYTES * max(needed)


def _worker(node: int, sizes: Sequence[int], loses: bool, folder: Path) -> None:
    """A process of the job. Writes what it has measured in each epoch, then dies if its node is to be lost."""
    torch.set_num_threads(1)

    def sharded(shard: object, mesh: DeviceMesh) -> nn.Module:
        model = build(_MODEL)
        for module in (*blocks_of(model), model):
            shard(module, mesh=mesh)  # type: ignore[operator]
        return model

    def build_on(mesh: DeviceMesh) -> TrainingState:
        model = sharded(fully_shard, mesh)
        return TrainingState(model, torch.optim.AdamW(model.parameters(), lr=1e-4))

    def train_step(job: ElasticJob, step: int) -> None:
        assert job.training is not None and job.mesh is not None
        model, optimizer = job.training.model, job.training.optimizer

        def own() -> None:
            model(batch_of(_MODEL)).float().pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        own()
        if step != _WARM_STEPS:
            return
        stock = sharded(torch_fully_shard, job.mesh)
        fsdp2 = step_of(stock, list(stock.parameters()), batch_of(_MODEL), micros=1)
        fsdp2()
        found = {}
        idle = least_received(partial(time.sleep, 1.0))
        for name, work in (("ours", own), ("fsdp2", fsdp2)):
            most = torch.tensor(least_received(work) - idle, dtype=torch.float64)
            dist.all_reduce(most, dist.ReduceOp.MAX)
            found[name] = most.item()
        if job.rank == 0:
            (folder / f"{job.num_ranks}").write_text(json.dumps(found))
        if loses and node == len(sizes) - 1 and job.num_ranks == sum(sizes):
            os.kill(os.getpid(), signal.SIGKILL)

    store = dist.TCPStore(host_of(0), _PORT, is_master=False)
    membership = StoreMembership(store, num_first=sum(sizes))
    job = ElasticJob(membership, build_on, lambda *_: CheckpointManager(folder / "steps"))
    job.run(train_step, _WARM_STEPS + 3)


def measure(sizes: Sequence[int], *, loses: bool) -> list[Row]:
    """Run a job on nodes of these numbers of ranks; if ``loses``, the last node is lost."""
    module = [sys.executable, "-m", "tools.bench.faults.elastic_nodes"]
    serve = [sys.executable, "-m", "vescale_fsdp.elastic.store_server", "--host", host_of(0)]
    environment = {"VESCALE_FSDP_SECRET": "s", "OMP_NUM_THREADS": "1"}
    after = sizes[:-1] if loses else sizes
    with (
        tempfile.TemporaryDirectory() as name,
        Lab(nodes=len(sizes), minutes=10, shared=[Path(name)]) as lab,
    ):
        Run({0: lab.popen(0, [*serve, "--port", str(_PORT)], env=environment)})  # which reads what it prints
        worker = [*module, "--nodes", ",".join(map(str, sizes)), "--folder", name]
        worker += ["--loses"] if loses else []
        ranks = Run(
            {
                10 * node + local: lab.popen(node, [*worker, "--worker", str(node)], env=environment)
                for node, size in enumerate(sizes)
                for local in range(size)
            }
        )
        codes = ranks.wait(300)
        last = len(sizes) - 1
        killed = {rank for rank in codes if loses and rank // 10 == last}
        if any(code != (-signal.SIGKILL if rank in killed else 0) for rank, code in codes.items()):
            raise RuntimeError(f"a rank ended otherwise: {codes}\n{ranks.tails()}")
        found = {
            each: json.loads((Path(name) / str(sum(each))).read_text())
            for each in {tuple(sizes), tuple(after)}
        }
    params = sum(p.numel() for p in build(_MODEL).parameters())
    rows = []
    for each, bytes_by in sorted(found.items(), reverse=True):
        case = f"elastic job, nodes of {' + '.join(map(str, each))} ranks, fp32"
        is_even = len(set(each)) == 1
        received = {rival: num_bytes / params for rival, num_bytes in bytes_by.items()}
        metric, unit, least = "received per node and step", "bytes per parameter", least_bytes(each) / params
        rows.append(Row(case, metric, unit, received["ours"], least, "least", "<= 1.02" if is_even else None))
        rows.append(Row(case, metric, unit, received["ours"], received["fsdp2"], "fsdp2"))
    return rows


@click.command(help=__doc__.splitlines()[0])
@click.option("--nodes", multiple=True, help="ranks of each node; equal nodes lose the last one")
@click.option("--json", "file", type=click.Path(path_type=Path))
@click.option("--worker", type=int, hidden=True)
@click.option("--loses", is_flag=True, hidden=True)
@click.option("--folder", type=click.Path(path_type=Path), hidden=True)
def main(
    nodes: Sequence[str], file: Path | None, worker: int | None, loses: bool, folder: Path | None
) -> None:
    cases = [tuple(map(int, each.split(","))) for each in nodes or ("2,2,2", "2,1,1")]
    if worker is not None and folder is not None:
        return _worker(worker, cases[0], loses, folder)
    rows = [row for sizes in cases for row in measure(sizes, loses=len(set(sizes)) == 1)]
    print_table(rows)
    if file is not None:
        write_json(file, rows)


if __name__ == "__main__":
    main()
