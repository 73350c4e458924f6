"""torchft with replica groups of sharded ranks: one group is killed, the other goes on; values against unsharded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torchft.coordination import LighthouseServer

from tests.stacks.jobs.torchft_job import GROUPS, RANKS, STEPS, build, loss_of, optimizer_of
from tools.torchrun_job import Job, JobFailed

_KILLED_AT = 3


def _unsharded(groups_of_steps: list[int]) -> nn.Sequential:
    """The model after the batches of so many groups at each step, on one process."""
    model = build()
    optimizer = optimizer_of(model)
    for step, groups in enumerate(groups_of_steps):
        optimizer.zero_grad()
        losses = [loss_of(model, step, group, rank) for group in range(groups) for rank in range(RANKS)]
        torch.stack(losses).mean().backward()
        optimizer.step()
    return model


def test_the_other_group_goes_on(tmp_path: Path) -> None:
    """A step in which a group is killed is not committed, but repeated by the group that is left."""
    lighthouse = LighthouseServer(
        "127.0.0.1:0", GROUPS - 1, join_timeout_ms=60_000, heartbeat_timeout_ms=10_000
    )
    url = f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"
    common = ["--lighthouse", url, "--out", str(tmp_path)]
    module, die = "tests.stacks.jobs.torchft_job", ["--die-at", str(_KILLED_AT)]
    try:
        with (
            Job(module, RANKS, [*common, "--group", "0"], tmp_path / "logs0") as left,
            Job(module, RANKS, [*common, "--group", "1", *die], tmp_path / "logs1") as killed,
        ):
            with pytest.raises(JobFailed):
                killed.wait()
            left.wait()
    finally:
        lighthouse.shutdown()

    found = [json.loads((tmp_path / f"0-{rank}.json").read_text()) for rank in range(RANKS)]
    assert found[0] == found[1]
    committed = {step: groups for step, groups, done in found[0]["attempts"] if done}
    assert [step for step, _, done in found[0]["attempts"] if not done] == [_KILLED_AT]
    assert [committed[step] for step in range(STEPS)] == [GROUPS] * _KILLED_AT + [1] * (STEPS - _KILLED_AT)
    expected = _unsharded([committed[step] for step in range(STEPS)])
    for weights, param in zip(found[0]["weights"], expected.parameters(), strict=True):
        torch.testing.assert_close(torch.tensor(weights), param.detach(), rtol=1e-5, atol=1e-6)
