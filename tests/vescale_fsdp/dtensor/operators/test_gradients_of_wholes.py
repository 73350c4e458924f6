"""Whole values of sharded parameters in losses that differ between ranks: gradients are those of data parallelism."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support.distributed import cpu_mesh, run_cases, run_ranks, run_threads
from tests.support.meetings import short_waits
from tests.support.models import TensorParallelLayer
from vescale_fsdp import RaggedDTensor, RaggedShard, distribute_tensor, fully_shard
from vescale_fsdp.errors import LifecycleError, UnsupportedOpError

pytestmark = pytest.mark.filterwarnings("ignore::vescale_fsdp.errors.GatherWarning")


def _whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[no-any-return]


def _replicated(p: Any) -> torch.Tensor:
    if not isinstance(p, RaggedDTensor):
        return p  # type: ignore[no-any-return]
    return p.redistribute(placements=[Replicate()] * p.device_mesh.ndim).to_local()


# What a loss reads of a parameter: each is a plain tensor.
READS: dict[str, Callable[[Any], torch.Tensor]] = {
    "full_tensor": _whole,
    "of a product": lambda p: _whole(p * 3.0),
    "redistribute": _replicated,
    "norm": lambda p: _whole(p.norm()),
    "norm, local": lambda p: p.norm().to_local() if isinstance(p, RaggedDTensor) else p.norm(),
    "sum over rows": lambda p: _whole((p**2).sum(0)),
    "column": lambda p: _whole(p[:, 1]),
    "transposed": lambda p: _whole(p.t()),
    "product": lambda p: _whole(p @ p.t()),
    "vector": lambda p: _whole(nn.utils.parameters_to_vector([p])),
}


def _loss(model: nn.Module, read: Callable[[Any], torch.Tensor], rank: int) -> torch.Tensor:
    torch.manual_seed(100 + rank)
    x, factor = torch.randn(4, 6), float(rank + 1)
    p: Any = model.weight
    value = read(p)
    return model(x).square().mean() + factor * (value * torch.randn(value.shape)).sum()  # type: ignore[no-any-return]


def _model(shape: tuple[int, int] = (6, 5)) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(*shape)


def _is_mean(kind: str, mesh_shape: tuple[int, ...]) -> None:
    """Two backwards, so that gradients are added; also without the forward."""
    ours, plain = fully_shard(_model(), mesh=cpu_mesh(*mesh_shape)), _model()
    for _ in range(2):
        _loss(ours, READS[kind], dist.get_rank()).backward()
        losses = [_loss(plain, READS[kind], rank) for rank in range(dist.get_world_size())]
        torch.stack(losses).mean().backward()
    for own, want in zip(ours.parameters(), plain.parameters(), strict=True):
        assert isinstance(own.grad, RaggedDTensor) and own.grad.placements == own.placements  # type: ignore[attr-defined]
        assert want.grad is not None
        torch.testing.assert_close(own.grad.full_tensor(), want.grad)


def test_gradients_are_means() -> None:
    """As those of the parameters that the forward uses; over replicas too."""
    kinds = ("full_tensor", "redistribute", "norm", "column")
    run_cases(2, _is_mean, [(kind, mesh_shape) for kind in kinds for mesh_shape in ((2,), (2, 1))])


@pytest.mark.part("numerics")
@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2)])
def test_whatever_the_loss_reads(mesh_shape: tuple[int, ...]) -> None:
    """Operators that gather, reductions, and whole parameters."""
    run_cases(math.prod(mesh_shape), _is_mean, [(kind, mesh_shape) for kind in READS])


def _tensor_parallel(kind: str) -> None:
    """On 2 x 2 ranks; both ranks of tensor parallelism have the same data."""
    mesh = cpu_mesh(2, 2, names=("dp", "tp"))
    torch.manual_seed(0)
    plain = TensorParallelLayer()
    torch.manual_seed(0)
    ours = TensorParallelLayer()
    parallelize_module(ours, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(ours, mesh=mesh["dp"])

    def loss(model: nn.Module, replica: int) -> torch.Tensor:
        torch.manual_seed(replica)
        values = [READS[kind](param) for param in model.parameters()]  # sharded, before the forward
        total: torch.Tensor = model(torch.randn(3, 7)).square().mean()
        for value in values:
            total = total + (replica + 1) * (value * torch.randn(value.shape)).sum()
        return total

    loss(ours, mesh.get_local_rank("dp")).backward()
    torch.stack([loss(plain, replica) for replica in range(2)]).mean().backward()
    for (name, own), want in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(own.grad, RaggedDTensor) and want.grad is not None
        torch.testing.assert_close(own.grad.full_tensor(), want.grad, msg=name)


def test_gradients_under_tensor_parallelism() -> None:
    """The mean is over the data ranks; parameters that tensor parallelism cuts, or replicates."""
    run_cases(4, _tensor_parallel, [("full_tensor",), ("redistribute",), ("norm",)])


def _as_asked() -> None:
    """What ``grad_placements`` says holds, and derivatives by input are means too."""
    rank, mesh = dist.get_rank(), cpu_mesh()
    own = [torch.full((4, 3), 1.0 + r) for r in range(2)]

    def grad_of(placements: Any, *, by_input: bool = False) -> torch.Tensor:
        leaf = distribute_tensor(torch.ones(4, 3), mesh, [RaggedShard((0,), (3, 1))]).requires_grad_()
        loss = (leaf.full_tensor(grad_placements=placements) * own[rank]).sum()  # type: ignore[attr-defined]
        if by_input:
            (grad,) = torch.autograd.grad(loss, leaf)
        else:
            loss.backward()
            assert leaf.grad is not None
            grad = leaf.grad
        return grad.full_tensor()  # type: ignore[attr-defined, no-any-return]

    assert torch.equal(grad_of([Partial()]), own[0] + own[1])
    assert torch.equal(grad_of([Replicate()]), torch.cat([own[0][:3], own[1][3:]]))
    assert torch.equal(grad_of(None), (own[0] + own[1]) / 2)
    assert torch.equal(grad_of(None, by_input=True), (own[0] + own[1]) / 2)


def test_placements_of_gradients_as_asked() -> None:
    """A sum with Partial; with Replicate each rank keeps its own part."""
    run_ranks(2, _as_asked)


def _accumulated() -> None:
    """Without synchronization in the first of two backwards."""
    ours, plain = fully_shard(_model(), mesh=cpu_mesh()), _model()
    for synchronizes in (False, True):
        ours.set_requires_gradient_sync(synchronizes)
        _loss(ours, _whole, dist.get_rank()).backward()
        torch.stack([_loss(plain, _whole, rank) for rank in range(2)]).mean().backward()
    for own, want in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad.full_tensor(), want.grad)  # type: ignore[union-attr]


def test_accumulated_gradients() -> None:
    """Both kinds of contributions have one scale also where reductions wait."""
    run_ranks(2, _accumulated)


def _compiled() -> None:
    rank = dist.get_rank()
    for read in (lambda p: p.full_tensor(), _replicated):
        torch._dynamo.reset()
        leaf = distribute_tensor(torch.ones(4, 3), cpu_mesh(), [RaggedShard((0,), (3, 1))]).requires_grad_()
        loss = torch.compile(lambda p, read=read: (read(p) * (rank + 1)).sum(), backend="aot_eager")
        loss(leaf).backward()
        assert torch.equal(leaf.grad.full_tensor(), torch.full((4, 3), 1.5))  # type: ignore[union-attr]


@pytest.mark.part("numerics")
def test_compiled_losses() -> None:
    """Graphs, whose tensors are torch's, take the mean too."""
    run_ranks(2, _compiled)


