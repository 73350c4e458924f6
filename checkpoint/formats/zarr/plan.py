"""Planning a conversion to a native checkpoint in its zarr form: one zarr v3 array per tensor.

The folder is what ``save(format="zarr")`` of one rank writes (see FORMAT.md), so that `load` reads it on any number of
ranks, and any zarr library reads its arrays. Arrays are cut along dim 0 into chunks of at most 32 MiB: plain bytes and
their crc32c. The rank's file with the checksums of all chunks is written after the chunks; the manifest is written
last.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from vescale_fsdp.checkpoint.formats.native.tree import native_manifest, native_tree
from vescale_fsdp.checkpoint.manifest.file_names import MANIFEST_NAME, ZARR_NAME
from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.manifest.rank_file import RankFile, pack_table
from vescale_fsdp.checkpoint.manifest.structure import Entry, Structure
from vescale_fsdp.checkpoint.manifest.zarr_layout import (
    Chunk,
    array_json,
    as_arrays,
    chunk_file,
    clipped,
    group_files,
)
from vescale_fsdp.checkpoint.moves.carried_state import CarriedState
from vescale_fsdp.checkpoint.moves.plan import (
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
from vescale_fsdp.checkpoint.moves.stored_tensor import TensorInfo
from vescale_fsdp.checkpoint.moves.tensor_view import TensorView
from vescale_fsdp.checkpoint.storage.checksums import CRC32C, CRC_BYTES, checksum_of

_CHUNK_BYTES = 32 * 2**20  # 32 MiB


def plan_zarr(state: CarriedState) -> OutputPlan:
    """Chunk files; then the arrays' metadata, the file with the checksums of chunks, and the manifest.

    Raises:
        CheckpointError: for values that the format cannot hold.
        ConversionError: for types that torch lacks, or two tensors whose keys, joined, are one name.
    """
    tree, names = native_tree(state, lambda name: -state.views[name].info.dtype.itemsize)
    views = [state.views[name] for _, name in names]
    entries = tuple(
        Entry(stored, view.info.dtype.required_torch_name, view.info.shape, 0, ())  # no cuts: one rank
        for (stored, _), view in zip(names, views, strict=True)
    )
    whole = native_manifest("zarr", Structure(tree, entries, ((),), ()), views, 1)
    manifest = as_arrays(whole, [_chunk_shape(view.info) for view in views])
    rank_file = RankFile(manifest, 0)
    crcs: dict[Chunk, int] = {}  # of the chunks that are written

    def read_missing_crcs(written: Written) -> None:
        """Read checksums of chunks that another process, or an earlier run, has written: they end the chunks' files."""
        for chunk in rank_file.chunks:
            if chunk not in crcs:
                nbytes = chunk.box.numel * manifest.entries[chunk.tensor_index].itemsize
                crc = written(chunk_file(manifest, *chunk), nbytes, CRC_BYTES)
                crcs[chunk] = int.from_bytes(crc, "little")

    def rank_file_bytes() -> bytes:
        body = rank_file.header + rank_file.chunk_table(crcs)
        stripes = (body[slice(*rank_file.stripe(index))] for index in range(rank_file.num_stripes))
        return body + pack_table([checksum_of(stripe) for stripe in stripes])

    # Each array's JSON is computed when it is written: all JSON together is larger than the rest of the plan.
    arrays = [
        _small_file(f"{path}/{ZARR_NAME}", partial(array_json, manifest, index))
        for index, path in enumerate(manifest.array_paths)
    ]
    *groups, root = [
        _small_file(name, partial(bytes, content)) for name, content in group_files(manifest).items()
    ]
    checksums = _small_file(rank_file.name, rank_file_bytes)
    closing = (*arrays, *groups, checksums, root, _small_file(MANIFEST_NAME, manifest.to_bytes))
    files = tuple(_chunk_plan(manifest, chunk, views[chunk.tensor_index], crcs) for chunk in rank_file.chunks)
    return OutputPlan("zarr", files, closing, is_stale=_is_stale, when_written=read_missing_crcs)


def _small_file(name: str, content: Callable[[], bytes]) -> ClosingFile:
    return ClosingFile(name, lambda: (content(),))


def _is_stale(name: str) -> bool:
    """Whether a file is one of a converted checkpoint. Older versions wrote arrays into the folder itself."""
    is_array_file = name.endswith((ZARR_NAME, "/c")) or "/c/" in name
    return name == MANIFEST_NAME or name.startswith("data-") or is_array_file


def _chunk_shape(info: TensorInfo) -> tuple[int, ...]:
    """Chunks of whole rows, at most `_CHUNK_BYTES` each."""
    if not info.shape:
        return ()
    rows = min(info.shape[0], max(1, _CHUNK_BYTES // (info.nbytes // info.shape[0]))) if info.numel else 1
    return (rows, *(max(1, size) for size in info.shape[1:]))  # zarr allows no chunk size of 0


def _chunk_plan(manifest: Manifest, chunk: Chunk, view: TensorView, crcs: dict[Chunk, int]) -> FilePlan:
    """A chunk's file: items, zeros up to a whole chunk, and their CRC-32C, which is also added to ``crcs``."""
    info, box = view.info, chunk.box
    inside = clipped(box, info.shape)
    start = box.offsets[0] * (info.numel // info.shape[0]) if info.shape else 0
    zeros = bytes((box.numel - inside.numel) * info.dtype.itemsize)

    def crc(crc_of: CrcOf) -> bytes:
        crcs[chunk] = CRC32C.combine(crc_of(0), CRC32C.of(zeros), len(zeros))
        return crcs[chunk].to_bytes(CRC_BYTES, "little")

    contents: list[Content] = [TensorItems(view, start, start + inside.numel, CRC32C)]
    if zeros:
        contents.append(FixedBytes(zeros))
    contents.append(ComputedBytes(CRC_BYTES, crc))
    return FilePlan(chunk_file(manifest, *chunk), tuple(contents))
