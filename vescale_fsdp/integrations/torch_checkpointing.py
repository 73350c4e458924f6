"""torch_checkpointing, PyTorch's library of checkpoint files per rank: a resharder that knows ragged tensors.

    spec = ItemSpec(resharder=RaggedResharder())
    manager = CheckpointManager.Config(items={"model": spec, "optimizer": spec}).build()
    manager.save(path, {"model": pieces(model_state), "optimizer": pieces(optimizer_state)})

    found = manager.load(path, into={"model": pieces(model_state), "optimizer": pieces(optimizer_state)})
    set_optimizer_state_dict(model, optimizer, rejoin(optimizer_state, found["optimizer"]))

Its files are torch.save's, which would store a ragged tensor without the place of what it stores. `pieces` gives plain
tensors that share the shards' memory and carry their place, the resharder writes all places into the checkpoint's
metadata, and a load fills the memory, on any number of ranks and under any layout. Checkpoints of FSDP2 are read too,
and FSDP2 reads ours with this resharder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch_checkpointing.checkpoint_layout import TorchSerialization
from torch_checkpointing.default_resharder import compute_local_shard_info
from torch_checkpointing.distributed_metadata import DistributedItemMetadata, ShardingMetadata
from torch_checkpointing.dtensor_metadata import DTensorShardingMetadata
from torch_checkpointing.resharding import Resharder
from torch_checkpointing.storage.base_storage import Storage
from torch_checkpointing.storage.torch_serialization import load_torch_serialized_from_storage

from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor
from vescale_fsdp.errors import CheckpointError
from vescale_fsdp.integrations.tried_versions import check_version
from vescale_fsdp.layout.geometry import Box
from vescale_fsdp.torch_private import local_of

KeyPath = tuple[str | int, ...]  # keys and indices from an item to a leaf
_PLACE = "vescale_fsdp_place"  # of a piece: the global shape, and the boxes that lie one after another in it


@dataclass(frozen=True)
class RaggedSharding(ShardingMetadata, type_name="vescale_fsdp_v1"):  # type: ignore[call-arg]
    """What one rank's tensor holds: boxes of a global tensor, one after another."""

    global_shape: tuple[int, ...]
    boxes: tuple[Box, ...]

    def to_dict(self) -> dict[str, Any]:
        """As json can hold it."""
        boxes = [[list(box.offsets), list(box.sizes)] for box in self.boxes]
        return {"global_shape": list(self.global_shape), "boxes": boxes}

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> RaggedSharding:
        """The inverse of `to_dict`."""
        boxes = tuple(Box(tuple(offsets), tuple(sizes)) for offsets, sizes in d["boxes"])
        return cls(tuple(d["global_shape"]), boxes)

    @property
    def equivalent_ranks(self) -> tuple[int, ...] | None:
        """None: each rank has its own."""
        return None


class _Copy(NamedTuple):
    path: KeyPath
    shared: Box
    source: tuple[Sequence[Box], int]  # all boxes of a tensor, and which of them
    target: tuple[Sequence[Box], int]


def pieces(state: Any) -> Any:
    """The same tree with this rank's piece, a plain tensor that shares its memory, for every ragged tensor."""
    return _mapped(state, (), lambda _, leaf: _piece(leaf) if isinstance(leaf, RaggedDTensor) else leaf)


def rejoin(state: Any, loaded: Any) -> Any:
    """What was loaded into ``pieces(state)``, with the ragged tensors of ``state`` for their pieces."""
    ragged = {path: leaf for path, leaf in _leaves(state) if isinstance(leaf, RaggedDTensor)}
    return _mapped(loaded, (), lambda path, leaf: ragged.get(path, leaf))


