"""What AdamW8bit and Shampoo share: the same bits however whole blocks are cut, and nothing on the wire."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.optim_cases import (
    SMALL_SHAPES,
    as_fsdp2,
    as_plain,
    as_ragged,
    assert_same,
    counted,
    full_tensors,
    full_value,
    train,
)
from vescale_fsdp import Flat, Granularity, RaggedDTensor, Tiles
from vescale_fsdp.optim import AdamW8bit, Shampoo

Shapes = tuple[tuple[int, ...], ...]


class Case(NamedTuple):
    """An optimizer with blocks.

    Attributes:
        steps: enough to meet all that it does now and then.
        fsdp2_shapes: matrices whose row chunks over 2 ranks are whole blocks.
        beside: a state tensor with some values per block.
    """

    kind: type[AdamW8bit | Shampoo]
    options: dict[str, Any]
    granularity: Callable[[str, Any], Granularity]
    shapes: Shapes
    steps: int
    fsdp2_shapes: Shapes
    beside: str

    def make(self, params: dict[str, torch.Tensor]) -> AdamW8bit | Shampoo:
        """The optimizer of these parameters."""
        return self.kind(list(params.values()), **self.options)


def _eight_bits(block: Flat | Tiles) -> Case:
    # 8-bit: with and without a short last block; a stack; fp32: small ones, and a vector of any size.
    shapes = (*SMALL_SHAPES, (64, 80), (65, 70), (3, 40, 48), (33, 129), (5000,))
    options = {"lr": 1e-2, "weight_decay": 0.1, "block": block}
    granularity = AdamW8bit.granularity(block=block)
    return Case(AdamW8bit, options, granularity, shapes, 4, ((64, 128), (96, 64)), "exp_avg_scales")


def _shampoo() -> Case:
    shapes = (*SMALL_SHAPES, (40, 24), (37, 19), (3, 16, 8), (3, 12, 8), (29,))
    options = {
        "lr": 1e-2,
        "weight_decay": 0.1,
        "eps": 1e-6,
        "block_size": 8,
        "update_every": 2,
        "start_step": 3,
    }
    granularity = Shampoo.granularity(block_size=8)
    return Case(Shampoo, options, granularity, shapes, 6, ((32, 12), (16, 20)), "left_factor")


CASES = {
    "flat:256": _eight_bits(Flat(256)),
    "flat:2048": _eight_bits(Flat(2048)),
    "tiles:32x32": _eight_bits(Tiles(32, 32)),
    "shampoo": _shampoo(),
}
EACH = ("flat:256", "shampoo")  # one of each optimizer
CORE = {("flat:256", 4), ("flat:2048", 2), ("tiles:32x32", 4), ("shampoo", 1), ("shampoo", 4)}
MORE = pytest.mark.part("numerics")


def _one_process(
    case: Case, dtype: torch.dtype = torch.float32, shapes: Shapes = ()
) -> dict[str, torch.Tensor]:
    params = as_plain(full_tensors(shapes or case.shapes, 0, dtype))
    return train(case.make(params), params, range(case.steps))


def _sharded(name: str, hybrid: bool, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], list[int]]:
    """The full parameters, and how many elements this rank holds of each."""
    case, mesh = CASES[name], cpu_mesh(2, 2) if hybrid else cpu_mesh()
    params = as_ragged(full_tensors(case.shapes, 0, dtype), mesh, case.granularity)
    values = train(case.make(params), params, range(case.steps))
    return values, [p.to_local().numel() for p in params.values()]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "world"),
    [
        pytest.param(name, world, marks=() if (name, world) in CORE else MORE)
        for name in CASES
        for world in (1, 2, 4)
    ],
)
def test_any_world_size_gives_the_same_bits(name: str, world: int) -> None:
    """Sharded with the optimizer's own granularity, parameters equal one process's bit for bit."""
    expected = _one_process(CASES[name])
    results = run_ranks(world, _sharded, name, False, torch.float32)
    for values, _ in results:
        assert_same(values, expected)
    if world > 1:
        held = [numels for _, numels in results]
        assert any(0 in numels for numels in held)  # empty pieces took part
        assert any(sum(numels[i] > 0 for numels in held) > 1 for i in range(len(CASES[name].shapes)))


@pytest.mark.parametrize("name", EACH)
def test_bf16_parameters_give_the_same_bits(name: str) -> None:
    """bf16 parameters: fp32 arithmetic inside, the same bits on 1 process and 3 ranks."""
    expected = _one_process(CASES[name], torch.bfloat16)
    for values, _ in run_ranks(3, _sharded, name, False, torch.bfloat16):
        assert_same(values, expected)


@pytest.mark.parametrize("name", EACH)
def test_hybrid_mesh_gives_the_same_bits(name: str) -> None:
    """2 replicas x 2 shards equal one process."""
    expected = _one_process(CASES[name])
    for values, _ in run_ranks(4, _sharded, name, True, torch.float32):
        assert_same(values, expected)


def _by_fsdp2(name: str) -> tuple[dict[str, torch.Tensor], list[bool]]:
    """FSDP2's Shard(0) where a rank's rows are whole blocks; also whether state beside is cut as they are."""
    case = CASES[name]
    params = as_fsdp2(full_tensors(case.fsdp2_shapes, 0), cpu_mesh())
    optimizer = case.make(params)
    values = train(optimizer, params, range(case.steps))
    return values, [isinstance(optimizer.state[p][case.beside], RaggedDTensor) for p in params.values()]


@pytest.mark.parametrize("name", EACH)
def test_fsdp2_parameters_work_where_rows_are_blocks(name: str) -> None:
    """FSDP2 DTensors whose cuts fall between blocks equal one process."""
    expected = _one_process(CASES[name], shapes=CASES[name].fsdp2_shapes)
    for values, ragged in run_ranks(2, _by_fsdp2, name):
        assert_same(values, expected)
        assert ragged == [True, True]


def _traffic(name: str) -> tuple[list[str], int]:
    """Collectives of a step; Shampoo's is one that computes roots."""
    case = CASES[name]
    params = as_ragged(full_tensors(case.shapes, 0), cpu_mesh(), case.granularity)
    optimizer = case.make(params)
    train(optimizer, params, range(3))
    with counted() as wire:
        optimizer.step()
    return wire.names, wire.sent_bytes


@pytest.mark.parametrize("name", EACH)
def test_a_step_has_no_communication(name: str) -> None:
    """Every block is local: no collective in step()."""
    assert run_ranks(4, _traffic, name) == [([], 0)] * 4


def _accumulated_or_not(name: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return _accumulated(name, 4), _accumulated(name, 1)


def _accumulated(name: str, parts: int) -> dict[str, torch.Tensor]:
    """Three steps, each after ``parts`` backward passes whose gradients add up exactly."""
    case = CASES[name]
    (shape,) = shapes = [(64, 80)]
    params = as_ragged(full_tensors(shapes, 0), cpu_mesh(), case.granularity)
    (param,) = params.values()
    optimizer = case.make(params)
    for step in range(3):
        whole = (torch.arange(5120.0).view(shape) * 4).roll(step)
        scale = as_ragged({"w": whole / parts}, cpu_mesh(), case.granularity)["w"]
        for _ in range(parts):
            (param.to_local() * scale.to_local().detach()).sum().backward()  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad()
    return {fqn: full_value(p) for fqn, p in params.items()}


@pytest.mark.parametrize("name", EACH)
def test_accumulated_gradients_equal_one(name: str) -> None:
    """Four accumulated backward passes give the steps of one."""
    for accumulated, at_once in run_ranks(2, _accumulated_or_not, name):
        assert_same(accumulated, at_once)
