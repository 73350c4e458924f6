"""`restore` where ranks see different steps, where one meets an error, and where another job saves and retires."""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import shutil
import warnings
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.distributed import run_ranks
from vescale_fsdp.checkpoint import CheckpointManager, PerRank, RamTier
from vescale_fsdp.checkpoint.loading.load import Verify
from vescale_fsdp.checkpoint.ranks.coordinator import SoloCoordinator
from vescale_fsdp.checkpoint.saving.save import Saver
from vescale_fsdp.checkpoint.step_folders import no_longer_kept
from vescale_fsdp.checkpoint.storage.base import Buffer, FileReader
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.errors import CheckpointError, CorruptCheckpointError


def _state(value: float) -> dict[str, Any]:
    return {"w": torch.full((50, 40), value), "v": torch.full((9,), value), "step": int(value)}


def _save_steps(root: Path, steps: Iterable[int]) -> None:
    """Steps of one process, whose values are their numbers."""
    for step in steps:
        Saver(LocalStorage(root / f"step-{step:08d}"), SoloCoordinator(), overwrite=True).save(_state(step))


def _damage(root: Path, step: int) -> None:
    (file,) = (root / f"step-{step:08d}").glob("data-*/*")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def _value(state: dict[str, Any]) -> float:
    """The one value that a state holds everywhere."""
    values = {*state["w"].unique().tolist(), *state["v"].unique().tolist(), state["step"]}
    (value,) = values
    return float(value)


def _outcome(manager: CheckpointManager, **options: Any) -> tuple[Any, str]:
    """The step that was restored, None, or the kind of the error with its text; and what the state holds."""
    state = _state(0)
    try:
        restored = manager.restore(state, **options)
    except BaseException as error:  # noqa: BLE001  whatever it is, the test looks at it
        return type(error), f"{error}"
    assert _value(state) == (0 if restored is None else restored.step)
    return (None, "") if restored is None else (restored.step, str(restored.skipped))


class _Operations(LocalStorage):
    """A root that calls a hook before every operation that reads, its steps' included."""

    def __init__(self, root: Path, before: Callable[[str], None]) -> None:
        super().__init__(root)
        self.before = before

    def child(self, name: str) -> LocalStorage:
        return _Operations(self.root / name, self.before)

    def list_folder(self, name: str) -> list[str]:
        self.before("list_folder")
        return super().list_folder(name)

    def exists(self, name: str) -> bool:
        self.before("exists")
        return super().exists(name)

    def read_small(self, name: str, *, limit_bytes: int) -> bytes:
        self.before("read_small")
        return super().read_small(name, limit_bytes=limit_bytes)

    def open_file(self, name: str) -> FileReader:
        self.before("open_file")
        return _Reader(super().open_file(name), self.before)


class _Reader(FileReader):
    looks_in_place = True

    def __init__(self, inner: FileReader, before: Callable[[str], None]) -> None:
        self._inner, self._before = inner, before

    @property
    def size_bytes(self) -> int:
        return self._inner.size_bytes

    def read_at(self, offset_bytes: int, buffers: Sequence[Buffer]) -> None:
        self._before("read_at")
        self._inner.read_at(offset_bytes, buffers)

    def view(self, start_bytes: int, stop_bytes: int) -> memoryview:
        self._before("view")
        return self._inner.view(start_bytes, stop_bytes)

    def close(self) -> None:
        self._inner.close()


class _Stale(LocalStorage):
    """A root of which some steps are not seen, for ever or for a number of listings."""

    def __init__(self, root: Path, unseen: Iterable[int], listings: int = 1 << 30) -> None:
        super().__init__(root)
        self.unseen = {f"step-{step:08d}" for step in unseen}
        self.listings = listings

    def list_folder(self, name: str) -> list[str]:
        self.listings -= 1
        found = super().list_folder(name)
        return [name for name in found if self.listings < 0 or name not in self.unseen]


