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
from itertools import chain, groupby, pairwise
from operator import attrgetter
from typing import TypeVar

import numpy as np
import torch

from vescale_fsdp.checkpoint.manifest.rank_file import CopyFinder, RankFile
from vescale_fsdp.checkpoint.native.rank_file_reader import RankFileReader
from vescale_fsdp.checkpoint.native.targets import Bytes, FileCopy, LoadTarget, file_copies
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator
from vescale_fsdp.checkpoint.ranks.exchange import Turn, TurnExchange
from vescale_fsdp.checkpoint.ranks.first_error import FirstError
from vescale_fsdp.checkpoint.ranks.threads import for_each
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.checksums import RunningChecksum, checksum_of
from vescale_fsdp.checkpoint.storage.progress import Meter
from vescale_fsdp.layout.extent import CopyWalk, Extent, ReadJob
from vescale_fsdp.layout.geometry import round_up
from vescale_fsdp.layout.region import Region

T = TypeVar("T")

_JOB_BYTES = 16 << 20  # 16 MiB: reads of 256 KiB take 1.4 times the CPU time
_TURN_BYTES = 4 << 20  # 4 MiB: largest message of bytes that one rank reads for several ranks
_SLICE_BYTES = 512 << 10  # 512 KiB: a slice and its source pages fill half of a core's cache
_start_of = attrgetter("start")


_Job = ReadJob[RankFileReader, FileCopy]


def _is_far(job: _Job) -> bool:
    """Return whether the job is far: its file cannot be mapped, so one request reads all bytes, which are copied."""
    return not job.source.file.looks_in_place


def _view(job: _Job) -> Bytes:
    """Return the job's bytes: mapped from the page cache if possible, else read into a buffer."""
    return np.frombuffer(job.source.view(job.extent.offset, job.extent.stop), dtype=np.uint8)


def _verify(job: _Job) -> int:
    """Read the bytes and compare checksums. Returns the number of bytes read. The job must have whole stripes."""
    _verify_data(job, _view(job))
    return job.extent.nbytes


def _verify_data(job: _Job, data: Bytes) -> None:
    """Compare the checksums of ``data``, the job's bytes in memory."""
    for index in _stripes(job):
        stripe, first = job.source.layout.stripe(index), job.extent.offset
        in_stripe = data[stripe.offset - first : stripe.stop - first]
        job.source.verify_stripe(index, checksum_of(in_stripe.data))


def _take(job: _Job) -> int:
    """Read the bytes into the tensors without verification. Returns the number of bytes read."""
    runs, buffered = _runs_and_buffered(job)
    if _is_far(job) and len(runs) + len(buffered) > 1:  # a single request instead of one per run
        _deliver(job.extent, _view(job), job.copies)
        return job.extent.nbytes
    for run in runs:
        job.source.read_at(_bytes_for(run[0], job).offset, _memories(run, job))
    if buffered:
        _deliver(job.extent, _view(job), buffered)
    return sum(_bytes_for(copy, job).nbytes for copy in (*chain(*runs), *buffered))


def _take_verified(job: _Job) -> int:
    """Read the bytes into the tensors and verify them. Returns the number of bytes read.

    The job must have whole stripes. Buffered bytes are verified before they are copied to tensors; bytes that are read
    straight into tensors are verified afterward.
    """
    if _is_far(job):
        data = _view(job)
        _verify_data(job, data)
        _deliver(job.extent, data, job.copies)
        return job.extent.nbytes
    walk = CopyWalk(job.copies)
    for index in _stripes(job):
        extent = job.source.layout.stripe(index)
        stripe = ReadJob(job.source, extent, walk.within(extent.offset, extent.stop))
        runs, buffered = _runs_and_buffered(stripe)
        if buffered:  # its bytes are mapped from the page cache, so reading them twice is cheap
            _verify(stripe)
            _take(stripe)
        else:
            job.source.verify_stripe(index, _read_and_hash(stripe, runs))
    return job.extent.nbytes


def _read_and_hash(job: _Job, runs: Sequence[Sequence[FileCopy]]) -> int:
    """Read runs slice by slice. Returns the checksum of all bytes of the job, including gaps between the runs.

    Args:
        runs: see `_runs_and_buffered`.
    """
    first = job.extent.offset
    digest, done = RunningChecksum(), first  # done: end of the bytes that are hashed
    unwanted: Bytes | None = None
    # The empty last run makes the loop hash the gap after the last real run.
    for run in (*runs, ()):
        start = at = _bytes_for(run[0], job).offset if run else job.extent.stop
        if done < start:
            unwanted = _view(job) if unwanted is None else unwanted
            digest.update(unwanted[done - first : start - first].data)
            done = start
        for memories in _slices(_memories(run, job)):
            job.source.read_at(at, memories)
            for memory in memories:
                # Runs overlap where two tensors need the same bytes; such bytes must be hashed once.
                digest.update(memory[max(done - at, 0) :].data)
                at += len(memory)
                done = max(done, at)
    return digest.intdigest()


