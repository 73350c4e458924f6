"""Muon equals torch.optim.Muon bit for bit, however its parameters lie, and costs what it says on the wire."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import distribute_tensor as stock_distribute

from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.faults.rounding_noise import exact_products
from tests.support.optim_cases import (
    REST_SHAPES,
    SHAPES,
    SMALL_SHAPES,
    as_fsdp2,
    as_plain,
    as_ragged,
    assert_same,
    counted,
    full_tensors,
    full_value,
    set_grads,
    train,
)
from vescale_fsdp import Element, RaggedShard, Rows, Whole, distribute_tensor, fully_shard
from vescale_fsdp.errors import LayoutError
from vescale_fsdp.optim import AdamWOptions, Muon
from vescale_fsdp.optim.muon import NewtonSchulz
from vescale_fsdp.torch_private import muon_adjust_lr, zeropower_via_newtonschulz

ADAMW = AdamWOptions(lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}


@pytest.fixture(autouse=True)
def _any_processor() -> Iterator[None]:
    """Bits are equal where products are: whether a processor sums those of a stack as it sums one is not ours."""
    with exact_products():
        yield


def reference(steps: int = 3, **options: Any) -> dict[str, torch.Tensor]:
    """One process: torch's Muon on every matrix (one per expert), torch's AdamW on the rest."""
    tensors = full_tensors((*SHAPES, *REST_SHAPES), 0)
    matrices: dict[str, torch.Tensor] = {}
    owners: dict[str, torch.Tensor] = {}
    for fqn, tensor in tensors.items():
        if tensor.ndim == 3:
            for expert, matrix in enumerate(tensor):
                matrices[f"{fqn}/{expert}"] = torch.nn.Parameter(matrix.clone())
        elif fqn not in list(tensors)[len(SHAPES) :]:
            matrices[fqn] = torch.nn.Parameter(tensor.clone())
        else:
            owners[fqn] = torch.nn.Parameter(tensor.clone())
    muon = torch.optim.Muon(list(matrices.values()), **OPTIONS, **options)
    adamw = torch.optim.AdamW(
        list(owners.values()), lr=ADAMW.lr, betas=ADAMW.betas, eps=ADAMW.eps, weight_decay=ADAMW.weight_decay
    )
    for step in range(steps):
        grads = full_tensors((*SHAPES, *REST_SHAPES), 100 + step)
        for fqn, param in {**matrices, **owners}.items():
            name, _, expert = fqn.partition("/")
            param.grad = grads[name][int(expert)].clone() if expert else grads[name].clone()
        muon.step()
        adamw.step()
    return {
        fqn: torch.stack([matrices[f"{fqn}/{e}"].detach() for e in range(len(tensor))])
        if tensor.ndim == 3
        else (matrices[fqn] if fqn in matrices else owners[fqn]).detach()
        for fqn, tensor in tensors.items()
    }


def make(params: dict[str, torch.Tensor], **options: Any) -> Muon:
    """Muon on the matrices of the case, AdamW on its rest."""
    values = list(params.values())
    return Muon(
        values[: len(SHAPES)], **{**OPTIONS, **options}, adamw_params=values[len(SHAPES) :], adamw=ADAMW
    )


@exact_products()
def sharded_run(kind: str, options: dict[str, Any]) -> tuple[dict[str, torch.Tensor], int, int]:
    """Three steps on this rank's shards: full parameters, empty pieces, cut matrices."""
    tensors = full_tensors((*SHAPES, *REST_SHAPES), 0)
    mesh = cpu_mesh()
    rules = {"element": Element(), "rows": Rows(2), "whole": Whole(), "matrix": Muon.granularity()}
    params = as_fsdp2(tensors, mesh) if kind == "fsdp2" else as_ragged(tensors, mesh, rules[kind])
    sizes = [p.to_local().numel() for p in params.values()]
    cut = sum(0 < n < p.numel() for n, p in zip(sizes, params.values(), strict=True))
    return train(make(params, **options), params, range(3)), sizes.count(0), cut


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"adjust_lr_fn": "match_rms_adamw"},
        {"nesterov": False, "momentum": 0.9, "ns_steps": 3, "eps": 1e-5},
        {"ns_coefficients": (3.0, -3.2, 1.2)},
    ],
    ids=["default", "match_rms", "plain momentum", "coefficients"],
)
def test_plain_tensors_equal_torch(options: dict[str, Any]) -> None:
    """Plain tensors, fp32: every parameter equals torch's Muon and AdamW bit for bit, with all its options."""
    params = as_plain(full_tensors((*SHAPES, *REST_SHAPES), 0))
    assert_same(train(make(params, **options), params, range(3)), reference(**options))


