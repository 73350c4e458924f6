"""Devices that the checks for GPUs run on: a GPU, the asynchronous device of the tests (``sim``), or the CPU."""

from __future__ import annotations

from typing import Any

import torch

from vescale_fsdp.devices import ACCELERATORS, Accelerator

SIM = "sim"
KINDS = ("cuda", SIM, "cpu")
_CYCLES_PER_MS = 1.7e6  # of a GPU's clock; about right is enough for a delay


def open_device(kind: str) -> torch.device:
    """Return the first device of a kind; loads the asynchronous device, which is compiled at its first use."""
    if kind == "cpu":
        return torch.device("cpu")
    if kind == SIM:
        from tests.support.async_device import library

        library()
        ACCELERATORS[SIM] = Accelerator(frozenset({"async_device"}))
    return torch.device(kind, 0)


def module_of(device: torch.device) -> Any:
    """Return ``torch.cuda`` or its like; None for the CPU."""
    return None if device.type == "cpu" else torch.get_device_module(device)


def synchronize(device: torch.device) -> None:
    """Wait for all work of the device."""
    if device.type != "cpu":
        module_of(device).synchronize()


def sleep(device: torch.device, milliseconds: float) -> None:
    """Keep the current stream of a GPU busy; other devices do nothing."""
    if milliseconds and device.type == "cuda":
        torch.cuda._sleep(int(milliseconds * _CYCLES_PER_MS))


def set_order(device: torch.device, order: str) -> None:
    """Choose the order in which the asynchronous device runs its streams; other devices do nothing."""
    if device.type == SIM:
        from tests.support.async_device import library

        library().synchronize()
        library().set_order(order, 0)


def hazards(device: torch.device) -> list[str]:
    """Return the accesses of memory that no event orders, since the last call; only the asynchronous device knows."""
    if device.type != SIM:
        return []
    from tests.support.async_device import hazards as found

    synchronize(device)
    return found()
