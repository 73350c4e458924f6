"""Steps that are no longer kept: which they are, and what happens where they cannot be removed."""

from __future__ import annotations

import errno
import json
import warnings
from pathlib import Path

import pytest
import torch

from tests.support.distributed import run_ranks
from tests.support.faults.saved_steps import outcome_of, state_of
from vescale_fsdp.checkpoint import CheckpointManager
from vescale_fsdp.checkpoint.manifest.file_names import step_name
from vescale_fsdp.checkpoint.steps.retention import surplus_steps
from vescale_fsdp.checkpoint.storage.local import LocalStorage


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


@pytest.mark.parametrize("text", ["1" * 400, "1" * 5000, "true", '"3"', "1e999", "null"])
def test_a_record_that_holds_no_number(text: str, tmp_path: Path) -> None:
    """Values that no float holds are left out of the history; the others stay."""
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"w": torch.ones(2)}, metric=0.5)
        record = tmp_path / "run" / step_name(1) / "record.json"
        values = json.loads(record.read_text())
        assert values["metric"] == 0.5
        record.write_text(json.dumps({**values, "metric": "here"}).replace('"here"', text))
        (found,) = manager.history()
        assert (found.step, found.metric) == (1, None)
