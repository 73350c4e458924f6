"""When steps are saved and which stay: policies, agreement between ranks, signals, records, pins."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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
    RetentionPolicy,
    SavePolicy,
    latest,
    read_state,
)
from vescale_fsdp.checkpoint.ranks.coordinator import SoloCoordinator
from vescale_fsdp.checkpoint.steps.save_policy import AllOf, AnyOf, SaveContext, check_policy
from vescale_fsdp.checkpoint.steps.save_schedule import SaveSchedule
from vescale_fsdp.errors import ArgumentError, CheckpointError


def _state(step: int) -> dict[str, Any]:
    return {"w": torch.full((64,), float(step))}


class _Asked(SavePolicy):
    """Answers from a list, step by step, and notes what it is asked."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.steps = answers, list[int]()

    def should_save(self, context: SaveContext) -> bool:
        self.steps.append(context.step)
        answer = self.answers[(context.step - 1) % len(self.answers)]
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]


class _SameAsked(_Asked):
    """The same, promised to be the same on all ranks."""

    same_on_all_ranks = True

    def should_save(self, context: SaveContext) -> bool:
        return super().should_save(context)


class _Evenings(EverySteps):
    """A policy of the package with another answer, which makes no promise of its own."""

    def should_save(self, context: SaveContext) -> bool:
        return not super().should_save(context)


def test_policies_are_combined() -> None:
    """By | and &, of any classes; what is none is refused, and so are limits that mean nothing."""
    a, b, c = EverySteps(5), _Asked(True), OnSignal()
    assert (a | b | c).policies == (a, b, c) == AnyOf(a, b, c).policies
    assert (a & b & c).policies == (a, b, c) == AllOf(a, b, c).policies
    assert (a | b & c).policies == (a, AllOf(b, c)) and ((a | b) & c).policies == (AnyOf(a, b), c)
    assert {EverySteps(5) | OnSignal()} == {EverySteps(5) | OnSignal()}
    assert (_Asked.same_on_all_ranks, _SameAsked.same_on_all_ranks) == (False, True)
    assert (EverySteps.same_on_all_ranks, _Evenings.same_on_all_ranks) == (True, False)
    refused: list[Any] = ["EverySteps", 5, [a], SavePolicy]
    for wrong in refused:
        for take in (AnyOf, AllOf, check_policy, lambda wrong: a | wrong, lambda wrong: wrong & a):
            with pytest.raises(TypeError):
                take(wrong)
    for make in (
        lambda: EverySteps(0),
        lambda: EveryMinutes(0),
        lambda: BestOf(0),
        lambda: BestOf(1, "least"),  # type: ignore[arg-type]
        lambda: BeforeDeadline(float("inf")),
        lambda: OnSignal(("SIGNONE",)),
        lambda: OnSignal(()),
        AnyOf,
        AllOf,
        lambda: OnSignal().should_save(SaveContext(1)),  # hidden in a policy of one's own: nobody listens
    ):
        with pytest.raises(ArgumentError):
            make()


def test_a_policy_of_ones_own(tmp_path: Path) -> None:
    """It saves, alone and combined, and is asked once per step; a subclass of any policy answers for itself."""
    own = _Asked(False, True, False)
    with CheckpointManager(tmp_path / "own", save_policy=own) as manager:
        for step in range(1, 7):
            if manager.should_save(step):
                manager.save(step, _state(step))
        assert (manager.steps(), own.steps) == ([2, 5], [1, 2, 3, 4, 5, 6])
    twice = _Asked(True, False)
    with CheckpointManager(
        tmp_path / "mixed", save_policy=(EverySteps(3) & twice) | (_Evenings(2) & twice)
    ) as manager:
        for step in range(1, 7):
            manager.save(step, _state(step))
        assert (manager.steps(), twice.steps) == ([1, 3, 5], [1, 2, 3, 4, 5, 6])
    wrong: list[dict[str, Any]] = [{"save_policy": 5}, {"retention": BestOf(3)}, {"retention": "2"}]
    for arguments in wrong:
        with pytest.raises(TypeError):
            CheckpointManager(tmp_path / "wrong", **arguments)
    for rule in (3, EverySteps(3)):
        with pytest.raises(TypeError):
            RetentionPolicy(keep_best=rule)  # type: ignore[arg-type]
    assert not (tmp_path / "wrong").exists()


