"""Streams: the source of the runtime's streams and events, which a test can replace.

    streams_of(cuda)  -> DeviceStreams     the device module's own streams and events
    streams_of(cpu)   -> None              work runs in the host's order

The runtime gets all streams from this module. A test passes a `Streams` to `CommContext` that records the waits between
streams, and checks the order on a CPU.

Streams and events come from ``torch.cuda`` (or another device's module), not from the generic ``torch.Stream``: a
``torch.cuda.Event`` keeps its handle in a field that the generic ``wait_event`` does not read (torch 2.11-2.13,
``torch/csrc/Stream.cpp`` and ``cuda/Event.cpp``), so a wait for a user's event could have no effect. The device
module's classes accept both kinds of event.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Block the host until the work before this point is done."""


class Stream(Protocol):
    """A queue of device work."""

    def record_event(self) -> Event:
        """The point after all work queued so far."""

    def wait_event(self, event: Event) -> None:
        """Start later work of this stream only after this point of another stream."""

    def wait_stream(self, stream: Any) -> None:
        """Start later work of this stream only after all work that is queued in the other stream now."""


class Streams(ABC):
    """Source of streams."""

    @abstractmethod
    def new(self) -> Stream:
        """A stream with priority over the compute stream."""

    @abstractmethod
    def current(self) -> Stream:
        """The stream on which the caller's work is queued."""

    @abstractmethod
    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Queue the work of a ``with`` block on this stream. Memory allocated in the block belongs to the stream."""


class DeviceStreams(Streams):
    """Streams of one accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)

    def new(self) -> Stream:
        """A stream of high priority: collectives must not queue behind compute kernels."""
        return self._module.Stream(device=self._device, priority=-1)  # type: ignore[no-any-return]

    def current(self) -> Stream:
        """The device's current stream."""
        return self._module.current_stream(self._device)  # type: ignore[no-any-return]

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """The device module's own context."""
        return self._module.stream(stream)  # type: ignore[no-any-return]


def streams_of(device: torch.device) -> Streams | None:
    """The streams of a device; None for the CPU (and meta), which has none."""
    return None if device.type in ("cpu", "meta") else DeviceStreams(device)
