"""The collectives of this package, each in the one spelling that torch 2.11-2.15 and gloo and NCCL share.

Every function starts its collective and returns the work to wait on; the buffers must live until then. Where gloo is
to be asked otherwise than NCCL, `_BACKENDS` says how. Times below: two ranks of one idle machine, torch 2.13, 30 MB,
``python tools/bench/collectives.py``.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
import xxhash

from vescale_fsdp.torch_private import (
    all_gather_single,
    coalesced,
    gloo_group,
    reduce_scatter_single,
    storage_id,
    timeout_of,
)


def new_group(
    base: dist.ProcessGroup, ranks: list[int] | None = None, *, backend: str | None = None
) -> dist.ProcessGroup:
    """Another group that waits as long as ``base``. A collective of its ranks, or of all, where it has all.

    Args:
        ranks: global numbers; default: those of ``base``.
        backend: default: that of the default group.
    """
    members = dist.get_process_group_ranks(base) if ranks is None else ranks
    timeout = timeout_of(base)
    is_gloo = (backend or dist.get_backend()) == "gloo"
    if is_gloo and timeout is not None and len(members) < dist.get_world_size():
        # torch puts the number of groups that a process has into such a group's name: ranks that have different
        # numbers would wait for each other in vain.
        numbers = {rank: number for number, rank in enumerate(members)}
        return gloo_group(numbers[dist.get_rank()], numbers, _new_name(members), timeout)
    return dist.new_group(
        members,
        timeout=timeout,
        backend=backend,
        # Only the ranks of a smaller group come here, so the others must not be waited for.
        use_local_synchronization=len(members) < dist.get_world_size(),
    )


# How many groups of the same ranks were made, by the default group: all members make them in the same order.
_num_made: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = (
    weakref.WeakKeyDictionary()
)


def _new_name(ranks: Sequence[int]) -> str:
    """A name that all of these ranks find, whatever other groups each of them is in."""
    world = dist.group.WORLD
    assert world is not None
    made = _num_made.setdefault(world, Counter())
    made[tuple(ranks)] += 1
    members = xxhash.xxh3_128_hexdigest(",".join(map(str, ranks)).encode())
    return f"vescale_fsdp {members} {made[tuple(ranks)]}"


_CHUNK_NUMEL = 1 << 16  # elements that are summed at a time, small enough for a cache
_ROOM_BYTES = 8 << 20  # on the CPU, for what is received and waits to be summed
_RECEIVED_BYTES = (
    64 << 20
)  # on an accelerator, that wait to be summed at most: a piece of the slices of all ranks
_ALIGN_NUMEL = (
    64  # pieces start at multiples of so many elements, so that copies of them are as fast as of the whole
)
_MESSAGE_TAG = 0x5E4D  # of single messages
_BREAK_TAG = 0xB4EA  # of a message that nobody sends
_SLICE_TAG = 0x51CE  # of slices sent between two ranks, apart from a user's messages in the same group


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Block the caller (on an accelerator: its current stream) until the collective is done."""


def wait_for(*works: Work | None) -> None:
    """Wait for collectives; None stands for one that was done at once."""
    for work in works:
        if work is not None:
            work.wait()


class _AllOf:
    """Several collectives under way, as one."""

    def __init__(self, works: Sequence[Work | None]) -> None:
        self._works = works

    def wait(self) -> None:
        wait_for(*self._works)


class _KeepSlice:
    """An all-reduce under way of which this rank keeps one slice."""

    def __init__(self, work: dist.Work | None, kept: torch.Tensor, into: torch.Tensor) -> None:
        self._work, self._kept, self._into = work, kept, into

    def wait(self) -> None:
        wait_for(self._work)
        self._into.copy_(self._kept)


# What gloo and NCCL both move as it is; other dtypes (bool, int16, float8, ..) travel as bytes.
_COMMON = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_COMMON |= {torch.int64, torch.int32, torch.int8, torch.uint8}


def _movable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype in _COMMON else tensor.view(torch.uint8)


def _share_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    return storage_id(one) == storage_id(other)


