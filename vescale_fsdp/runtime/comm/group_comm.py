"""GroupComm: the ranks of a group, users' settings for it, its collectives, and the memory of their buffers.

    mesh            1-D (shard) or 2-D (replicate, shard); axis ``shard_axis`` shards one copy of the parameters
    gather          all-gather over the sharding axis, or a user's object in its place
    reduce_scatter  over the sharding axis, on a communicator of its own if asked
    all_reduce      over the replicating axis (HSDP)

The divisor of a reduction (as in torch 2.13's FSDP2): fp32 and bf16 average in the collective. A user's factor, forced
sums and fp16 use SUM and divide here. fp16 also divides *before* summing, by a power of two near the root of the number
of ranks, so that the sum does not overflow.

A communication library may want buffers in memory of its own, registered with it or symmetric:

    process group    the pool of the backend's own allocator (NCCL's), whose memory is registered with it
    symmetric        torch's pool of symmetric memory; the ranks meet over a buffer before a collective uses it

Buffers free their memory and allocate it again (`vescale_fsdp.runtime.comm.dbuffer`), so the library's pool is entered
around every allocation. Then the gathered parameters themselves are in the library's memory, and no collective copies
them in or out. Neither kind has run on a GPU. A user's own collectives may bring a pool (`PooledComm`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
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
from vescale_fsdp.runtime.comm.order_watch import OrderWatch
from vescale_fsdp.torch_modes import meet_over, outside_fake_mode, process_group_pool, symmetric_pool
from vescale_fsdp.torch_private import groups_with_timeout_of


@runtime_checkable
class PooledComm(Protocol):
    """A user's collective with a pool of its own."""

    def memory_pool(self) -> AbstractContextManager[Any]:
        """Entered whenever a buffer takes memory, at the first gather and at all later ones."""


class CommMemory:
    """Memory of a communication library for the buffers of collectives: one `torch.cuda.MemPool`."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def memory_pool(self) -> AbstractContextManager[Any]:
        """Memory that is allocated inside belongs to the library."""
        return torch.cuda.use_mem_pool(self._pool)

    def prepare(self, buffer: torch.Tensor) -> None:
        """Called before a collective reads or writes a buffer."""


class ProcessGroupMemory(CommMemory):
    """Memory of the backend's allocator, registered as it is allocated. Args: the group, the device of its buffers."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(process_group_pool(group, device))


class SymmetricMemory(CommMemory):
    """Symmetric memory of a group's ranks. Args: as of `ProcessGroupMemory`."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(symmetric_pool(group, device))
        self._group = group

    def prepare(self, buffer: torch.Tensor) -> None:
        """The ranks meet over the buffer."""
        meet_over(buffer, self._group)


MemoryKind = Callable[[dist.ProcessGroup, torch.device], CommMemory]


def pool_of(comm: object) -> Callable[[], AbstractContextManager[Any]]:
    """The context to enter around allocations for a collective, the user's or ours."""
    if comm is None:  # called at every allocation, and isinstance of a protocol is slow
        return nullcontext
    return comm.memory_pool if isinstance(comm, PooledComm) else nullcontext


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
    """The method of `FSDPModule` that sets a field, and the form of its value that ranks compare."""
    return {"method": method, "shown": shown}


def _type_name(value: object) -> str | None:
    return None if value is None else type(value).__name__


def _name(value: Any) -> str | None:
    return None if value is None else value.__name__


def _is_there(value: object) -> bool:
    return value is not None


@dataclass(frozen=True)
class GroupSettings:
    """The user's settings of one group, as one value; the methods of `FSDPModule` that set them document them.

    Ranks compare all fields at a model's first use (`vescale_fsdp.runtime.consensus`). A group that is put on other
    ranks takes the value over (`vescale_fsdp.elastic.renewal`); communicators and memory pools, which belong to ranks,
    are made again from it.
    """

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
        """The form that ranks compare."""
        return ", ".join(self._shown(each) for each in fields(self))

    @property
    def changes(self) -> str:
        """The same for the fields that were set, each after a comma."""
        changed = [each for each in fields(self) if getattr(self, each.name) != each.default]
        return "".join(f", {self._shown(each)}" for each in changed)

    def _shown(self, each: Field[Any]) -> str:
        return f"{each.metadata['method']} {each.metadata['shown'](getattr(self, each.name))}"


Pool = Callable[[], AbstractContextManager[Any]]
Gather = Callable[[torch.Tensor, torch.Tensor], Work | None]
"""``gather(full, shard)``: start to fill 1-D ``full`` with all ranks' shards; the work ends when it is filled."""


