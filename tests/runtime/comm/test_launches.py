"""Operators that are launched per unit on an accelerator's branch, and by clipping: numbers that must not grow."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import models
from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.stream_recorder import recording
from vescale_fsdp import fully_shard

HALF = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def shard(function: Any, num_blocks: int) -> Any:
    model = models.build(num_blocks=num_blocks)
    for module in (*model.blocks, model):
        function(module, mesh=cpu_mesh(), mp_policy=HALF)
    return model


class Launches(TorchDispatchMode):
    """Operators on plain tensors: what a device would be given."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes back with its local tensors
        if all(
            kind in (torch.Tensor, nn.Parameter) for kind in types
        ):  # torch plans with tensors that are fake
            self.names[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


COPIES = (
    "aten.copy_",
    "aten._foreach_copy_",
    "aten._foreach_zero_",
    "aten.add_",
    "aten.zero_",
    "aten.clone",
    "aten.cat",
)


def of_a_unit() -> tuple[dict[str, float], int]:
    """Copying operators that a forward and a backward of one more block launch; parameters of a block."""
    counted = {}
    for num_blocks in (3, 5):
        model = shard(fully_shard, num_blocks)
        plain = models.build(num_blocks=num_blocks).bfloat16()
        with recording(model):
            models.loss_of(model, models.batch(0, 0)).backward()
            model.zero_grad()
            with Launches() as ours:
                models.loss_of(model, models.batch(1, 0)).backward()
        with Launches() as without:
            models.loss_of(plain, models.batch(1, 0).bfloat16()).backward()
        counted[num_blocks] = {name: ours.names[name] - without.names[name] for name in COPIES}
    added = {name: (counted[5][name] - counted[3][name]) / 2 for name in COPIES}
    return {name: number for name, number in added.items() if number}, len(list(model.blocks[0].parameters()))


def test_launches_of_a_unit() -> None:
    """The casts of two gathers, gradients in one copy; with one rank the reduction is a copy, too."""
    for added, num_params in run_ranks(1, of_a_unit):
        assert num_params > 3
        assert added == {"aten.copy_": 3, "aten._foreach_copy_": 1}


VIEWS = {f"aten.{name}" for name in ("unsqueeze", "detach", "view", "flatten", "unbind", "new_empty")}


def of_clipping() -> tuple[int, int, int]:
    """Ours, FSDP2's, and parameters."""
    found = []
    for function in (fully_shard, torch_fully_shard):
        model = shard(function, 8)
        models.loss_of(model, models.batch(0, 0)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # DTensor has its plans from here on
        with Launches() as seen:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        found.append(sum(n for name, n in seen.names.items() if "c10d" not in name and name not in VIEWS))
        assert seen.names["aten._foreach_norm"] == 1, seen.names
    return found[0], found[1], len(list(model.parameters()))


def test_launches_of_clipping() -> None:
    """As many as FSDP2, whose norms wait for one collective as well; on ranks with empty pieces too."""
    for ours, theirs, num_params in run_ranks(2, of_clipping):
        assert ours <= theirs < num_params
