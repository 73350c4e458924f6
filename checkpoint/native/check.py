"""Check every file of a native or zarr checkpoint once, for `verify`.

A load does not use this module: it verifies only the bytes that it reads (`native/read.py`, `native/zarr_chunks.py`).
The module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import NamedTuple

from vescale_fsdp.checkpoint.manifest.file_names import ZARR_NAME
from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.manifest.rank_file import RankFile
from vescale_fsdp.checkpoint.manifest.state_tree import dotted_name
from vescale_fsdp.checkpoint.manifest.zarr_layout import (
    Chunk,
    array_json,
    chunk_boxes,
    chunk_file,
    node_files,
)
from vescale_fsdp.checkpoint.native.rank_file_reader import RankFileReader
from vescale_fsdp.checkpoint.ranks.threads import for_each
from vescale_fsdp.checkpoint.storage.base import ALL_PROBLEMS, Storage
from vescale_fsdp.checkpoint.storage.checksums import CRC_BYTES
from vescale_fsdp.errors import VescaleError
from vescale_fsdp.layout.foreign_json import parse_json
from vescale_fsdp.layout.geometry import numel_of

_SCRATCH_BYTES = 1 << 20  # 1 MiB: hashed while it is in the processor's cache
_MOST_NODE_BYTES = 1 << 28  # 256 MiB, as a group may have the consolidated metadata of all its members
_MOST_MISSING = 1000  # missing ranks' files that are reported one by one


class Check(NamedTuple):
    """The result of checking one stripe of a rank's file, or one file of a zarr array.

    Attributes:
        problem: message of the error that a load would raise; None for a good file.
        num_bytes: number of bytes that were hashed.
        holds_tensors: whether the file contains values of tensors.
        tensors: names of the tensors with values in the bytes of the problem.
    """

    file: str
    problem: str | None
    num_bytes: int
    holds_tensors: bool
    tensors: tuple[str, ...] = ()


def check_files(
    storage: Storage, manifest: Manifest, tell: Callable[[Check], object], *, threads: int, deep: bool
) -> None:
    """Verify every byte of a checkpoint; ``tell`` is called with each result, from several threads.

    Args:
        deep: False verifies sizes and headers of all files instead.
    """
    if manifest.is_zarr:
        for check in _array_checks(storage, manifest, deep):
            tell(check)
    # With more threads than files, each file is divided into parts for several threads.
    parts = max(1, threads // manifest.world_size) if deep else 1
    ranks = _ranks_to_check(storage, manifest, tell)

    def check_part(number: int) -> int:
        nbytes = 0
        for check in _rank_file_checks(
            storage, manifest, ranks[number // parts], number % parts, parts, deep
        ):
            tell(check)
            nbytes += check.num_bytes
        return nbytes

    for_each(threads, check_part, range(len(ranks) * parts), name="checkpoint-verify")


def rank_file_problem(storage: Storage, manifest: Manifest, rank: int) -> str | None:
    """Verify a rank's file up to the first problem. Returns the problem; None if all bytes are good."""
    problems = (check.problem for check in _rank_file_checks(storage, manifest, rank, 0, 1, True))
    return next((problem for problem in problems if problem is not None), None)


def _ranks_to_check(storage: Storage, manifest: Manifest, tell: Callable[[Check], object]) -> Sequence[int]:
    """Return the ranks whose files are checked one by one.

    These include the first `_MOST_MISSING` missing files. All further missing files are reported here, as one problem.
    """
    if manifest.world_size <= _MOST_MISSING:  # every missing file can be reported, so no listing is needed
        return range(manifest.world_size)
    there = set(storage.list_files())  # one listing instead of a request for each file
    missing = [rank for rank in range(manifest.world_size) if manifest.file_name(rank) not in there]
    if unlisted := missing[_MOST_MISSING:]:
        problem = f"{len(unlisted)} more files of ranks are missing, from rank {unlisted[0]} on"
        # One problem for all: with 16,384 ranks, a check for each would hide the others.
        tell(Check(manifest.name, problem, 0, True))
    skipped = set(unlisted)
    return [rank for rank in range(manifest.world_size) if rank not in skipped]


