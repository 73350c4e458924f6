"""Operators that communicate are called by all ranks, or all ranks raise; also where torch.compile runs them."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tests.support.distributed import cpu_mesh, run_ranks, run_threads
from tests.support.dtensor_conformance import plain
from tests.support.meetings import meetings, short_waits
from tests.vescale_fsdp.dtensor.operators.test_combining import SHAPE, cuts
from vescale_fsdp import RaggedDTensor, RaggedShard, distribute_tensor, fully_shard
from vescale_fsdp.checkpoint import state_dict
from vescale_fsdp.dtensor import meeting, redistribute, set_implicit_gathers
from vescale_fsdp.dtensor.operators import gathered_views
from vescale_fsdp.errors import GatherWarning, LifecycleError, UnsupportedOpError

FULL = StateDictOptions(full_state_dict=True)
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
def test_a_rank_that_calls_alone_raises(name: str) -> None:
    """It names the operator and the absent rank within the bound; others raise at their next operator."""
    with short_waits(bound=0.1, ask=0.02):
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
    with short_waits(ask=0.02):
        ends = run_threads(3, different)
    for text in ends:
        assert "aten.add_.Tensor" in text and "aten.mul_.Tensor" in text


def keys_left() -> int:
    """How many keys of meetings are in the store after many operators."""
    x, y = pair()
    for _ in range(20):
        x.add_(y)
    assert meetings(cpu_mesh()) == 20
    dist.barrier()
    return dist.distributed_c10d._get_default_store().num_keys()


def test_meetings_leave_nothing_in_the_store() -> None:
    """Keys of all calls but the last are deleted."""
    assert max(run_threads(2, keys_left)) < 20


class _Watch:
    """A watch that finds a difference once a rank waits."""

    def __init__(self, *, finds: bool) -> None:
        self.entries: list[str] = []
        self.found = LifecycleError("Ranks differ.")
        self._finds, self._num_looks = finds, 0

    @property
    def error(self) -> LifecycleError | None:
        self._num_looks += 1
        return self.found if self._finds and self._num_looks > 1 else None

    def follow(self, log: Any, entry: str) -> None:
        self.entries.append(entry)


def observed() -> list[str]:
    x, _ = pair()
    log = meeting.meeting_of(x.device_mesh.get_group()).log
    watch, finder = cast(Any, _Watch(finds=False)), cast(Any, _Watch(finds=True))
    log.watches.add(watch)
    x.t(), x + 1, x.sum()
    log.watches.add(finder)
    if dist.get_rank() == 0:
        with pytest.raises(LifecycleError) as caught:
            _ = x.t()
        assert caught.value is finder.found
    return cast(list[str], watch.entries)


def test_operators_are_in_the_order_of_collectives() -> None:
    """What is sent is in the order of a unit's collectives, and a rank that waits hears what a watch has found."""
    with short_waits(ask=0.02):
        ends = run_threads(2, observed)
    for entries in ends:
        assert [entry.split()[0] for entry in entries] == ["aten.t.default", "aten.sum.default"]


def one_more() -> str:
    """Rank 0 has started a collective that the other rank has not; then both make the same call."""
    x, _ = pair()
    log = meeting.meeting_of(x.device_mesh.get_group()).log
    if dist.get_rank() == 0:
        log.start("gather ahead")
    with pytest.raises(LifecycleError) as caught:
        x.full_tensor()
    return str(caught.value.got)


def test_calls_after_other_collectives_raise() -> None:
    """Otherwise the messages of a gather in flight would meet those of the call."""
    with short_waits(ask=0.02):
        ends = run_threads(2, one_more)
    for text in ends:
        assert "after 0 " in text and "after 1 " in text


def late(has_warned: threading.Event) -> torch.Tensor:
    """Rank 1 calls once rank 0 has waited for so long that it is reported."""
    x, _ = pair()
    if dist.get_rank() == 1:
        assert has_warned.wait(timeout=30.0)
    return x.full_tensor()


