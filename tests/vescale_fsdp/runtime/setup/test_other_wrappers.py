"""Other data parallelisms of torch around a partly sharded model: those that leave our parameters out train it right.

Those that would take a sharded parameter are refused (`test_usual_mistakes`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.models import refused
from vescale_fsdp import fully_shard
from vescale_fsdp.errors import MisuseError, UnsupportedOpError

Wrap = Callable[[nn.Module], nn.Module]
CPU = torch.device("cpu")
IGNORE = "_set_params_and_buffers_to_ignore_for_model"


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 7), nn.Sequential(nn.Tanh(), nn.Linear(7, 6), nn.ReLU()), nn.Linear(6, 3)
    )


def names_of_sharded(model: nn.Module) -> list[str]:
    return [name for name, param in model.named_parameters() if isinstance(param, DTensor)]


def params_of_sharded(model: nn.Module) -> list[nn.Parameter]:
    return [model.get_parameter(name) for name in names_of_sharded(model)]


def ddp(model: nn.Module, **options: Any) -> nn.Module:
    getattr(DDP, IGNORE)(model, names_of_sharded(model))
    return DDP(model, **options)


def fsdp1(model: nn.Module, states: Callable[[nn.Module], list[Any]], use_orig_params: bool) -> nn.Module:
    return FSDP1(model, device_id=CPU, ignored_states=states(model), use_orig_params=use_orig_params)


def fsdp2(model: nn.Module) -> nn.Module:
    torch_fully_shard(model, mesh=cpu_mesh(), ignored_params=set(params_of_sharded(model)))
    return model


WRAPPERS: dict[str, Wrap] = {
    "DDP": ddp,
    "DDP, not synchronized": partial(ddp, init_sync=False),
    "FSDP1, parameters": partial(fsdp1, states=params_of_sharded, use_orig_params=True),
    "FSDP1, modules": partial(fsdp1, states=lambda model: [model.get_submodule("1")], use_orig_params=False),
    "FSDP2": fsdp2,
}


def trained(model: nn.Module, rank: int, ranks: int) -> list[float]:
    """Losses of three steps on this rank's half of the batches, and of one forward after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(4):
        batch = torch.randn(4, 5, generator=generator)
        loss = model(batch.chunk(ranks)[rank]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def with_ignored_part(shard: Callable[..., Any]) -> nn.Module:
    """The middle is sharded without its Linear, which DDP takes with the outer layers."""
    model = build()
    model[1].append(nn.Linear(6, 6))
    shard(model[1], mesh=cpu_mesh(), ignored_params=set(model[1][1].parameters()))
    return ddp(model, broadcast_buffers=False)


def around_ignored_part() -> dict[str, list[float]]:
    return {
        name: trained(with_ignored_part(shard), dist.get_rank(), dist.get_world_size())
        for name, shard in (("ours", fully_shard), ("stock", torch_fully_shard))
    }


def around(wrapper: str, inner_first: bool) -> dict[str, list[float]]:
    """The losses of a model whose middle is sharded by each runtime, with the same wrapper around it."""
    warnings.simplefilter("ignore")  # torch's, of FSDP1 on a CPU
    losses = {}
    for name, shard in (("ours", fully_shard), ("stock", torch_fully_shard)):
        model = build()
        if inner_first:
            shard(model[1], mesh=cpu_mesh())
            wrapped = WRAPPERS[wrapper](model)
        else:
            wrapped = FSDP1(model, device_id=CPU, ignored_states=[model[1]], use_orig_params=True)
            shard(model[1], mesh=cpu_mesh())
        losses[name] = trained(wrapped, dist.get_rank(), dist.get_world_size())
    return losses


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_that_leaves_sharded_parameters_out_trains_right(wrapper: str) -> None:
    """As around a part that FSDP2 has sharded, and as one process on the whole batch."""
    _compare(run_ranks(2, around, wrapper, True))


def test_a_part_that_fsdp1_leaves_out_is_sharded_later() -> None:
    """FSDP1 then meets parameters that its constructor has not seen."""
    _compare(run_ranks(2, around, "FSDP1", False))


def test_ddp_takes_what_fully_shard_ignores() -> None:
    """A sharded part around a replicated one, in a replicated model, as in PyTorch's test of ``ignored_params``."""
    for losses in run_ranks(2, around_ignored_part):
        assert losses["ours"] == losses["stock"]


def _compare(ranks: list[dict[str, list[float]]]) -> None:
    for losses in ranks:
        assert losses["ours"] == losses["stock"]
    means = torch.tensor([losses["ours"] for losses in ranks]).mean(0)
    torch.testing.assert_close(means, torch.tensor(trained(build(), 0, 1)))


def taken() -> None:
    model = build()
    # Axes of one mesh: FSDP2 of torch 2.11 itself refuses meshes without names, and those that overlap.
    mesh = cpu_mesh(2, 1, names=("ours", "theirs"))
    fully_shard(model[1], mesh=mesh["ours"])
    (name, other) = names_of_sharded(model)
    getattr(DDP, IGNORE)(model, [name])
    with refused(MisuseError, got=other, todo=IGNORE):
        DDP(model, init_sync=False)
    getattr(DDP, IGNORE)(model, [])
    delayed = [(each, model.get_parameter(each)) for each in (name, other)]
    with refused(MisuseError, got=other):
        DDP(model, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=model[0].weight)
    with refused(MisuseError, got="(6, 7)", todo="ignored_states"):
        FSDP1(model, device_id=CPU, ignored_states=[model.get_parameter(other)])
    # FSDP2 of torch 2.11 looks at placements before it looks at the parameter.
    is_2_11 = torch.__version__ < "2.12"
    with (
        pytest.raises(UnsupportedOpError)
        if is_2_11
        else refused(MisuseError, got="(6, 7)", todo="ignored_params")
    ):
        torch_fully_shard(model, mesh=mesh["theirs"], ignored_params={model.get_parameter(other)})


def test_a_parameter_that_is_not_left_out_is_named() -> None:
    """Each wrapper refuses what it takes, before it sends anything, and the error says how to leave it out."""
    run_ranks(2, taken)
