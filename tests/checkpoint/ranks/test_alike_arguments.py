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
from vescale_fsdp.checkpoint import (
    CheckpointManager,
    RaggedSavePlanner,
    RaggedWriter,
    RamTier,
    async_save,
    load,
    read_state,
    save,
)
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
    writer = RaggedWriter(path / "c", user={"rank": rank})
    dcp.save(_state(), storage_writer=writer, planner=RaggedSavePlanner())


# By the name that the error gives: what is called with (path, rank).
CASES: dict[str, Callable[[Path, int], Any]] = {
    "user": lambda path, rank: save(path / "c", _state(), user=rank),
    "user/a/b/1": lambda path, rank: save(
        path / "c", _state(), user={"a": {"b": [1, rank], "c": rank}}, format="zarr"
    ),
    "user/a/1/x~1y": lambda path, rank: save(path / "c", _state(), user={"a": [0, {"x/y": rank}]}),
    "user/only": lambda path, rank: save(path / "c", _state(), user={"only": 1} if rank else {}),
    "user/type": lambda path, rank: save(path / "c", _state(), user={"type": [1, True][rank]}),
    "user/behind": lambda path, rank: async_save(path / "c", _state(), user={"behind": rank}).wait(),
    "user/managed": lambda path, rank: CheckpointManager(path).save(1, _state(), user={"managed": rank}),
    "user/both": lambda path, rank: (
        CheckpointManager(path, async_=True).save(1, _state(), user={"both": rank}).wait()
    ),
    "user/memory": lambda path, rank: CheckpointManager(path, ram=RamTier("alike", folder=path)).save(
        1, _state(), user={"memory": rank}
    ),
    "user/rank": _dcp_save,
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


def _told(path: Path) -> dict[str, str]:
    """What each case says; every rank goes on to the next one only if none is left waiting."""
    said = {}
    for number, (name, call) in enumerate(CASES.items()):
        folder = path / str(number)
        try:
            call(folder, dist.get_rank())
        except (CheckpointError, dcp.CheckpointException) as error:
            said[name] = str(error)
        assert not (folder / "c" / "manifest.json").exists(), name
    return said


@pytest.mark.filterwarnings("ignore")  # DCP logs every exception it passes on
def test_arguments_that_differ_between_ranks(tmp_path: Path) -> None:
    """Each is refused on all ranks, with the name of the first difference, the values and the ranks."""
    for said in run_ranks(2, _told, tmp_path, timeout_s=120):
        assert list(said) == list(CASES)
        for name, text in said.items():
            assert f"where: the argument `{name.strip()}`" in text, (name, text)
            assert "on ranks [0]" in text and "on ranks [1]" in text, (name, text)


def _different_checkpoints(path: Path) -> str:
    try:
        _load(path, dist.get_rank(), folder=("one", "two"))
    except CheckpointError as error:
        return str(error)
    return "loaded"


def test_ranks_that_open_different_checkpoints(tmp_path: Path) -> None:
    """A path that means two checkpoints is refused on all ranks."""
    for text in run_ranks(2, _different_checkpoints, tmp_path):
        assert text.startswith("Ranks found different checkpoints at this path.")


def _alike(path: Path) -> Any:
    user = {"a": 1, "b": [2.5, None, {"c": "é"}]}
    mine = dict(reversed(user.items())) if dist.get_rank() else user
    save(path, _state(), user=mine)
    return load(path, {"w": torch.zeros(6), "step": -1}, include=("w", "step")).user


def test_equal_arguments_in_another_order(tmp_path: Path) -> None:
    """The order of a dict's keys is no difference."""
    assert run_ranks(2, _alike, tmp_path / "c") == [{"a": 1, "b": [2.5, None, {"c": "é"}]}] * 2
    assert read_state(tmp_path / "c").user["a"] == 1


@pytest.mark.parametrize(
    "user", [{1: "a", "1": "b"}, float("nan"), {"x": object()}, {(1, 2): 3}, {"n": 10**5000}]
)
def test_what_no_json_can_hold(user: Any, tmp_path: Path) -> None:
    """A user's part that would not come back as it is refused."""
    with pytest.raises(CheckpointError, match="the argument `user`"):
        save(tmp_path / "c", _state(), user=user)
    assert not (tmp_path / "c" / "manifest.json").exists()


def test_a_deep_user_part(tmp_path: Path) -> None:
    """What nests so deeply that a reader's stack may not do is refused; what is accepted is read."""
    deep: Any = 1
    for _ in range(100):
        deep = [deep]
    save(tmp_path / "c", _state(), user=deep)
    assert read_state(tmp_path / "c").user == deep
    with pytest.raises(CheckpointError, match="more than 100 levels"):
        save(tmp_path / "d", _state(), user=[deep])
