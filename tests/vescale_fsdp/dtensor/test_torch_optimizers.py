"""All of torch's optimizers on ragged parameters, beside one process; gradient clipping and scaling."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor
from torch.optim.optimizer import _foreach_supported_types as optim_types
from torch.utils._foreach_utils import _foreach_supported_types as util_types

from tests.support.distributed import cpu_mesh, run_cases, run_ranks
from tests.support.dtensor_conformance import plain
from vescale_fsdp import RaggedShard
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor, distribute_tensor
from vescale_fsdp.errors import UnsupportedOpError

WORLD = 3
SHAPES = ((7, 5), (6,), (4, 3, 2))
# Elements per rank: cut inside a row beside an empty rank; all on one rank; everywhere.
ELEMENT_PIECES = ((16, 0, 19), (0, 6, 0), (7, 9, 8))

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "ASGD": (torch.optim.ASGD, {"lr": 0.1, "t0": 1}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5, "weight_decay": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}),
    "Adam": (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
    "Adam tensor lr": (torch.optim.Adam, {"lr": torch.tensor(0.1), "capturable": False}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1}),
    "AdamW maximize": (torch.optim.AdamW, {"lr": 0.1, "maximize": True}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.1}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.1, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.1, "centered": True, "momentum": 0.9}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.1}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
}
FUSED = ("Adagrad", "Adam", "Adam tensor lr", "AdamW", "AdamW maximize", "SGD")
CASES = [
    pytest.param(name, form, id=f"{name}-{form}")
    for name in OPTIMIZERS
    for form in ("foreach", "loop", "fused")
    if (form != "fused" or name in FUSED) and (name, form) != ("Adam tensor lr", "foreach")
]


def values(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Values that are the same on all ranks."""
    real = plain(shape, seed)
    return torch.complex(real, plain(shape, seed + 1000)) if dtype.is_complex else real


def parameters(
    mesh: DeviceMesh, pieces: tuple[tuple[int, ...], ...], dtype: torch.dtype = torch.float32
) -> list[torch.nn.Parameter]:
    """Ragged parameters of the shapes above."""
    return [
        torch.nn.Parameter(
            distribute_tensor(values(shape, i, dtype), mesh, [RaggedShard.from_piece_numels(shape, numels)])
        )
        for i, (shape, numels) in enumerate(zip(SHAPES, pieces, strict=True))
    ]


