"""Verify an open checkpoint: every range that has a checksum, and all other bytes by reading them once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from vescale_fsdp.checkpoint.verify_report import VerifyReport
from vescale_fsdp.conversion.engine.source import Source
from vescale_fsdp.conversion.engine.stored_tensor import StoredChunk, StoredTensor, is_inflated
from vescale_fsdp.conversion.engine.tensor_view import SourceView, pieces_of
from vescale_fsdp.errors import VescaleError
from vescale_fsdp.layout.extent import Extent

_READ_BYTES = 4 * 2**20  # 4 MiB; largest read of bytes without a checksum


def verify_source(source: Source, deep: bool, progress: Callable[[int], object]) -> VerifyReport:
    """Verify every tensor and every value of an open checkpoint; without ``deep``, read the values alone."""
    problems: list[VerifyReport.Problem] = []
    read: list[int] = []
    num_checksums = 0

    def count(nbytes: int) -> None:
        read.append(nbytes)
        progress(nbytes)

    for name, tensor in source.tensors.items():
        with _noting(problems, name, name):
            # A chunk without a file is all zeros, or is decoded by the format's reader.
            chunks = [source.located(tensor.info, chunk) for chunk in tensor.chunks if chunk.extent.file]
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
            with _noting(problems, info.name, info.name):
                source.reads.verify_range(chunk.checked)
            count(chunk.checked.nbytes)
    # A small file can declare a huge tensor, by a stride of 0 that repeats items. Reading such a tensor would take
    # unbounded time, so only the stored bytes are read.
    if is_inflated(info.nbytes, tensor.stored_nbytes):
        for chunk in chunks:
            # 0 bytes for a chunk with a checksum: it was read above.
            nbytes = 0 if chunk.checked else chunk.stored_nbytes(info.dtype.itemsize)
            _read_extent(source, chunk.extent._replace(nbytes=nbytes), count)
    # Without chunks in files, the tensor is decoded by the format's reader; reading it shows whether that succeeds.
    elif not chunks or any(chunk.checked is None for chunk in chunks):
        extents = source.extents(info.name, 0, info.numel)
        if extents is not None:  # without numpy, whose import takes longer than reading a small checkpoint
            for extent in extents:
                _read_extent(source, extent, count)
        else:
            for piece in pieces_of(SourceView(source, info.name, info.name), _READ_BYTES):
                count(piece.nbytes)


def _read_extent(source: Source, extent: Extent, count: Callable[[int], None]) -> None:
    """Read an extent, and call ``count`` with the number of bytes of each read."""
    buffer = memoryview(bytearray(min(_READ_BYTES, extent.nbytes)))
    for part in extent.split(_READ_BYTES):
        source.reads.read(part.file, part.offset, buffer[: part.nbytes])
        count(part.nbytes)


@contextmanager
def _noting(problems: list[VerifyReport.Problem], where: str, *tensors: str) -> Iterator[None]:
    """Context manager that adds an error of the block to ``problems`` and does not raise it."""
    try:
        yield
    except VescaleError as error:
        problems.append(VerifyReport.Problem(where, str(error), tensors))
