"""torchtitan on CPU ranks: it takes a machine without an accelerator for one with CUDA, and asks that for its memory.

`use_cpu` comes before any other import of torchtitan, whose modules bind the device's type when they are imported.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torchtitan.tools import utils


class CpuDevice:
    """What torchtitan asks of a device's module (``torch.cuda``), for the host."""

    def set_device(self, device: object) -> None:
        """There is one."""

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def synchronize(self) -> None:
        """Nothing runs behind."""

    def empty_cache(self) -> None:
        """There is none."""

    def get_device_name(self, device: object = None) -> str:
        return "CPU"

    def get_device_properties(self, device: object = None) -> SimpleNamespace:
        return SimpleNamespace(name="CPU", total_memory=1 << 30)

    def reset_peak_memory_stats(self) -> None:
        """Nothing is counted."""

    def memory_stats(self, device: object = None) -> dict[str, int]:
        return {}


def use_cpu() -> None:
    """Have torchtitan use the CPU and gloo."""
    torch.set_num_threads(1)
    utils.device_type, utils.device_module = "cpu", CpuDevice()
    from torchtitan.distributed import utils as dist_utils

    dist_utils.set_pg_timeouts = lambda *_, **__: None  # by a function that torch 2.13 lacks
