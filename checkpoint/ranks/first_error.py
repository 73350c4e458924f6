"""Keep a rank's first error while the rank continues to send and receive for other ranks, and raise the error later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class FirstError:
    """Runs work until the first error, which is kept in ``error``; later work is skipped."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def attempt(self, work: Callable[[], T]) -> T | None:
        """Run ``work`` and return its result; None if ``work`` raises, or is skipped because of an earlier error."""
        if self.error is None:
            try:
                return work()
            except BaseException as caught:  # noqa: BLE001  kept: other ranks still wait for messages of this rank
                self.error = caught
        return None

    def raise_kept(self) -> None:
        """Raise the kept error, if there is one."""
        if self.error is not None:
            raise self.error


@contextmanager
def noting(error: BaseException | None) -> Iterator[None]:
    """Context manager for cleanup: an error in the block becomes a note of ``error``, or is raised if that is None."""
    try:
        yield
    except Exception as second:  # any class: cleanup must not hide the first error
        if error is None:
            raise
        error.add_note(f"then {type(second).__name__}: {second}")


@contextmanager
def adding_note(note: str | None) -> Iterator[None]:
    """Context manager: add ``note`` to an error that the block raises; no note if None."""
    try:
        yield
    except BaseException as error:  # Ctrl-C gets the note too
        if note is not None:
            error.add_note(note)
        raise
