"""Which process groups a save or load talks over, and that they end with the groups they were made for."""

from __future__ import annotations

import errno
import re
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.support.distributed import run_ranks
from vescale_fsdp import RaggedDTensor, RaggedShard, fully_shard
from vescale_fsdp.checkpoint import async_save, load, save
from vescale_fsdp.checkpoint.async_save import _group_savers, _saver_for
from vescale_fsdp.checkpoint.native import zarr_live as zarr_form
from vescale_fsdp.checkpoint.ranks import coordinator as agreement
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator, GroupCoordinator, coordinator_for
from vescale_fsdp.checkpoint.save import Saver
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.collectives.process_groups import new_group
from vescale_fsdp.errors import CheckpointError, CorruptCheckpointError
from vescale_fsdp.optim import muon_plan
from vescale_fsdp.runtime.data_mesh import default_mesh
from vescale_fsdp.torch_private import flatten_mesh, timeout_of

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
    assert made[0].everyone((1, 2)) == [(1, 2)] * 2
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
        savers.append(_saver_for(group))
    assert dist.group.WORLD is not None
    _made.extend(map(weakref.ref, agreement._groups[dist.group.WORLD].values()))
    assert len(_made) == 2 and dist.group.WORLD in _group_savers
    return before, savers[0] is savers[1]


def test_savers_end_with_their_group(tmp_path: Path) -> None:
    """One staging buffer for one group, however it is named; nothing is left behind when the group is destroyed."""
    run_ranks(2, _num_alive)
    assert run_ranks(2, _saved_behind, tmp_path / "first") == [(0, True)] * 2
    assert run_ranks(2, _saved_behind, tmp_path / "second") == [(0, True)] * 2


class _Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


_MET: dict[str, Callable[[], BaseException]] = {
    "disk": lambda: OSError(errno.ENOSPC, "No space left"),
    "memory": lambda: MemoryError("none left"),
    "runtime": lambda: RuntimeError("device lost"),
    "ctrl-c": lambda: KeyboardInterrupt("now"),
    "exit": lambda: SystemExit(3),
    "iteration": lambda: StopIteration("over"),
    "mute": _Mute,
    "ours": lambda: CheckpointError("does not fit"),
    "damage": lambda: CorruptCheckpointError("torn", expected=1, got=2, where="here"),
}


def _leave(met: dict[int, str], coordinator: Coordinator) -> BaseException | None:
    """How this rank leaves a block in which ranks meet what is named."""
    rank = dist.get_rank()
    try:
        with coordinator.together("testing"):
            if rank in met:
                raise _MET[met[rank]]()
    except BaseException as error:  # noqa: BLE001  the test looks at whatever it is
        return error
    return None


def _leave_all(cases: list[dict[int, str]]) -> list[str]:
    coordinator = coordinator_for()
    found = []
    for met in cases:
        error = _leave(met, coordinator)
        own = met.get(dist.get_rank())
        if own in ("ours", "damage", None):
            found.append(f"{type(error).__name__}: {error}")
        else:
            assert isinstance(error, type(_MET[own]())), (met, error)
            assert any("testing" in note for note in error.__notes__)
            found.append("own")
    return found


def test_all_ranks_leave_a_block_together() -> None:
    """Who was hit raises what it met, Ctrl-C included; the others an error that names the rank and what it met."""
    cases = [{rank: kind} for kind in _MET for rank in range(3)]
    ranks = run_ranks(3, _leave_all, [{}, *cases, {}])

    for found in ranks:
        assert found[0] == found[-1] == "NoneType: None"
    for number, met in enumerate(cases, start=1):
        ((bad_rank, kind),) = met.items()
        for rank, found in enumerate(ranks):
            if rank == bad_rank:
                assert found[number].splitlines()[0] == {
                    "ours": "CheckpointError: does not fit",
                    "damage": "CorruptCheckpointError: torn",
                }.get(kind, "own")
            else:
                wanted = "CorruptCheckpointError" if kind == "damage" else "CheckpointError"
                assert found[number].startswith(f"{wanted}: ") and f"ranks [{bad_rank}]" in found[number]
                assert f"rank {bad_rank}: {type(_MET[kind]()).__name__}" in found[number]
                # The parts of the rank's own error are not mixed with those of the summary.
                assert all(found[number].count(f"\n  {part}:") == 1 for part in ("expected", "what to do"))


