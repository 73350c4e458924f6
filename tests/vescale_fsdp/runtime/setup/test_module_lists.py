"""Units made of a list of modules, of which a forward may run only some."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.models import MLP, batch
from vescale_fsdp import FSDPModule, fully_shard
from vescale_fsdp.runtime.fsdp_state import FSDPState, state_of
from vescale_fsdp.runtime.param_group import GroupState

# Before, a list of modules of which a forward ran only some was not resharded (2.11: "did not run forward before
# backward, which is error-prone", and then errors in matrix products).
FSDP2_RUNS_PARTS_OF_LISTS = torch.__version__ >= "2.13"


class Model(nn.Module):
    """Two blocks, and a norm and a head that form one unit; the head may be left to the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 7)
        self.blocks = nn.ModuleList([MLP(7), MLP(7)])
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 11, bias=False)

    def forward(self, x: torch.Tensor, with_head: bool = True) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x) if with_head else x


def plain() -> Model:
    torch.manual_seed(3)
    return Model()


def shard(shard_fn: Any = fully_shard, **options: Any) -> Model:
    model = plain()
    for unit in (*model.blocks, [model.norm, model.head], model):
        shard_fn(unit, mesh=cpu_mesh(), **options)
    return model


class CountedReduction:
    """A reduce-scatter that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def allocate(self, size: list[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool
    ) -> Any:
        self.calls += 1
        scatter = vars(dist).get("reduce_scatter_single", dist.reduce_scatter_tensor)
        return scatter(output_tensor, input_tensor, group=group, op=op, async_op=async_op)


def count_reductions(model: Model) -> dict[str, CountedReduction]:
    counts = {name: CountedReduction() for name in ("blocks.0", "norm")}
    for name, counted in counts.items():
        model.get_submodule(name).set_custom_reduce_scatter(counted)
    return counts


def chunked_step(model: Model, x: torch.Tensor, chunks: int) -> None:
    """The loss of the head taken chunk by chunk, each with a backward of its own, then that of the rest."""
    hidden = model(x, with_head=False)
    cut = hidden.detach().requires_grad_()
    for chunk in cut.chunk(chunks):
        (model.head(chunk).pow(2).sum() / x.shape[0]).backward()
    hidden.backward(cut.grad)


def stop(*_: Any) -> None:
    raise InterruptedError


def state_after_root(is_partial: bool, after_a_failure: bool) -> list[GroupState]:
    model = shard()
    seen: list[GroupState] = []
    state = state_of(model.norm)
    assert isinstance(state, FSDPState)
    if after_a_failure:  # once both modules of the unit have begun
        handle = model.head.register_forward_pre_hook(stop)
        with pytest.raises(InterruptedError):
            model(batch(0, 0))
        handle.remove()
        model.reset_iter_state()
    model.norm.register_forward_hook(lambda *_: seen.append(state.groups[0].state))
    model(batch(0, 0), with_head=not is_partial)
    return [*seen, state.groups[0].state]


@pytest.mark.parametrize("after_a_failure", [True, False])
@pytest.mark.parametrize("is_partial", [True, False])
def test_a_partial_forward_reshards_when_the_root_ends(is_partial: bool, after_a_failure: bool) -> None:
    """Between its modules the unit stays gathered; when the root's forward is over it is sharded."""
    for inside, after in run_ranks(2, state_after_root, is_partial, after_a_failure):
        assert inside is GroupState.UNSHARDED
        assert after is GroupState.SHARDED


