"""Bytes and time of a training step across nodes: this package, FSDP2 and DDP, on a lab of network namespaces.

    python -m tools.bench.network                                        all cases, as root (tools/lab); an hour
    python -m tools.bench.network --cases 2x2 --models dense --dtypes bf16 --rates 1 --json network.json

A case is nodes x ranks per node, sharded over all ranks, or with an ``h`` (HSDP) within nodes and replicated over them,
or with an ``s`` the same with the optimizer spread over nodes (``shard_optimizer_over``), and a number of micro-batches
after it: ``2x2s4``. Beside such a case are our own FSDP and HSDP, and FSDP2 that shards over all ranks.

Bytes: what each node's link has received in a step, by the interface's counters, less the headers of Ethernet, IP and
TCP (66 bytes per packet) and less what comes without a step (measured). Each node's least of three steps, and the
largest of all nodes: every step sends the same, and what TCP repeats, or the job's store sends, only adds to it. The
least possible: into a node must come, once per gather, the parameters that its ranks do not have, and for its own
parameters, from each other node, the gradients of that node's ranks or their sum in the dtype of the sum, whichever is
less.

Time: medians of steps in which the runtimes alternate, beside two floors: the same computation with nothing sent (the
plain model in the compute dtype and AdamW of a shard, on all ranks at once), and an exchange of our bytes by raw
sockets, between all nodes at once. The floor is the larger of both. Beside them the CPU time of a rank's step, the
kernel's copies included: times the ranks per core it bounds a step too, where the cores are the limit.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TypedDict

import click
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel

from examples.llama import Llama, LlamaShape
from examples.moe import GroupedMoE, MoEShape
from tools.bench.rows import Row, print_table, write_json
from tools.bench.step import blocks_of
from tools.lab import Lab, LabError, Traffic, host_of, traffic_of
from vescale_fsdp import fully_shard

RIVALS = ("ours", "fsdp2", "ddp")
BESIDE = ("our FSDP", "our HSDP")  # more rivals where the optimizer is spread
POLICIES = {
    "bf16": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    "bf16-reduced": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16),  # gradients are summed in bf16 too
    "fp32": MixedPrecisionPolicy(torch.float32, torch.float32),
    "fp32-kept": MixedPrecisionPolicy(
        torch.float32, torch.float32
    ),  # gathered once, as many bytes as DDP sends
}
HEADER_BYTES = 66  # Ethernet 14, IPv4 20, TCP 32 with time stamps
_CASE = "NETWORK_BENCH_CASE"
_WARM_STEPS = 3
_PORT = 30000  # of the raw sockets; every node has its own
_BATCH, _SEQ, _VOCABULARY = 2, 64, 512


@dataclass(frozen=True)
class Case:
    """One run of the worker."""

    nodes: int
    per_node: int
    replicates: bool  # whether nodes are replicas, as in HSDP
    model: str
    dtype: str  # a key of `POLICIES`
    steps: int
    out: str = ""
    spreads: bool = False  # whether the optimizer is sharded over nodes, too
    micros: int = 1  # micro-batches per step
    seq: int = _SEQ  # tokens of each sequence, which no byte between nodes depends on

    @property
    def rivals(self) -> tuple[str, ...]:
        """What is measured."""
        return (*RIVALS, *BESIDE) if self.spreads else RIVALS

    @property
    def keeps(self) -> bool:
        """Whether parameters stay gathered from the forward to the backward."""
        return self.dtype.endswith("-kept")

    @property
    def name(self) -> str:
        kind = " HSDP" if self.replicates else ""
        if self.spreads:
            kind = f" optimizer over nodes, {self.micros} micro-batches,"
        return f"{self.nodes}x{self.per_node}{kind} {self.model} {self.dtype}"


@dataclass
class Figures:
    """What a run measures: bytes received per node and step, seconds and CPU seconds by runtime and floor."""

    received_bytes: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    cpu_seconds: dict[str, list[float]] = field(default_factory=dict)


def build(model: str) -> nn.Module:
    """A model of some three million parameters, equal on all ranks."""
    torch.manual_seed(0)
    if model == "dense":
        return Llama(LlamaShape(_VOCABULARY, 256, 4, 8, 4, 32, 704))
    return GroupedMoE(MoEShape(256, 4, 7, 256, 2))


def batch_of(model: str, seq: int = _SEQ) -> torch.Tensor:
    """This rank's tokens, or hidden states for the MoE blocks."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    if model == "dense":
        return torch.randint(0, _VOCABULARY, (_BATCH, seq), generator=generator)
    return torch.randn(_BATCH, seq, 256, generator=generator)


