"""Small parts of FSDP2's surface: what each switch says, what is refused and how, what tools look for."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.tensor import DTensor

from tests.support import models
from tests.support.async_device.stream_recorder import recording
from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.grads import reduced_grad
from tests.support.models import refused
from vescale_fsdp import FSDPModule, RaggedDTensor, fully_shard
from vescale_fsdp.errors import ArgumentError, MisuseError, UnsupportedOpError
from vescale_fsdp.runtime.fsdp_state import FSDPState, state_of
from vescale_fsdp.runtime.self_gathering_group import SelfGatheringGroup
from vescale_fsdp.torch_private import ShardPlacementResult, newer_class


def shard(mesh: Any = None, **options: Any) -> models.Stack:
    model = models.build()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh or cpu_mesh(), **options)
    return model


def backward(model: nn.Module, number: int = 0) -> None:
    models.loss_of(model, models.batch(number, dist.get_rank())).backward()


def state(module: nn.Module) -> FSDPState:
    found = state_of(module)
    assert found is not None
    return found


def grads_of(model: nn.Module) -> list[torch.Tensor]:
    grads = [reduced_grad(param) for param in model.parameters()]
    return [grad.full_tensor() for grad in grads if isinstance(grad, DTensor)]


def all_reduce_without_replicas() -> None:
    model, other = shard(), shard()
    model.set_requires_all_reduce(False)
    for each in (model, other):
        backward(each)
    assert len(grads_of(model)) == len(list(model.parameters()))
    for mine, theirs in zip(grads_of(model), grads_of(other), strict=True):
        assert torch.equal(mine, theirs)


def test_no_all_reduce_to_switch_off_without_replicas() -> None:
    """On a 1-D mesh set_requires_all_reduce(False) changes nothing: gradients are there."""
    run_ranks(2, all_reduce_without_replicas)


def gradient_sync_says_both() -> None:
    model = shard(cpu_mesh(2, 1, names=("replicate", "shard")))
    reference = models.build()
    model.set_requires_all_reduce(False)
    model.set_requires_gradient_sync(True)  # reduces over replicas again, as in FSDP2
    with model.no_sync():
        backward(model, 0)
    assert not grads_of(model)
    backward(model, 1)
    for number in range(2):
        for rank in range(2):
            (models.loss_of(reference, models.batch(number, rank)) / 2).backward()
    for mine, twin in zip(grads_of(model), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, twin.grad)
    model.zero_grad()
    model.set_requires_all_reduce(False)
    with model.no_sync():
        backward(model)
    backward(model)
    assert not grads_of(model), "no_sync has switched the all-reduce on"


def test_gradient_sync_means_the_all_reduce_too() -> None:
    """set_requires_gradient_sync(True) undoes set_requires_all_reduce(False); no_sync leaves both as they were."""
    run_ranks(2, gradient_sync_says_both)


def hook_on_a_stream() -> None:
    model = shard()
    with recording(model) as recorder:
        own = recorder.new()
        seen: list[str] = []

        def double(shard: torch.Tensor) -> None:
            seen.append(recorder.current().name)
            shard.mul_(2)

        for module in (*model.blocks, model):
            module.set_all_reduce_hook(double, stream=own)
        backward(model)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(param.grad, alpha=-0.1)  # type: ignore[arg-type]
        assert recorder.hazards == []
    assert seen == [own.name] * 4
    plain = shard()
    backward(plain)
    for doubled, once in zip(grads_of(model), grads_of(plain), strict=True):
        assert torch.equal(doubled, 2 * once)


def test_all_reduce_hook_on_a_stream_of_its_own() -> None:
    """The hook runs on the user's stream, in order with what comes before and after."""
    run_ranks(2, hook_on_a_stream)


