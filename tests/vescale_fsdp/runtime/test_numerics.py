"""Training sharded equals training in one process and FSDP2, whatever the world size and the cuts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils.checkpoint import checkpoint

from tests.support import models
from tests.support.distributed import cpu_mesh, run_cases, run_ranks
from tests.support.grads import all_wait
from tests.support.models import assert_is_piece
from vescale_fsdp import Element, Rows, Whole, fully_shard
from vescale_fsdp.runtime.fsdp_state import state_of
from vescale_fsdp.runtime.param_group import GroupState

GRANULARITIES = {"element": Element(), "rows3": Rows(3), "whole": Whole(), "mapping": {"*.weight": Rows(2)}}


def shard(model: models.Stack, mesh: Any, **options: Any) -> models.Stack:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def train_and_compare(world: int, granularity: str, reshard: bool | None, steps: int = 3) -> int:
    """Losses, gradients and parameters beside one process's; returns how many ranks' pieces were empty."""
    mesh = cpu_mesh()
    reference = models.build()
    model = shard(models.build(), mesh, granularity=GRANULARITIES[granularity], reshard_after_forward=reshard)
    options = {"lr": 0.05, "foreach": True}
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    plain = torch.optim.AdamW(reference.parameters(), **options)
    rank = mesh.get_rank()
    for step in range(steps):
        expected_loss, expected_grads = models.reference_grads(reference, step, world)
        loss = models.loss_of(model, models.batch(step, rank))
        loss.backward()
        assert models.mean_over_ranks(loss) == pytest.approx(expected_loss, rel=1e-5)
        for name, param in model.named_parameters():
            assert_is_piece(param.grad, expected_grads[name], name)
        expected_norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor()
        torch.testing.assert_close(norm, expected_norm)
        optimizer.step()
        plain.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor(), expected, msg=name)
    return sum(1 for param in model.parameters() if param.to_local().numel() == 0)


SWITCHED = [(granularity, reshard) for granularity in ("rows3", "whole") for reshard in (True, False)]


# Every layout on every world; the switch is independent of the layout: two layouts and worlds show it.
@pytest.mark.parametrize(
    ("world", "cases"),
    [
        *((world, [(granularity, None) for granularity in GRANULARITIES]) for world in (1, 2, 3, 4)),
        (2, SWITCHED),
        pytest.param(4, SWITCHED, marks=pytest.mark.part("numerics")),
    ],
    ids=["1", "2", "3", "4", "2-switched", "4-switched"],
)
def test_training_equals_one_process(world: int, cases: list[tuple[str, bool | None]]) -> None:
    """Loss, gradients, clipped norm and weights equal the plain model's after several AdamW steps."""
    empty = run_cases(world, train_and_compare, [(world, *case) for case in cases])

    if world == 4:
        for case, numbers in zip(cases, empty, strict=True):
            assert sum(numbers) > 0, f"{case} must contain ranks that hold nothing of a parameter"


