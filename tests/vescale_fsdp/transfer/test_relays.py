"""Relays: replicas of an engine send each other what they have received, so that the trainer sends every byte once."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.support.distributed import _PRELOAD, run_ranks
from tests.vescale_fsdp.transfer.test_faults import met
from tests.vescale_fsdp.transfer.test_plan import bytes_by_peer, held
from vescale_fsdp import RaggedShard, distribute_tensor
from vescale_fsdp.errors import CorruptCheckpointError, TransferError
from vescale_fsdp.layout.distribution import Axis, Distribution, RankSet, ShardCut
from vescale_fsdp.quantize import Fp8Blocks
from vescale_fsdp.torch_private import local_of
from vescale_fsdp.transfer import exchange
from vescale_fsdp.transfer.description import DescribedTensor, StateDescription, describe_states
from vescale_fsdp.transfer.joint_ranks import joint_ranks
from vescale_fsdp.transfer.links import codes, permute, scales
from vescale_fsdp.transfer.memory import Destination
from vescale_fsdp.transfer.plan import TransferPlan, plan_transfer
from vescale_fsdp.transfer.rank_transfers import RankTransfers
from vescale_fsdp.transfer.transfer import Transfer

LIMIT_S = 60.0
NUM_RANKS = 5  # a trainer and four replicas, in tests with processes that are lost


def described(num_trainers: int, replicas: int, tensor_parallel: int, experts: bool = False) -> TransferPlan:
    """A plan from shards of rows to replicas with tensor parallelism, which have a norm on all ranks."""
    ranks = range(num_trainers, num_trainers + replicas * tensor_parallel)
    axis = Axis(tensor_parallel, 1, ranks.start)
    source = [held(name, "bfloat16", (64, 512), range(num_trainers), ShardCut(0)) for name in ("q", "o")]
    cuts = {"q": ShardCut(0), "o": ShardCut(1)}
    target = [
        DescribedTensor(name, "bfloat16", (64, 512), Distribution((axis,), (cut,)), RankSet.of(ranks))
        for name, cut in cuts.items()
    ]
    source.append(held("norm", "float32", (64,), range(num_trainers)))
    target.append(held("norm", "float32", (64,), ranks))
    if experts:  # different ones on all ranks, and a router on all ranks
        source.append(held("experts", "bfloat16", (48, 64), range(num_trainers), ShardCut(0)))
        target.append(held("experts", "bfloat16", (48, 64), ranks, ShardCut(0)))
        source.append(held("router", "float32", (64, 512), range(num_trainers), ShardCut(0)))
        target.append(held("router", "float32", (64, 512), ranks))
    return plan_transfer(StateDescription.of(source), StateDescription.of(target))


def direct(plan: TransferPlan) -> TransferPlan:
    """The plan without relays."""
    return plan_transfer(plan.source, plan.target, relay=False)


def test_a_trainer_sends_every_byte_once() -> None:
    """However many replicas; a replica sends and receives at most one copy, and small tensors need no more messages."""
    alone, several = described(2, 1, 2), described(2, 4, 2)
    for trainer in range(2):
        to_one, to_all = (bytes_by_peer(plan, trainer)[True] for plan in (alone, several))
        assert to_one == to_all and sum(to_one.values()) == several.sent_bytes[trainer]
        assert len(RankTransfers(alone, trainer).messages()) == len(
            RankTransfers(several, trainer).messages()
        )
    copy = several.received_bytes[2]
    for rank in range(2, 10):
        by_peer = bytes_by_peer(several, rank)
        assert sum(by_peer[False].values()) == copy
        assert sum(by_peer[True].values()) == several.relayed_bytes[rank] == (copy if rank < 8 else 0)
        assert set(by_peer[True]) == ({rank + 2} if rank < 8 else set())
    assert (
        several.total_bytes == 8 * copy == sum(several.pair_bytes().values()) == direct(several).total_bytes
    )


def test_one_replica_is_sent_to_as_before() -> None:
    """Without ranks that take the same large tensors, plans with and without relays send the same messages."""
    plan = described(3, 1, 4)
    for rank in range(7):
        relayed, sent = (RankTransfers(each, rank).messages() for each in (plan, direct(plan)))
        assert [(m.peer, m.is_sent, m.number, m.nbytes) for m in relayed] == [
            (m.peer, m.is_sent, m.number, m.nbytes) for m in sent
        ]


def test_what_some_ranks_share_is_relayed() -> None:
    """Large tensors on all ranks have a route over all ranks, next to experts of which each rank has its own."""
    plan = described(2, 2, 2, experts=True)
    routes = set(plan.demand.routes)
    assert (2, 3, 4, 5) in routes and {(2, 4), (3, 5), (2,), (3,), (4,), (5,)} <= routes
    for column, route in enumerate(plan.demand.routes):
        for pair in pairwise(route):
            assert plan.pair_bytes()[pair] >= plan.demand.sent[:, column].sum() > 0
    once = 2 * (2 * 64 * 512) + 2 * 48 * 64 + 4 * 64 * 512 + 4 * 64
    assert sum(plan.sent_bytes.values()) == once
    assert sum(direct(plan).sent_bytes.values()) > 2 * once


def state_and_into() -> tuple[dict[str, Any] | None, dict[str, Any] | None, dict[str, torch.Tensor]]:
    """Two trainers, and two replicas of the whole: large and small tensors, strided, cast, coded and transposed."""
    trainers = DeviceMesh("cpu", [0, 1])
    generator = torch.Generator().manual_seed(1)
    shapes = {"rows": (512, 600), "turned": (256, 512), "half": (64, 64), "wide": (512, 512), "w": (128, 64)}
    full = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    full |= {"norm": torch.randn(64, generator=generator), "steps": torch.arange(8)}
    full["wide"] = full["wide"].bfloat16()
    coded = Fp8Blocks(32, 32).quantize(full["w"])
    wanted = {**full, "turned": full["turned"].t().contiguous(), "half": full["half"].bfloat16()}
    wanted |= {"wide": full["wide"].float(), "w": coded.codes, "w.scale": coded.scales}
    if dist.get_rank() < 2:
        cut = [RaggedShard((0,), (1, 3))]
        return {name: distribute_tensor(value, trainers, cut) for name, value in full.items()}, None, wanted
    return None, {name: torch.zeros_like(value) for name, value in wanted.items()}, wanted


def planned(state: Any, into: Any, **options: Any) -> TransferPlan:
    codec = Fp8Blocks(32, 32)
    links = {"turned": permute("turned"), "w": codes("w", codec), "w.scale": scales("w", codec)}
    return plan_transfer(
        *describe_states(state, into), links=links, cast=True, budget_bytes=1 << 20, **options
    )


def differing(into: dict[str, Any] | None, wanted: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors whose bits are not those that this rank should have."""
    pairs = {
        name: (tensor.view(torch.uint8), wanted[name].view(torch.uint8))
        for name, tensor in (into or {}).items()
    }
    return [name for name, (got, expected) in pairs.items() if not torch.equal(got, expected)]


