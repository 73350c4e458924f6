"""SelfGatheringGroup: a group of parameters whose class has all-gather hooks.

Below, ``pre`` means the class's fsdp_pre_all_gather, and ``post`` its fsdp_post_all_gather. The parameters are cut by
rows, as in FSDP2 (`plan_by_rows`), because hooks are written for rows: ``pre`` is called on this rank's rows, and the
outputs given to ``post`` are ``[m * padded rows, ...]``, padded on the last ranks. Only the gather differs from a
`ParamGroup`:

    rows        this rank's rows: an instance of the user's class over the group's shard
    inputs      tensors returned by ``pre``: any number, any dtypes, the same sizes on every rank
    outputs     1-D [m * input numel] each, filled by one all-gather each, without packing or copying
    unsharded   the full parameter that the first ``post`` returns; later gathers pass it to ``post`` as ``out``

Memory is handled as for a full buffer: a reshard frees the outputs and the tensors that ``post`` returns, and the next
gather allocates them again before it calls ``post``. Gradients are plain tensors, and are reduced as in every group.

Rejected alternative: one byte buffer per group and gather, as in FSDP2. It needs fewer collectives, but copies all
gathered bytes in and out. These weights are large, so the copies cost more than the additional collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from vescale_fsdp.collectives.slice_exchange import Work
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor, show_as_given
from vescale_fsdp.errors import MisuseError
from vescale_fsdp.layout.geometry import chunk_of, contiguous_strides
from vescale_fsdp.runtime.all_gather_hooks import (
    inner_of,
    rows_of,
    scaled_together,
    takes_mesh_only,
    takes_scale,
)
from vescale_fsdp.runtime.comm.collective_check import GatherCheck
from vescale_fsdp.runtime.comm.group_comm import GroupComm
from vescale_fsdp.runtime.data_mesh import local_part
from vescale_fsdp.runtime.gathered_writes import digest_of
from vescale_fsdp.runtime.group_plan import GroupPlan
from vescale_fsdp.runtime.param_group import ManagedParam, ParamGroup
from vescale_fsdp.torch_modes import is_fake
from vescale_fsdp.torch_private import is_wrapper, set_versions, version_of


class SelfGatheringGroup(ParamGroup):
    """A group whose parameters are gathered by the hooks of their class. The arguments are those of `ParamGroup`."""

    takes_plain = False  # a plain tensor is not of the class that has the hooks

    def __init__(
        self,
        plan: GroupPlan,
        mp_policy: MixedPrecisionPolicy,
        offload_policy: OffloadPolicy,
        device: torch.device,
    ) -> None:
        super().__init__(plan, mp_policy, offload_policy, device)
        self.policy_gather = None  # not used: the hooks decide which tensors are sent
        self._hooked = [
            _SelfGatheringParam(param, local_part(plan.params[param.slot.fqn].param), self.layout.num_shards)
            for param in self.params
        ]
        self._point_at_shard()

    def _values_of(self, param: nn.Parameter) -> torch.Tensor:
        return inner_of(local_part(param))

    def _point_at_shard(self) -> None:
        """Make the rows of all parameters views of the present shard, and drop the full parameters."""
        for hooked in self._hooked:
            hooked.point_at(self.shard[hooked.param.local])

    def forget_full(self) -> None:
        self._point_at_shard()
        self.writes.forget()

    def follow_shard(self) -> None:
        self.forget_full()  # which points the tensors at the new shard

    @property
    def refuses_writes(self) -> tuple[str, str]:
        return "a gather by the hooks of the parameter's class", "write to the sharded parameter: p.copy_(..)"

    def digest(self) -> str | None:
        if self.device.type != "cpu" or is_fake(self.shard):
            return None
        return " ".join(digest_of(each) for hooked in self._hooked for each in hooked.plain_tensors())

    def return_to_buffer(self) -> set[str]:
        return set()  # there is no buffer: `digest` notices the write

    @property
    def _shard_mesh(self) -> DeviceMesh:
        mesh = self.data.mesh
        return mesh if mesh.ndim == 1 else mesh[(mesh.mesh_dim_names or ())[-1]]  # the last axis shards

    def allocate_full(self) -> bool:
        """Return False: `start_gather` allocates, because only the results of ``pre`` show which sizes are needed."""
        return False

    @torch.no_grad()
    def bring_shard(self) -> list[torch.Tensor]:
        return [hooked.bring_rows(self.device) for hooked in self._hooked]

    @torch.no_grad()
    def _start_gather(self) -> None:
        if self._hooked[0].outputs is None:  # check only before the first gather, as in `ParamGroup`
            self._check_shard()
        rows = [hooked.rows_on(self.device) for hooked in self._hooked]
        with scaled_together([each for each in rows if takes_scale(each)], self.comm.shard_group):
            for hooked, own in zip(self._hooked, rows, strict=True):
                hooked.start_gather(own, self.comm, self._shard_mesh, self.mp_policy)

    @torch.no_grad()
    def _finish_gather(self) -> None:
        for hooked in self._hooked:
            hooked.finish_gather(self.compute_dtype, self.label[1:-1])

    def hand_over(self) -> None:
        super().hand_over()
        for param in self.params:  # attributes that were set later: a subclass has a dictionary of its own
            param.share_attributes()

    def free_full(self) -> None:
        """Free all memory of full parameters, unless `set_keep_unsharded_storage` keeps it."""
        if not self.comm.settings.keeps_full:
            for hooked in self._hooked:
                hooked.free()


class _SelfGatheringParam:
    """One parameter of a `SelfGatheringGroup`.

    Args:
        param: the parameter's slot, owners and Parameter objects.
        like: a tensor of the user's class, from which others are made with ``new_zeros``.
        num_shards: number of ranks that share the parameter.
    """

    def __init__(self, param: ManagedParam, like: torch.Tensor, num_shards: int) -> None:
        self.param = param
        self.num_shards = num_shards
        self.outputs: list[torch.Tensor] | None = None  # made at the first gather
        self._like = like
        self._rows: torch.Tensor | None = None
        self._brought: torch.Tensor | None = None  # copy of offloaded rows, until ``pre`` is called
        self._sizes: list[torch.Size] = []  # sizes of this gather's inputs
        self._metadata: Any = None
        # The tensors that make up the full parameter (outputs, tensors that ``post`` returned, and last the parameter
        # itself), with their versions.
        self._inner: list[tuple[torch.Tensor, int]] = []
        # Collectives in flight, each with its input, which must live until the collective has read it.
        self._in_flight: list[tuple[Work | None, torch.Tensor]] = []
        self._checks: list[GatherCheck] = []  # of the collectives in flight

    def point_at(self, piece: torch.Tensor) -> None:
        """Make this rank's rows a view of ``piece`` (1-D, of the shard); the next gather makes a new full parameter."""
        shape = self.param.slot.shape
        # The lower bounds avoid divisions by zero for an empty parameter.
        row_numel = max(1, self.param.slot.numel // max(1, shape[0]))
        self._like = self._rows = rows = rows_of(
            self._like, piece.view(piece.numel() // row_numel, *shape[1:])
        )
        if isinstance(self.param.sharded, RaggedDTensor):
            show_as_given(self.param.sharded, rows)
        self.outputs, self._inner = None, []
        self.param.unsharded, self.param.watched = None, False

    # -- gather ---------------------------------------------------------------------------------------

    def bring_rows(self, device: torch.device) -> torch.Tensor:
        """Copy offloaded rows to the device on which ``pre`` runs; return the inner tensor of the copy."""
        assert self._rows is not None
        self._brought = self._rows.to(device, non_blocking=True)
        return inner_of(self._brought)

    def rows_on(self, device: torch.device) -> Any:
        """Return this rank's rows, an instance of the user's class, on the device on which ``pre`` runs."""
        rows: Any = self._rows if self._brought is None else self._brought
        self._brought = None
        # Offloaded rows that `bring_rows` has not copied are copied here.
        return rows if rows.device == device else rows.to(device, non_blocking=True)

    def start_gather(
        self, rows: Any, comm: GroupComm, mesh: DeviceMesh, mp_policy: MixedPrecisionPolicy
    ) -> None:
        """Call ``pre`` on these rows, and start an all-gather of each tensor that it returns."""
        inputs: Sequence[torch.Tensor]
        if takes_mesh_only(rows):
            inputs, self._metadata = rows.fsdp_pre_all_gather(mesh)
        else:
            size = torch.Size(self.param.slot.shape)
            module = self.param.owners[0][0]
            inputs, self._metadata = rows.fsdp_pre_all_gather(
                mesh, size, contiguous_strides(size), module, mp_policy
            )
        self._sizes = [each.size() for each in inputs]
        self._check_sizes()
        flat = [each.contiguous().view(-1) for each in inputs]  # hooks may return tensors of any strides
        if self.outputs is None:
            self.outputs = [
                comm.allocate_full(each.numel() * self.num_shards, each.dtype, each.device) for each in flat
            ]
        with comm.full_pool():
            _allocate(self.outputs)
        checks = [comm.begin_check(*each) for each in zip(self.outputs, flat, strict=True)]
        self._checks = [check for check in checks if check is not None]
        self._in_flight = [
            (comm.gather(full, own), own) for full, own in zip(self.outputs, flat, strict=True)
        ]

    def _check_sizes(self) -> None:
        """Raise if inputs are not padded on a rank with fewer rows: collectives require equal sizes on all ranks."""
        assert self._rows is not None
        shape = self.param.slot.shape
        # Rank 0 has the most rows, to which the inputs of all ranks must be padded.
        padded = torch.Size((chunk_of(shape[0], self.num_shards, 0).numel, *shape[1:]))
        # A rank with the most rows needs no padding, so its inputs may have any size.
        if self._rows.shape == padded or all(size == padded for size in self._sizes):
            return
        raise MisuseError(
            "fsdp_pre_all_gather must pad its inputs if the rows do not divide evenly among the ranks.",
            expected=f"inputs of {tuple(padded)}, as on the ranks with the most rows",
            got=f"{[tuple(size) for size in self._sizes]} from rows of {tuple(self._rows.shape)}",
            where=f"{self.param.slot.fqn}, shape {shape} over {self.num_shards} ranks",
            todo="return inputs of the padded size, or choose a number of rows that is a multiple of the ranks",
        )

    def finish_gather(self, dtype: torch.dtype, label: str) -> None:
        """Call ``post`` on the gathered outputs. The first call makes the full parameter, later calls write into it.

        Args:
            label: name of the unit, for an error of `check_collectives`.
        """
        assert self.outputs is not None
        for work, _ in self._in_flight:
            if work is not None:
                work.wait()
        self._in_flight = []
        for check in self._checks:
            check.finish(label)
        self._checks = []
        arrived = tuple(
            full.view(-1, *size[1:]) for full, size in zip(self.outputs, self._sizes, strict=True)
        )
        after: Any = self._rows  # ``post`` is called as a method of this rank's rows
        if self.param.unsharded is None:
            tensor, inner = after.fsdp_post_all_gather(arrived, self._metadata, dtype)
            shape = self.param.slot.shape
            if tuple(tensor.shape) != shape:  # ``post`` returned padded rows; the parameter is the first rows
                tensor = torch.as_strided(tensor, shape, contiguous_strides(shape), 0)
            self.param.take_unsharded(
                self.param.prior.full_parameter(tensor, requires_grad=self.param.sharded.requires_grad)
            )
            assert self.param.unsharded is not None
            kept = [*self.outputs, *inner, self.param.unsharded]
            self._inner = [(each, version_of(each)) for each in kept]
        else:
            _allocate([each for each, _ in self._inner[:-1]])  # the last is the parameter, a view
            after.fsdp_post_all_gather(arrived, self._metadata, dtype, out=self.param.unsharded)
            # The values are the same as before, so tensors that autograd saved are still valid.
            set_versions(*zip(*self._inner, strict=True))
        self._metadata = None

    def plain_tensors(self) -> list[torch.Tensor]:
        """Return the tensors whose memory has the full parameter's values."""
        return [each for each, _ in self._inner if not is_wrapper(each)]

    def free(self) -> None:
        """Free all memory of the full parameter."""
        for each, _ in self._inner[:-1]:  # without the last, the parameter, which is a view
            storage = each.untyped_storage()
            if storage.resizable():  # memory of a communication library may not be
                storage.resize_(0)


def _allocate(tensors: Sequence[torch.Tensor]) -> None:
    """Allocate the memory of tensors again, if it was freed."""
    for tensor in tensors:
        storage, nbytes = tensor.untyped_storage(), tensor.numel() * tensor.element_size()
        if storage.nbytes() < nbytes:
            storage.resize_(nbytes)
