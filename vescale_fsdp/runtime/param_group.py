"""ParamGroup: the parameters of a unit that share dtype and mesh, from shard to full tensors and back.

The tensors of a group (S = shard_numel, m = ranks of the sharding axis):

    shard                1-D [S]    original dtype   this rank's parameters; the optimizer's view of truth
    sharded parameter    ND ragged  original dtype   RaggedDTensor over a slice of ``shard``
    full buffer          1-D [m*S]  compute dtype    DBuffer that the all-gather fills
    unsharded parameter  ND         compute dtype    view of the full buffer; what the forward reads (a scattered
                                                     one is copied out of it)
    gradient buffer      1-D [m*S]  `grad_dtype`     DBuffer that unsharded gradients are written into
    reduced shard        1-D [S]    reduce dtype     what the reduce-scatter leaves here
    sharded gradient     ND ragged  original dtype   ``.grad`` of the sharded parameter, a view of the above

Life cycle (`GroupState`):

    SHARDED --unshard()--> GATHERING --finish_gather()--> GATHERED --hand_over()--> UNSHARDED --reshard()--> SHARDED
    UNSHARDED --reshard(keep_part=True)--> PARTLY_SHARDED --unshard()--> GATHERING

PARTLY_SHARDED is `reshard_after_forward=<int>`: between forward and backward each rank keeps its part of the
full buffer over a smaller group, so that the second gather stays inside a node.

The modules hold the unsharded parameters in UNSHARDED, the sharded ones otherwise. Both are made once and
never re-created: a new unsharded Parameter between forward and backward would drop its gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor
from vescale_fsdp.errors import LifecycleError
from vescale_fsdp.layout.geometry import FlatRange
from vescale_fsdp.layout.group_layout import TensorSlot
from vescale_fsdp.layout.placement import RaggedShard
from vescale_fsdp.runtime.comm.dbuffer import DBuffer
from vescale_fsdp.runtime.comm.gradients import ReducedShard, UnshardedGrads
from vescale_fsdp.runtime.comm.group_comm import (
    AllGather,
    CommMemory,
    Gather,
    GatherPolicy,
    GroupComm,
    GroupSettings,
    ReduceScatter,
)
from vescale_fsdp.runtime.comm.streams import Event
from vescale_fsdp.runtime.data_mesh import PriorSharding, local_part
from vescale_fsdp.runtime.group_plan import GroupPlan, policy_of_group
from vescale_fsdp.torch_modes import profiled, without_grad
from vescale_fsdp.torch_private import (
    REDUCES_AS_STORED,
    DTensorSpec,
    foreach_zero_,
    local_of,
    post_accumulate_grad_hooks,
)


class GroupState(Enum):
    """Where a group's parameters are."""

    SHARDED = auto()  # entered at construction and by reshard()
    PARTLY_SHARDED = auto()  # entered by reshard(keep_part=True), after a forward only
    GATHERING = auto()  # entered by unshard(): the all-gather is under way
    GATHERED = auto()  # entered by finish_gather(): the full buffer is filled, for the stream that gathers
    UNSHARDED = auto()  # entered by hand_over(): modules read the full buffer

    @property
    def is_sharded(self) -> bool:
        """Whether a gather would have to bring parameters."""
        return self in (GroupState.SHARDED, GroupState.PARTLY_SHARDED)


@dataclass
class ManagedParam:
    """One parameter: where it lies, which modules hold it, and its two Parameter objects."""

    slot: TensorSlot
    owners: list[tuple[nn.Module, str]]  # every module attribute that is this parameter
    local: slice  # of a shard: this rank's piece
    sharded: nn.Parameter  # RaggedDTensor
    spec: DTensorSpec
    piece: torch.Tensor  # the view of the shard that ``sharded`` was given
    prior: PriorSharding  # how tensor or expert parallelism cut it before
    unsharded: nn.Parameter | None = None
    watched: bool = False  # autograd tells us when its unsharded gradient is there

    def __post_init__(self) -> None:
        self.take(self.sharded)

    def take(self, sharded: nn.Parameter) -> None:
        """Have this as the sharded parameter from now on."""
        self.sharded = sharded
        _homes[id(sharded)] = self

    def foreign(self) -> list[nn.Parameter | None]:
        """What owners hold that the group did not give them; None for an owner that has no such parameter now."""
        found: list[nn.Parameter | None] = []
        for module, name in self.owners:
            held = module._parameters.get(name)
            if held is not self.sharded and (held is None or held is not self.unsharded):
                found.append(held)
        return found

    def set_on_modules(self, parameter: nn.Parameter) -> None:
        """Make every owner hold ``parameter``."""
        for module, name in self.owners:
            # Straight into the dict: nn.Module.__setattr__ would re-register, and costs 10 times as much.
            module._parameters[name] = parameter