def _stripes(job: _Job) -> range:
    """Return the numbers of the stripes of a job that has whole stripes."""
    size = job.source.stripe_bytes
    return range(job.extent.offset // size, -(-job.extent.stop // size))


def _bytes_for(copy: FileCopy, job: _Job) -> Extent:
    """Return the bytes of a job that a copy needs."""
    start = max(job.extent.offset, copy.start)
    return Extent(job.extent.file, start, min(job.extent.stop, copy.stop) - start)


def _runs_and_buffered(job: _Job) -> tuple[list[list[FileCopy]], list[FileCopy]]:
    """Return the copies that are read straight into tensors, as runs, and the copies that need a buffer.

    The copies of a run follow each other in the file: one read scatters its bytes into several tensors.
    """
    runs: list[list[FileCopy]] = []
    buffered = []
    at = -1  # end of the last run; -1 equals no start, so the first copy begins a run
    for copy in job.copies:
        if not copy.is_direct:
            buffered.append(copy)
            continue
        needed = _bytes_for(copy, job)
        if needed.offset != at:
            runs.append([])
        runs[-1].append(copy)
        at = needed.stop
    return runs, buffered


def _memories(run: Sequence[FileCopy], job: _Job) -> list[Bytes]:
    """Return the memory to read a run of a job into; from now on, its tensors count as overwritten."""
    for copy in run:
        copy.target.begin()
    return [copy.memory(needed.offset, needed.stop) for copy in run for needed in (_bytes_for(copy, job),)]


def _deliver(extent: Extent, data: Bytes, copies: Sequence[FileCopy]) -> None:
    """Copy the bytes of an extent, which are ``data``, to the tensors that need them."""
    for copy in copies:
        needed = extent.clip(copy.start, copy.stop)
        copy.take(needed.offset, data[needed.offset - extent.offset : needed.stop - extent.offset])


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
        self, doing: str, work: Callable[[T], int], items: Sequence[T], total: int, *, uncached: bool = False
    ) -> None:
        """Call ``work`` for each item in several threads; the storage says how many.

        Args:
            work: returns the number of bytes that it has read.
            total: bytes of all items, for the meter.
            uncached: the bytes are not in the page cache: use more threads, each for a range of neighboring items.
        """
        self.meter.begin(doing, total)

        threads = min(self.storage.far_read_threads if uncached else self.storage.read_threads, len(items))
        self.num_bytes_read += for_each(
            threads,
            work,
            _interleaved(items, threads) if uncached and items else items,
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
        self._files: dict[str, RankFileReader] = {}
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
            self._files[name] = RankFileReader(self.storage, self._layouts[name])

    def close(self) -> None:
        with ExitStack() as closing:  # closes all files, even if closing one of them raises
            while self._files:
                closing.callback(self._files.popitem()[1].file.close)

    def _job(self, extent: Extent, copies: Sequence[FileCopy] = ()) -> _Job:
        return ReadJob(self._files[extent.file], extent, copies)

    def verify(self) -> None:
        jobs = [*self._jobs(True), *(self._job(turn.job) for turn in self._own_turns)]
        self._map("verifying", _verify, jobs, sum(job.extent.nbytes for job in jobs))

    def run(self, *, verify: bool) -> None:
        # The exchange comes first: a rank that fails in its own reads could not take part in it afterward.
        if self._exchange is not None:
            self._run_shared(self._exchange, verify)
        jobs = list(self._jobs(verify))
        work = _take_verified if verify else _take
        self._map(
            "loading",
            work,
            jobs,
            sum(job.extent.nbytes for job in jobs),
            # One choice for all jobs: the disk is used if any bytes are not in the page cache.
            uncached=any(not job.source.file.is_at_hand(job.extent.offset, job.extent.stop) for job in jobs),
        )

    def _run_shared(self, exchange: TurnExchange[Extent], verify: bool) -> None:
        """Read, send and receive the shared stripes. A rank that fails takes part to the end, and raises then."""
        kept = FirstError()
        copies_of: dict[Extent, list[FileCopy]] = {}
        extents = sorted(turn.job for turn in exchange.turns)  # by file and offset, as `CopyWalk` needs
        for name, of_file in groupby(extents, key=attrgetter("file")):
            walk = CopyWalk(sorted(self._copies.get(name, ()), key=_start_of))
            copies_of.update({extent: walk.within(extent.offset, extent.stop) for extent in of_file})

        def read(turn: Turn[Extent], data: memoryview) -> None:
            """Read and verify stripes to send."""
            job = self._job(turn.job)
            job.source.read_at(job.extent.offset, [data])
            if verify:
                _verify_data(job, np.frombuffer(data, dtype=np.uint8))

        def take(turn: Turn[Extent], data: memoryview) -> None:
            """Copy stripes, read or received, to this rank's tensors."""
            _deliver(turn.job, np.frombuffer(data, dtype=np.uint8), copies_of[turn.job])

        self.num_bytes_received += exchange.run(read, take, lambda turn: kept)
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

    def _jobs(self, whole_stripes: bool) -> Iterator[_Job]:
        """Yield the jobs of this rank's reads that are not shared."""
        # Whole stripes also if some are shared, because shared stripes are cut out of the extents.
        extents = list(self._extents(self._stripe_bytes if whole_stripes or self._shared else 1))
        for name, of_file in groupby(extents, key=attrgetter("file")):
            self.open()  # for callers that have not opened the files, such as `CheckpointReader`
            walk = CopyWalk(sorted(self._copies[name], key=_start_of))
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
