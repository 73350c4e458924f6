"""The demo's parts on a smaller model, and the demo itself, short: torchrun, SIGKILL, restart, export, compare."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from examples.corpus import Batches, read_corpus
from examples.llama import LlamaShape
from examples.train import Trainer, digests
from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.processes import run_command
from tools.demo import FIRST_STEP_BOUND, LATER_STEPS_BOUND
from tools.torchrun_job import losses_of
from vescale_fsdp import Rows

pytestmark = pytest.mark.part("jobs")

SMALL = LlamaShape(hidden_size=40, num_layers=2, num_heads=4, num_kv_heads=2, head_size=10, mlp_size=56)
STEPS = 12


def _trainer() -> Trainer:
    batches = Batches(read_corpus(1 << 18), seq_len=32)
    return Trainer(cpu_mesh(), batches, num_steps=STEPS, shape=SMALL, granularity=Rows(16))


def _start_digests() -> dict[str, str]:
    return digests(_trainer().model)


def _straight_on(folder: Path, save_at: int) -> tuple[dict[str, str], list[float], list[float]]:
    """Digests at the start, the losses of all steps, and those of a restart from the step saved."""
    trainer = _trainer()
    start, losses = digests(trainer.model), []
    for step in range(1, STEPS + 1):
        losses.append(trainer.step())
        if step == save_at:
            trainer.save(folder)
    return start, losses, _restarted(folder)


def _restarted(folder: Path, *, forget_optimizer: bool = False) -> list[float]:
    trainer = _trainer()
    trainer.load(folder)
    if forget_optimizer:
        trainer.optimizer.state.clear()
    return [trainer.step() for _ in range(trainer.next_step, STEPS)]


def _on_more_ranks(folder: Path) -> tuple[dict[str, str], list[float], list[float]]:
    """Digests at the start, the losses of a restart, and of one that forgets the optimizer."""
    return _start_digests(), _restarted(folder), _restarted(folder, forget_optimizer=True)


class Runs(NamedTuple):
    """What one, two and three ranks gave: digests at the start, and losses."""

    starts: list[dict[str, str]]  # by rank, of all three runs
    straight: list[list[float]]  # by rank, of two
    same: list[float]  # a restart at step 5 on two ranks
    more: list[float]  # on three
    forgetful: list[float]  # on three, without AdamW's moments


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("demo") / "saved"
    alone = run_ranks(1, _start_digests)
    starts, straight, restarted = zip(*run_ranks(2, _straight_on, folder, 4), strict=True)
    three, more, forgetful = zip(*run_ranks(3, _on_more_ranks, folder), strict=True)
    return Runs([*alone, *starts, *three], [*straight], restarted[0], more[0], forgetful[0])


def _relative(ours: list[float], theirs: list[float]) -> list[float]:
    return [abs(a / b - 1) for a, b in zip(ours, theirs, strict=True)]


def test_start_does_not_depend_on_ranks(runs: Runs) -> None:
    """Filled in shard by shard, the model starts with the same weights on 1, 2 and 3 ranks."""
    alone, *others = runs.starts

    assert others == [alone] * 5
    assert len(set(alone.values())) == len(alone) - 4  # the five norms are all ones


def test_loss_falls_and_is_the_same_on_all_ranks(runs: Runs) -> None:
    """Steps on two ranks lower the loss; every rank reports that of the global batch."""
    first, second = runs.straight

    assert first == second
    assert first[0] == pytest.approx(torch.log(torch.tensor(256.0)).item(), rel=0.02)
    assert first[-1] < first[0] - 0.2


def test_restart_on_more_ranks_goes_on_as_if_nothing_had_happened(runs: Runs) -> None:
    """Loaded on 2 ranks the losses are bit by bit those of the job that went on; on 3 within the bounds."""
    straight = runs.straight[0][4:]

    assert runs.same == straight
    assert _relative(runs.more, straight)[0] <= FIRST_STEP_BOUND
    assert all(each <= LATER_STEPS_BOUND for each in _relative(runs.more, straight)) and runs.more != straight


def test_bounds_notice_a_lost_optimizer(runs: Runs) -> None:
    """A restart that forgets AdamW's moments leaves the bound: the check can fail."""
    assert any(each > LATER_STEPS_BOUND for each in _relative(runs.forgetful, runs.straight[0][4:]))


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
    recipe = run_command(
        ["make", "--no-print-directory", "-n", "demo"], cwd=root, env=environment, check=True
    )
    _, *arguments = recipe.stdout.splitlines()[-1].split()  # what `make demo` runs, after the interpreter
    command = [sys.executable, *arguments, "--steps", "16", "--save-at", "5", "--lost", "4"]
    command += ["--out", str(tmp_path)]
    done = run_command(command, cwd=root, timeout_s=900)

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("  ok: ") == 7
    for file in ("restarted/layout.svg", "restarted/final/.metadata", "hugging_face/model.safetensors"):
        assert (tmp_path / file).stat().st_size > 0
    killed = losses_of(tmp_path / "killed")
    assert 9 <= max(killed) < 16
