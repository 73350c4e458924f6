"""Memory that a communication library wants under the buffers it works on: registered with it, or symmetric.

Buffers give their memory back and take it again (`vescale_fsdp.runtime.comm.dbuffer`), so that an allocation by the
library would serve once. Its pool is entered instead around everything that takes memory. The gathered parameters
themselves then lie in the library's memory, and nothing is copied in or out.

    process group    the pool of the backend's own allocator (NCCL's), whose memory is registered with it
    symmetric        torch's pool of symmetric memory; the ranks meet over a buffer before a collective works on it

Neither has run on a GPU: they have to be asked for by name (`put_in_memory`). A user's own collectives bring their
pool, if they have one (`PooledComm`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from vescale_fsdp.errors import ArgumentError, UnsupportedOpError, allows_untried
from vescale_fsdp.torch_modes import meet_over, process_group_pool, symmetric_pool

FEATURE = "memory_pools"


@runtime_checkable
class PooledComm(Protocol):
    """A user's collective with a pool of its own."""

    def memory_pool(self) -> AbstractContextManager[Any]:
        """Entered whenever a buffer takes memory, at the first gather and at all later ones."""


class CommMemory(Protocol):
    """Where buffers of collectives lie."""

    def memory_pool(self) -> AbstractContextManager[Any]:
        """Memory that is taken inside is the library's."""

    def prepare(self, buffer: torch.Tensor) -> None:
        """To be called before a collective reads or writes a buffer."""


class ProcessGroupMemory:
    """Memory of the backend's allocator. Arguments: the group, and where its buffers lie."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._pool = process_group_pool(group, device)

    def memory_pool(self) -> AbstractContextManager[Any]:
        """See `CommMemory`."""
        return torch.cuda.use_mem_pool(self._pool)

    def prepare(self, buffer: torch.Tensor) -> None:
        """Nothing: it is registered as it is allocated."""


class SymmetricMemory:
    """Symmetric memory of a group's ranks. Arguments as of `ProcessGroupMemory`."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._pool = group, symmetric_pool(group, device)

    def memory_pool(self) -> AbstractContextManager[Any]:
        """See `CommMemory`."""
        return torch.cuda.use_mem_pool(self._pool)

    def prepare(self, buffer: torch.Tensor) -> None:
        """The ranks meet over the buffer."""
        meet_over(buffer, self._group)


def pool_of(comm: object) -> Callable[[], AbstractContextManager[Any]]:
    """What to enter around allocations for a collective, the user's or ours."""
    if comm is None:  # asked at every allocation, and to see what a protocol asks for takes long
        return nullcontext
    return comm.memory_pool if isinstance(comm, PooledComm) else nullcontext


class Buffered(Protocol):
    """A group of parameters with buffers (`vescale_fsdp.runtime.param_group.ParamGroup`)."""

    comm: Any
    device: torch.device

    def use_memory(self, memory: CommMemory | None) -> None:
        """Have its buffers there from now on."""


def put_in_memory(
    groups: Sequence[Buffered],
    method: str,
    kind: Callable[[dist.ProcessGroup, torch.device], CommMemory] | None,
) -> None:
    """Have the buffers of groups over the same ranks in a library's memory, in one pool.

    Args:
        method: that the user has called, for errors.
        kind: of memory; None: the usual one.

    Raises:
        UnsupportedOpError: without ``VESCALE_FSDP_UNTRIED=memory_pools`` in the environment.
        ValueError: beside custom collectives.
    """
    if kind is not None and not allows_untried(FEATURE):
        raise UnsupportedOpError(
            f"{method} has never run on a GPU.",
            expected=f"VESCALE_FSDP_UNTRIED={FEATURE} in the environment of all ranks, to try it all the same",
            got=method,
            todo="leave it out, or try it and compare losses with a run without it",
        )
    if any(
        group.comm.settings.custom_all_gather or group.comm.settings.custom_reduce_scatter for group in groups
    ):
        raise ArgumentError(
            "Custom collectives bring memory of their own.",
            expected="none of them on the module",
            got="set_custom_all_gather or set_custom_reduce_scatter",
            where=method,
            todo="leave one of the two out",
        )
    take_memory(groups, kind)


def take_memory(
    groups: Sequence[Buffered], kind: Callable[[dist.ProcessGroup, torch.device], CommMemory] | None
) -> None:
    """`put_in_memory` without its checks."""
    memory = None if kind is None or not groups else kind(groups[0].comm.shard_group, groups[0].device)
    for group in groups:
        group.comm.change(memory=kind)
        group.use_memory(memory)
