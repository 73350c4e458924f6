"""What a stack asks for and nobody can honor: refused by name, with the model as it was."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from tests.support.distributed import cpu_mesh, run_ranks
from vescale_fsdp import fully_shard
from vescale_fsdp.errors import BoundNamesWarning, UntriedVersionWarning
from vescale_fsdp.integrations import as_fsdp2
from vescale_fsdp.quantize import QuantizedGather

PATHS = ("", "0", "1.0", "1")
SHARD = {"ours": fully_shard, "stock": torch_fully_shard}


def _model(root_has_its_own: bool = True) -> nn.Sequential:
    last = (nn.Linear(4, 4),) if root_has_its_own else ()
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), *last)


def _said(model: nn.Module, act: Callable[[], Any], changes: bool = False) -> str:
    """What an act that must not change the model, unless it ``changes`` it, is refused with."""
    before = [*map(type, model.modules())], [*map(id, model.parameters())]
    with pytest.raises(Exception) as refused:  # noqa: PT011 (its text is what is tested)
        act()
    assert changes or before == ([*map(type, model.modules())], [*map(id, model.parameters())])
    return str(refused.value)


def _mixed() -> dict[str, str]:
    """Every pair of a unit that one runtime has taken and one that the other is then given, if they share modules."""
    found = {}
    for first, second in itertools.product(PATHS, repeat=2):
        if not (first.startswith(second) or second.startswith(first)):
            continue
        for (one, theirs), (other, mine), own in itertools.product(
            SHARD.items(), SHARD.items(), (True, False)
        ):
            if one == other or (
                other == "stock" and torch.__version__ < "2.12"
            ):  # it fails with an error of its own
                continue
            model = _model(own)
            theirs(model.get_submodule(first), mesh=cpu_mesh())
            act = lambda model=model, mine=mine, at=second: mine(model.get_submodule(at), mesh=cpu_mesh())  # noqa: E731
            found[f"{one} at {first or 'root'}, {other} at {second or 'root'}, {own}"] = _said(
                model, act, changes=other == "stock"
            )
    return found


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_one_model_two_runtimes() -> None:
    """Whoever comes second says so, wherever in the model, and ours changes nothing."""
    for found in run_ranks(2, _mixed):
        assert len(found) >= 20
        for case, text in found.items():
            assert "vescale_fsdp" in text or "already been applied" in text, (
                case,
                text,
            )  # the latter: torch, at once


def _under_as_fsdp2() -> list[str]:
    """A stack's own policies beside ours, through torch's name."""
    import warnings

    warnings.simplefilter("ignore", BoundNamesWarning)
    warnings.simplefilter("ignore", UntriedVersionWarning)
    with as_fsdp2():
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp import fully_shard as found

        model = _model()
        policies = {"mp_policy": QuantizedGather(), "offload_policy": CPUOffloadPolicy()}
        return [
            _said(model, lambda: found(model, mesh=cpu_mesh(), **policies)),
            _said(model, lambda: FullyShardedDataParallel(model)),
        ]


def test_a_stacks_flags() -> None:
    """CPU offload beside a policy that gathers otherwise, and FSDP1."""
    for offload, fsdp1 in run_ranks(2, _under_as_fsdp2):
        assert "cpu_offload" in offload and "QuantizedGather" in offload
        assert "fsdp_version: 1" in fsdp1
