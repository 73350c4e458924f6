"""KeptPart: what a rank keeps of a group's full buffer in a hybrid cut, so that gathers stay inside its node.

    one step          node k, local rank l (of N nodes with L ranks)
    first gather      cast the own slice l*N + k into the kept part, all-gather it over the nodes; all-gather the parts
                      over the node into the full buffer
    other gathers     all-gather the parts over the node
    backwards         reduce-scatter over the node, into a sum of the part's size; the last backward reduce-scatters the
                      sum over the nodes, into the gradient of the own slice
    optimizer         steps the own slice, so the parts of all nodes are stale

The part is [l*N*S, (l+1)*N*S) of the buffer, in the compute dtype, and one allocation for the life of the group. With
one rank per node it is the full buffer itself, which is then never freed.

A gather over nodes is a collective, so all ranks must do it or none. When a part was gathered, a rank notes the version
counters of its shard, its counts of writes, and the optimizers' steps. It reports a change:

    before a root's forward, and in `unshard`    one small all-reduce tells all ranks which parts are stale on any rank
    before any other gather                      ranks with a stale part meet first: all have written, or all raise

A part counts as stale after ``state_dict``, whose tensors share the shard's memory but not its counters. Other writes
that torch does not count, such as ``p.to_local().data.zero_()``, are not found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from vescale_fsdp.collectives.slice_exchange import wait_for
from vescale_fsdp.layout.group_layout import GroupLayout
from vescale_fsdp.runtime.comm.dbuffer import DBuffer
from vescale_fsdp.runtime.comm.group_comm import GroupComm
from vescale_fsdp.runtime.gathered_writes import ShardWrites, bits_of
from vescale_fsdp.torch_modes import without_grad

if TYPE_CHECKING:
    from vescale_fsdp.runtime.param_group import ManagedParam


class KeptPart:
    """This rank's kept part of one group.

    Args:
        layout: the layout of the group, over all ranks of the cut.
        comm: the group's collectives, which have a ``cut_group``.

    Attributes:
        is_due: whether the next gather begins with a gather over nodes; the same on all ranks when it begins.
        is_whole: whether the part is the full buffer, because there is one rank per node.
        is_doubtful: whether users may have written the shard uncounted, through what ``state_dict`` has returned.
    """

    def __init__(self, layout: GroupLayout, comm: GroupComm) -> None:
        self._comm, self._size = comm, layout.shard_numel
        self.nodes = comm.mesh.size(0)
        self.first = comm.local_rank * self.nodes  # number of the part's first slice
        self.is_whole = comm.num_shards == 1
        self.is_due = True
        self.is_doubtful = False
        self._flat: torch.Tensor | None = None  # 1-D [nodes * S], unless `is_whole`
        self._writes = ShardWrites()

    def part_of(self, full: torch.Tensor) -> torch.Tensor:
        """Return the view of a buffer (1-D [num_slices * S]) that is this rank's part."""
        return full[self.first * self._size : (self.first + self.nodes) * self._size]

    def is_stale(self, params: Sequence[ManagedParam]) -> bool:
        """Return whether the shard was written on this rank since the part was gathered."""
        return self._writes.found(params)

    def forget(self) -> None:
        """Let the next gather gather the part over nodes; all ranks must call this."""
        self.is_due = True
        self._writes = ShardWrites()

    def accept_versions(self) -> None:
        """As `ShardWrites.accept_versions`."""
        self._writes.accept_versions()

    def start(
        self, shard: torch.Tensor, full: DBuffer, params: Sequence[ManagedParam], label: str
    ) -> torch.Tensor:
        """Gather the part over nodes if it is due.

        On an accelerator the current stream gathers; on the CPU the host waits, because the gather over the node reads
        the part.

        Args:
            shard: 1-D [S], this rank's slice, in any dtype.
            full: the full buffer, which is allocated.
            params: the parameters of the group.
            label: name of the unit, for an error of `check_collectives`.

        Returns:
            The part, 1-D, in the dtype of ``full``.
        """
        part = full.flat if self.is_whole else self._flat
        if part is None or part.dtype is not full.flat.dtype or part.device != full.flat.device:
            part = self._flat = self.part_of(full.flat).new_empty(self.nodes * self._size)
        if self.is_due:
            self.forget()  # until the gather has ended
            at = (self._comm.rank - self.first) * self._size
            own = part[at : at + self._size]
            with without_grad():
                own.copy_(shard, non_blocking=True)  # does not block if ``shard`` is in pinned memory
                check = self._comm.begin_check(part, own, over_nodes=True)
                wait_for(self._comm.gather_over_nodes(part, own))
                if check is not None:
                    check.finish(label)
            self._writes.note(params)
            self.is_due = self.is_doubtful = False
        return part

    def follow(self, full: DBuffer, params: Sequence[ManagedParam]) -> None:
        """Copy writes to gathered parameters, which are equal on all ranks and which the shard has, to the part."""
        if self._flat is not None and not self.is_whole:
            written = self.part_of(full.flat)
            if written.device.type != "cpu" or not torch.equal(bits_of(written), bits_of(self._flat)):
                self._flat.copy_(written)
        self._writes.note(params)
