"""Arguments in the order of torch's functions, or of another package's, are refused with the right call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from tests.support.distributed import run_ranks
from vescale_fsdp import plan_report
from vescale_fsdp.checkpoint import CheckpointManager, async_save, latest, load, read_state, save, verify
from vescale_fsdp.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict
from vescale_fsdp.conversion import convert, diff, open_source
from vescale_fsdp.errors import ArgumentError, CheckpointError, LayoutError
from vescale_fsdp.optim import AdamW8bit, Muon, OwnerOptimizer


class _Case:
    """What the calls below are made with: a state, a saved checkpoint and a manager with one step."""

    def __init__(self, folder: Path) -> None:
        self.model = nn.Linear(4, 4)
        self.state = {"model": self.model}
        self.optimizer = torch.optim.SGD(self.model.parameters())
        self.saved, self.new = folder / "saved", folder / "new"
        save(self.saved, self.state)
        self.manager = CheckpointManager(folder / "run")
        self.manager.save(1, self.state)


# By the function: what the error gives as the right call, the wrong call, and the right one.
CASES: dict[str, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "save": ("save(path, state)", lambda c: save(c.state, c.new), lambda c: save(c.new, c.state)),
    "async_save": (
        "save(path, state)",
        lambda c: async_save(c.model, c.new),
        lambda c: async_save(c.new, c.state).wait(),
    ),
    "load": ("load(path, state)", lambda c: load(c.state, c.saved), lambda c: load(c.saved, c.state)),
    "CheckpointManager": (
        "CheckpointManager(root)",
        lambda c: CheckpointManager(c.state),
        lambda c: CheckpointManager(c.new),
    ),
    "verify": ("path first", lambda c: verify(c.state), lambda c: verify(c.saved)),
    "read_state": ("path first", lambda c: read_state(c.state), lambda c: read_state(c.saved)),
    "latest": ("path first", lambda c: latest(c.state), lambda c: latest(c.saved)),
    "open_source": ("path first", lambda c: open_source(c.state), lambda c: open_source(c.saved)),
    "manager.save": (
        "manager.save(step, state)",
        lambda c: c.manager.save(c.state, 2),
        lambda c: c.manager.save(2, c.state),
    ),
    "manager.should_save": (
        "manager.should_save(step)",
        lambda c: c.manager.should_save(c.state),
        lambda c: c.manager.should_save(2),
    ),
    "manager.pin": ("manager.pin(step)", lambda c: c.manager.pin(c.state), lambda c: c.manager.pin(1)),
    "manager.restore": (
        "manager.restore(state, step=5)",
        lambda c: c.manager.restore(1),
        lambda c: c.manager.restore(c.state, step=1),
    ),
    "OwnerOptimizer": (
        "OwnerOptimizer(SGD, model.parameters(), ...)",
        lambda c: OwnerOptimizer(c.model.parameters(), torch.optim.SGD, lr=0.1),
        lambda c: OwnerOptimizer(torch.optim.SGD, c.model.parameters(), lr=0.1),
    ),
    "OwnerOptimizer, of one that was made": (
        "OwnerOptimizer(Adam, model.parameters(), ...)",
        lambda c: OwnerOptimizer(torch.optim.Adam(c.model.parameters()), c.model.parameters()),
        lambda c: OwnerOptimizer(torch.optim.Adam, c.model.parameters()),
    ),
    "AdamW8bit": (
        "model.parameters()",
        lambda c: AdamW8bit(c.model),
        lambda c: AdamW8bit(c.model.parameters()),
    ),
    "Muon": (
        "Muon(matrices, lr=0.02, adamw_params=others)",
        lambda c: Muon(*Muon.split_params(c.model)),
        lambda c: Muon([c.model.weight], lr=0.02, adamw_params=[c.model.bias]),
    ),
    "Muon, of a pair": (
        "Muon(matrices, adamw_params=others)",
        lambda c: Muon(Muon.split_params(c.model)),
        lambda c: Muon([c.model.weight], adamw_params=[c.model.bias]),
    ),
    "set_model_state_dict": (
        "set_model_state_dict(model, model_state_dict)",
        lambda c: set_model_state_dict(c.model.state_dict(), c.model),
        lambda c: set_model_state_dict(c.model, c.model.state_dict()),
    ),
    "set_optimizer_state_dict": (
        "set_optimizer_state_dict(model, optimizers, optim_state_dict)",
        lambda c: set_optimizer_state_dict(c.optimizer, c.model, {}),
        lambda c: set_optimizer_state_dict(
            c.model, c.optimizer, get_optimizer_state_dict(c.model, c.optimizer)
        ),
    ),
    "convert": (
        "convert(open_source(path), target, kind)",
        lambda c: convert(c.new, open_source(c.saved), "torch"),
        lambda c: convert(open_source(c.saved), c.new, "torch"),
    ),
    "diff": (
        "diff(open_source(path), open_source(other_path))",
        lambda c: diff(str(c.saved), str(c.saved)),
        lambda c: diff(open_source(c.saved), open_source(c.saved)),
    ),
    "plan_report": ("[8]", lambda c: plan_report(c.model, 8), lambda c: plan_report(c.model, [8])),
}


@pytest.mark.parametrize("function", CASES)
def test_a_wrong_order_is_answered_with_the_right_call(function: str, tmp_path: Path) -> None:
    """At once, by an error of ours, without the values of a state; and the right call works."""
    right, wrong_call, right_call = CASES[function]
    case = _Case(tmp_path)
    with pytest.raises((ArgumentError, LayoutError)) as refused:
        wrong_call(case)

    assert right in str(refused.value.todo) and "tensor(" not in str(refused.value)
    right_call(case)


def _one_rank_is_wrong(folder: Path) -> list[tuple[type, bool]]:
    """Rank 1 swaps what rank 0 does not."""
    state = {"w": torch.ones(3)}
    manager = CheckpointManager(folder / "run")
    manager.save(1, state)
    swaps = dist.get_rank() == 1
    errors = []
    for right, swapped in (
        (lambda: save(folder / "a", state), lambda: save(state, folder / "a")),
        (lambda: load(folder / "run" / "step-00000001", state), lambda: load(state, folder)),
        (lambda: async_save(folder / "b", state).wait(), lambda: async_save(state, folder / "b")),
        (lambda: manager.save(2, state), lambda: manager.save(state, 2)),
        (lambda: manager.restore(state), lambda: manager.restore(1)),
        (lambda: manager.pin(1), lambda: manager.pin(state)),
    ):
        with pytest.raises((ArgumentError, CheckpointError)) as raised:
            (swapped if swaps else right)()
        errors.append((type(raised.value), swaps))
    return errors


def test_a_mistake_of_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    """No rank waits for a rank whose call was refused."""
    first, second = run_ranks(2, _one_rank_is_wrong, tmp_path)

    assert second == [(ArgumentError, True)] * 6
    assert [issubclass(kind, CheckpointError) for kind, _ in first] == [True] * 6
