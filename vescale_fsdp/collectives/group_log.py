"""GroupLog: the collectives that this rank has started in one process group, compared with other ranks when one waits.

If ranks start different collectives in a group, the messages of one are received by another. The log is in memory, and
nothing is sent while all ranks make progress. A rank that waits asks for the logs of other ranks:

    rank that waits                     store                          a background thread of each other rank
    publish(), ask()                    this log; "asked"
                                        the other logs            <--  answer(), several times per bound
    difference()                   <--  the first entry in which logs differ

Logs that differ in an entry show that ranks have started different collectives. If one log is the beginning of the
other, a rank may only be late.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import NamedTuple, Protocol

import torch.distributed as dist

from vescale_fsdp.collectives.process_groups import digest_of_ranks
from vescale_fsdp.errors import LifecycleError, sides_of
from vescale_fsdp.torch_private import default_store

_KEPT = 64  # number of entries that a log keeps: ranks that wait are at most a few entries apart
_PARTNERS = (
    8  # a late rank compares its log with this many first ranks of the group, and with the ranks after it
)
_NOTHING = "nothing more"  # shown for a rank whose log is shorter than other ranks' logs


class LogDifference(NamedTuple):
    """The first entry in which logs differ.

    Args:
        where: the number of the entry, in words.
        sides: each variant of the entry with the ranks that have it; the first one has the lowest rank.
    """

    where: str
    sides: list[tuple[str, list[int]]]

    def texts(self) -> list[str]:
        """Return each variant with its ranks as text."""
        return [f"ranks {ranks} started: {entry}" for entry, ranks in self.sides]

    def error(self) -> LifecycleError:
        """Return the error that all ranks raise."""
        first, *others = self.texts()
        return LifecycleError(
            "The ranks have started different collectives, or the same collectives in another order.",
            expected=f"the same collective on all ranks; {first}",
            got="; ".join(others),
            where=self.where,
            todo="call the same functions, and run the same units in the same order, on every rank, even if a rank "
            "does not need the result (print and log it on one rank); set the same switches of units on all ranks. "
            "Restart: the process groups were aborted, and gradients of this step are wrong",
        )


class Watch(Protocol):
    """Compares the order of a sharded model's collectives with other ranks, and can abort them."""

    error: LifecycleError | None

    def follow(self, log: GroupLog, entry: str) -> None:
        """Add a collective that is not the model's, and that all ranks of a group start, to the order."""

    def sound(self, difference: LogDifference) -> None:
        """Abort the model's collectives on all ranks, and let all ranks raise."""

    def explain(self, failure: RuntimeError) -> None:
        """Raise a clearer error than ``failure`` if a collective failed because ranks differ."""


