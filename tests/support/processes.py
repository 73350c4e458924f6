"""Waits with a deadline, and commands with one: the error says what was waited for, and shows the stacks of processes.

Ranks of the test harness have this in `run_ranks`; jobs under torchrun in `tools.torchrun_job.Job`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from typing import Any

import psutil

from tools.torchrun_job import abort_with_children

_WRITTEN_S = 5.0  # how long a process may take to write its stacks
_POLL_S = 0.01


def wait_until(
    holds: Callable[[], object], what: str, *, limit_s: float = 60.0, state: Callable[[], str] = lambda: ""
) -> None:
    """Wait for a condition.

    Args:
        holds: the condition; may itself raise, if it can no longer come true.
        what: names the condition in the error.
        limit_s: seconds until the wait fails.
        state: called for the error: what there is instead, such as a log or stacks.

    Raises:
        AssertionError: at the deadline.
    """
    deadline_s = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"after {limit_s} s, still waiting for {what}\n{state()}")
        time.sleep(_POLL_S)


def receive(pipe: Connection, what: str, *, limit_s: float = 60.0) -> Any:
    """Receive an object from another process.

    Args:
        pipe: this process's end.
        what: names the object in the error.
        limit_s: seconds until the wait fails.

    Raises:
        AssertionError: at the deadline.
        EOFError: if the other process has ended without sending.
    """
    assert pipe.poll(limit_s), f"after {limit_s} s, still waiting for {what}"
    return pipe.recv()


def wait_until_gone(pid: int) -> None:
    """Wait until a signal has stopped or ended a process, which takes a moment."""
    gone = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    with contextlib.suppress(psutil.NoSuchProcess):
        wait_until(lambda: psutil.Process(pid).status() in gone, f"the end of process {pid}")


def join(worker: BaseProcess | Thread, *, limit_s: float = 60.0) -> None:
    """Wait for the end of a process or thread. Raises AssertionError at the deadline."""
    worker.join(limit_s)
    assert not worker.is_alive(), f"after {limit_s} s, still waiting for the end of {worker.name}"


def stacks_of(processes: Iterable[tuple[int, Path]]) -> str:
    """Return the stacks of all threads of running processes.

    Args:
        processes: process id, and the file for which the process has called ``faulthandler.register(SIGUSR1, ..)``.
    """
    files = []
    for pid, file in processes:
        os.kill(pid, signal.SIGUSR1)
        files.append(file)
    deadline_s = time.monotonic() + _WRITTEN_S
    while time.monotonic() < deadline_s and not all(_text(file).endswith("\n") for file in files):
        time.sleep(_POLL_S)
    return "\n".join(f"--- {file.name} ---\n{_text(file)}" for file in files)


def _text(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def run_command(
    command: Sequence[str],
    *,
    timeout_s: float = 240.0,
    env: Mapping[str, str] | None = None,
    check: bool = False,
    logs: Callable[[], Iterable[Path]] = tuple,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with its output as text. At the deadline all its Python processes show their stacks.

    Args:
        command: program and arguments.
        timeout_s: seconds until it is ended.
        env: its environment; by default that of this process.
        check: whether an exit status other than 0 is an error.
        logs: files of its processes, which are shown as well at the deadline.
        options: further ones of `subprocess.Popen`.

    Raises:
        AssertionError: if it runs longer, or fails and ``check`` is true.
    """
    environment = {**(os.environ if env is None else env), "PYTHONFAULTHANDLER": "1"}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    with subprocess.Popen(command, env=environment, text=True, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException as ended:
            abort_with_children(process)
            out, err = process.communicate(timeout=_WRITTEN_S)
            if not isinstance(ended, subprocess.TimeoutExpired):
                raise
            shown = "\n".join(f"--- {file.name} ---\n{_text(file)}" for file in sorted(logs()))
            raise AssertionError(f"{[*command]} took over {timeout_s} s\n{out}\n{err}\n{shown}") from None
    assert not (check and process.returncode), f"{[*command]} ended with {process.returncode}\n{out}\n{err}"
    return subprocess.CompletedProcess(command, process.returncode, out, err)
