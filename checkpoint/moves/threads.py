"""Run work in several threads that share one iterator of items. The first error stops all threads and is raised."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class Shared(Generic[T]):
    """An iterator that several threads share; it ends early after `stop`."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items, self._lock = iter(items), threading.Lock()
        self.is_stopped = False

    def __iter__(self) -> Shared[T]:
        return self

    def __next__(self) -> T:
        with self._lock:
            if self.is_stopped:
                raise StopIteration
            return next(self._items)

    def stop(self) -> None:
        """End the iteration for all threads."""
        self.is_stopped = True


def in_threads(count: int, work: Callable[[Shared[T]], None], items: Iterable[T]) -> None:
    """Run ``work(shared items)`` in ``count`` threads, and wait for all of them.

    `Thread.join` is not used: after a Ctrl-C during a join, Python 3.11 regards the thread as ended, and a second join
    returns while the thread still runs.

    Raises:
        BaseException: the first error of any thread, or the interrupt of the wait. All threads have ended then, unless
            the wait for their end was interrupted too.
    """
    shared = Shared(items)
    errors: list[BaseException] = []

    def run(ended: threading.Event) -> None:
        try:
            work(shared)
        except BaseException as error:  # noqa: BLE001  raised again by the waiting thread
            shared.stop()
            errors.append(error)
        finally:
            ended.set()

    events = [threading.Event() for _ in range(count)]
    threads = [
        threading.Thread(target=run, args=(ended,), name=f"convert-{number}")
        for number, ended in enumerate(events)
    ]
    try:
        for thread in threads:
            thread.start()
        for ended in events:
            ended.wait()
    except BaseException:  # Ctrl-C reaches the waiting thread only
        shared.stop()
        for thread, ended in zip(threads, events, strict=True):
            if thread.ident is not None:  # otherwise not started yet; if it starts later, it gets no item
                ended.wait()
        raise
    if errors:
        raise errors[0]
