"""Background work that finishes before the process exits, and that is safe with fork.

A thread pool of `concurrent.futures` would lose such work: at exit, pools accept no new work, so a running save could
not start the threads that write its files. An exiting process therefore waits for the work before it closes the pools:

    all work succeeds                     the process exits normally
    work fails and its error is not read  stderr names the work; the exit status is 1
    work exceeds its exit_timeout_s       stderr names the work; the process exits at once, with status 1

A forked child does not have its parent's threads: in the child, waiting for the parent's work is an error.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence

# The import of `thread` registers an exit function that closes all pools. This function is registered before
# `_finish_at_exit`, and therefore runs after it.
from concurrent.futures import Future, thread, wait
from queue import SimpleQueue
from typing import NoReturn

from vescale_fsdp.errors import ArgumentError, CheckpointError

EXIT_TIMEOUT_S = 60.0

assert thread is not None  # marks the import as used, so that no linter removes it


class Job:
    """One unit of background work.

    Args:
        what: name of the work for messages, such as "the save to /run/step-00000010".
        exit_timeout_s: how long an exiting process waits for the work, in seconds.
        is_needed: whether the process exits with status 1 if the work fails and no caller has read its error.
    """

    def __init__(self, what: str, exit_timeout_s: float, is_needed: bool) -> None:
        self.what, self.exit_timeout_s, self.is_needed = what, exit_timeout_s, is_needed
        self.future: Future[None] = Future()
        self.is_read = False  # whether a caller has read the result

    def run(self, work: Callable[[], None]) -> None:
        """Do the work, and store its success or error in the future."""
        try:
            work()
        except BaseException as error:  # noqa: BLE001  raised by the caller that waits, or reported at the exit
            self.future.set_exception(error)
        else:
            self.future.set_result(None)

    def disown(self) -> None:
        """In a forked child, make waiting for this job of the parent an error."""
        self.future.__init__()  # type: ignore[misc]  # a new lock: a thread of the parent may have held the old one
        self.is_read = True  # the child's exit does not report the error
        self.future.set_exception(
            CheckpointError(
                "Work of the parent process cannot be waited for in a forked child.",
                expected=f"a wait for {self.what} in the process that started it",
                got=f"process {os.getpid()}, a child",
                todo="wait before the fork, or in the parent",
            )
        )


class BackgroundThread:
    """A thread that does work in the order of submission. The first `submit` starts the thread.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._reset()
        _threads.add(self)

    def _reset(self) -> None:
        self._queue: SimpleQueue[tuple[Job, Callable[[], None]]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(
        self,
        work: Callable[[], None],
        what: str,
        *,
        exit_timeout_s: float = EXIT_TIMEOUT_S,
        is_needed: bool = True,
    ) -> Job:
        """Queue work, and return its `Job`; for the arguments see `Job`."""
        _jobs[:] = [job for job in _jobs if not _is_over(job)]  # keeps errors for `_report`
        job = Job(what, exit_timeout_s, is_needed)
        _jobs.append(job)
        self._queue.put((job, work))
        if self._thread is None:
            # A daemon thread, for which Python does not wait at exit: `_finish_at_exit` waits, with a time limit.
            self._thread = threading.Thread(target=_serve, args=(self._queue,), name=self._name, daemon=True)
            self._thread.start()
            weakref.finalize(self, self._queue.put, None)  # type: ignore[arg-type]  # None ends the thread
        return job


def check_exit_timeout(exit_timeout_s: float) -> None:
    """Check an ``exit_timeout_s`` argument.

    Raises:
        ArgumentError: for negative numbers, NaN, and values that are no numbers.
    """
    # Not `< 0`, which is False for NaN.
    if not isinstance(exit_timeout_s, (int, float)) or not exit_timeout_s >= 0:
        raise ArgumentError(
            "exit_timeout_s is not a time.",
            expected=">= 0",
            got=exit_timeout_s,
            where="exit_timeout_s=..",
        )


# Weak references, because the thread of an unreferenced object ends.
_threads: weakref.WeakSet[BackgroundThread] = weakref.WeakSet()
_jobs: list[Job] = []  # jobs that run, or have failed with an error that no caller has read


def _serve(queue: SimpleQueue[tuple[Job, Callable[[], None]] | None]) -> None:
    while (item := queue.get()) is not None:
        job, work = item
        job.run(work)
        del item, job, work  # the work may refer to large tensors, which must not live until the next item


def _is_over(job: Job) -> bool:
    """Return whether a job has succeeded, or has failed and a caller has read its error."""
    return job.future.done() and (job.is_read or job.future.exception() is None)


def _finish_at_exit() -> None:
    """Wait for running work at the exit, and report work that has failed or is not done."""
    start_s = time.monotonic()  # all jobs' time limits begin now
    try:
        for job in list(_jobs):
            wait([job.future], max(0.0, start_s + job.exit_timeout_s - time.monotonic()))
    except KeyboardInterrupt:
        pass  # Ctrl-C ends the wait: unfinished work is given up
    lost = [job for job in _jobs if not _is_over(job)]
    if not lost:
        return
    _report(lost)
    if any(not job.future.done() for job in lost):
        _leave()  # at once, because a hanging thread would block the normal exit
    if any(job.is_needed for job in lost):
        if multiprocessing.parent_process() is not None:
            _leave()  # now, because child processes of multiprocessing call no atexit functions
        # Exit functions run after other threads have ended; the function registered last runs first.
        atexit.register(_leave)


def _report(lost: Sequence[Job]) -> None:
    for job in lost:
        if job.future.done():
            error = job.future.exception()
            outcome = f"failed: {type(error).__name__}: {error}"
        else:
            outcome = f"was not done {job.exit_timeout_s:g} s after the program had ended, and was given up"
        print(f"vescale_fsdp.checkpoint: {job.what} {outcome}", file=sys.stderr)


def _leave() -> NoReturn:
    """Exit with status 1, by `os._exit`: an exiting interpreter has no other way to change its status."""
    # `os._exit` would skip the other exit functions and the flush of logs and streams, so they are called here.
    atexit.unregister(_leave)  # first, or `_run_exitfuncs` would call this function again
    atexit._run_exitfuncs()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    os._exit(1)


def _forget_parent() -> None:
    """In a forked child, drop the parent's work and threads, which do not exist there."""
    jobs = list(_jobs)
    _jobs.clear()
    for job in jobs:
        if not job.future.done():
            job.disown()
    for each in list(_threads):
        each._reset()  # the next `submit` then starts a thread of the child


os.register_at_fork(after_in_child=_forget_parent)
# Not `atexit`, whose functions run after `concurrent.futures` has closed its pools. Private in CPython 3.9-3.14; the
# function registered last runs first.
threading._register_atexit(_finish_at_exit)  # type: ignore[attr-defined]
