"""Lightning and Fabric under their strategies of ours: losses, resumes, other ranks against unsharded, callbacks."""

from __future__ import annotations

import json
import os
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from examples.llama import Llama
from examples.stacks.train_lightning import MICRO_BATCHES, SHAPE, MicroBatches
from tests.support.command import vescale_convert
from tools.torchrun_job import Job
from vescale_fsdp.checkpoint import read_state


def run(out: Path, ranks: int, *options: str) -> list[dict[str, Any]]:
    """What each rank of `lightning_job` found."""
    Job(
        "tests.stacks.jobs.lightning_job", ranks, ["--out", str(out), *options], out / "logs", timeout_s=600
    ).wait()
    name = "resumed" if options else "compared"
    return [json.loads((out / f"{name}-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs of this file."""
    return tmp_path_factory.mktemp("lightning")


@pytest.fixture(scope="module")
def compared(out: Path) -> list[dict[str, Any]]:
    """Both stacks on two ranks."""
    return run(out, 2)


def test_losses_are_stock_fsdp2s(compared: list[dict[str, Any]]) -> None:
    """Fifty steps of two micro-batches, values clipped, a resume in the middle: the same bits on both ranks."""
    for found in compared:
        assert len(found["stock"]) == 100 and found["stock"][-1] < 4 < found["stock"][0]
        assert found["ours"] == found["stock"]


def test_wrongly_divided_gradients_would_be_seen(compared: list[dict[str, Any]]) -> None:
    """The control: gradients left divided by the number of ranks give other losses within a few steps."""
    for found in compared:
        assert found["control"][:2] == found["stock"][:2]
        assert found["control"][2:50] != found["stock"][2:50]
        assert found["fabric_control"][:2] == found["stock_fabric"][:2]
        assert found["fabric_control"][2:] != found["stock_fabric"][2:50]


def test_lightnings_own_single_file_is_gone_on_from(compared: list[dict[str, Any]]) -> None:
    """What stock FSDP2 saved in one file resumes under ours, to the last bit."""
    for found in compared:
        assert found["single_file"] == found["stock"][50:]


def test_a_save_takes_no_step(compared: list[dict[str, Any]]) -> None:
    """Optimizers that are saved before their first step have no state afterwards; Adam counts the run's steps."""
    for found in compared:
        assert found["steps_of_adam"] == [25.0]
        assert found["fresh"] == [[], [1.0]]
        assert found["fresh_fabric"] == [[], []]


def test_state_of_callbacks(compared: list[dict[str, Any]]) -> None:
    """All ranks get back what rank 0 had, also where it cannot be plain JSON."""
    assert [found["remembered"] for found in compared] == [["rank 0", 1.5]] * 2


def test_fabric(compared: list[dict[str, Any]]) -> None:
    """Fabric's own loop, values clipped, a resume in the middle: the same bits on both ranks."""
    for found in compared:
        assert len(found["stock_fabric"]) == 100 and found["stock_fabric"][2:4] != found["loose_fabric"][2:]
        assert found["our_fabric"] == found["stock_fabric"]
        assert found["reduced"] == [False, True]  # no_backward_sync does what it says


@pytest.fixture(scope="module")
def unsharded() -> list[float]:
    """Losses of the same micro-batches on one process, in plain torch."""
    torch.manual_seed(0)
    model = Llama(SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    with patch.dict(os.environ, RANK="0", WORLD_SIZE="1"):
        for inputs, targets in islice(MicroBatches(), 100):
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            (loss / MICRO_BATCHES).backward()
            losses.append(loss.item())
            if len(losses) % MICRO_BATCHES == 0:
                nn.utils.clip_grad_value_(model.parameters(), 1e-3)
                optimizer.step()
                optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("ranks", [1, 3])
def test_other_number_of_ranks(
    ranks: int, out: Path, compared: list[dict[str, Any]], unsharded: list[float]
) -> None:
    """What two ranks saved goes on with one and with three: the same global batches, so the unsharded losses."""
    resumed = run(out, ranks, "--resume")
    for stack in ("ours", "our_fabric"):
        before, after = (
            [sum(losses) / len(found) for losses in zip(*(each[stack] for each in found), strict=True)]
            for found in (compared, resumed)
        )
        assert len(after) == 50
        assert before == pytest.approx(unsharded, rel=1e-4)
        assert after == pytest.approx(unsharded[50:], rel=1e-4)


def test_checkpoints_open_anywhere(out: Path, compared: list[dict[str, Any]]) -> None:
    """`vescale-convert` makes of a save what stock FSDP2 holds then; the trainer's counters are plain values."""
    stock = torch.load(out / "single.ckpt", weights_only=False)["state_dict"]
    for name, key, expected in (
        ("half.ckpt", "state_dict", stock),
        ("fabric", "model", torch.load(out / "stock_fabric.pt")),
    ):
        shown = vescale_convert("inspect", str(out / name))
        assert shown.exit_code == 0 and "lm_head.weight" in shown.output and "native" in shown.output
        done = vescale_convert("to-torch", str(out / name), str(out / f"{name}.pt"), "--trust-pickle")
        assert done.exit_code == 0, done.output
        model = torch.load(out / f"{name}.pt", weights_only=False)[key]
        assert len(expected) > 10 and model.keys() == expected.keys()
        assert all(torch.equal(model[name], expected[name]) for name in expected)
    tree = read_state(out / "half.ckpt").tree()
    assert tree["global_step"] == 25 and tree["loops"]["fit_loop"]
    assert set(tree["pickled"]) == {"callbacks"}
