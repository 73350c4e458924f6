"""Copies in partners' memory: what survives which loss, on which ranks, and what is said of it.

Each rank is a node of its own: it has a folder in memory, and is the first of its node.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.support.checkpoint_states import erase, mixed_state
from tests.support.distributed import RankError, run_ranks
from vescale_fsdp.checkpoint import (
    CheckpointManager,
    EverySteps,
    PerRank,
    RamTier,
    Restored,
    fingerprint,
    verify,
)
from vescale_fsdp.checkpoint.ranks.exchange import FROM_DISK
from vescale_fsdp.checkpoint.steps.run_file import RUN_FILE_NAME
from vescale_fsdp.checkpoint.storage.base import FileReader
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.conversion import open_source
from vescale_fsdp.errors import CheckpointError

STEP = "vescale-run/step-{:08d}"


@contextmanager
def _as_nodes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("LOCAL_RANK", "0")
        yield


class _NoReads(LocalStorage):
    """A disk on which nothing may be read but names, and which run it is."""

    def child(self, name: str) -> LocalStorage:
        return _NoReads(self.root / name)

    def open_file(self, name: str) -> FileReader:
        raise AssertionError(f"{name} was read from disk")

    def read_small(self, name: str, *, limit_bytes: int) -> bytes:
        if name == RUN_FILE_NAME:
            return super().read_small(name, limit_bytes=limit_bytes)
        raise AssertionError(f"{name} was read from disk")


def _state(step: int) -> dict[str, Any]:
    state = mixed_state()
    state["model"]["w"].to_local().fill_(step)
    state["stock"]["plain"].fill_(step)
    return state | {"own": PerRank(step + dist.get_rank(), merge=lambda values, rank, world: sum(values))}


def _manager(
    root: LocalStorage | Path, shm: Path, *, behind: bool = False, **options: Any
) -> CheckpointManager:
    tier = RamTier("run", folder=shm / f"node{dist.get_rank()}", **options)
    return CheckpointManager(root, save_policy=EverySteps(4), asynchronous=behind, ram=tier, fingerprint=True)


def _save_steps(
    root: Path, shm: Path, options: dict[str, Any], steps: int = 7, same_branch: bool = False
) -> list[str]:
    """Returns the files of data that each node holds of the newest step."""
    if options.pop("mesh", False):
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
        options["mesh"] = mesh["replicate"]
    with _as_nodes():
        manager = _manager(root, shm, **options)
        if same_branch:
            manager.restore(_state(0), read_only=True)
        for step in range(steps):
            manager.save(step, _state(step))
        manager.wait()
    folder = shm / f"node{dist.get_rank()}" / STEP.format(steps - 1)
    return sorted(path.name[:5] for path in folder.glob("data-*/*"))


def _restore(
    root: Path, shm: Path, reads_disk: bool, options: dict[str, Any]
) -> tuple[Restored, int, list[str]]:
    with _as_nodes(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = _state(0)
        erase(state)
        manager = _manager(LocalStorage(root) if reads_disk else _NoReads(root), shm, **options)
        restored = manager.restore(state)
        manager.wait()  # copies that are made again must not be under way when the test loses a node
    assert restored is not None
    full = state["model"]["w"].full_tensor()
    assert full.numel() and full.eq(restored.step).all() and state["stock"]["plain"].eq(restored.step).all()
    assert state["stock"]["replicate"].to_local().any() and state["step"] == 7
    return restored, state["own"].value, [str(one.message) for one in caught]


def _lose(shm: Path, *nodes: int) -> None:
    for node in nodes:
        shutil.rmtree(shm / f"node{node}")


@pytest.mark.parametrize(
    "world", [3, *(pytest.param(world, marks=pytest.mark.part("faults")) for world in (4, 5))]
)
def test_a_lost_node_costs_no_read_of_a_disk(tmp_path: Path, world: int) -> None:
    """What it held comes from its partner, and says so; on as many ranks, on fewer and on more."""
    shm = tmp_path / "shm"
    held = run_ranks(4, _save_steps, tmp_path / "steps", shm, {"replicas": 1})
    assert held == [["00000", "00001"], ["00000", "00001"], ["00002", "00003"], ["00002", "00003"]]
    lost = 3 if world == 3 else 2  # on fewer ranks the last node is not there
    _lose(shm, lost)

    for rank, (restored, own, said) in enumerate(
        run_ranks(world, _restore, tmp_path / "steps", shm, False, {"replicas": 1})
    ):
        assert (restored.step, restored.tier, restored.skipped, said) == (6, "ram", (), [])
        assert own == (6 + rank if world == 4 else 6 * 4 + 0 + 1 + 2 + 3)
        data = [move for move in restored.moves if "data-" in move.name]
        if world == 4:
            assert [(move.sender, move.receiver) for move in data] == [(3, 2)] and "00002-of" in data[0].name
        assert data and all(move.sender != lost for move in data)


def test_copies_along_a_mesh(tmp_path: Path) -> None:
    """Ranks of the dimension keep each other's, and a node may be lost of either."""
    shm = tmp_path / "shm"
    held = run_ranks(4, _save_steps, tmp_path / "steps", shm, {"replicas": 1, "mesh": True}, 2)
    assert held == [["00000", "00002"], ["00001", "00003"]] * 2
    _lose(shm, 0, 3)

    for restored, _, _ in run_ranks(4, _restore, tmp_path / "steps", shm, False, {}):
        assert (restored.step, restored.tier) == (1, "ram")


