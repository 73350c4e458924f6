"""Report the progress of a save, a load or a command to a function, or show it as a bar."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from vescale_fsdp.errors import format_bytes

_LINE_S = 10.0  # between two lines in a log; the last line is always written


class ProgressReport(NamedTuple):
    """Progress of one rank.

    Attributes:
        doing: "saving", "verifying" (hashing before a load) or "loading".
        done_bytes: number of bytes of this rank's part that are done.
        total_bytes: size of this rank's part.
        seconds: time since the work began.

    Examples:
        >>> report = ProgressReport("saving", done_bytes=50, total_bytes=100, seconds=5.0)
        >>> report.bytes_per_s, report.remaining_s
        (10.0, 5.0)
    """

    doing: str
    done_bytes: int
    total_bytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        """Average bytes per second since the work began."""
        return self.done_bytes / self.seconds if self.seconds else 0.0

    @property
    def remaining_s(self) -> float | None:
        """Expected remaining seconds at the average rate; None before the first byte."""
        return (self.total_bytes - self.done_bytes) / self.bytes_per_s if self.bytes_per_s else None


Tell = bool | Callable[[ProgressReport], object]
"""Type of ``progress`` arguments: a function that takes reports, called by one thread at a time; or True, which draws
a bar on a terminal and writes lines to a log file."""


class ProgressBar:
    """A progress bar of bytes on stderr; if stderr is no terminal, such as a log file, lines of text.

    Args:
        quiet: show nothing.
        label: text before the bar or in each line, such as "saving, rank 0". Lines are written only with a label.
    """

    def __init__(self, total_bytes: int, *, quiet: bool, label: str = "") -> None:
        self._bar = None
        self._label, self._quiet, self._last_line_s = label, quiet, time.monotonic()
        if not quiet and sys.stderr.isatty():
            from tqdm import tqdm  # imported late, for processes that show no bar

            self._bar = tqdm(
                total=total_bytes, unit="B", unit_scale=True, file=sys.stderr, desc=label or None
            )
        self._lock = threading.Lock()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def announce(self, total_bytes: int) -> None:
        """Set the total number of bytes, and start again from 0."""
        if self._bar is not None:
            self._bar.reset(total_bytes)

    def advance(self, nbytes: int) -> None:
        """Add bytes; thread-safe."""
        if self._bar is not None:
            with self._lock:
                self._bar.update(nbytes)

    def show(self, report: ProgressReport) -> None:
        """Draw a report, or write a line if the last one is old; the last report closes the bar."""
        if self._bar is None:
            if self._quiet or not self._label:
                return
            now_s, is_done = time.monotonic(), report.done_bytes >= report.total_bytes
            if is_done or now_s - self._last_line_s >= _LINE_S:
                self._last_line_s = now_s
                share = f"{format_bytes(report.done_bytes)} of {format_bytes(report.total_bytes)}"
                rate = f"{format_bytes(int(report.bytes_per_s))}/s"
                print(f"{self._label}: {share}, {report.seconds:.3g} s, {rate}", file=sys.stderr, flush=True)
        else:
            self._bar.update(report.done_bytes - self._bar.n)
            if report.done_bytes >= report.total_bytes:
                self._bar.close()


class Meter:
    """Counts the bytes of one save or load.

    Args:
        start: called with the kind of work and the total number of bytes when work begins; returns the function that
            takes the reports. None: nothing is reported.
    """

    def __init__(self, start: Callable[[str, int], Callable[[ProgressReport], object]] | None = None) -> None:
        self._start = start
        self._tell: Callable[[ProgressReport], object] | None = None
        self._lock = threading.Lock()
        self._report = ProgressReport("", 0, 0, 0.0)
        self._start_s = 0.0

    def begin(self, doing: str, total_bytes: int) -> None:
        """Start counting from 0; called again when an upload is retried."""
        if self._start is None:
            return
        self._start_s = time.monotonic()
        self._report = ProgressReport(doing, 0, total_bytes, 0.0)
        self._tell = self._start(doing, total_bytes)
        self._tell(self._report)

    def advance(self, num_bytes: int) -> None:
        """Add bytes; thread-safe."""
        if self._tell is not None and num_bytes:
            with self._lock:  # also around the call: a report function need not be thread-safe
                doing, done_bytes, total_bytes, _ = self._report
                seconds = time.monotonic() - self._start_s
                self._report = ProgressReport(doing, done_bytes + num_bytes, total_bytes, seconds)
                self._tell(self._report)


def meter_for(progress: Tell, rank: int) -> Meter:
    """Return a meter that reports to a function, draws a bar of rank 0's bytes on rank 0, or does nothing."""
    if callable(progress):
        return Meter(lambda doing, total_bytes: progress)
    if progress and rank == 0:
        # Named by the rank: all ranks write their own bytes, and the checkpoint has more.
        return Meter(
            lambda doing, nbytes: ProgressBar(nbytes, quiet=False, label=f"{doing}, rank {rank}").show
        )
    return Meter()
