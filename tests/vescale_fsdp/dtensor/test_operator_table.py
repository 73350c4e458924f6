"""The dispatch table, the document written from it, and what it refuses."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate

from tests.support.distributed import cpu_mesh, run_ranks
from tests.support.dtensor_conformance import plain
from tools.operators_table import operator_table
from vescale_fsdp import RaggedShard
from vescale_fsdp.dtensor import operators
from vescale_fsdp.dtensor.operators.dispatch_table import FAMILIES, is_supported, rule_of
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor, distribute_tensor
from vescale_fsdp.errors import GatherWarning, UnsupportedOpError

aten = torch.ops.aten
DOCUMENT = Path(str(operators.__file__)).parent / "OPERATORS.md"


def test_document_is_the_table() -> None:
    """OPERATORS.md is what the dispatch table says (python tools/operators_table.py writes it)."""
    written, version = DOCUMENT.read_text(), torch.__version__.split("+")[0]
    if f"torch {version}" not in written:
        pytest.skip(f"written for another torch than {version}; operators differ between releases")

    assert written == operator_table()


def test_every_family_has_operators() -> None:
    """No row of the table is empty, and each operator has one family."""
    rows = [line for line in operator_table().splitlines() if line.startswith("| ") and "`" in line]

    assert len(rows) == len(FAMILIES)


@pytest.mark.parametrize(
    "func, supported",
    [
        (aten.add.Tensor, True),
        (aten.add_.Tensor, True),
        (aten.add.out, True),
        (aten._foreach_add_.List, True),
        (aten._fused_adamw_.default, True),
        (aten.sum.dim_IntList, True),
        (aten.max.other, True),
        (aten.max.dim, True),
        (aten.mm.default, True),
        (aten.t.default, True),
        (aten.index.Tensor, True),
        (aten.tril_.default, True),
        (aten.linear.default, True),
        (aten.multinomial.default, True),
        (aten.cudnn_batch_norm.default, True),
        (aten.t_.default, False),
        (aten._make_dual.default, False),
        (aten.sum.IntList_out, True),
        (aten.native_dropout.default, True),
        (aten.resize_.default, False),
        (aten.set_.source_Tensor, False),
        (aten._foreach_max.default, True),
        (aten._foreach_max.out, False),
        (aten._foreach_powsum.Scalar, True),
        (aten.cat.default, True),
        (aten.cat.out, True),
        (aten.eye.m_out, True),
    ],
)
def test_what_is_supported(func: torch._ops.OpOverload, supported: bool) -> None:
    """Each overload is decided for itself."""
    assert is_supported(func) is supported
    assert (rule_of(func) in FAMILIES) is supported


def refusals() -> list[str]:
    """The errors of operators that cannot be right, and of arguments that cannot be combined."""
    mesh = cpu_mesh()
    cut, other = RaggedShard((0, 1), (7, 13)), RaggedShard((0,), (1, 3))
    x = distribute_tensor(plain((4, 5)), mesh, [cut])
    y = distribute_tensor(plain((4, 5)), mesh, [other])
    whole = plain((4, 5))
    replicated = y.redistribute(placements=[Replicate()])
    calls = [
        lambda: x @ whole.t(),
        lambda: x.t().mul_(2),
        lambda: x[:, 2].zero_(),
        lambda: x[0, 2].fill_(1.0),
        lambda: x.clone().t_(),
        lambda: x.expand(2, 4, 5).zero_(),
        lambda: torch._foreach_mul_([x.t()], 2.0),
        lambda: torch.add(x.t(), 1, out=x.t()),
        lambda: x.t() @ whole,
        lambda: x[torch.tensor([0, 2])],
        lambda: x + whole,
        lambda: whole.add_(x),
        lambda: torch.add(x, x, out=whole),
        lambda: x + plain((3, 4, 5)),
        lambda: torch._foreach_add_([whole], [x]),
        lambda: x.normal_(generator=torch.Generator()),
        lambda: torch.eye(5, 4, out=x),
        lambda: torch.cat([x, whole]),
        lambda: torch.sub(replicated[:1], replicated[:1], out=x),
        lambda: torch.dot(x.view(-1), whole.view(-1)),
        lambda: torch.nn.init.orthogonal_(x),
    ]
    warnings.simplefilter("ignore", GatherWarning)
    texts = []
    for call in calls:
        try:
            call()
            texts.append("no error")
        except (NotImplementedError, ValueError) as error:
            texts.append(
                f"{type(error).__name__} {error}" if getattr(error, "todo", "") else f"no cure: {error}"
            )
    assert torch.equal(x.full_tensor(), plain((4, 5))) and torch.equal(whole, plain((4, 5)))
    return texts


def test_refusals_name_operator_placement_and_way_out() -> None:
    """Every refusal says what, where and what to do; nothing was written."""
    for texts in run_ranks(2, refusals):
        for text in texts:
            assert text.startswith(("UnsupportedOpError", "PlacementError")), text
            assert "aten." in text and "RaggedShard(dims=" in text


class _Mixing(torch.optim.SGD):
    """An optimizer that adds a plain tensor."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.data.add_(torch.ones(4, 5))


