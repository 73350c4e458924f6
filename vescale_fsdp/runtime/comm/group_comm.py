"""GroupComm: the ranks of a group, what its collectives divide by, and who carries them out.

    mesh            1-D (shard) or 2-D (replicate, shard); axis ``shard_axis`` holds one copy of the parameters
    gather          all-gather over the sharding axis, or a user's object in its place
    reduce_scatter  over the sharding axis, on a communicator of its own if asked
    all_reduce      over the replicating axis (HSDP)

What a reduction divides by (as torch's FSDP2 does, torch 2.13): fp32 and bf16 average in the collective.
A factor of the user's, forced sums and fp16 use SUM and divide here; fp16 also divides by a power of two near
the root of the number of ranks *before* summing, lest the sum overflows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from vescale_fsdp.collectives import (
    Work,
    all_gather_into,
    all_reduce_at_once,
    new_group,
    reduce_scatter_into,
    runs_beside,
    sums_in_wider,
)
from vescale_fsdp.layout.group_layout import GroupLayout
from vescale_fsdp.runtime.comm.memory_pools import CommMemory, pool_of
from vescale_fsdp.runtime.comm.order_watch import OrderWatch
from vescale_fsdp.runtime.comm.settings import GroupSettings
from vescale_fsdp.torch_modes import outside_fake_mode
from vescale_fsdp.torch_private import groups_as_patient_as

Pool = Callable[[], AbstractContextManager[Any]]
Gather = Callable[[torch.Tensor, torch.Tensor], Work | None]
"""``gather(full, shard)``: start to fill 1-D ``full`` with all ranks' shards; the work ends when it is filled."""


@dataclass(frozen=True)
class GatherPolicy(MixedPrecisionPolicy, ABC):
    """A mixed precision that brings its own gather, one that may send weights in fewer bits."""

    @abstractmethod
    def gather_of(self, layout: GroupLayout, comm: GroupComm, dtype: torch.dtype) -> Gather | None:
        """The gather of one group, from shards of any dtype to a full buffer of ``dtype``; None: the usual one."""


