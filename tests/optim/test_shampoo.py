"""Blocked Shampoo: the textbook's numbers, the same bits at every world size, nothing on the wire."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

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
from vescale_fsdp.errors import LayoutError
from vescale_fsdp.layout.geometry import FlatRange
from vescale_fsdp.layout.granularity import Element
from vescale_fsdp.optim import Shampoo
from vescale_fsdp.optim.shampoo.block_math import inverse_root
from vescale_fsdp.optim.shampoo.factor_grid import factor_grid_of, granularity_of

BLOCK = 8
SHAPES = (*SMALL_SHAPES, (40, 24), (37, 19), (3, 16, 8), (3, 12, 8), (29,))
OPTIONS: dict[str, Any] = {
    "lr": 1e-2,
    "weight_decay": 0.1,
    "eps": 1e-6,
    "block_size": BLOCK,
    "update_every": 2,
    "start_step": 3,
}


def textbook(
    full: torch.Tensor, grads: list[torch.Tensor], grafting: str, block: int = BLOCK, beta2: float = 0.999
) -> torch.Tensor:
    """Shampoo of one matrix in float64, block by block, written from the formulas."""
    weight = full.double().clone()
    result = weight.clone()
    for top in range(0, full.shape[0], block):
        for left in range(0, full.shape[1], block):
            area = (slice(top, top + block), slice(left, left + block))
            w = weight[area].clone()
            big_l = torch.zeros(w.shape[0], w.shape[0], dtype=torch.float64)
            big_r = torch.zeros(w.shape[1], w.shape[1], dtype=torch.float64)
            m, v = torch.zeros_like(w), torch.zeros_like(w)
            for t, full_grad in enumerate(grads, 1):
                g = full_grad[area].double()
                big_l = beta2 * big_l + (1 - beta2) * g @ g.T
                big_r = beta2 * big_r + (1 - beta2) * g.T @ g
                m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
                m_hat = m / (1 - 0.9**t)
                adam = m_hat / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
                plain = adam if grafting == "adam" else m_hat
                if t == 3 or (t > 3 and t % 2 == 0):
                    roots = [_root(f / (1 - beta2**t)) for f in (big_l, big_r)]
                step = plain
                if t >= 3:
                    step = roots[0] @ m_hat @ roots[1]
                    step = step * plain.norm() / step.norm() if grafting == "adam" else step
                w = w - 1e-2 * (step + 0.1 * w)
            result[area] = w
    return result


def _root(factor: torch.Tensor) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(factor)
    values = values + max(0.0, 1e-6 - values.min().item())
    return vectors @ torch.diag(values**-0.25) @ vectors.T


@pytest.mark.parametrize("grafting", ["adam", "none"])
@pytest.mark.parametrize("shape", [(40, 24), (37, 19), (5, 4)])
def test_it_is_the_textbooks(shape: tuple[int, ...], grafting: str) -> None:
    """Eight steps agree with a float64 reference written from the formulas."""
    params = as_plain(full_tensors([shape], 0))
    (name,) = params
    got = train(Shampoo(list(params.values()), **OPTIONS, grafting=grafting), params, range(8))[name]  # type: ignore[arg-type]
    grads = [next(iter(full_tensors([shape], 100 + step).values())) for step in range(8)]
    full = full_tensors([shape], 0)[name]
    expected = textbook(full, grads, grafting)

    way = expected - full
    assert ((got - expected).norm() / way.norm()).item() < 1e-4


def test_other_blocks_are_another_optimizer() -> None:
    """Negative control: with blocks of 16 instead of 8, the way differs by more than 5 %."""
    ways = {}
    for block in (8, 16):
        params = as_plain(full_tensors([(16, 24)], 0))
        (name,) = params
        optimizer = Shampoo(list(params.values()), **{**OPTIONS, "block_size": block})
        ways[block] = train(optimizer, params, range(8))[name] - full_tensors([(16, 24)], 0)[name]

    assert ((ways[8] - ways[16]).norm() / ways[8].norm()).item() > 0.05


def sharded_run(kind: str, grafting: str = "adam") -> tuple[dict[str, torch.Tensor], list[int]]:
    """Six steps on this rank's shards: full parameters and elements held."""
    tensors = full_tensors(SHAPES, 0)
    mesh = cpu_mesh(2, 2) if kind == "hybrid" else cpu_mesh()
    params = as_ragged(tensors, mesh, Shampoo.granularity(block_size=BLOCK))
    values = train(Shampoo(list(params.values()), **OPTIONS, grafting=grafting), params, range(6))  # type: ignore[arg-type]
    return values, [p.to_local().numel() for p in params.values()]  # type: ignore[attr-defined]


