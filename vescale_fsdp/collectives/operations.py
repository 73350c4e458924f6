"""The collectives of this package, built on functions that torch 2.11-2.15, gloo and NCCL all support.

Most functions start a collective and return the work to wait for; the buffers must live until the wait has ended.
There is a class per kind of backend, because gloo needs other calls than NCCL. What a backend lacks is in
`slice_exchange`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from vescale_fsdp.collectives.interruptible import interruptibly
from vescale_fsdp.collectives.process_groups import backends_of, nodes_of, two_levels
from vescale_fsdp.collectives.slice_exchange import (
    AllWorks,
    MaxByMessages,
    Work,
    gather_by_node,
    movable,
    runs_beside,
    sum_in_pieces,
    sum_slices,
    sum_slices_by_node,
    thread_of,
    wait_for,
)
from vescale_fsdp.devices import ACCELERATORS
from vescale_fsdp.torch_modes import is_traced
from vescale_fsdp.torch_private import (
    all_gather_single,
    coalesced,
    group_of,
    reduce_scatter_single,
    storage_id,
)


def reduces_beside(group: dist.ProcessGroup, device_type: str) -> bool:
    """Return whether `reduce_scatter_into` on the CPU goes on while the caller computes: between nodes it does.

    There the network is slower than the cores. On one node it uses the cores that would compute.
    """
    return device_type == "cpu" and nodes_of(group) is not None and backend_of(group, "cpu") is _GLOO


class _KeepSlice(NamedTuple):
    """An all-reduce in flight; `wait` also copies ``kept``, this rank's slice of the result, into ``into``."""

    work: dist.Work | None
    kept: torch.Tensor
    into: torch.Tensor

    def wait(self) -> None:
        wait_for(self.work)
        self.into.copy_(self.kept)


class _Native:
    """A backend whose collectives read and write the caller's buffers directly: NCCL, and unknown backends.

    Args:
        coalesces: whether the backend launches several gathers at once.
    """

    def __init__(self, *, coalesces: bool = False) -> None:
        self._coalesces = coalesces

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Work | None:
        # In one level: the backend's own algorithms send each slice to a node once.
        return all_gather_single(movable(full), movable(shard), group=group, async_op=runs_beside(full))

    def all_gather_each(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], group: dist.ProcessGroup
    ) -> Work | None:
        if not self._coalesces or len(pairs) == 1 or runs_beside(pairs[0][0]):
            return AllWorks([self.all_gather(full, shard, group) for full, shard in pairs])
        with coalesced(group):
            for full, shard in pairs:
                self.all_gather(full, shard, group)
        return None  # the gathers run on the current stream, so no wait is needed

    def reduce_scatter(
        self, shard: torch.Tensor, full: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup
    ) -> Work | None:
        if full.dtype is shard.dtype:
            return reduce_scatter_single(shard, full, op=op, group=group, async_op=runs_beside(full))
        sum_in_pieces(shard, full, group)  # the backend cannot sum in a wider dtype than the buffer's
        if op == dist.ReduceOp.AVG:
            shard.div_(group.size())
        return None  # later work on the current stream sees the result

    def sums_in_wider(self, device_type: str) -> bool:
        return True  # by `sum_in_pieces`: the backend's own reduction sums in the dtype of the buffer


class _Gloo(_Native):
    """gloo, without its own all-gather and reduce-scatter, which copy the whole buffer."""

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Work | None:
        slices = full.split(shard.numel()) if shard.numel() else ()  # empty shards: there is nothing to send
        if slices and storage_id(full) != storage_id(shard):
            slices[group.rank()].copy_(shard)  # the only copy: slices of other ranks are received in place
        # Between nodes slices are sent directly: in gloo's broadcast some of them wait to be sent on. But its point-to-
        # point messages do not support GPU memory.
        nodes = nodes_of(group)
        if nodes is not None and slices and full.device.type == "cpu":
            return gather_by_node([movable(part) for part in slices], group, nodes)
        return AllWorks([broadcast_in_place(part, group, owner) for owner, part in enumerate(slices)])

    def reduce_scatter(
        self, shard: torch.Tensor, full: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup
    ) -> Work | None:
        if self.sums_in_wider(full.device.type):
            divisor = group.size() if op == dist.ReduceOp.AVG else 1
            nodes = two_levels(group, sent_bytes=full.element_size(), summed_bytes=shard.element_size())
            if nodes is None:
                reduction = partial(sum_slices, shard, full, group, divisor)
            else:
                reduction = partial(sum_slices_by_node, shard, full, group, nodes, divisor)
            if reduces_beside(group, "cpu"):
                return thread_of(group, "reductions").start_call(reduction)
            reduction()
            return None  # it has waited for its messages
        # An all-reduce of the whole buffer, because gloo's point-to-point messages do not support GPU memory.
        first = group.rank() * shard.numel()
        work = dist.all_reduce(full, op, group=group, async_op=True)
        return _KeepSlice(work, full[first : first + shard.numel()], shard)

    def sums_in_wider(self, device_type: str) -> bool:
        return device_type == "cpu"  # by `sum_slices`; gloo's all-reduce sums in the buffer's dtype


