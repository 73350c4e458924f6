"""Copies between devices and the host through pinned memory, concurrent with the device's compute.

    CopyStream      a device's stream for copies, and its synchronization with the compute stream
    PinnedSlots     pinned memory that a thread reuses for its copies
    DeferredCopy    copies that run while training goes on; the next optimizer step waits for them
    Stager          copies of all tensors of a state, in one reused buffer

Copies run on a separate stream. They are ordered with the compute stream only by explicit waits:
`CopyStream.wait_for_compute` before the copies, `CopyStream.hold_compute` after them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from vescale_fsdp.devices import available_accelerator
from vescale_fsdp.errors import ArgumentError, CheckpointError
from vescale_fsdp.layout.geometry import round_up
from vescale_fsdp.torch_private import local_of, storage_id, version_of

_ALIGN_BYTES = 64  # a cache line, and a multiple of every item size
_Kind = tuple[torch.Size, torch.dtype]


class CopyEvent(Protocol):
    """An event recorded on a stream, such as `torch.Event`."""

    def synchronize(self) -> None:
        """Block the calling thread until the work before the event is done."""


class CopyStream:
    """The stream for one device's copies from and to the host.

    Args:
        device: an accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device=device)

    def wait_for_compute(self) -> None:
        """Make later copies wait for the work queued on the caller's current stream."""
        self._stream.wait_stream(self._module.current_stream(self._device))

    def hold_compute(self, event: CopyEvent | None = None) -> None:
        """Make later work on the caller's current stream wait for all copies, or for an event on this stream."""
        current = self._module.current_stream(self._device)
        if event is None:
            current.wait_stream(self._stream)
        else:
            current.wait_event(event)

    def on(self) -> AbstractContextManager[Any]:
        """Context manager: copies in the block run on this stream."""
        return self._module.stream(self._stream)  # type: ignore[no-any-return]

    def record(self) -> CopyEvent:
        """Record an event after all copies so far, and return it."""
        return self._stream.record_event()  # type: ignore[no-any-return]


@lru_cache
def copy_stream_of(device: torch.device) -> CopyStream | None:
    """Return the stream for a device's copies, one per device; None for the CPU and meta devices."""
    return None if device.type in ("cpu", "meta") else CopyStream(device)


def host_memory(num_bytes: int) -> torch.Tensor:
    """Return a 1D uint8 CPU tensor of zeros, pinned if there is an accelerator.

    Writing zeros touches every page here: page faults during a later copy would cost more than the copy itself. torch
    rounds the size of pinned memory up to a power of two.
    """
    pins = available_accelerator() is not None
    return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pins, device="cpu")


class PinnedSlots(threading.local):
    """Two pinned buffers per thread: one is filled while the other is the source of a copy."""

    def __init__(self) -> None:
        self._slots: list[tuple[torch.Tensor, CopyEvent | None]] = [
            # Empty: `lend` allocates buffers of the sizes that it needs.
            (torch.empty(0, dtype=torch.uint8, device="cpu"), None)
        ] * 2

    def lend(self, num_bytes: int) -> torch.Tensor:
        """Return a 1D uint8 buffer that no earlier copy uses; valid until this thread has called `lend` twice more."""
        slot, busy = self._slots.pop(0)
        if busy is not None:
            busy.synchronize()
        if slot.numel() < num_bytes:
            pins = available_accelerator() is not None
            slot = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pins, device="cpu")
        self._slots.append((slot, None))
        return slot[:num_bytes]

    def busy_until(self, event: CopyEvent) -> None:
        """Mark the buffer that `lend` returned last as in use until an event."""
        slot, _ = self._slots[-1]
        self._slots[-1] = slot, event


