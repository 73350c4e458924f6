"""Comparisons of tests and tools fail where a value is NaN.

Whatever is asked of a NaN is false: ``nan > 1e-5``, ``nan == nan``, and so ``max(0.0, nan)`` is 0.0 and
``not nan > 1e-5`` holds. A comparison that is to find wrong values must be one that a NaN fails.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
FILES = [file for folder in ("tests", "tools", "examples") for file in sorted((ROOT / folder).rglob("*.py"))]
SIZES = {"abs", "norm", "item", "vector_norm"}  # what turns values into a number that is held against a bound
EQUALITIES = {"torch.equal", "torch.allclose", "torch.isclose", "same_bytes", "math.isclose"}
DROP_NAN = {"nan_to_num", "nansum", "nanmean", "nanmax", "nanmin"}
# Where NaN may equal NaN, or nothing is compared: function -> why.
NAN_IS_MEANT = {
    "tests/support/optim_cases.py:assert_same": "what the caller has spoiled",
    "tests/support/dtensor_conformance.py:assert_same": "what the caller has spoiled",
    "tests/vescale_fsdp/optim/test_adamw8bit.py:test_nan_and_inf_gradients_spoil_what_they_spoil_in_adamw": "three elements",  # noqa: E501
    "tests/vescale_fsdp/optim/test_compiled.py:test_a_step_is_compiled_once": "one gradient is infinite",
    "tests/vescale_fsdp/optim/test_compiled.py:test_few_kernels_near_eager": "likewise",
    "tests/vescale_fsdp/optim/test_compiled.py:test_steps_are_eager_where_nothing_compiles": "likewise",
    "tools/bench/rows.py:_text": "how a number is written",
    "tests/vescale_fsdp/dtensor/test_op_db.py:_close": "torch's operators make NaN; else skipped",
}


def blind(text: str) -> Iterator[tuple[str, str]]:
    """(function, expression) of every comparison that a NaN passes."""
    tree = ast.parse(text)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if _is_blind(node, parents):
            yield _function(node, parents), ast.unparse(node)


def _is_blind(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    if isinstance(node, ast.keyword) and node.arg == "equal_nan":
        return ast.unparse(node.value) != "False"
    if isinstance(node, ast.Attribute) and node.attr in DROP_NAN:
        return True
    if isinstance(node, ast.Call) and _called(node) in ("max", "min", "sorted"):
        return any(_is_size(part) for argument in node.args for part in ast.walk(argument))
    if isinstance(node, ast.Call) and _called(node) in EQUALITIES:
        return _is_denied(node, parents) and not _is_condition(parents[node], parents)
    if isinstance(node, ast.Compare) and any(map(_is_order, node.ops)):
        if _is_denied(node, parents):
            return not _is_condition(parents[node], parents)
        return _is_condition(node, parents) and any(_is_size(part) for part in ast.walk(node))
    return False


def _is_order(op: ast.cmpop) -> bool:
    return isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE)


def _is_size(node: ast.AST) -> bool:
    """Whether an expression measures values."""
    match node:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name in SIZES
    return False


def _called(call: ast.Call) -> str:
    """The name that a call has: ``max``, ``torch.equal``; empty for other expressions."""
    match call.func:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=ast.Name(id=module), attr=name):
            return f"{module}.{name}"
    return ""


def _is_denied(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    parent = parents[node]
    return isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not)


def _is_condition(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether what is found to be so is named or refused, as in ``[n for n in names if error(n) > 1e-5] == []``."""
    parent = parents[node]
    while isinstance(parent, ast.BoolOp):
        node, parent = parent, parents[parent]
    if isinstance(parent, ast.comprehension):
        return node in parent.ifs
    return isinstance(parent, ast.If | ast.IfExp) and node is parent.test


def _function(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> str:
    while node in parents and not isinstance(node, ast.FunctionDef):
        node = parents[node]
    return node.name if isinstance(node, ast.FunctionDef) else ""


def test_no_comparison_passes_nan() -> None:
    """Write ``assert all(d <= most for d in differences)``, ``(a - b).norm() > 0``, ``if not d <= most: raise``."""
    found = {
        f"{file.relative_to(ROOT).as_posix()}:{function}": expression
        for file in FILES
        if file != Path(__file__)
        for function, expression in blind(file.read_text())
    }

    assert FILES
    assert {where: what for where, what in found.items() if where not in NAN_IS_MEANT} == {}
    assert set(NAN_IS_MEANT) == set(found)


BLIND = (
    "assert_close(a, b, equal_nan=True)",
    "assert max(abs(a - b) for a, b in pairs) < 1e-6",
    "worst = max(worst, (a - b).norm().item())",
    "assert not (worst > 1e-6)",
    "assert not torch.allclose(a, b)",
    "assert any(not torch.equal(a, b) for a, b in pairs)",
    "assert [n for n in names if (a[n] - b[n]).abs().max() > 1e-6] == []",
    "if abs(a - b) > 1e-6:\n    raise ValueError",
    "assert same_bytes(a.nan_to_num(), b)",
)
SEEING = (
    "assert all(abs(a - b) < 1e-6 for a, b in pairs)",
    "assert (a - b).abs().max() > 1e-3",
    "assert [n for n in names if not torch.equal(a[n], b[n])] == []",
    "if not torch.allclose(a, b):\n    raise ValueError",
    "if b is None or not torch.allclose(a, b):\n    raise ValueError",
    "if not abs(a - b) <= 1e-6:\n    raise ValueError",
    "assert max(peak, len(held)) < 3",
    "assert_close(a, b, equal_nan=False)",
)


def test_what_counts_as_blind() -> None:
    """Each of the first holds for NaN; each of the others fails where a value is NaN, or has none."""
    assert [text for text in BLIND if len(list(blind(text))) != 1] == []
    assert [text for text in SEEING if list(blind(text))] == []
