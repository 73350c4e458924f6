"""Parameters that were not used: None where no rank used them, as under FSDP2; nothing hangs where some did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from tests.support.distributed import cpu_mesh, run_cases, run_ranks
from tests.support.grads import reduced_grad
from tests.support.models import assert_is_piece
from vescale_fsdp import fully_shard
from vescale_fsdp.errors import LifecycleError
from vescale_fsdp.runtime.comm import order_watch
from vescale_fsdp.runtime.comm.unsharded_grads import UsedFlags

# torch 2.11's FSDP2 does not reduce zeros for unused parameters: there the plain model alone is compared with.
STOCK_HAS_ZEROS = "set_reduce_scatter_unused_params" in vars(FSDPModule)


class Experts(nn.Module):
    """A root with a part of its own, and a unit with three, of which a call uses those it names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Linear(5, 6)
        self.extra = nn.Linear(6, 6)
        self.experts = nn.ModuleDict({name: nn.Linear(6, 6) for name in "abc"})

    def forward(self, x: torch.Tensor, names: str) -> torch.Tensor:
        x = self.embed(x)
        for name in names.removesuffix("e"):
            x = torch.tanh(self.experts[name](x)) + x
        return self.extra(x) if "e" in names else x


class Unit(nn.Module):
    """`Experts` with the experts in a unit of their own, which always runs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.outer = nn.Linear(5, 5)
        self.experts = Experts()

    def forward(self, x: torch.Tensor, names: str) -> torch.Tensor:
        return self.experts(self.outer(x), names)


def build(shard: Callable[..., Any], mesh: Any = None) -> Any:
    model = Unit()
    shard(model.experts, mesh=mesh or cpu_mesh())
    return shard(model, mesh=mesh or cpu_mesh())


def rows(step: int, rank: int | None = None) -> torch.Tensor:
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def add_mean_grads(model: nn.Module, step: int, loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Add to a plain model's gradients what all ranks' rows of a step give."""
    for rank in range(dist.get_world_size()):
        (loss(rows(step, rank)) / dist.get_world_size()).backward()


USES_OF_STEPS = ("abce", "ab", "c", "ab")


def trained(shard: Callable[..., Any], zeros: bool) -> list[torch.Tensor]:
    """Weights after steps that use other experts each, with an optimizer whose state goes on moving weights."""
    model = build(shard)
    if zeros:
        model.set_reduce_scatter_unused_params(reduce_scatter_unused_params=True)
    fired: list[str] = []
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    kept = []
    for step, names in enumerate(USES_OF_STEPS):
        fired.clear()
        model(rows(step), names).pow(2).sum().backward()
        used = {name for name, p in model.named_parameters() if p.grad is not None}
        assert used == set(fired) and len(fired) == len(used)
        assert zeros or any("experts.c" in name for name in used) == ("c" in names)
        assert not zeros or len(used) == 12
        optimizer.step()
        optimizer.zero_grad()
        kept += [param.full_tensor().detach() for param in model.parameters()]
    return kept


def trained_plain(zeros: bool) -> list[torch.Tensor]:
    """The same of the plain model."""
    model = Unit()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    kept = []
    for step, names in enumerate(USES_OF_STEPS):
        add_mean_grads(model, step, lambda x, names=names: model(x, names).pow(2).sum())
        for param in model.parameters() if zeros else ():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        optimizer.step()
        optimizer.zero_grad()
        kept += [param.detach().clone() for param in model.parameters()]
    return kept


def same_as_stock() -> None:
    for zeros in (False, True):
        ours = trained(fully_shard, zeros)
        assert len(ours) == 4 * 12
        torch.testing.assert_close(ours, trained_plain(zeros))
        if zeros and not STOCK_HAS_ZEROS:
            continue
        for left, right in zip(ours, trained(stock_fully_shard, zeros), strict=True):
            assert torch.equal(left, right)


def test_unused_parameters_as_under_fsdp2() -> None:
    """The same bits under AdamW where all ranks leave a parameter unused, and where zeros were asked for."""
    run_ranks(2, same_as_stock)


