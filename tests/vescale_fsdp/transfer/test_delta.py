"""Transfers of what has changed: at every step bit for bit what a whole transfer gives, whatever happened before."""

from __future__ import annotations

import json
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import distribute_tensor as distribute_stock

from tests.support.distributed import RankError, run_ranks
from vescale_fsdp import RaggedShard, distribute_tensor
from vescale_fsdp.errors import TransferError
from vescale_fsdp.quantize import Fp8Blocks
from vescale_fsdp.torch_private import local_of
from vescale_fsdp.transfer import Delta, Transfer, TransferPlan, describe_states, plan_transfer
from vescale_fsdp.transfer.delta import DeltaExchange
from vescale_fsdp.transfer.links import Link, codes, concatenate, permute, scales, stack
from vescale_fsdp.transfer.links import slice as part_of

State = dict[str, torch.Tensor] | None
CODEC = Fp8Blocks(16, 8)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def whole_source() -> dict[str, torch.Tensor]:
    """The source's tensors, of all widths, many of them small."""
    full = {name: torch.randn(48, 40).bfloat16() for name in ("q", "k", "v")}
    full |= {
        "wide": torch.randn(24, 20),
        "coded": torch.randn(50, 40).bfloat16(),
        "half": torch.randn(9, 7).half(),
    }
    full |= {"experts": torch.randn(3, 16, 24).bfloat16(), "steps": torch.arange(30).view(6, 5)}
    full |= {"complex": torch.randn(5, 3, dtype=torch.complex128), "flags": torch.rand(7, 5) < 0.5}
    return full | {f"small{number}": torch.randn(6, 5).bfloat16() for number in range(12)}


def linked() -> dict[str, Link]:
    """How target tensors with other names are made."""
    experts = permute("experts", (0, 2, 1))
    return {
        "qkv": concatenate("q", "k", "v"),
        "turned": permute("k"),
        "stacked": stack(part_of("q", 3, 20), part_of("v", 11, 20), dim=1),
        "experts": experts,
        "narrow": "wide",
        "codes": codes("coded", CODEC),
        "scales": scales("coded", CODEC),
        "expert codes": codes("experts", CODEC),
    }


def whole_target(full: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Empty tensors of the target."""
    shapes = {
        "qkv": (144, 40),
        "turned": (40, 48),
        "stacked": (20, 2, 40),
        "experts": (3, 24, 16),
        "narrow": (24, 20),
    }
    made = {name: torch.zeros(shape).bfloat16() for name, shape in shapes.items()}
    made |= {
        "codes": torch.zeros(50, 40, dtype=torch.uint8),
        "scales": torch.zeros(CODEC.grid((50, 40)).scales_shape),
    }
    made |= {"expert codes": torch.zeros(3, 16, 24, dtype=torch.float8_e4m3fn), "half": torch.zeros(9, 7)}
    same = [name for name in full if name.startswith("small")] + ["q", "steps", "complex", "flags"]
    return made | {name: torch.zeros_like(full[name]) for name in same}


def layouts(number: int, full: dict[str, torch.Tensor]) -> tuple[Callable[[], State], Callable[[], State]]:
    """Functions that make this rank's source, and an empty target; on some of four ranks."""

    def sharded(mesh: DeviceMesh, tensors: dict[str, torch.Tensor], kind: str) -> State:
        if mesh.get_coordinate() is None:
            return None
        outer = [Replicate()] * (mesh.ndim - 1)
        made: dict[str, torch.Tensor] = {}
        for number, (name, value) in enumerate(tensors.items()):
            if kind == "ragged":
                size, numel = mesh.size(mesh.ndim - 1), value.numel()
                first = numel * (1 + number % 3) // 5 if size == 2 else numel
                cut = RaggedShard.from_piece_numels(value.shape, [first, numel - first][:size])
                made[name] = distribute_tensor(value.clone(), mesh, [*outer, cut])
            else:
                dim = value.dim() - 1 if kind == "columns" else 0
                placement = Replicate() if kind == "whole" else Shard(dim)
                made[name] = distribute_stock(value.clone(), mesh, [*outer, placement], src_data_rank=None)
        return made

    ranks: list[tuple[Any, str, Any, str]] = [
        ([0, 1], "ragged", [2, 3], "columns"),
        ([[0, 1], [2, 3]], "ragged", [1, 2, 3], "rows"),  # HSDP, and ranks that have both
        ([0], "columns", [1, 2, 3], "whole"),  # replicas, which relay
        ([0, 1], "columns", [2, 3], "whole"),
    ]
    trainers, cut, engines, kind = ranks[number]
    meshes = DeviceMesh("cpu", trainers), DeviceMesh("cpu", engines)
    return (
        lambda: sharded(meshes[0], full, cut),
        lambda: sharded(meshes[1], whole_target(full), kind),
    )


def mutate(full: dict[str, torch.Tensor], state: State, drawn: random.Random, fraction: float) -> None:
    """Change a fraction of all items; of tensors that are only moved, by any bits. All ranks make the same changes."""
    generator = torch.Generator().manual_seed(drawn.randrange(1 << 30))
    scale = drawn.choice([1, 1, 8])  # magnitudes, and with them the scales of blocks, change a lot
    for name, whole in full.items() if fraction else ():
        is_changed = torch.rand(whole.shape, generator=generator) < fraction
        if name in ("wide", "coded", "half", "experts"):
            factors = torch.randn(whole.shape, generator=generator) * scale
            whole.copy_(
                torch.where(is_changed, (whole.float() * factors).clamp(-1e4, 1e4).to(whole.dtype), whole)
            )
        elif name == "flags":
            whole.bitwise_xor_(is_changed)
        else:
            raw = whole.view(-1).view(torch.uint8)
            noise = torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=generator)
            raw.copy_(torch.where(is_changed.view(-1).repeat_interleave(whole.itemsize), noise, raw))
    for name, tensor in (state or {}).items() if fraction else ():
        mesh, placements = tensor.device_mesh, list(tensor.placements)
        if any(isinstance(each, RaggedShard) for each in placements):
            again = distribute_tensor(full[name].clone(), mesh, placements)
        else:
            again = distribute_stock(full[name].clone(), mesh, placements, src_data_rank=None)
        bits = BITS[tensor.itemsize]
        with torch.no_grad():
            local_of(tensor).view(bits).copy_(local_of(again).view(bits))


