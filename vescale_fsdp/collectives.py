"""The collectives of this package, built on functions that torch 2.11-2.15, gloo and NCCL all support.

Every function starts its collective and returns the work to wait for; the buffers must live until then. `_BACKENDS` has
a class per backend, because gloo needs other calls than NCCL. Times in comments: two ranks of one idle machine, torch
2.13, 30 MB, ``python tools/bench/collectives.py``.
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
    """A new group with the timeout of ``base``. A collective of the group's ranks.

    Args:
        ranks: global ranks; default: the ranks of ``base``.
        backend: name of the backend; default: the default group's.
    """
    members = dist.get_process_group_ranks(base) if ranks is None else ranks
    timeout = timeout_of(base)
    is_gloo = (backend or dist.get_backend()) == "gloo"
    if is_gloo and timeout is not None and len(members) < dist.get_world_size():
        # torch names such a group by the number of groups of the process, so ranks with different numbers of groups
        # would wait under different names. This name counts only groups of the same members, which all members create
        # in the same order.
        world = dist.group.WORLD
        assert world is not None
        counts = _num_groups.setdefault(world, Counter())
        counts[tuple(members)] += 1
        # Short, however many ranks there are.
        digest = xxhash.xxh3_128_hexdigest(",".join(map(str, members)).encode())
        name = f"vescale_fsdp {digest} {counts[tuple(members)]}"
        numbers = {rank: number for number, rank in enumerate(members)}
        return gloo_group(numbers[dist.get_rank()], numbers, name, timeout)
    return dist.new_group(
        members,
        timeout=timeout,
        backend=backend,
        # Only the members of a smaller group call this, so torch must not wait for other ranks.
        use_local_synchronization=len(members) < dist.get_world_size(),
    )


# How many groups of each tuple of members this process has created, per default process group.
_num_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = (
    weakref.WeakKeyDictionary()
)

_CHUNK_NUMEL = 1 << 16  # elements that are summed at a time: they fit into a core's cache
_ROOM_BYTES = 8 << 20  # 8 MiB; on the CPU, upper limit of the buffer for received slices
# 64 MiB; on an accelerator, upper limit of the buffer for received slices.
_RECEIVED_BYTES = 64 << 20
# Pieces of a slice start at multiples of this number of elements, so that they are copied as fast as a whole slice.
_ALIGN_NUMEL = 64
# Tags are arbitrary numbers, unlike the default tag 0 of a user's own messages in the same group.
_MESSAGE_TAG = 0x5E4D  # tag of `send_async` and `receive_async`
_BREAK_TAG = 0xB4EA  # tag of a message that no rank sends
_SLICE_TAG = 0x51CE  # tag of slices that `_sum_slices` exchanges


class Work(Protocol):
    """A collective in flight."""

    def wait(self) -> object:
        """Block the caller (on an accelerator: its current stream) until the collective is done."""


def wait_for(*works: Work | None) -> None:
    """Wait for collectives; None stands for a complete one."""
    for work in works:
        if work is not None:
            work.wait()


class _AllOf:
    """Several collectives in flight, with one wait for all of them."""

    def __init__(self, works: Sequence[Work | None]) -> None:
        self._works = works

    def wait(self) -> None:
        wait_for(*self._works)


class _KeepSlice:
    """An all-reduce in flight; `wait` copies this rank's slice of the result."""

    def __init__(self, work: dist.Work | None, kept: torch.Tensor, into: torch.Tensor) -> None:
        self._work, self._kept, self._into = work, kept, into

    def wait(self) -> None:
        wait_for(self._work)
        self._into.copy_(self._kept)


# Dtypes that both gloo and NCCL send; tensors of other dtypes (bool, int16, float8, ..) are sent as bytes.
_COMMON = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_COMMON |= {torch.int64, torch.int32, torch.int8, torch.uint8}