def least_bytes(case: Case) -> float:
    """The least bytes that a node must receive per step, for a runtime that shards."""
    model = build(case.model)
    total = sum(p.numel() for p in model.parameters())
    in_blocks = sum(p.numel() for block in blocks_of(model) for p in block.parameters())
    share = (case.nodes - 1) / case.nodes
    policy = POLICIES[case.dtype]
    assert policy.param_dtype is not None and policy.reduce_dtype is not None
    sent, summed = policy.param_dtype.itemsize, policy.reduce_dtype.itemsize
    if case.spreads:  # parameters once per step, and the nodes' sums of gradients once
        return share * total * (sent + min(summed, case.per_node * sent))
    if case.replicates:  # an all-reduce of gradients: each node's share twice
        return 2 * summed * share * total
    again = 0 if case.keeps else in_blocks  # for the backward; the root is gathered once
    gathered = (again + total) * sent
    return share * (gathered + total * min(summed, case.per_node * sent))


def worker(case: Case) -> None:
    """A rank: measure all runtimes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    # In a function of its own, so that DDP ends before the group. A DDP model that outlives `destroy_process_group` may
    # never end (torch 2.13): it then has the last reference to the group, whose end waits, with the GIL, for a lock of
    # gloo's thread, and this thread waits for the GIL if it is dropping the tensor of the last all-reduce.
    figures = _measure(case)
    if dist.get_rank() == 0:
        Path(case.out).write_text(json.dumps(asdict(figures)))
    dist.barrier()
    dist.destroy_process_group()


def _measure(case: Case) -> Figures:
    """Bytes and seconds of all runtimes, on this rank; seconds of the slowest rank."""
    node, local = divmod(dist.get_rank(), case.per_node)
    batch = batch_of(case.model, case.seq)
    steps = {}
    for rival in case.rivals:
        wrapped = sharded(rival, build(case.model), case)
        steps[rival] = step_of(wrapped, list(wrapped.parameters()), batch, case.micros)
    figures = Figures()
    for step in steps.values():
        for _ in range(_WARM_STEPS):
            step()
    idle = least_received(lambda: time.sleep(1.0))
    for rival, step in steps.items():
        received = torch.tensor(least_received(step) - idle, dtype=torch.float64)
        dist.all_reduce(received, dist.ReduceOp.MAX)
        figures.received_bytes[rival] = received.item()
    if case.steps == 0:
        return figures
    plain = build(case.model).to(POLICIES[case.dtype].param_dtype)
    own = nn.Parameter(torch.randn(sum(p.numel() for p in plain.parameters()) // dist.get_world_size()))
    own.grad = torch.zeros_like(own)
    steps["compute"] = step_of(
        plain,
        [own],
        batch if batch.dtype == torch.int64 else batch.to(next(plain.parameters()).dtype),
        case.micros,
    )
    num_bytes = int(figures.received_bytes["ours"])
    exchange = _Exchange(node, case.nodes, num_bytes) if local == 0 else None
    dist.barrier()  # all nodes listen
    if exchange is not None:
        exchange.connect()
    steps["sockets"] = exchange if exchange is not None else lambda: None
    figures.seconds = {name: [] for name in steps}
    figures.cpu_seconds = {name: [] for name in steps}
    for turn in range(case.steps + 1):
        names = list(steps)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            dist.barrier()
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            steps[name]()
            elapsed = torch.tensor([time.perf_counter() - start_s, time.process_time() - start_cpu_s])
            dist.all_reduce(elapsed, dist.ReduceOp.MAX)  # a step lasts until its last rank has ended
            if turn:  # the first turn warms the floors up
                figures.seconds[name].append(elapsed[0].item())
                figures.cpu_seconds[name].append(elapsed[1].item())
    if exchange is not None:
        exchange.close()
    return figures


def sharded(rival: str, model: nn.Module, case: Case) -> nn.Module:
    """Shard a model with one of the case's rivals."""
    if rival == "ddp":
        return DistributedDataParallel(model)
    function: Callable[..., object] = torch_fully_shard if rival == "fsdp2" else fully_shard
    has_nodes = case.replicates or (case.spreads and rival in ("ours", "our HSDP"))
    options: dict[str, object] = {"mesh": mesh_of(case, has_nodes=has_nodes)}
    if case.spreads and rival == "ours":
        options["shard_optimizer_over"] = "replicate"
    for module in (*blocks_of(model), model):
        function(
            module,
            mp_policy=POLICIES[case.dtype],
            reshard_after_forward=False if case.keeps else None,
            **options,
        )
    return model


