"""Read torch.save files by byte ranges: one file with a state dict, or a folder with one file per rank.

    state.pt                                                              open_torch
    pytorch_model_fsdp_rank0.bin  optimizer_rank0.bin ..                  open_ranks: accelerate
    model_world_size_2_rank_0.pt  extra_state_world_size_2_rank_0.pt ..   open_ranks: verl

The position of a rank's part in the whole tensor depends on the class of the pickled tensor:

    DTensor         the box is computed from the placements and the rank's coordinates in the mesh
    ShardedTensor   contains the offsets of its boxes
    plain tensor    must be whole on every rank; the first rank's copy is read. The same holds for numpy arrays.

`StoredTensor` checks that the boxes tile the tensor, so a missing rank is an error. Placements without boxes (partial
sums, split factors that do not fit the mesh) are refused. Other state (schedulers, random states) is dropped if it
differs between ranks, or if it contains objects other than tensors and plain values.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from vescale_fsdp.checkpoint.state.nesting import Path, flatten, name_of
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.conversion.engine.entries import Entries
from vescale_fsdp.conversion.engine.source import BoxReader, Source
from vescale_fsdp.conversion.engine.stored_tensor import StoredChunk, StoredTensor, TensorInfo
from vescale_fsdp.conversion.formats.torch_save.archive_reader import LOCAL_SIGNATURE, TorchArchive
from vescale_fsdp.conversion.formats.torch_save.pickle_reader import (
    ArrayRef,
    PiecesRef,
    ShardRef,
    TensorRef,
    is_plain,
)
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError, DamagedFiles, option
from vescale_fsdp.layout.distribution import shard_order
from vescale_fsdp.layout.dtypes import dtype_from_torch
from vescale_fsdp.layout.extent import Extent
from vescale_fsdp.layout.geometry import Box, whole_box

if TYPE_CHECKING:
    import numpy as np

_STEP_DTYPE = dtype_from_torch("float32")  # the dtype of step counters in torch's optimizers
# The start of files of torch before 1.6: the pickle of torch's magic number.
_OLD_SIGNATURE = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


def is_torch_file(store: Storage, file: str) -> bool:
    """Whether a file begins like a torch.save archive (a zip)."""
    size = store.size(file)
    # >= 4: a shorter file has no signature.
    return size is not None and size >= 4 and store.read(file, 0, 4) == LOCAL_SIGNATURE


def is_tensor_ref(value: Any) -> bool:
    """Whether a leaf of an unpickled state stands for a tensor, or for a rank's part of a tensor."""
    return isinstance(value, (TensorRef, ShardRef, PiecesRef, ArrayRef))


