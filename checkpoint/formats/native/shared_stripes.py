"""Stripes that several ranks want: read and proven by one of them, and sent to the others in bounded memory.

    wanted      0: stripes 0 .. 15 of file 0     2: the same                 (replicas of one shard under HSDP)
    read        0: 0 .. 7                        2: 8 .. 15
    wave 0      0 sends 0 .. 3 to 2              2 sends 8 .. 11 to 0
    wave 1      0 sends 4 .. 7 to 2              2 sends 12 .. 15 to 0

Every rank knows what all want, plans the same waves, and walks them in order. In a wave a rank sends one *turn* at
most, a few stripes in a row that are one read, to all that want them, and receives a few. Reads go on ahead of the
waves.

Whoever cannot read, or cannot take what came, goes on sending and receiving, so that nobody waits for it; a byte behind
each turn says whether it is good, and what is not reaches no tensor.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice, pairwise
from typing import NamedTuple

import torch

from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator
from vescale_fsdp.checkpoint.ranks.first_error import FirstError

_MAX_INCOMING = 8  # turns that a rank receives in one wave


class StripeRun(NamedTuple):
    """Stripes [first, stop) of the file of a rank that saved."""

    saved_rank: int
    first: int
    stop: int


class SharedStripes(NamedTuple):
    """Stripes [first, stop) that several ranks want, and which of them reads them."""

    saved_rank: int
    first: int
    stop: int
    reader: int
    receivers: tuple[int, ...]


def plan_shared(wanted: Sequence[Iterable[StripeRun]], max_stripes: int) -> list[SharedStripes]:
    """The stripes that more than one rank wants; what there is to read is dealt out evenly among those that do.

    Args:
        wanted: by rank, runs of stripes; those of one rank do not overlap.
        max_stripes: how many are read and sent at once.
    """
    edges: dict[int, dict[int, list[tuple[int, bool]]]] = {}
    for rank, runs in enumerate(wanted):
        for run in runs:
            of_file = edges.setdefault(run.saved_rank, {})
            of_file.setdefault(run.first, []).append((rank, True))
            of_file.setdefault(run.stop, []).append((rank, False))
    found: list[SharedStripes] = []
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
                load[reader] += count
                for start in range(at, at + count, max_stripes):
                    end = min(start + max_stripes, at + count)
                    found.append(SharedStripes(saved_rank, start, end, reader, others))
                at += count
    return found


def waves_of_stripes(shared: Iterable[SharedStripes]) -> list[list[SharedStripes]]:
    """Turns in few waves: each rank sends one at most, and receives a bounded number."""
    by_reader: dict[int, list[SharedStripes]] = {}
    for turn in shared:
        by_reader.setdefault(turn.reader, []).append(turn)
    turns = sorted((place, reader) for reader, found in by_reader.items() for place in range(len(found)))
    waves: list[list[SharedStripes]] = []
    first_free: Counter[int] = Counter()  # wave in which a reader may send
    filling: dict[int, tuple[int, int]] = {}  # wave in which a rank may receive, and how many it does already
    for place, reader in turns:
        turn = by_reader[reader][place]
        number = first_free[reader]
        for rank in turn.receivers:
            wave, count = filling.get(rank, (0, 0))
            number = max(number, wave + (count == _MAX_INCOMING))
        for rank in turn.receivers:
            wave, count = filling.get(rank, (0, 0))
            filling[rank] = (number, count + 1 if number == wave else 1)
        waves.extend([] for _ in range(number + 1 - len(waves)))
        waves[number].append(turn)
        first_free[reader] = number + 1
    return waves


def exchange_stripes(
    coordinator: Coordinator,
    waves: Sequence[Sequence[SharedStripes]],
    size_of: Callable[[SharedStripes], int],
    read: Callable[[SharedStripes, memoryview], object],
    take: Callable[[SharedStripes, memoryview], object],
    *,
    threads: int,
) -> int:
    """Read this rank's stripes, send them, and take what others send; a collective.

    Args:
        size_of: bytes of a turn.
        read: fills memory with a turn's stripes, and proves them.
        take: brings a turn's bytes to where they belong; called for those that this rank read, too.
        threads: reads in flight.

    Returns:
        Bytes that this rank has received.

    Raises:
        BaseException: what this rank met, when all waves are done.
    """
    rank, errors, num_bytes = coordinator.rank, FirstError(), 0

    def brought(turn: SharedStripes) -> torch.Tensor:
        room = torch.zeros(size_of(turn) + 1, dtype=torch.uint8, device="cpu")
        errors.attempt(lambda: read(turn, _data_in(room)))
        room[-1] = errors.error is None
        return room

    own = iter([turn for wave in waves for turn in wave if turn.reader == rank])
    with ThreadPoolExecutor(threads, thread_name_prefix="checkpoint-read") as pool:
        ahead: deque[Future[torch.Tensor]] = deque(
            pool.submit(brought, turn) for turn in islice(own, threads)
        )
        for wave in waves:
            outgoing: list[tuple[torch.Tensor, int]] = []
            incoming: list[tuple[torch.Tensor, int]] = []
            come: list[tuple[SharedStripes, torch.Tensor]] = []
            for turn in wave:
                if turn.reader == rank:
                    room = ahead.popleft().result()
                    ahead.extend(pool.submit(brought, following) for following in islice(own, 1))
                    outgoing += [(room, receiver) for receiver in turn.receivers]
                elif rank in turn.receivers:
                    room = torch.empty(size_of(turn) + 1, dtype=torch.uint8, device="cpu")
                    incoming.append((room, turn.reader))
                    num_bytes += len(room) - 1
                else:
                    continue
                come.append((turn, room))
            coordinator.exchange(outgoing, incoming)
            for turn, room in come:
                if room[-1]:
                    errors.attempt(partial(take, turn, _data_in(room)))
    errors.raise_kept()
    return num_bytes


def _data_in(room: torch.Tensor) -> memoryview:
    """A turn's bytes, without the one behind them."""
    return room.numpy().data.cast("B")[:-1]
