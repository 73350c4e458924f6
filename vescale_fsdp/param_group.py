"""ParamGroup: the parameters of a unit that share dtype and mesh, from shard to full tensors and back.

The tensors of a group (S = shard_numel, m = ranks of the sharding axis):

    shard                1-D [S]    original dtype   this rank's parameters; the optimizer's view of truth
    sharded parameter    ND ragged  original dtype   RaggedDTensor over a slice of ``shard``
    full buffer          1-D [m*S]  compute dtype    DBuffer that the all-gather fills
    unsharded parameter  ND         compute dtype    view of the full buffer; what the forward reads
    gradient buffer      1-D [m*S]  reduce dtype     DBuffer that unsharded gradients are written into
    reduced shard        1-D [S]    reduce dtype     what the reduce-scatter leaves here
    sharded gradient     ND ragged  original dtype   ``.grad`` of the sharded parameter, a view of the above

Life cycle (`GroupState`):

    SHARDED --unshard()--> GATHERING --wait_unsharded()--> UNSHARDED --reshard()--> SHARDED

The modules hold the sharded parameters in SHARDED and the unsharded ones in UNSHARDED. Both are made once
and never re-created: a new unsharded Parameter between forward and backward would drop its gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp.dbuffer import DBuffer
from vescale_fsdp.dtensor import RaggedDTensor
from vescale_fsdp.errors import LifecycleError, explain
from vescale_fsdp.layout import GroupLayout, TensorSlot
from vescale_fsdp.placement import RaggedShard
from vescale_fsdp.redistribute import make_spec
from vescale_fsdp.torch_private import DTensorSpec, foreach_zero_, local_of, post_accumulate_grad_hooks

__all__ = ["GroupMesh", "GroupState", "ManagedParam", "ParamGroup", "ReducedShard"]


class GroupState(Enum):
    """Where a group's parameters are."""

    SHARDED = auto()  # entered at construction and by reshard()
    GATHERING = auto()  # entered by unshard(): the all-gather is under way
    UNSHARDED = auto()  # entered by wait_unsharded(): modules read the full buffer


@dataclass(frozen=True)
class GroupMesh:
    """The mesh of a group, by role: the last axis shards, an axis before it replicates (HSDP)."""

    mesh: DeviceMesh

    @property
    def shard_axis(self) -> int:
        """Index of the axis that shards."""
        return self.mesh.ndim - 1

    @property
    def num_shards(self) -> int:
        """Ranks along the sharding axis."""
        return self.mesh.size(self.shard_axis)

    @property
    def rank(self) -> int:
        """This rank's index along the sharding axis."""
        return self.mesh.get_local_rank(self.shard_axis)

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """Ranks that hold one copy of the parameters between them."""
        return self.mesh.get_group(self.shard_axis)

    @property
    def replicate_group(self) -> dist.ProcessGroup | None:
        """Ranks that hold the same shard, or None without replication."""
        return self.mesh.get_group(0) if self.mesh.ndim == 2 else None

    def placements(self, ragged: RaggedShard) -> tuple[Placement, ...]:
        """Placements of a parameter of the group on this mesh."""
        return (*(Replicate() for _ in range(self.mesh.ndim - 1)), ragged)


@dataclass
class ManagedParam:
    """One parameter: where it lies, which modules hold it, and its two Parameter objects."""

    slot: TensorSlot
    owners: list[tuple[nn.Module, str]]  # every module attribute that is this parameter
    sharded: nn.Parameter  # RaggedDTensor
    spec: DTensorSpec
    unsharded: nn.Parameter | None = None
    watched: bool = False  # autograd tells us when its unsharded gradient is there
    has_grad: bool = False  # its unsharded gradient is in the gradient buffer

    def set_on_modules(self, parameter: nn.Parameter) -> None:
        """Make every owner hold ``parameter``."""
        for module, name in self.owners:
            # Straight into the dict: nn.Module.__setattr__ would re-register, and costs 10 times as much.
            module._parameters[name] = parameter


