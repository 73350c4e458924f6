"""Threads that share work. The first error ends the work, and is raised when all threads have stopped.

in_threads   threads take items from one iterator; each thread has state of its own, such as a buffer
for_each     threads take items from one iterator, and call a function for each item
Workers      the calling thread submits work when it is ready, such as the write of a chunk that has arrived
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from vescale_fsdp.checkpoint.ranks.first_error import FirstError

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


def in_threads(count: int, work: Callable[[Shared[T]], None], items: Iterable[T], *, name: str) -> None:
    """Run ``work(shared items)`` in ``count`` threads, and wait for all threads.

    An event per thread replaces `Thread.join`: after a Ctrl-C during a join, Python 3.11 regards the thread as ended,
    and a second join returns while the thread still runs.

    Args:
        name: prefix of the threads' names.

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
        threading.Thread(target=run, args=(ended,), name=f"{name}-{number}")
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
            if thread.ident is not None:  # None: not started; a thread that still starts gets no items
                ended.wait()
        raise
    if errors:
        raise errors[0]


def for_each(
    count: int,
    work: Callable[[T], int],
    items: Iterable[T],
    *,
    name: str,
    advance: Callable[[int], object] = lambda nbytes: None,
) -> int:
    """Call ``work`` for each item in ``count`` threads; a single thread is the calling one.

    Args:
        work: returns the number of bytes done.
        advance: called with these bytes after each item, from several threads, such as `Meter.advance`.

    Returns:
        The sum of all bytes.

    Raises:
        BaseException: as `in_threads`.
    """
    done: list[int] = []

    def run(shared: Iterable[T]) -> None:
        for item in shared:
            nbytes = work(item)
            done.append(nbytes)  # a list, since `append` needs no lock
            advance(nbytes)

    if count <= 1:
        run(items)
    else:
        in_threads(count, run, items, name=name)
    return sum(done)


class Workers:
    """A context manager: threads that do submitted work in order. The block's end waits for all work.

    Args:
        count: number of threads.
        kept: keeps the first error; later work is skipped. A `TurnExchange` may keep its errors there too.
    """

    def __init__(self, count: int, kept: FirstError, *, name: str) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=name)
        self._kept, self._most = kept, 2 * count
        self._pending: deque[Future[object]] = deque()

    def submit(self, work: Callable[[], object]) -> Future[object]:
        """Submit work. Waits while two pieces of work per thread are pending, which bounds the memory."""
        while len(self._pending) >= self._most:
            self._pending.popleft().result()
        self._pending.append(self._pool.submit(self._kept.attempt, work))
        return self._pending[-1]

    def wait(self) -> None:
        """Wait for all submitted work."""
        while self._pending:
            self._pending.popleft().result()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pool.shutdown(cancel_futures=kind is not None)