class GroupComm:
    """The collectives of one group.

    Args:
        mesh: 1-D (shard) or 2-D (replicate, shard).
        part_size: ranks of the smaller groups that full parameters are kept over between forward and
            backward, or None. Divides the sharding axis.

    Attributes:
        shard_axis: index of the axis that shards, the last one.
        num_shards: ranks along it.
        rank: this rank's index along it.
        shard_group: ranks that hold one copy of the parameters between them.
        replicate_group: ranks that hold the same shard, or None without replication.
    """

    def __init__(self, mesh: DeviceMesh, part_size: int | None = None) -> None:
        self.mesh = mesh
        self.part_size = part_size
        # Asked several times per step and unit; a mesh answers slowly.
        self.shard_axis = mesh.ndim - 1
        self.num_shards = mesh.size(self.shard_axis)
        self.rank = mesh.get_local_rank(self.shard_axis)
        self.shard_group = mesh.get_group(self.shard_axis)
        self.replicate_group = mesh.get_group(0) if mesh.ndim == 2 else None
        self.settings = GroupSettings()
        self.watch: OrderWatch | None = None  # of the order in which ranks start collectives
        self.memory: CommMemory | None = None  # the communication library's own
        self.noted: list[tuple[torch.Tensor, torch.Tensor]] | None = (
            None  # gathers that the caller will start
        )
        self.reduce_group: dist.ProcessGroup | None = None  # where reductions have their own communicator
        self._part_mesh: DeviceMesh | None = None
        if part_size is not None:
            with groups_as_patient_as(self.shard_group), outside_fake_mode():
                self._part_mesh = DeviceMesh(mesh.device_type, mesh.mesh.view(-1, part_size))

    def change(self, **settings: Any) -> None:
        """Change some of the settings."""
        self.settings = replace(self.settings, **settings)

    def process_groups(self) -> list[dist.ProcessGroup]:
        """All that its collectives use."""
        parts = None if self._part_mesh is None else self._part_mesh.get_group(1)
        used = (self.shard_group, self.replicate_group, self.reduce_group, parts)
        return [group for group in used if group is not None]

    @property
    def part_rank(self) -> int:
        """This rank's index in its smaller group."""
        assert self._part_mesh is not None
        return self._part_mesh.get_local_rank(1)

    # -- collectives ----------------------------------------------------------------------------------

    def gather(self, full: torch.Tensor, shard: torch.Tensor) -> Work | None:
        """Start the all-gather of shards; ``shard`` may lie inside ``full`` (1-D both)."""
        if self.memory is not None:
            self.memory.prepare(full)
        if self.settings.custom_all_gather is not None:
            return self.settings.custom_all_gather(
                output_tensor=full, input_tensor=shard, group=self.shard_group, async_op=runs_beside(full)
            )
        return self.all_gather(full, shard)

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Work | None:
        """The same, whatever the user has brought; or note it, where it is started with others."""
        if self.noted is None:
            return all_gather_into(full, shard, self.shard_group)
        self.noted.append((full, shard))
        return None

    def gather_parts(self, full: torch.Tensor, part: torch.Tensor) -> Work | None:
        """Start the all-gather of what the smaller group kept between forward and backward."""
        assert self._part_mesh is not None
        return all_gather_into(full, part, self._part_mesh.get_group(1))

    def allocate_full(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The buffer that gathers fill (1-D [numel])."""
        if self.settings.custom_all_gather is not None:
            return self.settings.custom_all_gather.allocate([numel], dtype=dtype, device=device)
        with self.full_pool():
            return torch.empty(numel, dtype=dtype, device=device)

    @property
    def full_pool(self) -> Pool:
        """Where buffers that gathers fill take their memory, at each gather."""
        return pool_of(self.settings.custom_all_gather or self.memory)

    @property
    def grads_pool(self) -> Pool:
        """Where buffers of reductions take theirs."""
        return pool_of(self.settings.custom_reduce_scatter or self.memory)

    def allocate_grads(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer that reductions read, or one they write (1-D [numel])."""
        if self.settings.custom_reduce_scatter is not None:
            return self.settings.custom_reduce_scatter.allocate([numel], dtype=dtype, device=device)
        with self.grads_pool():
            return torch.empty(numel, dtype=dtype, device=device)

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor) -> Work | None:
        """Start the reduction of ``full`` (1-D, divided in place where fp16 asks) into ``shard``, in its dtype."""
        before = self._divide_before(shard.dtype)
        if before != 1:
            full.div_(before)
        group = self.reduce_group or self.shard_group
        if self.memory is not None:
            for buffer in (full, shard):
                self.memory.prepare(buffer)
        op = self._op(shard.dtype, self.num_shards)
        if self.settings.custom_reduce_scatter is not None:
            return self.settings.custom_reduce_scatter(
                output_tensor=shard, input_tensor=full, group=group, op=op, async_op=runs_beside(full)
            )
        return reduce_scatter_into(shard, full, op, group)

    def sums_in_wider(self, device: torch.device) -> bool:
        """Whether ``full`` may be of a narrower dtype than ``shard`` in a reduction; the same on all ranks."""
        if not self.settings.narrow or self.settings.custom_reduce_scatter is not None:
            return False
        return sums_in_wider(self.reduce_group or self.shard_group, device.type)

    def all_reduce(self, shard: torch.Tensor) -> None:
        """Reduce over the replicating axis, in place (nothing without one)."""
        if self.replicate_group is not None:
            all_reduce_at_once(shard, self._op(shard.dtype, self.mesh.size(0)), self.replicate_group)

    def finish_division(self, shard: torch.Tensor) -> None:
        """Divide a summed shard, in place, where the collective did not average."""
        if not self._averages(shard.dtype):
            shard.div_(self._total_factor() / self._divide_before(shard.dtype))

    # -- division -------------------------------------------------------------------------------------

    def _averages(self, dtype: torch.dtype) -> bool:
        """Whether the collectives divide."""
        return (
            self.settings.divide_factor is None and not self.settings.force_sum and dtype is not torch.float16
        )

    def _op(self, dtype: torch.dtype, num_ranks: int) -> dist.ReduceOp.RedOpType:
        # Of one rank the mean is the sum, and NCCL's AVG is not to be trusted there (torch 2.13, FSDP2's words).
        return dist.ReduceOp.AVG if self._averages(dtype) and num_ranks > 1 else dist.ReduceOp.SUM

    def _total_factor(self) -> float:
        return (
            self.settings.divide_factor
            if self.settings.divide_factor is not None
            else float(self.mesh.size())
        )

    def _divide_before(self, dtype: torch.dtype) -> float:
        if dtype is not torch.float16:
            return 1.0
        total, factor = self._total_factor(), 1.0
        while total % factor == 0 and total / factor > factor:
            factor *= 2
        return factor


def separate_reductions(comms: Iterable[GroupComm]) -> None:
    """Give reductions communicators of their own, one per set of ranks, so that they do not queue behind gathers.

    Collective: all ranks, for the same groups in the same order.
    """
    made: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
    for comm in comms:
        if comm.shard_group not in made:
            made[comm.shard_group] = new_group(comm.shard_group)
        comm.reduce_group = made[comm.shard_group]
        comm.change(separate_reductions=True)
