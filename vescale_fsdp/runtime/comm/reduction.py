"""A reduction under way, and which of its parameters any rank has used.

Every rank reduces all parameters of a unit, those it has not used as zeros, so that no rank waits for another that
never comes. But a gradient of zeros is not the same as none: Adam's momentum and weight decay would move the weight. So
all ranks send each other flags, one small message per mesh behind the last reduction of a backward:

    a parameter was used    on this rank     its gradient is set with the reduction; the message need not be read
                            elsewhere        its gradient, which others have made, is set once the message is read
                            nowhere          its ``.grad`` stays as it was, None after zero_grad

The message is always sent, and only read by a rank that has an unused parameter: on an accelerator reading makes the
host wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from vescale_fsdp.collectives import Work, all_reduce_in_place, wait_for
from vescale_fsdp.runtime.comm.dbuffer import DBuffer
from vescale_fsdp.torch_modes import is_fake, outside_modes


class ReducedShard(NamedTuple):
    """A reduction under way: its result, what it reads from, and how to know that it is done."""

    shard: torch.Tensor  # 1-D [S], reduce dtype
    source: DBuffer  # kept until the reduction has read it
    work: Work | None
    used: frozenset[str]  # parameters that have a gradient on this rank

    def wait(self) -> None:
        """Wait until ``shard`` is written and ``source`` read (on an accelerator: the current stream waits)."""
        if self.work is not None:
            self.work.wait()


class UsedFlags:
    """A message under way. Making one is a collective of the ranks of the mesh.

    Args:
        mesh: who takes part.
        used: what this rank has used, in an order that all ranks share.
        device: where the collective runs.
    """

    def __init__(self, mesh: DeviceMesh, used: Sequence[bool], device: torch.device) -> None:
        self._used = used
        with outside_modes():
            self._flags = torch.ones(len(used), dtype=torch.uint8, device=device)
            unused = [place for place, flag in enumerate(used) if not flag]
            if unused:
                self._flags[unused] = 0
            self._work: Work | None = None
            for axis in range(mesh.ndim):
                if mesh.size(axis) > 1:
                    wait_for(self._work)
                    self._work = all_reduce_in_place(self._flags, dist.ReduceOp.MAX, mesh.get_group(axis))

    def wait(self) -> None:
        """Wait for the message (on an accelerator: the current stream waits)."""
        wait_for(self._work)
        self._work = None

    def anywhere(self) -> list[bool]:
        """What any rank has used; the host waits for it."""
        self.wait()
        return list(map(bool, self._used if is_fake(self._flags) else self._flags.tolist()))