def test_ranks_that_meet_different_things_decide_alike() -> None:
    """Damage outweighs what does not fit; what is not ours ends the work on all ranks, damage or not."""
    first, second, third = run_ranks(
        3, _leave_all, [{0: "ours", 1: "damage"}, {0: "damage", 1: "ctrl-c"}, {0: "disk", 1: "memory"}]
    )

    assert [text.partition(":")[0] for text in first] == [
        "CorruptCheckpointError",
        "CheckpointError",
        "own",
    ]
    assert [text.partition(":")[0] for text in second] == ["CorruptCheckpointError", "own", "own"]
    assert [text.partition(":")[0] for text in third] == ["CorruptCheckpointError", *["CheckpointError"] * 2]
    assert "rank 0: OSError" in third[2] and "rank 1: MemoryError" in third[2]


_PLACES = ("overlaps", "_pack", "_unpack", "ArrayWriter._put_chunk", "Storage.put", "held_chunks")


def _zarr_fails(folder: Path, cases: list[tuple[str, str, int]]) -> list[str]:
    """How a save of arrays cut inside rows ends, where a function of its writer raises on one rank."""
    numels = [7, 30 - 7, 0] if dist.get_world_size() == 3 else [17, 13]
    placement = RaggedShard.from_piece_numels((5, 6), numels)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    start = sum(numels[: dist.get_rank()])
    local = torch.arange(start, start + numels[dist.get_rank()], dtype=torch.float32)
    state = {name: RaggedDTensor.from_local(local, mesh, [placement], shape=(5, 6)) for name in "abc"}
    found = []
    for number, (place, kind, bad_rank) in enumerate(cases):
        storage = LocalStorage(folder / f"{number}")
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == bad_rank:
                patch.setattr(f"{zarr_form.__name__}.{place}", partial(_raise, kind))
            try:
                Saver(storage, coordinator_for(), format="zarr").save(state)
                found.append("saved")
            except BaseException as error:  # noqa: BLE001  the test looks at whatever it is
                found.append(f"{type(error).__name__}: {error}")
    return found


def _raise(kind: str, *args: Any) -> Any:
    raise _MET[kind]()


def test_ranks_that_share_chunks_wait_for_none(tmp_path: Path) -> None:
    """Wherever one rank fails in a save of arrays cut between ranks, the others get their parts and hear of it."""
    kinds = ("memory", "runtime", "ctrl-c", "disk")
    cases = [(place, kind, rank) for place in _PLACES for kind in kinds for rank in (0, 1)]
    ranks = run_ranks(2, _zarr_fails, tmp_path, cases, timeout_s=120)

    failed: set[tuple[str, str]] = set()
    for (place, kind, bad_rank), *texts in zip(cases, *ranks, strict=True):
        name = type(_MET[kind]()).__name__
        if texts == ["saved", "saved"]:  # the function is not called on that rank
            continue
        failed.add((place, kind))
        assert texts[bad_rank].startswith(name), (place, kind, bad_rank)
        assert texts[1 - bad_rank].startswith("CheckpointError"), (place, kind, bad_rank)
        assert f"rank {bad_rank}: {name}" in texts[1 - bad_rank]
    assert failed == {(place, kind) for place in _PLACES for kind in kinds}
    assert not [path for path in tmp_path.glob("*/data-*") if not (path.parent / "manifest.json").exists()]


def _silent(folder: Path) -> tuple[str, float]:
    """What a rank hears, and after how long, when the other never comes to a save."""
    group = dist.new_group(timeout=timedelta(seconds=1.5))
    coordinator_for(group).raise_together(None, "meeting once")
    start_s = time.monotonic()
    text = ""
    if dist.get_rank() == 0:
        try:
            save(folder / "c", {"a": torch.zeros(3)}, process_group=group)
        except CheckpointError as error:
            text = f"{type(error).__name__} on {error.where}"
    waited_s = time.monotonic() - start_s
    dist.barrier()
    return text, waited_s


@pytest.mark.part("faults")
def test_a_rank_that_never_comes_is_waited_for_as_long_as_the_group_says(tmp_path: Path) -> None:
    """The groups made for coordination take the time-out of the group they serve."""
    (text, waited_s), _ = run_ranks(2, _silent, tmp_path)

    assert text.split() == ["UnreachableError", "on", "rank", "0"]
    assert waited_s > 1
    assert not (tmp_path / "c" / "manifest.json").exists()


_PATIENT = timedelta(hours=2)


