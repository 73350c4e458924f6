"""`verify`: report all problems of a checkpoint of any format, without a model or process group.

    native and zarr form         verifies the checksum of every stripe and chunk (`native.check`)
    other formats                verifies every range that has a checksum, and reads all other bytes once, to detect
                                 read errors of the disk

Opening a checkpoint already checks that metadata, file sizes, headers and index agree, and that chunks tile every
tensor.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from vescale_fsdp.checkpoint.foreign import OpenSource, foreign_formats
from vescale_fsdp.checkpoint.manifest.file_names import MANIFEST_NAME, manifest_file
from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.open import open_storage
from vescale_fsdp.checkpoint.verify_report import VerifyReport, damage_report
from vescale_fsdp.errors import CheckpointError, CorruptCheckpointError, NoCheckpointError, VescaleError

if TYPE_CHECKING:
    from vescale_fsdp.checkpoint.native.check import Check


def verify(
    path: str | os.PathLike[str] | OpenSource,
    *,
    deep: bool = True,
    progress: Callable[[int], object] = lambda _: None,
) -> VerifyReport:
    """Read a checkpoint and verify all its checksums. Problems are reported, not raised.

    Args:
        path: folder, file or URL of a checkpoint in any format; or an open `conversion.Source`.
        deep: verify all data; False reads only metadata and headers.
        progress: called with the number of tensor bytes read since the previous call; called from several threads.

    Examples:
        >>> import torch
        >>> from vescale_fsdp.checkpoint import save
        >>> save("to_verify", {"w": torch.ones(4)})
        >>> report = verify("to_verify")
        >>> report.ok, report.problems
        (True, ())
        >>> torch.save({"w": torch.ones(4)}, "to_verify.pt")
        >>> verify("to_verify.pt").ok
        True
    """
    if isinstance(path, OpenSource):
        if path.kind == "native":
            name = manifest_file(path.store) or MANIFEST_NAME
            manifest = Manifest.from_bytes(path.store.read(name), where=f"{path.store.where}/{name}")
            return _verify_own(path.store, manifest, deep, progress)
        return foreign_formats().verify(path, deep, progress)
    # Imported here because they import torch, which is not needed to verify a `Source`.
    from vescale_fsdp.checkpoint.native.read_state import read_manifest
    from vescale_fsdp.checkpoint.ranks.coordinator import num_neighbors

    storage = open_storage(path, neighbors=num_neighbors())  # neighbors: ranks share the cores
    try:
        manifest = read_manifest(storage)
    except NoCheckpointError as error:
        if isinstance(path, Storage):  # other formats are opened by path or URL only
            return VerifyReport((VerifyReport.Problem(MANIFEST_NAME, str(error)),))
        try:
            source = foreign_formats().open(os.fspath(path))
        except CorruptCheckpointError as damage:
            return damage_report(damage, storage.where)
        except VescaleError:  # no known format, so the missing manifest is the problem to report
            return VerifyReport((VerifyReport.Problem(MANIFEST_NAME, str(error)),))
        return foreign_formats().verify(source, deep, progress)
    except (CheckpointError, OSError) as error:
        found: str | None = None
        with suppress(OSError):  # the same error again: the storage cannot be read
            found = manifest_file(storage)
        return VerifyReport((VerifyReport.Problem(found or MANIFEST_NAME, str(error)),))
    return _verify_own(storage, manifest, deep, progress)


def _verify_own(
    storage: Storage, manifest: Manifest, deep: bool, progress: Callable[[int], object]
) -> VerifyReport:
    """Verify every stripe of every rank's file and every chunk of every zarr array, or the sizes and headers."""
    from vescale_fsdp.checkpoint.native.check import check_files  # few callers need it

    problems: list[VerifyReport.Problem] = []
    done: list[int] = []  # bytes of each verified stripe or chunk of tensors

    def note(check: Check) -> None:
        """Add the result of one check to the report; called from several threads."""
        if check.problem is not None:
            problems.append(VerifyReport.Problem(check.file, check.problem, check.tensors))
        if check.holds_tensors and check.num_bytes:
            done.append(check.num_bytes)
            progress(check.num_bytes)

    check_files(storage, manifest, note, threads=storage.read_threads, deep=deep)
    problems.sort(key=lambda problem: (problem.where, problem.text))  # threads find problems in any order
    return VerifyReport(tuple(problems), len(manifest.indices_by_name), len(done), sum(done))
