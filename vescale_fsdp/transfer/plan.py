"""Transfer plans: two descriptions and a few choices, from which each rank derives what it sends and receives.

    plan_transfer(source, target)   pure: compares names, shapes and dtypes
    plan.to_json()                  the descriptions, the links and the budget, which ranks compare by `plan.digest`
    print(plan), plan.pair_bytes()  totals of all ranks, and bytes by sender and receiver; needs no running ranks
    RankTransfers(plan, rank)       what one rank sends, receives and keeps, as strided boxes (`rank_transfers`)

Ranks that store one piece of a tensor are a *set*. The target's ranks take bytes from a set. Ranks that take the same
bytes are a *route*: the set sends the bytes to the first rank, and each rank sends them on to the next (`demand`). All
bytes that a set sends, in the order of routes, are divided into one equal byte range per rank of the set:

    set (0, 4), taken by ranks 8, 9, 10        8888888899999999....10101010
    equal byte ranges                          000000000000|444444444444444

So each sender has few receivers, and most receivers take bytes from only one rank of a set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from vescale_fsdp.checkpoint.manifest.structure import dump_json
from vescale_fsdp.checkpoint.storage.checksums import checksum_of
from vescale_fsdp.errors import PlacementError
from vescale_fsdp.layout.geometry import Box
from vescale_fsdp.transfer.demand import Demand, Ranks, demand_of
from vescale_fsdp.transfer.description import StateDescription
from vescale_fsdp.transfer.links import Link, PlacedLeaf, links_to_json, resolve_links, zero_boxes

BUDGET_BYTES = 64 << 20  # 64 MiB: default memory of a rank for messages
IN_FLIGHT = 4  # concurrent messages of a rank, in each direction
# Size of the widest item, complex128: streams are cut at multiples of this size, so that no item is cut.
ALIGN_BYTES = 16

_MAX_PAIR_RANKS = 32  # most senders, and most receivers, of `TransferPlan.pair_bytes`
# The last rank of a route starts to receive when all other ranks have received a message: messages are so small that
# this wait is this part of the time in which a rank receives all bytes of the route.
_MAX_FILL = 1 / 16
_MIN_RELAYED_BYTES = 128 << 10  # 128 KiB: smaller messages take as long as this one


@dataclass(frozen=True)
class TransferPlan:
    """How the ranks of a target get their tensors from the ranks of a source. `str` summarizes the plan.

    Args:
        source, target: the descriptions of both states, with the same rank numbers.
        links: (target name, link) pairs; a target tensor without a link comes from the source tensor of the same name.
        cast: whether floats may be rounded to the target's dtype.
        budget_bytes: memory that each rank may use for messages.
        relay: whether ranks of the target send bytes on to other ranks that take the same bytes.

    Examples:
        >>> import torch
        >>> from vescale_fsdp.transfer import describe_states
        >>> plan = plan_transfer(*describe_states({"w": torch.ones(4)}, {"w": torch.zeros(4)}))
        >>> plan.total_bytes, plan.kept_bytes  # a rank sends nothing to itself
        (0, {0: 16})
    """

    source: StateDescription
    target: StateDescription
    links: tuple[tuple[str, Link], ...] = ()
    cast: bool = False
    budget_bytes: int = BUDGET_BYTES
    relay: bool = True

    @property
    def message_bytes(self) -> int:
        """Size of the largest message. Half of the budget without `staged_bytes` is for sending, half for receiving."""
        left = self.budget_bytes - 2 * self.staged_bytes
        return max(left // (2 * IN_FLIGHT) // ALIGN_BYTES, 1) * ALIGN_BYTES

    def message_bytes_on(self, route: Ranks) -> int:
        """Return the size of the largest message on a route: smaller if ranks wait for each other's messages."""
        if len(route) == 1:
            return self.message_bytes
        total = int(self.demand.sent[:, self.demand.column_of[route]].sum())
        largest = max(int(total * _MAX_FILL) // (len(route) - 1), _MIN_RELAYED_BYTES)
        return min(largest // ALIGN_BYTES * ALIGN_BYTES, self.message_bytes)

    @property
    def staged_bytes(self) -> int:
        """Largest size of a rank's buffer for small source tensors, and of that for small target tensors."""
        return self.budget_bytes // 8

    @cached_property
    def leaves(self) -> tuple[PlacedLeaf, ...]:
        """The boxes that the transfer copies (`PlacedLeaf`), in the order of the target's tensors.

        Raises:
            PlacementError: if names, shapes or dtypes do not match; lists all mismatches.
        """
        return resolve_links(self.source, self.target, self.links, self.cast)

    @cached_property
    def zero_boxes(self) -> tuple[tuple[int, Box], ...]:
        """The boxes of target tensors that the target's ranks fill with zeros: number of the tensor, and box."""
        return tuple(zero_boxes(self.source, self.target, self.links))

    @cached_property
    def demand(self) -> Demand:
        """Bytes that each set of ranks of the source sends over each route of ranks of the target."""
        return demand_of(self.source, self.target, self.leaves, relay=self.relay)

    def byte_range(self, ranks: Ranks, sender: int, route: Ranks) -> tuple[int, int]:
        """Find the bytes that ``sender`` sends over ``route``.

        Returns:
            Start and stop, counted in the bytes that the ranks of the route take from the set ``ranks``.
        """
        row, column = self.demand.row_of[ranks], self.demand.column_of[route]
        start, stop = self.demand.starts[row, column : column + 2].tolist()
        number, total = ranks.index(sender), int(self.demand.starts[row, -1])

        def edge(number: int) -> int:
            """Return where sender ``number`` starts in the route's bytes, rounded down so that no item is cut."""
            position = total * number // len(ranks) - start
            return stop - start if position >= stop - start else max(position, 0) // ALIGN_BYTES * ALIGN_BYTES

        return edge(number), edge(number + 1)

    @cached_property
    def digest(self) -> int:
        """Checksum of the plan. Ranks compare it, since ranks with different plans would wait for each other."""
        return checksum_of(dump_json(self.to_json()))

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values, which are equal exactly if plans are."""
        return {
            "source": self.source.to_json(),
            "target": self.target.to_json(),
            "links": links_to_json(self.links),
            "cast": self.cast,
            "budget_bytes": self.budget_bytes,
            "relay": self.relay,
        }

    @cached_property
    def unused(self) -> tuple[str, ...]:
        """Names of source tensors from which no target tensor is made."""
        used = {leaf.source.name for leaf in self.leaves}
        return tuple(entry.name for entry in self.source.entries if entry.name not in used)

    @cached_property
    def sent_bytes(self) -> dict[int, int]:
        """Bytes that each rank of the source sends."""
        sent = dict.fromkeys(self.source.all_ranks, 0)
        for ranks, total in zip(self.demand.sets, self.demand.starts[:, -1].tolist(), strict=True):
            for number, rank in enumerate(ranks):
                sent[rank] += total * (number + 1) // len(ranks) - total * number // len(ranks)
        return sent

    @cached_property
    def received_bytes(self) -> dict[int, int]:
        """Bytes that each rank of the target receives."""
        return self._bytes_of(self.demand.routes)

    @cached_property
    def relayed_bytes(self) -> dict[int, int]:
        """Bytes that each rank of the target sends on to another one."""
        return self._bytes_of([route[:-1] for route in self.demand.routes])

    def _bytes_of(self, ranks_of_routes: Sequence[Ranks]) -> dict[int, int]:
        """Return the bytes of routes, added up for each rank of the target, if these are the ranks of each route."""
        nbytes = dict.fromkeys(self.demand.targets, 0)
        for ranks, total in zip(ranks_of_routes, self.demand.sent.sum(0).tolist(), strict=True):
            for rank in ranks:
                nbytes[rank] += total
        return nbytes

    @cached_property
    def kept_bytes(self) -> dict[int, int]:
        """Bytes that each rank copies within its own memory; without ranks that copy none."""
        kept = zip(self.demand.targets, self.demand.kept.tolist(), strict=True)
        return {rank: nbytes for rank, nbytes in kept if nbytes}

    @property
    def total_bytes(self) -> int:
        """Sum of the bytes that all ranks send, of which ranks of the target send the `relayed_bytes`."""
        return sum(self.received_bytes.values())

    @property
    def imbalance(self) -> float:
        """Bytes of the busiest sender, divided by the mean of all ranks of the source; 1.0 if nothing is sent."""
        busiest, total = max(self.sent_bytes.values(), default=0), sum(self.sent_bytes.values())
        return busiest * len(self.sent_bytes) / total if total else 1.0

    def pair_bytes(self) -> dict[tuple[int, int], int]:
        """Return the bytes by (sender, receiver), for pairs of the first 32 senders and the first 32 receivers.

        The senders are the ranks of the source, and the ranks of the target that relay.
        """
        senders = set(self.source.all_ranks[:_MAX_PAIR_RANKS])
        receivers = set(self.demand.targets[:_MAX_PAIR_RANKS])
        pairs: dict[tuple[int, int], int] = {}
        for column, route in enumerate(self.demand.routes):
            hops = [pair for pair in pairwise(route) if receivers.issuperset(pair)]
            for row in np.flatnonzero(self.demand.sent[:, column]).tolist():
                ranks = self.demand.sets[row]
                nbytes = dict.fromkeys(hops, int(self.demand.sent[row, column]))
                for sender in senders.intersection(ranks) if route[0] in receivers else ():
                    low, high = self.byte_range(ranks, sender, route)
                    if low < high:
                        nbytes[sender, route[0]] = high - low
                for pair, size in nbytes.items():
                    pairs[pair] = pairs.get(pair, 0) + size
        return pairs

    def __str__(self) -> str:
        num_receivers = sum(nbytes > 0 for nbytes in self.received_bytes.values())
        moved = f"{_size(sum(self.sent_bytes.values()))} from {len(self.sent_bytes)} ranks to {num_receivers}"
        relayed = sum(self.relayed_bytes.values())
        if relayed:
            moved += f", which send {_size(relayed)} on to each other"
        sender, receiver = (
            max(sizes.values(), default=0) for sizes in (self.sent_bytes, self.received_bytes)
        )
        lines = [
            f"{moved}; {_size(sum(self.kept_bytes.values()))} copied within ranks",
            f"busiest sender {_size(sender)} ({self.imbalance:.2f} x the mean), busiest receiver {_size(receiver)}",
            f"messages of at most {_size(self.message_bytes)}",
        ]
        if self.unused:
            shown = ", ".join(self.unused[:4]) + (" .." if len(self.unused) > 4 else "")
            lines.append(f"not used: {len(self.unused)} tensors of the source ({shown})")
        return "\n".join(lines)


def _size(nbytes: int) -> str:
    """Return a number of bytes as text with three digits and a unit, such as 1.25 GB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes} B"


def plan_transfer(
    source: StateDescription,
    target: StateDescription,
    *,
    links: Mapping[str, Link] | None = None,
    cast: bool = False,
    budget_bytes: int = BUDGET_BYTES,
    relay: bool = True,
) -> TransferPlan:
    """Plan how the ranks of a target get their tensors from the ranks of a source. Communicates nothing.

    A rank does not receive data that it stores itself. Ranks that store one piece of a tensor send equal amounts. Ranks
    of the target that take the same bytes, such as the replicas of an engine, send them on to each other: the source
    sends these bytes once, however many replicas there are.

    Args:
        source, target: the two descriptions that `describe_states` returns. The target need not use all source tensors.
        links: how target tensors are made, such as ``{"qkv": concatenate("q", "k", "v")}`` with the functions of
            `vescale_fsdp.transfer.links`. A target tensor without a link comes from the source tensor of the same name.
            A name is all keys of a tensor in its nested state, joined by dots; slashes are accepted too.
        cast: round floats to the target's dtype where it differs.
        budget_bytes: memory that each rank may use for messages, at least 4 KiB.
        relay: let ranks of the target send bytes on. False: the source sends the bytes to each rank that takes them,
            for engines that reach the trainer better than each other.

    Raises:
        PlacementError: if names, shapes or dtypes do not match, or a piece of a tensor is on no rank; lists all
            problems. Also if ``budget_bytes`` is too small.

    Examples:
        >>> import torch
        >>> from vescale_fsdp.transfer import describe_states
        >>> plan = plan_transfer(*describe_states({"w": torch.ones(4)}, {"w": torch.zeros(4)}))
        >>> plan.unused
        ()
    """
    if budget_bytes < 4096:
        raise PlacementError("The budget is too small.", expected="at least 4096 bytes", got=budget_bytes)
    linked = tuple((links or {}).items())
    leaves = resolve_links(source, target, linked, cast)
    demand = demand_of(source, target, leaves, relay=relay)
    plan = TransferPlan(source, target, linked, cast, budget_bytes, relay)
    # Fill the plan's cached properties instead of computing them again. In __dict__, because the dataclass is frozen.
    plan.__dict__.update(leaves=leaves, demand=demand)
    return plan
