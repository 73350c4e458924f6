"""A run of tests that was interrupted goes on where it ended, on the same commit only."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.support.processes import run_command

ROOT = Path(__file__).parents[2]
TESTS = """
import os
import pytest

@pytest.mark.parametrize("number", range(3))
def test_it(number):
    if str(number) in os.environ["ENDS"]:
        os._exit(1)
    assert str(number) not in os.environ["FAILS"]
"""
NOTES = """
from tools.docs.resumable import described

def pytest_sessionfinish(session, exitstatus):
    if exitstatus == 0 and "workerinput" not in vars(session.config):
        print("described:", described(session.config))
"""


def git(root: Path, *args: str) -> None:
    names = ("-c", "user.name=tests", "-c", "user.email=tests@example.org")
    run_command(("git", *names, *args), cwd=root, timeout_s=60, check=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository of three tests."""
    files = {
        "test_it.py": TESTS,
        "conftest.py": NOTES,
        "pytest.ini": "[pytest]\n",
        ".gitignore": "__pycache__\npassed\n.*\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "--force", *files)
    git(tmp_path, "commit", "--quiet", "--message", "tests")
    return tmp_path


def ran(root: Path, *options: str, fails: str = "", ends: str = "") -> tuple[int, str]:
    """Run the tests; how many passed, and what the runs were if all have."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "FAILS": fails, "ENDS": ends}
    plugin = ("-p", "tools.docs.resumable", "--resumable", "passed")
    done = run_command(
        (sys.executable, "-m", "pytest", *plugin, *options), cwd=root, env=env, timeout_s=120, check=False
    )
    passed = re.search(r"(\d+) passed", done.stdout)
    what = re.search(r"described: (.*)", done.stdout)
    return int(passed[1]) if passed else 0, what[1] if what else ""


@pytest.mark.parametrize("options", [(), ("--numprocesses", "2", "--dist", "loadfile")])
def test_what_has_passed_is_skipped(root: Path, options: tuple[str, ...]) -> None:
    """After failures; the description counts runs and failures, and the run after the last one starts again."""
    assert ran(root, *options) == (3, "all")
    assert ran(root, *options, fails="01") == (1, "")
    assert ran(root, *options, fails="0") == (1, "")
    assert ran(root, *options) == (1, "all, in 3 runs of one commit; 2 failed in one and passed in the next")
    assert ran(root, *options) == (3, "all")


def test_an_end_in_the_middle(root: Path) -> None:
    """What had not begun runs next."""
    assert ran(root, ends="1") == (0, "")
    assert ran(root) == (2, "all, in 2 runs of one commit")


def test_another_commit_or_a_changed_file_starts_again(root: Path) -> None:
    """Nothing is skipped then, and a run of changed files records nothing."""
    assert ran(root, fails="2") == (2, "")
    (root / "test_it.py").write_text(f"{TESTS}\n")
    assert ran(root) == (3, "all")
    git(root, "commit", "--all", "--quiet", "--message", "changed")
    assert ran(root, fails="1") == (2, "")
    assert ran(root) == (1, "all, in 2 runs of one commit; 1 failed in one and passed in the next")
