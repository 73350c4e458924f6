"""Compiled steps of AdamW8bit: compiled once per kind, near eager ones, and eager where a process cannot compile."""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters

from tests.support.optim_cases import full_tensors
from vescale_fsdp import Flat, Tiles, torch_modes
from vescale_fsdp.optim import AdamW8bit, adamw8bit
from vescale_fsdp.torch_modes import CompiledFunction, compiles_on

SHAPES = [(64, 80), (40, 96), (33, 65), (7,), (64, 96), (4, 64)]
MORE = pytest.mark.part("numerics")
# Inductor imports what torch 2.13 itself deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is compiled yet, and no process was asked."""
    torch._dynamo.reset()
    torch_modes._compiles.cache_clear()
    monkeypatch.setattr(adamw8bit, "_UPDATE", CompiledFunction(adamw8bit._update, for_small=True))
    yield
    torch._dynamo.reset()
    torch_modes._compiles.cache_clear()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile traces, and runs what it has traced eagerly: the bits are those of eager steps."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr(torch_modes, "why_not_compiled", lambda device_type: None)


def made(is_compiled: bool, dtype: torch.dtype, **options: Any) -> tuple[AdamW8bit, list[torch.nn.Parameter]]:
    """Two groups of the same shapes, with other rates and a tensor as learning rate in the second."""
    params = [
        torch.nn.Parameter(each) for seed in (0, 1) for each in full_tensors(SHAPES, seed, dtype).values()
    ]
    half = len(params) // 2
    groups = [
        {"params": params[:half]},
        {
            "params": params[half:],
            "lr": torch.tensor(3e-3),
            "betas": (0.8, 0.95),
            "weight_decay": 0.1,
            "eps": 1e-6,
        },
    ]
    return AdamW8bit(groups, lr=1e-2, min_8bit_numel=2000, compiled=is_compiled, **options), params


