"""A run that resumes has the optimizer's state bit for bit, whatever its dtype and that of its parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from vescale_fsdp.checkpoint import load, save
from vescale_fsdp.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

_BF16, _FP16, _FP32, _FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


class Keeping(torch.optim.Optimizer):
    """Element-wise, with state of a dtype of its own: moments, counts of several types, and a container."""

    def __init__(self, params: Any, lr: float = 0.25, dtype: torch.dtype = _FP32) -> None:
        super().__init__(params, {"lr": lr})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["average"] = torch.zeros_like(param, dtype=self._dtype)
                    state["count"] = torch.tensor(300.0)  # no bf16 number comes after 256 but 258
                    state["seen"] = torch.tensor(301)
                    state["signs"] = torch.zeros_like(param, dtype=torch.bool)
                    state["more"] = {
                        "square": torch.zeros_like(param, dtype=self._dtype),
                        "list": [torch.tensor(0.1)],
                    }
                state["count"] += 1
                state["seen"] += 1
                state["signs"] = param.grad > 0
                state["average"].lerp_(param.grad.to(self._dtype), 0.125)
                state["more"]["square"].add_(param.grad.to(self._dtype).square() * state["count"])
                change = state["average"] / (state["more"]["square"].sqrt() + state["more"]["list"][0])
                param.sub_((group["lr"] * change).to(param.dtype))


class Derived(torch.optim.AdamW):
    """Of a class that torch does not define."""


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam": lambda params: torch.optim.Adam(params, weight_decay=0.1, amsgrad=True),
    "AdamW": torch.optim.AdamW,
    "AdamW, a tensor as rate": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01), foreach=False),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, fused=True),
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adadelta": torch.optim.Adadelta,
    "Adagrad": torch.optim.Adagrad,
    "Adafactor": torch.optim.Adafactor,
    "ASGD": torch.optim.ASGD,
    "RMSprop": lambda params: torch.optim.RMSprop(params, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Derived": Derived,
    **{
        f"Keeping {dtype}": lambda params, dtype=dtype: Keeping(params, dtype=dtype)
        for dtype in (_FP32, _FP64, _BF16)
    },
}
# Classes of torch whose step takes state of another dtype than the parameter's. Adagrad's does too, but has state when
# it is made, in the parameter's dtype, and so refuses another one.
MIXED = ("SGD", "Adadelta", "ASGD", "Rprop")


def _model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False)).to(dtype)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        model(torch.randn(5, 3).to(next(model.parameters()).dtype)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, Any]]:
    """Names, dtypes and bits of parameters and state."""
    found: list[tuple[str, Any]] = []

    def visit(value: Any, name: str) -> None:
        if isinstance(value, torch.Tensor):
            found.append((f"{name} {value.dtype}", value.detach().reshape(-1).view(torch.uint8).tolist()))
        elif isinstance(value, (dict, list, tuple)):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in items:
                visit(item, f"{name}.{key}")
        else:
            found.append((name, value))

    visit({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "")
    return sorted(found, key=lambda pair: pair[0])


def _save_torch(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


def _load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    load(path, {"model": model, "optimizer": optimizer})


def _save_dcp(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    dcp.save(dict(zip("mo", get_state_dict(model, optimizer), strict=True)), checkpoint_id=path, no_dist=True)


def _load_dcp(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = dict(zip("mo", get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=path, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=state["m"], optim_state_dict=state["o"])


WAYS: dict[str, tuple[Callable[..., object], Callable[..., object]]] = {
    "native": (lambda path, m, o: save(path, {"model": m, "optimizer": o}), _load),
    "torch": (_save_torch, _load),
    "dcp": (_save_dcp, _load_dcp),
}


@pytest.mark.parametrize("own", [None, _FP32, _FP64], ids=str)
@pytest.mark.parametrize("dtype", [_FP32, _BF16, _FP16, _FP64], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_resumes_with_the_same_bits(
    name: str, dtype: torch.dtype, own: torch.dtype | None, tmp_path: Path
) -> None:
    """Three steps, a new process's model and optimizer, and three more: as six steps, by every way to save and load."""
    if own is not None and (name not in MIXED or own == dtype):
        return
    model = _model(dtype)
    optimizer = OPTIMIZERS[name](model.parameters())
    _train(model, optimizer, range(3))
    for parts in optimizer.state.values() if own is not None else ():
        parts |= {
            kind: value.to(own)
            for kind, value in parts.items()
            if isinstance(value, torch.Tensor) and value.ndim
        }
    for way, (save_to, _) in WAYS.items():
        save_to(tmp_path / way, model, optimizer)
    saved = _bits(model, optimizer)
    _train(model, optimizer, range(3, 6))
    for way, (_, load_from) in WAYS.items():
        again = _model(dtype)
        resumed = OPTIMIZERS[name](again.parameters())
        load_from(tmp_path / way, again, resumed)
        if way != "dcp" or own is None:  # DCP reads into the state of a new optimizer, in its dtype
            assert _bits(again, resumed) == saved, way
            _train(again, resumed, range(3, 6))
            assert _bits(again, resumed) == _bits(model, optimizer), way