def test_large_stacks_are_iterated_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many equal matrices are iterated at once does not show in the result."""
    monkeypatch.setattr("vescale_fsdp.optim.muon.STACK_NUMEL", 100)
    params = as_plain(full_tensors((*SHAPES, *REST_SHAPES), 0))
    assert_same(train(make(params), params, range(3)), reference())


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("kind", ["element", "rows", "whole", "matrix", "fsdp2"])
def test_any_cut_equals_torch(kind: str, world: int) -> None:
    """However matrices are cut, over 1, 2 or 4 ranks, the result is torch's on one process, bit for bit."""
    results = run_ranks(world, sharded_run, kind, {})
    expected = reference()
    for values, _, _ in results:
        assert_same(values, expected)
    if world == 4:
        assert max(empty for _, empty, _ in results) > 0  # empty pieces took part
        assert kind == "whole" or sum(cut for _, _, cut in results) > 2


@pytest.mark.parametrize("bucket_bytes", [1, 400])
def test_many_buckets_equal_torch(bucket_bytes: int) -> None:
    """The size of the buckets does not show in the result."""
    expected = reference()
    for values, _, _ in run_ranks(3, sharded_run, "element", {"bucket_bytes": bucket_bytes}):
        assert_same(values, expected)


@exact_products()
def matrices_in_bf16(world_kind: str) -> dict[str, torch.Tensor]:
    """Three steps on bf16 matrices."""
    tensors = full_tensors(SHAPES[:-1], 0, torch.bfloat16)
    params = as_plain(tensors) if world_kind in ("plain", "torch") else as_ragged(tensors, cpu_mesh())
    cls = torch.optim.Muon if world_kind == "torch" else Muon
    return train(cls(list(params.values()), **OPTIONS), params, range(3))


def test_bf16_parameters_do_not_depend_on_the_cut() -> None:
    """bf16 parameters and momentum: the same bits on 1 process and 3 ranks, torch's within one rounding."""
    expected = matrices_in_bf16("plain")
    for values in run_ranks(3, matrices_in_bf16, "ragged"):
        assert_same(values, expected)
    for fqn, value in matrices_in_bf16("torch").items():
        torch.testing.assert_close(expected[fqn], value, rtol=2**-7, atol=2**-9)


def test_bf16_is_torchs_but_for_the_last_subtraction() -> None:
    """torch's own operators, step by step, with the subtraction in fp32: the same bits.

    torch's kernel for the CPU first rounds the learning rate to bf16, and in tall matrices the product too; its kernel
    for GPUs does not.
    """
    params = {fqn: each.clone() for fqn, each in full_tensors(SHAPES[:-1], 0, torch.bfloat16).items()}
    momenta = {fqn: torch.zeros_like(each) for fqn, each in params.items()}
    iterate = NewtonSchulz()
    for step in range(3):
        shapes = [tuple(each.shape) for each in params.values()]
        grads = full_tensors(shapes, 100 + step, torch.bfloat16).values()
        for (fqn, param), grad in zip(params.items(), grads, strict=True):
            momenta[fqn].lerp_(grad, 1 - 0.95)
            update = grad.lerp(momenta[fqn], 0.95)
            orthogonal = zeropower_via_newtonschulz(
                update, iterate.coefficients, iterate.steps, iterate.eps
            ).float()
            param.mul_(1 - OPTIONS["lr"] * OPTIONS["weight_decay"])
            lr = muon_adjust_lr(OPTIONS["lr"], None, param.shape)
            param.copy_(param.float().add(orthogonal, alpha=-lr))
    assert_same(matrices_in_bf16("plain"), params)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "other",
    [
        {"lr": 0.1},
        {"weight_decay": 5.0},
        {"momentum": 0.5},
        {"nesterov": False},
        {"ns_steps": 2},
        {"ns_coefficients": (3.0, -3.2, 1.2)},
        {"adjust_lr_fn": "match_rms_adamw"},
    ],
    ids=str,
)
def test_matrices_of_one_shape_are_stepped_as_their_own_group_says(
    other: dict[str, Any], dtype: torch.dtype
) -> None:
    """What is computed on together has nothing else in common: two groups step as two optimizers do."""
    tensors = full_tensors([(6, 4)] * 4, 0, dtype)
    together, apart = as_plain(tensors), as_plain(tensors)
    first, second = list(together.values())[:2], list(together.values())[2:]
    one = Muon([{"params": first}, {"params": second, **other}], **OPTIONS)
    values = list(apart.values())
    two = [Muon(values[:2], **OPTIONS), Muon(values[2:], **{**OPTIONS, **other})]
    both: Any = SimpleNamespace(step=lambda: [optimizer.step() for optimizer in two])
    got, expected = train(one, together, range(3)), train(both, apart, range(3))
    assert_same(got, expected)
    plain = as_plain(tensors)
    usual = train(Muon(list(plain.values()), **OPTIONS), plain, range(3))
    assert [torch.equal(got[fqn], usual[fqn]) for fqn in got] == [True, True, False, False]


