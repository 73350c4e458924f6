"""Plans of transfers: any distribution to any other, small, and refused if states do not match."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from tests.vescale_fsdp.transfer.cases import descriptions, moved, part_of, region_of
from vescale_fsdp.errors import CheckpointError, PlacementError
from vescale_fsdp.layout import TensorSpec, plan_group
from vescale_fsdp.layout.distribution import Axis, Distribution, LayoutCut, RankSet, ShardCut
from vescale_fsdp.layout.geometry import Box, Range
from vescale_fsdp.layout.region import Region
from vescale_fsdp.quantize import Fp8Blocks
from vescale_fsdp.transfer import demand, rank_transfers
from vescale_fsdp.transfer.description import DescribedTensor, StateDescription, describe_states
from vescale_fsdp.transfer.links import Link, codes, concatenate, scales
from vescale_fsdp.transfer.plan import TransferPlan, plan_transfer
from vescale_fsdp.transfer.rank_transfers import RankTransfers, nbytes_of

SEARCH = settings(derandomize=True, database=None, deadline=None, max_examples=150)
SHAPES = st.sampled_from([(), (7,), (4, 6), (3, 5), (2, 3, 4), (5, 1, 2), (0, 3), (40, 30)])
WORLD_SIZE = 6


@st.composite
def cases(draw: st.DrawFn) -> TransferPlan:
    """Two descriptions of the same tensors."""
    dtypes = st.sampled_from(["float32", "int16", "int64", "uint8"])
    tensors = [(f"t{number}", draw(dtypes), draw(SHAPES)) for number in range(draw(st.integers(1, 3)))]
    source, target = draw(descriptions(tensors, WORLD_SIZE)), draw(descriptions(tensors, WORLD_SIZE))
    return plan_transfer(source, target, budget_bytes=4096, relay=draw(st.sampled_from([True, True, False])))


def test_any_distribution_to_any_other() -> None:
    """Every rank gets its part of every tensor, and both ends of a stream derive the same messages."""
    seen = {"sent": 0, "kept": 0, "replicas": 0, "relayed": 0}

    @SEARCH
    @given(cases())
    def check(plan: TransferPlan) -> None:
        full = {
            entry.name: torch.arange(entry.numel).view(entry.shape).to(getattr(torch, entry.dtype))
            for entry in plan.source.entries
        }
        got = moved(plan, full, WORLD_SIZE)
        for place, entry in enumerate(plan.target.entries):
            for rank in range(WORLD_SIZE):
                region = region_of(plan.target, place, rank)
                if region is not None:
                    assert torch.equal(got[rank][place], part_of(full[entry.name], region))
        seen["sent"] += int(plan.demand.sent.sum()) > 0
        seen["kept"] += int(plan.demand.kept.sum()) > 0
        seen["replicas"] += any(len(ranks) > 1 for ranks in plan.demand.sets)
        seen["relayed"] += any(len(route) > 1 for route in plan.demand.routes)
        assert plan.relay or not sum(plan.relayed_bytes.values())

    check()
    assert min(seen.values()) > 20


def held(name: str, dtype: str, shape: tuple[int, ...], ranks: range, *cuts: ShardCut) -> DescribedTensor:
    """A tensor that is cut over consecutive ranks, or whole on all of them."""
    axes = (Axis(len(ranks), 1, ranks.start),) if cuts else ()
    return DescribedTensor(name, dtype, shape, Distribution(axes, cuts), RankSet.of(ranks))


def test_all_that_does_not_meet_is_listed_at_once() -> None:
    """Names, shapes, dtypes, links and parts that no rank stores: one error names them all."""
    source = StateDescription.of(
        [
            held("a", "float32", (4, 4), range(2)),
            held("b", "float32", (4, 4), range(2)),
            held("n", "int64", (4,), range(2)),
            DescribedTensor(
                "lost", "float32", (4,), Distribution((Axis(3, 1),), (ShardCut(0),)), RankSet.world(2)
            ),
        ]
    )
    wanted = {
        "gone": (4, 4),
        "a": (4, 5),
        "narrow": (4, 4),
        "misfit": (4, 4),
        "lost": (4,),
    }
    target = StateDescription.of(
        [
            held(name, "bfloat16" if name == "narrow" else "float32", shape, range(2, 4))
            for name, shape in wanted.items()
        ]
    )
    links: dict[str, Link] = {
        "narrow": "b",
        "misfit": concatenate("a", "n"),
        "nowhere": "a",
    }

    with pytest.raises(PlacementError) as raised:
        plan_transfer(source, target, links=links)

    for told in (
        "'gone': the source has no tensor 'gone'",
        "'a': shape (4, 5), but the source makes (4, 4)",
        "'narrow': dtype bfloat16, but the source makes float32",
        "'misfit': Tensors cannot be concatenated.",
        "'nowhere' is linked, but the target has no such tensor",
        "'lost': no rank of the source has the piece at [2] of [3]",
    ):
        assert told in str(raised.value)
    assert "6 problems" in str(raised.value)


def bytes_by_peer(plan: TransferPlan, rank: int) -> dict[bool, dict[int, int]]:
    """Bytes of a rank's messages, by whether it sends them, and by peer."""
    nbytes: dict[bool, dict[int, int]] = {True: {}, False: {}}
    for message in RankTransfers(plan, rank).messages():
        by_peer = nbytes[message.is_sent]
        by_peer[message.peer] = by_peer.get(message.peer, 0) + message.nbytes
    return nbytes


