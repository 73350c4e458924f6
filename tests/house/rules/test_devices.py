"""Device types are named in one table: other files take streams and memory from torch's module of a type."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
TABLE = "vescale_fsdp/devices.py"
TYPES = ("cuda", "xpu", "npu", "hpu", "mps")
# Where a type is data of somebody else's format or API, by file: the text of the line.
FOREIGN: dict[str, set[str]] = {}


def _code_without_docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Lines of code by number, without comments and docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            match node.body:
                case [ast.Expr(value=ast.Constant()), *_]:
                    node.body[0] = ast.Pass()
    yield from enumerate(ast.unparse(tree).splitlines())


def _named_types(source: str) -> list[str]:
    """The lines of code that name a device type as a word: ``torch.cuda``, ``"cuda"``, ``"cuda:0"``."""
    found = []
    for _, line in _code_without_docstrings(source):
        words = line.replace("_", "a").translate({ord(mark): " " for mark in ".\"':()[]{},=*&|"}).split()
        if any(kind in words for kind in TYPES):
            found.append(line.strip())
    return found


def test_the_rule_sees_code_and_not_prose() -> None:
    assert _named_types('"""On cuda."""\nx = torch.cuda.Event()  # cuda\ny = "cuda:0"\nz = cuda_graphs') == [
        "x = torch.cuda.Event()",
        "y = 'cuda:0'",
    ]


def test_no_file_but_the_table_names_a_device_type() -> None:
    found = {}
    for folder in ("vescale_fsdp", "checkpoint", "conversion"):
        for path in (ROOT / folder).rglob("*.py"):
            file, source = str(path.relative_to(ROOT)), path.read_text()
            if not any(
                kind in source for kind in TYPES
            ):  # before the source is parsed, which takes seconds for all
                continue
            lines = [line for line in _named_types(source) if line not in FOREIGN.get(file, ())]
            if lines and file != TABLE:
                found[file] = lines

    assert found == {}
