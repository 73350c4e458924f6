"""What programs do to parameters while they are gathered: writes, hooks, attributes, flags, and optimizers."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.support.distributed import cpu_mesh, run_ranks, run_threads
from tests.support.models import refused
from vescale_fsdp import fully_shard
from vescale_fsdp.errors import LifecycleError
from vescale_fsdp.optim import AdamW8bit
from vescale_fsdp.quantize import Fp8Blocks, QuantizedGather
from vescale_fsdp.runtime.comm import order_watch

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def filled(model: nn.Module) -> nn.Module:
    """Fill parameters without random numbers, which ranks that are threads would share."""
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            param.copy_(torch.sin(torch.arange(param.numel()) * 1.7 + number).view(param.shape) / 2)
    return model


def model_of_plain() -> Any:
    return filled(nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)))


def model_of(**options: Any) -> Any:
    model = model_of_plain()
    for module in (model[0], model):
        fully_shard(module, mesh=cpu_mesh(), **options)
    return model


def rows(rank: int = 0) -> torch.Tensor:
    return torch.linspace(-1, 1, 24).view(4, 6) + rank


def full(param: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(param, DTensor)
    return param.full_tensor()


def _assign(weight: nn.Parameter) -> None:
    weight.data = weight.data.clamp(-0.1, 0.1)


WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "in place": lambda weight: weight.mul_(0.5),
    "a row": lambda weight: weight[2].zero_(),
    "data": lambda weight: weight.data.mul_(0.5),
    "clipped data": lambda weight: weight.data.clamp_(-0.1, 0.1),
    "assigned data": _assign,
    "init": nn.init.zeros_,
    "NaN": lambda weight: weight.fill_(float("nan")),
}


def written(name: str, options: dict[str, Any]) -> None:
    write, plain = WRITES[name], model_of_plain()
    model: Any = model_of(**options)
    with torch.no_grad():
        write(plain[0].weight)
    model[0].unshard()
    with torch.no_grad():
        write(model[0].weight)
    model[0].reshard()
    expected = plain[0].weight.detach()
    bound = 0.0 if "mp_policy" not in options else 2e-3
    got = full(model[0].weight)
    if name == "NaN":
        assert got.isnan().all()
    else:
        torch.testing.assert_close(got, expected, rtol=0, atol=bound)
    assert torch.equal(full(model[0].bias), plain[0].bias)  # with all its digits


@pytest.mark.filterwarnings("ignore:Gathered parameters were written")
@pytest.mark.parametrize("options", [{}, {"mp_policy": HALF}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", WRITES)
def test_writes_to_gathered_parameters_are_kept(name: str, options: dict[str, Any]) -> None:
    """As on one device; what a program has not written keeps all digits of the shard."""
    run_threads(2, written, name, options)


def rounded() -> None:
    model: Any = model_of(mp_policy=HALF)
    model[0].unshard()
    with torch.no_grad():
        model[0].weight.mul_(2)
    with pytest.warns(UserWarning, match=r"bfloat16.*float32"):
        model[0].reshard()


def test_a_write_in_bf16_warns_of_its_rounding() -> None:
    run_ranks(1, rounded)


def written_by_one_rank(name: str) -> list[str]:
    """Which kinds of errors end a training whose first rank writes alone."""
    order_watch.BOUND_S = 5.0
    model: Any = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for _ in range(6):
            model[0].unshard()
            if dist.get_rank() == 0:
                with torch.no_grad():
                    WRITES[name](model[0].weight)
            model[0].reshard()
            model(rows()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    except LifecycleError as error:
        return [type(error).__name__, str("weight" in f"{error.expected} {error.got}")]
    return []


@pytest.mark.parametrize("name", ["in place", "data"])
def test_writes_that_differ_between_ranks_raise_on_all(name: str) -> None:
    """At once in place; through ``.data`` as of the second time, because only owners of elements see the first."""
    for found in run_ranks(2, written_by_one_rank, name):
        assert found == ["LifecycleError", "True"]


def refused_writes(name: str) -> None:
    codec = Fp8Blocks(4, 4)
    torch.manual_seed(0)
    model: Any = nn.Linear(8, 8)
    policy = QuantizedGather(codecs=codec, param_dtype=torch.float32)
    fully_shard(model, mesh=cpu_mesh(), mp_policy=policy, granularity=codec.granularity)
    model.unshard()
    model.reshard()  # no write, no error
    model.unshard()
    with torch.no_grad():
        WRITES[name](model.weight)
    with pytest.raises(LifecycleError, check=lambda error: "weight" in str(error.got)):
        model.reshard()
    assert isinstance(model.weight, DTensor)


@pytest.mark.parametrize("name", ["in place", "data"])
def test_writes_that_a_quantized_gather_would_lose_raise(name: str) -> None:
    run_ranks(1, refused_writes, name)


def both_written() -> None:
    model: Any = model_of()
    sharded = list(model[0].parameters())
    model[0].unshard()
    with torch.no_grad():
        model[0].weight.mul_(2)
        sharded[0].mul_(3)
    with pytest.raises(LifecycleError, check=lambda error: "weight" in str(error.got)):
        model[0].reshard()


def test_two_writes_of_which_one_would_be_lost_raise() -> None:
    run_ranks(1, both_written)


# -- weights that change between forward and backward ------------------------------------------------------


def changed_between(way: str) -> str:
    model: Any = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    params = list(model.parameters())
    model(rows()).sum().backward()
    loss = model(rows()).pow(2).sum()
    with torch.no_grad():
        if way == "step":
            optimizer.step()
        elif way == "load":
            model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})
        elif way == "raw":
            for param in params:
                param.to_local().mul_(2)
    try:
        loss.backward()
    except RuntimeError as error:
        return type(error).__name__
    return ""


@pytest.mark.parametrize("way", ["step", "load", "raw", ""])
def test_weights_that_change_between_forward_and_backward_raise_torchs_error(way: str) -> None:
    """Of units that were gathered again, and of the root, which stayed gathered; without a change nothing raises."""
    for found in run_ranks(2, changed_between, way):
        assert found == ("RuntimeError" if way else "")


# -- optimizers -------------------------------------------------------------------------------------------


def built_while_gathered(way: str) -> None:
    model: Any = model_of()
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    if way == "unshard":
        model.unshard()
        params = list(model[2].parameters())
        model.reshard()
        loss = model(rows()).sum()
    else:
        loss = model(rows()).sum()
        params = list(model[2].parameters())
    if way == "add_param_group":
        optimizer.add_param_group({"params": params})
    else:
        optimizer = torch.optim.SGD(params, lr=0.1)
    optimizer.zero_grad()
    loss.backward()
    model.reshard()
    before = full(model[2].weight).clone()
    grad = full(model[2].weight.grad).clone()
    optimizer.step()
    torch.testing.assert_close(full(model[2].weight), before - 0.1 * grad)
    assert grad.abs().max() > 1e-3


@pytest.mark.parametrize("way", ["unshard", "forward", "add_param_group"])
def test_an_optimizer_of_gathered_parameters_steps_the_sharded_ones(way: str) -> None:
    run_ranks(2, built_while_gathered, way)


def with_state_while_gathered() -> None:
    model: Any = model_of()
    model.unshard()
    optimizer = AdamW8bit(model[2].parameters())
    model.reshard()
    model(rows()).sum().backward()
    with pytest.raises(LifecycleError, check=lambda error: "2.weight" in str(error.got)):
        optimizer.step()
    AdamW8bit(model[2].parameters()).step()  # the remedy


def test_an_optimizer_that_has_state_of_gathered_parameters_raises_at_its_step() -> None:
    run_ranks(2, with_state_while_gathered)


def stored_while_gathered() -> None:
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tp"))
    model: Any = parallelize_module(model_of_plain(), mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    model.unshard()
    weight, file = model[0].weight, io.BytesIO()
    torch.save(weight, file)
    file.seek(0)
    stored = torch.load(file, weights_only=True)
    assert type(stored) is DTensor and stored.placements == weight.placements
    assert stored.to_local().numel() == (24, 18)[dist.get_rank()]
    torch.testing.assert_close(stored.to_local(), weight.to_local(), rtol=0, atol=0)


def test_a_gathered_parameter_of_tensor_parallelism_is_stored_as_a_dtensor() -> None:
    """Who reads it needs nothing of this library."""
    run_ranks(2, stored_while_gathered)


# -- hooks and attributes -----------------------------------------------------------------------------------


def hooked(moment: str) -> tuple[list[str], torch.Tensor]:
    model = model_of_plain()
    seen: list[str] = []

    def attach() -> None:
        for number in (0, 2):
            weight = model[number].weight
            weight.register_hook(lambda grad: grad * 0.5)
            weight.register_hook(lambda grad, number=number: seen.append(f"{number} {type(grad).__name__}"))
            weight.register_post_accumulate_grad_hook(
                lambda p, n=number: seen.append(f"{n} after {type(p.grad).__name__}")
            )
            weight.lr_scale = 2.0 + number

    if moment == "before":
        attach()
    for module in (model[0], model):
        fully_shard(module, mesh=cpu_mesh())
    if moment == "sharded":
        attach()
    if moment == "gathered":
        for module in (model[0], model):
            module.unshard()
        attach()
        for module in (model[0], model):
            module.reshard()
    loss = model(rows(dist.get_rank())).pow(2).sum()
    if moment == "after the forward":
        attach()
    loss.backward()
    assert [model[number].weight.lr_scale for number in (0, 2)] == [2.0, 4.0]
    model[0].unshard()
    assert model[0].weight.lr_scale == 2.0
    model[0].reshard()
    return seen, full(model[0].weight.grad)


def _halved() -> torch.Tensor:
    grads = []
    for rank in range(2):
        plain = model_of_plain()
        plain(rows(rank)).pow(2).sum().backward()
        assert plain[0].weight.grad is not None
        grads.append(plain[0].weight.grad / 2)
    return (grads[0] + grads[1]) / 2


@pytest.mark.parametrize("moment", ["before", "sharded", "gathered", "after the forward"])
def test_hooks_and_attributes_hold_for_both_kinds_of_parameters(moment: str) -> None:
    """A hook gets the local gradient, as under DDP; one for accumulated gradients the sharded parameter's."""
    for seen, grad in run_ranks(2, hooked, moment):
        assert sorted(seen) == ["0 Tensor", "0 after RaggedDTensor", "2 Tensor", "2 after RaggedDTensor"]
        torch.testing.assert_close(grad, _halved())