def test_what_a_policy_knows(tmp_path: Path) -> None:
    """Step, metric, the last save or restore, and metrics of the steps on disk but of those that are left behind."""
    seen: list[SaveContext] = []

    class Seeing(SavePolicy):
        def should_save(self, context: SaveContext) -> bool:
            seen.append(context)
            return context.step in (10, 20)

    manager = CheckpointManager(tmp_path, save_policy=Seeing())
    for step, metric in ((10, 5.0), (11, 0.5), (20, 0.1)):
        manager.save(step, _state(step), metric=metric)
    manager.restore(_state(0), step=10)
    manager.save(12, _state(12))
    manager.close()
    known = [(context.last_step, sorted(context.known_metrics), context.metric) for context in seen]
    assert known == [(None, [], 5.0), (10, [5.0], 0.5), (10, [5.0], 0.1), (10, [5.0], None)]
    assert seen[1].last_save_unix_s <= seen[1].unix_s and seen[0].last_save_unix_s < seen[1].last_save_unix_s


def _decided(
    policy: SavePolicy, clock: Iterator[float], metrics: list[float | None]
) -> list[tuple[bool, bool]]:
    """Whether each of steps 1, 2, .. is saved, and finally, by one process alone."""
    now_s = [next(clock)]
    schedule = SaveSchedule(policy, SoloCoordinator(), lambda _: [0.5], clock=lambda: now_s[0])
    found = []
    for step, metric in enumerate(metrics, 1):
        now_s[0] = next(clock)
        made = schedule.decide(step, metric, force=False)
        if made.is_due:
            schedule.saved(made)
        found.append((made.is_due, made.is_final))
    schedule.close()
    return found


def test_each_policy_saves_at_its_steps() -> None:
    """Steps by number; minutes since the last save; before a deadline once; metrics beside those of older steps."""
    no: list[float | None] = [None] * 6
    minutes = [60.0 * minute for minute in range(7)]

    def due(found: list[tuple[bool, bool]]) -> list[int]:
        return [step for step, (is_due, _) in enumerate(found, 1) if is_due]

    assert due(_decided(EverySteps(2), iter(minutes), no)) == [2, 4, 6]
    assert due(_decided(EveryMinutes(2), iter(minutes), no)) == [2, 4, 6]
    assert due(_decided(EveryMinutes(2) | EverySteps(3), iter(minutes), no)) == [2, 3, 5, 6]
    assert due(_decided(EveryMinutes(2) & EverySteps(3), iter(minutes), no)) == [3, 6]
    final = _decided(BeforeDeadline(360, margin_s=120), iter(minutes), no)
    assert final == [(False, False)] * 3 + [(True, True)] + [(False, False)] * 2
    final = _decided(BeforeDeadline(360, margin_s=120) & EverySteps(5) | EverySteps(6), iter(minutes), no)
    assert final == [(False, False)] * 4 + [(True, True), (True, False)]
    nan = float("nan")
    metrics = [0.7, 0.6, nan, None, 0.4, 0.45]
    assert due(_decided(BestOf(2), iter(minutes), metrics)) == [1, 2, 5, 6]  # 0.5 is of an older step
    assert due(_decided(BestOf(1, "max"), iter(minutes), metrics)) == [1]
    assert due(_decided(BestOf(1), iter(minutes), [0.5, nan, -float("inf"), None, None, None])) == []


class _Two(SoloCoordinator):
    """One rank of two that do the same; notes for which step's numbers it waits, while at which."""

    world_size = 2

    def __init__(self) -> None:
        super().__init__()
        self.at, self.waits = 0, list[tuple[int, int]]()

    def begin_largest(self, numbers: Sequence[int]) -> Callable[[], list[int]]:
        begun_at = self.at

        def arrive() -> list[int]:
            self.waits.append((begun_at, self.at))
            return list(numbers)

        return arrive


