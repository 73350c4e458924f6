"""Exchanges of slices: gathers and sums that a backend lacks, or does with more bytes or memory than necessary.

On gloo ranks send each other slices, within a node and across nodes; on an accelerator slices are exchanged in pieces,
and summed in a wider dtype than they are sent in. Times in comments were measured with two ranks on one idle machine,
torch 2.13 and 30 MB, by ``python tools/bench/collectives.py``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from vescale_fsdp.collectives import interruptible
from vescale_fsdp.collectives.process_groups import Nodes, nodes_of

_CHUNK_NUMEL = 1 << 16  # elements that are summed at a time, few enough to stay in a core's cache
_ROOM_BYTES = 8 << 20  # 8 MiB: limit of the buffer for received slices on the CPU, to bound memory
# 64 MiB: limit of a piece that `sum_in_pieces` sends and receives; larger than on the CPU, to keep messages large.
_PIECE_BYTES = 64 << 20
# 128 KiB: slices of this size cross the network one after another, so that a node receives from one node at a time.
# Four nodes with links of 0.1 Gb/s gathered slices of 400 KiB in 102 ms instead of 135, of 1.6 MB in 435 instead of
# 530, and of 100 KiB in the same time.
_ROUND_BYTES = 128 << 10
# Pieces of a slice start at multiples of this number of elements, so that they are copied as fast as a whole slice.
_ALIGN_NUMEL = 64
# The tags are arbitrary, but not 0: messages that a user sends in the same group have tag 0 by default.
_SLICE_TAG = 0x51CE  # tag of slices that `sum_slices` exchanges
_MESSAGE_TAG = 0x5E4D  # tag of `send_async` and `receive_async` by default
# Tags of collectives in two levels. Each kind has its own, because messages of one pair of ranks and one tag are
# received in the order in which they are sent, and two threads send.
_ACROSS_TAG, _OWN_TAG, _FORWARDED_TAG, _RING_TAG = 0xAC05, 0x0435, 0xF0A3, 0x416A
_MAX_TAG = 0x3A75  # tag of `MaxByMessages`


class Work(Protocol):
    """A collective in flight."""

    def wait(self) -> object:
        """Block the caller (on an accelerator: its current stream) until the collective is done."""


def wait_for(*works: Work | None) -> None:
    """Wait for collectives; None stands for a collective that is complete."""
    if interruptible.is_active:
        started = [work for work in works if work is not None]
        interruptible.interruptibly(lambda: [work.wait() for work in started])
        return
    for work in works:  # without a further call: each unit waits several times in a step
        if work is not None:
            work.wait()


class AllWorks(NamedTuple):
    """Several collectives in flight, with one wait for all of them."""

    works: Sequence[Work | None]

    def wait(self) -> None:
        wait_for(*self.works)


# Dtypes that both gloo and NCCL send; tensors of other dtypes (bool, int16, float8, ..) are sent as bytes.
_COMMON = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_COMMON |= {torch.int64, torch.int32, torch.int8, torch.uint8}


def movable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in a dtype that collectives support: itself, or a view of its bytes."""
    return tensor if tensor.dtype in _COMMON else tensor.view(torch.uint8)


def send_async(
    tensor: torch.Tensor, group: dist.ProcessGroup, to: int, tag: int = _MESSAGE_TAG
) -> dist.Work | None:
    """Send a contiguous tensor to a rank of the group, which must call `receive_async` with the same tag."""
    return dist.isend(movable(tensor), group=group, group_dst=to, tag=tag)


def receive_async(
    tensor: torch.Tensor, group: dist.ProcessGroup, source: int, tag: int = _MESSAGE_TAG
) -> dist.Work | None:
    """Receive a contiguous tensor from a rank. Messages of one rank and tag arrive in the order of sending."""
    return dist.irecv(movable(tensor), group=group, group_src=source, tag=tag)


def runs_beside(tensor: torch.Tensor) -> bool:
    """Return whether collectives on this tensor are started with ``async_op=True``, as on the CPU.

    On an accelerator collectives run on the caller's current stream, which has high priority. With ``async_op=True``,
    NCCL would use the communicator's own stream, of normal priority, and synchronize with a pair of events.
    """
    return tensor.device.type in ("cpu", "meta")


