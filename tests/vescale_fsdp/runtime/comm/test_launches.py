"""Operators that are launched per unit on an accelerator's branch, and by clipping: numbers that must not grow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import models
from tests.support.async_device.stream_recorder import recording
from tests.support.distributed import cpu_mesh, run_ranks
from vescale_fsdp import FSDPModule, Rows, fully_shard
from vescale_fsdp.quantize import Fp8Blocks, QuantizedGather
from vescale_fsdp.runtime.comm.unsharded_grads import UnshardedGrads
from vescale_fsdp.torch_private import REDUCES_AS_STORED

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


COPIES = tuple(
    f"aten.{name}"
    for name in ("copy_", "_foreach_copy_", "_to_copy", "_foreach_zero_", "add_", "zero_", "clone", "cat")
)


@dataclass(frozen=True)
class Kind:
    """A kind of unit, and what one more of it may launch."""

    options: dict[str, Any]
    launched: dict[str, float]
    prepare: Callable[[Any], object] = lambda model: None
    offload: bool = False
    microbatches: int = 1


def scales_in_fp64(model: Any) -> None:
    for block in model.blocks:
        block.scale.data = block.scale.data.double()


# In bf16 each reshard casts the shard once, to notice writes to gathered parameters.
def unit(copies: int = 3, gathers: int = 2, groups: int = 1, **others: float) -> dict[str, float]:
    """Gradients of a group are written in one copy and reduced as one; a unit's gathers are one launch."""
    launched = {"copy_": copies, "_foreach_copy_": groups, **others}
    return {**launched, "all_gather_each": gathers, "reduce_scatter_into": groups}


CODES = QuantizedGather(torch.bfloat16, codecs=Fp8Blocks(1, 4))
# The casts of two gathers; with one rank collectives are copies: gathers without a cast before, and reductions.
KINDS = {
    "bf16": Kind({"mp_policy": HALF}, unit(_to_copy=2)),
    "fp32": Kind({}, unit()),
    "kept after the forward": Kind(
        {"mp_policy": HALF, "reshard_after_forward": False}, unit(2, gathers=1, _to_copy=1)
    ),
    "two dtypes": Kind({"mp_policy": HALF}, unit(7, groups=2, _to_copy=4), scales_in_fp64),
    # All its lines are short, so each matrix is encoded and decoded alone; other values are copied at once.
    "codes": Kind(
        {"mp_policy": CODES, "granularity": Rows(1)},
        # A policy without `reduce_dtype` reduces in bf16 and casts the sums, but not as of torch 2.15.
        {**unit(20 - REDUCES_AS_STORED, _to_copy=22, clone=8), "_foreach_copy_": 1 + 2 * 2},
    ),
    "offload": Kind({"mp_policy": HALF}, unit(6), offload=True),
    "accumulation": Kind({"mp_policy": HALF}, unit(5, gathers=4, _to_copy=4), microbatches=2),
}


def write_at_once(grads: UnshardedGrads, slot: Any, grad: torch.Tensor) -> None:
    grads._write(slot, grad)


def of_units() -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """What a forward and a backward of one more block launch, by kind; the first with each gradient on its own."""
    found = {name: of_a_unit(kind) for name, kind in KINDS.items()}
    with mock.patch.object(UnshardedGrads, "take", write_at_once):
        return found, of_a_unit(KINDS["bf16"])


def of_a_unit(kind: Kind) -> dict[str, float]:
    counted = {number: launched_with(kind, number) for number in (3, 5)}
    added = {name: (counted[5][name] - counted[3][name]) / 2 for name in counted[5]}
    return {name.removeprefix("aten."): number for name, number in added.items() if number}


def launched_with(kind: Kind, num_blocks: int) -> Counter[str]:
    """Of a second step, without what the same model launches unsharded."""
    model, plain = (models.build(num_blocks=num_blocks) for _ in range(2))
    for each in (model, plain):
        kind.prepare(each)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=cpu_mesh(), **kind.options)
    policy = kind.options.get("mp_policy")
    dtype = policy.param_dtype if policy is not None else torch.float32
    with recording(model, offload=kind.offload) as recorder:
        train(model, 0, torch.float32, kind.microbatches)
        model.zero_grad()
        recorder.collectives.clear()
        with Launches() as ours:
            train(model, 1, torch.float32, kind.microbatches)
    plain.to(dtype)
    with Launches() as without:
        train(plain, 1, dtype, kind.microbatches)
    found = Counter({name: ours.names[name] - without.names[name] for name in COPIES})
    found.update(collective.name for collective in recorder.collectives)
    return found


def train(model: Any, step: int, dtype: torch.dtype, microbatches: int) -> None:
    for number in range(microbatches):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(number == microbatches - 1)
        models.loss_of(model, models.batch(step, number).to(dtype)).backward()


def test_launches_of_a_unit() -> None:
    """Numbers that must not grow: those of one unit more, whatever its kind."""
    ((found, each_on_its_own),) = run_ranks(1, of_units)
    assert found == {name: kind.launched for name, kind in KINDS.items()}
    num_params = len(list(models.build().blocks[0].parameters()))
    assert each_on_its_own.get("_foreach_copy_") is None
    assert each_on_its_own["copy_"] == found["bf16"]["copy_"] + num_params


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