def mesh_of(case: Case, *, has_nodes: bool) -> DeviceMesh:
    """The mesh of all ranks, of one axis, or with an axis of nodes."""
    if has_nodes:
        return init_device_mesh("cpu", (case.nodes, case.per_node), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (case.nodes * case.per_node,))


def step_of(
    model: nn.Module, optimized: list[nn.Parameter], batch: torch.Tensor, micros: int
) -> Callable[[], None]:
    """A training step; AdamW steps the given parameters. Sharded gradients are reduced over nodes once per step."""
    optimizer = torch.optim.AdamW(optimized, lr=1e-4)
    zeroed = [p for p in model.parameters() if all(p is not each for each in optimized)]

    def step() -> None:
        for micro in range(micros):
            is_last = micro == micros - 1
            if isinstance(model, FSDPModule):
                model.set_requires_all_reduce(is_last)
            waits = isinstance(model, DistributedDataParallel) and not is_last
            with model.no_sync() if waits else nullcontext():  # type: ignore[operator]
                model(batch).float().pow(2).mean().backward()
        optimizer.step()
        if zeroed:  # the floor's gradients stay, for its optimizer has none of the model's parameters
            model.zero_grad()
        else:
            optimizer.zero_grad()

    return step


def least_received(work: Callable[[], object], times: int = 3) -> float:
    """The least of what this rank's node receives in several runs of ``work``: what comes besides only adds to it."""
    return min(received_by(work) for _ in range(times))


def received_by(work: Callable[[], object]) -> float:
    """Payload that this rank's node receives during ``work`` on all ranks."""
    traffic = traffic_during(work)
    return traffic.received_bytes - HEADER_BYTES * traffic.received_packets


def traffic_during(work: Callable[[], object]) -> Traffic:
    """What passes the link of this rank's node during ``work`` on all ranks, that of three barriers included."""
    dist.barrier()
    before = traffic_of()
    dist.barrier()  # no rank works, and so sends, before all have read their counters
    work()
    dist.barrier()
    return traffic_of() - before


class _Exchange:
    """Each node sends bytes to the next one and receives as many from the one before, over one connection each."""

    def __init__(self, node: int, nodes: int, num_bytes: int) -> None:
        self._sent, self._room = bytes(num_bytes), bytearray(1 << 20)
        self._server = socket.create_server((host_of(node), _PORT))
        self._next = host_of((node + 1) % nodes)

    def connect(self) -> None:
        """Connect to the next node, which must listen already."""
        self._to = socket.create_connection((self._next, _PORT), timeout=120)
        self._source, _ = self._server.accept()  # the node before connects in this moment, or has done so
        self._source.settimeout(120)

    def __call__(self) -> None:
        sending = threading.Thread(target=self._to.sendall, args=(self._sent,))
        sending.start()
        left = len(self._sent)
        while left:
            left -= self._source.recv_into(self._room, min(left, len(self._room)))
        sending.join(120)

    def close(self) -> None:
        """Close both connections."""
        self._server.close()
        self._to.close()
        self._source.close()


