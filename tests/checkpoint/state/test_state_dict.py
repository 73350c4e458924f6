"""Full state dicts into sharded models: our functions load them wherever torch's do, torch's own say so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as torchs
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.tensor import distribute_tensor

from tests.support import models
from tests.support.distributed import cpu_mesh, run_ranks
from vescale_fsdp import Element, Granularity, Whole, fully_shard
from vescale_fsdp.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict, set_state_dict
from vescale_fsdp.errors import UnsupportedOpError

FULL = StateDictOptions(full_state_dict=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class Buffered(models.Stack):
    """With a buffer, and a tensor of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(3, dtype=torch.int64))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def plain(seed: int) -> Buffered:
    torch.manual_seed(seed)
    model = Buffered()
    model.steps += seed
    return model


def sharded(model: Buffered, granularity: Granularity = Element()) -> Any:  # noqa: B008 (frozen)
    for block in model.blocks:
        fully_shard(block, mesh=cpu_mesh(), granularity=granularity)
    return fully_shard(model, mesh=cpu_mesh(), granularity=granularity)


def on_meta() -> Buffered:
    with torch.device("meta"):
        return Buffered()


def brought(state: dict[str, Any], options: StateDictOptions) -> dict[str, Any]:
    """What this rank gives: nothing, where rank 0's counts."""
    return state if dist.get_rank() == 0 or not options.broadcast_from_rank0 else {}


def check_equal(model: nn.Module, expected: nn.Module) -> None:
    given = dict(expected.state_dict())
    found = torchs.get_model_state_dict(model, options=FULL)
    assert found.keys() == given.keys() and given
    for name, value in given.items():
        assert torch.equal(found[name], value), name


def ours_does_it() -> None:
    source = plain(2)
    for options in (FULL, FROM_RANK_0):
        for start in (plain(1), on_meta()):
            model = sharded(start)
            set_model_state_dict(model, brought(source.state_dict(), options), options=options)
            check_equal(model, source)
            x = models.batch(0, dist.get_rank())
            torch.testing.assert_close(model(x), source(x))

    # The caller's tensors stay the caller's.
    with torch.no_grad():
        model.steps += 1
    assert torch.equal(source.steps, plain(2).steps)

    # Names as torch gives them, where wrappers add to them; a state in part leaves the rest on meta.
    model = on_meta()
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    model = sharded(model)
    part = {name: value for name, value in source.state_dict().items() if not name.startswith("head")}
    set_model_state_dict(model, part, options=StateDictOptions(full_state_dict=True, strict=False))
    assert model.head.weight.is_meta
    assert torch.equal(model.blocks[0].up.weight.full_tensor(), source.blocks[0].up.weight)
    with pytest.raises(RuntimeError, match=r"head\.weight"):
        model(models.batch(0, 0))
    set_model_state_dict(model, source.state_dict(), options=FULL)
    torch.testing.assert_close(model(x), source(x))


def optimizers_only() -> None:
    def stepped(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
        for step in range(2):
            models.loss_of(model, models.batch(step, 0)).backward()
            optimizer.step()
        return optimizer

    source, optimizer = plain(2), None
    optimizer = stepped(source)
    state = torchs.get_optimizer_state_dict(source, optimizer, options=FULL)
    moments = {
        name: optimizer.state[param]["exp_avg"]
        for name, param in source.named_parameters()
        if param in optimizer.state
    }
    for options in (FULL, FROM_RANK_0):
        model = sharded(plain(1))
        fresh = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5))
        result = set_state_dict(
            model,
            fresh,
            model_state_dict={},
            optim_state_dict=brought(state, options),
            options=options,
        )
        assert not result.missing_keys
        assert torch.equal(torch.as_tensor(fresh.param_groups[0]["lr"]), torch.tensor(0.1))
        check_equal(model, plain(1))
        for name, param in model.named_parameters():
            if name in moments:
                assert torch.equal(fresh.state[param]["exp_avg"].full_tensor(), moments[name]), name
        set_state_dict(
            model,
            fresh,
            model_state_dict=brought(source.state_dict(), options),
            optim_state_dict=brought(state, options),
            options=options,
        )
        check_equal(model, source)


def torchs_own_refuse(granularity: Granularity) -> None:
    errors, instead = (UnsupportedOpError, RuntimeError), "vescale_fsdp.checkpoint"
    source = plain(2)
    optimizer = torch.optim.AdamW(source.parameters())
    state = torchs.get_optimizer_state_dict(source, optimizer)
    for options in (FULL, FROM_RANK_0):
        for start in (plain(1), on_meta()):
            model = sharded(start, granularity)
            with pytest.raises(errors, match=instead):
                torchs.set_model_state_dict(model, brought(source.state_dict(), options), options=options)
        model = sharded(plain(1), granularity)
        fresh = torch.optim.AdamW(model.parameters())
        with pytest.raises(errors, match=instead):
            torchs.set_optimizer_state_dict(model, fresh, brought(state, options), options=options)
        set_optimizer_state_dict(model, fresh, brought(state, options), options=options)
    weight = model.embed.weight
    with pytest.raises(errors, match=r"vescale_fsdp\.distribute_tensor"):
        distribute_tensor(source.embed.weight.detach(), weight.device_mesh, weight.placements)
    assert "vescale_fsdp" not in str(weight.placements[0])


def test_full_states_by_our_functions() -> None:
    """Into shards and models on meta, from every rank or rank 0's, optimizers alone included."""
    run_ranks(2, ours_does_it)
    run_ranks(2, optimizers_only)


def test_full_states_by_torchs_functions_name_ours() -> None:
    """On every rank and before anything hangs, also where one rank holds whole tensors."""
    run_ranks(2, torchs_own_refuse, Element())
    run_ranks(2, torchs_own_refuse, Whole())