def _every_view(root: Path) -> list[tuple[Any, ...]]:
    """What restoring ends in, for every set of steps that rank 1 may fail to see, and every step asked for."""
    steps = (2, 4, 6)
    found = []
    for unseen in itertools.chain.from_iterable(itertools.combinations(steps, n) for n in range(4)):
        storage = _Stale(root, unseen if dist.get_rank() else ())
        manager = CheckpointManager(storage, patience_s=0.02)
        for wanted in (None, *steps, 9):
            found.append((unseen, wanted, *_outcome(manager, step=wanted)))
    return found


def test_ranks_that_see_different_steps(tmp_path: Path) -> None:
    """No rank takes an older step than another sees, nor none, without a word: all raise, and say who sees what."""
    _save_steps(tmp_path, (2, 4, 6))
    by_rank = run_ranks(2, _every_view, tmp_path)

    raised = 0
    for one, other in zip(*by_rank, strict=True):
        unseen, wanted, outcome, text = one
        assert other[:3] == one[:3]
        if wanted == 9:
            assert outcome is CheckpointError and "no such step" in text
        elif (wanted or 6) in unseen:
            raised += 1
            assert outcome is CheckpointError and "Ranks see different steps" in text
            assert other[3] == text and "ranks 0 see steps" in text
        else:
            assert outcome == (wanted or 6)
    assert raised == 16


