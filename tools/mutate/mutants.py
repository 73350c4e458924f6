"""Small defects of the product's code, found in its syntax trees and drawn by a seed."""

from __future__ import annotations

import ast
import random
from pathlib import Path
from typing import NamedTuple

PRODUCT = ("checkpoint", "conversion", "vescale_fsdp")

# Operator -> how it is written, and what it becomes.
_COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_ARITHMETIC = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "+"),
    ast.LShift: ("<<", ">>"),
}


class Mutant(NamedTuple):
    """One change: ``before``, at an offset of a file in characters, becomes ``after``."""

    file: str  # relative to the checkout
    line: int
    offset: int
    before: str
    after: str
    kind: str
    function: str = ""  # names of the classes and functions around it, joined by dots
    statement: str = ""  # the innermost statement, of a compound one its header, as `ast.unparse` writes it


class _Finder(ast.NodeVisitor):
    """All mutants of one file. Messages, annotations, decorators and docstrings are never changed."""

    def __init__(self, file: str, text: str) -> None:
        self.mutants: list[Mutant] = []
        self._file, self._text = file, text
        self._lines = text.splitlines(keepends=True)
        self._names: tuple[str, ...] = ()
        self._statement = ""

    def visit(self, node: ast.AST) -> None:
        """Visit a node; note which statement and which functions the mutants in it are in."""
        outer = self._names, self._statement
        if isinstance(node, ast.stmt):
            self._statement = ast.unparse(node).partition("\n")[0]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self._names = (*self._names, node.name)
        super().visit(node)
        self._names, self._statement = outer

    def _offset(self, line: int, column: int) -> int:
        """An offset in characters of a line and a column of the syntax tree, which counts UTF-8 bytes."""
        return sum(map(len, self._lines[: line - 1])) + len(self._lines[line - 1].encode()[:column].decode())

    def _begin(self, node: ast.expr | ast.stmt) -> int:
        return self._offset(node.lineno, node.col_offset)

    def _end(self, node: ast.expr | ast.stmt) -> int:
        return self._offset(node.end_lineno or 0, node.end_col_offset or 0)

    def _source(self, node: ast.expr) -> str:
        return self._text[self._begin(node) : self._end(node)]

    def _add(self, node: ast.expr | ast.stmt, kind: str, after: str) -> None:
        begin, end = self._begin(node), self._end(node)
        self._note(node.lineno, begin, self._text[begin:end], after, kind)

    def _note(self, line: int, offset: int, before: str, after: str, kind: str) -> None:
        mutant = Mutant(self._file, line, offset, before, after, kind, ".".join(self._names), self._statement)
        self.mutants.append(mutant)

    def _add_between(self, left: ast.expr, right: ast.expr, kind: str, old: str, new: str) -> None:
        """Change the operator between two operands; parentheses may stand around them, comments do not."""
        at = self._text.find(old, self._end(left), self._begin(right))
        if at >= 0:
            self._note(left.end_lineno or 0, at, old, new, kind)

    def visit_Compare(self, node: ast.Compare) -> None:
        """Turn the first comparison of a chain."""
        self._add_between(node.left, node.comparators[0], "comparison", *_COMPARISONS[type(node.ops[0])])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Exchange an arithmetic operator, unless texts are joined."""

        def is_text(side: ast.expr) -> bool:
            return isinstance(side, ast.JoinedStr) or isinstance(getattr(side, "value", None), str | bytes)

        if type(node.op) in _ARITHMETIC and not is_text(node.left) and not is_text(node.right):
            self._add_between(node.left, node.right, "arithmetic", *_ARITHMETIC[type(node.op)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """Exchange ``and`` and ``or``."""
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        self._add_between(node.values[0], node.values[1], "logic", old, new)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        """Drop a ``not``."""
        if isinstance(node.op, ast.Not):
            self._add(node, "negation", self._source(node.operand))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Change a number by one, and exchange True and False."""
        if isinstance(node.value, bool):
            self._add(node, "constant", str(not node.value))
        elif isinstance(node.value, int):
            self._add(node, "constant", str(node.value + 1))

    def visit_If(self, node: ast.If) -> None:
        """Negate a condition; leave out a check that raises."""
        if all(isinstance(statement, ast.Raise) for statement in node.body):
            self._add(node.test, "check", f"(False and ({self._source(node.test)}))")
        else:
            self._add(node.test, "condition", f"(not ({self._source(node.test)}))")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        """Leave out a call whose result is not used."""
        if isinstance(node.value, ast.Call):
            self._add(node, "statement", "pass")
            self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        """Return None instead of a value."""
        if node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self._add(node.value, "result", "None")
            self.generic_visit(node)

    def visit_arguments(self, node: ast.arguments) -> None:
        """Change defaults, not annotations."""
        for default in (*node.defaults, *node.kw_defaults):
            if default is not None:
                self.visit(default)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Change the defaults and the body, not annotations and decorators."""
        self.visit(node.args)
        for statement in node.body:
            self.visit(statement)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Change the value, not the annotation."""
        if node.value is not None:
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Messages are not changed."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Messages are not changed."""


