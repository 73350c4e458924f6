"""Plan which rank keeps, sends or rebuilds each file of a step in memory. Sends no messages itself.

    replicas=1, nodes of 2 ranks     nodes       a: 0 1   b: 2 3   c: 4 5   d: 6 7
                                     cliques     a b | c d
                                     copies      0 -> 2, 1 -> 3, 2 -> 0, 3 -> 1, 4 -> 6, ..

A *clique* is a group of ``replicas + 1`` nodes that keep each other's copies. It loses data only if all its nodes are
lost. Cliques are safer than one long ring of nodes: for a given number of lost nodes, fewer combinations of nodes
include all copies of a file.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from vescale_fsdp.checkpoint.ranks.exchange import FileMove
from vescale_fsdp.errors import CheckpointError

# Exists on Linux only; differs for every boot of every machine.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def node_name(folder: str | os.PathLike[str]) -> str:
    """Return the name of a node, which is equal for exactly the processes that share a memory folder.

    Creates the folder. Its device and inode numbers distinguish the containers of one machine, and the boot id
    distinguishes machines with equal host names.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    status = Path(folder).stat()
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return f"{socket.gethostname()} {boot} {status.st_dev:x} {status.st_ino:x}"


def ranks_by_node(nodes: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each node. Nodes are in the order of their first ranks.

    Args:
        nodes: node name of each rank.
    """
    ranks: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks.setdefault(node, []).append(rank)
    return list(ranks.values())


def partners_in_cliques(nodes: Sequence[str], replicas: int) -> list[list[int]]:
    """Return, for each rank, the ranks that keep a copy of its file. Remaining nodes join the last clique.

    Args:
        nodes: node name of each rank.
        replicas: copies of each file on other nodes, limited to the number of other nodes.
    """
    by_node = ranks_by_node(nodes)
    size = min(replicas + 1, len(by_node))  # there may be fewer nodes
    partners: list[list[int]] = [[] for _ in nodes]
    num_cliques = len(by_node) // size
    for number in range(num_cliques):
        # The last clique also gets the remaining nodes.
        clique = by_node[number * size : (number + 1) * size if number < num_cliques - 1 else len(by_node)]
        for index, ranks in enumerate(clique):
            for step in range(1, size):
                keepers = clique[(index + step) % len(clique)]
                for local, rank in enumerate(ranks):
                    partners[rank].append(keepers[local % len(keepers)])  # %: that node may have fewer ranks
    return partners


def partners_in_rings(rings: Sequence[Sequence[int]], nodes: Sequence[str], replicas: int) -> list[list[int]]:
    """Return, for each rank, the ranks that keep a copy of its file: the next ``replicas`` ranks in its ring.

    Args:
        rings: for each rank, the ordered ranks of its ring.
        nodes: node name of each rank.
        replicas: copies of each file on other nodes, limited to the number of other nodes.

    Raises:
        CheckpointError: if a ring is too short, or two copies of a file would be on one node.
    """
    partners = []
    replicas = min(replicas, len(set(nodes)) - 1)  # each copy must be on another node
    for rank, ring in enumerate(rings):
        index = ring.index(rank)
        keepers = [ring[(index + step) % len(ring)] for step in range(1, replicas + 1)]
        num_nodes = len({nodes[keeper] for keeper in (rank, *keepers)})
        if num_nodes <= replicas:  # the loss of one node would lose two copies
            raise CheckpointError(
                "Neighboring ranks of the mesh are on the same node.",
                expected=f"any {replicas + 1} consecutive ranks on different nodes, for replicas={replicas}",
                got=f"ranks {list(ring)[:8]}, of which {[rank, *keepers][:8]} are on {num_nodes} nodes",
                where="RamTier(mesh=..)",
                todo="pass the mesh dimension that runs across nodes, such as mesh['replicate']",
            )
        partners.append(keepers)
    return partners


def _least_busy(ranks: Iterable[int], load: Counter[int]) -> int:
    """Return the rank with the least load, and add one to its load."""
    rank = min(ranks, key=lambda rank: (load[rank], rank))  # by rank too, so that all ranks choose the same
    load[rank] += 1
    return rank


def plan_makers(wanted: Sequence[Sequence[int]], lost: Iterable[int]) -> dict[int, int]:
    """Choose the rank that rebuilds each lost file: among the ranks that need it, one with the fewest files to rebuild.

    Args:
        wanted: for each rank, the saved ranks whose files it needs.
        lost: saved ranks whose files are lost.

    Returns:
        Saved rank -> the rank that rebuilds its file.
    """
    load = Counter[int]()
    return {
        saved_rank: _least_busy((rank for rank, needs in enumerate(wanted) if saved_rank in needs), load)
        for saved_rank in sorted(lost)  # in the same order on all ranks
    }


def plan_moves(
    wanted: Sequence[set[str]], present: Sequence[set[str]], nodes: Sequence[str]
) -> list[FileMove]:
    """Plan the moves after which every node has the files that its ranks need. Each node receives a file only once.

    Args:
        wanted: for each rank, names of the files that it reads; each file must be on some node.
        present: for each rank, names of the files on its node.
        nodes: node name of each rank.
    """
    holders: dict[str, list[int]] = {name: [] for names in wanted for name in names}
    for rank, names in enumerate(present):
        for name in names & holders.keys():
            holders[name].append(rank)
    sent, received = Counter[int](), Counter[int]()
    return [
        FileMove(name, _least_busy(holders[name], sent), _least_busy(ranks, received))
        for ranks in ranks_by_node(nodes)
        # Sorted, because sets differ in order between processes, but all ranks must plan the same moves.
        for name in sorted(set().union(*(wanted[rank] for rank in ranks)) - present[ranks[0]])
    ]


def plan_copies(
    names: Sequence[str], present: Sequence[Sequence[str]], nodes: Sequence[str], num_copies: int
) -> list[FileMove]:
    """Plan the moves after which each file is on ``num_copies + 1`` nodes. Nodes with fewer files get copies first.

    Args:
        names: names of all files of the step; a file that no node has is not moved.
        present: for each rank, names of the files on its node.
        nodes: node name of each rank.
        num_copies: number of copies of each file, in addition to the first one.
    """
    by_node = ranks_by_node(nodes)
    holders = {
        name: [number for number, ranks in enumerate(by_node) if name in present[ranks[0]]] for name in names
    }
    num_files = Counter(number for numbers in holders.values() for number in numbers)
    sent, received = Counter[int](), Counter[int]()
    moves = []
    for name, numbers in holders.items():
        senders = [rank for number in numbers for rank in by_node[number]]
        others = [number for number in range(len(by_node)) if number not in numbers]
        # Without a holder, nothing can be sent.
        missing = max(0, num_copies + 1 - len(numbers)) if numbers else 0
        for number in sorted(others, key=lambda number: (num_files[number], number))[:missing]:
            moves.append(FileMove(name, _least_busy(senders, sent), _least_busy(by_node[number], received)))
            num_files[number] += 1
    return moves
