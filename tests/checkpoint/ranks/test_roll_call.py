"""Calls that only some ranks make: the ranks that do not come are named within seconds, and in the error at the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.distributed import run_ranks
from tests.support.processes import wait_until
from vescale_fsdp.checkpoint import CheckpointManager, async_save, load, save
from vescale_fsdp.checkpoint.ranks import coordinator, roll_call
from vescale_fsdp.errors import CheckpointError, LifecycleError
from vescale_fsdp.torch_private import default_store

_TIMEOUT_S = 4.0  # a loaded machine may stop a rank for seconds


class _Told(logging.Handler):
    """When something was said, and what."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[float, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append((time.monotonic(), record.getMessage()))


def _state() -> dict[str, Any]:
    return {"w": torch.ones(10)}


def _calls(folder: Path, group: dist.ProcessGroup) -> dict[str, Callable[[], object]]:
    # Made on all ranks: only its calls are forgotten on some of them.
    manager = CheckpointManager(folder / "run", process_group=group)
    return {
        "save": lambda: save(folder / "c", _state(), process_group=group, overwrite=True),
        "async_save": lambda: async_save(folder / "c", _state(), process_group=group, overwrite=True).wait(),
        "load": lambda: load(folder / "c", _state(), process_group=group),
        "manager": lambda: manager.save(1, _state()),
        "should_save": lambda: manager.should_save(1),
        "restore": lambda: manager.restore(_state()),
        "pin": lambda: manager.pin(1),
    }


def _one_rank_stays_away(folder: Path, call: str, missing: int, before: int) -> str:
    """What a call raises on the ranks that make it, once it has been made ``before`` times by all of them."""
    group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=_TIMEOUT_S if call else 30))
    told = _Told()
    logging.getLogger(roll_call.__name__).addHandler(told)
    with mock.patch.object(roll_call, "_PATIENCE_S", 0.2), mock.patch.object(roll_call, "_NOTES_S", 0.2):
        calls = _calls(folder, group)
        for _ in range(before):
            calls[call]()
        told.found.clear()
        dist.barrier()
        start_s = time.monotonic()
        try:
            if dist.get_rank() == missing:
                default_store().wait([f"over {call} {before}"])
                return "away"
            with pytest.raises(CheckpointError) as caught:
                calls[call]()
            assert f"ranks [{missing}]" in str(caught.value) and "rank == 0" in str(caught.value), (
                caught.value
            )
            assert all(f"ranks [{missing}]" in text for _, text in told.found)
            assert all(at_s - start_s < 0.9 * _TIMEOUT_S for at_s, _ in told.found)
            return f"told {len(told.found)}"
        finally:
            logging.getLogger(roll_call.__name__).removeHandler(told)
            default_store().add("came", 1)
            if dist.get_rank() != missing:
                wait_until(lambda: default_store().add("came", 0) >= 2, "the other rank that is not missing")
            default_store().set(f"over {call} {before}", "")


@pytest.mark.parametrize(
    ("call", "missing", "before"),
    [
        ("manager", 2, 1),
        *(
            pytest.param(*row, marks=pytest.mark.part("faults"))
            for row in (
                ("restore", 0, 0),
                ("save", 1, 0),
                ("save", 2, 1),
                ("async_save", 1, 1),
                ("async_save", 0, 0),
                ("load", 1, 0),
                ("should_save", 1, 0),
                ("pin", 1, 0),
            )
        ),
    ],
)
def test_ranks_that_do_not_come_are_named(call: str, missing: int, before: int, tmp_path: Path) -> None:
    """Before and after groups were made; one rank warns early, and all that came raise, naming the one that did not."""
    outcomes = run_ranks(3, _one_rank_stays_away, tmp_path, call, missing, before, timeout_s=60)
    assert outcomes.pop(missing) == "away"
    assert sorted(outcomes) == ["told 0", "told 1"]


def _late(folder: Path) -> int:
    """A rank that is late is waited for, and the checkpoint is good."""
    told = _Told()
    logging.getLogger(roll_call.__name__).addHandler(told)
    with mock.patch.object(roll_call, "_PATIENCE_S", 0.05), mock.patch.object(roll_call, "_NOTES_S", 0.05):
        for number in range(2):
            if dist.get_rank() == 1:
                default_store().wait([f"told {number}"])
            else:
                told.emit = lambda record, n=number: default_store().set(f"told {n}", "")  # type: ignore[method-assign]
            save(folder / "c", _state(), overwrite=True)
            state = {"w": torch.zeros(10)}
            load(folder / "c", state)
            assert state["w"].sum() == 10
    logging.getLogger(roll_call.__name__).removeHandler(told)
    return dist.get_rank()


def test_late_ranks_are_waited_for(tmp_path: Path) -> None:
    """A warning ends nothing: as the group is made, and in a meeting."""
    assert run_ranks(2, _late, tmp_path) == [0, 1]


class Silent(dist.Store):
    """A store whose process is stalled."""

    def add(self, key: str, amount: int) -> int:
        Event().wait(20)
        return 0


def _asks_a_stalled_store() -> str:
    dist.destroy_process_group()
    timeout, real = timedelta(seconds=0.5), coordinator.default_store
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    coordinator.default_store = Silent  # type: ignore[attr-defined]
    try:
        coordinator.coordinator_for()
    except LifecycleError as error:
        return str(error.expected)
    finally:
        coordinator.default_store = real  # type: ignore[attr-defined]
    return ""


def test_a_stalled_store_is_given_up_when_the_group_is() -> None:
    """torch's clients would wait for ever."""
    assert "0.5 s" in run_ranks(1, _asks_a_stalled_store)[0]


def _calls_differ(folder: Path, per_rank: tuple[str, ...]) -> str:
    """What a call raises where ranks make different ones; afterwards they make the same one."""
    group = dist.new_group(list(range(len(per_rank))), timeout=timedelta(seconds=30))
    calls = _calls(folder, group)
    calls["save"]()
    with pytest.raises(CheckpointError) as caught:
        calls[per_rank[dist.get_rank()]]()
    state = {"w": torch.zeros(10)}
    load(folder / "c", state, process_group=group)
    assert torch.equal(state["w"], torch.ones(10))
    return str(caught.value.got)


@pytest.mark.parametrize(
    "per_rank",
    [
        ("save", "load"),
        ("load", "save", "load"),
        pytest.param(("load", "save"), marks=pytest.mark.part("faults")),
    ],
)
def test_ranks_that_make_different_calls_hear_of_it(tmp_path: Path, per_rank: tuple[str, ...]) -> None:
    """On all ranks, and the next call is as if nothing had been."""
    for got in run_ranks(len(per_rank), _calls_differ, tmp_path, per_rank):
        assert "rank 0 " in got and "rank 1 " in got
