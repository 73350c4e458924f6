"""torch.compile beside FSDP2: per block and of whole models, graph breaks counted; addresses that graphs may keep.

One test compiles with ``COMPILE=inductor`` in the environment (`make test-faults`) by Inductor, which takes a C++
compiler and half a minute.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from tests.support import models
from tests.support.distributed import cpu_mesh, run_ranks
from vescale_fsdp import fully_shard
from vescale_fsdp.runtime.fsdp_state import state_of

STEPS = 3
BACKEND = os.environ.get("COMPILE", "aot_eager")


class Run(NamedTuple):
    """What training has done, and what it was compiled to."""

    losses: list[float]
    breaks: int
    graphs: int


class Lookup(torch.nn.Embedding):
    """An embedding of the largest column's number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.argmax(-1))


def train(
    shard: Callable[..., Any], compiled: str, backend: str, *, breaks: bool = False, embeds: bool = False
) -> Run:
    """Steps of a model of which blocks, or the whole, are compiled."""
    torch._dynamo.reset()
    counters.clear()
    model: Any = models.build()
    if embeds:
        model.embed = Lookup(5, 7)
    for block in model.blocks:
        if breaks:
            block.up.register_forward_hook(lambda *_: torch._dynamo.graph_break())
        shard(block, mesh=cpu_mesh())
        if compiled == "blocks":
            block.compile(backend=backend)
    shard(model, mesh=cpu_mesh())
    if compiled == "model":
        model.compile(backend=backend)
    if compiled == "wrapped model":
        model = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        loss = models.loss_of(model, models.batch(step, dist.get_rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Run(losses, sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"])


def beside_fsdp2(embeds: bool) -> None:
    plain = train(fully_shard, "nothing", "", embeds=embeds)
    assert plain.graphs == 0 and len(set(plain.losses)) == STEPS
    for compiled in ("blocks", "model", "wrapped model"):
        ours, theirs = (
            train(shard, compiled, "aot_eager", embeds=embeds) for shard in (fully_shard, torch_fully_shard)
        )
        assert ours.graphs > 0 and theirs.graphs > 0
        assert ours.breaks <= theirs.breaks, compiled
        assert ours.graphs <= theirs.graphs, compiled
        torch.testing.assert_close(ours.losses, plain.losses)
        torch.testing.assert_close(theirs.losses, plain.losses)
    torn = train(fully_shard, "model", "aot_eager", breaks=True)
    assert torn.breaks > ours.breaks, "breaks are counted"


@pytest.mark.part("numerics")
@pytest.mark.parametrize("embeds", [False, True])
def test_a_compiled_model_breaks_no_more_than_fsdp2s(embeds: bool) -> None:
    """No more than FSDP2's, and the losses of a model that is not compiled; a break more is counted."""
    run_ranks(2, beside_fsdp2, embeds)


def one_rank() -> None:
    plain, ours = train(fully_shard, "nothing", ""), train(fully_shard, "blocks", BACKEND)
    assert ours.graphs > 0
    torch.testing.assert_close(ours.losses, plain.losses)


def test_blocks_by_a_backend() -> None:
    """What is compiled reads and writes our buffers."""
    run_ranks(1, one_rank, timeout_s=600.0)


class Places(NamedTuple):
    """Of the full parameters of several forwards."""

    addresses: set[tuple[int, ...]]  # one tuple per forward that had them elsewhere
    stays: set[bool]  # whether their memory was there between a backward and the next forward
    values: list[list[float]]  # of one of them, forward by forward


def places(keeps: bool) -> Places:
    model: Any = models.shard(models.build(), reshard_after_forward=False)
    model.set_keep_unsharded_storage(keeps)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = Places(set(), set(), [])
    for step in range(STEPS):
        loss = models.loss_of(model, models.batch(step, dist.get_rank()))
        assert not any(isinstance(param, DTensor) for param in model.parameters()), "they stay gathered"
        found.addresses.add(tuple(param.data_ptr() for param in model.parameters()))
        found.values.append(model.blocks[1].down.weight.flatten().tolist())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        storages = [
            group.full.flat.untyped_storage()
            for module in model.modules()
            if (state := state_of(module))
            for group in state.groups
        ]
        found.stays.update(storage.nbytes() > 0 for storage in storages)
    return found


def test_addresses_that_graphs_may_keep() -> None:
    """Full parameters never move where their memory is kept, and are those of the last step; else it is given back."""
    for kept, freed in zip(run_ranks(2, places, True), run_ranks(2, places, False), strict=True):
        (addresses,) = kept.addresses
        assert len(set(addresses)) == len(addresses) > 20 and 0 not in addresses
        assert kept.stays == {True} and freed.stays == {False}
        assert kept.values == freed.values and len({tuple(values) for values in kept.values}) == STEPS
