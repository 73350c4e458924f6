"""Blocked Shampoo: the textbook's numbers, its blocks and roots. What cuts change stands in `test_any_cut`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.optim_cases import (
    as_plain,
    as_ragged,
    assert_same,
    full_tensors,
    train,
)
from vescale_fsdp import Element
from vescale_fsdp.errors import LayoutError
from vescale_fsdp.layout.geometry import Range
from vescale_fsdp.optim import Shampoo
from vescale_fsdp.optim.shampoo_blocks import factor_grid_of, granularity_of, inverse_roots

BLOCK = 8
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
    values = torch.maximum(values, (1e-6 * values.max()).clamp_min(1e-6))
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
    bands = [len(grid.bands_in(Range(a, b))) for a, b in pairwise(cuts)]

    assert sum(bands) == grid.factor_shapes["left"][0]
    assert min(bands) >= 1


def test_blocks_tile_the_parameter() -> None:
    """The drawing: 5 x 7 in blocks of 4 has blocks of 4x4, 4x3, 1x4 and 1x3."""
    grid = factor_grid_of((5, 7), 4)
    assert grid.factor_shapes == {"left": (2, 2, 4, 4), "right": (2, 2, 4, 4)}
    sizes = [(a.top, a.height, a.left, a.width) for a in grid.areas_in(Range(0, 35))]
    assert sizes == [(0, 4, 0, 4), (0, 4, 4, 3), (4, 1, 0, 4), (4, 1, 4, 3)]


@pytest.mark.parametrize("shape", [(29,), (37, 19), (16, 24), (3, 16, 8), (4, 12, 20), (2, 20, 37)])
def test_areas_hold_each_block_once(shape: tuple[int, ...]) -> None:
    """However areas are cut into parts, every element and every factor is in one of them, at its block's place."""
    grid = factor_grid_of(shape, BLOCK)
    lines = torch.Size(shape).numel() // grid.cols
    piece = Range(grid.band_start(1), torch.Size(shape).numel())  # without the first band
    for most in (1, 2, 3, 5, 100):
        seen = torch.zeros(lines, grid.cols)
        factors = torch.zeros(len(grid.bands_in(piece)), grid.num_columns)
        for area in (part for whole in grid.areas_in(piece) for part in whole.parts(most)):
            assert 0 < area.bands * area.columns <= most
            assert area.numel == area.bands * area.columns * max(area.height, area.width) ** 2
            first = grid.band_start(1) // grid.cols + area.top
            for band in range(area.bands):
                start = (first + band * area.height) * grid.cols
                assert grid.band_start(1 + area.band + band) == start
                assert grid.band_start(2 + area.band + band) == start + area.height * grid.cols
            assert area.left == area.column * BLOCK or grid.cols == 1
            bottom, right = first + area.bands * area.height, area.left + area.columns * area.width
            seen[first:bottom, area.left : right] += 1
            factors[area.band :, area.column :][: area.bands, : area.columns] += 1
        assert seen.sum() == piece.numel > 0 and seen.max() == 1
        assert (factors == 1).all()


def test_inverse_roots_raise_small_eigenvalues_to_the_floor() -> None:
    """Eigenvalues below the absolute floor are raised to it; NaN gives NaN, to its own matrix alone."""
    factors = torch.stack(
        [torch.diag(torch.tensor(each)) for each in ([16.0, 81.0], [1.0, 1.0], [0.0, 15.0], [0.0, 0.0])]
    )
    factors[1, 0, 1] = torch.nan
    roots = inverse_roots(factors, factors, 4, 1e-12, 0.0)
    torch.testing.assert_close(roots[0], torch.diag(torch.tensor([1 / 2, 1 / 3])))
    assert roots[1].isnan().all()
    torch.testing.assert_close(roots[3], torch.eye(2) * 1000)
    raised = inverse_roots(factors, factors, 4, 1.0, 0.0)
    torch.testing.assert_close(raised[2], torch.diag(torch.tensor([1.0, 15**-0.25])))
    assert torch.equal(raised[0], roots[0]) and not raised[2].isnan().any()


def test_small_eigenvalues_are_raised_to_a_fraction_of_the_largest() -> None:
    """Also those that rounding made negative; larger ones stay."""
    values = torch.tensor([[0.02, 1.0, 4.0], [-0.5, 1.0, 4.0], [0.5, 1.0, 4.0]], dtype=torch.float64)
    basis = torch.linalg.qr(
        torch.randn(3, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    )[0]
    factors = basis @ torch.diag_embed(values) @ basis.mT
    wanted = values.clamp_min(0.4).pow(-0.5)
    torch.testing.assert_close(
        inverse_roots(factors, factors, 2, 1e-12, 0.1),
        basis @ torch.diag_embed(wanted) @ basis.mT,
        rtol=1e-6,
        atol=1e-6,
    )


def test_a_decomposition_that_fails_costs_its_own_block_its_new_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """That block keeps its last root, with a warning; the others get their new one."""
    eigh = torch.linalg.eigh
    factors = torch.diag_embed(torch.tensor([[1.0, 16.0], [13.0, 2.0], [7.0, 81.0]]))

    def failing(matrices: torch.Tensor) -> Any:
        if (matrices == 13.0).any():
            raise torch.linalg.LinAlgError
        return eigh(matrices)

    monkeypatch.setattr(torch.linalg, "eigh", failing)
    with pytest.warns(UserWarning, match=r"\beigh\b"):
        roots = inverse_roots(factors, torch.full((3, 2, 2), 5.0), 4, 1e-12, 0.0)
    assert (roots[1] == 5.0).all() and roots.dtype == torch.float32
    for number in (0, 2):
        torch.testing.assert_close(roots[number], torch.diag(factors[number].diagonal() ** -0.25))


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
        assert_same(values, expected, ["p0_40x24"])


@pytest.mark.parametrize(
    ("build", "got"),
    [
        (lambda p: Shampoo([p], lr=-1.0), "lr=-1.0"),
        (lambda p: Shampoo([p], block_size=0), "block_size=0"),
        (lambda p: Shampoo([p], grafting="rms"), "grafting='rms'"),
        (lambda p: Shampoo([p], relative_eps=-1.0), "relative_eps=-1.0"),
        (lambda p: Shampoo([torch.nn.Parameter(torch.zeros(2, 2, 2, 2))]), "(2, 2, 2, 2)"),
    ],
)
def test_mistakes_are_refused(build: Callable[[torch.Tensor], Any], got: str) -> None:
    """What cannot be is refused when the optimizer is built."""
    with pytest.raises(LayoutError) as caught:
        build(torch.nn.Parameter(torch.zeros(4, 4)))
    assert got in str(caught.value.got)
