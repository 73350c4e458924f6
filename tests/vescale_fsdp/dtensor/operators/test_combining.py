"""Tensors that are not cut alike: copies of a model, broadcasting, and ranks that do not call the same operator."""

from __future__ import annotations

import itertools
import math
import sys
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.support.distributed import cpu_mesh, run_cases, run_threads
from tests.support.dtensor_conformance import plain
from vescale_fsdp import RaggedDTensor, RaggedShard, distribute_tensor, fully_shard
from vescale_fsdp.dtensor import redistribute
from vescale_fsdp.dtensor.operators import combining
from vescale_fsdp.errors import UnsupportedOpError

SHAPE = (8, 6)
NUMEL = math.prod(SHAPE)


def cuts(num_ranks: int) -> dict[str, RaggedShard]:
    """A cut inside rows, between rows, between rows with an empty rank, and the whole tensor on one rank."""
    even = [NUMEL * (rank + 1) // num_ranks - NUMEL * rank // num_ranks for rank in range(num_ranks)]
    inside = [even[0] - 3, even[1] + 3, *even[2:]]
    rows = [8 // num_ranks] * (num_ranks - 1)
    rows.append(8 - sum(rows))
    numels = {
        "inside": inside,
        "rows": [n * 6 for n in rows],
        "few rows": [0, 18, *[0] * (num_ranks - 2)],
    }
    numels["few rows"][0] += NUMEL - 18
    found = {name: RaggedShard.from_piece_numels(SHAPE, each) for name, each in numels.items()}
    return {**found, "whole": RaggedShard((), (0, 1, *[0] * (num_ranks - 2)))}


_sent: Counter[int] = Counter()  # rank -> operators that sent something


@pytest.fixture(autouse=True)
def _count_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    meet = combining.meet

    def counted(groups: Any, call: str) -> None:
        _sent[dist.get_rank()] += 1
        meet(groups, call)

    monkeypatch.setattr(combining, "meet", counted)


def messages() -> int:
    """How many operators of this rank have sent something, after ranks have met."""
    return _sent[dist.get_rank()]


def check(got: Any, want: torch.Tensor, what: object) -> None:
    found = got.full_tensor() if isinstance(got, DTensor) else got
    torch.testing.assert_close(found, want, msg=lambda text: f"{what}: {text}")


# -- broadcasting ---------------------------------------------------------------------------------------

STATISTICS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "sum": lambda w, dim: w.sum(dim, keepdim=True),
    "mean": lambda w, dim: w.mean(dim, keepdim=True),
    "norm": lambda w, dim: w.norm(dim=dim, keepdim=True),
    "amax": lambda w, dim: w.abs().amax(dim, keepdim=True),
    "amin": lambda w, dim: w.amin(dim, keepdim=True),
    "std": lambda w, dim: w.std(dim, keepdim=True),
    "var": lambda w, dim: w.var(dim, keepdim=True, correction=0),
}
FORMS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "in place": lambda w, s: w.sub_(s),
    "new": lambda w, s: w / (s + 20),
    "reversed": lambda w, s: torch.where(s > 0.3, s, w),
}
COMBINATIONS = list(itertools.product((0, 1), STATISTICS, FORMS))


def broadcasts(num_ranks: int) -> int:
    """All combinations with all cuts, against plain tensors; the number of combinations."""
    mesh, compared = cpu_mesh(), 0
    for (dim, statistic, form), (name, cut) in itertools.product(COMBINATIONS, cuts(num_ranks).items()):
        what = (dim, statistic, form, name)
        w, full = distribute_tensor(plain(SHAPE), mesh, [cut]), plain(SHAPE)
        before = messages()
        value, want = STATISTICS[statistic](w, dim), STATISTICS[statistic](full, dim)
        assert isinstance(value, DTensor)
        check(value, want, what)
        result = FORMS[form](w, value)
        assert isinstance(result, RaggedDTensor) and result.placements == w.placements, what
        if name == "whole" or (dim == 1 and name != "inside"):
            assert messages() == before, what  # every rank has what it needs
        want = FORMS[form](full, want)
        check(result, want, what)
        assert form != "in place" or result is w
        # The result is a tensor like any other.
        check(
            result.mul_(2).add_(w, alpha=0.5).sum(1),
            (want * 2 + full * 0.5 if result is not w else want * 3).sum(1),
            what,
        )
        compared += 1
    return compared // len(cuts(num_ranks))


@pytest.mark.parametrize(
    "num_ranks", [2, *(pytest.param(number, marks=pytest.mark.part("numerics")) for number in (3, 4))]
)
def test_rows_and_columns_broadcast(num_ranks: int) -> None:
    """Rows and columns are centred and scaled in place and not, whatever the cut; only the small operand travels."""
    assert len(COMBINATIONS) == 42
    assert run_threads(num_ranks, broadcasts, num_ranks) == [42] * num_ranks


