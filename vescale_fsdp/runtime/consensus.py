"""Consensus: ranks prove once, at a model's first use, that they have sharded it in the same way.

Ranks that disagree (another granularity, policy or model on one of them) would gather each other's pieces into wrong
places: wrong values without an error, or a collective that aborts. So before the first gather every rank makes lines of
text of all that must agree, and the ranks of a mesh compare one digest of them: an all-reduce per mesh axis.

    all equal      nothing more, now or later
    a difference   each rank learns of it by the same all-reduce; then they exchange hashes of their lines, and the
                   text of the first line that differs, for the error that all of them raise

Units are compared within their own mesh: pipeline stages and other experts may differ. What decides which collectives
a rank issues, in which order and on what, is compared as it is set then; `require_uncompared` is for switches that
cannot change any more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from vescale_fsdp.dtensor.spec import ranks_in
from vescale_fsdp.errors import LifecycleError
from vescale_fsdp.runtime.param_group import ParamGroup
from vescale_fsdp.runtime.takeover import settle
from vescale_fsdp.torch_modes import is_fake, outside_modes

ValueT = TypeVar("ValueT")
_NOTHING = "nothing: its model ends here"


class Member(Protocol):
    """What is compared of a unit (`vescale_fsdp.runtime.fsdp_state.FSDPState` is the only one)."""

    groups: list[ParamGroup]
    label: str  # its name in the model, once its root knows it
    reshard_after_forward: bool | None
    reshard_after_backward: bool
    requires_gradient_sync: bool
    unshard_in_backward: bool
    agreed: bool

    @property
    def prefetches(self) -> tuple[Sequence[Member] | None, Sequence[Member] | None]:
        """Units that the user wants gathered ahead in forwards, and in backwards."""

    @property
    def modes(self) -> str:
        """How backwards end, and how many reductions may be in flight."""


def reach_consensus(units: Sequence[tuple[str, Member]]) -> None:
    """Compare these units, named from their root, with those of the other ranks; free if all were compared before.

    Collective over the meshes of the units. What modules hold is taken over first (`takeover.settle`), and an error
    there counts as a difference, so that all ranks hear of it.

    Raises:
        LifecycleError: if ranks disagree, with the first difference and the ranks on each side; if a parameter
            cannot be taken over.
    """
    if all(unit.agreed for _, unit in units):
        return
    trouble = _settled(units)
    by_mesh: dict[DeviceMesh, list[tuple[str, ...]]] = {}
    names = {id(unit): name for name, unit in units}
    for name, unit in units:
        for number, group in enumerate(unit.groups):
            lines_of_group = _lines(f"unit {name!r}, group {number}", unit, group, names)
            by_mesh.setdefault(group.data.mesh, []).append(lines_of_group)
    differing = False
    # The widest first: of ranks that disagree on further meshes at least these all meet here.
    for mesh in sorted(by_mesh, key=lambda mesh: (-mesh.size(), mesh.ndim, ranks_in(mesh))):
        first = [f"mesh {ranks_in(mesh)}"] if trouble is None else [str(trouble)]
        lines = [*first, *chain(*zip(*by_mesh[mesh], strict=True))]
        with outside_modes():
            differing = _compare(mesh, lines, differing)
    if trouble is not None:
        raise trouble
    for _, unit in units:
        unit.agreed = True


def _settled(units: Sequence[tuple[str, Member]]) -> LifecycleError | None:
    """Take over what modules hold; the first error instead of raising it, since others wait for us."""
    try:
        for _, unit in units:
            for group in unit.groups:
                if not group.was_gathered:
                    settle(group)
    except LifecycleError as error:
        return error
    return None


def require_uncompared(units: Iterable[Member], switch: str) -> None:
    """Refuse to change, on this rank, what was compared with the others': they would not hear of it.

    Raises:
        LifecycleError: if a unit was compared, on this rank and so on all.
    """
    for unit in units:
        if unit.agreed:
            raise LifecycleError(
                f"{switch} comes too late: ranks have compared what they reduce, and would wait for each other.",
                expected="a call before the model's first use, on every rank",
                got=f"a call after the first use of {unit.label}",
                todo=f"call {switch} right after fully_shard",
            )


def _lines(where: str, unit: Member, group: ParamGroup, names: Mapping[int, str]) -> tuple[str, ...]:
    """What must agree of one group: who is in it, how it is trained, and where everything lies."""
    policy = group.mp_policy
    dtypes = (policy.param_dtype, policy.reduce_dtype, policy.output_dtype, policy.cast_forward_inputs)
    members = [(p.slot.fqn, p.slot.shape, f"requires_grad {p.sharded.requires_grad}") for p in group.params]
    return (
        f"{where}: {group.shard.dtype} {members}",
        (
            f"{where}: mp_policy {type(policy).__name__}{dtypes}, "
            f"offload {type(group.offload).__name__ if group.offload else None}, "
            f"reshard_after_forward {group.comm.part_size or unit.reshard_after_forward}, "
            f"on meta {group.shard.is_meta}, replaced {group.taken_over}"
        ),
        f"{where}: {_switches(unit, group, names)}",
        f"{where}: {group.layout.shard_numel} elements per rank, {group.layout.slots}",
    )


def _switches(unit: Member, group: ParamGroup, names: Mapping[int, str]) -> str:
    """What users set after sharding, and ranks must set alike."""
    ahead = [
        None if units is None else [names.get(id(each), "a unit elsewhere") for each in units]
        for units in unit.prefetches
    ]
    return (
        f"{group.comm.settings}, sums of micro-batches {group.sums_grads}, "
        f"set_requires_gradient_sync {unit.requires_gradient_sync}, "
        f"set_unshard_in_backward {unit.unshard_in_backward}, "
        f"set_reshard_after_backward {unit.reshard_after_backward}, prefetch lists {ahead}, {unit.modes}"
    )


def _compare(mesh: DeviceMesh, lines: list[str], differing: bool) -> bool:
    """Compare over every axis of a mesh, each axis passing on what the ones before have found."""
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    device = torch.device(mesh.device_type) if mesh.device_type != "cpu" else torch.device("cpu")
    for group in groups:
        differing = _differs(_hash("\n".join(lines)), differing, group, device)
    if differing:
        _raise_difference(lines, groups)
    return differing


def _differs(digest: int, already: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the ranks of a group have different digests, or one of them knows of others that have."""
    found = torch.tensor([digest, -digest, int(already)], dtype=torch.int64, device=device)
    if is_fake(found):
        return already  # nothing is computed here, and nothing sent
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    high, minus_low, known = found.tolist()
    return bool(high != -minus_low or known)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def _raise_difference(lines: list[str], groups: list[dist.ProcessGroup]) -> None:
    """Find the first line that differs, and raise with it, on all ranks."""
    hashes = _collect([_hash(line) for line in lines], groups)
    first = min(hashes)
    place = min(_first_difference(hashes[first], other) for rank, other in hashes.items())
    texts = _collect(lines[place] if place < len(lines) else _NOTHING, groups)
    sides: dict[str, list[int]] = {}
    for rank in sorted(texts):
        sides.setdefault(texts[rank], []).append(rank)
    (expected, here), *others = sides.items()
    raise LifecycleError(
        "The ranks have sharded different models, or the same one differently.",
        expected=f"on all ranks what ranks {here[:16]} have: {expected}",
        got="; ".join(f"ranks {ranks[:16]} have: {text}" for text, ranks in others[:4]),
        todo="build and shard the model with the same arguments on every rank, and load or replace parameters "
        "on all of them",
    )


def _collect(own: ValueT, groups: list[dist.ProcessGroup]) -> dict[int, ValueT]:
    """What every rank of a mesh has, by its global rank."""
    known = {dist.get_rank(): own}
    for group in groups:
        everyone: list[dict[int, ValueT]] = [{} for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(everyone, known, group=group)
        known = {rank: value for each in everyone for rank, value in each.items()}
    return known


def _first_difference(one: list[int], other: list[int]) -> int:
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return min(len(one), len(other)) if len(one) != len(other) else max(len(one), len(other))