_GLOO, _NATIVE, _COALESCING = _Gloo(), _Native(), _Native(coalesces=True)


def backend_of(group: dist.ProcessGroup, device_type: str) -> _Native:
    """Return the group's backend for tensors of a device type."""
    name = backends_of(group).get(device_type, "")
    if name == "gloo":
        return _GLOO
    accelerator = ACCELERATORS.get(device_type)
    return _COALESCING if accelerator is not None and name in accelerator.coalescing else _NATIVE


def all_gather_into(full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Work | None:
    """Gather shards of equal size into ``full``, in the order of ranks; ``shard`` may be this rank's slice of ``full``.

    Args:
        full: 1-D [num_ranks * shard_numel], written.
        shard: 1-D [shard_numel], read.
        group: the ranks that take part.

    Returns:
        The work to wait for; None if it is complete, as for one rank.
    """
    if group.size() > 1:
        return backend_of(group, full.device.type).all_gather(full, shard, group)
    if storage_id(full) != storage_id(shard):
        full.copy_(shard)
    return None


def all_gather_each(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], group: dist.ProcessGroup
) -> Work | None:
    """Do `all_gather_into` for several (full, shard) in the same order on all ranks; on NCCL in one launch."""
    if group.size() > 1:
        return backend_of(group, pairs[0][0].device.type).all_gather_each(pairs, group)
    for full, shard in pairs:
        all_gather_into(full, shard, group)
    return None


def reduce_scatter_into(
    shard: torch.Tensor, full: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup
) -> Work | None:
    """Reduce ``full`` over the ranks, in the dtype of ``shard``, and write this rank's slice of the result.

    Args:
        shard: 1-D [shard_numel], written.
        full: 1-D [num_ranks * shard_numel], read; its contents are undefined afterwards. Its dtype may be narrower
            than that of ``shard`` if `sums_in_wider` returns True.
        op: SUM or AVG.
        group: the ranks that take part.

    Returns:
        The work to wait for; None if it is complete, as for one rank.
    """
    if group.size() > 1:
        return backend_of(group, full.device.type).reduce_scatter(shard, full, op, group)
    shard.copy_(full)
    return None


def sums_in_wider(group: dist.ProcessGroup, device_type: str) -> bool:
    """Return whether `reduce_scatter_into` accepts a ``full`` of a narrower dtype than ``shard``."""
    return group.size() == 1 or backend_of(group, device_type).sums_in_wider(device_type)


def all_to_all_into(
    received: torch.Tensor,
    sent: torch.Tensor,
    received_numels: Sequence[int],
    sent_numels: Sequence[int],
    group: dist.ProcessGroup,
) -> dist.Work | None:
    """Send ``sent_numels[r]`` elements to each rank r, and receive ``received_numels[r]`` elements from each rank r.

    The elements for or from rank r follow those of rank r - 1 in ``sent`` and ``received``.

    Args:
        received: 1-D [sum(received_numels)], written.
        sent: 1-D [sum(sent_numels)], read.
        received_numels, sent_numels: elements per rank of the group, zeros allowed.
        group: the ranks that take part.

    Returns:
        The work to wait for.
    """
    # `movable` views other dtypes as bytes, so their counts are multiplied by the bytes per element.
    scale = 1 if movable(received) is received else received.element_size()
    return dist.all_to_all_single(
        movable(received),
        movable(sent),
        [scale * numel for numel in received_numels],
        [scale * numel for numel in sent_numels],
        group=group,
        async_op=True,
    )