# -- copies of a model ----------------------------------------------------------------------------------

A = 0.1
COMBINED: dict[str, Callable[[Any, Any], Any]] = {
    "average": lambda t, p: t.mul_(1 - A).add_(p, alpha=A),
    "lerp": lambda t, p: t.lerp_(p, A),
    "addcmul": lambda t, p: t.addcmul_(p, p, value=0.5),
    "copy": lambda t, p: t.copy_(p),
    "out": lambda t, p: torch.add(t, p, out=t),
    "new": lambda t, p: t - p,
    "where": lambda t, p: torch.where(p > 0, t, p),
    "masked": lambda t, p: t.masked_fill_(p > 0, 2.0),
    "foreach": lambda t, p: (torch._foreach_add_([t], [p], alpha=A), t)[1],
    "foreach lerp": lambda t, p: (torch._foreach_lerp_([t], [p], A), t)[1],
    "foreach new": lambda t, p: torch._foreach_mul([t], [p])[0],
    "foreach addcmul": lambda t, p: (torch._foreach_addcmul_([t], [p], [p], value=A), t)[1],
    "distance": lambda t, p: torch.dist(t, p),
    "equal": lambda t, p: torch.tensor([torch.equal(t, p), torch.allclose(t, p, atol=100.0)]),
}


def copies(num_ranks: int) -> int:
    """Every way of combining two copies, for every pair of cuts, stock placements and another mesh included."""
    mesh, compared = cpu_mesh(), 0
    other_mesh = cpu_mesh(1, num_ranks)
    x, y = plain(SHAPE, 1), plain(SHAPE, 2)
    others: list[Any] = [*cuts(num_ranks).values(), "stock", "mesh"]
    for name, fn in COMBINED.items():
        want = fn(x.clone(), y.clone())
        for first, second in itertools.product(cuts(num_ranks).values(), others):
            t, p = distribute_tensor(x, mesh, [first]), distribute_tensor(y, mesh, [first])
            if second == "stock":
                p = redistribute(p, [Shard(0)])
            elif second == "mesh":
                p = distribute_tensor(y, other_mesh, [Replicate(), first])
            else:
                p = distribute_tensor(y, mesh, [second])
            before = messages()
            with torch.no_grad():
                got = fn(t, p)
            assert (messages() > before) is (first != second), (name, first, second)
            check(got, want, (name, first, second))
            # The first operand of `where` is the condition, which is cut like p.
            assert name == "where" or not isinstance(got, RaggedDTensor) or got.placements == t.placements
            compared += 1
    return compared


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.part("numerics"))])
def test_copies_combine_however_they_are_cut(num_ranks: int) -> None:
    """The second operand comes to the first one's placement; equal cuts send nothing, and others meet."""
    assert run_threads(num_ranks, copies, num_ranks) == [len(COMBINED) * 4 * 6] * num_ranks


def gradients_of_copies() -> None:
    """Gradients of a distance between two copies: each is cut like its own tensor."""
    mesh, (first, second, *_) = cpu_mesh(), cuts(2).values()
    t = distribute_tensor(plain(SHAPE, 1), mesh, [first]).requires_grad_()
    p = distribute_tensor(plain(SHAPE, 2), mesh, [second]).requires_grad_()
    x, y = plain(SHAPE, 1).requires_grad_(), plain(SHAPE, 2).requires_grad_()
    for left, right in ((t, p), (x, y)):
        ((left - right).square() * right).sum().backward()
    for ours, theirs in ((t, x), (p, y)):
        assert isinstance(ours, RaggedDTensor) and isinstance(ours.grad, RaggedDTensor)
        assert ours.grad.placements == ours.placements
        check(ours.grad, theirs.grad, "gradient")  # type: ignore[arg-type]


def test_gradients_are_cut_like_their_tensors() -> None:
    """Also that of the tensor that was sent."""
    run_threads(2, gradients_of_copies)


def replicated_state() -> None:
    """Row-wise state made by new_zeros is replicated; what is written to it is gathered, alone and in lists."""
    mesh = cpu_mesh()
    for cut in cuts(2).values():
        g, full = distribute_tensor(plain(SHAPE), mesh, [cut]), plain(SHAPE)
        state, want = g.new_zeros((8, 1)), full.new_zeros((8, 1))
        for tensor, grad in ((state, g), (want, full)):
            mean = grad.square().mean(1, keepdim=True)
            tensor.mul_(0.9).add_(mean, alpha=0.1)
            torch._foreach_add_([tensor], [mean])
        check(state, want, cut)
        check(g / state.sqrt(), full / want.sqrt(), cut)
        outer = g.sum(1, keepdim=True) * g.sum(0)  # neither has the result's shape
        assert isinstance(outer, DTensor) and not isinstance(outer, RaggedDTensor)
        check(outer, full.sum(1, keepdim=True) * full.sum(0), cut)


