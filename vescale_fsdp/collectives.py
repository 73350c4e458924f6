"""The collectives of this package, built on functions that torch 2.11-2.15, gloo and NCCL all support.

Most functions start a collective and return the work to wait for; the buffers must live until the wait has ended.
There is a class per kind of backend, because gloo needs other calls than NCCL. Between nodes (`set_nodes`) as little as
possible crosses the network: `two_levels` decides which reductions first sum within nodes. Times in comments were
measured with two ranks on one idle machine, torch 2.13 and 30 MB, by ``python tools/bench/collectives.py``.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import cache, partial
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
import xxhash

from vescale_fsdp.devices import ACCELERATORS, current_device
from vescale_fsdp.torch_modes import is_traced
from vescale_fsdp.torch_private import (
    all_gather_single,
    coalesced,
    gloo_group,
    group_of,
    reduce_scatter_single,
    storage_id,
    timeout_of,
)


def new_group(
    base: dist.ProcessGroup, ranks: list[int] | None = None, *, backend: str | None = None
) -> dist.ProcessGroup:
    """Create a group with the timeout of ``base``. A collective of the new group's ranks.

    Args:
        base: the group whose timeout the new group gets.
        ranks: global ranks of the new group; default: the ranks of ``base``.
        backend: name of the backend; default: the backend of the default group.
    """
    members = dist.get_process_group_ranks(base) if ranks is None else ranks
    timeout = timeout_of(base)
    is_gloo = (backend or dist.get_backend()) == "gloo"
    if is_gloo and timeout is not None and len(members) < dist.get_world_size():
        # torch names the group of a part of the ranks by the number of groups of the process. Ranks that have created
        # different numbers of groups would then wait for each other under different names. The name below counts only
        # groups of the same members, which all members create in the same order.
        world = dist.group.WORLD
        assert world is not None
        counts = _num_groups.setdefault(world, Counter())
        counts[tuple(members)] += 1
        # A digest, because a list of thousands of ranks would be a long name.
        digest = xxhash.xxh3_128_hexdigest(",".join(map(str, members)).encode())
        name = f"vescale_fsdp {digest} {counts[tuple(members)]}"
        numbers = {rank: number for number, rank in enumerate(members)}
        return gloo_group(numbers[dist.get_rank()], numbers, name, timeout)
    return dist.new_group(
        members,
        timeout=timeout,
        backend=backend,
        # Only members call `new_group`, so torch must not wait for ranks outside a smaller group.
        use_local_synchronization=len(members) < dist.get_world_size(),
    )


# How many groups of each tuple of members this process has created, per default process group: weak, because a new
# default group has a new store, in which the names are free again.
_num_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = (
    weakref.WeakKeyDictionary()
)

_CHUNK_NUMEL = 1 << 16  # elements that are summed at a time, few enough to stay in a core's cache
_ROOM_BYTES = 8 << 20  # 8 MiB: limit of the buffer for received slices on the CPU, to bound memory
# 64 MiB: limit of the buffer for received slices on an accelerator, larger than on the CPU to keep messages large.
_RECEIVED_BYTES = 64 << 20
# 128 KiB: slices of this size cross the network one after another, so that a node receives from one node at a time.
# Four nodes with links of 0.1 Gb/s gathered slices of 400 KiB in 102 ms instead of 135, of 1.6 MB in 435 instead of
# 530, and of 100 KiB in the same time.
_ROUND_BYTES = 128 << 10
# Pieces of a slice start at multiples of this number of elements, so that they are copied as fast as a whole slice.
_ALIGN_NUMEL = 64
# The tags are arbitrary, but not 0: messages that a user sends in the same group have tag 0 by default.
_MESSAGE_TAG = 0x5E4D  # tag of `send_async` and `receive_async`
_BREAK_TAG = 0xB4EA  # tag of a message that no rank sends
_SLICE_TAG = 0x51CE  # tag of slices that `_sum_slices` exchanges
# Tags of collectives in two levels. Each kind has its own, because messages of one pair of ranks and one tag are
# received in the order in which they are sent, and two threads send.
_ACROSS_TAG, _OWN_TAG, _FORWARDED_TAG, _RING_TAG = 0xAC05, 0x0435, 0xF0A3, 0x416A


class Nodes(NamedTuple):
    """The nodes of a group: rank r of the group is rank ``r % per_node`` of node ``r // per_node``."""

    num: int
    per_node: int


