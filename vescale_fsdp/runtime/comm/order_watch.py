"""OrderWatch: checks that the ranks of a mesh start the same collectives in the same order.

If only some ranks run a unit, or change a setting, a collective of one unit meets a collective of another unit: then
gradients are wrong without an error, or the job hangs. So every rank keeps a log of the collectives that it starts, and
compares a digest of the log with other ranks once per backward, by one MAX of (digest, ~digest): all digests are equal
if the largest one is also the smallest. The message is sent when the backward begins, with all facts that decide which
collectives this backward starts, and is read before an optimizer step can use the reduced gradients:

    on the CPU            before the first reduction; the message has its own tag, and meets no other collective
    on an accelerator     when the host has queued the backward. The message is on the gather stream, behind the gathers
                          of the forward, so the host waits until the device has begun this backward, and not longer
    steps in backward     before the first reduction

The process group's store is used only if digests differ, or if a rank waits: to find the first difference and the ranks
on each side.

    training                              thread                              store
    note() each gather, reduction
    compare() where a backward begins
    read(): digests differ                                                    <-  the log of each rank
    note(), read() raise                                                      ->  the first difference
    a rank starts no collective           look(): logs of its groups          <-> compared with other ranks' logs

A step that does not end is compared by the logs of the process groups (`GroupLog`), which contain operators on sharded
tensors too: if no collective was started for half of `BOUND_S`, if a collective failed, or if a rank waits for others
in an operator. If one log is the beginning of the other, one rank may only be slow. Otherwise the ranks are in a
deadlock: the thread aborts their process groups (`break_group`), so pending collectives fail and all ranks raise.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from vescale_fsdp.collectives.group_log import GroupLog, LogDifference, first_difference, log_of
from vescale_fsdp.collectives.operations import max_apart
from vescale_fsdp.collectives.process_groups import (
    break_group,
    closed_peers,
    ended_peers,
    numbered_name,
)
from vescale_fsdp.collectives.slice_exchange import Work, wait_for
from vescale_fsdp.devices import ACCELERATORS
from vescale_fsdp.errors import LifecycleError, VescaleError
from vescale_fsdp.runtime.comm.streams import Event, Stream
from vescale_fsdp.torch_modes import is_fake, outside_modes
from vescale_fsdp.torch_private import default_store

if TYPE_CHECKING:
    from vescale_fsdp.runtime.comm.group_comm import GroupComm

# Seconds within which all ranks raise after they have started different collectives. A rank that has started none for
# half of this time compares its log with other ranks; half of it is far longer than the pauses of a slow step.
BOUND_S = 30.0
# How many times per BOUND_S an idle rank looks whether another rank asks for its log, or has found a difference.
_LOOKS_PER_BOUND = 8
_FAILED_S = 1.0  # seconds for which a rank whose collective failed waits for other ranks' logs
_LOST_S = 0.3  # seconds of this wait if a rank has probably ended, because that rank publishes no log
_ANSWER_S = 1.0  # seconds that the store may take to answer after this wait
# A log of this length is compared at the end of a forward, because forwards without gradients have no backward.
_MOST_ENTRIES = 4096
_MOST_LOGS = 64  # most ranks whose logs are read for an error message, to bound the load on the store
_log = logging.getLogger(__name__)


class _Message(NamedTuple):
    """A comparison of digests in flight."""

    step: int
    values: torch.Tensor  # int64 [2] on the host: the largest digest, and the complement of the smallest
    work: Work | None  # on the CPU
    event: Event | None  # on an accelerator, after the copy to the host


class OrderWatch:
    """This rank's log of collectives over one mesh, and its comparison with the logs of other ranks.

    Args:
        mesh: a mesh of more than one rank.
        device: the device of its collectives.

    Attributes:
        error: the error that the next `note` raises; None as long as no difference was found.
        over: the `GroupComm`s over this mesh, whose process groups are aborted once logs differ. Weak references, so
            that the watch does not keep old models alive.
    """

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        self.error: LifecycleError | None = None
        self._mesh, self._device = mesh, device
        self.over: weakref.WeakSet[GroupComm] = weakref.WeakSet()
        self._ranks: tuple[int, ...] = tuple(mesh.mesh.flatten().tolist())
        self._rank, self._store = dist.get_rank(), default_store()
        # The key is the same on all ranks, because all ranks create their watches in the same order.
        self._key = numbered_name("order", self._ranks)
        # Operators on parameters communicate over these groups too.
        self._group_logs = [log for log in map(log_of, mesh.get_all_groups()) if log is not None]
        for log in self._group_logs:
            log.watches.add(self)
        self._entries: list[str] = []
        self._step = 0
        self._logs: dict[int, list[str]] = {0: self._entries}  # step -> log; this step and the two before
        self._digest = hashlib.blake2b(digest_size=8)  # of all entries before this step
        self._message: _Message | None = None
        self._last = time.monotonic()  # time of the last start of a collective
        self._has_ended = False
        self._lock = threading.Lock()  # held while the store is used, by the thread or by training
        self._is_concluding = False  # whether `_conclude` waits for other ranks' logs
        self._silent: list[int] = []  # ranks that have shown no sign since a collective failed
        _thread.watch(self)

    # -- called by the training -----------------------------------------------------------------------

    def note(self, entry: str) -> None:
        """Add the collective that is about to start to the log.

        Raises:
            LifecycleError: if the logs of ranks differ.
        """
        if self.error is not None:
            raise self.error
        for log in self._group_logs:
            log.add(entry)
        self._append(entry)

    def follow(self, log: GroupLog, entry: str) -> None:
        """Add an operator, which all ranks of a group run, to this log, if the group has all ranks of the mesh."""
        if len(self._group_logs) == 1:  # otherwise one of several replicas may run the operator alone
            self._append(entry)

    def _append(self, entry: str) -> None:
        self._entries.append(entry)
        self._last = time.monotonic()

    @property
    def is_full(self) -> bool:
        """Whether the log is so long that it must be compared, without a backward."""
        return len(self._entries) >= _MOST_ENTRIES

    def compare(self, stream: Stream | None) -> None:
        """End a step, and start to compare its log with other ranks; `read` must follow. A collective of the mesh.

        Args:
            stream: the current stream, on which the message runs; None on the CPU.
        """
        self.read()
        self._digest.update("\n".join([*self._entries, ""]).encode())
        step, self._step, self._entries = self._step, self._step + 1, []
        self._logs[step + 1] = self._entries
        self._logs.pop(step - 2, None)  # a difference is found within two steps
        digest = int.from_bytes(self._digest.digest(), "big", signed=True)
        with outside_modes():  # a backward under torch.func must not wrap these tensors
            # On an accelerator the host does not wait for the copies, because its memory is pinned.
            pins = self._device.type != "cpu" and self._device.type in ACCELERATORS
            host = torch.tensor([digest, ~digest], dtype=torch.int64, device="cpu", pin_memory=pins)
            if is_fake(host):  # without values there is nothing to compare
                return
            values = host.to(self._device, non_blocking=True)
            work: Work | None = None
            for axis in range(self._mesh.ndim):
                # MAX over one axis after another yields MAX over the whole mesh.
                if self._mesh.size(axis) > 1:
                    wait_for(work)
                    work = max_apart(values, self._mesh.get_group(axis))
            if values is not host:
                host.copy_(values, non_blocking=True)
        self._message = _Message(step, host, work, stream.record_event() if stream is not None else None)

    def read(self) -> None:
        """Wait for the comparison in flight; a no-op if there is none.

        Raises:
            LifecycleError: on all ranks, if their logs differ.
        """
        if self._message is None:
            return
        message, self._message = self._message, None
        try:
            wait_for(message.work)
            if message.event is not None:
                message.event.synchronize()
        except RuntimeError as failure:  # a rank was lost, or has aborted the groups because logs differ
            self.explain(failure)
            raise
        high, complement = message.values.tolist()
        if high != ~complement:
            self.guarded(self._sound, message.step)
            if self.error is None:  # the store no longer exists
                raise first_difference({}, self._ranks, f"step {message.step}").error()
            raise self.error

    def explain(self, failure: RuntimeError) -> None:
        """Raise a clearer error than ``failure`` for a collective that failed; a no-op if no clearer error is known.

        Raises:
            LifecycleError: on all ranks, with the first difference, if ranks started different collectives; with the
                ranks that do not answer, if some have ended or cannot be reached.
        """
        if isinstance(failure, VescaleError):  # an error of this package needs no explanation
            return
        groups = {group for each in self.over for group in each.process_groups()}
        of_gloo = [group for group in groups if dist.get_backend(group) == "gloo"]
        # gloo's errors have no class of their own, but a collective that fails leaves connections closed.
        is_collective = isinstance(failure, dist.DistError) or any(map(closed_peers, of_gloo))
        wait_s = _LOST_S if any(map(ended_peers, of_gloo)) else _FAILED_S
        ranks = sorted({rank for group in groups for rank in dist.get_process_group_ranks(group)})
        # In a thread, because a store on a machine that cannot be reached answers after minutes, or never.
        looking = threading.Thread(
            target=self._look_late,
            args=(wait_s, ranks[:_MOST_LOGS] if is_collective else ()),
            name="vescale_fsdp explain",
            daemon=True,
        )
        looking.start()
        looking.join(wait_s + _ANSWER_S)
        if self._is_concluding:
            looking.join()  # bounded by `_conclude`
        if self.error is not None:
            raise self.error from failure
        if not is_collective:  # such as too little memory on this rank
            return
        missing = f"ranks {self._silent}" if self._silent else ""
        if looking.is_alive() or (self._has_ended and not missing):
            missing = "the process group's store, which rank 0 or its launcher hosts"
        if missing:
            raise LifecycleError(
                "A collective failed, and not all ranks report it.",
                expected=f"a report from every rank of the collective within {wait_s:g} s",
                got=f"none from {missing}; the collective's error: {failure}",
                where=f"rank {self._rank}",
                todo="look at the logs of those ranks: they have ended, cannot be reached, or have not met the failure "
                "yet. Look at their machines and the network, and restart from the last saved step",
            ) from failure

    def _look_late(self, wait_s: float, ranks: Sequence[int]) -> None:
        """Compare the logs that ranks publish in time; record which of ``ranks`` have reported no failure."""
        deadline = time.monotonic() + wait_s
        is_complete = self.guarded(self.look, True)
        # Report to other ranks that a collective failed on this rank.
        self.guarded(self._store.set, f"{self._key} failed on {self._rank}", "")
        while not is_complete and time.monotonic() < deadline:
            time.sleep(0.02)  # much shorter than the limits, yet little load on the store
            is_complete = self.guarded(self.look, True)
        self.guarded(self._find_silent, ranks)

    def _find_silent(self, ranks: Sequence[int]) -> None:
        """Record which of ``ranks`` have not reported a failure."""
        self._silent = [rank for rank in ranks if not self._store.check([f"{self._key} failed on {rank}"])]

    # -- called by the thread -------------------------------------------------------------------------

    def guarded(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Run a function that uses the store and return its result; True if the store no longer exists."""
        if self._has_ended:
            return True
        try:
            with self._lock:
                return work(*arguments)
        except (RuntimeError, ValueError, TypeError) as error:
            # torch raises these once the store or the groups are destroyed, at the end of the job.
            self._has_ended = True
            _log.info("The order of collectives is no longer compared between ranks: %s", error)
            return True

    @property
    def idle_s(self) -> float:
        """Seconds since this rank has started a collective."""
        return time.monotonic() - max([self._last, *(log.last_s for log in self._group_logs)])

    def look(self, is_late: bool = False) -> bool:
        """Check whether another rank has found a difference. If this rank is late, compare the running step's logs too.

        Args:
            is_late: whether this rank counts as late because its collective failed. Any rank is late if it has started
                no collective for half of `BOUND_S`.

        Returns:
            Whether the comparison is complete: ranks differ, or all partners have published logs that agree.
        """
        if self.error is None and self._store.check([self._alarm]):
            self._conclude()
        if self.error is not None or not (is_late or self.idle_s > BOUND_S / 2):
            return self.error is not None
        is_complete = True
        for log in self._group_logs:
            log.publish()
            difference, has_all = log.difference(log.partners())
            if difference is not None:
                return self._sound(difference)
            is_complete = is_complete and has_all
        return is_complete

    def answer(self) -> None:
        """Publish the logs of the groups if a rank that waits has asked for them."""
        for log in self._group_logs:
            log.answer()

    def sound(self, difference: LogDifference) -> None:
        """Abort the process groups of all ranks, and let all ranks raise; for a rank that waits in an operator."""
        self.guarded(self._sound, difference)

    def _sound(self, difference: LogDifference | int) -> bool:
        """Raise the alarm for a difference, or for a step in which logs differ."""
        self._store.compare_set(self._alarm, "", json.dumps(difference))  # keeps an earlier alarm
        if self.error is None:
            self._conclude()
        return True

    @property
    def _alarm(self) -> str:  # the store's key of the first step in which ranks differ, or of a difference
        return f"{self._key} alarm"

    def _show(self) -> None:
        """Publish the logs of this step and of the two steps before it."""
        for step, entries in list(self._logs.items()):  # a copy: training may end a step meanwhile
            # The length comes first, because an empty log would otherwise be read as one empty entry.
            self._store.set(f"{self._key} {step} of {self._rank}", "\n".join([f"{len(entries)}", *entries]))

    def _shown_logs(self, step: int, ranks: Iterable[int]) -> dict[int, list[str]]:
        """Return the logs of a step by rank: this rank's log, and the logs that the given ranks have published."""
        logs = {self._rank: list(self._logs.get(step, ()))}
        for rank in ranks:
            key = f"{self._key} {step} of {rank}"
            if rank != self._rank and self._store.check([key]):
                number, _, text = self._store.get(key).decode().partition("\n")
                logs[rank] = text.split("\n") if int(number) else []
        return logs

    def _conclude(self) -> None:
        """Abort the process groups, and set the error; called once there is an alarm."""
        sources = {self._rank, *self._ranks[:_MOST_LOGS]}
        # Twice the period with which idle ranks read the alarm: by then every rank has published its logs.
        deadline = time.monotonic() + 2 * BOUND_S / _LOOKS_PER_BOUND
        self._is_concluding = True
        for group in {group for each in self.over for group in each.process_groups()}:
            break_group(group)  # ranks that wait for this rank then fail, and publish their logs too
        self._show()
        self._store.set(f"{self._key} heard by {self._rank}", "")
        # This rank may host the store, which must last until the other ranks have read the alarm.
        while not self._store.check([f"{self._key} heard by {rank}" for rank in sources]):
            if time.monotonic() > deadline:
                break
            if _thread.is_stopping:  # the interpreter exits, and `stop` waits for this thread
                return
            time.sleep(0.02)  # so that reading puts little load on the store
        alarm = self._store.get(self._alarm).decode()
        if alarm.isdecimal():
            logs = self._shown_logs(int(alarm), sources)
            difference = first_difference(logs, self._ranks, "collective {} of a step")
        else:
            difference = LogDifference(*json.loads(alarm))
        self.error = difference.error()
        self._is_concluding = False


