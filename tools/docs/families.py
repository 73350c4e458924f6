"""A pytest plugin that writes the table of model families: ``FAMILIES=all pytest -p tools.docs.families --families``.

`make test-families` runs it. Every test of a family becomes a row of docs/families.md: its class, what differs between
names in files and in memory, and the result.
"""

from __future__ import annotations

import re
import textwrap
from importlib.metadata import version
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
SAME = "same bytes"
_ROWS = pytest.StashKey[dict[str, tuple[str, str, str]]]()
_FAMILY = re.compile(r"test_families\.py::\w+\[(.+)\]$")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option ``--families``."""
    parser.addoption("--families", action="store_true", help="write docs/families.md")


def pytest_configure(config: pytest.Config) -> None:
    """Record results, in the process that sees the result of all tests: xdist's workers see only some."""
    if config.getoption("--families") and "workerinput" not in vars(config):
        config.pluginmanager.register(_Rows(config))


class _Rows:
    def __init__(self, config: pytest.Config) -> None:
        self._rows = config.stash.setdefault(_ROWS, {})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the row of a family."""
        family = _FAMILY.search(report.nodeid)
        if family is not None and report.when == "call":
            said = {str(key): str(value) for key, value in report.user_properties}
            self._rows[family[1]] = (said.get("class", ""), said.get("mapping", ""), result_of(report))

    def pytest_sessionfinish(self) -> None:
        """Write the page."""
        if self._rows:
            PAGE.write_text(written(PAGE.read_text(), self._rows, version("transformers")))


def result_of(report: pytest.TestReport) -> str:
    """The last column: the same bytes, why a family was not built, or why its test failed."""
    if report.passed:
        return SAME
    if report.skipped and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    # The last line of the error itself, not of the traceback; of a rank's error its class and first line.
    lines = [line[1:].strip() for line in report.longreprtext.splitlines() if line.startswith("E ")]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return f"open: {textwrap.shorten((errors or lines or ['failed'])[-1], 200, placeholder=' ..')}"


def written(page: str, rows: dict[str, tuple[str, str, str]], transformers: str) -> str:
    """The page with other rows, and with their counts."""
    same = sum(result == SAME for _, _, result in rows.values())
    is_open = sum(result.startswith("open") for _, _, result in rows.values())
    counts = (
        f"transformers {transformers}: {len(rows)} model types, {same} with the same bytes, {is_open} open, "
        f"{len(rows) - same - is_open} not built."
    )
    lines = [
        "| family | class | files and memory differ in | result |",
        "|---|---|---|---|",
        *(
            f"| {family} | `{name or '-'}` | {mapping or '-'} | {_plain(result)} |"
            for family, (name, mapping, result) in sorted(rows.items())
        ),
    ]
    page = re.sub(r"(?m)^transformers \S+: .*$", lambda _: counts, page, count=1)
    return page[: page.index("| family |")] + "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """Text that neither ends a cell nor is markup."""
    return re.sub(r"[`|<>*_\[\]]", lambda match: f"&#{ord(match[0])};", text)