def twins(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    """The same parameters, whole."""
    return [torch.nn.Parameter(values(shape, i, dtype)) for i, shape in enumerate(SHAPES)]


def set_gradients(params: list[torch.nn.Parameter], step: int) -> None:
    """Known gradients, placed as the parameters are."""
    for index, param in enumerate(params):
        grad = values(tuple(param.shape), 100 + 10 * step + index, param.dtype)
        if isinstance(param, RaggedDTensor):
            param.grad = distribute_tensor(grad, param.device_mesh, param.placements)
        else:
            param.grad = grad


def steps_are_equal(
    name: str, form: str, pieces: tuple[tuple[int, ...], ...], dtype: torch.dtype = torch.float32
) -> int:
    """Three steps on ragged parameters and on whole ones; returns how many elements are here."""
    cls, options = OPTIMIZERS[name]
    options = {
        **options,
        **{"foreach": {"foreach": True}, "fused": {"fused": True}}.get(form, {"foreach": False}),
    }
    ragged, whole = parameters(cpu_mesh(), pieces, dtype), twins(dtype)
    ours, theirs = cls(ragged, **options), cls(whole, **options)
    for step in range(3):
        for params, optimizer in ((ragged, ours), (whole, theirs)):
            set_gradients(params, step)
            optimizer.step()
    for param, twin in zip(ragged, whole, strict=True):
        assert isinstance(param, RaggedDTensor)
        torch.testing.assert_close(param.full_tensor(), twin.detach())
        for key, value in ours.state[param].items():
            want = theirs.state[twin][key]
            if isinstance(value, RaggedDTensor):
                assert value.placements == param.placements
                torch.testing.assert_close(value.full_tensor(), want)
            elif isinstance(value, torch.Tensor):
                assert value.ndim == 0
                torch.testing.assert_close(value, want)
    return sum(param.to_local().numel() for param in ragged)


@pytest.mark.parametrize("name, form", CASES)
def test_optimizer_equals_one_process(name: str, form: str) -> None:
    """Three steps give one process's parameters and states, with pieces cut inside rows and empty ones."""
    assert sum(run_ranks(WORLD, steps_are_equal, name, form, ELEMENT_PIECES)) == 35 + 6 + 24


@pytest.mark.parametrize("form", ["foreach", "loop"])
def test_complex_parameters(form: str) -> None:
    """The same of complex numbers, which torch's fused steps do not support."""
    names = [name for name in OPTIMIZERS if (name, form) != ("Adam tensor lr", "foreach")]
    cases = [(name, form, ELEMENT_PIECES, torch.complex64) for name in names]
    for numels in run_cases(WORLD, steps_are_equal, cases):
        assert sum(numels) == 35 + 6 + 24


def test_fast_paths_are_the_default() -> None:
    """Optimizers and utilities know the class, so foreach and fused stay their default on accelerators."""
    assert RaggedDTensor in optim_types and RaggedDTensor in util_types


def clipping_is_equal(order: float, foreach: bool | None, pieces: tuple[tuple[int, ...], ...]) -> float:
    """Clipping and the total norm, on ragged and on whole gradients; the norm."""
    ragged, whole = parameters(cpu_mesh(), pieces), twins()
    set_gradients(ragged, 0)
    set_gradients(whole, 0)
    grads = [p.grad for p in whole if p.grad is not None]
    total = torch.nn.utils.get_total_norm(
        [p.grad for p in ragged if p.grad is not None], order, foreach=foreach
    )
    want = torch.nn.utils.get_total_norm(grads, order)
    assert isinstance(total, DTensor)
    torch.testing.assert_close(total.full_tensor(), want)
    norm = torch.nn.utils.clip_grad_norm_(ragged, 0.5, norm_type=order, foreach=foreach)
    assert isinstance(norm, DTensor)
    torch.testing.assert_close(
        norm.full_tensor(), torch.nn.utils.clip_grad_norm_(whole, 0.5, norm_type=order)
    )
    for param, twin in zip(ragged, whole, strict=True):
        assert isinstance(param.grad, RaggedDTensor) and twin.grad is not None
        torch.testing.assert_close(param.grad.full_tensor(), twin.grad)
    return norm.full_tensor().item()


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("foreach", [True, False, None])
def test_clipping_equals_one_process(order: float, foreach: bool | None) -> None:
    """clip_grad_norm_ and get_total_norm are those of one process, for every order and path."""
    norms = run_ranks(WORLD, clipping_is_equal, order, foreach, ELEMENT_PIECES)

    assert norms[0] > 0.5 and norms == [norms[0]] * WORLD


def beside_stock_dtensors() -> None:
    """Some parameters are torch's own DTensors, as those of tensor parallelism that sharding ignores."""
    mesh = cpu_mesh()
    mixed, whole = parameters(mesh, ELEMENT_PIECES), twins()
    mixed[1] = torch.nn.Parameter(torch_distribute_tensor(plain(SHAPES[1], 1), mesh, [Shard(0)]))
    for foreach in (True, False):
        steps = [torch.optim.AdamW(params, lr=0.1, foreach=foreach) for params in (mixed, whole)]
        for params, optimizer in zip((mixed, whole), steps, strict=True):
            for index, param in enumerate(params):
                param.grad = torch.zeros_like(param)
                param.grad.add_(plain((), 7 + index).item())
            norm = torch.nn.utils.clip_grad_norm_(params, 0.5, foreach=foreach)
            optimizer.step()
        assert norm > 0.5
        for param, twin in zip(mixed, whole, strict=True):
            assert (
                isinstance(param, DTensor) and twin.grad is not None and (twin - plain(twin.shape)).norm() > 0
            )
            torch.testing.assert_close(param.full_tensor(), twin.detach())
            assert isinstance(param.grad, DTensor)
            torch.testing.assert_close(param.grad.full_tensor(), twin.grad)
    sums = torch._foreach_add(mixed, 1.0)
    assert [type(each) for each in sums] == [RaggedDTensor, DTensor, RaggedDTensor]


def test_lists_beside_stock_dtensors() -> None:
    """Clipping and optimizer steps on lists of ours and of torch's own DTensors: torch does its own."""
    run_ranks(WORLD, beside_stock_dtensors)


def clip_values(order: float) -> None:
    ragged, whole = parameters(cpu_mesh(), ELEMENT_PIECES), twins()
    for params in (ragged, whole):
        set_gradients(params, 0)
        torch.nn.utils.clip_grad_value_(params, order)
    for param, twin in zip(ragged, whole, strict=True):
        assert isinstance(param.grad, RaggedDTensor)
        torch.testing.assert_close(param.grad.full_tensor(), twin.grad)


def test_clipping_by_value() -> None:
    """clip_grad_value_ is elementwise."""
    run_ranks(WORLD, clip_values, 0.3)


def broken_gradient(order: float, value: float) -> str:
    """Clipping with error_if_nonfinite where one rank has a bad element: the error's text."""
    params = parameters(cpu_mesh(), ELEMENT_PIECES)
    set_gradients(params, 0)
    grad = params[1].grad
    assert isinstance(grad, RaggedDTensor)
    if grad.to_local().numel():
        grad.to_local()[2] = value
    try:
        torch.nn.utils.clip_grad_norm_(params, 1.0, norm_type=order, error_if_nonfinite=True)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_gradients_are_seen_by_all(order: float, value: float) -> None:
    """A nan or inf on one rank is an error on every rank, whatever the order of the norm."""
    assert all("non-finite" in text for text in run_ranks(WORLD, broken_gradient, order, value))


def scaler_steps() -> list[tuple[float, bool]]:
    """GradScaler over a good, a bad and a good step: (scale, parameters moved)."""
    params = parameters(cpu_mesh(), ELEMENT_PIECES)
    optimizer = torch.optim.SGD(params, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    log = []
    for step in range(3):
        set_gradients(params, step)
        for param in params:
            assert isinstance(param.grad, RaggedDTensor)
            param.grad.mul_(8.0)
        bad = params[1].grad
        assert isinstance(bad, RaggedDTensor)
        if step == 1 and bad.to_local().numel():
            bad.to_local()[0] = math.inf
        scaler.scale(torch.zeros(()))  # the scaler wants to have seen a loss
        before = [p.detach().clone() for p in params]
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        moved = [bool((p.detach() - b).norm() > 0) for p, b in zip(params, before, strict=True)]
        assert all(moved) or not any(moved)
        log.append((scaler.get_scale(), all(moved)))
    return log


def test_grad_scaler_skips_the_bad_step_everywhere() -> None:
    """A non-finite gradient on one rank makes all ranks skip the step and halve the scale."""
    assert run_ranks(WORLD, scaler_steps) == [[(8.0, True), (4.0, False), (4.0, True)]] * WORLD


def outcomes(name: str) -> tuple[str, str]:
    """How a step ends on FSDP2's Shard(0) parameters, and on ragged ones."""
    mesh = cpu_mesh()
    cut = [RaggedShard((0,), (1, 2, 3))]
    stock = torch.nn.Parameter(torch_distribute_tensor(plain((6, 5)), mesh, [Shard(0)]))
    stock.grad = torch_distribute_tensor(plain((6, 5), 1), mesh, [Shard(0)])
    ours = torch.nn.Parameter(distribute_tensor(plain((6, 5)), mesh, cut))
    ours.grad = distribute_tensor(plain((6, 5), 1), mesh, cut)
    found = []
    for param in (stock, ours):
        optimizer = getattr(torch.optim, name)([param], lr=0.1)
        try:
            optimizer.step(lambda: torch.zeros(())) if name == "LBFGS" else optimizer.step()
            found.append("steps")
        except UnsupportedOpError as error:
            found.append(str(error))
            assert not optimizer.state and torch.equal(param.full_tensor(), plain((6, 5)))  # type: ignore[attr-defined]
        except RuntimeError:
            found.append("fails")
    return found[0], found[1]


@pytest.mark.parametrize(
    "name, stock, ours",
    [
        ("Adafactor", "fails", "vescale_fsdp.optim.AdamW8bit"),
        ("LBFGS", "steps", "steps"),
        ("Muon", "steps", "vescale_fsdp.optim.Muon"),
        ("SparseAdam", "fails", "torch.optim.Adam"),
    ],
)
def test_what_is_left_of_torch_optim_is_refused(name: str, stock: str, ours: str) -> None:
    """Optimizers that look beyond single elements end in an error that names another, before they change anything.

    FSDP2 itself fails for Adafactor and SparseAdam, halfway. LBFGS is a user of what is gathered (`test_utilities`).
    """
    for torchs, mine in run_ranks(WORLD, outcomes, name):
        assert stock in torchs and ours in mine
