"""The sites of checkpoint/ and conversion/ whose errors carry a remedy, found in their source."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Site(NamedTuple):
    """A call that writes a remedy.

    Args:
        name: file and qualified function, such as "checkpoint/load.py::_cannot_fill"; further sites of one function
            end in [1], [2], ..
        lines: first and last line of the call.
        text: the source of the remedy.
    """

    name: str
    lines: tuple[int, int]
    text: str


@cache
def sites() -> dict[str, Site]:
    """Return all sites, by name."""
    files = sorted(path for folder in ("checkpoint", "conversion") for path in (ROOT / folder).rglob("*.py"))
    return {site.name: site for file in files for site in _sites_in(file)}


def site_of(frame: FrameType | None) -> str | None:
    """Return the name of the nearest site in a stack, which builds the error; None if there is none."""
    while frame is not None:
        file = Path(frame.f_code.co_filename).resolve()
        in_line = [
            site
            for site in (_sites_in(file) if file.is_relative_to(ROOT) else ())
            if site.lines[0] <= frame.f_lineno <= site.lines[1]
        ]
        if in_line:  # the innermost call
            return min(in_line, key=lambda site: site.lines[1] - site.lines[0]).name
        frame = frame.f_back
    return None


@cache
def _sites_in(file: Path) -> tuple[Site, ...]:
    if file.relative_to(ROOT).parts[0] not in ("checkpoint", "conversion"):
        return ()
    tree = ast.parse(file.read_text())
    # Functions that pass a remedy on: their callers are the sites, if they are in the same file.
    helpers = {
        (is_method := names[0] == "self", node.name): names.index("todo") - is_method
        for node in ast.walk(tree)
        if isinstance(node, _Function) and "todo" in (names := [each.arg for each in node.args.args])
    }
    calls = list(_calls(tree, ""))
    called = {_called(call) for call, _ in calls} & helpers.keys()
    found = []
    numbers: Counter[str] = Counter()
    for call, function in calls:
        remedy = _remedy(call, helpers)
        *owners, short = function.split(".")
        is_passed_on = (
            isinstance(remedy, ast.Name) and remedy.id == "todo" and (bool(owners), short) in called
        )
        if remedy is None or is_passed_on:
            continue
        name = f"{file.relative_to(ROOT)}::{function}"
        end = f"[{numbers[name]}]" if numbers[name] else ""
        numbers[name] += 1
        lines = (call.lineno, call.end_lineno or call.lineno)
        found.append(Site(f"{name}{end}", lines, ast.unparse(remedy)))
    return tuple(found)


def _called(call: ast.Call) -> tuple[bool, str] | None:
    """Return the function of this file that a call may mean: whether it is a method, and its name."""
    match call.func:
        case ast.Name(id=name):
            return False, name
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            return True, name
    return None


def _remedy(call: ast.Call, helpers: dict[tuple[bool, str], int]) -> ast.expr | None:
    """Return the argument of a call that is a remedy; a constant "default" if a helper has one."""
    for keyword in call.keywords:
        if keyword.arg == "todo":
            return keyword.value
    called = _called(call)
    if called not in helpers:
        return None
    at = helpers[called]
    return call.args[at] if at < len(call.args) else ast.Constant("default")


def _calls(node: ast.AST, function: str) -> Iterator[tuple[ast.Call, str]]:
    """Yield all calls below a node, in the order of the source, with the names of the functions that contain them."""
    for child in ast.iter_child_nodes(node):
        inner = function
        if isinstance(child, _Function | ast.ClassDef):
            inner = f"{function}.{child.name}".removeprefix(".")
        if isinstance(child, ast.Call):
            yield child, function
        yield from _calls(child, inner)