def sum_slices(shard: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup, divisor: int) -> None:
    """Sum this rank's slices of all ranks' buffers, in the order of ranks. Every slice is sent once, in its own dtype.

    This sends half the bytes of an all-reduce, and a quarter for bf16 gradients that are summed in fp32. The receive
    buffer is bounded: a larger slice is received and summed in pieces, one after another. Two half-size buffers, one
    received while the other is summed, were a tenth slower, because of twice as many messages. Over three nodes or
    more, large slices are sent in rounds (`_sends_in_rounds`).
    """
    rank, size, numel = group.rank(), group.size(), shard.numel()
    slices = full.view(size, numel)
    nodes = nodes_of(group)
    # At once: as within one node.
    num, per_node = nodes if nodes is not None and _sends_in_rounds(nodes, slices[0].nbytes) else (1, size)
    node, local = rank // per_node, rank % per_node
    # The receive buffer has one piece from each other rank; this rank's own slice is read in place.
    room_numel = max(_ALIGN_NUMEL, _ROOM_BYTES // ((size - 1) * full.element_size()))
    room = full.new_empty(size - 1, min(room_numel, numel))
    for start in range(0, numel, room_numel):
        piece = slice(start, min(start + room_numel, numel))
        others = room[:, : piece.stop - piece.start].unbind()
        parts = [*others[:rank], slices[rank, piece], *others[rank:]]
        works: list[dist.Work | None] = []
        for distance in range(1, size):  # in the order of nodes
            away, step = distance // per_node, distance % per_node
            to = (node + away) % num * per_node + (local + step) % per_node
            source = (node - away) % num * per_node + (local - step) % per_node
            works += [
                receive_async(parts[source], group, source, _SLICE_TAG),
                send_async(slices[to, piece], group, to, _SLICE_TAG),
            ]
            if away and step == per_node - 1:  # the end of a round; the first has this node's ranks, too
                wait_for(*works)
                works = []  # gloo would wait for another message if these were waited for again
        wait_for(*works)
        _sum_into(shard[piece], parts, divisor)


class MaxByMessages:
    """The elementwise maximum of a few values over the ranks of a gloo group, in flight; in place.

    It is right even if ranks have started different collectives: its messages have a tag of their own. gloo would end
    the process if a small all-reduce met a larger collective. In round k a rank sends the maximum so far to the rank
    2^k places after it, so log2(ranks) rounds reach all ranks. The first round starts at once, the others in `wait`.

    Args:
        values: on the CPU.
        group: the ranks that take part.
    """

    def __init__(self, values: torch.Tensor, group: dist.ProcessGroup) -> None:
        self._values, self._group, self._distance = values, group, 1
        self._largest = (
            values  # so far; a new tensor in each round, because messages in flight read the last one
        )
        self._start()

    def _start(self) -> None:
        rank, size = self._group.rank(), self._group.size()
        self._received = torch.empty_like(self._values)
        self._works = [
            receive_async(self._received, self._group, (rank - self._distance) % size, _MAX_TAG),
            send_async(self._largest, self._group, (rank + self._distance) % size, _MAX_TAG),
        ]

    def wait(self) -> None:
        while self._distance < self._group.size():
            wait_for(*self._works)
            self._distance *= 2
            if self._distance < self._group.size():
                self._largest = torch.maximum(self._largest, self._received)
                self._start()
            else:
                torch.maximum(self._largest, self._received, out=self._values)


def _sends_in_rounds(nodes: Nodes, slice_bytes: int) -> bool:
    """Return whether nodes exchange slices in rounds, in each of which a node receives from one other node.

    Where several nodes send to one at the same time, their connections share its link badly: it is idle at times.
    """
    return nodes.num > 2 and slice_bytes >= _ROUND_BYTES


def sum_slices_by_node(
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
                    receive_async(part, group, node * per_node + source, _SLICE_TAG),
                    send_async(slices[each, to, piece], group, node * per_node + to, _SLICE_TAG),
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
                receive_async(
                    arriving[source - (source > node)], group, source * per_node + local, _SLICE_TAG
                ),
                send_async(sums[to], group, to * per_node + local, _SLICE_TAG),
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


def gather_by_node(slices: Sequence[torch.Tensor], group: dist.ProcessGroup, nodes: Nodes) -> Work:
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
            arriving.append(receive_async(slices[source], group, source, _ACROSS_TAG))
            works.append(send_async(slices[rank], group, to, _ACROSS_TAG))
    for peer in peers:
        works.append(send_async(slices[rank], group, peer, _OWN_TAG))
        works.append(receive_async(slices[peer], group, peer, _OWN_TAG))
        for source in sources:  # in the order in which the peer forwards them
            forwarded = source - local + peer % per_node
            works.append(receive_async(slices[forwarded], group, peer, _FORWARDED_TAG))

    if not peers and not in_ring:
        return AllWorks([*arriving, *works])

    def forward() -> None:
        newest = rank  # whose slice this rank has sent along the ring last
        received: Work | None
        for number, source in enumerate(sources):
            if in_ring:
                received = receive_async(slices[source], group, sources[0], _RING_TAG)
                works.append(send_async(slices[newest], group, sources[-1], _RING_TAG))
            else:
                received = arriving[number]
            wait_for(received)
            newest = source
            works.extend(send_async(slices[source], group, peer, _FORWARDED_TAG) for peer in peers)
        wait_for(*works)

    return thread_of(group, "gathers").start_call(forward)


class _InThread(Future[None]):
    """A call in another thread; `wait` raises its error."""

    def wait(self) -> None:
        self.result()


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
                work.set_exception(error)
            else:
                work.set_result(None)
            del queued, call, work  # the thread must not keep buffers alive while it waits


def thread_of(group: dist.ProcessGroup, kind: str) -> _CallThread:
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


def sum_in_pieces(shard: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum this rank's slices of all ranks' buffers, on the current stream of an accelerator, without blocking the host.

    Every rank receives one piece of its slice from all ranks, sums it in one kernel, and continues with the next piece.
    For bf16 gradients, this sends half the bytes of a reduction in fp32, in more and smaller messages than those of the
    backend's own reduce-scatter. A piece is copied before it is sent, because a call with one buffer costs the host the
    same for any number of ranks, and a call with a view for each rank does not.
    """
    size, numel = group.size(), shard.numel()
    # A quarter of the gradient buffer, so that small groups need little; at least 8 MiB, so that messages stay large.
    piece_bytes = min(_PIECE_BYTES, max(_PIECE_BYTES // 8, full.nbytes // 4))
    piece_numel = piece_bytes // (size * full.element_size())
    # Rounded down to a multiple, so that pieces are aligned and copied as fast as a whole slice.
    piece_numel = max(_ALIGN_NUMEL, piece_numel - piece_numel % _ALIGN_NUMEL)
    pieces = full.view(size, numel).split(piece_numel, dim=1)
    for into, piece in zip(shard.split(piece_numel), pieces, strict=True):
        sent = piece.contiguous()
        received = torch.empty_like(sent)
        wait_for(dist.all_to_all_single(received, sent, group=group, async_op=runs_beside(sent)))
        torch.sum(received, dim=0, dtype=into.dtype, out=into)
        del sent, received  # before the next piece is allocated
