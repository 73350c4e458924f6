"""Links from loading code: a transfer by the links gives what the code loads, and what is no move is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.distributed import run_ranks
from vescale_fsdp.errors import CheckpointError, PlacementError
from vescale_fsdp.quantize import Fp8Blocks, Int8Rows, Mxfp8
from vescale_fsdp.transfer import (
    Transfer,
    describe_states,
    joint_ranks,
    links_from_loader,
    plan_transfer,
    share_links,
)
from vescale_fsdp.transfer.description import named_tensors
from vescale_fsdp.transfer.links import (
    Link,
    codes,
    concatenate,
    index,
    permute,
    scales,
    slice,
    stack,
    zeros,
)

Weights = Iterable[tuple[str, torch.Tensor]]


def sent(source: dict[str, torch.Tensor], model: nn.Module, links: dict[str, Link]) -> None:
    """Transfer a state into the loaded tensors of a model, by links."""
    into = {name: tensor for name, tensor in named_tensors(model) if name in links}
    plan = plan_transfer(*describe_states(source, into), links=links, cast=True)
    Transfer(plan, verify=True).run(source, into)


class Drawn:
    """A loader whose operators a seed draws, and the model that it loads.

    Args:
        device: of the model.
    """

    def __init__(self, seed: int, device: str) -> None:
        self.seed = seed
        self.model = nn.Module()
        source = {name: tensor.to("meta") for name, tensor in self.checkpoint().items()}
        for number, (made, (outer, inner)) in enumerate(self.results(source.items())):
            dtype = Random(seed + number).choice((torch.float32, torch.bfloat16))
            # Padded with zeros behind and, in another dim, before.
            shape = [size + outer + inner if dim == 0 else size for dim, size in enumerate(made.shape)]
            target = torch.full(shape, 7, dtype=dtype, device=device)
            self.model.register_parameter(f"p{number}", nn.Parameter(target, requires_grad=False))

    def checkpoint(self) -> dict[str, torch.Tensor]:
        """The tensors to load, with values."""
        draw, generator = Random(self.seed), torch.Generator().manual_seed(self.seed)
        shapes = [[draw.randint(1, 6) for _ in range(draw.randint(1, 3))] for _ in range(3)]
        dtypes = [draw.choice((torch.float32, torch.bfloat16)) for _ in shapes]
        return {
            f"w{number}": torch.randn(shape, generator=generator).to(dtype)
            for number, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
        }

    def results(self, weights: Weights) -> list[tuple[torch.Tensor, tuple[int, int]]]:
        """What is written to each parameter, with the rows of zeros behind and before."""
        draw = Random(self.seed)
        made = [tensor for _, tensor in weights]
        for _ in range(draw.randint(2, 8)):
            one = draw.choice(made)
            dim = draw.randrange(one.dim()) if one.dim() else 0
            match draw.randrange(10):
                case 0:
                    made.append(one.transpose(dim, one.dim() - 1) if one.dim() else one)
                case 1 if one.dim() and one.shape[dim] > 1:
                    start = draw.randrange(one.shape[dim] - 1)
                    made.append(one.narrow(dim, start, draw.randint(1, one.shape[dim] - start)))
                case 2 if one.dim() > 1:
                    made.append(one.select(dim, draw.randrange(one.shape[dim])))
                case 3 if one.dim():
                    like = [each for each in made if each.dim() == one.dim() and each.dtype is one.dtype]
                    fits = [each for each in like if each.shape[:dim] == one.shape[:dim]]
                    fits = [each for each in fits if each.shape[dim + 1 :] == one.shape[dim + 1 :]]
                    made.append(torch.cat([one, draw.choice(fits)], dim))
                case 4 if one.dim() < 4:
                    fits = [each for each in made if each.shape == one.shape and each.dtype is one.dtype]
                    made.append(torch.stack([one, draw.choice(fits), one], dim))
                case 5:
                    made.append(one.reshape(-1))
                case 6 if one.dim():
                    made.append(one.unflatten(dim, (1, -1)) if one.dim() < 4 else one.contiguous())
                case 7 if one.dim():
                    made.append(torch.chunk(one, 2, dim)[-1].clone())
                case 8:
                    made.append(one.float())
                case 9 if one.dim() and one.numel() % 2 == 0:
                    made.append(one.reshape(2, -1).t().contiguous())
        last = [each for each in made[-3:] if each.numel() < 2000]
        return [
            (each, (draw.choice((0, 2)), draw.choice((0, 0, 1))) if each.dim() else (0, 0)) for each in last
        ]

    def load(self, weights: Weights) -> None:
        """Load the model."""
        for number, (made, (behind, before)) in enumerate(self.results(weights)):
            target = self.model.get_parameter(f"p{number}").data
            if behind or before:
                target.zero_()
                target = target[before : len(target) - behind]
            if number == 1:  # into a transposed parameter
                target, made = (
                    target.reshape(target.shape).mT if made.dim() > 1 else target,
                    (made.mT if made.dim() > 1 else made),
                )
            target.copy_(made)


@pytest.mark.parametrize("first", [0, pytest.param(60, marks=pytest.mark.part("numerics"))])
def test_random_loaders(first: int) -> None:
    """A model gets by its loader's links what the loader loads, bit for bit."""
    num_links = 0
    for seed in range(first, first + (60 if first == 0 else 300)):
        traced, loaded, served = Drawn(seed, "meta"), Drawn(seed, "cpu"), Drawn(seed, "cpu")
        source = traced.checkpoint()
        links = links_from_loader(traced.model, traced.load, source)
        loaded.load(source.items())
        sent(source, served.model, links)
        assert links.keys() == dict(named_tensors(loaded.model)).keys()
        for name, tensor in named_tensors(loaded.model):
            assert torch.equal(served.model.get_parameter(name), tensor), (seed, name)
        num_links += sum(not isinstance(link, str) for link in links.values())
    assert num_links > 60


