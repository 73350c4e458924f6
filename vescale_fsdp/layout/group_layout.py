"""The layout of a group: the position of every tensor in one flat buffer, which is cut into equal shards.

Rank r owns elements [r*S, (r+1)*S) of the group's global buffer, S = ``shard_numel``::

    S = 12, 3 ranks              rank 0          rank 1          rank 2
    buffer            |0 . . . . . . . . . . 11|12 . . . . . . 23|24 . . . . . . 35|
    slots             [ w (7, 2) block 2       w ][ b ][ v (4, 4), block 4     v ]__
    offsets            0                      14  14  20                       36

    w has 14 elements at offset 0: rank 0 owns w[0:12], rank 1 owns w[12:14] (12 % 2 == 0: no block is cut).
    b has 5 elements at offset 14. Element 19 is padding.
    v has 16 elements at offset 20: rank 1 owns v[0:4], which is one block, and rank 2 owns v[4:16].

A *scattered* slot is not one run of the buffer: its pieces are in gaps between other tensors. It still has at most one
piece per rank, in rank order and of whole blocks, and is stored as a few runs of equal pieces::

    S = 12, 5 ranks         rank 0       rank 1       rank 2       rank 3       rank 4
    a (5, 4), block 4     |aaaaaaaaaaaa|aaaaaaaa....|............|............|............|
    u (6, 5), block 5     |............|............|uuuuuuuuuu..|uuuuuuuuuu..|uuuuuuuuuu..|

    a is one run at offset 0. u has runs ((2, 3, 10, 0),): from rank 2 on, 3 ranks own 10 elements each, at
    local offset 0. If u were one run of the buffer, after a, S would have to be 15.

Only the planner chooses these numbers, and no other code computes them from shapes: the runtime, the placements of
parameters, checkpoints, reports and pictures all read the layout. A layout is an immutable value whose size does not
grow with the number of ranks. The constructor of `GroupLayout` checks that no block is cut, that no tensors overlap,
that all tensors are inside the buffer, and that tensors and pieces start at multiples of `align_numel`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple

from vescale_fsdp.errors import LayoutError
from vescale_fsdp.layout.foreign_json import MAX_DIMS
from vescale_fsdp.layout.geometry import Range, RunLengths, numel_of
from vescale_fsdp.layout.pictures import layouts_html
from vescale_fsdp.lazy import set_module


@set_module("vescale_fsdp.layout")
class Piece(NamedTuple):
    """One rank's part of one tensor: a flat range of the tensor, and its start in the rank's shard.

    Examples:
        >>> Piece(Range(4, 16), 8).numel
        12
    """

    range: Range  # of the tensor's flat elements
    local_offset: int  # position of the range's first element, in elements from the start of the rank's shard

    @property
    def numel(self) -> int:
        """Number of elements of the piece."""
        return self.range.numel


@set_module("vescale_fsdp.layout")
class PieceRun(NamedTuple):
    """Equal ranges of the shards of ranks [first_rank, first_rank + num_ranks): pieces of one tensor, or unused.

    Examples:
        >>> PieceRun(first_rank=0, num_ranks=2, piece_numel=10, local_offset=8).numel
        20
    """

    first_rank: int
    num_ranks: int
    piece_numel: int  # elements on each of these ranks
    local_offset: int  # position of each piece, in elements from the start of its rank's shard

    @property
    def ranks(self) -> range:
        """The ranks that own a piece of the run."""
        return range(self.first_rank, self.first_rank + self.num_ranks)

    @property
    def numel(self) -> int:
        """Number of elements of all pieces of the run."""
        return self.num_ranks * self.piece_numel

    def overlaps(self, other: PieceRun) -> bool:
        """Return whether a piece of this run and a piece of ``other`` share an element of the buffer."""
        return max(self.first_rank, other.first_rank) < min(self.ranks.stop, other.ranks.stop) and max(
            self.local_offset, other.local_offset
        ) < min(self.local_offset + self.piece_numel, other.local_offset + other.piece_numel)


def runs_between(start: int, stop: int, shard_numel: int) -> Iterator[PieceRun]:
    """Yield the non-empty buffer range [start, stop), cut at rank boundaries; all whole shards in it are one run."""
    (first, head), (last, tail) = divmod(start, shard_numel), divmod(stop, shard_numel)
    if first == last:
        yield PieceRun(first, 1, tail - head, head)
        return
    if head:
        yield PieceRun(first, 1, shard_numel - head, head)
        first += 1
    if last > first:
        yield PieceRun(first, last - first, shard_numel, 0)
    if tail:
        yield PieceRun(last, 1, tail, 0)


@set_module("vescale_fsdp.layout")
@dataclass(frozen=True, slots=True)  # slots save memory: a model has thousands of tensors
class TensorSlot:
    """The range of the group's global buffer that has one tensor, or the pieces of a scattered tensor.

    Args:
        fqn: fully qualified name of the parameter.
        shape: its full shape.
        dtype: its dtype's name without the ``torch.`` prefix, such as ``"float32"``.
        block_numel: elements per block; no rank boundary is inside a block.
        offset: index of the tensor's first element in the global buffer.
        runs: pieces of a scattered slot, in rank order; empty for a slot that is one run of the buffer.

    Examples:
        >>> slot = TensorSlot("w", (6, 4), "float32", block_numel=4, offset=8)
        >>> slot.numel, slot.span
        (24, Range(start=8, stop=32))
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    block_numel: int
    offset: int
    runs: tuple[PieceRun, ...] = ()
    numel: int = field(init=False, repr=False, compare=False)  # elements of the full tensor

    def __post_init__(self) -> None:
        sizes = {"block_numel": self.block_numel, "offset": self.offset}
        if len(self.shape) > MAX_DIMS:  # the limit of numpy and of torch's kernels
            raise LayoutError(
                "The tensor has too many dims.",
                expected=f"at most {MAX_DIMS} dims",
                got=len(self.shape),
                where=self.fqn,
                todo="reshape it",
            )
        sizes |= {f"shape[{dim}]": size for dim, size in enumerate(self.shape)}
        _check_integers(sizes, f"slot {self.fqn!r}")
        # Computed once: large models read it often. The class is frozen, so a plain assignment would raise.
        object.__setattr__(self, "numel", numel_of(self.shape))

    @property
    def is_scattered(self) -> bool:
        """Whether the tensor is in several runs of the buffer, so that a gather has to copy it to one place."""
        return bool(self.runs)

    @property
    def span(self) -> Range:
        """The range of the global buffer that contains the tensor.

        Raises:
            LayoutError: for a scattered slot.
        """
        if self.runs:
            problem = "A scattered tensor is not one range of the buffer: call GroupLayout.piece(slot, rank)."
            raise LayoutError(problem, where=self.fqn)
        return Range(self.offset, self.offset + self.numel)

    def to_json(self) -> dict[str, Any]:
        """Return JSON values for `from_json`; the key ``runs`` exists only for scattered slots."""
        data: dict[str, Any] = {
            "fqn": self.fqn,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "block_numel": self.block_numel,
            "offset": self.offset,
        }
        if self.runs:  # most slots have none
            data["runs"] = [list(run) for run in self.runs]
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TensorSlot:
        """Return the slot that `to_json` described."""
        runs = tuple(PieceRun(*run) for run in data.get("runs", ()))
        shape = tuple(data["shape"])
        return cls(data["fqn"], shape, data["dtype"], data["block_numel"], data["offset"], runs)


