"""A pytest plugin that records tested versions: ``pytest -p tools.docs.compatibility --compatibility torch|stacks``.

If all tests pass, it writes the installed versions to docs/compatibility.json, and the tables of the page from it.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parents[2] / "docs" / "compatibility.json"
PAGE = DATA.with_suffix(".md")
_OF_PACKAGES = {"stacks": "stack", "files": "package"}  # table of the data -> heading of its first column


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option ``--compatibility``."""
    parser.addoption(
        "--compatibility", choices=["torch", "stacks"], help="record the versions if all tests pass"
    )


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Record the versions, in the process that sees the result of all tests."""
    what = session.config.getoption("--compatibility")
    if (
        what is None or exitstatus != 0 or "workerinput" in vars(session.config)
    ):  # xdist's workers see only some tests
        return
    data = noted(json.loads(DATA.read_text()), what, version, f"{datetime.now(UTC):%Y-%m-%d}")
    DATA.write_text(json.dumps(data, indent=1) + "\n")
    text = PAGE.read_text()
    for name, table in tables(data).items():
        text = re.sub(rf"\| {name} \|.*?\n\n", f"{table}\n", text, count=1, flags=re.DOTALL)
    PAGE.write_text(text)


def noted(data: dict[str, Any], what: str, version_of: Any, today: str) -> dict[str, Any]:
    """The data with the versions that have passed now."""
    torch = version_of("torch").partition("+")[0]
    if what == "torch":
        row = {"tests": "all", "result": "pass", "date": today}
        return {**data, "torch": dict(sorted((data["torch"] | {torch: row}).items()))}
    rows = {
        table: {
            name: {"versions": [version_of(name)], "torch": torch, "date": today}
            for name in sorted(data[table])
        }
        for table in _OF_PACKAGES
    }
    return {**data, **rows}


def tables(data: dict[str, Any]) -> dict[str, str]:
    """The page's tables, by the heading of their first column."""
    torch = [
        f"| {v} | {row['tests']} | {row['result']} | {row['date']} |" for v, row in data["torch"].items()
    ]
    found = {"torch": "\n".join(["| torch | tests | result | date |", "|---|---|---|---|", *torch, ""])}
    for table, heading in _OF_PACKAGES.items():
        rows = [
            f"| {name} | {', '.join(row['versions'])} | {row['torch']} | {row['date']} |"
            for name, row in data[table].items()
        ]
        found[heading] = "\n".join(
            [f"| {heading} | versions | torch | date |", "|---|---|---|---|", *rows, ""]
        )
    return found
