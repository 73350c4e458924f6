"""Interruptible waits: in elastic jobs on gloo, waits for other ranks end as soon as a rank is known to be lost.

If a connection ends while gloo sends or receives a message, gloo forgets the message, and the wait for it ends with the
group's time-out (torch 2.13: so did the wait for a send of 256 MB to a process that was killed meanwhile). No call of
torch ends such a wait. A helper thread waits instead, and `interrupt` releases the caller. The helper and the message's
memory remain until the time-out.

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
    """A thread that runs calls in order and can be abandoned."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        # A daemon: a process that ends need not wait for messages that never arrive.
        Thread(target=self._run, name="vescale_fsdp waits", daemon=True).start()

    def _run(self) -> None:
        _own.is_helper = True
        while (queued := self.calls.get()) is not None:
            call, answer = queued
            finish = _run_call(call, answer)
            with _lock:
                # An abandoned helper ends: freeing its call, and so a group, may take long.
                is_kept = is_active and not answer.done()
                if is_kept:  # first, since the caller may wait again at once
                    _idle.append(self)
                if not answer.done():  # the caller has not left
                    finish()
            del queued, call, answer, finish  # the thread must not keep buffers alive while it is idle
            if not is_kept:
                return


def _run_call(call: Callable[[], Any], answer: Future[Any]) -> Callable[[], None]:
    """Run a call; return a function that passes its result or error to the caller."""
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
    """Run waits in helper threads until `end_interrupts`, so that `interrupt` can end them.

    Call it only if all groups use gloo: a wait for NCCL belongs to the caller's stream.
    """
    global is_active, _is_interrupted
    with _lock:
        is_active, _is_interrupted = True, False


def interrupt() -> None:
    """End all waits with an error; later waits fail at once, until `end_interrupts`.

    Close gloo's connections first; otherwise messages from other ranks could arrive in reused memory.
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
    return LifecycleError(
        "The epoch ended while this rank waited.",
        expected="all ranks to answer",
        got="a lost member, or a change of members",
    )


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