def memory_of(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    """Return the `storage_id` of each tensor that the optimizers write: their parameters and states.

    Raises:
        TypeError: for an object that is not a `torch.optim.Optimizer`: its steps do not call torch's step hooks.
    """
    storages: set[int] = set()
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ArgumentError(
                "The argument `optimizer` supports only torch optimizers.",
                expected="torch.optim.Optimizer",
                got=type(optimizer).__name__,
                todo="remove the argument `optimizer`: the state is then copied before the call returns",
                where="optimizer=..",
            )
        params = [param for group in optimizer.param_groups for param in group["params"]]
        states = [value for state in optimizer.state.values() for value in state.values()]
        storages |= {
            storage_id(local_of(each)) for each in (*params, *states) if isinstance(each, torch.Tensor)
        }
    return storages


class DeferredCopy:
    """Running copies of tensors that only optimizers write. The next optimizer step waits for them on the device.

    Any other write before that step is an error. It is detected by the tensors' version counters.

    Args:
        sources: the tensors being copied; they are kept alive until the copies are done.
        copied: for each device, the stream of its copies and an event after them.
    """

    def __init__(
        self, sources: Sequence[torch.Tensor], copied: Sequence[tuple[CopyStream, CopyEvent]]
    ) -> None:
        self._sources = list(sources)
        self._versions = [version_of(each) for each in sources]
        self._copied = list(copied)
        self._is_released = self._is_overtaken = False
        if sources:
            _hold_optimizers()
            _under_way.append(self)

    def release(self) -> None:
        """Make the caller's current streams wait for the copies; writes that are queued later are then safe."""
        if not self._is_released:  # a write before the first release did not wait for the copies
            self._is_overtaken = self._was_written
        for stream, event in self._copied:
            stream.hold_compute(event)
        self._is_released = True

    @property
    def _was_written(self) -> bool:
        # A copy of the list, and zip without `strict`: another thread may clear `_sources` in `finish`.
        pairs = zip(list(self._sources), self._versions, strict=False)
        return any(version_of(each) != version for each, version in pairs)

    def finish(self) -> None:
        """Wait on the host until all copies are done.

        Raises:
            CheckpointError: if a tensor was written before it was certainly copied.
        """
        for _, event in self._copied:
            event.synchronize()
        # `_was_written` is read before `_is_released`: once `_is_released` is set, an optimizer may write.
        was_written = self._was_written
        self._is_overtaken = self._is_overtaken or (was_written and not self._is_released)
        self._sources = []
        if self in _under_way:  # not if there were no sources
            _under_way.remove(self)
        if self._is_overtaken:
            raise CheckpointError(
                "A tensor was written while it was copied for a save: the copy may be a mixture of two states.",
                expected="no write to parameters and optimizer state before the next step of `optimizer`",
                got="another write before that step",
                todo="wait for the save's handle before writing them, or do not pass `optimizer` to the save",
            )


_under_way: list[DeferredCopy] = []


def _release_all(*unused: Any) -> None:
    for copy in list(_under_way):  # including released copies: optimizers may step on different streams
        copy.release()


@lru_cache
def _hold_optimizers() -> None:
    """Make every optimizer step wait for running copies. `lru_cache` registers the hook once per process.

    The hook is never removed: torch forbids the removal during a step.
    """
    register_optimizer_step_pre_hook(_release_all)


class Stager:
    """Copies this rank's tensors into one reused buffer, which is pinned if there is a GPU.

    Args:
        allocate: returns a 1D uint8 CPU tensor; called again only for a larger state.
        stream_of: returns the stream for a device's copies, or None if the device has no streams.
    """

    def __init__(
        self,
        allocate: Callable[[int], torch.Tensor] = host_memory,
        stream_of: Callable[[torch.device], CopyStream | None] = copy_stream_of,
    ) -> None:
        self._allocate, self._stream_of = allocate, stream_of
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._kinds: list[_Kind] = []  # shape and dtype of each tensor of the last call
        self._views: list[torch.Tensor] = []  # views of the buffer, one for each item of `_kinds`

    def stage(
        self, tensors: Sequence[torch.Tensor], *, can_wait: frozenset[int] = frozenset()
    ) -> tuple[list[torch.Tensor], DeferredCopy]:
        """Copy tensors into the buffer; the copies are valid until the next call.

        Args:
            can_wait: storages (by `storage_id`) that only torch optimizers write; their copies may still run on return.

        Returns:
            The contiguous CPU copies, and a `DeferredCopy` for the copies that may still run.
        """
        kinds = [(tensor.shape, tensor.dtype) for tensor in tensors]
        if kinds != self._kinds:
            # Views are kept for later saves: making a thousand takes longer than copying a thousand small tensors.
            self._views = self._cut(kinds)
            self._kinds = kinds
        streams = {device: self._stream_of(device) for device in {tensor.device for tensor in tensors}}
        at_once: list[tuple[torch.Tensor, torch.Tensor]] = []
        waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        for view, tensor in zip(self._views, tensors, strict=True):
            # Only a device has a stream; a copy between CPU memories blocks the caller in any case.
            late = streams[tensor.device] is not None and storage_id(tensor) in can_wait
            (waiting if late else at_once).append((view, tensor))
        for stream in streams.values():
            if stream is not None:
                stream.wait_for_compute()  # queued kernels may still write the tensors
        needed = DeferredCopy((), _copy(at_once, streams))
        pending = DeferredCopy([tensor for _, tensor in waiting], _copy(waiting, streams))
        needed.finish()  # the caller may change these tensors as soon as it goes on
        return self._views, pending

    def _cut(self, kinds: Sequence[_Kind]) -> list[torch.Tensor]:
        """Return views of the buffer for tensors of these kinds; allocate a larger buffer first if needed."""
        sizes = [shape.numel() * dtype.itemsize for shape, dtype in kinds]
        starts = [0, *accumulate(round_up(nbytes, _ALIGN_BYTES) for nbytes in sizes)]
        if self._buffer.numel() < starts[-1]:
            # The old buffer is freed before the larger one is allocated; its views would keep it alive.
            self._kinds, self._views = [], []
            self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
            self._buffer = self._allocate(starts[-1])
        return [
            self._buffer[start : start + nbytes].view(dtype).view(shape)
            # Not strict: the last item of `starts` is the total size.
            for (shape, dtype), start, nbytes in zip(kinds, starts, sizes, strict=False)
        ]


def _copy(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], streams: dict[torch.device, CopyStream | None]
) -> list[tuple[CopyStream, CopyEvent]]:
    """Start to copy the second tensor of each pair into the first.

    Returns:
        (stream, event recorded after its copies) for each stream that was used.
    """
    used: dict[CopyStream, None] = {}  # a set with a fixed order
    for view, tensor in pairs:
        if not tensor.numel():  # no copy, and so no event on the stream
            continue
        stream = streams[tensor.device]
        if tensor.dtype.itemsize == 1:  # some one-byte dtypes have no copy kernel
            view, tensor = view.view(torch.uint8), tensor.view(torch.uint8)
        with nullcontext() if stream is None else stream.on():
            view.copy_(tensor, non_blocking=stream is not None)
        if stream is not None:
            used[stream] = None
    return [(stream, stream.record()) for stream in used]