def differing(got: State, wanted: State) -> list[str]:
    """Names of tensors whose bits differ on this rank."""
    pairs = [(name, local_of(got[name]), local_of(wanted[name])) for name in wanted or {}]
    return [
        name
        for name, a, b in pairs
        if not torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    ]


def failing(drawn: random.Random) -> AbstractContextManager[Any]:
    """Patch: the exchange fails on one rank, before or after its messages."""
    victim, is_late = drawn.randrange(4), drawn.random() < 0.5
    if dist.get_rank() != victim:
        return nullcontext()
    real = DeltaExchange.run

    def run(self: DeltaExchange, *args: Any) -> None:
        if is_late:
            real(self, *args)
        else:
            self.errors.attempt(planted)
            real(self, *args)
        planted()

    def planted() -> None:
        raise ValueError("planted")

    return mock.patch.object(DeltaExchange, "run", run)


class Sides:
    """Both sides of a plan: the deltas under test, and whole transfers as the reference."""

    def __init__(
        self, layout: int, budget_bytes: int, *, keep_old: bool, verify: bool, on_host: bool
    ) -> None:
        self.full = whole_source()
        source, target = layouts(layout, self.full)
        self.state, self.empty, self.into, self.wanted = source(), target, target(), target()
        described = describe_states(self.state, self.into)
        self.plan: TransferPlan = plan_transfer(
            *described, links=linked(), cast=True, budget_bytes=budget_bytes
        )
        direct = plan_transfer(*described, links=linked(), cast=True, budget_bytes=budget_bytes, relay=False)
        self.reference = Transfer(direct)
        self.options: dict[str, Any] = {"keep_old": keep_old, "verify": verify}
        self.transfer = Transfer(self.plan, delta=Delta(on_host=on_host), **self.options)
        self.step = 0

    def restart(self, lost: int) -> None:
        """All ranks meet again; one has lost everything that it remembered, and its target."""
        delta: Any = self.transfer.delta
        if dist.get_rank() == lost:
            delta = True
            self.into = self.empty()
        self.transfer = Transfer(self.plan, delta=delta, version=self.transfer.version, **self.options)

    def run(self, how: str) -> Exception | None:
        """Run the delta transfer; returns the error."""
        self.step += 1
        try:
            if how == "snapshot":
                self.transfer.start(self.state, self.into, snapshot=True, version=self.step).wait(60)
            else:
                self.transfer.run(self.state, self.into, version=self.step)
        except TransferError as error:
            return error
        return None

    def check(self) -> None:
        """The target has exactly the bits of a whole transfer."""
        self.reference.run(self.state, self.wanted)
        assert self.transfer.version == self.step
        assert differing(self.into, self.wanted) == [], (self.step, dist.get_rank())


