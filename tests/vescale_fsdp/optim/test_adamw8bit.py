"""AdamW8bit: torchao's arithmetic, and 2.03 bytes of state. What cuts change stands in `test_any_cut`."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import distribute_tensor as stock_distribute

from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.optim_cases import (
    as_plain,
    as_ragged,
    full_tensors,
    train,
)
from vescale_fsdp import Element, Flat, Tiles
from vescale_fsdp.errors import LayoutError
from vescale_fsdp.optim import AdamW8bit, structured_optimizer

OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


@pytest.fixture(scope="module")
def torchao_adam() -> ModuleType:
    """torchao's optimizer module; its import reports kernels that this machine cannot load."""
    logging.getLogger("torchao").setLevel(logging.CRITICAL)
    pytest.importorskip("torchao", reason="the oracle of this test: pip install torchao")
    return importlib.import_module("torchao.optim.adam")


def test_the_arithmetic_is_torchaos(torchao_adam: ModuleType) -> None:
    """Ten steps of torchao's single_param_adam, run eagerly, give the same parameters, codes and scales."""
    full = full_tensors([(64, 80)], 0)["p0_64x80"]
    theirs, ours = full.clone(), torch.nn.Parameter(full.clone())
    state_of = torchao_adam.OptimState8bit.zeros
    exp_avg, exp_avg_sq = state_of(full.shape, True, 256), state_of(full.shape, False, 256)
    optimizer = AdamW8bit([ours], **OPTIONS)
    step, lr = torch.tensor(0.0), torch.tensor(OPTIONS["lr"])
    for number in range(10):
        grad = full_tensors([(64, 80)], 50 + number)["p0_64x80"]
        ours.grad = grad.clone()
        optimizer.step()
        step += 1
        torchao_adam.single_param_adam(
            theirs,
            grad,
            step,
            exp_avg,
            exp_avg_sq,
            None,
            lr,
            0.9,
            0.999,
            OPTIONS["weight_decay"],
            1e-8,
            True,
            False,
        )

    assert torch.equal(ours, theirs)
    assert torch.equal(optimizer.state[ours]["exp_avg_codes"], exp_avg.codes)
    assert torch.equal(optimizer.state[ours]["exp_avg_sq_scales"], exp_avg_sq.scale)


def test_it_stays_near_adamw() -> None:
    """Twenty steps stay within a few per cent of fp32 AdamW's way."""
    full = full_tensors([(64, 80)], 0)
    eight, exact = as_plain(full), as_plain(full)
    train(AdamW8bit(list(eight.values()), lr=1e-3), eight, range(20))
    train(torch.optim.AdamW(list(exact.values()), lr=1e-3), exact, range(20))
    start, way = full["p0_64x80"], exact["p0_64x80"] - full["p0_64x80"]

    assert ((eight["p0_64x80"] - start - way).norm() / way.norm()).item() < 0.1


@pytest.mark.parametrize(("block", "most"), [(Flat(256), 2.035), (Flat(2048), 2.008), (Tiles(32, 32), 2.01)])
def test_bytes_of_state(block: Flat | Tiles, most: float) -> None:
    """A million parameters have 2.03 bytes of state each (2.004 with blocks of 2048)."""
    param = torch.nn.Parameter(torch.zeros(1024, 1024))
    state = AdamW8bit([param], block=block).state[param]

    assert 2 < sum(t.numel() * t.element_size() for t in state.values()) / param.numel() < most


def eligible_run(rows: int) -> list[str]:
    """Names of the state of a parameter of which each rank holds little."""
    params = as_ragged({"w": torch.zeros(rows, 64)}, cpu_mesh(), AdamW8bit.granularity())
    (param,) = params.values()
    return sorted(AdamW8bit([param]).state[param])


def test_precision_goes_by_global_size() -> None:
    """4096 elements over 4 ranks are 8-bit on every rank, though each holds but 1024; 4032 are fp32."""
    eight = ["exp_avg_codes", "exp_avg_scales", "exp_avg_sq_codes", "exp_avg_sq_scales", "step"]
    assert run_ranks(4, eligible_run, 64) == [eight] * 4
    assert run_ranks(4, eligible_run, 63) == [["exp_avg", "exp_avg_sq", "step"]] * 4


def test_a_group_may_keep_fp32_state() -> None:
    """state_bits=32 keeps fp32 moments even beside bf16 parameters."""
    param = torch.nn.Parameter(torch.zeros(128, 64, dtype=torch.bfloat16))
    optimizer = AdamW8bit([{"params": [param], "state_bits": 32}])

    assert optimizer.state[param]["exp_avg"].dtype == torch.float32


