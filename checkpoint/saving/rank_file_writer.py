"""Writing one rank's file: stripes are hashed while in the cache, then written by several threads."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

import xxhash

from vescale_fsdp.checkpoint.manifest.rank_file import RankFile, pack_table
from vescale_fsdp.checkpoint.saving.rank_file_bytes import FileImage
from vescale_fsdp.checkpoint.storage.base import Buffer, FileWriter, Storage

__all__ = ["checksum_of", "write_rank_file"]


def checksum_of(buffers: Sequence[Buffer]) -> int:
    """xxh3-64 of buffers taken as one run of bytes."""
    if len(buffers) == 1:
        return xxhash.xxh3_64_intdigest(buffers[0])
    state = xxhash.xxh3_64()
    for buffer in buffers:
        state.update(buffer)
    return state.intdigest()


def write_rank_file(storage: Storage, image: FileImage) -> None:
    """Write a rank's file with its checksums; durable on return, gone again after an error.

    Raises:
        OSError: whatever the storage says, unchanged.
    """
    storage.retrying(lambda: _write_once(storage, image))


def _write_once(storage: Storage, image: FileImage) -> None:
    file = image.file
    with storage.create(file.name, file.total_bytes) as writer:
        threads = 1 if storage.in_order else min(storage.write_threads, file.num_stripes)
        if threads <= 1:
            checksums = [_write_stripe(writer, image, index) for index in range(file.num_stripes)]
        else:
            checksums = _write_parallel(writer, image, threads)
        writer.write_at(file.table_start, [pack_table(checksums)])


def _write_stripe(writer: FileWriter, image: FileImage, index: int) -> int:
    start, stop = image.file.stripe(index)
    buffers = image.buffers(start, stop)
    checksum = checksum_of(buffers)
    writer.write_at(start, buffers)
    return checksum


def _write_parallel(writer: FileWriter, image: FileImage, threads: int) -> list[int]:
    """Stripes in turn over threads; the first error stops those not yet begun."""
    file: RankFile = image.file
    failed = False

    def work(thread: int) -> list[int]:
        found = []
        for index in range(thread, file.num_stripes, threads):
            if failed:
                break
            found.append(_write_stripe(writer, image, index))
        return found

    with ThreadPoolExecutor(threads, thread_name_prefix="checkpoint-write") as pool:
        futures = [pool.submit(work, thread) for thread in range(threads)]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            failed = True  # harmless where all are done
        results = [future.result() for future in futures]
    return [results[index % threads][index // threads] for index in range(file.num_stripes)]