def a_step_is_refused() -> str:
    param = torch.nn.Parameter(distribute_tensor(plain((4, 5)), cpu_mesh(), [RaggedShard((0, 1), (7, 13))]))
    with pytest.raises(UnsupportedOpError) as caught:
        _Mixing([param]).step()
    return str(caught.value.todo)


def test_refusals_name_the_way_out_of_an_optimizer() -> None:
    """Whole matrices, which the optimizer can step."""
    assert all("OwnerOptimizer" in todo for todo in run_ranks(2, a_step_is_refused))


def partial_dims() -> list[str]:
    """Reductions and scans along dims, where pieces hold the dim whole: against the plain tensor."""
    mesh = cpu_mesh()
    full = plain((6, 4, 5), 3)
    done = []
    for cut in (RaggedShard((0,), (1, 0, 5)), RaggedShard((0, 1), (7, 0, 17))):
        x = distribute_tensor(full, mesh, [cut])
        for name, fn in {
            "sum": lambda t: t.sum(dim=-1),
            "sum keepdim": lambda t: t.sum(dim=2, keepdim=True),
            "mean": lambda t: t.mean(dim=-1),
            "max": lambda t: list(t.max(dim=-1)),
            "argmin": lambda t: t.argmin(dim=-1),
            "norm": lambda t: torch.linalg.vector_norm(t, 2, dim=-1),
            "softmax": lambda t: t.softmax(-1),
            "cumsum": lambda t: t.cumsum(-1),
            "sort": lambda t: list(t.sort(-1)),
            "topk": lambda t: list(t.topk(2, dim=-1)),
            "var": lambda t: t.var(dim=-1),
            "any": lambda t: (t > 1).any(dim=-1),
            "logsumexp": lambda t: t.logsumexp(-1),
        }.items():
            got, want = fn(x), fn(full)
            for a, b in zip(*((v if isinstance(v, list) else [v]) for v in (got, want)), strict=True):
                assert isinstance(a, RaggedDTensor), name
                torch.testing.assert_close(a.full_tensor(), b, msg=name)
            done.append(name)
        for fn in (lambda t: t.sum(dim=(0, 1)), lambda t: t.mean(dim=(0, 1)), lambda t: t.norm(dim=(0, 1))):
            torch.testing.assert_close(fn(x).full_tensor(), fn(full))
    return done


def over_cut_dims() -> int:
    """Sums, means and norms where pieces cut the dims in the middle: what every rank ends up with, against torch."""
    full = plain((6, 4, 5), 3)
    compared = 0
    for cut in (
        RaggedShard((0, 1, 2), (13, 0, 107)),
        RaggedShard((0, 1), (7, 0, 17)),
        RaggedShard((), (0, 1, 0)),
    ):
        x = distribute_tensor(full, cpu_mesh(), [cut])
        for dims in ((0,), (1,), (2,), (-1, 0), (1, 2), (0, 1)):
            for keepdim in (False, True):
                for fn in (
                    lambda t, d, k: (
                        torch.linalg.norm(t, dim=d, keepdim=k) if len(d) == 1 else t.norm(2, d, k)
                    ),
                    lambda t, d, k: torch.linalg.vector_norm(t, 3, dim=d, keepdim=k, dtype=torch.float64),
                    lambda t, d, k: t.sum(d, k, dtype=torch.float64),
                    lambda t, d, k: t.mean(d, k),
                ):
                    torch.testing.assert_close(fn(x, dims, keepdim).full_tensor(), fn(full, dims, keepdim))
                    compared += 1
        whole = (full * 10).to(torch.int32)
        counted = distribute_tensor(whole, cpu_mesh(), [cut]).sum(dim=2).full_tensor()
        assert counted.dtype == torch.int64 and torch.equal(counted, whole.sum(dim=2))
    return compared


def test_sums_and_norms_over_cut_dims() -> None:
    """Init code of weight norm and DoRA takes norms over dims, whatever the granularity."""
    assert run_ranks(3, over_cut_dims) == [144] * 3


def test_reductions_along_whole_dims() -> None:
    """Along dims that every piece holds whole, results are right and stay ragged."""
    assert len(run_ranks(3, partial_dims)[0]) == 26