def test_a_lost_clique_is_said_and_the_disk_counts(tmp_path: Path) -> None:
    """No other loss than that of all nodes of a clique takes memory away."""
    shm = tmp_path / "shm"
    run_ranks(4, _save_steps, tmp_path / "steps", shm, {"replicas": 1})
    _lose(shm, 2, 3)

    for rank, (restored, _, said) in enumerate(
        run_ranks(4, _restore, tmp_path / "steps", shm, True, {"replicas": 1})
    ):
        assert (restored.step, restored.tier, restored.moves) == (4, "disk", ())
        assert [number for number, _ in restored.skipped] == [6]
        assert [text[:12] for text in said] == (["step 6 (ram)"] if rank == 0 else [])
        assert "rank 2, 3" in restored.skipped[0][1]


@pytest.mark.parametrize(
    ("world", "behind"),
    [(3, True), *(pytest.param(n, False, marks=pytest.mark.part("faults")) for n in (4, 5))],
)
def test_what_memory_has_lost_comes_from_disk(tmp_path: Path, world: int, behind: bool) -> None:
    """A step that was saved to both: what a lost node held is put together of the disk's, the rest stays in memory."""
    shm = tmp_path / "shm"
    run_ranks(4, _save_steps, tmp_path / "steps", shm, {"behind": behind}, 5)
    lost = 3 if world == 3 else 2
    _lose(shm, lost)

    for rank, (restored, own, said) in enumerate(
        run_ranks(world, _restore, tmp_path / "steps", shm, True, {})
    ):
        assert (restored.step, restored.tier, restored.skipped, said) == (4, "ram", (), [])
        assert own == (4 + rank if world == 4 else 4 * 4 + 0 + 1 + 2 + 3)
        data = [move for move in restored.moves if "data-" in move.name]
        from_disk = [move.name for move in data if move.sender == FROM_DISK]
        assert len(from_disk) == 1 and f"{lost:05d}-of" in from_disk[0]
        others = {move.name.rpartition("/")[2][:5] for move in data if move.sender != FROM_DISK}
        assert f"{lost:05d}" not in others or world != 4  # made once, and sent to who else wants it