def used_by_some(mesh_shape: tuple[int, ...]) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", mesh_shape)
    model, plain = build(fully_shard, mesh), Unit()
    names = "ab" if rank == 0 else "a"  # b on one rank, c and extra nowhere
    sent = mock.patch.object(UsedFlags, "__init__", autospec=True, side_effect=UsedFlags.__init__)
    read = mock.patch.object(UsedFlags, "anywhere", autospec=True, side_effect=UsedFlags.anywhere)
    with sent as sending, read as reading:
        model.set_requires_all_reduce(False)
        model(rows(0), names).pow(2).sum().backward()
        # Sums over shards wait for the all-reduce over replicas, and what was used with them.
        held = len(mesh_shape) > 1
        assert all(reduced_grad(p) is None for p in model.parameters()) == held
        assert sending.call_count == int(not held)
        model.set_requires_all_reduce(True)
        model(rows(1), "a").pow(2).sum().backward()
        assert sending.call_count == reading.call_count == 2 - int(held)
        model(rows(2), "abce").pow(2).sum().backward()
        assert sending.call_count == reading.call_count == 3 - int(held)  # on the CPU reading is free
    for other in range(world):
        x = [
            torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + other)) for step in range(3)
        ]
        for each, used in zip(x, ("ab" if other == 0 else "a", "a", "abce"), strict=True):
            (plain(each, used).pow(2).sum() / world).backward()
    for name, param in model.named_parameters():
        assert_is_piece(param.grad, plain.get_parameter(name).grad, name, rtol=1e-4, atol=1e-5)


def none_of_a_rank_that_used_nothing_else() -> None:
    """Accumulated without synchronization: what an earlier micro-batch used counts."""
    model = build(fully_shard)
    with model.no_sync():
        model(rows(0), "ab" if dist.get_rank() else "a").sum().backward()
    model(rows(1), "a").sum().backward()
    grads = {name: param.grad is not None for name, param in model.named_parameters()}
    assert grads["experts.experts.b.weight"] and not grads["experts.experts.c.weight"]


def test_parameters_that_some_ranks_use() -> None:
    """They get what others made of them, over shards and replicas; flags are sent once and read where it matters."""
    run_ranks(2, used_by_some, (2,))
    run_ranks(2, none_of_a_rank_that_used_nothing_else)
    run_ranks(4, used_by_some, (2, 2))


class Idle(nn.Module):
    """A root whose forward runs its second unit only if it is told to; the third never runs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.units = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: torch.Tensor, *, both: bool) -> torch.Tensor:
        x = self.units[0](x)
        return self.units[1](x) if both else x


BOTH_IN_STEPS = (False, True, False, False, True)


def idle_units(shard: Callable[..., Any], synced: bool) -> list[list[Any]]:
    """Gradients of a second unit in turns: it runs, rests with what it has, rests with none, and runs again."""
    model: Any = Idle()
    for module in (*model.units, model):
        shard(module, mesh=cpu_mesh())
    model.set_reduce_scatter_unused_params(True)
    kept = []
    for step, both in enumerate(BOTH_IN_STEPS):
        model.set_requires_gradient_sync(synced or step % 2 == 1)
        model(rows(step), both=both).sum().backward()
        reduced = [reduced_grad(param) for param in model.parameters()]
        grads = [grad.full_tensor() if isinstance(grad, DTensor) else None for grad in reduced]
        kept.append(grads)
        if step != 1:
            model.zero_grad()
    return kept


def idle_plain(synced: bool) -> list[list[Any]]:
    """The same of the plain model, whose gradients count once they are reduced."""
    model, kept = Idle(), []
    reduced: list[Any] = [None] * 6
    for step, both in enumerate(BOTH_IN_STEPS):
        add_mean_grads(model, step, lambda x, both=both: model(x, both=both).sum())
        if synced or step % 2 == 1:
            num_ran = 4 if any(BOTH_IN_STEPS[: step + 1]) else 2
            for number, param in enumerate([*model.parameters()][:num_ran]):
                grad = torch.zeros_like(param) if param.grad is None else param.grad
                reduced[number] = grad if reduced[number] is None else reduced[number] + grad
                param.grad = None
        kept.append([*reduced])
        if step != 1:
            reduced = [None] * 6
            model.zero_grad()
    return kept


def idle_units_as_stock() -> None:
    for synced in (True, False):
        ours = idle_units(fully_shard, synced)
        assert ours[3][2] is not None and not ours[3][2].any() and ours[0][2] is None and ours[3][4] is None
        torch.testing.assert_close(ours, idle_plain(synced))
        if not STOCK_HAS_ZEROS or not synced:  # FSDP2's zero_grad leaves what is not reduced
            continue
        for mine, stocks in zip(ours, idle_units(stock_fully_shard, synced), strict=True):
            assert [each is None for each in mine] == [each is None for each in stocks]
            for left, right in zip(mine, stocks, strict=True):
                assert left is None or torch.equal(left, right)


def test_idle_units_get_zeros_as_under_fsdp2() -> None:
    """Where zeros were asked for: units that an earlier forward ran, and no others."""
    run_ranks(2, idle_units_as_stock)


class OneOrTwo(nn.Module):
    """Two layers, of which a call uses one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.once = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, both: bool) -> torch.Tensor:
        return self.always(x) + self.once(x) if both else self.always(x)


