"""`tools.typical_week` counts the lines that it says, and sees which statements run in every process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tools.mutate.running import hooked
from tools.typical_week import body_lines, hits_of, shares

PRODUCT = '''"""A module."""

LIMIT = 3  # not in a function


def kind(number: int) -> str:
    """What a number is."""
    # a comment
    found: str
    if number < (
        LIMIT
    ):
        found = "small"
    else:
        raise ValueError(
            number
        )
    return found
'''


def test_lines_of_statements_in_functions() -> None:
    """A header of three lines is one statement; docstring, comment, declaration and ``raise`` have no lines."""
    assert body_lines(PRODUCT) == {10: {10, 11, 12}, 13: {13}, 18: {18}}


def test_what_a_process_ran(tmp_path: Path) -> None:
    """Statements behind an error did not run; ranks that call `os._exit` are counted."""
    root = tmp_path.resolve()
    for file, text in {"vescale_fsdp/__init__.py": "", "vescale_fsdp/kinds.py": PRODUCT}.items():
        (root / file).parent.mkdir(exist_ok=True)
        (root / file).write_text(text)
    program = "import os; from vescale_fsdp.kinds import kind\ntry: kind({})\nfinally: os._exit(0)"
    (root / "hits").mkdir()

    def percent(number: int) -> float:
        with hooked(root) as environment:
            variables = environment | {"MUTATE_HITS": str(root / "hits"), "MUTATE_STATEMENTS": "1"}
            command = [sys.executable, "-c", program.format(number)]
            subprocess.run(command, cwd=root, env=variables, check=True, timeout=60)
        rows = shares(root, hits_of(root / "hits"))
        assert rows["runtime"] == rows["all"] and rows["checkpoint"]["lines"] == 0
        return rows["all"]["percent"]

    assert [percent(5), percent(1)] == [60.0, 100.0]
