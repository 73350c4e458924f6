"""One word for one thing: no two classes of the product share a name."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = [
    file for folder in ("vescale_fsdp", "checkpoint", "conversion") for file in (ROOT / folder).rglob("*.py")
]


def _shared(names: Iterable[tuple[str, Path]]) -> dict[str, list[str]]:
    """Names that stand in more than one place, with those places."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for name, file in names:
        places[name].append(str(file.relative_to(ROOT)))
    return {name: sorted(files) for name, files in places.items() if len(files) > 1}


def _classes(file: Path) -> list[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def test_no_class_name_stands_twice() -> None:
    assert FILES
    assert _shared((name, file) for file in FILES for name in _classes(file)) == {}


def test_shared_names_are_seen() -> None:
    layout, optim = ROOT / "vescale_fsdp/layout/a.py", ROOT / "vescale_fsdp/optim/a.py"
    found = _shared([("Piece", layout), ("Piece", optim), ("Box", layout)])
    assert found == {"Piece": ["vescale_fsdp/layout/a.py", "vescale_fsdp/optim/a.py"]}
