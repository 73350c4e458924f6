"""Is this checkpoint whole? Everything its format can tell, down to the checksums of the data.

Opening a source already proves that metadata, file sizes, headers and index agree and that chunks tile
every tensor. This reads the rest: every record of every archive against what the metadata says of it, every
byte against the checksums the format has. Formats without checksums are read once, so that at least the
disk has spoken.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vescale_fsdp.checkpoint.manifest.file_names import MANIFEST_NAME
from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.moves.copying import Progress
from vescale_fsdp.checkpoint.moves.source import Source
from vescale_fsdp.checkpoint.moves.stored_tensor import StoredChunk, StoredTensor, is_inflated
from vescale_fsdp.checkpoint.moves.tensor_view import SourceView, pieces_of
from vescale_fsdp.conversion.formats.huggingface.repository import index_of, stem_in
from vescale_fsdp.errors import VescaleError
from vescale_fsdp.layout.foreign_json import parse_json

if TYPE_CHECKING:
    from vescale_fsdp.checkpoint.loading.file_checks import Check

_READ_BYTES = 4 * 2**20  # 4 MiB
_THREADS = 2  # one hashes while the other waits for the disk


@dataclass(frozen=True)
class CheckReport:
    """What was found.

    Args:
        tensors: tensors looked at.
        nbytes: bytes of them that were read.
        checksums: data records whose checksum was compared.
        problems: one text each; empty if all is well.

    Examples:
        >>> CheckReport(tensors=3, nbytes=1024, checksums=3, problems=()).problems
        ()
    """

    tensors: int
    nbytes: int
    checksums: int
    problems: tuple[str, ...]


def verify(source: Source, *, deep: bool = True, progress: Progress = lambda _: None) -> CheckReport:
    """Check an opened source; problems are collected, not raised.

    Args:
        source: the checkpoint.
        deep: read all data and compare checksums, not just headers.
        progress: called with bytes read since the last call.

    Examples:
        >>> import torch
        >>> from vescale_fsdp.conversion import open_source
        >>> torch.save({"w": torch.ones(4)}, "checked.pt")
        >>> verify(open_source("checked.pt")).problems
        ()
    """
    if source.kind == "native" and deep:
        return _verify_native(source, progress)
    problems: list[str] = []
    checked = _Checker(source, problems, progress)
    for name, tensor in source.tensors.items():
        with _noting(problems, name):
            checked.tensor(tensor, deep=deep)
    for name, value in source.values.items():
        with _noting(problems, name):
            value()
    problems += _folder_problems(source)
    return CheckReport(len(source.tensors), checked.nbytes, checked.checksums, tuple(problems))


def _verify_native(source: Source, progress: Progress) -> CheckReport:
    """Every stripe of every rank's file and every chunk of an array, against the checksums beside them."""
    from vescale_fsdp.checkpoint.loading.file_checks import check_files  # numpy

    problems: list[str] = []
    done: list[int] = []  # bytes of each stripe and chunk of tensors

    def tell(check: Check) -> None:
        if check.problem is not None:
            problems.append(f"{check.file}: {check.problem}")
        if check.holds_tensors and check.num_bytes:
            done.append(check.num_bytes)
            progress(check.num_bytes)

    where = f"{source.store.where}/{MANIFEST_NAME}"
    manifest = Manifest.from_bytes(source.store.read(MANIFEST_NAME), where=where)
    check_files(source.store, manifest, tell, threads=_THREADS)
    return CheckReport(len(source.tensors), sum(done), len(done), tuple(sorted(problems)))


@contextmanager
def _noting(problems: list[str], name: str) -> Iterator[None]:
    """An error inside becomes a line of the report."""
    try:
        yield
    except VescaleError as error:
        problems.append(f"{name}: {error}")


class _Checker:
    def __init__(self, source: Source, problems: list[str], progress: Progress) -> None:
        self._source, self._problems, self._progress = source, problems, progress
        self.nbytes = 0
        self.checksums = 0

    def tensor(self, tensor: StoredTensor, *, deep: bool) -> None:
        chunks = [chunk for chunk in tensor.chunks if chunk.file]
        chunks = [self._source.located(tensor.info, chunk) for chunk in chunks]
        ranges = [chunk.checked for chunk in chunks]
        if not deep:
            return
        for checked in ranges:
            if checked is not None:
                with _noting(self._problems, tensor.info.name):
                    self._source.prove_range(checked)
                self.checksums += 1
                self._count(checked.nbytes)
        if is_inflated(
            tensor.info.nbytes, tensor.stored_nbytes
        ):  # what is stored, and not what it stands for
            for chunk in chunks:
                self._read(chunk, tensor.info.dtype.itemsize)
        elif not ranges or None in ranges:
            name = tensor.info.name
            for piece in pieces_of(SourceView(self._source, name, name), _READ_BYTES):
                self._count(piece.nbytes)

    def _read(self, chunk: StoredChunk, itemsize: int) -> None:
        """Bytes of a chunk that have no checksum."""
        stop = chunk.offset + (0 if chunk.checked else chunk.stored_nbytes(itemsize))
        for start in range(chunk.offset, stop, _READ_BYTES):
            nbytes = min(_READ_BYTES, stop - start)
            self._source.read_bytes(chunk.file, start, memoryview(bytearray(nbytes)))
            self._count(nbytes)

    def _count(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self._progress(nbytes)


def _folder_problems(source: Source) -> list[str]:
    """What loaders of a Hugging Face folder would trip over although every file is sound."""
    if source.kind != "hf":
        return []
    found = []
    listed = source.store.list_files()
    index_file = index_of(stem_in(listed))
    used = {chunk.file for tensor in source.tensors.values() for chunk in tensor.chunks} | {index_file}
    # Weights for other loaders may lie beside (pytorch_model.bin, Mistral's consolidated.safetensors).
    others = [file for file in listed if file.endswith(".safetensors") and "/" not in file]
    stale = [file for file in others if file not in used and not file.startswith("consolidated")]
    if stale:
        found.append(f"weight files that are not part of the model: {', '.join(stale)}; remove them")
    if source.store.size(index_file) is not None:
        index = parse_json(source.store.read(index_file))
        total = (
            index.get("metadata", {}).get("total_size") if isinstance(index.get("metadata"), dict) else None
        )
        if total != source.nbytes:
            found.append(
                f"{index_file} says total_size {total}, the files hold {source.nbytes}; write it again"
            )
    return found
