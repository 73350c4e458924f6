"""An accelerator's streams on a CPU: everything runs at once, and who waited for whom is written down.

    StreamRecorder     a dispatch mode: every operator becomes work of the current stream, with what it reads
                       and writes. It is also the `Streams` that a `CommContext` takes.
    recording(...)     puts one under a sharded model: its context, its collectives, its buffers

Order is happens-before, kept as vector clocks: ``clocks[s][t]`` is how much of stream t's work is surely done
before the next work of s. An access that is not ordered behind what it conflicts with is a hazard:

    a read, with the last write           a write, with the last write and all reads since
    an allocation on s, with every use of memory that was freed into s's pool (the caching allocator may give
    out any of it at once)                a host's access, with work that it has not synchronized with

A collective is work of the stream that starts it, as NCCL has it where the caller asks for none beside. With
``beside`` it is work of its communicator's own stream, behind the one that started it, and ``wait`` makes the
current stream wait for it, as a user's own collectives may do it.

Streams are chosen by thread, as a device's are. Memory is seen wherever it comes from and goes: operators, storages
that end, and storages that are resized.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vescale_fsdp.collectives.operations import (
    all_gather_each,
    all_gather_into,
    all_reduce_at_once,
    reduce_scatter_into,
)
from vescale_fsdp.collectives.slice_exchange import wait_for
from vescale_fsdp.runtime.comm.dbuffer import DBuffer
from vescale_fsdp.runtime.comm.streams import Streams
from vescale_fsdp.runtime.comm_context import CommContext
from vescale_fsdp.runtime.fsdp_state import state_of
from vescale_fsdp.runtime.param_group import ParamGroup

Clock = Counter[str]
HOST = "host"


@dataclass
class Block:
    """Memory from one allocation to its end."""

    pool: str  # the stream it was allocated on
    nbytes: int
    storage: StorageWeakRef | None
    written: tuple[str, int] | None = None  # last write: stream, tick
    reads: dict[str, int] = field(default_factory=dict)  # since then: last tick by stream

    def uses(self) -> list[tuple[str, int]]:
        return [*self.reads.items(), *([self.written] if self.written else [])]


class RecordedEvent:
    """A point in a stream's work."""

    def __init__(self, recorder: StreamRecorder, clock: Clock) -> None:
        self.recorder, self.clock = recorder, clock

    def synchronize(self) -> None:
        self.recorder.clocks[HOST] |= self.clock


class RecordedStream:
    """A queue of work, by name."""

    def __init__(self, recorder: StreamRecorder, name: str) -> None:
        self.recorder, self.name = recorder, name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RecordedStream) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def record_event(self) -> RecordedEvent:
        return RecordedEvent(self.recorder, self.recorder.clocks[self.name].copy())

    def wait_event(self, event: Any) -> None:
        self.recorder.clocks[self.name] |= event.clock

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())


class RecordedWork:
    """A collective under way on its communicator's stream."""

    def __init__(self, recorder: StreamRecorder, work: Any, stream: str) -> None:
        self.recorder, self.work = recorder, work
        self.done = recorder.clocks[stream].copy()

    def wait(self) -> None:
        if self.work is not None:
            with self.recorder.paused():
                self.work.wait()
        self.recorder.clocks[self.recorder.stream] |= self.done


@dataclass
class Collective:
    """When a collective could start and when it was needed, in ticks of the compute stream."""

    name: str
    stream: str
    tick: int  # of ``stream``
    behind: int  # compute work that had to be done before it
    clock: Clock  # all work that had to be done before it, by stream
    group: int
    needed: int | None = None  # the compute work that first waited for it

    @property
    def slack(self) -> int:
        """Pieces of compute work that can run beside it."""
        return 0 if self.needed is None else self.needed - 1 - self.behind


