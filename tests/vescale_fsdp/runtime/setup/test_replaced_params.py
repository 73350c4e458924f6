"""Parameters that are assigned, deleted or moved after `fully_shard`, and optimizers built before it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize
from torch.optim.optimizer import _global_optimizer_pre_hooks

from tests.support import models
from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.models import refused
from vescale_fsdp import RaggedDTensor, distribute_tensor, fully_shard
from vescale_fsdp.errors import LifecycleError, PlacementError
from vescale_fsdp.optim import AdamW8bit

Layers = nn.Sequential


def build(device: str = "cpu") -> Layers:
    torch.manual_seed(0)
    with torch.device(device):
        return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5), nn.Linear(5, 3))


def shard(model: Layers) -> Layers:
    for layer in list(model)[:-1]:
        fully_shard(layer, mesh=cpu_mesh())
    return fully_shard(model, mesh=cpu_mesh())  # type: ignore[return-value]


def value(shape: tuple[int, ...], seed: int = 5) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def as_plain(old: Any) -> nn.Parameter:
    return nn.Parameter(value(tuple(old.shape)))


def as_ragged(old: Any) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(value(tuple(old.shape)), old.device_mesh, old.placements))


def by_setattr(module: nn.Module, new: nn.Parameter) -> None:
    module.weight = new


def by_register(module: nn.Module, new: nn.Parameter) -> None:
    del module.weight
    module.register_parameter("weight", new)


def by_swap(module: nn.Module, new: nn.Parameter) -> None:
    torch.utils.swap_tensors(module.weight, new)


HOWS: dict[str, Callable[[nn.Module, nn.Parameter], None]] = {
    "setattr": by_setattr,
    "register_parameter": by_register,
}


def taken_over(how: str, kind: str, index: int) -> tuple[float, float]:
    """Outputs and weights after two steps, beside those of a plain model with the same values."""
    reference, model = build(), shard(build())
    x = value((4, 5), 9)
    with torch.no_grad():
        reference[index].weight.copy_(value(tuple(reference[index].weight.shape)))
    make = as_plain if kind == "plain" else as_ragged
    HOWS[how](model[index], make(model[index].weight))
    out, expected = model(x), reference(x)
    out.sum().backward()
    expected.sum().backward()
    difference = float((out - expected).abs().max())
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (reference, model)]
    for optimizer in optimizers:
        optimizer.step()
    weight: Any = model[index].weight
    assert isinstance(weight, RaggedDTensor)
    return difference, float((weight.full_tensor() - reference[index].weight).abs().max())


@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize("kind", ["plain", "ragged"])
@pytest.mark.parametrize("how", list(HOWS))
def test_replaced_before_the_first_use(how: str, kind: str, index: int) -> None:
    """The new values count, in the forward and in training."""
    for forward, trained in run_ranks(2, taken_over, how, kind, index):
        assert forward < 1e-6 and trained < 1e-5


def assigned_on_meta() -> float:
    """A model made on meta and loaded by assignment, parameter by parameter, as some loaders do."""
    model, reference = shard(build("meta")), build()
    optimizer_before = torch.optim.AdamW(list(model.parameters()))
    for number, (name, param) in enumerate(reference.named_parameters()):
        module, _, attribute = name.rpartition(".")
        old: Any = model.get_parameter(name)
        full = param.detach().clone()
        ragged = distribute_tensor(full, old.device_mesh, old.placements)
        stock = DTensor.from_local(
            ragged.to_local(), old.device_mesh, old.placements, shape=full.shape, stride=full.stride()
        )
        new = nn.Parameter((full, ragged)[number % 2])
        if number % 3 == 2 and torch.__version__ < "2.15":
            new = nn.Parameter(stock)
        elif number % 3 == 2:  # its own DTensor refuses foreign placements in every operator
            with pytest.raises(RuntimeError, match=r"\bvescale_fsdp\.distribute_tensor\b"):
                nn.Parameter(stock)
        setattr(model.get_submodule(module), attribute, new)
    difference = float((model(value((4, 5))) - reference(value((4, 5)))).abs().max())
    with refused(LifecycleError, where="AdamW"):
        optimizer_before.step()
    return difference


def test_a_meta_model_loads_by_assignment() -> None:
    """Plain, ragged and `DTensor.from_local` values, without `to_empty`; an optimizer of meta parameters is told."""
    assert all(difference < 1e-6 for difference in run_ranks(2, assigned_on_meta))


def changed(change: str, when: str) -> tuple[str, str | None]:
    """What was got and where, and what to do."""
    model = shard(build())
    x = value((4, 5))
    if when == "after":
        model(x).sum().backward()
    make_change(model[0], change)
    with pytest.raises(LifecycleError) as caught:
        model(x)
    return f"{caught.value.got} {caught.value.where}", caught.value.todo


def make_change(layer: nn.Module, change: str) -> None:
    if change == "delete":
        del layer.weight
    elif change == "parametrize":
        parametrize.register_parametrization(layer, "weight", nn.Identity())
    elif change == "shape":
        layer.weight = nn.Parameter(torch.zeros(7, 6))
    elif change == "dtype":
        layer.weight = nn.Parameter(torch.zeros(7, 5, dtype=torch.float64))
    elif change == "meta":
        layer.weight = nn.Parameter(torch.zeros(7, 5, device="meta"))
    else:
        by_setattr(layer, as_plain(layer.weight) if change == "plain" else as_ragged(layer.weight))


@pytest.mark.parametrize(
    ("change", "when"),
    [
        *((change, "before") for change in ("delete", "parametrize", "shape", "dtype", "meta")),
        *((change, "after") for change in ("delete", "parametrize", "plain", "ragged")),
    ],
)
def test_what_cannot_be_taken_over_is_refused(change: str, when: str) -> None:
    """By name, with what to do instead, on every rank."""
    for found, todo in run_ranks(2, changed, change, when):
        assert ("weight" in found or "float64" in found) and todo


def called_with_other_weights() -> bool:
    """`functional_call` sets tensors for one call: as the first use, too, they must not become the model's values."""
    model, x = shard(build()), value((4, 5))
    others = {name: param.detach() + 1 for name, param in build().named_parameters()}
    for _ in range(2):  # before the first gather, and after it
        with pytest.raises(LifecycleError):
            torch.func.functional_call(model, dict(others), (x,))
        assert torch.allclose(model(x), build()(x), rtol=0, atol=1e-6)
    return True