@exact_products()
def hybrid_run() -> tuple[dict[str, torch.Tensor], list[str]]:
    """2 replicas x 2 shards; also the collectives of one step."""
    tensors = full_tensors((*SHAPES, *REST_SHAPES), 0)
    params = as_ragged(tensors, cpu_mesh(2, 2, names=("replicate", "shard")))
    optimizer = make(params)
    values = train(optimizer, params, range(3))
    with counted() as wire:
        optimizer.step()
    return values, wire.names


def test_hybrid_mesh_equals_torch() -> None:
    """HSDP: owners are split over replicas, one exchange each way, and the result is torch's."""
    expected = reference()
    for values, names in run_ranks(4, hybrid_run):
        assert_same(values, expected)
        assert names == ["alltoall_base_"] * 2


def hybrid_owners() -> list[tuple[int, int]]:
    """Owners of a 2 x 2 mesh's cut matrices."""
    params = as_fsdp2(full_tensors([(8, 8)] * 8, 0), cpu_mesh(2, 2))
    optimizer = Muon(list(params.values()))
    set_grads(params, full_tensors([(8, 8)] * 8, 1))
    optimizer.step()
    (plan,) = optimizer._plans.values()
    return sorted(owner for bucket in plan.buckets for owner in bucket.owner_of.values())


def test_hybrid_mesh_uses_every_rank() -> None:
    """Both replicas iterate: matrices are not all repeated in each."""
    owners, *others = run_ranks(4, hybrid_owners)
    assert all(other == owners for other in others)
    assert owners == [(replica, shard) for replica in (0, 1) for shard in (0, 1) for _ in range(2)]


def traffic_run(kind: str) -> tuple[list[str], int]:
    """Collectives and bytes of a second step."""
    shapes = [(64, 32), (32, 64), (48, 48), (4, 16, 8)]
    tensors = full_tensors(shapes, 0)
    rules = {"whole": Whole("matrix"), "cut": Rows(1)}
    params = as_ragged(tensors, cpu_mesh(), rules[kind])
    optimizer = Muon(list(params.values()))
    train(optimizer, params, range(1))
    with counted() as wire:
        optimizer.step()
    return wire.names, wire.sent_bytes


def test_whole_matrices_cost_no_communication() -> None:
    """Where every matrix lies whole on one rank, a step has no collective at all."""
    assert run_ranks(4, traffic_run, "whole") == [([], 0)] * 4


def test_cut_matrices_cost_one_exchange_each_way() -> None:
    """A bucket costs two all-to-alls, and at most 2 bytes per element each way."""
    results = run_ranks(4, traffic_run, "cut")
    assert [names for names, _ in results] == [["alltoall_base_"] * 2] * 4
    numel = 64 * 32 + 32 * 64 + 48 * 48 + 4 * 16 * 8
    sent = sum(sent for _, sent in results)
    assert 0 < sent <= 2 * 2 * numel


def per_shard_run() -> float:
    """Relative difference between iterating row shards apart and the whole."""
    from vescale_fsdp.optim.muon import NewtonSchulz

    full = full_tensors([(256, 256)], 0)["p0_256x256"].bfloat16()
    iterate = NewtonSchulz()
    whole = iterate(full.clone()[None])[0].float()
    apart = torch.cat([iterate(rows.clone()[None])[0] for rows in full.chunk(4)]).float()
    return ((whole - apart).norm() / whole.norm()).item()


def test_iterating_shards_apart_is_another_optimizer() -> None:
    """Negative control: Newton-Schulz per row shard differs by more than a third."""
    assert per_shard_run() > 0.35


