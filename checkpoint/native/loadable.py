"""`Loadable`, the interface of a checkpoint that `load` reads, and its implementation for native checkpoints.

The other implementation, `conversion.live.viewed_checkpoint`, reads other formats through views, and native
checkpoints that are loaded with casts or key rules.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from typing import Any, Protocol

import torch

from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.manifest.state_tree import Json, dotted_name
from vescale_fsdp.checkpoint.native.leaves import NativeLeaves, fingerprint_in
from vescale_fsdp.checkpoint.native.read import Reads
from vescale_fsdp.checkpoint.native.read_state import CheckpointReader, read_manifest
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator
from vescale_fsdp.checkpoint.state.live_objects import LiveObjects
from vescale_fsdp.checkpoint.state.matching.catalogue import Catalogue, ManifestCatalogue
from vescale_fsdp.checkpoint.state.matching.match import match
from vescale_fsdp.checkpoint.state.matching.result import Match, TensorRead
from vescale_fsdp.checkpoint.state.model_names import ModelNames, container_of, split_entries
from vescale_fsdp.checkpoint.state.nesting import Path, name_of
from vescale_fsdp.checkpoint.state.optimizer_forms import items_of_node
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.errors import CheckpointError, ConversionError, NoCheckpointError, callers_level
from vescale_fsdp.layout.region import Region


class Loadable(ABC):
    """A checkpoint that a load has opened. A load first matches it with a state, then reads this rank's regions.

    Attributes:
        where: the checkpoint's path or URL.
        metadata: the ``metadata`` argument of `save`; None for other formats.
        warnings: possible problems with the checkpoint's files.
        may_have_more: whether ``strict="auto"`` means "missing": extra tensors in the checkpoint are then reported,
            not an error.
        sums: the recorded byte sums of each tensor, by its number in the catalogue; None if there are none.
    """

    where: str
    metadata: Json = None
    warnings: tuple[str, ...] = ()
    may_have_more = False
    sums: tuple[str, ...] | None = None

    @property
    def digest(self) -> str:
        """The recorded fingerprint as one text; empty if there is none."""
        return ""

    @property
    @abstractmethod
    def identity(self) -> str:
        """A text that is equal on all ranks that have opened the same checkpoint, and differs between checkpoints."""

    @abstractmethod
    def match(self, state: Any, include: tuple[str, ...] | None) -> Match:
        """Match a state with the checkpoint, under the names that fit the state best. Reads metadata alone."""

    @abstractmethod
    def reads(self, catalogue: Catalogue) -> Reads:
        """Return a new, empty plan of reads of a catalogue's tensors."""

    @abstractmethod
    def read_now(
        self, read: TensorRead, region: Region, catalogue: Catalogue, *, verify: bool
    ) -> torch.Tensor:
        """Read a region of a stored tensor, on this rank alone; the tensor of the state is not changed.

        Returns:
            The region's elements, 1D, on the CPU, in the dtype of ``read.tensor``.
        """

    @abstractmethod
    def fetch(self, saved_ranks: set[int], matched: Match) -> None:
        """Copy files that this rank's storage lacks from other nodes; a collective.

        Args:
            saved_ranks: the saved ranks whose files have tensors that this rank reads.
        """

    @abstractmethod
    def read_values(self, matched: Match) -> None:
        """Read this rank's `PerRank` values into ``matched.per_rank_values``."""

    def is_gone(self) -> bool:
        """Return whether the checkpoint was certainly removed or replaced since it was opened."""
        return False


class Supply(Protocol):
    """Copies files of saved ranks to this rank's storage."""

    def cost(self, saved_rank: int) -> int:
        """Return the cost of copying the file of a saved rank. Of several replicas, the cheapest file is read."""

    def fetch(self, manifest: Manifest, saved_ranks: set[int]) -> None:
        """Copy the files of ``saved_ranks``, which this rank needs, to its storage. A collective."""


