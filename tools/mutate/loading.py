"""How processes of a test run load the product: with one mutant applied, or with marks that record what is executed.

`running` copies this file to a folder of its own as ``sitecustomize.py``, which Python imports when it starts: ranks
and subprocesses load the product through it too. It imports nothing of this project. The environment says what to do:

MUTATE_ROOT: the checkout, an absolute path without links.
MUTATE_MUTANT: a JSON object with ``file`` (relative to the checkout), ``offset`` (characters), ``before``, ``after``.
MUTATE_HITS: a folder. Every block of statements that runs is noted there once per test (see `Marks`).
MUTATE_FILES: a JSON list of the files, relative to the checkout, that get marks; all if it is not set.
MUTATE_STATEMENTS: set if every statement is noted, instead of every block.
"""

import ast
import builtins
import json
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType
from typing import Any

ROOT = os.environ.get("MUTATE_ROOT", "")
HITS = os.environ.get("MUTATE_HITS")
FILES: list[str] | None = json.loads(os.environ.get("MUTATE_FILES", "null"))
STATEMENTS = "MUTATE_STATEMENTS" in os.environ
MUTANT: dict[str, Any] | None = json.loads(os.environ.get("MUTATE_MUTANT", "null"))
PRODUCT = tuple(os.path.join(ROOT, name) + os.sep for name in ("checkpoint", "conversion", "vescale_fsdp"))


class Marks:
    """Writes ``file line test`` to ``WORKER.hits`` where a block that begins at this line runs first in a test.

    The test is the number that the worker of the test run keeps in ``WORKER.test`` (see `plugin`). The environment of
    all its processes has the worker's name.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._pid = self._last = -1
        self._seen: set[tuple[str, int]] = set()

    def _open(self) -> None:
        worker = os.path.join(self._folder, os.environ.get("PYTEST_XDIST_WORKER", "main"))
        self._test = os.open(worker + ".test", os.O_RDWR | os.O_CREAT, 0o644)
        self._hits = os.open(worker + ".hits", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._pid = os.getpid()

    def __call__(self, file: str, line: int) -> None:
        """Note that the block of ``file`` that begins at ``line`` runs."""
        if self._pid != os.getpid():  # after a fork: the child may have closed the parent's files
            self._open()
        test = int.from_bytes(os.pread(self._test, 8, 0), "little")
        if test != self._last:
            self._seen.clear()
            self._last = test
        if (file, line) not in self._seen:
            self._seen.add((file, line))
            os.write(self._hits, f"{file} {line} {test}\n".encode())


def blocks_of(tree: ast.AST) -> list[list[ast.stmt]]:
    """Every block of statements within functions: bodies, branches, handlers."""
    blocks = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef):
            continue
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)  # a lambda's body is an expression
            if isinstance(block, list) and block:
                blocks.append(block)
    return blocks


def with_marks(file: str, text: str, statements: bool = False) -> ast.Module:
    """The file's tree, where every block begins with a call of ``__mark__``.

    Args:
        file: name in the marks.
        text: source.
        statements: mark every statement within functions, with its first line.
    """
    tree = ast.parse(text)
    for block in blocks_of(tree):
        marks = [_mark(file, statement.lineno) for statement in block]
        is_docstring = isinstance(block[0], ast.Expr) and isinstance(block[0].value, ast.Constant)
        if statements:
            pairs = [node for pair in zip(marks, block, strict=True) for node in pair]
            block[:] = [pairs[1], pairs[0], *pairs[2:]] if is_docstring else pairs
        else:
            block.insert(1 if is_docstring else 0, marks[0])
    return tree


def _mark(file: str, line: int) -> ast.stmt:
    """The call of ``__mark__`` for a line."""
    mark = ast.parse(f"__mark__({file!r}, {line})").body[0]
    for part in ast.walk(mark):
        if isinstance(part, ast.expr | ast.stmt):
            part.lineno = part.end_lineno = line
    return mark


class Loader(SourceFileLoader):
    """Compiles a changed text; reads and writes no compiled files."""

    def get_code(self, fullname: str) -> CodeType:
        """The module's code, with the mutant or the marks."""
        path = os.path.realpath(self.path)
        file, text = os.path.relpath(path, ROOT), self.get_data(path).decode()
        if MUTANT is not None and file == MUTANT["file"]:
            end = MUTANT["offset"] + len(MUTANT["before"])
            if text[MUTANT["offset"] : end] != MUTANT["before"]:
                raise SystemExit(f"{file} is not the text that the mutant was drawn from.")
            text = text[: MUTANT["offset"]] + MUTANT["after"] + text[end:]
        marked = text if HITS is None else with_marks(file, text, STATEMENTS)
        return compile(marked, self.path, "exec", dont_inherit=True)


class Finder:
    """Finds the product's modules that are changed."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The module's spec with `Loader`, or None: another finder finds it."""
        if name.partition(".")[0] != "vescale_fsdp":
            return None
        spec = PathFinder.find_spec(name, path, target)
        origin = os.path.realpath(spec.origin) if spec is not None and spec.origin else ""
        file = os.path.relpath(origin, ROOT)
        has_marks = HITS is not None and (FILES is None or file in FILES)
        is_changed = has_marks or (MUTANT is not None and file == MUTANT["file"])
        if spec is not None and is_changed and origin.startswith(PRODUCT) and origin.endswith(".py"):
            spec.loader = Loader(name, spec.origin or "")
        return spec


MARKS = Marks(HITS) if HITS is not None else None
if MARKS is not None:
    builtins.__mark__ = MARKS  # type: ignore[attr-defined]
if ROOT:  # not where the tool itself imports this file
    sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