def run(
    is_compiled: bool, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[list[torch.Tensor], list[int]]:
    """Four steps with learning rates of their own; all parameters and state, and graphs compiled after each step."""
    optimizer, params = made(is_compiled, dtype, **options)
    counters.clear()
    graphs = []
    for step in range(4):
        optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
        optimizer.param_groups[1]["lr"].mul_(0.7)
        grads = full_tensors([tuple(p.shape) for p in params], 100 + step, dtype).values()
        for number, (param, grad) in enumerate(zip(params, grads, strict=True)):
            param.grad = None if number == 1 and step == 1 else grad
        if step == 2:
            params[0].grad.view(-1)[70] = torch.inf  # type: ignore[union-attr]
        optimizer.step()
        graphs.append(counters["stats"]["unique_graphs"])
    states = [value for param in params for value in optimizer.state[param].values()]
    return [param.detach() for param in params] + states, graphs


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("block", "dtype"),
    [
        pytest.param(Flat(32), torch.float32, marks=MORE),
        pytest.param(Flat(256), torch.bfloat16, marks=MORE),
        pytest.param(Tiles(8, 32), torch.float32, marks=MORE),
    ],
)
def test_a_step_is_compiled_once(block: Any, dtype: torch.dtype) -> None:
    """Neither sizes, nor learning rates, nor other groups, nor missing gradients compile anything again."""
    (eager, _), (got, graphs) = run(False, dtype, block=block), run(True, dtype, block=block)
    for one, other in zip(got, eager, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert graphs[0] > 0
    assert graphs == [graphs[0]] * 4


@MORE
@pytest.mark.usefixtures("traced")
def test_more_kinds_than_torch_compiles_of_one_function() -> None:
    """Tiles in matrices of a dozen widths are a dozen kinds; torch alone gives up at eight."""
    params = [torch.nn.Parameter(torch.randn(64, 32 * width)) for width in range(1, 13)]
    optimizer = AdamW8bit(params, block=Tiles(32, 32), min_8bit_numel=0, compiled=True)
    before = [param.detach().clone() for param in params]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert all((param != old).all() for param, old in zip(params, before, strict=True))


@MORE
def test_few_kernels_near_eager() -> None:
    """Inductor makes at most 6 loops of a step over blocks; the last bit of averages is rounded otherwise."""
    from torch._inductor import metrics

    metrics.reset()
    params = [torch.nn.Parameter(torch.randn(64, 256)) for _ in range(3)]
    optimizer = AdamW8bit(params, compiled=True)
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    assert 0 < metrics.generated_cpp_vec_kernel_count <= 6
    (eager, _), (got, _) = run(False), run(True)
    for one, other in zip(got, eager, strict=True):
        if one.is_floating_point():
            torch.testing.assert_close(
                one, other, rtol=1e-3, atol=1e-3, equal_nan=True
            )  # a tenth of the rate
        else:  # codes at a threshold are rounded to its other side
            assert (one != other).float().mean() < 1e-2


@MORE
def test_compiled_steps_are_torchaos_compiled_steps() -> None:
    """torchao compiles its steps too: the same parameters and codes, in every bit."""
    pytest.importorskip("torchao", reason="the oracle of this test: pip install torchao")
    full = full_tensors([(64, 80)], 0)["p0_64x80"]
    ours, theirs = torch.nn.Parameter(full.clone()), torch.nn.Parameter(full.clone())
    one = AdamW8bit([ours], lr=1e-2, weight_decay=0.1, compiled=True)
    other = importlib.import_module("torchao.optim").AdamW8bit([theirs], lr=1e-2, weight_decay=0.1)
    for step in range(4):
        grad = full_tensors([(64, 80)], 50 + step)["p0_64x80"]
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        one.step()
        other.step()
    assert torch.equal(ours, theirs)
    assert torch.equal(one.state[ours]["exp_avg_codes"], other.state[theirs]["exp_avg"].codes)
    assert torch.equal(one.state[ours]["exp_avg_sq_codes"], other.state[theirs]["exp_avg_sq"].codes)


@MORE
def test_compiled_steps_do_not_depend_on_the_cut() -> None:
    """Blocks have the same bits wherever they are: in the whole tensor, or in pieces of 3, 1 and 16 blocks."""
    full, grad = (full_tensors([(80, 64)], seed)["p0_80x64"].view(-1, 256) for seed in (0, 1))

    def stepped(numbers: list[int]) -> torch.Tensor:
        params = [torch.nn.Parameter(part.clone()) for part in full.split(numbers)]
        optimizer = AdamW8bit(params, lr=1e-2, min_8bit_numel=0, compiled=True)
        for _ in range(3):
            for param, part in zip(params, grad.split(numbers), strict=True):
                param.grad = part.clone()
            optimizer.step()
        return torch.cat([param.detach() for param in params])

    assert torch.equal(stepped([20]), stepped([3, 1, 16]))


def _forked() -> AbstractContextManager[Any]:
    return mock.patch.object(torch_modes, "_OWN_PID", os.getpid() + 1)


def _without_compiler() -> AbstractContextManager[Any]:
    import torch._inductor.config

    return torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)})  # type: ignore[no-any-return]


@pytest.mark.parametrize("broken", [_forked, _without_compiler])
def test_steps_are_eager_where_nothing_compiles(broken: Callable[[], AbstractContextManager[Any]]) -> None:
    """After a fork, and without a compiler: the bits of eager steps, and one warning for all steps."""
    if broken is _forked:
        compiles_on("cpu")  # what the parent knows does not hold in the child
    eager, _ = run(False)
    with broken(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got, graphs = run(True)
    assert all(
        torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(got, eager, strict=True)
    )
    assert graphs == [0] * 4
    assert len([each for each in caught if each.category is UserWarning]) == 1


def test_a_device_without_a_backend_is_eager() -> None:
    """torch.compile has none for meta tensors; the process says so once."""
    with pytest.warns(UserWarning, match="meta"):
        assert not compiles_on("meta")
