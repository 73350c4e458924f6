"""`PeerMemory`: send the files of a step from nodes that have them in memory to nodes that read them.

    nodes have          a: 0 1 2 3    b: (lost)    c: 4 5 6 7    d: 4 5 6 7      files of the ranks that saved
    nodes need          a: 0 1 2      b: 3 4       c: 5 6        d: 7
    moves               3: a -> b, 4: c -> b

Each file is sent to a node once, by the rank that sends the fewest files. The disk is read only for files that no node
has: if the same step is on disk, one of the ranks that need such a file rebuilds the file from disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from vescale_fsdp.checkpoint.manifest.file_names import MANIFEST_NAME
from vescale_fsdp.checkpoint.manifest.manifest import Manifest
from vescale_fsdp.checkpoint.manifest.rank_file import RankFile
from vescale_fsdp.checkpoint.manifest.torch_dtypes import dtype_named
from vescale_fsdp.checkpoint.memory.partners import plan_makers, plan_moves
from vescale_fsdp.checkpoint.native.read_state import CheckpointReader, read_manifest
from vescale_fsdp.checkpoint.native.write import FileImage, write_rank_file
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator
from vescale_fsdp.checkpoint.ranks.exchange import FROM_DISK, FileMove, move_files
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.progress import Meter
from vescale_fsdp.errors import CheckpointError, CorruptCheckpointError

_ON_OWN_NODE, _ON_OTHER_NODE, _LOST = range(0, 6, 2)  # even numbers, since `PeerMemory.cost` adds 0 or 1


class StepOnDisk:
    """Rebuilds lost files of a step in memory from the same step on disk.

    A manager gives a step the same save_id on disk and in memory, so equal ids mean equal states. But the files differ:
    in memory, every rank stores all of its regions; on disk, each replica stores only a share of its regions. A file in
    memory is therefore assembled from verified pieces of several files on disk.

    Args:
        storage: the step's folder on disk; it may be missing, or contain another attempt.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def has(self, manifest: Manifest) -> bool:
        """Return whether the folder on disk contains the same state as a step in memory.

        Args:
            manifest: the manifest of the step in memory.
        """
        try:
            ours = read_manifest(self._storage)
        except CheckpointError:  # no step, or a damaged step, which `StepSearch` reports
            return False
        # Not the whole manifests: they describe different files. The save's ID alone would not show a damaged manifest.
        keys = ("save_id", "world_size", "blob_bytes", "entries")
        return all(getattr(ours, key) == getattr(manifest, key) for key in keys)

    def make(self, manifest: Manifest, saved_rank: int, memory: Storage) -> None:
        """Rebuild a saved rank's file in memory. Uses at most twice the memory of the file's tensors.

        Args:
            manifest: the manifest of the step in memory.
            saved_rank: the rank that saved the lost file.
            memory: the step's folder in memory.

        Raises:
            CorruptCheckpointError: if the pieces on disk are damaged.
            OSError: if the disk cannot be read, or memory is full.
        """
        file = RankFile(manifest, saved_rank)
        reader = CheckpointReader(self._storage)
        locals_by_name = {}
        wanted = []
        for index, region in file.pieces.items():
            entry = manifest.entries[index]
            tensor = torch.empty(region.numel, dtype=dtype_named(entry.dtype), device="cpu")
            locals_by_name[entry.name] = tensor
            wanted.append((index, region, tensor))
        reader.fill(wanted, verify=True)
        blob = bytes(reader.blobs([saved_rank])[0])
        # Under a temporary name first, so that no incomplete file counts as good.
        working = memory.working_name(file.name, "disk")
        memory.remove(working)  # left by a killed run
        write_rank_file(memory, FileImage(file, locals_by_name, blob), Meter(), name=working)
        memory.rename(working, file.name)


class LostPartError(CheckpointError):
    """A file of a step is neither in any node's memory nor on disk."""


class HeldPart(NamedTuple):
    """The files of a step in one node's memory.

    Attributes:
        node: the node's name, see `node_name`.
        saved_ranks: the saved ranks whose complete files are on the node.
        world_size: number of ranks that saved; 0 if the step's manifest on the node is missing or damaged.
    """

    node: str
    saved_ranks: tuple[int, ...] = ()
    world_size: int = 0


def is_whole(held: Iterable[HeldPart]) -> bool:
    """Return whether the nodes together have the files of all ranks that saved a step."""
    parts = list(held)
    # From any node with a good manifest; 0 if there is none.
    world_size = max(part.world_size for part in parts)
    return world_size > 0 and len({rank for part in parts for rank in part.saved_ranks}) == world_size


