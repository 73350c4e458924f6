"""Operators that communicate are called by all ranks, or all ranks raise; also where torch.compile runs them."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.support.distributed import cpu_mesh, run_ranks, run_threads
from tests.support.dtensor_conformance import plain
from tests.vescale_fsdp.dtensor.operators.test_combining import SHAPE, cuts, messages
from vescale_fsdp import fully_shard
from vescale_fsdp.dtensor import meeting, set_implicit_gathers
from vescale_fsdp.dtensor.operators import gathered_views
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor, distribute_tensor
from vescale_fsdp.errors import GatherWarning, LifecycleError, UnsupportedOpError
from vescale_fsdp.runtime.comm import order_watch

pytestmark = pytest.mark.filterwarnings("ignore::vescale_fsdp.errors.GatherWarning")


def pair() -> tuple[RaggedDTensor, RaggedDTensor]:
    """Two tensors that are cut differently."""
    first, second, *_ = cuts(dist.get_world_size()).values()
    mesh = cpu_mesh()
    return distribute_tensor(plain(SHAPE), mesh, [first]), distribute_tensor(plain(SHAPE, 1), mesh, [second])


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "aten.add_.Tensor": lambda x, y: x.add_(y),
    "aten._foreach_add_.List": lambda x, y: torch._foreach_add_([x], [y]),
    "aten.select.int": lambda x, y: x[:, 0],
    "aten.mm.default": lambda x, y: x @ y.view(6, 8),
}


def alone(name: str, all_done: threading.Barrier) -> tuple[str, str]:
    """Rank 0 calls an operator, later all ranks do: how both end on this rank."""
    x, y = pair()
    ends = []
    for turn in range(2):
        try:
            if turn or dist.get_rank() == 0:
                CALLS[name](x, y)
            ends.append("no error")
        except LifecycleError as error:
            ends.append(f"{error.got}")
        all_done.wait(timeout=30.0)
    return ends[0], ends[1]


@pytest.mark.parametrize("name", CALLS)
def test_a_rank_that_calls_alone_raises(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the operator and the absent rank within the bound; others raise at their next operator."""
    monkeypatch.setattr(meeting, "BOUND_S", 0.3)
    (first, _), (nothing, later) = run_threads(2, alone, name, threading.Barrier(2))

    assert name in first and "ranks 1" in first
    assert nothing == "no error" and name in later and "Rank 0 called" in later


def different() -> str:
    """Ranks call different operators."""
    x, y = pair()
    with pytest.raises(LifecycleError) as caught:
        x.add_(y) if dist.get_rank() == 0 else x.mul_(y)
    x.sub_(y)  # all ranks have heard of it, and go on together
    return str(caught.value.got)


def test_different_operators_raise_everywhere() -> None:
    """All ranks name both operators; nothing is sent."""
    for text in run_threads(3, different):
        assert "aten.add_.Tensor" in text and "aten.mul_.Tensor" in text


def keys_left() -> int:
    """How many keys of meetings are in the store after many operators."""
    x, y = pair()
    for _ in range(20):
        x.add_(y)
    assert messages(cpu_mesh()) == 20
    dist.barrier()
    return dist.distributed_c10d._get_default_store().num_keys()


def test_meetings_leave_nothing_in_the_store() -> None:
    """Keys of all calls but the last are deleted."""
    assert max(run_threads(2, keys_left)) < 20


class _Log:
    """An observer that finds a difference once it is told to."""

    def __init__(self) -> None:
        self.entries: list[str] = []
        self.error: LifecycleError | None = None

    def note(self, entry: str) -> None:
        self.entries.append(entry)
        if dist.get_rank() == 0:
            self.error = LifecycleError("Ranks differ.")


def observed() -> list[str]:
    x, _ = pair()
    log = _Log()
    meeting.observe(x.device_mesh, log)
    if dist.get_rank() == 0:
        with pytest.raises(LifecycleError) as caught:
            _ = x.t()
        assert caught.value is log.error
    return log.entries


def test_operators_are_in_the_order_of_collectives() -> None:
    """What is sent is logged with a unit's collectives, and a rank that waits hears what the log has found."""
    (entry,), nothing = run_threads(2, observed)
    assert "aten.t.default" in entry and nothing == []


# -- warnings and the switch ----------------------------------------------------------------------------


def warned() -> list[tuple[str, str]]:
    """Warnings of several reads: category and text."""
    x, _ = pair()
    gathered_views._warned.clear()  # another test of this process may have warned
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            x.t(), x[:, 0], x @ x.t(), x + 1, x[2], x.sum(0)
    return [(each.category.__name__, str(each.message)) for each in found]


def test_each_operator_warns_once_with_its_cost() -> None:
    """Reads that gather say how many bytes; what computes on the pieces says nothing."""
    for found in run_ranks(2, warned):
        assert {category for category, _ in found} == {GatherWarning.__name__}
        assert sorted(text.split()[0] for _, text in found) == [
            "aten.mm.default",
            "aten.select.int",
            "aten.t.default",
        ]
        assert all("192 B" in text for _, text in found)