@pytest.mark.parametrize(
    "policy, waited",
    [
        (EverySteps(3) | OnSignal(), [1, 3, 6]),
        (EverySteps(3) & EveryMinutes(9), [1, 3, 6]),
        (EveryMinutes(9) & OnSignal(), [1]),
        (_SameAsked(False, False, False, True, False, False), [1, 4]),
        (_SameAsked(True) & EverySteps(5), [1, 5]),
        (_Asked(False), [1, 2, 3, 4, 5, 6]),
    ],
)
def test_ranks_wait_only_where_they_must(policy: SavePolicy, waited: list[int]) -> None:
    """At the first call, at steps that may be saved, and always for answers that count for one step alone."""
    ranks = _Two()
    schedule = SaveSchedule(policy, ranks, lambda _: [])
    for step in range(1, 7):
        ranks.at = step
        if schedule.decide(step, None, force=False).is_due:
            schedule.saved(schedule.decide(step, None, force=False))
    schedule.close()
    assert [at for begun_at, at in ranks.waits if begun_at == at] == waited


def _on_ranks(root: Path) -> dict[str, Any]:
    """Answers that only one rank gives, and calls that are not alike, on two ranks."""
    rank = dist.get_rank()
    found: dict[str, Any] = {}
    heard: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    manager = CheckpointManager(root / "signal", save_policy=EverySteps(100) | OnSignal(), asynchronous=True)
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

    minutes = 1e-9 if rank == 0 else 1e6  # less than between two calls
    manager = CheckpointManager(root / "minutes", save_policy=EveryMinutes(minutes))
    for step in range(1, 4):
        manager.save(step, _state(step))
    found["minutes"] = manager.steps()

    best = CheckpointManager(root / "best", retention=1, save_policy=EverySteps(4) | BestOf(2))
    for step, metric in enumerate([5.0, 3.0, 4.0, 9.0, 1.0, 2.0, 8.0, 7.0, 7.5], 1):
        best.save(step, _state(step), metric=metric)
    found["best"] = [(one.step, one.metric) for one in best.history()]
    again = CheckpointManager(root / "best", retention=1, save_policy=BestOf(2))  # a restart knows them too
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
        manager = CheckpointManager(root / f"unlike{number}", save_policy=EverySteps(4))
        begun_s = time.monotonic()
        manager.save(1, _state(1))
        try:
            for step in arguments:
                manager.save(step, _state(step), **extra)
            errors.append("returned")
        except (CheckpointError, ValueError) as error:
            errors.append(str(error))
        errors[-1] += "" if time.monotonic() - begun_s < 60 else " late"
    found["errors"] = errors
    return found


def test_what_one_rank_hears_all_act_on_at_the_same_step(tmp_path: Path) -> None:
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
        assert re.search(r"\b4 .*\[0\].*\b5 .*\[1\]", steps_differ)
        assert "`force`" in force_differs and "`metric`" in metric_differs
        assert "all_reduce" in metric_differs and "all_reduce" not in force_differs
        assert not any(said.endswith(" late") for said in found["errors"])
    assert (first["heard"], second["heard"]) == (1, 2)  # chained while we listened, alone afterwards
    assert re.search(r"-1 .*\[1\].*\b3 .*\[0\]", first["errors"][3]) and "-1" in second["errors"][3]
    assert "[1]" not in second["errors"][3]  # its own error, not that of ranks that differ
    assert not (tmp_path / "unlike0" / "step-00000004").exists()


