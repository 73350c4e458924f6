"""Users' mistakes end in one error that says what was expected, what was got, where, and what to do."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.testing._internal.two_tensor import TwoTensor

from tests.support import models
from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.models import assert_is_piece, refused
from vescale_fsdp import Element, FSDPModule, RaggedShard, distribute_tensor, fully_shard
from vescale_fsdp.errors import (
    ArgumentError,
    LayoutError,
    LifecycleError,
    MisuseError,
    PlacementError,
    UnsupportedOpError,
)
from vescale_fsdp.layout import GroupLayout
from vescale_fsdp.runtime.comm.group_comm import GatherPolicy, GroupComm
from vescale_fsdp.runtime.fsdp_state import state_of
from vescale_fsdp.torch_private import REDUCES_AS_STORED


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.0))


def mistakes() -> None:
    mesh = cpu_mesh()
    with refused(ArgumentError, got="ModuleList"):
        fully_shard(nn.ModuleList([nn.Linear(2, 2)]), mesh=mesh)
    with refused(LayoutError, where="temperature", got="()"):
        fully_shard(Scalar(), mesh=mesh)
    strided = nn.Linear(4, 4)
    strided.weight = nn.Parameter(torch.randn(4, 4).t())
    with refused(UnsupportedOpError, where="weight", got="(1, 4)"):
        fully_shard(strided, mesh=mesh)
    subclass = nn.Linear(4, 4)
    subclass.weight = nn.Parameter(TwoTensor(torch.randn(4, 4), torch.randn(4, 4)))
    with refused(UnsupportedOpError, where="weight", got="TwoTensor"):
        fully_shard(subclass, mesh=mesh)
    with refused(LayoutError, got=3, where="weight"):
        fully_shard(nn.Linear(2, 2), mesh=mesh, granularity=lambda fqn, param: 3)  # type: ignore[return-value,arg-type]
    model = fully_shard(nn.Linear(2, 2), mesh=mesh)
    with refused(MisuseError, got="FSDPLinear", todo="fully_shard"):
        fully_shard(model, mesh=mesh)
    with refused(MisuseError, got="deepcopy of FSDPLinear"):
        copy.deepcopy(model)
    with refused(ArgumentError, got=2):
        model.set_reshard_after_forward(2)


def test_modules_that_cannot_be_sharded_are_refused() -> None:
    """Containers, scalars, strided parameters, wrong rules, double wraps, deep copies."""
    run_ranks(1, mistakes)


def everything_of(model: nn.Module) -> list[tuple[Any, ...]]:
    """What `fully_shard` might change: per module its class, hooks, states, parameters and buffers."""
    return [
        (
            type(module),
            set(vars(module)),
            [id(tensor) for tensor in (*module._parameters.values(), *module._buffers.values())],
            [len(getattr(module, hooks)) for hooks in HOOKS],
            [set(vars(p)) for p in module._parameters.values() if p is not None],
        )
        for module in model.modules()
    ]


HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")


def refused_halfway() -> None:
    mesh = cpu_mesh()
    model = models.build()
    model.norm = nn.BatchNorm1d(3)
    model.head.double()  # a second group, planned after the first

    def rule(fqn: str, param: nn.Parameter) -> Element:
        return Element() if param.dtype is torch.float32 else None  # type: ignore[return-value]

    class NoGather(GatherPolicy):
        def gather_of(self, layout: GroupLayout, comm: GroupComm, dtype: torch.dtype) -> None:
            if dtype is torch.float64:
                raise LayoutError("planted")

    before = everything_of(model)
    storages = [p.untyped_storage().nbytes() for p in model.parameters()]
    with refused(LayoutError, where="head.weight"):
        fully_shard(model, mesh=mesh, granularity=rule)
    with pytest.raises(LayoutError, match="planted"):
        fully_shard(model, mesh=mesh, mp_policy=NoGather())
    with refused(ArgumentError, got=7):
        fully_shard(model, mesh=mesh, reshard_after_forward=7)
    assert everything_of(model) == before
    assert [p.untyped_storage().nbytes() for p in model.parameters()] == storages
    fully_shard(model, mesh=mesh)
    assert everything_of(model) != before and len(state_of(model).groups) == 2  # type: ignore[union-attr]


def test_a_refused_call_changes_nothing() -> None:
    """Parameters, buffers, hooks and classes are those of before, even if a later group is the reason."""
    run_ranks(2, refused_halfway)


class Inner(nn.Module):
    """A module with a child that a list may name as well."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.child(x)