class PeerMemory:
    """One step in the memory of several nodes.

    Args:
        coordinator: the ranks that restore the step.
        storage: the step's folder in this node's memory; may not exist yet.
        held: for each rank, the files of the step on its node.
        on_disk: the same step on disk, if it was saved there.

    Attributes:
        moves: the moves of files between nodes, and from disk, so far; the same on all ranks.
    """

    def __init__(
        self, coordinator: Coordinator, storage: Storage, held: Sequence[HeldPart], on_disk: StepOnDisk
    ) -> None:
        self._coordinator, self._storage, self._held, self._on_disk = coordinator, storage, held, on_disk
        self._on_own_node = frozenset(held[coordinator.rank].saved_ranks)
        self._anywhere = frozenset(rank for part in held for rank in part.saved_ranks)
        self.moves: tuple[FileMove, ...] = ()

    def cost(self, saved_rank: int) -> int:
        """Return a sort key for the file of a saved rank.

        Files on this node come first, then files on other nodes, then lost files. Among equals, the file with this
        rank's own number comes first.
        """
        where = _ON_OTHER_NODE if saved_rank in self._anywhere else _LOST
        if saved_rank in self._on_own_node:
            where = _ON_OWN_NODE
        return where + (saved_rank != self._coordinator.rank)

    def bring_manifest(self) -> None:
        """Send the manifest to every node that has no good manifest; a collective.

        Raises:
            CorruptCheckpointError: on all ranks, if no node can read its manifest.
        """
        if not any(part.world_size for part in self._held):
            raise CorruptCheckpointError(
                "No node can read the manifest of this step.",
                expected=f"one good {MANIFEST_NAME} in some node's memory",
                got="damaged manifests",
                where=self._storage.where,
            )
        by_rank = [{MANIFEST_NAME} if part.world_size else set() for part in self._held]
        self._move([{MANIFEST_NAME} for _ in self._held], by_rank)

    def fetch(self, manifest: Manifest, saved_ranks: set[int]) -> None:
        """Move the files that this rank reads to its node; a collective.

        Raises:
            LostPartError: on all ranks, if any rank reads a file that neither a node nor the disk has.
        """
        # Sorted, because `everyone` compares representations, and sets have no fixed order.
        wanted = self._coordinator.everyone(sorted(saved_ranks - self._on_own_node))
        # Saved rank -> one of the ranks that read its file.
        lost = {
            rank: number
            for number, ranks in enumerate(wanted)
            for rank in ranks
            if rank not in self._anywhere
        }
        present = [set(part.saved_ranks) for part in self._held]
        if lost:
            self._check_disk(manifest, lost)
            makers = plan_makers(wanted, lost.keys())
            self._make(manifest, makers)
            for number, maker in makers.items():
                # All ranks of the maker's node now have the file in memory.
                for part, numbers in zip(self._held, present, strict=True):
                    if part.node == self._held[maker].node:
                        numbers.add(number)
        self._move(
            [set(map(manifest.file_name, ranks)) for ranks in wanted],
            [set(map(manifest.file_name, numbers)) for numbers in present],
        )

    def _check_disk(self, manifest: Manifest, lost: Mapping[int, int]) -> None:
        """Raise on all ranks unless every rank finds the same step on disk; a collective.

        Args:
            lost: saved rank of each lost file -> a rank that reads the file.
        """
        has_step = False
        with self._coordinator.together(
            "looking on disk for files that are lost in memory", "nothing was overwritten"
        ):
            has_step = self._on_disk.has(manifest)
        if not all(self._coordinator.everyone(has_step)):
            raise LostPartError(
                "A part of this step is in no node's memory.",
                expected="the file of each rank that saved, a copy of it, or the same step on disk",
                got=f"no file of saved rank {', '.join(map(str, sorted(lost)[:8]))}, which rank "
                f"{min(lost.values())} reads",
                where=self._storage.where,
                todo="restore an older step, or a step on disk; RamTier(replicas=1) survives the loss of a node",
            )

    def _make(self, manifest: Manifest, makers: Mapping[int, int]) -> None:
        """Rebuild lost files from disk, each on one rank; a collective.

        Args:
            makers: saved rank of each lost file -> the rank that rebuilds it.
        """
        doing = f"rebuilding lost files of {self._storage.where} from disk"
        with self._coordinator.together(doing, "nothing was overwritten"):
            for number, maker in makers.items():
                if maker == self._coordinator.rank:
                    self._on_disk.make(manifest, number, self._storage)
        self.moves += tuple(
            FileMove(manifest.file_name(number), FROM_DISK, maker) for number, maker in makers.items()
        )

    def _move(self, wanted: Sequence[set[str]], present: Sequence[set[str]]) -> None:
        """Send files to the nodes whose ranks need them; arguments as for `plan_moves`; a collective."""
        moves = plan_moves(wanted, present, [part.node for part in self._held])
        doing = f"receiving {self._storage.where} from other nodes' memory"
        move_files(self._coordinator, self._storage, moves, doing)
        self.moves += tuple(moves)
