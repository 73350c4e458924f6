"""OrderWatch: whether the ranks of a mesh start the same collectives in the same order.

Ranks that do not (a unit that only some of them run, a switch that only some of them set) mix up the gradients of
different units: wrong values without an error, or an endless wait. So every rank keeps a log of the collectives that it
starts, and a thread next to the training compares a digest of the log, once per backward, in the store in which the
process group met. No communicator is used, and no part of a step waits for it:

    training                         thread                                  store
    note() each gather, reduction
    end_step() where a forward or    digest of the log   -- compare_set -->  step n: digest of the first rank
    a backward ends                  another digest      -- alarm, log  -->  read by the threads of all ranks
    wait_until_compared() before     <- this rank's digest differs: it must not reduce with the first rank
    a reduction
    note() raises                    <- names the first difference

If no collective was started for `BOUND_S`, or one failed, logs of the running step are compared as well. If one log is
the beginning of the other, a rank may only be slow; otherwise the ranks will never meet. Then the thread ends the
collectives that wait in their groups (`break_group`), and all ranks raise.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import xxhash
from torch.distributed.device_mesh import DeviceMesh

from vescale_fsdp.collectives import break_group
from vescale_fsdp.errors import LifecycleError, VescaleError
from vescale_fsdp.torch_private import default_store

if TYPE_CHECKING:
    from vescale_fsdp.runtime.comm.group_comm import GroupComm

BOUND_S = 30.0  # without a start of a collective, until logs of a running step are compared
_ALARMS_PER_BOUND = 4  # how often per bound a rank reads the others' alarms
_SETTLE_S = 0.05  # the longest wait of a first reduction
_FAILED_S = 1.0  # how long a rank whose collective failed waits for the others' logs
_MOST_ENTRIES = 4096  # of a log (forwards without backwards have no end) until it is compared
_MOST_LOGS = 64  # to read when ranks differ
_PARTNERS = 8
_KEPT_KEYS = 64  # steps whose digests stay in the store
_NOTHING = "nothing more"
_log = logging.getLogger(__name__)


def can_watch(group: dist.ProcessGroup) -> bool:
    """Whether its ranks are processes that share a store; torch's groups for tests have no ranks, or threads."""
    return dist.get_backend(group) not in ("fake", "threaded")