def one_process() -> dict[str, torch.Tensor]:
    """The same on plain tensors."""
    params = as_plain(full_tensors(SHAPES, 0))
    return train(Shampoo(list(params.values()), **OPTIONS), params, range(6))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_any_world_size_gives_the_same_bits(world: int) -> None:
    """Sharded in whole bands, parameters equal one process's bit for bit."""
    expected = one_process()
    results = run_ranks(world, sharded_run, "ragged")
    for values, _ in results:
        assert_same(values, expected)
    if world == 4:
        held = [numels for _, numels in results]
        assert any(0 in numels for numels in held)
        assert any(sum(numels[i] > 0 for numels in held) > 1 for i in range(len(SHAPES)))


def test_hybrid_mesh_gives_the_same_bits() -> None:
    """2 replicas x 2 shards equal one process."""
    expected = one_process()
    for values, _ in run_ranks(4, sharded_run, "hybrid"):
        assert_same(values, expected)


def fsdp2_run() -> dict[str, torch.Tensor]:
    """FSDP2's Shard(0) where a rank's rows are whole bands."""
    params = as_fsdp2(full_tensors([(32, 12), (16, 20)], 0), cpu_mesh())
    return train(Shampoo(list(params.values()), **OPTIONS), params, range(6))


def test_fsdp2_parameters_work_where_rows_are_bands() -> None:
    """FSDP2 DTensors cut between bands equal one process."""
    params = as_plain(full_tensors([(32, 12), (16, 20)], 0))
    expected = train(Shampoo(list(params.values()), **OPTIONS), params, range(6))
    for values in run_ranks(2, fsdp2_run):
        assert_same(values, expected)


def bf16_run(kind: str) -> dict[str, torch.Tensor]:
    """Four steps of bf16 parameters."""
    tensors = full_tensors(SHAPES, 0, torch.bfloat16)
    granularity = Shampoo.granularity(block_size=BLOCK)
    params = as_plain(tensors) if kind == "plain" else as_ragged(tensors, cpu_mesh(), granularity)
    return train(Shampoo(list(params.values()), **OPTIONS), params, range(4))


def test_bf16_parameters_give_the_same_bits() -> None:
    """bf16 parameters: fp32 state and arithmetic, the same bits on 1 process and 3 ranks."""
    expected = bf16_run("plain")
    for values in run_ranks(3, bf16_run, "ragged"):
        assert_same(values, expected)


def traffic_run() -> tuple[list[str], int]:
    """Collectives of a step that computes roots."""
    params = as_ragged(full_tensors(SHAPES, 0), cpu_mesh(), Shampoo.granularity(block_size=BLOCK))
    optimizer = Shampoo(list(params.values()), **OPTIONS)
    train(optimizer, params, range(3))
    with counted() as wire:
        optimizer.step()
    return wire.names, wire.sent_bytes


def test_a_step_has_no_communication() -> None:
    """Every block is local: no collective in step()."""
    assert run_ranks(4, traffic_run) == [([], 0)] * 4


def misaligned_run() -> str:
    """The refusal of a parameter that is cut inside a band."""
    params = as_ragged(full_tensors([(37, 19)], 0), cpu_mesh(), Element())
    with pytest.raises(LayoutError) as caught:
        Shampoo(list(params.values()), **OPTIONS)
    return str(caught.value)


def test_a_cut_block_is_refused_with_the_cure() -> None:
    """A layout that would make other blocks is refused; the text names the granularity."""
    assert "Shampoo.granularity(block_size=8)" in run_ranks(2, misaligned_run)[0]


@pytest.mark.parametrize("shape", [(29,), (37, 19), (5, 4), (3, 16, 8), (3, 12, 8), (4, 5, 6)])
def test_granularity_keeps_bands_whole(shape: tuple[int, ...]) -> None:
    """Every cut that the granularity allows falls between bands."""
    grid = factor_grid_of(shape, BLOCK)
    numel = torch.Size(shape).numel()
    block = granularity_of(shape, BLOCK).block_numel(shape)
    cuts = [*range(0, numel, block), numel]
    bands = [len(grid.bands_in(FlatRange(a, b))) for a, b in pairwise(cuts)]

    assert sum(bands) == grid.factor_shapes["left"][0]
    assert min(bands) >= 1


