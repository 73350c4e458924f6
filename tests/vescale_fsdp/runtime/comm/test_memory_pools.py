"""Buffers of a user's collectives take their memory from the user's pool each time, first gathers and later ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.support import models
from tests.support.distributed import run_ranks
from tests.support.models import check_steps, refused, shard
from tests.support.units import groups_of
from vescale_fsdp.errors import UnsupportedOpError
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
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


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
    return {storage_id(group.full.flat) for group in groups_of(model)}


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


def test_custom_collectives_keep_their_memory() -> None:
    """A user's pool is entered at every gather; other units do not see it."""
    run_ranks(2, of_the_users)


def test_memory_of_the_library_is_refused() -> None:
    """Both methods name themselves; False asks for nothing."""
    run_ranks(2, _refusals)


def _refusals() -> None:
    block = shard(models.build()).blocks[0]
    block.set_allocate_memory_from_process_group_for_comm(False)
    methods: dict[str, list[Any]] = {
        "set_allocate_memory_from_process_group_for_comm": [True],
        "set_symm_mem_for_comm": [],
    }
    for method, arguments in methods.items():
        with refused(UnsupportedOpError, got=method):
            getattr(block, method)(*arguments)