class NativeCheckpoint(Loadable):
    """A native checkpoint; its tensors are matched with a state by name.

    Args:
        supply: copies files that are not in the storage; None if the storage has all files.
        manifest: the manifest; None to read it.

    Raises:
        NoCheckpointError: if there is no checkpoint.
        CorruptCheckpointError: if its manifest is damaged.
    """

    def __init__(
        self, storage: Storage, coordinator: Coordinator, supply: Supply | None, manifest: Manifest | None
    ) -> None:
        self._storage, self._coordinator, self._supply = storage, coordinator, supply
        rank = coordinator.rank
        # Of several replicas, the file of the same rank is preferred, so that ranks read different files.
        cost = supply.cost if supply is not None else lambda saved: saved != rank
        self._reader = CheckpointReader(storage, cost=cost, manifest=manifest)
        self._manifest = self._reader.manifest
        self.where, self.metadata = storage.where, self._reader.metadata

        self.sums = self._manifest.sums

    @property
    def digest(self) -> str:
        if self._manifest.sums is None:
            return ""
        return fingerprint_in(self._manifest, self._manifest.sums).digest

    @property
    def identity(self) -> str:
        return self._manifest.save_id  # new for every save

    def match(self, state: Any, include: tuple[str, ...] | None) -> Match:
        """Match by name. A model without a key, in the state or the checkpoint, matches the only model of the other."""
        live, tree = LiveObjects(state), self._manifest.structure.tree
        matched = match(state, ManifestCatalogue(self._manifest, self.where, tree), include, live=live)
        if matched.missing and (moved := self._with_model_at(live)) is not None:
            again = match(state, moved, include, live=live)
            if len(again.missing) < len(matched.missing):
                return again
        return matched

    def _with_model_at(self, live: LiveObjects) -> Catalogue | None:
        """Return the checkpoint's content with its only model at the path of the state's only model.

        Returns None if there is not one model on each side, or both have keys.
        """
        tree = self._manifest.structure.tree
        try:
            structure = self._manifest.structure
            leaves = NativeLeaves(structure, self.where)
            shapes = {name: structure.entries[place].shape for name, place in leaves.tensors.items()}
            model = split_entries(leaves.paths, shapes, None, self.where)
            own = model_path(live)
        except ConversionError:  # no tensors of a model, or keys that have no dotted names
            return None
        paths = [leaves.paths[name] for name in model.names]
        stored = container_of(model.prefix, paths) if model.prefix else ()
        if own is None or model.candidates or bool(own) == bool(stored):
            return None
        root = dict(items_of_node(tree) or ())
        if stored:
            for key in stored:
                tree = dict(items_of_node(tree) or ()).get(key, {})
            # What is not the model's stays where it is, or is ignored if the state has no such key.
            keys = {path[0] for path in live.leaves if path} - {stored[0]}
            names = {**leaves.paths, **{name: (name,) for name in leaves.per_rank}}
            ignored = tuple(n for n, path in names.items() if n not in model.names and path[0] not in keys)
            others = {key: item for key, item in root.items() if key in keys}
            return ManifestCatalogue(
                self._manifest, self.where, {**others, **dict(items_of_node(tree) or ())}, ignored
            )
        inner: Json = {key: root.pop(key) for key in list(root) if key in model.names}
        for key in reversed(own[1:]):
            inner = {key: inner}
        return ManifestCatalogue(self._manifest, self.where, {**root, own[0]: inner})

    def reads(self, catalogue: Catalogue) -> Reads:
        return self._reader.reads()

    def read_now(
        self, read: TensorRead, region: Region, catalogue: Catalogue, *, verify: bool
    ) -> torch.Tensor:
        result = torch.empty(region.numel, dtype=read.tensor.dtype, device="cpu")
        self._reader.fill([(read.number, region, result)], verify=verify)
        return result

    def fetch(self, saved_ranks: set[int], matched: Match) -> None:
        if self._supply is None:
            return
        ranks = set[int]()
        if matched.per_rank and self._manifest.blob_bytes:
            have_values = set(range(self._manifest.world_size))
            ranks = have_values if self._merging(matched) else have_values & {self._coordinator.rank}
        self._supply.fetch(self._manifest, ranks | saved_ranks)

    def _merging(self, matched: Match) -> set[str]:
        """Return the names of per-rank values that are merged from the values of all saved ranks."""
        # With equal numbers of ranks, each rank loads its own saved value.
        if self._coordinator.world_size == self._manifest.world_size:
            return set()
        return {name for name, leaf in matched.per_rank.items() if leaf.merge is not None}

    def read_values(self, matched: Match) -> None:
        """Read this rank's own saved values; if another number of ranks saved, merge the values that can be merged."""
        if not matched.per_rank:
            return
        rank, world = self._coordinator.rank, self._coordinator.world_size
        saved_world = self._manifest.world_size
        merging = self._merging(matched)
        if rank < saved_world:
            (own,) = self._reader.per_rank_values([rank])
            matched.per_rank_values.update({name: own[name] for name in matched.per_rank if name in own})
        elif merging != set(matched.per_rank):
            lacking = sorted(set(matched.per_rank) - merging)
            warnings.warn(
                f"rank {rank} keeps its own value of {', '.join(map(dotted_name, lacking))}: only {saved_world} ranks "
                "saved one. Pass merge= to PerRank to derive this rank's value.",
                stacklevel=callers_level(),
            )
        if merging:
            everyone = self._reader.per_rank_values()
            for name in merging:
                values = [values[name] for values in everyone if name in values]
                merge = matched.per_rank[name].merge
                assert merge is not None
                matched.per_rank_values[name] = merge(values, rank, world)

    def is_gone(self) -> bool:
        try:
            return read_manifest(self._storage).save_id != self._manifest.save_id
        except NoCheckpointError:
            return True
        except (CheckpointError, OSError):
            return False  # unknown: the caller raises the error of the read, which says more


def model_path(live: LiveObjects) -> Path | None:
    """Return the path of a state's only model, a module or a dict of tensors; None if there is not one.

    Raises:
        ConversionError: if the state has no tensors of a model.
    """
    if live.modules:
        return next(iter(live.modules)) if len(live.modules) == 1 else None
    model = split_leaves(live)
    return None if model.candidates else container_of(model.prefix, live.leaves)


def split_leaves(live: LiveObjects) -> ModelNames:
    """Split the leaves of a state into model, optimizers and others; see `split_entries`."""
    paths = {name_of(path): path for path in live.leaves}
    tensors = {name: live.leaves[path] for name, path in paths.items()}
    shapes = {name: leaf.shape for name, leaf in tensors.items() if isinstance(leaf, torch.Tensor)}
    prefix = name_of(next(iter(live.modules))) if len(live.modules) == 1 else None
    return split_entries(paths, shapes, prefix, "the state to be filled")
