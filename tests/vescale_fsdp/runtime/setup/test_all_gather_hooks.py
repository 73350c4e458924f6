"""Parameters of tensor subclasses that gather themselves: the same hooks, calls and numbers as under FSDP2."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard

from tests.support import models
from tests.support.distributed import cpu_mesh, run_cases, run_ranks
from tests.support.hooked_tensors import (
    CarelessInt8,
    CodesAndScales,
    Float8Rows,
    HalfRows,
    HooklessCodes,
    Int8Rows,
    OnlyBefore,
    ThreeArguments,
    Unpadded,
    Wrapper,
    WrapsNothing,
)
from vescale_fsdp import RaggedDTensor, Rows, fully_shard
from vescale_fsdp.errors import LayoutError, MisuseError, UnsupportedOpError, VescaleError
from vescale_fsdp.runtime.all_gather_hooks import scaled_together
from vescale_fsdp.runtime.consensus import reach_consensus
from vescale_fsdp.runtime.fsdp_state import state_of, states_of
from vescale_fsdp.runtime.self_gathering_group import SelfGatheringGroup


class Block(nn.Module):
    """One weight that gathers itself, beside plain parameters."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.up = nn.Linear(6, rows)
        self.down = nn.Linear(rows, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def build(kind: type[Wrapper] | None, rows: int = 8) -> nn.Sequential:
    torch.manual_seed(5)
    model = nn.Sequential(Block(rows), Block(rows))
    for block in model if kind is not None else ():
        for layer in (
            (block.up, block.down) if kind in (Int8Rows, Float8Rows) else (block.up,)
        ):  # 6 rows: on 2 ranks only
            layer.weight = nn.Parameter(kind(layer.weight.detach()))  # type: ignore[misc]
    return model


def shard(shard_fn: Any, kind: type[Wrapper], rows: int, **options: Any) -> nn.Sequential:
    model = build(kind, rows)
    for module in (*model, model):
        shard_fn(module, **{"mesh": cpu_mesh(), **options})
    return model


def inputs(step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def train_beside_fsdp2(
    kind: type[Wrapper], rows: int, options: dict[str, Any]
) -> tuple[list[float], list[int]]:
    """Losses of a few AdamW steps, equal to FSDP2's to the bit on two ranks; elements held here."""
    exact = {"rtol": 0.0, "atol": 0.0} if dist.get_world_size() == 2 else {"rtol": 1e-4, "atol": 1e-5}
    if options.pop("hybrid", False):
        options["mesh"] = cpu_mesh(1, dist.get_world_size(), names=("replicate", "shard"))
    ours, theirs = (shard(fn, kind, rows, **options) for fn in (fully_shard, torch_fully_shard))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, foreach=True) for m in (ours, theirs)]
    losses = []
    for step in range(3):
        both = [m(inputs(step)).pow(2).mean() for m in (ours, theirs)]
        for loss in both:
            loss.backward()
        torch.testing.assert_close(*both, **exact)
        losses.append(both[0].item())
        for (name, param), twin in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert isinstance(param, RaggedDTensor) and isinstance(param.grad, RaggedDTensor), name
            expected = twin.grad.full_tensor()  # type: ignore[union-attr]
            torch.testing.assert_close(param.grad.full_tensor(), expected, **exact, msg=name)
            assert expected.abs().sum() > 0
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    weight = ours.get_parameter("0.up.weight")
    assert isinstance(weight, RaggedDTensor) and type(weight.to_local()) is torch.Tensor
    return losses, [weight.to_local().numel()]


