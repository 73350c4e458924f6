"""Copies between devices and the host through pinned memory, concurrent with the device's compute.

    CopyStream      a device's stream for copies, and how it and the compute stream wait for each other
    PinnedSlots     pinned memory that a thread reuses for its copies
    DeferredCopy    copies that run while training goes on; the next optimizer step waits for them

Threads that read and write files have their own streams. Their copies are ordered with the trainer's stream only by
explicit waits: `CopyStream.wait_for_compute` before the copies, `CopyStream.hold_compute` after them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from vescale_fsdp.errors import ArgumentError, CheckpointError, allows_untried
from vescale_fsdp.torch_private import local_of, storage_id, version_of


class CopyEvent(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Block the caller until the work before this point is done."""


class CopyStream:
    """The stream on which one device's copies from and to the host run.

    Args:
        device: an accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device=device)

    def wait_for_compute(self) -> None:
        """Order later copies after the work that is queued on the caller's current stream."""
        self._stream.wait_stream(self._module.current_stream(self._device))

    def hold_compute(self, event: CopyEvent | None = None) -> None:
        """Order later work on the caller's current stream after the copies, or after an event among them."""
        current = self._module.current_stream(self._device)
        if event is None:
            current.wait_stream(self._stream)
        else:
            current.wait_event(event)

    def on(self) -> AbstractContextManager[Any]:
        """A block whose copies run on this stream."""
        return self._module.stream(self._stream)  # type: ignore[no-any-return]

    def record(self) -> CopyEvent:
        """An event after all copies so far."""
        return self._stream.record_event()  # type: ignore[no-any-return]


@lru_cache
def copy_stream_of(device: torch.device) -> CopyStream | None:
    """The one stream for a device's copies; None for the CPU and meta, which need none."""
    return None if device.type in ("cpu", "meta") else CopyStream(device)


def host_memory(num_bytes: int) -> torch.Tensor:
    """1D bytes in CPU memory, pinned if there is a GPU.

    It is filled with zeros, since the first write to fresh pages costs more than the copy itself. torch rounds the size
    of pinned memory up to a power of two; ``VESCALE_FSDP_UNTRIED=exact_pinning`` pins the exact size, which has not
    been tested on a GPU yet.
    """
    has_gpu = torch.cuda.is_available()
    if has_gpu and num_bytes and allows_untried("exact_pinning"):
        return _pinned_as_it_is(torch.zeros(num_bytes, dtype=torch.uint8, device="cpu"))
    return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=has_gpu, device="cpu")


def _pinned_as_it_is(memory: torch.Tensor) -> torch.Tensor:
    driver: Any = torch.cuda.cudart()
    code = int(driver.cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if code:
        raise MemoryError(f"cudaHostRegister could not pin {memory.numel()} bytes: error {code}")
    weakref.finalize(memory, driver.cudaHostUnregister, memory.data_ptr())  # runs before the memory is freed
    return memory


class PinnedSlots(threading.local):
    """Two pieces of pinned memory for each thread: one is filled while the other is the source of a copy."""

    def __init__(self) -> None:
        self._slots: list[tuple[torch.Tensor, CopyEvent | None]] = [
            (torch.empty(0, dtype=torch.uint8, device="cpu"), None)
        ] * 2

    def lend(self, num_bytes: int) -> torch.Tensor:
        """1D memory of this size, not in use by earlier copies; valid until this thread's second next call."""
        slot, busy = self._slots.pop(0)
        if busy is not None:
            busy.synchronize()
        if slot.numel() < num_bytes:
            slot = torch.empty(
                num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available(), device="cpu"
            )
        self._slots.append((slot, None))
        return slot[:num_bytes]

    def busy_until(self, event: CopyEvent) -> None:
        """The memory of the last `lend` is in use until an event."""
        slot, _ = self._slots[-1]
        self._slots[-1] = slot, event


def memory_of(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    """The storages (by `storage_id`) of the optimizers' parameters and states.

    Raises:
        TypeError: for another class than torch's, since its steps do not call torch's step hooks.
    """
    found: set[int] = set()
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ArgumentError(
                "Copies can be deferred only until a step of torch's optimizers.",
                expected="torch.optim.Optimizer",
                got=type(optimizer).__name__,
                todo="leave `optimizer` out: the state is then copied before the call returns",
            )
        params = [param for group in optimizer.param_groups for param in group["params"]]
        states = [value for state in optimizer.state.values() for value in state.values()]
        found |= {storage_id(local_of(each)) for each in (*params, *states) if isinstance(each, torch.Tensor)}
    return found


class DeferredCopy:
    """Running copies of tensors that only optimizers write. The next optimizer step waits for them on the device.

    Any other write before that step is an error. It is detected by the tensors' version counters.

    Args:
        sources: the copied tensors, kept alive until the copies are done.
        copied: for each device the stream of its copies, and an event after them.
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
        """Let the caller's current streams wait for the copies; writes that are queued later are allowed."""
        if not self._is_released:
            self._is_overtaken = self._was_written
        for stream, event in self._copied:
            stream.hold_compute(event)
        self._is_released = True

    @property
    def _was_written(self) -> bool:
        # Another thread may be in `finish`, which clears them.
        pairs = zip(list(self._sources), self._versions, strict=False)
        return any(version_of(each) != version for each, version in pairs)

    def finish(self) -> None:
        """Wait on the host until all copies are done.

        Raises:
            CheckpointError: if a tensor was written that may not have been copied yet.
        """
        for _, event in self._copied:
            event.synchronize()
        was_written = (
            self._was_written
        )  # read before _is_released: an optimizer may write as soon as that is set
        self._is_overtaken = self._is_overtaken or (was_written and not self._is_released)
        self._sources = []
        if self in _under_way:
            _under_way.remove(self)
        if self._is_overtaken:
            raise CheckpointError(
                "A tensor was written while it was copied for a save: the copy may have parts of two states.",
                expected="parameters and optimizer state that nothing but `optimizer` writes until its next step",
                got="another write before that step",
                todo="wait for the save's handle before writing them, or do not give `optimizer` to the save",
            )


_under_way: list[DeferredCopy] = []


def _release_all(*unused: Any) -> None:
    for copy in list(_under_way):  # at every step: optimizers may step on different streams
        copy.release()


@lru_cache
def _hold_optimizers() -> None:
    """Let every optimizer step wait for running copies. The hook stays, since torch forbids removal during a step."""
    register_optimizer_step_pre_hook(_release_all)
