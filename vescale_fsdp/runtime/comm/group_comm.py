"""GroupComm: the ranks of a parameter group, its collectives and their settings, and the memory of their buffers.

    mesh            1-D (shard) or 2-D (replicate, shard); axis ``shard_axis`` shards one copy of the parameters
    gather          all-gather over the sharding axis, or a user's all-gather
    reduce_scatter  reduction over the sharding axis, on a communicator of its own if the user asks for it
    finish_sum      reduction over the replicating axis: an all-reduce (HSDP), or a reduce-scatter (a hybrid cut)

Gradients are divided as in torch 2.13's FSDP2: fp32 and bf16 use AVG. With a user's factor, with forced sums, and for
fp16, SUM is used and the sum is divided. fp16 is also divided *before* the sum, by a power of two near the square root
of the number of ranks, so that the sum does not overflow.

The collectives themselves are in `vescale_fsdp.collectives`. On accelerators a reduction is one reduce-scatter of the
backend in the reduce dtype, from the gradient buffer, as in FSDP2. gloo on the CPU exchanges slices in the gradients'
dtype and sums them in the reduce dtype; `set_narrow_reduction(True)` does so on accelerators, too
(`_Native.reduce_scatter`).

Buffers free their memory and allocate it again (`vescale_fsdp.runtime.comm.dbuffer`). A user's own collectives may
provide a memory pool (`PooledComm`), which is entered around every allocation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import Field, dataclass, fields, replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from vescale_fsdp.collectives.operations import (
    all_gather_into,
    all_reduce_at_once,
    all_reduce_in_place,
    reduce_scatter_into,
    reduces_beside,
    sums_in_wider,
)
from vescale_fsdp.collectives.process_groups import new_group, set_nodes
from vescale_fsdp.collectives.slice_exchange import Work, runs_beside
from vescale_fsdp.layout.group_layout import GroupLayout
from vescale_fsdp.runtime.comm.collective_check import GatherCheck, check_replicas
from vescale_fsdp.runtime.comm.dbuffer import Gather, Pool
from vescale_fsdp.runtime.comm.order_watch import OrderWatch


@runtime_checkable
class PooledComm(Protocol):
    """A user's collective with a memory pool of its own."""

    def memory_pool(self) -> AbstractContextManager[Any]:
        """Return a context that is entered around every allocation of a buffer's memory."""


def pool_of(comm: object) -> Pool:
    """Return the function that makes the context for allocations for ``comm``, a user's collective or None."""
    if comm is None:  # the usual case: isinstance of a protocol is slow, and this runs at every allocation
        return nullcontext
    return comm.memory_pool if isinstance(comm, PooledComm) else nullcontext


