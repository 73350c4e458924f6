"""How many units hold full parameters at each point of a forward and a backward, next to torch's FSDP2.

A probe is an identity in the graph. It counts units when the forward passes it and again when the backward does: once
inside each block and once between blocks. What counts is what the modules hold, which both implementations show alike.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from tests.support.async_device.stream_recorder import recording
from tests.support.distributed import cpu_mesh, run_ranks, run_threads
from vescale_fsdp import fully_shard
from vescale_fsdp.runtime.fsdp_state import FSDPState, state_of
from vescale_fsdp.runtime.nested_tensors import tensors_of

WIDTH, BLOCKS = 6, 4
FORWARD, BACKWARD = "forward", "backward"
Counts = list[tuple[str, int]]
Call = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Probe(torch.autograd.Function):
    """Calls ``note(phase)`` where a forward and its backward pass."""

    @staticmethod
    def forward(ctx: Any, note: Callable[[str], None], x: torch.Tensor) -> torch.Tensor:
        ctx.note = note
        note(FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:  # type: ignore[override]
        ctx.note(BACKWARD)
        return None, grad


class Block(nn.Module):
    """A base layer with an adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)
        self.note: Callable[[str], None] = lambda phase: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Probe.apply(self.note, self.base(x) + self.up(self.down(x)))
        return torch.tanh(x)


class Model(nn.Module):
    """A projector (or prompt) under a stack of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.projector = nn.Linear(WIDTH, WIDTH)
        self.prompt = nn.Parameter(torch.ones(1, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.note: Callable[[str], None] = lambda phase: None
        self.call: Call = lambda block, x: block(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.prompt, self.projector(x)])
        for block in self.blocks:
            x = self.call(block, Probe.apply(self.note, x))
        return x


def frozen_llm(name: str) -> bool:
    return name.startswith("projector")


def prompt_tuning(name: str) -> bool:
    return name == "prompt"


def adapters(name: str) -> bool:
    return ".up." in name or ".down." in name


def upper_half(name: str) -> bool:
    return name.startswith("blocks.") and int(name.split(".")[1]) >= BLOCKS // 2


def everything(name: str) -> bool:
    return True


def reentrant(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=True)  # type: ignore[no-any-return]


def recomputed(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=False)  # type: ignore[no-any-return]


class Way(NamedTuple):
    """How units are cut and run."""

    call: Call = nn.Module.__call__
    is_synced: bool = True
    mesh_shape: tuple[int, ...] = ()
    units: str = "blocks"
    options: dict[str, Any] = {}  # noqa: RUF012  a default that is only read


TRAINED = {f.__name__: f for f in (everything, frozen_llm, prompt_tuning, adapters, upper_half)}
WAYS = {
    "plain": Way(),
    "checkpoint": Way(recomputed),
    "reentrant checkpoint": Way(reentrant),
    "no_sync": Way(is_synced=False),
    "hybrid": Way(mesh_shape=(2, 1)),
    "list": Way(units="pairs"),
    "base layers apart": Way(units="bases and blocks"),
    "base layers apart, checkpoint": Way(recomputed, units="bases and blocks"),
    "kept after forward": Way(options={"reshard_after_forward": False}),
}


def runs(trained: str, name: str) -> bool:
    """torch's reentrant checkpoint asks for an input with a gradient."""
    return "reentrant" not in name or trained not in ("adapters", "upper_half")


def units_of(model: Model, way: Way) -> list[Any]:
    """What each call of `fully_shard` is given, innermost first; the root is not among them."""
    blocks = list(model.blocks)
    if way.units == "pairs":
        return [[first, second] for first, second in zip(blocks[::2], blocks[1::2], strict=True)]
    bases = [block.base for block in blocks] if way.units.startswith("bases") else []
    return [*bases, *blocks]


def is_full(unit: Any) -> bool:
    """Whether the unit's modules hold full parameters."""
    first = unit[0] if isinstance(unit, list) else unit
    own = first if isinstance(first, nn.Linear) else first.up
    return not isinstance(own.weight, DTensor)


