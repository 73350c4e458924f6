"""A model and its optimizer that are moved to other ranks are as they would be in a new process."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import distribute_tensor as distribute_stock
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.support import models
from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.units import groups_of
from vescale_fsdp import (
    MixedPrecisionPolicy,
    PaddingPolicy,
    RaggedDTensor,
    RaggedShard,
    Rows,
    distribute_tensor,
    fully_shard,
)
from vescale_fsdp.checkpoint import load, save
from vescale_fsdp.checkpoint.state_dict import get_state_dict
from vescale_fsdp.elastic.renewal import check_more, check_renewable, renew_model, renew_more, renew_optimizer
from vescale_fsdp.errors import UnsupportedOpError
from vescale_fsdp.optim import AdamW8bit, Muon, Shampoo, step_in_backward

Make = Callable[[nn.Module], torch.optim.Optimizer]


def _matrices(model: nn.Module) -> tuple[list[Any], list[Any]]:
    params = list(model.parameters())
    return [p for p in params if p.ndim == 2], [p for p in params if p.ndim != 2]


def _muon(model: nn.Module) -> torch.optim.Optimizer:
    matrices, rest = _matrices(model)
    return Muon(matrices, lr=0.02, adamw_params=rest)


def _shampoo(model: nn.Module) -> torch.optim.Optimizer:
    matrices, rest = _matrices(model)
    return Shampoo(matrices, lr=0.02, block_size=8, adamw_params=rest)


def _plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def _in_backward(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)
    step_in_backward(model, optimizer)
    return optimizer


def _8bit(model: nn.Module) -> torch.optim.Optimizer:
    return AdamW8bit(model.parameters(), lr=0.02)


BF16 = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
CASES: list[tuple[Make, dict[str, Any]]] = [
    (_plain, {}),
    (_in_backward, {"reshard_after_forward": False, **BF16}),
    (_muon, {"granularity": Rows(2), "padding_policy": PaddingPolicy(scatter="never")}),
    (_shampoo, {"granularity": Shampoo.granularity(block_size=8)}),
    (_8bit, {"granularity": AdamW8bit.granularity()}),
]


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + 3):
        loss = models.loss_of(model, models.batch(step, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _copy_pieces(model: nn.Module, of: nn.Module) -> None:
    with torch.no_grad():
        for param, source in zip(model.parameters(), of.parameters(), strict=True):
            param.to_local().copy_(source.to_local())


def _fresh(
    mesh: DeviceMesh, make: Make, options: dict[str, Any]
) -> tuple[models.Stack, torch.optim.Optimizer]:
    model = models.shard(models.build(2), mesh, **options)
    return model, make(model)


def _renew_all() -> int:
    """Trained on 4 ranks, then on 3 of them, then on all: each time equal to a model made on these ranks."""
    meshes = [cpu_mesh(), DeviceMesh("cpu", [0, 1, 2]), cpu_mesh()]
    num_cut = 0
    for make, options in CASES:
        model = models.shard(models.build(1), meshes[0], **options)
        check_renewable(model, meshes[0])
        optimizer = make(model)
        params = list(model.parameters())
        model.set_requires_all_reduce(True)
        _steps(model, optimizer, dist.get_rank())
        models.loss_of(
            model, models.batch(9, 0)
        )  # a forward without its backward: a step that was broken off
        for mesh in meshes[1:]:
            if dist.get_rank() < mesh.size():
                renew_model(model, mesh)
                renew_optimizer(optimizer)
                assert all(held is param for held, param in zip(model.parameters(), params, strict=True))
                assert all(not param.to_local().any() and param.grad is None for param in params)
                other, others_optimizer = _fresh(mesh, make, options)
                _prove_alike(model, other)
                _copy_pieces(model, other)
                rank = mesh.get_local_rank()
                assert _steps(model, optimizer, rank) == _steps(other, others_optimizer, rank)
                num_cut += _prove_equal_states(model, optimizer, other, others_optimizer)
            dist.barrier()
    return num_cut


def _prove_alike(model: nn.Module, other: nn.Module) -> None:
    """The same layouts, on the same mesh."""
    for module, others in zip(model.modules(), other.modules(), strict=True):
        mine, theirs = groups_of(module), groups_of(others)
        assert [g.layout for g in mine] == [g.layout for g in theirs]
        assert [g.data for g in mine] == [g.data for g in theirs]


def _prove_equal_states(
    model: nn.Module, optimizer: torch.optim.Optimizer, other: nn.Module, others: torch.optim.Optimizer
) -> int:
    """Bits of parameters and of the optimizers' states; how many parameters have a piece here."""
    for param, twin in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(param.to_local(), twin.to_local())
    mine, theirs = get_state_dict(model, optimizer)[1], get_state_dict(other, others)[1]
    assert mine["state"].keys() == theirs["state"].keys() and mine["state"]
    for name, parts in mine["state"].items():
        for part, value in parts.items():
            twin = theirs["state"][name][part]
            if isinstance(value, RaggedDTensor):
                assert value.placements == twin.placements
                value, twin = value.to_local(), twin.to_local()
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(twin)), (name, part)
    return sum(param.to_local().numel() > 0 for param in model.parameters())