def rounds_with_hooks() -> list[list[str]]:
    """Which post-accumulate hooks fire where all ranks, none, and one of them use the second layer."""
    model = fully_shard(OneOrTwo(), mesh=cpu_mesh())
    fired: list[str] = []
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    rounds = []
    for both in (True, False, dist.get_rank() == 0):
        model(torch.ones(2, 4), both=both).sum().backward()
        rounds.append(sorted(fired))
        fired.clear()
    once = model.once.weight.grad.full_tensor()
    torch.testing.assert_close(
        once, torch.full((4, 4), 3.0)
    )  # 2 of the first round, a mean of 2 and 0 of the last
    return rounds


def test_hooks_do_not_fire_again_for_what_no_rank_used() -> None:
    """Gradients of an earlier micro-batch stay and their hooks are not called, unless some rank has added to them."""
    always = ["always.bias", "always.weight"]
    both = [*always, "once.bias", "once.weight"]
    for rounds in run_ranks(2, rounds_with_hooks):
        assert rounds == [both, always, both]


class Row(nn.Module):
    """Units in a row, all of which run; of each the output is used where a call says so."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Linear(5, 6)
        self.units = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)) for _ in range(4))
        self.head = nn.Linear(6, 3)
        self.recomputes = False

    def forward(self, x: torch.Tensor, uses: str) -> torch.Tensor:
        x = self.embed(x)
        for number, unit in enumerate(self.units):
            y = checkpoint(unit, x, use_reentrant=False) if self.recomputes else unit(x)
            x = x + torch.tanh(y) if str(number) in uses else x
        y = self.units[1](x.detach())  # a second call, whose input needs no gradient
        return self.head(x + y if "e" in uses else x)


# What the even ranks use and what the odd ones do, in each of two micro-batches.
USES = (
    (("0123", "0123"), ("023", "0123")),
    (("0123", "123"), ("012", "0123")),
    (("13", "02"), ("01", "")),
    (("0e", "3"), ("023", "0e")),
    (("02", "02"), ("0", "02")),
)


def _each(row: Row) -> list[Any]:
    return list(row.units)


KINDS: dict[str, tuple[Callable[[Row], list[Any]], dict[str, Any]]] = {
    "plain": (_each, {}),
    "kept": (_each, {"reshard_after_forward": False}),
    "in parts": (_each, {"reshard_after_forward": 2}),
    "bf16": (_each, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}),
    "lists": (lambda row: [row.units[0], [row.units[1], row.units[3]], row.units[2]], {}),
    "nested": (lambda row: [row.units[0][1], *row.units], {}),
    "recomputed": (_each, {}),
    "own communicator": (_each, {}),
    "zeros": (_each, {}),
    "inputs": (_each, {}),
}


def unevenly_used(kind: str, mesh_shape: tuple[int, ...], way: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = cpu_mesh(*mesh_shape)
    units, options = KINDS[kind]
    model: Any = Row()
    for unit in [*units(model), model]:
        fully_shard(unit, mesh=mesh, **options)
    model.recomputes = kind == "recomputed"
    model.set_reduce_scatter_unused_params(kind == "zeros")
    if kind == "own communicator":
        model.set_separate_reduce_scatter_group()
    is_odd = [other == world - 1 for other in range(world)]
    for step, (first, second) in enumerate(USES):
        plain = Row()
        x = [[batch_of(10 * step + micro, other) for other in range(world)] for micro in range(2)]
        if kind == "inputs":
            x[0][rank].requires_grad_(is_odd[rank])
        mine = first[is_odd[rank]], second[is_odd[rank]]
        if way == "one graph":
            (model(x[0][rank], mine[0]).sum() + model(x[1][rank], mine[1]).pow(2).sum()).backward()
        else:
            model.set_requires_gradient_sync(way != "no sync")
            model(x[0][rank], mine[0]).sum().backward()
            model.set_requires_gradient_sync(True)
            model(x[1][rank], mine[1]).pow(2).sum().backward()
        for other in range(world):
            both = plain(x[0][other].detach(), first[is_odd[other]]).sum()
            both = both + plain(x[1][other].detach(), second[is_odd[other]]).pow(2).sum()
            (both / world).backward()
        for name, param in model.named_parameters():
            expected = plain.get_parameter(name).grad
            if expected is None and kind != "zeros":
                assert param.grad is None, (step, name)
                continue
            expected = torch.zeros(param.shape) if expected is None else expected
            close = {"rtol": 0.1, "atol": 0.1} if kind == "bf16" else {"rtol": 1e-4, "atol": 1e-5}
            assert_is_piece(param.grad, expected, f"{step} {name}", **close)
        model.zero_grad()


def batch_of(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


WAYS = ("each", "no sync", "one graph")
ON_TWO = [(kind, (2,)) for kind in KINDS if kind != "in parts"]
ON_FOUR: list[tuple[str, tuple[int, ...]]] = [
    ("plain", (2, 2)),
    ("kept", (2, 2)),
    ("lists", (2, 2)),
    ("in parts", (4,)),
]


@pytest.mark.parametrize(
    ("world", "kinds", "ways"),
    [
        (2, ON_TWO[::2], (0,)),
        pytest.param(2, ON_TWO[1::2], (0,), marks=pytest.mark.part("numerics")),
        pytest.param(4, ON_FOUR, (0,), marks=pytest.mark.part("numerics")),
        pytest.param(2, ON_TWO, (1, 2), marks=pytest.mark.part("numerics")),
        pytest.param(4, ON_FOUR, (1, 2), marks=pytest.mark.part("numerics")),
    ],
    ids=["2", "2-others", "4", "2-more", "4-more"],
)
def test_units_whose_output_only_some_ranks_use(
    world: int, kinds: list[tuple[str, tuple[int, ...]]], ways: tuple[int, ...]
) -> None:
    """They train as in plain data parallelism: ranks that skip a unit gather and reduce it where others do.

    Also over shards and replicas, where one rank of four differs, and with parameters kept in parts. Each kind meets
    the ways in turn.
    """
    run_cases(
        world,
        unevenly_used,
        [(*kind, WAYS[(number + way) % 3]) for number, kind in enumerate(kinds) for way in ways],
    )


class TwoUnits(nn.Module):
    """Two units of equal sizes, which run in the order that is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: torch.Tensor, order: str = "01") -> torch.Tensor:
        for number in order:
            x = torch.tanh(self.units[int(number)](x))
        return x


