"""Buffers of collectives take their memory from a library's pool each time, first gathers and later ones alike."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.support import models
from tests.support.distributed import run_ranks
from tests.support.models import check_steps, refused, shard
from vescale_fsdp.collectives.operations import all_gather_into
from vescale_fsdp.errors import ArgumentError, UnsupportedOpError
from vescale_fsdp.runtime.comm import group_comm
from vescale_fsdp.runtime.fsdp_state import state_of
from vescale_fsdp.torch_private import storage_id


class Pool:
    """Knows whether somebody is inside."""

    def __init__(self) -> None:
        self.is_entered = False

    @contextmanager
    def __call__(self, *unused: Any) -> Iterator[None]:
        self.is_entered = True
        try:
            yield
        finally:
            self.is_entered = False


class OwnGather:
    """A user's all-gather, with a pool."""

    def __init__(self) -> None:
        self.memory_pool = Pool()

    def allocate(self, size: list[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        return all_gather_into(output_tensor, input_tensor, group)


@contextmanager
def growing(pool: Pool) -> Iterator[list[tuple[int, bool]]]:
    """Storages that take memory again, each with whether the pool was entered."""
    found: list[tuple[int, bool]] = []
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
        if nbytes > storage.nbytes():
            found.append((storage._cdata, pool.is_entered))
        return resize(storage, nbytes)

    with mock.patch.object(torch.UntypedStorage, "resize_", resized):
        yield found


def full_storages(model: Any) -> set[int]:
    return {storage_id(group.full.flat) for group in state_of(model).groups}  # type: ignore[union-attr]


def of_the_users() -> None:
    model, own = shard(models.build()), OwnGather()
    model.blocks[0].set_custom_all_gather(own)
    with growing(own.memory_pool) as found:
        check_steps(model, models.build(), 3)
    mine = full_storages(model.blocks[0])
    inside = [entered for storage, entered in found if storage in mine]
    assert len(inside) == 5 and all(inside)  # a forward's and a backward's gather per step; the first made it
    others = [entered for storage, entered in found if storage not in mine]
    assert len(others) > 10 and not any(others)


def of_the_group(method: str, arguments: list[Any]) -> None:
    model, pool = shard(models.build()), Pool()
    with refused(UnsupportedOpError, expected="VESCALE_FSDP_UNTRIED=memory_pools", got=method):
        getattr(model.blocks[0], method)(*arguments)
    patches: list[Any] = [
        mock.patch.object(group_comm, name, return_value=object())
        for name in ("process_group_pool", "symmetric_pool")
    ]
    met: list[int] = []
    with (
        mock.patch.dict(os.environ, {"VESCALE_FSDP_UNTRIED": "memory_pools"}),
        mock.patch.object(group_comm, "meet_over", lambda buffer, group: met.append(storage_id(buffer))),
        mock.patch.object(torch.cpu, "use_mem_pool", pool, create=True),
        patches[0],
        patches[1],
        growing(pool) as found,
    ):
        getattr(model.blocks[0], method)(*arguments)
        model.blocks[1].set_custom_all_gather(OwnGather())
        model.blocks[1].set_custom_all_gather(OwnGather())
        with refused(ArgumentError, got="set_custom_all_gather", where=method):
            getattr(model.blocks[1], method)(*arguments)
        check_steps(model, models.build(), 3)
    mine = full_storages(model.blocks[0])
    grads = [spare for group in state_of(model.blocks[0]).groups for spare in group.grads.spare.values()]  # type: ignore[union-attr]
    mine |= {storage_id(buffer.flat) for buffers in grads for buffer in buffers}
    inside = [entered for storage, entered in found if storage in mine]
    assert len(inside) >= 7 and all(inside)
    assert not any(entered for storage, entered in found if storage not in mine)
    assert met.count(min(full_storages(model.blocks[0]))) == (6 if "symm" in method else 0)


def test_custom_collectives_keep_their_memory() -> None:
    """A user's pool is entered at every gather; other units do not see it."""
    run_ranks(2, of_the_users)


METHODS = [("set_allocate_memory_from_process_group_for_comm", [True]), ("set_symm_mem_for_comm", [])]


def both_methods() -> None:
    for method, arguments in METHODS:
        of_the_group(method, arguments)
        dist.barrier()


def test_memory_of_the_process_group_and_symmetric_memory() -> None:
    """Asked for by name, since no GPU has seen it: all buffers of the unit lie there, and ranks meet over them."""
    run_ranks(2, both_methods)