def frozen_while_gathered() -> None:
    model: Any = model_of()
    model[0].unshard()
    model[0].weight.requires_grad_(False)
    model[0].reshard()
    assert not model[0].weight.requires_grad and model[0].bias.requires_grad
    model(rows()).sum().backward()
    assert model[0].weight.grad is None and full(model[0].bias.grad).any()


def test_a_parameter_frozen_while_gathered_stays_frozen() -> None:
    run_ranks(2, frozen_while_gathered)


# -- gradients that wait --------------------------------------------------------------------------------------


def _clear(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = None


CLEARS: dict[str, Callable[[Any, torch.optim.Optimizer], Any]] = {
    "model": lambda model, optimizer: model.zero_grad(),
    "model, zeros": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer, zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "none": lambda model, optimizer: _clear(model),
}
SHAPES: dict[str, tuple[tuple[int, ...], str]] = {
    "no_sync": ((2,), "set_requires_gradient_sync"),
    "HSDP": ((2, 2), "set_requires_gradient_sync"),
    "HSDP, no all-reduce": ((2, 2), "set_requires_all_reduce"),
}


def cleared(clear: str, shape: str, options: dict[str, Any]) -> None:
    sizes, switch = SHAPES[shape]
    mesh = dist.init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
    model = model_of_plain()
    for module in (model[0], model):
        fully_shard(module, mesh=mesh)
    compiled = options.pop("compiled", False)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
    plain = model_of_plain()
    twin = torch.optim.AdamW(plain.parameters())
    for _ in range(2):
        getattr(model, switch)(False)
        (model(rows()).sum() * float("nan")).backward()  # a micro-batch that the program skips
        with refused(LifecycleError, where="gradient of"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with pytest.raises(LifecycleError):
            step()
        CLEARS[clear](model, optimizer)
        model(rows(1)).sum().backward()
        getattr(model, switch)(True)
        model(rows(2)).sum().backward()
        (plain(rows(1)).sum() + plain(rows(2)).sum()).backward()
        for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(full(param.grad), other.grad, msg=name)
        step()
        twin.step()
        optimizer.zero_grad()
        twin.zero_grad()
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(param), other.detach())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("clear", CLEARS)
def test_gradients_that_wait_can_be_cleared(clear: str, shape: str) -> None:
    """A skipped NaN micro-batch leaves nothing behind; what waits can be neither clipped nor stepped."""
    run_ranks(2 if shape == "no_sync" else 4, cleared, clear, shape, {})


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": False}, {"compiled": True}], ids=str)
def test_gradients_that_wait_are_noticed_by_other_implementations(options: dict[str, Any]) -> None:
    run_ranks(2, cleared, "optimizer", "no_sync", options)


def cleared_by_one_rank() -> torch.Tensor:
    model: Any = model_of()
    with model.no_sync():
        model(rows()).sum().backward()
    if dist.get_rank() == 0:
        model.zero_grad()
    model(rows()).sum().backward()
    return full(model[0].weight.grad)


def test_gradients_cleared_on_one_rank_alone_do_not_hang() -> None:
    """The gradient is then the mean of what ranks have; collectives do not depend on it."""
    plain = model_of_plain()
    plain(rows()).sum().backward()
    assert plain[0].weight.grad is not None
    for grad in run_ranks(2, cleared_by_one_rank):
        torch.testing.assert_close(grad, plain[0].weight.grad * 1.5)


# -- losses ---------------------------------------------------------------------------------------------------


class Fused(nn.Module):
    """A root that reads the head's weight itself, without a call of the head."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.emb, self.layer = nn.Embedding(11, 8), nn.Linear(8, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.emb.weight
        filled(self)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(torch.tanh(self.layer(self.emb(tokens))))
        chunks = zip(hidden.chunk(2), tokens.chunk(2), strict=True)
        losses = [nn.functional.cross_entropy(part @ self.head.weight.T, target) for part, target in chunks]
        return torch.stack(losses).mean()


def fused_loss(tied: bool) -> None:
    model, plain = Fused(tied), Fused(tied)
    fully_shard(model.layer, mesh=cpu_mesh())
    fully_shard([model.emb, model.head] if tied else [model.norm, model.head], mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    tokens = torch.arange(8)
    for each in (model, plain):
        each(tokens).backward()
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(param.grad), other.grad, msg=name)


@pytest.mark.parametrize("tied", [False, True])
def test_a_root_may_read_the_weight_of_a_list_unit(tied: bool) -> None:
    run_threads(2, fused_loss, tied)


def penalty(stays: bool) -> None:
    model: Any = model_of()
    plain = model_of_plain()
    model.set_reshard_after_backward(not stays)
    for each in (model, plain):
        x = rows().requires_grad_()
        (force,) = torch.autograd.grad(each(x).pow(2).sum(), x, create_graph=True)
        (force.pow(2).sum() + each(rows()).sum()).backward()
    for module in (model[0], model):
        module.reshard()
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(param.grad), other.grad, msg=name)


@pytest.mark.parametrize("stays", [False, True])
def test_losses_on_gradients_of_inputs(stays: bool) -> None:
    """Forces, gradient penalties: units stay gathered for the second backward, which reduces."""
    run_threads(2, penalty, stays)


def by_hand() -> None:
    model: Any = model_of()
    plain = model_of_plain()
    model[0].unshard()
    nn.functional.linear(rows(), model[0].weight, model[0].bias).sum().backward()
    model[0].reshard()
    nn.functional.linear(rows(), plain[0].weight, plain[0].bias).sum().backward()
    torch.testing.assert_close(full(model[0].weight.grad), plain[0].weight.grad)


def test_a_backward_without_any_forward_reduces() -> None:
    run_threads(2, by_hand)
