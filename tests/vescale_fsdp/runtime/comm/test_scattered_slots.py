"""Scattered slots in training: copied out after the gather, gradients written into their pieces."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from tests.support.distributed import cpu_mesh, run_ranks
from tests.vescale_fsdp.layout.test_scattered_slots import DRAWN
from vescale_fsdp import FSDPModule, PaddingPolicy, RaggedDTensor, Rows, fully_shard
from vescale_fsdp.layout import planner
from vescale_fsdp.runtime.comm.dbuffer import DBuffer

GRANULARITY = {"*w0": Rows(3), "*w1": Rows(1), "*w2": Rows(4), "*w3": Rows(2)}
# What the planner scatters of a Branches unit, by world size.
SCATTERED = {1: set(), 2: set(), 3: {"w2"}, 4: {"w0", "w2"}}


class Branches(nn.Module):
    """Four matrices whose blocks have little in common; w2 is left out on demand."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"w0": (7, 15), "w1": (15, 15), "w2": (22, 3), "w3": (21, 16)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) / shape[1] ** 0.5))

    def forward(self, x: torch.Tensor, skip: bool = False) -> torch.Tensor:  # [n, 16] -> [n, 16]
        wide = torch.tanh(x @ self.w3.T)
        middle = torch.tanh(wide[:, :15] @ self.w1.T)
        narrow = middle @ self.w0.T
        side = narrow[:, :3] @ (self.w2.detach() * 0 if skip else self.w2).T
        return side[:, :16] + x


class Pair(nn.Module):
    """Two such units."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Branches() for _ in range(2))

    def forward(self, x: torch.Tensor, skip: bool = False) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, skip)
        return x


def build(seed: int = 3) -> Pair:
    torch.manual_seed(seed)
    return Pair()


def scattered(block: nn.Module) -> list[str]:
    """Names of a unit's tensors that no rank owns as one run."""
    assert isinstance(block, FSDPModule)
    return [
        slot.fqn for _, layout in block.model_layout().groups for slot in layout.slots if slot.is_scattered
    ]


def shard(model: Pair, world: int, **options: object) -> Pair:
    """Sharded by blocks that make the planner scatter what SCATTERED says."""
    for block in model.blocks:
        with mock.patch.object(
            planner, "ALIGN_BYTES", 32
        ):  # else there is hardly a place for such small tensors
            fully_shard(block, mesh=cpu_mesh(), granularity=GRANULARITY, **options)  # type: ignore[call-overload]
        assert set(scattered(block)) == SCATTERED[world]
    fully_shard(model, mesh=cpu_mesh())
    return model


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * step + rank))


def train_and_compare(world: int, reshard: bool | int | None, skip_on: int | None) -> None:
    """Losses, gradients and weights beside one process's over steps of two micro-batches each."""
    rank = cpu_mesh().get_rank()
    reference, model = build(), shard(build(), world, reshard_after_forward=reshard)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (reference, model)]
    for step in range(3):
        for micro in range(2):
            data = [batch(2 * step + micro, r) for r in range(world)]
            expected = torch.stack([reference(x, r == skip_on).pow(2).mean() for r, x in enumerate(data)])
            expected.mean().backward()
            loss = model(data[rank], rank == skip_on).pow(2).mean()
            assert loss.item() == pytest.approx(expected[rank].item(), rel=1e-5)
            loss.backward()
        for (name, param), plain in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert isinstance(param, RaggedDTensor)
            assert param.grad is not None
            torch.testing.assert_close(param.grad.full_tensor(), plain.grad, msg=name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, param), plain in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor(), plain, msg=name)


@pytest.mark.parametrize(
    ("world", "reshard", "skip_on"), [(3, None, None), (3, False, 1), (4, True, None), (4, 2, 3)]
)
def test_parity_with_one_process(world: int, reshard: bool | int | None, skip_on: int | None) -> None:
    """Training with scattered tensors equals the plain model's; also where a rank leaves one unused."""
    run_ranks(world, train_and_compare, world, reshard, skip_on)