@pytest.mark.parametrize(
    "world, kind, rows, options",
    [
        (2, Int8Rows, 8, {}),
        (2, Int8Rows, 8, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}),
        (2, Int8Rows, 8, {"reshard_after_forward": False}),
        (2, Int8Rows, 8, {"hybrid": True}),
        (2, HalfRows, 7, {}),
        pytest.param(3, HalfRows, 7, {}, marks=pytest.mark.part("numerics")),
        pytest.param(4, HalfRows, 7, {}, marks=pytest.mark.part("numerics")),
    ],
    ids=str,
)
def test_parity_with_fsdp2(world: int, kind: type[Wrapper], rows: int, options: dict[str, Any]) -> None:
    """Losses and gradients are FSDP2's, rows that do not divide included; each rank holds the same rows."""
    results = run_ranks(world, train_beside_fsdp2, kind, rows, options)

    chunk = -(-rows // world)
    for rank, (losses, held) in enumerate(results):
        assert held == [6 * max(0, min(chunk, rows - rank * chunk))]
        assert losses[0] != losses[-1]


def differs_from_plain() -> bool:
    model, plain = shard(fully_shard, Int8Rows, 8), build(None)
    return torch.equal(model(inputs(0)), plain(inputs(0)))


def test_the_hooks_decide_what_the_forward_reads() -> None:
    """Quantized weights give another output than plain ones: the comparison above is of something."""
    assert run_ranks(2, differs_from_plain) == [False, False]


def hook_calls() -> list[tuple[Any, ...]]:
    model = shard(fully_shard, HalfRows, 7)  # of another class: must not be seen below
    policy = MixedPrecisionPolicy(torch.bfloat16)
    model = fully_shard(build(Int8Rows)[0], mesh=cpu_mesh(), mp_policy=policy, reshard_after_forward=True)
    (hooked,) = (g for g in state_of(model).groups if isinstance(g, SelfGatheringGroup))  # type: ignore[union-attr]
    Wrapper.calls.clear()
    model(inputs(0)).sum().backward()
    full = hooked.params[0].unsharded
    assert full is not None and full.untyped_storage().nbytes() == 0  # given back by the reshard
    pre, _, post, *_ = calls = Wrapper.calls
    size = torch.Size((8, 6))
    assert pre == ("pre", 1, size, (6, 1), nn.Linear, policy)
    assert post == ("post", "note", torch.bfloat16, None)
    outs = [call[3] for call in calls if call[0] == "post"]
    assert outs[:2] == [None, None] and all(isinstance(out, nn.Parameter) for out in outs[2:])
    assert outs[2] is full
    return [call[0] for call in calls]


def test_calls_of_the_hooks() -> None:
    """The first gather makes a tensor, later ones fill that very Parameter; the arguments are FSDP2's."""
    for names in run_ranks(2, hook_calls):
        assert names == ["pre", "pre", "post", "post"] * 2


def careless() -> None:
    careful, model = shard(fully_shard, Int8Rows, 8), build(None)
    for block in model:
        block.up.weight = nn.Parameter(CarelessInt8(block.up.weight.detach()))
        block.down.weight = nn.Parameter(CarelessInt8(block.down.weight.detach()))
    for module in (*model, model):
        fully_shard(module, mesh=cpu_mesh())
    for one in (careful, model):
        one(inputs(0)).sum().backward()
    for param, twin in zip(model.parameters(), careful.parameters(), strict=True):
        assert torch.equal(param.grad.full_tensor(), twin.grad.full_tensor())  # type: ignore[union-attr]


def test_refilled_parameters_are_unmodified_for_autograd() -> None:
    """A hook may write into ``out`` plainly: it holds the same values again, and the backward goes on."""
    run_ranks(2, careless)


class ColumnParallel(nn.Module):
    """A weight that tensor parallelism has cut, its local part of a class with hooks (as torchao's are)."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        full = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))
        part = Int8Rows(full.chunk(mesh.size())[mesh.get_local_rank()].clone())
        self.weight = nn.Parameter(DTensor.from_local(part, mesh, [Shard(0)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.weight, DTensor)
        return x @ self.weight.to_local().t()


def beside_tensor_parallelism() -> None:
    mesh = cpu_mesh(2, 2, names=("dp", "tp"))
    ours, theirs = (
        fn(ColumnParallel(mesh["tp"]), mesh=mesh["dp"]) for fn in (fully_shard, torch_fully_shard)
    )
    for step in range(2):
        for model in (ours, theirs):
            model(inputs(step)).pow(2).sum().backward()
        assert isinstance(ours.weight, RaggedDTensor)
        grads = [model.weight.grad.to_local().view(-1, 6) for model in (ours, theirs)]
        assert torch.equal(*grads) and grads[0].abs().sum() > 0
    assert ours.weight.shape == (16, 6) and ours.weight.to_local().numel() == 4 * 6


def test_beside_tensor_parallelism() -> None:
    """DTensors whose local part is of such a class: the hooks see the rows that both axes leave."""
    run_ranks(4, beside_tensor_parallelism)


def checkpointed(folder: str) -> None:
    model = shard(fully_shard, Int8Rows, 8)
    dcp.save(model.state_dict(), checkpoint_id=folder)
    plain = build(None)
    other = fully_shard(build(None), mesh=cpu_mesh(), granularity=Rows(1))
    for param in other.parameters():
        nn.init.zeros_(param)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=folder)
    for name, param in plain.named_parameters():
        assert torch.equal(state[name].full_tensor(), param), name


def test_checkpoints_hold_plain_values(tmp_path: Any) -> None:
    """What is saved are the values the class wraps: a model without it loads them."""
    run_ranks(2, checkpointed, str(tmp_path))


def from_meta() -> None:
    with torch.device("meta"):
        model = build(Int8Rows)
    for module in (*model, model):
        fully_shard(module, mesh=cpu_mesh())
    model.to_empty(device="cpu")
    reference = shard(fully_shard, Int8Rows, 8)
    model.load_state_dict(reference.state_dict())
    assert torch.equal(model(inputs(0)), reference(inputs(0)))
    model.load_state_dict({k: v.clone() for k, v in reference.state_dict().items()}, assign=True)
    for param in model.parameters():
        with torch.no_grad():
            param.mul_(2)  # the hooks must read what is in the new shard
    assert (model(inputs(0)) - reference(inputs(0))).norm() > 0


def test_meta_init_and_new_shards() -> None:
    """to_empty and assigned state dicts move the shard; the hooks follow it."""
    run_ranks(2, from_meta)


def refusals() -> None:
    def refused(error: type[VescaleError], got: str, kind: Any, **options: Any) -> None:
        layer = nn.Linear(6, 8)
        layer.weight = nn.Parameter(kind(layer.weight.detach()))
        with models.refused(error, got=got):
            fully_shard(layer, **{"mesh": cpu_mesh(), **options})

    refused(MisuseError, "OnlyBefore", OnlyBefore)
    refused(MisuseError, "(", ThreeArguments)
    refused(UnsupportedOpError, "WrapsNothing", lambda data: data.as_subclass(WrapsNothing))
    refused(UnsupportedOpError, "Wrapper", Wrapper)
    refused(UnsupportedOpError, "reshard_after_forward=2", Int8Rows, reshard_after_forward=2)
    refused(UnsupportedOpError, "mesh", Int8Rows, mesh=cpu_mesh(2, 2))
    refused(LayoutError, "", Int8Rows, granularity=Rows(3))


def test_classes_whose_hooks_cannot_work_are_refused() -> None:
    """Half a pair of hooks, strange signatures, classes that wrap nothing, numbers to reshard to, cut blocks."""
    run_ranks(4, refusals)


class QuantizedLayer(nn.Module):
    """A frozen quantized weight, and an adapter that is trained."""

    def __init__(self, kind: type[HooklessCodes]) -> None:
        super().__init__()
        self.base = nn.Parameter(kind.quantized(torch.randn(6, 6)), requires_grad=False)
        self.adapter = nn.Sequential(nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(nn.functional.linear(x, self.base) + self.adapter(x))


def adapters_train(kind: type[HooklessCodes]) -> None:
    """The refusal of a weight of several inner tensors, and the training that its todo leads to."""
    models: list[nn.Sequential] = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(QuantizedLayer(kind), QuantizedLayer(kind)))
    model, plain = models
    with pytest.raises(UnsupportedOpError) as caught:
        fully_shard(model[0], mesh=cpu_mesh())
    assert "ignored_params" in str(caught.value.todo)
    frozen = {layer.base for layer in model}
    for module in (*model, model):
        fully_shard(module, mesh=cpu_mesh(), ignored_params=frozen)
    steps = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in models]
    for step in range(3):
        rows = [torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(2)]
        model(rows[dist.get_rank()]).square().sum().backward()
        torch.stack([plain(each).square().sum() for each in rows]).mean().backward()
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in models]
        assert norms[1] > 0.1
        torch.testing.assert_close(norms[0].full_tensor(), norms[1])  # type: ignore[attr-defined]
        for optimizer in steps:
            optimizer.step()
            optimizer.zero_grad()
    for own, want in zip(steps[0].param_groups[0]["params"], steps[1].param_groups[0]["params"], strict=True):
        torch.testing.assert_close(own.full_tensor(), want.detach())


def test_a_frozen_quantized_weight_stays_whole() -> None:
    """Of classes with hooks and without."""
    run_cases(2, adapters_train, [(CodesAndScales,), (HooklessCodes,)])


def unpadded() -> tuple[str, str] | None:
    layer = nn.Linear(6, 7)
    layer.weight = nn.Parameter(Unpadded(layer.weight.detach()))
    state = state_of(fully_shard(layer, mesh=cpu_mesh()))
    assert state is not None
    reach_consensus(states_of(*state.modules))
    if dist.get_rank() == 0:
        return None  # it would wait for the other
    with pytest.raises(MisuseError) as caught:
        layer(inputs(0))
    return str(caught.value.expected), str(caught.value.got)


def test_missing_padding_is_seen() -> None:
    """A rank with fewer rows whose hook does not pad raises instead of sending too little."""
    expected, got = run_ranks(2, unpadded)[1]
    assert "(4, 6)" in expected and "(3, 6)" in got


@pytest.fixture
def float8() -> Any:
    """torchao's float8 training; its import reports kernels that this machine cannot load."""
    logging.getLogger("torchao").setLevel(logging.CRITICAL)
    pytest.importorskip("torchao", reason="the users of these hooks: pip install torchao")
    return importlib.import_module("torchao.float8")


@contextmanager
def reductions_of_scales() -> Iterator[list[str]]:
    """Whose all-reduces for a largest value there are meanwhile, by module."""
    seen: list[str] = []

    def counted(function: Any) -> Any:
        def call(tensor: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
            if op in ("MAX", dist.ReduceOp.MAX) and tensor.is_floating_point():
                seen.append(function.__module__)
            return function(tensor, op, *args, **kwargs)

        return call

    functional = torch.distributed._functional_collectives
    torchaos = vars(sys.modules.get("torchao.float8.float8_utils", functional))  # it has bound the name
    with (
        mock.patch.object(dist, "all_reduce", counted(dist.all_reduce)),
        mock.patch.dict(torchaos, all_reduce=counted(functional.all_reduce)),
    ):
        yield seen


def train_with_scales(build_model: Any, after_step: Any) -> tuple[list[list[float]], list[int]]:
    """Losses of three steps, ours and FSDP2's, and the reductions of scales of the last one."""
    losses: list[list[float]] = []
    reductions = []
    for shard_fn in (fully_shard, torch_fully_shard):
        torch.manual_seed(0)
        model = build_model()
        for module in (*model, model):
            shard_fn(module, mesh=cpu_mesh())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses.append([])
        for step in range(3):
            with reductions_of_scales() as seen:
                loss = model(inputs(step)).pow(2).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                after_step(model)
            losses[-1].append(loss.item())
        reductions.append(len(seen))
    return losses, reductions


def scales_of_units() -> tuple[list[list[float]], list[int]]:
    weights = [Float8Rows(torch.full((2 - 2 * dist.get_rank(), 3), 7.0)), Float8Rows(torch.ones(2, 3))]
    weights[1]._data.mul_(1 + dist.get_rank())
    with scaled_together(weights, cpu_mesh().get_group()):
        scales = [weight._precomputed_scale for weight in weights]
    assert [scale.item() for scale in scales if scale is not None] == [64.0, 224.0]  # 448 / 7, 448 / 2
    assert weights[0]._precomputed_scale is weights[1]._precomputed_scale is None
    return train_with_scales(lambda: build(Float8Rows), lambda model: None)


def test_scales_of_a_unit_are_one_reduction() -> None:
    """Float8 weights that compute their scales at each gather do so together, with FSDP2's bits."""
    for (ours, theirs), (few, many) in run_ranks(2, scales_of_units):
        assert ours == theirs and ours[0] != ours[2]
        assert many == 2 * few > 0  # two weights in a unit


def train_float8(door: bool) -> tuple[list[list[float]], list[int]]:
    logging.getLogger("torchao").setLevel(logging.CRITICAL)
    float8 = importlib.import_module("torchao.float8")
    config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)

    def build_model() -> nn.Module:
        return float8.convert_to_float8_training(build(None, 16), config=config)  # type: ignore[no-any-return]

    precompute = float8.precompute_float8_dynamic_scale_for_fsdp
    return train_with_scales(build_model, precompute if door else lambda model: None)


@pytest.mark.part("numerics")
@pytest.mark.parametrize("door", [False, True])
def test_torchao_float8_weights(float8: Any, door: bool) -> None:
    """torchao's float8 linears, whose weights travel in 8 bits, train as under FSDP2 to the last bit.

    The scales of a unit are one reduction; where torchao's own door has computed those of the model, there is none.
    """
    for (ours, theirs), (few, many) in run_ranks(2, train_float8, door):
        assert ours == theirs and ours[0] != ours[2]
        assert (few == many == 0) if door else (many == 2 * few > 0)


def gathered_in_vain() -> set[Any]:
    """Metadata that ``post`` was given, where a unit is gathered ahead and does not run before the next step."""
    Wrapper.calls.clear()
    model = shard(fully_shard, Int8Rows, 8)
    expected = model(inputs(0)).detach()
    last = model._modules.pop("1")
    with torch.no_grad():
        model(inputs(0))
    model._modules["1"] = last
    assert torch.equal(model(inputs(0)), expected)
    return {call[1] for call in Wrapper.calls if call[0] == "post"}


def test_hooks_run_once_per_gather() -> None:
    """A gather that nobody used is finished once: its metadata is there, and the next gather has its own."""
    assert run_ranks(2, gathered_in_vain) == [{"note"}] * 2
