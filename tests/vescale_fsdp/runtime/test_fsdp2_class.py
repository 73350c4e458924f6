"""Our sharded modules are FSDP2's to whoever asks torch: `isinstance`, its functions, its notes on modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor

import vescale_fsdp
from tests.support import models
from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.grads import all_wait
from tests.support.models import assert_is_piece, refused
from vescale_fsdp import fully_shard
from vescale_fsdp.errors import LifecycleError, MisuseError, UnsupportedOpError
from vescale_fsdp.runtime import fsdp_module
from vescale_fsdp.runtime.param_group import GroupState
from vescale_fsdp.torch_private import STATES_HAVE_ONE_GROUP


def sharded() -> models.Stack:
    model = models.build()
    for block in model.blocks:
        fully_shard(block, mesh=cpu_mesh())
    return fully_shard(model, mesh=cpu_mesh())  # type: ignore[return-value]


def asked_by_torch() -> None:
    model = sharded()
    for module in (model, *model.blocks):
        assert isinstance(module, fsdp.FSDPModule)
        assert isinstance(module, vescale_fsdp.FSDPModule)
    assert not isinstance(model.embed, fsdp.FSDPModule)
    handle = model.blocks[0].unshard(async_op=True)
    assert isinstance(handle, fsdp.UnshardHandle)
    handle.wait()
    model.blocks[0].reshard()

    # Building the sharded class builds the original one.
    shelf = fully_shard(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), mesh=cpu_mesh())
    assert type(shelf[:1]) is nn.Sequential

    # What torch's pipelines read, and what its own fully_shard answers for modules that are not sharded.
    state: Any = fsdp.fully_shard.state(model)  # type: ignore[attr-defined]
    assert len(state._state_ctx.all_states) == 1 + len(model.blocks)
    assert state._comm_ctx is not None
    assert fsdp.fully_shard.state(model.embed) is None  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match="fully_shard"):
        fsdp.fully_shard(model, mesh=cpu_mesh())

    # Who uses a block before the root's first forward says so with this: the block becomes no root.
    for _ in range(2):
        model._get_fsdp_state()._lazy_init()
    model.blocks[0](torch.ones(2, 7)).sum().backward()
    model(models.batch(0, dist.get_rank())).sum().backward()
    other = sharded()
    other.blocks[0](torch.ones(2, 7))
    with refused(LifecycleError, got="blocks.0", where="FSDPStack"):
        other._get_fsdp_state()._lazy_init()

    # _apply finds our state, not torch's.
    with torch.device("meta"):
        meta = models.build()
    fully_shard(meta, mesh=cpu_mesh())
    meta.to_empty(device="cpu")
    assert all(param.device.type == "cpu" for param in meta.parameters())


def test_torch_takes_our_modules_for_fsdp2s() -> None:
    """isinstance, UnshardHandle, fully_shard.state, a second wrap by torch, and to_empty."""
    run_ranks(2, asked_by_torch)


def tracked() -> None:
    model = sharded()
    state: Any = model._get_fsdp_state()
    if not STATES_HAVE_ONE_GROUP:  # torch 2.11's pipelines read it, and its tracker the handles of the hooks
        assert not hasattr(state, "_fsdp_param_group")
        assert getattr(state, "_fsdp_param_group", None) is None
    with pytest.raises(AttributeError, match=r"mem_tracker\.MemTracker"), FSDPMemTracker(model):
        pass
    model(models.batch(0, dist.get_rank())).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


def test_torchs_memory_tracker_is_refused() -> None:
    """By name, and the model trains after it; code that probes for FSDP2's parameter group finds none."""
    run_ranks(2, tracked)


