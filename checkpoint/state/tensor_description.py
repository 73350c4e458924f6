"""Describe live tensors in the manifest's terms, without communication.

`Describer.describe` returns a tensor's dtype, global shape, `Distribution`, and the local tensor that this rank stores.
Ranks later compare digests of their descriptions.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp.checkpoint.manifest.state_tree import dotted_name
from vescale_fsdp.checkpoint.manifest.torch_dtypes import dtype_name
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor
from vescale_fsdp.dtensor.spec import group_ranks_in, is_in_group_order, ranks_by_group_rank
from vescale_fsdp.errors import CheckpointError
from vescale_fsdp.layout.distribution import (
    Axes,
    Axis,
    Cut,
    Distribution,
    LayoutCut,
    ShardCut,
    UnitsCut,
    shard_order,
)
from vescale_fsdp.layout.foreign_json import MAX_DIMS
from vescale_fsdp.layout.group_layout import GroupLayout
from vescale_fsdp.layout.placement import RaggedShard
from vescale_fsdp.layout.region import Region
from vescale_fsdp.torch_private import StridedShard, is_wrapper, local_of


class Described(NamedTuple):
    """The manifest's description of a tensor, and this rank's part of the tensor.

    Attributes:
        dtype: name of the dtype.
        shape: global shape.
        distribution: how the tensor is distributed over ranks.
        local: this rank's part, its region's elements in row-major order; None on a rank outside the tensor's mesh.
    """

    dtype: str
    shape: tuple[int, ...]
    distribution: Distribution
    local: torch.Tensor | None


_WHOLE = Distribution((), ())


class _Known(NamedTuple):
    """The cached distribution of the tensors of one layout slot: the weight, and optimizer state created like it."""

    layout: GroupLayout  # kept alive: the key of this entry contains the layout's id, which could be reused
    shape: tuple[int, ...]
    local_numel: int
    placements: tuple[Placement, ...]
    distribution: Distribution

    def holds_for(self, shape: tuple[int, ...], local_numel: int, placements: tuple[Placement, ...]) -> bool:
        """Return whether a tensor of the slot has this distribution. Takes O(1) time in the number of ranks."""
        if self.shape != shape or self.local_numel != local_numel:
            return False
        return self.placements is placements or all(map(_alike, self.placements, placements))


def _alike(a: Placement, b: Placement) -> bool:
    if a is b:
        return True
    if isinstance(a, RaggedShard) and isinstance(b, RaggedShard):
        # Without the units: comparing them takes time that grows with the number of ranks.
        return (a.dims, a.num_shards) == (b.dims, b.num_shards)
    return a == b


class _MeshPosition(NamedTuple):
    """The axes of a mesh as rules for rank numbers, and this rank's coordinate on each axis."""

    mesh: DeviceMesh  # kept alive: the key of this entry is the mesh's id, which could be reused
    axes: Axes | None  # None if this rank is outside the mesh
    coordinates: tuple[int, ...]
    disordered: frozenset[int] = frozenset()  # axes whose coordinates are not group ranks


