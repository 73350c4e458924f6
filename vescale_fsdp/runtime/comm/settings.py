"""GroupSettings: what users have set on a parameter group since it was made, as one value.

A change makes another value. Ranks compare all fields at a model's first use (`vescale_fsdp.runtime.consensus`), and a
group that is put on other ranks takes the value over whole (`vescale_fsdp.elastic.renewal`): communicators and pools of
memory, which belong to ranks, are made again from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from vescale_fsdp.collectives import Work
from vescale_fsdp.runtime.comm.memory_pools import CommMemory

MemoryKind = Callable[[dist.ProcessGroup, torch.device], CommMemory]


class AllGather(Protocol):
    """A user's all-gather (torch's ``AllGather``): where buffers come from, and the collective."""

    def allocate(self, size: list[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer of this size that the collective can use."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Work | None:
        """Gather ``input_tensor`` of all ranks into ``output_tensor``."""


class ReduceScatter(Protocol):
    """A user's reduce-scatter (torch's ``ReduceScatter``)."""

    def allocate(self, size: list[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer of this size that the collective can use."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> Work | None:
        """Reduce ``input_tensor`` over the ranks, this rank's part into ``output_tensor``."""


def _set_by(method: str, shown: Callable[[Any], object] = lambda value: value) -> dict[str, Any]:
    """Which method of `FSDPModule` sets a field, and what ranks compare of its value."""
    return {"method": method, "shown": shown}


def _type_name(value: object) -> str | None:
    return None if value is None else type(value).__name__


def _name(value: Any) -> str | None:
    return None if value is None else value.__name__


def _is_there(value: object) -> bool:
    return value is not None


@dataclass(frozen=True)
class GroupSettings:
    """The switches of one group; the methods that set them say what they mean."""

    divide_factor: float | None = field(default=None, metadata=_set_by("set_gradient_divide_factor"))
    force_sum: bool = field(default=False, metadata=_set_by("set_force_sum_reduction_for_comms"))
    narrow: bool = field(default=True, metadata=_set_by("set_narrow_reduction"))
    custom_all_gather: AllGather | None = field(
        default=None, metadata=_set_by("set_custom_all_gather", _type_name)
    )
    custom_reduce_scatter: ReduceScatter | None = field(
        default=None, metadata=_set_by("set_custom_reduce_scatter", _type_name)
    )
    memory: MemoryKind | None = field(
        default=None, metadata=_set_by("set_allocate_memory_from_process_group_for_comm", _name)
    )
    separate_reductions: bool = field(default=False, metadata=_set_by("set_separate_reduce_scatter_group"))
    requires_all_reduce: bool = field(default=True, metadata=_set_by("set_requires_all_reduce"))
    all_reduce_hook: Callable[[torch.Tensor], None] | None = field(
        default=None, metadata=_set_by("set_all_reduce_hook", _is_there)
    )
    on_delivery: Callable[[list[nn.Parameter]], None] | None = field(
        default=None, metadata=_set_by("step_in_backward", _is_there)
    )
    zeros_unused: bool = field(default=False, metadata=_set_by("set_reduce_scatter_unused_params"))
    keeps_full: bool = field(default=False, metadata=_set_by("set_keep_unsharded_storage"))

    def __str__(self) -> str:
        """What ranks compare."""
        return ", ".join(self._shown(each) for each in fields(self))

    @property
    def changes(self) -> str:
        """What ranks compare of fields that were set, each behind a comma."""
        changed = [each for each in fields(self) if getattr(self, each.name) != each.default]
        return "".join(f", {self._shown(each)}" for each in changed)

    def _shown(self, each: Field[Any]) -> str:
        return f"{each.metadata['method']} {each.metadata['shown'](getattr(self, each.name))}"