def all_reduce_in_place(
    tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup
) -> dist.Work | None:
    """Start to reduce a tensor over the ranks, in place; on an accelerator, concurrently with the current stream."""
    if is_traced(tensor):
        tensor.copy_(_traced_all_reduce()(tensor, op.name, group.group_name))
        return None
    return dist.all_reduce(tensor, op, group=group, async_op=True)


def all_reduce_at_once(tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> None:
    """Reduce a tensor over the ranks, in place, on the current stream (on the CPU, the caller waits)."""
    interruptibly(lambda: dist.all_reduce(tensor, op, group=group))


def max_apart(values: torch.Tensor, group: dist.ProcessGroup) -> Work | None:
    """Start the elementwise maximum of a few values over the ranks, in place; on an accelerator, on the current stream.

    On gloo its messages cannot meet those of other collectives, which ranks may have started in another order.
    """
    if not runs_beside(values):
        all_reduce_at_once(values, dist.ReduceOp.MAX, group)
        return None
    if backend_of(group, values.device.type) is _GLOO and group.size() > 1:
        return MaxByMessages(values, group)
    return all_reduce_in_place(values, dist.ReduceOp.MAX, group)


def reduce_in_place(
    tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup, owner: int
) -> dist.Work | None:
    """Reduce a tensor to one rank of the group; its contents on other ranks are undefined afterwards."""
    return dist.reduce(tensor, op=op, group=group, group_dst=owner, async_op=True)


def broadcast_in_place(tensor: torch.Tensor, group: dist.ProcessGroup, owner: int) -> dist.Work | None:
    """Copy ``tensor`` from rank ``owner`` of the group to all other ranks."""
    return dist.broadcast(movable(tensor), group=group, group_src=owner, async_op=True)


def gathered(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return a small tensor of every rank, stacked: [num_ranks, *tensor.shape]. Blocks until all ranks take part."""
    if is_traced(tensor):
        return _traced_gather()(tensor, group.group_name)
    flat = tensor.detach().contiguous().view(-1)  # collectives take 1-D contiguous buffers
    full = flat.new_empty(dist.get_world_size(group) * flat.numel())
    wait_for(all_gather_into(full, flat, group))
    return full.view(-1, *tensor.shape)


# -- under torch.compile --------------------------------------------------------------------------------

# torch's collectives write to buffers in place, which the graphs of torch.compile lose (torch 2.13): the buffers are
# read as if nothing had been received. Graphs contain these operators instead, which return new tensors. They are made
# when the first one is recorded, because that takes milliseconds.

_Traced = Callable[..., torch.Tensor]


@cache
def _traced_gather() -> _Traced:
    def compute(tensor: torch.Tensor, group: str) -> torch.Tensor:
        return gathered(tensor, group_of(group))

    def shape(tensor: torch.Tensor, group: str) -> torch.Tensor:
        return tensor.new_empty([group_of(group).size(), *tensor.shape])

    return traced_operator("gathered", compute, shape)


@cache
def _traced_all_reduce() -> _Traced:
    def compute(tensor: torch.Tensor, op: str, group: str) -> torch.Tensor:
        total = tensor.clone()
        wait_for(all_reduce_in_place(total, getattr(dist.ReduceOp, op), group_of(group)))
        return total

    def shape(tensor: torch.Tensor, op: str, group: str) -> torch.Tensor:
        return torch.empty_like(tensor)

    return traced_operator("all_reduced", compute, shape)


def traced_operator(name: str, compute: _Traced, shape: _Traced) -> _Traced:
    """Return an operator that torch.compile records and does not look into.

    Args:
        name: its name in the namespace ``vescale_fsdp``.
        compute: runs it. Returns a new tensor, and changes no argument.
        shape: returns an empty tensor of the result's shape and dtype. Has annotations, as ``compute``.
    """
    types = {"torch": torch}  # annotations are text, in the scope of another function
    for function in (compute, shape):
        function.__annotations__ = {key: eval(text, types) for key, text in function.__annotations__.items()}
    operator = torch.library.custom_op(f"vescale_fsdp::{name}", compute, mutates_args=())
    operator.register_fake(shape)
    return operator