@dataclass(frozen=True)
class TorchFile:
    """One torch.save file, read by byte ranges."""

    store: Storage
    name: str
    archive: TorchArchive

    @classmethod
    def open(cls, store: Storage, file: str, *, trust: bool = False, stand_ins: bool = False) -> TorchFile:
        """Open a file; reads its directory. For ``trust`` and ``stand_ins`` see `load_tensor_pickle`.

        Raises:
            ConversionError: if the file is not a zip archive, which torch has written since 1.6.
            CorruptCheckpointError: if the file is missing.
        """
        where = f"{store.where}/{file}"
        size = store.required_info(file).size_bytes
        if not is_torch_file(store, file):
            is_old = (
                size >= len(_OLD_SIGNATURE) and store.read(file, 0, len(_OLD_SIGNATURE)) == _OLD_SIGNATURE
            )
            raise ConversionError(
                "This file cannot be read by byte ranges.",
                expected="the zip format that torch.save has written since torch 1.6",
                got="the format of older versions" if is_old else "another format",
                where=where,
                todo=f"save it again: torch.save(torch.load({where!r}, map_location='cpu'), {f'{where}.new'!r})"
                if is_old
                else f"pass a file that torch.save wrote, or name the format with {option('kind')}",
            )
        read = partial(store.read, file)
        return cls(store, file, TorchArchive(read, size, where=where, trust=trust, stand_ins=stand_ins))

    @property
    def where(self) -> str:
        """Path of the file, for messages."""
        return f"{self.store.where}/{self.name}"

    @property
    def content(self) -> Mapping[str, Any]:
        """The saved object as a dict. For files of known trainers, which always save a dict.

        Raises:
            CorruptCheckpointError: if the file contains another object.
        """
        content = self.archive.content
        if not isinstance(content, Mapping):
            raise self.damaged("a dict", type(content).__name__)
        return content

    def leaves(self) -> dict[Path, Any]:
        """Return the leaves of the saved state dict by path; tensors are stand-ins (see `is_tensor_ref`).

        Raises:
            ConversionError: if the file contains no dict, its pickle names code that tensors do not need, or FSDP1 has
                flattened the parameters.
            CorruptCheckpointError: if the file is damaged.
        """
        content = self.archive.content
        if not isinstance(content, Mapping):
            raise ConversionError(
                "The file contains no state dict.",
                expected="a dict of tensors, nested or not",
                got="a tensor" if is_tensor_ref(content) else type(content).__name__,
                where=self.where,
                todo="save model.state_dict() or a dict that contains it",
            )
        leaves = flatten(content, is_tensor_ref)
        if flat := next((path for path in leaves if str(path[-1]).endswith("_flat_param")), None):
            raise ConversionError(
                "FSDP1 has flattened these parameters, and the file does not contain their names and shapes.",
                expected="parameters under their own names",
                got=name_of(flat),
                where=self.where,
                todo="load it into the model that saved it, and save with StateDictType.SHARDED_STATE_DICT",
            )
        return leaves

    def tensor(self, path: Path, ref: Any) -> StoredTensor:
        """Describe a tensor that is whole in this file."""
        return stored_tensor(name_of(path), [TensorPart(self, ref)])

    def chunk(self, ref: TensorRef, where: str, box: Box | None = None) -> StoredChunk:
        """Return the chunk of a tensor, or of ``box`` of a larger tensor; see `TorchArchive.chunk`."""
        archive = Extent(self.name, 0, self.archive.nbytes)
        return self.archive.chunk(box or whole_box(ref.shape), archive, ref, where)

    def flat(self, ref: Any) -> StoredTensor:
        """Describe a flat tensor of this file, which has no name: one chunk of contiguous items.

        Raises:
            CorruptCheckpointError: if the tensor is not 1D and contiguous.
        """
        if not isinstance(ref, TensorRef):
            raise self.damaged("flat, contiguous tensors of parameters", type(ref).__name__)
        if len(ref.shape) != 1 or (ref.shape[0] > 1 and ref.strides != (1,)):
            got = f"shape {ref.shape}, strides {ref.strides}"
            raise self.damaged("flat, contiguous tensors of parameters", got)
        return StoredTensor(TensorInfo("", ref.shape, ref.dtype), (self.chunk(ref, self.where),))

    def scalar(self, value: Any) -> object:
        """Read a scalar for comparisons: the bytes if it is a tensor, otherwise the number itself."""
        if not isinstance(value, TensorRef):
            return value
        return self.store.read(*self.chunk(value, self.where).extent)

    def add_leaf(self, entries: Entries, path: Path, leaf: Any) -> None:
        """Add a leaf of this file's state to ``entries``."""
        if is_tensor_ref(leaf):
            entries.add_tensor(path, self.tensor(path, leaf), _array_reader(leaf))
        else:
            entries.add_value(path, leaf)

    def add_all(self, entries: Entries, path: Path, value: Any) -> None:
        """Add the leaves inside a value to ``entries``; leaves other than tensors and plain values are unsupported."""
        for inner, leaf in flatten({path[-1]: value}, is_tensor_ref).items():
            leaf_path = (*path[:-1], *inner)
            if is_tensor_ref(leaf) or is_plain(leaf):
                self.add_leaf(entries, leaf_path, leaf)
            else:
                entries.unsupported.append(name_of(leaf_path))

    def add_step(self, entries: Entries, path: Path, value: Any) -> None:
        """Add the step count of one parameter, given the step count that the file stores for several parameters.

        Each parameter gets a copy: if parameters shared one tensor, the update of each would increment it.
        """
        if isinstance(value, TensorRef):
            tensor = self.tensor(path, value)
            data = self.scalar(value)
        else:
            info = TensorInfo(name_of(path), (), _STEP_DTYPE)
            # "": no file stores the tensor, whose bytes are in ``data``.
            tensor = StoredTensor(info, (StoredChunk(whole_box(()), Extent("", 0, 0)),))
            data = struct.pack("<f", float(value))
        assert isinstance(data, bytes)
        entries.add_tensor(path, tensor, partial(_read_box_of, data, tensor.info))

    def damaged(self, expected: str, got: object, todo: str | None = None) -> CorruptCheckpointError:
        """Make the error for a file whose entries do not have the structure of its format."""
        return CorruptCheckpointError(
            "A file of this checkpoint does not contain the expected entries.",
            expected=expected,
            got=got,
            where=self.where,
            todo=todo or "copy the files of all ranks again, all from one save",
        )


