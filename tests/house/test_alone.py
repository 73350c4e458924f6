"""Tests marked ``alone`` run by themselves, and others two at a time."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.support.alone import place
from tests.support.processes import run_command, wait_until

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
    """The other worker waits; before and afterwards, two tests run at a time."""
    words = noted(tmp_path, "@pytest.mark.alone")
    assert num_beside(words, "b") == 1
    assert num_beside(words, "c") + num_beside(words, "a") > 2  # two at a time otherwise


def test_without_the_mark_it_runs_beside_another(tmp_path: Path) -> None:
    """The control."""
    assert num_beside(noted(tmp_path, ""), "b") > 1


def hold(path: Path, is_alone: bool, name: str, notes: Path, pipe: Connection) -> None:
    """Hold a place until the pipe has a message, and note when it is entered and left."""
    with path.open("r+b") as file, place(file, is_alone):
        with notes.open("a") as lines:
            lines.write(f"{name} enters\n")
        pipe.send("entered")
        assert pipe.poll(60.0)
        with notes.open("a") as lines:
            lines.write(f"{name} leaves\n")


def test_a_test_that_comes_later_does_not_overtake(tmp_path: Path) -> None:
    """One test runs, another waits to be alone: a third one waits for both."""
    path, notes = tmp_path / "lock", tmp_path / "notes"
    path.touch()
    context = multiprocessing.get_context("spawn")
    pipes = {}
    for name in ("first", "alone", "later"):
        pipes[name], theirs = context.Pipe()
        process = context.Process(target=hold, args=(path, name == "alone", name, notes, theirs), daemon=True)
        process.start()
        if name == "first":
            assert pipes[name].poll(60.0)
        elif name == "alone":
            wait_until(lambda: is_locked(path), "the door is held", limit_s=60.0)
    assert not pipes["later"].poll(5.0)  # a process starts in less
    for name in ("first", "alone", "later"):
        pipes[name].send("leave")
        assert pipes[name].poll(60.0)
    wait_until(lambda: len(notes.read_text().splitlines()) == 6, "all have left", limit_s=60.0)
    order = [f"{name} {what}" for name in ("first", "alone", "later") for what in ("enters", "leaves")]
    assert notes.read_text().splitlines() == order


def is_locked(path: Path) -> bool:
    """Whether another process holds the door."""
    with path.open("r+b") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
        except OSError:
            return True
    return False
