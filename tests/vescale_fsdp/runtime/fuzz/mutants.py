"""Mistakes put into the runtime, each of which `check` has to find in a program."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from tests.vescale_fsdp.runtime.fuzz import sharded
from tests.vescale_fsdp.runtime.fuzz.program import Block, Micro, Program, Step
from vescale_fsdp.checkpoint import load
from vescale_fsdp.runtime.comm.group_comm import GroupComm
from vescale_fsdp.runtime.comm.unsharded_grads import UnshardedGrads, UsedFlags
from vescale_fsdp.runtime.param_group import ParamGroup


class Mutant(NamedTuple):
    """A mistake, and a program that meets it."""

    patch: Callable[[], AbstractContextManager[Any]]
    program: Program


def _behind(owner: type, name: str, change: Callable[..., None]) -> Callable[[], AbstractContextManager[Any]]:
    """Do something else behind a method: ``change(self, *arguments)``."""
    method = getattr(owner, name)

    def changed(self: Any, *arguments: Any) -> Any:
        result = method(self, *arguments)
        change(self, *arguments)
        return result

    return lambda: mock.patch.object(owner, name, changed)


def _before(owner: type, name: str, change: Callable[..., None]) -> Callable[[], AbstractContextManager[Any]]:
    method = getattr(owner, name)

    def changed(self: Any, *arguments: Any) -> Any:
        change(self, *arguments)
        return method(self, *arguments)

    return lambda: mock.patch.object(owner, name, changed)


def _drop(group: ParamGroup, source: Any) -> None:
    if "blocks.1" in group.label:
        source.flat.zero_()


def _poison(comm: GroupComm, shard: torch.Tensor) -> None:
    shard[:1] = torch.nan


def _twice(group: ParamGroup, param: Any, grad: torch.Tensor) -> None:
    if len(param.owners) > 1:
        grad.mul_(2)


def _stale() -> AbstractContextManager[Any]:
    gather, first = GroupComm.gather, WeakKeyDictionary[GroupComm, torch.Tensor]()

    def changed(self: GroupComm, full: torch.Tensor, shard: torch.Tensor) -> Any:
        work = gather(self, full, shard)
        full.copy_(first.setdefault(self, full.clone()))
        return work

    return mock.patch.object(GroupComm, "gather", changed)


def _rolled(comm: GroupComm, full: torch.Tensor, shard: torch.Tensor) -> None:
    full.copy_(full.view(comm.num_shards, -1).roll(1, 0).reshape(-1))


def _swapped(comm: GroupComm, part: torch.Tensor, own: torch.Tensor) -> None:
    part.copy_(part.view(2, -1).flip(0).reshape(-1))


def _overwrite(grads: UnshardedGrads, slot: Any, grad: torch.Tensor) -> None:
    grads._written.discard(slot.fqn)


def _load_without_moments(path: Path, state: dict[str, Any]) -> None:
    load(path, state)
    for optimizer in state["optimizers"]:
        optimizer.state.clear()


_TWO = Program(blocks=(Block(), Block()))
MUTANTS = {
    "a sum that is not divided": Mutant(
        lambda: mock.patch.object(GroupComm, "_op", return_value=dist.ReduceOp.SUM), _TWO
    ),
    "a unit's gradients are dropped": Mutant(_before(ParamGroup, "start_reduce", _drop), _TWO),
    "an element is NaN": Mutant(_behind(GroupComm, "finish_division", _poison), _TWO),
    "the first gather's weights": Mutant(_stale, _TWO),
    "pieces in another order": Mutant(_behind(GroupComm, "gather", _rolled), _TWO),
    "a tied gradient counts twice": Mutant(_before(ParamGroup, "_take", _twice), Program(tied=True)),
    "a micro-batch overwrites another": Mutant(
        _before(UnshardedGrads, "_write", _overwrite),
        Program(steps=(Step((Micro(sync="no_sync"), Micro())),)),
    ),
    "replicas differ": Mutant(
        lambda: mock.patch.object(GroupComm, "finish_sum", return_value=None), Program(mesh=(2, 2))
    ),
    "a part of the weights before the step": Mutant(
        lambda: mock.patch.object(ParamGroup, "is_kept_stale", return_value=False),
        Program(mesh=(2, 2), spread=True),
    ),
    "a slice of the wrong node": Mutant(
        _behind(GroupComm, "gather_over_nodes", _swapped), Program(mesh=(2, 2), spread=True)
    ),
    "a sum over one node is lost": Mutant(
        lambda: mock.patch.object(ParamGroup, "owes_replicas", False),
        Program(
            mesh=(2, 2),
            spread=True,
            blocks=(Block(runs="odd steps"), Block(spare="odd steps")),
            steps=(Step(), Step((Micro(sync="no_all_reduce"),)), Step(), Step()),
        ),
    ),
    "what nobody used gets zeros": Mutant(
        lambda: mock.patch.object(UsedFlags, "anywhere", lambda self: [True] * len(self._used)),
        Program(blocks=(Block(spare="never"),), optimizer="adamw"),
    ),
    "what one rank used is lost": Mutant(
        lambda: mock.patch.object(UsedFlags, "anywhere", lambda self: list(self._used)),
        Program(blocks=(Block(spare="some ranks"),)),
    ),
    "a checkpoint without moments": Mutant(
        lambda: mock.patch.object(sharded, "load", _load_without_moments),
        Program(optimizer="adamw", moves=(3,)),
    ),
    "an evaluation's weights": Mutant(
        lambda: mock.patch.object(ParamGroup, "is_stale", return_value=False),
        Program(steps=(Step(evaluates="no_grad", late=True), Step()), reshard=False),
    ),
}