def test_replicated_state_takes_rows() -> None:
    """Optimizers with a state per row, and outer products of rows and columns."""
    run_threads(2, replicated_state)


# Python calls of an operator between tensors that are cut alike, before tensors could be cut differently (torch 2.13,
# Python 3.11). Newer versions of Python count fewer.
CALLS = {
    "add": 34,
    "add_": 38,
    "lerp_": 39,
    "addcmul_": 49,
    "copy_": 37,
    "row": 105,
    "foreach_add_": 55,
    "foreach_lerp_": 56,
    "row view": 215,
    "norm": 73,
    "out": 96,
}


def calls_of(fn: Callable[[], object]) -> int:
    """How many Python functions a warm call enters: the least of a few calls, since collected objects call back."""
    number = 0

    def count(frame: types.FrameType, event: str, arg: object) -> None:
        nonlocal number
        number += event == "call"

    fn()
    found = []
    for _ in range(4):
        number = 0
        sys.setprofile(count)
        try:
            fn()
        finally:
            sys.setprofile(None)
        found.append(number)
    return min(found)


def calls_when_cut_alike() -> dict[str, int]:
    """The number of Python calls per operator, on this rank."""
    mesh, cut = cpu_mesh(), RaggedShard((0, 1), (7, 13))
    tensors = [distribute_tensor(plain((4, 5), seed), mesh, [cut]) for seed in range(6)]
    x, y, z, *others = tensors
    row = DTensor.from_local(plain((5,), 3), mesh, [Replicate()])
    before = messages()
    with torch.no_grad():
        found = {
            "add": calls_of(lambda: x + y),
            "add_": calls_of(lambda: x.add_(y, alpha=2)),
            "lerp_": calls_of(lambda: x.lerp_(y, 0.1)),
            "addcmul_": calls_of(lambda: x.addcmul_(y, z)),
            "copy_": calls_of(lambda: x.copy_(y)),
            "row": calls_of(lambda: x * row),
            "foreach_add_": calls_of(lambda: torch._foreach_add_([x, y, z], others)),
            "foreach_lerp_": calls_of(lambda: torch._foreach_lerp_([x, y, z], others, 0.5)),
            "row view": calls_of(lambda: x[1]),
            "norm": calls_of(lambda: x.norm()),
            "out": calls_of(lambda: torch.mul(x, y, out=z)),
        }
    assert messages() == before
    return found


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13"), reason="counted with torch 2.13, whose calls count too"
)
def test_equal_cuts_cost_what_they_did() -> None:
    """No message and no more Python calls."""
    found = run_threads(2, calls_when_cut_alike)[0]

    assert found.keys() == CALLS.keys()
    assert {name: n / CALLS[name] for name, n in found.items() if n > CALLS[name]} == {}


# -- two models, one of them gathered -------------------------------------------------------------------

AVERAGES: dict[str, Callable[[Any, Any], Any]] = {
    "lerp_": lambda t, s: t.lerp_(s, 0.25),
    "add_": lambda t, s: t.add_(s, alpha=0.25),
    "foreach": lambda t, s: torch._foreach_lerp_([t], [s], 0.25),
    "copy_": lambda t, s: t.copy_(s),
}


def remedies_work(name: str, gathered: str) -> None:
    """What the error of a step between a gathered and a sharded parameter says to do makes the step right."""
    models: list[Any] = []
    for seed in range(2):
        torch.manual_seed(seed)
        models.append(fully_shard(torch.nn.Linear(6, 4), mesh=cpu_mesh()))
    teacher, student = models
    want, other = (model.weight.full_tensor() for model in models)
    plain_teacher = want.clone()
    with torch.no_grad():
        AVERAGES[name](want, other)
        if gathered == "plain teacher":
            with pytest.raises(UnsupportedOpError) as refused:
                AVERAGES[name](plain_teacher, student.weight)
            assert ".full_tensor()" in str(refused.value.todo)
            AVERAGES[name](plain_teacher, student.weight.full_tensor())
            check(plain_teacher, want, name)
            return
        module = teacher if gathered == "teacher" else student
        module.unshard()
        with pytest.raises(UnsupportedOpError) as refused:
            AVERAGES[name](teacher.weight, student.weight)
        module.reshard()
        AVERAGES[name](teacher.weight, student.weight)
        check(teacher.weight, want, name)


def test_a_gathered_teacher_or_student_is_told_to_reshard() -> None:
    """Also a teacher that was never sharded: the todo is the way out."""
    run_cases(
        2, remedies_work, [(n, who) for n in AVERAGES for who in ("teacher", "student", "plain teacher")]
    )