class RaggedResharder(Resharder):  # type: ignore[misc]
    """Reads what each rank needs out of the files of all, for ragged tensors, DTensors and plain ones alike.

    Plain tensors count as the same on all ranks; the first rank's are read. Values that are no tensors are read from
    this rank's own file, or from the first one's where there were fewer ranks.
    """

    def __init__(self) -> None:
        check_version("torch_checkpointing")

    def extract_sharding_metadata(self, item_key: str, item_value: Any) -> dict[KeyPath, ShardingMetadata]:
        """The place of every tensor of an item.

        Raises:
            CheckpointError: for a ragged tensor that `pieces` was not asked for.
        """
        return {
            path: _sharding_of(leaf, item_key, path)
            for path, leaf in _leaves(item_value)
            if isinstance(leaf, torch.Tensor)
        }

    def should_reshard(
        self,
        source_metadata: DistributedItemMetadata | None,
        target_metadata: dict[KeyPath, ShardingMetadata] | None,
    ) -> bool:
        """For any tensors: a file read without its metadata could hold other elements than they.

        Raises:
            CheckpointError: if the checkpoint says nothing of places.
        """
        if not target_metadata:
            return False
        if source_metadata is None:
            raise CheckpointError(
                "This checkpoint does not say where its pieces belong.",
                expected="an item that was saved with a resharder",
                got="no metadata of it",
                todo="give the item its resharder before the first save, too",
            )
        return True

    def load(
        self,
        source_path: Path,
        item_key: str,
        target_metadata: dict[KeyPath, ShardingMetadata],
        source_metadata: DistributedItemMetadata,
        target: Any,
        storage: Storage,
    ) -> list[KeyPath]:
        """Fill the tensors of ``target`` in place.

        Returns:
            Paths that the checkpoint does not have.

        Raises:
            CheckpointError: if a tensor has another shape there, or some of its elements are nowhere.
        """
        known = source_metadata.nested_path_to_metadata
        by_rank: dict[int, list[_Copy]] = {_rank_of_values(source_metadata): []}
        for path, sharding in target_metadata.items():
            for rank, copy in _copies(path, sharding, known.get(path, ())):
                by_rank.setdefault(rank, []).append(copy)
        memory = dict(_leaves(target))
        for number, (rank, copies) in enumerate(by_rank.items()):
            found = _read(source_path, item_key, rank, source_metadata, storage)
            if number == 0:
                _take_values(target, found)
            there = dict(_leaves(found))
            for copy in copies:
                with torch.no_grad():
                    _part(memory[copy.path], copy.target, copy.shared).copy_(
                        _part(there[copy.path], copy.source, copy.shared)
                    )
        return [path for path in target_metadata if path not in known]


def _mapped(tree: Any, path: KeyPath, change: Callable[[KeyPath, Any], Any]) -> Any:
    """A copy of the dicts, lists and tuples of a tree, with other leaves."""
    if isinstance(tree, Mapping):
        return {key: _mapped(value, (*path, key), change) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_mapped(value, (*path, number), change) for number, value in enumerate(tree))
    return change(path, tree)


def _leaves(tree: Any) -> Iterator[tuple[KeyPath, Any]]:
    found: list[tuple[KeyPath, Any]] = []
    _mapped(tree, (), lambda path, leaf: found.append((path, leaf)))
    return iter(found)


def _piece(tensor: RaggedDTensor) -> torch.Tensor:
    piece = local_of(tensor).detach()
    boxes = tuple((box.offsets, box.sizes) for box in tensor.boxes)
    vars(piece)[_PLACE] = (tuple(tensor.shape), boxes)  # which torch.save and copies keep
    return piece


def _sharding_of(tensor: torch.Tensor, item_key: str, path: KeyPath) -> ShardingMetadata:
    if isinstance(tensor, RaggedDTensor):
        raise CheckpointError(
            "A ragged tensor cannot be stored as it is.",
            expected="vescale_fsdp.integrations.torch_checkpointing.pieces(state)",
            got=f"a ragged tensor of shape {tuple(tensor.shape)}",
            where=".".join(map(str, (item_key, *path))),
            todo="give save, and load(into=...), the pieces of the state",
        )
    if isinstance(tensor, DTensor):
        return DTensorShardingMetadata.from_dtensor(tensor)  # type: ignore[no-any-return]
    shape, boxes = vars(tensor).get(
        _PLACE, (tuple(tensor.shape), (((0,) * tensor.ndim, tuple(tensor.shape)),))
    )
    return RaggedSharding(shape, tuple(Box(*box) for box in boxes))