class Counted:
    """An all-gather or reduce-scatter that counts."""

    def __init__(self, name: str, older: str) -> None:
        self.collective = vars(dist).get(name) or vars(dist)[older]
        self.numels: list[int] = []
        self.ops: list[Any] = []

    def allocate(self, size: list[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **rest: Any) -> Any:
        self.numels.append(output_tensor.numel())
        self.ops.append(rest.get("op"))
        return self.collective(output_tensor, input_tensor, **rest)


def comms_of_several_groups() -> None:
    model, plain = models.build(), shard()
    for each in (model, plain):
        each.blocks[0].tiny.requires_grad_(False)  # a group of its own in ours
    model = fully_shard(model, mesh=cpu_mesh())
    gather = Counted("all_gather_single", "all_gather_into_tensor")
    reduce = Counted("reduce_scatter_single", "reduce_scatter_tensor")
    model.set_custom_all_gather(gather)
    model.set_custom_reduce_scatter(reduce)
    hooked: list[int] = []
    model.set_all_reduce_hook(lambda shard: hooked.append(shard.numel()))
    backward(model)
    groups = state(model).groups
    assert len(groups) == 2
    assert gather.numels == [group.layout.numel for group in groups]
    assert reduce.numels == hooked == [group.layout.shard_numel for group in groups if group.note_trained()]
    other = fully_shard(models.build(), mesh=cpu_mesh())
    other.blocks[0].tiny.requires_grad_(False)
    backward(other)
    for mine, twin in zip(grads_of(model), grads_of(other), strict=True):
        assert torch.equal(mine, twin)


def test_custom_collectives_serve_all_groups_of_a_mesh() -> None:
    """Where trainability splits a unit into groups of one mesh, each uses the user's objects and hook."""
    run_ranks(2, comms_of_several_groups)


def counted_reductions(module: nn.Module) -> Counted:
    reduce = Counted("reduce_scatter_single", "reduce_scatter_tensor")
    assert isinstance(module, FSDPModule)
    module.set_custom_reduce_scatter(reduce)
    return reduce


def ops_of_reductions() -> list[list[Any]]:
    def of(policy: MixedPrecisionPolicy, mesh: Any = None, **switches: Any) -> list[Any]:
        model = shard(mesh, mp_policy=policy)
        reduce = counted_reductions(model.blocks[1])
        for name, value in switches.items():
            getattr(model.blocks[1], name)(value)
        backward(model)
        assert all(grad.isfinite().all() for grad in grads_of(model))
        return [str(op) for op in reduce.ops]

    full, half = MixedPrecisionPolicy(), MixedPrecisionPolicy(reduce_dtype=torch.float16)
    return [
        of(full),
        of(full, set_force_sum_reduction_for_comms=True),
        of(full, set_gradient_divide_factor=3.0),
        of(half),
        of(full, cpu_mesh(2, 1, names=("replicate", "shard"))),
    ]


def test_operations_of_reductions() -> None:
    """fp32 averages in the collective; forced sums, factors, fp16 and a single rank sum."""
    for found in run_ranks(2, ops_of_reductions):
        assert found == [["RedOpType.AVG"], *[["RedOpType.SUM"]] * 4]


def large_half_gradients() -> None:
    model = nn.Linear(2, 1, bias=False)
    fully_shard(model, mesh=cpu_mesh(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
    model(torch.full((1, 2), 30000.0)).sum().backward()
    assert torch.equal(grads_of(model)[0], torch.full((1, 2), 30000.0))


def test_fp16_sums_do_not_overflow() -> None:
    """Four times 30,000 is more than fp16 holds; gradients are divided before they are summed."""
    run_ranks(4, large_half_gradients)


def reductions_per_backward() -> list[int]:
    model = shard()
    reduce = counted_reductions(model.blocks[1])
    counts = []
    for forwards in (1, 2, 3):
        reduce.numels.clear()
        rank = dist.get_rank()
        torch.stack([models.loss_of(model, models.batch(n, rank)) for n in range(forwards)]).sum().backward()
        counts.append(len(reduce.numels))
        model.zero_grad()
    with model.no_sync():
        backward(model)
    return [*counts, len(reduce.numels) - 1]


def test_one_reduction_per_backward() -> None:
    """Several forwards before one backward cost one reduction, and none without synchronization."""
    assert run_ranks(2, reductions_per_backward) == [[1, 1, 1, 0]] * 2


class Dropping(models.Stack):
    """Runs its last block and does not use what comes out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks[:-1]:
            x = block(x)
        self.blocks[-1](x)
        return self.head(x)


def last_backward(shard: Callable[..., Any]) -> list[bool]:
    model = models.build()
    model.__class__ = Dropping
    for module in (*model.blocks, model):
        shard(module, mesh=cpu_mesh())
    backward(model)
    there = []
    for is_last in (False, True):
        model.zero_grad()
        model.set_is_last_backward(is_last)
        backward(model)
        assert len(grads_of(model.blocks[0])) == len(list(model.blocks[0].parameters()))
        there.append(len(grads_of(model.blocks[-1])) > 0)
    return there


def test_a_unit_that_no_gradient_came_by_keeps_none() -> None:
    """Behind the last backward too, as under FSDP2: a gradient of zeros would let Adam's state move its weights."""
    assert run_ranks(2, last_backward, fully_shard) == [[False, False]] * 2
    assert run_ranks(2, last_backward, fsdp2_fully_shard) == [[False, False]] * 2


def methods_for_one_mesh() -> None:
    pairs = cpu_mesh(1, 2, names=("replicate", "shard"))
    info = FSDPMeshInfo(cpu_mesh(2, 1, names=("a", "b"))["b"], shard_mesh_dim=0)
    model = fully_shard(
        nn.Linear(4, 4),
        mesh=cpu_mesh(),
        shard_placement_fn=lambda p: ShardPlacementResult(None, info) if p.ndim == 2 else None,
    )
    for name in ("set_custom_all_gather", "set_custom_reduce_scatter", "set_all_reduce_hook"):
        with pytest.raises(ArgumentError) as several:
            getattr(model, name)(None)
        assert name in several.value.problem and several.value.where == "FSDPLinear"
    replicated = fully_shard(nn.Linear(4, 4), mesh=pairs)
    with refused(ArgumentError, got="object object", where="set_all_reduce_hook"):
        replicated.set_all_reduce_hook(lambda shard: None, stream=object())  # type: ignore[arg-type]
    with refused(UnsupportedOpError, got="set_symm_mem_for_comm"):
        replicated.set_symm_mem_for_comm()
    with refused(UnsupportedOpError, got="set_allocate_memory_from_process_group_for_comm"):
        replicated.set_allocate_memory_from_process_group_for_comm(True)


@pytest.mark.skipif(
    ShardPlacementResult.__module__ == newer_class.__module__, reason="this torch has no ShardPlacementResult"
)
def test_methods_that_need_one_mesh() -> None:
    """Collectives and hooks would be ambiguous over several meshes; replicas have no stream for the hook."""
    run_ranks(2, methods_for_one_mesh)


def refusal_types() -> None:
    model = fully_shard(nn.Linear(2, 2), mesh=cpu_mesh())
    with refused(MisuseError, got="FSDPLinear"):
        fully_shard(model, mesh=cpu_mesh())
    with refused(MisuseError, got="deepcopy of FSDPLinear"):
        copy.deepcopy(model)


def test_refusals_are_of_torchs_types() -> None:
    """A second wrap and a deep copy raise AssertionError, as FSDP2's do."""
    run_ranks(1, refusal_types)


class Sliced(nn.Module):
    """Returns a view of what its layer made, and keeps what it made."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.layer(x) * 2
        return self.kept[:, :3]


class Changed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1
        return x.mul_(2)


def sliced_grads(shard: bool, way: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(Sliced(), Changed() if way == "changed" else nn.Identity(), nn.Linear(3, 2))
    if shard:
        for module in (model[0], model):
            fully_shard(module, mesh=cpu_mesh())
    y = model(torch.linspace(-1, 1, 20).view(4, 5))
    (model[0].kept if way == "kept" else y).pow(2).sum().backward()
    grads = [param.grad for param in model.parameters()]
    return [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads if grad is not None]


def output_views(way: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for ours, plain in zip(sliced_grads(True, way), sliced_grads(False, way), strict=True):
            assert plain.any() and torch.equal(ours, plain)


@pytest.mark.parametrize("way", ["changed", "kept"])
def test_outputs_that_are_views(way: str) -> None:
    """Changed in place by the caller, or with a loss on the tensor behind them: as on one device, without a warning."""
    run_ranks(1, output_views, way)


def what_tools_look_for() -> None:
    model = models.build()
    model.blocks[2] = replicate(models.MLP())
    left = list(model.blocks[2].parameters())
    for module in (*model.blocks[:2], model):
        fully_shard(module, mesh=cpu_mesh())
    assert fully_shard.state(model.blocks[0]) is state(model.blocks[0])  # type: ignore[attr-defined]
    assert fully_shard.state(nn.Linear(2, 2)) is None  # type: ignore[attr-defined]
    assert [id(p) for p in model.blocks[2].parameters()] == [id(p) for p in left]
    assert not isinstance(model.blocks[2].up.weight, RaggedDTensor)
    marked = {name for name, module in model.named_modules() if "_is_fsdp_managed_module" in vars(module)}
    assert {"", "embed", "blocks.0", "blocks.0.up"} <= marked
    assert not any(name.startswith("blocks.2") for name in marked)
    with pytest.warns(DeprecationWarning, match="set_gradient_divide_factor"):
        model.set_reduce_scatter_divide_factor(3.0)
    assert state(model).groups[0].comm.settings.divide_factor == 3.0
    model._set_unshard_async_op(True)
    assert isinstance(model, FSDPModule)
    assert not any(isinstance(group, SelfGatheringGroup) for group in state(model).groups)


def test_what_tools_look_for() -> None:
    """state(), marks for torch.compile, DDP's modules left alone, the older name of the divide factor."""
    run_ranks(1, what_tools_look_for)
