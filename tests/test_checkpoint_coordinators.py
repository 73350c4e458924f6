"""Which process groups a save or load talks over, and that they end with the groups they were made for."""

from __future__ import annotations

import weakref
from pathlib import Path

import torch
import torch.distributed as dist

from tests.distributed import run_ranks
from vescale_fsdp.checkpoint import agreement, async_save, async_saving, load
from vescale_fsdp.checkpoint.agreement import GroupCoordinator, coordinator_for

_made: list[weakref.ref[dist.ProcessGroup]] = []  # in a rank's process, which lives through several calls


def _num_alive() -> int:
    """How many of the groups that earlier calls of this file made have outlived them; other files may leave theirs."""
    alive = sum(made() is not None for made in _made)
    _made.clear()
    return alive


def _groups_of_two_uses() -> tuple[int, int]:
    """Groups alive from before, and those made by coordinators for two uses, asked for twice."""
    before = _num_alive()
    made = [coordinator_for(use=use) for use in ("sync", "async", "sync", "async")]
    assert all(isinstance(one, GroupCoordinator) and one.world_size == 2 for one in made)
    assert made[0].common([1, 2]) == {1, 2}
    assert dist.group.WORLD is not None
    groups = agreement._groups[dist.group.WORLD].values()
    _made.extend(map(weakref.ref, groups))
    assert len(_made) == len(groups) and all(ref() is not None for ref in _made)
    return before, len(groups)


def test_groups_are_made_once_and_end_with_their_group() -> None:
    """One group for each use, however often; none is left when the group they came from is destroyed, in a process
    that goes on with others."""
    run_ranks(2, _num_alive)
    assert run_ranks(2, _groups_of_two_uses) == [(0, 2)] * 2
    assert run_ranks(2, _groups_of_two_uses) == [(0, 2)] * 2


def _saved_behind(folder: Path) -> tuple[int, bool]:
    """Groups alive from before, and whether two saves, of all ranks by default and by name, had one saver."""
    before = _num_alive()
    savers = []
    for name, group in (("default", None), ("named", dist.group.WORLD)):
        async_save(folder / name, {"a": torch.arange(5.0)}, process_group=group).wait()
        state = {"a": torch.zeros(5)}
        load(folder / name, state)
        assert state["a"].tolist() == [0, 1, 2, 3, 4]
        savers.append(async_saving._saver_for(group))
    assert dist.group.WORLD is not None
    _made.extend(map(weakref.ref, agreement._groups[dist.group.WORLD].values()))
    assert len(_made) == 2 and dist.group.WORLD in async_saving._group_savers
    return before, savers[0] is savers[1]


def test_savers_end_with_their_group(tmp_path: Path) -> None:
    """One staging buffer for one group, however it is named; nothing is left behind when the group is destroyed."""
    run_ranks(2, _num_alive)
    assert run_ranks(2, _saved_behind, tmp_path / "first") == [(0, True)] * 2
    assert run_ranks(2, _saved_behind, tmp_path / "second") == [(0, True)] * 2