@pytest.mark.part("faults")
def test_renewed_equals_fresh() -> None:
    """Losses, parameters and states, bit for bit, for every kind of optimizer; the objects stay the same."""
    assert min(run_ranks(4, _renew_all)) >= 9  # pieces that were compared; the last rank has the fewest


class Averages:
    """Averages in an object of the user's, in another type."""

    def __init__(self, model: nn.Module) -> None:
        self.of = {name: param.detach().clone().double() for name, param in model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        return {"of": self.of}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state["of"].items():
            self.of[name].copy_(value)


class Holder(nn.Module):
    """A module that is not sharded, with an average as a buffer."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("average", value)


def _full(state: Any) -> list[torch.Tensor]:
    """The whole tensors of a nested state."""
    if isinstance(state, nn.Module):
        state = [*state.parameters(), *state.buffers()]
    if isinstance(state, (dict, list)):
        return [
            each for item in (state.values() if isinstance(state, dict) else state) for each in _full(item)
        ]
    if isinstance(state, Averages):
        return _full(state.of)
    if isinstance(state, torch.optim.Optimizer):
        return _full([state.state[param] for param in state.param_groups[0]["params"]])
    return [state.full_tensor().clone() if isinstance(state, RaggedDTensor) else state.clone()]


def _renew_more(folder: Path) -> int:
    """Averages, a second model and its optimizer are saved on 3 ranks, loaded on 2 of them, then on 3."""
    model, policy = (models.shard(models.build(seed), cpu_mesh(), granularity=Rows(2)) for seed in (1, 2))
    optimizer, other = _plain(model), _plain(policy)
    _steps(policy, other, dist.get_rank())
    ema = {name: param.detach().clone() for name, param in model.named_parameters()}
    more = {
        "ema": ema,
        "list": [{"swa": torch.zeros_like(next(iter(ema.values())))}],
        "object": Averages(model),
    }
    more |= {
        "policy": policy,
        "its": other,
        "holder": Holder(next(iter(ema.values())).clone()),
        "plain": torch.ones(3),
    }
    model.register_buffer("shadow", next(iter(ema.values())).clone())
    _steps(model, optimizer, dist.get_rank())
    more["list"][0]["swa"].add_(2)
    check_more(model, more, cpu_mesh())
    state = {"model": model, "optimizer": optimizer, "more": more}
    wanted = _full(state)
    save(folder, state)
    num_renewed = 0
    for mesh in (DeviceMesh("cpu", [0, 1]), cpu_mesh()):
        if dist.get_rank() < mesh.size():
            renew_more(model, more, mesh)
            renew_optimizer(optimizer)
            for average, param in zip(ema.values(), model.parameters(), strict=True):
                assert average.placements == param.placements and not average.to_local().any()
            load(folder, state, process_group=mesh.get_group())
            found = _full(state)
            assert len(found) == len(wanted) > 60 and all(map(torch.equal, found, wanted))
            with torch.no_grad():
                for average, param in zip(ema.values(), model.parameters(), strict=True):
                    average.lerp_(param, 0.5)
                    num_renewed += average.to_local().numel() > 0
            losses = _steps(policy, other, mesh.get_local_rank())
            assert all(map(math.isfinite, losses))
        dist.barrier()
    return num_renewed


def test_what_is_sharded_beside_the_model_moves_with_it(tmp_path: Path) -> None:
    """Averages in dicts, lists, objects and buffers, a second model and its optimizer."""
    assert min(run_ranks(3, _renew_more, tmp_path / "c")) >= 3


def _refuse_more() -> list[str]:
    """Tensors that are sharded like no parameter: where they are."""
    model = models.shard(models.build(1), cpu_mesh())
    stock = distribute_stock(torch.ones(4), cpu_mesh(), [Replicate()])
    cut = distribute_tensor(torch.ones(4, 2), cpu_mesh(), [RaggedShard((0,), (1, 3))])
    said = []
    for more in ({"a": [stock]}, {"b": {"c": cut}}, {"d": Holder(stock)}):
        with pytest.raises(UnsupportedOpError) as caught:
            check_more(model, more, cpu_mesh())
        said.append(str(caught.value.where))
    model.register_buffer("stock", stock)
    with pytest.raises(UnsupportedOpError) as caught:
        check_more(model, {}, cpu_mesh())
    return [*said, str(caught.value.where)]


def test_what_cannot_move_is_refused_by_name() -> None:
    assert run_ranks(2, _refuse_more) == [["more.a.0", "more.b.c", "more.d.average", "model.stock"]] * 2


CHANGES: dict[str, Any] = {
    "divide_factor": 3.0,
    "force_sum": True,
    "narrow": False,
    "custom_all_gather": object(),
    "custom_reduce_scatter": object(),
    "separate_reductions": True,
    "requires_all_reduce": False,
    "all_reduce_hook": print,
    "on_delivery": print,
    "zeros_unused": True,
    "keeps_full": True,
    "check_every": 2,
}


def _settings_renewed() -> None:
    """Every field set on one unit, on its own and with the others, before the model goes to other ranks."""
    for changes in ({name: value} for name, value in CHANGES.items()):
        model = models.shard(models.build(1), cpu_mesh())
        block, root = groups_of(model.blocks[0]), groups_of(model)
        defaults = [group.comm.settings for group in root]
        for group in block:
            group.comm.change(**changes)
        before = [group.comm.settings for group in block]
        assert before[0] not in defaults and CHANGES.keys() == {each.name for each in fields(before[0])}
        renew_model(model, cpu_mesh())
        block, root = groups_of(model.blocks[0]), groups_of(model)  # new ones
        assert [group.comm.settings for group in block] == before
        assert [group.comm.settings for group in root] == defaults
        for comm in [group.comm for group in block + root]:
            assert (comm.reduce_group is not None) == comm.settings.separate_reductions
            assert comm.reduce_group is not comm.shard_group


def test_settings_are_taken_over_whole() -> None:
    """Settings of one unit stay on that unit, and on no other, after a move to other ranks."""
    run_ranks(2, _settings_renewed)


def _refused() -> list[tuple[str, str]]:
    """Models that cannot be moved: where, and why."""
    mesh = cpu_mesh(2, 2, names=("dp", "tp"))
    cut = models.TensorParallelLayer()
    parallelize_module(cut, mesh["tp"], {"up": ColwiseParallel()})
    fully_shard(cut, mesh=mesh["dp"])
    elsewhere = models.shard(models.build(1), mesh["tp"])
    said = []
    in_parts = models.shard(models.build(1), cpu_mesh(), reshard_after_forward=2)
    for model, given in ((cut, mesh["dp"]), (elsewhere, mesh["dp"]), (in_parts, cpu_mesh())):
        with pytest.raises(UnsupportedOpError) as caught:
            check_renewable(model, given)
        said.append((str(caught.value.where), str(caught.value.got)))
    return said


def test_what_cannot_be_renewed_is_refused_at_once() -> None:
    """When the model is built, not when a rank is lost."""
    for cut, elsewhere, in_parts in run_ranks(4, _refused):
        assert cut[0].startswith("norm.") and elsewhere[0].startswith("embed.")
        assert "tp" in elsewhere[1] and "tp" not in in_parts[1]
        assert "reshard_after_forward=2" in in_parts[1]
