"""`Loadable`, the interface of a checkpoint that `load` reads, and its implementation for native checkpoints.

Checkpoints of other formats, and native checkpoints that are loaded with casts or key rules, are read through views:
see `viewed_checkpoint`.
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
from vescale_fsdp.checkpoint.state.match import Match, TensorRead, match
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.errors import CheckpointError


class Loadable(ABC):
    """A checkpoint that a load has opened. A load first matches it with a state, then reads this rank's regions.

    Attributes:
        where: its path or URL.
        metadata: the ``metadata`` of `save`; None if there is none.
        warnings: warnings about its files.
        left_out: entries that the state cannot take.
        joins_stages: whether an entry is unexpected only if no rank takes it; pipeline stages take different entries.
    """

    where: str
    metadata: Json = None
    warnings: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    joins_stages = False

    @property
    @abstractmethod
    def identity(self) -> str:
        """Equal on ranks that have opened the same checkpoint."""

    @abstractmethod
    def match(self, state: Any, include: tuple[str, ...] | None) -> Match:
        """Match the checkpoint with a state, without reading data; ``reads`` of the result are the tensors that fit."""

    @abstractmethod
    def describe(self, number: int) -> tuple[tuple[int, ...], str, bool]:
        """Shape and dtype of stored tensor ``number``, and whether it was sharded when it was saved."""

    @abstractmethod
    def reads(self) -> Reads:
        """A new, empty plan of reads from the checkpoint."""

    def allocate(
        self, matched: Match, state: Any, include: tuple[str, ...] | None, on_failure: ExitStack
    ) -> Match:
        """Allocate tensors of modules that are on the meta device, where that is supported.

        Args:
            matched: the match before the allocation.
            on_failure: gets a callback that restores the meta tensors.

        Returns:
            The match with the allocated tensors.
        """
        return matched

    @abstractmethod
    def require_equal(self, one: TensorRead, other: TensorRead, region: Region) -> None:
        """Check two stored tensors that both fill one tensor of the state; without an error, the second fills it."""

    @abstractmethod
    def fetch(self, reads: Reads, matched: Match) -> None:
        """Copy missing files to this rank's storage; a collective."""

    @abstractmethod
    def read_values(self, matched: Match) -> None:
        """Read this rank's per-rank values into the match."""

    def is_gone(self) -> bool:
        """Whether the checkpoint is known to be removed or replaced."""
        return False


class Supply(Protocol):
    """Copies files of saved ranks to this rank's storage."""

    def cost(self, saved_rank: int) -> int:
        """Cost of copying the file of a saved rank; among replicas, the cheapest file is read."""

    def fetch(self, manifest: Manifest, saved_ranks: set[int]) -> None:
        """Copy the files of ``saved_ranks``; a collective, to which each rank passes the ranks that it needs."""


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
        # Among replicas, prefer this rank's own file.
        cost = supply.cost if supply is not None else lambda saved: saved != rank
        self._reader = CheckpointReader(storage, cost=cost, manifest=manifest)
        self._manifest = self._reader.manifest
        self.where, self.metadata = storage.where, self._reader.metadata

    @property
    def identity(self) -> str:
        return self._manifest.save_id

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
        """Does nothing: the tensors may differ, and the last name's value is used."""

    def fetch(self, reads: Reads, matched: Match) -> None:
        if self._supply is None:
            return
        ranks = set[int]()
        if matched.per_rank and self._manifest.blob_bytes:
            saved = set(range(self._manifest.world_size))
            ranks = saved if self._merging(matched) else saved & {self._coordinator.rank}
        self._supply.fetch(self._manifest, ranks | reads.saved_ranks())

    def _merging(self, matched: Match) -> set[str]:
        """Names of per-rank values that are merged from the values of all saved ranks."""
        if self._coordinator.world_size == self._manifest.world_size:
            return set()
        return {name for name, leaf in matched.per_rank.items() if leaf.merge is not None}

    def read_values(self, matched: Match) -> None:
        """Read this rank's own saved values, or merge the values of all saved ranks."""
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
                f"rank {rank} keeps its own value of {', '.join(map(dotted_name, lacking))}: {saved} ranks saved. "
                "Give PerRank a merge function to derive one.",
                stacklevel=5,
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
            return False  # not known; the caller raises its own error, which says more
