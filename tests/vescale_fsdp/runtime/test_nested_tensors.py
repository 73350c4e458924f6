"""What modules take and return: dataclasses with tensors inside, and tensors wrapped by torch.func."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from tests.support import models
from tests.support.distributed import cpu_mesh, run_ranks
from vescale_fsdp import RaggedDTensor, fully_shard
from vescale_fsdp.runtime.nested_tensors import map_tensors, tensors_of


@dataclass
class Inner:
    """A dataclass inside another."""

    hidden: torch.Tensor
    note: str = "kept"


@dataclass(frozen=True)
class Batch:
    """Tensors at several depths, and what is none."""

    first: torch.Tensor
    more: list[Inner] = field(default_factory=list)
    count: int = 0


def test_trees_with_dataclasses() -> None:
    """Tensors are found in a fixed order and replaced in a copy; what holds none keeps its identity."""
    a, b, c = (torch.full((1,), float(i)) for i in range(3))
    empty = Inner(None)  # type: ignore[arg-type]
    tree = {"x": Batch(a, [Inner(b)], 3), "y": (c, "text", empty)}

    doubled = map_tensors(lambda tensor: 2 * tensor, tree)

    assert [t is s for t, s in zip(tensors_of(tree), (a, b, c), strict=True)] == [True] * 3
    assert [t.item() for t in tensors_of(doubled)] == [0.0, 2.0, 4.0]
    assert doubled["x"].count == 3 and doubled["x"].more[0].note == "kept"
    assert doubled["y"][2] is empty and a.item() == 0.0
    assert map_tensors(lambda tensor: tensor, tree)["x"] is tree["x"]


class Pair(NamedTuple):
    """A container that only torch's tree functions know."""

    left: torch.Tensor
    right: Any


def test_trees_of_other_containers() -> None:
    """Named tuples, ordered and default dicts keep their types; what torch does not know is left alone."""
    a, b, c, d = (torch.full((1,), float(i)) for i in range(4))
    unknown = {a}
    tree = [
        Pair(a, {"k": b}),
        OrderedDict(z=c, a=1),
        defaultdict(list, x=[d]),
        unknown,
        None,
        torch.Size([2]),
    ]

    doubled = map_tensors(lambda tensor: 2 * tensor, tree)

    assert [t is s for t, s in zip(tensors_of(tree), (a, b, c, d), strict=True)] == [True] * 4
    assert [t.item() for t in tensors_of(doubled)] == [0.0, 2.0, 4.0, 6.0]
    assert [type(item) for item in doubled] == [type(item) for item in tree]
    assert doubled[3] is unknown and list(doubled[1]) == ["z", "a"] and doubled[2].default_factory is list


class Block(nn.Module):
    """Takes and returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, batch: Batch) -> Batch:
        hidden = batch.more[0].hidden
        return Batch(batch.first, [Inner(torch.tanh(self.layer(hidden)))], batch.count + 1)


class BareBlock(Block):
    """The same on the bare tensor."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return torch.tanh(self.layer(hidden))


class Model(nn.Module):
    """Blocks that pass a dataclass on."""

    def __init__(self, block: type[Block] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block(), block()])

    def forward(self, x: torch.Tensor) -> Batch:
        batch = Batch(x, [Inner(x)])
        for block in self.blocks:
            batch = block(batch)
        return batch


class BareModel(Model):
    """The same model, of which FSDP2 sees only bare tensors: before torch 2.13 it does not look into dataclasses."""

    def __init__(self) -> None:
        super().__init__(BareBlock)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        for block in self.blocks:
            x = block(x)
        return x


def build(model: type[Model] = Model) -> Model:
    torch.manual_seed(2)
    return model()


FSDP2_KNOWS_TREES = (
    torch.__version__ >= "2.13"
)  # dataclasses, and tensors that torch.func has wrapped (not 2.11)


def through_dataclasses(half: bool) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
    ours, theirs = build(), build(Model if FSDP2_KNOWS_TREES else BareModel)
    seen: list[torch.dtype] = []
    ours.blocks[1].register_forward_pre_hook(lambda m, args: seen.append(args[0].more[0].hidden.dtype))
    for shard, model in ((fully_shard, ours), (torch_fully_shard, theirs)):
        for module in (*model.blocks, model):
            shard(module, mesh=cpu_mesh(), mp_policy=policy, reshard_after_forward=True)
        out = model(models.batch(0, dist.get_rank()))
        if isinstance(out, Batch):
            assert out.count == 2
            out = out.more[0].hidden
        out.float().pow(2).sum().backward()
    assert seen == [torch.bfloat16 if half else torch.float32]
    for param, twin in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert isinstance(param.grad, RaggedDTensor)
        expected = twin.grad.full_tensor()  # type: ignore[union-attr]
        assert torch.equal(param.grad.full_tensor(), expected) and expected.abs().sum() > 0


@pytest.mark.parametrize("half", [False, True])
def test_dataclasses_of_tensors(half: bool) -> None:
    """Tensors in dataclasses are cast, and bring the parameters back for the backward, as in FSDP2."""
    run_ranks(2, through_dataclasses, half)


def transforms(shard: Any) -> dict[str, list[torch.Tensor]]:
    """What transforms of the model give, sharded by ``shard``; None: of the plain model, gradients averaged."""
    x, tangent = models.batch(0, dist.get_rank()), torch.ones(4, 5)
    found: dict[str, list[torch.Tensor]] = {}

    def sharded() -> models.Stack:
        model = models.build()
        for module in (*model.blocks, model) if shard is not None else ():
            shard(module, mesh=cpu_mesh())
        return model

    def mean(grad: torch.Tensor) -> torch.Tensor:
        if isinstance(grad, DTensor):
            return grad.full_tensor()
        dist.all_reduce(grad)
        return grad / dist.get_world_size()

    model = sharded()
    out, moved = torch.func.jvp(model, (x,), (tangent,))
    (out.sum() + moved.sum()).backward()
    found["jvp"] = [out, moved, *(mean(p.grad) for p in model.parameters())]  # type: ignore[arg-type]
    out, pull = torch.func.vjp(sharded(), x)
    found["vjp"] = [out, *pull(torch.ones_like(out))]
    found["vmap"] = [torch.func.vmap(sharded())(x)]
    return found


def transformed() -> None:
    ours = transforms(fully_shard)
    for rival in (None, torch_fully_shard) if FSDP2_KNOWS_TREES else (None,):
        for name, expected in transforms(rival).items():
            for mine, other in zip(ours[name], expected, strict=True):
                torch.testing.assert_close(mine, other, msg=name)
                assert other.abs().sum() > 0, name


def test_transforms_of_torch_func() -> None:
    """jvp, its backward, vjp and vmap of a sharded module give the plain module's values, and FSDP2's."""
    run_ranks(2, transformed)
