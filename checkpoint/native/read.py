"""`ReadPlan`: reads byte ranges of many files in parallel, with bounded memory, and verifies every stripe.

The plan collects sinks (see `targets`) for each file and divides their byte ranges into jobs of at most 16 MiB. If
checksums are compared, jobs consist of whole stripes. A job is verified, taken, or both:

    verify     hash the bytes: on a local disk, in mapped pages of the page cache, without a copy
    take       positional reads straight into the tensors. Copied from a buffer instead: strided parts, parts on a
               device, and every part of a *far* job, whose bytes come over a network: a single request for the job
               and its small gaps costs less than one request for each part

``verify="before"`` verifies all jobs, then takes them. "while" reads a stripe in slices that stay in a core's cache,
and hashes each slice after its read; in a far job, it verifies each stripe before the copy. Far jobs are read by more
threads than there are cores, since a thread mostly waits.

Bytes that are not in the page cache are read from the disk through the cache. More threads than cores read these too,
and each thread reads a range of its own from front to back. Measured for 3 GiB, 2 ranks and 2 cores on a virtual disk
(ext4; two readers per rank that only read take 1.94 s):

    time     with checksums
    2.09 s   2.18 s            each thread reads a range of its own
    2.39 s   2.39 s            threads take turns along the files: the kernel's read-ahead serves one reader, or several
                               that are far apart
    2.80 s   2.83 s            direct reads into buffers, and copies from there: a request in flight delays the next
                               request, and the copy costs processor time

Alternatives to "while", by speed relative to an unverified read (CPU time of 512 MiB into 4 KiB pages, Linux 6.18):

    0.84     reading and hashing in slices, as "while" does
    0.58     hashing mapped pages, then reading the same stripe: no damaged stripe reaches a tensor, but the kernel's
             copy fetches the pages from memory a second time. This gains little: a state that a failed load has filled
             in part is lost in any case, and "before" leaves *all* tensors unchanged
    0.62     copying from mapped pages: only the kernel's copy is fast into small pages
    0.65     copying through a buffer that stays in the cache, which is slower for the same reason
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import ExitStack
from itertools import groupby, islice, pairwise, takewhile
from operator import attrgetter, itemgetter
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from vescale_fsdp.checkpoint.manifest.rank_file import RankFile, ShareFinder
from vescale_fsdp.checkpoint.native.open_rank_file import OpenRankFile
from vescale_fsdp.checkpoint.native.targets import Bytes, LoadTarget, Sink, sinks_of
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator
from vescale_fsdp.checkpoint.ranks.exchange import Exchange, Turn
from vescale_fsdp.checkpoint.ranks.first_error import FirstError
from vescale_fsdp.checkpoint.ranks.threads import for_each
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.checksums import RunningChecksum, checksum_of
from vescale_fsdp.checkpoint.storage.progress import Meter
from vescale_fsdp.layout.geometry import round_up
from vescale_fsdp.layout.region import Region

T = TypeVar("T")

_JOB_BYTES = 16 << 20  # 16 MiB: reads of 256 KiB take 1.4 times the CPU time
_TURN_BYTES = 4 << 20  # 4 MiB: largest message of bytes that one rank reads for several ranks
_SLICE_BYTES = 512 << 10  # 512 KiB: a slice and its source pages fill half of a core's cache
_start_of = attrgetter("start")


class _FileRun(NamedTuple):
    """A contiguous range of a file, from byte ``start`` on, that one read scatters into several buffers."""

    start: int
    memories: list[Bytes]


class _ReadJob(NamedTuple):
    """Bytes [start, stop) of a file, and the sinks that need some of these bytes, sorted by start."""

    file: OpenRankFile
    start: int
    stop: int
    sinks: Sequence[Sink]

    @property
    def size_bytes(self) -> int:
        """Number of bytes from ``start`` to ``stop``."""
        return self.stop - self.start

    @property
    def is_far(self) -> bool:
        """Whether the file cannot be mapped: all bytes are then read by one request, and copied."""
        return not self.file.reader.looks_in_place

    def view(self) -> Bytes:
        """Return the job's bytes: mapped from the page cache if possible, else read into a buffer."""
        return np.frombuffer(self.file.view(self.start, self.stop), dtype=np.uint8)

    def verify(self) -> int:
        """Read the bytes and compare checksums. Returns the number of bytes read. The job must have whole stripes."""
        self.verify_data(self.view())
        return self.size_bytes

    def verify_data(self, data: Bytes) -> None:
        """Compare the checksums of ``data``, the job's bytes in memory."""
        for index, start, stop in self._stripes():
            self.file.verify_stripe(index, checksum_of(data[start:stop].data))

    def take(self) -> int:
        """Read the bytes into the sinks without verification. Returns the number of bytes read."""
        runs, rest = self._scattered()
        if self.is_far and len(runs) + len(rest) > 1:  # a single request instead of one per part
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
        """Read the bytes into the sinks and verify them. Returns the number of bytes read.

        The job must have whole stripes. Buffered bytes are verified before they are copied to tensors; bytes that are
        read straight into tensors are verified afterward.
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
            if rest:  # its bytes are mapped from the page cache, so reading them twice is cheap
                stripe.verify()
                stripe.take()
            else:
                self.file.verify_stripe(index, stripe._read_and_hash(runs))
        return self.size_bytes

    def _read_and_hash(self, runs: Sequence[_FileRun]) -> int:
        """Read runs slice by slice. Returns the checksum of all bytes of the job, including gaps between the runs."""
        digest, done = RunningChecksum(), self.start  # done: end of the bytes that are hashed
        unwanted: Bytes | None = None
        # The empty last run makes the loop hash the gap after the last real run.
        for start, memories in [*runs, _FileRun(self.stop, [])]:
            if done < start:
                unwanted = self.view() if unwanted is None else unwanted
                digest.update(unwanted[done - self.start : start - self.start].data)
                done = start
            at = start
            for part in _slices(memories):
                self.file.read_at(at, part)
                for memory in part:
                    # Runs overlap where two tensors need the same bytes; such bytes must be hashed once.
                    digest.update(memory[max(done - at, 0) :].data)
                    at += len(memory)
                    done = max(done, at)
        return digest.intdigest()

    def _stripes(self) -> Iterator[tuple[int, int, int]]:
        """Yield (stripe number, start, stop) of each stripe; start and stop count from the job's first byte."""
        size = self.file.stripe_bytes
        for index in range(self.start // size, -(-self.stop // size)):
            stop = min((index + 1) * size, self.file.checked_bytes)
            yield index, index * size - self.start, stop - self.start

    def _part(self, sink: Sink) -> tuple[int, int]:
        """Return the byte range of the file that a sink needs from this job."""
        return max(self.start, sink.start), min(self.stop, sink.stop)

    def _scattered(self) -> tuple[list[_FileRun], list[Sink]]:
        """Return (runs of the file to read straight into tensors, sinks whose bytes must be copied)."""
        runs: list[_FileRun] = []
        rest = []
        at = -1  # end of the last run; -1 equals no start, so the first sink begins a run
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
    """Copy bytes [start, stop) of a file, which are ``data``, to the sinks that need them."""
    for sink in sinks:
        first, last = max(start, sink.start), min(stop, sink.stop)
        sink.take(first, data[first - start : last - start])


def _slices(memories: Sequence[Bytes]) -> Iterator[list[Bytes]]:
    """Yield the buffers, cut into consecutive groups of `_SLICE_BYTES` bytes; the last group may be smaller."""
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
    """Finds the sinks of byte ranges that are passed in ascending order, without a search from the start.

    Args:
        sinks: sorted by start.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks
        self._first = 0

    def within(self, start: int, stop: int) -> list[Sink]:
        """Return the sinks that need some of bytes [start, stop)."""
        sinks = self._sinks
        while self._first < len(sinks) and sinks[self._first].stop <= start:
            self._first += 1
        overlapping = takewhile(lambda sink: sink.start < stop, islice(sinks, self._first, None))
        # Sinks are not sorted by stop: one that follows a long sink may stop before the range.
        return [sink for sink in overlapping if sink.stop > start]


class Reads(ABC):
    """The reads of one load. Call `ask` for each tensor, then `open`, `verify` if wanted, `run`, and `close`.

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
        """Call ``work`` for each item in several threads; the storage says how many.

        Args:
            work: returns the number of bytes that it has read.
            total: bytes of all items, for the meter.
            far: the bytes are not in the page cache: use more threads, each for a range of neighboring items.
        """
        self.meter.begin(doing, total)

        threads = min(self.storage.far_read_threads if far else self.storage.read_threads, len(items))
        self.num_bytes_read += for_each(
            threads,
            work,
            _interleaved(items, threads) if far and items else items,
            name="checkpoint-read",
            advance=self.meter.advance,
        )

    @abstractmethod
    def ask(self, index: int, region: Region, tensor: torch.Tensor) -> LoadTarget:
        """Request a region of stored tensor number ``index``, which `run` reads into ``tensor``."""

    def saved_ranks(self) -> set[int]:
        """Return the saved ranks whose files contain requested bytes; empty in all but the native form."""
        return set()

    def stripes(self) -> list[StripeRun]:
        """Return the requested stripes, which ranks compare before `share`; empty if reads cannot be shared."""
        return []

    def share(self, coordinator: Coordinator, by_rank: Sequence[Sequence[StripeRun]]) -> None:
        """Let a single rank read each stripe that several ranks request, and send it to the others.

        `run` is then a collective.

        Args:
            by_rank: for each rank, the result of its `stripes`.
        """
        raise AssertionError("a form without stripes has nothing to share")

    @abstractmethod
    def open(self) -> None:
        """Open the files and check them as far as possible without reading tensors; they stay open until `close`.

        Raises:
            CorruptCheckpointError: if a file is missing, or differs from what the manifest describes.
        """

    @abstractmethod
    def verify(self) -> None:
        """Read and verify all bytes that `run` would read. Changes no tensor."""

    @abstractmethod
    def run(self, *, verify: bool) -> None:
        """Read all requested regions; with ``verify``, compare checksums on the way.

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
        self._exchange: Exchange[StripeRun] | None = None  # set by `share`
        self._own_turns: list[Turn[StripeRun]] = []  # the shared stripes that this rank reads
        # Saved rank -> stripes of its file that this rank and other ranks need, and one of these ranks reads.
        self._shared: dict[int, set[int]] = {}

    def ask(self, index: int, region: Region, tensor: torch.Tensor) -> LoadTarget:
        target = LoadTarget(tensor)
        for stored in self._finder.shares(index, region):
            start, max_gap_bytes = stored.piece.start_bytes, self.storage.max_gap_bytes
            for sink in sinks_of(stored.copy, start, target, max_gap_bytes=max_gap_bytes):
                self.add(self._finder.file(stored.rank), sink)
        return target

    def add(self, file: RankFile, sink: Sink) -> None:
        """Request the bytes of one sink from a file."""
        self._sinks.setdefault(file.rank, []).append(sink)

    def saved_ranks(self) -> set[int]:
        return set(self._sinks)

    def stripes(self) -> list[StripeRun]:
        size = self._finder.manifest.stripe_bytes
        return [
            StripeRun(rank, start // size, -(-stop // size))
            for rank, sinks in sorted(self._sinks.items())
            # Not joined over gaps: no rank needs the stripes in a gap.
            for start, stop in _joined(sorted(sinks, key=_start_of), self._finder.file(rank), size, 0)
        ]

    def share(self, coordinator: Coordinator, by_rank: Sequence[Sequence[StripeRun]]) -> None:
        # At least one stripe, because stripes are verified whole.
        max_stripes = max(1, _TURN_BYTES // self._finder.manifest.stripe_bytes)
        turns = plan_shared(by_rank, max_stripes, coordinator.rank, self._size)
        self._own_turns = [turn for turn in turns if turn.sender == coordinator.rank]
        for turn in turns:
            self._shared.setdefault(turn.job.saved_rank, set()).update(range(turn.job.first, turn.job.stop))
        self._exchange = Exchange(coordinator, turns, threads=self.storage.far_read_threads)

    def _bounds(self, run: StripeRun) -> tuple[int, int]:
        """Return the byte range [start, stop) of stripes in their file."""
        file = self._finder.file(run.saved_rank)
        return file.stripe(run.first)[0], file.stripe(run.stop - 1)[1]

    def _size(self, run: StripeRun) -> int:
        """Return the size of stripes in bytes."""
        start, stop = self._bounds(run)
        return stop - start

    def open(self) -> None:
        needed = {turn.job.saved_rank for turn in self._own_turns}
        needed |= {rank for rank, *_ in self._ranges(self._finder.manifest.stripe_bytes)}
        for rank in sorted(needed - self._files.keys()):  # may be called again: see `_jobs`
            self._files[rank] = OpenRankFile(self.storage, self._finder.file(rank))

    def close(self) -> None:
        with ExitStack() as closing:  # closes all files, even if closing one of them raises
            while self._files:
                closing.callback(self._files.popitem()[1].reader.close)

    def verify(self) -> None:
        turns = [
            _ReadJob(self._files[turn.job.saved_rank], *self._bounds(turn.job), ())
            for turn in self._own_turns
        ]
        jobs = [*self._jobs(True), *turns]
        self._map("verifying", _ReadJob.verify, jobs, sum(job.size_bytes for job in jobs))

    def run(self, *, verify: bool) -> None:
        if (
            self._exchange is not None
        ):  # first: a rank that fails in its own reads could not take part afterward
            self._run_shared(self._exchange, verify)
        jobs = list(self._jobs(verify))
        work = _ReadJob.take_verified if verify else _ReadJob.take
        self._map(
            "loading",
            work,
            jobs,
            sum(job.size_bytes for job in jobs),
            # One choice for all jobs: the disk is used if any bytes are not in the page cache.
            far=any(not job.file.reader.is_at_hand(job.start, job.stop) for job in jobs),
        )

    def _run_shared(self, exchange: Exchange[StripeRun], verify: bool) -> None:
        """Read, send and receive the shared stripes. A rank that fails takes part to the end, and raises then."""
        kept = FirstError()
        sinks_of_run: dict[StripeRun, list[Sink]] = {}
        runs = sorted(turn.job for turn in exchange.turns)  # by file and stripe, as `_Walk` needs
        for saved_rank, of_file in groupby(runs, key=attrgetter("saved_rank")):
            walk = _Walk(sorted(self._sinks.get(saved_rank, ()), key=_start_of))
            sinks_of_run.update({run: walk.within(*self._bounds(run)) for run in of_file})

        def read(run: StripeRun, data: memoryview) -> None:
            """Read and verify stripes to send."""
            job = _ReadJob(self._files[run.saved_rank], *self._bounds(run), ())
            job.file.read_at(job.start, [data])
            if verify:
                job.verify_data(np.frombuffer(data, dtype=np.uint8))

        def take(run: StripeRun, data: memoryview) -> None:
            """Copy stripes, read or received, to this rank's sinks."""
            _deliver(*self._bounds(run), np.frombuffer(data, dtype=np.uint8), sinks_of_run[run])

        self.num_bytes_received += exchange.run(read, take, lambda run: kept)
        kept.raise_kept()
        self.num_bytes_read += sum(turn.nbytes for turn in self._own_turns)

    def _ranges(self, step: int) -> Iterator[tuple[int, int, int]]:
        """Yield (saved rank, start, stop) of each job of this rank's reads that are not shared.

        Args:
            step: number of bytes; every job starts at a multiple of it.
        """
        size = max(_JOB_BYTES // step, 1) * step  # whole steps, at least one
        for rank, sinks in self._sinks.items():
            file, shared = self._finder.file(rank), self._shared.get(rank, set())
            for start, stop in _joined(sorted(sinks, key=_start_of), file, step, self.storage.max_gap_bytes):
                for first, last in _without(start, stop, shared, file.manifest.stripe_bytes):
                    # No job cuts an element: item sizes fall along a file, so the starts of later jobs are multiples
                    # of the item size.
                    yield from ((rank, at, min(at + size, last)) for at in range(first, last, size))

    def _jobs(self, whole_stripes: bool) -> Iterator[_ReadJob]:
        """Yield the jobs of this rank's reads that are not shared."""
        stripe_bytes = self._finder.manifest.stripe_bytes
        # Whole stripes also if some are shared, because shared stripes are cut out of the ranges.
        ranges = list(self._ranges(stripe_bytes if whole_stripes or self._shared else 1))
        for rank, of_rank in groupby(ranges, key=itemgetter(0)):
            self.open()  # for callers that have not called it, such as `CheckpointReader`
            file = self._files[rank]
            walk = _Walk(sorted(self._sinks[rank], key=_start_of))
            for _, start, stop in of_rank:
                sinks = walk.within(start, stop)
                if sinks or whole_stripes:
                    yield _ReadJob(file, start, stop, sinks)


def _interleaved(items: Sequence[T], num_parts: int) -> list[T]:
    """Reorder items: the first item of each of ``num_parts`` equal parts, then the second of each, and so on.

    Threads that take the items in this order read far apart, which the kernel's read-ahead needs.
    """
    size = -(-len(items) // num_parts)
    return [items[at] for first in range(size) for at in range(first, len(items), size)]


def _joined(sinks: Sequence[Sink], file: RankFile, step: int, max_gap: int) -> list[tuple[int, int]]:
    """Return the byte ranges to read: those of ``sinks``, rounded out to whole steps, and joined over small gaps.

    Args:
        sinks: sorted by start.
        step: number of bytes; ranges start and stop at multiples of it, or at the checksum table.
        max_gap: largest gap in bytes between two ranges that are joined.
    """
    joined: list[tuple[int, int]] = []
    for sink in sinks:
        start = sink.start // step * step
        # The last stripe ends where the checksum table begins.
        stop = min(round_up(sink.stop, step), file.table_start if step > 1 else sink.stop)
        if joined and start - joined[-1][1] <= max_gap:
            # `max`: a sink may stop before an earlier, longer one.
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return joined


def _without(start: int, stop: int, shared: Set[int], size: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a byte range that are in no shared stripe; ``size`` is the size of a stripe in bytes."""
    if not shared:
        yield start, stop
        return
    for is_shared, numbers in groupby(range(start // size, -(-stop // size)), key=shared.__contains__):
        if not is_shared:
            own = list(numbers)
            yield max(start, own[0] * size), min(stop, (own[-1] + 1) * size)


class StripeRun(NamedTuple):
    """Stripes [first, stop) of the file of a saved rank."""

    saved_rank: int
    first: int
    stop: int


def plan_shared(
    by_rank: Sequence[Iterable[StripeRun]],
    max_stripes: int,
    rank: int,
    size_of: Callable[[StripeRun], int],
) -> list[Turn[StripeRun]]:
    """Assign the stripes that several ranks request evenly to these ranks. Returns the turns of ``rank``.

        requested   0: stripes 0 .. 15 of file 0     2: the same                 (replicas of one shard under HSDP)
        read        0: 0 .. 7                        2: 8 .. 15

    Args:
        by_rank: runs of stripes that each rank requests; the runs of one rank do not overlap.
        max_stripes: largest number of stripes that are read and sent at once.
        size_of: returns the size of stripes in bytes.
    """
    # Saved rank -> stripe -> (rank, True) if a run of the rank begins at this stripe, (rank, False) if one ends there.
    edges: dict[int, dict[int, list[tuple[int, bool]]]] = {}
    for reader, runs in enumerate(by_rank):
        for run in runs:
            of_file = edges.setdefault(run.saved_rank, {})
            of_file.setdefault(run.first, []).append((reader, True))
            of_file.setdefault(run.stop, []).append((reader, False))
    own: list[tuple[int, Turn[StripeRun]]] = []  # (number of the turn among its sender's turns, turn)
    load: Counter[int] = Counter()  # rank -> number of stripes that it reads for others
    num_turns: Counter[int] = Counter()  # rank -> number of its turns
    for saved_rank, of_file in sorted(edges.items()):  # sorted: all ranks must compute the same plan
        ranks: set[int] = set()  # the ranks that request stripes [first, stop)
        for first, stop in pairwise(sorted(of_file)):
            # Ends first, because a run of a rank may begin where the rank's previous run ends.
            ranks -= {reader for reader, begins in of_file[first] if not begins}
            ranks |= {reader for reader, begins in of_file[first] if begins}
            if len(ranks) < 2:  # a single reader has nothing to share
                continue
            at, receivers = first, tuple(sorted(ranks))
            # The least loaded ranks first; the rank decides between equal loads, alike on all ranks.
            for number, sender in enumerate(sorted(ranks, key=lambda reader: (load[reader], reader))):
                # Equal shares; the remainder goes to the first of these ranks.
                count = (stop - first - number + len(ranks) - 1) // len(ranks)
                starts = range(at, at + count, max_stripes)
                if rank in ranks:  # turns of other ranks are only counted
                    for nth, start in enumerate(starts, num_turns[sender]):
                        run = StripeRun(saved_rank, start, min(start + max_stripes, at + count))
                        own.append((nth, Turn(run, sender, receivers, size_of(run))))
                load[sender] += count
                num_turns[sender] += len(starts)
                at += count
    # The first turn of each sender, then the second of each, and so on, so that all senders work at the same time.
    return [turn for _, turn in sorted(own, key=lambda item: (item[0], item[1].sender))]
