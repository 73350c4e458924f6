"""Consensus: ranks check once, at a model's first use, that they have sharded it in the same way.

If ranks differ in a granularity, a policy or the model, a gather puts pieces at wrong offsets: values are wrong without
an error, or a collective aborts. So before the first gather every rank describes its layouts and settings in lines of
text, and the ranks of a mesh compare a digest of the lines: one meeting (`dtensor.meeting`) and one all-reduce per mesh
axis.

    digests are equal   no other communication, now or later
    digests differ      every rank knows this from the all-reduce; then ranks exchange hashes of their lines, and the
                        text of the first line that differs, and all ranks raise an error with this text

Units are compared within their own mesh: pipeline stages and experts on other meshes may differ. The lines contain
every setting that decides which collectives a rank issues, in which order and on which data. Methods that set what
cannot change after the comparison call `require_uncompared`.
"""

from __future__ import annotations

import hashlib
import socket
import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from vescale_fsdp.collectives.interruptible import interruptibly
from vescale_fsdp.collectives.operations import all_reduce_at_once
from vescale_fsdp.collectives.process_groups import ranks_per_node
from vescale_fsdp.dtensor.meeting import meet
from vescale_fsdp.dtensor.spec import ranks_in
from vescale_fsdp.errors import LifecycleError, callers_level, sides_of
from vescale_fsdp.runtime.param_group import ParamGroup
from vescale_fsdp.runtime.takeover import adopt_replaced_params, refuse_added_params
from vescale_fsdp.torch_modes import is_fake, outside_modes

if TYPE_CHECKING:
    from vescale_fsdp.runtime.fsdp_state import FSDPState

ValueT = TypeVar("ValueT")
_NOTHING = "no more units: the model ends before"  # shown for a rank that has fewer lines than other ranks
_DIFFERENT = "The ranks have sharded different models, or have sharded one model differently."
_SAME_ARGUMENTS = (
    "build and shard the model with the same arguments on every rank, "
    "and load or replace parameters on all of them"
)


def reach_consensus(units: Mapping[FSDPState, str]) -> None:
    """Compare these units with the units of other ranks; a no-op if all units were compared before.

    Collective over the meshes of the units. Parameters that users have set in place of sharded parameters are adopted
    first (`adopt_replaced_params`), and parameters that were added are refused. If this fails on one rank, all raise.

    Args:
        units: unit -> its name, which is compared as well.

    Raises:
        LifecycleError: if ranks differ, with the first difference and the ranks on each side; or if a parameter cannot
            be adopted, or was added after sharding.
    """
    if all(unit.agreed for unit in units):
        return
    failure = difference = None
    try:
        for unit in units:
            for group in unit.groups:
                if not group.was_gathered:
                    adopt_replaced_params(group)
        refuse_added_params(units)
    except LifecycleError as error:
        failure = error  # raised after the comparison, because other ranks wait for this rank's collective
    by_mesh: dict[DeviceMesh, list[tuple[str, ...]]] = {}
    for unit, name in units.items():
        for number, group in enumerate(unit.groups):
            lines_of_group = _lines(f"unit {name!r}, group {number}", unit, group, units)
            by_mesh.setdefault(group.data.mesh, []).append(lines_of_group)
    # The sort keys give the meshes the same order on all ranks. The largest mesh comes first: most ranks then name the
    # cause itself, and not that a rank failed elsewhere.
    for mesh in sorted(by_mesh, key=lambda mesh: (-mesh.size(), mesh.ndim, ranks_in(mesh))):
        first = f"mesh {ranks_in(mesh)}"
        if failure is not None:
            first = " ".join(str(part) for part in (failure.problem, failure.got, failure.where) if part)
        try:
            # A forward under torch.func or inference mode must not change the tensors of the comparison. Lines are
            # sorted by kind, over all groups: parameters and policies come before the layouts that follow from them,
            # so that the first difference is the cause.
            with outside_modes():
                per_node = _compare(mesh, [first, *chain(*zip(*by_mesh[mesh], strict=True))], failure)
            for unit in units:
                for group in unit.groups:
                    if group.data.mesh == mesh:
                        group.comm.set_nodes(per_node)
        except LifecycleError as error:
            # Raised after the other meshes, whose ranks may not have heard of it and wait for this rank's collective.
            difference = difference or error
            failure = failure or error
    if difference is not None:
        raise difference
    if failure is not None:
        raise failure
    for unit in units:
        unit.agreed = True


