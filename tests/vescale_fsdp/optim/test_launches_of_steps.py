"""What a step launches on an accelerator: numbers that do not grow with the parameters."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.faults.rounding_noise import exact_products
from tests.vescale_fsdp.runtime.comm.test_launches import VIEWS, Launches
from vescale_fsdp import Flat, Tiles, fully_shard
from vescale_fsdp.optim import AdamW8bit, Muon, Shampoo, muon, shampoo_blocks, structured_optimizer
from vescale_fsdp.optim.muon import NewtonSchulz

SHAPES = [(64, 96), (40, 96), (33, 96), (16,), (64, 256), (5, 96)]
MORE = pytest.mark.part("numerics")


class LargestToo(Launches):
    """Operators, and the elements of the largest tensor that one of them has made."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        if all(each.alias_info is None for each in func._schema.returns):  # no views, nothing in place
            tensors = made if isinstance(made, (list, tuple)) else [made]
            sizes = [each.numel() for each in tensors if isinstance(each, torch.Tensor)]
            self.largest = max([self.largest, *sizes])
        return made


def train(
    count: int,
    batched: bool,
    cls: Any = AdamW8bit,
    shapes: Any = SHAPES,
    dtype: Any = torch.float32,
    **options: Any,
) -> tuple[list[torch.Tensor], int, int]:
    """Five steps of so many times the parameters; all that the last one launches, and its largest tensor."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes * count]
    optimizer = cls(params, lr=1e-2, **options)
    launched = largest = 0
    with ExitStack() as patched:
        for module in (structured_optimizer, muon, shampoo_blocks):
            patched.enter_context(mock.patch.object(module, "launches", return_value=batched))
        for step in range(5):
            for number, param in enumerate(params):
                param.grad = None if number == 1 and step == 1 else torch.randn(param.shape).to(dtype)
            with LargestToo() as seen:
                optimizer.step()
            launched = sum(number for name, number in seen.names.items() if name not in VIEWS | HOST)
            largest = seen.largest
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [param.detach() for param in params] + states, launched, largest


HOST = {
    f"aten.{name}"
    for name in (
        "add_",  # of step counters
        "_local_scalar_dense",
        "alias",
        "empty",
        "empty_like",
        "reshape",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "transpose",
    )
}


@pytest.mark.parametrize(
    ("block", "most"),
    [
        (Flat(32), 0),
        pytest.param(Flat(50), 32, marks=MORE),
        pytest.param(Tiles(8, 32), 8, marks=MORE),
        (Tiles(8, 20), 88),
    ],
)
def test_8bit_steps_are_launched_once_for_all(block: Any, most: int) -> None:
    """Parameters with blocks alike are stepped as one, with the bits of one by one.

    Twelve parameters more launch nothing more, but a pad for each tensor whose blocks do not come out even.
    """
    options = {"block": block, "min_8bit_numel": 600}
    alone, many, _ = train(2, batched=False, **options)
    together, _, _ = train(2, batched=True, **options)
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))
    assert len(alone) > 60
    _, twice, _ = train(4, batched=True, **options)
    _, once, _ = train(2, batched=True, **options)
    assert twice - once <= most, (once, twice)
    assert once < many / 2


def test_8bit_batches_are_bounded() -> None:
    """More than a batch holds is stepped in several, with the same bits."""
    alone, _, _ = train(2, batched=False, min_8bit_numel=600)
    with mock.patch.object(structured_optimizer, "BATCH_NUMEL", 12_000):
        parts, few, _ = train(2, batched=True, min_8bit_numel=600)
    _, one, _ = train(2, batched=True, min_8bit_numel=600)
    assert all(torch.equal(*pair) for pair in zip(alone, parts, strict=True))
    assert few > one


def test_norms_of_a_stack_are_one_launch() -> None:
    """Newton-Schulz of many matrices launches as much as that of two."""
    counts = []
    for number in (2, 9):
        with Launches() as seen:
            NewtonSchulz()(torch.randn(number, 8, 12).bfloat16())
        counts.append(sum(n for name, n in seen.names.items() if name not in VIEWS))
    assert counts[0] == counts[1]


MATRICES = [(24, 40), (40, 24), (33, 17), (24, 40), (5, 16, 24)]
SHAMPOO: dict[str, Any] = {
    "block_size": 16,
    "update_every": 2,
    "start_step": 3,
    "eps": 1e-6,
    "weight_decay": 0.1,
}


@pytest.mark.parametrize(
    ("grafting", "dtype"),
    [
        pytest.param("adam", torch.float32, marks=MORE),
        pytest.param("none", torch.bfloat16, marks=MORE),
        pytest.param("adam", torch.bfloat16, marks=MORE),
        pytest.param("none", torch.float32, marks=MORE),
    ],
)
def test_blocks_of_all_parameters_are_one_stack(grafting: str, dtype: torch.dtype) -> None:
    """Shampoo's step of twice the parameters launches nothing more, and leads where block by block does."""
    options = {"cls": Shampoo, "shapes": [*MATRICES, (29,)], "dtype": dtype, "grafting": grafting, **SHAMPOO}
    alone, many, _ = train(2, batched=False, **options)
    together, once, _ = train(2, batched=True, **options)
    _, twice, _ = train(4, batched=True, **options)
    assert len(alone) > 60
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)
    assert once == twice < many / 3, (once, twice, many)


