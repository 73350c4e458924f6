"""Copies between devices and the host that run beside what a device computes, by way of pinned memory.

    CopyStream      a device's stream for them, and how it and the compute stream wait for each other
    PinnedSlots     memory that a thread copies by way of, again and again
    DeferredCopy    copies that go on while training does, held to be done before the next optimizer step

Threads that read and write files have streams of their own: what they do to a device is ordered neither behind what
the trainer has given its stream, nor before what it gives it next, unless somebody says so.
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
    """The stream of one device that its copies from and to the host are work of.

    Args:
        device: an accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device=device)

    def wait_for_compute(self) -> None:
        """Copies that follow see what the caller's current stream was given so far."""
        self._stream.wait_stream(self._module.current_stream(self._device))

    def hold_compute(self, event: CopyEvent | None = None) -> None:
        """What the caller's current stream is given next starts behind the copies, or behind an event of theirs."""
        current = self._module.current_stream(self._device)
        if event is None:
            current.wait_stream(self._stream)
        else:
            current.wait_event(event)

    def on(self) -> AbstractContextManager[Any]:
        """Copies inside are work of this stream."""
        return self._module.stream(self._stream)  # type: ignore[no-any-return]

    def record(self) -> CopyEvent:
        """The point behind all copies so far."""
        return self._stream.record_event()  # type: ignore[no-any-return]


@lru_cache
def copy_stream_of(device: torch.device) -> CopyStream | None:
    """The stream for copies of a device, one for all; None for the CPU (and meta), which needs none."""
    return None if device.type in ("cpu", "meta") else CopyStream(device)


def host_memory(num_bytes: int) -> torch.Tensor:
    """1D bytes in CPU memory, pinned if there is a GPU.

    Filled once: the first touch of fresh pages costs more than the copy itself. torch rounds what it pins up to a power
    of two. ``VESCALE_FSDP_UNTRIED=exact_pinning`` pins memory of this very size; no GPU has tried it yet.
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
    weakref.finalize(memory, driver.cudaHostUnregister, memory.data_ptr())  # before the memory goes
    return memory


class PinnedSlots(threading.local):
    """Two pieces of pinned memory for each thread, so that one is filled while the other is copied from."""

    def __init__(self) -> None:
        self._slots: list[tuple[torch.Tensor, CopyEvent | None]] = [
            (torch.empty(0, dtype=torch.uint8, device="cpu"), None)
        ] * 2

    def lend(self, num_bytes: int) -> torch.Tensor:
        """1D memory of this size, valid until the call after the next of this thread; copies with it are done."""
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
        """What was lent last is in use until then."""
        slot, _ = self._slots[-1]
        self._slots[-1] = slot, event


def memory_of(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    """The storages (by `storage_id`) of what these optimizers step and of their states.

    Raises:
        TypeError: for what is no optimizer of torch's kind: nobody would hear of its steps.
    """
    found: set[int] = set()
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ArgumentError(
                "Copies can go on until the step of an optimizer of torch's kind alone.",
                expected="torch.optim.Optimizer",
                got=type(optimizer).__name__,
                todo="leave `optimizer` out: the state is then copied before the call returns",
            )
        params = [param for group in optimizer.param_groups for param in group["params"]]
        states = [value for state in optimizer.state.values() for value in state.values()]
        found |= {storage_id(local_of(each)) for each in (*params, *states) if isinstance(each, torch.Tensor)}
    return found


class DeferredCopy:
    """Copies under way of what only optimizers write. Their next step waits for it, on the device.

    Any other write to it before that step is an error, found by the counts of writes that tensors keep.

    Args:
        sources: what is copied, kept until it is.
        copied: for each device the stream of its copies, and the point behind them.
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
        """Let writes begin, behind the copies: the caller's current streams wait for them."""
        if not self._is_released:
            self._is_overtaken = self._was_written
        for stream, event in self._copied:
            stream.hold_compute(event)
        self._is_released = True

    @property
    def _was_written(self) -> bool:
        pairs = zip(list(self._sources), self._versions, strict=False)
        return any(version_of(each) != version for each, version in pairs)

    def finish(self) -> None:
        """Wait until all of it is copied, on the host.

        Raises:
            CheckpointError: if something was written that was not yet surely copied.
        """
        for _, event in self._copied:
            event.synchronize()
        was_written = self._was_written  # asked first: an optimizer writes once it was released
        self._is_overtaken = self._is_overtaken or (was_written and not self._is_released)
        self._sources = []
        if self in _under_way:
            _under_way.remove(self)
        if self._is_overtaken:
            raise CheckpointError(
                "A tensor was written while it was copied for a save: the copy may have parts of two states.",
                expected="parameters and optimizer state that nothing but `optimizer` writes until its next step",
                got="a write by something else before that step",
                todo="wait for the save's handle before writing them, or do not give `optimizer` to the save",
            )


_under_way: list[DeferredCopy] = []


def _release_all(*unused: Any) -> None:
    for copy in list(_under_way):  # each time: optimizers may step on different streams
        copy.release()


@lru_cache
def _hold_optimizers() -> None:
    """Have every optimizer's step wait for copies under way; once, for it may not be taken back during a step."""
    register_optimizer_step_pre_hook(_release_all)