def lists_of_modules() -> None:
    mesh = cpu_mesh()
    with refused(ArgumentError, got="[]"):
        fully_shard([], mesh=mesh)
    outer, other = Inner(), nn.Linear(5, 5)
    given: Any = [outer.child, outer, other, outer]
    assert fully_shard(given, mesh=mesh) is given
    assert isinstance(outer, FSDPModule) and isinstance(other, FSDPModule)
    assert not isinstance(outer.child, FSDPModule)
    assert state_of(outer).modules == (outer, other)  # type: ignore[union-attr]
    assert type(fully_shard(nn.Linear(5, 5), mesh=mesh)) is type(other)


def test_modules_inside_others_of_a_list_belong_to_those() -> None:
    """Modules inside others of the list belong to those; modules of one class get one sharded class."""
    run_ranks(1, lists_of_modules)


def tied_across_units() -> None:
    model = models.build()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    fully_shard(model.blocks[0], mesh=cpu_mesh())
    with refused(LayoutError, where="up.weight", todo="fully_shard([a, b])"):
        fully_shard(model.blocks[1], mesh=cpu_mesh())
    with refused(LayoutError, where="blocks.1.up.weight"):
        fully_shard(model, mesh=cpu_mesh())
    together = models.build()
    together.blocks[1].up.weight = together.blocks[0].up.weight
    fully_shard([together.blocks[0], together.blocks[1]], mesh=cpu_mesh())
    assert together.blocks[0].up.weight is together.blocks[1].up.weight


def test_parameters_tied_across_units_are_refused() -> None:
    """Sharding each side alone would untie them in silence."""
    run_ranks(1, tied_across_units)


def placement_functions() -> None:
    mesh = cpu_mesh()
    fully_shard(models.build(), mesh=mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    fully_shard(models.build(), mesh=mesh, shard_placement_fn=lambda p: None)
    for wrong in (Shard(2), "rows", RaggedShard((0,), (1, 1))):
        with refused(MisuseError, where="weight", got=wrong):
            fully_shard(nn.Linear(2, 2), mesh=mesh, shard_placement_fn=lambda p, wrong=wrong: wrong)
    with refused(PlacementError, got="'x'"):
        fully_shard(nn.Linear(2, 2), mesh=mesh, dp_mesh_dims="x")


def test_placement_functions_and_mesh_dims() -> None:
    """torch's shard_placement_fn is asked and checked, and dp_mesh_dims must be torch's."""
    run_ranks(1, placement_functions)


def order_mistakes() -> None:
    mesh = cpu_mesh()
    model = models.build()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    model.blocks[0](torch.randn(2, 7))
    fully_shard(model, mesh=mesh)
    with refused(LifecycleError, got="blocks.0"):
        model(models.batch(0, 0))
    whole = models.build()
    for block in whole.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(whole, mesh=mesh)
    whole(models.batch(0, 0))
    with refused(LifecycleError, got="FSDPMLP"):
        whole.blocks[1].reset_iter_state()
    listed = models.build()
    fully_shard(list(listed.blocks), mesh=mesh)
    with refused(LifecycleError, got="3 modules"):
        listed(models.batch(0, 0))


def test_modules_run_in_a_wrong_order() -> None:
    """A block that ran before its root, and a list without a root, are named."""
    run_ranks(1, order_mistakes)


class Failing(models.Stack):
    fail = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if self.fail and index == 1:
                raise ValueError("planted")
        return self.head(x)


def recover() -> None:
    mesh = cpu_mesh()
    model = models.build()
    model.__class__ = Failing
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    models.loss_of(model, models.batch(0, 0)).backward()
    model.zero_grad()
    model.fail = True
    with pytest.raises(ValueError, match="planted"):
        model(models.batch(0, 0))
    model.fail = False
    model.reset_iter_state()
    reference = models.build()
    _, grads = models.reference_grads(reference, 1, 2)
    models.loss_of(model, models.batch(1, mesh.get_rank())).backward()
    for name, param in model.named_parameters():
        assert_is_piece(param.grad, grads[name], name)


def test_reset_after_an_exception() -> None:
    """After reset_iter_state the next step is right."""
    run_ranks(2, recover)


def recover_in_backward() -> None:
    model = models.build()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=cpu_mesh(2, 1, names=("replicate", "shard")))
    rank, events, failing = dist.get_rank(), [], [False]

    def watch(grad: torch.Tensor) -> None:
        events.append("backward 0")

    def fail(grad: torch.Tensor) -> None:
        if failing[0]:
            raise ValueError("planted")

    model.blocks[0].tiny.register_forward_hook(lambda module, args, out: out.register_hook(watch) and None)
    model.blocks[1].tiny.register_forward_hook(lambda module, args, out: out.register_hook(fail) and None)
    for index, block in enumerate(model.blocks):
        (group,) = state_of(block).groups  # type: ignore[union-attr]
        reduce = group.comm.reduce_scatter

        def reduced(shard: torch.Tensor, full: torch.Tensor, index: int = index, reduce: Any = reduce) -> Any:
            events.append(f"reduce {index}")
            return reduce(shard, full)

        group.comm.reduce_scatter = reduced  # type: ignore[method-assign]
    model.set_requires_all_reduce(False)
    models.loss_of(model, models.batch(0, rank)).backward()  # leaves sums that replicas do not know
    with model.no_sync():
        models.loss_of(model, models.batch(1, rank)).backward()  # and gradients that are not reduced
    model.set_requires_all_reduce(True)
    failing[0] = True
    with pytest.raises(ValueError, match="planted"):
        models.loss_of(model, models.batch(2, rank)).backward()
    failing[0] = False
    model.reset_iter_state()
    model.zero_grad()  # block 2's were through
    events.clear()
    _, grads = models.reference_grads(models.build(), 3, 2)
    models.loss_of(model, models.batch(3, rank)).backward()
    assert events == ["reduce 2", "reduce 1", "backward 0", "reduce 0"]
    for name, param in model.named_parameters():
        assert_is_piece(param.grad, grads[name], name)