def require_uncompared(units: Iterable[FSDPState], switch: str) -> None:
    """Raise if ranks have compared these units already, so that a setting can no longer change.

    Args:
        switch: name of the method that sets it, for the message.

    Raises:
        LifecycleError: if a unit was compared. Either all ranks raise or no rank does.
    """
    for unit in units:
        if unit.agreed:
            raise LifecycleError(
                f"{switch} must be called before the first forward: ranks have compared this setting, and a rank that "
                "changes it alone would make all ranks hang.",
                expected="a call before the model's first use, on every rank",
                got=f"a call after the first use of {unit.label}",
                todo=f"call {switch} right after fully_shard",
            )


def _lines(where: str, unit: FSDPState, group: ParamGroup, names: Mapping[FSDPState, str]) -> tuple[str, ...]:
    """Return the lines of one group: its parameters, its policies, the user's settings, and its layout."""
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
            f"shard_optimizer_over {group.data.over}, "
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


def _compare(mesh: DeviceMesh, lines: list[str], failure: LifecycleError | None) -> int:
    """Compare lines over every axis of a mesh.

    Args:
        mesh: the mesh.
        lines: this rank's lines; the first is about ``failure``, if there is one.
        failure: why this rank cannot use the units, whatever other ranks have.

    Returns:
        `ranks_per_node`, if the ranks of the last axis, which shards, have the same number; else 0. Nodes of different
        sizes are no error.

    Raises:
        LifecycleError: if lines differ, on all ranks of the mesh.
    """
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    if is_fake(torch.empty(0, dtype=torch.int64, device=mesh.device_type)):
        return 0  # under FakeTensorMode no values are computed or sent
    meet(groups, "first use of a sharded model")
    digest = _hash("\n".join(lines))
    differing, own_per_node, per_node, are_apart = False, ranks_per_node(), 0, False
    host = _hash(socket.gethostname())
    for group in groups:
        # One MAX of (digest, -digest) yields the largest and the smallest digest. If both are equal, all digests are.
        # The flag goes with them, so that a rank raises even if its lines are equal along the axes that follow.
        values = [digest, -digest, int(differing), own_per_node, -own_per_node, host, -host]
        extremes = torch.tensor(values, dtype=torch.int64, device=mesh.device_type)
        all_reduce_at_once(extremes, dist.ReduceOp.MAX, group)
        high, minus_low, differed_before, most, minus_fewest, high_host, minus_low_host = extremes.tolist()
        differing = bool(high != -minus_low or differed_before)
        per_node = most if most == -minus_fewest else 0
        are_apart = high_host != -minus_low_host
    if differing:
        _raise_difference(lines, groups, failure)
    if are_apart and not per_node and mesh.device_type == "cpu" and dist.get_rank() == 0:
        warnings.warn(
            "Ranks are on several machines, and how many are on each is unknown, or not the same on all: every slice "
            "crosses the network once per rank. Set LOCAL_WORLD_SIZE to the same number on all ranks, as torchrun "
            "does. An elastic job knows the number: start as many ranks on each machine.",
            stacklevel=callers_level(),
        )
    return per_node


def _hash(text: str) -> int:
    # 7 bytes, because the number and its negative must fit into an int64. Not `hash`, which differs between processes.
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def _raise_difference(
    lines: list[str], groups: list[dist.ProcessGroup], failure: LifecycleError | None
) -> None:
    """Find the first line in which ranks differ, and raise an error with this line on all ranks.

    If ranks differ because some of them failed, the error has the problem and the remedy of the first that did.
    """
    hashes = _collect([_hash(line) for line in lines], groups)
    columns = enumerate(zip_longest(*hashes.values()))  # one rank's model may have fewer lines
    index = next((index for index, column in columns if len(set(column)) > 1), len(lines))
    texts = _collect(lines[index] if index < len(lines) else _NOTHING, groups)
    (expected, here), *others = sides_of(texts)
    own = None if failure is None else (failure.problem, failure.todo or _SAME_ARGUMENTS)
    failures = _collect(own, groups) if index == 0 else {}
    causes = [failures[rank] for rank in sorted(failures)]
    problem, todo = next((each for each in causes if each is not None), (_DIFFERENT, _SAME_ARGUMENTS))
    raise LifecycleError(
        problem,
        expected=f"the same on all ranks; ranks {here} have: {expected}",
        got="; ".join(f"ranks {ranks} have: {text}" for text, ranks in others),
        todo=todo,
    )


def _collect(own: ValueT, groups: list[dist.ProcessGroup]) -> dict[int, ValueT]:
    """Return the values of all ranks of a mesh, by global rank. Collective over all these process groups."""
    values = {dist.get_rank(): own}
    # Each gather over an axis sends all values that the gathers over earlier axes have collected.
    for group in groups:
        everyone: list[dict[int, ValueT]] = [{} for _ in range(dist.get_world_size(group))]
        interruptibly(partial(dist.all_gather_object, everyone, values, group=group))
        values = {rank: value for each in everyone for rank, value in each.items()}
    return values