def test_a_late_rank_is_reported_and_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warning names the call and the rank; all ranks get their values."""
    has_warned, warnings_given = threading.Event(), []

    def warn(_: str, text: str) -> None:
        warnings_given.append(text)
        has_warned.set()

    monkeypatch.setattr(meeting._log, "warning", warn)
    with short_waits(ask=0.02, report=0.05):
        found = run_threads(2, late, has_warned)
    for full in found:
        torch.testing.assert_close(full, plain(SHAPE))
    (text,) = warnings_given
    assert "full_tensor" in text and "ranks 1" in text


def on_two_axes(all_done: threading.Barrier) -> tuple[str, str]:
    """On a mesh of two axes, the last rank calls something else; then all ranks make the same call."""
    mesh = cpu_mesh(2, 2)
    x = distribute_tensor(plain(SHAPE), mesh, [RaggedShard.from_piece_numels((8, 3), (10, 14)), Shard(1)])
    ends = []
    for turn in range(2):
        try:
            x.sum() if turn == 0 and dist.get_rank() == 3 else x.full_tensor()
            ends.append("")
        except LifecycleError as error:
            ends.append(str(error.got))
        all_done.wait(timeout=30.0)
    return ends[0], ends[1]


def test_all_ranks_of_all_groups_raise() -> None:
    """Also those whose own first group has met, since a rank that raises lets its later groups know; then all go on."""
    with short_waits(ask=0.02):
        ends = run_threads(4, on_two_axes, threading.Barrier(4))
    for first, then in ends:
        assert "full_tensor" in first and "sum" in first and then == ""


# -- what it costs --------------------------------------------------------------------------------------


class _Counted:
    """A store that counts its requests."""

    def __init__(self, store: Any, requests: list[str]) -> None:
        self._store, self._requests = store, requests

    def __getattr__(self, name: str) -> Any:
        self._requests.append(name)
        return getattr(self._store, name)


class _Own(torch.optim.SGD):
    """An optimizer that gathers every parameter in its step."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.full_tensor(), p.sum()


class _Failing(torch.optim.SGD):
    """An optimizer whose step fails on all ranks, after it has gathered a parameter."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["params"][0].full_tensor()
        raise ArithmeticError


def after_a_failed_step(module: Any) -> None:
    with suppress(ArithmeticError):
        _Failing(module.parameters()).step()
    for _ in range(2):
        module.p0.full_tensor()


def module_of(num_tensors: int, mesh: DeviceMesh) -> torch.nn.Module:
    (cut, *_) = cuts(mesh.size()).values()
    module = torch.nn.Module()
    for index in range(num_tensors):
        param = torch.nn.Parameter(distribute_tensor(plain(SHAPE, index), mesh, [cut]))
        module.register_parameter(f"p{index}", param)
    return module


ROWS: dict[str, tuple[Callable[[Any], Any], int]] = {
    "full_tensor": (lambda m: m.p0.full_tensor(), 1),
    "twice": (lambda m: [m.p0.full_tensor() for _ in range(2)], 2),
    "started": (lambda m: redistribute(m.p0, [Shard(0)], async_op=True).wait(), 1),
    "local": (lambda m: redistribute(redistribute(m.p0, m.p0.placements), m.p0.placements), 0),
    "state dict": (lambda m: state_dict.get_model_state_dict(m, options=FULL), 1),
    "torch's": (lambda m: torch_state_dict.get_model_state_dict(m, options=FULL), 10),
    "failed step": (after_a_failed_step, 3),
    "own step": (lambda m: _Own(m.parameters()).step(), 1),
    "reductions": (lambda m: [p.sum() + p.max() for p in m.parameters()], 1),
    "apart": (lambda m: [(p.sum(), p.full_tensor()) for p in m.parameters()], 20),
    "clipped": (lambda m: torch.nn.utils.get_total_norm(m.parameters()).full_tensor(), 0),
    "equal": (lambda m: torch.equal(m.p0, redistribute(m.p0, [Shard(0)])), 2),
}


def requests(row: str, lists: list[list[str]]) -> tuple[int, int]:
    """The meetings of a row, and the requests of this rank."""
    own = lists[dist.get_rank()]
    module: Any = module_of(10, cpu_mesh())
    met = meeting.meeting_of(cpu_mesh().get_group())
    assert met is not None
    met._store = _Counted(met._store, own)
    module.p0.full_tensor()
    dist.barrier()
    own.clear()
    before = met.count
    ROWS[row][0](module)
    return met.count - before, len(own)


@pytest.mark.parametrize("row", ROWS)
def test_requests_to_the_store(row: str) -> None:
    """Three per meeting and rank, and two more of the last rank; a call of many tensors is one meeting."""
    with short_waits(ask=30.0):
        (count, _), *others = found = run_threads(3, requests, row, [[] for _ in range(3)])
    assert count == ROWS[row][1] and all(other[0] == count for other in others)
    assert sum(number for _, number in found) == count * (3 * 3 + 2)


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
    before = meetings(x.device_mesh)
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
    assert meetings(x.device_mesh) == before
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
            before = meetings(x.device_mesh)
            got = fn(x * 3, y * 2)
            met += meetings(x.device_mesh) > before
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
    assert run_ranks(2, compiled, tuple(COMPILED)) == [3, 3]


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

    with short_waits(order=0.8, ask=0.1), pytest.raises(LifecycleError) as caught:
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
