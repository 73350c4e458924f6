"""The demo's parts on a smaller model, and the demo itself, short: torchrun, SIGKILL, restart, export, compare."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples.corpus import Batches, read_corpus
from examples.llama import LlamaShape
from examples.train import Trainer, digests
from tests.support.distributed import cpu_mesh, run_ranks
from tools.demo import FIRST_STEP_BOUND, LATER_STEPS_BOUND
from tools.torchrun_job import losses_of
from vescale_fsdp import Rows

SMALL = LlamaShape(hidden_size=40, num_layers=2, num_heads=4, num_kv_heads=2, head_size=10, mlp_size=56)
STEPS = 12


def _trainer() -> Trainer:
    batches = Batches(read_corpus(1 << 18), seq_len=32)
    return Trainer(cpu_mesh(), batches, num_steps=STEPS, shape=SMALL, granularity=Rows(16))


def _start_digests() -> dict[str, str]:
    return digests(_trainer().model)


def _train(steps: int) -> list[float]:
    trainer = _trainer()
    return [trainer.step() for _ in range(steps)]


def _train_and_save(folder: Path, save_at: int) -> list[float]:
    trainer = _trainer()
    losses = []
    for step in range(1, STEPS + 1):
        losses.append(trainer.step())
        if step == save_at:
            trainer.save(folder)
    return losses


def _go_on(folder: Path, forget_optimizer: bool) -> list[float]:
    trainer = _trainer()
    trainer.load(folder)
    if forget_optimizer:
        trainer.optimizer.state.clear()
    return [trainer.step() for _ in range(trainer.next_step, STEPS)]


def _relative(ours: list[float], theirs: list[float]) -> list[float]:
    return [abs(a / b - 1) for a, b in zip(ours, theirs, strict=True)]


def test_start_does_not_depend_on_ranks() -> None:
    """Filled in shard by shard, the model starts with the same weights on 1, 2 and 3 ranks."""
    (alone,) = run_ranks(1, _start_digests)

    assert run_ranks(2, _start_digests) == [alone] * 2
    assert run_ranks(3, _start_digests) == [alone] * 3
    assert len(set(alone.values())) == len(alone) - 4  # the five norms are all ones


def test_loss_falls_and_is_the_same_on_all_ranks() -> None:
    """Ten steps on two ranks lower the loss; every rank reports that of the global batch."""
    first, second = run_ranks(2, _train, 10)

    assert first == second
    assert first[0] == pytest.approx(torch.log(torch.tensor(256.0)).item(), rel=0.02)
    assert first[-1] < first[0] - 0.2


def test_restart_on_more_ranks_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """Loaded on 2 ranks the losses are bit by bit those of the job that went on; on 3 within the bounds."""
    straight = run_ranks(2, _train_and_save, tmp_path / "saved", 4)[0][4:]
    same, more = (run_ranks(ranks, _go_on, tmp_path / "saved", False)[0] for ranks in (2, 3))

    assert same == straight
    assert _relative(more, straight)[0] <= FIRST_STEP_BOUND
    assert all(each <= LATER_STEPS_BOUND for each in _relative(more, straight)) and more != straight


def test_bounds_notice_a_lost_optimizer(tmp_path: Path) -> None:
    """A restart that forgets AdamW's moments leaves the bound: the check can fail."""
    straight = run_ranks(2, _train_and_save, tmp_path / "saved", 4)[0][4:]
    forgetful = run_ranks(3, _go_on, tmp_path / "saved", True)[0]

    assert any(each > LATER_STEPS_BOUND for each in _relative(forgetful, straight))


def test_half_written_progress_line_is_left_out(tmp_path: Path) -> None:
    """A progress file read while it is written gives the whole lines; a missing one gives none."""
    lines = [json.dumps({"step": step, "loss": 5.0 - step}) for step in (1, 2)]
    (tmp_path / "progress.jsonl").write_text(lines[0] + "\n" + lines[1][:9])

    assert losses_of(tmp_path) == {1: 4.0}
    assert losses_of(tmp_path / "nowhere") == {}


def test_demo_from_start_to_end(tmp_path: Path) -> None:
    """The demo with few steps: every claim holds, and everything it promises lies in its folder."""
    root = Path(__file__).parents[2]
    # Under `make test` this make is a make's child: it must not take over its options, nor say where it is.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    recipe = subprocess.run(
        ["make", "--no-print-directory", "-n", "demo"],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    _, *arguments = recipe.stdout.splitlines()[-1].split()  # what `make demo` runs, after the interpreter
    command = [sys.executable, *arguments, "--steps", "16", "--save-at", "5", "--lost", "4"]
    command += ["--out", str(tmp_path)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=900)

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("  ok: ") == 7
    for file in ("restarted/layout.svg", "restarted/final/.metadata", "hugging_face/model.safetensors"):
        assert (tmp_path / file).stat().st_size > 0
    killed = losses_of(tmp_path / "killed")
    assert 9 <= max(killed) < 16
