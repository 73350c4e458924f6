"""Reading ranges of many files: coalesced, in parallel, with bounded memory, every stripe verified.

`ReadPlan` collects sinks per file and cuts them into jobs of at most 16 MiB, which cover whole stripes where
checksums are compared. A job is proven, taken, or both:

    prove      hash the bytes where they are: on a local disk in the page cache, mapped, without a copy
    take       positional reads that scatter straight into the tensors; what is strided or on a device is
               copied from where it is, and so is all of a job that comes over a network: one request for
               it and the small gaps in it costs less than one for each part

``verify="before"`` proves all jobs, then takes them; "while" takes a stripe, and proves what has arrived while
it is in the cache.

Alternatives considered for "while": hashing mapped pages and reading them then, stripe by stripe, so that no
damaged stripe reaches a tensor. The kernel's copy fetches them from memory a second time: 0.58 of an unverified
read against 0.84 (CPU time of 512 MiB into 4 KiB pages, Linux 6.18), no better than "before", which leaves *all*
tensors alone; a state that a failed load has filled in part is lost in any case. Copying from mapped pages, or
through a buffer that stays in the cache: 0.62 and 0.65, since only the kernel's copy is fast into small pages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from operator import attrgetter
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import xxhash

from vescale_fsdp.checkpoint.loading.locate import ShareFinder
from vescale_fsdp.checkpoint.loading.targets import Bytes, LoadTarget, Sink, sinks_of
from vescale_fsdp.checkpoint.loading.verified_rank_file import OpenRankFile
from vescale_fsdp.checkpoint.manifest.rank_file import RankFile
from vescale_fsdp.checkpoint.manifest.region import Region
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.progress import Meter

__all__ = ["ReadPlan", "Reads"]

T = TypeVar("T")

_JOB_BYTES = 16 << 20  # 16 MiB
_start_of = attrgetter("start")


class _FileRun(NamedTuple):
    """Bytes of a file from ``start`` on that fill memories one after another."""

    start: int
    memories: list[Bytes]


class _ReadJob(NamedTuple):
    """Bytes [start, stop) of a file and the sinks that want some of them, by start."""

    file: OpenRankFile
    start: int
    stop: int
    sinks: Sequence[Sink]

    def prove(self) -> None:
        """Compare the checksums of a job that covers whole stripes."""
        self._prove(self._look())

    def _prove(self, data: Bytes) -> None:
        for index, start, stop in self._stripes():
            self.file.prove_stripe(index, xxhash.xxh3_64_intdigest(data[start:stop].data))

    def take(self) -> None:
        """Bring every sink its bytes, as they are."""
        runs, rest = self._scattered()
        if len(runs) + len(rest) > 1 and not self.file.reader.looks_in_place:
            runs, rest = [], list(self.sinks)
        self._read(runs)
        if rest:
            self._deliver(self._look(), rest)

    def _read(self, runs: Sequence[_FileRun]) -> None:
        for start, memories in runs:
            self.file.read_at(start, memories)

    def take_and_prove(self) -> None:
        """Both; what is copied rather than read is proven first, since it is at hand for that."""
        if not self.file.reader.looks_in_place:
            data = self._look()
            self._prove(data)
            self._deliver(data, self.sinks)
            return
        walk = _Walk(self.sinks)
        for index, start, stop in self._stripes():
            first, end = self.start + start, self.start + stop
            stripe = _ReadJob(self.file, first, end, walk.within(first, end))
            runs, rest = stripe._scattered()
            if rest:
                stripe.prove()
                stripe.take()
            else:
                stripe._read(runs)
                self.file.prove_stripe(index, stripe._digest(runs))

    def _digest(self, runs: Sequence[_FileRun]) -> int:
        """The checksum of what runs have brought, and of what nobody wants between them."""
        digest, at = xxhash.xxh3_64(), self.start
        unwanted: Bytes | None = None
        for start, memories in [*runs, _FileRun(self.stop, [])]:
            if at < start:
                unwanted = self._look() if unwanted is None else unwanted
                digest.update(unwanted[at - self.start : start - self.start].data)
                at = start
            for memory in memories:
                digest.update(memory[at - start :].data)  # runs overlap where bytes are wanted twice
                start += len(memory)
                at = max(at, start)
        return digest.intdigest()

    def _deliver(self, data: Bytes, sinks: Sequence[Sink]) -> None:
        for sink in sinks:
            first, stop = self._part(sink)
            sink.take(first, data[first - self.start : stop - self.start])

    def _look(self) -> Bytes:
        return np.frombuffer(self.file.view(self.start, self.stop), dtype=np.uint8)

    def _stripes(self) -> Iterator[tuple[int, int, int]]:
        """Number of each stripe and its place in the job's bytes."""
        size = self.file.stripe_bytes
        for index in range(self.start // size, -(-self.stop // size)):
            yield (
                index,
                index * size - self.start,
                min((index + 1) * size, self.file.checked_bytes) - self.start,
            )

    def _part(self, sink: Sink) -> tuple[int, int]:
        """The bytes of the file that a sink wants from this job."""
        return max(self.start, sink.start), min(self.stop, sink.stop)

    def _scattered(self) -> tuple[list[_FileRun], list[Sink]]:
        """Runs of the file that go straight to memory; and the sinks that are left."""
        runs: list[_FileRun] = []
        rest = []
        at = -1
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


class _Walk:
    """Sinks, sorted by start, asked for along ascending ranges."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks
        self._first = 0

    def within(self, start: int, stop: int) -> list[Sink]:
        """Those that want some of bytes [start, stop)."""
        sinks = self._sinks
        while self._first < len(sinks) and sinks[self._first].stop <= start:
            self._first += 1
        found = []
        for sink in islice(sinks, self._first, None):
            if sink.start >= stop:
                break
            if sink.stop > start:
                found.append(sink)
        return found


class Reads(ABC):
    """What a load reads, in one of the forms: asked for first, then opened, proven or run. Close it in the end."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.meter = Meter()  # told of bytes that have been read
        self.num_bytes = 0  # that `run` has read

    def _map(self, doing: str, work: Callable[[T], object], items: Sequence[T], sizes: Sequence[int]) -> None:
        """Do the work of all items, of so many bytes each, in as many threads as the storage likes."""
        self.num_bytes = sum(sizes)
        self.meter.begin(doing, self.num_bytes)

        def metered(item: T, num_bytes: int) -> None:
            work(item)
            self.meter.advance(num_bytes)

        threads = min(self.storage.read_threads, len(items))
        if threads <= 1:
            for item, num_bytes in zip(items, sizes, strict=True):
                metered(item, num_bytes)
            return
        with ThreadPoolExecutor(threads, thread_name_prefix="checkpoint-read") as pool:
            for _ in pool.map(metered, items, sizes):
                pass

    @abstractmethod
    def ask(self, place: int, region: Region, tensor: torch.Tensor) -> LoadTarget:
        """Ask for what fills ``tensor`` with a region of tensor number ``place``."""

    def saved_ranks(self) -> set[int]:
        """Whose files hold what was asked for, in the native form."""
        return set()

    @abstractmethod
    def open(self) -> None:
        """Open all files that stay open until the end, and prove what can be proven of them without reading data.

        Raises:
            CorruptCheckpointError: if one is missing or not what the manifest describes.
        """

    @abstractmethod
    def prove(self) -> None:
        """Verify all that `run` would read; nothing is written anywhere."""

    @abstractmethod
    def run(self, *, verify: bool) -> None:
        """Read everything; with ``verify``, compare checksums on the way.

        Raises:
            CorruptCheckpointError: if a checksum differs; any tensor may be filled then.
        """

    @abstractmethod
    def close(self) -> None:
        """Close all files."""


class ReadPlan(Reads):
    """The native form: sinks by file.

    Args:
        finder: where regions lie.
    """

    def __init__(self, storage: Storage, finder: ShareFinder) -> None:
        super().__init__(storage)
        self._finder = finder
        self._sinks: dict[int, list[Sink]] = {}
        self._files: dict[int, OpenRankFile] = {}

    def ask(self, place: int, region: Region, tensor: torch.Tensor) -> LoadTarget:
        target = LoadTarget(tensor)
        for stored in self._finder.shares(place, region):
            for sink in sinks_of(stored, target, max_gap_bytes=self.storage.max_gap_bytes):
                self.add(self._finder.file(stored.rank), sink)
        return target

    def add(self, file: RankFile, sink: Sink) -> None:
        """Ask for one range of one file."""
        self._sinks.setdefault(file.rank, []).append(sink)

    def saved_ranks(self) -> set[int]:
        return set(self._sinks)

    def open(self) -> None:
        for rank in [rank for rank in self._sinks if rank not in self._files]:
            self._files[rank] = OpenRankFile(self.storage, self._finder.file(rank))

    def close(self) -> None:
        for file in self._files.values():
            file.reader.close()
        self._files.clear()

    def prove(self) -> None:
        jobs = list(self._jobs(True))
        self._map("verifying", _ReadJob.prove, jobs, [job.stop - job.start for job in jobs])

    def run(self, *, verify: bool) -> None:
        jobs = list(self._jobs(verify))
        work = _ReadJob.take_and_prove if verify else _ReadJob.take
        self._map("loading", work, jobs, [job.stop - job.start for job in jobs])

    def _jobs(self, whole_stripes: bool) -> Iterator[_ReadJob]:
        self.open()
        for rank, sinks in self._sinks.items():
            file = self._files[rank]
            ordered = sorted(sinks, key=_start_of)
            step = file.file.manifest.stripe_bytes if whole_stripes else 1
            walk = _Walk(ordered)
            for start, stop in _intervals(ordered, file.file, step, self.storage.max_gap_bytes):
                yield _ReadJob(file, start, stop, walk.within(start, stop))


def _intervals(sinks: Sequence[Sink], file: RankFile, step: int, max_gap: int) -> Iterator[tuple[int, int]]:
    """Byte ranges to read: sinks rounded out to whole steps, joined over small gaps, cut into jobs."""
    joined: list[list[int]] = []
    for sink in sinks:
        start = sink.start // step * step
        stop = min(-(-sink.stop // step) * step, file.table_start if step > 1 else sink.stop)
        if joined and start - joined[-1][1] <= max_gap:
            joined[-1][1] = max(joined[-1][1], stop)
        else:
            joined.append([start, stop])
    # No job cuts an element: item sizes fall, so what fits the first start and this size fits all that follow.
    size = max(_JOB_BYTES // step, 1) * step
    for start, stop in joined:
        for cut in range(start, stop, size):
            yield cut, min(cut + size, stop)