class Describer:
    """Describes the tensors of one state, and numbers their layouts in the order of their appearance.

    Args:
        rank_of: global rank -> rank in the checkpoint's world; None if they are equal.
    """

    def __init__(self, rank_of: dict[int, int] | None = None) -> None:
        self._rank_of = rank_of
        self._meshes: dict[int, _MeshPosition] = {}
        self._layout_numbers: dict[GroupLayout, int] = {}
        self._by_identity: dict[int, tuple[GroupLayout, int, dict[str, int]]] = {}
        self._known: dict[tuple[int, int, str], _Known] = {}
        self._regions: dict[tuple[object, ...], tuple[Distribution, Region]] = {}

    @property
    def layouts(self) -> tuple[GroupLayout, ...]:
        """The layouts of the tensors described so far; `LayoutCut.layout` is an index into this tuple."""
        return tuple(self._layout_numbers)

    def copy_part(self, name: str, full: torch.Tensor, into: torch.Tensor) -> None:
        """Copy this rank's part of a full tensor into a sharded tensor of the same shape."""
        described = self.describe(name, into)
        if described.local is None:  # this rank has no part of the tensor
            return
        flat = described.local.view(-1)
        for box, at in self.region(described, dist.get_rank()).pieces():
            flat[at : at + box.numel].view(box.sizes).copy_(full[box.slices()])

    def describe(self, name: str, tensor: torch.Tensor) -> Described:
        """Return the dtype, shape, distribution and local part of a tensor.

        Raises:
            CheckpointError: for tensors that cannot be stored (partial, sparse, quantized, meta, ...).
        """
        if not isinstance(tensor, DTensor):
            _check_plain(name, tensor)
            # Detached only if needed, because `detach` creates a tensor object.
            local = tensor.detach() if tensor.requires_grad else tensor
            return Described(dtype_name(tensor.dtype), tuple(tensor.shape), _WHOLE, local)
        local = local_of(tensor)
        if local.requires_grad:
            local = local.detach()
        _check_plain(name, local)  # the local tensor has the values: the DTensor's own type is a wrapper
        dtype, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
        position = self._position_in(tensor.device_mesh)
        if position.axes is None:
            return Described(dtype, shape, _WHOLE, None)
        reference = tensor.layout_ref if isinstance(tensor, RaggedDTensor) else None
        if reference is None:
            return Described(dtype, shape, self._distribution(name, tensor, position), local)
        layout, fqn = reference
        key = (id(tensor.device_mesh), id(layout), fqn)
        known = self._known.get(key)
        if known is None or not known.holds_for(shape, local.numel(), tensor.placements):
            distribution = self._distribution(name, tensor, position)
            known = _Known(layout, shape, local.numel(), tensor.placements, distribution)
            # A distribution with units is not cached: they may differ between tensors, and `holds_for` ignores them.
            if not any(isinstance(cut, UnitsCut) for cut in distribution.cuts):
                self._known.setdefault(key, known)
        return Described(dtype, shape, known.distribution, local)

    def region(self, described: Described, rank: int) -> Region:
        """Return a rank's region of a tensor that this object has described."""
        distribution = described.distribution
        key = (described.shape, id(distribution), rank)
        _, region = self._regions.get(key, (None, None))
        if region is None:
            coordinates = [axis.coordinates([rank])[0] for axis in distribution.axes]
            region = distribution.region(described.shape, coordinates, self.layouts)
            # The entry refers to the distribution, so that the id in its key is not reused.
            self._regions[key] = (distribution, region)
        return region

    def _distribution(self, name: str, tensor: DTensor, position: _MeshPosition) -> Distribution:
        assert position.axes is not None
        shards: dict[int, tuple[int, int]] = {}
        ragged: list[tuple[Axis, Cut]] = []
        for number, placement in enumerate(tensor.placements):
            axis = position.axes[number]
            if isinstance(placement, RaggedShard):
                ragged.append((axis, self._ragged_cut(tensor, placement, position.coordinates[number])))
            elif isinstance(placement, StridedShard):
                shards[number] = (placement.dim, int(placement.split_factor))
            elif placement.is_shard():
                shards[number] = (placement.dim, 1)  # type: ignore[attr-defined]
            elif not placement.is_replicate():
                raise CheckpointError(
                    "A tensor has a placement that cannot be saved.",
                    expected="placements that are Shard, RaggedShard or Replicate",
                    got=tuple(map(str, tensor.placements)),
                    where=dotted_name(name),
                    todo="reduce it first: tensor.redistribute(placements=[Replicate(), ...])",
                )
        self._check_order(name, tensor, position)
        order = shard_order(shards, [axis.size for axis in position.axes])
        if order is None:
            raise _no_order(name, tensor)
        cuts = [(position.axes[number], ShardCut(shards[number][0])) for number in order]
        pairs = [pair for pair in (*cuts, *ragged) if pair[0].size > 1]  # an axis of one rank cuts nothing
        return Distribution(tuple(axis for axis, _ in pairs), tuple(cut for _, cut in pairs))

    def _check_order(self, name: str, tensor: DTensor, position: _MeshPosition) -> None:
        """Check that it is defined which rank has which shard.

        Raises:
            CheckpointError: if a cut axis of the mesh has ranks out of order.
        """
        for axis in position.disordered:
            placement = tensor.placements[axis]
            if isinstance(placement, (Shard, StridedShard)):
                raise CheckpointError(
                    "A tensor is sharded over a mesh axis with ranks out of order: torch's redistribute and FSDP2 "
                    "assign different shards to these ranks.",
                    expected="a mesh with ascending ranks along the axis, or a RaggedShard",
                    got=tensor.device_mesh.mesh.tolist(),
                    where=f"{dotted_name(name)}, mesh axis {axis}",
                    todo="create the mesh with init_device_mesh",
                )

    def _ragged_cut(self, tensor: DTensor, placement: RaggedShard, coordinate: int) -> Cut:
        """Return a reference to the tensor's layout slot, or the placement's units if no slot describes the tensor."""
        reference = tensor.layout_ref if isinstance(tensor, RaggedDTensor) else None
        if reference is not None:
            layout, fqn = reference
            known, number, slots = self._layout(layout)
            slot = slots.get(fqn)
            if slot is not None and _agrees(known, slot, tensor, placement, coordinate):
                return LayoutCut(number, slot)
        return UnitsCut(placement.dims, placement.units.runs)

    def _layout(self, layout: GroupLayout) -> tuple[GroupLayout, int, dict[str, int]]:
        """Return the layout, its number, and the index of the slot of each parameter name.

        The cache is by identity, because a layout is large to hash; equal layouts get one number.
        """
        known = self._by_identity.get(id(layout))
        if known is None:
            number = self._layout_numbers.setdefault(layout, len(self._layout_numbers))
            known = (layout, number, {slot.fqn: index for index, slot in enumerate(layout.slots)})
            self._by_identity[id(layout)] = known
        return known

    def _position_in(self, mesh: DeviceMesh) -> _MeshPosition:
        known = self._meshes.get(id(mesh))
        if known is None:
            known = _MeshPosition(mesh, None, ())
            if mesh.get_coordinate() is not None:  # None: this rank is outside the mesh
                disordered = frozenset(axis for axis in range(mesh.ndim) if not is_in_group_order(mesh, axis))
                known = _MeshPosition(
                    mesh, axes_of_mesh(mesh, self._rank_of), group_ranks_in(mesh), disordered
                )
            self._meshes[id(mesh)] = known
        return known