def accumulate_in_the_buffer(world: int) -> None:
    reference, model = build(), shard(build(), world)
    for micro in range(3):
        torch.stack([reference(batch(micro, r)).pow(2).mean() for r in range(world)]).mean().backward()
        model.set_requires_gradient_sync(micro == 2)  # type: ignore[operator]
        model(batch(micro, cpu_mesh().get_rank())).pow(2).mean().backward()
    for (name, param), plain in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert param.grad is not None
        torch.testing.assert_close(param.grad.full_tensor(), plain.grad, msg=name)  # type: ignore[attr-defined]


def test_unreduced_gradients_add_up_in_the_pieces() -> None:
    """Micro-batches without communication add to what is in the pieces."""
    run_ranks(4, accumulate_in_the_buffer, 4)


def save(world: int, path: Path) -> None:
    model = shard(build(seed=5), world)
    dcp.save({"model": model.state_dict()}, checkpoint_id=path)


def load_and_compare(world: int, path: Path) -> None:
    expected, model = build(seed=5), shard(build(seed=6), world)
    state = model.state_dict()
    dcp.load({"model": state}, checkpoint_id=path)
    model.load_state_dict(state)
    for (name, param), plain in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(param.full_tensor(), plain), name  # type: ignore[attr-defined]
    x = batch(0, 0)
    torch.testing.assert_close(model(x), expected(x))


@pytest.mark.parametrize(("saved", "loaded"), [(3, 4), (4, 3), (4, 1), (2, 4)])
def test_dcp_round_trip(saved: int, loaded: int, tmp_path: Path) -> None:
    """Stock DCP saves scattered parameters and loads them over other worlds, bit for bit."""
    run_ranks(saved, save, saved, tmp_path)
    run_ranks(loaded, load_and_compare, loaded, tmp_path)


def forbid(world: int) -> list[str]:
    model = build()
    never = PaddingPolicy(scatter="never")
    fully_shard(model.blocks[0], mesh=cpu_mesh(), granularity=GRANULARITY, padding_policy=never)
    return scattered(model.blocks[0])


def test_scattering_can_be_forbidden() -> None:
    """PaddingPolicy(scatter="never") keeps every tensor one run of the buffer."""
    assert run_ranks(4, forbid, 4) == [[]] * 4


def test_buffer_writes_and_reads_runs_of_several_ranks() -> None:
    """Values written to a scattered slot lie in its pieces, and a gather copies them out of there."""
    a, u = DRAWN.slots
    buffer = DBuffer(DRAWN, torch.zeros(DRAWN.numel))
    values = torch.arange(30.0).view(6, 5)
    full = buffer.view(u)

    for target, part in zip(*buffer.places([(u, values)]), strict=True):
        target.copy_(part)
    buffer.add(u, values)

    for rank in range(5):
        piece = DRAWN.piece(u, rank)
        start = rank * DRAWN.shard_numel + piece.local_offset
        held = buffer.flat[start : start + piece.numel]
        assert torch.equal(held, 2 * values.view(-1)[piece.range.start : piece.range.stop])
    assert buffer.flat.count_nonzero() == 29  # nothing outside the pieces; element 0 is a zero
    buffer.wait_gather()
    assert torch.equal(full, 2 * values)
    assert full.data_ptr() != buffer.flat.data_ptr()
    assert buffer.view(a).data_ptr() == buffer.flat.data_ptr()


def test_copies_come_and_go_with_the_buffer() -> None:
    """Freeing the buffer frees the copies too, and refilling them is no modification to autograd."""
    buffer = DBuffer(DRAWN, torch.zeros(DRAWN.numel))
    full = buffer.view(DRAWN.slots[1])

    buffer.free()
    freed = full.untyped_storage().nbytes()
    buffer.allocate()
    buffer.flat.fill_(3)
    buffer.wait_gather()

    assert freed == 0
    assert torch.equal(full, torch.full((6, 5), 3.0))
