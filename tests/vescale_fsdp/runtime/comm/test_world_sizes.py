"""What a unit launches, sends and calls does not depend on the number of ranks: rank 0 of fake groups."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.support.async_device.stream_recorder import recording
from tests.support.distributed import cpu_mesh
from tests.vescale_fsdp.runtime.comm.test_launches import Launches
from tools.bench.parts.simulated_accelerator import fake_group
from vescale_fsdp import fully_shard, torch_modes
from vescale_fsdp.quantize import Fp8Blocks, QuantizedGather

WORLDS = (8, 64, 1024)
CODEC = Fp8Blocks(1, 32)
HALF = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
KINDS: dict[str, dict[str, Any]] = {
    "bf16": {"mp_policy": HALF},
    "fp32": {},
    "codes": {
        "mp_policy": QuantizedGather(torch.bfloat16, torch.float32, codecs=CODEC),
        "granularity": CODEC.granularity,
    },
}


def sharded(num_units: int, kind: str) -> Any:
    # Large enough for every rank of the largest group to own a part, so that rank 0 has the same work in all groups.
    model = nn.Sequential(
        *(
            nn.Sequential(nn.Linear(64, 512, bias=False), nn.Linear(512, 64, bias=False))
            for _ in range(num_units)
        )
    )
    for module in (*model, model):
        fully_shard(module, mesh=cpu_mesh(), **KINDS[kind])
    return model


def step(model: Any) -> None:
    model(torch.ones(2, 64)).float().sum().backward()
    model.zero_grad()


def counts_of_a_step(num_units: int, kind: str) -> Counter[str]:
    """Operators, collectives and calls of functions of a third step, on the accelerator's branch."""
    model = sharded(num_units, kind)
    calls = 0
    least = sys.maxsize  # of several steps: a collection of garbage in one of them calls functions, too

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    for _ in range(2):
        step(model)
    for _ in range(4):
        calls = 0
        sys.setprofile(count)
        step(model)
        sys.setprofile(None)
        least = min(least, calls)
    with recording(model) as recorder:
        step(model)
        recorder.collectives.clear()
        with Launches() as seen:
            step(model)
    found = Counter({f"launch {name}": number for name, number in seen.names.items()})
    found.update(f"collective {each.name}" for each in recorder.collectives)
    found["calls"] = least
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_unit_costs_the_same_on_8_64_and_1024_ranks(kind: str) -> None:
    """One unit more launches, sends and calls as much in every group."""
    added = {}
    for world in WORLDS:
        # Uncompiled steps in chunks as on an accelerator: padding of 1,024 ranks would be a second chunk of the CPU's.
        chunks = mock.patch.dict(torch_modes._CHUNK_NUMEL, {"cpu": torch_modes._LARGE_CHUNK_NUMEL})
        with fake_group(world), chunks:
            few, many = (counts_of_a_step(number, kind) for number in (2, 3))
        many.subtract(few)
        added[world] = {name: number for name, number in many.items() if number}
    assert added[8] == added[64] == added[1024]
    assert added[8]["collective all_gather_each"] == 2
    assert added[8]["collective reduce_scatter_into"] == 1
    assert added[8]["calls"] > 100
