"""Steps that are no longer kept: which they are, and what happens where they cannot be removed."""

from __future__ import annotations

import errno
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.checkpoint_states import sealed_manifest
from tests.support.distributed import run_ranks
from tests.support.faults.saved_steps import outcome_of, state_of
from vescale_fsdp.checkpoint import BestOf, CheckpointManager, RetentionPolicy, read_state, verify
from vescale_fsdp.checkpoint.steps.retention import surplus_steps
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.errors import CorruptCheckpointError


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
    manager = CheckpointManager(_Keeps(root, error), retention=1, asynchronous=behind)
    said = "returned"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for step in (1, 2):
                manager.save(step, state_of(step))
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
    assert "step-00000001" in said and not second[1]
    assert ("manifest.json" if error is None else type(error).__name__) in said
    assert outcome_of(CheckpointManager(tmp_path)) == (2, "()")
    assert outcome_of(CheckpointManager(tmp_path), step=1) == (1, "()")  # its data was not touched


@pytest.mark.parametrize("behind", [False, True])
def test_an_interrupt_while_retiring(behind: bool, tmp_path: Path) -> None:
    """Who is stopped while it removes steps stops, and the others hear of it."""
    first, second = run_ranks(2, _retention_fails, tmp_path, KeyboardInterrupt("stop"), behind)

    assert first[0] == "KeyboardInterrupt: stop"
    assert second[0].startswith("CheckpointError") and "rank 0: KeyboardInterrupt" in second[0]
    assert "step 2" in second[0] and first[2] == second[2] == [1, 2]


def test_which_steps_are_kept() -> None:
    """The newest, every n-th, and all that are newer than what was saved; torn ones are not kept."""
    folders = [(1, True), (2, True), (3, False), (4, True), (5, True), (7, True)]

    assert surplus_steps(folders, 5, keep_last=1) == [1, 2, 3, 4]
    assert surplus_steps(folders, 5, keep_last=3) == [1, 3]
    assert surplus_steps(folders, 5, keep_last=4) == surplus_steps(folders, 5, keep_last=9) == [3]
    assert surplus_steps(folders, 5, keep_last=1, keep_every=2) == [1, 3]


def _flipped(content: bytes) -> Iterator[bytes]:
    for at in range(0, len(content), 17):
        yield content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def _cut(content: bytes) -> Iterator[bytes]:
    for size in range(0, len(content), len(content) // 5 + 1):
        yield content[:size]


@pytest.mark.parametrize("damaged", [_flipped, _cut])
def test_damage_of_a_best_step_is_reported_and_removes_nothing(
    damaged: Callable[[bytes], Iterator[bytes]], tmp_path: Path
) -> None:
    """Every file of a step but its data: `verify` reports the damage, and the best step is kept, with a warning."""
    run = tmp_path / "run"
    manager = CheckpointManager(run, retention=RetentionPolicy(keep_last=1, keep_best=BestOf(1)))
    manager.save(1, state_of(1), metric=0.125)
    best = run / "step-00000001"
    files = [file for file in best.iterdir() if file.is_file() and file.name != ".lock"]
    assert files and (best / "manifest.json") in files
    cases = [(file, content) for file in files for content in damaged(file.read_bytes())]
    for step, (file, content) in enumerate(cases, start=2):
        sound = file.read_bytes()
        file.write_bytes(content)
        assert verify(best, deep=False).problems, content
        with pytest.warns(UserWarning, match=r"\[1\]"):
            manager.save(step, state_of(step), metric=0.5)
        assert 1 in manager.steps(), content
        assert not (found := manager.history()[0]).metric and found.damage
        file.write_bytes(sound)
    found = manager.history()[0]
    assert (found.step, found.metric, found.damage) == (1, 0.125, "")


def test_a_damaged_step_is_removed_by_age_alone(tmp_path: Path) -> None:
    """Without a rule about metrics, no manifest is read."""
    manager = CheckpointManager(tmp_path, retention=1)
    manager.save(1, state_of(1), metric=0.125)
    (tmp_path / "step-00000001" / "manifest.json").write_bytes(b"{")
    manager.save(2, state_of(2))
    assert manager.steps() == [2]


@pytest.mark.parametrize(
    "saved",
    [
        {},
        {"unix_s": 1.0},
        {"unix_s": True, "seconds": 1.0, "metric": None},
        {"unix_s": 1.0, "seconds": None, "metric": None},
        {"unix_s": 1.0, "seconds": 1.0, "metric": "1"},
        {"unix_s": 1.0, "seconds": 1.0, "metric": 10**400},
        {"unix_s": 1.0, "seconds": 1.0, "metric": None, "more": 1},
        [1.0, 1.0, None],
        None,
    ],
)
def test_a_record_of_another_form_is_damage(saved: object, tmp_path: Path) -> None:
    """Even with a valid checksum; a record is absent, or has numbers."""
    manager = CheckpointManager(tmp_path)
    manager.save(1, state_of(1), metric=0.5)
    manifest = tmp_path / "step-00000001" / "manifest.json"
    data = json.loads(manifest.read_bytes())
    manifest.write_bytes(sealed_manifest({**data, "saved": saved}))
    with pytest.raises(CorruptCheckpointError):
        read_state(manifest.parent)
    del data["saved"]
    manifest.write_bytes(sealed_manifest(data))
    (record,) = manager.history()
    assert record.metric is None and read_state(manifest.parent).tree()["step"] == 1
