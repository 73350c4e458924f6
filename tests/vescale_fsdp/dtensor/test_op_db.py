"""torch's own operator database, walked: every sample on ragged tensors is right or refused, never wrong.

Refused is only what torch's own ``Shard(0)`` does not compute either, and the three exceptions of `refusal`.

Of an operator with hundreds of samples some are taken, spread evenly: two by `make test`, forty by the part
"numerics"; ``OP_DB=all`` takes all (`make test-faults`).
Each sample is run twice: on plain tensors, and with every tensor of the main shape made ragged and every other
one a replicated DTensor. The cut alternates: inside a row, between rows, everything on one of the two ranks.
In-place and ``out=`` forms are run too, where the operator has them.
"""

from __future__ import annotations

import os
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor

from tests.support.distributed import cpu_mesh, run_ranks
from vescale_fsdp import RaggedShard
from vescale_fsdp.dtensor.operators import dispatch_table as operators
from vescale_fsdp.dtensor.operators import elementwise
from vescale_fsdp.dtensor.operators.arguments import SAME_SHAPE
from vescale_fsdp.dtensor.operators.gathered_views import READING
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor, Rule, distribute_tensor, set_rules
from vescale_fsdp.errors import UnsupportedOpError
from vescale_fsdp.layout.geometry import numel_of
from vescale_fsdp.torch_private import pytree

TAKES_ALL = os.environ.get("OP_DB") == "all"
CORE_SAMPLES, MOST_SAMPLES = 1, 40

# Values that nobody can predict: memory that was not written, and random numbers of another generator.
UNPREDICTABLE = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "normal",
    "bernoulli",
    "exponential",
    "cauchy",
    "geometric",
    "log_normal",
    "uniform",
    "rand_like",
    "randn_like",
    "randint_like",
    "randn",
    "randint",
    "multinomial",
    "nn.functional.alpha_dropout",
    "nn.functional.dropout",
    "nn.functional.rrelu",
}


