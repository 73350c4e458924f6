"""Which process groups a save or load talks over, and that they end with the groups they were made for."""

from __future__ import annotations

import torch.distributed as dist

from tests.distributed import run_ranks
from vescale_fsdp.checkpoint import agreement
from vescale_fsdp.checkpoint.agreement import GroupCoordinator, coordinator_for


def _groups_of_two_uses() -> tuple[int, int]:
    """The number of groups kept before and after coordinators for two uses, asked for twice."""
    before = len(agreement._groups)
    made = [coordinator_for(use=use) for use in ("sync", "async", "sync", "async")]
    assert all(isinstance(one, GroupCoordinator) and one.world_size == 2 for one in made)
    assert made[0].common([1, 2]) == {1, 2}
    return before, len(agreement._groups[dist.group.WORLD])


def test_groups_are_made_once_and_end_with_their_group() -> None:
    """One group for each use, however often; none is left when the group they came from is destroyed, in a process
    that goes on with others."""
    assert run_ranks(2, _groups_of_two_uses) == [(0, 2)] * 2
    assert run_ranks(2, _groups_of_two_uses) == [(0, 2)] * 2
