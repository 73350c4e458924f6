"""Work shared by threads: all of it is done, or the first error ends it, and no thread is left behind."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import pytest

from tests.support.processes import wait_until
from vescale_fsdp.checkpoint.ranks.first_error import FirstError
from vescale_fsdp.checkpoint.ranks.threads import Shared, Workers, for_each, in_threads


def _names(prefix: str) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(prefix)]


@pytest.mark.parametrize("count", [1, 4])
def test_each_item_is_done_once_and_counted(count: int) -> None:
    done: list[int] = []
    counted: list[int] = []

    def work(item: int) -> int:
        done.append(item)
        return item

    assert for_each(count, work, iter(range(100)), name="t", advance=counted.append) == sum(range(100))
    assert sorted(done) == sorted(counted) == [*range(100)]
    assert for_each(count, work, [], name="t") == 0


@pytest.mark.parametrize("count", [1, 3])
def test_the_first_error_ends_the_work(count: int) -> None:
    """Items that no thread has taken are left alone; the error comes out when all threads have ended."""
    done: list[int] = []

    def work(item: int) -> int:
        if item == 5:
            raise OSError("planted")
        done.append(item)
        # Work under way goes on until the error is noticed.
        wait_until(
            lambda: item < 5 or count == 1 or len(_names("failing")) < count, "the failed thread to end"
        )
        return 1

    with pytest.raises(OSError, match="planted"):
        for_each(count, work, range(1000), name="failing")
    assert len(done) <= 5 + count and _names("failing") == []


def test_workers_keep_the_first_error_and_skip_what_follows() -> None:
    """Work runs in order of submission, with a bound on what is pending; after an error the rest is skipped."""
    kept, done = FirstError(), list[int]()
    go = threading.Event()

    def work(number: int) -> Callable[[], None]:
        def run() -> None:
            assert go.wait(60)
            if number == 3:
                raise OSError("planted")
            done.append(number)

        return run

    def submit_all(workers: Workers) -> None:
        for number in range(8):
            workers.submit(work(number))
            submitted.append(number)
        workers.wait()

    submitted: list[int] = []
    with Workers(1, kept, name="working") as workers:
        submitting = threading.Thread(target=submit_all, args=(workers,))
        submitting.start()
        wait_until(lambda: submitted == [0, 1], "two pieces of work to be pending")
        go.set()
        submitting.join(60)
    assert submitted == [*range(8)] and done == [0, 1, 2] and _names("working") == []
    with pytest.raises(OSError, match="planted"):
        kept.raise_kept()


def test_a_block_that_is_left_by_an_error_waits_for_work_under_way_alone() -> None:
    """As on Ctrl-C: what runs ends, what is queued is cancelled."""
    kept, done = FirstError(), list[int]()
    begun, go = threading.Event(), threading.Event()

    def work(number: int) -> Callable[[], None]:
        def run() -> None:
            begun.set()
            assert go.wait(60)
            done.append(number)

        return run

    def leave() -> None:
        with Workers(1, kept, name="leaving") as workers:
            for number in range(2):
                workers.submit(work(number))
            assert begun.wait(60)
            threading.Timer(0.05, go.set).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        leave()
    assert done == [0] and kept.error is None and _names("leaving") == []


def test_threads_have_ended_when_ctrl_c_is_raised() -> None:
    """Ctrl-C in the middle of a piece of work: the piece is finished, no other is begun, and only then is it raised."""
    done: list[int] = []

    def work(shared: Shared[int]) -> None:
        for item in shared:
            os.kill(os.getpid(), signal.SIGINT)
            wait_until(lambda: shared.is_stopped, "Ctrl-C to be noticed")
            done.append(item)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            in_threads(1, work, range(3), name="test")
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == [0]
