"""The table of model families: rows, counts, and texts that stay in their cells."""

from __future__ import annotations

import re

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
