"""The layout of a group: where every tensor lies in one flat buffer cut into equal shards. A value.

Rank r owns elements [r*S, (r+1)*S) of the group's global buffer, S = ``shard_numel``::

    S = 12, 3 ranks              rank 0          rank 1          rank 2
    buffer            |0 . . . . . . . . . . 11|12 . . . . . . 23|24 . . . . . . 35|
    slots             [ w (7, 2) block 2       w ][ b ][ v (4, 4), block 4     v ]__
    offsets            0                      14  14  20                       36

    w has 14 elements at offset 0: rank 0 owns w[0:12], rank 1 owns w[12:14] (12 % 2 == 0: no block is cut);
    b has 5 at 14; v has 16 at 20 (24 - 20 = 4 is one block); one element of padding at 19.

Nothing but the planner decides these numbers, and nothing rebuilds them from shapes: the runtime, the
placements of parameters, checkpoints, reports and pictures all ask the layout. It does not grow with the
number of ranks, and it proves itself when built: a `GroupLayout` that exists cuts no block, overlaps
nowhere and lies inside its buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from vescale_fsdp.errors import LayoutError, explain
from vescale_fsdp.geometry import FlatRange, numel_of

__all__ = ["GroupLayout", "ModelLayout", "Piece", "TensorSlot"]


class Piece(NamedTuple):
    """What one rank holds of one tensor: a flat range of the tensor, and where it starts in the shard."""

    range: FlatRange  # of the tensor's flat elements
    local_offset: int  # of the range's first element, in elements from the start of the rank's shard

    @property
    def numel(self) -> int:
        """Elements the rank holds."""
        return self.range.numel


@dataclass(frozen=True)
class TensorSlot:
    """Where one tensor lies in the group's global buffer.

    Args:
        fqn: fully qualified name of the parameter.
        shape: its full shape.
        dtype: its dtype's name without the ``torch.`` prefix, such as ``"float32"``.
        block_numel: elements per block; a rank boundary inside the tensor lies between two blocks.
        offset: index of the tensor's first element in the global buffer.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    block_numel: int
    offset: int

    @cached_property
    def numel(self) -> int:
        """Elements of the full tensor."""
        return numel_of(self.shape)

    @property
    def span(self) -> FlatRange:
        """The tensor's range of the global buffer."""
        return FlatRange(self.offset, self.offset + self.numel)

    def to_json(self) -> dict[str, Any]:
        """Plain values that `from_json` reads back without loss."""
        return {
            "fqn": self.fqn,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "block_numel": self.block_numel,
            "offset": self.offset,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TensorSlot:
        """Inverse of `to_json`."""
        return cls(data["fqn"], tuple(data["shape"]), data["dtype"], data["block_numel"], data["offset"])


@dataclass(frozen=True)
class GroupLayout:
    """Slots of one group over ``num_shards`` equal shards of ``shard_numel`` elements.

    Raises:
        LayoutError: at construction, if a slot is malformed, overlaps another, leaves the buffer, or has
            a rank boundary inside a block.
    """

    num_shards: int
    shard_numel: int
    slots: tuple[TensorSlot, ...]

    def __post_init__(self) -> None:
        if self.num_shards < 1 or self.shard_numel < 0:
            raise LayoutError(
                explain(
                    "A group needs at least one shard of non-negative size.",
                    expected="num_shards >= 1 and shard_numel >= 0",
                    got=f"num_shards={self.num_shards}, shard_numel={self.shard_numel}",
                    todo="pass the number of ranks the group is sharded over",
                )
            )
        for slot in self.slots:
            self._prove_slot(slot)
        self._prove_disjoint()

    def _prove_slot(self, slot: TensorSlot) -> None:
        if min(slot.shape, default=0) < 0 or slot.block_numel < 1 or slot.offset < 0:
            raise LayoutError(
                explain(
                    "A slot has a negative size or offset, or an empty block.",
                    expected="sizes >= 0, block_numel >= 1, offset >= 0",
                    got=slot,
                    where=slot.fqn,
                )
            )
        if slot.span.stop > self.numel:
            raise LayoutError(
                explain(
                    "A slot leaves the group's buffer.",
                    expected=f"end of slot <= {self.numel} ({self.num_shards} shards x {self.shard_numel})",
                    got=f"[{slot.span.start}, {slot.span.stop})",
                    where=slot.fqn,
                )
            )
        if not self._cuts_between_blocks(slot):
            raise LayoutError(
                explain(
                    "A rank boundary cuts a block.",
                    expected=f"k * {self.shard_numel} a multiple of {slot.block_numel} away from the start",
                    got=f"slot [{slot.span.start}, {slot.span.stop})",
                    where=slot.fqn,
                    todo="take the layout from plan_group",
                )
            )

    def _cuts_between_blocks(self, slot: TensorSlot) -> bool:
        if slot.numel == 0:
            return True
        first_boundary = (slot.offset // self.shard_numel + 1) * self.shard_numel
        if first_boundary >= slot.span.stop:
            return True
        if (first_boundary - slot.offset) % slot.block_numel:
            return False
        # A second boundary lies S further on, so S itself must be a number of blocks.
        return first_boundary + self.shard_numel >= slot.span.stop or self.shard_numel % slot.block_numel == 0

    def _prove_disjoint(self) -> None:
        names = [slot.fqn for slot in self.slots]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise LayoutError(
                explain("A name stands twice in one group.", expected="distinct names", got=twice)
            )
        filled = sorted((slot for slot in self.slots if slot.numel), key=lambda slot: slot.offset)
        for left, right in pairwise(filled):
            if left.span.stop > right.offset:
                raise LayoutError(
                    explain(
                        "Two slots overlap.",
                        expected="disjoint ranges of the buffer",
                        got=f"{left.fqn} {tuple(left.span)} and {right.fqn} {tuple(right.span)}",
                    )
                )

    @cached_property
    def _by_fqn(self) -> dict[str, TensorSlot]:
        return {slot.fqn: slot for slot in self.slots}

    @property
    def numel(self) -> int:
        """Elements of the global buffer, padding included."""
        return self.num_shards * self.shard_numel

    @cached_property
    def payload_numel(self) -> int:
        """Elements of all tensors, without padding."""
        return sum(slot.numel for slot in self.slots)

    @property
    def padding_ratio(self) -> float:
        """Padding as a fraction of the payload (0.0 for an empty group)."""
        return (self.numel - self.payload_numel) / self.payload_numel if self.payload_numel else 0.0

    def slot(self, fqn: str) -> TensorSlot:
        """The slot of one tensor.

        Raises:
            LayoutError: if the group has no tensor of that name.
        """
        try:
            return self._by_fqn[fqn]
        except KeyError:
            raise LayoutError(
                explain(
                    "The group holds no tensor of this name.",
                    expected=f"one of {sorted(self._by_fqn)[:8]}",
                    got=repr(fqn),
                )
            ) from None

    def shard_range(self, rank: int) -> FlatRange:
        """The range of the global buffer that a rank owns."""
        return FlatRange(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def piece(self, slot: TensorSlot, rank: int) -> Piece:
        """What ``rank`` holds of a tensor; an empty range (at offset 0) if it holds nothing."""
        shard = self.shard_range(rank)
        held = slot.span.intersect(shard)
        if held.numel == 0:
            return Piece(FlatRange(0, 0), 0)
        return Piece(held.shift(-slot.offset), held.start - shard.start)

    def pieces_of(self, rank: int) -> Iterator[tuple[TensorSlot, Piece]]:
        """Non-empty pieces a rank holds, in buffer order."""
        held = [(slot, self.piece(slot, rank)) for slot in self.slots]
        yield from sorted((pair for pair in held if pair[1].numel), key=lambda pair: pair[1].local_offset)

    def piece_numels(self, slot: TensorSlot) -> tuple[int, ...]:
        """Elements of a tensor on each rank, in rank order. Sums to the tensor's numel."""
        return tuple(self.piece(slot, rank).numel for rank in range(self.num_shards))

    def to_json(self) -> dict[str, Any]:
        """Plain values that `from_json` reads back without loss."""
        return {
            "num_shards": self.num_shards,
            "shard_numel": self.shard_numel,
            "slots": [slot.to_json() for slot in self.slots],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> GroupLayout:
        """Inverse of `to_json`; proves the layout anew."""
        slots = tuple(TensorSlot.from_json(slot) for slot in data["slots"])
        return cls(data["num_shards"], data["shard_numel"], slots)


@dataclass(frozen=True)
class ModelLayout:
    """All groups of a model by name, in the order in which they were sharded."""

    groups: tuple[tuple[str, GroupLayout], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.groups]
        if len(set(names)) != len(names):
            raise LayoutError(
                explain("A group name stands twice in one model.", expected="distinct names", got=names)
            )

    @classmethod
    def of(cls, groups: Iterable[tuple[str, GroupLayout]]) -> ModelLayout:
        """A model layout from pairs of group name and layout."""
        return cls(tuple(groups))

    @property
    def padding_ratio(self) -> float:
        """Padding of all groups as a fraction of their payload."""
        payload = sum(group.payload_numel for _, group in self.groups)
        return sum(group.numel for _, group in self.groups) / payload - 1 if payload else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain values that `from_json` reads back without loss."""
        return {"groups": [{"name": name, **group.to_json()} for name, group in self.groups]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelLayout:
        """Inverse of `to_json`."""
        return cls(tuple((group["name"], GroupLayout.from_json(group)) for group in data["groups"]))
