"""Consensus: ranks verify once, at a model's first use, that they have sharded it in the same way.

Ranks that disagree (another granularity, policy or model on one of them) would gather each other's pieces into wrong
places: wrong values without an error, or a collective that aborts. So before the first gather every rank describes, in
lines of text, all that must agree, and the ranks of a mesh compare one digest of them: an all-reduce per mesh axis.

    all equal      nothing more, now or later
    a difference   the same all-reduce reports it to each rank; then they exchange hashes of their lines, and the text
                   of the first line that differs, for the error that all of them raise

Units are compared within their own mesh: pipeline stages and other experts may differ. The comparison covers every
setting that decides which collectives a rank issues, in which order and on what. `require_uncompared` is for switches
that cannot change afterwards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from vescale_fsdp.dtensor.spec import ranks_in
from vescale_fsdp.errors import LifecycleError
from vescale_fsdp.runtime.param_group import ParamGroup
from vescale_fsdp.runtime.takeover import adopt_replaced_params
from vescale_fsdp.torch_modes import is_fake, outside_modes

if TYPE_CHECKING:
    from vescale_fsdp.runtime.fsdp_state import FSDPState

ValueT = TypeVar("ValueT")
_NOTHING = "nothing: its model ends here"


def reach_consensus(units: Mapping[FSDPState, str]) -> None:
    """Compare these units, with their names, with those of the other ranks; free if all were compared before.

    Collective over the meshes of the units. Parameters that modules got in place of theirs are adopted first
    (`adopt_replaced_params`). An error there counts as a difference, so that all ranks raise it.

    Raises:
        LifecycleError: if ranks disagree, with the first difference and the ranks on each side; if a parameter
            cannot be adopted.
    """
    if all(unit.agreed for unit in units):
        return
    failure = None
    try:
        for unit in units:
            for group in unit.groups:
                if not group.was_gathered:
                    adopt_replaced_params(group)
    except LifecycleError as error:  # raised below: other ranks wait for this one
        failure = error
    by_mesh: dict[DeviceMesh, list[tuple[str, ...]]] = {}
    for unit, name in units.items():
        for number, group in enumerate(unit.groups):
            lines_of_group = _lines(f"unit {name!r}, group {number}", unit, group, units)
            by_mesh.setdefault(group.data.mesh, []).append(lines_of_group)
    differing = False
    # The widest first: ranks that disagree on further meshes meet at least here.
    for mesh in sorted(by_mesh, key=lambda mesh: (-mesh.size(), mesh.ndim, ranks_in(mesh))):
        first = f"mesh {ranks_in(mesh)}" if failure is None else str(failure)
        with outside_modes():
            differing = _compare(mesh, [first, *chain(*zip(*by_mesh[mesh], strict=True))], differing)
    if failure is not None:
        raise failure
    for unit in units:
        unit.agreed = True


def require_uncompared(units: Iterable[FSDPState], switch: str) -> None:
    """Refuse to change a setting that ranks have compared: the others would not change theirs.

    Raises:
        LifecycleError: if a unit was compared, on this rank and so on all.
    """
    for unit in units:
        if unit.agreed:
            raise LifecycleError(
                f"{switch} must be called before the first forward: ranks have compared this setting, and one that "
                "changed it alone would make all of them wait.",
                expected="a call before the model's first use, on every rank",
                got=f"a call after the first use of {unit.label}",
                todo=f"call {switch} right after fully_shard",
            )


def _lines(where: str, unit: FSDPState, group: ParamGroup, names: Mapping[FSDPState, str]) -> tuple[str, ...]:
    """All that must agree of one group: its parameters, how it is trained, users' settings, and its layout."""
    policy = group.mp_policy
    dtypes = (policy.param_dtype, policy.reduce_dtype, policy.output_dtype, policy.cast_forward_inputs)
    members = [(p.slot.fqn, p.slot.shape, f"requires_grad {p.sharded.requires_grad}") for p in group.params]
    prefetches = [
        None if listed is None else [names.get(each, "a unit elsewhere") for each in listed]
        for listed in (unit.forward_prefetch, unit.backward_prefetch)
    ]
    return (
        f"{where}: {group.shard.dtype} {members}",
        (
            f"{where}: mp_policy {type(policy).__name__}{dtypes}, "
            f"offload {type(group.offload).__name__ if group.offload else None}, "
            f"reshard_after_forward {group.comm.part_size or unit.reshard_after_forward}, "
            f"on meta {group.shard.is_meta}, replaced {group.adopted}"
        ),
        (
            f"{where}: {group.comm.settings}, sums of micro-batches {group.sums_grads}, "
            f"set_requires_gradient_sync {unit.requires_gradient_sync}, "
            f"set_unshard_in_backward {unit.unshard_in_backward}, "
            f"set_reshard_after_backward {unit.reshard_after_backward}, prefetch lists {prefetches}, "
            f"set_is_last_backward {unit.schedule.is_last_backward}, "
            f"set_manual_backward_finalization {unit.schedule.finalizes_by_hand}, "
            f"set_reduce_scatter_max_input_buffers {unit.max_reductions}"
        ),
        f"{where}: {group.layout.shard_numel} elements per rank, {group.layout.slots}",
    )


def _compare(mesh: DeviceMesh, lines: list[str], differing: bool) -> bool:
    """Compare over every axis of a mesh, each axis passing on the result of the ones before."""
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    device = torch.device(mesh.device_type) if mesh.device_type != "cpu" else torch.device("cpu")
    for group in groups:
        digest = _hash("\n".join(lines))
        extremes = torch.tensor([digest, -digest, int(differing)], dtype=torch.int64, device=device)
        if is_fake(extremes):
            continue  # nothing is computed here, and nothing sent
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
        high, minus_low, known = extremes.tolist()
        differing = bool(high != -minus_low or known)
    if differing:
        _raise_difference(lines, groups)
    return differing


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def _raise_difference(lines: list[str], groups: list[dist.ProcessGroup]) -> None:
    """Find the first line that differs, and raise with it, on all ranks."""
    hashes = _collect([_hash(line) for line in lines], groups)
    first = hashes[min(hashes)]
    index = min(_first_difference(first, other) for other in hashes.values())
    texts = _collect(lines[index] if index < len(lines) else _NOTHING, groups)
    sides: dict[str, list[int]] = {}
    for rank in sorted(texts):
        sides.setdefault(texts[rank], []).append(rank)
    (expected, here), *others = sides.items()
    raise LifecycleError(
        "The ranks have sharded different models, or the same one differently.",
        expected=f"on all ranks the same as ranks {here[:16]} have: {expected}",
        got="; ".join(f"ranks {ranks[:16]} have: {text}" for text, ranks in others[:4]),
        todo="build and shard the model with the same arguments on every rank, and load or replace parameters "
        "on all of them",
    )


def _collect(own: ValueT, groups: list[dist.ProcessGroup]) -> dict[int, ValueT]:
    """The value of every rank of a mesh, by global rank."""
    known = {dist.get_rank(): own}
    for group in groups:
        everyone: list[dict[int, ValueT]] = [{} for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(everyone, known, group=group)
        known = {rank: value for each in everyone for rank, value in each.items()}
    return known


def _first_difference(one: list[int], other: list[int]) -> int:
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return min(len(one), len(other)) if len(one) != len(other) else max(len(one), len(other))
