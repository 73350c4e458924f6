"""CommContext: the streams and the reductions in flight of all units under a root, and which stream owns which memory.

Memory is freed deterministically, without ``record_stream``: the host frees a buffer at a fixed point of the schedule,
after it has let the stream that owns the memory wait for the last use by other streams. On the CPU there are no
streams: gathers run in gloo's threads, and `wait` blocks. The start of a reduction on one node blocks until it has
ended; a reduction between nodes runs in a thread of ours.
`tests/vescale_fsdp/runtime/schedule/test_streams.py` runs this code on recorded streams and checks the order of every
access and allocation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import UnshardHandle as TorchUnshardHandle

from vescale_fsdp.collectives.operations import all_gather_each, all_reduce_at_once
from vescale_fsdp.collectives.slice_exchange import Work, wait_for
from vescale_fsdp.layout.group_layout import GroupLayout
from vescale_fsdp.runtime.comm.dbuffer import DBuffer
from vescale_fsdp.runtime.comm.group_comm import GroupComm
from vescale_fsdp.runtime.comm.order_watch import OrderWatch
from vescale_fsdp.runtime.comm.streams import Event, Stream, Streams
from vescale_fsdp.runtime.comm.unsharded_grads import ReducedShard, UsedFlags
from vescale_fsdp.runtime.param_group import GroupState, ParamGroup
from vescale_fsdp.runtime.takeover import adopt_replaced_params
from vescale_fsdp.torch_modes import NULL_CONTEXT, is_fake, outside_modes

_MOST_REPLICATING = 2  # all-reduces of replicas in flight on the CPU: one on the network, and the next one


class _Reduction(NamedTuple):
    """A reduction that a `CommContext` has started: its group, streams and event."""

    group: ParamGroup
    reduced: ReducedShard
    owner: Stream | None  # the stream that owns the memory of the gradient buffer
    result_owner: Stream | None  # the stream that owns the memory of the reduced shard
    started: Event | None  # recorded on the reduce stream after the start of the collective


class _InUse(NamedTuple):
    """Tensors that one stream owns and another stream reads: kept alive until the owner has waited for the event."""

    tensors: Sequence[torch.Tensor]
    owner: Stream
    event: Event


def _release(kept: deque[_InUse], *, most: int = 0) -> None:
    """Drop the oldest tensors, after their owners wait for their readers, until at most ``most`` entries are left."""
    while len(kept) > most:
        kept[0].owner.wait_event(kept[0].event)  # before the tensors are dropped, which frees their memory
        kept.popleft()


class CommContext:
    """Streams and reductions in flight. Several roots may share one context (`share_comm_ctx`).

    A block of memory belongs to the stream on which it was allocated. Before the host frees the block, this stream must
    wait for every other stream that used the block: the native caching allocator may give the block to the stream's
    next allocation, and with ``backend:cudaMallocAsync`` the free itself is work of the stream. In the table, c is the
    compute stream, g gathers, r reduces, a all-reduces over replicas, and h copies from the host:

        full buffers, and the scratch memory of gathers           g; it waits for c whenever a buffer is freed
        full buffers that last until the backward (the root's)    c; g waits for c before it writes them
        gradients from autograd                                   the stream that computed them; it waits for c
        gradient buffers                                          c; freed once c waits for their reduction
        reduced shards, which become the sharded gradients        c; kept until c waits for the delivery on r or a
        copies of shards from the host, for a gather              h; kept until gathered, and h waits for the gather

    Args:
        streams: creates the streams; None on the CPU, where the host itself waits.
    """

    def __init__(self, streams: Streams | None) -> None:
        self.streams = streams
        self.max_reductions = 1  # reductions in flight: the largest limit of all units
        self._limits: dict[object, int] = {}  # unit -> reductions in flight that it allows
        self.in_flight: list[_Reduction] = []
        self._spare_grads: dict[GroupLayout, dict[torch.dtype, list[DBuffer]]] = {}
        # On the CPU: the one spare buffer whose memory is not freed, since new memory would cost page faults.
        self._kept: DBuffer | None = None
        self._host_copies: dict[Stream, Event] = {}  # event of each stream's last copy from or to the host
        self._ahead: set[ParamGroup] = set()  # prefetched groups, for which no unit has waited yet
        # Resharded groups whose full buffers are still allocated, and the event after the last read of these buffers.
        self._lingering: list[ParamGroup] = []
        self._lingering_read: Event | None = None
        self._waits_for_event = False  # whether gathers wait for a user's event instead of the compute stream
        self._shards_ready: Event | None = None  # shards may be read after this event
        self._brought: deque[_InUse] = deque()  # shards from the host that the gather stream reads
        self._home: Stream | None = None  # the stream on which the last backward has begun
        self._reduced: deque[_InUse] = deque()  # reduced shards that the streams of reductions use
        # On the CPU, all-reduces of replicas in flight: the network sends one while a unit computes.
        self._replicating: deque[tuple[ParamGroup, ReducedShard, Work | None]] = deque()
        self.watches: dict[DeviceMesh, OrderWatch] = {}
        self._num_forwards = 0  # forwards of the root that have gathered
        self._is_uncounted = False  # whether a forward has begun since the last gather

    def set_limit(self, unit: object, limit: int | None) -> None:
        """Set how many reductions in flight a unit allows; None: the unit no longer belongs to this context."""
        self._limits.pop(unit, None)
        if limit is not None:
            self._limits[unit] = limit
        self.max_reductions = max(self._limits.values(), default=1)

    def _new_stream(self) -> Stream | None:
        return self.streams.new() if self.streams is not None else None

    # Streams are created at their first use: each unit begins with a context of its own, whose streams are never used
    # because `lazy_init` replaces the context by the root's.
    gather_stream = cached_property(_new_stream)  # gathers, casts before them, decoding after them
    reduce_stream = cached_property(_new_stream)  # reductions, and the work on reduced shards
    replica_stream = cached_property(_new_stream)  # all-reduces of replicas, during the next unit's reduction
    copy_stream = cached_property(_new_stream)  # shards from the host, during the last unit's all-gather
    agreement_stream = cached_property(_new_stream)  # messages that the host reads, behind no other work

    def _on(self, stream: Stream | None) -> AbstractContextManager[Any]:
        """Return a context that runs work on a stream; on the CPU a null context."""
        return self.streams.on(stream) if self.streams is not None and stream is not None else NULL_CONTEXT

    def begin_backward(self) -> None:
        """Note the stream of a backward, which owns the gradients."""
        if self.streams is not None:
            self._home = self.streams.current()

    def count_forward(self) -> None:
        """Count a forward of the root, when it gathers: groups may check their collectives in every N-th one.

        A forward without gathers, which one rank may run alone, must not count: the count is the same on all ranks.
        """
        self._is_uncounted = True

    def wait_for_compute(self) -> None:
        """Let gathers, and copies from the host, wait for the compute stream's work so far (the optimizer's step)."""
        if self.streams is not None:
            self._shards_ready = self.streams.current().record_event()
        self._gathers_wait_for_frees()

    def wait_for_event(self, event: Event) -> None:
        """Let gathers, and copies from the host, wait for a user's event instead of the compute stream."""
        self._waits_for_event = True
        self._shards_ready = event
        if self.gather_stream is not None:
            self.gather_stream.wait_event(event)

    def _gathers_wait_for_frees(self) -> None:
        """Let gathers wait for the compute stream's reads of freed memory, before they reuse that memory.

        Copies from the host do not wait: they do not allocate from that memory.
        """
        self._waits_for_event = False
        if self.streams is not None and self.gather_stream is not None:
            self.gather_stream.wait_stream(self.streams.current())

    # -- order ----------------------------------------------------------------------------------------

    def watch(self, comm: GroupComm, device: torch.device) -> None:
        """Begin to compare the order of a group's collectives with other ranks (`OrderWatch`)."""
        if comm.can_watch:
            if comm.mesh not in self.watches:
                self.watches[comm.mesh] = OrderWatch(comm.mesh, device)
            comm.watch = self.watches[comm.mesh]
            comm.watch.over.add(comm)

    def compare_order(self, watches: Iterable[OrderWatch]) -> None:
        """Start to compare the order of collectives; `OrderWatch.read` must follow.

        The message is on the gather stream: the compute stream joins the reduce stream at the end of every backward.
        """
        for watch in watches:
            with self._on(self.gather_stream):
                watch.compare(self.gather_stream)

    def explain(self, failure: RuntimeError) -> None:
        """Raise a clearer error than ``failure`` if a collective failed because ranks started different collectives.

        Raises:
            LifecycleError: with the names of the collectives.
        """
        for watch in self.watches.values():
            watch.explain(failure)

    def agree_on_kept(self, groups: Iterable[ParamGroup]) -> None:
        """Let ranks agree which kept parts of hybrid cuts are gathered over nodes next; groups without are ignored.

        A collective. The host waits for one message per set of ranks: no rank may gather over nodes alone.
        """
        by_ranks: dict[dist.ProcessGroup, list[ParamGroup]] = {}
        for group in groups:
            if group.comm.cut_group is not None:
                by_ranks.setdefault(group.comm.cut_group, []).append(group)
        for ranks, members in by_ranks.items():
            stale = [
                group.is_kept_stale() or (group.kept is not None and group.kept.is_doubtful)
                for group in members
            ]
            with self._on(self.agreement_stream), outside_modes():
                flags = torch.tensor(stale, dtype=torch.uint8, device=members[0].device)
                if ranks.size() > 1 and not is_fake(flags):
                    try:
                        all_reduce_at_once(flags, dist.ReduceOp.MAX, ranks)
                        stale = [bool(flag) for flag in flags.tolist()]
                    except RuntimeError as error:  # torch raises it if a collective fails
                        self.explain(error)
                        raise
            for group, is_stale in zip(members, stale, strict=True):
                assert group.kept is not None
                group.kept.is_due = is_stale

    # -- gather ---------------------------------------------------------------------------------------

    def gather(self, groups: Sequence[ParamGroup], *, lasting: bool = False) -> None:
        """Start the all-gathers of those groups that are sharded; a no-op for the rest.

        Args:
            groups: the groups of a unit.
            lasting: whether the groups stay gathered from the forward to the backward, like the root's. Then the
                compute stream allocates their memory, and can later reuse it for gradients; the gather stream has no
                other use for so large a block. The gather then waits for the compute stream, which so far has only
                the work of earlier units.
        """
        owned: list[ParamGroup] = []  # groups whose memory belongs to the compute stream
        if lasting and not self._waits_for_event and any(group.state.is_sharded for group in groups):
            # Here and below, outside of torch.func and inference mode, because the buffers outlive this forward.
            with outside_modes():
                owned = [group for group in groups if group.allocate_full()]
            self._gathers_wait_for_frees()  # the compute stream may still read the old contents of this memory
        if any(group in self._lingering for group in groups):
            self.free_lingering()  # before the gather: a later free would drop the gathered parameters
        here = self.streams.current() if self.streams is not None else None
        with self._on(self.gather_stream), outside_modes():
            for group in groups:
                if group.state.is_sharded:
                    self._num_forwards += self._is_uncounted
                    self._is_uncounted = False
                    every = group.comm.settings.check_every
                    group.comm.checks = every > 0 and self._num_forwards % every == 0
                    group.full_owner = here if group in owned else self.gather_stream
                    is_due = group.kept is not None and group.kept.is_due
                    group.note_start("gather between nodes" if is_due else "gather")
                    self._ahead.add(group)
                    adopt_replaced_params(group)
            brought = self._bring(groups)
            self._start_gathers(groups)
            for group in groups:
                if self.gather_stream is not None and group.state is GroupState.GATHERING:
                    # Decoding and copies after the collective use memory of the gather stream, so they run on it.
                    group.finish_gather()
                    group.gathered = self.gather_stream.record_event()
        # Keep the copies until the gather has read them.
        if brought and self.copy_stream is not None and self.gather_stream is not None:
            self._brought.append(_InUse(brought, self.copy_stream, self.gather_stream.record_event()))
        self.free_lingering()  # last, so that this gather need not wait for the freed buffer's readers

    def _start_gathers(self, groups: Sequence[ParamGroup]) -> None:
        """Start the all-gathers of a unit; on an accelerator, in one launch for all groups over the same ranks."""
        if self.streams is None:  # gloo has no common launch of several collectives
            for group in groups:
                group.unshard()
            return
        delayed: dict[dist.ProcessGroup, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        try:
            for group in groups:
                group.comm.delayed = delayed.setdefault(group.comm.shard_group, [])
                group.unshard()
        finally:  # if a group raises, the groups before it are in GATHERING, so their collectives must start
            for group in groups:
                group.comm.delayed = None
            for ranks, pairs in delayed.items():
                if pairs:
                    wait_for(all_gather_each(pairs, ranks))

    def _bring(self, groups: Sequence[ParamGroup]) -> list[torch.Tensor]:
        """Copy offloaded shards from the host while earlier gathers run; the gather stream waits for the copies.

        Returns:
            The copies, which the caller must keep until the gather has read them.
        """
        # A kept part that is not due is gathered without the shard.
        offloaded = [
            group
            for group in groups
            if group.is_offloaded
            and group.state is GroupState.SHARDED
            and (group.kept is None or group.kept.is_due)
        ]
        if not offloaded or self.copy_stream is None or self.gather_stream is None:
            return []
        _release(self._brought, most=1)  # keep copies of at most two units in memory
        if self._shards_ready is not None:  # the optimizer may still be writing the shards
            self.copy_stream.wait_event(self._shards_ready)
        with self._on(self.copy_stream), outside_modes():
            brought = [shard for group in offloaded for shard in group.bring_shard()]
        self._note_host_copy(self.copy_stream, offloaded)
        self.gather_stream.wait_stream(self.copy_stream)
        return brought

    def free_lingering(self) -> None:
        """Free full buffers that `reshard` has left allocated; later gathers wait until the buffers were read."""
        if self._lingering:
            lingering, self._lingering = self._lingering, []
            # The recorded event, not the current stream's work: the unit may have computed on another stream.
            with outside_modes():
                self._free_full(lingering, self._lingering_read)

    def _free_full(self, groups: Sequence[ParamGroup], read: Event | None) -> None:
        """Free full buffers, after their owners, and gathers, wait for the event after the last read."""
        if read is not None:
            # Gathers wait also where another stream owns the memory: `reshard` writes gathered values to the shards.
            for owner in dict.fromkeys([self.gather_stream, *[group.full_owner for group in groups]]):
                if owner is not None:
                    owner.wait_event(read)
        for group in groups:
            group.free_full()

    def wait(self, groups: Sequence[ParamGroup]) -> None:
        """Wait for the all-gathers in flight and set the unsharded parameters on the modules."""
        for group in groups:
            if group.state in (GroupState.GATHERING, GroupState.GATHERED):
                with outside_modes():
                    self.wait_for_reads([group])
                    group.hand_over()
                self._ahead.discard(group)

    def wait_for_reads(self, groups: Sequence[ParamGroup]) -> None:
        """Let the compute stream wait until gathers in flight have read the shards of these groups."""
        for group in groups:
            if group.state is GroupState.GATHERING:
                group.finish_gather()
            elif self.streams is not None and group.gathered is not None:
                self.streams.current().wait_event(group.gathered)

    def reshard(
        self, groups: Sequence[ParamGroup], *, keep_part: bool = False, lingers: bool = False
    ) -> None:
        """Free full parameters; the next gather waits until the compute stream no longer reads them.

        Args:
            groups: the groups of a unit.
            keep_part: see `ParamGroup.reshard`.
            lingers: whether to free the memory only after the next gather has started, unless a unit is prefetched
                already. The next gather then need not wait for this unit's compute. At the peak there are two full
                buffers, as with a prefetch.
        """
        self.wait(groups)  # a gather in flight must not write into freed memory
        self.free_lingering()
        if all(group.state is GroupState.SHARDED for group in groups):
            return
        with outside_modes():
            try:
                for group in groups:
                    # A stream on which the unit has not computed may reshard it, and reads the buffer to keep writes.
                    if self.streams is not None and group.filled is not None:
                        self.streams.current().wait_event(group.filled)
                    group.filled = None
                    group.reshard(keep_part=keep_part)
            finally:  # a group that raises is included, because its parameters were replaced
                freed = [group for group in groups if group.state is not GroupState.UNSHARDED]
                # Recorded here, not at the next gather, when another stream may be the current stream.
                read = self.streams.current().record_event() if self.streams is not None else None
                if lingers and read is not None and not self._ahead:
                    self._lingering, self._lingering_read = freed, read
                else:
                    self._free_full(freed, read)
                    self._waits_for_event = False  # the gather stream has waited for compute

    # -- gradient buffers -------------------------------------------------------------------------------

    def adopt(self, group: ParamGroup) -> None:
        """Let a group use this context's watch and streams, and share gradient buffers with groups of equal layout."""
        self.watch(group.comm, group.device)
        group.grads.streams = self.streams
        group.grads.take_spare = self._take_spare
        # Buffers that a user's reduce-scatter allocates are not shared with groups that do not use it.
        if group.comm.settings.custom_reduce_scatter is None:
            group.grads.spare = self._spare_grads.setdefault(group.layout, {})

    def _take_spare(self, spares: list[DBuffer]) -> DBuffer | None:
        """Take one of these buffers; None if there is none. On the CPU, first finish the reductions in flight.

        On the CPU this wait costs little, because the reduction uses the cores that would otherwise compute. The wait
        yields a spare buffer whose memory is still allocated: new memory would cost a page fault for every 4 KiB. On an
        accelerator, and between nodes, there is no wait: the reduction overlaps with the next unit's backward.
        """
        if self.streams is None:
            while self.in_flight and not self.overlaps(self.in_flight[0].group):
                self.finish_reduction()
        spare = spares.pop() if spares else None
        if spare is self._kept:
            self._kept = None  # in use again, so it must not be freed
        else:  # the kept buffer has another layout or dtype: free it before other memory is allocated
            self._free_kept()
        return spare

    def overlaps(self, group: ParamGroup) -> bool:
        """Whether on the CPU a group's collectives overlap with compute: if its ranks are on several nodes.

        The overlap takes a second full buffer and a second gradient buffer.
        """
        return group.comm.reduces_beside(group.device)

    def _free_kept(self) -> None:
        if self._kept is not None:
            self._kept.free()
            self._kept = None

    # -- reduce ---------------------------------------------------------------------------------------

    def wait_for_slot(self) -> None:
        """Finish the oldest reductions until fewer than ``max_reductions`` are in flight."""
        while len(self.in_flight) >= self.max_reductions:
            self.finish_reduction()

    def reduce(self, group: ParamGroup) -> None:
        """Start the reduction of a group's gradients; `finish_reduction` delivers the result."""
        self.wait_for_slot()  # first, because it frees a gradient buffer before this group allocates one
        # Ranks whose forwards differed must not reduce together. On an accelerator the host would wait, so the end of
        # the backward reads the comparison, unless optimizers step before it.
        if group.comm.watch is not None and (
            self.streams is None or group.comm.settings.on_delivery is not None
        ):
            group.comm.watch.read()
        group.note_start("reduction")
        source = group.complete_grads()
        # `_take_spare` frees the kept buffer. A group that got its gradient buffer before the last reduction, as the
        # root does at the loss, has not called `_take_spare` since. Where collectives overlap with compute, the buffer
        # stays: the next unit takes it while this reduction is in flight.
        if self.streams is None and not self.overlaps(group):
            self._free_kept()
        owner = self.streams.current() if self.streams is not None else None
        started = None
        # The results have memory of the backward's stream: they become gradients, which users free after work of that
        # stream.
        home = self._home or owner
        with self._on(home):
            results = group.allocate_reduced()
        if owner is not None and home is not None and self.reduce_stream is not None:
            self.reduce_stream.wait_stream(owner)  # the owner has written the gradients
            if home != owner:  # `home` may still use the memory that the results now have
                self.reduce_stream.wait_stream(home)
        with self._on(self.reduce_stream):
            reduced = group.start_reduce(source, *results)
            if self.reduce_stream is not None:
                started = self.reduce_stream.record_event()
        self.in_flight.append(_Reduction(group, reduced, owner, home, started))

    def finish_reduction(self) -> None:
        """Finish the oldest reduction in flight. On an accelerator streams wait, and the host does not."""
        reduction = self.in_flight.pop(0)  # the oldest; all ranks finish in the same order
        group, reduced = reduction.group, reduction.reduced
        try:
            stream = self._wait_until_reduced(reduction)
            # The next unit of equal layout reuses the buffer's tensors, and on the CPU its memory as well.
            buffer = reduced.source
            group.grads.spare.setdefault(buffer.flat.dtype, []).append(buffer)
            self._free_kept()
            if self.streams is None:
                self._kept = buffer
            else:
                buffer.free()
            # Listed before `start_replicate`, which drops the sums while another stream may still read them.
            kept: list[torch.Tensor] = []
            if stream is not None:
                kept = [reduced.part, reduced.shard, reduced.home, *group.unreplicated_sums()]
            with self._on(stream):
                started = group.start_replicate(reduced)
                if started is not None:
                    replicated, work = started
                    if work is not None or self._replicating:  # all ranks deliver in one order
                        self._replicating.append((group, replicated, work))
                        self._deliver(most_in_flight=0 if work is None else _MOST_REPLICATING)
                    else:
                        group.deliver(replicated)
        except RuntimeError as error:  # torch raises it if a collective fails
            self.explain(error)
            raise
        if reduction.result_owner is not None and stream is not None:
            _release(self._reduced, most=1)  # the last all-reduce may overlap with compute
            self._reduced.append(_InUse(kept, reduction.result_owner, stream.record_event()))
            if group.comm.settings.on_delivery is not None and group.comm.replicate_group is None:
                # The optimizer has stepped the unit: gradients of at most one unit exist at a time. The compute stream
                # waits for the step of a shard; it waits for the reduction before it in any case.
                _release(self._reduced)
        self._note_host_copy(stream, [group])

    def _deliver(self, *, most_in_flight: int) -> None:
        """Deliver the oldest all-reduces of replicas until at most so many are in flight."""
        while len(self._replicating) > most_in_flight:
            group, replicated, work = self._replicating.popleft()
            wait_for(work)
            group.deliver(replicated)

    def _wait_until_reduced(self, reduction: _Reduction) -> Stream | None:
        """Let two streams wait for a reduction over shards: the stream that continues, and the gradient buffer's owner.

        The continuing stream runs the all-reduce over replicas and the casts. The owner waits only for the reduction
        over shards, and may then reuse the buffer's memory: the later steps do not read the buffer.

        Returns:
            The stream that continues.
        """
        group, reduced, owner, _, started = reduction
        stream = self.reduce_stream if group.comm.replicate_group is None else self.replica_stream
        with self._on(stream):
            if stream is not None and started is not None:
                stream.wait_event(started)
            reduced.wait()
        if owner is not None and stream is not None and started is not None:
            # A collective with a work object ran on a stream of the library, and `reduced.wait` let ``stream`` wait for
            # it. So the event must be recorded on ``stream``. Otherwise the collective ran on the reduce stream.
            owner.wait_event(started if reduced.work is None else stream.record_event())
        return stream

    def finish_reductions(self) -> None:
        """Finish all reductions in flight. Work on the compute stream after this may read the sharded gradients."""
        while self.in_flight:
            self.finish_reduction()
        self._deliver(most_in_flight=0)
        self._free_kept()
        self._join_streams()

    def drop_reductions(self) -> None:
        """Drop all reductions in flight, after waiting until they no longer use their buffers."""
        dropped, self.in_flight = self.in_flight, []  # before the waits, which raise if a rank is lost
        replicating, self._replicating = self._replicating, deque()
        # Every wait runs, also after a wait that raises. The wait that is added last, the oldest one, runs first.
        with ExitStack() as waits:
            for reduction in reversed(dropped):
                waits.callback(self._drop, reduction)
            for _, _, work in reversed(replicating):
                if work is not None:
                    waits.callback(work.wait)
        self._join_streams()

    def _drop(self, reduction: _Reduction) -> None:
        stream = self._wait_until_reduced(reduction)
        if reduction.result_owner is not None and stream is not None:
            self._reduced.append(
                _InUse(
                    [reduction.reduced.part, reduction.reduced.shard],
                    reduction.result_owner,
                    stream.record_event(),
                )
            )

    def _join_streams(self) -> None:
        """Let the compute stream wait for reductions, and release memory that was kept for other streams."""
        _release(self._reduced)
        _release(self._brought)
        if self.streams is not None and self._home is not None:
            here = self.streams.current()
            if here != self._home:
                here.wait_stream(self._home)

    def run_on(self, stream: Stream | None, work: Callable[[], None]) -> None:
        """Run a user's function on the user's stream; ``stream`` None: on the current stream.

        The function runs after the work that is on the current stream now, and before later work of that stream.
        """
        if self.streams is None or stream is None:
            work()
            return
        here = self.streams.current()
        stream.wait_stream(here)
        with self._on(stream):
            work()
        here.wait_stream(stream)

    # -- flags of used parameters ---------------------------------------------------------------------

    def send_used(self, mesh: DeviceMesh, used: Sequence[bool], device: torch.device) -> UsedFlags:
        """Send flags of used parameters to the ranks of a mesh, on a stream that the compute stream does not wait for.

        This is the gather stream, because the compute stream joins the reduce stream at the end of every backward.
        """
        with self._on(self.gather_stream):
            return UsedFlags(mesh, used, device)

    def read_used(self, flags: UsedFlags) -> list[bool]:
        """Return for each parameter whether any rank has used it; the host waits for the message."""
        with self._on(self.gather_stream):
            return flags.anywhere()

    # -- host -----------------------------------------------------------------------------------------

    def _note_host_copy(self, stream: Stream | None, groups: Sequence[ParamGroup]) -> None:
        """Record an event after a copy from or to the host, for `wait_for_host_copies`."""
        if stream is not None and any(group.is_offloaded for group in groups):
            self._host_copies[stream] = stream.record_event()

    def wait_for_host_copies(self) -> None:
        """Block the host until copies from and to the host end; the host may then write shards and read gradients."""
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
        """Wait until the module has its full parameters."""
        try:
            self._comm.wait(self._groups)
        except RuntimeError as error:  # torch raises it if a collective fails
            self._comm.explain(error)
            raise
        for group in self._groups:
            group.expose()
            for param in group.params:
                param.show_grad()


class GradientReductionHandle:
    """Waits for the reductions in flight, and sets gradients of parameters that other ranks, but not this rank, used.

    Args:
        comm: the context of the reductions.
        messages: messages with the flags of used parameters, and the groups of each message.
        done: called at the end of each wait.
    """

    def __init__(
        self,
        comm: CommContext,
        messages: Sequence[tuple[UsedFlags, list[ParamGroup]]],
        done: Callable[[], None] = lambda: None,
    ) -> None:
        self._comm = comm
        self._done = done
        self._messages = list(messages)

    def wait(self) -> None:
        """Wait for the reductions and messages; the sharded gradients may be read after this."""
        try:
            self._comm.finish_reductions()
            for watch in self._comm.watches.values():
                watch.read()
            while self._messages:
                flags, groups = self._messages.pop(0)  # popped, so that a second wait is a no-op
                flags.wait()
                # On an accelerator, reading blocks the host: only a rank with unused parameters reads the message.
                if self._comm.streams is None or any(group.has_deferred_grads for group in groups):
                    read = iter(self._comm.read_used(flags))
                    for group in groups:
                        used = list(islice(read, len(group.params)))
                        if group.has_deferred_grads:
                            group.apply_deferred_grads(used)
                        # The last flag of each group: whether any rank has found a write through ``.data``.
                        if next(read) and self._comm.streams is None:
                            group.writes.is_compared = True
            self._comm.wait_for_host_copies()
            self._done()
        except RuntimeError as error:  # torch raises it if a collective fails
            self._comm.explain(error)
            raise