def _no_order(name: str, tensor: DTensor) -> CheckpointError:
    return CheckpointError(
        "The ranks' parts of a tensor are not ranges of its dims.",
        expected="split factors that are products of the sizes of later mesh axes over the same dim",
        got=f"{tensor.placements} on a mesh of {tuple(tensor.device_mesh.shape)}",
        where=dotted_name(name),
        todo="redistribute the tensor first, or store the tensor as it was before view or flatten",
    )


def axes_of_mesh(mesh: DeviceMesh, rank_of: dict[int, int] | None) -> Axes:
    """Return one `Axis` per mesh axis; coordinates are ranks in the axis' process groups, see `dtensor.spec`."""
    numbers = ranks_by_group_rank(mesh).numpy()
    if rank_of is not None:
        # A rank of the mesh that does not take part in the save gets number -1.
        numbers = np.vectorize(lambda rank: rank_of.get(int(rank), -1))(numbers)
    return axes_of_ranks(numbers)


def axes_of_ranks(numbers: np.ndarray) -> Axes:  # type: ignore[type-arg]
    """Return one `Axis` per dim of an array of rank numbers: a rule if the numbers follow a rule, else a table."""
    coordinates = np.indices(numbers.shape)
    flat = numbers.reshape(-1).tolist()
    axes = []
    for dim, size in enumerate(numbers.shape):
        first = np.moveaxis(numbers, dim, 0)
        # The strides of a few neighbors; the rules below are checked for all ranks.
        line = first.reshape(size, -1)[:, 0]
        stride = int(line[1] - line[0]) if size > 1 else 1
        wanted = coordinates[dim].reshape(-1).tolist()
        # Base 0 first, because it needs no entry in the manifest.
        rules = [Axis(size, stride, base) for base in (0, min(flat)) if stride > 0]
        # In a hybrid cut, the coordinate counts nodes first and ranks in a node then: the first step that is not like
        # the one before is from the last node to the next rank of the first node.
        nodes = 1 + int(np.argmax(np.diff(line, append=line[:1]) != stride))
        if 1 < nodes < size and size % nodes == 0 and line[nodes] > line[0] and stride > 0:
            outer = int(line[nodes] - line[0])
            rules += [Axis(size, outer, base, None, (nodes, stride)) for base in (0, min(flat))]
        fitting = [rule for rule in rules if rule.coordinates(flat) == wanted]
        table = tuple(sorted(zip(flat, wanted, strict=True)))  # sorted, to be equal on all ranks
        axes.append(fitting[0] if fitting else Axis(size, 1, 0, table))
    return tuple(axes)


def _agrees(
    layout: GroupLayout, index: int, tensor: DTensor, placement: RaggedShard, coordinate: int
) -> bool:
    """Return whether a slot of a layout describes a tensor. An optimizer may give another shape the same placement.

    Only this rank's piece is compared, so that the time does not grow with the number of ranks. If the slot describes
    the tensor on some ranks only, their digests differ.
    """
    slot = layout.slots[index]
    if slot.shape != tuple(tensor.shape) or layout.num_shards != placement.num_shards:
        return False
    return layout.piece(slot, coordinate).numel == local_of(tensor).numel()


def _check_plain(name: str, tensor: torch.Tensor) -> None:
    problem, todo = None, "save its dense parts (values, indices, scales) as separate tensors"
    if tensor.dim() > MAX_DIMS:
        problem, todo = f"a tensor of {tensor.dim()} dims", "view it with fewer dims"
    elif tensor.is_nested:
        problem = "a nested tensor"
    elif tensor.layout is not torch.strided:
        problem = f"a tensor of layout {tensor.layout}"
    elif tensor.is_quantized:
        problem = f"a quantized tensor of {tensor.dtype}"
    elif tensor.device.type == "meta":
        problem = "a tensor on the meta device, which has no values"
        todo = "allocate it: call to_empty() of its module; a load allocates modules that are in the state themselves"
    # The exact types first: they are not wrapper subclasses, and `is_wrapper` is slower.
    elif type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and is_wrapper(tensor):
        problem = f"a tensor of type {type(tensor).__name__}"
    if problem is not None:
        raise CheckpointError(
            "A tensor cannot be saved or loaded.",
            expected=f"a dense tensor with values and at most {MAX_DIMS} dims, or a DTensor of such tensors",
            got=problem,
            where=dotted_name(name),
            todo=todo,
        )
