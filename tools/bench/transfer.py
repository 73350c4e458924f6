"""Sending weights from a trainer on 2 ranks to an engine with tensor parallelism over 2: `Transfer` and alternatives.

    python tools/bench/transfer.py                          100 million parameters, bf16, gloo
    python tools/bench/transfer.py --layers 2 --rounds 3    smaller
    python tools/bench/transfer.py --gbit 1                 dense, from two nodes to two others (tools/lab)
    python tools/bench/transfer.py --gbit 0.2 --replicas 4 --layers 0    from two nodes to four replicas on a node each

    dense           a Llama's tensors, to shards of rows and of columns
    experts         fused experts [experts, in, out] to transposed [experts, out, in], shards of out
    deltas          dense, of which some items have changed at random: only these are sent (`Transfer(delta=True)`)
    small tensors   1,000 tensors of 16 kB, cut by rows, to shards of columns

Alternatives: raw `dist.send` of the same bytes between the same pairs of ranks; gathering each tensor on rank 0 and
broadcasting it to the engine, which keeps its shard; saving to memory (``/dev/shm``) and loading from there. Medians
over alternating rounds, of the slowest rank. Extra memory is the growth of the resident set's high-water mark.
Further rows are the speed of packing transposed matrices, and plans for 4,096 simulated trainer ranks and 1,024 engine
ranks.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

sys.path.insert(0, str(Path(__file__).parents[2]))

from tools.bench.network import HEADER_BYTES, traffic_during
from tools.bench.rows import Row, print_table, write_json
from tools.bench.step import _high_water_bytes, _reset_high_water, _resident_bytes
from tools.lab import Lab, Traffic
from vescale_fsdp.checkpoint import load, save
from vescale_fsdp.dtensor.ragged_dtensor import distribute_tensor
from vescale_fsdp.layout.distribution import Axis, Distribution, LayoutCut, RankSet, ShardCut
from vescale_fsdp.layout.granularity import Element, Granularity, Tiles
from vescale_fsdp.layout.placement import RaggedShard
from vescale_fsdp.layout.planner import TensorSpec, plan_group
from vescale_fsdp.quantize import Fp8Blocks
from vescale_fsdp.transfer.description import DescribedTensor, StateDescription, describe_states
from vescale_fsdp.transfer.links import Link, codes, permute, scales
from vescale_fsdp.transfer.packing import copy_box
from vescale_fsdp.transfer.plan import TransferPlan, plan_transfer
from vescale_fsdp.transfer.rank_transfers import RankTransfers
from vescale_fsdp.transfer.transfer import Transfer

HIDDEN, INTER, VOCAB, EXPERTS = 1024, 2816, 16384, 8
NUM_SMALL = 1000
RANKS, TRAINERS = 4, 2
FRACTIONS = (0.001, 0.01, 0.03, 0.1)  # of items that change between two transfers with `delta`
MIB = 1 << 20
WAYS = {"relayed": True, "direct": False}  # `relay` of `plan_transfer`
State = dict[str, Any]


def groups(layers: int) -> list[dict[str, tuple[tuple[int, ...], Placement]]]:
    """Names, shapes and the engine's placements of a Llama's tensors, unit by unit."""
    found: list[dict[str, tuple[tuple[int, ...], Placement]]] = [{"embed": ((VOCAB, HIDDEN), Shard(0))}]
    for layer in range(layers):
        unit: dict[str, tuple[tuple[int, ...], Placement]] = {}
        for name in ("q", "k", "v"):
            unit[f"{layer}.{name}"] = ((HIDDEN, HIDDEN), Shard(0))
        unit[f"{layer}.o"] = ((HIDDEN, HIDDEN), Shard(1))
        for name in ("gate", "up"):
            unit[f"{layer}.{name}"] = ((INTER, HIDDEN), Shard(0))
        unit[f"{layer}.down"] = ((HIDDEN, INTER), Shard(1))
        unit[f"{layer}.norm1"] = unit[f"{layer}.norm2"] = ((HIDDEN,), Replicate())
        found.append(unit)
    return found


def trainer_state(units: list[dict[str, Any]], mesh: DeviceMesh, block: Granularity) -> State:
    """The trainer's shards, laid out by the planner."""
    state: State = {}
    for unit in units:
        specs = [
            TensorSpec(name, shape, "bfloat16", block.block_numel(shape)) for name, (shape, _) in unit.items()
        ]
        layout = plan_group(specs, TRAINERS)
        for slot in layout.slots:
            cut = RaggedShard.from_piece_numels(slot.shape, list(layout.piece_numels(slot)))
            full = torch.randn(slot.shape, dtype=torch.bfloat16)
            state[slot.fqn] = distribute_tensor(full, mesh, [cut])
    return state


