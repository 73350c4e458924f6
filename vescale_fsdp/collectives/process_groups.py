"""Process groups: making and ending them, which of their ranks share a node, and who has left.

On gloo as little as possible crosses the network between nodes (`set_nodes`): `two_levels` decides which reductions
first sum within nodes.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import groupby
from typing import NamedTuple

import torch
import torch.distributed as dist

from vescale_fsdp.torch_private import named_group, timeout_of

_BREAK_TAG = 0xB4EA  # tag of a message that no rank sends


def new_group(
    base: dist.ProcessGroup, ranks: list[int] | None = None, *, backend: str | None = None
) -> dist.ProcessGroup:
    """Create a group with the timeout of ``base``. A collective of the new group's ranks.

    Args:
        base: the group whose timeout the new group gets.
        ranks: global ranks of the new group; default: the ranks of ``base``.
        backend: name of the backend; default: the backends of the default group.
    """
    members = dist.get_process_group_ranks(base) if ranks is None else ranks
    # torch names the group of a part of the ranks by the number of groups of the process. Ranks that have created
    # different numbers of groups would then wait for each other under different names.
    name = numbered_name("group", members)
    numbers = {rank: number for number, rank in enumerate(members)}
    return named_group(numbers[dist.get_rank()], numbers, name, timeout_of(base), backend=backend)


def digest_of_ranks(ranks: Iterable[int]) -> str:
    """Return a digest of ranks for names and keys, where a list of thousands of ranks would be long."""
    # Of the standard library, so that training needs no package beside torch.
    return hashlib.blake2b(",".join(map(str, ranks)).encode(), digest_size=16).hexdigest()


def numbered_name(kind: str, ranks: Iterable[int]) -> str:
    """Return a name that is new in this process, and the same on all of ``ranks`` if these call it in the same order.

    It counts only the calls with the same kind and ranks.
    """
    world = dist.group.WORLD
    assert world is not None
    name = f"vescale_fsdp {kind} {digest_of_ranks(ranks)}"
    counts = _num_names.setdefault(world, Counter())
    counts[name] += 1
    return f"{name} {counts[name]}"


# Per default process group: weak, because a new default group has a new store, in which the names are free again.
_num_names: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()


class Nodes(NamedTuple):
    """The nodes of a group: rank r of the group is rank ``r % per_node`` of node ``r // per_node``."""

    num: int
    per_node: int


def set_hosts(hosts: Sequence[str]) -> None:
    """Set the address of each global rank's node, in the order of ranks; empty: the launcher's variable counts again.

    An elastic job calls it in each epoch, because LOCAL_WORLD_SIZE does not change when ranks are lost.
    """
    _hosts[:] = hosts


_hosts: list[str] = []


def ranks_per_node() -> int:
    """Return the number of ranks per node, of `set_hosts`, else of the launcher (LOCAL_WORLD_SIZE, by torchrun).

    Ranks with the same ``global rank // ranks_per_node()`` are on one node. 0: the number is unknown, or not the same
    on all nodes.
    """
    if _hosts:
        sizes = [len(list(ranks)) for _, ranks in groupby(_hosts)]
        is_even = len(set(sizes)) == 1 and len(sizes) == len(set(_hosts))
        return sizes[0] if is_even else 0
    given = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(given) if given.isdecimal() else 0