def build(shard: Any, trained: str, way: Way) -> tuple[Model, list[Any]]:
    torch.manual_seed(1)
    model = Model()
    for name, param in model.named_parameters():
        param.requires_grad_(TRAINED[trained](name))
    units = units_of(model, way)
    mesh = cpu_mesh(*way.mesh_shape, names=("replicate", "shard") if way.mesh_shape else None)
    for module in (*units, model):
        shard(module, mesh=mesh, **way.options)
    model.call = way.call
    return model, units


def steps(model: Any, units: list[Any], way: Way) -> Counts:
    """Counts of two steps; then nothing is left in full."""
    counts: Counts = []

    def note(phase: str) -> None:
        counts.append((phase, sum(is_full(unit) for unit in units)))

    for module in (model, *model.blocks):
        module.note = note
    for number in range(2):
        model.set_requires_gradient_sync(way.is_synced)
        torch.manual_seed(number)
        model(torch.randn(3, WIDTH)).square().mean().backward()
        assert not any(is_full(unit) for unit in units)
    return counts


def count(shard: Any, trained: str, way: Way, *, on_streams: bool = False) -> Counts:
    model, units = build(shard, trained, way)
    with ExitStack() as stack:
        if on_streams:
            hazards = stack.enter_context(recording(model)).hazards
        counts = steps(model, units, way)
        assert not on_streams or hazards == []
    return counts


def more(ours: Counts, stock: Counts) -> bool:
    return any(one > other for (_, one), (_, other) in zip(ours, stock, strict=True))


def beside_fsdp2(frozen: list[str], ways: list[str]) -> dict[str, tuple[Counts, Counts]]:
    """Counts of ours and of FSDP2, where ours holds more at any point."""
    differ = {}
    for trained in frozen:
        for name in ways:
            if not runs(trained, name):
                continue
            way = WAYS[name]
            ours, stock = count(fully_shard, trained, way), count(torch_fully_shard, trained, way)
            assert sum(phase == FORWARD for phase, _ in ours) >= 4 * BLOCKS
            assert sum(phase == BACKWARD for phase, _ in ours) >= BLOCKS
            if [phase for phase, _ in ours] != [phase for phase, _ in stock] or more(ours, stock):
                differ[f"{trained}, {name}"] = ours, stock
    return differ


SOME, OTHERS = ["everything", "frozen_llm"], ["prompt_tuning", "adapters", "upper_half"]
FEW = ["plain", "checkpoint", "base layers apart"]


@pytest.mark.parametrize(
    ("frozen", "ways"),
    [
        (SOME, FEW),
        pytest.param(SOME, [name for name in WAYS if name not in FEW], marks=pytest.mark.part("numerics")),
        pytest.param(OTHERS, FEW, marks=pytest.mark.part("numerics")),
        pytest.param(OTHERS, [name for name in WAYS if name not in FEW], marks=pytest.mark.part("numerics")),
    ],
    ids=["some", "some-more", "others", "others-more"],
)
def test_no_more_units_are_in_full_than_under_fsdp2(frozen: list[str], ways: list[str]) -> None:
    """At no point more units are in full, whatever is frozen and however it runs."""
    for differ in run_ranks(2, beside_fsdp2, frozen, ways):
        assert differ == {}


def most(trained: str, name: str) -> int:
    return max(number for _, number in count(fully_shard, trained, WAYS[name], on_streams=True))


def on_streams() -> dict[str, int]:
    """The most units in full at once, on an accelerator's branch."""
    names = [name for name, way in WAYS.items() if way.mesh_shape == () and not way.options]
    return {
        f"{trained}, {name}": most(trained, name)
        for trained in TRAINED
        for name in names
        if runs(trained, name)
    }


@pytest.mark.part("numerics")
def test_streams_keep_no_more_units_in_full() -> None:
    """A block is held at a time; where it is recomputed, its base layer with it if that is a unit."""
    for found in run_ranks(1, on_streams):
        assert found == {case: 2 if "apart, checkpoint" in case else 1 for case in found}


def only_trainable_units(state: FSDPState, args: Any, kwargs: Any) -> Any:
    """Inputs of frozen units pass unwatched, so only the end of the backward reshards them."""
    if not any(group.note_trained() for group in state.groups):
        return args, kwargs
    return _watch_inputs(state, args, kwargs)


_watch_inputs = FSDPState._watch_inputs


