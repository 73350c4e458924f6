"""The error tree and the four parts of a message."""

from __future__ import annotations

import ast
import pickle
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache

import pytest

from tests.house.test_names import FILES
from vescale_fsdp import errors
from vescale_fsdp.errors import VescaleError, explain

BUILTINS = {
    "ArgumentError": ValueError,
    "CheckpointError": RuntimeError,
    "CollectiveError": RuntimeError,
    "ConversionError": RuntimeError,
    "CorruptCheckpointError": RuntimeError,
    "DamagedLoadError": RuntimeError,
    "LayoutError": ValueError,
    "LifecycleError": RuntimeError,
    "MisuseError": AssertionError,
    "NoCheckpointError": RuntimeError,
    "PartialLoadError": RuntimeError,
    "PlacementError": ValueError,
    "StorageError": RuntimeError,
    "TransferError": RuntimeError,
    "UnknownNameError": KeyError,
    "UnsupportedOpError": NotImplementedError,
}


def test_tree_is_complete() -> None:
    """Every public error but the base is in the table above."""
    classes = {name for name in vars(errors) if name.endswith("Error")} - {"VescaleError"}

    assert set(BUILTINS) == classes


def test_each_error_is_also_a_builtin() -> None:
    """Callers may catch ours by the base or by the builtin kind they would expect."""
    kinds = {name: getattr(errors, name) for name in BUILTINS}

    assert [
        name for name, kind in kinds.items() if not issubclass(kind, VescaleError) or not kind.__doc__
    ] == []
    assert [name for name, kind in kinds.items() if not issubclass(kind, BUILTINS[name])] == []


def test_corrupt_is_a_checkpoint_error() -> None:
    """Who handles unreadable checkpoints handles broken ones too."""
    assert issubclass(errors.CorruptCheckpointError, errors.CheckpointError)


def test_explain_has_four_parts_in_order() -> None:
    """Problem, expected, got, where, what to do: one line each."""
    text = explain("It broke.", expected="3", got=4, where="here", todo="mend it")

    assert text == "It broke.\n  expected: 3\n  got: 4\n  where: here\n  what to do: mend it"


def test_explain_leaves_out_what_is_unknown() -> None:
    """Place and cure are optional; falsy values that were got are still shown."""
    assert explain("It broke.", expected="3", got=0) == "It broke.\n  expected: 3\n  got: 0"


def test_parts_are_attributes() -> None:
    """Also in another process; values that may not pickle are kept as the message shows them."""
    kinds = [
        getattr(errors, name) for name in BUILTINS if name not in ("PartialLoadError", "DamagedLoadError")
    ]
    assert kinds
    for kind in kinds:
        raised = kind("It broke.", expected=3, got=lambda: None, where="here", todo="mend it")
        for error in (raised, pickle.loads(pickle.dumps(raised))):
            assert (error.problem, error.expected, error.where) == ("It broke.", 3, "here")
            assert error.todo == "mend it" and str(error.got) in str(error)
        assert str(raised).startswith("It broke.\n")  # also where the builtin would show its repr
    assert kinds[0]("It broke.").got is None


def test_arguments_are_refused_with_parts() -> None:
    """No builtin error is raised with a text of four parts: ours has them as attributes."""
    found = []
    for file in FILES:
        source = file.read_text()
        for node in ast.walk(ast.parse(source)) if "(explain" in source else ():
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                text = ast.unparse(node.exc)
                if text.startswith(("ValueError(explain", "TypeError(explain", "AttributeError(explain")):
                    found.append(f"{file}:{node.lineno}")

    assert not found


def _signatures(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (function or class, argument) of all functions, and of all classes by __init__ or by annotated fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from ((node.name, each.arg) for each in ast.walk(node.args) if isinstance(each, ast.arg))
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                    yield node.name, inner.target.id
                elif isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
                    yield from ((node.name, each.arg) for each in inner.args.args + inner.args.kwonlyargs)


@cache
def _arguments() -> dict[str, set[str]]:
    """Return function or class -> its arguments; "" -> all arguments there are."""
    known: defaultdict[str, set[str]] = defaultdict(set, Trainer={"plugins"})  # Lightning's
    for file in FILES:
        for owner, argument in _signatures(ast.parse(file.read_text())):
            known[owner].add(argument)
            known[""].add(argument)
    return known


def _unnamed(source: str, known: dict[str, set[str]]) -> list[int]:
    """Return the lines that make an ArgumentError whose ``where`` has no argument and no value of the run."""
    found = []
    for node in ast.walk(ast.parse(source)) if "ArgumentError" in source else ():
        if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith("ArgumentError"):
            continue
        where = next(
            (keyword.value for keyword in node.keywords if keyword.arg == "where"), ast.Constant(None)
        )
        if not isinstance(where, ast.Constant):
            continue  # such as a path, a parameter or a rank
        # call(argument=.., ..), or argument=.. of several calls
        parts = re.fullmatch(r"(?:[\w.]*?(\w+)\()?((?:\w+=\.\.(?:, )?)+)\)?", str(where.value))
        names = re.findall(r"(\w+)=", parts[2]) if parts else []
        if parts is None or not known.get(parts[1] or "", set()).issuperset(names):
            found.append(node.lineno)
    return found


def test_refused_arguments_are_named() -> None:
    """Every ArgumentError says in ``where`` which argument of which call it refuses, and both exist."""
    known = _arguments()
    made = sum(file.read_text().count(" ArgumentError(") for file in FILES)
    assert made and {str(file): lines for file in FILES if (lines := _unnamed(file.read_text(), known))} == {}


@pytest.mark.parametrize(
    ("where", "is_named"),
    [
        ("", False),
        (", where=None", False),
        (", where='load'", False),
        (", where='the argument `read`'", False),
        (", where='load(reads=..)'", False),
        (", where='loads(read=..)'", False),
        (", where='load(read=.., verify=..)'", True),
        (", where='CheckpointManager.restore(state=..)'", True),
        (", where='state=..'", True),
        (", where=str(path)", True),
    ],
)
def test_unnamed_arguments_are_seen(where: str, is_named: bool) -> None:
    """The check above."""
    assert _unnamed(f"raise errors.ArgumentError('No.'{where})", _arguments()) == ([] if is_named else [1])
