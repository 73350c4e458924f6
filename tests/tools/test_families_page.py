"""The table of model families: rows, counts, and texts that stay in their cells."""

from __future__ import annotations

import re

import pytest

from tests.support.tiny_families import why_not_built
from tools.docs.families import SAME, written

PAGE = """# Title

transformers 0: none

| family | class | files | result |
|---|---|---|---|
| old | - | - | - |
"""


def test_rows_replace_the_old_ones_and_are_counted() -> None:
    """By name; what did not pass is counted apart."""
    rows = {
        "b": ("BModel", "", SAME),
        "a": ("AModel", "names", "open: Error: x|y"),
        "c": ("", "", "needs *timm*"),
    }
    page = written(PAGE, rows, "5.0")
    counts = next(line for line in page.splitlines() if line.startswith("transformers"))
    assert re.findall(r"\d+", counts) == ["5", "0", "3", "1", "1", "1"]
    table = page[page.index("| family |") :].splitlines()[2:]
    assert [row.split(" | ")[0] for row in table] == ["| a", "| b", "| c"]
    assert all(row.count("|") == 5 for row in table) and "old" not in page
    assert table[1] == "| b | `BModel` | - | same bytes |"
    assert written(page, rows, "5.0") == page


@pytest.mark.part("formats")
@pytest.mark.parametrize(
    ("class_name", "error", "start"),
    [
        ("DinatModel", ImportError("DinatModel requires the natten library"), "needs functions that natten"),
        ("LlamaModel", ImportError("LlamaModel requires the other library"), "needs ImportError: LlamaModel"),
        ("T5Gemma2Encoder", ValueError("x"), "transformers does not build it: AttributeError:"),
        ("NoSuchModel", ValueError("x"), "transformers does not build it: AttributeError:"),
        ("LlamaModel", ValueError("some words " * 40), "cannot be built small: ValueError: some words"),
    ],
)
def test_a_reason_says_whether_a_package_transformers_or_the_tests_lack_something(
    class_name: str, error: Exception, start: str
) -> None:
    """What the class's own defaults build, and the tests do not, is the tests' lack; long reasons end at a word."""
    reason = why_not_built(class_name, error)
    assert reason.startswith(start)
    assert len(reason) < 200 and (not reason.endswith("..") or reason.split()[-2] in ("some", "words"))