def test_reset_after_an_exception_in_the_backward() -> None:
    """Sums and gradients of before are dropped, and each unit reduces when its own backward is through."""
    run_ranks(2, recover_in_backward)


def failed_before(phase: str, resets: bool) -> None:
    """The step after a failed one has the gradients of a step alone, or is refused."""
    torch.manual_seed(0)
    mesh, rank = cpu_mesh(), dist.get_rank()
    model = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(4)))
    plain = copy.deepcopy(model)
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    batches = torch.randn(3, mesh.size(), 5, 6)

    def fail(*unused: Any) -> None:
        raise ValueError("planted")

    def fail_at_gradient(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(fail)

    model(batches[0, rank]).pow(2).mean().backward()
    failed = {
        "forward": lambda: model[1].register_forward_hook(fail),
        "output": lambda: model[1].register_forward_hook(fail_at_gradient),
        "before": lambda: model[1].register_full_backward_pre_hook(fail),
        "after": lambda: model[1].register_full_backward_hook(fail),
    }[phase]()
    if phase == "forward":
        with pytest.raises(ValueError, match="planted"):
            model(batches[1, rank])
    else:
        loss = model(batches[1, rank]).pow(2).mean()
        with pytest.raises(ValueError, match="planted"):
            loss.backward(retain_graph=True)
    failed.remove()
    if resets:
        model.reset_iter_state()
    elif phase != "forward":
        for again in (model, model[0], lambda batch: loss.backward()):
            with pytest.raises(LifecycleError):
                again(batches[2, rank])
        with torch.no_grad(), pytest.raises(LifecycleError):
            model(batches[2, rank])
        return
    model.zero_grad()
    model(batches[2, rank]).pow(2).mean().backward()
    plain(batches[2].flatten(0, 1)).pow(2).mean().backward()
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert expected.grad is not None and expected.grad.abs().sum() > 0
        assert_is_piece(param.grad, expected.grad, name)


def test_a_step_after_a_failed_one_is_right_or_refused() -> None:
    """Wherever it failed: autograd does not tell its end, and the rest of the units would keep their last gradients."""
    for phase in ("forward", "output", "before", "after"):
        for resets in (False, True):
            run_ranks(2, failed_before, phase, resets)


def released() -> None:
    model = models.build()
    for block in model.blocks:
        fully_shard(block, mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    models.loss_of(model, models.batch(0, 0)).backward()
    watched = [weakref.ref(model), *(weakref.ref(p) for p in model.parameters())]
    del model, block
    gc.collect()
    assert [ref() for ref in watched] == [None] * len(watched)


def test_nothing_survives_the_model() -> None:
    """After del model no parameter or module is kept alive."""
    run_ranks(2, released)


def dtypes() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    mesh = cpu_mesh()
    model = models.build()
    seen, tables, reduced = [], [], []
    for block, reduce_dtype in zip(model.blocks, (torch.float32, None, torch.float64), strict=True):
        block.table = nn.Parameter(torch.tensor([257, 2]), requires_grad=False)  # 257 is no bf16
        fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype))
        block.set_all_reduce_hook(lambda shard: reduced.append(shard.dtype))
        block.register_forward_pre_hook(lambda m, args: seen.append((args[0].dtype, m.up.weight.dtype)))
        block.register_forward_pre_hook(lambda m, args: tables.append(m.table.tolist()))
    fully_shard(model, mesh=mesh, mp_policy=policy)
    out = model(models.batch(0, mesh.get_rank()))
    assert out.dtype is torch.float32
    assert seen == [(torch.bfloat16, torch.bfloat16)] * 3
    assert tables == [[257, 2]] * 3
    out.pow(2).mean().backward()
    stored, computed = torch.float32, torch.bfloat16
    assert reduced == [torch.float64, stored if REDUCES_AS_STORED else computed, torch.float32]
    reference = models.build()
    half = models.twin(reference).to(torch.bfloat16)
    for rank in range(2):
        (half(models.batch(0, rank).bfloat16()).float().pow(2).mean() / 2).backward()
    for name, plain in half.named_parameters():
        param = model.get_parameter(name)
        assert param.dtype is torch.float32 and param.grad.dtype is torch.float32
        torch.testing.assert_close(
            param.grad.full_tensor(), plain.grad.float(), rtol=5e-2, atol=5e-2, msg=name
        )
    kept = MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False)
    layer = fully_shard(nn.Linear(5, 3), mesh=mesh, mp_policy=kept)
    with pytest.raises(RuntimeError, match="dtype"):
        layer(models.batch(0, 0))
    assert layer(models.batch(0, 0).bfloat16()).dtype is torch.bfloat16
    embedding = fully_shard(nn.Embedding(300, 3), mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    assert embedding(torch.tensor([257])).dtype is torch.bfloat16  # of integers, which stay what they are


def test_compute_is_in_bf16_and_gradients_come_back_in_fp32() -> None:
    """bf16 compute over fp32 shards: inputs and parameters are cast but for integers, gradients come back in fp32."""
    run_ranks(2, dtypes)


def differentiated_gradients() -> None:
    """All ranks have the same inputs, so that gradients are those of one process."""
    plain = models.build(1, num_blocks=2).double()
    model = models.shard(models.build(1, num_blocks=2).double(), cpu_mesh())
    params, references = list(model.parameters()), list(plain.parameters())
    x = models.batch(0, 0).double()
    generator = torch.Generator().manual_seed(3)
    vectors = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in references]

    def loss(net: nn.Module) -> torch.Tensor:
        return net(x).square().mean()  # in float64

    own_grads = torch.autograd.grad(loss(plain), references, create_graph=True)
    products = torch.autograd.grad(own_grads, references, grad_outputs=vectors)

    loss(model).backward()  # gradients with a graph add to those without
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*create_graph=True.*")
        loss(model).backward(create_graph=True)
    for param, grad in zip(params, own_grads, strict=True):
        assert_is_piece(param.grad.detach(), 2 * grad.detach())
    grads = [param.grad for param in params]
    with refused(UnsupportedOpError, where="gradient of parameter", todo="first derivatives"):
        torch.autograd.grad(grads, params, grad_outputs=[torch.ones_like(p) for p in params])
    optimizer = torch.optim.SGD(params, lr=0.1)
    optimizer.zero_grad(set_to_none=False)  # detaches gradients that have a graph
    assert not any(param.grad.requires_grad for param in params)

    # The way out that the error names: the difference of two gradients.
    def gradients(scale: float) -> list[torch.Tensor]:
        with torch.no_grad():
            for param, vector in zip(params, vectors, strict=True):
                param.add_(distribute_tensor(vector, param.device_mesh, param.placements), alpha=scale)
        optimizer.zero_grad()
        loss(model).backward()
        assert not any(param.grad.requires_grad for param in params)
        return [param.grad for param in params]

    eps = 1e-6
    moved, own = gradients(eps), gradients(-eps)
    for ahead, here, product in zip(moved, own, products, strict=True):
        assert_is_piece((ahead - here) / eps, product, rtol=1e-3, atol=1e-4)


