"""The example that logs to TensorBoard and W&B: every step has every number, and saves appear when they commit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.torchrun_job import Job

STEPS = 30
ALWAYS = {"train/loss", "train/tokens_per_second", "layout/padding"}
OF_SAVES = {
    "checkpoint/step",
    "checkpoint/bytes",
    "checkpoint/save_seconds",
    "checkpoint/stall_seconds",
}


def _run(out: Path, to: str) -> None:
    arguments = ["--out", str(out), "--to", to, "--steps", str(STEPS)]
    Job("examples.watched", 2, arguments, out / "job", environment={"WANDB_MODE": "offline"}).wait()


def test_tensorboard_shows_the_run(tmp_path: Path) -> None:
    """The event file has a point per step for the loss, and the steps that were committed."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    _run(tmp_path, "tensorboard")
    events = accumulators.EventAccumulator(str(tmp_path / "logs"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == ALWAYS | OF_SAVES
    losses = [event.value for event in events.Scalars("train/loss")]
    assert len(losses) == STEPS and losses[-1] < losses[0] - 1
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, STEPS + 1))
    saved = {event.value for event in events.Scalars("checkpoint/step")}
    assert {10.0} <= saved <= {10.0, 20.0, 30.0}
    assert len({event.value for event in events.Scalars("layout/padding")}) == 1


def test_wandb_gets_the_run_offline(tmp_path: Path) -> None:
    """The offline run's file has every number of every step."""
    pytest.importorskip("wandb")
    _run(tmp_path, "wandb")
    (file,) = (tmp_path / "logs").rglob("run-*.wandb")
    data = file.read_bytes()  # protocol buffers: names are plain bytes in each step's record
    counts = {name: data.count(name.encode()) for name in ALWAYS | OF_SAVES}
    assert min(counts[name] for name in ALWAYS) >= STEPS
    assert min(counts[name] for name in OF_SAVES) >= STEPS - 20  # from the first commit on