class StreamRecorder(TorchDispatchMode, Streams):
    """Records work by stream and finds what is not ordered."""

    def __init__(self, *, beside: bool = False) -> None:
        super().__init__()
        self.beside = beside
        self._current = threading.local()
        self.clocks: dict[str, Clock] = defaultdict(Clock)
        self.hazards: list[str] = []
        self.work: Counter[str] = Counter()  # operators by stream
        self.blocks: dict[int, Block] = {}
        self.pools: dict[str, list[Block]] = defaultdict(list)  # freed, and not yet surely unused
        self.pool_bytes: Counter[str] = Counter()  # in use, by the stream they were allocated on
        self.pool_peaks: Counter[str] = Counter()
        self.on_host: set[int] = set()  # storages that live on the host
        self.groups: list[ParamGroup] = []
        self.most_full = 0  # gathered buffers alive at once, those of ``counted`` groups
        self.counted: list[ParamGroup] = []
        self.collectives: list[Collective] = []
        self._pause = 0
        self._num_streams = 0

    # -- Streams --------------------------------------------------------------------------------------

    @property
    def stream(self) -> str:
        """Of the calling thread."""
        name: str = vars(self._current).get("name", "compute")
        return name

    @stream.setter
    def stream(self, name: str) -> None:
        self._current.name = name

    def new(self) -> RecordedStream:
        self._num_streams += 1
        return RecordedStream(self, f"stream{self._num_streams}")

    def current(self) -> RecordedStream:
        return RecordedStream(self, self.stream)

    def synchronize(self) -> None:
        """Do nothing: the work of these streams takes no time."""

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.stream = self.stream, stream.name
        try:
            yield
        finally:
            self.stream = before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What a communication library does inside is not work of ours."""
        self._pause += 1
        try:
            yield
        finally:
            self._pause -= 1

    # -- memory ---------------------------------------------------------------------------------------

    def block_of(self, tensor: torch.Tensor, *, born: bool = False) -> Block:
        """The block a tensor lies in; one first seen as an operator's result is an allocation."""
        return self._block_in(tensor.untyped_storage(), born=born)

    def _block_in(self, storage: torch.UntypedStorage, *, born: bool) -> Block:
        block = self.blocks.get(storage._cdata)
        if block is None:
            if born:
                self._check_allocation(storage.nbytes())
            pool = self.stream
            block = Block(pool, storage.nbytes(), StorageWeakRef(storage))
            self.blocks[storage._cdata] = block
            self.pool_bytes[pool] += block.nbytes
            self.pool_peaks[pool] = max(self.pool_peaks[pool], self.pool_bytes[pool])
        return block

    def resized(self, storage: torch.UntypedStorage, before: int) -> None:
        """A storage got or lost its memory, on the current stream."""
        if before and not storage.nbytes():
            self.free(storage._cdata)
        elif storage.nbytes() and not before:
            self._block_in(storage, born=True)

    def _check_allocation(self, nbytes: int) -> None:
        """Any memory in the stream's pool may be given out now."""
        if not nbytes:
            return
        clock, left = self.clocks[self.stream], []
        for block in self.pools[self.stream]:
            pending = [use for use in block.uses() if use[0] != self.stream and clock[use[0]] < use[1]]
            if pending:
                left.append(block)
                self.hazards.append(
                    f"{block.nbytes} bytes freed to {self.stream} are still used by {sorted(pending)}"
                )
        self.pools[self.stream] = left

    def free(self, key: int) -> None:
        """A storage's memory goes back to the stream it was allocated on."""
        block = self.blocks.pop(key, None)
        if block is not None:
            self.pool_bytes[block.pool] -= block.nbytes
            if key not in self.on_host:
                self.pools[block.pool].append(block)
        self.on_host.discard(key)

    def _collect(self) -> None:
        for key, block in list(self.blocks.items()):
            if block.storage is not None and block.storage.expired():
                self.free(key)

    # -- work -----------------------------------------------------------------------------------------

    def access(self, name: str, stream: str, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        """One piece of work: check its order against everything that touched the same memory."""
        clock = self.clocks[stream]
        clock |= self.clocks[HOST]  # launched after whatever the host has waited for
        clock[stream] += 1
        self.work[stream] += 1
        if stream == "compute":
            for started in self.collectives:
                if started.needed is None and clock[started.stream] >= started.tick:
                    started.needed = clock[stream]
        for tensor in reads:
            block = self.block_of(tensor)
            self._require(name, stream, "reads", [block.written] if block.written else [])
            block.reads[stream] = clock[stream]
        for tensor in writes:
            block = self.block_of(tensor, born=True)
            self._require(name, stream, "writes", block.uses())
            block.written, block.reads = (stream, clock[stream]), {}

    def _require(self, name: str, stream: str, verb: str, uses: list[tuple[str, int]]) -> None:
        for other, tick in uses:
            if other != stream and self.clocks[stream][other] < tick:
                self.hazards.append(f"{name} on {stream} {verb} what {other} may still be using")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is not torch.Tensor and kind is not nn.Parameter for kind in types):
            return NotImplemented  # a subclass works on its local tensors, and those are seen
        self._collect()
        result = func(*args, **(kwargs or {}))
        if self._pause or str(func).startswith("c10d"):
            return result
        schema = func._schema
        written: list[torch.Tensor] = []
        for argument, value in zip(schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written += _tensors(value)
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        if is_view:
            return result
        reads = [t for t in _tensors((args, kwargs)) if not any(t is w for w in written)]
        made = [t for t in _tensors(result) if not any(t is w for w in written)]
        self._launch(
            str(func), reads, [*written, *made], bool((kwargs or {}).get("non_blocking")) or args[2:]
        )
        return result

    def _launch(
        self, name: str, reads: list[torch.Tensor], writes: list[torch.Tensor], non_blocking: Any
    ) -> None:
        keys = [t.untyped_storage()._cdata for t in (*reads, *writes)]
        known = [key for key in keys if key in self.blocks or key in self.on_host]
        hosts = [key in self.on_host for key in known]
        only_host = bool(hosts) and all(hosts)
        if only_host:
            self.on_host.update(keys)  # what the host copies to and from its memory is memory of its own
        stream = HOST if only_host else self.stream
        self.access(name, stream, reads, writes)
        copies_between = any(hosts) and not only_host and "copy_" in name
        if (copies_between and not _is_true(non_blocking)) or "_local_scalar_dense" in name:
            self.clocks[HOST] |= self.clocks[stream]

    def collective(
        self,
        real: Callable[..., Any],
        group: dist.ProcessGroup,
        reads: list[Any],
        writes: list[Any],
        *args: Any,
    ) -> RecordedWork | None:
        """Start a collective, on the current stream or on its communicator's behind it."""
        stream = self.stream
        if self.beside:
            stream = f"communicator{id(group)}"
            self.clocks[stream] |= self.clocks[self.stream]
        self.access(real.__name__, stream, reads, writes)
        if any(tensor.untyped_storage()._cdata in self.on_host for tensor in (*reads, *writes)):
            self.hazards.append(f"{real.__name__} is given memory of the host")
        clock = self.clocks[stream]
        self.collectives.append(
            Collective(real.__name__, stream, clock[stream], clock["compute"], clock.copy(), id(group))
        )
        with self.paused():
            work = real(*args)
            if not self.beside:
                wait_for(work)
        return RecordedWork(self, work, stream) if self.beside else None


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _is_true(value: Any) -> bool:
    return value is True or (isinstance(value, tuple) and True in value)


@contextmanager
def recording(
    *roots: nn.Module,
    offload: bool = False,
    context: type[CommContext] = CommContext,
    beside: bool = False,
) -> Iterator[StreamRecorder]:
    """Run what is inside as on an accelerator, the roots on a `CommContext` of recorded streams each."""
    recorder = StreamRecorder(beside=beside)
    for root in roots:
        comm = context(recorder)
        for module in root.modules():
            state = state_of(module)
            if state is not None:
                state.join(comm)
                recorder.groups += [group for group in state.groups if group not in recorder.groups]
    with ExitStack() as stack:
        for patch in _patches(recorder, offload):
            stack.enter_context(patch)
        for group in recorder.groups:
            recorder.block_of(group.shard)
            if offload:
                recorder.on_host.add(group.shard.untyped_storage()._cdata)
        stack.enter_context(recorder)
        yield recorder


def _patches(recorder: StreamRecorder, offload: bool) -> list[Any]:
    def gather(full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> RecordedWork | None:
        return recorder.collective(all_gather_into, group, [shard], [full], full, shard, group)

    def gather_each(pairs: Any, group: dist.ProcessGroup) -> RecordedWork | None:
        full, shards = (list(each) for each in zip(*pairs, strict=True))
        return recorder.collective(all_gather_each, group, shards, full, pairs, group)

    def scatter(
        shard: torch.Tensor, full: torch.Tensor, op: Any, group: dist.ProcessGroup
    ) -> RecordedWork | None:
        return recorder.collective(reduce_scatter_into, group, [full], [shard], shard, full, op, group)

    def reduce(tensor: torch.Tensor, op: Any, group: dist.ProcessGroup) -> None:
        wait_for(recorder.collective(all_reduce_at_once, group, [tensor], [tensor], tensor, op, group))

    allocate, resize = DBuffer.allocate, torch.UntypedStorage.resize_

    def allocated(buffer: DBuffer) -> None:
        allocate(buffer)
        alive = [g for g in recorder.counted if g.full and g.full.flat.untyped_storage().nbytes()]
        recorder.most_full = max(recorder.most_full, len(alive))

    def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
        before = storage.nbytes()
        result = resize(storage, nbytes)
        recorder.resized(storage, before)
        return result

    def room_on_host(group: ParamGroup, shard: torch.Tensor) -> torch.Tensor:
        with recorder.paused():
            host = torch.empty_like(shard)
        recorder.on_host.add(host.untyped_storage()._cdata)
        return host

    patches = [
        mock.patch("vescale_fsdp.runtime.comm.group_comm.all_gather_into", gather),
        mock.patch("vescale_fsdp.runtime.comm_context.all_gather_each", gather_each),
        mock.patch("vescale_fsdp.runtime.comm.group_comm.reduce_scatter_into", scatter),
        mock.patch("vescale_fsdp.runtime.comm.group_comm.all_reduce_at_once", reduce),
        mock.patch.object(DBuffer, "allocate", allocated),
        mock.patch.object(torch.UntypedStorage, "resize_", resized),
    ]
    if offload:
        patches += [
            mock.patch.object(ParamGroup, "is_offloaded", True),
            mock.patch.object(ParamGroup, "_is_pinned", True),
            mock.patch.object(ParamGroup, "_room_on_host", room_on_host),
        ]
    return patches
