"""Steps depend on gradients, not on how a BLAS library rounds.

Another processor is simulated by noise of one unit in the last place on every product and decomposition, and by the
code paths of MKL that this processor can run.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.faults.rounding_noise import RoundingNoise
from tests.support.optim_cases import as_plain, full_tensors, train
from tests.support.processes import run_command
from vescale_fsdp.optim import AdamW8bit, Muon, Shampoo
from vescale_fsdp.optim.shampoo_blocks import inverse_roots

SHAPES = [(24, 40), (33, 17), (5, 16, 24), (29,)]
SMALL_BLOCKS = {"block_size": 16, "update_every": 5}
CASES: dict[str, tuple[Any, dict[str, Any], list[tuple[int, ...]], float]] = {
    "shampoo": (Shampoo, SMALL_BLOCKS, SHAPES, 1e-4),
    "shampoo_ungrafted": (Shampoo, {**SMALL_BLOCKS, "grafting": "none"}, SHAPES, 1e-4),
    "shampoo_every_step": (Shampoo, {**SMALL_BLOCKS, "update_every": 1}, SHAPES, 1e-4),
    # Newton-Schulz is computed in bf16, whose unit in the last place is 8e-3, and raises small singular values.
    "muon": (Muon, {}, SHAPES[:3], 0.1),
    # The gradients have noise here. A moment at the border of two codes may take the other one.
    "adamw8bit": (AdamW8bit, {"min_8bit_numel": 1}, SHAPES, 1e-3),
}

MORE = pytest.mark.part("numerics")


def low_rank(step: int, grads: dict[str, torch.Tensor]) -> None:
    """Gradients of rank 2, as a small batch gives them: the factors of Shampoo have a null space."""
    generator = torch.Generator().manual_seed(step)
    for name, grad in grads.items():
        if grad.dim() > 1:
            *stack, rows, cols = grad.shape
            left = torch.randn(*stack, rows, 2, generator=generator)
            grads[name] = left @ torch.randn(*stack, 2, cols, generator=generator)


def way(name: str, gradients: str, seed: int | None) -> tuple[torch.Tensor, int]:
    """The change of all parameters in 20 steps, and how many results were rounded otherwise."""
    cls, options, shapes, _ = CASES[name]
    start = full_tensors(shapes, 0)
    params = as_plain(start)
    optimizer = cls(list(params.values()), lr=1e-2, **options)
    change = low_rank if gradients == "low_rank" else None
    if seed is None:
        end, num_changed = train(optimizer, params, range(20), change), 0
    else:
        with RoundingNoise(seed) as noise:
            end = train(optimizer, params, range(20), change)
        num_changed = noise.num_changed
    return torch.cat([(end[key] - start[key]).flatten() for key in start]), num_changed


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    assert one.isfinite().all() and other.isfinite().all() and one.norm() > 0
    return ((one - other).norm() / one.norm()).item()


@MORE
@pytest.mark.parametrize("gradients", ["low_rank", "full_rank"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=MORE if name in ("shampoo_every_step", "shampoo_ungrafted") else ())
        for name in CASES
    ],
)
def test_a_unit_in_the_last_place_stays_small(name: str, gradients: str) -> None:
    """Twenty steps with noise on every product end where those without it end."""
    exact, _ = way(name, gradients, None)
    for seed in (1, 2):
        noisy, num_changed = way(name, gradients, seed)
        assert num_changed or name == "adamw8bit"
        assert distance(exact, noisy) < CASES[name][3]


def test_rounding_shows_without_a_floor() -> None:
    """Negative control: with no floor that counts, the same noise changes the root of a factor without full rank."""
    grad = torch.randn(1, 16, 2, generator=torch.Generator().manual_seed(0))
    factors = grad @ grad.mT
    for relative_eps, is_stable in ((1e-6, True), (0.0, False)):
        exact = inverse_roots(factors, factors, 4, 1e-12, relative_eps)
        with RoundingNoise(1):
            noisy = inverse_roots(factors + factors * 1e-7 * torch.eye(16), factors, 4, 1e-12, relative_eps)
        assert (distance(exact, noisy) < 1e-3) == is_stable


STEPS = """
import sys, torch
from tests.vescale_fsdp.optim.test_rounding import CASES, way
torch.save({name: way(name, "low_rank", None)[0] for name in CASES}, sys.argv[1])
"""


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch is built without MKL")
@MORE
@pytest.mark.parametrize("path", ["COMPATIBLE", "AVX2"])
def test_every_code_path_of_mkl_agrees(path: str, tmp_path: Path) -> None:
    """``MKL_CBWR`` chooses MKL's code for another processor (one that this processor cannot run is its default)."""
    file = tmp_path / "ways.pt"
    run_command(
        [sys.executable, "-c", STEPS, str(file)],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "MKL_CBWR": path},
        check=True,
        timeout_s=300,
    )
    ways = torch.load(file)
    assert ways.keys() == CASES.keys()
    for name, theirs in ways.items():
        assert distance(way(name, "low_rank", None)[0], theirs) < CASES[name][3], name
