"""`verify`: everything that is wrong with a checkpoint, found offline, without touching any state.

How files are checked stands in `file_checks`; what ``load(verify=...)`` proves before it fills a tensor in `read_plan`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from vescale_fsdp.checkpoint.loading.file_checks import Check, check_files
from vescale_fsdp.checkpoint.loading.read_state import read_manifest
from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.ranks.coordinator import num_neighbours
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.open import open_storage
from vescale_fsdp.errors import CheckpointError


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: in which file, and the error a load would raise.

    Examples:
        >>> import torch
        >>> from vescale_fsdp.checkpoint import save
        >>> save("to_damage", {"w": torch.ones(4)})
        >>> from pathlib import Path
        >>> (file,) = Path("to_damage").glob("data-*/*.safetensors")
        >>> data = bytearray(file.read_bytes())
        >>> data[-100] ^= 1
        >>> _ = file.write_bytes(data)
        >>> (problem,) = verify("to_damage").problems
        >>> problem.file.endswith(file.name)
        True
    """

    file: str
    text: str


@dataclass(frozen=True)
class VerifyReport:
    """What `verify` found.

    Attributes:
        problems: all of them; empty if the checkpoint is good.
        num_files: files whose bytes were hashed.
        num_bytes: bytes that were hashed.

    Examples:
        >>> VerifyReport((), num_files=4, num_bytes=1 << 30).ok
        True
    """

    problems: tuple[Problem, ...]
    num_files: int
    num_bytes: int

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def verify(path: str | os.PathLike[str] | Storage) -> VerifyReport:
    """Hash every byte of a checkpoint and compare; report all problems instead of raising the first.

    Examples:
        >>> import torch
        >>> from vescale_fsdp.checkpoint import save
        >>> save("to_verify", {"w": torch.ones(4)})
        >>> report = verify("to_verify")
        >>> report.ok, report.problems
        (True, ())
    """
    storage = open_storage(path, neighbours=num_neighbours())
    try:
        manifest = read_manifest(storage)
    except (CheckpointError, OSError) as error:
        return VerifyReport((Problem("manifest.json", str(error)),), 0, 0)
    checks: list[Check] = []
    check_files(storage, manifest, checks.append, threads=storage.read_threads)
    found = sorted((check.file, check.problem) for check in checks if check.problem is not None)
    problems = (*_incomplete(manifest), *(Problem(file, problem) for file, problem in found))
    return VerifyReport(problems, manifest.world_size, sum(check.num_bytes for check in checks))


def _incomplete(manifest: Manifest) -> list[Problem]:
    """Tensors of which some place is held by nobody."""
    problems = []
    for place, entry in enumerate(manifest.entries):
        missing = manifest.holders_of(place).missing_place()
        if missing is not None and entry.numel:
            problems.append(Problem("manifest.json", f"tensor {entry.name}: no rank holds place {missing}"))
    return problems