def test_fused_blocks_are_iterated_apart() -> None:
    """row_splits treats Q, K and V rows as matrices of their own, each with its own learning rate."""
    full = full_tensors([(24, 8)], 0)["p0_24x8"]
    grads = full_tensors([(24, 8)], 1)["p0_24x8"]
    fused = torch.nn.Parameter(full.clone())
    parts = [torch.nn.Parameter(part.clone()) for part in full.split([16, 4, 4])]
    fused.grad = grads.clone()
    for part, grad in zip(parts, grads.split([16, 4, 4]), strict=True):
        part.grad = grad.clone()
    Muon([{"params": [fused], "row_splits": (16, 4, 4)}], lr=0.02).step()
    torch.optim.Muon(parts, lr=0.02).step()

    assert torch.equal(fused, torch.cat(parts))


@exact_products()
def tensor_parallel_run(kind: str) -> torch.Tensor:
    """Three steps of a DTensor cut by columns, or raggedly beside tensor parallelism by rows or by columns."""
    full = full_tensors([(12, 16)], 0)["p0_12x16"]
    if kind == "columns":
        param = torch.nn.Parameter(stock_distribute(full, cpu_mesh(), [Shard(1)]))
    else:
        placements = [RaggedShard((0,), (1, 2)), Shard(0 if kind == "ragged rows" else 1)]
        param = torch.nn.Parameter(distribute_tensor(full, cpu_mesh(2, 2), placements))
    params = {"p0_12x16": param}
    return train(Muon([param], lr=0.02), params, range(3))["p0_12x16"]


@pytest.mark.parametrize("kind", ["columns", "ragged rows", "ragged columns"])
def test_other_placements_take_the_slower_path(kind: str) -> None:
    """A DTensor without contiguous pieces is gathered by every rank; torch's result within fp32 rounding."""
    full = full_tensors([(12, 16)], 0)
    param = torch.nn.Parameter(full["p0_12x16"].clone())
    expected = train(torch.optim.Muon([param], lr=0.02), {"p0_12x16": param}, range(3))["p0_12x16"]
    for value in run_ranks(2 if kind == "columns" else 4, tensor_parallel_run, kind):
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("shape", [*SMALL_SHAPES, (64, 32), (32, 64), (33, 65), (128, 128)])
def test_batched_iteration_equals_single(shape: tuple[int, ...]) -> None:
    """A stack of equal shapes gives the same bits as torch's function on each (CPU)."""
    from torch.optim._muon import _zeropower_via_newtonschulz

    from vescale_fsdp.optim.muon import NewtonSchulz

    stack = torch.stack([*full_tensors([shape] * 3, 5).values()])
    iterate = NewtonSchulz()
    expected = torch.stack(
        [
            _zeropower_via_newtonschulz(m.clone(), iterate.coefficients, iterate.steps, iterate.eps)
            for m in stack
        ]
    )

    assert torch.equal(iterate(stack.bfloat16()), expected)


@exact_products()
def nan_run(world_kind: str) -> dict[str, torch.Tensor]:
    """Two steps whose second gradient holds a NaN in one matrix and an infinity in another."""

    def spoil(step: int, grads: dict[str, torch.Tensor]) -> None:
        if step == 1:
            list(grads.values())[2].view(-1)[3] = float("nan")
            list(grads.values())[5].view(-1)[7] = float("inf")

    tensors = full_tensors(SHAPES[:-1], 0)
    params = as_plain(tensors) if world_kind == "plain" else as_ragged(tensors, cpu_mesh())
    values = list(params.values())
    optimizer = torch.optim.Muon(values, **OPTIONS) if world_kind == "plain" else Muon(values, **OPTIONS)
    return train(optimizer, params, range(3), spoil)


def test_nan_and_inf_show_as_in_torch() -> None:
    """A NaN or infinite gradient spoils its own matrix, as in torch, and no other; nothing hangs."""
    expected = nan_run("plain")
    spoiled = [name for name, value in expected.items() if value.isnan().any()]
    assert len(spoiled) == 2
    for values in run_ranks(3, nan_run, "ragged"):
        assert_same(values, expected, spoiled)


def accumulate_run(parts: int) -> dict[str, torch.Tensor]:
    """One step after ``parts`` backward passes whose gradients add up exactly."""
    tensors = {"w": full_tensors([(12, 8)], 0)["p0_12x8"]}
    params = as_ragged(tensors, cpu_mesh())
    whole = torch.arange(96.0).view(12, 8) * 4
    for _ in range(parts):
        loss = (params["w"].to_local() * as_ragged({"w": whole / parts}, cpu_mesh())["w"].to_local()).sum()
        loss.backward()
    Muon(list(params.values()), lr=0.02).step()
    return {fqn: full_value(p) for fqn, p in params.items()}