def engine_state(
    units: list[dict[str, Any]], mesh: DeviceMesh, *, coded: bool
) -> tuple[State, dict[str, Link]]:
    """The engine's empty shards, and the links to the trainer's tensors."""
    state: State = {}
    links: dict[str, Link] = {}
    codec = Fp8Blocks()

    def add(name: str, shape: tuple[int, ...], dtype: torch.dtype, placement: Placement) -> None:
        sizes = list(shape)
        if isinstance(placement, Shard):
            sizes[placement.dim] //= 2
        state[name] = DTensor.from_local(torch.zeros(sizes, dtype=dtype), mesh, [placement], run_check=False)

    for unit in units:
        for name, (shape, placement) in unit.items():
            if coded and len(shape) == 2:
                links[name], links[f"{name}.scale"] = codes(name, codec), scales(name, codec)
                add(name, shape, torch.float8_e4m3fn, placement)
                add(f"{name}.scale", codec.grid(shape).scales_shape, torch.float32, placement)
            else:
                add(name, shape, torch.bfloat16, placement)
    return state, links


class Sending:
    """One rank's part of a transfer, and of raw sends of the same bytes.

    Args:
        rank: this rank.
        state, into: this rank's source and target; None on ranks that have none.
    """

    def __init__(
        self, rank: int, state: State | None, into: State | None, links: dict[str, Link] | None = None
    ) -> None:
        self.rank, self.state, self.into = rank, state, into
        self.plan = plan_transfer(*describe_states(state, into), links=links)
        self.transfer = Transfer(self.plan)
        pairs: dict[int, int] = {}
        for message in RankTransfers(self.plan, rank).messages():
            pairs[message.peer] = pairs.get(message.peer, 0) + message.nbytes
        self.raw = {peer: torch.ones(nbytes, dtype=torch.uint8) for peer, nbytes in pairs.items()}

    def ours(self) -> None:
        """The transfer."""
        self.transfer.run(self.state, self.into)

    def sends(self) -> None:
        """The same bytes between the same ranks, from contiguous buffers."""
        for turn in range(2):
            other = (self.rank + turn) % 2
            if self.rank < TRAINERS:
                dist.send(self.raw[TRAINERS + other], TRAINERS + other)
            else:
                source = (self.rank - turn) % 2
                dist.recv(self.raw[source], source)


