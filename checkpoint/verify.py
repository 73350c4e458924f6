"""`verify`: report all problems of a checkpoint of any format, without a model or process group.

    native and zarr form         verifies the checksum of every stripe and chunk (`native.check`)
    other formats                verifies every range that has a checksum, and reads all other bytes once, to detect
                                 read errors of the disk

Opening a checkpoint already checks that metadata, file sizes, headers and index agree, and that chunks tile every
tensor.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from vescale_fsdp.checkpoint.manifest.file_names import MANIFEST_NAME
from vescale_fsdp.checkpoint.manifest.manifest import Manifest, NoCheckpointError
from vescale_fsdp.checkpoint.moves.source import Source
from vescale_fsdp.checkpoint.moves.stored_tensor import StoredChunk, StoredTensor, is_inflated
from vescale_fsdp.checkpoint.moves.tensor_view import SourceView, pieces_of
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.open import open_storage
from vescale_fsdp.errors import CheckpointError, CorruptCheckpointError, VescaleError
from vescale_fsdp.formats import open_foreign

if TYPE_CHECKING:
    from vescale_fsdp.checkpoint.native.check import Check

_READ_BYTES = 4 * 2**20  # 4 MiB; largest read of bytes without a checksum


@dataclass(frozen=True)
class VerifyReport:
    """The result of `verify`.

    Attributes:
        problems: all problems; empty if the checkpoint is good.
        num_tensors: number of tensors in the checkpoint.
        num_checksums: number of verified checksums: of stripes, of chunks, or of records of other formats.
        num_bytes: number of tensor bytes that were read.

    Examples:
        >>> VerifyReport((), num_tensors=4, num_checksums=1, num_bytes=1 << 20).ok
        True
        >>> import torch
        >>> from vescale_fsdp.checkpoint import save
        >>> save("to_damage", {"w": torch.ones(4)})
        >>> from pathlib import Path
        >>> (file,) = Path("to_damage").glob("data-*/*.safetensors")
        >>> data = bytearray(file.read_bytes())
        >>> data[-100] ^= 1
        >>> _ = file.write_bytes(data)
        >>> (problem,) = verify("to_damage").problems
        >>> problem.where.endswith(file.name)
        True
    """

    class Problem(NamedTuple):
        """One problem of a checkpoint.

        Attributes:
            where: the file's name; in other formats, which are verified tensor by tensor, the tensor's name; the
                path of a file that cannot be opened.
            text: message of the error that a load would raise.
        """

        where: str
        text: str

        def __str__(self) -> str:
            return f"{self.where}: {self.text}"

    problems: tuple[Problem, ...]
    num_tensors: int = 0
    num_checksums: int = 0
    num_bytes: int = 0

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems


def damage_report(damage: CorruptCheckpointError, where: str) -> VerifyReport:
    """Return the report about a checkpoint at ``where`` that cannot be opened: a problem per file."""
    errors = (damage, *damage.others)
    # args[0]: the message of one error alone
    problems = (VerifyReport.Problem(str(error.where or where), error.args[0]) for error in errors)
    return VerifyReport(tuple(problems))


def verify(
    path: str | os.PathLike[str] | Source,
    *,
    deep: bool = True,
    progress: Callable[[int], object] = lambda _: None,
) -> VerifyReport:
    """Read a checkpoint and verify all its checksums. Problems are reported, not raised.

    Args:
        path: folder, file or URL of a checkpoint in any format; or an open `Source`.
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
    if isinstance(path, Source):
        if path.kind == "native":
            manifest = Manifest.from_bytes(
                path.store.read(MANIFEST_NAME), where=f"{path.store.where}/{MANIFEST_NAME}"
            )
            return _verify_own(path.store, manifest, deep, progress)
        return _verify_source(path, deep, progress)
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
            source = open_foreign(path)
        except CorruptCheckpointError as damage:
            return damage_report(damage, storage.where)
        except VescaleError:  # no known format, so the missing manifest is the problem to report
            return VerifyReport((VerifyReport.Problem(MANIFEST_NAME, str(error)),))
        return _verify_source(source, deep, progress)
    except (CheckpointError, OSError) as error:
        return VerifyReport((VerifyReport.Problem(MANIFEST_NAME, str(error)),))
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
            problems.append(VerifyReport.Problem(check.file, check.problem))
        if check.holds_tensors and check.num_bytes:
            done.append(check.num_bytes)
            progress(check.num_bytes)

    check_files(storage, manifest, note, threads=storage.read_threads, deep=deep)
    problems.sort(key=lambda problem: (problem.where, problem.text))  # threads find problems in any order
    unsaved = [
        VerifyReport.Problem(
            MANIFEST_NAME, f"tensor {entry.label}: no rank stores cell {missing} of its grid"
        )
        for index, entry in enumerate(manifest.entries)
        if entry.numel and (missing := manifest.holders_of(index).missing_cell()) is not None
    ]
    return VerifyReport((*unsaved, *problems), len(manifest.indices_by_name), len(done), sum(done))