class AllGather(Protocol):
    """A user's all-gather, with the methods of torch's ``AllGather``."""

    def allocate(self, size: list[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a new buffer of this size for the collective."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Work | None:
        """Gather ``input_tensor`` of all ranks into ``output_tensor``; return the work to wait for, or None."""


class ReduceScatter(Protocol):
    """A user's reduce-scatter, with the methods of torch's ``ReduceScatter``."""

    def allocate(self, size: list[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a new buffer of this size for the collective."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> Work | None:
        """Reduce ``input_tensor`` over the ranks, and write this rank's part into ``output_tensor``."""


@dataclass(frozen=True)
class GroupSettings:
    """The user's settings of one group. `SETTERS` names the method or function that sets and documents each field.

    Ranks compare all fields at a model's first use (`vescale_fsdp.runtime.consensus`). When a model continues on other
    ranks, its new groups get the same settings (`vescale_fsdp.elastic.renewal`), from which they create communicators.
    """

    divide_factor: float | None = None
    force_sum: bool = False
    narrow: bool | None = None  # None: on the CPU only
    custom_all_gather: AllGather | None = None
    custom_reduce_scatter: ReduceScatter | None = None
    separate_reductions: bool = False
    requires_all_reduce: bool = True
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None
    on_delivery: Callable[[list[nn.Parameter]], None] | None = None
    zeros_unused: bool = False
    keeps_full: bool = False
    check_every: int = 0  # root forwards from one check of collectives to the next; 0: none

    def __str__(self) -> str:
        """Return the text of all settings, which ranks compare."""
        return ", ".join(self._shown(each) for each in fields(self))

    @cached_property
    def changes(self) -> str:
        """The text of the settings that differ from their defaults, with a comma before each setting."""
        changed = [each for each in fields(self) if getattr(self, each.name) != each.default]
        return "".join(f", {self._shown(each)}" for each in changed)

    def _shown(self, each: Field[Any]) -> str:
        """Return the text of one setting, which must be the same on ranks that agree."""
        value = getattr(self, each.name)
        # The texts of objects contain addresses. So a hook is shown as True or False, any other object as its class.
        if each.name in ("all_reduce_hook", "on_delivery"):
            value = value is not None
        elif value is not None and not isinstance(value, (bool, int, float)):
            value = type(value).__name__
        return f"{SETTERS[each.name]} {value}"


# Field -> the method or function that sets it, which error messages name.
SETTERS = {
    "divide_factor": "set_gradient_divide_factor",
    "force_sum": "set_force_sum_reduction_for_comms",
    "narrow": "set_narrow_reduction",
    "custom_all_gather": "set_custom_all_gather",
    "custom_reduce_scatter": "set_custom_reduce_scatter",
    "separate_reductions": "set_separate_reduce_scatter_group",
    "requires_all_reduce": "set_requires_all_reduce",
    "all_reduce_hook": "set_all_reduce_hook",
    "on_delivery": "step_in_backward",
    "zeros_unused": "set_reduce_scatter_unused_params",
    "keeps_full": "set_keep_unsharded_storage",
    "check_every": "fully_shard(check_collectives=)",
}


@dataclass(frozen=True)
class GatherPolicy(MixedPrecisionPolicy, ABC):
    """A mixed precision policy with its own gather in place of the all-gather, such as one that sends 8-bit codes."""

    @abstractmethod
    def gather_of(self, layout: GroupLayout, comm: GroupComm, dtype: torch.dtype) -> Gather | None:
        """Return one group's gather, from shards of any dtype to a buffer of ``dtype``; None: a plain all-gather."""


class GroupComm:
    """The collectives of one group.

    Args:
        mesh: 1-D (shard) or 2-D (replicate, shard).
        part_size: number of ranks that together keep one copy of the full parameters between forward and backward; a
            divisor of the number of shards. None: no copy is kept in parts.
        cut: in a hybrid cut, the 1-D mesh of all ranks in the order of their slices. The replicating axis of ``mesh``
            has the nodes then.

    Attributes:
        shard_axis: index of the axis that shards, the last one.
        num_shards: number of ranks along this axis.
        local_rank: this rank's index along this axis.
        rank: number of this rank's slice of the buffer: ``local_rank``, unless the cut is hybrid.
        shard_group: ranks that share one copy of the full parameters.
        replicate_group: ranks with the same shard, or None without replication; in a hybrid cut, those with the same
            part, one of each node.
        cut_group: all ranks of a hybrid cut, or None.
    """

    def __init__(self, mesh: DeviceMesh, part_size: int | None = None, cut: DeviceMesh | None = None) -> None:
        self.mesh = mesh
        self.part_size = part_size
        # Stored, because reading these values from a mesh is slow, and each step reads them several times per unit.
        self.shard_axis = mesh.ndim - 1
        self.num_shards = mesh.size(self.shard_axis)
        self.rank = self.local_rank = mesh.get_local_rank(self.shard_axis)
        self.shard_group = mesh.get_group(self.shard_axis)
        self.replicate_group = mesh.get_group(0) if mesh.ndim == 2 else None
        self.cut_group: dist.ProcessGroup | None = None
        if cut is not None:
            self.rank, self.cut_group = cut.get_local_rank(0), cut.get_group(0)
        self.settings = GroupSettings()
        self.watch: OrderWatch | None = None
        self.checks = False  # whether collectives of this root forward are checked; the same on all ranks
        # While this is a list, `all_gather` only adds (full, shard) to it; the caller starts these gathers together.
        self.delayed: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        self.reduce_group: dist.ProcessGroup | None = None  # communicator of reductions; None: `shard_group`
        self._part_group: dist.ProcessGroup | None = None  # the ``part_size`` ranks
        self.part_rank = 0  # this rank's index in `_part_group`
        if part_size is not None:
            ranks = dist.get_process_group_ranks(self.shard_group)
            first = self.rank - self.rank % part_size
            self._part_group = new_group(self.shard_group, ranks[first : first + part_size])
            self.part_rank = self.rank - first

    def change(self, **settings: Any) -> None:
        """Change the given fields of `GroupSettings`."""
        # Settings are frozen. `ParamGroup.note_start` notices a change because the object is a new one.
        self.settings = replace(self.settings, **settings)

    def process_groups(self) -> list[dist.ProcessGroup]:
        """Return all process groups of this group's collectives."""
        used = (self.shard_group, self.replicate_group, self.cut_group, self.reduce_group, self._part_group)
        return [group for group in used if group is not None]

    def set_nodes(self, per_node: int) -> None:
        """Allow collectives over shards in two levels, for a number of ranks per node that all ranks have compared."""
        for group in self.process_groups():
            set_nodes(group, per_node)

    # -- collectives ----------------------------------------------------------------------------------

    def gather(self, full: torch.Tensor, shard: torch.Tensor) -> Work | None:
        """Start the all-gather of 1-D shards into 1-D ``full``; ``shard`` may be a view of ``full``."""
        if self.settings.custom_all_gather is not None:
            return self.settings.custom_all_gather(
                output_tensor=full, input_tensor=shard, group=self.shard_group, async_op=runs_beside(full)
            )
        return self.all_gather(full, shard)

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Work | None:
        """Start an all-gather of this package, not of the user; or add it to ``delayed``, if that is a list."""
        if self.delayed is None:
            return all_gather_into(full, shard, self.shard_group)
        self.delayed.append((full, shard))
        return None

    def begin_check(
        self, full: torch.Tensor, own: torch.Tensor, *, is_part: bool = False, over_nodes: bool = False
    ) -> GatherCheck | None:
        """Return the check of the gather that is about to start, if this step is checked.

        Args:
            full, own: as for the gather.
            is_part: whether the gather is `gather_parts`.
            over_nodes: whether the gather is `gather_over_nodes`.
        """
        group, rank = (self._part_group, self.part_rank) if is_part else (self.shard_group, self.local_rank)
        if over_nodes:
            group, rank = self.replicate_group, self.mesh.get_local_rank(0)
        assert group is not None
        if not self.checks or group.size() == 1:
            return None
        replicas = [] if self.replicate_group is None else [self.replicate_group]
        check = GatherCheck(group, [self.shard_group, *replicas], rank)
        check.begin(full, own)
        return check

    def check_reduced(self, shard: torch.Tensor, label: str) -> None:
        """Check that replicas have equal reduced shards, if this step is checked."""
        if self.cut_group is not None:  # no two ranks have the same shard
            return
        if self.checks and self.replicate_group is not None and self.replicate_group.size() > 1:
            check_replicas(shard, [self.replicate_group, self.shard_group], label)

    def gather_over_nodes(self, part: torch.Tensor, own: torch.Tensor) -> Work | None:
        """Start the all-gather of slices of all nodes into 1-D ``part``, of which ``own`` is a view (a hybrid cut)."""
        assert self.replicate_group is not None
        return all_gather_into(part, own, self.replicate_group)

    def gather_parts(self, full: torch.Tensor, part: torch.Tensor) -> Work | None:
        """Start the all-gather of the parts that ``part_size`` ranks kept between forward and backward."""
        assert self._part_group is not None
        return all_gather_into(full, part, self._part_group)

    def allocate_full(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a new buffer for a gather to fill (1-D [numel])."""
        return _allocated(self.settings.custom_all_gather, numel, dtype, device)

    def allocate_grads(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a new buffer for a reduction to read or write (1-D [numel])."""
        return _allocated(self.settings.custom_reduce_scatter, numel, dtype, device)

    @property
    def full_pool(self) -> Pool:
        """The memory pool of buffers that gathers fill: the user's, or a null context."""
        return pool_of(self.settings.custom_all_gather)

    @property
    def grads_pool(self) -> Pool:
        """The memory pool of buffers that reductions read or write: the user's, or a null context."""
        return pool_of(self.settings.custom_reduce_scatter)

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor) -> Work | None:
        """Start the reduction of 1-D ``full`` into ``shard``, in the dtype of ``shard``.

        For fp16, ``full`` is first divided in place, so that the sum does not overflow.
        """
        before = self._divide_before(shard.dtype)
        if before != 1:  # dividing by 1 would cost a pass over the buffer
            full.div_(before)
        group = self.reduce_group or self.shard_group
        op = self._op(shard.dtype, self.num_shards)
        if self.settings.custom_reduce_scatter is not None:
            return self.settings.custom_reduce_scatter(
                output_tensor=shard, input_tensor=full, group=group, op=op, async_op=runs_beside(full)
            )
        return reduce_scatter_into(shard, full, op, group)

    def sums_in_wider(self, device: torch.device) -> bool:
        """Return whether a reduction supports a ``full`` of a narrower dtype than ``shard``: the same on all ranks."""
        # On accelerators the backend's reduce-scatter is one kernel, and nothing faster was measured there.
        is_narrow = device.type == "cpu" if self.settings.narrow is None else self.settings.narrow
        # A user's reduce-scatter gets two buffers of one dtype, as in FSDP2.
        if not is_narrow or self.settings.custom_reduce_scatter is not None:
            return False
        return sums_in_wider(self.reduce_group or self.shard_group, device.type)

    @property
    def can_watch(self) -> bool:
        """Whether ranks can compare what they do through a store.

        Groups of torch's test backends cannot: "fake" has no other ranks, and the ranks of "threaded" are threads of
        one process.
        """
        return self.mesh.size() > 1 and dist.get_backend(self.shard_group) not in ("fake", "threaded")

    def reduces_beside(self, device: torch.device) -> bool:
        """Return whether on the CPU a reduction over shards goes on while this rank computes."""
        group = self.reduce_group or self.shard_group
        return self.settings.custom_reduce_scatter is None and reduces_beside(group, device.type)

    def finish_sum(self, part: torch.Tensor, shard: torch.Tensor) -> Work | None:
        """Reduce over the replicating axis what `reduce_scatter` has left; a no-op on a mesh without such an axis.

        Args:
            part: result of the reduction over shards; read, and undefined afterwards unless it is ``shard``.
            shard: written: ``part`` itself, reduced over replicas, or in a hybrid cut this rank's slice of the sum.

        Returns:
            On the CPU, if replicas are on several nodes, the work to wait for. Else None: the current stream has
            reduced.
        """
        if self.replicate_group is None:
            return None
        op = self._op(shard.dtype, self.mesh.size(0))
        if self.cut_group is not None:
            return reduce_scatter_into(shard, part, op, self.replicate_group)
        if reduces_beside(self.replicate_group, shard.device.type):
            return all_reduce_in_place(shard, op, self.replicate_group)
        all_reduce_at_once(shard, op, self.replicate_group)
        return None

    def finish_division(self, shard: torch.Tensor) -> None:
        """Divide a summed shard in place; a no-op if the collectives used AVG."""
        if not self._averages(shard.dtype):
            # Without the part of the divisor by which `reduce_scatter` has divided before the sum.
            shard.div_(self._total_factor() / self._divide_before(shard.dtype))

    # -- division -------------------------------------------------------------------------------------

    def _averages(self, dtype: torch.dtype) -> bool:
        """Return whether collectives on this dtype use AVG."""
        settings = self.settings
        return settings.divide_factor is None and not settings.force_sum and dtype is not torch.float16

    def _op(self, dtype: torch.dtype, num_ranks: int) -> dist.ReduceOp.RedOpType:
        # For one rank SUM gives the same result, and NCCL's AVG is unreliable (a comment in torch 2.13's FSDP2).
        return dist.ReduceOp.AVG if self._averages(dtype) and num_ranks > 1 else dist.ReduceOp.SUM

    def _total_factor(self) -> float:
        """Return the number by which sums are divided: the user's factor, or the number of ranks."""
        factor = self.settings.divide_factor
        return factor if factor is not None else float(self.mesh.size())

    def _divide_before(self, dtype: torch.dtype) -> float:
        """Return the number by which gradients are divided before the sum; 1 except for fp16."""
        if dtype is not torch.float16:
            return 1.0
        total, factor = self._total_factor(), 1.0
        # A power of two near the square root of the total, as in torch's FSDP2, so that results have the same bits.
        while total % factor == 0 and total / factor > factor:
            factor *= 2
        return factor


def _allocated(
    comm: AllGather | ReduceScatter | None, numel: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return a new buffer (1-D [numel]) for a user's collective, or for this package's (None)."""
    if comm is not None:
        return comm.allocate([numel], dtype=dtype, device=device)
    return torch.empty(numel, dtype=dtype, device=device)


def separate_reductions(comms: Iterable[GroupComm]) -> None:
    """Create separate communicators for reductions, one per set of ranks, so that they do not queue behind gathers.

    Collective: all ranks call it, with the same groups in the same order.
    """
    reduce_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
    for comm in comms:
        if comm.shard_group not in reduce_groups:
            reduce_groups[comm.shard_group] = new_group(comm.shard_group)
        comm.reduce_group = reduce_groups[comm.shard_group]
        comm.change(separate_reductions=True)
