"""A step never makes the host wait for a device: nothing in it reads a value of a device's tensor.

What would be on a device (parameters, gradients, state, temporaries) is fake: it has no values, and an operator that
needs one, such as ``item`` or ``nonzero``, raises. What is on the host (step counts, learning rates) is real.
Optimizers take their path for accelerators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vescale_fsdp.optim import (
    AdamW8bit,
    Muon,
    Shampoo,
    adamw8bit,
    muon,
    shampoo_blocks,
    structured_optimizer,
)
from vescale_fsdp.torch_modes import outside_fake_mode

SHAPES = [(64, 48), (64, 48), (2, 24, 16), (16,)]
ATEN = torch.ops.aten
COPIES = (ATEN.copy_.default, ATEN._foreach_copy_.default)
TO_HOST = (torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.to)


class HostSync(Exception):
    """A copy to the host, for which it waits."""


class _Devices(TorchDispatchMode):
    """Computes on the host what only has tensors of the host, and numbers; all other tensors are fake."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        fake = [isinstance(each, FakeTensor) for each in given]
        if func in COPIES and any(fake) and not fake[0]:
            raise HostSync(str(func))
        if given and not any(fake):
            with outside_fake_mode():
                return func(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if given or not isinstance(result, torch.Tensor) or result.dim():
            return result
        with outside_fake_mode():  # a number, such as a step count
            return func(*args, **(kwargs or {}))


class _NoCopies(TorchFunctionMode):
    """Refuses what brings a device's tensor to the host; here, where both are one device, no operator would show it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in TO_HOST and isinstance(args[0], FakeTensor):
            where = [
                str(each) for each in tree_leaves((args[1:], kwargs)) if not isinstance(each, torch.Tensor)
            ]
            if func is not torch.Tensor.to or "cpu" in where:
                raise HostSync(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _devices() -> Iterator[None]:
    """Fake devices, whose operators are launches."""
    for signed in (True, False):
        adamw8bit.DynamicMap.of(signed, torch.device("cpu"))  # cached, so never fake
    with ExitStack() as stack:
        for module in (structured_optimizer, muon, shampoo_blocks):
            stack.enter_context(mock.patch.object(module, "launches", return_value=True))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_Devices())
        stack.enter_context(_NoCopies())
        yield


def step_thrice(make: Callable[[list[torch.nn.Parameter]], Any], dtype: torch.dtype = torch.float32) -> None:
    """Three steps with a scheduler's learning rates."""
    params = [torch.nn.Parameter(torch.empty(shape, dtype=dtype)) for shape in SHAPES]
    assert all(isinstance(param, FakeTensor) for param in params)
    optimizer = make(params)
    for step in range(3):
        for param in params:
            param.grad = torch.empty_like(param)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 / (step + 1)
        optimizer.step()
    assert isinstance(optimizer.state[params[0]][next(iter(optimizer.state[params[0]]))], torch.Tensor)


OPTIMIZERS: dict[str, Callable[[list[torch.nn.Parameter]], Any]] = {
    "Muon": lambda params: Muon(params[:-1], adamw_params=params[-1:]),
    "Shampoo": lambda params: Shampoo(params, block_size=32, update_every=2, start_step=2),
    "AdamW8bit": lambda params: AdamW8bit(params, min_8bit_numel=3000),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.part("numerics"))]
)
def test_steps_never_wait_for_a_device(name: str, dtype: torch.dtype) -> None:
    """Three steps of every optimizer, whose second and third use what earlier ones have planned."""
    step_thrice(OPTIMIZERS[name], dtype)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: bool(x.isnan().any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: torch.zeros(()).copy_(x.sum()),
    ],
)
def test_reads_are_seen(read: Callable[[torch.Tensor], Any]) -> None:
    """Negative control: what makes the host wait raises here."""
    with pytest.raises((HostSync, DataDependentOutputException, DynamicOutputShapeException)):
        read(torch.empty(3))