class Fused(nn.Module):
    """A layer as engines have it on one rank: q and k fused, experts stacked and transposed; another for no weights."""

    scale: torch.Tensor

    def __init__(self, rank: int, ranks: int, device: str) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        kind = {"device": device, "dtype": torch.bfloat16}
        self.qk = nn.Linear(4, 12 // ranks, bias=False, **kind)
        self.experts = nn.Parameter(torch.ones(3, 4, 2 * 6 // ranks, **kind))
        self.bias = nn.Parameter(torch.ones(4, **kind))
        self.register_buffer("scale", torch.ones(1, device=device))

    @torch.no_grad()
    def load_weights(self, weights: Weights) -> None:
        """From q [8, 4], k [4, 4], experts' gate and up [6, 4], and a bias [4] that rank 0 alone adds."""
        own = self.ranks
        for name, tensor in weights:
            if name in ("q", "k"):
                first = 0 if name == "q" else 8 // own
                rows = tensor.shape[0] // own
                self.qk.weight[first : first + rows] = tensor.narrow(0, self.rank * rows, rows)
            elif name == "bias":
                self.bias.data.copy_(tensor)
                if self.rank:
                    self.bias.data.zero_()
            else:
                part = tensor.chunk(own)[self.rank].t()
                number, width = int(name[0]), 6 // own
                self.experts.data[number].narrow(1, 0 if name.endswith("gate") else width, width).copy_(part)


def trained() -> dict[str, torch.Tensor]:
    """What a trainer stores: float32, other than the engine."""
    torch.manual_seed(0)
    state = {"q": torch.randn(8, 4), "k": torch.randn(4, 4), "bias": torch.randn(4)}
    return state | {f"{at}.{kind}": torch.randn(6, 4) for at in range(3) for kind in ("gate", "up")}


def test_each_rank_of_an_engine() -> None:
    """Ranks with tensor parallelism are one target; each gets its part, and what is not loaded has no link."""
    source = trained()
    models = [Fused(rank, 2, "cpu") for rank in range(2)]
    links: dict[str, Link] = {}
    for rank, model in enumerate(models):
        before = {name: tensor.clone() for name, tensor in named_tensors(model)}
        # The models have values: they keep them.
        links |= links_from_loader(model, model.load_weights, source, prefix=f"{rank}.")
        assert all(torch.equal(tensor, before[name]) for name, tensor in named_tensors(model))
    assert links["1.qk.weight"] == concatenate(slice("q", 4, 4), slice("k", 2, 2))
    names = [
        concatenate(*(permute(slice(f"{at}.{kind}", 0, 3)) for kind in ("gate", "up")), dim=1)
        for at in range(3)
    ]
    assert links["0.experts"] == stack(*names)
    assert {name for name in links if name.endswith("scale")} == set()
    into = {
        str(rank): {name: tensor for name, tensor in named_tensors(model) if f"{rank}.{name}" in links}
        for rank, model in enumerate(models)
    }
    plan = plan_transfer(*describe_states(source, into), links=links, cast=True)
    Transfer(plan, keep_old=True, verify=True).run(source, into)
    for rank, model in enumerate(models):
        loaded = Fused(rank, 2, "cpu")
        loaded.load_weights(source.items())
        assert all(
            torch.equal(tensor, dict(named_tensors(loaded))[name]) for name, tensor in named_tensors(model)
        )


def serves_another_job(folder: str, secret: str) -> list[str]:
    """Three jobs of one rank: a trainer, and the two ranks of an engine, which alone have its loading code."""
    rank = dist.get_rank()
    at = rank - 1
    dist.barrier()  # all have come, so none finds the others gone
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with joint_ranks(f"file://{folder}/meet", first_rank=rank, num_ranks=3, secret=secret or None) as ranks:
        state = None if rank else trained()
        source, _ = describe_states(state, None, ranks=ranks)
        engine = Fused(at, 2, "cpu")
        own = links_from_loader(engine, engine.load_weights, source, prefix=f"{at}.") if rank else {}
        links = share_links(own, ranks=ranks)
        loads = {name: tensor for name, tensor in named_tensors(engine) if f"{at}.{name}" in links}
        into = {str(at): loads} if rank else None
        plan = plan_transfer(*describe_states(state, into, ranks=ranks), links=links, cast=True)
        Transfer(plan, ranks=ranks, verify=True).run(state, into)
        assert own.items() <= links.items()
        if rank:
            loaded = Fused(at, 2, "cpu")
            loaded.load_weights(trained().items())
            assert len(loads) == 3
            assert all(torch.equal(loads[name], dict(named_tensors(loaded))[name]) for name in loads)
    return [*links]


@pytest.mark.parametrize("secret", ["", "x"])
def test_links_of_an_engine_in_another_job(secret: str, tmp_path: Path) -> None:
    """The trainer gets the links of both ranks of the engine, whose classes it need not have."""
    names = [f"{rank}.{name}" for rank in range(2) for name in ("experts", "bias", "qk.weight")]
    assert run_ranks(3, serves_another_job, str(tmp_path), secret) == [names] * 3


class OwnCodec(Fp8Blocks):
    """Other ranks would take it for the package's own, were it not for its name."""


def shares_badly() -> str:
    """Each kind of link survives; links that are not equal, or cannot be sent, are refused on all ranks."""
    rank = dist.get_rank()
    nested = permute(stack(index("e", 1), slice("f", 2, 4, dim=1)), (2, 0, 1))
    good: dict[str, Link] = {
        "a.b": concatenate("q", zeros([2, 3]), nested, dim=1),
        "w": codes(index("e", 0), Fp8Blocks(1, 128)),
        "w_scale": scales("w", Mxfp8()),
        "i": codes("i", Int8Rows()),
        "renamed": "other",
    }
    assert share_links(good if rank == 1 else {}) == good
    assert share_links(dict([*good.items()][rank : rank + 1])) == dict([*good.items()][:3])
    with pytest.raises(PlacementError if rank else CheckpointError) as caught:
        share_links({"w": codes("w", OwnCodec())} if rank else {})
    with pytest.raises(PlacementError) as differs:  # every rank has read both
        share_links({"w": "a" if rank < 2 else "b"})
    assert "w" in str(caught.value)
    return f"{differs.value.got} {differs.value.where}"


def test_links_that_cannot_be_shared() -> None:
    """The error names the tensor and the ranks."""
    assert run_ranks(3, shares_badly) == ["links of ranks 0 and 2 w"] * 3


def test_what_is_loaded_may_be_replaced() -> None:
    """Processing after the load that only moves items is part of the links: the model's last tensors are linked."""
    model = nn.Linear(4, 6, bias=False, device="meta")

    def load(weights: Weights) -> None:
        for _, tensor in weights:
            model.weight.data.copy_(tensor)
        model.weight = nn.Parameter(model.weight.data.t().contiguous(), requires_grad=False)

    assert links_from_loader(model, load, {"w": torch.ones(6, 4)}) == {"weight": permute("w")}


def _assigns(model: nn.Module, weights: Weights) -> None:
    (_, tensor), *_ = weights
    model.weight = nn.Parameter(tensor.clone(), requires_grad=False)


def _loads_by_assignment(model: nn.Module, weights: Weights) -> None:
    model.load_state_dict({"weight": next(iter(weights))[1]}, assign=True)


def _moves_into_its_own(model: nn.Module, weights: Weights) -> None:
    model.weight.data = model.spare.data[:6]
    model.weight.data.copy_(next(iter(weights))[1])


def _assigns_and_fails(model: nn.Module, weights: Weights) -> None:
    _assigns(model, weights)
    raise KeyError("as loaders do")


@pytest.mark.parametrize("load", [_assigns, _loads_by_assignment, _moves_into_its_own, _assigns_and_fails])
def test_a_model_that_serves_keeps_its_tensors(load: Callable[[nn.Module, Weights], None]) -> None:
    """Whatever a loader sets in place of them: the model has its tensors, and their values, and can be filled."""
    source = {"w": torch.randn(6, 4)}
    model = nn.Linear(4, 6, bias=False)
    model.register_buffer("spare", torch.full((8, 4), 5.0), persistent=False)
    weight, before, memory = model.weight, model.weight.detach().clone(), model.weight.data_ptr()
    links: dict[str, Link] = {}
    try:
        links = links_from_loader(model, lambda weights: load(model, weights), source)
    except KeyError:
        assert load is _assigns_and_fails
    assert model.weight is weight and weight.data_ptr() == memory
    assert torch.equal(weight, before) and torch.equal(model.spare, torch.full((8, 4), 5.0))
    if load is not _assigns_and_fails:
        sent(source, model, links)
        assert torch.equal(model.weight, source["w"]) and torch.equal(model.spare, torch.full((8, 4), 5.0))


def test_exchanged_tensors_are_refused() -> None:
    """They would be tensors without values in a model that serves."""
    model = nn.Linear(4, 6, bias=False)
    before = model.weight.detach().clone()

    def load(weights: Weights) -> None:
        new = nn.Parameter(next(iter(weights))[1].clone(), requires_grad=False)
        torch.utils.swap_tensors(model.weight, new)

    with pytest.raises(PlacementError) as raised:
        links_from_loader(model, load, {"w": torch.randn(6, 4)})
    assert raised.value.where == "weight"
    assert torch.equal(model.weight, before)


def repacked(model: nn.Module, source: torch.Tensor) -> None:
    """What some engines do after the load: another parameter, with the rows in another order."""
    model.weight = nn.Parameter(source.index_select(0, torch.arange(6)))


OTHER = torch.ones(6, 4)
REFUSED: dict[str, tuple[Callable[[nn.Module, torch.Tensor], Any], str]] = {
    "arithmetic": (lambda model, source: model.weight.data.copy_(source * 2), "mul"),
    "in place": (lambda model, source: model.weight.data.copy_(source).add_(1), "add_"),
    "value": (lambda model, source: model.weight.data.fill_(source.sum().item()), "_local_scalar_dense"),
    "branch": (
        lambda model, source: model.weight.data.copy_(source) if source[0, 0] > 0 else None,
        "_local_scalar_dense",
    ),
    "comparison": (lambda model, source: torch.equal(source, source), "equal"),
    "mask": (lambda model, source: source[source > 0], "index"),
    "repacking": (repacked, "index_select"),
    "twice": (
        lambda model, source: [model.weight.data.copy_(source), model.weight.data[2:].copy_(source[:4])],
        "'w'",
    ),
    "partly": (lambda model, source: model.weight.data[:4].copy_(source[:4]), "[4:6, 0:4]"),
    "uninitialized": (lambda model, source: model.weight.data.copy_(torch.empty_like(source)), "not written"),
    "constant": (lambda model, source: model.weight.data.fill_(1), "1"),
    "negative zeros": (lambda model, source: model.weight.data.fill_(-0.0), "-0.0"),
    "rounded": (lambda model, source: model.weight.data.copy_(source.bfloat16()), "bfloat16"),
    "rounded twice": (lambda model, source: model.weight.data.copy_(source.half().bfloat16()), "float16"),
    "kind": (lambda model, source: model.weight.data.copy_(source.int()), "int32"),
    "bits": (lambda model, source: model.weight.data.copy_(source.view(torch.int32)), "int32"),
    "other tensor": (lambda model, source: model.weight.data.copy_(OTHER), "not of the checkpoint"),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_is_no_move_is_refused(kind: str, device: str) -> None:
    """Each refusal names the operator, the item or the tensor, and says what to do."""
    model = nn.Linear(4, 6, bias=False, device=device)
    run, named = REFUSED[kind]

    def load(weights: Weights) -> None:
        for _, tensor in weights:
            run(model, tensor)

    with pytest.raises(PlacementError) as caught:
        links_from_loader(model, load, {"w": torch.ones(6, 4)})
    error = caught.value
    assert named in f"{error.got} {error.where}"
    assert error.expected and error.todo


def test_two_roundings_are_refused() -> None:
    """A transfer rounds once: float16 between float32 and bfloat16 would give other bits."""
    model = nn.Linear(4, 6, bias=False, device="meta", dtype=torch.bfloat16)

    def load(weights: Weights) -> None:
        for _, tensor in weights:
            model.weight.data.copy_(tensor.half())

    with pytest.raises(PlacementError):
        links_from_loader(model, load, {"w": torch.ones(6, 4)})


def test_writes_of_other_threads_are_refused() -> None:
    """The recorder sees one thread: a tensor that another one has written to is named."""
    model = nn.Linear(4, 6, bias=False, device="meta")

    def load(weights: Weights) -> None:
        for _, tensor in weights:
            thread = threading.Thread(
                target=lambda source: model.weight.detach().copy_(source), args=(tensor,)
            )
            thread.start()
            thread.join(60)

    with pytest.raises(PlacementError) as caught:
        links_from_loader(model, load, {"w": torch.ones(6, 4)})
    assert "weight" in str(caught.value.where)


@torch.no_grad()
def test_padding_and_several_copies_at_once() -> None:
    """Zeros around, or what is cut off by negative padding; `_foreach_copy_`; FP8 bytes that stay as they are."""
    codes = torch.float8_e4m3fn
    source = {"w": torch.randn(3, 4), "v": torch.randn(5), "c": torch.randn(2, 3).to(codes)}
    loaded, served, traced = (
        nn.ParameterDict(
            {
                "w": nn.Parameter(torch.ones(6, 4, device=device), requires_grad=False),
                "v": nn.Parameter(torch.ones(4, device=device), requires_grad=False),
                "c": nn.Parameter(torch.ones(2, 3, device=device).to(codes), requires_grad=False),
            }
        )
        for device in ("cpu", "cpu", "meta")
    )

    def load(model: nn.ParameterDict, weights: Weights) -> None:
        given = dict(weights)
        padded = nn.functional.pad(given["w"], (1, -1, 2, 1)), nn.functional.pad(given["v"], (-1, 0))
        torch._foreach_copy_([model["w"], model["v"]], list(padded))
        model["c"].copy_(given["c"])

    links = links_from_loader(traced, lambda weights: load(traced, weights), source)
    load(loaded, source.items())
    sent(source, served, links)
    for name, tensor in named_tensors(loaded):
        assert torch.equal(served[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_own_tensors_of_a_loader() -> None:
    """A loader may compute with tensors that are not of the checkpoint, such as the rows that it takes."""
    model = nn.Linear(4, 6, bias=False, device="meta")

    def load(weights: Weights) -> None:
        for _, tensor in weights:
            for into, row in enumerate(torch.arange(6).flip(0).tolist()):
                model.weight.data[into] = tensor[row]

    links = links_from_loader(model, load, {"w": torch.ones(6, 4)})
    source, served = {"w": torch.randn(6, 4)}, nn.Linear(4, 6, bias=False)
    sent(source, served, links)
    assert torch.equal(served.weight, source["w"].flip(0))


def test_problems_of_all_tensors() -> None:
    """One error lists every tensor that is not made of moves."""
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False, device="meta") for _ in range(3)))

    def load(weights: Weights) -> None:
        for (_, tensor), param in zip(weights, model.parameters(), strict=True):
            param.data.copy_(tensor.neg() if tensor.shape[0] else tensor)

    with pytest.raises(PlacementError) as caught:
        links_from_loader(model, load, {name: torch.ones(2, 2) for name in "abc"})
    assert all(f"{number}.weight" in str(caught.value.got) for number in range(3))


def test_a_model_that_serves_keeps_its_shapes() -> None:
    """A loader that turns a weight in its own memory leaves the weight of a model with values as it was."""
    model = nn.Linear(4, 6, bias=False)
    before = model.weight.detach().clone()

    def load(weights: Weights) -> None:
        model.weight.data.copy_(next(iter(weights))[1])
        model.weight.data = model.weight.data.t()

    links = links_from_loader(model, load, {"w": torch.ones(6, 4)})
    assert links == {"weight": permute("w")}
    assert torch.equal(model.weight, before)
