"""What a page's script trained, compared with the same training in one process without any of this library."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from vescale_fsdp.checkpoint import load

__all__ = ["assert_trained_alike"]


def assert_trained_alike(
    checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer, most: float
) -> None:
    """Compare weights and optimizer state of a checkpoint with those of a run that was never interrupted.

    Args:
        most: relative difference of a tensor, by norm, that rounding in another order makes.
    """
    expected = {name: param.detach().clone() for name, param in model.named_parameters()}
    moments = {name: dict(optimizer.state[param]) for name, param in model.named_parameters()}
    assert len(moments) > 4 and all(state["step"] > 1 for state in moments.values())
    kept = {name: {kind: value.clone() for kind, value in state.items()} for name, state in moments.items()}
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    optimizer.state.clear()

    load(checkpoint, {"model": model, "optimizer": optimizer})

    for name, param in model.named_parameters():
        state = optimizer.state[param]
        assert state["step"].item() == kept[name]["step"].item(), name
        pairs = {"": (param, expected[name])}
        pairs |= {kind: (state[kind], kept[name][kind]) for kind in ("exp_avg", "exp_avg_sq")}
        for kind, (found, wanted) in pairs.items():
            assert ((found - wanted).norm() / wanted.norm()).item() < most, (name, kind)
