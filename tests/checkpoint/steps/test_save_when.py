"""When steps are saved and which stay: rules, agreement between ranks, signals, records, pins."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.distributed import run_ranks
from vescale_fsdp.checkpoint import (
    BeforeDeadline,
    BestOf,
    CheckpointManager,
    EveryMinutes,
    EverySteps,
    OnSignal,
    RamTier,
    latest,
    read_state,
)
from vescale_fsdp.checkpoint.ranks.coordinator import SoloCoordinator
from vescale_fsdp.checkpoint.steps.save_schedule import SaveSchedule
from vescale_fsdp.checkpoint.steps.save_when import save_rules
from vescale_fsdp.checkpoint.steps.step_records import StepRecord
from vescale_fsdp.errors import CheckpointError


def _state(step: int) -> dict[str, Any]:
    return {"w": torch.full((64,), float(step))}


def test_rules_are_put_together() -> None:
    """By | and as a sequence, nested; what is no rule is refused, and so are limits that mean nothing."""
    rules = (EverySteps(5), EveryMinutes(3), OnSignal(), BestOf(2, "max"))
    assert save_rules(rules[0] | rules[1] | rules[2] | rules[3]) == rules
    assert save_rules([rules[0] | rules[1], rules[2] | rules[3]]) == rules
    assert {EverySteps(5) | OnSignal()} == {EverySteps(5) | OnSignal()}
    refused: list[Any] = ["EverySteps", 5, [5], None]
    for wrong in refused:
        with pytest.raises(TypeError, match="no rule"):
            save_rules(wrong)
    for make in (
        lambda: EverySteps(0),
        lambda: EveryMinutes(0),
        lambda: BestOf(0),
        lambda: BestOf(1, "least"),  # type: ignore[arg-type]
        lambda: BeforeDeadline(float("inf")),
        lambda: OnSignal(("SIGNONE",)),
        lambda: OnSignal(()),
    ):
        with pytest.raises(ValueError, match="got:"):
            make()


def _decided(rules: Any, clock: Iterator[float], metrics: list[float | None]) -> list[tuple[bool, bool]]:
    """Whether each of steps 1, 2, .. is saved, and finally, by one process alone."""
    now_s = [next(clock)]
    schedule = SaveSchedule(save_rules(rules), SoloCoordinator(), lambda: [0.5], clock=lambda: now_s[0])
    found = []
    for step, metric in enumerate(metrics, 1):
        now_s[0] = next(clock)
        made = schedule.decide(step, metric, force=False)
        if made.is_due:
            schedule.saved(made)
        found.append((made.is_due, made.is_final))
    schedule.close()
    return found


def test_each_rule() -> None:
    """Steps by number; minutes since the last save; before a deadline once; metrics beside those of older steps."""
    no: list[float | None] = [None] * 6
    minutes = [60.0 * minute for minute in range(7)]

    def due(found: list[tuple[bool, bool]]) -> list[int]:
        return [step for step, (is_due, _) in enumerate(found, 1) if is_due]

    assert due(_decided(EverySteps(2), iter(minutes), no)) == [2, 4, 6]
    assert due(_decided(EveryMinutes(2), iter(minutes), no)) == [2, 4, 6]
    assert due(_decided(EveryMinutes(2) | EverySteps(3), iter(minutes), no)) == [2, 3, 5, 6]
    final = _decided(BeforeDeadline(360, margin_s=120), iter(minutes), no)
    assert final == [(False, False)] * 3 + [(True, True)] + [(False, False)] * 2
    nan = float("nan")
    metrics = [0.7, 0.6, nan, None, 0.4, 0.45]
    assert due(_decided(BestOf(2), iter(minutes), metrics)) == [1, 2, 5, 6]  # 0.5 is of an older step
    assert due(_decided(BestOf(1, "max"), iter(minutes), metrics)) == [1]
    assert due(_decided(BestOf(1), iter(minutes), [0.5, nan, -float("inf"), None, None, None])) == []


def _on_ranks(root: Path) -> dict[str, Any]:
    """Rules that only one rank knows of, and calls that are not alike, on two ranks."""
    rank = dist.get_rank()
    found: dict[str, Any] = {}
    heard: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    manager = CheckpointManager(root / "signal", save_when=[EverySteps(100), OnSignal()], async_=True)
    stopped_at = None
    for step in range(1, 20):
        if step == 5 and rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        if manager.should_save(step):
            handle = manager.save(step, _state(step))
            found.setdefault("handles", []).append(handle)
        if manager.should_stop:
            stopped_at = step
            break
    manager.close()
    found["stopped"] = (stopped_at, manager.steps())
    os.kill(os.getpid(), signal.SIGUSR1)  # now nobody but the first handler hears it
    found["heard"] = len(heard)

    minutes = 0.0005 if rank == 0 else 1e6
    manager = CheckpointManager(root / "minutes", save_when=EveryMinutes(minutes))
    for step in range(1, 4):
        time.sleep(0.04)
        manager.save(step, _state(step))
    found["minutes"] = manager.steps()

    best = CheckpointManager(root / "best", keep_last=1, save_when=EverySteps(4) | BestOf(2))
    for step, metric in enumerate([5.0, 3.0, 4.0, 9.0, 1.0, 2.0, 8.0, 7.0, 7.5], 1):
        best.save(step, _state(step), metric=metric)
    found["best"] = [(one.step, one.metric) for one in best.history()]
    again = CheckpointManager(root / "best", keep_last=1, save_when=BestOf(2))  # a restart knows them too
    found["again"] = [again.should_save(20, metric=metric) for metric in (1.5, 2.0, 6.0)]

    errors = []
    for number, (arguments, extra) in enumerate(
        [
            ((4 + rank, 6), {}),
            ((5, 6), {"force": rank == 1}),
            ((5, 6), {"metric": float(rank)}),
            ((3 - 4 * rank, 6), {}),
        ]
    ):
        manager = CheckpointManager(root / f"unlike{number}", save_interval=4)
        begun_s = time.monotonic()
        manager.save(1, _state(1))
        try:
            for step in arguments:
                manager.save(step, _state(step), **extra)
            errors.append("returned")
        except (CheckpointError, ValueError) as error:
            errors.append(str(error))
        errors[-1] += "" if time.monotonic() - begun_s < 60 else " too late"
    found["errors"] = errors
    return found


def test_ranks_agree(tmp_path: Path) -> None:
    """What one rank hears or measures, all act on at the same step; who comes with another step is refused by name."""
    first, second = run_ranks(2, _on_ranks, tmp_path)

    for found in (first, second):
        step, steps = found["stopped"]
        assert step in (5, 6, 7) and steps == [step]
        assert found["handles"] == [None]  # a final save is done when it returns, behind training or not
        assert found["minutes"] and found["minutes"] == first["minutes"]
        assert found["best"] == [(5, 1.0), (6, 2.0), (8, 7.0)]
        assert found["again"] == [True, False, False]
        steps_differ, force_differs, metric_differs, _ = found["errors"]
        assert (
            "different steps" in steps_differ and "step 4 on ranks [0]; step 5 on ranks [1]" in steps_differ
        )
        assert "the argument `force`" in force_differs and "the argument `metric`" in metric_differs
        assert "too late" not in "".join(found["errors"])
    assert (first["heard"], second["heard"]) == (1, 2)  # chained while we listened, alone afterwards
    assert (
        "step -1 on ranks [1]; step 3 on ranks [0]" in first["errors"][3]
        and "cannot be negative" in second["errors"][3]
    )
    assert not (tmp_path / "unlike0" / "step-00000004").exists()


def test_an_interval_asks_for_nothing_else(tmp_path: Path) -> None:
    """A signal that nobody asked for ends the process as ever; a fork of ours is none of ours."""
    CheckpointManager(tmp_path, save_interval=3)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    manager = CheckpointManager(tmp_path, save_when=OnSignal(("SIGTERM",)))
    child = os.fork()
    if not child:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM
    os.kill(os.getpid(), signal.SIGTERM)
    assert manager.should_save(1) and manager.should_stop
    on_top: list[int] = []
    ours = signal.signal(signal.SIGTERM, lambda number, frame: on_top.append(number))
    manager.close()
    os.kill(os.getpid(), signal.SIGTERM)
    assert on_top == [signal.SIGTERM] and callable(ours)  # who listens by now goes on to
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_records_pins_and_removal(tmp_path: Path) -> None:
    """What is noted of steps; a pinned one outlives limits and is not removed; memory forgets what is removed."""
    ram = RamTier("run", folder=tmp_path / "shm", keep_last=9)
    manager = CheckpointManager(tmp_path / "run", keep_last=2, ram=ram)
    assert latest(tmp_path / "run") is None
    manager.save(1, _state(1), metric=0.25)
    manager.pin(1)
    for step in (2, 3, 4):
        manager.save(step, _state(step), metric=float("inf"))

    history = manager.history()
    assert [(one.step, one.pinned, one.metric, one.num_bytes) for one in history] == [
        (1, True, 0.25, 256),
        (3, False, None, 256),
        (4, False, None, 256),
    ]
    for one in history:
        assert one.seconds is not None and one.unix_s is not None
        assert 0 < one.seconds < 60 and abs(one.unix_s - time.time()) < 600
    newest = latest(tmp_path / "run")
    assert newest == str(tmp_path / "run" / "step-00000004") and read_state(newest)["w"].read()[0] == 4
    with pytest.raises(CheckpointError, match="pinned"):
        manager.remove(1)
    with pytest.raises(CheckpointError, match=r"no such step[\s\S]*\[1, 3, 4\]"):
        manager.pin(2)
    manager.remove(4)
    restored = manager.restore(_state(0))
    assert restored is not None and (restored.step, restored.tier) == (3, "ram")
    manager.unpin(1)
    manager.remove(1)
    assert manager.steps() == [3]


@pytest.mark.parametrize(
    "record", [b"", b"[1]", b'{"metric": "1"}', b'{"metric": NaN, "num_bytes": {}}', None]
)
def test_a_record_that_is_none(record: bytes | None, tmp_path: Path) -> None:
    """Steps without a record, or with a damaged one, are steps all the same."""
    manager = CheckpointManager(tmp_path, save_when=BestOf(1), keep_last=1)
    manager.save(1, _state(1), metric=1.0)
    path = tmp_path / "step-00000001" / "record.json"
    path.unlink()
    if record is not None:
        path.write_bytes(record)

    assert manager.history() == [StepRecord(1)]
    manager.save(2, _state(2), metric=0.5)
    assert manager.steps() == [2]


def test_a_record_that_cannot_be_written(tmp_path: Path) -> None:
    """The step is good without it, and that is said."""
    manager = CheckpointManager(tmp_path)
    (tmp_path / "step-00000001" / "record.json").mkdir(parents=True)
    with pytest.warns(UserWarning, match="step 1 is saved, what that took is not noted"):
        manager.save(1, _state(1))
    assert manager.steps() == [1]
