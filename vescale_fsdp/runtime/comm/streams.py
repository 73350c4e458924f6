"""Streams: creates the runtime's streams and events. A test can replace it.

    streams_of(cuda)  -> DeviceStreams     the device module's own streams and events
    streams_of(cpu)   -> None              work runs in the host's order

The runtime gets all streams from this module. A test passes a `Streams` of its own to `CommContext`, which records the
waits between streams, and verifies the order of work without an accelerator.

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
        """Block the host until the device has done the work before this point."""


class Stream(Protocol):
    """A queue of device work."""

    def record_event(self) -> Event:
        """Return the point after all work queued so far."""

    def wait_event(self, event: Event) -> None:
        """Let later work of this stream wait for the event, a point in another stream's work."""

    def wait_stream(self, stream: Any) -> None:
        """Let later work of this stream wait for all work that is queued in the other stream now."""


class Streams(ABC):
    """Creates and selects the streams of a device."""

    @abstractmethod
    def new(self) -> Stream:
        """Create a stream with priority over the compute stream."""

    @abstractmethod
    def current(self) -> Stream:
        """Return the stream on which the caller's work is queued."""

    @abstractmethod
    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Return a context whose work is queued on this stream. Memory allocated in it belongs to the stream."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until all streams of the device, also a user's, have done their work."""


class DeviceStreams(Streams):
    """The streams of one accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)

    def new(self) -> Stream:
        """Create a stream of high priority (-1), because collectives must not queue behind compute kernels."""
        return self._module.Stream(device=self._device, priority=-1)  # type: ignore[no-any-return]

    def current(self) -> Stream:
        """Return the device's current stream."""
        return self._module.current_stream(self._device)  # type: ignore[no-any-return]

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Return the device module's own context for a stream."""
        return self._module.stream(stream)  # type: ignore[no-any-return]

    def synchronize(self) -> None:
        """Call the device module's own ``synchronize``."""
        self._module.synchronize(self._device)


def streams_of(device: torch.device) -> Streams | None:
    """Return the streams of a device; None for the CPU and for meta, which have no streams."""
    return None if device.type in ("cpu", "meta") else DeviceStreams(device)
