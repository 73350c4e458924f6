"""The three ways a program runs: plain data parallelism, this library, and torch's FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import vescale_fsdp
from tests.support.hooked_tensors import Wrapper
from tests.vescale_fsdp.runtime.fuzz.habits.model import Model, build
from tests.vescale_fsdp.runtime.fuzz.habits.program import Program

Hook = Callable[[torch.Tensor], None]


class Doubled(Wrapper):
    """Sends its values times two, which rounds nothing."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor], None]:
        return (self._data * 2,), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        (twice,) = outputs
        if out is not None:
            out = out.to_local() if isinstance(out, DTensor) else out
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                torch.mul(twice, 0.5, out=out)
            return None
        full = twice * 0.5
        return full, (full,)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A whole tensor, whoever holds its parts."""
    tensor = tensor.detach()
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole._data if isinstance(whole, Wrapper) else whole


class Engine:
    """One way to train."""

    def build(self, program: Program) -> Any:
        """The model before it is sharded."""
        return build(program)

    def shard(self, model: Any, program: Program) -> None:
        """Shard the model."""

    def after_grad(self, param: nn.Parameter, hook: Hook) -> Callable[[], None]:
        """Call a hook when ``param.grad`` is there; returns what removes it."""
        raise NotImplementedError

    def unshard(self, model: Any) -> None:
        """Gather all units."""

    def reshard(self, model: Any) -> None:
        """Free all units."""

    def sync(self, model: Any, how: str) -> None:
        """Whether the next backward reduces gradients: "sync", "no_sync", "no_all_reduce"."""

    def stay(self, model: Any, now: bool) -> None:
        """Keep full parameters after the next backward, or not."""

    def reset(self, model: Any) -> None:
        """Forget an iteration that an exception ended."""

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        loss.backward(**options)


class Plain(Engine):
    """The model on every rank; each gradient is averaged when it has come, unless that waits for a later backward."""

    def __init__(self) -> None:
        self._now = True
        self._waiting: dict[nn.Parameter, None] = {}
        self._hooks: dict[nn.Parameter, list[Hook]] = {}

    def build(self, program: Program) -> Model:
        model = build(program)
        for param in model.parameters():
            trains = param.requires_grad
            param.requires_grad_(True).register_post_accumulate_grad_hook(self._come)
            param.requires_grad_(trains)
        return model

    def _come(self, param: Any) -> None:
        self._waiting[param] = None
        if self._now:
            self._reduce(param)

    def _reduce(self, param: nn.Parameter) -> None:
        del self._waiting[param]
        if param.grad is not None:
            dist.all_reduce(param.grad, dist.ReduceOp.AVG)
        for hook in list(self._hooks.get(param, ())):
            if param.grad is not None:
                hook(param)

    def after_grad(self, param: nn.Parameter, hook: Hook) -> Callable[[], None]:
        if not param.requires_grad:
            raise RuntimeError("torch registers no hook on a frozen parameter")
        hooks = self._hooks.setdefault(param, [])
        hooks.append(hook)
        return lambda: hooks.remove(hook)

    def sync(self, model: Any, how: str) -> None:
        self._now = how == "sync"

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        loss.backward(**options)
        for param in list(self._waiting) if self._now else ():
            self._reduce(param)

    def reset(self, model: Any) -> None:
        self._waiting.clear()


class _Sharded(Engine):
    fully_shard: Callable[..., Any]
    is_unit: Callable[[nn.Module], bool]

    def build(self, program: Program) -> Any:
        model = build(program)
        if program.unit == "self_gathering":
            for block in model.blocks:
                block.up.weight = nn.Parameter(
                    Doubled(block.up.weight.detach())
                )  # its rows divide by the ranks
        return model

    def shard(self, model: Any, program: Program) -> None:
        self._units = self._shard(model, program)

    def _shard(self, model: Any, program: Program) -> list[Any]:
        data = _mesh(program)
        if program.unit == "tp":
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            for block in model.blocks:
                parallelize_module(block, data["tp"], plan)
            data = data["data"]
        offload = CPUOffloadPolicy(pin_memory=False) if program.unit == "offloaded" else OffloadPolicy()
        options = {"mesh": data, "reshard_after_forward": program.reshard, "offload_policy": offload}
        if program.unit in ("hybrid", "zero1") and isinstance(self, Ours):
            options["shard_optimizer_over"] = "replicate"
        for unit in _units(model, program):
            type(self).fully_shard(unit, **options)
        return [module for module in model.modules() if type(self).is_unit(module)]

    def after_grad(self, param: nn.Parameter, hook: Hook) -> Callable[[], None]:
        return param.register_post_accumulate_grad_hook(hook).remove

    def unshard(self, model: Any) -> None:
        for unit in self._units:
            unit.unshard()

    def reshard(self, model: Any) -> None:
        for unit in self._units:
            unit.reshard()

    def sync(self, model: Any, how: str) -> None:
        model.set_requires_gradient_sync(how != "no_sync")
        model.set_requires_all_reduce(how == "sync")

    def stay(self, model: Any, now: bool) -> None:
        model.set_reshard_after_backward(not now)

    def reset(self, model: Any) -> None:
        model.reset_iter_state()


class Ours(_Sharded):
    """This library."""

    fully_shard = staticmethod(vescale_fsdp.fully_shard)
    is_unit = staticmethod(lambda module: isinstance(module, vescale_fsdp.FSDPModule))


class FSDP2(_Sharded):
    """torch's."""

    fully_shard = staticmethod(fsdp.fully_shard)
    is_unit = staticmethod(lambda module: isinstance(module, fsdp.FSDPModule))


ENGINES: dict[str, type[Engine]] = {"plain": Plain, "ours": Ours, "fsdp2": FSDP2}


def _mesh(program: Program) -> DeviceMesh:
    pair = ("data", "tp") if program.unit == "tp" else ("replicate", "shard")
    names = pair if len(program.mesh) == 2 else ("shard",)
    return init_device_mesh("cpu", program.mesh, mesh_dim_names=names)


def _units(model: Any, program: Program) -> Iterator[Any]:
    """Units, inner ones first."""
    if program.unit != "root":
        for block in model.blocks:
            if program.unit == "nested":
                yield block.up
            yield block
    if program.unit == "norm_head":
        yield [model.norm, model.head]
    if program.unit == "emb_head":
        yield [model.emb, model.head]
    yield model


@contextmanager
def gathered(engine: Engine, model: Any, closes: bool) -> Iterator[None]:
    """Between unshard() and reshard()."""
    engine.unshard(model)
    yield
    if closes:
        engine.reshard(model)
