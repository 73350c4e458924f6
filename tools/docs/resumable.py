"""A pytest plugin that continues an interrupted run: ``pytest -p tools.docs.resumable --resumable FILE``.

All tests on another torch take two hours. FILE gets a line for each test as it ends. A later run of the same commit
skips those that have passed; a run of another commit starts again, and one of changed files neither skips nor records.
`described` says how many runs it took, and how many tests failed before they passed.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

_PASSED = pytest.StashKey[frozenset[str]]()  # tests that are skipped, as earlier runs have passed them


class _Record:
    """The file of a run, in the process that sees the result of all tests."""

    def __init__(self, path: Path, commit: str) -> None:
        lines = path.read_text().splitlines() if path.exists() else []
        self._path, self._lines = path, lines if lines[:1] == [commit] else [commit]
        self.passed, self._failed = self._tests("passed"), set[str]()
        self._path.write_text("\n".join([*self._lines, "run", ""]))

    def _tests(self, result: str) -> frozenset[str]:
        return frozenset(line[len(result) + 1 :] for line in self._lines if line.startswith(f"{result} "))

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker of xdist what it skips."""
        node.workerinput["passed"] = sorted(self.passed)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a line when a phase of a test fails, and when a test ends without that."""
        if report.failed:
            self._failed.add(report.nodeid)
            self._add(f"failed {report.nodeid}")
        elif report.when == "teardown" and report.nodeid not in self._failed:
            self._add(f"passed {report.nodeid}")

    def _add(self, line: str) -> None:
        with self._path.open("a") as file:
            file.write(f"{line}\n")

    def described(self) -> str:
        """Return what the runs of this commit were, after the last one has passed; and remove the file."""
        runs, failed = 1 + self._lines.count("run"), self._tests("failed")
        self._path.unlink()
        in_runs = f", in {runs} runs of one commit" if runs > 1 else ""
        return f"all{in_runs}" + (f"; {len(failed)} failed in one and passed in the next" if failed else "")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option ``--resumable``."""
    parser.addoption(
        "--resumable", type=Path, help="file of the tests that have passed; a later run skips these"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Read what earlier runs have passed: from the file, or, in a worker of xdist, from the main process."""
    inputs = vars(config).get("workerinput")
    if inputs is not None:
        config.stash[_PASSED] = frozenset(inputs.get("passed", ()))
    elif (path := config.getoption("--resumable")) is not None and (
        commit := _commit(config.rootpath)
    ) is not None:
        record = _Record(path, commit)
        config.stash[_PASSED] = record.passed
        config.pluginmanager.register(record, "resumable-record")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what has passed."""
    passed = config.stash.get(_PASSED, frozenset())
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
    items[:] = [item for item in items if item.nodeid not in passed]


def described(config: pytest.Config) -> str:
    """Return "all", and how many runs it took if it was more than one."""
    record = config.pluginmanager.get_plugin("resumable-record")
    return "all" if record is None else record.described()


def _commit(root: Path) -> str | None:
    """Return the commit of the working tree; None if files have changed since, or outside of a repository."""
    changed, commit = (
        subprocess.run(("git", *args), cwd=root, capture_output=True, text=True, timeout=60)
        for args in (("status", "--porcelain"), ("rev-parse", "HEAD"))
    )
    return commit.stdout.strip() if commit.returncode == 0 and not changed.stdout else None