@dataclass(frozen=True)
class GatherPolicy(MixedPrecisionPolicy, ABC):
    """A mixed precision policy with a gather of its own, which may send weights in fewer bits."""

    @abstractmethod
    def gather_of(self, layout: GroupLayout, comm: GroupComm, dtype: torch.dtype) -> Gather | None:
        """The gather of one group, from shards of any dtype to a full buffer of ``dtype``; None: the usual one."""


class GroupComm:
    """The collectives of one group.

    Args:
        mesh: 1-D (shard) or 2-D (replicate, shard).
        part_size: ranks of the smaller groups over which full parameters are kept between forward and backward, or
            None. Divides the sharding axis.

    Attributes:
        shard_axis: index of the axis that shards, the last one.
        num_shards: ranks along it.
        rank: this rank's index along it.
        shard_group: ranks that share one copy of the parameters.
        replicate_group: ranks with the same shard, or None without replication.
    """

    def __init__(self, mesh: DeviceMesh, part_size: int | None = None) -> None:
        self.mesh = mesh
        self.part_size = part_size
        # Read several times per step and unit, and slow to read from a mesh.
        self.shard_axis = mesh.ndim - 1
        self.num_shards = mesh.size(self.shard_axis)
        self.rank = mesh.get_local_rank(self.shard_axis)
        self.shard_group = mesh.get_group(self.shard_axis)
        self.replicate_group = mesh.get_group(0) if mesh.ndim == 2 else None
        self.settings = GroupSettings()
        self.watch: OrderWatch | None = None  # of the order in which ranks start collectives
        self.memory: CommMemory | None = None  # the communication library's own
        # (full, shard) of gathers that the caller will start together
        self.noted: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        self.reduce_group: dist.ProcessGroup | None = None  # reductions' own communicator
        self._part_mesh: DeviceMesh | None = None
        if part_size is not None:
            with groups_with_timeout_of(self.shard_group), outside_fake_mode():
                self._part_mesh = DeviceMesh(mesh.device_type, mesh.mesh.view(-1, part_size))

    def change(self, **settings: Any) -> None:
        """Change some of the settings."""
        self.settings = replace(self.settings, **settings)

    def process_groups(self) -> list[dist.ProcessGroup]:
        """All process groups of its collectives."""
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
        """Start the all-gather of shards; ``shard`` may be a view of ``full`` (1-D both)."""
        if self.memory is not None:
            self.memory.prepare(full)
        if self.settings.custom_all_gather is not None:
            return self.settings.custom_all_gather(
                output_tensor=full, input_tensor=shard, group=self.shard_group, async_op=runs_beside(full)
            )
        return self.all_gather(full, shard)

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Work | None:
        """The same without the user's object; or note it, where the caller starts several gathers together."""
        if self.noted is None:
            return all_gather_into(full, shard, self.shard_group)
        self.noted.append((full, shard))
        return None

    def gather_parts(self, full: torch.Tensor, part: torch.Tensor) -> Work | None:
        """Start the all-gather of the parts that the smaller group kept between forward and backward."""
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
        """The pool of buffers that gathers fill, entered at each gather."""
        return pool_of(self.settings.custom_all_gather or self.memory)

    @property
    def grads_pool(self) -> Pool:
        """The pool of buffers of reductions."""
        return pool_of(self.settings.custom_reduce_scatter or self.memory)

    def allocate_grads(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer that reductions read or write (1-D [numel])."""
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
        settings = self.settings
        return settings.divide_factor is None and not settings.force_sum and dtype is not torch.float16

    def _op(self, dtype: torch.dtype, num_ranks: int) -> dist.ReduceOp.RedOpType:
        # Of one rank the mean is the sum, and NCCL's AVG is unreliable there (so says torch 2.13's FSDP2).
        return dist.ReduceOp.AVG if self._averages(dtype) and num_ranks > 1 else dist.ReduceOp.SUM

    def _total_factor(self) -> float:
        factor = self.settings.divide_factor
        return factor if factor is not None else float(self.mesh.size())

    def _divide_before(self, dtype: torch.dtype) -> float:
        if dtype is not torch.float16:
            return 1.0
        total, factor = self._total_factor(), 1.0
        while total % factor == 0 and total / factor > factor:
            factor *= 2
        return factor


def separate_reductions(comms: Iterable[GroupComm]) -> None:
    """Give reductions communicators of their own, one per set of ranks, so that they do not wait for gathers.

    Collective: all ranks, for the same groups in the same order.
    """
    made: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
    for comm in comms:
        if comm.shard_group not in made:
            made[comm.shard_group] = new_group(comm.shard_group)
        comm.reduce_group = made[comm.shard_group]
        comm.change(separate_reductions=True)
