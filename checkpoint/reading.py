"""Reading ranges of many files: coalesced, in parallel, with bounded memory, every stripe verified.

`ReadPlan` collects sinks per file and cuts them into jobs of at most 16 MiB. A job is one positional read
that scatters straight into the tensors' memory; only what cannot go there passes through scratch. With
verification, jobs cover whole stripes, and each stripe's hash is compared while its bytes are in the cache.
"""

from __future__ import annotations

import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import xxhash

from vescale_fsdp.checkpoint.rankfile import CHECKSUM_BYTES, RankFile
from vescale_fsdp.checkpoint.sinks import Bytes, Sink
from vescale_fsdp.checkpoint.storage import FileReader, Storage
from vescale_fsdp.checkpoint.writing import checksum_of
from vescale_fsdp.errors import CheckpointError, CorruptCheckpointError, explain

__all__ = ["OpenRankFile", "ReadPlan", "Reads"]

_JOB_BYTES = 16 << 20  # 16 MiB
_HASH_BYTES = 1 << 20  # 1 MiB: read and hashed at once, so that it is hashed from the cache


class OpenRankFile:
    """A rank's file, open, with its size, header and checksum table proven against the manifest.

    Raises:
        CheckpointError: if the file is missing.
        CorruptCheckpointError: if it is not the file the manifest describes.
    """

    def __init__(self, storage: Storage, file: RankFile) -> None:
        self.file = file
        self.where = f"{storage.where}/{file.name}"
        try:
            self.reader: FileReader = storage.open_file(file.name)
        except FileNotFoundError as error:
            raise CorruptCheckpointError(
                explain(
                    "A file of the checkpoint is missing.",
                    expected=f"{file.total_bytes} bytes that hold {_some(self._names())}",
                    got="no file",
                    where=self.where,
                    todo="restore an older step",
                )
            ) from error
        try:
            self._prove_size()
            self._prove_header()
            self.checksums = self._read_table()
        except BaseException:
            self.reader.close()
            raise

    def _names(self) -> list[str]:
        return self.file.names_in(len(self.file.header), self.file.table_start)

    def _prove_size(self) -> None:
        size, expected = self.reader.size_bytes, self.file.total_bytes
        if size != expected:
            lost = self.file.names_in(min(size, expected), self.file.table_start)
            raise self.corrupt(
                "A file of the checkpoint has another size than the manifest says.",
                f"{expected} bytes",
                f"{size} bytes" + (f"; lost: {_some(lost)}" if size < expected else ""),
            )

    def _prove_header(self) -> None:
        expected = self.file.header
        found = bytearray(len(expected))
        self.reader.read_at(0, [found])
        if found == expected:
            return
        at = next(place for place, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
        start = max(0, at - 60)
        raise self.corrupt(
            "A file's header is not the one that follows from the manifest: it is damaged, or another "
            "checkpoint's file.",
            f".. {expected[start : at + 60]!r} ..",
            f".. {bytes(found[start : at + 60])!r} ..; from byte {at} on; holds {_some(self._names())}",
        )

    def _read_table(self) -> tuple[int, ...]:
        table = bytearray((self.file.num_stripes + 1) * CHECKSUM_BYTES)
        self.reader.read_at(self.file.table_start, [table])
        (own,) = struct.unpack("<Q", table[-CHECKSUM_BYTES:])
        if xxhash.xxh3_64_intdigest(table[:-CHECKSUM_BYTES]) != own:
            raise self.corrupt("A file's table of checksums is damaged.", f"{own:016x}", "another checksum")
        return struct.unpack(f"<{self.file.num_stripes}Q", table[:-CHECKSUM_BYTES])

    def prove_stripe(self, index: int, checksum: int) -> None:
        """Compare a stripe's checksum with the table's.

        Raises:
            CorruptCheckpointError: naming the file, the bytes and the tensors in them.
        """
        if checksum != self.checksums[index]:
            start, stop = self.file.stripe(index)
            raise self.corrupt(
                f"Bytes [{start}, {stop}) are not those that were written.",
                f"checksum {self.checksums[index]:016x}",
                f"{checksum:016x}; in them: {_some(self.file.names_in(start, stop))}",
            )

    def hash_stripe(self, index: int, scratch: Bytes) -> int:
        """Checksum of a stripe, read through a small buffer."""
        start, stop = self.file.stripe(index)
        state = xxhash.xxh3_64()
        for at in range(start, stop, len(scratch)):
            part = scratch[: min(len(scratch), stop - at)]
            self.reader.read_at(at, [part])
            state.update(part.data)
        return state.intdigest()

    def corrupt(self, problem: str, expected: str, got: str) -> CorruptCheckpointError:
        """An error that names this file."""
        todo = "restore an older step; verify(path) lists all that is wrong"
        return CorruptCheckpointError(
            explain(problem, expected=expected, got=got, where=self.where, todo=todo)
        )


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


def _some(names: Sequence[str]) -> str:
    """A few names, for messages."""
    shown = ", ".join(names[:4])
    return f"{shown} and {len(names) - 4} more" if len(names) > 4 else shown or "nothing"


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