def _all_time_outs() -> tuple[int, set[timedelta | None], timedelta | None]:
    """How many groups there are when everything that makes groups has made its own, and their time-outs."""
    assert dist.group.WORLD is not None
    for use in ("sync", "async", "dcp"):
        coordinator_for(use=use)
    mesh = default_mesh()
    for mesh_dims in ((2, 2), (4,)):
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        own = init_device_mesh("cpu", mesh_dims, mesh_dim_names=("r", "s")[: len(mesh_dims)])
        fully_shard(model, mesh=own, reshard_after_forward=2)
        model.set_separate_reduce_scatter_group()
        if len(mesh_dims) == 2:
            flatten_mesh(own, "both", partial(new_group, own.get_group(0)))
            muon_plan._make_ranks(own["s"], 0)
        model(torch.ones(1, 8)).sum().backward()
    assert mesh.size() == 4
    patient = DeviceMesh.from_group(dist.new_group(timeout=_PATIENT), "cpu")
    fully_shard(torch.nn.Linear(8, 8), mesh=patient)  # keeps the time-out that the user gave
    groups = list(dist.distributed_c10d._world.pg_map)
    return len(groups), {timeout_of(group) for group in groups}, timeout_of(dist.group.WORLD)


def test_groups_that_we_make_wait_as_long_as_those_they_come_from() -> None:
    """Of coordinators, parts of meshes, flattened meshes, reductions' own groups and optimizers."""
    for count, timeouts, world in run_ranks(4, _all_time_outs, timeout_s=117):
        assert count >= 10 and world == timedelta(seconds=177)
        assert timeouts == {world, _PATIENT}


def _in_several_groups(folder: Path) -> list[float]:
    """What ranks 0 and 1 load back, of which rank 0 is in one group more; then once more, with another new group."""
    pair, _ = dist.new_group([0, 1]), dist.new_group([0, 2])
    found = []
    for name in ("a", "b"):
        if dist.get_rank() < 2:
            save(folder / name, {"w": torch.full((4,), 3.0)}, process_group=pair)
            state = {"w": torch.zeros(4)}
            load(folder / name, state, process_group=pair)
            async_save(folder / f"{name} behind", state, process_group=pair).wait()
            found += state["w"].tolist()
        dist.new_group([1, 2])
    return found


def test_ranks_may_be_in_different_numbers_of_groups(tmp_path: Path) -> None:
    """torch names a group of some ranks by how many each has, so that they would wait for each other in vain."""
    assert run_ranks(3, _in_several_groups, tmp_path, timeout_s=60) == [[3.0] * 8, [3.0] * 8, []]


def _fail_alike(where: Sequence[str]) -> str:
    """Every rank but the last raises, in a place of its own or of others; returns the error that this rank raises."""
    coordinator, error = coordinator_for(), None
    if coordinator.rank < len(where):
        place, todo = where[coordinator.rank], "restore another step"
        error = CorruptCheckpointError("A checksum differs.", expected="a", got="b", where=place, todo=todo)
    with pytest.raises(CorruptCheckpointError) as caught:
        coordinator.raise_together(error, "reading")
    return str(caught.value)


def test_ranks_with_the_same_error_are_one_line() -> None:
    """The file and the advice are there once; a second file of the same problem is named alone; all ranks are named."""
    *own, other = run_ranks(4, _fail_alike, ["file 1", "file 1", "file 2"])
    assert [text.splitlines()[3].strip() for text in own] == [
        "where: file 1",
        "where: file 1",
        "where: file 2",
    ]
    first = "expected: a; got: b; where: file 1; what to do: restore another step"
    assert other.splitlines()[2:5] == [
        f"  got: ranks 0, 1: CorruptCheckpointError: A checksum differs. ({first})",
        "rank 2: CorruptCheckpointError: A checksum differs. (where: file 2)",
        "  where: ranks [0, 1, 2]",
    ]


def test_errors_of_many_ranks_are_bounded() -> None:
    """Of different files, four are named, with the number of the others."""
    *_, other = run_ranks(7, _fail_alike, [f"file {rank}" for rank in range(6)])
    assert all(f"(where: file {rank})" in other for rank in (1, 2, 3))
    assert "file 4" not in other and re.search(r"\n\D*2\D*$", other.split("  where: ranks")[0])
    assert "ranks [0, 1, 2, 3, 4, 5]" in other and other.count("restore another step") == 1
