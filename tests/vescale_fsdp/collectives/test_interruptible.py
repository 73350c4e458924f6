"""Waits for other ranks that can be left, as elastic jobs leave them."""

from __future__ import annotations

import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.support.distributed import run_ranks
from tests.support.processes import wait_until
from vescale_fsdp.collectives.interruptible import (
    allow_interrupts,
    end_interrupts,
    interrupt,
    interruptibly,
)
from vescale_fsdp.collectives.slice_exchange import receive_async, send_async, wait_for
from vescale_fsdp.elastic.connections import close_gloo_connections
from vescale_fsdp.errors import LifecycleError

_TIMEOUT_S = 40.0


def _loses_a_message() -> tuple[str, float]:
    """Rank 1 closes its connections while it receives: rank 0's error, and for how long it waited."""
    group = dist.new_group(timeout=timedelta(seconds=_TIMEOUT_S))
    message = torch.zeros(128 << 20, dtype=torch.uint8)
    work = send_async(message, group, 1) if dist.get_rank() == 0 else None
    dist.barrier()
    if dist.get_rank() == 1:
        receive_async(message, group, 0)
        close_gloo_connections()
        return "", 0.0
    began_s = time.monotonic()
    allow_interrupts()
    threading.Timer(1.0, interrupt).start()
    try:
        wait_for(work)
    except RuntimeError as error:
        return type(error).__name__, time.monotonic() - began_s
    finally:
        end_interrupts()
    return "", time.monotonic() - began_s


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which connections are gloo's")
def test_a_message_that_gloo_has_lost_is_left() -> None:
    """gloo waits for it until the time-out of the group."""
    (error, waited_s), _ = run_ranks(2, _loses_a_message)
    assert error == "LifecycleError" and waited_s < _TIMEOUT_S / 2


def test_calls_that_can_be_left() -> None:
    """Results and errors are passed on, from few threads; interrupted and later calls fail at once."""
    before = threading.active_count()
    assert interruptibly(lambda: threading.current_thread()) is threading.current_thread()
    allow_interrupts()
    try:
        own = [interruptibly(threading.current_thread) for _ in range(50)]
        assert threading.current_thread() not in own and len(set(own)) <= 2
        with pytest.raises(ZeroDivisionError):
            interruptibly(lambda: 1 // 0)
        ended = threading.Event()
        threading.Timer(0.05, interrupt).start()
        for _ in range(2):
            with pytest.raises(LifecycleError):
                interruptibly(lambda: ended.wait(60))
        assert not ended.is_set()
        ended.set()
        allow_interrupts()
        assert interruptibly(lambda: 3) == 3
    finally:
        end_interrupts()
    assert interruptibly(threading.current_thread) is threading.current_thread()
    wait_until(lambda: threading.active_count() <= before, "the threads to end")
