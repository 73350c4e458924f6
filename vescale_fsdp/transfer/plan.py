"""Transfer plans: two descriptions and a few choices, from which each rank derives what it sends and receives.

    plan_transfer(source, target)   pure: compares names, shapes and dtypes, and balances the senders' loads
    plan.to_json()                  the descriptions, the links, the budget, and the shares of unequal senders
    print(plan), plan.to_svg()      totals of all ranks, and a picture of senders and receivers; needs no running ranks
    RankTransfers(plan, rank)       what one rank sends, receives and keeps, as strided boxes (`rank_transfers`)

Ranks that store the same part of a tensor are a *set*. The target's ranks take bytes from a set; these bytes, in the
rank order of the receivers, are divided into one byte range per rank of the set:

    set (0, 4), taken by ranks 8, 9, 10        8888888899999999....10101010
    equal loads, so equal byte ranges          000000000000|444444444444444

So each sender has few receivers, and most receivers take bytes from only one rank of a set. A rank's *load* is the
number of bytes that it sends. If a rank is in several sets, byte ranges get unequal sizes so that loads are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from vescale_fsdp.checkpoint.manifest.structure import dump_json
from vescale_fsdp.checkpoint.storage.checksums import checksum_of
from vescale_fsdp.errors import PlacementError
from vescale_fsdp.layout.pictures import PAPER, Canvas
from vescale_fsdp.transfer.demand import Demand, demand_of
from vescale_fsdp.transfer.description import StateDescription
from vescale_fsdp.transfer.links import (
    Link,
    PlacedLeaf,
    links_from_json,
    links_to_json,
    resolve_links,
)

if TYPE_CHECKING:
    from vescale_fsdp.quantize.codec import BlockCodec

BUDGET_BYTES = 64 << 20  # 64 MiB: default memory of a rank for messages
IN_FLIGHT = 4  # concurrent messages of a rank, in each direction
# Size of the widest item, complex128: streams are cut at multiples of this size, so that no item is cut.
ALIGN_BYTES = 16

_VERSION = 2  # version of the JSON form
_MAX_BALANCE_ROUNDS = 200  # bounds the time of planning; loads that still change by then are nearly equal
_BALANCE_TOLERANCE_BYTES = 64  # loads that differ by less count as equal

_MAX_DRAWN = 32  # most senders, and most receivers, in a picture
_CELL_PX, _LEFT_PX, _TOP_PX, _BAR_PX = 22, 90, 140, 200
_FILL, _QUIET, _RULE = "#2e6fdb", "#667085", "#d0d5dd"  # colors of squares and bars, of text, of outlines

Ranks = tuple[int, ...]
Shares = Mapping[Ranks, tuple[int, ...]]


@dataclass(frozen=True)
class TransferPlan:
    """How the ranks of a target get their tensors from the ranks of a source. `str` summarizes the plan.

    Args:
        source, target: the descriptions of both states, with the same rank numbers.
        links: (target name, link) pairs; a target tensor without a link comes from the source tensor of the same name.
        cast: whether floats may be rounded to the target's dtype.
        budget_bytes: memory that each rank may use for messages.
        shares: bytes that each rank of a set sends, for each set whose ranks send unequal amounts.

    Examples:
        >>> import torch
        >>> from vescale_fsdp.transfer import describe_states
        >>> plan = plan_transfer(*describe_states({"w": torch.ones(4)}, {"w": torch.zeros(4)}))
        >>> TransferPlan.from_json(plan.to_json()) == plan
        True
        >>> plan.total_bytes, plan.kept_bytes  # a rank sends nothing to itself
        (0, {0: 16})
    """

    source: StateDescription
    target: StateDescription
    links: tuple[tuple[str, Link], ...] = ()
    cast: bool = False
    budget_bytes: int = BUDGET_BYTES
    shares: tuple[tuple[Ranks, tuple[int, ...]], ...] = ()

    @property
    def message_bytes(self) -> int:
        """Size of the largest message: half of what `staged_bytes` leaves is for sending, half for receiving."""
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

    @cached_property
    def all_shares(self) -> Shares:
        """Bytes that each rank of a set sends, by set; equal amounts if `shares` does not list the set."""
        chosen = dict(self.shares)
        wanted = zip(self.demand.sets, self.demand.sent.sum(1).tolist(), strict=True)
        return {ranks: chosen.get(ranks) or equal_shares(nbytes, len(ranks)) for ranks, nbytes in wanted}

    def byte_range(self, ranks: Ranks, sender: int, receiver: int) -> tuple[int, int]:
        """Find the bytes that ``sender`` sends to ``receiver``.

        Returns:
            Start and stop, counted in the bytes that ``receiver`` takes from the set ``ranks``.
        """
        row, column = self.demand.row_of[ranks], self.demand.column_of[receiver]
        start, stop = self.demand.starts[row, column : column + 2].tolist()
        number, shares = ranks.index(sender), self.all_shares[ranks]
        low = sum(shares[:number]) - start

        def edge(position: int) -> int:
            """Limit a position to the receiver's bytes, and round it down so that no item is cut; the end stays."""
            return stop - start if position >= stop - start else max(position, 0) // ALIGN_BYTES * ALIGN_BYTES

        return edge(low), edge(low + shares[number])

    @cached_property
    def digest(self) -> int:
        """Checksum of the plan. Ranks compare it, since ranks with different plans would wait for each other."""
        return checksum_of(dump_json(self.to_json()))

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values that `from_json` reads back without loss."""
        return {
            "version": _VERSION,
            "source": self.source.to_json(),
            "target": self.target.to_json(),
            "links": links_to_json(self.links),
            "cast": self.cast,
            "budget_bytes": self.budget_bytes,
            "shares": [[list(ranks), list(sent)] for ranks, sent in self.shares],
        }

    @classmethod
    def from_json(
        cls, data: Mapping[str, Any], codecs: Mapping[str, Callable[..., BlockCodec]] | None = None
    ) -> TransferPlan:
        """Restore a plan from the result of `to_json`.

        Args:
            codecs: classes of the codecs in links, by class name.

        Raises:
            PlacementError: if the version of the JSON form is not supported.
        """
        if data.get("version") != _VERSION:  # fields of another version may have another meaning
            raise PlacementError(
                "This plan was written by another version of vescale_fsdp.",
                expected=f"version {_VERSION} of plans",
                got=data.get("version"),
                todo="make the plan again",
            )
        return cls(
            StateDescription.from_json(data["source"]),
            StateDescription.from_json(data["target"]),
            links_from_json(data["links"], codecs or {}),
            data["cast"],
            data["budget_bytes"],
            tuple((tuple(ranks), tuple(sent)) for ranks, sent in data["shares"]),
        )

    @cached_property
    def unused(self) -> tuple[str, ...]:
        """Names of source tensors from which no target tensor is made."""
        used = {leaf.source.name for leaf in self.leaves}
        return tuple(entry.name for entry in self.source.entries if entry.name not in used)

    @cached_property
    def sent_bytes(self) -> dict[int, int]:
        """Bytes that each rank of the source sends."""
        sent = dict.fromkeys(self.source.all_ranks, 0)
        for ranks in self.demand.sets:
            for rank, nbytes in zip(ranks, self.all_shares[ranks], strict=True):
                sent[rank] += nbytes
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
        senders, receivers = set(self.source.all_ranks[:_MAX_DRAWN]), self.demand.targets[:_MAX_DRAWN]
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

    def to_svg(self, title: str = "transfer") -> str:
        """Draw an SVG picture with one square per sender (row) and receiver (column), darker for more bytes.

        A bar next to each row and under each column shows the rank's total. Only the first 32 senders and the first 32
        receivers are drawn; a line gives the number of omitted ranks.
        """
        senders, receivers = list(self.sent_bytes)[:_MAX_DRAWN], list(self.received_bytes)[:_MAX_DRAWN]
        right, bottom = _LEFT_PX + len(receivers) * _CELL_PX, _TOP_PX + len(senders) * _CELL_PX
        canvas = Canvas(title, max(right + _BAR_PX + 120, 620), bottom + _BAR_PX + 60)
        canvas.text(20, 32, title, size=18, bold=True)
        for number, line in enumerate(str(self).splitlines()):
            canvas.text(20, 52 + 16 * number, line, size=12, color=_QUIET)
        pairs = self.pair_bytes()
        most = max(pairs.values(), default=0)
        for row, sender in enumerate(senders):
            y = _TOP_PX + row * _CELL_PX
            canvas.text(_LEFT_PX - 8, y + 15, f"rank {sender}", anchor="end")
            for column, receiver in enumerate(receivers):
                nbytes = pairs.get((sender, receiver), 0)
                tip = f"rank {sender} to rank {receiver}: {_size(nbytes)}"
                x = _LEFT_PX + column * _CELL_PX
                canvas.rect(x, y, _CELL_PX - 2, _CELL_PX - 2, _shade(nbytes, most), stroke=_RULE, tip=tip)
            nbytes = self.sent_bytes[sender]
            # max(1, ..): no division by zero if nothing is sent.
            length = (_BAR_PX - 40) * nbytes / max(1, *self.sent_bytes.values())
            canvas.rect(right + 10, y, length, _CELL_PX - 2, _FILL, tip=_size(nbytes))
            canvas.text(right + length + 16, y + 15, _size(nbytes), size=10, color=_QUIET)
        for column, receiver in enumerate(receivers):
            x = _LEFT_PX + column * _CELL_PX
            canvas.text(x + 10, _TOP_PX - 6, str(receiver), anchor="middle")
            nbytes = self.received_bytes[receiver]
            # max(1, ..): no division by zero if nothing is received.
            length = (_BAR_PX - 40) * nbytes / max(1, *self.received_bytes.values())
            canvas.rect(x, bottom + 10, _CELL_PX - 2, length, _FILL, tip=_size(nbytes))
        # A plan may have thousands of ranks, for which the picture has no room.
        omitted = len(self.sent_bytes) - len(senders), len(self.received_bytes) - len(receivers)
        if any(omitted):
            note = f"not drawn: {omitted[0]} senders, {omitted[1]} receivers"
            canvas.text(20, bottom + _BAR_PX + 40, note)
        return canvas.svg()


def _shade(nbytes: int, most: int) -> str:
    """Return the color of a square: white for zero bytes, darker for more."""
    if not nbytes:
        return PAPER
    share = 0.15 + 0.85 * nbytes / most  # at least 0.15: small amounts stay visible
    mixed = (round(255 + (int(_FILL[at : at + 2], 16) - 255) * share) for at in (1, 3, 5))
    return "#" + "".join(f"{value:02x}" for value in mixed)


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

    A rank does not receive data that it stores itself. The bytes to send are balanced over ranks that store the same
    part.

    Args:
        source, target: the two descriptions that `describe_states` returns. The target need not use all source tensors.
        links: how target tensors are made, such as ``{"qkv": concatenate("q", "k", "v")}`` with the functions of
            `vescale_fsdp.transfer.links`. A target tensor without a link comes from the source tensor of the same name.
            A name is all keys of a tensor in its nested state, joined by dots; slashes are accepted too.
        cast: round floats to the target's dtype where it differs.
        budget_bytes: memory that each rank may use for messages, at least 4 KiB.

    Raises:
        PlacementError: if names, shapes or dtypes do not match, or a part of a tensor is on no rank; lists all
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
    wanted = dict(zip(demand.sets, demand.sent.sum(1).tolist(), strict=True))
    # Equal shares are omitted, so that the JSON form of a plan stays small.
    uneven = tuple(
        (ranks, sent)
        for ranks, sent in balanced_shares(wanted).items()
        if sent != equal_shares(wanted[ranks], len(ranks))
    )
    plan = TransferPlan(source, target, linked, cast, budget_bytes, uneven)
    # Fill the plan's cached properties instead of computing them again. In __dict__, because the dataclass is frozen.
    plan.__dict__.update(leaves=leaves, demand=demand)
    return plan


def equal_shares(nbytes: int, count: int) -> tuple[int, ...]:
    """Divide ``nbytes`` among ``count`` ranks; returns the bytes of each rank, which differ by at most one."""
    # Differences of consecutive rounded-down multiples, whose sum is exactly ``nbytes``.
    return tuple(nbytes * (number + 1) // count - nbytes * number // count for number in range(count))


def balanced_shares(wanted: Mapping[Ranks, int]) -> dict[Ranks, tuple[int, ...]]:
    """Choose the bytes that each rank of each set sends, such that the ranks' loads are as equal as possible.

    A rank's load is the sum of the bytes that it sends as a member of several sets. In turn, the bytes of each set are
    divided again, given the loads that its ranks have from other sets, until nothing changes. This is coordinate
    descent on the sum of squared loads, which is convex.

    Args:
        wanted: bytes that all receivers together take from each set.

    Returns:
        For each set, the bytes of each of its ranks; their sum is ``wanted[set]``.
    """
    shares = {ranks: equal_shares(nbytes, len(ranks)) for ranks, nbytes in wanted.items()}
    loads: dict[int, int] = {}
    for ranks, sent in shares.items():
        for rank, nbytes in zip(ranks, sent, strict=True):
            loads[rank] = loads.get(rank, 0) + nbytes
    several = [ranks for ranks in shares if len(ranks) > 1]
    for _ in range(_MAX_BALANCE_ROUNDS):
        largest_change = 0
        for ranks in several:
            others = [loads[rank] - nbytes for rank, nbytes in zip(ranks, shares[ranks], strict=True)]
            current = [loads[rank] for rank in ranks]
            if max(current) - min(current) <= _BALANCE_TOLERANCE_BYTES:
                continue  # balanced already
            sent = _added_to_lowest(others, wanted[ranks])
            changes = (abs(a - b) for a, b in zip(sent, shares[ranks], strict=True))
            largest_change = max(largest_change, *changes)
            shares[ranks] = sent
            for rank, other, nbytes in zip(ranks, others, sent, strict=True):
                loads[rank] = other + nbytes
        if largest_change <= _BALANCE_TOLERANCE_BYTES:
            break
    return shares


def _added_to_lowest(loads: Sequence[int], nbytes: int) -> tuple[int, ...]:
    """Divide ``nbytes`` among ranks with given loads, so that the lowest loads rise to one common level.

    Returns:
        The bytes that are added to each load.
    """
    # Equal loads are ordered by their index, so that all ranks compute the same plan.
    order = sorted(range(len(loads)), key=lambda number: (loads[number], number))
    added = [0] * len(loads)
    for count in range(1, len(order) + 1):
        lowest = order[:count]
        total = sum(loads[number] for number in lowest) + nbytes
        # The smallest number of loads whose common level does not exceed the next higher load.
        if count == len(order) or total <= loads[order[count]] * count:
            level, rest = divmod(total, count)
            for index, number in enumerate(lowest):
                # Bytes that cannot be divided equally go to the first `rest` loads.
                added[number] = level + (index < rest) - loads[number]
            break
    return tuple(added)
