"""A few threads that share one iterator of work; the first error stops them all and is raised."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

__all__ = ["Shared", "in_threads"]

T = TypeVar("T")


class Shared(Generic[T]):
    """One iterator, taken from by several threads, that ends early when one of them fails."""

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
        """No thread gets another item."""
        self.is_stopped = True


def in_threads(count: int, work: Callable[[Shared[T]], None], items: Iterable[T]) -> None:
    """Run ``work(shared items)`` in so many threads and wait for all of them.

    Raises:
        BaseException: the first error of any thread, or what interrupted the wait; the others have ended then.
    """
    shared = Shared(items)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work(shared)
        except BaseException as error:  # noqa: BLE001  (raised again below, by the thread that waits)
            shared.stop()
            errors.append(error)

    threads = [threading.Thread(target=run, name=f"convert-{number}") for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:  # Ctrl-C reaches the waiting thread only
        shared.stop()
        for thread in threads:
            thread.join()
        raise
    if errors:
        raise errors[0]