# By id of the sharded parameter.
_homes: weakref.WeakValueDictionary[int, ManagedParam] = weakref.WeakValueDictionary()


def home_of(parameter: nn.Parameter) -> ManagedParam | None:
    """What has this as its sharded parameter."""
    found = _homes.get(id(parameter))
    return found if found is not None and found.sharded is parameter else None


class GradHook:
    """Called by autograd when an unsharded parameter has its gradient. Holds no cycle alive.

    Args:
        take: a bound method that is given the parameter and its gradient.
    """

    def __init__(self, take: Callable[[ManagedParam, torch.Tensor], None], param: ManagedParam) -> None:
        self._take = weakref.WeakMethod(take)
        self._param = weakref.ref(param)

    def __call__(self, unsharded: torch.Tensor) -> None:
        grad, unsharded.grad = unsharded.grad, None
        take, param = self._take(), self._param()
        if grad is not None and take is not None and param is not None:
            take(param, grad)


def refuse_replaced(fqns: list[str]) -> NoReturn:
    """Of parameters that modules no longer held when their unit was resharded."""
    raise LifecycleError(
        "Parameters were replaced or deleted while their unit was unsharded; the sharded ones are back in place.",
        expected="the unsharded parameters that the gather handed out",
        got=", ".join(fqns[:4]),
        todo="write into the sharded parameters instead: load_state_dict, or copy_ of a tensor that "
        "vescale_fsdp.distribute_tensor made",
    )


