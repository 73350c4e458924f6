"""Meetings of ranks before calls that communicate: how many there were, and how long a rank waits for other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from torch.distributed.device_mesh import DeviceMesh

from vescale_fsdp.dtensor import meeting
from vescale_fsdp.runtime.comm import order_watch


def meetings(mesh: DeviceMesh) -> int:
    """How many calls of this rank have met the other ranks of a mesh of one axis."""
    met = meeting.meeting_of(mesh.get_group())
    assert met is not None
    return met.count


@contextmanager
def short_waits(**seconds: float) -> Iterator[None]:
    """Shorten the waits of this process.

    Args:
        seconds: ``bound``: a rank gives up a meeting; ``report``: it warns of missing ranks; ``ask``: it compares its
            call with those of waiting ranks; ``order``: ranks whose collectives differ in order raise.
    """
    names = {"bound": "BOUND_S", "report": "REPORT_S", "ask": "ASK_S"}
    with ExitStack() as patches:
        for wait, value in seconds.items():
            owner, name = (order_watch, "BOUND_S") if wait == "order" else (meeting, names[wait])
            patches.enter_context(mock.patch.object(owner, name, value))
        yield
