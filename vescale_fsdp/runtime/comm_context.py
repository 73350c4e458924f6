"""CommContext: the streams of a tree of units, the reductions in flight, and whose memory is whose.

Memory is freed deterministically, without ``record_stream``: a buffer is given back when the compute stream is done
with it as an event says, and the gather stream waits for that event before it allocates again. On the CPU there are
no streams: collectives run in gloo's threads and `wait` is a wait. ``tests/runtime/comm/test_streams.py`` runs all of
this on recorded streams and finds every access and allocation in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import UnshardHandle as TorchUnshardHandle

from vescale_fsdp.collectives import all_gather_each, wait_for
from vescale_fsdp.layout.group_layout import GroupLayout
from vescale_fsdp.runtime.comm.dbuffer import DBuffer
from vescale_fsdp.runtime.comm.gradients import ReducedShard, UsedFlags
from vescale_fsdp.runtime.comm.group_comm import GroupComm
from vescale_fsdp.runtime.comm.order_watch import OrderWatch, can_watch
from vescale_fsdp.runtime.comm.streams import Event, Stream, Streams
from vescale_fsdp.runtime.param_group import GroupState, ParamGroup
from vescale_fsdp.runtime.takeover import settle
from vescale_fsdp.torch_modes import AS_IT_IS, outside_modes


class _Reduction(NamedTuple):
    """A reduction in flight."""

    group: ParamGroup
    reduced: ReducedShard
    owner: Stream | None  # whose the memory of its gradient buffer is
    started: Event | None  # behind it, where its collective is work of the reduce stream


class _InUse(NamedTuple):
    """Memory of one stream that another is given to read or write: kept, and then waited for, by its owner."""

    tensors: Sequence[torch.Tensor]
    event: Event


class CommContext:
    """Streams and reductions in flight. Several roots may share one (`share_comm_ctx`).

    Who owns which memory (the caching allocator gives a freed block to the stream it was allocated on, at
    once, so every other stream that used it must be waited for first):

        gathered buffers, and what a gather needs beside them     g; it waits for c whenever one is freed
        those that last until the backward (the root's)           c; g waits for it before it writes them
        gradients as autograd makes them                          their stream's; it waits for c, which reads them
        gradient buffers                                          c; freed once c waits for their reduction
        reduced shards, so sharded gradients                      r; r waits for c at the start of a reduction
        the same with replicas, behind their all-reduce           a; they are kept until it is done, and r waits for it
        shards from the host, on their way into a gather          h; kept until they are in it, and h waits for that

    Args:
        streams: where streams come from; None on the CPU, where a wait is a wait.
    """

    def __init__(self, streams: Streams | None) -> None:
        self.streams = streams
        self.max_reductions = 1  # in flight: as many as any unit allows
        self._limits: dict[object, int] = {}  # by unit: how many reductions it allows in flight
        self.in_flight: list[_Reduction] = []
        self._spare_grads: dict[GroupLayout, dict[torch.dtype, list[DBuffer]]] = {}
        self._kept: DBuffer | None = None  # the one of them that still has its memory
        self._host_copies: dict[Stream, Event] = {}  # the last copy from or to the host, by stream
        self._ahead: set[ParamGroup] = set()  # gathered, and nobody has waited for them
        # Sharded again, with full buffers that still have their memory, and when it was last read.
        self._lingering: list[ParamGroup] = []
        self._lingering_read: Event | None = None
        self._waits_for_event = False  # gathers wait for a user's event, and not for the compute stream
        self._behind: Event | None = None  # what shards are read behind
        self._brought: deque[_InUse] = deque()  # shards from the host, that the gather stream reads
        self._all_reducing: deque[_InUse] = deque()  # reduced shards, that the replicas' stream reads
        self.watches: dict[DeviceMesh, OrderWatch] = {}

    def set_limit(self, unit: object, limit: int) -> None:
        """Note how many reductions the unit allows in flight."""
        self._limits[unit] = limit
        self.max_reductions = max(self._limits.values())

    def limit_of(self, unit: object) -> int:
        """How many reductions the unit allows in flight."""
        return self._limits.get(unit, 1)

    def drop_limit(self, unit: object) -> int:
        """The unit leaves: its limit no longer counts here, and is returned."""
        limit = self._limits.pop(unit, 1)
        self.max_reductions = max(self._limits.values(), default=1)
        return limit

    # Made when first asked for: every unit begins with a context of its own, and drops it for its root's.
    @cached_property
    def gather_stream(self) -> Stream | None:
        """Where gathers start, and the casts before and the decoding after them run."""
        return self.streams.new() if self.streams is not None else None

    @cached_property
    def reduce_stream(self) -> Stream | None:
        """Where reductions start, and what is done with a reduced shard runs."""
        return self.streams.new() if self.streams is not None else None

    @cached_property
    def replica_stream(self) -> Stream | None:
        """Where replicas are all-reduced: beside the next unit's reduction over shards."""
        return self.streams.new() if self.streams is not None else None

    @cached_property
    def copy_stream(self) -> Stream | None:
        """Where shards come from the host: beside the all-gather of the unit before."""
        return self.streams.new() if self.streams is not None else None

    def _on(self, stream: Stream | None) -> AbstractContextManager[Any]:
        return self.streams.on(stream) if self.streams is not None and stream is not None else AS_IT_IS

    def _compute_waits_for(self, stream: Stream | None) -> None:
        if self.streams is not None:
            self.streams.current().wait_stream(stream)

    def wait_for_compute(self) -> None:
        """Let gathers, and copies from the host, wait for what the compute stream was given (the optimizer's step)."""
        if self.streams is not None:
            self._behind = self.streams.current().record_event()
        self._gathers_wait_for_frees()

    def wait_for_event(self, event: Event) -> None:
        """Let them wait for a user's event instead of the whole compute stream."""
        self._waits_for_event = True
        self._behind = event
        if self.gather_stream is not None:
            self.gather_stream.wait_event(event)

    def _gathers_wait_for_frees(self) -> None:
        """Let gathers, and not copies from the host, wait for the compute stream, which was done with some memory."""
        self._waits_for_event = False
        if self.streams is not None and self.gather_stream is not None:
            self.gather_stream.wait_stream(self.streams.current())

    # -- order ----------------------------------------------------------------------------------------

    def watch(self, comm: GroupComm) -> None:
        """Compare with other ranks in which order collectives of a group are started."""
        if comm.mesh.size() > 1 and can_watch(comm.shard_group):
            if comm.mesh not in self.watches:
                self.watches[comm.mesh] = OrderWatch(comm.mesh)
            comm.watch = self.watches[comm.mesh]
            comm.watch.over.add(comm)

    def explain(self, failure: RuntimeError) -> None:
        """Raise what a collective failed of, if ranks have started other ones.

        Raises:
            LifecycleError: naming them.
        """
        for watch in self.watches.values():
            watch.explain(failure)

    # -- gather ---------------------------------------------------------------------------------------

    def gather(self, groups: Sequence[ParamGroup], *, lasting: bool = False) -> None:
        """Start all-gathers.

        Args:
            groups: of a unit.
            lasting: they stay gathered from the forward to the backward. Then their memory is the compute stream's:
                once free it serves gradients as well, while the gather stream has no use for a buffer as large as the
                root's. It has been given no more than the units before this one, so waiting for it costs nothing.
        """
        if lasting and not self._waits_for_event and any(group.state.is_sharded for group in groups):
            with outside_modes():
                for group in groups:
                    group.allocate_full()
            self._gathers_wait_for_frees()
        if any(group in self._lingering for group in groups):
            self.free_lingering()
        with self._on(self.gather_stream), outside_modes():
            for group in groups:
                if group.state.is_sharded:
                    group.note_start("gather")
                    self._ahead.add(group)
                    settle(group)
            brought = self._bring(groups)
            self._start_gathers(groups)
            for group in groups:
                if self.gather_stream is not None and group.state is GroupState.GATHERING:
                    # What decodes or copies out behind the collective uses memory of this stream: here, now.
                    group.finish_gather()
                    group.gathered = self.gather_stream.record_event()
        if brought and self.gather_stream is not None:
            self._brought.append(_InUse(brought, self.gather_stream.record_event()))
        self.free_lingering()

    def _start_gathers(self, groups: Sequence[ParamGroup]) -> None:
        """Start the all-gathers of a unit: on an accelerator one launch for all over the same ranks."""
        if self.streams is None:
            for group in groups:
                group.unshard()
            return
        noted: dict[dist.ProcessGroup, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        try:
            for group in groups:
                group.comm.noted = noted.setdefault(group.comm.shard_group, [])
                group.unshard()
        finally:  # what the groups before one that cannot be gathered have noted is under way for them
            for group in groups:
                group.comm.noted = None
            for ranks, pairs in noted.items():
                if pairs:
                    wait_for(all_gather_each(pairs, ranks))

    def _bring(self, groups: Sequence[ParamGroup]) -> list[torch.Tensor]:
        """Copy shards from the host, beside the gathers that the gather stream has; it waits for the copies.

        No more than two units' are there: the one before the last has been gathered once the next is copied.
        """
        offloaded = [group for group in groups if group.is_offloaded and group.state is GroupState.SHARDED]
        if not offloaded or self.copy_stream is None or self.gather_stream is None:
            return []
        while len(self._brought) > 1:
            self.copy_stream.wait_event(self._brought.popleft().event)
        if self._behind is not None:
            self.copy_stream.wait_event(self._behind)
        with self._on(self.copy_stream), outside_modes():
            brought = [shard for group in offloaded for shard in group.bring_shard()]
        self._note_host_copy(self.copy_stream, offloaded)
        self.gather_stream.wait_stream(self.copy_stream)
        return brought

    def free_lingering(self) -> None:
        """Free what `reshard` has left; later gathers wait until the stream that read it is done with it."""
        if self._lingering:
            lingering, self._lingering = self._lingering, []
            with outside_modes():
                for group in lingering:
                    group.free_full()
            # Not for the current stream: that may be another one than the unit computed on.
            assert self.gather_stream is not None and self._lingering_read is not None
            self.gather_stream.wait_event(self._lingering_read)
            self._lingering_read = None

    def wait(self, groups: Sequence[ParamGroup]) -> None:
        """Wait for the all-gathers under way and hand the unsharded parameters to the modules."""
        for group in groups:
            if group.state in (GroupState.GATHERING, GroupState.GATHERED):
                with outside_modes():
                    self.settle([group])
                    group.hand_over()
                self._ahead.discard(group)

    def settle(self, groups: Sequence[ParamGroup]) -> None:
        """See to it that gathers under way have read their shards before the compute stream goes on."""
        for group in groups:
            if group.state is GroupState.GATHERING:
                group.finish_gather()
            elif self.streams is not None and group.gathered is not None:
                self.streams.current().wait_event(group.gathered)

    def reshard(
        self, groups: Sequence[ParamGroup], *, keep_part: bool = False, lingers: bool = False
    ) -> None:
        """Free full parameters; the next gather waits until the compute stream is done with them.

        Args:
            groups: of a unit.
            keep_part: see `ParamGroup.reshard`.
            lingers: where no unit is gathered ahead, let memory go behind the start of the next gather. That one then
                runs beside the compute that uses this unit, as one ahead does, and takes as much memory.
        """
        self.wait(groups)
        self.free_lingering()
        if all(group.state is GroupState.SHARDED for group in groups):
            return
        stays = lingers and self.streams is not None and not self._ahead
        with outside_modes():
            for group in groups:
                group.reshard(keep_part=keep_part, frees=not stays)
        if stays:
            assert self.streams is not None
            self._lingering, self._lingering_read = list(groups), self.streams.current().record_event()
            return
        # Here, not at the next gather: another stream may compute as well, and free what it has used before then.
        self._gathers_wait_for_frees()

    # -- gradient buffers -------------------------------------------------------------------------------

    def adopt(self, group: ParamGroup) -> None:
        """Let a group share gradient buffers with those of equal layout: the layers of a model."""
        self.watch(group.comm)
        group.grads.streams = self.streams
        group.grads.take_spare = self._take_spare
        if group.comm.settings.custom_reduce_scatter is None and group.comm.memory is None:
            group.grads.spare = self._spare_grads.setdefault(group.layout, {})

    def _take_spare(self, spares: list[DBuffer]) -> DBuffer | None:
        """One of these buffers, if there is one; on the CPU, once the reductions in flight are done.

        There a wait costs little, since the cores that would overlap with it do the reduction, and the buffer
        that was reduced goes, memory and all, to the next unit: a fresh one would cost a page fault for every
        4 KiB. On an accelerator the reduction runs beside the next unit's backward, and its buffer with it.
        """
        if self.streams is None:
            while self.in_flight:
                self.finish_reduction()
        spare = spares.pop() if spares else None
        if spare is self._kept:
            self._kept = None
        else:
            self._let_go()
        return spare

    def _recycle(self, group: ParamGroup, buffer: DBuffer) -> None:
        """Keep a gradient buffer that was reduced: its tensors, and on the CPU its memory until the next one."""
        group.grads.spare.setdefault(buffer.flat.dtype, []).append(buffer)
        self._let_go()
        if self.streams is None:
            self._kept = buffer
        else:
            buffer.free()

    def _let_go(self) -> None:
        if self._kept is not None:
            self._kept.free()
            self._kept = None

    # -- reduce ---------------------------------------------------------------------------------------

    def make_way(self) -> None:
        """Finish reductions until one more may start: at most ``max_reductions`` stay in flight."""
        while len(self.in_flight) >= self.max_reductions:
            self.finish_reduction()

    def reduce(self, group: ParamGroup) -> None:
        """Start a reduction."""
        self.make_way()
        if group.comm.watch is not None:
            group.comm.watch.settle()
        group.note_start("reduction")
        source = group.complete_grads()
        self._let_go()  # nobody took it: the root's gradients, for one, have their memory since the loss
        owner = self.streams.current() if self.streams is not None else None
        started = None
        if owner is not None and self.reduce_stream is not None:
            self.reduce_stream.wait_stream(owner)
            while len(self._all_reducing) > 1:  # the last one may be under way beside this reduction
                self.reduce_stream.wait_event(self._all_reducing.popleft().event)
        with self._on(self.reduce_stream):
            reduced = group.start_reduce(source)
            if self.reduce_stream is not None:
                started = self.reduce_stream.record_event()
        self.in_flight.append(_Reduction(group, reduced, owner, started))

    def finish_reduction(self) -> None:
        """Finish the oldest reduction in flight, for the streams: the host goes on at once."""
        reduction = self.in_flight.pop(0)
        group, reduced = reduction.group, reduction.reduced
        try:
            stream = self._wait_until_reduced(reduction)
            self._recycle(group, reduced.source)
            kept = [reduced.shard, *group.unreplicated_sums()]
            with self._on(stream):
                group.finish_reduce(reduced)
        except RuntimeError as error:
            self.explain(error)
            raise
        if stream is not None and stream is not self.reduce_stream:
            self._all_reducing.append(_InUse(kept, stream.record_event()))
        self._note_host_copy(stream, [group])

    def _wait_until_reduced(self, reduction: _Reduction) -> Stream | None:
        """Let streams wait for a reduction over shards: the one that goes on with it, which is returned, and the owner.

        Only now may the stream that owns the gradient buffer use its memory again. What follows (the replicas'
        all-reduce, casts) need not be waited for before the next reduction has run.
        """
        group, reduced, owner, started = reduction
        stream = self.reduce_stream if group.comm.replicate_group is None else self.replica_stream
        with self._on(stream):
            if stream is not None and started is not None:
                stream.wait_event(started)
            reduced.wait()
        if owner is not None and stream is not None and started is not None:
            # Where there is something to wait for, it is not the work of the stream that started it.
            owner.wait_event(started if reduced.work is None else stream.record_event())
        return stream

    def finish_reductions(self) -> None:
        """Finish all of them; the compute stream may read the sharded gradients behind this."""
        while self.in_flight:
            self.finish_reduction()
        self._let_go()
        self._join_streams()

    def drop_reductions(self) -> None:
        """Forget all reductions in flight, once they no longer touch their buffers."""
        for reduction in self.in_flight:
            self._wait_until_reduced(reduction)
        self.in_flight.clear()
        self._join_streams()

    def _join_streams(self) -> None:
        """Let the compute stream wait for what became of reductions, and let go of what was kept for other streams."""
        while self._all_reducing and self.reduce_stream is not None:
            self.reduce_stream.wait_event(self._all_reducing.popleft().event)
        while self._brought and self.copy_stream is not None:
            self.copy_stream.wait_event(self._brought.popleft().event)
        self._compute_waits_for(self.reduce_stream)

    def run_beside(self, stream: Stream | None, work: Callable[[], None]) -> None:
        """Do a user's work on a stream of theirs (None: where we are), in order with what is before and after."""
        if self.streams is None or stream is None:
            work()
            return
        here = self.streams.current()
        stream.wait_stream(here)
        with self._on(stream):
            work()
        here.wait_stream(stream)

    # -- host -----------------------------------------------------------------------------------------

    def _note_host_copy(self, stream: Stream | None, groups: Sequence[ParamGroup]) -> None:
        if stream is not None and any(group.is_offloaded for group in groups):
            self._host_copies[stream] = stream.record_event()

    def wait_for_host_copies(self) -> None:
        """Block until copies from and to the host are done: it may then write shards and read gradients."""
        for event in self._host_copies.values():
            event.synchronize()
        self._host_copies.clear()


class UnshardHandle(TorchUnshardHandle):
    """Waits for an unshard that was started with ``async_op=True``.

    Examples:
        >>> import torch
        >>> from vescale_fsdp import fully_shard
        >>> model = fully_shard(torch.nn.Linear(8, 4))
        >>> handle = model.unshard(async_op=True)
        >>> handle.wait()
        >>> model.weight.shape
        torch.Size([4, 8])
        >>> model.reshard()
    """

    def __init__(self, comm: CommContext, groups: Sequence[ParamGroup]) -> None:
        self._comm, self._groups = comm, groups

    def wait(self) -> None:
        """After this the module holds its full parameters."""
        self._comm.wait(self._groups)


class GradientReductionHandle:
    """Waits for the reductions in flight, and sets the gradients that hang on what other ranks have used.

    Args:
        comm: where reductions are in flight.
        told: messages about what was used, each with the groups it speaks of.
    """

    def __init__(self, comm: CommContext, told: Sequence[tuple[UsedFlags, list[ParamGroup]]]) -> None:
        self._comm = comm
        self._told = list(told)

    def wait(self) -> None:
        """After this the sharded gradients may be read."""
        try:
            self._finish()
        except RuntimeError as error:
            self._comm.explain(error)
            raise

    def _finish(self) -> None:
        self._comm.finish_reductions()
        while self._told:
            flags, groups = self._told.pop(0)
            flags.wait()
            if any(group.is_in_doubt for group in groups):
                used = iter(flags.anywhere())
                for group in groups:
                    group.settle_doubtful(list(islice(used, len(group.params))))
        self._comm.wait_for_host_copies()