class OrderWatch:
    """The log of this rank over one mesh.

    Args:
        mesh: more than one rank.

    Attributes:
        error: raised by all ranks, once ranks have differed.
        over: communicators whose collectives it ends then.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.error: LifecycleError | None = None
        self.over: weakref.WeakSet[GroupComm] = weakref.WeakSet()
        self._ranks: tuple[int, ...] = tuple(mesh.mesh.flatten().tolist())
        self._rank, self._store = dist.get_rank(), default_store()
        self._key = f"vescale_fsdp order {_name_of(self._ranks)}"
        self._entries: list[str] = []
        self._step = 0
        self._logs: dict[int, list[str]] = {0: self._entries}  # of this step and the last ones
        self._last = time.monotonic()  # when a collective was started
        self._has_ended = self._differs = False
        self._is_compared = (
            threading.Event()
        )  # all ended steps are compared with the first rank's logs, if known
        self._is_awaited = False  # by the next reduction
        self._lock = threading.Lock()
        self._shown: tuple[int, int] | None = None  # the last published step, and the length of its log
        _thread.watch(self)

    # -- by the training ------------------------------------------------------------------------------

    def note(self, entry: str) -> None:
        """A collective is about to start.

        Raises:
            LifecycleError: if ranks differ.
        """
        if self.error is not None:
            raise self.error
        self._entries.append(entry)
        self._last = time.monotonic()
        if len(self._entries) >= _MOST_ENTRIES:
            self.end_step()

    def end_step(self, *, then_reduces: bool = False) -> None:
        """A forward or a backward has ended: compare its log while the training continues.

        Args:
            then_reduces: `wait_until_compared` precedes the next reduction.
        """
        self._is_compared.clear()
        self._is_awaited = then_reduces
        step, entries = self._step, self._entries
        self._step, self._entries = step + 1, []
        self._logs[step + 1] = self._entries
        self._logs.pop(step - 2, None)
        self._last = time.monotonic()
        _thread.put(self, step, entries)

    def wait_until_compared(self) -> None:
        """Before a reduction: a rank whose forward differed from the first rank's must not reduce with it.

        The comparison began at the forward's end. The wait is short, so that a slow store does not delay the step.
        """
        if self._is_awaited:
            self._is_awaited = False
            self._is_compared.wait(_SETTLE_S)
            if self._differs:
                self._is_compared.wait(BOUND_S)  # for the logs of others

    def explain(self, failure: RuntimeError) -> None:
        """Find out whether a collective failed because of a different order.

        Raises:
            LifecycleError: if so, on all ranks.
        """
        if isinstance(failure, VescaleError):
            return
        deadline = time.monotonic() + _FAILED_S
        while not self.guarded(self.look, True) and time.monotonic() < deadline:
            time.sleep(0.02)
        if self.error is not None:
            raise self.error from failure

    # -- by the thread --------------------------------------------------------------------------------

    def guarded(self, work: Callable[..., bool], *arguments: Any) -> bool:
        """Run one of the methods below and return its result; True once there can be no more result."""
        if self._has_ended:
            return True
        try:
            with self._lock:
                return work(*arguments)
        except (
            RuntimeError,
            ValueError,
            TypeError,
        ) as error:  # store or groups no longer exist: the job ends
            self._has_ended, self._differs = True, False
            _log.info("The order of collectives is no longer compared between ranks: %s", error)
            return True

    def compared(self) -> None:
        """All ended steps were compared."""
        self._is_compared.set()

    def compare(self, step: int, entries: list[str]) -> bool:
        """Compare the log of a step with the one of the first rank that ended it."""
        digest = xxhash.xxh3_64_hexdigest("\n".join(entries).encode())
        first = self._store.compare_set(f"{self._key} {step}", "", f"{digest} {self._rank}").decode()
        if first.split()[0] != digest:
            self._differs = True
            self._store.compare_set(self._alarm, "", str(step))
        elif first.split()[1] == str(self._rank) and step >= _KEPT_KEYS:
            self._store.delete_key(f"{self._key} {step - _KEPT_KEYS}")
        return self.look()

    def look(self, is_late: bool = False) -> bool:
        """Read the other ranks' alarm; where this rank is late, compare its log with theirs.

        Returns:
            Whether the comparison is complete: ranks differ, or all have published logs that agree.
        """
        if self.error is None and self._store.check([self._alarm]):
            self._conclude(int(self._store.get(self._alarm)))
        if self.error is not None or not (is_late or time.monotonic() - self._last > BOUND_S):
            return self.error is not None
        self._show()
        partners = self._partners()
        logs = self._shown_logs(self._step, partners)
        if any(_differ(logs[self._rank], log) for log in logs.values()):
            self._store.compare_set(self._alarm, "", str(self._step))
            self._conclude(self._step)
        return self.error is not None or len(logs) == len(partners)

    def _partners(self) -> set[int]:
        """The ranks that a late one compares itself with: enough that some rank finds each difference."""
        index, size = self._ranks.index(self._rank), len(self._ranks)
        return {*self._ranks[:_PARTNERS], *(self._ranks[(index + step) % size] for step in range(3))}

    @property
    def _alarm(self) -> str:
        return f"{self._key} alarm"

    def _show(self) -> None:
        """Publish the logs of this step and the last ones."""
        shown = self._step, len(self._entries)
        if self._shown == shown:
            return
        for step, entries in list(self._logs.items()):
            self._store.set(f"{self._key} {step} of {self._rank}", "\n".join([f"{len(entries)}", *entries]))
        self._shown = shown

    def _shown_logs(self, step: int, ranks: Iterable[int]) -> dict[int, list[str]]:
        """The logs of a step by rank: this rank's, and those that these ranks have published."""
        logs = {self._rank: list(self._logs.get(step, ()))}
        for rank in ranks:
            key = f"{self._key} {step} of {rank}"
            if rank != self._rank and self._store.check([key]):
                number, _, text = self._store.get(key).decode().partition("\n")
                logs[rank] = text.split("\n") if int(number) else []
        return logs

    def _conclude(self, step: int) -> None:
        """Ranks differ in this step: set the error, and end collectives that wait."""
        asked = {self._rank, *self._ranks[:_MOST_LOGS]}
        deadline = time.monotonic() + 2 * BOUND_S / _ALARMS_PER_BOUND
        self._show()
        for group in {group for each in self.over for group in each.process_groups()}:
            break_group(group)  # so that ranks that wait for this one compare their logs as well
        while True:
            self._show()
            logs = self._shown_logs(step, asked)
            if len(logs) == len(asked) or time.monotonic() > deadline:
                break
            if _thread.is_stopping:
                return
            time.sleep(0.02)
        self.error = _error(logs, self._ranks)


