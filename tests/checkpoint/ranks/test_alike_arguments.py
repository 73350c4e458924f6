"""Arguments that must be the same on all ranks are compared: no rank's silently wins, and no rank waits for others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.support.distributed import run_ranks
from vescale_fsdp.checkpoint import CheckpointManager, RamTier, async_save, load, read_state, save
from vescale_fsdp.checkpoint.dcp import RaggedSavePlanner, RaggedWriter
from vescale_fsdp.errors import CheckpointError


def _state() -> dict[str, Any]:
    return {"w": torch.arange(6.0), "step": 3}


def _save_steps(path: Path) -> CheckpointManager:
    manager = CheckpointManager(path / "run")
    for step in (1, 2):
        manager.save(step, _state())
    return manager


def _load(path: Path, rank: int, **changes: Any) -> None:
    """Load what was saved; rank 1 with other arguments. The state must stay as it is."""
    for name in ("one", "two"):
        save(path / name, _state())
    state = {"w": torch.zeros(6), "step": -1}
    changed = {name: value[rank] for name, value in changes.items()}
    try:
        load(path / changed.pop("folder", "one"), state, **changed)
    finally:
        assert not state["w"].any() and state["step"] == -1


def _restore(path: Path, rank: int, **changes: Any) -> None:
    manager = _save_steps(path)
    state = {"w": torch.zeros(6), "step": -1}
    try:
        manager.restore(state, **{name: value[rank] for name, value in changes.items()})
    finally:
        assert not state["w"].any() and state["step"] == -1


def _dcp_save(path: Path, rank: int) -> None:
    writer = RaggedWriter(path / "c", metadata={"rank": rank})
    dcp.save(_state(), storage_writer=writer, planner=RaggedSavePlanner())


# By the name that the error gives: what is called with (path, rank).
CASES: dict[str, Callable[[Path, int], Any]] = {
    "metadata": lambda path, rank: save(path / "c", _state(), metadata=rank),
    "metadata.a.b.1": lambda path, rank: save(
        path / "c", _state(), metadata={"a": {"b": [1, rank], "c": rank}}, format="zarr"
    ),
    "metadata.a.1.x/y": lambda path, rank: save(path / "c", _state(), metadata={"a": [0, {"x/y": rank}]}),
    "metadata.only": lambda path, rank: save(path / "c", _state(), metadata={"only": 1} if rank else {}),
    "metadata.type": lambda path, rank: save(path / "c", _state(), metadata={"type": [1, True][rank]}),
    "metadata.behind": lambda path, rank: async_save(path / "c", _state(), metadata={"behind": rank}).wait(),
    "metadata.managed": lambda path, rank: CheckpointManager(path).save(
        1, _state(), metadata={"managed": rank}
    ),
    "metadata.both": lambda path, rank: (
        CheckpointManager(path, asynchronous=True).save(1, _state(), metadata={"both": rank}).wait()
    ),
    "metadata.memory": lambda path, rank: CheckpointManager(path, ram=RamTier("alike", folder=path)).save(
        1, _state(), metadata={"memory": rank}
    ),
    "metadata.rank": _dcp_save,
    "overwrite": lambda path, rank: save(path / "c", _state(), overwrite=bool(rank)),
    "format": lambda path, rank: save(path / "c", _state(), format=("native", "zarr")[rank]),
    "step": lambda path, rank: CheckpointManager(path).save(1 + rank, _state()),
    "strict": lambda path, rank: _load(path, rank, strict=(True, False)),
    "include  ": lambda path, rank: _load(path, rank, include=("w", "step")),
    "include": lambda path, rank: _load(path, rank, include=("w", None)),
    "verify": lambda path, rank: _load(path, rank, verify=("before", "never")),
    "read": lambda path, rank: _load(path, rank, read=("once", "each")),
    "step ": lambda path, rank: _restore(path, rank, step=(2, 99)),
    "step  ": lambda path, rank: _restore(path, rank, step=(None, 1)),
    "include ": lambda path, rank: _restore(path, rank, include=("*", None)),
}


def _told(path: Path) -> dict[str, tuple[object, object]]:
    """Where each case differs, and in what; every rank goes on to the next one only if none is left waiting."""
    said = {}
    for number, (name, call) in enumerate(CASES.items()):
        folder = path / str(number)
        try:
            call(folder, dist.get_rank())
        except CheckpointError as error:
            said[name] = error.where, error.got
        except dcp.CheckpointException as wrapped:
            (met, _), *_ = wrapped.failures.values()
            assert isinstance(met, CheckpointError)
            said[name] = met.where, met.got
        assert not (folder / "c" / "manifest.json").exists(), name
    return said


@pytest.mark.filterwarnings("ignore")  # DCP logs every exception it passes on
def test_arguments_that_differ_between_ranks(tmp_path: Path) -> None:
    """Each is refused on all ranks, with the name of the first difference, the values and the ranks."""
    for said in run_ranks(2, _told, tmp_path, timeout_s=120):
        assert list(said) == list(CASES)
        for name, (where, got) in said.items():
            assert where == f"the argument `{name.strip()}`"
            assert "[0]" in str(got) and "[1]" in str(got), (name, got)


# Calls whose last argument is valid or not: (path, argument).
CHECKED: dict[str, tuple[Callable[[Path, Any], Any], Any, Any]] = {
    "save.path": (lambda path, value: save(value or path, _state()), None, 5),
    "save.format": (lambda path, value: save(path, _state(), format=value), "native", "none"),
    "async_save.path": (lambda path, value: async_save(value or path, _state()).wait(), None, 5),
    "async_save.exit_timeout_s": (
        lambda path, value: async_save(path, _state(), exit_timeout_s=value).wait(),
        1.0,
        -1.0,
    ),
    "load.path": (lambda path, value: load(value or path, _state()), None, 5),
    "load.include": (lambda path, value: load(path, _state(), include=value), "*", 5),
    "load.dtype": (lambda path, value: load(path, _state(), dtype=value), (), 5),
    "load.source": (lambda path, value: load(path, _state(), source=value), None, "config.json"),
    "manager.root": (lambda path, value: CheckpointManager(value or path), None, 5),
    "manager.save_policy": (lambda path, value: CheckpointManager(path, save_policy=value), None, 5),
    "manager.retention": (lambda path, value: CheckpointManager(path, retention=value), 1, 0),
    "manager.export": (lambda path, value: CheckpointManager(path, export=value), None, "none"),
    "manager.export_every": (lambda path, value: CheckpointManager(path, export_every=value), 1, 0),
    "manager.exit_timeout_s": (lambda path, value: CheckpointManager(path, exit_timeout_s=value), 1.0, -1.0),
    "manager.check_replicas": (lambda path, value: CheckpointManager(path, check_replicas=value), "all", "-"),
}


def _refused(path: Path) -> dict[str, type[Exception]]:
    """The class of error of each call; rank 1 passes the wrong value."""
    raised: dict[str, type[Exception]] = {}
    for name in CHECKED:
        if name.startswith("load."):
            save(path / name, _state())
    for name, (call, *values) in CHECKED.items():
        try:
            call(path / name, values[dist.get_rank()])
        except Exception as error:  # noqa: BLE001  compared by the test
            raised[name] = type(error)
    return raised


def test_an_argument_that_is_wrong_on_one_rank_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    """No rank waits for a rank whose arguments were refused; that rank raises its own error."""
    right, wrong = run_ranks(2, _refused, tmp_path)
    assert list(right) == list(wrong) == list(CHECKED)
    for name, kind in right.items():
        assert issubclass(kind, CheckpointError), name
        assert issubclass(wrong[name], (ValueError, TypeError)), name


def _unlike_managers(path: Path) -> list[object]:
    """Arguments that decide which collectives a manager issues; rank 1 passes another one."""
    cases: list[dict[str, Any]] = [{"asynchronous": True}, {"export": "zarr"}, {"export_every": 2}]
    told: list[object] = []
    for case in cases:
        try:
            CheckpointManager(path, **(case if dist.get_rank() else {}))
        except CheckpointError as error:
            told.append(error.where)
    return told


def test_managers_of_unlike_collectives_are_refused_on_all_ranks(tmp_path: Path) -> None:
    """A rank alone would create a group, or wait for an export that no other rank writes."""
    where = [f"the argument `{name}`" for name in ("asynchronous", "export", "export_every")]
    assert run_ranks(2, _unlike_managers, tmp_path) == [where, where]


def _different_checkpoints(path: Path) -> str:
    try:
        _load(path, dist.get_rank(), folder=("one", "two"))
    except CheckpointError as error:
        return type(error).__name__
    return "loaded"


def test_ranks_that_open_different_checkpoints(tmp_path: Path) -> None:
    """A path that means two checkpoints is refused on all ranks."""
    assert run_ranks(2, _different_checkpoints, tmp_path) == ["NoCheckpointError"] * 2


def _alike(path: Path) -> Any:
    metadata = {"a": 1, "b": [2.5, None, {"c": "é"}]}
    mine = dict(reversed(metadata.items())) if dist.get_rank() else metadata
    save(path, _state(), metadata=mine)
    return load(path, {"w": torch.zeros(6), "step": -1}, include=("w", "step")).metadata


def test_equal_arguments_in_another_order(tmp_path: Path) -> None:
    """The order of a dict's keys is no difference."""
    assert run_ranks(2, _alike, tmp_path / "c") == [{"a": 1, "b": [2.5, None, {"c": "é"}]}] * 2
    assert read_state(tmp_path / "c").metadata["a"] == 1


@pytest.mark.parametrize(
    "metadata", [{1: "a", "1": "b"}, float("nan"), {"x": object()}, {(1, 2): 3}, {"n": 10**5000}]
)
def test_what_no_json_can_hold(metadata: Any, tmp_path: Path) -> None:
    """Metadata that would not come back as it is refused."""
    with pytest.raises(CheckpointError, check=lambda error: error.where.endswith("`metadata`")):
        save(tmp_path / "c", _state(), metadata=metadata)
    assert not (tmp_path / "c" / "manifest.json").exists()


def test_a_deep_user_part(tmp_path: Path) -> None:
    """What nests so deeply that a reader's stack may not do is refused; what is accepted is read."""
    deep: Any = 1
    for _ in range(100):
        deep = [deep]
    save(tmp_path / "c", _state(), metadata=deep)
    assert read_state(tmp_path / "c").metadata == deep
    with pytest.raises(CheckpointError, check=lambda error: error.where.endswith("`metadata`")):
        save(tmp_path / "d", _state(), metadata=[deep])