def _array_reader(ref: Any) -> BoxReader | None:
    """Return the function that reads boxes of a numpy array, which is stored in the pickle itself.

    Returns None for tensors, which are read by their byte ranges.
    """
    return ref.read if isinstance(ref, ArrayRef) else None


def _read_box_of(data: bytes, info: TensorInfo, box: Box) -> np.ndarray:
    """Return ``data`` as the items of a box, as raw bits."""
    import numpy as np

    return np.frombuffer(data, info.dtype.raw).reshape(box.sizes)


class TensorPart(NamedTuple):
    """The part of a tensor that one file contains: the whole tensor, or one rank's part.

    Attributes:
        ref: a `TensorRef`, `ShardRef`, `PiecesRef` or `ArrayRef`.
    """

    file: TorchFile
    ref: Any


def stored_tensor(name: str, parts: Sequence[TensorPart]) -> StoredTensor:
    """Describe the whole tensor whose parts are in the files of ranks.

    Raises:
        ConversionError: for placements that do not determine the boxes of the parts.
        CorruptCheckpointError: if the parts do not tile the tensor, or a part does not have the shape of its box.
    """
    first = parts[0].ref
    if isinstance(first, ArrayRef):
        info, box = TensorInfo(name, first.shape, first.dtype), whole_box(first.shape)
        # * bool(..): an empty array has no chunks.
        return StoredTensor(info, (StoredChunk(box, Extent("", 0, info.nbytes)),) * bool(box.numel))
    if isinstance(first, TensorRef):  # whole on every rank: the first file's copy
        chunks = _chunks(name, parts[0].file, first, whole_box(first.shape))
        return StoredTensor(TensorInfo(name, first.shape, first.dtype), tuple(chunks))
    chunk_of_box: dict[Box, StoredChunk] = {}
    for file, part in parts:
        if isinstance(part, PiecesRef):
            boxes = [(Box(offsets, ref.shape), ref) for offsets, ref in part.pieces]
        else:  # an axis of the mesh has one rank more than the largest coordinate of any rank
            axes = [1 + max(p.ref.coordinates[i] for p in parts) for i in range(len(part.coordinates))]
            boxes = [(_dtensor_box(name, file.name, part, axes), part.local)]
        for box, ref in boxes:
            for chunk in _chunks(name, file, ref, box):
                chunk_of_box.setdefault(box, chunk)  # replicas of a box have the same bytes; keeps the first
    dtype = first.local.dtype if isinstance(first, ShardRef) else first.dtype
    return StoredTensor(TensorInfo(name, first.shape, dtype), tuple(chunk_of_box.values()))


def _chunks(name: str, file: TorchFile, ref: TensorRef, box: Box) -> Iterator[StoredChunk]:
    """Yield the chunk of a box; an empty box has none."""
    if box.numel:
        yield file.chunk(ref, f"tensor {name} in {file.name}", box)


