"""Run work in several threads that share one iterator of items. The first error stops all threads, and is raised."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class Shared(Generic[T]):
    """An iterator that several threads share; `stop` ends it early.

    Generators are not thread-safe, so a lock protects each step.
    """

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
    """Run ``work(shared items)`` in ``count`` threads, and wait for all threads.

    An event per thread replaces `Thread.join`: after a Ctrl-C during a join, Python 3.11 regards the thread as ended,
    and a second join returns while the thread still runs.

    Raises:
        BaseException: the first error of any thread, or the KeyboardInterrupt that ended the wait. All threads have
            ended by then, unless a second interrupt came during the wait for their end.
    """
    shared = Shared(items)
    errors: list[BaseException] = []

    def run(ended: threading.Event) -> None:
        try:
            work(shared)
        except BaseException as error:  # noqa: BLE001  the waiting thread raises it again
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
    except BaseException:  # Ctrl-C: only the waiting (main) thread gets it
        shared.stop()
        for thread, ended in zip(threads, events, strict=True):
            if thread.ident is not None:  # None: not started. If it still starts, it gets no items.
                ended.wait()
        raise
    if errors:
        raise errors[0]
