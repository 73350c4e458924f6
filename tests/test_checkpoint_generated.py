"""Whatever `save` accepts, a load brings back, bit for bit and by type; what it could not is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed import run_ranks
from tests.generated_states import assert_same, draw_state, fresh
from vescale_fsdp.checkpoint import async_save, load, read_state, save, verify


def _round_trips(path: Path, form: str, seeds: range) -> tuple[int, int]:
    """Leaves compared, and states compared, after a save, a verification and a load into a fresh state."""
    leaves = states = 0
    for seed in seeds:
        folder = path / f"{seed}"
        state = draw_state(seed)
        if form == "behind":
            async_save(folder, state).wait()
        else:
            save(folder, state, format=form)
        if dist.get_rank() == 0:
            assert verify(folder).problems == (), seed
            read_state(folder).tree(read=True)
        into: dict[str, Any] = fresh(draw_state(seed))
        load(folder, into)
        leaves += assert_same(state, into, f"{seed}")
        states += 1
    return leaves, states


@pytest.mark.parametrize("form", ["native", "zarr", "behind"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_state_comes_back(form: str, world: int, tmp_path: Path) -> None:
    """Random nestings of every kind of leaf, under odd keys, on one to four ranks."""
    seeds = range(100 * world, 100 * world + 12)
    for leaves, states in run_ranks(world, _round_trips, tmp_path, form, seeds):
        assert states == len(seeds) and leaves > 100