def sent_by_all(sides: Sides) -> int:
    """Bytes that all ranks have sent in the last run."""
    assert sides.transfer.delta is not None
    numbers: list[int] = [0] * 4
    dist.all_gather_object(numbers, sides.transfer.delta.sent_bytes)
    return sum(numbers)


EVENTS = (
    "run",
    "run",
    "run",
    "skip",
    "repeat",
    "abort",
    "snapshot",
    "restart",
    "written",
    "written behind torch",
)


def many_steps(seed: int, numbers: range, num_steps: int) -> dict[str, int]:
    """Steps with drawn events. Returns how often each was seen, and how often a run sent only patches."""
    seen = dict.fromkeys((*EVENTS, "patched", "spilled", "unusable"), 0)
    for number in numbers:  # each with other layouts, budgets and options
        drawn = random.Random(seed * 100 + number)
        torch.manual_seed(seed * 100 + number)
        verify = bool(number & 1)
        keep_old, budget_bytes = drawn.random() < 0.5, drawn.choice([4096, 16384, 1 << 20])
        sides = Sides(number % 4, budget_bytes, keep_old=keep_old, verify=verify, on_host=number % 4 == 0)
        seen["spilled"] -= watch_spills(sides)
        for _ in range(num_steps):
            event = drawn.choice(EVENTS)
            fraction = drawn.choice([0.0, 0.001, 0.01, 0.1, 0.5, 1.0])
            victim = drawn.randrange(4)
            local = None
            if dist.get_rank() == victim and sides.into is not None:
                local = local_of(next(iter(sides.into.values())))
            if event == "written behind torch" and not verify:
                event = "run"
            seen[event] += 1
            if event != "repeat":
                mutate(sides.full, sides.state, drawn, fraction)
            if event == "skip":
                continue
            if event == "abort":
                before = {name: local_of(tensor).clone() for name, tensor in (sides.into or {}).items()}
                with failing(drawn):
                    error = sides.run("run")
                assert isinstance(error, TransferError)
                if error.target == "old":
                    assert differing(sides.into, before) == [] and error.version == sides.transfer.version
                else:
                    seen["unusable"] += 1
                    assert not keep_old and sides.transfer.version is None
                continue
            if event == "restart":
                sides.restart(victim)
            if event == "written" and local is not None and local.numel():
                local.fill_(1)
            if event == "written behind torch" and local is not None and local.numel():
                local.data.view(BITS[local.itemsize]).bitwise_not_()
            assert sides.run(event) is None, (seed, number, sides.step, event)
            sides.check()
            pool = sides.transfer._pool
            assert sum(len(buffer) for buffer in pool._free) <= budget_bytes
            seen["patched"] += sent_by_all(sides) < sides.plan.total_bytes // 2
        seen["spilled"] += watch_spills(sides)
    return seen


SPILLS: list[int] = []


def watch_spills(sides: Sides) -> int:
    """Number of spills of this process so far."""
    if not SPILLS:
        SPILLS.append(0)
        real = DeltaExchange._spill

        def noted(self: DeltaExchange) -> None:
            SPILLS[0] += 1
            real(self)

        DeltaExchange._spill = noted  # type: ignore[method-assign]
    return SPILLS[0]


# A thousand transfers and restarts of four ranks take 17 minutes beside two other tests, on a slow machine.
LONG = (pytest.mark.part("faults"), pytest.mark.timeout(3600))


@pytest.mark.parametrize(("num_sides", "num_steps"), [(3, 8), pytest.param(20, 50, marks=LONG)])
def test_every_step_is_a_whole_transfer(num_sides: int, num_steps: int) -> None:
    """Skipped, repeated and aborted rounds, restarts, snapshots, writes to the target, and patches that do not fit."""
    seen: Counter[str] = Counter()
    # Few at a time, in new processes: threads of earlier process groups make later sides slower.
    for first in range(0, num_sides, 5):
        numbers = range(num_sides)[first : first + 5]
        ranks = run_ranks(4, many_steps, 1, numbers, num_steps, timeout_s=600)
        seen.update(
            ranks[0] | {event: sum(each[event] for each in ranks) for event in ("spilled", "unusable")}
        )

    assert seen["patched"] > num_sides * num_steps // 8, seen
    assert seen["spilled"] > 0
    if num_steps > 8:
        assert min(seen[event] for event in EVENTS) > 10, seen
        assert seen["unusable"] > 0