def cuts_of(shape: torch.Size) -> list[RaggedShard]:
    """Inside a row; between rows; all on the second rank."""
    numel = shape.numel()
    row = numel_of(shape[1:])
    inside, between = max(1, numel * 2 // 5), (shape[0] + 1) // 2 * row
    return [
        RaggedShard.from_piece_numels(shape, pair)
        for pair in ((inside, numel - inside), (between, numel - between), (0, numel))
    ]


def distributed(tree: Any, main: torch.Size | None, cut: RaggedShard, mesh: DeviceMesh) -> Any:
    """Arguments with ragged tensors where they have the main shape, and replicated ones elsewhere."""

    def convert(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.ndim == 0:
            return value
        full = value.detach()
        if value.shape == main:
            return distribute_tensor(full, mesh, [cut])
        return DTensor.from_local(full.clone(), mesh, [Replicate()], run_check=False)

    return pytree.tree_map(convert, tree)


def in_shards(tree: Any, main: torch.Size | None, mesh: DeviceMesh) -> Any:
    """The same with torch's own Shard(0) in place of ragged tensors."""

    def convert(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.ndim == 0:
            return value
        full = value.detach().clone()
        if value.shape == main:
            return torch_distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)
        return DTensor.from_local(full, mesh, [Replicate()], run_check=False)

    return pytree.tree_map(convert, tree)


# Refusals of what Shard(0) computes, by what the error expected. torch deprecates `out=` tensors that it has to resize:
# its DTensor then has two shapes.
KNOWN = {READING: "refused: a write to a view", SAME_SHAPE: "refused: out= of another shape"}
# In place, these change the shape of a tensor.
RESHAPING = ("squeeze", "t")


def refusal(
    op: Any, call: Callable[..., Any], tree: Any, main: torch.Size, mesh: DeviceMesh, error: Exception
) -> str:
    """A refusal's verdict: whether torch's Shard(0) computes the sample, and rightly."""
    if isinstance(error, UnsupportedOpError) and error.expected in KNOWN:
        return KNOWN[str(error.expected)]
    if (
        isinstance(error, UnsupportedOpError)
        and f"aten.{op.name}_." in str(error.got)
        and op.name in RESHAPING
    ):
        return "refused"
    try:
        want = _call(call, _copies(tree))
        got = _call(call, in_shards(tree, main, mesh))
        is_right = same(got, want, op.name not in UNPREDICTABLE) == ""
    except Exception:  # noqa: BLE001  torch refuses it too, in its own ways
        return "refused"
    return "refused, but Shard(0) computes it" if is_right else "refused"


def same(got: Any, want: Any, compare_values: bool) -> str:
    """What is wrong with a result, or nothing."""
    got_leaves, want_leaves = pytree.tree_leaves(got), pytree.tree_leaves(want)
    if len(got_leaves) != len(want_leaves):
        return f"{len(got_leaves)} results, not {len(want_leaves)}"
    for a, b in zip(got_leaves, want_leaves, strict=True):
        if not isinstance(b, torch.Tensor):
            if a != b:
                return f"{a} is not {b}"
            continue
        found, wanted = a, b.detach()
        if isinstance(a, DTensor) and not isinstance(a, RaggedDTensor):
            found = a.full_tensor()
        if found.shape != b.shape or found.dtype != b.dtype:
            return f"{found.dtype} {tuple(found.shape)}, not {b.dtype} {tuple(b.shape)}"
        if isinstance(a, RaggedDTensor):  # each rank its own piece, without asking the other for its
            start, stop = a.piece
            found, wanted = a.to_local().detach().reshape(-1), wanted.reshape(-1)[start:stop]
        if found.shape != wanted.shape or found.dtype != wanted.dtype:
            return f"a local {found.dtype} {tuple(found.shape)}, not {wanted.dtype} {tuple(wanted.shape)}"
        if compare_values and not _close(found, wanted):
            return "other values"
        if compare_values and wanted.is_floating_point() and wanted.numel() and wanted.isnan().all():
            return "skipped: NaN alone, which proves nothing"
    return ""


def _close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    # Equal bits, as nearly all are, are seen in a tenth of the time; torch 2.13 does not compare complex32 so.
    same_bits = found.dtype != torch.complex32 and torch.equal(found, wanted)
    return same_bits or torch.allclose(found, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)


def forms(op: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The ways to call an operator, each taking fresh arguments and returning all it changed."""
    yield "function", op.op
    if op.inplace_variant is not None:
        yield "in place", lambda x, *args, **kwargs: [op.inplace_variant(x, *args, **kwargs), x]
    if op.supports_out:

        def with_out(x: Any, *args: Any, **kwargs: Any) -> Any:
            target = torch.zeros_like(x)
            return [op.op(x, *args, out=target, **kwargs), target]

        yield "out=", with_out


def _to_cut(sample: Any) -> torch.Tensor | None:
    """The tensor of a sample that is to be cut; None if it has no element, no dim, or another layout."""
    first = next((t for t in pytree.tree_leaves(sample.input) if isinstance(t, torch.Tensor)), None)
    cannot = first is None or first.ndim == 0 or first.numel() == 0 or first.layout != torch.strided
    return None if cannot else first


def run_sample(op: Any, sample: Any, number: int, mesh: DeviceMesh) -> Iterator[tuple[str, str]]:
    """(form, verdict) of one sample: right, refused, skipped, or what is wrong."""
    first = _to_cut(sample)
    assert first is not None
    cuts = cuts_of(first.shape)
    tree = (sample.input, *sample.args), sample.kwargs
    cut = cuts[number % len(cuts)]
    for form, call in forms(op):
        try:
            got = _call(call, distributed(tree, first.shape, cut, mesh))
        except NotImplementedError as error:
            yield form, refusal(op, call, tree, first.shape, mesh, error)
            continue
        except Exception as error:
            if "in-place operations that require placement changes" in str(error):
                yield form, "refused"  # by torch 2.11's own DTensor, which our reduction handed over to
            elif _fails(call, _copies(tree)):
                yield form, "skipped: fails on plain tensors"
            elif _fails(call, distributed(tree, None, cut, mesh), type(error)):
                yield form, "skipped: fails on torch's own DTensors"
            else:
                raise
            continue
        try:
            want = _call(call, _copies(tree))
        except Exception:  # noqa: BLE001  not ours to judge
            yield form, "skipped: fails on plain tensors"
            continue
        is_predictable = op.name not in UNPREDICTABLE and not sample.kwargs.get("dropout_p")
        yield form, same(got, want, is_predictable) or "right"


def _copies(tree: Any) -> Any:
    return pytree.tree_map(lambda v: v.detach().clone() if isinstance(v, torch.Tensor) else v, tree)


def _call(call: Callable[..., Any], tree: Any) -> Any:
    args, kwargs = tree
    return call(*args, **kwargs)


def _fails(call: Callable[..., Any], tree: Any, how: type[Exception] = Exception) -> bool:
    try:
        _call(call, tree)
    except how:
        return True
    return False


def samples_of(op: Any, most: int) -> Iterator[Any]:
    """The same on both ranks, whatever random numbers they draw in between. Not by ``op.sample_inputs``, which looks
    through the call stack at every sample for the test that it serves."""
    random.seed(0)
    numpy.random.seed(0)
    torch.default_generator.manual_seed(
        0
    )  # not torch.manual_seed, which notes a stack trace for each kind of device
    samples = list(op.sample_inputs_func(op, "cpu", torch.float32, False))
    samples = [sample for sample in samples if _to_cut(sample) is not None]
    yield from samples if TAKES_ALL else samples[:: len(samples) // most + 1]


def walk(only: tuple[str, ...] | None, most: int) -> tuple[Counter[str], list[str], set[str]]:
    """Verdicts over the database, or over the named operators; what was wrong; the names of what was right."""
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db  # seconds; only here

    mesh = cpu_mesh()
    verdicts: Counter[str] = Counter()
    wrong: list[str] = []
    right: set[str] = set()
    ops = [op for op in op_db if torch.float32 in op.supported_dtypes("cpu")]
    for op in ops if only is None else [op for op in ops if op.name in only]:
        for number, sample in enumerate(samples_of(op, most)):
            try:
                for form, verdict in run_sample(op, sample, number, mesh):
                    verdicts[verdict] += 1
                    if verdict == "right":
                        right.add(op.name)
                    elif verdict not in REFUSED and not verdict.startswith("skipped"):
                        wrong.append(f"{op.name} {form} sample {number}: {verdict}")
            except Exception as error:  # noqa: BLE001  any other error than a refusal is a finding
                wrong.append(f"{op.name} sample {number}: {type(error).__name__} {str(error)[:200]}")
    return verdicts, wrong, right


def walk_with_a_wrong_rule() -> list[str]:
    """What the walk finds when cumsum, which looks along a dim, is taken for elementwise."""
    rule_of = operators.rule_of

    def careless(func: torch._ops.OpOverload) -> Rule:
        return elementwise.elementwise if func is torch.ops.aten.cumsum.default else rule_of(func)

    set_rules(careless)
    try:
        return walk(("cumsum",), MOST_SAMPLES)[1]
    finally:
        set_rules(rule_of)


REFUSED = ("refused", *KNOWN.values())

ESSENTIAL = {
    "abs",
    "add",
    "addcdiv",
    "addcmul",
    "all",
    "amax",
    "any",
    "argmax",
    "clamp",
    "div",
    "eq",
    "exp",
    "isfinite",
    "lerp",
    "linalg.vector_norm",
    "log",
    "masked_fill",
    "max",
    "maximum",
    "mean",
    "mul",
    "norm",
    "pow",
    "prod",
    "sign",
    "sqrt",
    "std",
    "sub",
    "sum",
    "to",
    "var",
    "where",
    "zeros_like",
}


@pytest.mark.parametrize(
    ("most", "least_right", "least_refused"),
    [
        (CORE_SAMPLES, 900, 80),
        pytest.param(MOST_SAMPLES, 6000, 600, marks=pytest.mark.part("numerics")),
    ],
)
def test_every_sample_is_right_or_refused(most: int, least_right: int, least_refused: int) -> None:
    """No sample of any operator gives another value than on plain tensors, on either rank."""
    for verdicts, wrong, right in run_ranks(2, walk, None, most, timeout_s=1000.0):
        assert wrong == []
        assert right >= ESSENTIAL
        num_refused = sum(verdicts[each] for each in REFUSED)
        assert verdicts["right"] > least_right and num_refused > least_refused, verdicts


def test_a_wrong_rule_is_found() -> None:
    """The walk can fail: an operator that is not elementwise, run as if it were, is reported."""
    assert all(run_ranks(2, walk_with_a_wrong_rule))