def runs_beside(tensor: torch.Tensor) -> bool:
    """Whether a collective on this tensor is started as one to be waited for.

    On an accelerator it becomes work of the stream that the caller has chosen, one of high priority: asked to run
    beside it, NCCL's would go to the communicator's own, of normal priority, with a pair of events around it.
    """
    return tensor.device.type in ("cpu", "meta")


class _Native:
    """A backend that gathers into and reduces from the buffers it is given, on streams: NCCL."""

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Work | None:
        return all_gather_single(_movable(full), _movable(shard), group=group, async_op=runs_beside(full))

    def all_gather_each(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], group: dist.ProcessGroup
    ) -> Work | None:
        return _AllOf([self.all_gather(full, shard, group) for full, shard in pairs])

    def reduce_scatter(
        self, shard: torch.Tensor, full: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup
    ) -> Work | None:
        if full.dtype is shard.dtype:
            return reduce_scatter_single(shard, full, op=op, group=group, async_op=runs_beside(full))
        _sum_in_pieces(shard, full, group)
        if op == dist.ReduceOp.AVG:
            shard.div_(group.size())
        return None

    def sums_in_wider(self, device_type: str) -> bool:
        return True  # by an exchange of slices: its own reduction reads a buffer in the dtype it sums in


class _Coalescing(_Native):
    """One that makes one launch of several gathers."""

    def all_gather_each(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], group: dist.ProcessGroup
    ) -> Work | None:
        if len(pairs) == 1 or runs_beside(pairs[0][0]):
            return super().all_gather_each(pairs, group)
        with coalesced(group):
            for full, shard in pairs:
                self.all_gather(full, shard, group)
        return None


class _Gloo(_Native):
    """gloo, whose own all-gather and reduce-scatter work on copies of the whole buffer."""

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Work | None:
        slices = full.split(shard.numel()) if shard.numel() else ()
        if slices and not _share_storage(full, shard):
            slices[group.rank()].copy_(shard)  # the one copy; the others' slices come to where they belong
        return _AllOf([broadcast_in_place(part, group, owner) for owner, part in enumerate(slices)])

    def reduce_scatter(
        self, shard: torch.Tensor, full: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup
    ) -> Work | None:
        if self.sums_in_wider(full.device.type):
            _sum_slices(shard, full, group, group.size() if op == dist.ReduceOp.AVG else 1)
            return None
        # An all-reduce in place, of which each rank keeps its slice: gloo sends no slices of a GPU's memory.
        first = group.rank() * shard.numel()
        work = dist.all_reduce(full, op, group=group, async_op=True)
        return _KeepSlice(work, full[first : first + shard.numel()], shard)

    def sums_in_wider(self, device_type: str) -> bool:
        return device_type == "cpu"  # by slices, which go from rank to rank


_OTHER = _Native()
_BACKENDS = {"gloo": _Gloo(), "nccl": _Coalescing()}


def _backend_of(group: dist.ProcessGroup, device_type: str) -> _Native:
    """The backend that moves tensors of a device; those that are not listed are asked as NCCL is."""
    return _BACKENDS.get(_backends_of(group).get(device_type, ""), _OTHER)


def _backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """By type of device."""
    return dict(pair.partition(":")[::2] for pair in dist.get_backend_config(group).split(","))


