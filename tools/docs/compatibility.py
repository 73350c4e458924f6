"""A pytest plugin that records tested versions: ``pytest -p tools.docs.compatibility --compatibility torch|stacks``.

If all tests pass, it writes the installed versions, and what tests recorded of optimizers, to docs/compatibility.json,
and the tables of the page from it. ``--compatibility optimizers``, for tests/stacks/optimizers alone, writes only what
was recorded of optimizers. ``python -m tools.docs.compatibility`` writes the tables alone.
"""

from __future__ import annotations

import ast
import json
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tools.docs.resumable import described

DATA = Path(__file__).parents[2] / "docs" / "compatibility.json"
PAGE = DATA.with_suffix(".md")
_OF_PACKAGES = {"stacks": "stack", "files": "package"}  # table of the data -> heading of its first column
_TESTS = Path(__file__).parents[2] / "tests" / "stacks"
# Stack -> the files of its tests.
_TRIED_BY = {
    "accelerate": ("test_accelerate.py",),
    "lightning": ("test_lightning.py",),
    "nemo_automodel": ("test_nemo_automodel.py",),
    "peft": ("test_trl_lora.py",),
    "torch_checkpointing": ("conversion/test_torch_checkpointing.py",),
    "torchtitan": ("test_torchtitan.py",),
    "transformers": ("test_trainer.py", "conversion/test_from_pretrained.py"),
    "trl": ("test_trl_lora.py",),
    "verl": ("test_verl.py",),
}
# Results of optimizer classes in the order of the table's columns.
OPTIMIZER_RESULTS = {
    "bits": "as it is, same bits",
    "rounding": "as it is, up to rounding",
    "owner": "by `OwnerOptimizer`",
    "refused": "refused by name",
}
_recorded: dict[str, Any] = {}  # what tests recorded of optimizer packages


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option ``--compatibility``."""
    parser.addoption(
        "--compatibility",
        choices=["torch", "stacks", "optimizers"],
        help="record the versions if all tests pass",
    )


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep what a test has recorded as its property "optimizers": the classes of each result, by package."""
    if report.when == "call":
        for name, value in report.user_properties:
            if name == "optimizers":
                _recorded.update(value)  # type: ignore[call-overload]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Record the versions, in the process that sees the result of all tests."""
    what = session.config.getoption("--compatibility")
    if (
        what is None or exitstatus != 0 or "workerinput" in vars(session.config)
    ):  # xdist's workers see only some tests
        return
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    data = json.loads(DATA.read_text())
    if what != "optimizers":
        data = noted(data, what, version, today, described(session.config))
    data["optimizers"] = dict(sorted({**data["optimizers"], **_recorded}.items()))
    DATA.write_text(json.dumps(data, indent=1) + "\n")
    write_page(data)


def write_page(data: dict[str, Any]) -> None:
    """Write the tables of the data into the page."""
    text = PAGE.read_text()
    for name, table in tables(data).items():
        start = text.index(f"| {name} |")
        text = text[:start] + f"{table}\n" + text[text.index("\n\n", start) + 2 :]
    PAGE.write_text(text)


def noted(data: dict[str, Any], what: str, version_of: Any, today: str, tests: str = "all") -> dict[str, Any]:
    """The data with the versions that have passed now; ``tests`` says which tests, in how many runs."""
    torch = version_of("torch").partition("+")[0]
    if what == "torch":
        row = {"tests": tests, "result": "pass", "date": today}
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
        tried = {name: f" {_tried(name)} |" if table == "stacks" else "" for name in data[table]}
        rows = [
            f"| {name} | {', '.join(row['versions'])} | {row['torch']} | {row['date']} |{tried[name]}"
            for name, row in data[table].items()
        ]
        columns = "| versions | torch | date |" + (" tried |" if table == "stacks" else "")
        found[heading] = "\n".join([f"| {heading} {columns}", "|---" * columns.count("|") + "|", *rows, ""])
    results = " | ".join(OPTIMIZER_RESULTS.values())
    found["optimizers of"] = "\n".join(
        [
            f"| optimizers of | version | {results} |",
            "|---|---|" + "---|" * len(OPTIMIZER_RESULTS),
            *(_optimizer_row(package, row) for package, row in data["optimizers"].items()),
            "",
        ]
    )
    return found


def _tried(stack: str) -> str:
    """What the tests of a stack try: the first sentences of their files."""
    documents = [ast.get_docstring(ast.parse((_TESTS / file).read_text())) or "" for file in _TRIED_BY[stack]]
    return "; ".join(text.partition("\n")[0].rstrip(".").rpartition(": ")[2] for text in documents)


def _optimizer_row(package: str, row: dict[str, Any]) -> str:
    cells = [
        f"{len(row[result])}: {', '.join(row[result])}" if row[result] else "" for result in OPTIMIZER_RESULTS
    ]
    return f"| {package} | {row['version']} | {' | '.join(cells)} |"


if __name__ == "__main__":
    write_page(json.loads(DATA.read_text()))