@set_module("vescale_fsdp.layout")
@dataclass(frozen=True)
class GroupLayout:
    """The slots of one group's tensors in a buffer of ``num_shards`` equal shards.

    Args:
        num_shards: ranks that share the buffer.
        shard_numel: elements of the buffer that each rank owns.
        slots: the tensors, in definition order.
        align_numel: ``shard_numel`` and the starts of tensors and pieces are multiples of this; 1 means no alignment.

    Raises:
        LayoutError: at construction, if a slot is malformed or misaligned, overlaps another slot, ends after the
            buffer, or has a rank boundary inside a block.

    Examples:
        >>> slots = (TensorSlot("w", (6, 4), "float32", 4, 0), TensorSlot("b", (6,), "float32", 1, 24))
        >>> layout = GroupLayout(num_shards=2, shard_numel=16, slots=slots)
        >>> layout.piece_numels(layout.slot("w")), round(layout.padding_ratio, 3)
        ((16, 8), 0.067)
    """

    num_shards: int
    shard_numel: int
    slots: tuple[TensorSlot, ...]
    align_numel: int = 1

    def __post_init__(self) -> None:
        sizes = {
            "num_shards": self.num_shards,
            "shard_numel": self.shard_numel,
            "align_numel": self.align_numel,
        }
        _check_integers(sizes, "a group's layout")
        if self.num_shards < 1 or self.shard_numel < 0 or self.align_numel < 1:
            raise LayoutError(
                "A group needs at least one shard of non-negative size, and a positive alignment.",
                expected="num_shards >= 1, shard_numel >= 0 and align_numel >= 1",
                got=", ".join(f"{name}={size}" for name, size in sizes.items()),
                todo="pass the number of ranks that shard the group",
            )
        if self.shard_numel % self.align_numel:
            raise _invalid("", "The shards of this group are misaligned.", self._aligned, self.shard_numel)
        names = [slot.fqn for slot in self.slots]
        if len(set(names)) != len(names):
            repeated = sorted(name for name, count in Counter(names).items() if count > 1)
            raise LayoutError("A name appears twice in one group.", expected="distinct names", got=repeated)
        end_of_buffer = self.numel
        for slot in self.slots:
            self._check_slot(slot, end_of_buffer)
        self._check_disjoint()

    @property
    def _aligned(self) -> str:
        """The alignment in words, for messages."""
        return f"multiples of {self.align_numel} elements"

    def _check_slot(self, slot: TensorSlot, end_of_buffer: int) -> None:
        """Raise LayoutError unless a slot is aligned, inside the buffer, and without a cut inside a block."""
        if slot.offset < 0 or slot.block_numel < 1 or (slot.shape and min(slot.shape) < 0):
            problem = "A slot has a negative size or offset, or an empty block."
            raise _invalid(slot.fqn, problem, "sizes >= 0, block_numel >= 1, offset >= 0", slot)
        if slot.offset % self.align_numel:
            raise _invalid(slot.fqn, "The tensors of this group are misaligned.", self._aligned, slot.offset)
        if slot.runs:
            problem = self._problem_of_runs(slot)
            if problem:
                expected = (
                    f"{slot.numel} elements in whole blocks of {slot.block_numel}, one piece per rank, in rank order, "
                    f"inside {self.num_shards} shards of {self.shard_numel}"
                )
                raise _invalid(
                    slot.fqn, "The pieces of this scattered slot are not valid.", expected, problem
                )
            return
        start, size, stop = slot.offset, self.shard_numel, slot.offset + slot.numel
        if stop > end_of_buffer:
            expected = f"end of slot <= {end_of_buffer} ({self.num_shards} shards x {size})"
            problem = "A slot does not fit into the group's buffer."
            raise _invalid(slot.fqn, problem, expected, f"[{start}, {stop})")
        if start == stop:  # an empty tensor contains no boundary
            return
        # The first boundary after the start, because a boundary at the start cuts nothing.
        first_boundary = (start // size + 1) * size
        # Boundaries are S elements apart. So if the first boundary is between blocks and S is a whole number of blocks,
        # all later boundaries are between blocks, too.
        if (first_boundary < stop and (first_boundary - start) % slot.block_numel) or (
            first_boundary + size < stop and size % slot.block_numel
        ):
            expected = f"k * {size} a multiple of {slot.block_numel} away from the start"
            raise _invalid(slot.fqn, "A rank boundary cuts a block.", expected, f"slot [{start}, {stop})")

    def _problem_of_runs(self, slot: TensorSlot) -> str:
        """Return why the pieces of a scattered slot are not valid; "" if they are valid.

        Valid pieces are in rank order, inside shards and of whole blocks, and contain every element once.
        """
        start, next_rank, problem = 0, 0, ""
        for run in slot.runs:
            if start % slot.block_numel:
                problem = f"a piece starts inside a block, at element {start}"
            if run.first_rank < next_rank or min(run.num_ranks, run.piece_numel) < 1 or run.local_offset < 0:
                problem = f"run {tuple(run)} is empty, negative or not after rank {next_rank - 1}"
            # A run of one piece may end in the tensor's last, short block; the next run's start is checked above.
            if run.num_ranks > 1 and run.piece_numel % slot.block_numel:
                problem = f"run {tuple(run)} cuts blocks of {slot.block_numel}"
            if run.local_offset + run.piece_numel > self.shard_numel:
                problem = f"run {tuple(run)} leaves its shard of {self.shard_numel}"
            if run.local_offset % self.align_numel:
                problem = f"run {tuple(run)} does not start at a multiple of {self.align_numel}"
            next_rank, start = run.ranks.stop, start + run.numel
        first = slot.runs[0]
        if start != slot.numel or next_rank > self.num_shards:
            problem = f"{start} elements on ranks below {next_rank}"
        elif slot.offset != first.first_rank * self.shard_numel + first.local_offset:
            problem = f"offset {slot.offset} is not that of the first piece"
        return problem

    def _check_disjoint(self) -> None:
        """Raise LayoutError if two slots share an element of the buffer."""
        # Empty slots may share their start with other slots.
        filled = [slot for slot in self.slots if slot.numel]
        # Sorted by offset, so that a slot can only overlap a later one if it overlaps the next.
        contiguous = sorted((slot for slot in filled if not slot.runs), key=attrgetter("offset"))
        for left, right in pairwise(contiguous):
            if left.offset + left.numel > right.offset:
                raise _overlap(left, right)
        scattered = [slot for slot in filled if slot.runs]
        starts = [slot.offset for slot in contiguous] if scattered else []  # used only for scattered slots
        for index, slot in enumerate(scattered):
            for run in slot.runs:
                # To stay fast on long lists, compare only with slots that reach into the shards of the run's ranks.
                # - 1, because the last slot that starts before these shards may end in them.
                first = bisect_right(starts, run.first_rank * self.shard_numel) - 1
                stop = bisect_left(starts, run.ranks.stop * self.shard_numel)
                for other in (*contiguous[max(first, 0) : stop], *scattered[:index]):
                    if any(run.overlaps(piece) for piece in self.runs_of(other)):
                        raise _overlap(slot, other)

    @cached_property
    def _by_fqn(self) -> dict[str, TensorSlot]:
        return {slot.fqn: slot for slot in self.slots}

    @property
    def numel(self) -> int:
        """Number of elements of the global buffer, including padding."""
        return self.num_shards * self.shard_numel

    @cached_property
    def payload_numel(self) -> int:
        """Number of elements of all tensors, without padding."""
        return sum(slot.numel for slot in self.slots)

    @property
    def padding_ratio(self) -> float:
        """Padding as a fraction of the payload (0.0 for an empty group)."""
        return (self.numel - self.payload_numel) / self.payload_numel if self.payload_numel else 0.0

    @property
    def copied_numel(self) -> int:
        """Number of elements of scattered tensors, which every gather copies."""
        return sum(slot.numel for slot in self.slots if slot.runs)

    @property
    def copied_ratio(self) -> float:
        """Copied elements as a fraction of the payload (0.0 for an empty group)."""
        return self.copied_numel / self.payload_numel if self.payload_numel else 0.0

    def slot(self, fqn: str) -> TensorSlot:
        """Return the slot of one tensor.

        Raises:
            LayoutError: if the group has no tensor of that name.
        """
        try:
            return self._by_fqn[fqn]
        except KeyError:
            raise LayoutError(
                "The group has no tensor of this name.",
                expected=f"one of {sorted(self._by_fqn)[:8]}",  # a group may have thousands of names
                got=repr(fqn),
            ) from None

    def shard_range(self, rank: int) -> Range:
        """Return the range of the global buffer that ``rank`` owns."""
        return Range(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def piece(self, slot: TensorSlot, rank: int) -> Piece:
        """Return the piece of a tensor on ``rank``: an empty range at offset 0 if the rank owns none of the tensor."""
        start = 0
        for run in self.runs_of(slot):
            if rank in run.ranks:
                start += (rank - run.first_rank) * run.piece_numel
                return Piece(Range(start, start + run.piece_numel), run.local_offset)
            start += run.numel
        return Piece(Range(0, 0), 0)

    def pieces_of(self, rank: int) -> Iterator[tuple[TensorSlot, Piece]]:
        """Yield the slots and pieces of all tensors of which ``rank`` owns elements, in buffer order."""
        pieces = [(slot, self.piece(slot, rank)) for slot in self.slots]
        yield from sorted((pair for pair in pieces if pair[1].numel), key=lambda pair: pair[1].local_offset)

    def piece_lengths(self, slot: TensorSlot) -> RunLengths:
        """Return the number of a tensor's elements on each rank, in rank order, as runs."""
        runs, next_rank = [], 0
        for run in self.runs_of(slot):
            # The ranks before this run own nothing; if there are none, `RunLengths` drops the empty pair.
            runs += [(run.first_rank - next_rank, 0), (run.num_ranks, run.piece_numel)]
            next_rank = run.ranks.stop
        return RunLengths((*runs, (self.num_shards - next_rank, 0)))

    def piece_numels(self, slot: TensorSlot) -> tuple[int, ...]:
        """Return the number of a tensor's elements on each rank, in rank order, as one number per rank."""
        return tuple(self.piece_lengths(slot))

    def holders(self, slot: TensorSlot) -> Iterator[int]:
        """Yield the ranks that own at least one element of a tensor, in order."""
        for run in self.runs_of(slot):
            yield from run.ranks

    def runs_of(self, slot: TensorSlot) -> tuple[PieceRun, ...]:
        """Return the pieces of any slot as runs of equal pieces: at most three runs for a contiguous slot."""
        if slot.runs or not slot.numel:
            return slot.runs  # () for an empty slot: `runs_between` needs a non-empty range
        return tuple(runs_between(slot.offset, slot.offset + slot.numel, self.shard_numel))

    def _repr_html_(self) -> str:
        """Return the picture, as a notebook shows it."""
        return layouts_html([self])

    def to_json(self) -> dict[str, Any]:
        """Return JSON values for `from_json`."""
        return {
            "num_shards": self.num_shards,
            "shard_numel": self.shard_numel,
            "slots": [slot.to_json() for slot in self.slots],
            "align_numel": self.align_numel,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> GroupLayout:
        """Return the layout that `to_json` described. The constructor checks the layout, which may come from a file."""
        slots = tuple(TensorSlot.from_json(slot) for slot in data["slots"])
        return cls(data["num_shards"], data["shard_numel"], slots, data["align_numel"])


def _check_integers(sizes: Mapping[str, object], where: str) -> None:
    """Raise LayoutError for sizes that JSON can contain but no layout can have: 1.5, 2.0, true, "3"."""
    wrong = {
        name: size
        for name, size in sizes.items()
        if not isinstance(size, int) or size is True or size is False  # bool is a subclass of int
    }
    if wrong:
        raise LayoutError(
            "A size of this layout is not an integer.",
            expected="integers",
            got=", ".join(f"{name}={size!r}" for name, size in wrong.items()),
            where=where,
            todo="take the layout from plan_group, or from the checkpoint's manifest as it was written",
        )


def _invalid(fqn: str, problem: str, expected: str, got: object) -> LayoutError:
    todo = "take the layout from plan_group"
    return LayoutError(problem, expected=expected, got=got, where=fqn or None, todo=todo)


def _overlap(left: TensorSlot, right: TensorSlot) -> LayoutError:
    first, second = (
        f"{slot.fqn} {tuple(map(tuple, slot.runs)) if slot.runs else tuple(slot.span)}"
        for slot in (left, right)
    )
    return _invalid("", "Two slots overlap.", "disjoint ranges of the buffer", f"{first} and {second}")


@set_module("vescale_fsdp.layout")
@dataclass(frozen=True)
class ModelLayout:
    """All groups of a model by name, in the order of sharding.

    Examples:
        >>> layout = GroupLayout(2, 4, (TensorSlot("b", (8,), "float32", 1, 0),))
        >>> model = ModelLayout.of([("block", layout)])
        >>> ModelLayout.from_json(model.to_json()) == model
        True
    """

    groups: tuple[tuple[str, GroupLayout], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.groups]
        if len(set(names)) != len(names):
            raise LayoutError(
                "A group name appears twice in one model.", expected="distinct names", got=names
            )

    @classmethod
    def of(cls, groups: Iterable[tuple[str, GroupLayout]]) -> ModelLayout:
        """Return a model layout from pairs of group name and layout."""
        return cls(tuple(groups))

    @property
    def copied_numel(self) -> int:
        """Number of elements of scattered tensors in all groups."""
        return sum(group.copied_numel for _, group in self.groups)

    @property
    def padding_ratio(self) -> float:
        """Padding of all groups as a fraction of their payload."""
        payload = sum(group.payload_numel for _, group in self.groups)
        return sum(group.numel for _, group in self.groups) / payload - 1 if payload else 0.0

    def _repr_html_(self) -> str:
        """Return pictures of the largest layouts, as a notebook shows them."""
        return layouts_html(layout for _, layout in self.groups)

    def to_json(self) -> dict[str, Any]:
        """Return JSON values for `from_json`."""
        return {"groups": [{"name": name, **group.to_json()} for name, group in self.groups]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelLayout:
        """Return the model layout that `to_json` described."""
        return cls(tuple((group["name"], GroupLayout.from_json(group)) for group in data["groups"]))