def test_the_gradient_of_a_sharded_parameter_is_of_first_order() -> None:
    """With create_graph=True gradients have their values, a second derivative is refused, and differences give it."""
    run_ranks(2, differentiated_gradients)


def backwards_that_name_parameters() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    plain = copy.deepcopy(model)
    fully_shard(model[0], mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    inputs = torch.full((2, 4), dist.get_rank() + 1.0)
    params = list(model.parameters())
    model(inputs).square().sum().backward(inputs=params)
    model.reshard()
    assert all(param.grad is None for param in params)
    loss = model(inputs).square().sum()
    with pytest.raises(RuntimeError, match="allow_unused"):
        torch.autograd.grad(loss, params, retain_graph=True)
    (alone,) = torch.autograd.grad(loss, [model[1].weight])
    (own,) = torch.autograd.grad(plain(inputs).square().sum(), [plain[1].weight])
    torch.testing.assert_close(alone, own)
    model.reset_iter_state()
    # The way out that the page names.
    model.zero_grad()
    for each in (model, plain):
        each[0].requires_grad_(False)
        each(inputs).square().sum().backward()
    model.reshard()
    whole = plain[1].weight.grad
    assert whole is not None and model[0].weight.grad is None
    dist.all_reduce(whole)
    torch.testing.assert_close(model[1].weight.grad.full_tensor(), whole / 2)  # type: ignore[union-attr, operator]


def test_backwards_that_name_parameters() -> None:
    """What docs/limits.md says of ``inputs=`` and ``autograd.grad``; and freezing trains right."""
    run_ranks(2, backwards_that_name_parameters)