def compare_with_fsdp2(steps: int) -> list[float]:
    mesh = cpu_mesh()
    ours = shard(models.build(), mesh)
    theirs = models.build()
    for block in theirs.blocks:
        torch_fully_shard(block, mesh=mesh)
    torch_fully_shard(theirs, mesh=mesh)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (ours, theirs)]
    differences = []
    for step in range(steps):
        losses = []
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            loss = models.loss_of(model, models.batch(step, mesh.get_rank()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        differences.append(abs(losses[0] - losses[1]))
    return differences


def test_losses_equal_fsdp2_bitwise_on_two_ranks() -> None:
    """On two ranks a sum has one order: 20 fp32 steps give FSDP2's losses to the last bit."""
    for differences in run_ranks(2, compare_with_fsdp2, 20):
        assert differences == [0.0] * 20


def accumulate(world: int, use_context: bool) -> None:
    mesh = cpu_mesh()
    reference = models.build()
    model = shard(models.build(), mesh)
    for micro in range(3):
        last = micro == 2
        if use_context and not last:
            with model.no_sync():
                models.loss_of(model, models.batch(micro, mesh.get_rank())).backward()
            assert micro or all_wait(model)
        else:
            model.set_requires_gradient_sync(True if use_context else last)
            models.loss_of(model, models.batch(micro, mesh.get_rank())).backward()
        torch.stack(
            [models.loss_of(reference, models.batch(micro, r)) for r in range(world)]
        ).mean().backward()
    for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert_is_piece(param.grad, expected.grad, name)


@pytest.mark.parametrize("use_context", [True, False])
def test_gradient_accumulation_without_communication(use_context: bool) -> None:
    """Micro-batches under no_sync add up; the last one reduces them all."""
    run_ranks(2, accumulate, 2, use_context)


def accumulate_with_communication() -> None:
    mesh = cpu_mesh()
    reference, model = models.build(), shard(models.build(), mesh)
    for micro in range(2):
        models.loss_of(model, models.batch(micro, mesh.get_rank())).backward()
        torch.stack([models.loss_of(reference, models.batch(micro, r)) for r in range(2)]).mean().backward()
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert_is_piece(param.grad, expected.grad)


def test_gradient_accumulation_with_communication() -> None:
    """Two backwards with reduction add up in the sharded gradients."""
    run_ranks(2, accumulate_with_communication)


def two_forwards_one_backward() -> None:
    mesh = cpu_mesh()
    reference, model = models.build(), shard(models.build(), mesh)
    rank = mesh.get_rank()
    loss = models.loss_of(model, models.batch(0, rank)) + models.loss_of(model, models.batch(1, rank))
    loss.backward()
    expected = (
        torch.stack([models.loss_of(reference, models.batch(s, r)) for s in range(2) for r in range(2)]).sum()
        / 2
    )
    expected.backward()
    for param, plain in zip(model.parameters(), reference.parameters(), strict=True):
        assert_is_piece(param.grad, plain.grad)


def test_two_forwards_reach_one_reduction() -> None:
    """Both uses of every unit reach its one reduction."""
    run_ranks(2, two_forwards_one_backward)


class Checkpointed(models.Stack):
    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def checkpointed(reentrant: bool) -> None:
    mesh = cpu_mesh()
    reference, model = models.build(), models.build()
    model.__class__ = Checkpointed
    model.reentrant = reentrant
    model = shard(model, mesh)
    behind: list[GroupState] = []  # of the blocks once their backward is through

    def watch(module: nn.Module, args: object, output: torch.Tensor) -> None:
        output.register_hook(lambda _: behind.extend(state_of(b).groups[0].state for b in model.blocks))

    model.embed.register_forward_hook(watch)
    for step in range(2):
        _, grads = models.reference_grads(reference, step, 2)
        model.zero_grad()
        models.loss_of(model, models.batch(step, mesh.get_rank())).backward()
        assert behind == [GroupState.SHARDED] * 3 * (step + 1)
        for name, param in model.named_parameters():
            assert_is_piece(param.grad, grads[name], name)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_forwards_give_the_gradients_of_plain_ones(reentrant: bool) -> None:
    """Recomputed forwards give the gradients of plain ones, and their units are freed as early."""
    run_ranks(2, checkpointed, reentrant)


def sum_of_rows(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x * weight.sum(0)


def nearest(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, weight).softmax(-1) @ weight


# Ways in which a function, which is computed again in the backward, reads a weight of the root without a module's call.
READS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "gate": lambda model, x: sum_of_rows(model.gate.weight, x),
    "embedding": lambda model, x: nearest(model.embed.weight, x),
    "own": lambda model, x: sum_of_rows(model.scale, x),
    "names": lambda model, x: sum_of_rows(dict(model.named_parameters())["embed.weight"], x),
}


class Gated(nn.Module):
    """Blocks in functions that are computed again, and read a weight of the root without a call of its module."""

    def __init__(self, read: str, *, is_tied: bool, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.gate = nn.Linear(8, 8, bias=False)
        self.scale = nn.Parameter(torch.randn(4, 8)) if read == "own" else None
        if is_tied:
            self.head.weight = self.embed.weight
        self.read, self.reentrant = READS[read], reentrant

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(checkpoint(self.gated, x, use_reentrant=self.reentrant))
        return self.head(x + self.gate.weight[0])  # whose gradient arrives first

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) + self.read(self, x)


def gated(read: str, is_tied: bool, reentrant: bool, is_frozen: bool) -> None:
    model: Any = Gated(read, is_tied=is_tied, reentrant=reentrant)
    reference = Gated(read, is_tied=is_tied, reentrant=reentrant)
    for each in (model, reference):
        each.gate.requires_grad_(not is_frozen)
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=cpu_mesh())
    tokens = torch.arange(6).view(2, 3)
    for _ in range(2):
        for each in (model, reference):
            each.zero_grad()
            each(tokens).square().mean().backward()
        for name, param in model.named_parameters():
            expected = reference.get_parameter(name).grad
            if expected is None:
                assert is_frozen and param.grad is None, name
            else:
                assert_is_piece(param.grad, expected, name)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("read", READS)
def test_recomputed_functions_may_read_weights_of_the_root(read: str, is_tied: bool) -> None:
    """Also after the head's backward, when nothing else refers to the root's full parameters."""
    run_ranks(2, gated, read, is_tied, False, True)


@pytest.mark.parametrize("read", READS)
def test_reentrant_functions_may_read_weights_of_the_root(read: str) -> None:
    """Which their backward differentiates, too."""
    run_ranks(2, gated, read, False, True, False)


class SometimesUnused(nn.Module):
    """Uses ``second`` only where asked."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, use_second: bool) -> torch.Tensor:
        x = self.first(x)
        return self.second(x) if use_second else x


def unused_on_rank_one() -> None:
    mesh = cpu_mesh()
    torch.manual_seed(0)
    model = fully_shard(SometimesUnused(), mesh=mesh)
    x = models.batch(0, mesh.get_rank())
    model(x, use_second=mesh.get_rank() == 0).sum().backward()
    grad = model.second.weight.grad.full_tensor()
    torch.manual_seed(0)
    plain = SometimesUnused()
    plain(models.batch(0, 0), use_second=True).sum().backward()
    torch.testing.assert_close(grad, plain.second.weight.grad / 2)
    assert grad.abs().sum() > 0


def test_parameters_unused_on_one_rank() -> None:
    """A parameter that one rank did not use counts as zero there; nothing hangs."""
    run_ranks(2, unused_on_rank_one)


class Tied(nn.Module):
    """Two modules share one parameter inside a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 5, bias=False)
        self.b = nn.Linear(5, 5, bias=False)
        self.b.weight = self.a.weight
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.table = nn.Embedding(3, 5, sparse=True)
        self.gain = nn.Parameter(torch.ones(5, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.b(torch.tanh(self.frozen(self.a(x)))) + self.table(torch.tensor([2, 0, 2, 2]))
        return x * self.gain


def tied_frozen_and_mixed() -> None:
    mesh = cpu_mesh()
    torch.manual_seed(0)
    plain = Tied()
    torch.manual_seed(0)
    model = fully_shard(Tied(), mesh=mesh)
    assert model.a.weight is model.b.weight
    model(models.batch(0, mesh.get_rank())).sum().backward()
    torch.stack([plain(models.batch(0, r)).sum() for r in range(2)]).mean().backward()
    assert model.frozen.weight.grad is None
    for name in ("a.weight", "gain", "table.weight"):
        ours, theirs = model.get_parameter(name), plain.get_parameter(name)
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad.to_dense(), msg=name)


def test_shared_frozen_and_mixed_dtype_parameters_in_one_unit() -> None:
    """Tied parameters get one gradient, frozen ones none, sparse ones become dense; two dtypes live in one unit."""
    run_ranks(2, tied_frozen_and_mixed)


def identity_over_steps() -> None:
    mesh = cpu_mesh()
    model = shard(models.build(), mesh)
    sharded = [id(p) for p in model.parameters()]
    seen: dict[str, set[int]] = {}
    block = model.blocks[1]

    def record(module: nn.Module, args: object) -> None:
        seen.setdefault("up", set()).add(id(module.up.weight))

    block.register_forward_pre_hook(record)
    for step in range(3):
        models.loss_of(model, models.batch(step, mesh.get_rank())).backward()
        model.zero_grad()
        assert sharded == [id(p) for p in model.parameters()]
    assert len(seen["up"]) == 1
    assert seen["up"] != {id(block.up.weight)}


def test_parameter_objects_are_made_once() -> None:
    """The optimizer's and the forward's Parameter objects keep their identity over steps."""
    run_ranks(2, identity_over_steps)


def hsdp() -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    reference, model = models.build(), shard(models.build(), mesh)
    rank = torch.distributed.get_rank()
    for step in range(2):
        _, grads = models.reference_grads(reference, step, 4)
        model.zero_grad()
        models.loss_of(model, models.batch(step, rank)).backward()
        for name, param in model.named_parameters():
            assert_is_piece(param.grad, grads[name], name)
            assert param.full_tensor().shape == reference.get_parameter(name).shape


def test_hybrid_sharding_on_two_by_two_ranks() -> None:
    """A 2-D mesh replicates over its first axis and shards over its second."""
    run_ranks(4, hsdp)
