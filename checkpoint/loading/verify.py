"""`verify`: everything that is wrong with a checkpoint, found offline, without touching any state."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from vescale_fsdp.checkpoint.loading.read_state import read_manifest
from vescale_fsdp.checkpoint.loading.verified_rank_file import OpenRankFile
from vescale_fsdp.checkpoint.loading.zarr_chunks import ChunkTables, verify_arrays
from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.manifest.rank_file import RankFile
from vescale_fsdp.checkpoint.ranks.rank_storage import open_rank_storage
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.errors import CheckpointError

__all__ = ["Problem", "VerifyReport", "verify"]

_SCRATCH_BYTES = 1 << 20  # 1 MiB


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: in which file, and the error a load would raise."""

    file: str
    text: str


@dataclass(frozen=True)
class VerifyReport:
    """What `verify` found.

    Attributes:
        problems: all of them; empty if the checkpoint is good.
        num_files: files whose bytes were hashed.
        num_bytes: bytes that were hashed.
    """

    problems: tuple[Problem, ...]
    num_files: int
    num_bytes: int

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def verify(path: str | os.PathLike[str] | Storage) -> VerifyReport:
    """Hash every byte of a checkpoint and compare; report all problems instead of raising the first."""
    storage = open_rank_storage(path)
    try:
        manifest = read_manifest(storage)
    except (CheckpointError, OSError) as error:
        return VerifyReport((Problem("manifest.json", str(error)),), 0, 0)
    problems = _incomplete(manifest)
    num_bytes = 0
    if manifest.chunks is not None:
        for file, problem, hashed in verify_arrays(ChunkTables(storage, manifest)):
            problems += [] if problem is None else [Problem(file, problem)]
            num_bytes += hashed
    with ThreadPoolExecutor(storage.read_threads, thread_name_prefix="checkpoint-verify") as pool:
        checks = pool.map(lambda rank: _verify_file(storage, manifest, rank), range(manifest.world_size))
        for of_file, hashed in checks:
            problems += of_file
            num_bytes += hashed
    return VerifyReport(tuple(problems), manifest.world_size, num_bytes)


def _incomplete(manifest: Manifest) -> list[Problem]:
    """Tensors of which some place is held by nobody."""
    problems = []
    for place, entry in enumerate(manifest.entries):
        missing = manifest.holders_of(place).missing_place()
        if missing is not None and entry.numel:
            problems.append(Problem("manifest.json", f"tensor {entry.name}: no rank holds place {missing}"))
    return problems


def _verify_file(storage: Storage, manifest: Manifest, rank: int) -> tuple[list[Problem], int]:
    """Problems of one rank's file, and how many bytes were hashed."""
    file = RankFile(manifest, rank)
    problems: list[Problem] = []
    try:
        opened = OpenRankFile(storage, file)
    except (CheckpointError, OSError) as error:
        return [Problem(file.name, str(error))], 0
    scratch = np.empty(_SCRATCH_BYTES, dtype=np.uint8)
    try:
        for index in range(file.num_stripes):
            try:
                opened.prove_stripe(index, opened.hash_stripe(index, scratch))
            except (CheckpointError, OSError) as error:
                problems.append(Problem(file.name, str(error)))
    finally:
        opened.reader.close()
    return problems, file.table_start