def _verify_source(source: Source, deep: bool, progress: Callable[[int], object]) -> VerifyReport:
    """Verify every tensor and every value of an open checkpoint; without ``deep``, read the values alone."""
    problems: list[VerifyReport.Problem] = []
    read: list[int] = []
    num_checksums = 0

    def count(nbytes: int) -> None:
        read.append(nbytes)
        progress(nbytes)

    for name, tensor in source.tensors.items():
        with _noting(problems, name):
            # A chunk without a file is all zeros, or is decoded by the format's reader.
            chunks = [source.located(tensor.info, chunk) for chunk in tensor.chunks if chunk.file]
            if deep:
                num_checksums += sum(chunk.checked is not None for chunk in chunks)
                _read_tensor(source, tensor, chunks, problems, count)
    for name, value in source.values.items():
        with _noting(problems, name):
            value()
    problems += (VerifyReport.Problem(source.url, text) for text in source.folder_problems())
    return VerifyReport(tuple(problems), len(source.tensors), num_checksums, sum(read))


def _read_tensor(
    source: Source,
    tensor: StoredTensor,
    chunks: Sequence[StoredChunk],
    problems: list[VerifyReport.Problem],
    count: Callable[[int], None],
) -> None:
    """Verify the ranges of a tensor that have a checksum; if some bytes have none, also read the tensor."""
    info = tensor.info
    for chunk in chunks:
        if chunk.checked is not None:
            with _noting(problems, info.name):
                source.reads.verify_range(chunk.checked)
            count(chunk.checked.nbytes)
    # A small file can declare a huge tensor, by a stride of 0 that repeats items. Reading such a tensor would take
    # unbounded time, so only the stored bytes are read.
    if is_inflated(info.nbytes, tensor.stored_nbytes):
        for chunk in chunks:
            # 0 bytes for a chunk with a checksum: it was read above.
            nbytes = 0 if chunk.checked else chunk.stored_nbytes(info.dtype.itemsize)
            _read_range(source, chunk.file, chunk.offset, nbytes, count)
    # Without chunks in files, the tensor is decoded by the format's reader; reading it shows whether that succeeds.
    elif not chunks or any(chunk.checked is None for chunk in chunks):
        ranges = source.byte_ranges(info.name, 0, info.numel)
        if ranges is not None:  # without numpy, whose import takes longer than reading a small checkpoint
            for each in ranges:
                _read_range(source, each.file, each.offset, each.nbytes, count)
        else:
            for piece in pieces_of(SourceView(source, info.name, info.name), _READ_BYTES):
                count(piece.nbytes)


def _read_range(source: Source, file: str, offset: int, nbytes: int, count: Callable[[int], None]) -> None:
    """Read a range of a file, and call ``count`` with the number of bytes of each read."""
    buffer = memoryview(bytearray(min(_READ_BYTES, nbytes)))
    for start in range(0, nbytes, _READ_BYTES):
        part = buffer[: nbytes - start]
        source.reads.read(file, offset + start, part)
        count(len(part))


@contextmanager
def _noting(problems: list[VerifyReport.Problem], where: str) -> Iterator[None]:
    """Context manager that adds an error of the block to ``problems`` and does not raise it."""
    try:
        yield
    except VescaleError as error:
        problems.append(VerifyReport.Problem(where, str(error)))
