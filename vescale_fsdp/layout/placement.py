"""RaggedShard: a DTensor placement that gives each rank any number of whole units, including none.

The semantics follow the published ones (volcengine/veScale, ``docs/texts/raggedshard.md``). ``dims`` are the leading
tensor dims (0, .., i-1). They are flattened and cut into ``sum(local_units)`` equal units; rank r of the mesh axis
owns ``local_units[r]`` contiguous units, in rank order. ``dims=()`` keeps the tensor whole on the only rank whose
unit count is not zero.

    RaggedShard((0,), (1, 2, 0, 1)) on shape (8, 3): 4 units of 2 rows
        rank 0: rows [0, 2)   rank 1: rows [2, 6)   rank 2: nothing   rank 3: rows [6, 8)

A rank owns one flat range of the tensor (`RaggedShard.piece`); its local tensor is 1-D and contains the elements of
this range. A placement is a value: compared by content, hashable, picklable, deep-copyable. It stores the unit counts
as runs of equal numbers (`RunLengths`), so its size does not grow with the number of ranks; ``local_units`` is computed
on demand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp.errors import PlacementError, UnsupportedOpError
from vescale_fsdp.layout.geometry import Range, RunLengths, numel_of
from vescale_fsdp.lazy import set_module

_INSTEAD = (
    "use vescale_fsdp.distribute_tensor (for a DTensor, vescale_fsdp.dtensor.redistribute), or set_model_state_dict "
    "etc. of vescale_fsdp.checkpoint.state_dict"
)

# The way out for an optimizer that needs whole matrices.
OWNER_OPTIMIZER = (
    'fully_shard(..., granularity="whole") and vescale_fsdp.optim.OwnerOptimizer(cls, params, ...)'
)


@set_module("vescale_fsdp")
# eq=False: `__eq__` below compares runs; a generated one would expand `local_units` to one number per rank.
@dataclass(frozen=True, eq=False)
class RaggedShard(Placement):
    """Shard a tensor by whole units over one mesh axis.

    The tensor is divided into ``sum(local_units)`` units of equal size, and rank r owns ``local_units[r]`` of them, in
    rank order. A unit contains all dims behind ``dims`` whole: for ``dims=(0,)`` it consists of rows, for ``dims=()``
    it is the whole tensor. The placement is described in arXiv 2602.22437.

    Args:
        dims: the leading tensor dims that are flattened and sharded: () or (0, .., i-1).
        local_units: one non-negative int per rank of the mesh axis, at least one of them positive.

    Raises:
        PlacementError: if the dims are not a prefix or the units are not valid.

    Examples:
        >>> two_to_one = RaggedShard((0,), (2, 1))  # rank 0 has two thirds of the rows
        >>> two_to_one.piece_numels((6, 4)), two_to_one.piece((6, 4), rank=1)
        ((16, 8), Range(start=16, stop=24))
    """

    dims: tuple[int, ...]
    local_units: tuple[int, ...]

    def __post_init__(self) -> None:
        # torch's Placement is a C++ class. Without this call its methods crash the process.
        super().__init__()
        object.__setattr__(self, "dims", tuple(self.dims))
        # Written through __dict__, because the class is frozen. `units` replaces the field `local_units`, which
        # `__getattr__` computes: one number per rank would be large on thousands of ranks.
        self.__dict__["units"] = RunLengths.of(self.__dict__.pop("local_units"))
        if self.dims != tuple(range(len(self.dims))):
            raise PlacementError(
                "Only leading dims can be cut.", expected="(), (0,), (0, 1), ...", got=self.dims
            )
        if not self.units or min(self.units.distinct) < 0 or self.units.total == 0:
            raise PlacementError(
                "The units are not valid.",
                expected="one unit count >= 0 per rank, at least one of them > 0",
                got=self.local_units,
                where="RaggedShard(local_units=...)",
            )
        if not self.dims and sum(count for count, units in self.units.runs if units) != 1:
            raise PlacementError(
                "dims=() keeps the tensor on one rank.",
                expected="exactly one rank with units > 0",
                got=self.local_units,
                todo="name the dims to cut, or give one owner",
            )

    if not TYPE_CHECKING:  # type checkers see the dataclass field

        def __getattr__(self, name: str) -> Any:
            """Return ``local_units``, which is computed from ``units`` and not stored."""
            if name == "local_units":
                return tuple(self.units)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def units(self) -> RunLengths:
        """``local_units`` as runs."""
        units: RunLengths = self.__dict__["units"]
        return units

    @property
    def _key(self) -> tuple[object, ...]:
        # With the type, because a StridedRaggedShard of equal dims and units owns other elements.
        return type(self), self.dims, self.units

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RaggedShard) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickles contain the published fields instead of runs, so that every version can read them.
        return RaggedShard, (self.dims, self.local_units)

    def __deepcopy__(self, memo: dict[int, Any]) -> RaggedShard:
        return self  # immutable

    def is_shard(self, dim: int | None = None) -> bool:
        """Return True: ranks own different elements, so code that sums pieces must also sum over the ranks.

        Raises:
            UnsupportedOpError: if ``dim`` is given, since a ragged cut need not be along one dim.
        """
        if dim is not None:
            self._refuse_dim(f"is_shard({dim})")
        return True

    @property
    def dim(self) -> NoReturn:
        """Raise: code that reads the dim of a sharded tensor would cut it at other elements than the pieces."""
        self._refuse_dim("dim")

    def _refuse_dim(self, what: str) -> NoReturn:
        raise UnsupportedOpError(
            "A ragged cut is not a cut of one tensor dim into equal chunks.",
            expected="code that asks RaggedShard for piece(shape, rank), or the tensor for its boxes",
            got=what,
            where=str(self),
            todo=f"{_INSTEAD}. In from_pretrained(distributed_config=...): import the models of a tested version of "
            "transformers before install() or as_fsdp2()",
        )

    # What torch's ``redistribute`` calls to make shards of a stock DTensor (torch 2.11-2.15).
    def _replicate_to_shard(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedOpError(
            "torch's redistribute cannot make ragged pieces.",
            expected="placements of torch",
            got=str(self),
            where="DTensor.redistribute",
            todo="call vescale_fsdp.dtensor.redistribute(tensor, placements), or torch's method under "
            "vescale_fsdp.integrations.as_fsdp2(). In an optimizer of torch: step whole matrices with "
            f"{OWNER_OPTIMIZER}",
        )

    _reduce_shard_tensor = _replicate_to_shard

    # What operators on a stock DTensor with this placement call to gather it (torch 2.11-2.15).
    def _to_replicate_tensor(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedOpError(
            "torch's DTensor cannot gather ragged pieces.",
            expected="a RaggedDTensor",
            got=str(self),
            where="an operator on torch's DTensor",
            todo=_INSTEAD,
        )

    def __format__(self, spec: str) -> str:
        # torch's distribute_tensor formats an unknown placement into its error message and calls no other method of
        # the placement. So only this method can tell the user which function to call instead.
        return format(str(self), spec) if spec else f"{self!s} of vescale_fsdp ({_INSTEAD})"

    def __str__(self) -> str:
        units = self.units
        # There may be thousands of ranks.
        text = ", ".join(map(str, units)) if len(units) <= 8 else f"{units[0]}, .., {units[-1]}"
        return f"RaggedShard(dims={self.dims}, units=({text}))"

    @classmethod
    def from_piece_numels(cls, shape: Sequence[int], piece_numels: Sequence[int]) -> RaggedShard:
        """Return the placement under which rank r owns ``piece_numels[r]`` elements of a tensor of this shape.

        The placement has the largest units, and the fewest dims, that allow these pieces.

        Raises:
            PlacementError: if the sizes of the pieces do not add up to the size of the tensor.

        Examples:
            >>> RaggedShard.from_piece_numels((6, 4), [8, 16])
            RaggedShard(dims=(0,), local_units=(1, 2))
        """
        numel, numels = numel_of(shape), RunLengths.of(piece_numels)
        if numels.total != numel:
            raise PlacementError(
                "The pieces do not add up to the tensor.",
                expected=f"{numel} elements for shape {tuple(shape)}",
                got=f"{numels.total} in {tuple(piece_numels)}",
            )
        if numel == 0:
            # An empty tensor: rank 0 gets one empty unit, because a RaggedShard needs a positive unit count.
            return cls.of_runs((0,), RunLengths(((1, 1), (len(numels) - 1, 0))))
        unit_numel = math.gcd(*numels.distinct)
        depth = next(
            # The fewest dims such that a unit contains all later dims whole. At least one dim, because dims=() would
            # mean that one rank owns the whole tensor.
            d
            for d in range(min(1, len(shape)), len(shape) + 1)
            if unit_numel % numel_of(shape[d:]) == 0
        )
        return cls.of_runs(tuple(range(depth)), numels.map(lambda numel: numel // unit_numel))

    @classmethod
    def of_runs(cls, dims: tuple[int, ...], units: RunLengths) -> RaggedShard:
        """Return the placement with these units, without expanding the runs to one number per rank."""
        return RaggedShard(dims, units)  # type: ignore[arg-type]  # `RunLengths.of` accepts runs instead of the tuple

    @property
    def num_shards(self) -> int:
        """Number of ranks of the mesh axis."""
        return len(self.units)

    def unit_numel(self, shape: Sequence[int]) -> int:
        """Return the number of elements per unit of a tensor of this shape.

        Raises:
            PlacementError: if the shape has too few dims, or if ``dims`` of the shape do not divide into equal units.
        """
        numel, units = numel_of(shape), self.units.total
        # Elements of the trailing dims, which a unit must contain whole (0 if one of these dims is empty).
        run_numel = numel_of(shape[len(self.dims) :])
        whole_runs = not self.dims or run_numel == 0 or (numel // units) % run_numel == 0
        if len(shape) >= len(self.dims) and numel % units == 0 and whole_runs:
            return numel // units
        raise PlacementError(
            "A tensor of this shape cannot be cut like this.",
            expected=f"dims {self.dims} of the shape to divide into {units} units",
            got=f"shape {tuple(shape)}",
            where=str(self),
            todo="use RaggedShard.from_piece_numels, or take the placement from a plan",
        )

    def piece(self, shape: Sequence[int], rank: int) -> Range:
        """Return the half-open range of the flattened tensor that ``rank`` of the mesh axis owns."""
        unit = self.unit_numel(shape)
        return Range(self.units.start(rank) * unit, self.units.start(rank + 1) * unit)

    def piece_lengths(self, shape: Sequence[int]) -> RunLengths:
        """Return the number of elements on each rank, in rank order, as runs."""
        unit = self.unit_numel(shape)
        return self.units.map(lambda units: units * unit)

    def piece_numels(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the number of elements on each rank, in rank order, as one number per rank."""
        return tuple(self.piece_lengths(shape))

    def owners(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks that own at least one element."""
        return tuple(self.piece_lengths(shape).holders(0, numel_of(shape)))


@set_module("vescale_fsdp.layout")
@dataclass(frozen=True, eq=False)
class StridedRaggedShard(RaggedShard):
    """A RaggedShard on a tensor that ``Shard(0)`` on other mesh axes has already cut.

    The other axes cut dim 0 into ``split_factor`` chunks; the ragged placement cuts each chunk in the same ratio. So in
    the flat order of the full tensor a rank of this axis owns ``split_factor`` runs, one per chunk, and concatenating
    the pieces in rank order would permute the rows::

        shape (6,), units (1, 2), split_factor 2:   chunk 0      chunk 1
            rank 0 owns elements 0 and 3            0 | 1 2      3 | 4 5
            rank 1 owns elements 1, 2 and 4, 5      r0  r1       r0  r1

    `vescale_fsdp.dtensor.spec.make_spec` creates this placement from a `RaggedShard`; users need not write it.

    Args:
        dims, local_units: as for `RaggedShard`, but for one chunk instead of the whole tensor.
        split_factor: number of chunks, at least 2.

    Raises:
        PlacementError: if the split factor is below 2, or the dims or units are not valid.

    Examples:
        >>> StridedRaggedShard((0,), (1, 2), split_factor=2).runs((6,), rank=0)
        (Range(start=0, stop=1), Range(start=3, stop=4))
    """

    split_factor: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split_factor < 2:
            raise PlacementError(
                "A strided cut needs several chunks.",
                expected="split_factor >= 2",
                got=self.split_factor,
                todo="use RaggedShard",
            )

    @property
    def _key(self) -> tuple[object, ...]:
        return (*super()._key, self.split_factor)

    def __reduce__(self) -> tuple[Any, ...]:
        return StridedRaggedShard, (self.dims, self.local_units, self.split_factor)

    def __str__(self) -> str:
        return f"Strided{super().__str__()[:-1]}, split_factor={self.split_factor})"

    def runs(self, shape: Sequence[int], rank: int) -> tuple[Range, ...]:
        """Return the ranges of the flattened full tensor that ``rank`` owns, one per chunk, in flat order.

        Raises:
            PlacementError: if dim 0 does not divide into the chunks.
        """
        if shape[0] % self.split_factor:
            raise PlacementError(
                "Dim 0 does not divide into the chunks.",
                expected=f"a multiple of {self.split_factor}",
                got=f"shape {tuple(shape)}",
                where=str(self),
            )
        chunk = (shape[0] // self.split_factor, *shape[1:])
        piece = self.piece(chunk, rank)
        return tuple(piece.shift(index * numel_of(chunk)) for index in range(self.split_factor))