def chunked(chunks: int, announce: bool) -> dict[str, int]:
    model, reference = shard(), plain()
    theirs = shard(torch_fully_shard) if FSDP2_RUNS_PARTS_OF_LISTS else None
    counts = count_reductions(model)
    world, rank = dist.get_world_size(), dist.get_rank()
    for step in range(2):
        x = batch(step, rank, rows=6)
        if announce:
            model.set_is_last_backward(False)
            hidden = model(x, with_head=False)
            cut = hidden.detach().requires_grad_()
            for chunk in cut.chunk(chunks):
                (model.head(chunk).pow(2).sum() / x.shape[0]).backward()
            model.set_is_last_backward(True)
            hidden.backward(cut.grad)
        else:
            chunked_step(model, x, chunks)
        if theirs is not None:
            chunked_step(theirs, x, chunks)
        for other in range(world):
            x = batch(step, other, rows=6)
            (reference(x).pow(2).sum() / x.shape[0] / world).backward()
    for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad, rtol=1e-4, atol=1e-5, msg=name)
        if theirs is not None:
            other = theirs.get_parameter(name).grad
            torch.testing.assert_close(param.grad.full_tensor(), other.full_tensor(), msg=name)
    return {name: counted.calls for name, counted in counts.items()}


def test_chunked_loss_over_a_partial_list() -> None:
    """A head run per chunk, outside the root's forward: gradients of one process, and of FSDP2 where it can.

    Told that more backwards follow, every unit reduces once per step, the head's too.
    """
    for calls in run_ranks(2, chunked, 3, True):
        assert calls == {"blocks.0": 2, "norm": 2}


def test_chunked_loss_without_announcement() -> None:
    """Without set_is_last_backward the gradients are the same (the first chunk reduces zeros elsewhere)."""
    run_ranks(2, chunked, 2, False)


def casts() -> list[tuple[torch.dtype, torch.dtype]]:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float64)
    model = plain()
    fully_shard([model.norm, model.head], mesh=cpu_mesh(), mp_policy=policy)
    fully_shard(model, mesh=cpu_mesh())
    seen: list[tuple[torch.dtype, torch.dtype]] = []
    for module in (model.norm, model.head):
        module.register_forward_hook(lambda m, args, out: seen.append((args[0].dtype, out.dtype)))
    assert model(batch(0, 0), with_head=False).dtype is torch.float64
    assert model.head(torch.ones(2, 7)).dtype is torch.float64
    return seen


def test_inputs_and_outputs_are_cast_per_module() -> None:
    """Every module of a list casts its own inputs and outputs, whether or not the others run."""
    for seen in run_ranks(1, casts):
        assert [inputs for inputs, _ in seen] == [torch.bfloat16] * 2


class Tied(nn.Module):
    """An embedding and the norm and head behind all blocks as one unit; the embedding's inputs need no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, 8)
        self.block = MLP(8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 97, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.block(self.embed(ids))))


def _accumulate(model: nn.Module, synced: set[int]) -> None:
    """Three micro-batches of this rank's, of which some are reduced."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    for number in range(3):
        ids = torch.randint(0, 97, (3, 12), generator=generator)
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(number in synced)
        nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()


def tied_reductions() -> None:
    torch.manual_seed(3)
    alone = Tied()
    for synced in ({2}, {0, 1, 2}):
        model = copy.deepcopy(alone)
        for unit in (model.block, [model.norm, model.embed, model.head], model):
            fully_shard(unit, mesh=cpu_mesh())
        counted = CountedReduction()
        model.norm.set_custom_reduce_scatter(counted)
        _accumulate(model, synced)
        assert counted.calls == len(synced)
        found = {name: param.grad.full_tensor() for name, param in model.named_parameters()}
        if len(synced) == 1:
            _accumulate(alone, synced)
            for name, param in alone.named_parameters():
                dist.all_reduce(param.grad)
                assert torch.equal(param.grad / 2, found[name]) and found[name].any(), name
        else:  # the control: other sums
            for name, param in alone.named_parameters():
                torch.testing.assert_close(param.grad / 2, found[name])
            assert (alone.head.weight.grad / 2 - found["embed.weight"]).norm() > 0


def test_a_unit_with_a_tied_embedding_is_reduced_once() -> None:
    """Behind the embedding's backward, where it lies with the head: micro-batches are summed as without sharding."""
    run_ranks(2, tied_reductions)