def ranks_per_node() -> int:
    """Return the number of ranks per node that the launcher has set (LOCAL_WORLD_SIZE, by torchrun); 0 if it has not.

    Ranks with the same ``global rank // LOCAL_WORLD_SIZE`` are on one node.
    """
    given = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(given) if given.isdecimal() else 0


def set_nodes(group: dist.ProcessGroup, per_node: int) -> None:
    """Set the nodes of a group, for its gathers and reductions. All its ranks call it between the same collectives.

    Args:
        group: the ranks that take part.
        per_node: `ranks_per_node`, after the ranks have compared it; 0: not known, and collectives have one level.
    """
    ranks = dist.get_process_group_ranks(group)
    _nodes.pop(group, None)
    if per_node:
        size = len(ranks) // len({rank // per_node for rank in ranks})  # of each node
        parts = [ranks[first : first + size] for first in range(0, len(ranks), size)]
        homes = [{rank // per_node for rank in part} for part in parts]
        if all(len(home) == 1 for home in homes) and len(set.union(*homes)) == len(parts):
            _nodes[group] = Nodes(len(parts), size)


_nodes: weakref.WeakKeyDictionary[dist.ProcessGroup, Nodes] = weakref.WeakKeyDictionary()


def two_levels(group: dist.ProcessGroup, *, sent_bytes: int, summed_bytes: int) -> Nodes | None:
    """Decide whether a reduction sums within nodes first, and then across them, or at once over all ranks.

    Two levels are chosen where fewer bytes then cross the network: a node's sum instead of the slices of its ranks. The
    sum has the dtype of the result. So bf16 slices that are summed in fp32 are sent unsummed by nodes of two ranks, and
    summed by larger ones. (Gathers send a slice to each node once in any case: `_gather_by_node`, or NCCL itself.)

    Args:
        group: the ranks that take part.
        sent_bytes: bytes per element of what ranks send.
        summed_bytes: bytes per element of a sum.

    Returns:
        The nodes of the group; None for one level. It is None also if `set_nodes` was not called, or the group has
        one node, one rank per node, nodes of different sizes, or ranks that are not in the order of nodes.
    """
    nodes = _nodes.get(group)
    if nodes is None or 1 in nodes or summed_bytes >= nodes.per_node * sent_bytes:
        return None
    return nodes


def crosses_network(group: dist.ProcessGroup) -> bool:
    """Return whether a group is known to have ranks on several nodes (`set_nodes`)."""
    nodes = _nodes.get(group)
    return nodes is not None and nodes.num > 1


def reduces_beside(group: dist.ProcessGroup, device_type: str) -> bool:
    """Return whether `reduce_scatter_into` on the CPU goes on while the caller computes: between nodes it does.

    There the network is slower than the cores. On one node it uses the cores that would compute.
    """
    return device_type == "cpu" and crosses_network(group) and _backend_of(group, "cpu") is _GLOO


class Work(Protocol):
    """A collective in flight."""

    def wait(self) -> object:
        """Block the caller (on an accelerator: its current stream) until the collective is done."""


def wait_for(*works: Work | None) -> None:
    """Wait for collectives; None stands for a collective that is complete."""
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
    """An all-reduce in flight; `wait` also copies this rank's slice of the result into ``into``."""

    def __init__(self, work: dist.Work | None, kept: torch.Tensor, into: torch.Tensor) -> None:
        self._work, self._kept, self._into = work, kept, into

    def wait(self) -> None:
        wait_for(self._work)
        self._into.copy_(self._kept)


# Dtypes that both gloo and NCCL send; tensors of other dtypes (bool, int16, float8, ..) are sent as bytes.
_COMMON = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_COMMON |= {torch.int64, torch.int32, torch.int8, torch.uint8}


def _movable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in a dtype that collectives support: itself, or a view of its bytes."""
    return tensor if tensor.dtype in _COMMON else tensor.view(torch.uint8)


def _share_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    return storage_id(one) == storage_id(other)


def runs_beside(tensor: torch.Tensor) -> bool:
    """Return whether collectives on this tensor are started with ``async_op=True``, as on the CPU.

    On an accelerator collectives run on the caller's current stream, which has high priority. With ``async_op=True``,
    NCCL would use the communicator's own stream, of normal priority, and synchronize with a pair of events.
    """
    return tensor.device.type in ("cpu", "meta")


class _Native:
    """A backend whose collectives read and write the caller's buffers directly: NCCL, and unknown backends."""

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Work | None:
        # In one level: the backend's own algorithms send each slice to a node once.
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
        # The backend cannot sum in a wider dtype than the buffer's.
        nodes = two_levels(group, sent_bytes=full.element_size(), summed_bytes=shard.element_size())
        if nodes is None:
            _sum_in_pieces(shard, full, group)
        else:
            _sum_nodes_in_pieces(shard, full, group, nodes)
        if op == dist.ReduceOp.AVG:  # both only sum
            shard.div_(group.size())
        return None  # later work on the current stream sees the result

    def sums_in_wider(self, device_type: str) -> bool:
        return True  # by `_sum_in_pieces`: the backend's own reduction sums in the dtype of the buffer


class _Coalescing(_Native):
    """A backend that launches several gathers at once."""

    def all_gather_each(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], group: dist.ProcessGroup
    ) -> Work | None:
        if len(pairs) == 1 or runs_beside(pairs[0][0]):  # one gather, or not on an accelerator
            return super().all_gather_each(pairs, group)
        with coalesced(group):
            for full, shard in pairs:
                self.all_gather(full, shard, group)
        return None  # the gathers run on the current stream, so no wait is needed


class _Gloo(_Native):
    """gloo, without its own all-gather and reduce-scatter, which copy the whole buffer."""

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Work | None:
        slices = full.split(shard.numel()) if shard.numel() else ()  # empty shards: there is nothing to send
        if slices and not _share_storage(full, shard):
            slices[group.rank()].copy_(shard)  # the only copy: slices of other ranks are received in place
        # Between nodes slices are sent directly: in gloo's broadcast some of them wait to be sent on. But its point-to-
        # point messages do not support GPU memory.
        if crosses_network(group) and slices and full.device.type == "cpu":
            return _gather_by_node([_movable(part) for part in slices], group, _nodes[group])
        return _AllOf([broadcast_in_place(part, group, owner) for owner, part in enumerate(slices)])

    def reduce_scatter(
        self, shard: torch.Tensor, full: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup
    ) -> Work | None:
        if self.sums_in_wider(full.device.type):
            divisor = group.size() if op == dist.ReduceOp.AVG else 1
            nodes = two_levels(group, sent_bytes=full.element_size(), summed_bytes=shard.element_size())
            if nodes is None:
                reduction = partial(_sum_slices, shard, full, group, divisor)
            else:
                reduction = partial(_sum_slices_by_node, shard, full, group, nodes, divisor)
            if reduces_beside(group, "cpu"):
                return _thread_of(group, "reductions").start_call(reduction)
            reduction()
            return None  # it has waited for its messages
        # An all-reduce of the whole buffer, because gloo's point-to-point messages do not support GPU memory.
        first = group.rank() * shard.numel()
        work = dist.all_reduce(full, op, group=group, async_op=True)
        return _KeepSlice(work, full[first : first + shard.numel()], shard)

    def sums_in_wider(self, device_type: str) -> bool:
        return device_type == "cpu"  # by `_sum_slices`; gloo's all-reduce sums in the buffer's dtype


_GLOO, _NATIVE, _COALESCING = _Gloo(), _Native(), _Coalescing()


def _backend_of(group: dist.ProcessGroup, device_type: str) -> _Native:
    """Return the group's backend for tensors of a device type."""
    name = _backends_of(group).get(device_type, "")
    if name == "gloo":
        return _GLOO
    accelerator = ACCELERATORS.get(device_type)
    return _COALESCING if accelerator is not None and name in accelerator.coalescing else _NATIVE


def device_for_messages(group: dist.ProcessGroup | None, device: torch.device) -> torch.device:
    """Return the device if the group has a backend for it, else the current device of a type that it has one for."""
    backends = _backends_of(group)
    return device if device.type in backends else current_device(next(iter(backends)))


def _backends_of(group: dist.ProcessGroup | None) -> dict[str, str]:
    """Return device type -> name of the backend."""
    # torch returns a text with a pair per device type, such as "cpu:gloo,xpu:xccl". [::2] drops the colon of each pair.
    return dict(pair.partition(":")[::2] for pair in dist.get_backend_config(group).split(","))


def _sum_slices(shard: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup, divisor: int) -> None:
    """Sum this rank's slices of all ranks' buffers, in the order of ranks. Every slice is sent once, in its own dtype.

    This sends half the bytes of an all-reduce, and a quarter for bf16 gradients that are summed in fp32. The receive
    buffer is bounded: a larger slice is received and summed in pieces, one after another. Two half-size buffers, one
    received while the other is summed, were a tenth slower, because of twice as many messages. Over three nodes or
    more, large slices are sent in rounds (`_rounds_of`).
    """
    rank, size, numel = group.rank(), group.size(), shard.numel()
    slices = full.view(size, numel)
    # The receive buffer has one piece from each other rank; this rank's own slice is read in place.
    room_numel = max(_ALIGN_NUMEL, _ROOM_BYTES // ((size - 1) * full.element_size()))
    room = full.new_empty(size - 1, min(room_numel, numel))
    for start in range(0, numel, room_numel):
        piece = slice(start, min(start + room_numel, numel))
        others = room[:, : piece.stop - piece.start].unbind()
        parts = [*others[:rank], slices[rank, piece], *others[rank:]]
        for pairs in _rounds_of(group, parts[rank].nbytes):
            works: list[dist.Work | None] = []
            for to, source in pairs:
                works += [
                    _receive(parts[source], group, source, _SLICE_TAG),
                    _send(slices[to, piece], group, to, _SLICE_TAG),
                ]
            wait_for(*works)
        _sum_into(shard[piece], parts, divisor)


def _sends_in_rounds(nodes: Nodes | None, slice_bytes: int) -> bool:
    """Return whether nodes exchange slices in rounds, in each of which a node receives from one other node.

    Where several nodes send to one at the same time, their connections share its link badly: it is idle at times.
    """
    return nodes is not None and nodes.num > 2 and slice_bytes >= _ROUND_BYTES


def _rounds_of(group: dist.ProcessGroup, slice_bytes: int) -> list[list[tuple[int, int]]]:
    """Return pairs of ranks for an exchange of slices, each to send to and to receive from, in rounds.

    One round has all pairs if no more than two nodes take part, or if slices are small. Else a round has the ranks of
    one other node, and the first has those of this rank's node too.
    """
    rank, size = group.rank(), group.size()
    nodes = _nodes.get(group)
    if nodes is None or not _sends_in_rounds(nodes, slice_bytes):
        return [[((rank + distance) % size, (rank - distance) % size) for distance in range(1, size)]]
    node, local = divmod(rank, nodes.per_node)

    def at(away: int, step: int) -> int:
        return (node + away) % nodes.num * nodes.per_node + (local + step) % nodes.per_node

    by_node = [
        [(at(away, step), at(-away, -step)) for step in range(nodes.per_node)] for away in range(nodes.num)
    ]
    return [by_node[0][1:] + by_node[1], *by_node[2:]]


def _sum_slices_by_node(
    shard: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup, nodes: Nodes, divisor: int
) -> None:
    """Sum this rank's slices of all ranks' buffers in two levels: over the ranks of each node, then over the nodes.

    Local rank l of a node sums the slices of the node's ranks for the ranks l of all nodes, in the dtype of ``shard``,
    and sends each of these ranks its sum. Both sums are in the order of the ranks. So a node sends one slice per rank
    and other node. A piece is summed within the node while the sums of the piece before cross the network.
    """
    node, local = divmod(group.rank(), nodes.per_node)
    num, per_node, numel = nodes.num, nodes.per_node, shard.numel()
    slices = full.view(num, per_node, numel)  # by the node and the local rank of who gets the sum
    # Bytes per element of a piece: slices from the ranks of this node; sums of this node and of others, for two pieces.
    piece_bytes = (per_node - 1) * num * full.element_size() + 2 * (2 * num - 1) * shard.element_size()
    piece_numel = max(_ALIGN_NUMEL, _ROOM_BYTES // piece_bytes)
    width = min(piece_numel, numel)
    received = full.new_empty(per_node - 1, num, width)
    rooms = [
        (shard.new_empty(num, width), shard.new_empty(num - 1, width))
        for _ in range(2 if numel > piece_numel else 1)
    ]
    crossing: tuple[torch.Tensor, list[torch.Tensor], list[dist.Work | None]] | None = None
    for number, start in enumerate(range(0, numel, piece_numel)):
        piece = slice(start, min(start + piece_numel, numel))
        room = received[:, :, : piece.stop - piece.start]
        works: list[dist.Work | None] = []
        for distance in range(1, per_node):
            to, source = (local + distance) % per_node, (local - distance) % per_node
            for each in range(num):
                part = room[source - (source > local), each]
                works += [
                    _receive(part, group, node * per_node + source, _SLICE_TAG),
                    _send(slices[each, to, piece], group, node * per_node + to, _SLICE_TAG),
                ]
        wait_for(*works)
        sums, arriving = (each[:, : piece.stop - piece.start] for each in rooms[number % len(rooms)])
        for each in range(num):
            others = room[:, each].unbind()
            _sum_into(sums[each], [*others[:local], slices[each, local, piece], *others[local:]], 1)
        if crossing is not None:
            _finish_sum(*crossing, divisor)
        works = []
        for distance in range(1, num):
            to, source = (node + distance) % num, (node - distance) % num
            works += [
                _receive(arriving[source - (source > node)], group, source * per_node + local, _SLICE_TAG),
                _send(sums[to], group, to * per_node + local, _SLICE_TAG),
            ]
            if distance < num - 1 and _sends_in_rounds(nodes, sums[to].nbytes):
                wait_for(*works)
                works = []  # gloo would wait for another message if these were waited for again
        others = arriving.unbind()
        crossing = shard[piece], [*others[:node], sums[node], *others[node:]], works
    if crossing is not None:
        _finish_sum(*crossing, divisor)


def _finish_sum(
    total: torch.Tensor, parts: Sequence[torch.Tensor], works: Sequence[dist.Work | None], divisor: int
) -> None:
    wait_for(*works)
    _sum_into(total, parts, divisor)


def _send(tensor: torch.Tensor, group: dist.ProcessGroup, to: int, tag: int) -> dist.Work | None:
    return dist.isend(_movable(tensor), group=group, group_dst=to, tag=tag)


def _receive(tensor: torch.Tensor, group: dist.ProcessGroup, source: int, tag: int) -> dist.Work | None:
    return dist.irecv(_movable(tensor), group=group, group_src=source, tag=tag)


def _gather_by_node(slices: Sequence[torch.Tensor], group: dist.ProcessGroup, nodes: Nodes) -> Work:
    """Gather over nodes: a rank receives the slices of the same local rank of other nodes, and shares them in its node.

        rank l of node n    to rank l of other nodes      its slice, at once
                            to other ranks of node n      its slice, at once; slices of other nodes, when they arrive

    A thread forwards the latter, so that other ranks need not wait for this rank's caller. With one rank per node there
    is nothing to forward. Over three nodes or more, large slices go around a ring of nodes, so that a node receives
    from one other node; the thread keeps the ring going.

    Args:
        slices: all ranks' slices, 1-D; this rank's is read, the others are written.
    """
    rank, per_node = group.rank(), nodes.per_node
    node, local = divmod(rank, per_node)
    peers = [node * per_node + (local + distance) % per_node for distance in range(1, per_node)]
    # The same local rank of other nodes, in the order in which their slices arrive.
    sources = [(node - distance) % nodes.num * per_node + local for distance in range(1, nodes.num)]
    in_ring = _sends_in_rounds(nodes, slices[rank].nbytes)
    works: list[Work | None] = []
    arriving: list[Work | None] = []
    if not in_ring:
        for source, to in zip(sources, reversed(sources), strict=True):
            arriving.append(_receive(slices[source], group, source, _ACROSS_TAG))
            works.append(_send(slices[rank], group, to, _ACROSS_TAG))
    for peer in peers:
        works.append(_send(slices[rank], group, peer, _OWN_TAG))
        works.append(_receive(slices[peer], group, peer, _OWN_TAG))
        for source in sources:  # in the order in which the peer forwards them
            forwarded = source - local + peer % per_node
            works.append(_receive(slices[forwarded], group, peer, _FORWARDED_TAG))

    if not peers and not in_ring:
        return _AllOf([*arriving, *works])

    def forward() -> None:
        newest = rank  # whose slice this rank has sent along the ring last
        received: Work | None
        for number, source in enumerate(sources):
            if in_ring:
                received = _receive(slices[source], group, sources[0], _RING_TAG)
                works.append(_send(slices[newest], group, sources[-1], _RING_TAG))
            else:
                received = arriving[number]
            wait_for(received)
            newest = source
            works.extend(_send(slices[source], group, peer, _FORWARDED_TAG) for peer in peers)
        wait_for(*works)

    return _thread_of(group, "gathers").start_call(forward)


class _InThread:
    """A call in another thread; `wait` raises its error."""

    def __init__(self) -> None:
        self.done: Future[None] = Future()

    def wait(self) -> None:
        self.done.result()


class _CallThread:
    """A thread that runs calls one after the other.

    There is one per group and kind of collective, because only these are started in the same order on all ranks.
    """

    def __init__(self, name: str) -> None:
        self.calls: SimpleQueue[tuple[Callable[[], None], _InThread] | None] = SimpleQueue()
        # A daemon: a process that ends need not wait for messages that other ranks may never send.
        threading.Thread(target=self._run, name=f"vescale_fsdp {name}", daemon=True).start()

    def start_call(self, call: Callable[[], None]) -> _InThread:
        work = _InThread()
        self.calls.put((call, work))
        return work

    def _run(self) -> None:
        while (queued := self.calls.get()) is not None:
            call, work = queued
            try:
                call()
            except BaseException as error:  # noqa: BLE001  raised by `wait`
                work.done.set_exception(error)
            else:
                work.done.set_result(None)
            del queued, call, work  # the thread must not keep buffers alive while it waits


def _thread_of(group: dist.ProcessGroup, kind: str) -> _CallThread:
    threads = _threads.setdefault(group, {})
    if kind not in threads:
        threads[kind] = _CallThread(kind)
        weakref.finalize(group, threads[kind].calls.put, None)  # the thread ends with the group
    return threads[kind]


_threads: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, _CallThread]] = weakref.WeakKeyDictionary()


def _sum_into(total: torch.Tensor, parts: Sequence[torch.Tensor], divisor: int) -> None:
    """Sum the 1-D tensors ``parts`` into ``total``, in their order, and divide the sum by ``divisor``.

    The sum is computed in chunks that stay in a core's cache: to add a tensor of another dtype, torch first converts
    all of it.
    """
    chunked = [part.split(_CHUNK_NUMEL) for part in parts]
    for into, first, *others in zip(total.split(_CHUNK_NUMEL), *chunked, strict=True):
        into.copy_(first)  # not added: the contents of ``total`` are undefined
        for other in others:
            into.add_(other)
        if divisor > 1:
            into.div_(divisor)


def _sum_in_pieces(shard: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum this rank's slices of all ranks' buffers, on the current stream of an accelerator, without blocking the host.

    Every rank receives one piece of its slice from all ranks, sums it in one kernel, and continues with the next piece.
    For bf16 gradients, this sends half the bytes of a reduction in fp32. The receive buffer has a bounded size.
    """
    size, numel = group.size(), shard.numel()
    # A quarter of the gradient buffer, so that small groups need little; at least 8 MiB, so that messages stay large.
    received_bytes = min(_RECEIVED_BYTES, max(_RECEIVED_BYTES // 8, full.numel() * full.element_size() // 4))
    piece_numel = received_bytes // (size * full.element_size())
    # Rounded down to a multiple, so that pieces are aligned and copied as fast as a whole slice.
    piece_numel = max(_ALIGN_NUMEL, piece_numel - piece_numel % _ALIGN_NUMEL)
    slices = full.view(size, numel)
    received = full.new_empty(size, min(piece_numel, numel))
    for start in range(0, numel, piece_numel):
        stop = min(start + piece_numel, numel)
        room, sent = received[:, : stop - start], slices[:, start:stop]
        if (
            room.numel() == full.numel()
        ):  # one piece: a call whose cost for the host does not grow with the ranks
            work = dist.all_to_all_single(received.view(-1), full, group=group, async_op=runs_beside(full))
        else:
            work = dist.all_to_all(
                list(room.unbind()), list(sent.unbind()), group=group, async_op=runs_beside(full)
            )
        wait_for(work)
        into = shard[start:stop]
        torch.sum(room, dim=0, dtype=into.dtype, out=into)


def _sum_nodes_in_pieces(
    shard: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup, nodes: Nodes
) -> None:
    """Sum as `_sum_in_pieces`, in two levels: an exchange within the node, then a reduce-scatter of the nodes' sums.

    The order of sums over the nodes is the backend's. A piece takes four calls, for any number of ranks. For that its
    slices are copied together, which costs a pass in the memory of the device: less than calls for single slices of
    hundreds of ranks.
    """
    within, across = _groups_by_node(group, nodes)
    num, per_node, numel = nodes.num, nodes.per_node, shard.numel()
    received_bytes = min(_RECEIVED_BYTES, max(_RECEIVED_BYTES // 8, full.numel() * full.element_size() // 4))
    piece_numel = received_bytes // (group.size() * full.element_size())
    piece_numel = max(_ALIGN_NUMEL, piece_numel - piece_numel % _ALIGN_NUMEL)
    slices = full.view(num, per_node, numel)
    buffers = full.new_empty(2, group.size() * min(piece_numel, numel))
    node_sums = shard.new_empty(num * min(piece_numel, numel))
    for start in range(0, numel, piece_numel):
        stop = min(start + piece_numel, numel)
        sent, received = buffers[:, : group.size() * (stop - start)]
        sent.view(per_node, num, -1).copy_(slices[:, :, start:stop].transpose(0, 1))
        wait_for(
            dist.all_to_all_single(
                _movable(received), _movable(sent), group=within, async_op=runs_beside(full)
            )
        )
        sums = node_sums[: num * (stop - start)]
        torch.sum(received.view(per_node, -1), dim=0, dtype=sums.dtype, out=sums)
        wait_for(
            reduce_scatter_single(
                shard[start:stop], sums, op=dist.ReduceOp.SUM, group=across, async_op=runs_beside(full)
            )
        )


def _groups_by_node(group: dist.ProcessGroup, nodes: Nodes) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return the ranks of this rank's node, and the same local rank of all nodes. The first call is a collective."""
    if group not in _node_groups:
        ranks = dist.get_process_group_ranks(group)
        node, local = divmod(group.rank(), nodes.per_node)
        members = ranks[node * nodes.per_node : (node + 1) * nodes.per_node], ranks[local :: nodes.per_node]
        _node_groups[group] = new_group(group, members[0]), new_group(group, members[1])
    return _node_groups[group]


_node_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[dist.ProcessGroup, dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)


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
        return _backend_of(group, full.device.type).all_gather(full, shard, group)
    if not _share_storage(full, shard):
        full.copy_(shard)
    return None


def all_gather_each(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], group: dist.ProcessGroup
) -> Work | None:
    """Do `all_gather_into` for several (full, shard) in the same order on all ranks; on NCCL in one launch."""
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
        full: 1-D [num_ranks * shard_numel], read; its contents are undefined afterwards. Its dtype may be narrower
            than that of ``shard`` if `sums_in_wider` returns True.
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
    """Return whether `reduce_scatter_into` accepts a ``full`` of a narrower dtype than ``shard``."""
    return group.size() == 1 or _backend_of(group, device_type).sums_in_wider(device_type)


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
    # `_movable` views other dtypes as bytes, so their counts are multiplied by the bytes per element.
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
    """Start to reduce a tensor over the ranks, in place; on an accelerator, concurrently with the current stream."""
    if is_traced(tensor):
        tensor.copy_(_traced_all_reduce()(tensor, op.name, group.group_name))
        return None
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


def closed_peers(group: dist.ProcessGroup) -> list[int]:
    """Return the ranks of a gloo group whose connections to this rank are closed. Does not wait.

    The kernel closes the connections of a process that ends. gloo closes all connections of a rank when one of its
    waits times out, and a rank that has called `break_group` has closed its connections too.
    """
    closed = []
    for rank in range(group.size()):
        if rank != group.rank():
            room = torch.empty(1, dtype=torch.uint8, device="cpu")
            try:  # no rank sends a message with this tag, so the receive only fails, at once, or stays pending
                dist.irecv(room, group=group, group_src=rank, tag=_BREAK_TAG)
            except RuntimeError:
                closed.append(rank)
    return closed


def ended_peers(group: dist.ProcessGroup) -> list[int]:
    """Return the ranks of a gloo group that have probably ended: `closed_peers`, or none if all of several are closed.

    A wait of this rank that times out closes all connections, so these then say nothing about the other ranks.
    """
    closed = closed_peers(group)
    return [] if 1 < len(closed) == group.size() - 1 else closed


def break_group(group: dist.ProcessGroup) -> None:
    """Abort a group: collectives in flight and later ones raise, on this rank and on ranks that wait for this rank."""
    if group.size() == 1:  # no other rank waits
        return
    backends = set(_backends_of(group).values())
    if "gloo" in backends:
        # gloo's abort does nothing (torch 2.13), but a receive that times out closes all connections of the group. A
        # receive from a rank whose connection is closed does not: it fails at once, and leaves other connections open.
        room = torch.empty(1, dtype=torch.uint8, device="cpu")
        for rank in set(range(group.size())) - {group.rank(), *closed_peers(group)}:
            with suppress(RuntimeError):  # the time-out, or a connection that another rank has just closed
                # No rank sends a message with this tag.
                work = dist.irecv(room, group=group, group_src=rank, tag=_BREAK_TAG)
                assert work is not None
                work.wait(timedelta(milliseconds=1))  # the shortest time-out, because no message will arrive
    if backends - {"gloo"}:
        group.abort()
    for part in _node_groups.get(group, ()):
        break_group(part)


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