class _Thread:
    """The one thread of a process that looks for differences while a rank is idle; it ends with the last watch."""

    def __init__(self) -> None:
        self._watches: weakref.WeakSet[OrderWatch] = weakref.WeakSet()
        self._changed = threading.Event()  # ends a pause early
        self.is_stopping = False  # whether the interpreter is about to exit
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def watch(self, watch: OrderWatch) -> None:
        """Add a watch, and start the thread if it does not run."""
        with self._lock:
            self._watches.add(watch)
            self._changed.set()
            if self._thread is None or not self._thread.is_alive():  # not alive in a forked child process
                # A daemon, because Python waits for threads that are not daemons before `atexit` runs `stop`.
                self._thread = threading.Thread(target=self._run, name="vescale_fsdp order", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """End the thread before the interpreter exits, because it could use modules that no longer exist."""
        thread = self._thread
        if thread is not None and thread.is_alive():
            self.is_stopping = True
            self._changed.set()
            thread.join(timeout=5.0)  # bounded, because the thread may be waiting for the store

    def _run(self) -> None:
        while not self.is_stopping:
            self._changed.clear()
            pause_s = BOUND_S / _LOOKS_PER_BOUND
            if not self._changed.wait(pause_s) and not self._look(pause_s):
                return

    def _look(self, idle_s: float) -> bool:
        """Let the watches of an idle rank check for differences. A rank that starts collectives does not use the store.

        Returns:
            Whether a watch is left. Without one, the thread ends.
        """
        with self._lock:
            watches = list(self._watches)
            if not watches:
                self._thread = None  # so that `watch` starts a new thread
        for watch in watches:
            if watch.idle_s > idle_s:
                watch.guarded(watch.answer)
                watch.guarded(watch.look)
        return bool(watches)


_thread = _Thread()
atexit.register(_thread.stop)
