"""What a page's code trained, compared with the same training in one process without any of this library."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import nn

import vescale_fsdp.optim
from tests.house.docs.page_blocks import Block
from tests.support.optim_cases import full_value
from vescale_fsdp.checkpoint import load
from vescale_fsdp.optim import AdamWOptions
from vescale_fsdp.quantize import QuantizedGather


def assert_trained_alike(
    checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer, most: float
) -> None:
    """Compare weights and optimizer state of a checkpoint with those of a run that was never interrupted.

    Args:
        most: relative difference of a tensor, by norm, that rounding in another order makes.
    """
    expected = {name: param.detach().clone() for name, param in model.named_parameters()}
    moments = {name: dict(optimizer.state[param]) for name, param in model.named_parameters()}
    assert len(moments) > 2 and all(state["step"] > 1 for state in moments.values())
    kept = {name: {kind: value.clone() for kind, value in state.items()} for name, state in moments.items()}
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    optimizer.state.clear()

    load(checkpoint, {"model": model, "optimizer": optimizer})

    for name, param in model.named_parameters():
        state = optimizer.state[param]
        assert state["step"].item() == kept[name]["step"].item(), name
        pairs = {"": (param, expected[name])}
        pairs |= {kind: (state[kind], kept[name][kind]) for kind in ("exp_avg", "exp_avg_sq")}
        for kind, (found, wanted) in pairs.items():
            assert ((found - wanted).norm() / wanted.norm()).item() < most, (name, kind)


# -- blocks, run once as they are and once without this library ------------------------------------------------

_TRAINS = re.compile(r"\.(?:backward|step|step_in_backward)\(")
# What a page's last block only defines, called.
_CALLED = {
    "docs/state_in_motion.md": """
from types import SimpleNamespace
training = build(torch.distributed.device_mesh.init_device_mesh("cpu", (1,)))
for step in (1, 2):
    train_step(SimpleNamespace(training=training), step)
model, optimizer = training.model, training.optimizer
""",
}


def trains(block: Block) -> bool:
    """Whether a block has a training step in it."""
    return block.language == "python" and _TRAINS.search(block.text) is not None


class Trained(NamedTuple):
    """What a block has trained."""

    start: dict[str, torch.Tensor]  # weights of the model that was there already, by name
    losses: list[float]
    values: dict[str, torch.Tensor]  # weights, gradients, and what optimizers keep of them, by name


def trained_by(
    page: str, blocks: Sequence[Block], plain_beside: Sequence[Trained] | None = None
) -> Iterator[Trained]:
    """Run a page's python on one rank; what each block that trains has left.

    Args:
        plain_beside: run without this library, from the weights that these began with.
    """
    beside = iter(plain_beside or ())
    names: dict[str, Any] = {"__name__": "__main__"}
    with ExitStack() as stack:
        if plain_beside is not None:
            for patch in _plain_names():
                stack.enter_context(patch)
        losses = stack.enter_context(_noted_losses())
        for place, block in enumerate(blocks):
            if trains(block) and plain_beside is not None:
                _set_weights(names.get("model"), next(beside).start)
            start = _values(names["model"], None) if "model" in names else {}
            torch.manual_seed(place)
            called = _CALLED.get(page, "") if trains(block) else ""
            exec(compile(block.text + called, "<page>", "exec"), names)  # noqa: S102  pages are ours
            if trains(block):
                yield Trained(start, losses.copy(), _values(names["model"], names.get("optimizer")))
                losses.clear()


def _set_weights(model: nn.Module | None, weights: Mapping[str, torch.Tensor]) -> None:
    """Begin where the other run began: our random numbers are not torch's."""
    with torch.no_grad():
        for name, param in model.named_parameters() if model is not None else ():
            param.copy_(weights[name])


def assert_alike(found: Trained, expected: Trained) -> None:
    """Compare losses, weights, gradients and optimizer state; moments that are kept in 8 bits are left out."""
    assert found.losses
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    assert any(name.endswith((".grad", "/step", "/momentum_buffer")) for name in found.values)
    is_coded = any(name.endswith("_codes") for name in found.values)
    for name, value in expected.values.items():
        if not (is_coded and "/exp_avg" in name):
            torch.testing.assert_close(found.values[name], value, rtol=1e-5, atol=1e-7, msg=name)