def _late_view(root: Path, listings: int) -> tuple[Any, list[str]]:
    storage = _Stale(root, (4, 6), listings if dist.get_rank() == 1 else 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcome = _outcome(CheckpointManager(storage))
    return outcome, [str(one.message) for one in caught]


def test_a_stale_listing_is_listed_again(tmp_path: Path) -> None:
    """What a rank does not see at first is waited for, and that is said."""
    _save_steps(tmp_path, (2, 4, 6))
    (first, said), *others = run_ranks(3, _late_view, tmp_path, 3)

    assert first == (6, "()") and "ranks 1 see steps 2" in said[0]
    assert others == [((6, "()"), [])] * 2
    assert run_ranks(3, _late_view, tmp_path, 0) == [((6, "()"), [])] * 3


def _nothing(root: Path) -> tuple[Any, Any]:
    manager = CheckpointManager(root / "none")
    return _outcome(manager), _outcome(CheckpointManager(root, patience_s=0.1), step=4 - 2 * dist.get_rank())


def test_no_steps_and_different_wishes(tmp_path: Path) -> None:
    """Where no rank sees a step there is none, at once; ranks that ask for different steps are told so."""
    _save_steps(tmp_path, (2, 4))
    for outcome, (kind, text) in run_ranks(2, _nothing, tmp_path):
        assert outcome == (None, "")
        assert kind is CheckpointError and "the argument `step`" in text and "2 on ranks [1]" in text


def _older_unseen(root: Path) -> tuple[Any, str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _outcome(CheckpointManager(_Stale(root, (4,) if dist.get_rank() else ()), patience_s=0.1))


def test_falling_back_needs_all_ranks_too(tmp_path: Path) -> None:
    """When the newest step is damaged, the next older one counts, and not the one that all happen to see."""
    _save_steps(tmp_path, (2, 4, 6))
    _damage(tmp_path, 6)
    for kind, text in run_ranks(2, _older_unseen, tmp_path):
        assert kind is CheckpointError and "ranks 1 see steps 2" in text


def _memory_lost(root: Path, interval: int) -> tuple[int, str, list[str]]:
    tier = RamTier("run", keep_last=2, folder=root / f"node{dist.get_rank()}")
    patched = pytest.MonkeyPatch()
    patched.setenv("LOCAL_RANK", "0")  # each rank is the only one of its node
    with patched.context(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        manager = CheckpointManager(root / "steps", save_interval=interval, ram=tier)
        for step in (1, 2, 3):
            manager.save(step, _state(step) | {"own": PerRank(step)})
        if dist.get_rank() == 1:
            shutil.rmtree(root / "node1" / "vescale-run" / "step-00000003")
        dist.barrier()
        restored = manager.restore(_state(0) | {"own": PerRank(0)})
    assert restored is not None
    return restored.step, str(restored.skipped), [str(one.message) for one in caught]


def test_memory_that_is_lost_is_said(tmp_path: Path) -> None:
    """A step that one node's memory lacks is not waited for, but named in `skipped` and warned of."""
    for rank, (step, skipped, said) in enumerate(run_ranks(2, _memory_lost, tmp_path, 1)):
        assert step == 3 and "none of rank 1, wanted by rank 1" in skipped  # from disk
        assert [text[:26] for text in said] == (["step 3 (ram) was skipped: "] if rank == 0 else [])


class _Keeps(LocalStorage):
    """A root that does not let go: it raises, or does nothing, when it is to remove."""

    def __init__(self, root: Path, error: BaseException | None) -> None:
        super().__init__(root)
        self.error = error

    def remove(self, name: str) -> None:
        if self.error is not None:
            raise self.error


def _retention_fails(
    root: Path, error: BaseException | None, behind: bool
) -> tuple[str, list[str], list[int]]:
    manager = CheckpointManager(_Keeps(root, error), keep_last=1, async_=behind)
    said = "returned"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for step in (1, 2):
                manager.save(step, _state(step))
                manager.wait()
        except BaseException as met:  # noqa: BLE001  whatever it is, the test looks at it
            said = f"{type(met).__name__}: {met}"
    return said, [str(one.message) for one in caught], manager.steps()


_REFUSALS = [
    PermissionError(errno.EPERM, "Operation not permitted"),
    MemoryError("none"),
    ValueError("odd"),
    None,
]


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("error", _REFUSALS, ids=repr)
def test_what_cannot_be_retired(error: BaseException | None, behind: bool, tmp_path: Path) -> None:
    """A step that is committed stands: no rank raises, and a warning says what is left, and why."""
    first, second = run_ranks(2, _retention_fails, tmp_path, error, behind)

    assert first[0] == second[0] == "returned" and first[2] == second[2] == [1, 2]
    (said,) = first[1]
    assert "could not be removed" in said and "step-00000001" in said and not second[1]
    assert ("is still there" if error is None else type(error).__name__) in said
    assert _outcome(CheckpointManager(tmp_path)) == (2, "()")
    assert _outcome(CheckpointManager(tmp_path), step=1) == (1, "()")  # its data was not touched


@pytest.mark.parametrize("behind", [False, True])
def test_an_interrupt_while_retiring(behind: bool, tmp_path: Path) -> None:
    """Who is stopped while it removes steps stops, and the others hear of it."""
    first, second = run_ranks(2, _retention_fails, tmp_path, KeyboardInterrupt("stop"), behind)

    assert first[0] == "KeyboardInterrupt: stop"
    assert second[0].startswith("CheckpointError") and "rank 0: KeyboardInterrupt" in second[0]
    assert "step 2 is committed" in second[0] and first[2] == second[2] == [1, 2]


def test_which_steps_are_kept() -> None:
    """The newest, every n-th, and all that are newer than what was saved; torn ones are not kept."""
    folders = [(1, True), (2, True), (3, False), (4, True), (5, True), (7, True)]

    assert no_longer_kept(folders, 5, keep_last=1) == [1, 2, 3, 4]
    assert no_longer_kept(folders, 5, keep_last=3) == [1, 3]
    assert no_longer_kept(folders, 5, keep_last=4) == no_longer_kept(folders, 5, keep_last=9) == [3]
    assert no_longer_kept(folders, 5, keep_last=1, keep_every=2) == [1, 3]


_READS = {"list_folder", "exists", "read_small", "open_file", "read_at", "view"}
_FAULTS = {
    "disk": OSError(errno.EIO, "Input/output error"),
    "rights": PermissionError(errno.EACCES, "Permission denied"),
    "time-out": TimeoutError(errno.ETIMEDOUT, "Connection timed out"),
    "connection": ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
    "stale": OSError(errno.ESTALE, "Stale file handle"),
    "memory": MemoryError("no memory"),
    "store": RuntimeError("503 Slow Down"),
    "stop": KeyboardInterrupt("stop"),
}


def _every_fault(
    root: Path, shm: Path, bad_rank: int, verify: Verify
) -> dict[str, list[tuple[str, Any, str]]]:
    """For every kind of error, what restoring ends in when it is met at the first, second, .. operation of a rank."""
    found: dict[str, list[tuple[str, Any, str]]] = {}
    for name, error in _FAULTS.items():
        for number in itertools.count():
            operations = iter(range(1 << 30))
            hit: list[str] = []

            def fail(
                operation: str,
                number: int = number,
                operations: Any = operations,
                hit: list[str] = hit,
                error: BaseException = error,
            ) -> None:
                if next(operations) == number and dist.get_rank() == bad_rank:
                    hit.append(operation)
                    raise error

            tier = RamTier("run", folder=shm)
            tier._root = _Operations(tier._root.root, fail)
            manager = CheckpointManager(_Operations(root, fail), ram=tier)
            outcome = _outcome(manager, verify=verify)
            all_hit: list[list[str]] = [[], []]
            dist.all_gather_object(all_hit, hit)
            if not any(all_hit):
                assert outcome == (4, "()")
                break
            found.setdefault(name, []).append((all_hit[bad_rank][0], *outcome))
    return found


@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize("verify", ["before", "while"])
def test_whatever_one_rank_meets_all_raise(bad_rank: int, verify: Verify, tmp_path: Path) -> None:
    """At every operation: who is hit raises what it met, the others name it; nobody goes back to an older step."""
    _save_steps(tmp_path / "run", (2, 4))
    _save_steps(tmp_path / "shm" / "vescale-run", (3,))
    by_rank = run_ranks(2, _every_fault, tmp_path / "run", tmp_path / "shm", bad_rank, verify)

    assert by_rank[0].keys() == _FAULTS.keys()
    for name, error in _FAULTS.items():
        own, others = by_rank[bad_rank][name], by_rank[1 - bad_rank][name]
        assert {operation for operation, *_ in own} == _READS
        for (operation, kind, text), (_, other_kind, other_text) in zip(own, others, strict=True):
            assert (kind, text) == (type(error), str(error)), operation
            assert (
                other_kind is CheckpointError and f"rank {bad_rank}: {kind.__name__}: {error}" in other_text
            )


class _Replaced:
    """Another job that keeps one step: at operation ``number`` of a restore it saves the next and removes the last."""

    def __init__(self, root: Path, first: int, number: int, same_step: bool) -> None:
        self.root, self.step, self.number, self.same_step = root, first, number, same_step
        self.count = 0
        self.seen: list[str] = []

    def __call__(self, operation: str) -> None:
        self.seen.append(operation)
        self.count += 1
        if self.count - 1 == self.number:
            if not self.same_step:
                shutil.rmtree(self.root / f"step-{self.step:08d}")
                self.step += 1
            _save_steps(self.root, [self.step])


@pytest.mark.parametrize("verify", ["before", "while", "never"])
def test_a_step_that_vanishes_is_no_damage(verify: Verify, tmp_path: Path) -> None:
    """Whenever in a restore the step goes and the next one comes, the next one is restored, whole."""
    step = 1
    _save_steps(tmp_path, [step])
    for number in itertools.count():
        job = _Replaced(tmp_path, step, number, same_step=False)
        outcome = _outcome(CheckpointManager(_Operations(tmp_path, job)), verify=verify)
        if job.count <= number:
            break
        assert outcome[0] in (job.step, step) and outcome[1] == "()", job.seen
        assert outcome[0] == job.step or {*job.seen[number:]} <= {"read_at", "view"}
        step = job.step
    assert step == number + 1 and number > 6
    (tmp_path / f"step-{step:08d}" / "manifest.json").unlink()
    assert _outcome(CheckpointManager(tmp_path)) == (None, "")


def _replaced_on_ranks(root: Path, hit_rank: int, same_step: bool) -> int:
    step = 1
    for number in range(100):
        job = _Replaced(root, step, number if dist.get_rank() == hit_rank else -1, same_step)
        outcome = _outcome(CheckpointManager(_Operations(root, job)))
        found: list[Any] = [None, None]
        dist.all_gather_object(found, (job.count > job.number, job.step, outcome))
        assert found[0][2] == found[1][2], found
        if not found[hit_rank][0]:
            return number
        assert found[0][2][0] in (step, found[hit_rank][1]) and found[0][2][1] == "()", (found, job.seen)
        step = found[hit_rank][1]
    raise AssertionError("a restore of a hundred operations")


@pytest.mark.parametrize("same_step", [False, True])
def test_ranks_end_with_the_same_step(same_step: bool, tmp_path: Path) -> None:
    """Also where it vanishes, or is saved anew under its number, between what two ranks do."""
    for hit_rank in (0, 1):
        root = tmp_path / f"{hit_rank}"
        _save_steps(root, [1])
        first, second = run_ranks(2, _replaced_on_ranks, root, hit_rank, same_step)
        assert first == second > 7


def _save_until_told(root: str, pipe: Connection) -> None:
    manager = CheckpointManager(root, keep_last=1)
    step = 0
    # Pauses of 20 ms: ranks list within fewer, and could never agree on a step that is gone before both have seen it.
    while not pipe.poll(0.02):
        step += 1
        manager.save(step, _state(step))
        if step == 1:
            pipe.send(step)
    pipe.send(step)


def _restore_often(root: Path, times: int) -> list[int]:
    found = []
    for _ in range(times):
        state = _state(0)
        restored = CheckpointManager(root).restore(state)
        assert restored is not None and not restored.skipped
        assert _value(state) == restored.step
        found.append(restored.step)
    return found


@pytest.mark.parametrize(("world", "times"), [(1, 300), (2, 100)])
def test_restoring_beside_a_job_that_saves(world: int, times: int, tmp_path: Path) -> None:
    """Hundreds of restores while another process saves and keeps one step: none fails, each is of one step."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "vescale_fsdp.checkpoint"])
    ours, theirs = context.Pipe()
    process = context.Process(target=_save_until_told, args=(str(tmp_path), theirs))
    process.start()
    try:
        assert ours.recv() == 1
        found = run_ranks(world, _restore_often, tmp_path, times)
    finally:
        ours.send("stop")
        assert ours.poll(60)
        last = ours.recv()
        process.join()
    assert all(steps == sorted(steps) and steps == found[0] for steps in found)
    assert len(found[0]) == times and len(set(found[0])) > 10 and found[0][-1] <= last


def test_steps_that_vanish_for_good(tmp_path: Path) -> None:
    """If the only step goes while it is read, restoring raises: the state may hold some of it."""
    _save_steps(tmp_path, [1])

    def remove(operation: str) -> None:
        if operation == "read_at":
            shutil.rmtree(tmp_path / "step-00000001", ignore_errors=True)

    kind, text = _outcome(CheckpointManager(_Operations(tmp_path, remove)))
    assert kind is CheckpointError and "removed while they were read" in text


def test_a_step_that_vanishes_every_time(tmp_path: Path) -> None:
    """Restoring gives up when its patience is over, and not before it has tried three times."""
    job = _Replaced(tmp_path, 1, -1, same_step=False)
    _save_steps(tmp_path, [1])

    def replace(operation: str) -> None:
        if operation == "open_file":
            job.count, job.number = 0, 0
            job(operation)

    kind, text = _outcome(CheckpointManager(_Operations(tmp_path, replace), patience_s=0))
    assert kind is CheckpointError and "Steps vanish while they are read, 3 so far" in text and job.step == 4


def test_impatience_is_refused(tmp_path: Path) -> None:
    """A time to wait is not negative, and a number."""
    for patience_s in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="patience_s"):
            CheckpointManager(tmp_path, patience_s=patience_s)


def test_damage_in_memory_is_said(tmp_path: Path) -> None:
    """A damaged manifest in memory is skipped like any damage, with a warning."""
    manager = CheckpointManager(tmp_path / "run", ram=RamTier("run", folder=tmp_path))
    manager.save(3, _state(3))
    (tmp_path / "vescale-run" / "step-00000003" / "manifest.json").write_text("{")
    with pytest.warns(UserWarning, match=r"step 3 \(ram\) is damaged"):
        assert _outcome(manager)[0] == 3
    shutil.rmtree(tmp_path / "run")
    with pytest.warns(UserWarning, match="damaged"):
        assert _outcome(manager)[0] is CorruptCheckpointError
