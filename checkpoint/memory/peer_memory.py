"""`PeerMemory`: a step that lies in the memory of several nodes, brought to those that read it.

    nodes hold          a: 0 1 2 3    b: (lost)    c: 4 5 6 7    d: 4 5 6 7      files of the ranks that saved
    now wanted          a: 0 1 2      b: 3 4       c: 5 6        d: 7
    moves               3: a -> b, 4: c -> b

Each file goes to a node once, from the rank that has least to send. Nothing is read from a disk, unless a file is lost
with all nodes that held it: where the disk has the same step, one of the ranks that want the file makes it anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from vescale_fsdp.checkpoint.loading.read_state import CheckpointReader, read_manifest
from vescale_fsdp.checkpoint.manifest.file_names import MANIFEST_NAME
from vescale_fsdp.checkpoint.manifest.manifest import Manifest, NoCheckpointError
from vescale_fsdp.checkpoint.manifest.rank_file import RankFile
from vescale_fsdp.checkpoint.manifest.torch_dtypes import dtype_named
from vescale_fsdp.checkpoint.memory.partners import ranks_by_node
from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator
from vescale_fsdp.checkpoint.ranks.exchange import FROM_DISK, FileMove, move_files
from vescale_fsdp.checkpoint.saving.rank_file_bytes import FileImage
from vescale_fsdp.checkpoint.saving.rank_file_writer import write_rank_file
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.progress import Meter
from vescale_fsdp.errors import CheckpointError, CorruptCheckpointError


class DiskTwin:
    """The folder of a step on disk, which may be its twin, another attempt at it, or nothing.

    Args:
        storage: the folder.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def has(self, manifest: Manifest) -> bool:
        """Whether the folder holds the same state as a step in memory."""
        try:
            found = read_manifest(self._storage)
        except NoCheckpointError:
            return False
        except CheckpointError:
            return False  # damaged: the search comes to it by itself, and says so
        return (found.save_id, found.world_size, found.blob_bytes, found.entries) == (
            manifest.save_id,
            manifest.world_size,
            manifest.blob_bytes,
            manifest.entries,
        )

    def make(self, manifest: Manifest, saved_rank: int, memory: Storage) -> None:
        """Make a rank's file in memory anew. Takes as much memory beside it while it is at it.

        Raises:
            CorruptCheckpointError: if the disk's pieces are damaged.
            OSError: if they cannot be read, or there is no room.
        """
        file = RankFile(manifest, saved_rank)
        reader = CheckpointReader(self._storage)
        locals_by_name = {}
        wanted = []
        for piece in file.pieces:
            entry = manifest.entries[piece.place]
            tensor = torch.empty(piece.region.numel, dtype=dtype_named(entry.dtype), device="cpu")
            locals_by_name[entry.name] = tensor
            wanted.append((piece.place, piece.region, tensor))
        reader.fill(wanted, verify=True)
        blob = bytes(reader.blobs([saved_rank])[0])
        working = memory.working_name(file.name, "disk")
        memory.remove(working)  # of a run that was killed
        write_rank_file(memory, FileImage(file, locals_by_name, blob), Meter(), name=working)
        memory.rename(working, file.name)


_ON_OWN_NODE, _ON_OTHER_NODE, _LOST = range(0, 6, 2)


class LostPartError(CheckpointError):
    """A part of a step is in no node's memory any more, nor on disk."""


class HeldPart(NamedTuple):
    """What a node's memory holds of a step.

    Attributes:
        node: as `node_name` gives it.
        saved_ranks: whose files it holds, whole.
        world_size: of the ranks that saved; 0 where the node has no manifest of it, or a damaged one.
    """

    node: str
    saved_ranks: tuple[int, ...] = ()
    world_size: int = 0


def is_whole(held: Iterable[HeldPart]) -> bool:
    """Whether nodes hold the files of all ranks that saved a step, together."""
    parts = list(held)
    world_size = max(part.world_size for part in parts)
    return world_size > 0 and len({rank for part in parts for rank in part.saved_ranks}) == world_size