def mutants_of(file: str, text: str) -> list[Mutant]:
    """All mutants of a file, in the order of the text."""
    finder = _Finder(file, text)
    finder.visit(ast.parse(text))
    return sorted(finder.mutants)


def product_files(root: Path) -> list[str]:
    """The product's Python files, relative to a checkout; folders that are links are not entered twice."""
    return sorted(
        str(path.relative_to(root))
        for folder in PRODUCT
        for path in (root / folder).rglob("*.py")
        if path.resolve() == root.resolve() / path.relative_to(root)
    )


def draw(root: Path, count: int, seed: int) -> list[Mutant]:
    """A seeded sample of the mutants of all files.

    Example:
        >>> draw(Path("."), 100, seed=0)
    """
    every = [mutant for file in product_files(root) for mutant in mutants_of(file, (root / file).read_text())]
    return random.Random(seed).sample(every, min(count, len(every)))


def place(root: Path, sample: list[Mutant]) -> list[Mutant | None]:
    """Where mutants of another version of the product are in this checkout; None for one whose code is gone.

    A mutant is the same one if change and statement are equal, or change and function if the function has one such
    change alone. Of several, the one in a function of the same name is taken, then the one in the same file, then the
    nearest.
    """
    every = [mutant for file in product_files(root) for mutant in mutants_of(file, (root / file).read_text())]
    return [_place(mutant, every) for mutant in sample]


def _place(wanted: Mutant, every: list[Mutant]) -> Mutant | None:
    def rank(mutant: Mutant) -> tuple[bool, bool, bool, int]:
        names, last = mutant.function, mutant.function.rpartition(".")[2]
        return (
            last != wanted.function.rpartition(".")[2],
            names != wanted.function,
            mutant.file != wanted.file,
            abs(mutant.offset - wanted.offset),
        )

    alike = [m for m in every if (m.before, m.after, m.kind) == (wanted.before, wanted.after, wanted.kind)]
    equal = sorted((m for m in alike if m.statement == wanted.statement), key=rank)
    elsewhere = {(m.file, m.function) for m in equal}
    if equal and (not rank(equal[0])[0] or len(elsewhere) == 1):
        return equal[0]
    inside = [m for m in alike if wanted.function and m.function == wanted.function]
    return inside[0] if len(inside) == 1 else None


def shared(root: Path, other: Path) -> list[tuple[Mutant, Mutant]]:
    """Mutants of functions that two checkouts have with the same code, each at its place in both.

    They compare the suites of two commits, each on the product that it was written for. Comments and docstrings may
    differ.
    """
    pairs: dict[
        Mutant, Mutant
    ] = {}  # by the first: a nested function's mutants are found in the outer one too
    for file in product_files(root):
        if (other / file).exists():
            theirs = _by_function(file, (other / file).read_text())
            ours = _by_function(file, (root / file).read_text())
            pairs |= {mutant: theirs[place] for place, mutant in ours.items() if place in theirs}
    return list(pairs.items())


def _by_function(file: str, text: str) -> dict[tuple[str, int], Mutant]:
    """Mutants by the code of a function, without docstrings, and their number in it; nested functions included."""
    placed: dict[tuple[str, int], Mutant] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            finder = _Finder(file, text)
            finder.visit(node)
            code = ast.dump(_WithoutDocstrings().visit(node))
            placed |= {(code, number): mutant for number, mutant in enumerate(finder.mutants)}
    return placed


class _WithoutDocstrings(ast.NodeTransformer):
    """Removes texts that stand alone."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        """None for a text: it is removed."""
        return None if isinstance(node.value, ast.Constant) else node