def replicas_get_all() -> dict[str, int]:
    """All options; returns the bytes that this rank has sent to others in a run, by way."""
    state, into, wanted = state_and_into()
    sent: Counter[str] = Counter()
    way = ""
    real = exchange.send_async

    def counted(tensor: torch.Tensor, *args: Any) -> Any:
        sent[way] += tensor.nbytes
        return real(tensor, *args)

    ways: dict[str, dict[str, bool]] = {
        "relayed": {},
        "direct": {},
        "kept": {"keep_old": True},
        "verified": {"verify": True},
        "snapshot": {"keep_old": True, "verify": True},
    }
    with mock.patch.object(exchange, "send_async", counted):
        for way, options in ways.items():
            plan = planned(state, into, relay=way != "direct")
            transfer = Transfer(plan, **options)
            for tensor in (into or {}).values():
                tensor.zero_()
            for _ in range(2):
                transfer.start(state, into, snapshot=way == "snapshot").wait(60)
            assert not differing(into, wanted), (way, differing(into, wanted))
            sent[way] //= 2
            assert sum(buffer.nbytes for buffer in transfer._pool._free) <= plan.budget_bytes
    return dict(sent)


def test_all_replicas_get_the_same_bits() -> None:
    """In place, strided, cast, coded, transposed; with all options; and the bytes that are sent are those planned."""
    by_rank = run_ranks(4, replicas_get_all)

    sent = {way: [each.get(way, 0) for each in by_rank] for way in by_rank[0]}
    copy = sent["relayed"][2]
    assert sent["relayed"] == sent["kept"] and sum(sent["relayed"]) == sum(sent["direct"]) == 2 * copy
    assert sum(sent["relayed"][:2]) == copy and sent["relayed"][3] == 0 == sum(sent["direct"][2:])


def deltas_are_relayed() -> list[int]:
    """Bytes that this rank sends when a hundredth of all items has changed: with relays, and without."""
    state, into, _ = state_and_into()
    again = None if into is None else {name: torch.zeros_like(value) for name, value in into.items()}
    transfers = [
        Transfer(planned(state, into, relay=relay), delta=True, verify=True) for relay in (True, False)
    ]
    for step in range(2):
        for tensor in (state or {}).values():
            local_of(tensor).view(-1)[:: 100 if step else 1].add_(1)
        for transfer, target in zip(transfers, (into, again), strict=True):
            transfer.run(state, target)
        assert into is None or not differing(into, again or {})
    return [transfer.delta.sent_bytes for transfer in transfers if transfer.delta is not None]


def test_patches_are_relayed() -> None:
    """With `delta`, the trainer sends every patch once, and all replicas have the same bits as without relays."""
    relayed, sent = zip(*run_ranks(4, deltas_are_relayed), strict=True)

    assert (
        2 * sum(relayed[:2]) == sum(sent[:2]) and relayed[2:] == (sum(relayed[:2]), 0) and sent[2:] == (0, 0)
    )
    assert sum(relayed[:2]) < 100_000


