"""Read torch.save files by range: one file with a state dict, or a folder with one file per rank.

    state.pt                                                              open_torch
    pytorch_model_fsdp_rank0.bin  optimizer_rank0.bin ..                  open_ranks: accelerate
    model_world_size_2_rank_0.pt  extra_state_world_size_2_rank_0.pt ..   open_ranks: verl

What each rank pickled of a tensor says where its part belongs:

    DTensor         placements and the rank's coordinates in the mesh give the box
    ShardedTensor   lists its boxes
    plain tensor    whole on every rank, so the first rank's copy is read; so are numpy arrays, stored in the pickle

`StoredTensor` checks that the boxes tile the tensor, so a missing rank is an error. Placements that give no boxes
(partial sums, strides that do not fit the mesh) are refused. Other state (schedulers, random states) is left out where
ranks disagree about it or its pickle names more than tensors and plain values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vescale_fsdp.checkpoint.formats.torch_save.archive_reader import TorchArchive
from vescale_fsdp.checkpoint.formats.torch_save.pickle_reader import (
    ArrayRef,
    PiecesRef,
    ShardRef,
    TensorRef,
    is_plain,
)
from vescale_fsdp.checkpoint.manifest.distribution import shard_order
from vescale_fsdp.checkpoint.moves.source import BoxReader, Source, StoredValue, constant
from vescale_fsdp.checkpoint.moves.stored_tensor import StoredChunk, StoredTensor, TensorInfo
from vescale_fsdp.checkpoint.state.nesting import Path, flatten, name_of
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError
from vescale_fsdp.layout.geometry import Box, whole_box


@dataclass(frozen=True)
class HeldTensor:
    """What one rank's file holds of a tensor."""

    file: str
    archive: TorchArchive
    ref: Any  # a TensorRef, ShardRef, PiecesRef or ArrayRef


def is_tensor_ref(value: Any) -> bool:
    """Whether a leaf of an unpickled state is a tensor, whole or in part."""
    return isinstance(value, (TensorRef, ShardRef, PiecesRef, ArrayRef))


def stored_tensor(name: str, held: Sequence[HeldTensor]) -> StoredTensor:
    """The whole tensor of which ranks hold these parts.

    Raises:
        ConversionError: for placements that do not say where a part belongs.
        CorruptCheckpointError: if the parts do not tile it, or one has another shape than its place gives.
    """
    first = held[0].ref
    if isinstance(first, ArrayRef):
        info, box = TensorInfo(name, first.shape, first.dtype), whole_box(first.shape)
        return StoredTensor(info, (StoredChunk(box, "", 0, info.nbytes),) * bool(box.numel))
    if isinstance(first, TensorRef):
        box = whole_box(first.shape)
        chunks = _chunks(name, held[0], first, box)
        return StoredTensor(TensorInfo(name, first.shape, first.dtype), tuple(chunks))
    parts: dict[Box, StoredChunk] = {}
    for part in held:
        for box, ref in _boxes(name, part, held):
            for chunk in _chunks(name, part, ref, box):
                parts.setdefault(box, chunk)  # replicas hold the same
    dtype = first.local.dtype if isinstance(first, ShardRef) else first.dtype
    return StoredTensor(TensorInfo(name, first.shape, dtype), tuple(parts.values()))


def box_reader(ref: object) -> BoxReader | None:
    """What reads a tensor whose bytes lie in no file as they are; None for all others."""
    return ref.read if isinstance(ref, ArrayRef) else None


def differing_files(held: Sequence[HeldTensor]) -> tuple[str, ...]:
    """Files whose copy of a whole tensor is not the first file's: other shape, type, flags or checksum."""
    if not isinstance(held[0].ref, (TensorRef, ArrayRef)):
        return ()

    def content(part: HeldTensor) -> tuple[Any, ...]:
        ref = part.ref
        if not isinstance(ref, TensorRef):
            return (ref.shape, ref.dtype, ref.data) if isinstance(ref, ArrayRef) else ()
        crc = 0 if 0 in ref.shape else part.archive.storage_crc(ref.storage_key)
        if crc is None:
            crc = part.archive.find_crc(ref.storage_key)
        return (ref.shape, ref.dtype, ref.strides, ref.storage_offset, ref.signs, crc)

    expected = content(held[0])
    return tuple(part.file for part in held[1:] if content(part) != expected)


