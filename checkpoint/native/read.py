"""`ReadPlan`: reads byte ranges of many files in parallel, with bounded memory, and verifies every stripe.

The plan collects the copies (see `targets`) from each file and divides their bytes into jobs of at most 16 MiB. If
checksums are compared, jobs consist of whole stripes. A job is verified, taken, or both:

    verify     hash the bytes: on a local disk, in mapped pages of the page cache, without a copy
    take       positional reads straight into the tensors. Through a buffer instead: strided copies, copies to a
               device, and all copies of a *far* job, whose bytes come over a network: a single request for the job
               and its small gaps costs less than one request for each copy

``verify="before"`` verifies all jobs, then takes them. "while" reads a stripe in slices that stay in a core's cache,
and hashes each slice after its read; in a far job, each stripe is verified before the copy. Far jobs are read by more
threads than there are cores, since such a thread mostly waits.

Bytes that are not in the page cache are read from the disk through the cache. More threads than cores read such
bytes too, and each thread reads a range of its own from front to back. Measured for 3 GiB, 2 ranks and 2 cores on a
virtual disk (ext4; two readers per rank that only read take 1.94 s):

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
    0.65     copying through a buffer that stays in the cache: the copy from the buffer is not the kernel's
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain, groupby, islice, pairwise, takewhile
from operator import attrgetter
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from vescale_fsdp.checkpoint.manifest.rank_file import CopyFinder, RankFile
from vescale_fsdp.checkpoint.native.open_rank_file import OpenRankFile
from vescale_fsdp.checkpoint.native.targets import Bytes, FileCopy, LoadTarget, file_copies
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator
from vescale_fsdp.checkpoint.ranks.exchange import Turn, TurnExchange
from vescale_fsdp.checkpoint.ranks.first_error import FirstError
from vescale_fsdp.checkpoint.ranks.threads import for_each
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.checksums import RunningChecksum, checksum_of
from vescale_fsdp.checkpoint.storage.progress import Meter
from vescale_fsdp.layout.extent import Extent
from vescale_fsdp.layout.geometry import round_up
from vescale_fsdp.layout.region import Region

T = TypeVar("T")

_JOB_BYTES = 16 << 20  # 16 MiB: reads of 256 KiB take 1.4 times the CPU time
_TURN_BYTES = 4 << 20  # 4 MiB: largest message of bytes that one rank reads for several ranks
_SLICE_BYTES = 512 << 10  # 512 KiB: a slice and its source pages fill half of a core's cache
_start_of = attrgetter("start")


class _ReadJob(NamedTuple):
    """A job: one read of bytes [start, stop) of a file, and the copies of some of these bytes, sorted by start."""

    file: OpenRankFile
    start: int
    stop: int
    copies: Sequence[FileCopy]

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
        for index in self._stripes:
            start, stop = self.file.file.stripe(index)
            self.file.verify_stripe(index, checksum_of(data[start - self.start : stop - self.start].data))

    def take(self) -> int:
        """Read the bytes into the tensors without verification. Returns the number of bytes read."""
        runs, rest = self._scattered()
        if self.is_far and len(runs) + len(rest) > 1:  # a single request instead of one per run
            _deliver(self.start, self.stop, self.view(), self.copies)
            return self.size_bytes
        for run in runs:
            self.file.read_at(self._start(run[0]), self._memories(run))
        if rest:
            _deliver(self.start, self.stop, self.view(), rest)
        return sum(self._stop(copy) - self._start(copy) for copy in (*chain(*runs), *rest))

    def take_verified(self) -> int:
        """Read the bytes into the tensors and verify them. Returns the number of bytes read.

        The job must have whole stripes. Buffered bytes are verified before they are copied to tensors; bytes that are
        read straight into tensors are verified afterward.
        """
        if self.is_far:
            data = self.view()
            self.verify_data(data)
            _deliver(self.start, self.stop, data, self.copies)
            return self.size_bytes
        walk = _Walk(self.copies)
        for index in self._stripes:
            start, stop = self.file.file.stripe(index)
            stripe = _ReadJob(self.file, start, stop, walk.within(start, stop))
            runs, rest = stripe._scattered()
            if rest:  # its bytes are mapped from the page cache, so reading them twice is cheap
                stripe.verify()
                stripe.take()
            else:
                self.file.verify_stripe(index, stripe._read_and_hash(runs))
        return self.size_bytes

    def _read_and_hash(self, runs: Sequence[Sequence[FileCopy]]) -> int:
        """Read runs slice by slice. Returns the checksum of all bytes of the job, including gaps between the runs.

        Args:
            runs: see `_scattered`.
        """
        digest, done = RunningChecksum(), self.start  # done: end of the bytes that are hashed
        unwanted: Bytes | None = None
        # The empty last run makes the loop hash the gap after the last real run.
        for run in (*runs, ()):
            start = at = self._start(run[0]) if run else self.stop
            if done < start:
                unwanted = self.view() if unwanted is None else unwanted
                digest.update(unwanted[done - self.start : start - self.start].data)
                done = start
            for memories in _slices(self._memories(run)):
                self.file.read_at(at, memories)
                for memory in memories:
                    # Runs overlap where two tensors need the same bytes; such bytes must be hashed once.
                    digest.update(memory[max(done - at, 0) :].data)
                    at += len(memory)
                    done = max(done, at)
        return digest.intdigest()

    @property
    def _stripes(self) -> range:
        """Numbers of the stripes of a job that has whole stripes."""
        size = self.file.stripe_bytes
        return range(self.start // size, -(-self.stop // size))

    def _start(self, copy: FileCopy) -> int:
        """Return the first byte of the file that a copy needs from this job."""
        return max(self.start, copy.start)

    def _stop(self, copy: FileCopy) -> int:
        """Return the end of the bytes of the file that a copy needs from this job."""
        return min(self.stop, copy.stop)

    def _scattered(self) -> tuple[list[list[FileCopy]], list[FileCopy]]:
        """Return the copies that are read straight into tensors, as runs, and the copies that need a buffer.

        The copies of a run follow each other in the file: one read scatters its bytes into several tensors.
        """
        runs: list[list[FileCopy]] = []
        rest = []
        at = -1  # end of the last run; -1 equals no start, so the first copy begins a run
        for copy in self.copies:
            if not copy.is_direct:
                rest.append(copy)
                continue
            if self._start(copy) != at:
                runs.append([])
            runs[-1].append(copy)
            at = self._stop(copy)
        return runs, rest

    def _memories(self, run: Sequence[FileCopy]) -> list[Bytes]:
        """Return the memory to read a run into; from now on, its tensors count as overwritten."""
        for copy in run:
            copy.target.begin()
        return [copy.memory(self._start(copy), self._stop(copy)) for copy in run]


def _deliver(start: int, stop: int, data: Bytes, copies: Sequence[FileCopy]) -> None:
    """Copy bytes [start, stop) of a file, which are ``data``, to the tensors that need them."""
    for copy in copies:
        first, last = max(start, copy.start), min(stop, copy.stop)
        copy.take(first, data[first - start : last - start])


def _slices(memories: Sequence[Bytes]) -> Iterator[list[Bytes]]:
    """Yield the buffers, cut into consecutive groups of `_SLICE_BYTES` bytes; the last group may be smaller."""
    group: list[Bytes] = []
    room = _SLICE_BYTES
    for memory in memories:
        at = 0
        while len(memory) - at >= room:
            group.append(memory[at : at + room])
            yield group
            at, group, room = at + room, [], _SLICE_BYTES
        if at < len(memory):
            group.append(memory[at:])
            room -= len(memory) - at
    if group:
        yield group


class _Walk:
    """Finds the copies from byte ranges that are passed in ascending order, without a search from the start.

    Args:
        copies: sorted by start.
    """

    def __init__(self, copies: Sequence[FileCopy]) -> None:
        self._copies = copies
        self._first = 0

    def within(self, start: int, stop: int) -> list[FileCopy]:
        """Return the copies that need some of bytes [start, stop)."""
        copies = self._copies
        while self._first < len(copies) and copies[self._first].stop <= start:
            self._first += 1
        overlapping = takewhile(lambda copy: copy.start < stop, islice(copies, self._first, None))
        # Copies are not sorted by stop: a copy that follows a long copy may stop before the range.
        return [copy for copy in overlapping if copy.stop > start]


class Reads(ABC):
    """The reads of one load. Call `ask` for each tensor, then `open`, `verify` if wanted, `run`, and `close`.

    Attributes:
        num_bytes_read: bytes read from the storage, with verification whole stripes; bytes that are verified and then
            read count twice.
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

    def stripes(self) -> list[Extent]:
        """Return the requested stripes, which ranks compare before `share`; empty if reads cannot be shared."""
        return []

    def share(self, coordinator: Coordinator, by_rank: Sequence[Sequence[Extent]]) -> None:
        """Let a single rank read each stripe that several ranks request, and send the stripe to these ranks.

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
    """Reads of the native form: the copies from each file.

    Args:
        finder: finds copies from files to regions.
    """

    def __init__(self, storage: Storage, finder: CopyFinder) -> None:
        super().__init__(storage)
        self._finder = finder
        self._stripe_bytes = finder.manifest.stripe_bytes
        # By the name of the file:
        self._layouts: dict[str, RankFile] = {}
        self._copies: dict[str, list[FileCopy]] = {}
        self._files: dict[str, OpenRankFile] = {}
        # The numbers of the stripes that several ranks need, and one of these ranks reads.
        self._shared: dict[str, set[int]] = {}
        self._exchange: TurnExchange[Extent] | None = None  # set by `share`
        self._own_turns: list[Turn[Extent]] = []  # the shared stripes that this rank reads

    def ask(self, index: int, region: Region, tensor: torch.Tensor) -> LoadTarget:
        target = LoadTarget(tensor)
        for file, whole in self._finder.copies(index, region):
            for copy in file_copies(whole, target, max_gap_bytes=self.storage.max_gap_bytes):
                self.add(file, copy)
        return target

    def add(self, file: RankFile, copy: FileCopy) -> None:
        """Request the bytes of one copy from a file."""
        self._layouts[file.name] = file
        self._copies.setdefault(file.name, []).append(copy)

    def saved_ranks(self) -> set[int]:
        return {file.rank for file in self._layouts.values()}

    def stripes(self) -> list[Extent]:
        # Not joined over gaps: no rank needs the stripes in a gap.
        return [
            extent for name in sorted(self._copies) for extent in self._joined(name, self._stripe_bytes, 0)
        ]

    def share(self, coordinator: Coordinator, by_rank: Sequence[Sequence[Extent]]) -> None:
        turns = plan_shared(by_rank, self._stripe_bytes, coordinator.rank)
        self._own_turns = [turn for turn in turns if turn.sender == coordinator.rank]
        for turn in turns:
            self._shared.setdefault(turn.job.file, set()).update(self._numbers(turn.job))
        self._exchange = TurnExchange(coordinator, turns, threads=self.storage.far_read_threads)

    def _numbers(self, extent: Extent) -> range:
        """Return the numbers of the stripes with bytes of an extent."""
        return range(extent.offset // self._stripe_bytes, -(-extent.stop // self._stripe_bytes))

    def open(self) -> None:
        needed = {turn.job.file for turn in self._own_turns}
        needed |= {extent.file for extent in self._extents(self._stripe_bytes)}
        for name in sorted(needed - self._files.keys()):  # `_jobs` calls `open` again
            self._files[name] = OpenRankFile(self.storage, self._layouts[name])

    def close(self) -> None:
        with ExitStack() as closing:  # closes all files, even if closing one of them raises
            while self._files:
                closing.callback(self._files.popitem()[1].reader.close)

    def _job(self, extent: Extent, copies: Sequence[FileCopy] = ()) -> _ReadJob:
        return _ReadJob(self._files[extent.file], extent.offset, extent.stop, copies)

    def verify(self) -> None:
        jobs = [*self._jobs(True), *(self._job(turn.job) for turn in self._own_turns)]
        self._map("verifying", _ReadJob.verify, jobs, sum(job.size_bytes for job in jobs))

    def run(self, *, verify: bool) -> None:
        # The exchange comes first: a rank that fails in its own reads could not take part in it afterward.
        if self._exchange is not None:
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

    def _run_shared(self, exchange: TurnExchange[Extent], verify: bool) -> None:
        """Read, send and receive the shared stripes. A rank that fails takes part to the end, and raises then."""
        kept = FirstError()
        copies_of: dict[Extent, list[FileCopy]] = {}
        extents = sorted(turn.job for turn in exchange.turns)  # by file and offset, as `_Walk` needs
        for name, of_file in groupby(extents, key=attrgetter("file")):
            walk = _Walk(sorted(self._copies.get(name, ()), key=_start_of))
            copies_of.update({extent: walk.within(extent.offset, extent.stop) for extent in of_file})

        def read(extent: Extent, data: memoryview) -> None:
            """Read and verify stripes to send."""
            job = self._job(extent)
            job.file.read_at(job.start, [data])
            if verify:
                job.verify_data(np.frombuffer(data, dtype=np.uint8))

        def take(extent: Extent, data: memoryview) -> None:
            """Copy stripes, read or received, to this rank's tensors."""
            stripes = np.frombuffer(data, dtype=np.uint8)
            _deliver(extent.offset, extent.stop, stripes, copies_of[extent])

        self.num_bytes_received += exchange.run(read, take, lambda extent: kept)
        kept.raise_kept()
        self.num_bytes_read += sum(turn.nbytes for turn in self._own_turns)

    def _extents(self, step: int) -> Iterator[Extent]:
        """Yield the bytes of each job of this rank's reads that are not shared.

        Args:
            step: number of bytes; every job starts at a multiple of ``step``.
        """
        size = max(_JOB_BYTES // step, 1) * step  # whole steps, at least one
        for name in self._copies:
            for joined in self._joined(name, step, self.storage.max_gap_bytes):
                for extent in self._without_shared(joined):
                    # No job cuts an element: item sizes fall along a file, so the starts of later jobs are multiples
                    # of the item size.
                    yield from (extent.part(at, at + size) for at in range(0, extent.nbytes, size))

    def _jobs(self, whole_stripes: bool) -> Iterator[_ReadJob]:
        """Yield the jobs of this rank's reads that are not shared."""
        # Whole stripes also if some are shared, because shared stripes are cut out of the extents.
        extents = list(self._extents(self._stripe_bytes if whole_stripes or self._shared else 1))
        for name, of_file in groupby(extents, key=attrgetter("file")):
            self.open()  # for callers that have not opened the files, such as `CheckpointReader`
            walk = _Walk(sorted(self._copies[name], key=_start_of))
            for extent in of_file:
                copies = walk.within(extent.offset, extent.stop)
                if copies or whole_stripes:
                    yield self._job(extent, copies)

    def _joined(self, name: str, step: int, max_gap: int) -> list[Extent]:
        """Return the bytes that the copies from a file need, rounded out to whole steps, and joined over small gaps.

        Args:
            step: number of bytes; extents start and stop at multiples of ``step``, or at the checksum table.
            max_gap: largest gap in bytes between two extents that are joined.
        """
        starts, stops = list[int](), list[int]()
        for copy in sorted(self._copies[name], key=_start_of):
            start, stop = copy.start // step * step, copy.stop
            if step > 1:  # the last stripe ends where the checksum table begins
                stop = min(round_up(stop, step), self._layouts[name].table_start)
            if stops and start - stops[-1] <= max_gap:
                stops[-1] = max(stops[-1], stop)  # a copy may stop before an earlier, longer copy
            else:
                starts.append(start)
                stops.append(stop)
        return [Extent(name, start, stop - start) for start, stop in zip(starts, stops, strict=True)]

    def _without_shared(self, extent: Extent) -> Iterator[Extent]:
        """Yield extents of those bytes of an extent that are in no shared stripe."""
        shared, size = self._shared.get(extent.file), self._stripe_bytes
        if not shared:
            yield extent
            return
        for is_shared, numbers in groupby(self._numbers(extent), key=shared.__contains__):
            if not is_shared:
                own = list(numbers)
                yield extent.clip(own[0] * size, (own[-1] + 1) * size)


def _interleaved(items: Sequence[T], num_parts: int) -> list[T]:
    """Reorder items: the first item of each of ``num_parts`` equal parts, then the second of each, and so on.

    Threads that take the items in this order read far apart, which the kernel's read-ahead needs.
    """
    size = -(-len(items) // num_parts)
    return [items[at] for first in range(size) for at in range(first, len(items), size)]


def plan_shared(by_rank: Sequence[Iterable[Extent]], stripe_bytes: int, rank: int) -> list[Turn[Extent]]:
    """Assign the stripes that several ranks request evenly to these ranks. Returns the turns of ``rank``.

        requested   0: stripes 0 .. 15 of file 0     2: stripes 0 .. 15 of file 0   (replicas of one shard under HSDP)
        read        0: stripes 0 .. 7                2: stripes 8 .. 15

    Args:
        by_rank: the stripes that each rank requests, joined; the stripes of one rank do not overlap.
        stripe_bytes: size of a stripe; extents start at a stripe, and stop at a stripe or with the file's last stripe.
    """
    # At least one stripe, because stripes are verified whole.
    max_bytes = max(1, _TURN_BYTES // stripe_bytes) * stripe_bytes
    # File -> offset -> (rank, True) if an extent of the rank begins there, (rank, False) if one ends there.
    edges: dict[str, dict[int, list[tuple[int, bool]]]] = {}
    for reader, extents in enumerate(by_rank):
        for extent in extents:
            of_file = edges.setdefault(extent.file, {})
            of_file.setdefault(extent.offset, []).append((reader, True))
            of_file.setdefault(extent.stop, []).append((reader, False))
    own: list[tuple[int, Turn[Extent]]] = []  # (number of the turn among its sender's turns, turn)
    load: Counter[int] = Counter()  # rank -> number of stripes that it reads for other ranks
    num_turns: Counter[int] = Counter()  # rank -> number of its turns
    for name, of_file in sorted(edges.items()):  # sorted: all ranks must compute the same plan
        ranks: set[int] = set()  # the ranks that request bytes [first, stop)
        for first, stop in pairwise(sorted(of_file)):
            # Ends first, because an extent of a rank may begin where the rank's previous extent ends.
            ranks -= {reader for reader, begins in of_file[first] if not begins}
            ranks |= {reader for reader, begins in of_file[first] if begins}
            if len(ranks) < 2:  # a single reader has nothing to share
                continue
            requested, at, receivers = Extent(name, first, stop - first), 0, tuple(sorted(ranks))
            num_stripes = -(-requested.nbytes // stripe_bytes)
            # The least loaded ranks first; the rank decides between equal loads, alike on all ranks.
            for number, sender in enumerate(sorted(ranks, key=lambda reader: (load[reader], reader))):
                # Equal shares; the remainder goes to the first of these ranks.
                count = (num_stripes - number + len(ranks) - 1) // len(ranks)
                end = at + count * stripe_bytes
                starts = range(at, end, max_bytes)
                if rank in ranks:  # turns of other ranks are only counted
                    for nth, start in enumerate(starts, num_turns[sender]):
                        job = requested.part(start, min(start + max_bytes, end))
                        own.append((nth, Turn(job, sender, receivers, job.nbytes)))
                load[sender] += count
                num_turns[sender] += len(starts)
                at = end
    # The first turn of each sender, then the second of each, and so on, so that all senders work at the same time.
    return [turn for _, turn in sorted(own, key=lambda item: (item[0], item[1].sender))]