def differing_files(parts: Sequence[TensorPart]) -> tuple[str, ...]:
    """Return the files whose copy of a plain tensor differs from the first file's copy, in description or content."""
    if not isinstance(parts[0].ref, (TensorRef, ArrayRef)):
        return ()

    def content(part: TensorPart) -> tuple[Any, ...]:
        ref, archive = part.ref, part.file.archive
        if not isinstance(ref, TensorRef):
            return (ref.shape, ref.dtype, ref.data) if isinstance(ref, ArrayRef) else ()
        crc = 0 if 0 in ref.shape else archive.storage_crc(ref.storage_key)
        if crc is None:  # the archive has no checksums, so the bytes are read
            crc = archive.find_crc(ref.storage_key)
        return (ref.shape, ref.dtype, ref.strides, ref.storage_offset, ref.signs, crc)

    expected = content(parts[0])
    return tuple(part.file.name for part in parts[1:] if content(part) != expected)


def _dtensor_box(name: str, file: str, part: ShardRef, axes: list[int]) -> Box:
    """Compute the rank's box: each mesh axis in turn cuts the box into chunks, whose size is rounded up."""
    box = whole_box(part.shape)
    for axis in _cutting_order(name, file, part, axes):
        box = box.chunk(part.placements[axis].dim, axes[axis], part.coordinates[axis])
    if box.sizes != part.local.shape:
        raise CorruptCheckpointError(
            "A rank's part does not have the shape of its box.",
            expected=f"shape {box.sizes} at {part.coordinates} of a mesh of {axes}",
            got=f"shape {part.local.shape}",
            where=f"{name} in {file}",
            todo="check that the files of all ranks are there and from one save",
        )
    return box


def _cutting_order(name: str, file: str, part: ShardRef, axes: list[int]) -> list[int]:
    """Return the mesh axes that shard the tensor, in the order in which they cut it."""
    # By class name, since placements are stand-ins.
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
        expected = f"split factors that are sizes of later axes that shard the same dim, in a mesh of {axes}"
        raise _unplaced(name, file, expected, factors)
    return order


def _unplaced(name: str, file: str, expected: str, got: object) -> ConversionError:
    return ConversionError(
        "A tensor's placements do not determine the position of its parts.",
        expected=expected,
        got=got,
        where=f"{name} in {file}",
        todo="save full tensors, or with torch.distributed.checkpoint",
    )


def open_torch(store: Storage, file: str, *, trust_pickle: bool = False) -> Source:
    """Open a torch.save file; reads only its directory and its pickle.

    Raises:
        ConversionError: if the file contains no dict, or its pickle names code that tensors do not need.
        CorruptCheckpointError: if the file is damaged, or contains only one rank's parts of tensors.
    """
    torch_file, entries = TorchFile.open(store, file, trust=trust_pickle), Entries()
    for path, leaf in torch_file.leaves().items():
        torch_file.add_leaf(entries, path, leaf)
    return entries.source("torch", store, file=file)


# Names of accelerate's files, and of verl's files, which also contain the world size.
_RANK_FILE = re.compile(r"(.+?)(?:_world_size_(\d+))?_rank_?(\d+)\.(?:bin|pt|pth)")
_MOST_RANKS = 100_000  # files of ranks that are looked for
_STATES = ("model", "optimizer")  # only in other states (schedulers), single entries may be dropped
_CONTAINERS = {  # names of accelerate and verl -> name of the state
    "pytorch_model_fsdp": "model",
    "optim": "optimizer",
    "optimizer_0": "optimizer",
    "optimizer": "optimizer",
}


def rank_files(files: Iterable[str]) -> dict[str, list[str]]:
    """Find the per-rank files; returns the files of each state (``model``, ``optimizer``, ...) in the order of ranks.

    The names of missing files are included.
    """
    by_state: dict[str, dict[int, str]] = {}
    worlds: dict[str, int] = {}
    for file in files:
        match = _RANK_FILE.fullmatch(file)
        if match and "/" not in file:
            name = _CONTAINERS.get(match[1], match[1])
            by_state.setdefault(name, {})[int(match[3])] = file
            # accelerate's names have no world size, so at least the ranks up to the largest one are expected.
            worlds[name] = max(worlds.get(name, 0), int(match[2] or 0), int(match[3]) + 1)
    return {
        name: [
            ranks.get(rank) or _other_rank(min(ranks.values()), rank) for rank in _ranks(worlds[name], ranks)
        ]
        for name, ranks in sorted(by_state.items())
    }