def test_accumulated_gradients_equal_one() -> None:
    """Four accumulated backward passes give the step of one."""
    assert_same(run_ranks(2, accumulate_run, 4)[0], run_ranks(2, accumulate_run, 1)[0])


def test_missing_gradients_are_left_alone() -> None:
    """A parameter without a gradient keeps value and momentum; the plan follows the gradients."""
    params = as_plain(full_tensors([(4, 4), (6, 4)], 0))
    first, second = params.values()
    before = second.detach().clone()
    optimizer = Muon([first, second], lr=0.1)
    first.grad = torch.ones_like(first)
    optimizer.step()
    assert torch.equal(second, before)
    assert not optimizer.state[second]["momentum_buffer"].any()
    second.grad = torch.ones_like(second)
    optimizer.step()
    assert (second - before).norm() > 0


@pytest.mark.parametrize(
    ("build", "got", "todo"),
    [
        (lambda p: Muon([torch.nn.Parameter(torch.zeros(4))]), "(4,)", "adamw_params"),
        (lambda p: Muon(p), "one tensor", "[param]"),
        (lambda p: Muon([p], lr=-1.0), "lr=-1.0", ""),
        (lambda p: Muon([p], adjust_lr_fn="rms"), "adjust_lr_fn='rms'", ""),
        (lambda p: Muon([{"params": [p], "row_splits": (3, 3)}]), "(3, 3)", ""),
        (lambda p: Muon([{"params": [p], "algorithm": "sgd"}]), "'sgd'", "adamw_params"),
        (lambda p: Muon([torch.nn.Parameter(torch.zeros(4, 4, device="meta"))]), "meta", "to_empty"),
    ],
)
def test_mistakes_are_refused_with_the_cure(
    build: Callable[[torch.Tensor], Any], got: str, todo: str
) -> None:
    """What cannot be trained is refused when the optimizer is built; the cure names the argument or function."""
    with pytest.raises(LayoutError) as caught:
        build(torch.nn.Parameter(torch.zeros(4, 4)))
    assert got in str(caught.value.got) and todo in (caught.value.todo or "")


def test_schedulers_and_closures_work() -> None:
    """A learning-rate scheduler changes the step, and a closure's loss is returned."""
    param = torch.nn.Parameter(torch.eye(3))
    optimizer = Muon([param], lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.0 if epoch else 1.0)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (param * torch.arange(9.0).view(3, 3)).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == pytest.approx(12.0)
    scheduler.step()
    before = param.detach().clone()
    optimizer.step(closure)
    assert torch.equal(param, before)


@exact_products()
def model_run(sharded: bool) -> dict[str, torch.Tensor]:
    """Three steps of a small model on the same data on every rank; its full parameters."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Embedding(12, 8), torch.nn.Linear(8, 24), torch.nn.GELU(), torch.nn.Linear(24, 12)
    )
    if sharded:
        fully_shard(model[1], granularity=Muon.granularity(whole=["weight"]))
        fully_shard(model, granularity=Muon.granularity())
    matrices, rest = Muon.split_params(model)
    optimizer = Muon(matrices, lr=0.02, adamw_params=rest, adamw=ADAMW)
    for step in range(3):
        tokens = torch.randint(0, 12, (4, 6), generator=torch.Generator().manual_seed(step))
        torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {fqn: full_value(p) for fqn, p in model.named_parameters()}


def test_fully_sharded_model_trains_the_same() -> None:
    """fully_shard(granularity=Muon.granularity()) on 2 ranks gives one process's parameters, bit for bit."""
    expected = model_run(False)
    for values in run_ranks(2, model_run, True):
        assert_same(values, expected)


@exact_products()
def replicated_run() -> torch.Tensor:
    """A replicated DTensor, one step."""
    param = torch.nn.Parameter(stock_distribute(torch.eye(4), cpu_mesh(), [Replicate()]))
    param.grad = stock_distribute(torch.arange(16.0).view(4, 4), cpu_mesh(), [Replicate()])
    Muon([param], lr=0.1).step()
    return full_value(param)


def test_replicated_dtensors_work() -> None:
    """A DTensor that every rank holds whole is stepped where it lies."""
    param = torch.nn.Parameter(torch.eye(4))
    param.grad = torch.arange(16.0).view(4, 4)
    torch.optim.Muon([param], lr=0.1).step()
    for value in run_ranks(2, replicated_run):
        assert torch.equal(value, param)
