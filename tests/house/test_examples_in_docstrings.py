"""Examples in docstrings give what they show."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [file for file in sorted((ROOT / "vescale_fsdp").rglob("*.py")) if ">>> " in file.read_text()]


def test_there_are_examples() -> None:
    """The search finds the planner's."""
    assert ROOT / "vescale_fsdp" / "layout" / "planner.py" in FILES


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_examples(file: Path) -> None:
    """Each runs alone, with its module's names."""
    name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    found = doctest.testmod(importlib.import_module(name))

    assert found.attempted > 0
    assert found.failed == 0