def _swapped(model: Any, x: torch.Tensor, is_odd: bool) -> None:
    model(x, "10" if is_odd else "01").sum().backward()


def _left_out(model: Any, x: torch.Tensor, is_odd: bool) -> None:
    model(x, "1" if is_odd else "01").sum().backward()


def _not_synced(model: Any, x: torch.Tensor, is_odd: bool) -> None:
    model.units[1].set_requires_gradient_sync(not is_odd)
    model(x).sum().backward()


def _not_summed_over_replicas(model: Any, x: torch.Tensor, is_odd: bool) -> None:
    model.units[1].set_requires_all_reduce(not is_odd)
    model(x).sum().backward()


def _other_factor(model: Any, x: torch.Tensor, is_odd: bool) -> None:
    model.units[1].set_gradient_divide_factor(3.0 if is_odd else 2.0)
    model(x).sum().backward()


def _deadlocked(model: Any, x: torch.Tensor, is_odd: bool) -> None:
    """Set after the forward was compared: one rank reduces a unit, the other one gathers the next."""
    out = model(x)
    model.units[1].set_requires_gradient_sync(not is_odd)
    out.sum().backward()


ODD_WAYS: dict[str, Callable[[Any, torch.Tensor, bool], None]] = {
    "swapped": _swapped,
    "left out": _left_out,
    "not synced": _not_synced,
    "not summed": _not_summed_over_replicas,
    "other factor": _other_factor,
    "deadlocked": _deadlocked,
}


def odd_way(way: str, shape: tuple[int, ...]) -> tuple[str, str] | None:
    """What a rank hears of a last rank that goes another way in the second step."""
    with mock.patch.object(order_watch, "BOUND_S", 4.0):
        model: Any = TwoUnits()
        mesh = cpu_mesh(*shape)
        for module in (*model.units, model):
            fully_shard(module, mesh=mesh)
        if way == "deadlocked":
            model.set_separate_reduce_scatter_group()
        x, is_odd = torch.ones(2, 6), dist.get_rank() == dist.get_world_size() - 1
        model(x).sum().backward()
        try:
            ODD_WAYS[way](model, x, is_odd)
            for _ in range(4):
                model(x).sum().backward()
        except LifecycleError as error:
            return str(error.expected), str(error.got)
        return None


@pytest.mark.parametrize(
    ("way", "shape"),
    [(way, (2, 2)) for way in ODD_WAYS if way != "deadlocked"]
    + [
        ("swapped", (2,)),
        ("not synced", (2,)),
        pytest.param("deadlocked", (2,), marks=pytest.mark.part("faults")),
    ],
)
def test_every_rank_hears_of_another_order(way: str, shape: tuple[int, ...]) -> None:
    """Orders that cannot be reconciled raise on all ranks, within a bound, and name units and ranks."""
    world = 2 if len(shape) == 1 else 4
    for found in run_ranks(world, odd_way, way, shape, timeout_s=30.0):
        assert found is not None, "this rank has heard of nothing"
        expected, got = found
        assert "units." in expected + got
        assert f"ranks {list(range(world - 1))} " in expected and f"ranks [{world - 1}] " in got
