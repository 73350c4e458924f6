"""Who keeps copies of whose part: ranks by node, nodes in cliques, rings inside a clique. Arithmetic, no messages.

    replicas=1, nodes of 2 ranks     nodes       a: 0 1   b: 2 3   c: 4 5   d: 6 7
                                     cliques     a b | c d
                                     copies      0 -> 2, 1 -> 3, 2 -> 0, 3 -> 1, 4 -> 6, ..

A clique of ``replicas + 1`` nodes loses nothing unless all of its nodes are lost. Cliques rather than one long ring,
since of the same number of lost nodes fewer combinations then hit all copies of a part.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from vescale_fsdp.errors import CheckpointError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # Linux


def node_name(folder: str | os.PathLike[str]) -> str:
    """What is the same for all processes that see one folder in memory, and for no others. The folder is made.

    Containers of one machine have a memory file system each, and machines of one name a boot each.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    found = Path(folder).stat()
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return f"{socket.gethostname()} {boot} {found.st_dev:x} {found.st_ino:x}"


def ranks_by_node(nodes: Sequence[str]) -> list[list[int]]:
    """Ranks of each node, nodes in the order of their first ranks.

    Args:
        nodes: by rank, the name of its node.
    """
    found: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        found.setdefault(node, []).append(rank)
    return list(found.values())


def partners_in_cliques(nodes: Sequence[str], replicas: int) -> list[list[int]]:
    """By rank, those that keep a copy of its part; nodes that are left over join the last clique.

    Args:
        nodes: by rank, the name of its node.
        replicas: copies of each part beside the node's own; as many as there are other nodes, if these are fewer.
    """
    by_node = ranks_by_node(nodes)
    size = min(replicas + 1, len(by_node))
    found: list[list[int]] = [[] for _ in nodes]
    num_cliques = len(by_node) // size
    for number in range(num_cliques):
        clique = by_node[number * size : (number + 1) * size if number < num_cliques - 1 else len(by_node)]
        for place, ranks in enumerate(clique):
            for step in range(1, size):
                keepers = clique[(place + step) % len(clique)]
                for local, rank in enumerate(ranks):
                    found[rank].append(keepers[local % len(keepers)])
    return found


def partners_in_rings(rings: Sequence[Sequence[int]], nodes: Sequence[str], replicas: int) -> list[list[int]]:
    """By rank, those that follow it in its ring.

    Args:
        rings: by rank, the ranks of its ring, in order.
        nodes: by rank, the name of its node.
        replicas: copies of each part beside the node's own; as many as there are other nodes, if these are fewer.

    Raises:
        CheckpointError: if a ring is too short, or a copy would lie on the node whose loss it is for.
    """
    found = []
    replicas = min(replicas, len(set(nodes)) - 1)
    for rank, ring in enumerate(rings):
        place = ring.index(rank)
        keepers = [ring[(place + step) % len(ring)] for step in range(1, replicas + 1)]
        if len({nodes[rank], *(nodes[keeper] for keeper in keepers)}) <= replicas:
            raise CheckpointError(
                "A mesh does not lead to other nodes.",
                expected=f"{replicas + 1} ranks on as many nodes next to each other, for replicas={replicas}",
                got=f"ranks {list(ring)[:8]}, of which {[rank, *keepers][:8]} lie on "
                f"{len({nodes[keeper] for keeper in [rank, *keepers]})} nodes",
                where="RamTier(mesh=..)",
                todo="pass the mesh dimension that runs across nodes, such as mesh['replicate']",
            )
        found.append(keepers)
    return found
