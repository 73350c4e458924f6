"""`Loadable`, the interface of a checkpoint that `load` reads, and its implementation for native checkpoints.

The other implementation, `viewed_checkpoint`, reads other formats through views, and native checkpoints that are loaded
with casts or key rules.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from contextlib import ExitStack
from typing import Any, Protocol

from vescale_fsdp.checkpoint.formats.native.read import Reads
from vescale_fsdp.checkpoint.formats.read_state import CheckpointReader, read_manifest
from vescale_fsdp.checkpoint.manifest.manifest import Manifest, NoCheckpointError
from vescale_fsdp.checkpoint.manifest.region import Region
from vescale_fsdp.checkpoint.manifest.state_tree import Json, dotted_name
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator
from vescale_fsdp.checkpoint.state.matching.match import match
from vescale_fsdp.checkpoint.state.matching.result import Match, TensorRead
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.errors import CheckpointError, callers_level


class Loadable(ABC):
    """A checkpoint that a load has opened. A load first matches it with a state, then reads this rank's regions.

    Attributes:
        where: the checkpoint's path or URL.
        metadata: the ``metadata`` argument of `save`; None for other formats.
        warnings: possible problems with the checkpoint's files.
        left_out: entries of the checkpoint for which the state has no object.
        joins_stages: whether an entry is unexpected only if no rank loads it, since pipeline stages load different
            entries; if False, each rank decides alone.
    """

    where: str
    metadata: Json = None
    warnings: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    joins_stages = False

    @property
    @abstractmethod
    def identity(self) -> str:
        """A text that is equal on all ranks that have opened the same checkpoint, and differs between checkpoints."""

    @abstractmethod
    def match(self, state: Any, include: tuple[str, ...] | None) -> Match:
        """Match the checkpoint with a state by metadata alone. The result's ``reads`` has only tensors that fit."""

    @abstractmethod
    def describe(self, number: int) -> tuple[tuple[int, ...], str, bool]:
        """Return (shape, dtype, whether it was sharded when it was saved) of stored tensor ``number``."""

    @abstractmethod
    def reads(self) -> Reads:
        """Return a new, empty plan of reads from the checkpoint."""

    def allocate(
        self, matched: Match, state: Any, include: tuple[str, ...] | None, on_failure: ExitStack
    ) -> Match:
        """Allocate tensors of modules that are on the meta device. By default, change nothing.

        Args:
            matched: the match before the allocation.
            on_failure: receives a callback that moves these tensors back to the meta device.

        Returns:
            The match with the allocated tensors.
        """
        return matched

    @abstractmethod
    def require_equal(self, one: TensorRead, other: TensorRead, region: Region) -> None:
        """Raise if two stored tensors for one tensor of the state differ, where that is an error."""

    @abstractmethod
    def fetch(self, reads: Reads, matched: Match) -> None:
        """Copy files that this rank's storage lacks from other nodes; a collective."""

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

    @property
    def identity(self) -> str:
        return self._manifest.save_id  # new for every save

    def match(self, state: Any, include: tuple[str, ...] | None) -> Match:
        matched, entries = match(state, self._manifest.structure.tree, include), self._manifest.entries
        matched.reads = [
            read
            for read in matched.reads
            if matched.fits(read, entries[read.number].dtype, entries[read.number].shape)
        ]
        return matched

    def describe(self, number: int) -> tuple[tuple[int, ...], str, bool]:
        entry = self._manifest.entries[number]
        return entry.shape, entry.dtype, bool(entry.cuts)

    def reads(self) -> Reads:
        return self._reader.reads()

    def require_equal(self, one: TensorRead, other: TensorRead, region: Region) -> None:
        """Do nothing: the two tensors may differ, and the last one is loaded, as by load_state_dict."""

    def fetch(self, reads: Reads, matched: Match) -> None:
        if self._supply is None:
            return
        ranks = set[int]()
        if matched.per_rank and self._manifest.blob_bytes:
            saved = set(range(self._manifest.world_size))
            ranks = saved if self._merging(matched) else saved & {self._coordinator.rank}
        self._supply.fetch(self._manifest, ranks | reads.saved_ranks())

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
        rank, world, saved = self._coordinator.rank, self._coordinator.world_size, self._manifest.world_size
        merging = self._merging(matched)
        if rank < saved:
            (own,) = self._reader.per_rank_values([rank])
            matched.per_rank_values.update({name: own[name] for name in matched.per_rank if name in own})
        elif merging != set(matched.per_rank):
            lacking = sorted(set(matched.per_rank) - merging)
            warnings.warn(
                f"rank {rank} keeps its own value of {', '.join(map(dotted_name, lacking))}: only {saved} ranks saved "
                "one. Pass merge= to PerRank to derive this rank's value.",
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
