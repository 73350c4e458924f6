"""The first error of a rank that other ranks wait for: it continues to send and receive, and raises at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class FirstError:
    """Does work until the first error, which is kept; later work is skipped."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def attempt(self, work: Callable[[], T]) -> T | None:
        """The result of the work; None if it raises, or there was an error before."""
        if self.error is None:
            try:
                return work()
            except BaseException as caught:  # noqa: BLE001  other ranks still wait for this rank's parts
                self.error = caught
        return None

    def raise_kept(self) -> None:
        """Raise the kept error, if there is one."""
        if self.error is not None:
            raise self.error


@contextmanager
def noting(error: BaseException | None) -> Iterator[None]:
    """Around the end of a block that ``error``, if not None, has ended: a second error becomes a note of it."""
    try:
        yield
    except Exception as second:
        if error is None:
            raise
        error.add_note(f"{type(second).__name__} met after that: {second}")


@contextmanager
def adding_note(note: str | None) -> Iterator[None]:
    """Add a note to an error of the block."""
    try:
        yield
    except BaseException as error:
        if note is not None:
            error.add_note(note)
        raise
