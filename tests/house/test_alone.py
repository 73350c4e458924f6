"""Tests marked ``alone`` run by themselves, and others two at a time."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support.processes import run_command

pytestmark = pytest.mark.part("jobs")  # five seconds each

ROOT = Path(__file__).parents[2]
# Each test notes when it begins and ends, in one file that all append to.
FILE = """
import os
import time

import pytest


def note(word):
    with open(os.environ["NOTES"], "a") as file:
        file.write(word + "\\n")


{mark}
@pytest.mark.parametrize("number", range({count}))
def test_it(number):
    note("begin {name}")
    time.sleep(0.1)
    note("end {name}")
"""


def noted(tmp_path: Path, mark: str) -> list[str]:
    """What two workers note: one has ten short tests, the other one test with the mark and then ten more."""
    for name, its_mark, count in (("a", "", 10), ("b", mark, 1), ("c", "", 10)):
        (tmp_path / f"test_{name}.py").write_text(FILE.format(name=name, mark=its_mark, count=count))
    notes = tmp_path / "notes"
    files = ("test_a.py", "test_b.py", "test_c.py")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    alone: by itself\n")
    options = (
        "-p",
        "tests.support.alone",
        "--numprocesses",
        "2",
        "--dist",
        "loadfile",
        "--no-loadscope-reorder",
    )
    env = os.environ | {"NOTES": str(notes), "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    done = run_command(
        (sys.executable, "-m", "pytest", *options, *files), cwd=tmp_path, env=env, timeout_s=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(tmp_path.glob("pytest-alone-*"))
    words = notes.read_text().splitlines()
    assert len(words) == 2 * 21
    return words


def num_beside(words: list[str], name: str) -> int:
    """How many tests run while the test of this name does, itself included."""
    begin, end = words.index(f"begin {name}"), words.index(f"end {name}")
    before = sum(1 if word.startswith("begin") else -1 for word in words[:begin])
    return before + sum(word.startswith("begin") for word in words[begin:end])


def test_a_test_alone_has_no_other_beside_it(tmp_path: Path) -> None:
    """Its neighbours wait, and it does not wait for the last of them."""
    words = noted(tmp_path, "@pytest.mark.alone")
    assert num_beside(words, "b") == 1
    assert words.index("begin b") < len(words) - 2
    assert num_beside(words, "c") + num_beside(words, "a") > 2  # two at a time otherwise


def test_without_the_mark_it_runs_beside_another(tmp_path: Path) -> None:
    """The control."""
    assert num_beside(noted(tmp_path, ""), "b") > 1