class Encoder(models.Stack):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):  # reads the root's parameters before, between and behind its forward
            x = self(x + self.embed.bias.mean()) @ self.head.weight[:, :5]
        return x

    def fail(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("planted")


def registered_with_torch() -> None:
    model, plain = models.build(), models.build()
    model.__class__ = Encoder
    fully_shard(model, mesh=cpu_mesh())
    for method in ("encode", "fail"):
        fsdp.register_fsdp_forward_method(model, method)
    x = models.batch(0, dist.get_rank())
    with torch.no_grad():
        torch.testing.assert_close(model.encode(x), Encoder.encode(plain, x))  # type: ignore[operator, arg-type]
    assert isinstance(model.embed.weight, DTensor)
    with pytest.raises(ValueError, match="planted"):
        model.fail(x)  # type: ignore[operator]
    models.loss_of(model, x).backward()  # goes on, and reshards in the end
    assert all(isinstance(param, DTensor) and param.grad is not None for param in model.parameters())
    with torch.no_grad():
        model(x)
    assert fully_shard.state(model).groups[0].state is GroupState.SHARDED  # type: ignore[attr-defined]


def test_torchs_own_register_fsdp_forward_method() -> None:
    """HF's Trainer registers generate with it: a no-op for modules that are not FSDP2's, and not for ours."""
    run_ranks(2, registered_with_torch)


def finalized_by_hand() -> None:
    model, reference = sharded(), models.build()
    rank = dist.get_rank()
    models.loss_of(model, models.batch(0, rank)).backward()
    with refused(LifecycleError, got="FSDPMLP"):
        model.blocks[0].finalize_backward()
    model.zero_grad()
    with refused(LifecycleError, got="finalize_backward", where="FSDPStack"):
        model.finalize_backward()
    for async_op in (False, True):
        model.set_manual_backward_finalization(True)
        model.set_requires_gradient_sync(False)
        for step in range(2):
            models.loss_of(model, models.batch(step, rank)).backward()
        assert all_wait(model)
        with refused(LifecycleError, got="set_manual_backward_finalization(False)"):
            model.set_manual_backward_finalization(False)
        model.set_requires_gradient_sync(True)
        handle = model.finalize_backward(async_op=async_op)
        assert (handle is not None) == async_op
        if handle is not None:
            handle.wait()
        model.set_manual_backward_finalization(False)
        reference.zero_grad()
        losses = [models.loss_of(reference, models.batch(s, r)) for s in range(2) for r in range(2)]
        (torch.stack(losses).sum() / 2).backward()
        for name, param in model.named_parameters():
            expected = reference.get_parameter(name).grad
            assert_is_piece(param.grad, expected, name)
        model.zero_grad()


def test_backwards_finalized_by_hand() -> None:
    """torch 2.15's set_manual_backward_finalization and finalize_backward, on every torch."""
    run_ranks(2, finalized_by_hand)


class Forwarding(nn.Module):
    """A wrapper that has all attributes of what is in it, as those of torch.compile and peft have."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def forward(self, *args: Any) -> Any:
        return self.inner(*args)


def wrapped_after_sharding() -> None:
    reference = models.build()
    losses = [models.loss_of(reference, models.batch(0, rank)) for rank in range(2)]
    (torch.stack(losses).sum() / 2).backward()
    for wrap in (checkpoint_wrapper, Forwarding):
        for shard_the_wrapper in (False, True):  # accelerate does, with activation checkpointing
            model = models.build()
            for number, block in enumerate(model.blocks):
                fully_shard(block, mesh=cpu_mesh())
                model.blocks[number] = wrap(block)
                if shard_the_wrapper:
                    fully_shard(model.blocks[number], mesh=cpu_mesh())
            fully_shard(model, mesh=cpu_mesh())
            for _ in range(2):
                model.zero_grad()
                models.loss_of(model, models.batch(0, dist.get_rank())).backward()
            for param, twin in zip(model.parameters(), reference.parameters(), strict=True):
                assert isinstance(param, DTensor)
                torch.testing.assert_close(param.grad.full_tensor(), twin.grad)
    stocks = models.build()
    fsdp.fully_shard(stocks.blocks[0], mesh=cpu_mesh())
    stocks.blocks[0] = Forwarding(stocks.blocks[0])
    with refused(MisuseError, got="FSDP2"):
        fully_shard(stocks, mesh=cpu_mesh())


def test_wrappers_of_sharded_modules() -> None:
    """A wrapper that answers for the module in it was taken for one that FSDP2 has sharded."""
    run_ranks(2, wrapped_after_sharding)


class Newer(fsdp.FSDPModule):
    """What a later torch may bring."""

    def set_brand_new_thing(self, enable: bool) -> None:
        raise AssertionError("inherited in silence")


def test_methods_of_a_newer_torch_are_refused_by_name() -> None:
    """What ours does not have is refused, not run on a state that is not there."""
    ours = type("Ours", (Newer,), {})
    fsdp_module.refuse_unknown(ours, Newer)
    with refused(UnsupportedOpError, got="set_brand_new_thing"):
        ours.set_brand_new_thing(None, True)
