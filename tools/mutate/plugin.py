"""A pytest plugin: tells the processes of a run which test runs, and keeps how long each test took and how it ended.

Environment: MUTATE_LOG, a folder. Each worker of the run writes there
``WORKER.test``: the number of the running test, 8 bytes (see `loading.Marks`);
``WORKER.tests``: a JSON line ``[number, id, seconds, passed]`` for every test that ended.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


class _Log:
    """The files of one worker."""

    def __init__(self, folder: Path) -> None:
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        self._test, self._tests = folder / f"{worker}.test", folder / f"{worker}.tests"
        self._number = 0
        self._failed = False

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Number the test, time it with its fixtures, and note how it ended."""
        self._number += 1
        self._test.write_bytes(self._number.to_bytes(8, "little"))
        self._failed = False
        begin = time.perf_counter()
        result = yield
        row = [self._number, item.nodeid, round(time.perf_counter() - begin, 3), not self._failed]
        with self._tests.open("a") as tests:
            tests.write(json.dumps(row) + "\n")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a failure in any phase of a test."""
        self._failed |= report.failed


def pytest_configure(config: pytest.Config) -> None:
    """Begin the files of this worker; the process that only distributes tests has none."""
    if not config.getoption("numprocesses", None) or "PYTEST_XDIST_WORKER" in os.environ:
        config.pluginmanager.register(_Log(Path(os.environ["MUTATE_LOG"])))
