"""Units whose pieces are loaded one after the other by ``load_state_dict(assign=True)``, from the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from tests.support.distributed import cpu_mesh, run_ranks, run_threads
from vescale_fsdp import RaggedDTensor, Rows, fully_shard
from vescale_fsdp.errors import LifecycleError
from vescale_fsdp.runtime.fsdp_state import state_of


class Model(nn.Module):
    """A unit of three modules around a block, with a buffer; the head may share the embedding's weight."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.emb = nn.Linear(11, 6, bias=False)
        self.block = nn.Linear(6, 6)
        self.head = nn.Linear(11, 6, bias=False)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.block(self.emb(x))) @ self.head.weight


VARIANTS = ("plain", "two dtypes", "rows", "tied")


def values(variant: str) -> Model:
    torch.manual_seed(3)
    model = Model(tied=variant == "tied")
    for buffer in (model.norm.running_mean, model.norm.running_var):
        assert buffer is not None
        buffer.uniform_(0.5, 2)
    nn.init.uniform_(model.norm.weight)
    if variant == "two dtypes":
        model.norm.to(torch.float64)
        model.block.bias.data = model.block.bias.data.double()
    return model


def shard(model: Model, variant: str, order: tuple[str, ...] = ("norm", "emb", "head")) -> Model:
    options: dict[str, Any] = {"mesh": cpu_mesh()}
    if variant == "rows":
        options |= {"granularity": Rows(2)}
    fully_shard([model.get_submodule(name) for name in order], **options)
    return fully_shard(model, **options)  # type: ignore[return-value]


def on_meta(variant: str, order: tuple[str, ...] = ("norm", "emb", "head")) -> Model:
    with torch.device("meta"):
        model = Model(tied=variant == "tied")
    if variant == "two dtypes":
        model.norm.to(torch.float64)
        model.block.bias = nn.Parameter(model.block.bias.double())
    return shard(model, variant, order)


def wrong(model: nn.Module, reference: nn.Module) -> list[str]:
    """What differs in a state dict, and in what a forward reads."""
    expected, found = reference.state_dict(), []
    for name, value in model.state_dict().items():
        full: Any = value.full_tensor() if isinstance(value, RaggedDTensor) else value
        if not torch.equal(full, expected[name]):
            found.append(name)
    for module in [model, *model.children()]:
        if state_of(module) is not None:
            module.unshard()  # type: ignore[operator]
    for name, param in model.named_parameters():
        if not torch.equal(param.detach(), reference.get_parameter(name).detach()):
            found.append(f"{name}, unsharded")
    assert len(list(model.named_parameters())) >= 5
    return found


CALLS: dict[str, list[list[str]]] = {
    "at once": [["norm", "emb", "block", "head"]],
    "backwards": [["head", "block", "emb", "norm"]],
    "one by one": [["emb"], ["head"], ["norm"], ["block"]],
    "one by one, last first": [["head"], ["block"], ["norm"], ["emb"]],
    "twice": [["head", "norm"], ["head", "norm", "emb", "block"], ["emb"]],
}


def load(variant: str, order: tuple[str, ...]) -> list[str]:
    reference = values(variant)
    full_state = shard(values(variant), variant, order).state_dict()
    found = []
    for name, calls in CALLS.items():
        model = on_meta(variant, order)
        for modules in calls:
            part = {k: v.clone() for m in modules for k, v in full_state.items() if k.startswith(f"{m}.")}
            if variant == "tied" and name != "at once":
                part.pop("head.weight", None)
            model.load_state_dict(part, assign=True, strict=False)
        found += [f"{name}: {each}" for each in wrong(model, reference)]
    return found


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("order", [("norm", "emb", "head"), ("head", "norm", "emb")])
def test_assigned_in_any_order(variant: str, order: tuple[str, ...]) -> None:
    """Every piece is there at the end, in the state dict and in the forward."""
    assert run_ranks(2, load, variant, order) == [[], []]


def load_other_ways(way: str) -> list[str]:
    reference = values("plain")
    full_state = {k: v.clone() for k, v in shard(values("plain"), "plain").state_dict().items()}
    model = on_meta("plain")
    if way == "to_empty first":
        model.load_state_dict({"head.weight": full_state["head.weight"]}, assign=True, strict=False)
        model.to_empty(device="cpu")
        model.load_state_dict(full_state, assign=True)
    elif way == "to_empty of one module":
        model.load_state_dict({"norm.weight": full_state["norm.weight"]}, assign=True, strict=False)
        model.emb.to_empty(device="cpu")
        model.load_state_dict(full_state, assign=True)
    elif way == "module by module":
        for name in ("head", "emb", "norm", "block"):
            part = {k.partition(".")[2]: v for k, v in full_state.items() if k.startswith(f"{name}.")}
            model.get_submodule(name).load_state_dict(part, assign=True)
    else:
        options = StateDictOptions(strict=True)
        model.to_empty(device="cpu")
        set_model_state_dict(model, full_state, options=options)
    return wrong(model, reference)


@pytest.mark.parametrize(
    "way", ["to_empty first", "to_empty of one module", "module by module", "set_model_state_dict"]
)
def test_loaded_in_other_ways(way: str) -> None:
    """Loading a part, materializing, loading all; each module by itself; torch's function."""
    assert run_ranks(2, load_other_ways, way) == [[], []]


def forgotten() -> str:
    full_state = shard(values("plain"), "plain").state_dict()
    model = on_meta("plain")
    part = {k: v.clone() for k, v in full_state.items() if k != "emb.weight"}
    model.load_state_dict(part, assign=True, strict=False)
    assert model.emb.weight.is_meta and not model.head.weight.is_meta
    with pytest.raises(LifecycleError) as caught:
        model(torch.randn(4, 11))
    return str(caught.value.got)


def test_what_was_not_loaded_is_named() -> None:
    """A piece that nobody loaded is an error, not zeros."""
    assert run_ranks(2, forgotten) == ["1.weight"] * 2  # of the second module of the list


def exchanged() -> float:
    """Equal pieces of one shard assigned to each other's parameters."""
    model = shard(values("plain"), "plain")
    state = model.state_dict()
    full = state["head.weight"].full_tensor()
    model.load_state_dict({**state, "emb.weight": state["head.weight"]}, assign=True)
    model.emb.unshard()  # type: ignore[operator]
    return float((model.emb.weight - full).abs().max())


def test_pieces_of_one_shard_change_places() -> None:
    """Being in the same memory is not enough: each piece must be at its own place."""
    assert run_ranks(1, exchanged) == [0.0]


def assigned_in_part() -> str:
    model = shard(values("plain"), "plain")
    model.emb.weight = nn.Parameter(model.emb.weight.detach().double())
    with pytest.raises(LifecycleError) as caught:
        model(torch.randn(4, 11))
    return str(caught.value.got)


def test_one_parameter_of_another_dtype_is_refused() -> None:
    """A group has one dtype, so a forward does not copy the pieces of two into one shard."""
    kinds = ["torch.float32 on cpu", "torch.float64 on cpu"]
    assert run_threads(2, assigned_in_part) == [str(kinds)] * 2
