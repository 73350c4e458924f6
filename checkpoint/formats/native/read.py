"""Reading ranges of many files: coalesced, in parallel, with bounded memory, every stripe verified.

`ReadPlan` collects sinks for each file and cuts them into jobs of at most 16 MiB, which cover whole stripes where
checksums are compared. A job is verified, taken, or both:

    verify     hash the bytes in the page cache, mapped, without a copy (on a local disk)
    take       positional reads that scatter straight into the tensors. Copied from a buffer instead: strided parts,
               parts on a device, and all of a *far* job, which comes over a network: one request for the job and its
               small gaps costs less than one request for each part

``verify="before"`` verifies all jobs, then takes them. "while" takes a stripe in slices that stay in a core's cache,
and hashes each slice after its read; it verifies each stripe of a far job before the copy. Far jobs are read by more
threads than there are cores, since a thread mostly waits.

Bytes that are not in the page cache are read from the disk through the cache, also by more threads, each of which
reads a part of its own from front to back. Measured with 3 GiB, 2 ranks and 2 cores on a virtual disk (ext4,
alternating with two readers per rank that only read, 1.94 s): 2.09 s, and 2.18 s with checksums. With threads that
take turns along the files: 2.39 s and 2.39 s, since the kernel's read-ahead serves one reader, or several far apart.
With direct reads into buffers and copies from there: 2.80 s and 2.83 s, since a request in flight delays those behind
it, and the copy costs processor time that the cache would have saved.

Alternatives considered for "while": to hash mapped pages and read them afterward, stripe by stripe, so that no
damaged stripe reaches a tensor. The kernel's copy then fetches the pages from memory a second time: 0.58 of an
unverified read against 0.84 (CPU time of 512 MiB into 4 KiB pages, Linux 6.18). That is no better than "before", which
leaves *all* tensors unchanged; a state that a failed load has filled in part is lost in any case. To copy from mapped
pages, or through a buffer that stays in the cache: 0.62 and 0.65, since only the kernel's copy is fast into small
pages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import groupby, islice, pairwise, takewhile, zip_longest
from operator import attrgetter, itemgetter
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from vescale_fsdp.checkpoint.formats.native.open_rank_file import OpenRankFile
from vescale_fsdp.checkpoint.formats.native.targets import Bytes, LoadTarget, Sink, sinks_of
from vescale_fsdp.checkpoint.manifest.rank_file import RankFile, ShareFinder
from vescale_fsdp.checkpoint.manifest.region import Region
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator
from vescale_fsdp.checkpoint.ranks.exchange import exchange, waves_of
from vescale_fsdp.checkpoint.ranks.first_error import FirstError
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.checksums import RunningChecksum, checksum_of
from vescale_fsdp.checkpoint.storage.progress import Meter
from vescale_fsdp.layout.geometry import round_up

T = TypeVar("T")

_JOB_BYTES = 16 << 20  # 16 MiB: reads of 256 KiB take 1.4 times the CPU time
_TURN_BYTES = 4 << 20  # 4 MiB: one read for several ranks
_MAX_INCOMING = 8  # turns that a rank receives in one wave; 32 MiB of buffers each wave
_SLICE_BYTES = 512 << 10  # 512 KiB: with its source, half of a core's cache
_start_of = attrgetter("start")


class _FileRun(NamedTuple):
    """A contiguous range of a file, from byte ``start`` on, that is read into several buffers in order."""

    start: int
    memories: list[Bytes]


class _ReadJob(NamedTuple):
    """Bytes [start, stop) of a file, and the sinks that need some of them, sorted by start."""

    file: OpenRankFile
    start: int
    stop: int
    sinks: Sequence[Sink]

    @property
    def size_bytes(self) -> int:
        """Bytes of the job."""
        return self.stop - self.start

    @property
    def is_far(self) -> bool:
        """Whether the bytes are read by one request, and copied."""
        return not self.file.reader.looks_in_place

    def view(self) -> Bytes:
        """The bytes: mapped from the page cache, or read into a buffer."""
        return np.frombuffer(self.file.view(self.start, self.stop), dtype=np.uint8)

    def verify(self) -> int:
        """Compare checksums; returns the number of bytes read. Needs a job of whole stripes."""
        self.verify_data(self.view())
        return self.size_bytes

    def verify_data(self, data: Bytes) -> None:
        """Compare checksums of the job's bytes in memory."""
        for index, start, stop in self._stripes():
            self.file.verify_stripe(index, checksum_of(data[start:stop].data))

    def take(self) -> int:
        """Read the bytes into the sinks, unverified; returns the number of bytes read."""
        runs, rest = self._scattered()
        if self.is_far and len(runs) + len(rest) > 1:  # one request instead of one for each part
            _deliver(self.start, self.stop, self.view(), self.sinks)
            return self.size_bytes
        for start, memories in runs:
            self.file.read_at(start, memories)
        if rest:
            _deliver(self.start, self.stop, self.view(), rest)
        return sum(len(memory) for _, memories in runs for memory in memories) + sum(
            last - first for first, last in map(self._part, rest)
        )

    def take_verified(self) -> int:
        """Verify and deliver; returns the number of bytes read. Needs a job of whole stripes.

        Buffered bytes are verified before they are copied; bytes that are read straight into tensors, afterward.
        """
        if self.is_far:
            data = self.view()
            self.verify_data(data)
            _deliver(self.start, self.stop, data, self.sinks)
            return self.size_bytes
        walk = _Walk(self.sinks)
        for index, start, stop in self._stripes():
            first, end = self.start + start, self.start + stop
            stripe = _ReadJob(self.file, first, end, walk.within(first, end))
            runs, rest = stripe._scattered()
            if rest:  # mapped from the page cache: cheap to read twice
                stripe.verify()
                stripe.take()
            else:
                self.file.verify_stripe(index, stripe._read_and_hash(runs))
        return self.size_bytes

    def _read_and_hash(self, runs: Sequence[_FileRun]) -> int:
        """Read runs, slice by slice; returns the checksum of all the job's bytes, the gaps between runs included."""
        digest, done = RunningChecksum(), self.start
        unwanted: Bytes | None = None
        # The empty last run makes the loop hash the gap after the others.
        for start, memories in [*runs, _FileRun(self.stop, [])]:
            if done < start:
                unwanted = self.view() if unwanted is None else unwanted
                digest.update(unwanted[done - self.start : start - self.start].data)
                done = start
            at = start
            for part in _slices(memories):
                self.file.read_at(at, part)
                for memory in part:
                    # Runs overlap where two tensors need the same bytes; these are hashed once.
                    digest.update(memory[max(done - at, 0) :].data)
                    at += len(memory)
                    done = max(done, at)
        return digest.intdigest()

    def _stripes(self) -> Iterator[tuple[int, int, int]]:
        """Number of each stripe, and its byte range within the job."""
        size = self.file.stripe_bytes
        for index in range(self.start // size, -(-self.stop // size)):
            stop = min((index + 1) * size, self.file.checked_bytes)
            yield index, index * size - self.start, stop - self.start

    def _part(self, sink: Sink) -> tuple[int, int]:
        """The byte range that a sink needs from this job."""
        return max(self.start, sink.start), min(self.stop, sink.stop)

    def _scattered(self) -> tuple[list[_FileRun], list[Sink]]:
        """(runs of the file that are read straight into tensors, sinks whose bytes must be copied)."""
        runs: list[_FileRun] = []
        rest = []
        at = -1  # no byte: the first sink starts a run
        for sink in self.sinks:
            start, stop = self._part(sink)
            if sink.memory is None:
                rest.append(sink)
                continue
            if start != at:
                runs.append(_FileRun(start, []))
            sink.begin()
            runs[-1].memories.append(sink.memory[start - sink.start : stop - sink.start])
            at = stop
        return runs, rest


def _deliver(start: int, stop: int, data: Bytes, sinks: Sequence[Sink]) -> None:
    """Give sinks their parts of bytes [start, stop) of a file."""
    for sink in sinks:
        first, last = max(start, sink.start), min(stop, sink.stop)
        sink.take(first, data[first - start : last - start])


def _slices(memories: Sequence[Bytes]) -> Iterator[list[Bytes]]:
    """Cut buffers into consecutive groups of `_SLICE_BYTES`; the last group may be smaller."""
    part: list[Bytes] = []
    room = _SLICE_BYTES
    for memory in memories:
        at = 0
        while len(memory) - at >= room:
            part.append(memory[at : at + room])
            yield part
            at, part, room = at + room, [], _SLICE_BYTES
        if at < len(memory):
            part.append(memory[at:])
            room -= len(memory) - at
    if part:
        yield part


class _Walk:
    """Looks up the sinks of byte ranges that are passed in ascending order; ``sinks`` are sorted by start."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks
        self._first = 0

    def within(self, start: int, stop: int) -> list[Sink]:
        """The sinks that need some of bytes [start, stop)."""
        sinks = self._sinks
        while self._first < len(sinks) and sinks[self._first].stop <= start:
            self._first += 1
        overlapping = takewhile(lambda sink: sink.start < stop, islice(sinks, self._first, None))
        return [sink for sink in overlapping if sink.stop > start]


class Reads(ABC):
    """The reads of a load in one of the forms: first `ask`, then `open`, `verify` or `run`, and `close`.

    Attributes:
        num_bytes_read: bytes of tensors read from the storage; bytes that are verified and then read count twice.
        num_bytes_received: bytes of tensors received from other ranks.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.num_bytes_read = 0
        self.num_bytes_received = 0
        self.meter = Meter()  # counts the bytes read

    def _map(
        self, doing: str, work: Callable[[T], int], items: Sequence[T], total: int, *, far: bool = False
    ) -> None:
        """Call ``work`` for each item, in the storage's number of threads.

        Args:
            work: returns the number of bytes that it has read.
            total: bytes of all items, for the meter.
            far: use the threads of far reads, each for a range of neighboring items.
        """
        self.meter.begin(doing, total)

        def metered(item: T) -> int:
            num_bytes = work(item)
            self.meter.advance(num_bytes)
            return num_bytes

        threads = min(self.storage.far_read_threads if far else self.storage.read_threads, len(items))
        if threads <= 1:
            for item in items:
                self.num_bytes_read += metered(item)
            return
        with ThreadPoolExecutor(threads, thread_name_prefix="checkpoint-read") as pool:
            for num_bytes in pool.map(metered, _interleaved(items, threads) if far else items):
                self.num_bytes_read += num_bytes

    @abstractmethod
    def ask(self, index: int, region: Region, tensor: torch.Tensor) -> LoadTarget:
        """Request a region of a tensor, which `run` reads into ``tensor``; ``index`` is the stored tensor's number."""

    def saved_ranks(self) -> set[int]:
        """The ranks whose files have the requested bytes, in the native form."""
        return set()

    def stripes(self) -> list[StripeRun]:
        """The requested stripes, for ranks to compare; empty in forms whose reads cannot be shared."""
        return []

    def share(self, coordinator: Coordinator, by_rank: Sequence[Sequence[StripeRun]]) -> None:
        """Read each stripe that several ranks request on one of them only; from now on, `run` is a collective.

        Args:
            by_rank: the `stripes` of each rank.
        """
        raise AssertionError("a form without stripes has nothing to share")

    @abstractmethod
    def open(self) -> None:
        """Open all files that stay open until `close`, and check them as far as possible without reading data.

        Raises:
            CorruptCheckpointError: if a file is missing, or differs from what the manifest describes.
        """

    @abstractmethod
    def verify(self) -> None:
        """Verify all that `run` would read; no tensor changes."""

    @abstractmethod
    def run(self, *, verify: bool) -> None:
        """Read everything; with ``verify``, compare checksums on the way.

        Raises:
            CorruptCheckpointError: if a checksum differs; by then, tensors may have been changed.
        """

    @abstractmethod
    def close(self) -> None:
        """Close all files."""


class ReadPlan(Reads):
    """Reads of the native form: sinks by file.

    Args:
        finder: finds regions in files.
    """

    def __init__(self, storage: Storage, finder: ShareFinder) -> None:
        super().__init__(storage)
        self._finder = finder
        self._sinks: dict[int, list[Sink]] = {}
        self._files: dict[int, OpenRankFile] = {}
        self._coordinator = Coordinator()
        self._waves: list[list[SharedStripes]] = []
        self._shared: dict[int, set[int]] = {}  # by file: stripes that are read once for several ranks

    def ask(self, index: int, region: Region, tensor: torch.Tensor) -> LoadTarget:
        target = LoadTarget(tensor)
        for stored in self._finder.shares(index, region):
            start, max_gap_bytes = stored.piece.start_bytes, self.storage.max_gap_bytes
            for sink in sinks_of(stored.share, start, target, max_gap_bytes=max_gap_bytes):
                self.add(self._finder.file(stored.rank), sink)
        return target

    def add(self, file: RankFile, sink: Sink) -> None:
        """Request one byte range of one file."""
        self._sinks.setdefault(file.rank, []).append(sink)

    def saved_ranks(self) -> set[int]:
        return set(self._sinks)

    def stripes(self) -> list[StripeRun]:
        size = self._finder.manifest.stripe_bytes
        return [
            StripeRun(rank, start // size, -(-stop // size))
            for rank, sinks in sorted(self._sinks.items())
            # No gaps: nobody needs the stripes in them.
            for start, stop in _joined(sorted(sinks, key=_start_of), self._finder.file(rank), size, 0)
        ]

    def share(self, coordinator: Coordinator, by_rank: Sequence[Sequence[StripeRun]]) -> None:
        shared = plan_shared(by_rank, max(1, _TURN_BYTES // self._finder.manifest.stripe_bytes))
        self._coordinator, self._waves = coordinator, waves_of(shared, _MAX_INCOMING)
        for turn in shared:
            self._shared.setdefault(turn.saved_rank, set()).update(range(turn.first, turn.stop))

    def _own_turns(self) -> list[SharedStripes]:
        """The shared stripes that this rank reads."""
        return [turn for wave in self._waves for turn in wave if turn.sender == self._coordinator.rank]

    def _bounds(self, turn: SharedStripes) -> tuple[int, int]:
        """Half-open byte range of a turn in its file."""
        file = self._finder.file(turn.saved_rank)
        return file.stripe(turn.first)[0], file.stripe(turn.stop - 1)[1]

    def open(self) -> None:
        needed = {turn.saved_rank for turn in self._own_turns()}
        needed |= {rank for rank, *_ in self._ranges(self._finder.manifest.stripe_bytes)}
        for rank in sorted(needed - self._files.keys()):
            self._files[rank] = OpenRankFile(self.storage, self._finder.file(rank))

    def close(self) -> None:
        with ExitStack() as closing:  # closes all, whatever one raises
            while self._files:
                closing.callback(self._files.popitem()[1].reader.close)

    def verify(self) -> None:
        turns = [
            _ReadJob(self._files[turn.saved_rank], *self._bounds(turn), ()) for turn in self._own_turns()
        ]
        jobs = [*self._jobs(True), *turns]
        self._map("verifying", _ReadJob.verify, jobs, sum(job.size_bytes for job in jobs))

    def run(self, *, verify: bool) -> None:
        if self._waves:  # first: a rank that fails in its own reads must not leave others waiting
            self._run_shared(verify)
        jobs = list(self._jobs(verify))
        work = _ReadJob.take_verified if verify else _ReadJob.take
        self._map(
            "loading",
            work,
            jobs,
            sum(job.size_bytes for job in jobs),
            far=any(not job.file.reader.is_at_hand(job.start, job.stop) for job in jobs),
        )

    def _run_shared(self, verify: bool) -> None:
        """Exchange the shared stripes. A rank that fails raises after all ranks have their data."""
        kept, rank = FirstError(), self._coordinator.rank
        sinks_of_turn: dict[SharedStripes, list[Sink]] = {}
        turns = sorted(turn for wave in self._waves for turn in wave)
        for saved_rank, of_file in groupby(turns, key=attrgetter("saved_rank")):
            walk = _Walk(sorted(self._sinks.get(saved_rank, ()), key=_start_of))
            sinks_of_turn.update({turn: walk.within(*self._bounds(turn)) for turn in of_file})

        def size_of(turn: SharedStripes) -> int:
            start, stop = self._bounds(turn)
            return stop - start

        def read(turn: SharedStripes, data: memoryview) -> bool:
            def work() -> None:
                start, stop = self._bounds(turn)
                job = _ReadJob(self._files[turn.saved_rank], start, stop, ())
                job.file.read_at(start, [data])
                if verify:
                    job.verify_data(np.frombuffer(data, dtype=np.uint8))

            kept.attempt(work)
            return kept.error is None

        def take(turn: SharedStripes, data: memoryview) -> None:
            stripes = np.frombuffer(data, dtype=np.uint8)
            kept.attempt(lambda: _deliver(*self._bounds(turn), stripes, sinks_of_turn[turn]))

        own = [[turn for turn in wave if rank in (turn.sender, *turn.receivers)] for wave in self._waves]
        self.num_bytes_received += exchange(
            self._coordinator, own, size_of, read, take, threads=self.storage.far_read_threads
        )
        kept.raise_kept()
        self.num_bytes_read += sum(map(size_of, self._own_turns()))

    def _ranges(self, step: int) -> Iterator[tuple[int, int, int]]:
        """(saved rank, start, stop) of this rank's reads that are not shared, one for each job.

        Args:
            step: bytes; a job starts at a multiple of it.
        """
        size = max(_JOB_BYTES // step, 1) * step
        for rank, sinks in self._sinks.items():
            file, shared = self._finder.file(rank), self._shared.get(rank, set())
            for start, stop in _joined(sorted(sinks, key=_start_of), file, step, self.storage.max_gap_bytes):
                for first, last in _without(start, stop, shared, file.manifest.stripe_bytes):
                    # No job cuts an element: item sizes fall along a file, so later starts are multiples of them.
                    yield from ((rank, at, min(at + size, last)) for at in range(first, last, size))

    def _jobs(self, whole_stripes: bool) -> Iterator[_ReadJob]:
        stripe_bytes = self._finder.manifest.stripe_bytes
        # Shared stripes are left out whole, so ranges begin at stripes.
        ranges = list(self._ranges(stripe_bytes if whole_stripes or self._shared else 1))
        for rank, of_rank in groupby(ranges, key=itemgetter(0)):
            self.open()  # opens what the caller has not opened
            file = self._files[rank]
            walk = _Walk(sorted(self._sinks[rank], key=_start_of))
            for _, start, stop in of_rank:
                sinks = walk.within(start, stop)
                if sinks or whole_stripes:
                    yield _ReadJob(file, start, stop, sinks)


def _interleaved(items: Sequence[T], num_parts: int) -> list[T]:
    """The first item of each part, the second of each, and so on, so that threads read far apart."""
    size = -(-len(items) // num_parts)
    return [items[at] for first in range(size) for at in range(first, len(items), size)]


def _joined(sinks: Sequence[Sink], file: RankFile, step: int, max_gap: int) -> list[tuple[int, int]]:
    """Byte ranges to read: sinks, sorted by start, rounded out to whole steps and joined over small gaps."""
    joined: list[tuple[int, int]] = []
    for sink in sinks:
        start = sink.start // step * step
        # Stripes end where the table begins.
        stop = min(round_up(sink.stop, step), file.table_start if step > 1 else sink.stop)
        if joined and start - joined[-1][1] <= max_gap:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return joined


def _without(start: int, stop: int, shared: Set[int], size: int) -> Iterator[tuple[int, int]]:
    """A byte range without its shared stripes."""
    if not shared:
        yield start, stop
        return
    for is_shared, numbers in groupby(range(start // size, -(-stop // size)), key=shared.__contains__):
        if not is_shared:
            own = list(numbers)
            yield max(start, own[0] * size), min(stop, (own[-1] + 1) * size)


class StripeRun(NamedTuple):
    """Stripes [first, stop) of the file of a rank that saved."""

    saved_rank: int
    first: int
    stop: int


class SharedStripes(NamedTuple):
    """Stripes [first, stop) that several ranks request: ``sender`` reads them and sends them to ``receivers``."""

    saved_rank: int
    first: int
    stop: int
    sender: int
    receivers: tuple[int, ...]


def plan_shared(by_rank: Sequence[Iterable[StripeRun]], max_stripes: int) -> list[SharedStripes]:
    """The stripes that several ranks request, dealt out evenly among those ranks, in the order that `waves_of` needs.

        requested   0: stripes 0 .. 15 of file 0     2: the same                 (replicas of one shard under HSDP)
        read        0: 0 .. 7                        2: 8 .. 15

    Args:
        by_rank: runs of stripes that each rank requests; the runs of one rank do not overlap.
        max_stripes: largest number of stripes that are read and sent at once.
    """
    # By file and stripe: ranks whose runs begin (True) or end there.
    edges: dict[int, dict[int, list[tuple[int, bool]]]] = {}
    for rank, runs in enumerate(by_rank):
        for run in runs:
            of_file = edges.setdefault(run.saved_rank, {})
            of_file.setdefault(run.first, []).append((rank, True))
            of_file.setdefault(run.stop, []).append((rank, False))
    by_sender: dict[int, list[SharedStripes]] = {}
    load: Counter[int] = Counter()  # stripes that each rank reads for others
    for saved_rank, of_file in sorted(edges.items()):  # all ranks must plan the same
        ranks: set[int] = set()  # the ranks that request stripes [first, stop)
        for first, stop in pairwise(sorted(of_file)):
            # Ends first: a run of a rank may begin where its last run ends.
            ranks -= {rank for rank, begins in of_file[first] if not begins}
            ranks |= {rank for rank, begins in of_file[first] if begins}
            if len(ranks) < 2:  # one reader: nothing to share
                continue
            at = first
            for number, sender in enumerate(sorted(ranks, key=lambda rank: (load[rank], rank))):
                # The least loaded ranks come first and take the remainder.
                count = (stop - first - number + len(ranks) - 1) // len(ranks)
                receivers = tuple(sorted(ranks - {sender}))
                load[sender] += count
                for start in range(at, at + count, max_stripes):
                    end = min(start + max_stripes, at + count)
                    turn = SharedStripes(saved_rank, start, end, sender, receivers)
                    by_sender.setdefault(sender, []).append(turn)
                at += count
    # The first turn of each sender, the second of each, and so on: all senders work at the same time.
    rounds = zip_longest(*(turns for _, turns in sorted(by_sender.items())))
    return [turn for turns in rounds for turn in turns if turn is not None]