def a_relay_changes_bits() -> None:
    """With `verify`, bits that change where a relay stores them are an error; the rank behind it got good ones."""
    state, into, wanted = state_and_into()
    real = Destination.unpack
    flipped: list[Any] = []

    def flipping(self: Destination, batch: Any, data: torch.Tensor) -> None:
        real(self, batch, data)
        if dist.get_rank() == 2 and not flipped:
            flipped.append(batch)
            self.flat(batch.copies[0][0].target).view(-1).view(torch.uint8).bitwise_not_()

    transfer = Transfer(planned(state, into), verify=True, keep_old=True)
    with mock.patch.object(Destination, "unpack", flipping):
        error = met(lambda: transfer.run(state, into))
    assert isinstance(error, TransferError) and error.target == "old"
    assert isinstance(error.__cause__, CorruptCheckpointError)
    assert dist.get_rank() == 2 or error.__cause__.where == "ranks [2]"
    transfer.run(state, into)
    assert not differing(into, wanted)


def test_a_relay_that_stores_other_bits_is_noticed() -> None:
    """The rank that stores other bits notices it; the ranks behind it have received what was sent."""
    run_ranks(4, a_relay_changes_bits)


def seen_in(into: dict[str, torch.Tensor], full: dict[str, torch.Tensor]) -> str:
    """What a target contains: "old", "new", "unusable" or "mixed"."""
    verdicts = {
        "old": all((value == 7).all() for value in into.values()),
        "new": all(torch.equal(value, full[name]) for name, value in into.items()),
        "unusable": all(value.isnan().all() for value in into.values()),
    }
    return next((verdict for verdict, holds in verdicts.items() if holds), "mixed")


def meets(folder: str, rank: int, victim: int, signal_number: int, keep_old: bool) -> None:
    """A trainer (rank 0) or a replica. The victim is killed or stopped; the others meet again and transfer again."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)
    full = {"a": torch.arange(1 << 19, dtype=torch.float32).view(512, 1024), "b": torch.arange(100.0)}
    state, into = (full, None) if rank == 0 else (None, {name: full[name] * 0 + 7 for name in full})
    told: list[Any] = []
    for meeting in range(2 if victim else 1):
        left = [each for each in range(NUM_RANKS) if not meeting or each != victim]
        with joint_ranks(
            f"file://{folder}/meet{meeting}",
            first_rank=left.index(rank),
            num_ranks=len(left),
            timeout_s=4 if signal_number == signal.SIGSTOP and not meeting else LIMIT_S,
        ) as ranks:
            plan = plan_transfer(*describe_states(state, into, ranks=ranks), budget_bytes=1 << 20)
            transfer = Transfer(plan, ranks=ranks, keep_old=keep_old)
            if rank == victim:
                _ends_while_it_sends(signal_number)
            try:
                transfer.run(state, into, version=meeting)
            except TransferError as error:
                told.append([list(error.lost), error.target, transfer.version])
            else:
                told.append([plan.demand.routes, "new", transfer.version])
            if into is not None:
                told[-1][1] = [told[-1][1], seen_in(into, full)]
    Path(folder, str(rank)).write_text(json.dumps(told))


def _ends_while_it_sends(signal_number: int) -> None:
    """Kill or stop this process before it begins to send its third message."""
    real, seen = exchange.send_async, []

    def ending(*args: Any) -> Any:
        seen.append(1)
        if len(seen) == 3:
            os.kill(os.getpid(), signal_number)
        return real(*args)

    exchange.send_async = ending


@pytest.mark.parametrize(
    ("victim", "signal_number", "keep_old"),
    [
        (2, signal.SIGKILL, False),
        *(
            pytest.param(*case, marks=pytest.mark.part("faults"))
            for case in (
                (1, signal.SIGKILL, True),
                (0, signal.SIGKILL, False),
                (0, signal.SIGSTOP, False),
                (2, signal.SIGSTOP, True),
            )
        ),
    ],
)
def test_a_rank_of_a_route_is_lost(tmp_path: Path, victim: int, signal_number: int, keep_old: bool) -> None:
    """All others name it and no target is mixed; the next meeting plans without it, and all get the weights."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOAD))
    given = victim, int(signal_number), keep_old
    jobs = [context.Process(target=meets, args=(str(tmp_path), rank, *given)) for rank in range(NUM_RANKS)]
    try:
        for job in jobs:
            job.start()
        for rank, job in enumerate(jobs):
            if rank != victim:
                job.join(LIMIT_S)
    finally:
        for job in jobs:
            job.kill()
            job.join(LIMIT_S)
    told = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir() if path.name.isdigit()}
    assert set(told) == {str(rank) for rank in range(NUM_RANKS) if rank != victim}
    outcome = "old" if keep_old else "unusable"
    for name, (first, *second) in told.items():
        ended, new = (each if name == "0" else [each, each] for each in (outcome, "new"))  # 0: the trainer
        assert first == [[victim], ended, None], told
        assert second == [[[[1, 2, 3]], new, 1]][: int(victim > 0)], told
