"""Which process groups a save or load talks over, and that they end with the groups they were made for."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from tests.distributed import run_ranks
from vescale_fsdp.checkpoint import agreement, async_save, async_saving, load
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


def _saved_behind(folder: Path) -> tuple[int, int]:
    """The number of savers kept before and after two saves, of all ranks by default and by name."""
    before = len(async_saving._group_savers)
    for name, group in (("default", None), ("named", dist.group.WORLD)):
        async_save(folder / name, {"a": torch.arange(5.0)}, process_group=group).wait()
        state = {"a": torch.zeros(5)}
        load(folder / name, state)
        assert state["a"].tolist() == [0, 1, 2, 3, 4]
    return before, len(async_saving._group_savers)


def test_savers_end_with_their_group(tmp_path: Path) -> None:
    """One staging buffer for one group, however it is named; none is left behind when the group is destroyed."""
    assert run_ranks(2, _saved_behind, tmp_path / "first") == [(0, 1)] * 2
    assert run_ranks(2, _saved_behind, tmp_path / "second") == [(0, 1)] * 2
