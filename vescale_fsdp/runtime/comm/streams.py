"""Streams: where queues of device work come from, so that the schedule can be run without a device.

    streams_of(cuda)  -> DeviceStreams     the device module's own streams and events
    streams_of(cpu)   -> None              the host does one thing after the other

The schedule asks for streams here and nowhere else. A test hands `CommContext` another
`Streams`, one that writes down who waits for whom, and proves the order of things on a CPU.

Streams and events are made by ``torch.cuda`` (or the device's module of that kind), not by the generic
``torch.Stream``: a ``torch.cuda.Event`` keeps its handle in a field that the generic ``wait_event`` does not
read (torch 2.11-2.13, ``torch/csrc/Stream.cpp`` and ``cuda/Event.cpp``), so that a user's event would be waited
for by chance. The module's own classes take both kinds.
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
        """The point behind all work queued so far."""

    def wait_event(self, event: Event) -> None:
        """Start later work only behind this point of another stream."""

    def wait_stream(self, stream: Any) -> None:
        """Start later work only behind all that the other stream was given so far."""


class Streams(ABC):
    """Where streams come from."""

    @abstractmethod
    def new(self) -> Stream:
        """A stream that goes before the compute stream where both have work."""

    @abstractmethod
    def current(self) -> Stream:
        """The stream that the caller's work goes to."""

    @abstractmethod
    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Send the work of a block to this stream. Memory allocated there belongs to it."""


class DeviceStreams(Streams):
    """Streams of one accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)

    def new(self) -> Stream:
        """A stream of high priority."""
        return self._module.Stream(device=self._device, priority=-1)  # type: ignore[no-any-return]

    def current(self) -> Stream:
        """The stream that the caller computes on."""
        return self._module.current_stream(self._device)  # type: ignore[no-any-return]

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """The device module's own way to switch."""
        return self._module.stream(stream)  # type: ignore[no-any-return]


def streams_of(device: torch.device) -> Streams | None:
    """The streams of a device; None for the CPU (and meta), which has none."""
    return None if device.type in ("cpu", "meta") else DeviceStreams(device)
