"""The one table of accelerators: what this package must know of a device type that torch does not say.

Everything else is device-agnostic: streams and events come from ``torch.get_device_module``, and which
backend sends a device's tensors comes from the process group. A device type without a row works too: its host memory
is not pinned, and each gather is launched by itself. ``docs/compatibility.md`` says how to add a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Accelerator:
    """What this package must know of a device type.

    Args:
        coalescing: names of the backends of `torch.distributed` that launch several all-gathers at once, as a
            ``_coalescing_manager`` block.
    """

    coalescing: frozenset[str] = frozenset()


ACCELERATORS: dict[str, Accelerator] = {
    "cuda": Accelerator(frozenset({"nccl"})),
    # Not tried: each needs its own hardware. They are here because torch pins host memory for them.
    "xpu": Accelerator(),
    "npu": Accelerator(),
    "hpu": Accelerator(),
}


def available_accelerator() -> Accelerator | None:
    """Return the row of this machine's accelerator; None if there is no accelerator, or no row for it."""
    # current_accelerator returns what torch was built for, also on a machine without such a device.
    kind = torch.accelerator.current_accelerator()
    return ACCELERATORS.get(kind.type) if kind is not None and torch.accelerator.is_available() else None


def current_device(device_type: str) -> torch.device:
    """Return the current device of a type, with its index, because devices of tensors have one: "cuda:0"."""
    if device_type in ("cpu", "meta"):
        return torch.device(device_type)
    return torch.device(device_type, torch.get_device_module(device_type).current_device())