class ParamGroup:
    """The parameters of a unit that share dtype and mesh, with one layout and one buffer.

    Args:
        plan: the original parameters, who holds them, and where each will lie. They are read; `install`
            replaces them.
        mp_policy: dtypes of compute and reduction.
        offload_policy: whether shards, gradients and so the optimizer live on the host.
        device: where the unit computes. Shards of meta parameters stay meta until materialised.
    """

    takes_plain: ClassVar[bool] = (
        True  # this rank's piece of a full plain tensor is all a parameter is made of
    )

    def __init__(
        self,
        plan: GroupPlan,
        mp_policy: MixedPrecisionPolicy,
        offload_policy: OffloadPolicy,
        device: torch.device,
    ) -> None:
        self.layout = plan.layout
        self.data, self.scatter, self.wanted_part_size = plan.data, plan.scatter, plan.wanted_part_size
        self.together = plan.together
        self.comm = GroupComm(plan.data.mesh, plan.part_size)
        self.mp_policy = mp_policy = policy_of_group(mp_policy, plan.param_dtype)
        self.offload = offload_policy if isinstance(offload_policy, CPUOffloadPolicy) else None
        self.device = device
        self.label = ""  # for the profiler, once the root knows it
        self.state = GroupState.SHARDED
        self.full: DBuffer | None = None  # made at the first unshard
        self.gathered: Event | None = None  # on an accelerator: when the full buffer is filled
        self.sums_grads = False  # of several backwards, before they are reduced; the same on all ranks
        self._brought: torch.Tensor | None = None  # of an offloaded shard, the copy that the gather reads
        self._part: torch.Tensor | None = None  # 1-D [numel / part_size], there in PARTLY_SHARDED
        self._unreplicated: ReducedShard | None = None  # reduced over shards, not over replicas
        self._untold_used: frozenset[str] | None = None  # what was used, until the other ranks are told
        self._doubtful: dict[str, torch.Tensor] = {}  # reduced pieces of what this rank has not used
        first = next(iter(plan.params.values()))
        self.shard = self._new_shard(first.dtype, torch.device("meta") if first.is_meta else device)
        self._noted: dict[str, tuple[GroupSettings, str]] = {}  # by kind, what is logged of a start
        self.was_gathered = False
        self.taken_over: list[str] = []  # parameters that modules got from others, before the first gather
        self.params = [
            self._shard_param(slot, plan.params[slot.fqn], plan.owners[slot.fqn], plan.priors[slot.fqn])
            for slot in plan.layout.slots
        ]
        self.grads = UnshardedGrads(self.layout, self._new_grads, lambda: self.grad_dtype)
        self.policy_gather: Gather | None = None  # a gather of the policy's own, in place of the usual one
        if isinstance(mp_policy, GatherPolicy):
            self.policy_gather = mp_policy.gather_of(plan.layout, self.comm, self.compute_dtype)

    # -- construction ---------------------------------------------------------------------------------

    def _new_shard(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type == "meta" or self.offload is None:
            return torch.zeros(self.layout.shard_numel, dtype=dtype, device=device)
        return torch.zeros(self.layout.shard_numel, dtype=dtype, device="cpu", pin_memory=self._is_pinned)

    def _shard_param(
        self,
        slot: TensorSlot,
        param: nn.Parameter,
        owners: list[tuple[nn.Module, str]],
        prior: PriorSharding,
    ) -> ManagedParam:
        placement = RaggedShard.from_piece_numels(slot.shape, self.layout.piece_lengths(slot))
        spec = prior.sharded_spec(placement, param.shape, param.dtype)
        piece = self.layout.piece(slot, self.comm.rank)
        local_slice = slice(piece.local_offset, piece.local_offset + piece.numel)
        local = self.shard[local_slice]
        if not param.is_meta and not local.is_meta:
            local.copy_(self._values_of(param).reshape(-1)[piece.range.start : piece.range.stop])
        # A layout speaks of the whole tensor; where other axes cut it too, the placements have to.
        layout_ref = (self.layout, slot.fqn) if slot.shape == tuple(param.shape) else None
        ragged = RaggedDTensor.wrap(local, spec, layout_ref=layout_ref)
        sharded = nn.Parameter(ragged, requires_grad=param.requires_grad)
        return ManagedParam(slot, owners, local_slice, sharded, spec, local_of(sharded), prior)

    def _values_of(self, param: nn.Parameter) -> torch.Tensor:
        """What this rank has of an original parameter, to take its piece from."""
        return local_part(param)

    def install(self) -> None:
        """Put the sharded parameters in place of the original ones."""
        for param in self.params:
            param.set_on_modules(param.sharded)

    def is_intact(self) -> bool:
        """Whether the modules hold this group's parameters, and these their pieces of the shard."""
        for param in self.params:  # not all(..): asked before every gather, of every parameter
            if local_of(param.sharded) is not param.piece or param.foreign():
                return False
        return not self.shard.is_meta

    def new_shard(self, dtype: torch.dtype, device: torch.device) -> None:
        """Begin a new shard, of zeros."""
        self.shard = self._new_shard(dtype, device)

    # -- dtypes ---------------------------------------------------------------------------------------

    @property
    def compute_dtype(self) -> torch.dtype:
        """dtype of the all-gather and of the forward. Integer parameters are not cast."""
        wanted = self.mp_policy.param_dtype
        return wanted if wanted is not None and self.shard.is_floating_point() else self.shard.dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        """dtype of the reduction; where the policy does not say it, what this torch's FSDP2 means by that."""
        return self.mp_policy.reduce_dtype or (self.shard.dtype if REDUCES_AS_STORED else self.compute_dtype)

    @property
    def grad_dtype(self) -> torch.dtype:
        """dtype of the gradient buffer: the reduction's, or autograd's where the reduction sums from that.

        FSDP2 sums the gradients of several backwards in the reduction's dtype; so do we.
        """
        narrow, wide = self.compute_dtype, self.reduce_dtype
        if self.sums_grads or narrow.itemsize >= wide.itemsize or not self.comm.sums_in_wider(self.device):
            return wide
        return narrow

    @property
    def home(self) -> torch.device:
        """Where shards live: where the unit computes, or the host."""
        return self.device if self.offload is None else torch.device("cpu")

    @property
    def is_offloaded(self) -> bool:
        """Whether the shard lives on the host while the unit computes elsewhere."""
        return self.offload is not None and self.device.type != "cpu"

    @property
    def _is_pinned(self) -> bool:
        """Whether what lives on the host is in pinned memory, so that copies run beside the host's work."""
        return self.is_offloaded and self.offload is not None and self.offload.pin_memory

    @property
    def trainable(self) -> bool:
        """Whether any parameter wants a gradient."""
        return any(param.sharded.requires_grad for param in self.params)

    # -- gather ---------------------------------------------------------------------------------------

    def note_start(self, kind: str) -> None:
        """A gather or a reduction is about to start: see `OrderWatch`."""
        watch, settings = self.comm.watch, self.comm.settings
        if watch is None:
            return
        noted = self._noted.get(kind)
        if noted is None or noted[0] is not settings:
            text = f"{kind} of {self.label[1:-1]} ({self.params[0].slot.fqn}, ..){settings.changes}"
            noted = self._noted[kind] = settings, text
        watch.note(noted[1])

    def unshard(self) -> None:
        """Start the all-gather on the current stream; `finish_gather` and `hand_over` end it."""
        if self.state not in (GroupState.SHARDED, GroupState.PARTLY_SHARDED):
            return
        self._start_gather()
        self.was_gathered = True
        self.state = GroupState.GATHERING

    def allocate_full(self) -> None:
        """Give the full buffer its memory, on the current stream; nothing if it has."""
        if self.full is None:
            self._check_shard()
            self._make_full_buffer()
        assert self.full is not None
        self.full.allocate()

    def bring_shard(self) -> list[torch.Tensor]:
        """Copy an offloaded shard to where the unit computes, on the current stream, for the gather that follows.

        Returns:
            What the gather will read, to be kept until it has.
        """
        self._check_shard()
        self._brought = torch.empty(self.shard.shape, dtype=self.shard.dtype, device=self.device)
        self._brought.copy_(self.shard, non_blocking=True)
        return [self._brought]

    def _start_gather(self) -> None:
        self.allocate_full()
        assert self.full is not None
        shard = self.shard if self._brought is None else self._brought
        if self.state is GroupState.PARTLY_SHARDED:
            assert self._part is not None
            self.full.start_gather(self._part, self.comm.gather_parts)
        elif self.policy_gather is not None:
            self.full.start_gather(shard, self.policy_gather)
        else:
            must_move = shard.dtype != self.compute_dtype or (shard is self.shard and self.is_offloaded)
            at = self.layout.shard_range(self.comm.rank) if must_move else None
            self.full.start_gather(shard, self.comm.gather, copy_to=at)
        self._brought = None

    def _check_shard(self) -> None:
        if self.shard.is_meta:
            raise LifecycleError(
                "Parameters are still on the meta device.",
                expected="materialised parameters before the first forward",
                got=", ".join(param.slot.fqn for param in self.params[:4]),
                todo="call model.to_empty(device=...) and initialise, or load a checkpoint",
            )
        if self.offload is not None and self.shard.device.type != "cpu":
            raise LifecycleError(
                "Under CPUOffloadPolicy the shards live on the host.",
                expected="parameters on cpu",
                got=f"{self.shard.device}",
                where=self.params[0].slot.fqn,
                todo="do not move the module to the accelerator; model.to_empty(device='cpu') if it is meta",
            )

    def _part_range(self) -> FlatRange:
        assert self.comm.part_size is not None
        numel = self.layout.numel // self.comm.part_size
        return FlatRange(self.comm.part_rank * numel, (self.comm.part_rank + 1) * numel)

    def _make_full_buffer(self) -> None:
        flat = self.comm.allocate_full(self.layout.numel, self.compute_dtype, self.device)
        full = DBuffer(self.layout, flat, self.comm.full_pool)
        self.full = full
        for param in self.params:
            param.unsharded = param.prior.full_parameter(
                full.view(param.slot), requires_grad=param.sharded.requires_grad
            )
            param.watched = False

    def finish_gather(self) -> None:
        """Wait for the all-gather (on an accelerator: the current stream, the one it began on, waits)."""
        assert self.state is GroupState.GATHERING, self.state
        self._finish_gather()
        self.state = GroupState.GATHERED

    def _finish_gather(self) -> None:
        assert self.full is not None
        self.full.wait_gather()

    def hand_over(self) -> None:
        """Hand the unsharded parameters to the modules. The compute stream has waited for the gather."""
        self._part = self.gathered = None  # not earlier: the gather reads the part
        for param in self.params:
            assert param.unsharded is not None
            if param.unsharded.requires_grad != param.sharded.requires_grad:
                param.unsharded.requires_grad_(param.sharded.requires_grad)
            if param.sharded.requires_grad and not param.watched:
                param.unsharded.register_post_accumulate_grad_hook(GradHook(self.take_grad, param))
                param.watched = True
            param.set_on_modules(param.unsharded)
        self.state = GroupState.UNSHARDED

    def reshard(self, *, keep_part: bool = False, frees: bool = True) -> None:
        """Free the full buffer and hand the sharded parameters back. The caller orders the streams.

        Args:
            keep_part: keep this rank's part over the smaller group, for the gather of the backward.
            frees: False: `free_full` follows.
        """
        assert self.state not in (GroupState.GATHERING, GroupState.GATHERED), "a gather is waited for first"
        if self.state is GroupState.UNSHARDED:
            replaced = [param.slot.fqn for param in self.params if param.foreign()]
            for param in self.params:
                param.set_on_modules(param.sharded)
            if keep_part and self.comm.part_size is not None and self.full is not None:
                start, stop = self._part_range()
                self._part = self.full.flat[start:stop].clone()
            if frees:
                self.free_full()
            self.state = GroupState.SHARDED if self._part is None else GroupState.PARTLY_SHARDED
            if replaced:
                refuse_replaced(replaced)
        elif not keep_part:  # the part is out of date once the optimizer has run
            self._part, self.state = None, GroupState.SHARDED

    def use_gather(self, comm: AllGather) -> None:
        """Gather with a user's object from now on, into buffers of its own."""
        self.comm.change(custom_all_gather=comm)
        self.forget_full()

    def use_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce with a user's object from now on, from buffers of its own."""
        self.comm.change(custom_reduce_scatter=comm)
        self.grads.spare = {}

    def use_memory(self, memory: CommMemory | None) -> None:
        """Have the buffers of collectives in a communication library's memory from now on; None: in the usual one."""
        self.comm.memory = memory
        self.grads.spare = {}
        self.forget_full()

    def forget_full(self) -> None:
        """Have the full buffer made anew at the next gather."""
        self.full = None

    def free_full(self) -> None:
        """Give back the memory of the full buffer, unless it is to stay."""
        if self.full is not None and not self.comm.settings.keeps_full:
            self.full.free()

    # -- reduce ---------------------------------------------------------------------------------------

    def take_grad(self, param: ManagedParam, grad: torch.Tensor) -> None:
        """Called when autograd has made an unsharded gradient."""
        with without_grad(), profiled("FSDP::post_backward_accumulate ", self.label):
            self._take(param, grad)

    def _take(self, param: ManagedParam, grad: torch.Tensor) -> None:
        if grad.is_sparse:  # nn.Embedding(sparse=True): the buffer is dense
            grad = grad.to_dense()
        self.grads.take(param.slot, param.prior.own_grad(grad))

    def collect_grads(self) -> None:
        """Take gradients that somebody set on unsharded parameters, as pipelines do for the weights' half."""
        for param in self.params:
            if param.unsharded is not None and param.unsharded.grad is not None:
                grad, param.unsharded.grad = param.unsharded.grad, None
                with without_grad():
                    self._take(param, grad)

    def _new_grads(self, dtype: torch.dtype) -> DBuffer:
        flat = self.comm.allocate_grads(self.layout.numel, dtype, self.device)
        return DBuffer(self.layout, flat, self.comm.grads_pool)

    def write_grads(self) -> None:
        """Write what autograd has made so far into the gradient buffer, to be reduced with later backwards' sums."""
        with without_grad():
            self.grads.write_kept()

    def complete_grads(self) -> DBuffer:
        """The buffer that `start_reduce` is to read, filled on the current stream.

        Its padding is zero where users' code sees it, or the reduced shard: a custom reduce-scatter, an all-reduce
        hook, or one that may be set before the sums of several backwards are reduced over replicas.
        """
        with without_grad():
            buffer, settings = self.grads.complete(), self.comm.settings
            is_seen = settings.custom_reduce_scatter is not None or settings.all_reduce_hook is not None
            if (is_seen or not self._delivers) and buffer.padding():
                foreach_zero_(buffer.padding())
            return buffer

    def start_reduce(self, source: DBuffer) -> ReducedShard:
        """Start the reduction of what `complete_grads` has made, on the current stream."""
        used = self.grads.hand_over()
        self._untold_used = used | (self._untold_used or frozenset())
        shard = self.comm.allocate_grads(self.layout.shard_numel, self.reduce_dtype, self.device)
        return ReducedShard(shard, source, self.comm.reduce_scatter(shard, source.flat), used)

    def finish_reduce(self, reduced: ReducedShard) -> None:
        """Add what a reduction left, which the caller has waited for, to the sharded gradients."""
        shard, used = reduced.shard, reduced.used
        if self._unreplicated is not None:
            shard.add_(self._unreplicated.shard)
            used |= self._unreplicated.used
            self._unreplicated = None
        if not self._delivers:
            self._unreplicated = reduced._replace(used=used)
            return
        self.comm.all_reduce(shard)
        if self.comm.settings.all_reduce_hook is not None:
            self.comm.settings.all_reduce_hook(shard)
        self.comm.finish_division(shard)
        shard = self._to_shard_home(shard.to(self.shard.dtype))
        wanted = [param for param in self.params if param.sharded.requires_grad]
        delivered = {
            param.slot.fqn: shard[param.local]
            for param in wanted
            if self.comm.settings.zeros_unused or param.slot.fqn in used or self._adds_zeros(param)
        }
        self._deliver(delivered)
        for param in wanted:
            if (
                param.slot.fqn not in delivered
            ):  # of an earlier reduction of the same backward there may be one already
                known = self._doubtful.get(param.slot.fqn)
                piece = shard[param.local]
                self._doubtful[param.slot.fqn] = piece if known is None else known.add_(piece)

    def _adds_zeros(self, param: ManagedParam) -> bool:
        """Whether what other ranks may not have used either is added at once, so that the host need not wait for flags.

        Not where somebody listens: hooks fire for parameters that some rank has used.
        """
        listens = self.comm.settings.on_delivery is not None or post_accumulate_grad_hooks(param.sharded)
        return param.sharded.grad is not None and not listens

    @property
    def owes_replicas(self) -> bool:
        """Whether what earlier reductions have left is to be reduced over replicas by the next one."""
        return self._unreplicated is not None and self._delivers

    def unreplicated_sums(self) -> list[torch.Tensor]:
        """What earlier reductions have left and the next one adds to."""
        return [] if self._unreplicated is None else [self._unreplicated.shard]

    @property
    def _delivers(self) -> bool:
        """Whether a reduction ends in the sharded gradients; else in sums that are not yet reduced over replicas."""
        return self.comm.settings.requires_all_reduce or self.comm.replicate_group is None

    def _deliver(self, pieces: dict[str, torch.Tensor]) -> None:
        """Add to the sharded gradients of these parameters, and call the hooks that users have set on them."""
        given = [param for param in self.params if param.slot.fqn in pieces]
        for param in given:
            self._accumulate(param, pieces[param.slot.fqn])
        for param in given:
            for hook in post_accumulate_grad_hooks(param.sharded):
                hook(param.sharded)
        if self.comm.settings.on_delivery is not None and given:
            self.comm.settings.on_delivery([param.sharded for param in given])

    def take_used(self) -> list[bool] | None:
        """Which parameters this rank has used since it was asked last; None if gradients are not delivered yet."""
        if self._untold_used is None or not self._delivers:
            return None
        used, self._untold_used = self._untold_used, None
        return [param.slot.fqn in used for param in self.params]

    @property
    def is_in_doubt(self) -> bool:
        """Whether a gradient waits for the word that some rank has used its parameter."""
        return bool(self._doubtful)

    def settle_doubtful(self, used: Sequence[bool]) -> None:
        """Deliver what some rank has used, in the order of `take_used`; the rest keeps the gradient it has, or none."""
        doubtful, self._doubtful = self._doubtful, {}
        found = {param.slot.fqn for param, flag in zip(self.params, used, strict=True) if flag}
        self._deliver({fqn: piece for fqn, piece in doubtful.items() if fqn in found})

    def _to_shard_home(self, shard: torch.Tensor) -> torch.Tensor:
        """A reduced shard where the parameters are: the host, under CPU offload."""
        if not self.is_offloaded:
            return shard
        host = self._room_on_host(shard)
        # The host may read it only once it is there: at once if somebody reads at once, else at the end.
        read_at_once = self.comm.settings.on_delivery is not None or any(
            param.sharded.grad is not None or post_accumulate_grad_hooks(param.sharded)
            for param in self.params
        )
        host.copy_(shard, non_blocking=self._is_pinned and not read_at_once)
        return host

    def _room_on_host(self, shard: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(shard, device="cpu", pin_memory=self._is_pinned)

    def _accumulate(self, param: ManagedParam, local: torch.Tensor) -> None:
        existing = param.sharded.grad
        if existing is None:
            assert isinstance(param.sharded, RaggedDTensor)
            param.sharded.grad = RaggedDTensor.wrap(local, param.spec, layout_ref=param.sharded.layout_ref)
        else:
            local_of(existing).add_(local)

    def drop_grads(self) -> None:
        """Forget unsharded gradients, and sums not yet reduced over replicas (after an exception)."""
        self.grads.drop()
        self._unreplicated = self._untold_used = None
        self._doubtful = {}
        for param in self.params:
            if param.unsharded is not None:
                param.unsharded.grad = None