def _policies_on_ranks(root: Path) -> dict[str, Any]:
    """Policies of one's own on two ranks: which steps are saved, and what each rank raises."""
    rank = dist.get_rank()

    def run(name: str, policy: SavePolicy, *, steps: int = 6) -> Any:
        step = 0
        try:
            with CheckpointManager(root / name, save_policy=policy) as manager:
                for step in range(1, steps + 1):
                    manager.save(step, _state(step))
        except (CheckpointError, TypeError, ValueError) as error:
            return type(error), str(error), step
        return manager.steps()

    mine = _Asked(*(number % 2 == rank for number in range(6)))
    only_one = _Asked(False, False, rank == 1, False, rank == 0, False)
    return {
        "any": run("any", only_one),
        "asked": only_one.steps,
        "all": run("all", mine & EverySteps(3)),  # any rank's answer counts before & does
        "never": run("never", _Asked(rank == 0) & _Asked(False)),
        "both": run("both", _Asked(rank == 0) & _Asked(rank == 1), steps=2),
        "alike": run("alike", _SameAsked(False, True, False)),
        "unlike": run("unlike", _SameAsked(False, False, rank == 1)),
        "raises": run("raises", _Asked(False, ValueError("own") if rank else False)),
        "raises behind": run("raises behind", _SameAsked(False, ValueError("own") if rank else False)),
        "no bool": run("no bool", _Asked(False, 1 if rank else False)),
        "no bool behind": run("no bool behind", _SameAsked(False, None if rank else False)),
        "shapes": run("shapes", _Asked(True) if rank else _Asked(True) | EverySteps(2)),
    }


def test_ranks_agree_on_policies_of_ones_own(tmp_path: Path) -> None:
    """Any rank's True counts, at the step it was given for; errors and answers that are no bool are raised on all."""
    first, second = run_ranks(2, _policies_on_ranks, tmp_path)
    for found in (first, second):
        assert (found["any"], found["asked"]) == ([3, 5], [1, 2, 3, 4, 5, 6])
        assert (found["all"], found["never"], found["both"]) == ([3, 6], [], [1, 2])
        assert found["alike"] == [2, 5]
        assert found["unlike"][0] is CheckpointError and re.search(
            r"\bTrue .*\[1\].*\bFalse .*\[0\]", found["unlike"][1]
        )
        assert found["no bool"][::2] == (ArgumentError, 2)
        assert all(part in found["no bool"][1] for part in ("expected:", "got:", "where:", "what to do:"))
        assert found["no bool behind"][0] is ArgumentError
        assert found["shapes"][0] is CheckpointError
    assert first["raises"][::2] == (CheckpointError, 2) and "ValueError: own" in first["raises"][1]
    assert second["raises"][::2] == (ValueError, 2) == second["raises behind"][::2]
    assert first["raises behind"][::2] == (CheckpointError, 3)  # it did not wait at step 2
    assert not list(tmp_path.glob("*aises*/step-*")) and not list(tmp_path.glob("no bool*/step-*"))


def test_an_interval_asks_for_nothing_else(tmp_path: Path) -> None:
    """A signal that nobody asked for ends the process as ever; a fork of ours is none of ours."""
    CheckpointManager(tmp_path, save_policy=EverySteps(3))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    manager = CheckpointManager(tmp_path, save_policy=OnSignal(("SIGTERM",)))
    child = os.fork()
    if not child:
        os.kill(os.getpid(), signal.SIGTERM)  # delivered before it returns
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


def test_only_signals_need_the_main_thread(tmp_path: Path) -> None:
    """Ray Train calls the training function in a thread, where a manager without `OnSignal` saves and restores."""

    def in_thread() -> list[int]:
        with CheckpointManager(tmp_path / "run") as manager:
            manager.save(1, _state(1))
            restored = manager.restore(_state(0))
            assert restored is not None
            return [restored.step, *manager.steps()]

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(in_thread).result(timeout=60) == [1, 1]
        refused = threads.submit(CheckpointManager, tmp_path / "run", save_policy=OnSignal())
        with pytest.raises(ArgumentError):
            refused.result(timeout=60)


def test_records_pins_and_removal(tmp_path: Path) -> None:
    """What is noted of steps; a pinned one outlives limits and is not removed; memory forgets what is removed."""
    ram = RamTier("run", folder=tmp_path / "shm", keep_last=9)
    manager = CheckpointManager(tmp_path / "run", retention=2, ram=ram)
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
    with pytest.raises(CheckpointError, check=lambda error: error.got == 1):
        manager.remove(1)
    with pytest.raises(CheckpointError, check=lambda error: error.got == 2 and "[1, 3, 4]" in error.expected):
        manager.pin(2)
    manager.remove(4)
    restored = manager.restore(_state(0))
    assert restored is not None and (restored.step, restored.tier) == (3, "ram")
    manager.unpin(1)
    manager.remove(1)
    assert manager.steps() == [3]
