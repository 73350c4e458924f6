"""Count the product's classes that are a part of a tensor or of a file.

    python -m tools.part_classes [--json FILE]

A class is one of them if it is a NamedTuple, a dataclass or has `__slots__`, and its fields are

* a position (`POSITIONS`) beside a size (`SIZES`) or beside memory (`MEMORY`), as integers or shapes; or
* a field that is typed as one of `GEOMETRY`, or a NamedTuple's field that is typed as another class that was found; or
* a position beside a collection of those.

`NOT_PARTS` lists the classes that fit this and are none, with the reason; `PARTS` those that are one and do not fit.
A module's name for a tuple of two or more numbers counts as a class. Two groups are printed: layout, optim and the
records of formats (`RECORDS`), and the other classes. At the end stands the number of annotations that have tuples of
numbers without a name, so that a class that became such a tuple shows.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from pathlib import Path
from typing import NamedTuple

from tools.mutate.mutants import product_files
from tools.torchrun_job import ROOT

# Words of a field's name, which underscores separate.
POSITIONS = {
    "start",
    "starts",
    "offset",
    "offsets",
    "first",
    "at",
    "skip",
    "corner",
    "source",
    "target",
    "top",
    "row",
}
SIZES = {
    "stop",
    "stops",
    "numel",
    "nbytes",
    "bytes",
    "size",
    "sizes",
    "rows",
    "cols",
    "shape",
    "strides",
    "height",
}
NUMBERS = re.compile(
    r"int|Shape|Ints|torch\.Size|tuple\[int, \.\.\.\]|slice|tuple\[tuple\[int, int, int\], \.\.\.\]"
)
MEMORY = re.compile(r"\b(Buffer|Bytes|Tensor|memoryview)\b")
GEOMETRY = {"Range", "Box", "Region", "Extent", "Copy"}

# Folders whose classes are counted apart. Those of foreign formats are records: they say what is on disk.
RECORDS = ("vescale_fsdp/layout/", "vescale_fsdp/optim/", "conversion/formats/")

NOT_PARTS = {
    "Slice": "an operation on a whole tensor, as the other index maps are",
}
PARTS = {
    "FileMove": "a turn: a whole file with its sender and receiver",
}
# What stands for a part without a class. `tuple[int, ...]` is a shape and does not count.
NUMBERS_ALONE = re.compile(r"tuple\[int(, int)+\]")


class Found(NamedTuple):
    """A class of the product."""

    file: str
    name: str
    is_tuple: bool
    fields: dict[str, str]  # name -> annotation


def classes_of(file: str, text: str) -> list[Found]:
    """NamedTuples, dataclasses, and classes with slots, whose fields are the arguments of `__init__`."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            is_tuple = any(ast.unparse(base).split(".")[-1] == "NamedTuple" for base in node.bases)
            is_dataclass = any("dataclass" in ast.unparse(each) for each in node.decorator_list)
            fields = {
                line.target.id: ast.unparse(line.annotation)
                for line in node.body
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
            }
            has_slots = any(
                "__slots__" in ast.unparse(line) for line in node.body if isinstance(line, ast.Assign)
            )
            for line in node.body:
                if has_slots and isinstance(line, ast.FunctionDef) and line.name == "__init__":
                    fields |= {
                        each.arg: ast.unparse(each.annotation) for each in line.args.args if each.annotation
                    }
            if is_tuple or is_dataclass or has_slots:
                found.append(Found(file, node.name, is_tuple, fields))
    return found


def aliases_of(file: str, text: str) -> list[Found]:
    """A file's names for tuples of numbers."""
    return [
        Found(file, ast.unparse(target), False, {"": ast.unparse(node.value)})
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if NUMBERS_ALONE.fullmatch(ast.unparse(node.value))
    ]


def unnamed_tuples(text: str) -> int:
    """How many annotations of arguments, results and fields have a tuple of two or more numbers."""
    annotations: list[ast.expr | None] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            annotations.append(node.returns)
        elif isinstance(node, ast.arg | ast.AnnAssign):
            annotations.append(node.annotation)
    return sum(bool(each and NUMBERS_ALONE.search(ast.unparse(each))) for each in annotations)


def _has(kind: Found, words: set[str]) -> bool:
    """Whether a field is a number or several, and its name has one of the words."""
    return any(
        NUMBERS.fullmatch(annotation.removesuffix(" | None"))
        and words.intersection(name.strip("_").split("_"))
        for name, annotation in kind.fields.items()
    )


def _fits(kind: Found, parts: set[str]) -> bool:
    """Whether a class fits the rule, if ``parts`` do."""
    annotations = [annotation.removesuffix(" | None") for annotation in kind.fields.values()]
    if any(set(annotation.split(" | ")) & GEOMETRY for annotation in annotations):
        return True
    if kind.is_tuple and any(annotation in parts for annotation in annotations):
        return True
    names = {name for annotation in annotations for name in re.findall(r"\w+", annotation)}
    beside = _has(kind, SIZES) or any(map(MEMORY.search, annotations)) or bool(names & (parts | GEOMETRY))
    return _has(kind, POSITIONS) and beside


def part_classes(root: Path) -> list[Found]:
    """The classes of a checkout, in the order of files; then the names for tuples of numbers."""
    texts = {file: (root / file).read_text() for file in product_files(root)}
    every = [kind for file, text in texts.items() for kind in classes_of(file, text)]
    aliases = [kind for file, text in texts.items() for kind in aliases_of(file, text)]
    parts = {kind.name for kind in every if kind.name in PARTS or kind.name in GEOMETRY}
    while True:
        more = {kind.name for kind in every if _fits(kind, parts) and kind.name not in NOT_PARTS} | parts
        if more == parts:
            return [kind for kind in every if kind.name in parts] + aliases
        parts = more


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the lists there too")
    options = parser.parse_args()
    groups: dict[str, list[str]] = {"layout, optim and the records of formats": [], "others": []}
    for kind in part_classes(ROOT):
        group = "layout, optim and the records of formats" if kind.file.startswith(RECORDS) else "others"
        groups[group].append(f"{kind.file}: {kind.name}")
    for group, names in groups.items():
        print(f"{group}: {len(names)}")
        for name in names:
            print(f"  {name}")
    print(f"all: {sum(map(len, groups.values()))}")
    unnamed = sum(unnamed_tuples((ROOT / file).read_text()) for file in product_files(ROOT))
    print(f"annotations with tuples of numbers without a name: {unnamed}")
    if options.json:
        options.json.write_text(json.dumps(groups, indent=1))


if __name__ == "__main__":
    main()
