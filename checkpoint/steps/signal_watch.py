"""`SignalWatch`: hears signals that announce the end of a job, without ending the process.

Whoever listened before is called too, and is back when the watch is closed. Processes forked from this one, such as
a data loader's workers, inherit the handler: to them, and once the watch is closed, it is as if there were none, so
that ``terminate()`` goes on ending them.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any

from vescale_fsdp.errors import ArgumentError


class SignalWatch:
    """Remembers which of some signals came.

    Args:
        names: such as SIGTERM.

    Attributes:
        heard: numbers of those that came.

    Raises:
        ValueError: outside of the main thread, where Python lets nobody listen.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.heard: set[int] = set()
        self._process = os.getpid()
        self._before: dict[int, Any] = {}
        self._is_closed = False
        if threading.current_thread() is not threading.main_thread():
            raise ArgumentError(
                "Signals can be heard in the main thread only.",
                expected="a manager with OnSignal() to be made there",
                got=f"thread {threading.current_thread().name}",
            )
        for name in names:
            number = signal.Signals[name]
            self._before[number] = signal.getsignal(number)
            signal.signal(number, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        before = self._before[number]
        is_ours = not self._is_closed and os.getpid() == self._process
        if is_ours:
            self.heard.add(number)
        if callable(before):
            before(number, frame)
        elif before == signal.SIG_DFL and not is_ours:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def close(self) -> None:
        """Give signals back to whoever had them; whoever listens by now goes on to."""
        if self._is_closed:
            return
        self._is_closed = True
        for number, before in self._before.items():
            # None: it was not Python that listened, and nothing can bring that back.
            if signal.getsignal(number) == self._hear and before is not None:
                signal.signal(number, before)
