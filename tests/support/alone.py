"""A pytest plugin: a test marked ``alone`` runs while no other test of the same run does.

It is for tests that measure time: under pytest-xdist another test beside them takes their processor. All workers of a
run lock bytes of one file. Every test enters through a door, one after the other, and keeps a place in a room; a test
that is to be alone holds the door until the room is empty, so that others do not keep it waiting.
"""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

_DOOR, _ROOM = 0, 1  # bytes of the file
_file = pytest.StashKey[IO[bytes]]()


@contextmanager
def place(file: IO[bytes], alone: bool) -> Iterator[None]:
    """Wait for a place beside other tests, or for the whole room.

    The locks are those of POSIX: children do not inherit them, and they are released when a worker ends.
    """
    fcntl.lockf(file, fcntl.LOCK_EX, 1, _DOOR)
    fcntl.lockf(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH, 1, _ROOM)
    fcntl.lockf(file, fcntl.LOCK_UN, 1, _DOOR)
    try:
        yield
    finally:
        fcntl.lockf(file, fcntl.LOCK_UN, 1, _ROOM)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around pytest-timeout, whose clock does not run meanwhile
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Let a worker's tests wait for each other; without pytest-xdist there is one test at a time."""
    # Not the environment's PYTEST_XDIST_WORKER, which a run inside a test inherits.
    worker = vars(item.config).get("workerinput")
    if worker is None:
        return (yield)
    if _file not in item.config.stash:
        item.config.stash[_file] = _path(worker["testrunuid"]).open("w+b")
    with place(item.config.stash[_file], item.get_closest_marker("alone") is not None):
        return (yield)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the file; workers that still run have it open."""
    if _file in config.stash:
        config.stash[_file].close()
        _path(vars(config)["workerinput"]["testrunuid"]).unlink(missing_ok=True)


def _path(run: str) -> Path:
    return Path(tempfile.gettempdir(), f"pytest-alone-{run}")
