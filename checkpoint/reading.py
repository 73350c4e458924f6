"""Reading ranges of many files: coalesced, in parallel, with bounded memory, every stripe verified.

`ReadPlan` collects sinks per file and cuts them into jobs of at most 16 MiB. A job is one positional read
that scatters straight into the tensors' memory; only what cannot go there passes through scratch. With
verification, jobs cover whole stripes, and each stripe's hash is compared while its bytes are in the cache.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from vescale_fsdp.checkpoint.open_rank_file import OpenRankFile
from vescale_fsdp.checkpoint.rankfile import RankFile
from vescale_fsdp.checkpoint.sinks import Bytes, Sink
from vescale_fsdp.checkpoint.storage import Storage
from vescale_fsdp.checkpoint.writing import checksum_of
from vescale_fsdp.errors import CheckpointError, explain

__all__ = ["ReadPlan", "Reads", "missing_manifest"]

_JOB_BYTES = 16 << 20  # 16 MiB
_HASH_BYTES = 1 << 20  # 1 MiB: read and hashed at once, so that it is hashed from the cache


class _Job(NamedTuple):
    """One read: bytes [start, stop) of a file and the sinks that want some of them."""

    file: OpenRankFile
    start: int
    stop: int
    sinks: Sequence[Sink]


class Reads(ABC):
    """Reads of another form, carried out with those of a `ReadPlan`."""

    @abstractmethod
    def prove(self) -> None:
        """Check what will be read; nothing is written anywhere."""

    @abstractmethod
    def run(self) -> None:
        """Read, check and copy."""


class ReadPlan:
    """Sinks by file; `prove` checks what will be read, `run` reads it. Close it in the end."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._sinks: dict[int, list[Sink]] = {}
        self._files: dict[int, OpenRankFile] = {}
        self._local = threading.local()
        self.others: list[Reads] = []

    def add(self, file: RankFile, sink: Sink) -> None:
        """Ask for one range of one file."""
        if file.rank not in self._files:
            self._files[file.rank] = OpenRankFile(self._storage, file)
        self._sinks.setdefault(file.rank, []).append(sink)

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.reader.close()
        self._files.clear()

    def prove(self) -> None:
        """Verify every stripe that `run` would read; nothing is written anywhere."""
        jobs = [(job.file, index) for job in self._jobs(True) for index in _stripes(job)]

        def prove(item: tuple[OpenRankFile, int]) -> None:
            file, index = item
            file.prove_stripe(index, file.hash_stripe(index, self._scratch(_HASH_BYTES)))

        self._map(prove, jobs)
        for reads in self.others:
            reads.prove()

    def run(self, *, verify: bool) -> None:
        """Read everything into the sinks; with ``verify``, compare checksums on the way.

        Raises:
            CorruptCheckpointError: if a checksum differs; sinks may be partly filled then.
        """
        self._map(self._read_verified if verify else self._read, list(self._jobs(verify)))
        for reads in self.others:
            reads.run()

    def _map(self, work, jobs) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
        threads = min(self._storage.read_threads, len(jobs))
        if threads <= 1:
            for job in jobs:
                work(job)
            return
        with ThreadPoolExecutor(threads, thread_name_prefix="checkpoint-read") as pool:
            for _ in pool.map(work, jobs):
                pass

    def _scratch(self, nbytes: int) -> Bytes:
        """A buffer of this thread's own, reused from job to job."""
        buffer: Bytes | None = getattr(self._local, "buffer", None)
        if buffer is None or len(buffer) < nbytes:
            buffer = np.empty(nbytes, dtype=np.uint8)
            self._local.buffer = buffer
        return buffer[:nbytes]

    def _jobs(self, whole_stripes: bool) -> Iterator[_Job]:
        for rank, sinks in self._sinks.items():
            file = self._files[rank]
            ordered = _exclusive(sorted(sinks, key=lambda sink: sink.start))
            step = file.file.manifest.stripe_bytes if whole_stripes else 1
            first = 0
            for start, stop in _intervals(ordered, file.file, step, self._storage.max_gap_bytes):
                while first < len(ordered) and ordered[first].stop <= start:
                    first += 1
                wanted = []
                for sink in ordered[first:]:
                    if sink.start >= stop:
                        break
                    if sink.stop > start:
                        wanted.append(sink)
                yield _Job(file, start, stop, wanted)

    def _read(self, job: _Job) -> None:
        try:
            parts, scratched = self._parts(job)
            job.file.reader.read_at(job.start, parts)
        except EOFError as error:
            raise job.file.corrupt("A file ended early.", f"{job.stop} bytes", str(error)) from error
        _deliver(job, scratched)

    def _read_verified(self, job: _Job) -> None:
        parts, scratched = self._parts(job)
        at = job.start
        for index in _stripes(job):
            stop = job.file.file.stripe(index)[1]
            stripe, parts = _take(parts, stop - at)
            try:
                job.file.reader.read_at(at, stripe)
            except EOFError as error:
                raise job.file.corrupt("A file ended early.", f"{stop} bytes", str(error)) from error
            job.file.prove_stripe(index, checksum_of(stripe))
            at = stop
        _deliver(job, scratched)

    def _parts(self, job: _Job) -> tuple[list[Bytes], list[tuple[int, Bytes]]]:
        """Buffers that tile a job's bytes, and those of them that are scratch, with their place."""
        needed = (job.stop - job.start) - sum(
            min(s.stop, job.stop) - max(s.start, job.start) for s in job.sinks if s.memory is not None
        )
        scratch = self._scratch(needed) if needed else np.empty(0, dtype=np.uint8)
        parts: list[Bytes] = []
        scratched: list[tuple[int, Bytes]] = []
        at = job.start

        def fill(stop: int) -> None:
            nonlocal scratch, at
            if stop > at:
                part, scratch = scratch[: stop - at], scratch[stop - at :]
                parts.append(part)
                scratched.append((at, part))
                at = stop

        for sink in job.sinks:
            if sink.memory is not None:
                start, stop = max(sink.start, job.start), min(sink.stop, job.stop)
                fill(start)
                parts.append(sink.memory[start - sink.start : stop - sink.start])
                at = stop
        fill(job.stop)
        return parts, scratched