def _chunks(name: str, part: HeldTensor, ref: TensorRef, box: Box) -> Iterator[StoredChunk]:
    if box.numel:
        yield part.archive.chunk(box, part.file, 0, ref, f"tensor {name} in {part.file}")


def _boxes(name: str, part: HeldTensor, held: Sequence[HeldTensor]) -> Iterator[tuple[Box, TensorRef]]:
    if isinstance(part.ref, PiecesRef):
        for offsets, ref in part.ref.pieces:
            yield Box(offsets, ref.shape), ref
        return
    axes = [1 + max(p.ref.coordinates[i] for p in held) for i in range(len(part.ref.coordinates))]
    yield _dtensor_box(name, part.file, part.ref, axes), part.ref.local


def _dtensor_box(name: str, file: str, part: ShardRef, axes: list[int]) -> Box:
    """The rank's box: each mesh axis cuts what the ones before left, in chunks of the ceiling."""
    box = whole_box(part.shape)
    for axis in _cutting_order(name, file, part, axes):
        box = box.chunk(part.placements[axis].dim, axes[axis], part.coordinates[axis])
    if box.sizes != part.local.shape:
        raise CorruptCheckpointError(
            "A rank's part does not have the shape that its place in the mesh gives.",
            expected=f"shape {box.sizes} at {part.coordinates} of a mesh of {axes}",
            got=f"shape {part.local.shape}",
            where=f"{name} in {file}",
            todo="check that the files of all ranks are there, and from one save",
        )
    return box


def _cutting_order(name: str, file: str, part: ShardRef, axes: list[int]) -> list[int]:
    """Mesh axes that cut the tensor, in the order in which they do."""
    kinds = [type(placement).__name__ for placement in part.placements]
    if odd := set(kinds) - {"Shard", "_StridedShard", "Replicate"}:
        raise _unplaced(name, file, "Shard and Replicate", min(odd))
    shards = {
        axis: (placement.dim, placement.split_factor if kind == "_StridedShard" else 1)
        for axis, (kind, placement) in enumerate(zip(kinds, part.placements, strict=True))
        if kind != "Replicate"
    }
    order = shard_order(shards, axes)
    if order is None:
        factors = [factor for _, factor in shards.values() if factor != 1]
        expected = f"split factors that are sizes of later axes over the same dim in a mesh of {axes}"
        raise _unplaced(name, file, expected, factors)
    return order


def _unplaced(name: str, file: str, expected: str, got: object) -> ConversionError:
    return ConversionError(
        "A tensor's placement does not say where its parts belong.",
        expected=expected,
        got=got,
        where=f"{name} in {file}",
        todo="save full tensors, or with torch.distributed.checkpoint",
    )


@dataclass(frozen=True)
class StateFile:
    """One torch.save file that holds a state dict."""

    file: str
    archive: TorchArchive
    leaves: dict[Path, Any]  # tensors as what `is_tensor_ref` knows, everything else as itself


def is_torch_file(store: Storage, file: str) -> bool:
    """Whether a file begins like a torch.save archive (a zip)."""
    size = store.size(file)
    return size is not None and size >= 4 and store.read(file, 0, 4) == b"PK\x03\x04"


def open_archive(store: Storage, file: str, *, trust: bool = False, stand_ins: bool = False) -> TorchArchive:
    """A torch.save file, of which the end is read; ``trust`` and ``stand_ins`` as in `TorchArchive`.

    Raises:
        ConversionError: if it has the format from before zip archives.
        CorruptCheckpointError: if it is not there.
    """
    where = f"{store.where}/{file}"
    size = store.required_info(file).size_bytes
    if not is_torch_file(store, file):
        raise ConversionError(
            "This torch.save file cannot be read by range.",
            expected="the zip format that torch has written since 1.6",
            got="another format",
            where=where,
            todo="load it with torch and save it again",
        )
    return TorchArchive(
        lambda offset, nbytes: store.read(file, offset, nbytes),
        size,
        where=where,
        trust=trust,
        stand_ins=stand_ins,
    )