def _movable(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as a collective sends it: viewed as bytes if a backend does not support the dtype."""
    return tensor if tensor.dtype in _COMMON else tensor.view(torch.uint8)


def _share_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    return storage_id(one) == storage_id(other)


def runs_beside(tensor: torch.Tensor) -> bool:
    """Whether collectives on this tensor are started with ``async_op=True``.

    On an accelerator they run on the caller's current stream, which has high priority. With ``async_op=True``, NCCL
    would use the communicator's own stream, of normal priority, and synchronize with a pair of events.
    """
    return tensor.device.type in ("cpu", "meta")


class _Native:
    """A backend that gathers into and reduces from the caller's buffers, on streams: NCCL, and unknown backends."""

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
        _sum_in_pieces(shard, full, group)  # the backend cannot sum in a wider dtype than the buffer's
        if op == dist.ReduceOp.AVG:
            shard.div_(group.size())
        return None

    def sums_in_wider(self, device_type: str) -> bool:
        return True  # by `_sum_in_pieces`: the backend's own reduction sums in the dtype of the buffer


class _Coalescing(_Native):
    """A backend that launches several gathers at once."""

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
    """gloo, without its own all-gather and reduce-scatter, which copy the whole buffer."""

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Work | None:
        slices = full.split(shard.numel()) if shard.numel() else ()
        if slices and not _share_storage(full, shard):
            slices[group.rank()].copy_(shard)  # the only copy: other ranks' slices are received in place
        return _AllOf([broadcast_in_place(part, group, owner) for owner, part in enumerate(slices)])

    def reduce_scatter(
        self, shard: torch.Tensor, full: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup
    ) -> Work | None:
        if self.sums_in_wider(full.device.type):
            _sum_slices(shard, full, group, group.size() if op == dist.ReduceOp.AVG else 1)
            return None
        # An all-reduce in place, because gloo cannot send slices of a GPU's memory.
        first = group.rank() * shard.numel()
        work = dist.all_reduce(full, op, group=group, async_op=True)
        return _KeepSlice(work, full[first : first + shard.numel()], shard)

    def sums_in_wider(self, device_type: str) -> bool:
        return device_type == "cpu"  # by `_sum_slices`


_OTHER = _Native()
_BACKENDS = {"gloo": _Gloo(), "nccl": _Coalescing()}


def _backend_of(group: dist.ProcessGroup, device_type: str) -> _Native:
    """The backend for tensors of a device type; `_Native` for backends that `_BACKENDS` does not list."""
    return _BACKENDS.get(_backends_of(group).get(device_type, ""), _OTHER)


def _backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """Device type -> name of the backend."""
    # The text is like "cpu:gloo,cuda:nccl"
    return dict(pair.partition(":")[::2] for pair in dist.get_backend_config(group).split(","))


def _sum_slices(shard: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup, divisor: int) -> None:
    """Sum this rank's slice of all ranks' buffers, in the order of ranks. Every slice is sent once, in its own dtype.

    Sends half the bytes of an all-reduce, and a quarter for bf16 gradients that are summed in fp32. The buffer for
    received slices has a bounded size: pieces of that size are received and summed one after another. Receiving one
    half of the buffer while the other half is summed was a tenth slower, because of twice as many messages.
    """
    rank, size, numel = group.rank(), group.size(), shard.numel()
    slices = full.view(size, numel)
    # The other ranks' pieces share the buffer.
    room_numel = max(_ALIGN_NUMEL, _ROOM_BYTES // ((size - 1) * full.element_size()))
    room = full.new_empty(size - 1, min(room_numel, numel))  # the own slice is not received
    for start in range(0, numel, room_numel):
        piece = slice(start, min(start + room_numel, numel))
        others = room[:, : piece.stop - piece.start].unbind()
        parts = [*others[:rank], slices[rank, piece], *others[rank:]]
        works: list[dist.Work | None] = []
        for distance in range(1, size):  # in each round, every rank sends to one rank and receives from one
            to, source = (rank + distance) % size, (rank - distance) % size
            works += [
                dist.irecv(_movable(parts[source]), group=group, group_src=source, tag=_SLICE_TAG),
                dist.isend(_movable(slices[to, piece]), group=group, group_dst=to, tag=_SLICE_TAG),
            ]
        wait_for(*works)
        _sum_into(shard[piece], parts, divisor)


def _sum_into(total: torch.Tensor, parts: Sequence[torch.Tensor], divisor: int) -> None:
    """Sum 1-D tensors into ``total``, in their order, and divide by ``divisor``.

    The sum is computed in chunks that stay in a core's cache, because a sum of two dtypes first converts the whole
    second operand.
    """
    chunked = [part.split(_CHUNK_NUMEL) for part in parts]
    for into, first, *others in zip(total.split(_CHUNK_NUMEL), *chunked, strict=True):
        into.copy_(first)
        for other in others:
            into.add_(other)
        if divisor > 1:
            into.div_(divisor)


def _sum_in_pieces(shard: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup) -> None:
    """`_sum_slices` on the current stream of an accelerator, without waiting on the host.

    For one piece of its slice at a time, every rank receives that piece from all ranks and sums it in one kernel. For
    bf16 gradients, this sends half the bytes of a reduction in fp32. The receive buffer has a bounded size.
    """
    size, numel = group.size(), shard.numel()
    # A quarter of the buffer, so that small groups need little; at least 8 MiB, so that messages stay large.
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
        The work to wait for; None if it is complete, as for one rank.
    """
    if group.size() > 1:
        return _backend_of(group, full.device.type).all_gather(full, shard, group)
    if not _share_storage(full, shard):
        full.copy_(shard)
    return None


def all_gather_each(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], group: dist.ProcessGroup
) -> Work | None:
    """`all_gather_into` for several (full, shard), in the same order on all ranks; one launch on NCCL."""
    if group.size() > 1:
        return _backend_of(group, pairs[0][0].device.type).all_gather_each(pairs, group)
    for full, shard in pairs:
        all_gather_into(full, shard, group)
    return None


def reduce_scatter_into(
    shard: torch.Tensor, full: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup
) -> Work | None:
    """Reduce ``full`` over the ranks, in the dtype of ``shard``, and write this rank's slice of the result.

    Args:
        shard: 1-D [shard_numel], written.
        full: 1-D [num_ranks * shard_numel], read; its contents are undefined afterwards. May have a narrower dtype
            than ``shard`` if `sums_in_wider`.
        op: SUM or AVG.
        group: the ranks that take part.

    Returns:
        The work to wait for; None if it is complete, as for one rank.
    """
    if group.size() > 1:
        return _backend_of(group, full.device.type).reduce_scatter(shard, full, op, group)
    shard.copy_(full)
    return None


def sums_in_wider(group: dist.ProcessGroup, device_type: str) -> bool:
    """Whether `reduce_scatter_into` accepts a buffer of a narrower dtype than the sum's."""
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
        The work to wait for.
    """
    # Other dtypes are sent as bytes.
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
    """Reduce a tensor over the ranks, in place; on an accelerator, concurrently with the current stream."""
    return dist.all_reduce(tensor, op, group=group, async_op=True)


def all_reduce_at_once(tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> None:
    """Reduce a tensor over the ranks, in place, on the current stream (on the CPU, the caller waits)."""
    dist.all_reduce(tensor, op, group=group)


def reduce_in_place(
    tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup, owner: int
) -> dist.Work | None:
    """Reduce a tensor to one rank of the group; its contents on other ranks are undefined afterwards."""
    return dist.reduce(tensor, op=op, group=group, group_dst=owner, async_op=True)


def broadcast_in_place(tensor: torch.Tensor, group: dist.ProcessGroup, owner: int) -> dist.Work | None:
    """Copy ``tensor`` from rank ``owner`` of the group to all other ranks."""
    return dist.broadcast(_movable(tensor), group=group, group_src=owner, async_op=True)


def send_async(tensor: torch.Tensor, group: dist.ProcessGroup, to: int) -> dist.Work | None:
    """Send a contiguous tensor to a rank of the group, which must call `receive_async`."""
    return dist.isend(_movable(tensor), group=group, group_dst=to, tag=_MESSAGE_TAG)


def receive_async(tensor: torch.Tensor, group: dist.ProcessGroup, source: int) -> dist.Work | None:
    """Receive a contiguous tensor from a rank of the group. Messages of one rank arrive in the order of sending."""
    return dist.irecv(_movable(tensor), group=group, group_src=source, tag=_MESSAGE_TAG)


def break_group(group: dist.ProcessGroup) -> None:
    """Abort a group: its present and later collectives raise, on this rank and on ranks that wait for it."""
    if group.size() == 1:  # no other rank waits
        return
    backends = set(_backends_of(group).values())
    if "gloo" in backends:
        # gloo's abort does nothing (torch 2.13), but a receive that times out closes all connections.
        room = torch.empty(1, dtype=torch.uint8, device="cpu")
        # Any other rank serves as the source. RuntimeError: the time-out, or connections that are closed already.
        with suppress(RuntimeError):
            work = dist.irecv(room, group=group, group_src=(group.rank() + 1) % group.size(), tag=_BREAK_TAG)
            assert work is not None
            work.wait(timedelta(milliseconds=1))  # the shortest time-out: no message comes
    if backends - {"gloo"}:
        group.abort()


def gathered(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """A small tensor of every rank, stacked: [num_ranks, *tensor.shape]. Waits for all ranks."""
    flat = tensor.detach().contiguous().view(-1)  # collectives take 1-D contiguous buffers
    full = flat.new_empty(dist.get_world_size(group) * flat.numel())
    wait_for(all_gather_into(full, flat, group))
    return full.view(-1, *tensor.shape)