def shapes_of_views() -> None:
    """Views keep the piece and share its memory."""
    mesh = cpu_mesh()
    full = plain((6, 4, 5))
    x = distribute_tensor(full, mesh, [RaggedShard((0, 1, 2), (13, 0, 107))])
    for shape in ((-1,), (24, 5), (6, 20), (2, 3, 4, 5), (6, 1, 4, 5)):
        view = x.view(shape)
        assert isinstance(view, RaggedDTensor) and torch.equal(view.full_tensor(), full.view(shape))
        assert view.to_local().data_ptr() == x.to_local().data_ptr()
    assert x.flatten(1).shape == (6, 20) and x.unsqueeze(0).squeeze(0).shape == x.shape
    x.view(-1).mul_(2)
    assert torch.equal(x.full_tensor(), full * 2)


def views_of_rows() -> int:
    """Rows and runs of rows, and what is written to them, against plain tensors, for any cut."""
    mesh, generator, compared = cpu_mesh(), torch.Generator().manual_seed(3), 0
    views: dict[str, Callable[[torch.Tensor], Any]] = {
        "row": lambda t: t[2],
        "last row": lambda t: t[-1],
        "part of a row": lambda t: t[1, 2:4],
        "one element": lambda t: t.view(-1)[7:8],
        "rows": lambda t: t[1:5],
        "no rows": lambda t: t[2:2],
        "chunks": lambda t: t.chunk(4),
        "parts": lambda t: t.split([1, 0, 5]),
        "all rows": lambda t: t.unbind(0),
        "rows in other dims": lambda t: t[2:4].view(4, -1),
        "inference": lambda t: t.reshape(2, -1).narrow(0, 1, 1),
    }
    for number in range(12):
        pieces = torch.randint(0, 3, (3,), generator=generator)
        pieces[number % 3] += 1  # some rank holds something
        units = RaggedShard((0, 1), tuple(pieces.tolist()))
        full = plain((6, 4, 5)[: 2 + number % 2], number)
        numels = [int(n) * full.numel() // units.units.total for n in pieces[:-1]]
        cut = RaggedShard.from_piece_numels(full.shape, [*numels, full.numel() - sum(numels)])
        for name, view in views.items():
            x, want = distribute_tensor(full, mesh, [cut]), full.clone()
            with torch.inference_mode(
                name == "inference"
            ):  # torch takes nothing apart there before it comes to us
                for a, b in zip(listed(view(x)), listed(view(want)), strict=True):
                    assert isinstance(a, RaggedDTensor) and torch.equal(a.full_tensor(), b), name
                    a.mul_(2).add_(1)
                    b.mul_(2).add_(1)
                    compared += 1
            assert torch.equal(x.full_tensor(), want), name
    return compared


def listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def users_code() -> list[str]:
    """What init code and training loops do to parameters, on plain and on sharded ones."""
    mesh, cut = cpu_mesh(), RaggedShard((0, 1), (7, 0, 13))
    full = plain((4, 5))
    codes: dict[str, Callable[[torch.Tensor], Any]] = {
        "padding row": lambda t: t.data[1].zero_(),
        "last rows": lambda t: t[-2:].fill_(3.0),
        "row by index": lambda t: t.__setitem__(2, 0.5),
        "triangle": lambda t: t.triu_(1),
        "constant columns": lambda t: t.index_fill_(1, torch.tensor(2), 9.0),
        "scale of rows": lambda t: t.div_(t.abs().amax(1, keepdim=True)),
        "scale of columns": lambda t: t.div_(t.abs().amax(0)),
        "weight norm": lambda t: t.mul_(1 / torch.norm_except_dim(t, 2, 0)),
        "spectral norm": lambda t: t.div_(torch.linalg.matrix_norm(t, 2)),
        "centered rows": lambda t: t.sub_(t.mean(1, keepdim=True)).div_(t.std(1, keepdim=True)),
        "gram matrix": lambda t: t.mul_(t.mm(t.new_ones((5, 4))).diagonal().sum()),
        "softmax": lambda t: t.copy_(t.softmax(0)),
        "sorted": lambda t: t.copy_(t.sort(dim=1).values),
        "ranks of rows": lambda t: t.mul_(t.argmax(1, keepdim=True)),
        "cumulative": lambda t: t.copy_(t.cumsum(0)),
    }
    for name, code in codes.items():
        x = torch.nn.Parameter(distribute_tensor(full, mesh, [cut]))
        want = torch.nn.Parameter(full.clone())
        with torch.no_grad():
            code(x)
            code(want)
        torch.testing.assert_close(x.full_tensor(), want, msg=lambda text, name=name: f"{name}: {text}")
        assert (want - full).norm() > 0, name
    return list(codes)


def test_a_view_is_the_same_flat_range() -> None:
    """A view of any shape is the same flat range in other dims; rows are a range of their own."""
    run_ranks(3, shapes_of_views)
    assert run_ranks(3, views_of_rows) == [12 * (1 + 1 + 1 + 1 + 1 + 1 + 3 + 3 + 6 + 1 + 1)] * 3


def test_what_users_do_to_parameters() -> None:
    """Initializations and rescalings give the values they give on plain tensors."""
    assert len(run_ranks(3, users_code)[0]) == 15
