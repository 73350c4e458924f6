"""A save under way when the interpreter exits is finished, or the exit status and stderr say that it is lost."""

from __future__ import annotations

import errno
import json
import re
import sys
from pathlib import Path

import pytest
import torch

from tests.support.faults.faulty_storage import FaultyStorage, disk_full
from tests.support.processes import run_command
from vescale_fsdp.checkpoint import CheckpointManager, async_save, read_state
from vescale_fsdp.checkpoint.storage.local import LocalStorage


@pytest.fixture(scope="module")
def exits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    """Exit statuses of the cases of `leaving_processes`, and where they left what they wrote."""
    folder = tmp_path_factory.mktemp("exits")
    command = [sys.executable, "-m", "tests.checkpoint.save.leaving_processes", str(folder)]
    run_command(command, check=True, logs=lambda: folder.glob("*.err"))
    return folder, json.loads((folder / "codes.json").read_text())


def _stderr(folder: Path, case: str) -> str:
    """What a process wrote on stderr, without the leaks that triton's bindings report at exit (with torch 2.15)."""
    text = (folder / f"{case}.err").read_text()
    return re.sub(r"nanobind: leaked .*?refleaks\.html\n?", "", text, flags=re.DOTALL)


@pytest.mark.parametrize(
    ("case", "saved"),
    [
        ("alone", "alone"),
        ("managed", "managed/step-00000007"),
        ("rank0", "ranks"),
        ("rank1", "ranks"),
        ("child", "child"),
    ],
)
def test_a_save_under_way_is_finished(case: str, saved: str, exits: tuple[Path, dict[str, int]]) -> None:
    """Alone, by a manager, after `destroy_process_group`, in a forked child."""
    folder, codes = exits
    assert codes[case] == 0 and not _stderr(folder, case)
    assert torch.equal(torch.arange(2_000_000.0), read_state(folder / saved)["w"].read())
    assert (folder / f"{case}.atexit").exists() or case == "child"


@pytest.mark.parametrize("case", ["hanging", "failing"])
def test_a_lost_save_is_no_success(case: str, exits: tuple[Path, dict[str, int]]) -> None:
    """Status 1, the path on stderr, and users' exit functions are called all the same."""
    folder, codes = exits
    assert codes[case] == 1
    assert str(folder / case) in (folder / f"{case}.err").read_text()
    assert (folder / f"{case}.atexit").exists()
    assert not list((folder / case).glob("manifest.json"))


def test_an_error_that_was_asked_for_is_not_reported_again(exits: tuple[Path, dict[str, int]]) -> None:
    """Whoever asks for the error decides what becomes of the process."""
    folder, codes = exits
    assert codes["heard"] == 0 and not _stderr(folder, "heard")


def _state() -> dict[str, torch.Tensor]:
    return {"w": torch.ones(1000)}


def test_blocks_wait_for_saves(tmp_path: Path) -> None:
    """Handle and manager end a ``with`` block when all is committed; the manager is closed."""
    with async_save(tmp_path / "c", _state()) as handle:
        assert not _is_there(tmp_path / "absent")
    assert handle.done() and _is_there(tmp_path / "c")
    with CheckpointManager(tmp_path / "run", asynchronous=True) as manager:
        manager.save(1, _state())
    assert manager.steps() == [1]


def _is_there(path: Path) -> bool:
    """Whether a checkpoint is there."""
    return (path / "manifest.json").exists()


def test_the_error_of_a_block_comes_first(tmp_path: Path) -> None:
    """What the block raised is raised, with the save's error as a note; without one the save's error is raised."""
    full = FaultyStorage(LocalStorage(tmp_path / "c"), fail_at=1, error=disk_full)
    with pytest.raises(KeyError) as caught, async_save(full, _state()):
        raise KeyError("of the block")
    assert any("OSError" in note for note in caught.value.__notes__)
    full = FaultyStorage(LocalStorage(tmp_path / "d"), fail_at=1, error=disk_full)
    with pytest.raises(OSError, check=lambda error: error.errno == errno.ENOSPC), async_save(full, _state()):
        pass


@pytest.mark.parametrize("timeout_s", [-1.0, float("nan")])
def test_no_time_to_wait(timeout_s: float, tmp_path: Path) -> None:
    """Refused before anything is saved."""
    with pytest.raises(ValueError, match="exit_timeout_s"):
        async_save(tmp_path / "c", _state(), exit_timeout_s=timeout_s)
    with pytest.raises(ValueError, match="exit_timeout_s"):
        CheckpointManager(tmp_path / "c", exit_timeout_s=timeout_s)