def rows_of(case: Case, gbit: float, figures: Figures, *, with_bytes: bool) -> list[Row]:
    """The rows of a run: bytes once per case, times at every rate."""
    params = sum(p.numel() for p in build(case.model).parameters())
    rows = []
    if with_bytes:
        received = {rival: each / params for rival, each in figures.received_bytes.items()}
        metric, unit = "received per node and step", "bytes per parameter"
        least = least_bytes(case) / params
        rows.append(Row(case.name, metric, unit, received["ours"], least, "least", "<= 1.02"))
        # Not 1.0: with HSDP both send the same gradients, and ours also which parameters were used, some hundred bytes.
        rows.append(Row(case.name, metric, unit, received["ours"], received["fsdp2"], "fsdp2", "<= 1.001"))
        rows += [
            Row(case.name, metric, unit, received["ours"], received[each], each)
            for each in case.rivals[len(RIVALS) :]
        ]
        rows.append(Row(case.name, metric, unit, received["ours"], received["ddp"], "ddp"))
    if not figures.seconds:
        return rows
    ms = {name: 1000 * statistics.median(seconds) for name, seconds in figures.seconds.items()}
    floor = max(ms["compute"], ms["sockets"])
    name = f"{case.name}, {gbit:g} Gb/s"
    which = "compute" if ms["compute"] >= ms["sockets"] else "raw sockets"
    # Where the optimizer is spread, gathers over nodes on the CPU do not overlap with compute.
    target = "<= 1.15" if gbit <= 1 and not case.spreads else None
    rows.append(Row(name, "step time", "ms", ms["ours"], floor, f"floor ({which})", target))
    rows.append(
        Row(name, "step time", "ms", ms["ours"], ms["fsdp2"], "fsdp2", "<= 1.0" if gbit <= 1 else None)
    )
    ddp_target = "<= 1.05" if gbit <= 1 and case.keeps else None
    rows.append(Row(name, "step time", "ms", ms["ours"], ms["ddp"], "ddp", ddp_target))
    cpu_ms = {name: 1000 * statistics.median(seconds) for name, seconds in figures.cpu_seconds.items()}
    rows += [
        Row(name, "CPU time of a rank's step", "ms", cpu_ms["ours"], cpu_ms[rival], rival)
        for rival in ("compute", "fsdp2", "ddp")
    ]
    return rows


class Kind(TypedDict):
    """What the name of a case says."""

    nodes: int
    per_node: int
    replicates: bool
    spreads: bool
    micros: int


def parse_case(text: str) -> Kind:
    """``2x2h`` -> 2 nodes, 2 ranks each, HSDP; ``2x2s4`` -> the optimizer over nodes, 4 micro-batches."""
    nodes, _, rest = text.partition("x")
    per_node, spread, micros = rest.removesuffix("h").partition("s")
    return {
        "nodes": int(nodes),
        "per_node": int(per_node),
        "replicates": text.endswith("h"),
        "spreads": bool(spread),
        "micros": int(micros or 1),
    }


@click.command(help=__doc__.splitlines()[0])
@click.option(
    "--cases", default="2x1,4x1,2x2,2x2h,4x2", show_default=True, help="nodes x ranks; h: HSDP; s4: spread"
)
@click.option("--models", default="dense,moe", show_default=True)
@click.option("--dtypes", default="bf16,fp32", show_default=True, help=f"of {', '.join(POLICIES)}")
@click.option("--rates", default="1,0.1", show_default=True, help="Gb/s of each link")
@click.option("--steps", default=5, show_default=True, help="timed ones; 0: bytes alone")
@click.option(
    "--seq", default=_SEQ, show_default=True, help="tokens of each sequence; bytes do not depend on it"
)
@click.option("--json", "file", type=click.Path(path_type=Path))
def main(cases: str, models: str, dtypes: str, rates: str, steps: int, seq: int, file: Path | None) -> None:
    rows: list[Row] = []
    for kind in map(parse_case, cases.split(",")):
        nodes = kind["nodes"]
        with (
            tempfile.TemporaryDirectory() as folder,
            Lab(nodes, float(rates.split(",")[0]), minutes=120, shared=[Path(folder)]) as lab,
        ):
            for model in models.split(","):
                for dtype in dtypes.split(","):
                    for number, rate in enumerate(rates.split(",")):
                        for node in range(nodes):
                            lab.slow(node, mbit=1000 * float(rate))
                        out = Path(folder) / "figures.json"
                        case = Case(model=model, dtype=dtype, steps=steps, out=str(out), seq=seq, **kind)
                        lab.run(
                            ["-m", "tools.bench.network"],
                            nproc_per_node=case.per_node,
                            timeout_s=1200,
                            env={_CASE: json.dumps(asdict(case))},
                        )
                        figures = Figures(**json.loads(out.read_text()))
                        rows += rows_of(case, float(rate), figures, with_bytes=number == 0)
                        print_table(rows[-9 if number == 0 else -6 :])
    print_table(rows)
    if file:
        write_json(file, rows)


if __name__ == "__main__":
    if _CASE in os.environ:
        worker(Case(**json.loads(os.environ[_CASE])))
    else:
        try:
            main()
        except LabError as error:
            raise SystemExit(str(error)) from None
