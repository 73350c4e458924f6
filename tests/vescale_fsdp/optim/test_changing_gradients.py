"""torch's optimizers on sharded parameters, behind the backward and inside it, if each step trains other parameters.

A random program says for each step which experts each rank uses, which block is left out, runs twice or is recomputed,
which parameters are frozen, and how many micro-batches there are. The reference trains the whole model on one device,
on all ranks' batches, with an optimizer of torch's for each piece of a weight that a rank owns. All bits are equal.
"""

from __future__ import annotations

import copy
import random
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.distributed import cpu_mesh, run_ranks
from vescale_fsdp import RaggedDTensor, fully_shard
from vescale_fsdp.dtensor.piece_map import pieces_of
from vescale_fsdp.optim import step_in_backward

WORLD, NUM_EXPERTS, NUM_BLOCKS = 2, 4, 2
MORE = pytest.mark.part("numerics")
KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
    "SGD foreach": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "foreach": True}),
    "SGD fused": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "fused": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "foreach": False}),
    "AdamW foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.01}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}),
}
# The block that runs twice, and how blocks are recomputed. Not both with reentrant checkpoints, under which each run of
# a block is reduced by itself: the sum of two means has other bits.
FORMS = [
    (None, ""),
    (None, "plain"),
    (None, "reentrant"),
    *((n, how) for n in range(NUM_BLOCKS) for how in ("", "plain")),
]
NOT_BEHIND = ("SGD fused",)  # torch's refuses parameters of which only some have a momentum


@dataclass(frozen=True)
class Micro:
    """One micro-batch.

    Args:
        experts: those that each rank uses.
        left_out, twice: a block that does not run, and one that runs two times; the same on all ranks.
        recompute: how the blocks are checkpointed: "", "plain" or "reentrant".
    """

    experts: tuple[tuple[int, ...], ...]
    left_out: int | None
    twice: int | None
    recompute: str


@dataclass(frozen=True)
class Step:
    """One step: its micro-batches, the frozen parameters, and what is done behind the optimizer."""

    micros: tuple[Micro, ...]
    frozen: tuple[str, ...]
    lr_factor: float
    to_none: bool
    reloads: bool


def draw(seed: int, names: list[str], *, in_backward: bool) -> list[Step]:
    """A random program."""
    draws = random.Random(seed)
    block = (None, None, *range(NUM_BLOCKS))
    steps = []
    for _ in range(5):
        micros = tuple(
            Micro(
                tuple(
                    tuple(sorted(draws.sample(range(NUM_EXPERTS), draws.randint(0, NUM_EXPERTS - 1))))
                    for _ in range(WORLD)
                ),
                draws.choice(block),
                *draws.choice(FORMS),
            )
            for _ in range(draws.randint(1, 2))
        )
        frozen = tuple(draws.sample(names, draws.choice([0, 0, 1, 3])))
        # In the backward gradients are dropped, as by ``set_to_none=True``.
        to_none = in_backward or draws.random() < 0.5
        steps.append(Step(micros, frozen, draws.choice([1.0, 0.5]), to_none, draws.random() < 0.2))
    return steps


class Experts(nn.Module):
    """A sum over the chosen experts, of which there may be none."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(7, 7) for _ in range(NUM_EXPERTS))
        self.scale = nn.Parameter(torch.ones(7))

    def forward(self, x: torch.Tensor, chosen: tuple[int, ...]) -> torch.Tensor:
        for number in chosen:
            x = x + self.experts[number](x)
        return x * self.scale


class Block(nn.Module):
    """Three layers, one of them smaller than the world."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 9)
        self.gate = nn.Linear(9, 1)
        self.down = nn.Linear(9, 7, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x))
        return x + self.down(hidden * torch.sigmoid(self.gate(hidden)))


