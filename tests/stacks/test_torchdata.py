"""torchdata's StatefulDataLoader in a ReshardableLoader: on other ranks no sample is seen twice or lost."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from vescale_fsdp.checkpoint.data import ReshardableLoader, ReshardableSampler

# torchdata calls what newer torch deprecates.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*set_vital"),
    # JAX, which other tests of the same process have imported, warns at every fork.
    pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning"),
]
NUM_SAMPLES = 101


def _loaders(world: int, workers: int) -> list[ReshardableLoader[torch.Tensor]]:
    samplers = [ReshardableSampler(NUM_SAMPLES, seed=2, rank=rank, world_size=world) for rank in range(world)]
    return [
        ReshardableLoader(
            StatefulDataLoader(range(NUM_SAMPLES), batch_size=3, sampler=sampler, num_workers=workers)
        )
        for sampler in samplers
    ]


@pytest.mark.parametrize("workers", [0, 1])
def test_on_4_then_3_then_5_ranks(workers: int) -> None:
    """Whether workers read ahead or not."""
    seen: list[int] = []
    loaders: list[ReshardableLoader[torch.Tensor]] = []
    for world in (4, 3, 5):
        states = [loader.state_dict() for loader in loaders]
        loaders = _loaders(world, workers)
        for rank, loader in enumerate(loaders):
            if states:
                loader.load_state_dict(loader.split(loader.merge(states), rank, world))
            seen += [sample for batch in islice(loader, 2) for sample in batch.tolist()]
    seen += [sample for loader in loaders for batch in loader for sample in batch.tolist()]

    assert sorted(seen) == list(range(NUM_SAMPLES)) and seen != sorted(seen)