def _trade(
    received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> list[dist.Work | None]:
    """Start to send every other rank its own of ``sent``, and to receive of each its own of ``received``."""
    rank, size = group.rank(), group.size()
    works: list[dist.Work | None] = []
    for distance in range(1, size):
        to, source = (rank + distance) % size, (rank - distance) % size
        works.append(dist.irecv(_movable(received[source]), group=group, group_src=source, tag=_SLICE_TAG))
        works.append(dist.isend(_movable(sent[to]), group=group, group_dst=to, tag=_SLICE_TAG))
    return works


def _sum_slices(shard: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup, divisor: int) -> None:
    """Sum this rank's slice of all ranks' buffers, in the order of ranks; every slice travels once, as it is.

    Half the bytes of an all-reduce, and of bf16 gradients that are summed in fp32 a quarter. What is received has room
    of bounded size. Pieces as large as that come and are summed in turn: halves of it, of which one comes
    while the other is summed, are twice as many messages and took a tenth longer.
    """
    rank, size, numel = group.rank(), group.size(), shard.numel()
    slices = full.view(size, numel)
    room_numel = max(_ALIGN_NUMEL, _ROOM_BYTES // ((size - 1) * full.element_size()))
    room = full.new_empty(size - 1, min(room_numel, numel))
    for start in range(0, numel, room_numel):
        piece = slice(start, min(start + room_numel, numel))
        others = room[:, : piece.stop - piece.start].unbind()
        parts = [*others[:rank], slices[rank, piece], *others[rank:]]
        wait_for(*_trade(parts, slices[:, piece].unbind(), group))
        _sum_into(shard[piece], parts, divisor)


def _sum_into(total: torch.Tensor, parts: Sequence[torch.Tensor], divisor: int) -> None:
    """The sum of 1-D tensors, in their order, divided; by chunks that stay in a core's cache.

    A sum of two dtypes widens all of the second one first.
    """
    chunked = [part.split(_CHUNK_NUMEL) for part in parts]
    for into, first, *others in zip(total.split(_CHUNK_NUMEL), *chunked, strict=True):
        into.copy_(first)
        for other in others:
            into.add_(other)
        if divisor > 1:
            into.div_(divisor)


def _sum_in_pieces(shard: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup) -> None:
    """`_sum_slices` as work of the current stream: the host waits for nothing, and what is received is bounded.

    Piece by piece every rank gets what all ranks have of its slice, and sums that in one kernel. Half the bytes of a
    reduction in fp32, and a buffer half as large.
    """
    size, numel = group.size(), shard.numel()
    received_bytes = min(_RECEIVED_BYTES, max(_RECEIVED_BYTES // 8, full.numel() * full.element_size() // 4))
    piece_numel = received_bytes // (size * full.element_size())
    piece_numel = max(_ALIGN_NUMEL, piece_numel - piece_numel % _ALIGN_NUMEL)
    slices = full.view(size, numel)
    received = full.new_empty(size, min(piece_numel, numel))
    for start in range(0, numel, piece_numel):
        stop = min(start + piece_numel, numel)
        room, sent = received[:, : stop - start], slices[:, start:stop]
        wait_for(
            dist.all_to_all(list(room.unbind()), list(sent.unbind()), group=group, async_op=runs_beside(full))
        )
        into = shard[start:stop]
        torch.sum(room, dim=0, dtype=into.dtype, out=into)


def all_gather_into(full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Work | None:
    """Gather equal shards into ``full``, rank-major; ``shard`` may be this rank's slice of ``full``.

    Args:
        full: 1-D [num_ranks * shard_numel], written.
        shard: 1-D [shard_numel], read.
        group: the ranks that take part.

    Returns:
        The work to wait on; None if there is none, as for one rank alone.
    """
    if group.size() > 1:
        return _backend_of(group, full.device.type).all_gather(full, shard, group)
    if not _share_storage(full, shard):
        full.copy_(shard)
    return None


def all_gather_each(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], group: dist.ProcessGroup
) -> Work | None:
    """`all_gather_into` for several (full, shard), on NCCL in one launch; in the same order on all ranks."""
    if group.size() > 1:
        return _backend_of(group, pairs[0][0].device.type).all_gather_each(pairs, group)
    for full, shard in pairs:
        all_gather_into(full, shard, group)
    return None


def reduce_scatter_into(
    shard: torch.Tensor, full: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup
) -> Work | None:
    """Reduce ``full`` over the ranks, in the dtype of ``shard``, and leave this rank's part there.

    Args:
        shard: 1-D [shard_numel], written.
        full: 1-D [num_ranks * shard_numel], read; its contents are undefined afterwards. Of a narrower dtype, the
            same on all ranks, only where `sums_in_wider`.
        op: SUM or AVG.
        group: the ranks that take part.

    Returns:
        The work to wait on; None if there is none, as for one rank alone.
    """
    if group.size() > 1:
        return _backend_of(group, full.device.type).reduce_scatter(shard, full, op, group)
    shard.copy_(full)
    return None


def sums_in_wider(group: dist.ProcessGroup, device_type: str) -> bool:
    """Whether `reduce_scatter_into` takes a buffer of a narrower dtype than it sums in."""
    return group.size() == 1 or _backend_of(group, device_type).sums_in_wider(device_type)


def all_to_all_into(
    received: torch.Tensor,
    sent: torch.Tensor,
    received_numels: Sequence[int],
    sent_numels: Sequence[int],
    group: dist.ProcessGroup,
) -> dist.Work | None:
    """Send the next ``sent_numels[r]`` elements of ``sent`` to rank r, for all r; receive likewise.

    Args:
        received: 1-D [sum(received_numels)], written.
        sent: 1-D [sum(sent_numels)], read.
        received_numels, sent_numels: elements per rank of the group, zeros allowed.
        group: the ranks that take part.

    Returns:
        The work to wait on.
    """
    scale = received.element_size() if received.dtype not in _COMMON else 1
    return dist.all_to_all_single(
        _movable(received),
        _movable(sent),
        [scale * numel for numel in received_numels],
        [scale * numel for numel in sent_numels],
        group=group,
        async_op=True,
    )


def all_reduce_in_place(
    tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup
) -> dist.Work | None:
    """Reduce a tensor of equal shape over the ranks, in place; wherever the current stream is, beside it."""
    return dist.all_reduce(tensor, op, group=group, async_op=True)


def all_reduce_at_once(tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> None:
    """The same as work of the current stream (on the CPU: the caller waits)."""
    dist.all_reduce(tensor, op, group=group)


def reduce_in_place(
    tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup, owner: int
) -> dist.Work | None:
    """Reduce a tensor onto one rank of the group; what the others hold afterwards is undefined."""
    return dist.reduce(tensor, op=op, group=group, group_dst=owner, async_op=True)


def broadcast_in_place(tensor: torch.Tensor, group: dist.ProcessGroup, owner: int) -> dist.Work | None:
    """Give every rank of the group what ``owner`` has in ``tensor``."""
    return dist.broadcast(_movable(tensor), group=group, group_src=owner, async_op=True)


def send_async(tensor: torch.Tensor, group: dist.ProcessGroup, to: int) -> dist.Work | None:
    """Send a contiguous tensor to a rank of the group, which calls `receive_async`."""
    return dist.isend(_movable(tensor), group=group, group_dst=to, tag=_MESSAGE_TAG)


def receive_async(tensor: torch.Tensor, group: dist.ProcessGroup, source: int) -> dist.Work | None:
    """Fill a contiguous tensor with what a rank of the group sends; of one rank in the order in which it sends."""
    return dist.irecv(_movable(tensor), group=group, group_src=source, tag=_MESSAGE_TAG)


def break_group(group: dist.ProcessGroup) -> None:
    """End what waits in a group: its collectives raise, on this rank and on those that wait for it, then and later."""
    if group.size() == 1:
        return
    backends = set(_backends_of(group).values())
    if "gloo" in backends:
        # gloo's abort ends nothing (torch 2.13); a message that is not waited for closes all connections.
        room = torch.empty(1, dtype=torch.uint8, device="cpu")
        with suppress(RuntimeError):  # also where they are closed already
            work = dist.irecv(room, group=group, group_src=(group.rank() + 1) % group.size(), tag=_BREAK_TAG)
            assert work is not None
            work.wait(timedelta(milliseconds=1))
    if backends - {"gloo"}:
        group.abort()


def gathered(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """A small tensor of every rank, stacked: [num_ranks, *tensor.shape]. Waits."""
    flat = tensor.detach().contiguous().view(-1)
    full = flat.new_empty(dist.get_world_size(group) * flat.numel())
    wait_for(all_gather_into(full, flat, group))
    return full.view(-1, *tensor.shape)
