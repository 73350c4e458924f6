"""`plan_zarr`: plans a conversion to a native checkpoint in the zarr form, with one zarr v3 array per tensor.

The result equals what ``save(format="zarr")`` writes on a single rank (see FORMAT.md): `load` reads it on any number of
ranks, and any zarr library reads its arrays. The zarr library makes the metadata. It does not encode the chunks: its
codecs need a whole chunk in memory, twice, while a conversion copies byte ranges within its memory budget, in several
threads, and resumes inside a file. Arrays are cut along dim 0 into chunks of at most 32 MiB, stored as plain bytes and
a crc32c. The rank's file with the checksums of all chunks is written after the chunks, and the manifest last.
"""

from __future__ import annotations

from dataclasses import dataclass

from vescale_fsdp.checkpoint.manifest.file_names import ZARR_NAME, is_own_file
from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.manifest.rank_file import RankFile, pack_table
from vescale_fsdp.checkpoint.manifest.structure import Entry, Structure
from vescale_fsdp.checkpoint.manifest.zarr_layout import (
    Chunk,
    array_json,
    as_arrays,
    chunk_file,
    clipped,
    node_files,
)
from vescale_fsdp.checkpoint.storage.checksums import CRC32C, CRC_BYTES, checksum_of
from vescale_fsdp.conversion.engine.carried_state import CarriedState
from vescale_fsdp.conversion.engine.plan import (
    ClosingFile,
    ComputedBytes,
    Content,
    CrcOf,
    FilePlan,
    FixedBytes,
    OutputPlan,
    TensorItems,
    Written,
)
from vescale_fsdp.conversion.engine.stored_tensor import TensorInfo
from vescale_fsdp.conversion.engine.tensor_view import TensorView
from vescale_fsdp.conversion.formats.native.tree import native_manifest, native_tree

_CHUNK_BYTES = 32 * 2**20  # 32 MiB; largest chunk, unless a single row is larger


def plan_zarr(state: CarriedState) -> OutputPlan:
    """Return the plan of the chunk files, the arrays' metadata, the rank's file and the manifest.

    Raises:
        CheckpointError: for values that the format cannot store.
        ConversionError: for dtypes that torch lacks, or two tensors whose joined keys are the same name.
    """
    # Tensors are in the order of falling item size, as FORMAT.md requires.
    tree, names = native_tree(state, lambda name: -state.views[name].info.dtype.itemsize)
    views = [state.views[name] for _, name in names]
    entries = tuple(
        Entry(stored, view.info.dtype.required_torch_name, view.info.shape, 0, ())  # no cuts: one rank
        for (stored, _), view in zip(names, views, strict=True)
    )
    whole = native_manifest("zarr", Structure(tree, entries, ((),), ()), views, 1, state.metadata)
    manifest = as_arrays(whole, [_chunk_shape(view.info) for view in views])
    rank_file = RankFile(manifest, 0)
    crcs: dict[Chunk, int] = {}  # crc32c of the chunks that this process has written

    def read_missing_crcs(written: Written) -> None:
        """Read the checksums of chunks that another process or an earlier run wrote, from the ends of their files."""
        for chunk in rank_file.chunks:
            if chunk not in crcs:
                nbytes = chunk.box.numel * manifest.entries[chunk.tensor_index].itemsize
                crc = written(chunk_file(manifest, *chunk), nbytes, CRC_BYTES)
                crcs[chunk] = int.from_bytes(crc, "little")

    def rank_file_bytes() -> bytes:
        """Return the rank's file, after all chunks are written."""
        body = rank_file.header + rank_file.chunk_table(crcs)
        extents = map(rank_file.stripe, range(rank_file.num_stripes))
        stripes = (body[extent.offset : extent.stop] for extent in extents)
        return body + pack_table([checksum_of(stripe) for stripe in stripes])

    arrays = [
        ClosingFile(f"{path}/{ZARR_NAME}", _ArrayJson(manifest, index))
        for index, path in enumerate(manifest.array_paths)
    ]
    *groups, root = [ClosingFile(name, _Bytes(content)) for name, content in node_files(manifest).items()]
    checksums = ClosingFile(rank_file.name, lambda: (rank_file_bytes(),))
    last = ClosingFile(manifest.name, lambda: (manifest.to_bytes(),))
    closing = (*arrays, *groups, checksums, root, last)
    files = tuple(_chunk_plan(manifest, chunk, views[chunk.tensor_index], crcs) for chunk in rank_file.chunks)
    return OutputPlan("zarr", files, closing, is_stale=is_own_file, when_written=read_missing_crcs)


# Objects with slots, because a plan has one for each array: functions and partials take five times the memory.


@dataclass(frozen=True, slots=True)
class _Bytes:
    """The content of a file, in one piece."""

    content: bytes

    def __call__(self) -> tuple[bytes]:
        return (self.content,)


@dataclass(frozen=True, slots=True)
class _ArrayJson:
    """The metadata of an array, computed when it is written: all JSON together is larger than the rest of the plan."""

    manifest: Manifest
    index: int

    def __call__(self) -> tuple[bytes]:
        return (array_json(self.manifest, self.index),)


@dataclass(frozen=True, slots=True)
class _ChunkCrc:
    """The CRC-32C of a chunk's items and of the zeros after them, which it also puts into ``crcs``."""

    chunk: Chunk
    zeros: bytes
    crcs: dict[Chunk, int]

    def __call__(self, crc_of: CrcOf) -> bytes:
        crc = CRC32C.combine(crc_of(0), CRC32C.of(self.zeros), len(self.zeros))
        self.crcs[self.chunk] = crc
        return crc.to_bytes(CRC_BYTES, "little")


def _chunk_shape(info: TensorInfo) -> tuple[int, ...]:
    """Return the chunk sizes: whole rows, at most `_CHUNK_BYTES`, but at least one row."""
    if not info.shape:
        return ()
    # A tensor without elements is a special case, because its rows may have no bytes to divide by.
    rows = min(info.shape[0], max(1, _CHUNK_BYTES // (info.nbytes // info.shape[0]))) if info.numel else 1
    return (rows, *(max(1, size) for size in info.shape[1:]))  # zarr allows no chunk size of 0


def _chunk_plan(manifest: Manifest, chunk: Chunk, view: TensorView, crcs: dict[Chunk, int]) -> FilePlan:
    """Return the plan of a chunk's file: items, zeros beyond the tensor's edge, and their CRC-32C.

    Args:
        crcs: receives the CRC-32C when the file is written.
    """
    info, box = view.info, chunk.box
    inside = clipped(box, info.shape)
    start = box.offsets[0] * (info.numel // info.shape[0]) if info.shape else 0
    zeros = bytes((box.numel - inside.numel) * info.dtype.itemsize)

    contents: list[Content] = [TensorItems(view, start, start + inside.numel, CRC32C)]
    if zeros:
        contents.append(FixedBytes(zeros))
    contents.append(ComputedBytes(CRC_BYTES, _ChunkCrc(chunk, zeros, crcs)))
    return FilePlan(chunk_file(manifest, *chunk), tuple(contents))
