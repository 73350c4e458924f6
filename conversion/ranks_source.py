"""Reading a folder with one torch.save file per rank, as accelerate, verl and hand-written FSDP2 loops
leave them.

    pytorch_model_fsdp_rank0.bin  pytorch_model_fsdp_rank1.bin  optimizer_rank0.bin ...
    model_world_size_2_rank_0.pt  model_world_size_2_rank_1.pt

Sharded tensors are DTensors: each file names its rank's place in the mesh and the placements, which give
the box. Placements whose boxes do not follow from that (strided shards, partial sums) are refused, and the
boxes of all files must tile every tensor, so a missing rank is found. Tensors that are not sharded are
taken from the first rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from vescale_fsdp.conversion.nesting import Path, flatten, name_of
from vescale_fsdp.conversion.source import Source, StoredValue
from vescale_fsdp.conversion.store import Store
from vescale_fsdp.conversion.tensors import StoredChunk, StoredTensor, TensorInfo, whole_box
from vescale_fsdp.conversion.torch_archive import TorchArchive
from vescale_fsdp.conversion.unpickle import ShardRef, TensorRef
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError, explain
from vescale_fsdp.geometry import Box

__all__ = ["open_ranks", "rank_files"]

_RANK_FILE = re.compile(r"(.+?)(?:_world_size_\d+)?_rank_?(\d+)\.(?:bin|pt|pth)")
_CONTAINERS = {"pytorch_model_fsdp": "model", "optim": "optimizer", "optimizer_0": "optimizer"}


def rank_files(files: Iterable[str]) -> dict[str, list[str]]:
    """Files of each state (``model``, ``optimizer``, ...), in order of rank; empty if there are none."""
    found: dict[str, dict[int, str]] = {}
    for file in files:
        match = _RANK_FILE.fullmatch(file)
        if match:
            found.setdefault(_CONTAINERS.get(match[1], match[1]), {})[int(match[2])] = file
    return {name: [ranks[rank] for rank in sorted(ranks)] for name, ranks in sorted(found.items())}


def open_ranks(store: Store, *, trust_pickle: bool = False) -> Source:
    """Open a folder of per-rank files; reads their directories and pickles.

    Raises:
        ConversionError: for placements that do not say where a part belongs, or states that are no dicts.
        CorruptCheckpointError: if a file is damaged, or the parts do not tile a tensor (a rank is missing).
    """
    tensors: dict[str, StoredTensor] = {}
    values: dict[str, StoredValue] = {}
    paths: dict[str, Path] = {}
    groups = rank_files(store.list_files())
    for container, files in groups.items():
        leaves = [(file, *_leaves(store, file, trust=trust_pickle)) for file in files]
        for path in dict.fromkeys(path for _, _, found in leaves for path in found):
            name = name_of((container, *path))
            paths[name] = (container, *path)
            held = [(file, archive, found[path]) for file, archive, found in leaves if path in found]
            if isinstance(held[0][2], (ShardRef, TensorRef)):
                tensors[name] = _stored(name, held)
            else:
                values[name] = _constant(held[0][2])
    facts = {"rank files": ", ".join(f"{name}: {len(files)}" for name, files in groups.items())}
    return Source("ranks", store, tensors, values, paths, facts, trust_pickle)


def _constant(value: Any) -> StoredValue:
    return lambda: value


def _leaves(store: Store, file: str, *, trust: bool) -> tuple[TorchArchive, dict[Path, Any]]:
    where = f"{store.url}/{file}"
    archive = TorchArchive(
        lambda offset, nbytes: store.read(file, offset, nbytes),
        store.required_size(file),
        where=where,
        trust=trust,
    )
    content = archive.content
    if not isinstance(content, Mapping):
        raise ConversionError(
            explain(
                "a rank's file holds no state dict",
                expected="a dict of tensors, nested or not",
                got=type(content).__name__,
                where=where,
                todo="save the state dict itself",
            )
        )
    return archive, flatten(content, lambda value: isinstance(value, (TensorRef, ShardRef)))


def _stored(name: str, held: list[tuple[str, TorchArchive, Any]]) -> StoredTensor:
    file, archive, first = held[0]
    if isinstance(first, TensorRef):
        info = TensorInfo(name, first.shape, first.dtype)
        return StoredTensor(info, _chunks(file, archive, first, whole_box(first.shape)))
    info = TensorInfo(name, first.shape, first.local.dtype)
    axes = [1 + max(part.coordinates[i] for _, _, part in held) for i in range(len(first.coordinates))]
    chunks: dict[Box, StoredChunk] = {}
    for file, archive, part in held:
        box = _box(name, file, part, axes)
        for chunk in _chunks(file, archive, part.local, box):
            chunks.setdefault(box, chunk)  # replicas hold the same
    return StoredTensor(info, tuple(chunks.values()))


def _chunks(file: str, archive: TorchArchive, ref: TensorRef, box: Box) -> tuple[StoredChunk, ...]:
    if not box.numel:
        return ()
    nbytes = box.numel * ref.dtype.itemsize
    return (StoredChunk(box, file, archive.tensor_offset(ref), nbytes, ref.strides),)


def _box(name: str, file: str, part: ShardRef, axes: list[int]) -> Box:
    """The rank's box: each mesh axis cuts what the ones before left, in chunks of the ceiling."""
    offsets, sizes = [0] * len(part.shape), list(part.shape)
    for axis, placement in enumerate(part.placements):
        kind = type(placement).__name__
        if kind == "Replicate":
            continue
        if kind != "Shard":
            raise ConversionError(
                explain(
                    "a tensor's placement does not say where its parts belong",
                    expected="Shard and Replicate",
                    got=kind,
                    where=f"{name} in {file}",
                    todo="save full tensors, or with torch.distributed.checkpoint",
                )
            )
        dim = placement.dim
        chunk = -(-sizes[dim] // axes[axis])
        start = min(part.coordinates[axis] * chunk, sizes[dim])
        offsets[dim] += start
        sizes[dim] = min(chunk, sizes[dim] - start)
    if tuple(sizes) != part.local.shape:
        raise CorruptCheckpointError(
            explain(
                "a rank's part does not have the shape that its place in the mesh gives",
                expected=f"shape {tuple(sizes)} at {part.coordinates} of a mesh of {axes}",
                got=f"shape {part.local.shape}",
                where=f"{name} in {file}",
                todo="check that the files of all ranks are there, and from one save",
            )
        )
    return Box(tuple(offsets), tuple(sizes))
