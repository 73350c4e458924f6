"""Threads that share work: what becomes of the work in progress when the process is interrupted."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support.processes import wait_until
from vescale_fsdp.conversion.engine.copying import CopyLimits
from vescale_fsdp.conversion.engine.threads import Shared, in_threads


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
            in_threads(1, work, range(3))
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == [0]


def test_threads_have_an_end() -> None:
    """Whatever is asked for, and however large the budget."""
    assert CopyLimits(1 << 60, threads=10**9).usable_threads == 1024
    assert CopyLimits(1 << 60, threads=7).usable_threads == 7
