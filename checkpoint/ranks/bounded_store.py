"""Calls of a torch store that end: torch's own wait for ever where a store's process is stalled (2.11-2.15).

A store whose process is gone fails at once, since the kernel closes its connections. One that is stopped, or on a
machine that is gone without a word, answers nothing, and its clients' time-outs do not cover what they read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from threading import Thread
from typing import Any, TypeVar

import torch.distributed as dist

from vescale_fsdp.errors import LifecycleError

T = TypeVar("T")
_POLL_S = 0.02


def within(timeout_s: float, call: Callable[[], T], what: str) -> T:
    """What a call returns or raises, if it ends in time; a call that does not goes on in a thread of its own.

    Args:
        what: whose answer is awaited, for the error.

    Raises:
        LifecycleError: if it does not.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  raised by who waits
            future.set_exception(error)

    Thread(target=run, name="bounded-call", daemon=True).start()
    try:
        return future.result(timeout_s)
    except TimeoutError:
        if future.done():  # the call itself has raised it
            raise
        raise LifecycleError(
            "A store does not answer.",
            expected=f"an answer within {timeout_s:g} s",
            got="none: its process is stalled, or its machine is gone",
            where=what,
            todo="look at the process that holds the store; restart it, and this job",
        ) from None


class BoundedStore(dist.Store):
    """A store none of whose calls takes longer than a time.

    Args:
        store: what is asked.
        timeout_s: of each call, and of waiting for keys where the caller gives no time.
    """

    def __init__(self, store: dist.Store, timeout_s: float) -> None:
        super().__init__()
        self._store, self._timeout_s = store, timeout_s

    def _ask(self, call: Callable[[], T], what: str) -> T:
        try:
            return within(self._timeout_s, call, what)
        except dist.DistNetworkError as lost:
            raise LifecycleError(
                "The store where processes meet was lost.",
                expected="the process that holds it to live as long as any that meets there",
                got=f"{type(lost).__name__}: {lost}",
                where=what,
                todo="see why that process has ended; start it, and this job, again",
            ) from lost

    def set(self, key: str, value: Any) -> None:
        self._ask(lambda: self._store.set(key, value), f"set {key}")

    def get(self, key: str) -> bytes:
        self.wait([key])  # torch's would wait by itself, as long as it likes
        return self._ask(lambda: self._store.get(key), f"get {key}")

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self._ask(lambda: self._store.compare_set(key, expected, desired), f"compare_set {key}")

    def add(self, key: str, amount: int) -> int:
        return self._ask(lambda: self._store.add(key, amount), f"add {key}")

    def check(self, keys: list[str]) -> bool:
        return self._ask(lambda: self._store.check(keys), f"check {keys[:4]}")

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return when all keys are there.

        Raises:
            DistStoreError: if they are not in time.
            LifecycleError: if the store does not answer.
        """
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        deadline_s = time.monotonic() + timeout_s
        while not self.check(keys):
            if time.monotonic() > deadline_s:
                raise dist.DistStoreError(f"{keys[:4]} did not come within {timeout_s:g} s")
            time.sleep(_POLL_S)

    def delete_key(self, key: str) -> bool:
        return self._ask(lambda: self._store.delete_key(key), f"delete_key {key}")

    deleteKey = delete_key  # the name under which torch asks for it

    def num_keys(self) -> int:
        return self._ask(self._store.num_keys, "num_keys")

    def has_extended_api(self) -> bool:
        return False