class GroupLog:
    """This rank's log of one process group.

    Args:
        group: a group of more than one rank.

    Attributes:
        ranks: the global ranks of the group, in ascending order.
        key: the beginning of the group's keys in the store, the same on all its ranks.
        count: number of collectives started so far.
        last_s: time of the last start, as ``time.monotonic()``.
        is_in_row: whether the last collective was one of those that meet only once in a row (`dtensor.meeting`).
        watches: watches of models whose mesh has this group. Weak references.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ranks = tuple(sorted(dist.get_process_group_ranks(group)))
        self._rank, self._store = dist.get_rank(), default_store()
        self.key = f"vescale_fsdp group {digest_of_ranks(self.ranks)} {group.group_name}"
        self.count, self.last_s, self.is_in_row = 0, time.monotonic(), False
        self.watches: weakref.WeakSet[Watch] = weakref.WeakSet()
        self._entries: list[str] = []  # the last ones
        self._lock = threading.Lock()  # the thread of a watch reads the entries
        self._published = -1  # the count that was published last
        # Ranks whose logs have all entries of this one at this count, and the same ones: they need not be read again.
        self._agreed: tuple[int, frozenset[int]] = (-1, frozenset())

    # -- written where collectives start ---------------------------------------------------------------

    def add(self, entry: str) -> None:
        """Add the collective that is about to start."""
        self.is_in_row = False
        with self._lock:
            self.count, self.last_s = self.count + 1, time.monotonic()
            self._entries.append(entry)
            if len(self._entries) > 2 * _KEPT:
                del self._entries[:-_KEPT]

    def start(self, entry: str, *, is_in_row: bool = False) -> None:
        """Add a collective that is not a sharded model's own, and that is about to start.

        Args:
            entry: the collective.
            is_in_row: the attribute from now on.

        Raises:
            LifecycleError: if a watch has found that ranks differ.
        """
        self.check()
        self.add(entry)
        self.is_in_row = is_in_row
        self.follow(entry)

    def follow(self, entry: str) -> None:
        """Add a collective that all ranks start to the order of the models."""
        for watch in self.watches:
            watch.follow(self, entry)

    def check(self) -> None:
        """Raise the error of a watch that has found that ranks differ."""
        for watch in self.watches:
            if watch.error is not None:
                raise watch.error

    def amend(self, entry: str) -> None:
        """Replace the last entry, on all ranks: its collective was refused before anything was sent."""
        with self._lock:
            self._entries[-1], self._agreed = entry, (-1, frozenset())
            is_published, self._published = self._published == self.count, -1
        if is_published:
            self.publish()

    def explain(self, failure: RuntimeError) -> None:
        """Raise a clearer error than ``failure``, if a watch has one."""
        for watch in self.watches:
            watch.explain(failure)

    # -- compared where a rank waits -------------------------------------------------------------------

    def publish(self) -> None:
        """Let other ranks read this log; a no-op if it has not changed."""
        with self._lock:
            count, entries = self.count, self._entries[-_KEPT:]
        if count != self._published:
            self._published = count
            # The counts come first, because an empty log would otherwise be read as one empty entry.
            self._store.set(self._key_of(self._rank), "\n".join([f"{count} {len(entries)}", *entries]))

    def ask(self) -> None:
        """Ask the other ranks to publish their logs."""
        self._store.set(f"{self.key} asked", "")

    def answer(self) -> None:
        """Publish this log if another rank has asked for it."""
        if self._store.check([f"{self.key} asked"]):
            self.publish()

    def partners(self) -> set[int]:
        """Return the ranks with which this rank compares its log if it is late.

        Each rank reads only the logs of the first ranks and of the ranks after it, to limit the load on the store.
        Since all ranks do this, at least one rank sees each difference.
        """
        index, size = self.ranks.index(self._rank), len(self.ranks)
        return {*self.ranks[:_PARTNERS], *(self.ranks[(index + step) % size] for step in range(3))} - {
            self._rank
        }

    def difference(self, ranks: Iterable[int]) -> tuple[LogDifference | None, bool]:
        """Compare this log with the published logs of other ranks.

        A rank that is idle for long compares often: it reads a log again only if that may show something new.

        Returns:
            The first difference, or None; and whether all these ranks have published a log.
        """
        with self._lock:
            own_count, own_entries = self.count, self._entries[-_KEPT:]
            agreed = self._agreed[1] if self._agreed[0] == own_count else frozenset()
        logs = {self._rank: (own_count, own_entries)}
        is_complete, ranks = True, tuple(ranks)
        for rank in ranks:
            if rank in agreed:
                continue
            if not self._store.check([self._key_of(rank)]):
                is_complete = False
                continue
            head, *entries = self._store.get(self._key_of(rank)).decode().split("\n")
            count, num_entries = map(int, head.split())
            logs[rank] = count, entries[:num_entries]
        first = max(count - len(entries) for count, entries in logs.values())  # the first entry that all have
        aligned = {rank: entries[first - count + len(entries) :] for rank, (count, entries) in logs.items()}
        own = aligned[self._rank]
        if all(left == right for log in aligned.values() for left, right in zip(own, log, strict=False)):
            with self._lock:
                if own_entries == self._entries[-_KEPT:]:  # not amended meanwhile
                    as_long = {rank for rank, (count, _) in logs.items() if count >= own_count}
                    self._agreed = own_count, agreed | as_long
            return None, is_complete
        if agreed:
            with self._lock:
                self._agreed = -1, frozenset()
            return self.difference(ranks)  # of all ranks, so that the difference names them all
        where = f"entry {{}} of the last {len(own)} collectives of a process group"
        return first_difference(aligned, self.ranks, where), True

    def _key_of(self, rank: int) -> str:  # the store's key of a rank's log
        return f"{self.key} log of {rank}"


def first_difference(logs: Mapping[int, list[str]], ranks: Iterable[int], where: str) -> LogDifference:
    """Return the first difference of logs.

    Args:
        logs: the logs at hand, by rank.
        ranks: the ranks whose logs are compared.
        where: what the number of an entry counts, for `LogDifference`.
    """
    columns = list(zip_longest(*logs.values(), fillvalue=_NOTHING))
    index = next((index for index, column in enumerate(columns) if len(set(column)) > 1), None)
    if index is not None:
        entries = dict(zip(logs, columns[index], strict=True))
    else:  # the logs at hand do not differ
        entries = dict.fromkeys(
            ranks, "another order on some of these ranks, which have not published their logs"
        )
    return LogDifference(where.format(index), sides_of(entries))


# Backends that imitate ranks which do not exist.
WITHOUT_RANKS = frozenset({"fake"})
_logs: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupLog] = weakref.WeakKeyDictionary()


def log_of(group: dist.ProcessGroup) -> GroupLog | None:
    """Return the log of a group; None for a group of one rank, and for groups whose other ranks do not exist."""
    log = _logs.get(group)
    if log is None and group.size() > 1 and dist.get_backend(group) not in WITHOUT_RANKS:
        log = _logs[group] = GroupLog(group)
    return log