@pytest.mark.parametrize("stepped", [False, True])
def test_a_load_that_casts_gives_state_the_dtypes_of_the_state(stepped: bool, tmp_path: Path) -> None:
    """Those of the optimizer's own state, or of its parameters before the first step; counts keep theirs."""
    model = _model(_FP32)
    optimizer = Keeping(model.parameters())
    _train(model, optimizer, range(2))
    save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    again = _model(_BF16)
    resumed = Keeping(again.parameters(), dtype=_FP64)
    if stepped:
        _train(again, resumed, range(1))
    load(tmp_path / "c", {"model": again, "optimizer": resumed}, dtype="state")
    (state, *_), (whole, *_) = resumed.state.values(), optimizer.state.values()
    assert state["average"].dtype == (_FP64 if stepped else _BF16)
    assert torch.equal(state["average"], whole["average"].to(state["average"].dtype))
    assert (state["count"].item(), state["count"].dtype, state["seen"].item()) == (302, _FP32, 303)
    assert next(again.parameters()).dtype == _BF16


@pytest.mark.parametrize("way", ["native", "torch"])
def test_a_group_without_parameters_gets_its_options(way: str, tmp_path: Path) -> None:
    """By its place among those without parameters, also if groups are divided otherwise."""

    def made(lr: float, groups: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = _model(_FP32)
        one, *rest = [list(layer.parameters()) for layer in model]
        filled = [one, *rest] if groups == 4 else [one + rest[0]]
        params = [filled[0], [], *filled[1:], []]
        return model, torch.optim.AdamW(
            [{"params": p, "lr": lr * (n + 1)} for n, p in enumerate(params)], lr=lr
        )

    model, optimizer = made(0.5, 4)
    for group in optimizer.param_groups[::2]:
        group["lr"] = 0.75
    WAYS[way][0](tmp_path / "c", model, optimizer)
    for groups in (4, 3) if way == "native" else (4,):
        again, resumed = made(0.01, groups)
        _load(tmp_path / "c", again, resumed)
        rates = [group["lr"] for group in resumed.param_groups]
        assert rates == ([0.75, 1.0, 0.75, 2.0] if groups == 4 else [0.75, 1.0, 2.0])


@pytest.mark.parametrize("flat", [False, True])
def test_the_state_of_frozen_parameters_is_kept(flat: bool) -> None:
    """A parameter that is frozen when its state is loaded, and not before, goes on with its moments."""
    # torch flattens no lists.
    made: Any = torch.optim.AdamW if flat else Keeping
    model, again = _model(_BF16), _model(_BF16)
    again[0].weight.requires_grad_(False)
    optimizer, resumed = made(model.parameters()), made(again.parameters())
    _train(model, optimizer, range(2))
    options = {"flatten_optimizer_state_dict": flat}
    state = get_optimizer_state_dict(model, optimizer, options=_options(**options))
    set_optimizer_state_dict(again, resumed, state, options=_options(**options))
    kinds = resumed.state[again[0].weight]
    assert not again[0].weight.requires_grad and again[0].bias.requires_grad
    for kind, value in optimizer.state[model[0].weight].items():
        if isinstance(value, torch.Tensor):
            assert kinds[kind].dtype == value.dtype and torch.equal(kinds[kind], value), kind


def _options(**settings: Any) -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(**settings)


@pytest.mark.parametrize("dtype", [_FP32, _FP16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_reading_the_state_takes_no_step(name: str, dtype: torch.dtype) -> None:
    """Before the first step the getter changes nothing; what it returns is what the run begins with."""
    model, other = _model(dtype), _model(dtype)
    optimizer, untouched = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](other.parameters())
    before = [param.detach().clone() for param in model.parameters()]
    state = get_optimizer_state_dict(model, optimizer)
    assert all(map(torch.equal, before, model.parameters())) and all(
        p.grad is None for p in model.parameters()
    )
    assert optimizer.state_dict()["state"] == {} or name == "Adagrad"  # which has state when it is made
    fresh = _model(dtype)
    resumed = OPTIMIZERS[name](fresh.parameters())
    set_optimizer_state_dict(
        fresh, resumed, copy.deepcopy(state)
    )  # Adagrad's are the optimizer's own tensors
    for each, own in ((model, optimizer), (other, untouched), (fresh, resumed)):
        _train(each, own, range(3))
    expected = _bits(other, untouched)
    assert _bits(model, optimizer) == expected
    if not name.startswith("Keeping"):  # whose state begins with counts that a step has changed
        assert _bits(fresh, resumed) == expected
