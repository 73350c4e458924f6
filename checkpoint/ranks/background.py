"""Work behind training that is finished before the process ends, and that survives a fork.

A pool of `concurrent.futures` loses such work: when the interpreter exits, pools take no more work, and a save that is
under way then cannot start the threads that write its files. So exits wait here, before any pool is closed:

    all work ends well              the process exits as it would have
    some work has failed, unheard   stderr says which; the exit status is 1
    some takes longer than allowed  stderr says which; the process exits at once, with status 1

A forked child has no threads of its parent's: it starts with none, and the parent's work is an error to wait for there.
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

# Imported before `_finish_at_exit` is registered, and so called after it: what closes all pools.
from concurrent.futures import Future, thread, wait
from queue import SimpleQueue
from typing import NoReturn

from vescale_fsdp.errors import ArgumentError, CheckpointError

EXIT_TIMEOUT_S = 60.0

assert thread is not None


class Job:
    """One piece of work.

    Args:
        what: for messages, such as "the save to /run/step-00000010".
        exit_timeout_s: how long an exit waits for it.
        is_needed: whether a process that loses it exits with status 1.
    """

    def __init__(self, what: str, exit_timeout_s: float, is_needed: bool) -> None:
        self.what, self.exit_timeout_s, self.is_needed = what, exit_timeout_s, is_needed
        self.future: Future[None] = Future()
        self.heard = False  # whether anybody has asked how it ended

    def run(self, work: Callable[[], None]) -> None:
        """Do it, and keep what it raises."""
        try:
            work()
        except BaseException as error:  # noqa: BLE001  raised by whoever asks for it, or reported at the exit
            self.future.set_exception(error)
        else:
            self.future.set_result(None)

    def disown(self) -> None:
        """In a forked child: let whoever waits hear that the work is another process's."""
        self.future.__init__()  # type: ignore[misc]  # the parent's lock may have been held by a thread
        self.heard = True
        self.future.set_exception(
            CheckpointError(
                "Work of the parent process cannot be waited for in a forked child.",
                expected=f"{self.what} to be waited for where it was started",
                got=f"process {os.getpid()}, a child",
                todo="wait before the fork, or in the parent",
            )
        )


class BackgroundThread:
    """One thread that does work in the order in which it is submitted; started when there is some.

    Args:
        name: of the thread.
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
        """Do this behind what was submitted before; arguments as for `Job`."""
        _jobs[:] = [job for job in _jobs if not _is_over(job)]
        job = Job(what, exit_timeout_s, is_needed)
        _jobs.append(job)
        self._queue.put((job, work))
        if self._thread is None:
            # A daemon: the exit waits for its work, with a bound, and not for the thread.
            self._thread = threading.Thread(target=_serve, args=(self._queue,), name=self._name, daemon=True)
            self._thread.start()
            weakref.finalize(self, self._queue.put, None)  # type: ignore[arg-type]  # ends the thread
        return job


def check_exit_timeout(exit_timeout_s: float) -> None:
    """Refuse what is no time to wait for.

    Raises:
        ValueError: for negative numbers and NaN.
    """
    if not exit_timeout_s >= 0:
        raise ArgumentError("exit_timeout_s is not a time.", expected=">= 0", got=exit_timeout_s)


_threads: weakref.WeakSet[BackgroundThread] = weakref.WeakSet()
_jobs: list[Job] = []  # under way, or failed and not asked for


def _serve(queue: SimpleQueue[tuple[Job, Callable[[], None]] | None]) -> None:
    while (item := queue.get()) is not None:
        job, work = item
        job.run(work)
        del item, job, work  # what work holds is not kept until there is more


def _is_over(job: Job) -> bool:
    return job.future.done() and (job.heard or job.future.exception() is None)


def _finish_at_exit() -> None:
    """Wait for what is under way; say what is lost."""
    start_s = time.monotonic()
    try:
        for job in list(_jobs):
            wait([job.future], max(0.0, start_s + job.exit_timeout_s - time.monotonic()))
    except KeyboardInterrupt:
        pass  # a second Ctrl-C: what is not done now is lost
    lost = [job for job in _jobs if not _is_over(job)]
    if not lost:
        return
    _report(lost)
    if any(not job.future.done() for job in lost):
        _leave()  # a thread that hangs would hold up the exit itself
    if any(job.is_needed for job in lost):
        if multiprocessing.parent_process() is not None:
            _leave()  # such children call no exit functions
        atexit.register(_leave)  # the first exit function to be called, when other threads have ended


def _report(lost: Sequence[Job]) -> None:
    for job in lost:
        if job.future.done():
            error = job.future.exception()
            said = f"failed: {type(error).__name__}: {error}"
        else:
            said = f"was not done {job.exit_timeout_s:g} s after the program had ended, and was given up"
        print(f"vescale_fsdp.checkpoint: {job.what} {said}", file=sys.stderr)


def _leave() -> NoReturn:
    """Exit with status 1, which nothing but this can change once the interpreter is exiting."""
    atexit.unregister(_leave)
    atexit._run_exitfuncs()  # the others, which would not be called
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    os._exit(1)


def _forget_parent() -> None:
    jobs = list(_jobs)
    _jobs.clear()
    for job in jobs:
        if not job.future.done():
            job.disown()
    for each in list(_threads):
        each._reset()


os.register_at_fork(after_in_child=_forget_parent)
# CPython 3.9-3.14: the only calls before `concurrent.futures` refuses new work; in reverse order.
threading._register_atexit(_finish_at_exit)  # type: ignore[attr-defined]