def _differ(one: list[str], other: list[str]) -> bool:
    """Whether neither log is the beginning of the other."""
    return any(left != right for left, right in zip(one, other, strict=False))


def _error(logs: dict[int, list[str]], ranks: Iterable[int]) -> LifecycleError:
    """The first difference of logs, and the ranks on each side."""
    columns = list(zip_longest(*logs.values(), fillvalue=_NOTHING))
    index = next((index for index, column in enumerate(columns) if len(set(column)) > 1), None)
    sides: dict[str, list[int]] = {}
    if index is not None:
        for rank, entry in zip(logs, columns[index], strict=True):
            sides.setdefault(entry, []).append(rank)
    (expected, here), *others = sorted(sides.items(), key=lambda side: min(side[1])) or [("", [])]
    return LifecycleError(
        "The ranks have started different collectives, or the same ones in another order.",
        expected=f"on all ranks the collective that ranks {sorted(here)[:16]} started: {expected}",
        got="; ".join(f"ranks {sorted(side)[:16]} started: {entry}" for entry, side in others[:4])
        or f"another order on some of ranks {list(ranks)[:16]}, which did not answer",
        where=f"collective {index} of a step",
        todo="run the same units in the same order on every rank, even if a rank does not need their output, set the "
        "same switches of units on all ranks, and restart: gradients of this step are wrong, and the process groups "
        "have ended",
    )


_made: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()


def _name_of(ranks: tuple[int, ...]) -> str:
    """A name for a watch of these ranks, which create their watches in the same order."""
    world = dist.group.WORLD
    assert world is not None
    made = _made.setdefault(world, Counter())
    made[ranks] += 1
    return f"{xxhash.xxh3_64_hexdigest(','.join(map(str, ranks)).encode())} {made[ranks]}"


class _Thread:
    """The thread that compares logs, one for all watches of a process; it ends when there is no watch."""

    def __init__(self) -> None:
        self._watches: weakref.WeakSet[OrderWatch] = weakref.WeakSet()
        self._steps: queue.SimpleQueue[tuple[weakref.ref[OrderWatch], int, list[str]] | None] = (
            queue.SimpleQueue()
        )
        self.is_stopping = False  # the interpreter ends
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def watch(self, watch: OrderWatch) -> None:
        """Add a watch."""
        with self._lock:
            self._watches.add(watch)
            if self._thread is None or not self._thread.is_alive():  # as in a forked child
                self._thread = threading.Thread(target=self._run, name="vescale_fsdp order", daemon=True)
                self._thread.start()

    def put(self, watch: OrderWatch, step: int, entries: list[str]) -> None:
        """Compare a step."""
        self._steps.put((weakref.ref(watch), step, entries))

    def stop(self) -> None:
        """End before the interpreter does."""
        thread = self._thread
        if thread is not None and thread.is_alive():
            self.is_stopping = True
            self._steps.put(None)
            thread.join(timeout=5.0)

    def _run(self) -> None:
        while True:
            try:
                item = self._steps.get(timeout=BOUND_S / _ALARMS_PER_BOUND)
            except queue.Empty:
                if not self._look():
                    return
                continue
            if item is None:
                return
            reference, step, entries = item
            watch = reference()
            if watch is not None:
                watch.guarded(watch.compare, step, entries)
                watch.compared()
            del watch

    def _look(self) -> bool:
        """Let every watch read the others' alarms; False if there is no watch, so that the thread ends."""
        with self._lock:
            watches = list(self._watches)
            if not watches:
                self._thread = None
        for watch in watches:
            watch.guarded(watch.look)
        return bool(watches)


_thread = _Thread()
atexit.register(_thread.stop)