def set_nodes(group: dist.ProcessGroup, per_node: int) -> None:
    """Set the nodes of a group, for its gathers and reductions. All its ranks call it between the same collectives.

    Args:
        group: the ranks that take part.
        per_node: `ranks_per_node`, after the ranks have compared it; 0: not known, and collectives have one level.
    """
    ranks = dist.get_process_group_ranks(group)
    _nodes.pop(group, None)
    if per_node:
        size = len(ranks) // len({rank // per_node for rank in ranks})  # of each node
        parts = [ranks[first : first + size] for first in range(0, len(ranks), size)]
        homes = [{rank // per_node for rank in part} for part in parts]
        if all(len(home) == 1 for home in homes) and len(set.union(*homes)) == len(parts) > 1:
            _nodes[group] = Nodes(len(parts), size)


_nodes: weakref.WeakKeyDictionary[dist.ProcessGroup, Nodes] = weakref.WeakKeyDictionary()


def nodes_of(group: dist.ProcessGroup) -> Nodes | None:
    """Return the nodes of a group; None if it is on one node, or they are not known (`set_nodes`)."""
    return _nodes.get(group)


def two_levels(group: dist.ProcessGroup, *, sent_bytes: int, summed_bytes: int) -> Nodes | None:
    """Decide whether a reduction on gloo sums within nodes first, and then across them, or at once over all ranks.

    Two levels are chosen where fewer bytes then cross the network: a node's sum instead of the slices of its ranks. The
    sum has the dtype of the result. So bf16 slices that are summed in fp32 are sent unsummed by nodes of two ranks, and
    summed by larger ones. (Gathers send a slice to each node once in any case: `gather_by_node`.)

    Args:
        group: the ranks that take part.
        sent_bytes: bytes per element of what ranks send.
        summed_bytes: bytes per element of a sum.

    Returns:
        The nodes of the group; None for one level. It is None also if `set_nodes` was not called, or the group has
        one node, one rank per node, nodes of different sizes, or ranks that are not in the order of nodes.
    """
    nodes = nodes_of(group)
    if nodes is None or nodes.per_node == 1 or summed_bytes >= nodes.per_node * sent_bytes:
        return None
    return nodes


def backends_of(group: dist.ProcessGroup | None) -> dict[str, str]:
    """Return device type -> name of the backend."""
    # torch returns a text with a pair per device type, such as "cpu:gloo,xpu:xccl". [::2] drops the colon of each pair.
    return dict(pair.partition(":")[::2] for pair in dist.get_backend_config(group).split(","))


def closed_peers(group: dist.ProcessGroup) -> list[int]:
    """Return the ranks of a gloo group whose connections to this rank are closed. Does not wait.

    The kernel closes the connections of a process that ends. gloo closes all connections of a rank when one of its
    waits times out, and a rank that has called `break_group` has closed its connections too.
    """
    closed = []
    for rank in range(group.size()):
        if rank != group.rank():
            room = torch.empty(1, dtype=torch.uint8, device="cpu")
            try:  # no rank sends a message with this tag, so the receive only fails, at once, or stays pending
                dist.irecv(room, group=group, group_src=rank, tag=_BREAK_TAG)
            except RuntimeError:
                closed.append(rank)
    return closed


def ended_peers(group: dist.ProcessGroup) -> list[int]:
    """Return the ranks of a gloo group that have probably ended: `closed_peers`, or none if all of several are closed.

    A wait of this rank that times out closes all connections, so these then say nothing about the other ranks.
    """
    closed = closed_peers(group)
    return [] if 1 < len(closed) == group.size() - 1 else closed


def break_group(group: dist.ProcessGroup) -> None:
    """Abort a group: collectives in flight and later ones raise, on this rank and on ranks that wait for this rank."""
    if group.size() == 1:  # no other rank waits
        return
    backends = set(backends_of(group).values())
    if "gloo" in backends:
        # gloo's abort does nothing (torch 2.13), but a receive that times out closes all connections of the group. A
        # receive from a rank whose connection is closed does not: it fails at once, and leaves other connections open.
        room = torch.empty(1, dtype=torch.uint8, device="cpu")
        for rank in set(range(group.size())) - {group.rank(), *closed_peers(group)}:
            with suppress(RuntimeError):  # the time-out, or a connection that another rank has just closed
                # No rank sends a message with this tag.
                work = dist.irecv(room, group=group, group_src=rank, tag=_BREAK_TAG)
                assert work is not None
                work.wait(timedelta(milliseconds=1))  # the shortest time-out, because no message will arrive
    if backends - {"gloo"}:
        group.abort()