def open_state_file(store: Storage, file: str, *, trust: bool, stand_ins: bool = False) -> StateFile:
    """Read the directory and the pickle of a torch.save file; ``trust`` and ``stand_ins`` as in `TorchArchive`.

    Raises:
        ConversionError: if it holds no dict, or its pickle names more than tensors need.
        CorruptCheckpointError: if it is damaged.
    """
    where = f"{store.where}/{file}"
    archive = open_archive(store, file, trust=trust, stand_ins=stand_ins)
    content = archive.content
    if not isinstance(content, Mapping):
        raise ConversionError(
            "The file holds no state dict.",
            expected="a dict of tensors, nested or not",
            got="a tensor" if is_tensor_ref(content) else type(content).__name__,
            where=where,
            todo="save model.state_dict() or a dict that contains it",
        )
    leaves = flatten(content, is_tensor_ref)
    if flat := next((path for path in leaves if str(path[-1]).endswith("_flat_param")), None):
        raise ConversionError(
            "FSDP1 has flattened these parameters, and the file does not say how.",
            expected="parameters under their own names",
            got=name_of(flat),
            where=where,
            todo="load it into the model that saved it, and save with StateDictType.SHARDED_STATE_DICT",
        )
    return StateFile(file, archive, leaves)


def open_torch(store: Storage, file: str, *, trust_pickle: bool = False) -> Source:
    """Open a torch.save file; reads its directory and its pickle only.

    Raises:
        ConversionError: if it holds no dict, or its pickle names more than tensors need.
        CorruptCheckpointError: if it is damaged, or is one rank's file of several.
    """
    state = open_state_file(store, file, trust=trust_pickle)
    tensors: dict[str, StoredTensor] = {}
    values: dict[str, StoredValue] = {}
    readers: dict[str, BoxReader] = {}
    paths = {name_of(path): path for path in state.leaves}
    for name, leaf in zip(paths, state.leaves.values(), strict=True):
        if not is_tensor_ref(leaf):
            values[name] = constant(leaf)
            continue
        tensors[name] = stored_tensor(name, [HeldTensor(file, state.archive, leaf)])
        if (reader := box_reader(leaf)) is not None:
            readers[name] = reader
    return Source("torch", store, tensors, values, paths, readers=readers, file=file)


_RANK_FILE = re.compile(r"(.+?)(?:_world_size_(\d+))?_rank_?(\d+)\.(?:bin|pt|pth)")
_STATES = ("model", "optimizer")
_CONTAINERS = {
    "pytorch_model_fsdp": "model",
    "optim": "optimizer",
    "optimizer_0": "optimizer",
    "optimizer": "optimizer",
}


def rank_files(files: Iterable[str]) -> dict[str, list[str]]:
    """Files of each state (``model``, ``optimizer``, ...), in order of rank; empty if there are none.

    Raises:
        CorruptCheckpointError: if ranks are missing.
    """
    found: dict[str, dict[int, str]] = {}
    worlds: dict[str, int] = {}
    for file in files:
        match = _RANK_FILE.fullmatch(file)
        if match and "/" not in file:
            name = _CONTAINERS.get(match[1], match[1])
            found.setdefault(name, {})[int(match[3])] = file
            worlds[name] = max(worlds.get(name, 0), int(match[2] or 0), int(match[3]) + 1)
    for name, ranks in found.items():
        if missing := sorted(set(range(worlds[name])) - set(ranks)):
            raise CorruptCheckpointError(
                "Files of some ranks are missing.",
                expected=f"{worlds[name]} files like {min(ranks.values())}",
                got=f"none for rank {', '.join(map(str, missing[:8]))}",
                todo="copy the files of all ranks into one folder",
            )
    return {name: [ranks[rank] for rank in sorted(ranks)] for name, ranks in sorted(found.items())}