@dataclass
class ReducedShard:
    """A reduction under way: its result, what it reads from, and how to know that it is done."""

    shard: torch.Tensor  # 1-D [S], reduce dtype
    source: DBuffer  # kept until the reduction has read it
    works: list[dist.Work] = field(default_factory=list)


class ParamGroup:
    """The parameters of a unit that share dtype and mesh, with one layout and one buffer.

    Args:
        layout: where each parameter lies.
        mesh: the ranks, by role.
        params: the original parameters by name, in the order of ``layout.slots``.
        owners: per name, every (module, attribute) that is this parameter.
        mp_policy: dtypes of compute and reduction.
        device: where shards and buffers live (``meta`` stays meta until materialised).
    """

    def __init__(
        self,
        layout: GroupLayout,
        mesh: GroupMesh,
        params: dict[str, nn.Parameter],
        owners: dict[str, list[tuple[nn.Module, str]]],
        mp_policy: MixedPrecisionPolicy,
        device: torch.device,
    ) -> None:
        self.layout = layout
        self.mesh = mesh
        self.mp_policy = mp_policy
        self.state = GroupState.SHARDED
        self.full: DBuffer | None = None  # made at the first unshard
        self.grads: DBuffer | None = None  # there while unsharded gradients wait for their reduction
        self.divide_factor: float | None = None
        self.force_sum = False
        dtype = next(iter(params.values())).dtype
        self.shard = torch.zeros(layout.shard_numel, dtype=dtype, device=device)
        self.params = [self._shard_param(slot, params[slot.fqn], owners[slot.fqn]) for slot in layout.slots]

    # -- construction ---------------------------------------------------------------------------------

    def _shard_param(
        self, slot: TensorSlot, param: nn.Parameter, owners: list[tuple[nn.Module, str]]
    ) -> ManagedParam:
        placement = RaggedShard.from_piece_numels(slot.shape, self.layout.piece_numels(slot))
        spec = make_spec(self.mesh.mesh, self.mesh.placements(placement), torch.Size(slot.shape), param.dtype)
        local = self.local_view(self.shard, slot)
        if not param.is_meta and not local.is_meta:
            start, stop = self.layout.piece(slot, self.mesh.rank).range
            local.copy_(param.detach().reshape(-1)[start:stop])
        ragged = RaggedDTensor.wrap(local, spec, layout_ref=(self.layout, slot.fqn))
        managed = ManagedParam(slot, owners, nn.Parameter(ragged, requires_grad=param.requires_grad), spec)
        managed.set_on_modules(managed.sharded)
        return managed

    def local_view(self, shard: torch.Tensor, slot: TensorSlot) -> torch.Tensor:
        """This rank's piece of a slot inside a shard-sized 1-D tensor."""
        piece = self.layout.piece(slot, self.mesh.rank)
        return shard[piece.local_offset : piece.local_offset + piece.numel]

    def rebind(self) -> None:
        """Take over what the modules hold now (after ``_apply``, ``to_empty``, ``load_state_dict``).

        Pieces that left the shard (another device, another dtype, ``assign=True``) are copied into a new
        one, and the parameters are pointed at it, so that the group stays one allocation.
        """
        for param in self.params:
            module, name = param.owners[0]
            held = module._parameters[name]
            if not isinstance(held, RaggedDTensor) or held.placements != param.spec.placements:
                raise LifecycleError(
                    explain(
                        "A sharded parameter was replaced by something the group cannot hold.",
                        expected=f"a RaggedDTensor placed {tuple(map(str, param.spec.placements))}",
                        got=f"{type(held).__name__}",
                        where=param.slot.fqn,
                        todo="load a sharded state dict, or copy_ the values instead of assigning tensors",
                    )
                )
            param.sharded = held
            param.spec = held._spec
        locals_ = [local_of(param.sharded) for param in self.params]
        first = locals_[0]
        mixed = sorted({str(local.dtype) for local in locals_})
        if len(mixed) > 1:
            raise LifecycleError(
                explain("The parameters of a group took different dtypes.", expected="one dtype", got=mixed)
            )
        base = self.shard.untyped_storage()._cdata
        if all(local.untyped_storage()._cdata == base for local in locals_):
            return
        self.shard = torch.zeros(self.layout.shard_numel, dtype=first.dtype, device=first.device)
        for param, local in zip(self.params, locals_, strict=True):
            view = self.local_view(self.shard, param.slot)
            if not local.is_meta:
                view.copy_(local)
            param.sharded._local_tensor = view  # type: ignore[attr-defined]
            param.set_on_modules(param.sharded)
        self.full = None

    # -- dtypes ---------------------------------------------------------------------------------------

    @property
    def compute_dtype(self) -> torch.dtype:
        """dtype of the all-gather and of the forward. Integer parameters are not cast."""
        wanted = self.mp_policy.param_dtype
        return wanted if wanted is not None and self.shard.is_floating_point() else self.shard.dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        """dtype of the gradient buffer and of the reduction."""
        return self.mp_policy.reduce_dtype or self.compute_dtype

    @property
    def trainable(self) -> bool:
        """Whether any parameter wants a gradient."""
        return any(param.sharded.requires_grad for param in self.params)

    # -- gather ---------------------------------------------------------------------------------------

    def unshard(self) -> None:
        """Start the all-gather on the current stream; `wait_unsharded` ends it."""
        if self.state is not GroupState.SHARDED:
            return
        if self.shard.is_meta:
            raise LifecycleError(
                explain(
                    "Parameters are still on the meta device.",
                    expected="materialised parameters before the first forward",
                    got=", ".join(param.slot.fqn for param in self.params[:4]),
                    todo="call model.to_empty(device=...) and initialise, or load a checkpoint",
                )
            )
        if self.full is None:
            self._make_full_buffer()
        assert self.full is not None
        self.full.allocate()
        self.full.start_all_gather(self.shard, self.mesh.shard_group)
        self.state = GroupState.GATHERING

    def _make_full_buffer(self) -> None:
        full = DBuffer(self.layout, self.mesh.rank, self.compute_dtype, self.shard.device)
        self.full = full
        for param in self.params:
            param.unsharded = nn.Parameter(full.view(param.slot), requires_grad=False)
            param.watched = False

    def wait_unsharded(self) -> None:
        """Wait for the all-gather and hand the unsharded parameters to the modules."""
        if self.state is not GroupState.GATHERING:
            return
        assert self.full is not None
        self.full.wait_all_gather()
        for param in self.params:
            assert param.unsharded is not None
            param.unsharded.requires_grad_(param.sharded.requires_grad)
            if param.sharded.requires_grad and not param.watched:
                param.unsharded.register_post_accumulate_grad_hook(_GradHook(self, param))
                param.watched = True
            param.set_on_modules(param.unsharded)
        self.state = GroupState.UNSHARDED

    def reshard(self) -> None:
        """Free the full buffer and hand the sharded parameters back. The caller orders the streams."""
        self.wait_unsharded()
        if self.state is GroupState.SHARDED:
            return
        for param in self.params:
            param.set_on_modules(param.sharded)
        assert self.full is not None
        self.full.free()
        self.state = GroupState.SHARDED

    # -- reduce ---------------------------------------------------------------------------------------

    def write_grad(self, param: ManagedParam, grad: torch.Tensor) -> None:
        """Put an unsharded gradient where the reduction reads it: the one pass over it."""
        if self.grads is None:
            self.grads = DBuffer(self.layout, self.mesh.rank, self.reduce_dtype, grad.device)
        target = self.grads.view(param.slot)
        if param.has_grad:
            target.add_(grad)
        else:
            target.copy_(grad)
            param.has_grad = True

    def start_reduce(self) -> ReducedShard:
        """Start the reduction of all unsharded gradients on the current stream.

        Parameters without a gradient count as zero, so that ranks on which some were unused still agree
        on what travels.
        """
        if self.grads is None:
            self.grads = DBuffer(self.layout, self.mesh.rank, self.reduce_dtype, self.shard.device)
        missing = [self.grads.view(param.slot) for param in self.params if not param.has_grad]
        if missing:
            foreach_zero_(missing)
        for param in self.params:
            param.has_grad = False
        source, self.grads = self.grads, None
        pre_divide = self._pre_divide_factor()
        if pre_divide != 1:
            source.flat.div_(pre_divide)
        reduced = ReducedShard(source.flat.new_empty(self.layout.shard_numel), source)
        self._add_work(reduced, source.reduce_scatter(reduced.shard, self._op(), self.mesh.shard_group))
        return reduced

    @staticmethod
    def _add_work(reduced: ReducedShard, work: dist.Work | None) -> None:
        if work is not None:
            reduced.works.append(work)

    def _op(self) -> dist.ReduceOp.RedOpType:
        plain_average = (
            self.divide_factor is None and not self.force_sum and self.reduce_dtype is not torch.float16
        )
        return dist.ReduceOp.AVG if plain_average else dist.ReduceOp.SUM

    def _pre_divide_factor(self) -> float:
        """fp16 sums overflow: divide by a power of two near the root of the world before summing."""
        if self.reduce_dtype is not torch.float16:
            return 1
        factor = 1
        while self._total_divide() % factor == 0 and self._total_divide() / factor > factor:
            factor *= 2
        return factor

    def _total_divide(self) -> float:
        return self.divide_factor if self.divide_factor is not None else float(self.mesh.mesh.size())

    def finish_reduce(self, reduced: ReducedShard) -> None:
        """Wait for a reduction and add its result to the sharded gradients."""
        for work in reduced.works:
            work.wait()
        shard = reduced.shard
        if self.mesh.replicate_group is not None:
            dist.all_reduce(shard, self._op(), group=self.mesh.replicate_group)
        if self._op() is dist.ReduceOp.SUM:
            shard.div_(self._total_divide() / self._pre_divide_factor())
        shard = shard.to(self.shard.dtype)
        for param in self.params:
            if param.sharded.requires_grad:
                self._accumulate(param, self.local_view(shard, param.slot))
        for param in self.params:
            for hook in post_accumulate_grad_hooks(param.sharded):
                hook(param.sharded)

    def _accumulate(self, param: ManagedParam, local: torch.Tensor) -> None:
        existing = param.sharded.grad
        if existing is None:
            param.sharded.grad = RaggedDTensor.wrap(
                local, param.spec, layout_ref=(self.layout, param.slot.fqn)
            )
        else:
            existing._local_tensor.add_(local)  # type: ignore[attr-defined]

    def drop_grads(self) -> None:
        """Forget unsharded gradients that wait for a reduction (after an exception)."""
        self.grads = None
        for param in self.params:
            param.has_grad = False
            if param.unsharded is not None:
                param.unsharded.grad = None


class _GradHook:
    """Called by autograd when an unsharded parameter has its gradient. Holds no cycle alive."""

    def __init__(self, group: ParamGroup, param: ManagedParam) -> None:
        self.group = weakref.ref(group)
        self.param = weakref.ref(param)

    def __call__(self, unsharded: torch.Tensor) -> None:
        grad, unsharded.grad = unsharded.grad, None
        group, param = self.group(), self.param()
        if grad is not None and group is not None and param is not None:
            with torch.no_grad():
                group.write_grad(param, grad)


def bytes_of(groups: Sequence[ParamGroup]) -> int:
    """Bytes of the shards of these groups on this rank."""
    return sum(group.shard.numel() * group.shard.element_size() for group in groups)