class Model(nn.Module):
    """An input layer, blocks, experts, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.moe = Experts()
        self.head = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor, micro: Micro, rank: int) -> torch.Tensor:
        x = self.embed(x)
        for number, block in enumerate(self.blocks):
            for _ in range(0 if number == micro.left_out else 2 if number == micro.twice else 1):
                if micro.recompute:
                    x = checkpoint(block, x, use_reentrant=micro.recompute == "reentrant")
                else:
                    x = block(x)
        return self.head(self.moe(x, micro.experts[rank]))


def build() -> Model:
    torch.manual_seed(3)
    return Model()


def loss_of(model: nn.Module, step: int, number: int, micro: Micro, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * number + rank)
    x = torch.randn(4, 5, generator=generator, requires_grad=True)  # reentrant checkpoints need a gradient
    return model(x, micro, rank).pow(2).mean()


def groups_of(params: dict[str, Any]) -> list[dict[str, Any]]:
    """Two param groups, whose members take turns in the model."""
    return [
        {"params": [param for name, param in params.items() if "bias" not in name]},
        {"params": [param for name, param in params.items() if "bias" in name], "lr": 0.02},
    ]


def finish(optimizer: torch.optim.Optimizer, step: Step) -> None:
    optimizer.step()
    optimizer.zero_grad(set_to_none=step.to_none)
    if step.reloads:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def set_rates(optimizer: torch.optim.Optimizer, factor: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("first_lr", group["lr"]) * factor


class Plain:
    """The same program on one device, with an optimizer of torch's for each piece."""

    def __init__(self, kind: type[torch.optim.Optimizer], options: dict[str, Any], like: nn.Module) -> None:
        self.model = build()
        self.pieces: dict[str, list[nn.Parameter]] = {}
        cuts = dict(like.named_parameters())
        for name, param in self.model.named_parameters():
            cut = pieces_of(cuts[name])
            assert cut is not None
            flat = param.detach().reshape(-1)
            ranges = [cut.piece(number) for number in range(len(cut.numels))]
            self.pieces[name] = [nn.Parameter(flat[each.start : each.stop].clone()) for each in ranges]
        self.optimizers = {
            piece: kind([group for group in groups_of({name: piece}) if group["params"]], **options)
            for name, pieces in self.pieces.items()
            for piece in pieces
        }

    def run(self, number: int, step: Step) -> None:
        """Run one step: each rank's gradients are summed over its micro-batches, and averaged over ranks."""
        params = dict(self.model.named_parameters())
        sums: dict[str, torch.Tensor] = {}
        for name, param in params.items():
            param.requires_grad_(name not in step.frozen)
        for rank in range(WORLD):
            self.model.zero_grad()
            for index, micro in enumerate(step.micros):
                loss_of(self.model, number, index, micro, rank).backward()
            for name, param in params.items():
                if param.grad is not None:
                    sums[name] = sums[name] + param.grad if name in sums else param.grad.clone()
        for name, pieces in self.pieces.items():
            start = 0
            for piece in pieces:
                if name in sums:
                    mean = (sums[name].reshape(-1) / WORLD)[start : start + piece.numel()].clone()
                    piece.grad = mean if piece.grad is None else piece.grad + mean
                    start += piece.numel()
                set_rates(self.optimizers[piece], step.lr_factor)
                finish(self.optimizers[piece], step)
        with torch.no_grad():
            for name, param in params.items():
                param.copy_(torch.cat(self.pieces[name]).view_as(param))


def differing(name: str, seed: int, mesh_shape: tuple[int, ...], in_backward: bool) -> list[str]:
    """Run the program, sharded and plain; return the names of parameters and state that differ on this rank."""
    kind, options = KINDS[name]
    model: Any = build()
    mesh = cpu_mesh(*mesh_shape)
    for module in (*model.blocks, model.moe, model):
        fully_shard(module, mesh=mesh)
    params = dict(model.named_parameters())
    optimizer = kind(groups_of(params), **options)
    if in_backward:
        step_in_backward(model, optimizer)
    plain = Plain(kind, options, model)
    for number, step in enumerate(draw(seed, list(params), in_backward=in_backward)):
        for fqn, param in params.items():
            param.requires_grad_(fqn not in step.frozen)
        set_rates(optimizer, step.lr_factor)
        for index, micro in enumerate(step.micros):
            with nullcontext() if index == len(step.micros) - 1 else model.no_sync():
                loss_of(model, number, index, micro, dist.get_rank()).backward()
        assert not in_backward or not any(isinstance(each.grad, RaggedDTensor) for each in params.values())
        finish(optimizer, step)
        plain.run(number, step)
    if in_backward:  # torch gathers state in the order of its keys, which must be the same on all ranks
        order = [param for group in optimizer.param_groups for param in group["params"]]
        assert list(map(id, optimizer.state)) == [id(param) for param in order if param in optimizer.state]
    wrong = []
    for fqn, param in params.items():
        piece = plain.pieces[fqn][mesh.get_local_rank(mesh.ndim - 1)]
        state, expected = optimizer.state.get(param, {}), plain.optimizers[piece].state.get(piece, {})
        assert state.keys() == expected.keys()
        pairs = {"": (param, piece)} | {key: (state[key], expected[key]) for key in state}
        wrong += [f"{fqn} {key}" for key, (got, want) in pairs.items() if not is_same(got, want)]
    return wrong


def is_same(got: Any, want: Any) -> bool:
    got = got.to_local() if isinstance(got, RaggedDTensor) else got
    return torch.equal(got, want) if isinstance(want, torch.Tensor) else got == want


def all_differing(name: str, seeds: range, in_backward: bool) -> list[str]:
    return [
        f"{name}, seed {seed}, {shape}: {wrong}"
        for seed in seeds
        for shape in ((2,), (2, 1))
        if (wrong := differing(name, seed, shape, in_backward))
    ]


ROWS = [
    (name, in_backward)
    for name in KINDS
    for in_backward in (False, True)
    if in_backward or name not in NOT_BEHIND
]
CORE = ("SGD", "SGD fused", "Adam", "AdamW", "AdamW foreach", "AdamW fused", "Adagrad", "RMSprop")


@pytest.mark.parametrize(
    ("name", "in_backward"), [pytest.param(*row, marks=() if row[0] in CORE else MORE) for row in ROWS]
)
def test_bits_are_those_of_plain_training(name: str, in_backward: bool) -> None:
    """Weights and state, on shards and on replicas."""
    assert run_ranks(2, all_differing, name, range(1), in_backward) == [[], []]


@pytest.mark.part("numerics")
@pytest.mark.parametrize(("name", "in_backward"), ROWS)
def test_bits_in_many_programs(name: str, in_backward: bool) -> None:
    """The same, of more programs."""
    assert run_ranks(2, all_differing, name, range(1, 12), in_backward) == [[], []]