def test_weights_of_one_call_are_refused() -> None:
    """The model keeps its own, and goes on."""
    assert all(run_ranks(2, called_with_other_weights))


def replaced_while_unsharded() -> tuple[str, bool]:
    model = shard(build())
    sharded = model[0].weight
    model.unshard()  # type: ignore[operator]
    model[0].unshard()  # type: ignore[operator]
    model[0].weight = nn.Parameter(torch.zeros(7, 5))
    with pytest.raises(LifecycleError) as caught:
        model[0].reshard()  # type: ignore[operator]
    model(value((4, 5)))
    model[0].reshard()  # type: ignore[operator]
    return str(caught.value.got), model[0].weight is sharded


def test_replaced_while_unsharded() -> None:
    """Resharding says so, and leaves the model as it was."""
    for got, is_back in run_ranks(2, replaced_while_unsharded):
        assert "weight" in got and is_back


def swapped_run() -> bool:
    """`swap_tensors` with an equally placed tensor keeps the parameter and brings other values, at any time."""
    model, x = shard(build()), value((4, 5))
    equal = []
    for seed in range(2):
        weight: Any = model[0].weight
        full = value((7, 5), 20 + seed)
        by_swap(model[0], nn.Parameter(distribute_tensor(full, weight.device_mesh, weight.placements)))
        assert model[0].weight is weight
        reference = build()
        reference[0].weight.data.copy_(full)
        equal.append(torch.allclose(model(x), reference(x), rtol=0, atol=1e-6))  # a NaN is never close
        model.reshard()  # type: ignore[operator]
    return equal == [True, True]


def test_swapped_tensors_are_found() -> None:
    """The gather reads the new piece, not what the shard still holds."""
    assert all(run_ranks(2, swapped_run))


def data_run() -> float:
    """``.data =`` brings the values of a tensor placed alike; anything else is refused."""
    model, x = shard(build()), value((4, 5))
    weight: Any = model[0].weight
    full = value((7, 5), 30)
    weight.data = distribute_tensor(full, weight.device_mesh, weight.placements)
    assert torch.equal(weight.full_tensor(), full)
    for bad in (full, full.double(), distribute_tensor(full.double(), weight.device_mesh, weight.placements)):
        with pytest.raises(PlacementError):
            weight.data = bad
    weight.data.mul_(1)  # reading it gives the same memory
    reference = build()
    reference[0].weight.data.copy_(full)
    return float((model(x) - reference(x)).abs().max())


def test_data_is_set_or_refused() -> None:
    """It was ignored: the values were those of before."""
    assert all(difference < 1e-6 for difference in run_ranks(2, data_run))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "AdamW foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "8 bits": lambda params: AdamW8bit(params),
}


def built_before(kind: str) -> str:
    model = build()
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    bystander = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    shard(model)
    model(value((4, 5))).sum().backward()
    bystander.step()  # others are let through
    with pytest.raises(LifecycleError) as caught:
        optimizer.step()
    after = OPTIMIZERS[kind](list(model.parameters()))
    after.step()
    return str(caught.value.got)


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_optimizers_built_before_say_so(kind: str) -> None:
    """At their first step, although no gradient is there to be skipped; those built after train."""
    for got in run_ranks(2, built_before, kind):
        assert "6 of 6" in got


def hooks_left() -> tuple[int, int, int]:
    before = len(_global_optimizer_pre_hooks)
    model = build()
    kept = list(model.parameters())
    shard(model)
    during = len(_global_optimizer_pre_hooks)
    del kept
    gc.collect()
    return before, during, len(_global_optimizer_pre_hooks)


def test_no_hook_stays() -> None:
    """Optimizers' steps are watched only while somebody holds an original parameter."""
    for before, during, after in run_ranks(2, hooks_left):
        assert (during, after) == (before + 1, before)


def replicated() -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    fully_shard(model[1], mesh=cpu_mesh())
    replicate(model)
    x = models.batch(0, dist.get_rank(), rows=2)[:, :1].repeat(1, 8)
    model(x).sum().backward()
    grads: dict[str, Any] = {name: param.grad for name, param in model.named_parameters()}
    found = {name: g.full_tensor() if isinstance(g, RaggedDTensor) else g for name, g in grads.items()}
    torch.manual_seed(0)
    reference = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    for rank in range(2):
        (reference(models.batch(0, rank, rows=2)[:, :1].repeat(1, 8)).sum() / 2).backward()
    wrong = [
        n for n, p in reference.named_parameters() if p.grad is None or not torch.allclose(found[n], p.grad)
    ]
    with pytest.raises(RuntimeError, match="`fully_shard`"):
        replicate(shard(build()))
    return wrong


def test_replicate_leaves_sharded_modules_alone() -> None:
    """torch's `replicate` over a sharded child averages the others' gradients, and refuses a sharded root."""
    assert run_ranks(2, replicated, timeout_s=60.0) == [[], []]
