"""Transfer plans: two descriptions and a few choices, from which each rank derives what it sends and receives.

    plan_transfer(source, target)   pure: compares names, shapes and dtypes
    plan.to_json()                  the descriptions, the links and the budget, which ranks compare by `plan.digest`
    print(plan), plan.pair_bytes()  totals of all ranks, and bytes by sender and receiver; needs no running ranks
    RankTransfers(plan, rank)       what one rank sends, receives and keeps, as strided boxes (`rank_transfers`)

Ranks that store one piece of a tensor are a *set*. The target's ranks take bytes from a set; these bytes, in the
rank order of the receivers, are divided into one equal byte range per rank of the set:

    set (0, 4), taken by ranks 8, 9, 10        8888888899999999....10101010
    equal byte ranges                          000000000000|444444444444444

So each sender has few receivers, and most receivers take bytes from only one rank of a set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from vescale_fsdp.checkpoint.manifest.structure import dump_json
from vescale_fsdp.checkpoint.storage.checksums import checksum_of
from vescale_fsdp.errors import PlacementError
from vescale_fsdp.transfer.demand import Demand, demand_of
from vescale_fsdp.transfer.description import StateDescription
from vescale_fsdp.transfer.links import Link, PlacedLeaf, links_to_json, resolve_links

BUDGET_BYTES = 64 << 20  # 64 MiB: default memory of a rank for messages
IN_FLIGHT = 4  # concurrent messages of a rank, in each direction
# Size of the widest item, complex128: streams are cut at multiples of this size, so that no item is cut.
ALIGN_BYTES = 16

_MAX_PAIR_RANKS = 32  # most senders, and most receivers, of `TransferPlan.pair_bytes`

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class TransferPlan:
    """How the ranks of a target get their tensors from the ranks of a source. `str` summarizes the plan.

    Args:
        source, target: the descriptions of both states, with the same rank numbers.
        links: (target name, link) pairs; a target tensor without a link comes from the source tensor of the same name.
        cast: whether floats may be rounded to the target's dtype.
        budget_bytes: memory that each rank may use for messages.

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

    @property
    def message_bytes(self) -> int:
        """Size of the largest message. Half of the budget without `staged_bytes` is for sending, half for receiving."""
        left = self.budget_bytes - 2 * self.staged_bytes
        return max(left // (2 * IN_FLIGHT) // ALIGN_BYTES, 1) * ALIGN_BYTES

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
    def demand(self) -> Demand:
        """Bytes that each rank of the target takes from each set of ranks of the source."""
        return demand_of(self.source, self.target, self.leaves)

    def byte_range(self, ranks: Ranks, sender: int, receiver: int) -> tuple[int, int]:
        """Find the bytes that ``sender`` sends to ``receiver``.

        Returns:
            Start and stop, counted in the bytes that ``receiver`` takes from the set ``ranks``.
        """
        row, column = self.demand.row_of[ranks], self.demand.column_of[receiver]
        start, stop = self.demand.starts[row, column : column + 2].tolist()
        number, total = ranks.index(sender), int(self.demand.starts[row, -1])

        def edge(number: int) -> int:
            """Return where sender ``number`` starts in the receiver's bytes, rounded down so that no item is cut."""
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
        return dict(zip(self.demand.targets, self.demand.sent.sum(0).tolist(), strict=True))

    @cached_property
    def kept_bytes(self) -> dict[int, int]:
        """Bytes that each rank copies within its own memory; without ranks that copy none."""
        kept = zip(self.demand.targets, self.demand.kept.tolist(), strict=True)
        return {rank: nbytes for rank, nbytes in kept if nbytes}

    @property
    def total_bytes(self) -> int:
        """Sum of the bytes that all ranks send."""
        return sum(self.sent_bytes.values())

    @property
    def imbalance(self) -> float:
        """Bytes of the busiest sender, divided by the mean of all senders; 1.0 if nothing is sent."""
        busiest = max(self.sent_bytes.values(), default=0)
        return busiest * len(self.sent_bytes) / self.total_bytes if self.total_bytes else 1.0

    def pair_bytes(self) -> dict[tuple[int, int], int]:
        """Return the bytes by (sender, receiver), for pairs of the first 32 senders and the first 32 receivers."""
        senders, receivers = (
            set(self.source.all_ranks[:_MAX_PAIR_RANKS]),
            self.demand.targets[:_MAX_PAIR_RANKS],
        )
        pairs: dict[tuple[int, int], int] = {}
        for row, ranks in enumerate(self.demand.sets):
            for column in np.flatnonzero(self.demand.sent[row, : len(receivers)]).tolist():
                for sender in senders.intersection(ranks):
                    low, high = self.byte_range(ranks, sender, receivers[column])
                    if low < high:
                        pair = sender, receivers[column]
                        pairs[pair] = pairs.get(pair, 0) + high - low
        return pairs

    def __str__(self) -> str:
        num_receivers = sum(nbytes > 0 for nbytes in self.received_bytes.values())
        moved = f"{_size(self.total_bytes)} from {len(self.sent_bytes)} ranks to {num_receivers}"
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
) -> TransferPlan:
    """Plan how the ranks of a target get their tensors from the ranks of a source. Communicates nothing.

    A rank does not receive data that it stores itself. Ranks that store one piece of a tensor send equal amounts.

    Args:
        source, target: the two descriptions that `describe_states` returns. The target need not use all source tensors.
        links: how target tensors are made, such as ``{"qkv": concatenate("q", "k", "v")}`` with the functions of
            `vescale_fsdp.transfer.links`. A target tensor without a link comes from the source tensor of the same name.
            A name is all keys of a tensor in its nested state, joined by dots; slashes are accepted too.
        cast: round floats to the target's dtype where it differs.
        budget_bytes: memory that each rank may use for messages, at least 4 KiB.

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
    demand = demand_of(source, target, leaves)
    plan = TransferPlan(source, target, linked, cast, budget_bytes)
    # Fill the plan's cached properties instead of computing them again. In __dict__, because the dataclass is frozen.
    plan.__dict__.update(leaves=leaves, demand=demand)
    return plan