def test_another_attempt_on_disk_is_no_twin(tmp_path: Path) -> None:
    """Only what was saved at once proves to be the same state; damage on disk is found while the file is made."""
    shm, root = tmp_path / "shm", tmp_path / "steps"
    run_ranks(2, _save_steps, root, shm, {}, 5)
    twin = shutil.copytree(root / "step-00000004", tmp_path / "twin")
    run_ranks(2, _save_steps, root, tmp_path / "other", {}, 5, True)
    _lose(shm, 1)
    for restored, _, _ in run_ranks(2, _restore, root, shm, True, {}):
        assert (restored.step, restored.tier) == (4, "disk") and restored.moves == ()
        assert "rank 1" in restored.skipped[0][1]

    shutil.rmtree(root / "step-00000004")
    shutil.copytree(twin, root / "step-00000004")
    for file in (root / "step-00000004").glob("data-*/*"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    for restored, _, _ in run_ranks(2, _restore, root, shm, True, {}):
        assert (restored.step, restored.tier) == (0, "disk")
        assert [number for number, _ in restored.skipped] == [4, 4]
    assert not list(shm.rglob("*.partial"))


def _dies(root: Path, shm: Path, told: Path) -> None:
    """Restore; rank 1, who holds the only copy, is gone when it has sent a part of it."""
    with _as_nodes():
        manager = _manager(root, shm, replicas=1)
        if dist.get_rank() == 1:
            read_at = LocalStorage.open_file

            def open_file(self: LocalStorage, name: str) -> FileReader:
                if "00000-of" in name:
                    os._exit(1)
                return read_at(self, name)

            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(LocalStorage, "open_file", open_file)
                manager.restore(_state(0))
        try:
            manager.restore(_state(0))
            told.write_text("returned")
        except CheckpointError as error:
            told.write_text(type(error).__name__)


def test_a_partner_dies_while_it_holds_the_only_copy(tmp_path: Path) -> None:
    """Who waited for it raises; when all start anew the copy is still there; if its node is lost too, the disk is."""
    shm, root = tmp_path / "shm", tmp_path / "steps"
    run_ranks(2, _save_steps, root, shm, {"replicas": 1})
    _lose(shm, 0)
    with pytest.raises(RankError):
        run_ranks(2, _dies, root, shm, tmp_path / "told")
    assert (tmp_path / "told").read_text() == "UnreachableError"

    for restored, _, _ in run_ranks(2, _restore, root, shm, False, {"replicas": 1}):
        assert (restored.step, restored.tier) == (6, "ram") and restored.moves
    _lose(shm, 0, 1)
    for restored, _, _ in run_ranks(2, _restore, root, shm, True, {"replicas": 1}):
        assert (restored.step, restored.tier, restored.moves) == (4, "disk", ())


def _check_fingerprint(shm: Path, state: dict[str, torch.Tensor]) -> None:
    """Each node has the sums of the newest step's tensors in memory, of which each replica stores the whole."""
    step = shm / f"node{dist.get_rank()}" / STEP.format(2)
    assert open_source(str(step)).recorded == fingerprint(state)


def _replicated(root: Path, shm: Path) -> tuple[int, str]:
    with _as_nodes():
        manager = _manager(root, shm)
        for step in range(3):
            manager.save(step, {"w": torch.full((10,), step), "moved": torch.arange(step)})
        _check_fingerprint(shm, {"w": torch.full((10,), 2), "moved": torch.arange(2)})
        if dist.get_rank() == 1:
            _lose(shm, 1)
        dist.barrier()
        state = {"w": torch.zeros(10, dtype=torch.int64), "moved": torch.zeros(2, dtype=torch.int64)}
        restored = manager.restore(state)
    assert restored is not None and state["w"].eq(restored.step).all() and state["moved"].tolist() == [0, 1]
    return restored.step, restored.tier


def test_what_is_replicated_needs_no_copies(tmp_path: Path) -> None:
    """Every node holds all of it anyway."""
    assert run_ranks(2, _replicated, tmp_path / "steps", tmp_path / "shm") == [(2, "ram")] * 2


def _damage(path: Path, kind: str) -> None:
    data = bytearray(path.read_bytes())
    if kind == "missing":
        path.unlink()
    elif kind == "truncated":
        path.write_bytes(data[: len(data) // 2])
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


def _restore_and_heal(
    root: Path, shm: Path, options: dict[str, Any]
) -> tuple[Restored, list[str], list[str]]:
    """Returns what was restored, what was said, and the files that this node holds when copies are there again."""
    with _as_nodes(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = _state(0)
        erase(state)
        manager = _manager(_NoReads(root), shm, **options)
        restored = manager.restore(state)
        manager.wait()
    assert restored is not None and state["model"]["w"].full_tensor().eq(restored.step).all()
    folder = shm / f"node{dist.get_rank()}" / STEP.format(restored.step)
    held = sorted(path.name[:5] for path in folder.glob("data-*/*") if not verify(folder).problems)
    return restored, [str(one.message) for one in caught], held


@pytest.mark.parametrize(
    "kind", ["flipped", "missing", pytest.param("truncated", marks=pytest.mark.part("faults"))]
)
def test_a_damaged_file_comes_from_its_partner(tmp_path: Path, kind: str) -> None:
    """The same step is restored, not an older one; the damaged file is deleted, and both nodes hold all files again."""
    shm, options = tmp_path / "shm", {"replicas": 1, "keep_last": 2}
    run_ranks(2, _save_steps, tmp_path / "steps", shm, options)
    (own,) = (shm / "node0" / STEP.format(6)).glob("data-*/00000-*")
    _damage(own, kind)
    for rank, (restored, said, held) in enumerate(
        run_ranks(2, _restore_and_heal, tmp_path / "steps", shm, options)
    ):
        assert (restored.step, restored.tier, restored.skipped) == (6, "ram", ())
        assert [(move.sender, move.receiver) for move in restored.moves] == [(1, 0)]
        assert len(said) == (1 if rank == 0 and kind != "missing" else 0)
        assert held == ["00000", "00001"]


def test_copies_are_made_anew_at_once(tmp_path: Path) -> None:
    """After a restore from a partner, before any save: a second loss costs nothing either. What is damaged and was not
    read is found while it is copied."""
    shm, options = tmp_path / "shm", {"replicas": 2}
    run_ranks(3, _save_steps, tmp_path / "steps", shm, options, 2)
    _lose(shm, 2)
    (copy,) = (shm / "node0" / STEP.format(1)).glob("data-*/00001-*")
    _damage(copy, "flipped")
    for restored, said, held in run_ranks(3, _restore_and_heal, tmp_path / "steps", shm, options):
        assert (restored.step, restored.tier, said) == (1, "ram", [])
        assert held == ["00000", "00001", "00002"]


def test_a_file_whose_copies_are_damaged_too(tmp_path: Path) -> None:
    """Then the step is lost, and the one before counts; on all ranks alike."""
    shm, options = tmp_path / "shm", {"replicas": 1, "keep_last": 2}
    run_ranks(2, _save_steps, tmp_path / "steps", shm, options)
    for copy in shm.glob("*/" + STEP.format(6) + "/data-*/00000-*"):
        _damage(copy, "flipped")
    for restored, _, _ in run_ranks(2, _restore, tmp_path / "steps", shm, True, options):
        assert (restored.step, restored.tier) == (5, "ram")
        assert [number for number, _ in restored.skipped] == [6] and "rank 0" in restored.skipped[0][1]


@pytest.mark.parametrize("damaged", [(0,), (0, 1)])
def test_a_damaged_manifest_comes_anew_from_another_node(tmp_path: Path, damaged: tuple[int, ...]) -> None:
    """Where no node has a good one, the step before counts."""
    shm = tmp_path / "shm"
    run_ranks(2, _save_steps, tmp_path / "steps", shm, {"replicas": 1, "keep_last": 2})
    for node in damaged:
        manifest = shm / f"node{node}" / STEP.format(6) / "manifest.json"
        manifest.write_bytes(manifest.read_bytes()[:-20])

    for restored, _, _ in run_ranks(
        2, _restore, tmp_path / "steps", shm, False, {"replicas": 1, "keep_last": 2}
    ):
        if len(damaged) == 1:
            assert (restored.step, restored.tier, restored.skipped) == (6, "ram", ())
            moves = [(move.name.rpartition("/")[2], move.sender, move.receiver) for move in restored.moves]
            assert moves == [("manifest.json", 1, 0)]  # the files of data are those of their folder
        else:
            assert (restored.step, restored.tier) == (5, "ram")
            assert "manifest.json" in restored.skipped[0][1]


class _Full(LocalStorage):
    """A memory that takes this node's own files and no copies."""

    def create(self, name: str, size_bytes: int) -> Any:
        if "from" in name:
            raise OSError(28, "No space left on device", name)
        return super().create(name, size_bytes)

    def child(self, name: str) -> LocalStorage:
        return _Full(Path(self.where) / name, durable=False)


def _no_room(root: Path, shm: Path) -> tuple[list[str], list[int], list[str]]:
    with _as_nodes(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        manager = _manager(root, shm, replicas=1, keep_last=1)
        assert manager._ram is not None
        if dist.get_rank() == 1:
            manager._ram._root = _Full(shm / "node1" / "vescale-run", durable=False)
        for step in range(3, 6):
            manager.save(step, _state(step))
        manager.close()
        state = _state(0)
        restored = manager.restore(state)
    assert restored is not None and (restored.step, restored.tier) == (5, "ram")
    node = shm / f"node{dist.get_rank()}"
    left = sorted(path.name for path in node.rglob("*.partial")) + sorted(
        path.name for path in node.glob("vescale-run/step-*")
    )
    return [str(one.message) for one in caught], manager.steps(), left


def test_a_partner_without_room_is_warned_of(tmp_path: Path) -> None:
    """Once per step, on rank 0 and on the rank that has none; the disk is not concerned, nothing is left half done, and
    memory does not fill up with older steps."""
    first, second = run_ranks(2, _no_room, tmp_path / "steps", tmp_path / "shm")

    assert len(first[0]) == len(second[0]) == 3
    assert all("rank 1: OSError: [Errno 28]" in text for text in first[0])
    assert all("[Errno 28]" in text and "rank 1" in text for text in second[0])
    assert first[1] == second[1] == [4] and first[2] == second[2] == ["step-00000005"]


class _Refusing(LocalStorage):
    """A memory that refuses everything."""

    def create(self, name: str, size_bytes: int) -> Any:
        raise OSError(28, "No space left on device", name)

    def child(self, name: str) -> LocalStorage:
        return _Refusing(Path(self.where) / name, durable=False)


def _memory_fails(
    root: Path, shm: Path, kind: str, behind: bool
) -> tuple[list[str], list[int], tuple[int, str]]:
    with _as_nodes(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        manager = _manager(root, shm, behind=behind, replicas=1)
        assert manager._ram is not None
        manager.save(3, _state(3))
        node = shm / f"node{dist.get_rank()}"
        if dist.get_rank() == 1:
            if kind == "full":
                manager._ram._root = _Refusing(node / "vescale-run", durable=False)
            else:
                manager.wait()
                shutil.rmtree(node)
                node.write_text("no folder")
        manager.save(4, _state(4))
        manager.save(5, _state(5))
        manager.close()
        left = list(node.rglob("*.safetensors")) if node.is_dir() else []
        if kind == "gone" and dist.get_rank() == 1:
            node.unlink()
        restored = manager.restore(_state(0))
    assert restored is not None and len(left) <= 2, left
    said = [str(one.message) for one in caught]
    return said, manager.steps(), (restored.step, restored.tier)


@pytest.mark.parametrize(
    ("kind", "behind"),
    [("full", True), ("gone", False), pytest.param("full", False, marks=pytest.mark.part("faults"))],
)
def test_a_memory_that_fails_does_not_stop_the_disk(tmp_path: Path, kind: str, behind: bool) -> None:
    """The disk has the step, and a warning says of each step on which rank memory had no place for it, and why."""
    first, second = run_ranks(2, _memory_fails, tmp_path / "steps", tmp_path / "shm", kind, behind)
    for said, steps, _ in (first, second):
        assert steps == [4]
        missed = [text for text in said if str(tmp_path / "shm") in text]
        assert [text.split()[1] for text in missed] == ["4", "5"] and all("rank 1" in text for text in missed)
    assert first[2] == second[2] == (4, "disk")


def _disk_fails(root: Path, shm: Path, behind: bool) -> tuple[list[str], tuple[int, str]]:
    with _as_nodes():
        manager = _manager(root, shm, behind=behind)
        manager.save(3, _state(3))
        if dist.get_rank() == 0:
            root.mkdir(exist_ok=True)
            (root / "step-00000004").write_text("no folder")
        dist.barrier()
        try:
            manager.save(4, _state(4))
            manager.wait()
            notes = ["nothing was raised"]
        except (OSError, CheckpointError) as error:
            notes = error.__notes__
        restored = manager.restore(_state(0))
    assert restored is not None
    return notes, (restored.step, restored.tier)


@pytest.mark.parametrize("behind", [False, True])
def test_a_disk_that_fails_does_not_cost_memory_its_step(tmp_path: Path, behind: bool) -> None:
    """The error is raised on all ranks, says that memory has the step, and restore takes it from there."""
    for notes, restored in run_ranks(2, _disk_fails, tmp_path / "steps", tmp_path / "shm", behind):
        assert re.search(r"\b4\b.* memory\b", " ".join(notes)) and restored == (4, "ram")


def _held_up(root: Path, shm: Path) -> bool:
    """Whether saves wait for their copies only at the next save."""
    with _as_nodes(), pytest.MonkeyPatch.context() as patched:
        go, begun = threading.Event(), threading.Event()
        manager = _manager(root, shm, replicas=1)
        assert manager._ram is not None
        copy = manager._ram._copy

        def late(*args: Any) -> None:
            begun.set()
            assert go.wait(60)
            copy(*args)

        patched.setattr(manager._ram, "_copy", late)
        manager.save(1, _state(1))
        assert begun.wait(60)
        folder = shm / f"node{dist.get_rank()}" / STEP.format(1)
        before = len(list(folder.glob("data-*/*")))
        go.set()
        manager.save(2, _state(2))
        manager.wait()
    return before == 1 and not folder.exists()


def test_copies_are_made_behind_training(tmp_path: Path) -> None:
    """A save returns before they are; the next one waits for them, and the older step goes when they are there."""
    assert run_ranks(2, _held_up, tmp_path / "steps", tmp_path / "shm") == [True] * 2


def _few_nodes(root: Path, shm: Path) -> tuple[list[str], int]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tier = RamTier("run", folder=shm / f"node{dist.get_rank() // 2}", replicas=2)
        for step in range(2):  # managers of two epochs share a tier
            manager = CheckpointManager(root, ram=tier, save_policy=EverySteps(100))
            manager.save(step + 1, {"w": torch.ones(2)})
            manager.close()
    return [str(one.message) for one in caught], tier.num_copies


@pytest.mark.parametrize(
    ("world", "copies"), [(2, 0), (3, 1), pytest.param(5, 2, marks=pytest.mark.part("faults"))]
)
def test_too_few_nodes_hold_fewer_copies(tmp_path: Path, world: int, copies: int) -> None:
    """As many as there are other nodes, which rank 0 warns of for every manager; with more nodes there are more."""
    for rank, (said, num_copies) in enumerate(
        run_ranks(world, _few_nodes, tmp_path / "steps", tmp_path / "shm")
    ):
        assert num_copies == copies
        assert len(said) == (2 if copies < 2 and rank == 0 else 0)
    with pytest.raises(ValueError, match="replicas"):
        RamTier("run", replicas=-1)