class PeerMemory:
    """One step, held by several nodes.

    Args:
        storage: the step's folder in this node's memory; it may not exist yet.
        held: by rank, what its node holds of the step.
        twin: where the disk has it, if it does.

    Attributes:
        moves: files that were brought from one node to another, or from disk, the same on all ranks.
    """

    def __init__(
        self, coordinator: Coordinator, storage: Storage, held: Sequence[HeldPart], twin: DiskTwin
    ) -> None:
        self._coordinator, self._storage, self._held, self._twin = coordinator, storage, held, twin
        self._on_own_node = frozenset(held[coordinator.rank].saved_ranks)
        self._anywhere = frozenset(rank for part in held for rank in part.saved_ranks)
        self.moves: tuple[FileMove, ...] = ()

    def cost(self, saved_rank: int) -> int:
        """Of a file: whether it lies on this node, on another, or is lost; of equal ones the rank's own comes first."""
        where = _ON_OTHER_NODE if saved_rank in self._anywhere else _LOST
        if saved_rank in self._on_own_node:
            where = _ON_OWN_NODE
        return where + (saved_rank != self._coordinator.rank)

    def bring_manifest(self) -> None:
        """Let every node know the step; a collective.

        Raises:
            CorruptCheckpointError: on all ranks, if no node can read its manifest.
        """
        if not any(part.world_size for part in self._held):
            raise CorruptCheckpointError(
                "No node can read the manifest of this step.",
                expected=f"one good {MANIFEST_NAME} in some node's memory",
                got="damaged ones",
                where=self._storage.where,
                todo="restore an older step",
            )
        by_rank = [{MANIFEST_NAME} if part.world_size else set() for part in self._held]
        self._move([{MANIFEST_NAME} for _ in self._held], by_rank)

    def fetch(self, manifest: Manifest, saved_ranks: set[int]) -> None:
        """Bring the files that this rank reads to its node; a collective.

        Raises:
            LostPartError: on all ranks, if one of them reads a file that no node holds, and the disk does not either.
        """
        wanted = self._coordinator.everyone(sorted(saved_ranks - self._on_own_node))
        lost = {
            rank: number
            for number, ranks in enumerate(wanted)
            for rank in ranks
            if rank not in self._anywhere
        }
        held = [set(part.saved_ranks) for part in self._held]
        if lost:
            self._prove_twin(manifest, lost)
            makers = plan_makers(wanted, lost.keys())
            self._make(manifest, makers)
            for number, maker in makers.items():
                for part, numbers in zip(self._held, held, strict=True):
                    if part.node == self._held[maker].node:
                        numbers.add(number)
        self._move(
            [set(map(manifest.file_name, ranks)) for ranks in wanted],
            [set(map(manifest.file_name, numbers)) for numbers in held],
        )

    def _prove_twin(self, manifest: Manifest, lost: Mapping[int, int]) -> None:
        """Raise on all ranks unless all of them see the same step on disk."""
        has_twin = False
        with self._coordinator.together(
            "looking on disk for what memory has lost", "nothing was overwritten"
        ):
            has_twin = self._twin.has(manifest)
        if not all(self._coordinator.everyone(has_twin)):
            raise LostPartError(
                "A part of this step is in no node's memory any more.",
                expected="the file of each rank that saved, a copy of it, or the same step on disk",
                got=f"none of rank {', '.join(map(str, sorted(lost)[:8]))}, wanted by rank {min(lost.values())}",
                where=self._storage.where,
                todo="an older step or the disk has it; RamTier(replicas=1) survives the loss of a node",
            )

    def _make(self, manifest: Manifest, makers: Mapping[int, int]) -> None:
        """Make lost files anew, each on one rank."""
        doing = f"making anew of the disk what {self._storage.where} has lost"
        with self._coordinator.together(doing, "nothing was overwritten"):
            for number, maker in makers.items():
                if maker == self._coordinator.rank:
                    self._twin.make(manifest, number, self._storage)
        self.moves += tuple(
            FileMove(manifest.file_name(number), FROM_DISK, maker) for number, maker in makers.items()
        )

    def _move(self, wanted: Sequence[set[str]], held: Sequence[set[str]]) -> None:
        moves = plan_moves(wanted, held, [part.node for part in self._held])
        doing = f"bringing {self._storage.where} from other nodes' memory"
        move_files(self._coordinator, self._storage, moves, doing)
        self.moves += tuple(moves)


def plan_makers(wanted: Sequence[Sequence[int]], lost: Iterable[int]) -> dict[int, int]:
    """Who makes which lost file: of the ranks that want it the one that makes the fewest.

    Args:
        wanted: by rank, whose files it wants.
    """
    made = Counter[int]()
    makers = {}
    for number in sorted(lost):
        wanting = [rank for rank, numbers in enumerate(wanted) if number in numbers]
        makers[number] = min(wanting, key=lambda rank: (made[rank], rank))
        made[makers[number]] += 1
    return makers


def plan_moves(wanted: Sequence[set[str]], held: Sequence[set[str]], nodes: Sequence[str]) -> list[FileMove]:
    """Moves after which every node holds what its ranks want.

    Args:
        wanted: by rank, names of files; each is held by some rank.
        held: by rank, names of files that lie on its node.
        nodes: by rank, the name of its node.
    """
    holders: dict[str, list[int]] = {name: [] for names in wanted for name in names}
    for rank, names in enumerate(held):
        for name in names & holders.keys():
            holders[name].append(rank)
    sent, received = Counter[int](), Counter[int]()
    moves = []
    for ranks in ranks_by_node(nodes):
        lacking = set().union(*(wanted[rank] for rank in ranks)) - held[ranks[0]]
        for name in sorted(lacking):
            sender = min(holders[name], key=lambda rank: (sent[rank], rank))
            receiver = min(ranks, key=lambda rank: (received[rank], rank))
            sent[sender] += 1
            received[receiver] += 1
            moves.append(FileMove(name, sender, receiver))
    return moves


def plan_copies(
    names: Sequence[str], held: Sequence[Sequence[str]], nodes: Sequence[str], num_copies: int
) -> list[FileMove]:
    """Moves after which ``num_copies + 1`` nodes hold each file that any holds: those that hold the fewest get it.

    Args:
        names: of files.
        held: by rank, those that lie on its node.
        nodes: by rank, the name of its node.
    """
    by_node = ranks_by_node(nodes)
    lies_on = {
        name: {number for number, ranks in enumerate(by_node) if name in held[ranks[0]]} for name in names
    }
    num_held = Counter(number for numbers in lies_on.values() for number in numbers)
    sent, received = Counter[int](), Counter[int]()
    moves = []
    for name, holders in lies_on.items():
        senders = [rank for number in sorted(holders) for rank in by_node[number]]
        others = [number for number in range(len(by_node)) if number not in holders]
        lacking = num_copies + 1 - len(holders) if holders else 0
        for number in sorted(others, key=lambda number: (num_held[number], number))[: max(0, lacking)]:
            sender = min(senders, key=lambda rank: (sent[rank], rank))
            receiver = min(by_node[number], key=lambda rank: (received[rank], rank))
            sent[sender] += 1
            received[receiver] += 1
            num_held[number] += 1
            moves.append(FileMove(name, sender, receiver))
    return moves
