"""Plans of transfers: any distribution to any other, balanced, small, and refused where they do not meet."""

from __future__ import annotations

import json

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from tests.checkpoint.transfer.cases import descriptions, moved, part_of, region_of
from vescale_fsdp.checkpoint.transfer.planning.plan import TransferPlan, plan_transfer

SEARCH = settings(derandomize=True, database=None, deadline=None, max_examples=150)
SHAPES = st.sampled_from([(), (7,), (4, 6), (3, 5), (2, 3, 4), (5, 1, 2), (0, 3), (8, 8)])
WORLD_SIZE = 6


@st.composite
def cases(draw: st.DrawFn) -> TransferPlan:
    """Two descriptions of the same tensors."""
    dtypes = st.sampled_from(["float32", "int16", "int64", "uint8"])
    tensors = [(f"t{number}", draw(dtypes), draw(SHAPES)) for number in range(draw(st.integers(1, 3)))]
    source, target = draw(descriptions(tensors, WORLD_SIZE)), draw(descriptions(tensors, WORLD_SIZE))
    return plan_transfer(source, target, budget_bytes=4096)


def test_any_distribution_to_any_other() -> None:
    """Every rank ends with its part of every tensor, both ends agree, totals are exact, loads are level."""
    seen = {"sent": 0, "kept": 0, "replicas": 0}

    @SEARCH
    @given(cases())
    def check(plan: TransferPlan) -> None:
        full = {
            entry.name: torch.arange(entry.numel).view(entry.shape).to(getattr(torch, entry.dtype))
            for entry in plan.source.entries
        }
        got = moved(TransferPlan.from_json(json.loads(json.dumps(plan.to_json()))), full, WORLD_SIZE)
        for place, entry in enumerate(plan.target.entries):
            for rank in range(WORLD_SIZE):
                region = region_of(plan.target, place, rank)
                if region is not None:
                    assert torch.equal(got[rank][place], part_of(full[entry.name], region))
        seen["sent"] += int(plan.demand.sent.sum()) > 0
        seen["kept"] += int(plan.demand.kept.sum()) > 0
        seen["replicas"] += any(len(ranks) > 1 for ranks in plan.demand.sets)

    check()
    assert min(seen.values()) > 20
