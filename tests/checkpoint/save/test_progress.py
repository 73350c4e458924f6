"""What is seen of saves and loads: progress, a bar, log lines; what cannot fit is refused before it is written."""

from __future__ import annotations

import logging
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.distributed import run_ranks
from tests.support.faults.disks import room
from vescale_fsdp import conversion
from vescale_fsdp.checkpoint import (
    CheckpointManager,
    PerRank,
    ProgressReport,
    RamTier,
    async_save,
    load,
    save,
)
from vescale_fsdp.checkpoint.ranks.coordinator import solo_coordinator
from vescale_fsdp.checkpoint.steps.run_file import RunFile
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.errors import CheckpointError, ConversionError

ROWS, COLUMNS = 12_000, 512  # 12 MB on each of two ranks: several stripes


def _state() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(float(ROWS * COLUMNS)).view(ROWS, COLUMNS)
    return {"w": distribute_tensor(whole, mesh, [Shard(0)]), "own": PerRank(dist.get_rank())}


def _stop(report: ProgressReport) -> None:
    raise RuntimeError("seen enough")


def _watched(root: Path) -> tuple[dict[str, list[ProgressReport]], list[str]]:
    state = _state()
    found: dict[str, list[ProgressReport]] = {}

    def told(name: str) -> Any:
        return found.setdefault(name, []).append

    save(root / "native", state, progress=told("save"))
    save(root / "zarr", state, format="zarr", progress=told("save zarr"))
    async_save(root / "async", state, progress=told("async_save")).wait()
    load(root / "native", state, verify="before", progress=told("load before"))
    load(root / "native", state, verify="while", progress=told("load while"))
    load(root / "zarr", state, verify="while", progress=told("load zarr"))
    manager = CheckpointManager(root / "steps", progress=told("manager"), asynchronous=True)
    manager.save(1, state)
    manager.restore(state, verify="while")
    errors = []
    for number in range(2):
        try:
            save(root / f"stopped{number}", state, progress=_stop if dist.get_rank() == number else False)
            errors.append("returned")
        except (CheckpointError, RuntimeError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    assert not (root / "stopped0" / "manifest.json").exists()
    return found, errors


def test_progress_is_told(tmp_path: Path) -> None:
    """Of every rank's own bytes, up to the last; an error of who listens ends the save on all ranks."""
    ranks = run_ranks(2, _watched, tmp_path)
    for found, _ in ranks:
        own_bytes = ROWS * COLUMNS * 4 // 2
        runs: dict[str, list[list[ProgressReport]]] = {name: [] for name in found}
        for name, reports in found.items():
            for report in reports:
                if report.done_bytes == 0:
                    runs[name].append([])
                runs[name][-1].append(report)
        assert {name: [run[0].doing for run in each] for name, each in runs.items()} == {
            "save": ["saving"],
            "save zarr": ["saving"],
            "async_save": ["saving"],
            "load before": ["verifying", "loading"],
            "load while": ["loading"],
            "load zarr": ["loading"],
            "manager": ["saving", "loading"],
        }
        for run in (run for each in runs.values() for run in each):
            assert run[-1].done_bytes == run[-1].total_bytes >= own_bytes and run[-1].remaining_s == 0
            assert all(a.done_bytes < b.done_bytes and a.seconds <= b.seconds for a, b in pairwise(run))
            assert run[0].remaining_s is None and run[-1].bytes_per_s > 0
        assert len(found["save"]) > 3  # stripe by stripe
    (_, first), (_, second) = ranks
    assert first[0].startswith("RuntimeError: seen") and "rank 0: RuntimeError: seen" in second[0]
    assert "rank 1: RuntimeError: seen" in first[1] and second[1].startswith("RuntimeError: seen")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_bar_and_log_lines(
    is_terminal: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Drawn on rank 0 if it is asked for, in a log file as one line; logged with bytes, seconds and rate."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    state = {"w": torch.ones(1 << 20)}
    with caplog.at_level(logging.INFO, logger="vescale_fsdp.checkpoint"):
        save(tmp_path / "c", state)
        assert capsys.readouterr().err == ""
        save(tmp_path / "d", state, progress=True)
        load(tmp_path / "d", state, verify="while", progress=True)
    err = capsys.readouterr().err
    lines = err.replace("\r", "\n").split("\n")
    assert ("\r" in err) == ("4.19M/4.19M" in err) == is_terminal
    assert {line.partition(",")[0] for line in lines if line} == {
        "saving",
        "loading",
    }  # every frame has its label
    assert is_terminal or [line.partition(",")[0] for line in lines if line] == ["saving", "loading"]
    saved, _, loaded = [record.getMessage() for record in caplog.records]
    assert f" {tmp_path}/c: 4194304 " in saved and " GB/s" in saved
    assert f" {tmp_path}/d: rank 0 " in loaded and " 4194" in loaded and " GB/s" in loaded


class _Small(LocalStorage):
    """A disk that is nearly full on rank 1."""

    @property
    def free_bytes(self) -> int | None:
        return 5000 if dist.is_initialized() and dist.get_rank() == 1 else super().free_bytes


def _no_room(root: Path) -> list[str]:
    state = _state()
    said = []
    handle = async_save(_Small(root / "async"), state)
    tier = RamTier("run", folder=root / "shm")
    manager = CheckpointManager(root / "steps", ram=tier)
    tier._root = _Small(root / "ram", durable=False)  # children are ordinary
    for work in (
        lambda: save(_Small(root / "native"), state),
        lambda: save(_Small(root / "zarr"), state, format="zarr"),
        handle.wait,
    ):
        try:
            work()
            said.append("returned")
        except CheckpointError as error:
            said.append(str(error.got))
    small = {"w": torch.ones(4)}
    save(_Small(root / "small"), small)
    manager.save(1, small)
    return said


def test_what_cannot_fit_is_not_begun(tmp_path: Path) -> None:
    """The least that any rank has free counts: all ranks refuse before one of them writes."""
    for said in run_ranks(2, _no_room, tmp_path):
        assert said == ["5000"] * 3
    for name in ("native", "zarr", "async"):
        assert [path.name for path in (tmp_path / name).glob("*")] in ([], [".lock"])
    assert (tmp_path / "small" / "manifest.json").exists()


def test_memory_without_room(tmp_path: Path) -> None:
    """Each rank asks for what it stores itself, replicas too: the other ranks of a node may store less."""
    tier, coordinator = RamTier("run", folder=tmp_path / "shm"), solo_coordinator()
    run = RunFile((("0123abcd", None),))
    state = {"w": torch.ones(1024)}

    def is_taken(step: int) -> bool:
        save_id, _ = tier.begin(coordinator, run)
        return tier.save(coordinator, step, state, None, save_id=save_id, run=run, behind=coordinator)

    with room(4095), pytest.warns(UserWarning, match="vescale-run"):
        assert not is_taken(1)
    with room(2 * 4096):
        assert is_taken(2)


def test_a_conversion_without_room(tmp_path: Path) -> None:
    """It says so, and leaves no folder behind; with room it goes well."""
    save(tmp_path / "native", {"model": {"w": torch.ones(1 << 16)}})
    source = conversion.open_source(str(tmp_path / "native"))
    with room(1 << 17), pytest.raises(ConversionError, check=lambda error: str(error.got) == "131072"):
        conversion.convert(source, str(tmp_path / "out"), "hf")
    assert not (tmp_path / "out").exists()
    with room(1 << 19):
        conversion.convert(source, str(tmp_path / "out"), "hf")
    assert (tmp_path / "out").exists()
