"""What a unit adds to a step, as `tools/bench/counts.py` counts it."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from tools.bench.counts import POLICIES, TRAINED, most_in_full, of_one_more
from tools.bench.parts.simulated_accelerator import fake_group
from vescale_fsdp import fully_shard


@pytest.mark.parametrize("name", POLICIES)
def test_a_unit_costs_no_more_than_under_fsdp2(name: str) -> None:
    """FSDP2's number of collectives, with fewer operators and allocations, at any number of ranks."""
    found = []
    for ranks in (64, 16384):
        with fake_group(ranks):
            found.append(
                [of_one_more(POLICIES[name], function) for function in (fully_shard, torch_fully_shard)]
            )
    with fake_group(64):
        plain = of_one_more(POLICIES[name], None)
    assert found[0] == found[1]
    ours, theirs = found[0]
    assert ours["collectives"] == theirs["collectives"] == 3
    # FSDP2 of torch 2.15 has two operators fewer in bf16: as many as ours.
    is_as_many = torch.__version__ >= "2.15" and name == "bf16"
    assert plain["operators"] < ours["operators"] < theirs["operators"] + is_as_many
    assert plain["allocations"] < ours["allocations"] < theirs["allocations"]


def test_no_unit_is_in_full_between_backwards() -> None:
    """On an accelerator's branch, whatever is frozen: as under FSDP2."""
    with fake_group(64):
        for is_trained in TRAINED.values():
            assert most_in_full(fully_shard, is_trained) == most_in_full(torch_fully_shard, is_trained) == 0