def test_matrices_of_all_parameters_are_one_stack() -> None:
    """Muon's step of twice the parameters launches nothing more."""
    _, once, _ = train(2, batched=True, cls=Muon, shapes=MATRICES)
    _, twice, _ = train(4, batched=True, cls=Muon, shapes=MATRICES)
    assert 0 < once == twice
    _, halves, _ = train(2, batched=True, cls=Muon, shapes=MATRICES, dtype=torch.bfloat16)
    _, twice, _ = train(4, batched=True, cls=Muon, shapes=MATRICES, dtype=torch.bfloat16)
    assert 0 < halves == twice


@pytest.mark.parametrize(("cls", "options"), [(Shampoo, {**SHAMPOO}), (Muon, {})])
@exact_products()
def test_stacks_are_bounded(cls: Any, options: dict[str, Any]) -> None:
    """A stack holds no more than it may, however many parameters there are; the result is the same."""
    names = ((structured_optimizer, "BATCH_NUMEL"), (shampoo_blocks, "_STACK_NUMEL"))
    names += ((muon, "STACK_NUMEL"), (muon, "_WIDENED_NUMEL"))
    options["shapes"] = (
        [*MATRICES, (160,)] if cls is Shampoo else MATRICES
    )  # a vector's factors are larger than it
    one, few, free = train(3, batched=True, cls=cls, **options)
    with ExitStack() as patched:
        for module, name in names:
            patched.enter_context(mock.patch.object(module, name, 2500))
        other, many, bounded = train(3, batched=True, cls=cls, **options)
    assert few < many and bounded <= 2500 < free
    for left, right in zip(one, other, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


def host_cost(shard_fn: Any, number: int, options: dict[str, Any]) -> tuple[int, int]:
    """Calls of Python functions that a step of AdamW makes on so many sharded parameters; operators on pieces."""
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(number)))
    shard_fn(model, mesh=cpu_mesh())
    model(torch.randn(2, 4)).sum().backward()
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    for _ in range(2):
        optimizer.step()  # DTensor has its plans from here on
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    optimizer.step()
    sys.setprofile(None)
    with Launches() as seen:
        optimizer.step()
    return calls, sum(seen.names.values())


def cost_of_a_parameter(options: dict[str, Any]) -> list[tuple[float, int]]:
    """Calls for one more, and operators of a step: ours and FSDP2's."""
    found = []
    for shard_fn in (fully_shard, torch_fully_shard):
        (few, _), (many, operators) = (host_cost(shard_fn, number, options) for number in (8, 24))
        found.append(((many - few) / 16, operators))
    return found


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}])
def test_torchs_optimizers_cost_the_host_less_than_on_fsdp2(options: dict[str, Any]) -> None:
    """One more costs fewer calls of Python functions, which are what a step takes of the host, and no operator more."""
    for (ours, operators), (theirs, their_operators) in run_ranks(1, cost_of_a_parameter, options):
        assert 0 < ours < 0.75 * theirs, (ours, theirs)
        assert 0 < operators <= their_operators
