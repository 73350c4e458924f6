"""The plan of a transfer: two descriptions and a few choices, from which each rank finds what it sends and receives.

plan_transfer(source, target)      pure: names, shapes and dtypes are compared, loads are levelled
plan.to_json()                     the descriptions, the links, the budget, and uneven shares if there are any
RankTransfers(plan, rank)          what one rank sends, receives and keeps, as strided boxes (`rank_transfers`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from vescale_fsdp.checkpoint.checksums import checksum_of
from vescale_fsdp.checkpoint.manifest.structure import Entry, dump_json
from vescale_fsdp.checkpoint.manifest.torch_dtypes import stored_dtype
from vescale_fsdp.checkpoint.transfer.planning.balance import Shares, equal_shares, levelled_shares
from vescale_fsdp.checkpoint.transfer.planning.demand import Demand, demand_of
from vescale_fsdp.checkpoint.transfer.planning.description import StateDescription
from vescale_fsdp.checkpoint.transfer.planning.links import (
    Codec,
    Coded,
    Leaf,
    Link,
    Linkable,
    Named,
    leaves_of,
    link_from_json,
    link_to_json,
)
from vescale_fsdp.checkpoint.transfer.planning.shares import ALIGN_BYTES
from vescale_fsdp.checkpoint.transfer.planning.sources import PlacedLeaf, SourceTensor
from vescale_fsdp.errors import PlacementError

BUDGET_BYTES = 64 << 20  # 64 MiB
IN_FLIGHT = 4  # messages each way that a rank has on the wire or in its hands
_VERSION = 1
_NAMES_OF_BYTES = {"float8_e4m3fn": ("uint8",), "int8": ("uint8",), "uint8": ("float8_e8m0fnu",)}
_MANY = 20  # problems that an error lists


@dataclass(frozen=True, eq=False)
class TransferPlan:
    """How a target's ranks get their weights from a source's.

    Args:
        source, target: who holds what; rank numbers of both are of one world.
        links: what target tensors are made of, where it is not the source tensor of their name.
        cast: whether floats may be rounded to the target's dtype.
        budget_bytes: of memory that a rank may use for messages.
        shares: bytes that each rank of a set of ranks that hold the same sends, where they are not equal.

    Examples:
        >>> import torch
        >>> from vescale_fsdp import describe_states
        >>> plan = plan_transfer(*describe_states({"w": torch.ones(4)}, {"w": torch.zeros(4)}))
        >>> TransferPlan.from_json(plan.to_json()) == plan
        True
    """

    source: StateDescription
    target: StateDescription
    links: tuple[tuple[str, Link], ...] = ()
    cast: bool = False
    budget_bytes: int = BUDGET_BYTES
    shares: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TransferPlan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def message_bytes(self) -> int:
        """The most that one message carries."""
        return max(self.budget_bytes // (2 * IN_FLIGHT) // ALIGN_BYTES, 1) * ALIGN_BYTES

    @cached_property
    def leaves(self) -> tuple[PlacedLeaf, ...]:
        """All leaves, in the order of the target's tensors.

        Raises:
            PlacementError: if names, shapes or dtypes do not meet; lists all that do not.
        """
        return _Resolver(self).leaves()

    @cached_property
    def demand(self) -> Demand:
        """Bytes between all ranks."""
        return demand_of(self.source, self.target, self.leaves)

    @cached_property
    def all_shares(self) -> Shares:
        """Bytes that each rank of each set sends."""
        chosen = dict(self.shares)
        wanted = zip(self.demand.sets, self.demand.sent.sum(1).tolist(), strict=True)
        return {ranks: chosen.get(ranks) or equal_shares(nbytes, len(ranks)) for ranks, nbytes in wanted}

    def wanted_bytes(self, ranks: tuple[int, ...], receiver: int) -> int:
        """Bytes that a rank takes from a set."""
        demand = self.demand
        return int(demand.sent[demand.row_of[ranks], demand.column_of[receiver]])

    def stretch(self, ranks: tuple[int, ...], sender: int, receiver: int) -> tuple[int, int]:
        """The bytes that one rank of a set sends, of all that another takes from the set."""
        row, column = self.demand.row_of[ranks], self.demand.column_of[receiver]
        start, stop = self.demand.starts[row, column : column + 2].tolist()
        place = ranks.index(sender)
        before = sum(self.all_shares[ranks][:place])
        edges = before, before + self.all_shares[ranks][place]
        low, high = (_edge(edge - start, stop - start) for edge in edges)
        return low, high

    @cached_property
    def unused(self) -> tuple[str, ...]:
        """Tensors of the source that the target has no use for."""
        used = {leaf.source.name for leaf in self.leaves}
        return tuple(entry.name for entry in self.source.entries if entry.name not in used)

    @cached_property
    def digest(self) -> int:
        """A number that differs between different plans."""
        return checksum_of(dump_json(self.to_json()))

    def to_json(self) -> dict[str, Any]:
        """Plain values that `from_json` reads back without loss."""
        return {
            "version": _VERSION,
            "source": self.source.to_json(),
            "target": self.target.to_json(),
            "links": [[name, link_to_json(link)] for name, link in self.links],
            "cast": self.cast,
            "budget_bytes": self.budget_bytes,
            "shares": [[list(ranks), list(sent)] for ranks, sent in self.shares],
        }

    @classmethod
    def from_json(
        cls, data: Mapping[str, Any], codecs: Mapping[str, Callable[..., Codec]] | None = None
    ) -> TransferPlan:
        """Inverse of `to_json`.

        Args:
            codecs: classes of the codecs that links name, by class name.
        """
        if data.get("version") != _VERSION:
            raise PlacementError(
                "This plan is of another version.",
                expected=_VERSION,
                got=data.get("version"),
                todo="plan anew",
            )
        return cls(
            StateDescription.from_json(data["source"]),
            StateDescription.from_json(data["target"]),
            tuple((name, link_from_json(link, codecs or {})) for name, link in data["links"]),
            data["cast"],
            data["budget_bytes"],
            tuple((tuple(ranks), tuple(sent)) for ranks, sent in data["shares"]),
        )


def _edge(position: int, nbytes: int) -> int:
    """Where a stretch begins or ends within a stream: between items, whatever their width."""
    return nbytes if position >= nbytes else max(position, 0) // ALIGN_BYTES * ALIGN_BYTES


def plan_transfer(
    source: StateDescription,
    target: StateDescription,
    *,
    links: Mapping[str, Linkable] | None = None,
    cast: bool = False,
    budget_bytes: int = BUDGET_BYTES,
) -> TransferPlan:
    """Plan how a target's ranks get their tensors from the ranks of a source. Pure.

    Nothing is sent to a rank that holds it; of ranks that hold the same, none sends what a less loaded one could.

    Args:
        source, target: who holds what, by `describe_states`; tensors of the source that nothing asks for stay.
        links: what target tensors are made of, such as ``{"qkv": concatenate("q", "k", "v")}`` with the functions of
            `vescale_fsdp.checkpoint.transfer`; others come from the source tensor of their name.
        cast: round floats to the target's dtype where it is another.
        budget_bytes: of memory that each rank may use for messages, at least 4 KiB.

    Raises:
        PlacementError: if names, shapes or dtypes do not meet, or nobody holds a part; lists all that is wrong.

    Examples:
        >>> import torch
        >>> from vescale_fsdp import describe_states
        >>> plan = plan_transfer(*describe_states({"w": torch.ones(4)}, {"w": torch.zeros(4)}))
        >>> plan.unused
        ()
    """
    if budget_bytes < 4096:
        raise PlacementError("The budget is too small.", expected="at least 4096 bytes", got=budget_bytes)
    found = tuple(
        (name, Named(link) if isinstance(link, str) else link) for name, link in (links or {}).items()
    )
    plan = TransferPlan(source, target, found, cast, budget_bytes)
    demand = plan.demand
    wanted = dict(zip(demand.sets, demand.sent.sum(1).tolist(), strict=True))
    uneven = tuple(
        (ranks, sent)
        for ranks, sent in levelled_shares(wanted).items()
        if sent != equal_shares(wanted[ranks], len(ranks))
    )
    if not uneven:
        return plan
    levelled = TransferPlan(source, target, found, cast, budget_bytes, uneven)
    # What is known already depends on the descriptions and links alone.
    levelled.__dict__.update(leaves=plan.leaves, demand=demand)
    return levelled


class _Resolver:
    """Finds the leaves of a plan, and all that is wrong."""

    def __init__(self, plan: TransferPlan) -> None:
        self._plan = plan
        self._links = dict(plan.links)
        self._sources: dict[Named | Coded, SourceTensor] = {}
        self._problems: list[str] = []

    def leaves(self) -> tuple[PlacedLeaf, ...]:
        """The leaves of all tensors of the target."""
        target = self._plan.target
        found = [leaf for place, entry in enumerate(target.entries) for leaf in self._of(place, entry)]
        names = {entry.name for entry in target.entries}
        self._problems += [
            f"{name!r} is linked, but the target has no such tensor"
            for name in self._links
            if name not in names
        ]
        self._prove_held(found)
        if self._problems:
            shown = "\n    ".join(self._problems[:_MANY])
            more = len(self._problems) - _MANY
            raise PlacementError(
                "Source and target do not meet.",
                expected="for each tensor of the target a source of its shape and dtype",
                got=f"{len(self._problems)} that do not\n    {shown}"
                + (f"\n    and {more} more" if more > 0 else ""),
                todo="link names that differ: plan_transfer(..., links={name: ...}); cast=True rounds floats",
            )
        return tuple(found)

    def _of(self, place: int, entry: Entry) -> Iterator[PlacedLeaf]:
        link = self._links.get(entry.name, Named(entry.name))
        try:
            shape, leaves = leaves_of(link, self._shape_of)
        except KeyError as missing:
            self._problems.append(f"{entry.name!r}: the source has no tensor {missing}")
            return
        except PlacementError as misfit:
            self._problems.append(f"{entry.name!r}: " + " ".join(str(misfit).split()))
            return
        if shape != entry.shape:
            self._problems.append(f"{entry.name!r}: shape {entry.shape}, but the source makes {shape}")
            return
        for leaf in leaves:
            yield self._placed(place, entry, leaf)

    def _shape_of(self, item: Named | Coded) -> tuple[int, ...]:
        return self._source(item).shape

    def _source(self, item: Named | Coded) -> SourceTensor:
        if item not in self._sources:
            self._sources[item] = SourceTensor(self._plan.source, item)
        return self._sources[item]

    def _placed(self, place: int, entry: Entry, leaf: Leaf) -> PlacedLeaf:
        source = self._source(leaf.source)
        have, want = stored_dtype(source.dtype), stored_dtype(entry.dtype)
        is_bits = have.name == want.name
        if isinstance(leaf.source, Coded):  # its bytes, under whatever name kernels want
            is_bits = is_bits or want.name in _NAMES_OF_BYTES.get(have.name, ())
        if not is_bits and not (self._plan.cast and have.kind == want.kind == "float"):
            self._problems.append(f"{entry.name!r}: dtype {want.name}, but the source makes {have.name}")
        narrow = entry.dtype if want.itemsize <= have.itemsize else source.dtype
        casts = (False, False) if is_bits else (narrow != source.dtype, narrow != entry.dtype)
        return PlacedLeaf(leaf, source, place, narrow, *casts)

    def _prove_held(self, leaves: list[PlacedLeaf]) -> None:
        """That each part of each tensor that is read is held by some rank."""
        for source in {id(leaf.source): leaf.source for leaf in leaves}.values():
            missing = source.holders.missing_place()
            if missing is not None:
                sizes = [axis.size for axis in source.distribution.axes]
                where = np.unravel_index(missing, sizes) if sizes else ()
                self._problems.append(
                    f"{source.name!r}: no rank of the source holds the part at {[int(n) for n in where]} of {sizes}"
                )
