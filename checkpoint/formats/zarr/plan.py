"""Planning a native checkpoint in its zarr form: one zarr v3 array per tensor, which any zarr library reads.

The folder is what ``save(format="zarr")`` of one rank makes (see the engine's FORMAT.md), so that `load` takes it
at any world size. Arrays are cut along dim 0 into chunks of at most 32 MiB, plain bytes and their crc32c. The
checksums of all chunks are known once these are written: the file that holds them closes the result, and the
manifest comes last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    structure, views = _structure(state)
    whole = native_manifest("zarr", structure, views, 1)
    manifest = as_arrays(whole, [_chunk_shape(view.info) for view in views])
    known: dict[Chunk, int] = {}
    sums = RankFile(manifest, 0)
    files = [_chunk_file(manifest, chunk, views[chunk.tensor_index], known) for chunk in sums.chunks]
    # Made when they are written: all together are larger than the rest of the plan.
    closing = [
        ClosingFile(f"{path}/{ZARR_NAME}", partial(_array_json, manifest, index))
        for index, path in enumerate(manifest.array_paths)
    ]
    groups = [_small(name, content) for name, content in group_files(manifest).items()]
    closing += [*groups[:-1], ClosingFile(sums.name, lambda: (_sealed(sums, known),)), groups[-1]]
    closing.append(ClosingFile(MANIFEST_NAME, lambda: (manifest.to_bytes(),)))
    learn = partial(_learn_checksums, manifest, sums.chunks, known)
    return OutputPlan("zarr", tuple(files), tuple(closing), is_stale=_is_stale, when_written=learn)


def _is_stale(name: str) -> bool:
    of_before = name.endswith((ZARR_NAME, "/c")) or "/c/" in name  # arrays lay in the folder itself
    return name == MANIFEST_NAME or name.startswith("data-") or of_before


def _small(name: str, content: bytes) -> ClosingFile:
    return ClosingFile(name, lambda: (content,))


def _array_json(manifest: Manifest, index: int) -> tuple[bytes]:
    return (array_json(manifest, index),)


def _structure(state: CarriedState) -> tuple[Structure, list[TensorView]]:
    """State tree and tensors in file order, whole on one rank, with the view of each."""
    tree, names = native_tree(state, lambda name: -state.views[name].info.dtype.itemsize)
    views = [state.views[name] for _, name in names]
    entries = tuple(
        Entry(stored, view.info.dtype.required_torch_name, view.info.shape, 0, ())
        for (stored, _), view in zip(names, views, strict=True)
    )
    return Structure(tree, entries, ((),), ()), views


def _chunk_shape(info: TensorInfo) -> tuple[int, ...]:
    """Whole rows, of which a chunk has as many as its size allows."""
    if not info.shape:
        return ()
    rows = min(info.shape[0], max(1, _CHUNK_BYTES // (info.nbytes // info.shape[0]))) if info.numel else 1
    return (rows, *(max(1, size) for size in info.shape[1:]))


def _chunk_file(manifest: Manifest, chunk: Chunk, view: TensorView, known: dict[Chunk, int]) -> FilePlan:
    """Data, zeros up to a whole chunk, and the CRC-32C of both, which is remembered too."""
    info, box = view.info, chunk.box
    inside = clipped(box, info.shape)
    start = box.offsets[0] * (info.numel // info.shape[0]) if info.shape else 0
    zeros = bytes((box.numel - inside.numel) * info.dtype.itemsize)
    contents: list[Content] = [TensorItems(view, start, start + inside.numel, CRC32C)]
    if zeros:
        contents.append(FixedBytes(zeros))
    contents.append(ComputedBytes(CRC_BYTES, partial(_checksum, known, chunk, zeros)))
    return FilePlan(chunk_file(manifest, *chunk), tuple(contents))


def _checksum(known: dict[Chunk, int], chunk: Chunk, zeros: bytes, crc_of: CrcOf) -> bytes:
    known[chunk] = CRC32C.combine(crc_of(0), CRC32C.of(zeros), len(zeros))
    return known[chunk].to_bytes(CRC_BYTES, "little")


def _learn_checksums(
    manifest: Manifest, chunks: Iterable[Chunk], known: dict[Chunk, int], written: Written
) -> None:
    """The checksums of chunks that an earlier run or another process wrote, from the ends of their files."""
    for chunk in chunks:
        if chunk not in known:
            nbytes = chunk.box.numel * manifest.entries[chunk.tensor_index].itemsize
            known[chunk] = int.from_bytes(written(chunk_file(manifest, *chunk), nbytes, CRC_BYTES), "little")


def _sealed(file: RankFile, known: Mapping[Chunk, int]) -> bytes:
    """A rank's file that holds nothing but checksums of chunks."""
    body = file.header + file.chunk_table(known)
    stripes = (body[slice(*file.stripe(index))] for index in range(file.num_stripes))
    return body + pack_table([checksum_of(stripe) for stripe in stripes])