def _deliver(job: _Job, scratched: Sequence[tuple[int, Bytes]]) -> None:
    for sink in job.sinks:
        if sink.memory is None:
            for at, data in scratched:
                start, stop = max(at, sink.start), min(at + len(data), sink.stop)
                if start < stop:
                    sink.deliver(start, data[start - at : stop - at])


def _take(parts: list[Bytes], nbytes: int) -> tuple[list[Bytes], list[Bytes]]:
    """The first ``nbytes`` of a list of buffers, and the rest."""
    taken: list[Bytes] = []
    for place, part in enumerate(parts):
        if nbytes < len(part):
            head = [part[:nbytes]] if nbytes else []
            return taken + head, [part[nbytes:], *parts[place + 1 :]]
        taken.append(part)
        nbytes -= len(part)
    return taken, []


def _stripes(job: _Job) -> range:
    """Stripes of a job that covers whole ones."""
    size = job.file.file.manifest.stripe_bytes
    return range(job.start // size, -(-job.stop // size))


def _exclusive(sinks: list[Sink]) -> list[Sink]:
    """Sinks in which no range that is read straight into memory is wanted by another sink too."""
    found: list[Sink] = []
    at = 0
    while at < len(sinks):
        stop, end = sinks[at].stop, at + 1
        while end < len(sinks) and sinks[end].start < stop:
            stop = max(stop, sinks[end].stop)
            end += 1
        cluster = sinks[at:end]
        found += cluster if len(cluster) == 1 else [sink.without_memory() for sink in cluster]
        at = end
    return found


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
    # A job of elements must not cut one: sinks are aligned, and so is this size.
    size = max(_JOB_BYTES // step, 1) * step
    for start, stop in joined:
        cut = start // size * size
        while cut < stop:
            yield max(cut, start), min(cut + size, stop)
            cut += size


def missing_manifest(where: str) -> CheckpointError:
    """The error for a folder without a manifest."""
    return CheckpointError(
        explain(
            "There is no checkpoint at this path.",
            expected="a folder with manifest.json (it is written last: a folder without one is incomplete)",
            got="no manifest.json",
            where=where,
            todo="give the path of a complete checkpoint",
        )
    )
