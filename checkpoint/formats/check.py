"""Check every file of a native or zarr checkpoint once, for `verify`.

Loads verify the bytes that they read by themselves: see `native/read.py` and `zarr/chunks.py`. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import NamedTuple

from vescale_fsdp.checkpoint.formats.native.open_rank_file import OpenRankFile
from vescale_fsdp.checkpoint.formats.zarr.chunks import ChunkTables, read_chunk
from vescale_fsdp.checkpoint.manifest.file_names import MANIFEST_NAME
from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.manifest.rank_file import RankFile
from vescale_fsdp.checkpoint.manifest.state_tree import dotted_name
from vescale_fsdp.checkpoint.manifest.zarr_layout import (
    Chunk,
    array_json,
    chunk_boxes,
    chunk_file,
    group_files,
)
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.errors import VescaleError

_SCRATCH_BYTES = 1 << 20  # 1 MiB: hashed while in the cache
_MOST_MISSING = 1000  # missing files of ranks that are reported one by one


class Check(NamedTuple):
    """The result of one check: of a stripe of a rank's file, or of a file of an array.

    Attributes:
        problem: the error that a load would raise; None if there is none.
        num_bytes: bytes that were hashed.
        holds_tensors: whether the file contains values of tensors.
    """

    file: str
    problem: str | None
    num_bytes: int
    holds_tensors: bool


def check_files(
    storage: Storage, manifest: Manifest, tell: Callable[[Check], object], *, threads: int
) -> None:
    """Hash and compare every byte; ``tell`` is called with each result, from several threads."""
    if manifest.is_zarr:
        for check in _array_checks(ChunkTables(storage, manifest)):
            tell(check)
    # With more threads than files, several threads check one file, each a part of it.
    parts = max(1, threads // manifest.world_size)
    ranks = _ranks_to_check(storage, manifest, tell)

    def check_part(number: int) -> None:
        for check in _rank_file_checks(storage, manifest, ranks[number // parts], number % parts, parts):
            tell(check)

    with ThreadPoolExecutor(threads, thread_name_prefix="checkpoint-verify") as pool:
        for _ in pool.map(check_part, range(len(ranks) * parts)):  # the loop raises what a thread has raised
            pass


def rank_file_problem(storage: Storage, manifest: Manifest, rank: int) -> str | None:
    """The first problem of a rank's file, all of whose bytes are verified; None if there is none."""
    problems = (check.problem for check in _rank_file_checks(storage, manifest, rank, 0, 1))
    return next((problem for problem in problems if problem is not None), None)


def _ranks_to_check(storage: Storage, manifest: Manifest, tell: Callable[[Check], object]) -> Sequence[int]:
    """The ranks whose files are checked one by one. At most `_MOST_MISSING` missing files are checked like this; all
    other missing files are reported as one problem."""
    if manifest.world_size <= _MOST_MISSING:
        return range(manifest.world_size)
    there = set(storage.list_files())
    missing = [rank for rank in range(manifest.world_size) if manifest.file_name(rank) not in there]
    if unlisted := missing[_MOST_MISSING:]:
        problem = f"{len(unlisted)} more files of ranks are missing, from rank {unlisted[0]} on"
        tell(Check(MANIFEST_NAME, problem, 0, True))
    skipped = set(unlisted)
    return [rank for rank in range(manifest.world_size) if rank not in skipped]


def _rank_file_checks(
    storage: Storage, manifest: Manifest, rank: int, part: int, parts: int
) -> Iterator[Check]:
    """Verify the stripes of part number ``part`` of ``parts`` equal parts of a rank's file, from front to back."""
    file = RankFile(manifest, rank)
    holds_tensors = not manifest.is_zarr  # there, chunk files hold them
    try:
        opened = OpenRankFile(storage, file)
    except (VescaleError, OSError) as error:  # reported, so that the other files are checked too
        if part == 0:  # once per file, not for each of its parts
            yield Check(file.name, str(error), 0, holds_tensors)
        return
    scratch = bytearray(_SCRATCH_BYTES)
    with closing(opened.reader):
        for index in range(file.num_stripes * part // parts, file.num_stripes * (part + 1) // parts):
            start, stop = file.stripe(index)
            problem = None
            try:
                opened.verify_stripe(index, opened.hash_stripe(index, scratch))
            except (VescaleError, OSError) as error:  # the stripes after it are checked too
                problem = str(error)
            yield Check(file.name, problem, stop - start, holds_tensors)


def _array_checks(tables: ChunkTables) -> Iterator[Check]:
    """Verify every file of the arrays in the zarr form."""
    manifest = tables.manifest
    for name, expected in group_files(manifest).items():
        yield Check(name, _json_problem(tables.storage, name, expected, "a group"), 0, False)
    for tensor, places in manifest.indices_by_name.items():
        place = places[0]  # all descriptions of one tensor share one array
        name = f"{manifest.array_paths[place]}/zarr.json"
        problem = _json_problem(
            tables.storage, name, array_json(manifest, place), f"tensor {dotted_name(tensor)}"
        )
        yield Check(name, problem, 0, False)
        if problem is not None:
            continue  # the metadata is damaged, so its chunks are not known
        for box in chunk_boxes(manifest.entries[place].shape, manifest.chunk_sizes[place]):
            num_bytes, problem = 0, None
            try:
                num_bytes = len(read_chunk(tables, Chunk(place, box)))
            except (VescaleError, OSError) as error:
                problem = str(error)
            yield Check(chunk_file(manifest, place, box), problem, num_bytes, True)


def _json_problem(storage: Storage, name: str, expected: bytes, of: str) -> str | None:
    """The problem of a small file whose content follows from the manifest; None if there is none."""
    try:
        with closing(storage.open_file(name)) as reader:
            content = bytearray(min(reader.size_bytes, len(expected)))  # a damaged file may be of any size
            is_same = reader.size_bytes == len(expected)
            reader.read_at(0, [content])
    # EOFError: a file that became shorter; ValueError: not a regular file.
    except (VescaleError, OSError, EOFError, ValueError) as error:
        return f"{of}: {error}"
    return None if is_same and content == expected else f"{of}: {name} differs from what the manifest implies"