def _rank_file_checks(
    storage: Storage, manifest: Manifest, rank: int, part: int, parts: int, deep: bool
) -> Iterator[Check]:
    """Divide a rank's file into ``parts`` equal parts, and verify the stripes of part number ``part`` in order.

    Without ``deep``, only the file's size, header and table of checksums are verified.
    """
    file = RankFile(manifest, rank)
    holds_tensors = not manifest.is_zarr  # in the zarr form, chunk files have the tensors' values
    try:
        opened = RankFileReader(storage, file)
    except (VescaleError, OSError) as error:  # not raised, so that the other files are checked too
        if part == 0:  # reported once per file, not once per part
            names = file.tensors_in(0, file.table_start)
            yield Check(file.name, _text_of(error), 0, holds_tensors, tuple(names))
        return
    scratch = bytearray(_SCRATCH_BYTES)
    num_stripes = file.num_stripes if deep else 0
    with closing(opened.file):
        for index in range(num_stripes * part // parts, num_stripes * (part + 1) // parts):
            problem: str | None = None
            tensors: tuple[str, ...] = ()
            extent = file.stripe(index)
            try:
                opened.verify_stripe(index, opened.hash_stripe(index, scratch))
            except (VescaleError, OSError) as error:  # not raised, so that later stripes are checked too
                problem, tensors = _text_of(error), tuple(file.tensors_in(extent.offset, extent.stop))
            yield Check(file.name, problem, extent.nbytes, holds_tensors, tensors)


def _text_of(error: VescaleError | OSError) -> str:
    """Return an error's message, without the advice to call `verify`."""
    return str(error).replace(ALL_PROBLEMS, "")


def _array_checks(storage: Storage, manifest: Manifest, deep: bool) -> Iterator[Check]:
    """Verify every file of the zarr arrays: metadata of groups and arrays, then chunks, or their sizes."""
    from vescale_fsdp.checkpoint.native.zarr_chunks import ChunkReader, ChunkTables  # imports numpy

    for name, expected in node_files(manifest).items():
        yield Check(name, _node_problem(storage, name, expected, "a zarr node"), 0, False)
    with closing(ChunkReader(ChunkTables(storage, manifest))) as reader:
        for tensor, places in manifest.indices_by_name.items():
            place = places[0]  # all descriptions of one tensor share one array
            name, label = f"{manifest.array_paths[place]}/{ZARR_NAME}", f"tensor {dotted_name(tensor)}"
            yield Check(name, _node_problem(storage, name, array_json(manifest, place), label), 0, False)
            for box in chunk_boxes(manifest.entries[place].shape, manifest.chunk_sizes[place]):
                num_bytes, problem, file = 0, None, chunk_file(manifest, place, box)
                try:
                    if deep:
                        num_bytes = len(reader.read(Chunk(place, box)))
                    else:
                        nbytes = numel_of(box.sizes) * manifest.entries[place].itemsize
                        storage.check_size(file, nbytes + CRC_BYTES)
                except (VescaleError, OSError) as error:
                    problem = _text_of(error)
                yield Check(file, problem, num_bytes, True, () if problem is None else (dotted_name(tensor),))


def _node_problem(storage: Storage, name: str, expected: bytes, of: str) -> str | None:
    """Compare a node's metadata with those that the manifest implies. Returns the problem, or None.

    Args:
        of: the group or tensor that the file describes, for the message.
    """
    try:
        document = parse_json(storage.read_small(name, limit_bytes=_MOST_NODE_BYTES))
    # ValueError: the file is no JSON, too large, or no regular file.
    except (VescaleError, OSError, ValueError) as error:
        return f"{of}: {error}"
    # Other fields are allowed: another version of the library may write more, and users may consolidate metadata.
    is_same = isinstance(document, dict) and document == {**document, **parse_json(expected)}
    return None if is_same else f"{of}: {name} differs from what the manifest implies"