def _read_on_one_rank(all_done: threading.Barrier) -> str:
    model = fully_shard(nn.Linear(4, 3), mesh=cpu_mesh())
    whole: Any = model.weight.full_tensor()  # type: ignore[operator]
    loss = whole.sum() if dist.get_rank() == 0 else torch.zeros((), requires_grad=True)
    try:
        loss.backward()
    except LifecycleError as error:
        return str(error.got)
    finally:
        all_done.wait(timeout=30.0)
    return ""


def test_a_loss_of_one_rank_alone_raises() -> None:
    """All ranks gather, and one of them uses the value: its backward waits for the others, and says so."""
    with short_waits(bound=0.3):
        first, second = run_threads(2, _read_on_one_rank, threading.Barrier(2))
    assert "(3, 4)" in first and not second


def _mixed_with_plain() -> object:
    model = fully_shard(nn.Linear(4, 3), mesh=cpu_mesh())
    norm = model.weight.norm()  # type: ignore[operator]  # of the sharded weight, before the forward
    loss = norm + model(torch.ones(2, 4)).mean()
    with pytest.raises(UnsupportedOpError) as caught:
        loss.backward()
    return caught.value.todo


def test_a_loss_of_both_kinds_names_the_way_out() -> None:
    """A sharded norm plus a plain loss has no plain gradient; the todo is among the reads above."""
    assert "loss + p.norm().full_tensor()" in str(run_ranks(2, _mixed_with_plain)[0])