def test_replicas_of_a_source_share_the_work_exactly() -> None:
    """Two ranks with whole copies and three receivers: 1.5 copies each, and one receiver gets bytes of both."""
    source = StateDescription.of([held("w", "bfloat16", (64, 64), range(2))])
    target = StateDescription.of([held("w", "bfloat16", (64, 64), range(2, 5))])
    plan = plan_transfer(source, target, relay=False)

    assert [bytes_by_peer(plan, rank)[True] for rank in range(2)] == [{2: 8192, 3: 4096}, {3: 4096, 4: 8192}]


def simulated(num_sources: int, num_targets: int, num_tensors: int) -> TransferPlan:
    """Ragged shards of groups of ten tensors, to tensor parallelism over 4 ranks with replicas."""
    layouts, source, target = [], [], []
    for group in range(num_tensors // 10):
        specs = [
            TensorSpec(f"{group}.{n}", (64 + 8 * ((group + n) % 7), 64), "bfloat16", 1) for n in range(10)
        ]
        layouts.append(plan_group(specs, num_sources))
        for spec in specs:
            place = [slot.fqn for slot in layouts[-1].slots].index(spec.fqn)
            pieces = Distribution((Axis(num_sources, 1),), (LayoutCut(group, place),))
            columns = Distribution((Axis(4, 1),), (ShardCut(place % 2),))
            ranks = RankSet.of(range(num_sources, num_sources + num_targets))
            source.append(
                DescribedTensor(spec.fqn, "bfloat16", spec.shape, pieces, RankSet.world(num_sources))
            )
            target.append(DescribedTensor(spec.fqn, "bfloat16", spec.shape, columns, ranks))
    return plan_transfer(StateDescription.of(source, layouts), StateDescription.of(target))


def test_totals_of_all_ranks_cost_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared pairs of regions grow with the tensors and with the source's ranks, not with pairs of ranks."""
    compared = [0]
    real = demand.shared_numels

    def counted(source: Any, *args: Any) -> Any:
        compared[-1] += len(source.cells)
        return real(source, *args)

    monkeypatch.setattr(demand, "shared_numels", counted)
    simulated(32, 16, 40)
    compared.append(0)
    large = simulated(128, 64, 40)
    compared.append(0)
    simulated(32, 16, 80)

    small_pairs, large_pairs, twice_pairs = compared
    assert 0 < large_pairs < 6 * small_pairs and twice_pairs < 2.5 * small_pairs
    nbytes = sum(2 * entry.numel for entry in large.source.entries)
    assert large.demand.sent.sum() == nbytes and large.total_bytes == 16 * nbytes
    senders, routes = large.demand.sent.shape
    assert routes == 4 and 120 < senders <= 128  # of tensors so small the last ranks hold nothing
    assert set(large.received_bytes.values()) == {nbytes // 4} and len(large.received_bytes) == 64


def test_a_rank_asks_for_its_own_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work of one rank does not grow with ranks that it does not communicate with."""
    asked = []
    real = rank_transfers.copies_between

    def counted(*args: Any) -> Any:
        asked.append(1)
        return real(*args)

    monkeypatch.setattr(rank_transfers, "copies_between", counted)
    counts = []
    for num_sources in (32, 128):
        plan = simulated(num_sources, 16, 40)
        asked.clear()
        messages = RankTransfers(plan, 1).messages()
        assert messages and all(message.is_sent for message in messages)
        counts.append(len(asked))
    assert 0 < counts[1] <= counts[0]


def test_codes_are_half_the_bytes() -> None:
    """A coded bf16 matrix is sent as codes and scales, at most 0.51 of its bytes."""
    source = StateDescription.of([held("w", "bfloat16", (1024, 1024), range(2), ShardCut(0))])
    codec = Fp8Blocks()
    parts = [("c", "float8_e4m3fn", (1024, 1024)), ("s", "float32", codec.grid((1024, 1024)).scales_shape)]
    target = StateDescription.of([held(*part, range(2, 4), ShardCut(1)) for part in parts])

    plan = plan_transfer(source, target, links={"c": codes("w", codec), "s": scales("w", codec)})

    assert 1 << 20 < plan.demand.sent.sum() <= 0.51 * (2 << 20)
    other = Fp8Blocks(64, 128)
    again, halved = (
        plan_transfer(source, target, links={"c": codes("w", each), "s": scales("w", codec)})
        for each in (Fp8Blocks(), other)
    )
    assert again == plan and hash(again) == hash(plan) and again.digest == plan.digest
    assert halved != plan and halved.digest != plan.digest


def test_the_report_is_what_ranks_do() -> None:
    """Totals and pairs are those of the streams that ranks derive."""
    source = StateDescription.of(
        [held("w", "bfloat16", (65, 64), range(2)), held("v", "float32", (8, 8), range(1, 4), ShardCut(0))]
    )
    target = StateDescription.of(
        [held("w", "bfloat16", (65, 64), range(1, 4), ShardCut(0)), held("v", "float32", (8, 8), range(4, 6))]
    )
    plan = plan_transfer(source, target)

    pairs = plan.pair_bytes()
    for rank in range(6):
        sends = bytes_by_peer(plan, rank)[True]
        assert sends == {taker: nbytes for (sender, taker), nbytes in pairs.items() if sender == rank}
        expected = plan.sent_bytes.get(rank, 0) + plan.relayed_bytes.get(rank, 0)
        assert abs(sum(sends.values()) - expected) <= 32
        assert sum(bytes_by_peer(plan, rank)[False].values()) == plan.received_bytes.get(rank, 0)
        assert nbytes_of(RankTransfers(plan, rank).kept) == plan.kept_bytes.get(rank, 0)
    assert plan.total_bytes == sum(pairs.values()) > 0 and plan.kept_bytes and plan.imbalance > 1
    assert f"{plan.imbalance:.2f} " in str(plan) and "copied" in str(plan)


def test_names_have_dots_and_slashes_are_accepted() -> None:
    """Keys of nested states are joined by dots; links may spell names with slashes."""
    state = {"model": {"a": {"q": torch.ones(2), "k": torch.ones(2)}}}
    into = {"engine": [{"qk": torch.zeros(4)}]}
    source, target = describe_states(state, into)
    assert [entry.name for entry in source.entries] == ["model.a.q", "model.a.k"]

    names = {"engine.0.qk": ("model.a.q", "model.a.k"), "engine/0/qk": ("model/a/q", "model/a/k")}
    for name, inputs in names.items():
        plan = plan_transfer(source, target, links={name: concatenate(*inputs)})
        assert [leaf.source.name for leaf in plan.leaves] == ["model.a.q", "model.a.k"] and plan.unused == ()
    with pytest.raises(PlacementError):
        plan_transfer(source, target, links={name: concatenate("model.a.q", "model.a.k") for name in names})
    with pytest.raises(CheckpointError):
        describe_states({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, None)


def test_ranges_become_boxes_beside_whole_ones() -> None:
    """The whole row stays first; the range from 1 to 5 of a 2 x 3 box becomes a box in each of its rows."""
    whole, cut = Region(Box((0, 0), (2, 3)), Range(0, 6)), Region(Box((2, 0), (2, 3)), Range(1, 5))
    table = demand.RegionTable.of([(0, whole), (1, cut)], 2).boxes()
    assert table.cells.tolist() == [0, 1, 1]
    assert [table.box(row) for row in range(3)] == [whole.box, Box((2, 1), (1, 2)), Box((3, 0), (1, 2))]
    assert (table.starts.tolist(), table.stops.tolist()) == ([0, 0, 0], [6, 2, 2])
