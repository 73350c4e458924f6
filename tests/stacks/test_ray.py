"""Ray Train: a node is killed, fewer workers continue, a second run adds one; losses and weights of one process."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest
import torch
from torch.nn import functional as F

from examples.corpus import Batches, read_corpus
from examples.llama import Llama
from tests.support.processes import run_command, wait_until
from tools.torchrun_job import ROOT
from vescale_fsdp.checkpoint import CheckpointManager

ray = pytest.importorskip("ray")

from examples.stacks.train_ray import SAVE_EVERY, SHAPE  # noqa: E402

KILLED_AFTER, STEPS, MORE_STEPS = 12, 20, 25


def fit(out: Path, *options: str) -> dict[str, Any]:
    """Run the example's command; return its result, after all processes of Ray have ended."""
    marked = {"VESCALE_RAY_TEST": uuid4().hex}
    command = [sys.executable, "-m", "examples.stacks.train_ray", "--out", str(out), *options]
    run_command(command, timeout_s=900, env={**os.environ, **marked}, check=True, cwd=ROOT)
    wait_until(lambda: not running(marked), "all processes of Ray to end")
    result: dict[str, Any] = json.loads((out / "result.json").read_text())
    return result


def running(marked: dict[str, str]) -> list[int]:
    """Processes whose environment has a mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if marked.items() <= process.environ().items():
                found.append(process.pid)
        except psutil.Error:  # it has ended
            continue
    return found


class Unsharded:
    """The same training in one process, in plain torch: mean losses, and the weights after each checkpoint."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        model = Llama(SHAPE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        batches = Batches(read_corpus())
        self.losses: dict[int, float] = {}
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        for step in range(1, MORE_STEPS + 1):
            inputs, targets = batches.of_rank(step, 0, 1)
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            self.losses[step] = loss.item()
            if step % SAVE_EVERY == 0:
                self.weights[step] = {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.timeout(2000)
def test_fewer_workers_continue(tmp_path: Path) -> None:
    """Ray has the steps, and keeps the newest two; each loads on one process."""
    plain = Unsharded()
    results = {
        STEPS: fit(tmp_path, "--steps", str(STEPS), "--kill-at", str(KILLED_AFTER)),
        MORE_STEPS: fit(tmp_path, "--steps", str(MORE_STEPS)),
    }

    lines = [json.loads(line) for line in (tmp_path / "progress.jsonl").read_text().splitlines()]
    first, second = KILLED_AFTER // SAVE_EVERY * SAVE_EVERY + 1, STEPS + 1
    assert [(line["step"], line["workers"]) for line in lines] == [
        *((step, 3) for step in range(1, KILLED_AFTER + 1)),
        *((step, 2) for step in range(first, second)),
        *((step, 3) for step in range(second, MORE_STEPS + 1)),
    ]
    assert [line["loss"] for line in lines] == pytest.approx(
        [plain.losses[line["step"]] for line in lines], rel=1e-5
    )
    assert plain.losses[MORE_STEPS] < plain.losses[1] - 1
    of_step = {line["step"]: line for line in lines}  # the last of each
    for step, result in results.items():
        kept = [step - SAVE_EVERY, step]
        assert result == {"last": of_step[step], "kept": [of_step[each] for each in kept]}
    manager = CheckpointManager(tmp_path / "llama" / "checkpoints")
    # Ray may not have read the report of a step that was saved just before the node was lost; then it stays.
    assert set(manager.steps()) - {first - 1} == set(kept)
    for step in kept:
        model = Llama(SHAPE)
        manager.restore({"model": model}, step=step, read_only=True)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, plain.weights[step][name], rtol=1e-4, atol=1e-5)
