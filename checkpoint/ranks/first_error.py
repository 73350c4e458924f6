"""Keep a rank's first error while it continues to send and receive for other ranks; the rank raises it at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class FirstError:
    """Runs work until the first error. The error is kept, and later work is skipped."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def attempt(self, work: Callable[[], T]) -> T | None:
        """Run work and return its result; None if it raises, or was skipped after an earlier error."""
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
    """Context manager for cleanup after ``error``, if any: a second error becomes a note of the first."""
    try:
        yield
    except Exception as second:
        if error is None:
            raise
        error.add_note(f"then {type(second).__name__}: {second}")


@contextmanager
def adding_note(note: str | None) -> Iterator[None]:
    """Context manager: add a note, unless None, to an error of the block."""
    try:
        yield
    except BaseException as error:
        if note is not None:
            error.add_note(note)
        raise
