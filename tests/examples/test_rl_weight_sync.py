"""The example of two jobs that share weights: the sampler's letters get better as the trainers learn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from examples.rl_weight_sync import Options, start
from tests.support.distributed import run_ranks


def job(options: Options, folder: str) -> list[float]:
    """This process's part of the example, in the world of its own job."""
    rank = dist.get_rank()
    dist.barrier()  # all have come, so none finds the others gone
    dist.destroy_process_group()
    return start(rank, options, folder)


@pytest.mark.part("jobs")
def test_the_sampler_learns_what_the_trainers_do(tmp_path: Path) -> None:
    """Both jobs see the same rewards, which grow: samples are drawn from weights that are new in every step."""
    options = Options(f"file://{tmp_path}/meet", steps=30)

    *trainers, sampler = run_ranks(3, job, replace(options, batch=64), str(tmp_path), timeout_s=120)

    assert len(sampler) == 30 and trainers[0] == trainers[1]
    assert sampler == pytest.approx(trainers[0], rel=0, abs=1e-6)
    assert sampler[0] < 0.3 < 0.6 < sampler[-1]
