"""From live tensors to what a manifest says of them, by arithmetic on this rank alone.

`Describer` answers for one tensor: dtype, global shape, `Distribution`, and the local tensor whose bytes
this rank would write. Nothing is communicated; ranks later compare digests of what they found.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale_fsdp.checkpoint.distribution import (
    Axes,
    Axis,
    Cut,
    Distribution,
    LayoutCut,
    ShardCut,
    UnitsCut,
)
from vescale_fsdp.checkpoint.dtypes import dtype_name
from vescale_fsdp.dtensor import RaggedDTensor
from vescale_fsdp.errors import CheckpointError, explain
from vescale_fsdp.layout import GroupLayout
from vescale_fsdp.placement import RaggedShard
from vescale_fsdp.torch_private import StridedShard, is_wrapper, local_of

__all__ = ["Described", "Describer"]


class Described(NamedTuple):
    """What a manifest says of a tensor, and this rank's part of it.

    Attributes:
        local: row-major elements of the rank's region; None on a rank outside the tensor's mesh.
    """

    dtype: str
    shape: tuple[int, ...]
    distribution: Distribution
    local: torch.Tensor | None


class Describer:
    """Describes the tensors of one state; layouts met on the way are numbered in order of appearance.

    Args:
        rank_of: number within the checkpoint's world of each global rank.
    """

    def __init__(self, rank_of: dict[int, int] | None = None) -> None:
        self._rank_of = rank_of
        self._meshes: dict[int, tuple[DeviceMesh, Axes | None]] = {}
        self._layout_numbers: dict[GroupLayout, int] = {}
        self._by_identity: dict[int, tuple[GroupLayout, int, dict[str, int]]] = {}

    @property
    def layouts(self) -> tuple[GroupLayout, ...]:
        """Layouts met so far; `LayoutCut.layout` is a place in this tuple."""
        return tuple(self._layout_numbers)

    def describe(self, name: str, tensor: torch.Tensor) -> Described:
        """Dtype, shape, distribution and local part of a tensor.

        Raises:
            CheckpointError: for tensors that cannot be stored (partial, sparse, quantized, meta, ...).
        """
        if not isinstance(tensor, DTensor):
            _check_plain(name, tensor)
            return Described(
                dtype_name(tensor.dtype), tuple(tensor.shape), Distribution((), ()), tensor.detach()
            )
        local = local_of(tensor).detach()
        _check_plain(name, local)
        axes = self._axes_of(tensor.device_mesh)
        distribution = self._distribution(name, tensor, axes) if axes is not None else Distribution((), ())
        return Described(
            dtype_name(tensor.dtype), tuple(tensor.shape), distribution, local if axes is not None else None
        )

    def _distribution(self, name: str, tensor: DTensor, axes: Axes) -> Distribution:
        early: list[tuple[Axis, Cut]] = []
        strided: list[tuple[Axis, Cut]] = []
        late: list[tuple[Axis, Cut]] = []
        for axis, placement in zip(axes, tensor.placements, strict=True):
            if isinstance(placement, RaggedShard):
                late.append((axis, self._ragged_cut(tensor, placement)))
            elif isinstance(placement, StridedShard):
                # Made by cutting what later axes left of the dim: innermost first, after all plain shards.
                strided.insert(0, (axis, ShardCut(placement.dim)))
            elif placement.is_shard():
                early.append((axis, ShardCut(placement.dim)))  # type: ignore[attr-defined]
            elif not placement.is_replicate():
                raise CheckpointError(
                    explain(
                        "A tensor is not in a state that can be saved.",
                        expected="placements that are Shard, RaggedShard or Replicate",
                        got=tuple(map(str, tensor.placements)),
                        where=name,
                        todo="reduce it first: tensor.redistribute(placements=[Replicate(), ...])",
                    )
                )
        pairs = [pair for pair in (*early, *strided, *late) if pair[0].size > 1]
        return Distribution(tuple(axis for axis, _ in pairs), tuple(cut for _, cut in pairs))

    def _ragged_cut(self, tensor: DTensor, placement: RaggedShard) -> Cut:
        reference = tensor.layout_ref if isinstance(tensor, RaggedDTensor) else None
        if reference is not None:
            layout, fqn = reference
            known, number, slots = self._layout(layout)
            place = slots.get(fqn)
            if place is not None and _agrees(known, place, tensor, placement):
                return LayoutCut(number, place)
        runs: list[tuple[int, int]] = []
        for units in placement.local_units:
            if runs and runs[-1][1] == units:
                runs[-1] = (runs[-1][0] + 1, units)
            else:
                runs.append((1, units))
        return UnitsCut(placement.dims, tuple(runs))

    def _layout(self, layout: GroupLayout) -> tuple[GroupLayout, int, dict[str, int]]:
        known = self._by_identity.get(id(layout))
        if known is None:
            number = self._layout_numbers.setdefault(layout, len(self._layout_numbers))
            known = (layout, number, {slot.fqn: place for place, slot in enumerate(layout.slots)})
            self._by_identity[id(layout)] = known
        return known

    def _axes_of(self, mesh: DeviceMesh) -> Axes | None:
        """Axes of a mesh in rules of rank numbers; None on a rank outside the mesh."""
        known = self._meshes.get(id(mesh))
        if known is None:
            known = (mesh, axes_of_mesh(mesh, self._rank_of))
            self._meshes[id(mesh)] = known
        return known[1]


def axes_of_mesh(mesh: DeviceMesh, rank_of: dict[int, int] | None) -> Axes | None:
    """One `Axis` per mesh axis, or None if this rank is not in the mesh."""
    if mesh.get_coordinate() is None:
        return None
    numbers = mesh.mesh.numpy()
    if rank_of is not None:
        numbers = np.vectorize(lambda rank: rank_of.get(int(rank), -1))(numbers)
    return axes_of_ranks(numbers)


def axes_of_ranks(numbers: np.ndarray) -> Axes:  # type: ignore[type-arg]
    """One `Axis` per dim of an array of rank numbers: by rule where one holds, by table elsewhere."""
    coordinates = np.indices(numbers.shape)
    flat = numbers.reshape(-1).tolist()
    axes = []
    for dim, size in enumerate(numbers.shape):
        first = np.moveaxis(numbers, dim, 0)
        stride = int((first[1] - first[0]).flat[0]) if size > 1 else 1
        wanted = coordinates[dim].reshape(-1).tolist()
        rules = [Axis(size, stride, base) for base in (0, min(flat)) if stride > 0]
        fitting = [rule for rule in rules if rule.coordinates(flat) == wanted]
        table = tuple(sorted(zip(flat, wanted, strict=True)))
        axes.append(fitting[0] if fitting else Axis(size, 1, 0, table))
    return tuple(axes)


def _agrees(layout: GroupLayout, place: int, tensor: DTensor, placement: RaggedShard) -> bool:
    """Whether a layout says what the placement says here: optimizers may derive tensors of other shapes.

    Only this rank's piece is compared, to stay O(1) in ranks; ranks that differ are caught by the digest.
    """
    slot = layout.slots[place]
    if slot.shape != tuple(tensor.shape) or layout.num_shards != placement.num_shards:
        return False
    coordinate = tensor.device_mesh.get_local_rank(tensor.placements.index(placement))
    return layout.piece(slot, coordinate).numel == local_of(tensor).numel()


def _check_plain(name: str, tensor: torch.Tensor) -> None:
    problem = None
    if tensor.layout is not torch.strided:
        problem = f"a tensor of layout {tensor.layout}"
    elif tensor.is_quantized:
        problem = f"a quantized tensor of {tensor.dtype}"
    elif tensor.device.type == "meta":
        problem = "a tensor on the meta device, which has no values"
    elif type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and is_wrapper(tensor):
        problem = f"a tensor of type {type(tensor).__name__}"
    if problem is not None:
        raise CheckpointError(
            explain(
                "A tensor cannot be saved.",
                expected="a dense tensor with values, or a DTensor of such",
                got=problem,
                where=name,
                todo="save its dense parts (values, indices, scales) as tensors of their own",
            )
        )