def misaligned_run() -> tuple[str, float]:
    """The refusal's text, and how far quantizing misaligned pieces would be off."""
    full = full_tensors([(33, 130)], 0)
    try:
        AdamW8bit(list(as_ragged(full, cpu_mesh(), Element()).values()))
    except LayoutError as error:
        refusal = str(error)
    # What would happen: each piece quantized by itself, as if it were a tensor.
    params = as_ragged(full, cpu_mesh(), Element())
    ((fqn, param),) = params.items()
    piece = torch.nn.Parameter(param.to_local().detach().clone().view(1, -1))  # type: ignore[attr-defined]
    optimizer = AdamW8bit([piece], **OPTIONS, min_8bit_numel=1)
    for step in range(4):
        grad = next(iter(full_tensors([(33, 130)], 100 + step).values()))
        piece.grad = grad.view(-1)[slice(*param.piece)].clone().view(1, -1)  # type: ignore[attr-defined]
        optimizer.step()
    whole = torch.nn.Parameter(full[fqn].clone())
    right = train(AdamW8bit([whole], **OPTIONS), {fqn: whole}, range(4))[fqn]
    moved = (right.view(-1)[slice(*param.piece)] - piece.view(-1)).abs() > 0
    return refusal, moved.float().mean().item()  # type: ignore[attr-defined]


def test_a_cut_block_is_refused_because_it_would_differ() -> None:
    """Negative control: with a cut inside a block the numbers change; so the optimizer refuses, with the cure."""
    results = run_ranks(2, misaligned_run)
    assert "granularity=AdamW8bit.granularity()" in results[0][0]
    assert max(differing for _, differing in results) > 0.2


def columns_run() -> str:
    """The refusal for a parameter cut by columns."""
    param = torch.nn.Parameter(stock_distribute(torch.zeros(64, 64), cpu_mesh(), [Shard(1)]))
    assert isinstance(param, DTensor)
    with pytest.raises(LayoutError) as caught:
        AdamW8bit([param])
    AdamW8bit([{"params": [param], "state_bits": 32}])
    return str(caught.value)


def test_columns_are_refused_with_the_cure() -> None:
    """A parameter without contiguous pieces is refused; fp32 state takes it."""
    assert "state_bits=32" in run_ranks(2, columns_run)[0]


def spoiled_run(make: str) -> dict[str, torch.Tensor]:
    """Three steps; the second has a NaN and two infinities in its gradient."""

    def spoil(step: int, grads: dict[str, torch.Tensor]) -> None:
        if step == 1:
            flat = grads["p0_65x70"].view(-1)
            flat[300], flat[700], flat[701] = float("nan"), float("inf"), float("-inf")

    params = as_plain(full_tensors([(65, 70)], 0))
    cls: Any = AdamW8bit if make == "8bit" else torch.optim.AdamW
    return train(cls(list(params.values()), **OPTIONS), params, range(3), spoil)


def test_nan_and_inf_gradients_spoil_what_they_spoil_in_adamw() -> None:
    """The parameter becomes NaN at exactly AdamW's elements; the rest of their blocks goes on as before."""
    ours, theirs = spoiled_run("8bit")["p0_65x70"], spoiled_run("adamw")["p0_65x70"]
    assert theirs.isnan().sum() == 3
    assert torch.equal(ours.isnan(), theirs.isnan())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=3 * OPTIONS["lr"], equal_nan=True)


def test_overflow_freezes_the_element_as_in_adamw() -> None:
    """A gradient whose square overflows moves nothing and leaves the state finite."""
    param = torch.nn.Parameter(torch.zeros(64, 64))
    optimizer = AdamW8bit([param], lr=0.1, weight_decay=0.0)
    param.grad = torch.full((64, 64), 1e25)
    optimizer.step()

    assert (param == 0).all()
    assert optimizer.state[param]["exp_avg_sq_scales"].isfinite().all()


@pytest.mark.parametrize(
    ("build", "got"),
    [
        (lambda p: AdamW8bit([p], lr=-1.0), "lr=-1.0"),
        (lambda p: AdamW8bit([p], block=Element()), "Element()"),
        (lambda p: AdamW8bit([{"params": [p], "state_bits": 4}]), "4"),
        (lambda p: AdamW8bit([torch.nn.Parameter(torch.zeros(64, 64).t())]), "strides (1, 64)"),
    ],
)
def test_mistakes_are_refused(build: Callable[[torch.Tensor], Any], got: str) -> None:
    """What cannot be is refused when the optimizer is built."""
    with pytest.raises(LayoutError) as caught:
        build(torch.nn.Parameter(torch.zeros(64, 64)))
    assert got in str(caught.value.got)


def test_a_batch_writes_fp32_state_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two parameters that step as one batch, as on accelerators."""
    monkeypatch.setattr(structured_optimizer, "launches", lambda device: True)
    params = [torch.nn.Parameter(torch.zeros(4)) for _ in range(2)]
    optimizer = AdamW8bit([{"params": params, "state_bits": 32}], betas=(0.5, 0.75))
    for param in params:
        param.grad = torch.full((4,), 2.0)
    optimizer.step()
    for param in params:
        assert optimizer.state[param]["exp_avg"].tolist() == [1.0] * 4
        assert optimizer.state[param]["exp_avg_sq"].tolist() == [1.0] * 4