def without_nodes() -> Counts:
    with mock.patch.object(FSDPState, "_watch_inputs", only_trainable_units):
        return count(fully_shard, "frozen_llm", WAYS["plain"])


def test_frozen_units_need_their_node() -> None:
    """Negative control: without a node on its inputs every frozen unit stays in full through the backward."""
    for counts in run_ranks(1, without_nodes):
        assert max(number for phase, number in counts if phase == FORWARD) == 1
        assert max(number for phase, number in counts if phase == BACKWARD) == BLOCKS


def reductions_of_frozen_units() -> tuple[int, set[str]]:
    """How often frozen units wait for room for a reduction, and which parameters end with a gradient."""
    model, _ = build(fully_shard, "frozen_llm", WAYS["plain"])
    root = state_of(model)
    assert root is not None
    model(torch.ones(3, WIDTH))  # joins the streams of the root
    with mock.patch.object(root.comm, "wait_for_slot", wraps=root.comm.wait_for_slot) as waits:
        for tensor in tensors_of(model(torch.ones(3, WIDTH))):
            tensor.square().mean().backward()
    assert dist.get_world_size() == 1
    return waits.call_count, {name for name, param in model.named_parameters() if param.grad is not None}


def test_frozen_units_reduce_nothing() -> None:
    """Only the projector's unit reduces, and it alone waits."""
    for waits, with_grads in run_ranks(1, reductions_of_frozen_units):
        assert waits == 2  # `_reduce`, and `reduce` of its one group
        assert with_grads == {"projector.weight", "projector.bias"}


class Held(torch.autograd.Function):
    """An identity whose node refers to a weight without saving it for the backward, and reads it there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        assert ctx.weight.norm() > 0
        return grad, None


class Tied(nn.Module):
    """The root owns an embedding that is also the head, and a norm behind the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, WIDTH)
        self.norm = nn.RMSNorm(WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 12, bias=False)
        self.head.weight = self.embed.weight
        generator = torch.Generator().manual_seed(2)  # the ranks are threads, which share torch's own
        for param in self.parameters():
            param.data = torch.randn(param.shape, generator=generator)
        self.seen: list[bool] = []

    def forward(self, tokens: torch.Tensor, way: str) -> Any:
        if way.startswith("checkpoint"):
            x = checkpoint(self.embed, tokens, use_reentrant=False)
        else:
            x = self.embed(tokens)
        rows = x
        x.register_hook(lambda grad: self.seen.append(isinstance(self.embed.weight, DTensor)))
        if way == "norm":
            x = self.norm(x)
        if way == "held":
            x = Held.apply(x, self.embed.weight)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x = self.head(x)
        return (x, rows) if way == "second output" else x


def losses_of(model: nn.Module, way: str, rank: int) -> None:
    """Gradients of two forwards."""
    for step in range(2):
        tokens = torch.arange(6) * (step + 2 * rank + 1) % 12
        outputs = model(tokens, way)
        every = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.stack([each.square().mean() for each in every]).sum().backward()


def tied_root(way: str) -> list[bool]:
    """Whether the root was sharded before its embedding's backward; checks that gradients are the plain model's."""
    model, plain = Tied(), Tied()
    for module in (*model.layers, model):
        fully_shard(module, mesh=cpu_mesh())
    model.set_reshard_after_backward(way != "not resharded")  # type: ignore[operator]
    losses_of(model, way, dist.get_rank())
    for rank in range(dist.get_world_size()):
        losses_of(plain, way, rank)
    for module in (*model.layers, model):
        module.reshard()  # type: ignore[operator]
    for name, param in model.named_parameters():
        expected = plain.get_parameter(name).grad
        if expected is not None:
            assert param.grad is not None
            got = param.grad.full_tensor()  # type: ignore[attr-defined]
            torch.testing.assert_close(got, expected / dist.get_world_size())
    return model.seen


@pytest.mark.parametrize("way", ["plain", "norm", "held", "checkpoint", "second output", "not resharded"])
def test_the_root_stays_gathered_until_the_backward_ends(way: str) -> None:
    """A hook or a recomputed function may read its weights at any time in the backward."""
    for seen in run_threads(2, tied_root, way):
        assert seen == [False] * 2
