"""Stock FSDP2 training that is saved and resumed through torch's DCP, with the engine's writer, reader and planners.

Everything is float64: sums over other ranks then differ by about 1e-16 of their size, so that losses of a resumed
run must agree to 1e-12, and a state that is lost or stale by one step cannot hide in rounding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from tests.support import models
from tests.support.checkpoint_states import assert_equal, plain
from tests.support.distributed import cpu_mesh, run_ranks
from vescale_fsdp.checkpoint.dcp import RaggedLoadPlanner, RaggedReader, RaggedSavePlanner, RaggedWriter
from vescale_fsdp.conversion import convert, open_source

_SAVED_AT, _LAST = 3, 7
_FORMS = {"nested": False, "flat": True, "behind": True}  # saves, and whether optimizer state is flattened


class Trainer:
    """A model under FSDP2, AdamW, a schedule of its rate, and a count of steps."""

    def __init__(self, seed: int) -> None:
        self.model: nn.Module = models.build(seed).double()
        for module in (*self.model.blocks, self.model):
            fully_shard(module, mesh=cpu_mesh())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.step = 0

    def state(self, flat: bool) -> dict[str, Any]:
        """All that a resumed run needs, as torch's own functions give it."""
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        model, optim = get_state_dict(self.model, self.optimizer, options=options)
        return {"model": model, "optim": optim, "scheduler": self.scheduler, "step": self.step}

    def resume(self, path: Path, flat: bool, leave_out: str | None) -> dict[str, Any]:
        """Load what was saved, but for one part of it; returns the state as loaded."""
        state = self.state(flat)
        given = {key: value for key, value in state.items() if key != leave_out}
        dcp.load(given, storage_reader=RaggedReader(path), planner=RaggedLoadPlanner())
        self.step = given.get("step", _SAVED_AT)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
            options=StateDictOptions(flatten_optimizer_state_dict=flat),
        )
        return state

    def train(self, last: int) -> list[float]:
        """Losses up to a step, over global batches that do not depend on the world size."""
        losses = []
        for step in range(self.step, last):
            rows = torch.cat([models.batch(step, part, rows=2) for part in range(6)]).double()
            loss = self.model(rows.chunk(dist.get_world_size())[dist.get_rank()]).pow(2).mean()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(models.mean_over_ranks(loss))
        self.step = last
        return losses


def _values(state: dict[str, Any]) -> dict[str, Any]:
    """A copy of everything, gathered."""
    return {**plain(state), "scheduler": state["scheduler"].state_dict()}


def _engine(path: Path) -> dict[str, Any]:
    return {"storage_writer": RaggedWriter(path), "planner": RaggedSavePlanner()}


def _save(folder: Path) -> tuple[dict[str, dict[str, Any]], list[float]]:
    """Train, save in three ways, train on; the values that were saved, and the losses from there on."""
    trainer = Trainer(seed=1)
    trainer.train(_SAVED_AT)
    expected = {name: _values(trainer.state(flat)) for name, flat in _FORMS.items()}
    for name in ("nested", "flat"):
        dcp.save(trainer.state(_FORMS[name]), **_engine(folder / name))
    group = dist.new_group(backend="gloo")
    saving = dcp.async_save(trainer.state(True), process_group=group, **_engine(folder / "behind"))
    losses = trainer.train(_LAST)
    saving.result(60)
    return expected, losses


def _resume(
    folder: Path, names: list[str], leave_out: str | None = None
) -> dict[str, tuple[dict[str, Any], list[float]]]:
    """By name of a save: the values as loaded, and the losses from there on."""
    found = {}
    for name in names:
        trainer = Trainer(seed=2)
        state = trainer.resume(folder / name, _FORMS[name], leave_out)
        found[name] = _values({**state, "step": trainer.step}), trainer.train(_LAST)
    return found


@pytest.mark.filterwarnings("ignore")  # DCP's async path warns of its own defaults
@pytest.mark.part("jobs")
def test_training_goes_on_with_other_ranks(tmp_path: Path) -> None:
    """Saved by 2 ranks, resumed by 2, 3 and 1: every value is the saved one, every loss that of the run left alone."""
    expected, losses = run_ranks(2, _save, tmp_path)[0]

    for world in (2, 3, 1):
        for name, (found, resumed) in run_ranks(world, _resume, tmp_path, list(_FORMS))[0].items():
            assert assert_equal(expected[name], found, name) > 1000
            torch.testing.assert_close(resumed, losses, rtol=1e-12, atol=0.0)
            assert resumed == losses or world != 2
    # The control: without the moments, or with a rate out of date, a run takes another way from the second step on.
    for part in ("optim", "scheduler"):
        _, resumed = run_ranks(2, _resume, tmp_path, ["nested"], part)[0]["nested"]
        assert resumed[0] == losses[0]
        assert any(abs(a - b) > 1e-5 for a, b in zip(resumed, losses, strict=True))


def _converted_is_the_original(original: str, converted: str) -> int:
    """The number of equal leaves after two loads into FSDP2 models, by torch's own functions."""
    values = []
    for path in (original, converted):
        trainer = Trainer(seed=2)
        trainer.train(1)  # AdamW's moments exist
        state = trainer.state(False)
        loaded = {key: state[key] for key in ("model", "optim")}
        dcp.load(loaded, checkpoint_id=path)
        set_state_dict(
            trainer.model,
            trainer.optimizer,
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optim"],
        )
        after = trainer.state(False)
        values.append(plain({key: after[key] for key in ("model", "optim")}))
    return assert_equal(values[0], values[1])


def _save_stock(path: str) -> None:
    trainer = Trainer(seed=1)
    trainer.train(_SAVED_AT)
    state = trainer.state(False)
    dcp.save({key: state[key] for key in ("model", "optim")}, checkpoint_id=path)


def test_a_conversion_to_a_file_and_back_loads_as_the_original_on_other_ranks(tmp_path: Path) -> None:
    """2 ranks save, DCP -> torch -> DCP, 3 ranks load: model, moments, steps and groups as saved."""
    run_ranks(2, _save_stock, str(tmp_path / "dcp"))
    convert(open_source(str(tmp_path / "dcp")), str(tmp_path / "state.pt"), "torch")
    convert(open_source(str(tmp_path / "state.pt")), str(tmp_path / "again"), "dcp")
    assert min(run_ranks(3, _converted_is_the_original, str(tmp_path / "dcp"), str(tmp_path / "again"))) > 500
