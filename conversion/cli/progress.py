"""How far a command has come."""

from __future__ import annotations

import sys
import threading

__all__ = ["ProgressBar"]


class ProgressBar:
    """Bytes on stderr; nothing if that is no terminal."""

    def __init__(self, total_bytes: int, *, quiet: bool) -> None:
        self._bar = None
        if not quiet and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total_bytes, unit="B", unit_scale=True, file=sys.stderr)
        self._lock = threading.Lock()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def announce(self, total_bytes: int) -> None:
        """What there is to do, once it is known."""
        if self._bar is not None:
            self._bar.reset(total_bytes)

    def advance(self, nbytes: int) -> None:
        """From any thread."""
        if self._bar is not None:
            with self._lock:
                self._bar.update(nbytes)