def refused() -> int:
    """With the switch off."""
    x, y = pair()
    before = messages(x.device_mesh)
    reads = [
        lambda: x.t(),
        lambda: x[:, 0],
        lambda: x @ x.view(6, 8),
        lambda: x.argsort(0),
        lambda: x.tril_(),
    ]
    for read in reads:
        with pytest.raises(UnsupportedOpError) as caught:
            read()
        assert "RaggedShard" in str(caught.value.where) and ".full_tensor()" in str(caught.value.todo)
    assert messages(x.device_mesh) == before
    (x + y).sum(0).add_(x[1])
    return len(reads)


def test_implicit_gathers_can_be_refused() -> None:
    """Nothing is sent; sums and moves go on."""
    assert set_implicit_gathers(False) is True
    try:
        assert run_threads(2, refused) == [5, 5]
    finally:
        assert set_implicit_gathers(True) is False


# -- torch.compile --------------------------------------------------------------------------------------

COMPILED: dict[str, Callable[[Any, Any], Any]] = {
    "copies": lambda x, y: x.mul(0.9).add_(y, alpha=0.1),
    "total": lambda x, y: x.sum() * 2,
    "columns": lambda x, y: x - x.mean(0),
    "largest": lambda x, y: x.amax(0),
    "product": lambda x, y: x @ x.t(),
    "gathered": lambda x, y: x.full_tensor() * 2,
}


def compiled(names: tuple[str, ...]) -> int:
    """Compiled functions, called with new values, against plain tensors; how many met other ranks."""
    met = 0
    for name in names:
        fn = torch.compile(COMPILED[name], backend="aot_eager", fullgraph=True)
        x, y = pair()
        with torch.no_grad():
            fn(x, y)
            before = messages(x.device_mesh)
            got = fn(x * 3, y * 2)
            met += messages(x.device_mesh) > before
        x, y = plain(SHAPE) * 3, plain(SHAPE, 1) * 2  # type: ignore[assignment]
        want = x * 2 if name == "gathered" else COMPILED[name](x, y)
        found = got.full_tensor() if isinstance(got, DTensor) else got
        torch.testing.assert_close(found, want, msg=lambda text, name=name: f"{name}: {text}")
    return met


@pytest.mark.part("numerics")
def test_compiled_operators_meet_where_they_run() -> None:
    """A graph contains the messages: values are those of the call, not of the recording, and ranks meet each time."""
    assert run_ranks(2, compiled, ("copies",)) == [1, 1]


@pytest.mark.part("numerics")
def test_compiled_reductions_and_gathers() -> None:
    """Results that need other ranks' elements were uninitialized memory."""
    assert run_ranks(2, compiled, tuple(COMPILED)) == [2, 2]


# -- in training ----------------------------------------------------------------------------------------


def model_of(shard: bool) -> Any:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    if not shard:
        return model
    fully_shard(model[0], mesh=cpu_mesh())
    return fully_shard(model, mesh=cpu_mesh())


def logging_on_rank_0() -> str:
    """Rank 0 reads a column between two steps, others train on: the error on this rank."""
    model = model_of(True)

    def train() -> None:
        for step in range(3):
            model(plain((4, 5), step)).sum().backward()
            if step == 1 and dist.get_rank() == 0:
                _ = model[0].weight[:, 0]

    with mock.patch.object(order_watch, "BOUND_S", 0.5), pytest.raises(LifecycleError) as caught:
        train()
    return f"{caught.value.expected} {caught.value.got}"


def test_logging_on_one_rank_in_training_raises_on_all() -> None:
    """The order of collectives contains operators, so that all ranks raise within its bound, and name the operator."""
    for text in run_ranks(2, logging_on_rank_0):
        assert "aten.s" in text and "gather" in text


def hand_written_terms(first: bool) -> None:
    """Terms of a loss on sharded parameters, before or after the model's own gradients, against a plain model."""
    sharded, whole = model_of(True), model_of(False)
    x = plain((4, 5))

    def own(model: Any) -> None:
        model(x).square().sum().backward()

    def terms(model: Any) -> None:
        for p in model.parameters():
            total = p.sum()
            (total.full_tensor() if isinstance(total, DTensor) else total).backward()
            if p.ndim == 2:
                column = p[:, 0].square().sum()
                (column.full_tensor() if isinstance(column, DTensor) else column).backward()

    for model in (sharded, whole):
        for part in (terms, own) if first else (own, terms):
            part(model)
    for p, q in zip(sharded.parameters(), whole.parameters(), strict=True):
        assert isinstance(p.grad, RaggedDTensor) and p.grad.placements == p.placements
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)


@pytest.mark.parametrize("first", [True, False])
def test_hand_written_terms_add_to_gradients(first: bool) -> None:
    """Before and after the backward of the model: the sums of both, cut like the parameter."""
    run_ranks(2, hand_written_terms, first)
