"""Waits for other ranks that end as soon as a rank is known to be lost, in elastic jobs on gloo.

If a connection ends while gloo sends or receives a message, gloo forgets the message, and the wait for it ends with the
group's time-out (torch 2.13: so did the wait for a send of 256 MB to a process that was killed meanwhile). No call of
torch ends such a wait. So a helper thread waits, and `interrupt` lets the caller leave. The helper, and the memory of
the message, stay until the time-out.

Outside of elastic jobs, calls run in the caller's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread, local
from typing import Any, TypeVar

from vescale_fsdp.errors import LifecycleError

T = TypeVar("T")


class _Helper:
    """A thread that runs calls one after the other, and can be left behind."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        # A daemon: a process that ends need not wait for messages that never arrive.
        Thread(target=self._run, name="vescale_fsdp waits", daemon=True).start()

    def _run(self) -> None:
        _own.is_helper = True
        while (queued := self.calls.get()) is not None:
            call, answer = queued
            finish = _finishing(call, answer)
            with _lock:
                is_kept = is_active
                if is_kept:  # first, since the caller may wait again at once
                    _idle.append(self)
                if not answer.done():  # the caller has not left
                    finish()
            del queued, call, answer, finish  # the thread must not keep buffers alive while it is idle
            if not is_kept:
                return


def _finishing(call: Callable[[], Any], answer: Future[Any]) -> Callable[[], None]:
    """Run a call; return what gives its result or its error to the caller."""
    try:
        return partial(answer.set_result, call())
    except BaseException as error:  # noqa: BLE001  raised by the caller, if it still waits
        return partial(answer.set_exception, error)


_lock = Lock()
is_active = False  # whether waits can be left: between `allow_interrupts` and `end_interrupts`
_is_interrupted = False
_own = local()  # `is_helper`: in a helper, whose caller can leave, calls run at once
_pending: set[Future[Any]] = set()  # of callers that wait
_idle: list[_Helper] = []


def allow_interrupts() -> None:
    """Let helpers wait, until `end_interrupts`.

    Only if all groups are gloo's: a wait for NCCL belongs to the caller's stream.
    """
    global is_active, _is_interrupted
    with _lock:
        is_active, _is_interrupted = True, False


def interrupt() -> None:
    """Let all callers leave their waits, with an error; later waits fail at once, until `end_interrupts`.

    Close gloo's connections first: else messages of other ranks could arrive in memory that is used again.
    """
    global _is_interrupted
    with _lock:
        _is_interrupted = is_active
        for answer in _pending if is_active else ():
            if not answer.done():
                answer.set_exception(_lost())


def end_interrupts() -> None:
    """Let calls run in their callers' threads again, and end idle helpers."""
    global is_active, _is_interrupted
    with _lock:
        is_active = _is_interrupted = False
        helpers = [*_idle]
        _idle.clear()
    for helper in helpers:
        helper.calls.put(None)


def _lost() -> LifecycleError:
    return LifecycleError("A member of the epoch was lost.", expected="all ranks to answer")


def interruptibly(call: Callable[[], T]) -> T:
    """Run a call that waits for other ranks.

    Raises:
        LifecycleError: if a rank is lost, in an elastic job. The call then goes on without effect on this thread.
    """
    if not is_active or vars(_own).get("is_helper"):
        return call()
    answer: Future[T] = Future()
    with _lock:
        if _is_interrupted:
            raise _lost()
        _pending.add(answer)
        helper = _idle.pop() if _idle else None
    (helper or _Helper()).calls.put((call, answer))
    try:
        return answer.result()
    finally:
        with _lock:
            _pending.discard(answer)
        del answer  # its error refers to this frame
