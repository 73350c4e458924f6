"""The first error of a rank that others wait for: it goes on sending and receiving, and raises when all are served."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class FirstError:
    """Does work until some fails, then none; keeps what that raised."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def attempt(self, work: Callable[[], T]) -> T | None:
        """What the work returns; None if it raises, which is kept, or if something has gone wrong before."""
        if self.error is None:
            try:
                return work()
            except BaseException as caught:  # noqa: BLE001  others still wait for this rank's parts
                self.error = caught
        return None

    def raise_kept(self) -> None:
        """Raise what was kept, if anything."""
        if self.error is not None:
            raise self.error


@contextmanager
def noting(error: BaseException | None) -> Iterator[None]:
    """Around what ends a block that ``error`` has left, if anything has: what fails here as well is a note of it."""
    try:
        yield
    except Exception as second:
        if error is None:
            raise
        error.add_note(f"{type(second).__name__} met after that: {second}")


@contextmanager
def telling(note: str | None) -> Iterator[None]:
    """Around what may fail: its error gets a note."""
    try:
        yield
    except BaseException as error:
        if note is not None:
            error.add_note(note)
        raise