def _ranks(world_size: int, present: Collection[int]) -> list[int]:
    """Return the ranks that should have files; of very many, since a name can claim any number, those that do."""
    return sorted({*present, *range(min(world_size, _MOST_RANKS))})


def _other_rank(file: str, rank: int) -> str:
    """Return the name of another rank's file."""
    match = _RANK_FILE.fullmatch(file)
    assert match is not None
    return f"{file[: match.start(3)]}{rank}{file[match.end(3) :]}"


def open_ranks(store: Storage, *, trust_pickle: bool = False) -> Source:
    """Open a folder of per-rank files; reads their directories and pickles.

    Raises:
        ConversionError: for placements that do not determine the boxes of the parts, states that are no dicts, or
            plain tensors that differ between ranks in a state without sharded tensors.
        CorruptCheckpointError: if a file is damaged, or the parts do not tile a tensor (a rank is missing).
    """
    entries, damaged = Entries(), DamagedFiles()
    groups = rank_files(store.list_files())
    for container, names in groups.items():
        is_state = container in _STATES
        try:
            # stand_ins: the pickles of schedulers and similar state may contain objects of any class.
            reading = partial(_file_and_leaves, store, trust=trust_pickle, stand_ins=not is_state)
            leaves = damaged.read(reading, names)
            if len(leaves) == len(names):
                with damaged.noted():
                    entries.update(_joined_state(container, leaves))
        except ConversionError as error:
            # Without the optimizer, the model can still be read: an optimizer of FSDP1's flat parameters has no
            # parameter names.
            if container == "model" or (is_state and "model" not in groups):
                raise
            entries.unsupported.append(container)
            # The first line is the error's summary; its other lines are too long for a warning.
            problem = str(error).splitlines()[0]
            entries.warnings.append(f"{container} is dropped because of {names[0]}. {problem}")
    damaged.raise_any()
    facts = {"rank files": ", ".join(f"{name}: {len(files)}" for name, files in groups.items())}
    return entries.source("ranks", store, facts)


def _file_and_leaves(store: Storage, name: str, **options: bool) -> tuple[TorchFile, dict[Path, Any]]:
    file = TorchFile.open(store, name, **options)
    return file, file.leaves()


def _joined_state(container: str, opened: Sequence[tuple[TorchFile, dict[Path, Any]]]) -> Entries:
    """Join one state from the files of all ranks, each with its leaves.

    Raises:
        ConversionError: if plain tensors of a model or an optimizer differ between ranks, and no tensor is sharded.
    """
    entries = Entries()
    differing: list[tuple[str, str]] = []
    is_sharded = False
    files, leaves = zip(*opened, strict=True)
    for inner in dict.fromkeys(path for each in leaves for path in each):
        path = (container, *inner)
        parts = [TensorPart(f, each[inner]) for f, each in zip(files, leaves, strict=True) if inner in each]
        first = parts[0].ref
        if not is_tensor_ref(first):
            if container in _STATES or (is_plain(first) and all(part.ref == first for part in parts)):
                entries.add_value(path, first)
            else:
                entries.unsupported.append(name_of(path))
            continue
        unlike = differing_files(parts)[:1]  # one file is enough for the message
        # Such as a random state, which each rank has of its own.
        if unlike and container not in _STATES:
            entries.unsupported.append(name_of(path))
            continue
        entries.add_tensor(path, stored_tensor(name_of(path), parts), _array_reader(first))
        is_sharded |= isinstance(first, (ShardRef, PiecesRef))
        differing += [(name_of(path), file) for file in unlike]
    # If other tensors are sharded, differing plain tensors are accepted, with a warning. If none is, the plain tensors
    # may be parts of sharded tensors.
    if differing and not is_sharded:
        name, file = differing[0]
        raise ConversionError(
            "The ranks have plain tensors that differ, and the files do not say how these belong together.",
            expected="DTensors or ShardedTensors, or the same tensors on every rank",
            got=f"a different {name} in {file} than in {files[0].name}",
            todo="save with torch.distributed.checkpoint; "
            f"if {files[0].name} alone is the whole state, pass that file",
        )
    entries.warnings += [
        f"{name} is not sharded but differs between ranks: taken from {files[0].name}"
        for name, _ in differing
    ]
    return entries