def one_restarts() -> None:
    """Of three replicas, the second one has lost everything."""
    torch.manual_seed(0)
    sides = Sides(2, 1 << 20, keep_old=False, verify=True, on_host=False)
    assert sides.run("run") is None
    whole = sides.plan.total_bytes // 3
    mutate(sides.full, sides.state, random.Random(0), 0.001)
    sides.restart(2)
    assert sides.run("run") is None
    sides.check()
    assert sides.transfer.delta is not None
    sent = sides.transfer.delta.sent_bytes
    # The trainer sends everything to the second replica, and patches to the first, which sends them on to the third.
    rank = dist.get_rank()
    assert whole < sent < 1.5 * whole if rank == 0 else 0 < sent < whole / 2 if rank == 1 else sent == 0, (
        rank,
        sent,
    )


def test_a_restarted_replica_costs_the_others_nothing() -> None:
    """Patches go along the replicas that have the base."""
    run_ranks(4, one_restarts)


def dies(folder: str, victim: int) -> None:
    """A rank is killed while it sends or receives patches; other ranks note what became of them."""
    torch.manual_seed(0)
    sides = Sides(3, 1 << 20, keep_old=False, verify=False, on_host=False)
    assert sides.run("run") is None
    before = {name: local_of(tensor).clone() for name, tensor in (sides.into or {}).items()}
    mutate(sides.full, sides.state, random.Random(0), 0.1)
    method = "_bundle" if victim < 2 else "_stage"
    if dist.get_rank() == victim:
        kill = partial(os.kill, os.getpid(), signal.SIGKILL)
        mock.patch.object(DeltaExchange, method, side_effect=lambda *_: kill()).start()
    error = sides.run("run")
    assert isinstance(error, TransferError)
    assert differing(sides.into, before) == []
    outcome = [list(error.lost), error.target, error.version, sides.transfer.version]
    Path(folder, str(dist.get_rank())).write_text(json.dumps(outcome))


@pytest.mark.part("faults")
@pytest.mark.parametrize("victim", [0, 1, 2, 3])
def test_a_rank_dies_among_patches(tmp_path: Path, victim: int) -> None:
    """SIGKILL of a sender or a receiver: all other ranks name it, and engines have their old weights and version."""
    with pytest.raises(RankError, match="died"):
        run_ranks(4, dies, str(tmp_path), victim, timeout_s=60)

    told = {file.name: json.loads(file.read_text()) for file in tmp_path.iterdir()}
    assert set(told) == {str(rank) for rank in range(4) if rank != victim}
    assert all(outcome[0] == [victim] for outcome in told.values()), told
    assert all(told[rank][1:] == ["old", 1, 1] for rank in {"2", "3"} & set(told)), told


@pytest.mark.parametrize("numel", [30, 2**16])
@pytest.mark.parametrize("first", [0, 5])  # item of the memory at which the second name begins
def test_names_of_one_memory(numel: int, first: int) -> None:
    """An engine ties what the trainer does not: as in a whole transfer, the name that is stored last wins."""
    memory = torch.zeros(numel + first)
    served, whole = (
        {"a": each[:numel], "b": each[first:], "c": torch.zeros(numel)} for each in (memory, memory.clone())
    )
    trained = {name: torch.full((numel,), float(value)) for value, name in enumerate("abc")}
    plan = plan_transfer(*describe_states(trained, served))
    deltas = Transfer(plan, delta=True)
    for step in range(3):
        trained["a"][step + 6] = 77 + step
        trained["c"][step] = step
        deltas.run(trained, served)
        Transfer(plan).run(trained, whole)
        assert all(torch.equal(served[name], whole[name]) for name in served), step
    assert memory.unique().numel() > 1 or not first


@pytest.mark.parametrize("part", ["columns", "all"])
def test_interleaved_views_are_no_overlap(part: str) -> None:
    """Columns of one matrix are sent as changes; the matrix and some of its columns are sent whole."""
    memory = torch.zeros(256, 256)
    served = {"a": memory if part == "all" else memory[:, :128], "b": memory[:, 128:]}
    trained = {"a": torch.zeros_like(served["a"]), "b": torch.ones_like(served["b"])}
    deltas = Transfer(plan_transfer(*describe_states(trained, served)), delta=True)
    whole = {name: each.clone() for name, each in trained.items()}
    for step in range(2):
        trained["a"][0, 130 if part == "all" else 1] = whole["a"][0, 130 if part == "all" else 1] = 7.0 + step
        deltas.run(trained, served)
        assert torch.equal(served["b"], whole["b"])
        assert torch.equal(served["a"][:, :128], whole["a"][:, :128])
    assert deltas.delta is not None and (deltas.delta.target_run is None) == (part == "all")