@contextmanager
def _noted_losses() -> Iterator[list[float]]:
    """The values that backwards begin with."""
    noted: list[float] = []
    backward = torch.Tensor.backward

    def noting(tensor: torch.Tensor, *arguments: Any, **options: Any) -> None:
        noted.append(tensor.item())
        backward(tensor, *arguments, **options)

    with mock.patch.object(torch.Tensor, "backward", noting):
        yield noted


def _values(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    found = {}
    for name, param in model.named_parameters():
        found[name] = full_value(param)
        if param.grad is not None:
            found[f"{name}.grad"] = full_value(param.grad)
        state = {} if optimizer is None else optimizer.state.get(param, {})
        found |= {f"{name}/{key}": full_value(torch.as_tensor(value)) for key, value in state.items()}
    return found


def _plain_names() -> list[Any]:
    """What pages import, without sharding: one rank has everything."""
    changes = {
        vescale_fsdp: {"fully_shard": _unsharded, "FSDPModule": nn.Module},
        torch.distributed.fsdp: {"FSDPModule": nn.Module},
        vescale_fsdp.optim: {
            "Muon": _PlainMuon,
            "AdamW8bit": _PlainAdamW,
            "Shampoo": _PlainAdam,
            "step_in_backward": _plain_in_backward,
        },
    }
    return [
        mock.patch.object(module, name, plain)
        for module, names in changes.items()
        for name, plain in names.items()
    ]


def _unsharded(module: Any, *, mp_policy: Any = None, **options: Any) -> Any:
    """The module, or a list of modules, computing in the policy's dtype."""
    for each in module if isinstance(module, list) else [module]:
        each.no_sync, each.model_layout = nullcontext, mock.Mock()
        for layer in each.modules():
            if mp_policy is not None and next(layer.children(), None) is None:
                layer.forward = partial(_cast_forward, layer, mp_policy)
    return module


class _Instead(torch.autograd.Function):
    """Another value in a parameter's place, whose gradient is the parameter's."""

    @staticmethod
    def forward(ctx: Any, param: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad.float(), None


def _cast_forward(layer: nn.Module, policy: Any, x: torch.Tensor) -> torch.Tensor:
    """The layer's forward with weights as the policy sends them: rounded to its codec, and cast."""
    params: Any = layer._parameters
    layer._parameters = {name: _Instead.apply(param, _sent(param, policy)) for name, param in params.items()}
    try:
        return type(layer).forward(layer, x.to(policy.param_dtype))  # type: ignore[no-any-return]
    finally:
        layer._parameters = params


def _sent(param: torch.Tensor, policy: Any) -> torch.Tensor:
    value = param.detach()
    if isinstance(policy, QuantizedGather) and value.ndim == 2:
        value = policy.codecs.quantize(value).dequantize()
    return value.to(policy.param_dtype)


def _plain_in_backward(model: Any, optimizer: Any) -> None:
    """Gradients are gone behind the step."""
    optimizer.register_step_post_hook(lambda stepped, *call: stepped.zero_grad())


class _PlainMuon:
    """torch's Muon, and its AdamW for the rest."""

    granularity = vescale_fsdp.optim.Muon.granularity
    split_params = vescale_fsdp.optim.Muon.split_params

    def __init__(self, matrices: Any, *, lr: float, adamw_params: Any) -> None:
        adamw = torch.optim.AdamW(adamw_params, **asdict(AdamWOptions()))
        self.parts = [torch.optim.Muon(matrices, lr=lr), adamw]

    def step(self) -> None:
        for part in self.parts:
            part.step()

    @property
    def state(self) -> dict[torch.Tensor, Any]:
        return {param: state for part in self.parts for param, state in part.state.items()}


class _PlainAdamW(torch.optim.AdamW):
    """What 8-bit AdamW's first step is, whose moments are quantized behind it."""

    granularity = vescale_fsdp.optim.AdamW8bit.granularity


class _PlainAdam(torch.optim.Adam):
    """What Shampoo's first steps are, before it has roots."""

    granularity = vescale_fsdp.optim.Shampoo.granularity

    def __init__(self, params: Any, *, lr: float, block_size: int, update_every: int) -> None:
        super().__init__(params, lr=lr)