def experts(layers: int, mesh: DeviceMesh, *, is_trainer: bool) -> tuple[State, dict[str, Link]]:
    """Fused experts of the trainer, [experts, in, out], or the engine's transposed shards, and the links."""
    shapes = {"gate_up": (EXPERTS, HIDDEN, INTER), "down": (EXPERTS, INTER // 2, HIDDEN)}
    units = [
        {f"{layer}.{name}": (shape, Shard(1)) for name, shape in shapes.items()} for layer in range(layers)
    ]
    names = [name for unit in units for name in unit]
    links = {name: permute(name, (0, 2, 1)) for name in names}
    if is_trainer:
        return trainer_state(units, mesh, Element()), links
    turned = [
        {name: ((shape[0], shape[2], shape[1]), cut) for name, (shape, cut) in unit.items()} for unit in units
    ]
    return engine_state(turned, mesh, coded=False)[0], links


class Bench:
    """One rank of the benchmark."""

    def __init__(self, rank: int, layers: int, folder: str) -> None:
        self.rank = rank
        self.is_trainer = is_trainer = rank < TRAINERS
        self.folder = folder
        units = groups(layers)
        self.trainers, self.engines = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
        self.mesh = mesh = self.trainers if is_trainer else self.engines
        # Rank 1 creates one too: torch 2.13 names later groups by the number of groups of a process, and ranks with
        # different names would not find each other.
        self.relay, _ = dist.new_group([0, 2, 3]), dist.new_group([1])
        self.units = units
        _, links = engine_state(units, mesh, coded=True)
        self.state = trainer_state(units, mesh, Element()) if is_trainer else None
        tiled = trainer_state(units, mesh, Tiles(128, 128)) if is_trainer else None
        self.into = None if is_trainer else engine_state(units, mesh, coded=False)[0]
        into_coded = None if is_trainer else engine_state(units, mesh, coded=True)[0]
        start_s = time.perf_counter()
        self.dense = Sending(rank, self.state, self.into)
        self.planning_s = time.perf_counter() - start_s
        self.coded = Sending(rank, tiled, into_coded, links)
        fused, links = experts(max(layers // 2, 1), mesh, is_trainer=is_trainer)
        self.experts = Sending(rank, fused if is_trainer else None, None if is_trainer else fused, links)
        small = [{f"{number}": ((128, 64), Shard(1)) for number in range(NUM_SMALL)}]
        self.small = Sending(
            rank,
            trainer_state(small, mesh, Element()) if is_trainer else None,
            None if is_trainer else engine_state(small, mesh, coded=False)[0],
        )

    def gathers(self) -> None:
        """Gather every tensor on rank 0 and broadcast it to the engine's ranks."""
        for unit in self.units:
            for name, (shape, placement) in unit.items():
                full = torch.empty(shape, dtype=torch.bfloat16)
                if self.state is not None:
                    gathered = self.state[name].full_tensor()
                    full = gathered
                if self.rank != 1:
                    dist.broadcast(full, 0, group=self.relay)  # type: ignore[arg-type]  # torch 2.15: or a number
                if self.into is not None:
                    own = full
                    if isinstance(placement, Shard):
                        own = full.chunk(2, placement.dim)[self.rank - TRAINERS]
                    self.into[name].to_local().copy_(own)

    def files(self) -> None:
        """The trainer saves to memory, the engine loads."""
        path = f"{self.folder}/state"
        if self.state is not None:
            save(path, self.state, overwrite=True, process_group=self.trainers.get_group())
        dist.barrier()
        if self.into is not None:
            load(path, self.into, process_group=self.engines.get_group())


def measure(rank: int, layers: int, rounds: int, port: int, folder: str) -> None:
    """Worker: time all ways, alternating."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    bench = Bench(rank, layers, folder)
    ways: dict[str, Callable[[], None]] = {
        "ours": bench.dense.ours,
        "sends": bench.dense.sends,
        "gathers": bench.gathers,
        "fp8": bench.coded.ours,
        "files": bench.files,
        "experts": bench.experts.ours,
        "experts, sends": bench.experts.sends,
        "small": bench.small.ours,
        "small, sends": bench.small.sends,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    extra = dict.fromkeys(ways, 0)
    for turn in range(rounds + 1):
        for name, way in ways.items():
            dist.barrier()
            _reset_high_water()
            before, start_s = _resident_bytes(), time.perf_counter()
            way()
            took_s = time.perf_counter() - start_s
            extra[name] = max(extra[name], _high_water_bytes() - before)
            if turn:
                seconds[name].append(took_s)
    measured = (bench.dense, bench.coded, bench.experts, bench.small)
    sent = [sending.plan.total_bytes for sending in measured]
    deltas = measured_deltas(bench.dense, rounds)
    torch.save((seconds, extra, sent, needed(bench), bench.planning_s, deltas), f"{folder}/rank{rank}")
    dist.destroy_process_group()


class Deltas(NamedTuple):
    """What one rank measures of a transfer of changes.

    Attributes:
        numel: items that all ranks send in a whole transfer, of 2 bytes.
        own_numel: items that this rank sends or receives.
        sent_bytes: bytes that this rank sends, by fraction of changed items.
        seconds: CPU time of this rank, by fraction.
        floor_s: CPU time for reading this rank's tensors, and a copy of them, once.
    """

    numel: int
    own_numel: int
    sent_bytes: dict[float, int]
    seconds: dict[float, float]
    floor_s: float


def measured_deltas(sending: Sending, rounds: int) -> Deltas:
    """Change some items at random, and send them: bytes, and CPU time without the other ranks."""
    transfer = Transfer(sending.plan, delta=True)
    transfer.run(sending.state, sending.into)
    locals_ = [tensor.to_local() for tensor in (sending.state or sending.into or {}).values()]
    sent: dict[float, int] = {}
    seconds: dict[float, list[float]] = {fraction: [] for fraction in FRACTIONS}
    for fraction in FRACTIONS * rounds:
        if sending.state is not None:
            for local in locals_:
                is_changed = torch.rand(local.shape) < fraction
                local.view(torch.int16).bitwise_xor_(is_changed.to(torch.int16))
        dist.barrier()
        start_s = time.process_time()
        transfer.run(sending.state, sending.into)
        seconds[fraction].append(time.process_time() - start_s)
        assert transfer.delta is not None
        sent[fraction] = transfer.delta.sent_bytes
    copies = [local.clone() for local in locals_]
    floors = []
    for _ in range(rounds):
        start_s = time.process_time()
        for local, copy in zip(locals_, copies, strict=True):
            # Reads to the end, since they are equal.
            torch.equal(local.view(torch.int64), copy.view(torch.int64))
        floors.append(time.process_time() - start_s)
    numel = sum(raw.numel() // 2 for raw in sending.raw.values())
    medians = {fraction: statistics.median(each) for fraction, each in seconds.items()}
    return Deltas(sending.plan.total_bytes // 2, numel, sent, medians, statistics.median(floors))


def delta_rows(ranks: list[Deltas]) -> list[Row]:
    """Rows of `measured_deltas`: bytes beside the entropy of positions and 16 bits per change; CPU time per item."""
    rows = []
    for fraction in FRACTIONS:
        case = f"delta, {100 * fraction:g} % changed"
        nbytes = sum(each.sent_bytes[fraction] for each in ranks)
        entropy = -fraction * math.log2(fraction) - (1 - fraction) * math.log2(1 - fraction)
        least = ranks[0].numel * (entropy + 16 * fraction) / 8
        rows.append(Row(case, "bytes sent", "MB", nbytes / 1e6, least / 1e6, "entropy and values", "<= 1.3"))
        for side, own in (("trainer", ranks[:TRAINERS]), ("engine", ranks[TRAINERS:])):
            ns, floor = (
                1e9 * statistics.median(each / rank.own_numel for each, rank in zip(times, own, strict=True))
                for times in ([rank.seconds[fraction] for rank in own], [rank.floor_s for rank in own])
            )
            rows.append(Row(case, f"CPU time per item, {side}", "ns", ns, floor, "reading shard and base"))
    return rows


def packing_rows() -> list[Row]:
    """Speed of packing a transposed half of a matrix, and of torch's `copy_`, alternating, on one thread."""
    torch.set_num_threads(1)
    rows = []
    for cols in (INTER, 4096):
        box = torch.randn(HIDDEN, cols).to(torch.bfloat16)[:, : cols // 2].t()
        out = torch.empty(box.shape, dtype=torch.bfloat16)
        ways: dict[str, Callable[[], Any]] = {
            "tiles": partial(copy_box, box, out),
            "copy_": partial(out.copy_, box),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(21):
            for name, way in ways.items():
                start_s = time.thread_time()
                way()
                seconds[name].append(time.thread_time() - start_s)
        tiles, copy = (out.nbytes / 1e9 / statistics.median(each[1:]) for each in seconds.values())
        rows.append(
            Row(f"transpose, rows {cols} apart", "speed, CPU time", "GB/s", tiles, copy, "copy_", ">= 1.0")
        )
    return rows


def needed(bench: Bench) -> int:
    """Bytes of the engine's shards, none of which it has yet."""
    return sum(
        2 * (tensor.to_local().numel() if isinstance(tensor, DTensor) else tensor.numel())
        for tensor in (bench.into or {}).values()
    )


def simulated(num_sources: int, num_targets: int, num_tensors: int) -> TransferPlan:
    """Descriptions of ragged shards (groups of ten tensors), and of replicas with tensor parallelism over 8."""
    layouts, source, target = [], [], []
    for group in range(num_tensors // 10):
        specs = [
            TensorSpec(f"{group}.{n}", (1024 + (group * 10 + n) % 97 * 8, 1024), "bfloat16", 1)
            for n in range(10)
        ]
        layouts.append(plan_group(specs, num_sources))
        for place, slot in enumerate(layouts[-1].slots):
            pieces = Distribution((Axis(num_sources, 1),), (LayoutCut(group, place),))
            columns = Distribution((Axis(8, 1),), (ShardCut(place % 2),))
            ranks = RankSet.of(range(num_sources, num_sources + num_targets))
            source.append(
                DescribedTensor(slot.fqn, "bfloat16", slot.shape, pieces, RankSet.world(num_sources))
            )
            target.append(DescribedTensor(slot.fqn, "bfloat16", slot.shape, columns, ranks))
    return plan_transfer(StateDescription.of(source, layouts), StateDescription.of(target))


def simulate(out: str) -> None:
    """CPU time and memory of a plan and of all ranks' totals, in a new process."""
    simulated(32, 16, 10)  # imports everything, so that the measured plan does not
    before, start_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    assert simulated(4096, 1024, 1000).demand.sent.sum() > 0
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    torch.save((time.process_time() - start_s, grown / 1024), out)


def rows_of(ranks: list[Any], budget_bytes: int) -> list[Row]:
    """Rows of the ranks' measurements."""
    seconds = {
        name: statistics.median(
            max(rank[0][name][turn] for rank in ranks) for turn in range(len(ranks[0][0][name]))
        )
        for name in ranks[0][0]
    }
    extra = {name: max(rank[1][name] for rank in ranks) for name in ranks[0][1]}
    (sent, coded, turned, small), need = ranks[0][2], sum(rank[3] for rank in ranks)
    case = f"2 to TP 2, {sent / 1e6:.0f} MB"
    ms = {name: 1000 * value for name, value in seconds.items()}
    allowed = (budget_bytes + 32 * MIB) / MIB
    return [
        Row(case, "bytes sent, bf16", "MB", sent / 1e6, need / 1e6, "needed", "<= 1.0"),
        Row(case, "bytes sent, fp8", "MB", coded / 1e6, need / 1e6, "needed in bf16", "<= 0.51"),
        Row(case, "time, bf16", "ms", ms["ours"], ms["sends"], "raw dist.send", "<= 1.3"),
        Row(case, "time, bf16", "ms", ms["ours"], ms["gathers"], "gather and broadcast", "<= 0.55"),
        Row(case, "time, bf16", "ms", ms["ours"], ms["files"], "save to memory and load"),
        Row(
            f"experts, {turned / 1e6:.0f} MB",
            "time, transposed",
            "ms",
            ms["experts"],
            ms["experts, sends"],
            "raw dist.send",
            "<= 1.6",
        ),
        Row(
            f"{NUM_SMALL} small tensors, {small / 1e6:.1f} MB",
            "time",
            "ms",
            ms["small"],
            ms["small, sends"],
            "raw dist.send",
            "<= 3",
        ),
        Row(case, "time, fp8", "ms", ms["fp8"], ms["sends"], "raw dist.send of bf16"),
        Row(case, "time, fp8", "ms", ms["fp8"], ms["files"], "save to memory and load, bf16"),
        Row(case, "extra memory, bf16", "MiB", extra["ours"] / MIB, None, None, f"<= {allowed:.0f}"),
        Row(case, "extra memory, fp8", "MiB", extra["fp8"] / MIB, None, None, f"<= {allowed:.0f}"),
        Row(case, "extra memory, gather", "MiB", extra["gathers"] / MIB),
        Row(case, "planning, once", "ms", 1000 * max(rank[4] for rank in ranks)),
    ]


class OverNodes(NamedTuple):
    """What `measured_over_nodes` measures."""

    num_bytes: int  # of a transfer
    seconds: dict[str, list[float]]  # of the slowest rank, by way
    traffic: dict[int, Traffic]  # of one transfer, by node


def measured_over_nodes(layers: int, rounds: int, gbit: float) -> OverNodes:
    """Time transfers from two nodes to two others, of one rank each, and count the bytes on their links."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Lab(RANKS, gbit, minutes=20, shared=[Path(folder)]) as lab,
    ):
        lab.run(
            ["-m", "tools.bench.transfer", "--worker", folder, *map(str, (layers, rounds))], timeout_s=1000
        )
        ranks = [torch.load(f"{folder}/rank{rank}") for rank in range(RANKS)]
    seconds = {
        name: [max(each) for each in zip(*(rank[1][name] for rank in ranks), strict=True)]
        for name in ranks[0][1]
    }
    return OverNodes(ranks[0][0], seconds, {node: Traffic(*rank[2]) for node, rank in enumerate(ranks)})


def work_on_node(folder: str, layers: int, rounds: int) -> None:
    """A rank of `measured_over_nodes`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    is_trainer = dist.get_rank() < TRAINERS
    trainers, engines = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
    units = groups(layers)
    state = trainer_state(units, trainers, Element()) if is_trainer else None
    into = None if is_trainer else engine_state(units, engines, coded=False)[0]
    sending = Sending(dist.get_rank(), state, into)
    ways = {"ours": sending.ours, "sends": sending.sends}
    for way in ways.values():
        way()  # connects
    traffic = traffic_during(sending.ours)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            dist.barrier()
            start_s = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - start_s)
    torch.save((sending.plan.total_bytes, seconds, tuple(traffic)), f"{folder}/rank{dist.get_rank()}")
    dist.barrier()
    dist.destroy_process_group()


def node_rows(measured: OverNodes, gbit: float) -> list[Row]:
    """Rows of `measured_over_nodes`: the wire needs half of the bytes on each link."""
    case = f"2 nodes to 2 others, {measured.num_bytes / 1e6:.0f} MB, {gbit:g} Gb/s"
    wire_ms = 1000 * measured.num_bytes / 2 * 8 / (gbit * 1e9)
    ms = {name: 1000 * statistics.median(each) for name, each in measured.seconds.items()}
    links = [max(each.sent_bytes, each.received_bytes) for each in measured.traffic.values()]
    return [
        Row(case, "time, bf16", "ms", ms["ours"], wire_ms, "the wire", "<= 1.1"),
        Row(case, "time, bf16", "ms", ms["ours"], ms["sends"], "raw dist.send"),
        Row(case, "most bytes on a link", "MB", max(links) / 1e6, min(links) / 1e6, "least", "<= 1.05"),
    ]


class ToReplicas(NamedTuple):
    """What `measured_to_replicas` measures, by way: relayed, or sent to each replica."""

    num_bytes: int  # of the state
    seconds: dict[str, list[float]]  # of the slowest rank
    traffic: dict[str, dict[int, Traffic]]  # of one transfer, by node; headers excluded


def measured_to_replicas(layers: int, rounds: int, gbit: float, replicas: int) -> ToReplicas:
    """Time transfers from two nodes to replicas of an engine on a node each, and count the bytes on their links."""
    num_ranks = TRAINERS + replicas
    with (
        tempfile.TemporaryDirectory() as folder,
        Lab(num_ranks, gbit, minutes=20, shared=[Path(folder)]) as lab,
    ):
        given = ["--worker", folder, *map(str, (layers, rounds)), "--replicas", str(replicas)]
        lab.run(["-m", "tools.bench.transfer", *given], timeout_s=1000)
        ranks = [torch.load(f"{folder}/rank{rank}") for rank in range(num_ranks)]
    ways = ranks[0][1]
    seconds = {
        way: [max(each) for each in zip(*(rank[1][way] for rank in ranks), strict=True)] for way in ways
    }
    traffic = {way: {node: Traffic(*rank[2][way]) for node, rank in enumerate(ranks)} for way in ways}
    return ToReplicas(ranks[0][0], seconds, traffic)


def work_on_replica(folder: str, layers: int, rounds: int) -> None:
    """A rank of `measured_to_replicas`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rank, units = dist.get_rank(), groups(layers)
    trainers = DeviceMesh("cpu", list(range(TRAINERS)))
    state = trainer_state(units, trainers, Element()) if rank < TRAINERS else None
    shapes = {name: shape for unit in units for name, (shape, _) in unit.items()}
    into = None
    if rank >= TRAINERS:
        into = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    described = describe_states(state, into)
    ways = {name: Transfer(plan_transfer(*described, relay=relay)) for name, relay in WAYS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    traffic: dict[str, tuple[int, ...]] = {}
    for name, transfer in ways.items():
        transfer.run(state, into)  # connects
        traffic[name] = tuple(traffic_during(partial(transfer.run, state, into)))
    for _ in range(rounds):
        for name, transfer in ways.items():
            dist.barrier()
            start_s = time.perf_counter()
            transfer.run(state, into)
            seconds[name].append(time.perf_counter() - start_s)
    torch.save(
        (sum(2 * math.prod(shape) for shape in shapes.values()), seconds, traffic), f"{folder}/rank{rank}"
    )
    dist.barrier()
    dist.destroy_process_group()


def replica_rows(measured: ToReplicas, gbit: float) -> list[Row]:
    """Rows of `measured_to_replicas`, without the headers of packets."""
    replicas = len(measured.traffic["relayed"]) - TRAINERS
    size = measured.num_bytes
    case = f"2 nodes to {replicas} replicas, {size / 1e6:.1f} MB, {gbit:g} Gb/s"
    ms = {name: 1000 * statistics.median(each) for name, each in measured.seconds.items()}
    wire_ms = 1000 * size * 8 / (gbit * 1e9)
    sent, received = (
        {
            way: [
                getattr(each, f"{word}_bytes") - HEADER_BYTES * getattr(each, f"{word}_packets")
                for each in links.values()
            ]
            for way, links in measured.traffic.items()
        }
        for word in ("sent", "received")
    )
    by_trainer, by_replica = (
        {way: max(links[which]) / 1e6 for way, links in sent.items()}
        for which in (slice(TRAINERS), slice(TRAINERS, None))
    )
    arrived = max(received["relayed"][TRAINERS:]) / 1e6
    return [
        Row(
            case,
            "sent by a trainer",
            "MB",
            by_trainer["relayed"],
            size / TRAINERS / 1e6,
            "its shard",
            "<= 1.02",
        ),
        Row(case, "sent by a trainer", "MB", by_trainer["relayed"], by_trainer["direct"], "relay=False"),
        Row(case, "sent by a replica, most", "MB", by_replica["relayed"], size / 1e6, "the state", "<= 1.02"),
        Row(case, "received by a replica, most", "MB", arrived, size / 1e6, "the state", "<= 1.02"),
        Row(case, "time", "ms", ms["relayed"], wire_ms, "the wire, one replica", "<= 1.25"),
        Row(case, "time", "ms", ms["relayed"], ms["direct"], "relay=False"),
    ]


def _measured(layers: int, rounds: int, folder: str, start_method: str) -> list[Any]:
    """The measurements of the ranks of one run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.start_processes(measure, (layers, rounds, port, folder), nprocs=RANKS, start_method=start_method)
    return [torch.load(f"{folder}/rank{rank}", weights_only=False) for rank in range(RANKS)]


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description="weights between running jobs")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--gbit", type=float, help="between nodes of a lab, with links of this rate")
    parser.add_argument(
        "--replicas", type=int, help="with --gbit: replicas of the whole state, instead of TP 2"
    )
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        folder, layers, rounds = given.worker
        return (work_on_replica if given.replicas else work_on_node)(folder, int(layers), int(rounds))
    if given.gbit and given.replicas:
        found = measured_to_replicas(given.layers, given.rounds, given.gbit, given.replicas)
        rows = replica_rows(found, given.gbit)
        print_table(rows)
        return write_json(given.json, rows) if given.json else None
    if given.gbit:
        rows = node_rows(measured_over_nodes(given.layers, given.rounds, given.gbit), given.gbit)
        print_table(rows)
        return write_json(given.json, rows) if given.json else None
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    folder = tempfile.mkdtemp(dir=memory)
    try:
        # Forked, so that imports are done once instead of five times.
        ranks = _measured(given.layers, given.rounds, folder, "fork")
        # Freed blocks must leave the resident set, else their reuse is not counted. That makes each allocation slow,
        # so memory is measured in a separate run. malloc reads the variable when a process starts.
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(64 * 1024)  # 64 KiB
        extra = [rank[1] for rank in _measured(given.layers, 1, folder, "spawn")]
        ranks = [(rank[0], own, *rank[2:]) for rank, own in zip(ranks, extra, strict=True)]
        process = mp.get_context("fork").Process(target=simulate, args=(f"{folder}/plan",))
        process.start()
        process.join()
        plan_s, plan_mib = torch.load(f"{folder}/plan")
    finally:
        shutil.rmtree(folder)
    case = "4096 to 1024 ranks, 1000 tensors"
    rows = [*rows_of(ranks, 64 * MIB), *delta_rows([rank[5] for rank in ranks]), *packing_rows()]
    rows.append(Row(case, "plan and totals", "CPU s", plan_s, None, None, "<= 10"))
    rows.append(Row(case, "plan and totals", "MiB", plan_mib, None, None, "<= 1024"))
    print_table(rows)
    if given.json:
        write_json(given.json, rows)


if __name__ == "__main__":
    main()
