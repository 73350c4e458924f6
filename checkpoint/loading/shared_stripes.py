"""Stripes that several ranks want: read and proven by one of them, and sent to the others in bounded memory.

    wanted      0: stripes 0 .. 7 of file 0      2: the same                 (replicas of one shard under HSDP)
    read        0: 0 .. 3                        2: 4 .. 7
    wave 0      0 sends stripe 0 to 2            2 sends stripe 4 to 0
    wave 1      0 sends stripe 1 to 2            2 sends stripe 5 to 0       ..

Every rank knows what all want, plans the same waves, and walks them in order. In a wave a rank sends one stripe at
most, to all that want it, and receives a few. Reads go on ahead of the waves.

Whoever cannot read, or cannot take what came, goes on sending and receiving, so that nobody waits for it; a byte behind
each stripe says whether it is good, and what is not reaches no tensor.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice, pairwise
from typing import NamedTuple

import torch

from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator

__all__ = ["SharedStripe", "StripeRun", "exchange_stripes", "plan_shared", "waves_of_stripes"]

_MAX_INCOMING = 8  # stripes that a rank receives in one wave


class StripeRun(NamedTuple):
    """Stripes [first, stop) of the file of a rank that saved."""

    saved_rank: int
    first: int
    stop: int


class SharedStripe(NamedTuple):
    """A stripe that several ranks want, and which of them reads it."""

    saved_rank: int
    number: int
    reader: int
    receivers: tuple[int, ...]


def plan_shared(wanted: Sequence[Iterable[StripeRun]]) -> list[SharedStripe]:
    """The stripes that more than one rank wants; what there is to read is dealt out evenly among those that do.

    Args:
        wanted: by rank, runs of stripes; those of one rank do not overlap.
    """
    edges: dict[int, dict[int, list[tuple[int, bool]]]] = {}
    for rank, runs in enumerate(wanted):
        for run in runs:
            of_file = edges.setdefault(run.saved_rank, {})
            of_file.setdefault(run.first, []).append((rank, True))
            of_file.setdefault(run.stop, []).append((rank, False))
    found: list[SharedStripe] = []
    load: Counter[int] = Counter()
    for saved_rank, of_file in sorted(edges.items()):
        now: set[int] = set()
        places = sorted(of_file)
        for first, stop in pairwise(places):
            now -= {rank for rank, begins in of_file[first] if not begins}
            now |= {rank for rank, begins in of_file[first] if begins}
            if len(now) < 2:
                continue
            at = first
            for place, reader in enumerate(sorted(now, key=lambda rank: (load[rank], rank))):
                count = (stop - first - place + len(now) - 1) // len(now)
                others = tuple(sorted(now - {reader}))
                found += [SharedStripe(saved_rank, at + i, reader, others) for i in range(count)]
                load[reader] += count
                at += count
    return found


def waves_of_stripes(shared: Iterable[SharedStripe]) -> list[list[SharedStripe]]:
    """Stripes in few waves: each rank sends one at most, and receives a bounded number."""
    by_reader: dict[int, list[SharedStripe]] = {}
    for stripe in shared:
        by_reader.setdefault(stripe.reader, []).append(stripe)
    turns = sorted((place, reader) for reader, stripes in by_reader.items() for place in range(len(stripes)))
    waves: list[list[SharedStripe]] = []
    first_free: Counter[int] = Counter()  # wave in which a reader may send
    filling: dict[int, tuple[int, int]] = {}  # wave in which a rank may receive, and how many it does already
    for place, reader in turns:
        stripe = by_reader[reader][place]
        number = first_free[reader]
        for rank in stripe.receivers:
            wave, count = filling.get(rank, (0, 0))
            number = max(number, wave + (count == _MAX_INCOMING))
        for rank in stripe.receivers:
            wave, count = filling.get(rank, (0, 0))
            filling[rank] = (number, count + 1 if number == wave else 1)
        waves.extend([] for _ in range(number + 1 - len(waves)))
        waves[number].append(stripe)
        first_free[reader] = number + 1
    return waves


class _Attempts:
    """Work that may fail; the first error is kept, and nothing more is tried."""

    error: BaseException | None = None

    def do(self, work: Callable[[], object]) -> bool:
        """Whether the work went well."""
        if self.error is None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001  other ranks must not wait: `exchange_stripes` raises it
                self.error = error
        return self.error is None


def exchange_stripes(
    coordinator: Coordinator,
    waves: Sequence[Sequence[SharedStripe]],
    size_of: Callable[[SharedStripe], int],
    read: Callable[[SharedStripe, memoryview], object],
    take: Callable[[SharedStripe, memoryview], object],
    *,
    threads: int,
) -> int:
    """Read this rank's stripes, send them, and take what others send; a collective.

    Args:
        size_of: bytes of a stripe.
        read: fills memory with a stripe, and proves it.
        take: brings a stripe's bytes to where they belong; called for stripes that this rank read, too.
        threads: reads in flight.

    Returns:
        Bytes that this rank has received.

    Raises:
        BaseException: what this rank met, when all waves are done.
    """
    rank, attempts, num_bytes = coordinator.rank, _Attempts(), 0

    def brought(stripe: SharedStripe) -> torch.Tensor:
        room = torch.zeros(size_of(stripe) + 1, dtype=torch.uint8)
        data = memoryview(room.numpy())[:-1]
        room[-1] = attempts.do(lambda: read(stripe, data))
        return room

    own = iter([stripe for wave in waves for stripe in wave if stripe.reader == rank])
    with ThreadPoolExecutor(threads, thread_name_prefix="checkpoint-read") as pool:
        ahead: deque[Future[torch.Tensor]] = deque(
            pool.submit(brought, stripe) for stripe in islice(own, threads)
        )
        for wave in waves:
            outgoing: list[tuple[torch.Tensor, int]] = []
            incoming: list[tuple[torch.Tensor, int]] = []
            come: list[tuple[SharedStripe, torch.Tensor]] = []
            for stripe in wave:
                if stripe.reader == rank:
                    room = ahead.popleft().result()
                    ahead.extend(pool.submit(brought, following) for following in islice(own, 1))
                    outgoing += [(room, receiver) for receiver in stripe.receivers]
                elif rank in stripe.receivers:
                    room = torch.empty(size_of(stripe) + 1, dtype=torch.uint8)
                    incoming.append((room, stripe.reader))
                    num_bytes += len(room) - 1
                else:
                    continue
                come.append((stripe, room))
            coordinator.exchange(outgoing, incoming)
            for stripe, room in come:
                if room[-1]:
                    attempts.do(lambda stripe=stripe, room=room: take(stripe, memoryview(room.numpy())[:-1]))  # type: ignore[misc]
    if attempts.error is not None:
        raise attempts.error
    return num_bytes
