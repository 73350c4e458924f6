"""What `load` fills a state from: `Loadable`, and native checkpoints as one.

Checkpoints of other formats, and native ones that are loaded with casts or key rules, are loaded through views: see
`viewed_checkpoint`.
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
    """A checkpoint that a load has opened: matched with a state, then asked for this rank's regions of its tensors.

    Attributes:
        where: its path or URL.
        metadata: the ``metadata`` of `save`, if it has any.
        warnings: doubts about its files.
        left_out: entries that the state cannot take.
        joins_stages: whether an entry is unexpected only if no rank takes it; pipeline stages take different ones.
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
        """Match it with a state; ``reads`` of the result are tensors that fit. Reads no data."""

    @abstractmethod
    def describe(self, number: int) -> tuple[tuple[int, ...], str, bool]:
        """Shape and dtype of stored tensor ``number``, and whether ranks that saved had parts of it."""

    @abstractmethod
    def reads(self) -> Reads:
        """Reads of its tensors, of which none is asked for yet."""

    def allocate(
        self, matched: Match, state: Any, include: tuple[str, ...] | None, on_failure: ExitStack
    ) -> Match:
        """Give tensors of modules on the meta device memory, where that is supported.

        Args:
            matched: the match.
            on_failure: gets what puts them back on the meta device.

        Returns:
            The match with the tensors that the state has now.
        """
        return matched

    @abstractmethod
    def require_equal(self, one: TensorRead, other: TensorRead, region: Region) -> None:
        """Called with two stored tensors for one tensor of the state: raise, or let the second one fill it."""

    @abstractmethod
    def fetch(self, reads: Reads, matched: Match) -> None:
        """Bring files that this rank's storage lacks; a collective."""

    @abstractmethod
    def read_values(self, matched: Match) -> None:
        """Read this rank's per-rank values into the match."""

    def is_gone(self) -> bool:
        """Whether the checkpoint is certainly removed or replaced."""
        return False


class Supply(Protocol):
    """Brings the files of ranks that saved to this rank's storage."""

    def cost(self, saved_rank: int) -> int:
        """Cost of bringing the file of a rank that saved; of equal files the cheapest one is chosen."""

    def fetch(self, manifest: Manifest, saved_ranks: set[int]) -> None:
        """Bring the files of these ranks; a collective, in which each rank passes its own."""


class NativeCheckpoint(Loadable):
    """A native checkpoint, matched with a state name by name.

    Args:
        supply: brings files that are not in the storage; None if all are.
        manifest: None to read it.

    Raises:
        NoCheckpointError: if there is no checkpoint.
        CorruptCheckpointError: if its manifest is damaged.
    """

    def __init__(
        self, storage: Storage, coordinator: Coordinator, supply: Supply | None, manifest: Manifest | None
    ) -> None:
        self._storage, self._coordinator, self._supply = storage, coordinator, supply
        rank = coordinator.rank
        # Of replicas, this rank's own file is nearest to it.
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
        """They may differ: names are compared one by one, and the last one counts."""

    def fetch(self, reads: Reads, matched: Match) -> None:
        if self._supply is None:
            return
        ranks = set[int]()
        if matched.per_rank and self._manifest.blob_bytes:
            saved = set(range(self._manifest.world_size))
            ranks = saved if self._merging(matched) else saved & {self._coordinator.rank}
        self._supply.fetch(self._manifest, ranks | reads.saved_ranks())

    def _merging(self, matched: Match) -> set[str]:
        """Per-rank values that are made of those of all ranks that saved."""
        if self._coordinator.world_size == self._manifest.world_size:
            return set()
        return {name for name, leaf in matched.per_rank.items() if leaf.merge is not None}

    def read_values(self, matched: Match) -> None:
        """A rank takes its own values, or values merged from those of all ranks that saved."""
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
            return False  # unknown: the caller's own error says more than this one
