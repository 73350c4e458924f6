"""Recordings of small models: layers and tokens extrapolate, and FSDP2 copies and pads as computed."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from tools.bench.parts.simulated_accelerator import DecoderShape
from tools.replay.machine import Machine
from tools.replay.models import (
    BLOCKSHARD,
    FSDP2,
    LIBRARIES,
    MORE,
    NARROW,
    OURS,
    SHARD1,
    Case,
    Model,
    Recorded,
)
from tools.replay.queue import replay

DENSE = Model(DecoderShape(8, 256, 64, 512, 512, head=32), 64)
EXPERTS = Model(DecoderShape(8, 64, 32, 96, 512, num_experts=8, top_k=2, head=16), 64)
RANKS = 32  # more than experts
# Bound by products, by the network, by copies; and with contention.
MACHINES = {
    "products": Machine(1e12, 1e12, 1e12, 1e12, flops_s=1e10),
    "network": Machine(1e7, 1e7, 1e12, 1e12, hop_s=0),
    "copies": Machine(1e12, 1e12, 1e7, 1e7),
    "contention": Machine(1e9, 1e9, 1e9, 1e9, contention=1.0, flops_s=1e12),
}


@cache
def recorded(model: Model, library: str, ranks: int = RANKS) -> Recorded:
    return Recorded.of(Case(model, library, (ranks,)))


def layer_numel(shape: DecoderShape) -> int:
    attention = 2 * shape.hidden * (shape.query or shape.hidden) + 2 * shape.hidden * shape.kv
    return attention + 2 * shape.hidden + 3 * shape.hidden * shape.mlp * max(1, shape.num_experts)


NUMERICS = pytest.mark.part("numerics")


@pytest.mark.parametrize("library", [OURS, pytest.param(FSDP2, marks=NUMERICS)])
def test_four_layers_extrapolate_to_eight(library: str) -> None:
    """In time and memory, whatever bounds the step."""
    found = recorded(DENSE, library)
    (eight,) = found.case.record(8, [1])
    assert MORE == 4
    for machine in MACHINES.values():
        truth = replay(eight, machine.seconds_of, machine.class_of, machine.slowdowns)
        step = found.step(machine, DENSE.sequence)
        assert step.seconds == pytest.approx(float(truth.total), rel=1e-3)
        assert step.exposed_s == pytest.approx(float(truth.alone.get("collective", 0)), rel=2e-3, abs=1e-9)
        assert (step.peaks.live, step.peaks.pools) == pytest.approx(
            (eight.peaks.live, eight.peaks.pools), rel=1e-3
        )


@NUMERICS
def test_tokens_extrapolate() -> None:
    found = recorded(EXPERTS, OURS)
    (truth,) = found.case.record(MORE, [4])
    _, four = found.with_sequences(4)
    assert [item.flops for item in four.items] == [item.flops for item in truth.items]
    assert sum(item.nbytes for item in four.items) == pytest.approx(
        sum(item.nbytes for item in truth.items), rel=1e-3
    )
    assert four.peaks.live == pytest.approx(truth.peaks.live, rel=1e-3)


@pytest.mark.parametrize("library", [OURS, pytest.param(NARROW, marks=NUMERICS)])
def test_ours_copies_nothing(library: str) -> None:
    """Gathers of two bytes per parameter, without FSDP2's copies; and one reduction, unless slices are exchanged."""
    found = recorded(EXPERTS, library)
    gathers, gathered = found.per_layer("collective", "_allgather_base_")
    assert gathers == 2 and gathered == pytest.approx(4 * layer_numel(EXPERTS.shape), rel=0.05)
    for name in ("split_with_sizes_copy", "chunk_cat", "all_gather_copy_in"):
        assert found.per_layer("operator", name) == (0, 0)
    reductions, reduced = found.per_layer("collective", "_reduce_scatter_base_")
    assert (reductions, reduced > 0) == ((1, True) if library == OURS else (0, False))


@pytest.mark.parametrize(
    "library", [FSDP2, *(pytest.param(each, marks=NUMERICS) for each in (SHARD1, BLOCKSHARD))]
)
def test_fsdp2_pads_experts_by_default_only(library: str) -> None:
    """Eight experts over 32 ranks: a gather has four times the experts' parameters, or exactly these."""
    found = recorded(EXPERTS, library)
    shape = EXPERTS.shape
    experts = 3 * shape.hidden * shape.mlp * shape.num_experts
    padded = layer_numel(shape) + 3 * experts * (library == FSDP2)
    gathers, gathered = found.per_layer("collective", "_allgather_base_")
    assert (gathers, gathered) == (2, 4 * padded)
    # Read and written once; `cat` again for Shard(1), and once more before the reduction.
    assert found.per_layer("operator", "split_with_sizes_copy") == (2, 2 * 4 * padded)
    cats = found.per_layer("operator", "cat")[0] - recorded(EXPERTS, FSDP2).per_layer("operator", "cat")[0]
    assert cats == (3 * 2 if library == SHARD1 else 0)
    assert found.per_layer("collective", "_reduce_scatter_base_") == (1, 4 * padded)


@NUMERICS
def test_replicas_add_an_all_reduce_of_the_shard() -> None:
    """On a communicator of its own, which has the replicas."""
    found = Recorded.of(Case(DENSE, OURS, (2, 16)))
    reductions, reduced = found.per_layer("collective", "allreduce_")
    assert reductions == 1 and reduced == pytest.approx(4 * layer_numel(DENSE.shape) / 16, rel=0.05)
    items = [item for item in found.recordings[0][0].items if item.kind == "collective"]
    assert {(item.name, item.ranks) for item in items} == {
        ("_allgather_base_", 16),
        ("_reduce_scatter_base_", 16),
        ("allreduce_", 2),
    }
    assert len({item.group for item in items}) == 2


def test_what_does_not_divide_is_refused() -> None:
    """By the rule, and by FSDP2."""
    uneven = replace(EXPERTS, shape=replace(EXPERTS.shape, mlp=100))
    with pytest.raises(ValueError, match="divide"):
        Case(uneven, SHARD1, (RANKS,))
    case = Case(uneven, FSDP2, (RANKS,))
    object.__setattr__(case, "library", SHARD1)
    with pytest.raises(NotImplementedError):
        case.record(1, [1])


@pytest.mark.parametrize("wrong", [{"library": "FSDP1"}, {"optimizer": "muon"}])
def test_cases_verify_themselves(wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="got"):
        Case(**{"model": DENSE, "library": LIBRARIES[0], "mesh_shape": (2,), **wrong})  # type: ignore[arg-type]


def test_machines_verify_themselves() -> None:
    with pytest.raises(ValueError, match="got"):
        Machine(0, 1, 1, 1)
    with pytest.raises(ValueError, match="got"):
        Machine(1, 1, 1, 1, contention=-1)