def _boxes_of(sharding: ShardingMetadata, rank: int) -> tuple[Box, ...]:
    if isinstance(sharding, RaggedSharding):
        return sharding.boxes
    sizes, offsets = compute_local_shard_info(sharding, rank)
    return (Box(tuple(offsets), tuple(sizes)),)


def _copies(path: KeyPath, target: ShardingMetadata, groups: Sequence[Any]) -> Iterator[tuple[int, _Copy]]:
    """What to read for one tensor of this rank, each element once, and of which rank."""
    if not groups:
        return
    held: dict[Box, tuple[int, Sequence[Box], int]] = {}
    for group in groups:
        _check_shape(path, target, group.sharding_metadata)
        for rank in group.ranks:
            stored = _boxes_of(group.sharding_metadata, rank)
            for number, box in enumerate(stored):
                held.setdefault(box, (rank, stored, number))
    own = _boxes_of(target, dist.get_rank() if dist.is_initialized() else 0)
    for at, box in enumerate(own):
        missing = box.numel
        for theirs, (rank, boxes, number) in held.items():
            shared = box.intersect(theirs)
            if shared is not None:
                missing -= shared.numel
                yield rank, _Copy(path, shared, (boxes, number), (own, at))
        if missing:
            raise CheckpointError(
                "The checkpoint does not hold every element of a tensor exactly once.",
                expected=f"{box.numel} elements of {box}",
                got=f"{box.numel - missing}",
                where=".".join(map(str, path)),
                todo="load a checkpoint that all of its ranks have written",
            )


def _check_shape(path: KeyPath, target: Any, source: Any) -> None:
    if tuple(target.global_shape) != tuple(source.global_shape):
        raise CheckpointError(
            "A tensor has another shape in the checkpoint.",
            expected=f"shape {tuple(target.global_shape)}",
            got=f"shape {tuple(source.global_shape)}",
            where=".".join(map(str, path)),
            todo="build the model that the checkpoint was saved from",
        )


def _rank_of_values(source: DistributedItemMetadata) -> int:
    own = dist.get_rank() if dist.is_initialized() else 0
    return own if own in source.rank_to_layout_info else 0


def _read(folder: Path, item_key: str, rank: int, source: DistributedItemMetadata, storage: Storage) -> Any:
    layout = source.get_layout_info(rank, item_key)
    if not isinstance(layout.serialization_format, TorchSerialization):
        raise CheckpointError(
            "A file of another form than torch.save's cannot be resharded.",
            expected="an item with the default layout",
            got=f"{type(layout.serialization_format).__name__}",
            where=layout.file_path,
            todo="save the item without a layout of its own",
        )
    return load_torch_serialized_from_storage(folder / layout.file_path, storage, map_location="cpu")


def _part(tensor: torch.Tensor, held: tuple[Sequence[Box], int], shared: Box) -> torch.Tensor:
    """The elements of a box, in the memory that holds it behind those before it."""
    boxes, number = held
    memory = local_of(tensor) if isinstance(tensor, DTensor) else tensor
    box = boxes[number]
    if len(boxes) > 1 or memory.shape != torch.Size(box.sizes):
        start = sum(before.numel for before in boxes[:number])
        memory = memory.view(-1)[start : start + box.numel].view(box.sizes)
    return memory[shared.slices(box.offsets)]


def _take_values(target: Any, source: Any) -> None:
    """Put what is no tensor into the dicts and lists of ``target``."""
    if isinstance(target, dict) and isinstance(source, Mapping):
        pairs = [(key, source[key]) for key in target if key in source]
    elif isinstance(target, list) and isinstance(source, Sequence):
        pairs = list(enumerate(source[: len(target)]))
    else:
        return
    for key, value in pairs:
        if isinstance(target[key], dict | list):
            _take_values(target[key], value)
        elif not isinstance(target[key], torch.Tensor):
            target[key] = value