def open_ranks(store: Storage, *, trust_pickle: bool = False) -> Source:
    """Open a folder of per-rank files; reads their directories and pickles.

    Raises:
        ConversionError: for placements that do not say where a part belongs, states that are no dicts, or
            plain tensors that differ between ranks though nothing says which part each is.
        CorruptCheckpointError: if a file is damaged, or the parts do not tile a tensor (a rank is missing).
    """
    joined = _Joined()
    groups = rank_files(store.list_files())
    for container, files in groups.items():
        is_state = container in _STATES
        try:
            states = [
                open_state_file(store, file, trust=trust_pickle, stand_ins=not is_state) for file in files
            ]
            joined.take(_Joined.of(container, states))
        except ConversionError as error:
            # FSDP1's optimizers under flat parameters hold ranges that nothing names; the model is read without.
            if container == "model" or (is_state and "model" not in groups):
                raise
            joined.omitted.append(container)
            problem = str(error).splitlines()[0]
            joined.warnings.append(f"{container} is left out because of {files[0]}. {problem}")
    facts = {"rank files": ", ".join(f"{name}: {len(files)}" for name, files in groups.items())}
    return Source(
        "ranks",
        store,
        joined.tensors,
        joined.values,
        joined.paths,
        facts,
        joined.readers,
        omitted=tuple(joined.omitted),
        warnings=tuple(joined.warnings),
    )


class _Joined:
    """The states of all ranks as one."""

    def __init__(self) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        self.values: dict[str, StoredValue] = {}
        self.readers: dict[str, BoxReader] = {}
        self.paths: dict[str, Path] = {}
        self.omitted: list[str] = []
        self.warnings: list[str] = []

    def take(self, other: _Joined) -> None:
        """Add what another has."""
        self.tensors |= other.tensors
        self.values |= other.values
        self.readers |= other.readers
        self.paths |= other.paths
        self.omitted += other.omitted
        self.warnings += other.warnings

    @classmethod
    def of(cls, container: str, states: list[StateFile]) -> _Joined:
        """One state of all ranks.

        Raises:
            ConversionError: if plain tensors of a model or an optimizer differ, and nothing says how they belong.
        """
        found = cls()
        differing: list[tuple[str, str]] = []
        is_sharded = False
        for path in dict.fromkeys(path for state in states for path in state.leaves):
            name = name_of((container, *path))
            held = [HeldTensor(s.file, s.archive, s.leaves[path]) for s in states if path in s.leaves]
            if not is_tensor_ref(held[0].ref):
                found._add_value((container, *path), [part.ref for part in held])
                continue
            unlike = differing_files(held)[:1]
            if unlike and container not in _STATES:
                found.omitted.append(name)  # random states
                continue
            found.paths[name] = (container, *path)
            found.tensors[name] = stored_tensor(name, held)
            if (reader := box_reader(held[0].ref)) is not None:
                found.readers[name] = reader
            is_sharded |= isinstance(held[0].ref, (ShardRef, PiecesRef))
            differing += [(name, file) for file in unlike]
        if differing and not is_sharded:
            raise _no_place(*differing[0], states[0].file)
        found.warnings += [
            f"{name} is not sharded but differs between ranks: taken from {states[0].file}"
            for name, _ in differing
        ]
        return found

    def _add_value(self, path: Path, said: list[Any]) -> None:
        """A value, unless ranks disagree about it or it is none that can be carried."""
        name = name_of(path)
        if path[0] in _STATES or (is_plain(said[0]) and all(other == said[0] for other in said)):
            self.values[name] = constant(said[0])
            self.paths[name] = path
        else:
            self.omitted.append(name)


def _no_place(name: str, file: str, first: str) -> ConversionError:
    return ConversionError(
        "The ranks hold plain tensors that differ, and nothing says how they fit together.",
        expected="DTensors or ShardedTensors, or the same tensors on every rank",
        got=f"another {name} in {file} than in {first}",
        todo=f"save with torch.distributed.checkpoint; if {first} alone is the whole state, pass that file",
    )