def test_blocks_tile_the_parameter() -> None:
    """The drawing: 5 x 7 in blocks of 4 has blocks of 4x4, 4x3, 1x4 and 1x3."""
    grid = factor_grid_of((5, 7), 4)
    assert grid.factor_shapes == {"left": (2, 2, 4, 4), "right": (2, 2, 4, 4)}
    sizes = [(b.top, b.height, b.left, b.width) for b in grid.blocks_in(FlatRange(0, 35))]
    assert sizes == [(0, 4, 0, 4), (0, 4, 4, 3), (4, 1, 0, 4), (4, 1, 4, 3)]


def test_inverse_roots() -> None:
    """The perturbation shifts only when the least eigenvalue is below eps; NaN gives NaN."""
    diagonal = torch.diag(torch.tensor([16.0, 81.0]))
    torch.testing.assert_close(inverse_root(diagonal, 4, 1e-12), torch.diag(torch.tensor([1 / 2, 1 / 3])))
    shifted = inverse_root(torch.diag(torch.tensor([0.0, 15.0])), 4, 1.0)
    torch.testing.assert_close(shifted, torch.diag(torch.tensor([1.0, 1 / 2])))
    spoiled = inverse_root(torch.full((2, 2), torch.nan), 4, 1.0)
    assert spoiled is not None
    assert spoiled.isnan().all()


def spoiled_run(kind: str) -> dict[str, torch.Tensor]:
    """Five steps; the gradient of the second holds a NaN in one block."""

    def spoil(step: int, grads: dict[str, torch.Tensor]) -> None:
        if step == 1:
            grads["p0_40x24"][9, 3] = float("nan")

    tensors = full_tensors([(40, 24), (16, 8)], 0)
    granularity = Shampoo.granularity(block_size=BLOCK)
    params = as_plain(tensors) if kind == "plain" else as_ragged(tensors, cpu_mesh(), granularity)
    return train(Shampoo(list(params.values()), **OPTIONS), params, range(5), spoil)


def test_nan_gradients_show_and_stay_in_their_block() -> None:
    """A NaN spoils its own block, visibly, and no other; no rank stops, at any world size."""
    expected = spoiled_run("plain")
    spoiled = expected["p0_40x24"].isnan()
    assert spoiled[8:16, :8].all()
    assert spoiled.sum() == 64
    assert not expected["p1_16x8"].isnan().any()
    for values in run_ranks(2, spoiled_run, "ragged"):
        assert_same(values, expected)


def accumulate_run(parts: int) -> dict[str, torch.Tensor]:
    """Three steps, each after ``parts`` backward passes whose gradients add up exactly."""
    granularity = Shampoo.granularity(block_size=BLOCK)
    params = as_ragged(full_tensors([(24, 16)], 0), cpu_mesh(), granularity)
    (param,) = params.values()
    optimizer = Shampoo([param], **OPTIONS)
    for step in range(3):
        whole = (torch.arange(384.0).view(24, 16) * 4).roll(step)
        scale = as_ragged({"w": whole / parts}, cpu_mesh(), granularity)["w"]
        for _ in range(parts):
            (param.to_local() * scale.to_local().detach()).sum().backward()  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad()
    return {fqn: full_value(p) for fqn, p in params.items()}


def test_accumulated_gradients_equal_one() -> None:
    """Four accumulated backward passes give the steps of one."""
    assert_same(run_ranks(2, accumulate_run, 4)[0], run_ranks(2, accumulate_run, 1)[0])


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda p: Shampoo([p], lr=-1.0), "these values: lr"),
        (lambda p: Shampoo([p], block_size=0), "block_size >= 1"),
        (lambda p: Shampoo([p], grafting="rms"), "'adam' or 'none'"),
        (lambda p: Shampoo([torch.nn.Parameter(torch.zeros(2, 2, 2, 2))]), "adamw_params"),
    ],
)
def test_mistakes_are_refused_with_the_cure(build: Callable[[torch.Tensor], Any], text: str) -> None:
    """What cannot be is refused when the optimizer is built."""
    with pytest.raises(LayoutError, match=text):
        build(torch.nn.Parameter(torch.zeros(4, 4)))
