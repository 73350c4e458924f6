"""TRL's GRPO under `as_fsdp2`: stock FSDP2's losses, and an engine that gets the weights which TRL sends to vLLM."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from trl.generation.vllm_generation import VLLMGeneration

from examples.stacks.options import Options
from examples.stacks.train_trl_grpo import Feed, train
from tests.stacks.jobs.example_ranks import LARGEST, run_on_ranks

STEPS = 4
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


class Checked(Feed):
    """Compares the engine's weights of each step with what TRL sends to vLLM.

    Attributes:
        differing: names of tensors whose bits differ.
    """

    def __init__(self) -> None:
        super().__init__()
        self.differing: list[str] = []
        self.sums: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        super().on_step_end(args, state, control, **more)
        # TRL's own code, without vLLM: it gathers one parameter after another, on all ranks.
        reader = VLLMGeneration.__new__(VLLMGeneration)
        reader.accelerator = SimpleNamespace(device=torch.device("cpu"))
        sent = dict(reader._iter_fsdp2_params(more["model"]))
        if self.engine is not None:
            assert sent.keys() == self.engine.keys()
            self.differing += [
                name for name, value in sent.items() if not torch.equal(value, self.engine[name])
            ]
            self.sums.append(sum(float(value.double().sum()) for value in self.engine.values()))


def _trained(out: Path, runtime: str) -> tuple[Any, ...]:
    feed = Checked() if runtime == "vescale" else None
    torch.manual_seed(0)
    history = train(Options(out, runtime, steps=STEPS, norm_type=LARGEST, max_norm=0.005), feed)
    found = () if feed is None else (feed.versions, feed.differing, feed.sums)
    dist.barrier()
    return history, *found


def test_grpo_trains_and_feeds_an_engine(tmp_path: Path) -> None:
    """Losses, rewards and norms are stock FSDP2's; the engine has the weights of every step, which change."""
    (stock,), _ = run_on_ranks(2, _trained, tmp_path, "fsdp2")
    (history, versions, _, _), (_, _, differing, sums) = run_on_ranks(2, _trained, tmp_path, "vescale")

    assert history == stock and len(history) == STEPS
    assert len({reward for _, reward, _ in history}) > 1
    assert versions == list(range(STEPS + 1)) and differing == [] and len(set(sums)) == STEPS + 1
