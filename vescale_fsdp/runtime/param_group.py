"""ParamGroup: the parameters of a unit that have one buffer. It gathers them, frees them, and reduces gradients.

The tensors of a group (S = shard_numel, m = ranks of the sharding axis):

    shard                1-D [S]    original dtype   this rank's parameters, which the optimizer steps
    sharded parameter    ND ragged  original dtype   RaggedDTensor over a slice of ``shard``
    full buffer          1-D [m*S]  compute dtype    DBuffer that the all-gather fills
    unsharded parameter  ND         compute dtype    view of the full buffer; if scattered, a copy from it
    gradient buffer      1-D [m*S]  `grad_dtype`     DBuffer that unsharded gradients are written into
    kept part            1-D        compute dtype    in a hybrid cut: see `kept_part`
    reduced shard        1-D [S]    reduce dtype     result of the reduce-scatter
    sharded gradient     ND ragged  original dtype   ``.grad`` of the sharded parameter, a view of the reduced shard

Life cycle (`GroupState`):

    SHARDED --unshard()--> GATHERING --finish_gather()--> GATHERED --hand_over()--> UNSHARDED --reshard()--> SHARDED
    UNSHARDED --reshard(keep_part=True)--> PARTLY_SHARDED --unshard()--> GATHERING

PARTLY_SHARDED is for `reshard_after_forward=<int>`. Between forward and backward, that many ranks (usually a node's)
together keep the full buffer, each rank a part, so that the second gather stays inside the node.

In UNSHARDED the modules have the unsharded parameters, in all other states the sharded parameters. Parameters of both
kinds are created once: a new unsharded Parameter between forward and backward would lose its gradient. Both have the
user's attributes and hooks:

    attributes                              one dictionary
    register_hook                           called with the local gradient, before the reduction, as in DDP
    register_post_accumulate_grad_hook      called with the sharded parameter, after the reduction
    writes in place                         `gathered_writes`
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from vescale_fsdp.collectives.slice_exchange import Work
from vescale_fsdp.dtensor.first_order import first_order
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor, WriteCount, redistribute
from vescale_fsdp.dtensor.waiting_grad import WaitingValues, waiting_in
from vescale_fsdp.errors import LifecycleError, some
from vescale_fsdp.layout.group_layout import TensorSlot
from vescale_fsdp.layout.placement import RaggedShard
from vescale_fsdp.runtime.comm.collective_check import GatherCheck
from vescale_fsdp.runtime.comm.dbuffer import DBuffer
from vescale_fsdp.runtime.comm.group_comm import Gather, GatherPolicy, GroupComm, GroupSettings
from vescale_fsdp.runtime.comm.streams import Event, Stream
from vescale_fsdp.runtime.comm.unsharded_grads import ReducedShard, UnshardedGrads
from vescale_fsdp.runtime.data_mesh import GatheredDTensor, PriorSharding, local_part
from vescale_fsdp.runtime.gathered_writes import GatheredWrites, bits_of, digest_of, note_exposed
from vescale_fsdp.runtime.group_plan import GroupPlan, OriginalParam, note_gathered, policy_of_group
from vescale_fsdp.runtime.kept_part import KeptPart
from vescale_fsdp.torch_modes import is_fake, profiled, without_grad
from vescale_fsdp.torch_private import (
    REDUCES_AS_STORED,
    DTensorSpec,
    foreach_zero_,
    increment_versions,
    is_view_of,
    local_of,
    move_hooks,
    piece_in,
    post_accumulate_grad_hooks,
    set_local,
    set_post_accumulate_grad_hooks,
    spec_of,
    tensor_hooks,
)


class GroupState(Enum):
    """The state of a group in its life cycle.

    Attributes:
        is_sharded: whether an all-gather must start before modules can read full parameters.
    """

    SHARDED = "sharded", True  # entered at construction and by reshard()
    PARTLY_SHARDED = "partly sharded", True  # entered by reshard(keep_part=True), after a forward only
    GATHERING = "gathering", False  # entered by unshard(): the all-gather is in flight
    GATHERED = "gathered", False  # entered by finish_gather(): filled, for the stream that gathers
    UNSHARDED = "unsharded", False  # entered by hand_over(): modules read the full buffer

    def __init__(self, shown: str, is_sharded: bool) -> None:
        self.is_sharded = is_sharded  # not a property, which every hook would call


@dataclass
class ManagedParam:
    """One parameter: its slot, the modules that own it, and its sharded and unsharded Parameter objects."""

    slot: TensorSlot
    owners: list[tuple[nn.Module, str]]  # every module attribute that is this parameter
    local: slice  # this rank's piece, as a slice of the shard
    sharded: nn.Parameter  # RaggedDTensor
    spec: DTensorSpec
    piece: torch.Tensor  # the view of the shard that ``sharded`` was given, to notice a replacement
    prior: PriorSharding  # sharding by tensor or expert parallelism
    unsharded: nn.Parameter | None = None
    watched: bool = False  # whether ``unsharded`` has a `GradHook`
    attributes: dict[str, Any] = field(default_factory=dict)  # the users', of both Parameters
    # Whether ``unsharded`` required a gradient when it was last set on the modules; None: never set.
    trained: bool | None = None
    # Whether it required a gradient in a forward or reduction since the last reduction was started. A gradient that
    # was summed before the user has frozen the parameter is delivered, too; the same on all ranks.
    is_due: bool = False
    gathered_grad: torch.Tensor | None = None  # ``.grad`` of ``unsharded`` after `FSDPModule.unshard`
    notice: torch.Tensor | None = None  # what `show_grad` shows
    # While gradients wait for a reduction: what is shown as ``.grad`` of the two Parameters.
    waiting: tuple[RaggedDTensor, torch.Tensor | None] | None = None
    # The hooks that the user had when the last gradient arrived; None once they were called.
    pending_hooks: list[Callable[[Any], Any]] | None = None
    written: Callable[[torch.Tensor], None] | None = None  # called after writes to ``sharded`` or its views
    generation: int = 0  # how often ``sharded`` or ``piece`` was replaced

    def __post_init__(self) -> None:
        self.take(self.sharded)

    def take(self, sharded: nn.Parameter) -> None:
        """Make ``sharded`` the sharded parameter, also for `managed_param_of`."""
        if sharded is not self.sharded:
            move_hooks(self.sharded, sharded)
            self.generation += 1
        self.sharded = sharded
        if self.written is not None and isinstance(sharded, RaggedDTensor):
            sharded.writes = sharded.writes or WriteCount()
            sharded.writes.then = self.written
        self.share_attributes()
        _by_sharded[id(sharded)] = self  # by id, so that the dictionary keeps no Parameter alive

    def take_piece(self, piece: torch.Tensor) -> None:
        """Note that ``piece`` is the view of the shard that ``sharded`` has now."""
        self.generation += piece is not self.piece
        self.piece = piece

    def take_unsharded(self, unsharded: nn.Parameter) -> None:
        """Make ``unsharded`` the unsharded parameter."""
        self.unsharded, self.watched, self.trained = unsharded, False, None
        self.gathered_grad = self.notice = None
        if self.waiting is not None:
            self.waiting = self.waiting[0], None
        note_gathered(unsharded, self.slot.fqn, weakref.ref(self))
        set_post_accumulate_grad_hooks(unsharded, _UnshardedHooks())
        self.share_attributes()

    def share_attributes(self) -> None:
        """Let both Parameters have the user's attributes: one dictionary, unless a subclass stores tensors there."""
        attributes = vars(self.sharded)
        if attributes is not self.attributes:  # the sharded parameter was replaced, or swapped by Module.to
            for name in self.attributes.keys() - attributes.keys() - {"keeps_grad_placed"}:
                attributes[name] = self.attributes[name]
            self.attributes = attributes
        if self.unsharded is None or vars(self.unsharded) is attributes:
            return
        if type(self.unsharded) in _SHARE_ATTRIBUTES:
            self.unsharded.__dict__ = attributes
        else:
            for name in attributes.keys() - vars(self.unsharded).keys():
                setattr(self.unsharded, name, attributes[name])

    def show_grad(self) -> None:
        """Let a reduced gradient be noticed at the unsharded parameter: it can be zeroed there, but not read."""
        if self.gathered_grad is not None and self.sharded.grad is None:
            self.hide_grad()  # the gradient that was shown has been dropped
        if self.gathered_grad is None and self.sharded.grad is not None:
            if self.notice is None:  # made once: this runs for each parameter after each backward
                zero = functools.partial(_zero_grad_of, weakref.ref(self))
                self.notice = self.like_unsharded(zero, is_gathered=True)
            self.gathered_grad = self.show(self.notice)

    def like_unsharded(self, zero: Callable[[], None], *, is_gathered: bool) -> torch.Tensor | None:
        """Return a tensor without values for ``.grad`` of the unsharded parameter; None if it cannot have one."""
        full = self.unsharded
        if full is None or type(full) not in _SHARE_ATTRIBUTES:
            return None
        return self.as_unsharded(WaitingValues(local_of(full), self.slot.fqn, zero, is_gathered=is_gathered))

    def show(self, shown: torch.Tensor | None) -> torch.Tensor | None:
        """Set ``.grad`` of the unsharded parameter to a tensor of `like_unsharded`; None if it has a gradient."""
        values = waiting_in(shown)
        if values is None or self.unsharded is None or self.unsharded.grad is not None:
            return None
        values.added, values.is_added_to = None, False
        self.unsharded.grad = shown
        return shown

    def follow_grad(self) -> None:
        """Set the sharded gradient to None if a user has done so at the unsharded parameter."""
        if self.gathered_grad is not None and (
            self.unsharded is None or self.unsharded.grad is not self.gathered_grad
        ):
            self.hide_grad()

    def hide_grad(self) -> None:
        """End `show_grad`; a gradient that was set to None meanwhile is None at the sharded parameter, too."""
        shown, self.gathered_grad = self.gathered_grad, None
        assert shown is not None and self.unsharded is not None
        values = waiting_in(shown)
        assert values is not None
        if self.unsharded.grad is shown:
            self.unsharded.grad = self.as_unsharded(values.added)
        elif not values.is_added_to:
            self.sharded.grad = None

    def as_unsharded(self, local: torch.Tensor | None) -> torch.Tensor | None:
        """Return a local tensor as a tensor like the unsharded parameter."""
        if local is None or not isinstance(self.unsharded, DTensor):
            return local
        return DTensor(local, spec_of(self.unsharded), requires_grad=False)  # type: ignore[call-arg]

    def post_hooks(self) -> list[Callable[[Any], Any]]:
        """Return the user's hooks for accumulated gradients, of both Parameters."""
        hooks = list(post_accumulate_grad_hooks(self.sharded))
        if self.unsharded is not None:
            redirected = post_accumulate_grad_hooks(self.unsharded)
            hooks += [hook.hook for hook in redirected if isinstance(hook, _AfterReduction)]
        return hooks

    def follow_requires_grad(self) -> None:
        """Freeze or unfreeze both Parameters if a user has frozen or unfrozen one since the last call."""
        full, sharded = self.unsharded, self.sharded
        assert full is not None
        if self.trained is not None and full.requires_grad != self.trained == sharded.requires_grad:
            sharded.requires_grad_(full.requires_grad)  # through the unsharded parameter
        self.trained = sharded.requires_grad
        if full.requires_grad != self.trained:
            full.requires_grad_(self.trained)

    def replacements(self) -> list[nn.Parameter | None]:
        """Return parameters that users have set on owners in place of this one; None for an owner that has none."""
        replacements: list[nn.Parameter | None] = []
        for module, name in self.owners:
            current = module._parameters.get(name)
            # A deleted parameter is None. Before the first gather `unsharded` is None too, so None is tested first.
            if current is not self.sharded and (current is None or current is not self.unsharded):
                replacements.append(current)
        return replacements

    def set_on_modules(self, parameter: nn.Parameter) -> None:
        """Set ``parameter`` on every owner, under the owner's name for it."""
        for module, name in self.owners:
            # Not setattr: nn.Module.__setattr__ would register the parameter again, and takes ten times as long.
            module._parameters[name] = parameter


_SHARE_ATTRIBUTES: tuple[type, ...] = (nn.Parameter, GatheredDTensor)
# The key is the id of the sharded Parameter, so that this dictionary keeps no Parameter alive.
_by_sharded: weakref.WeakValueDictionary[int, ManagedParam] = weakref.WeakValueDictionary()


def managed_param_of(parameter: nn.Parameter) -> ManagedParam | None:
    """Return the managed parameter whose sharded Parameter this is, or None."""
    managed = _by_sharded.get(id(parameter))
    # Compare the objects too: Python may have given the id of a freed Parameter to this one.
    return managed if managed is not None and managed.sharded is parameter else None


class BackwardWatch(Protocol):
    """Begins a backward: the unit's `Schedule`."""

    in_backward: bool
    has_grads: bool  # whether a gradient has arrived in this backward

    def gather_again(self, group: ParamGroup) -> None:
        """Gather a group whose shard was written while it was gathered."""

    def begin_backward(self) -> None:
        """Begin a backward that has reached a gradient before any output of a unit."""


@dataclass(frozen=True)
class _AfterReduction:
    """Replaces a user's hook on an unsharded parameter, which autograd calls; `ParamGroup._deliver` calls ``hook``."""

    hook: Callable[[Any], Any]

    def __call__(self, unsharded: torch.Tensor) -> None:
        """Do nothing."""


class _UnshardedHooks(OrderedDict[int, Any]):
    """The hooks for accumulated gradients of an unsharded parameter, whenever they are registered."""

    def __setitem__(self, key: int, hook: Any) -> None:
        super().__setitem__(
            key, hook if isinstance(hook, (GradHook, _AfterReduction)) else _AfterReduction(hook)
        )


class GradHook:
    """The hook that autograd calls once it has accumulated an unsharded parameter's gradient.

    The hook's references to the group and the parameter are weak: autograd keeps the hook alive, so strong references
    would form a cycle.

    Args:
        take: a bound method, called as ``take(param, grad)``.
    """

    def __init__(self, take: Callable[[ManagedParam, torch.Tensor], None], param: ManagedParam) -> None:
        self._take = weakref.WeakMethod(take)
        self._param = weakref.ref(param)

    def __call__(self, unsharded: torch.Tensor) -> None:
        grad = taken_grad(unsharded)
        take, param = self._take(), self._param()  # None once the group is freed
        if grad is None or take is None or param is None:
            return
        # A parameter that was frozen at its sharded Parameter, while it was gathered, gets no gradient.
        if param.sharded.requires_grad or not param.trained:
            for hook in tensor_hooks(param.sharded):  # as in DDP, they get the local gradient
                changed = hook(grad)
                grad = grad if changed is None else changed
            take(param, grad)


def taken_grad(unsharded: torch.Tensor) -> torch.Tensor | None:
    """Take the gradient that has arrived at an unsharded parameter: a second reference would keep it in memory."""
    grad, unsharded.grad = unsharded.grad, None
    values = waiting_in(grad)
    if values is None:
        return grad
    added, values.added = values.added, None
    if added is None:
        unsharded.grad = grad  # still waits
    return added


class ParamGroup:
    """Parameters of a unit with one layout and one buffer.

    They agree in stored dtype, compute dtype, trainability, mesh and all-gather hooks. Parameters that agree in all of
    these are two groups if one buffer would need much padding for their blocks.

    Args:
        plan: the original parameters, their owners, and their layout. The model is not changed until `install`.
        mp_policy: dtypes of compute and reduction.
        offload_policy: whether shards, gradients, and so the optimizer state, are on the host.
        device: where the unit computes. Shards of meta parameters stay meta until materialized.
    """

    # Whether a full plain tensor can replace a parameter before the first gather.
    takes_plain: ClassVar[bool] = True

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
        self.comm = GroupComm(plan.data.mesh, plan.part_size, plan.data.cut)
        self.kept = KeptPart(plan.layout, self.comm) if plan.data.cut is not None else None
        self.mp_policy = mp_policy = policy_of_group(mp_policy, plan.param_dtype)
        self.offload = offload_policy if isinstance(offload_policy, CPUOffloadPolicy) else None
        self.device = device
        self.label = ""  # shown in profiles; `FSDPState.set_name` sets it
        self.state = GroupState.SHARDED
        self.full: DBuffer | None = None  # created at the first unshard
        self.gathered: Event | None = None  # on an accelerator: recorded once the full buffer is filled
        self.full_owner: Stream | None = None  # the stream that owns the full buffer's memory
        self.filled: Event | None = None  # `gathered` after `hand_over`, kept until the reshard
        self.was_gathered = False  # whether a gather has ever started
        # Whether gradients of several backwards are summed before a reduction; the same on all ranks.
        self.sums_grads = False
        self.adopted: list[str] = []  # names of parameters that were replaced before the first gather
        self._brought: torch.Tensor | None = None  # copy of an offloaded shard, which the gather reads
        self._check: GatherCheck | None = None  # of the gather in flight
        self._part: torch.Tensor | None = None  # 1-D [numel / part_size], in PARTLY_SHARDED
        self._unreplicated: ReducedShard | None = None  # reduced over shards, not yet over replicas
        # Names of used parameters that were not yet sent to other ranks.
        self._unreported_used: frozenset[str] | None = None
        # Reduced pieces of parameters that this rank has not used, by name. They are delivered once it is known that
        # another rank has used the parameter.
        self._deferred_grads: dict[str, torch.Tensor] = {}
        # Whether `step_in_backward` has stepped parameters of the group since the optimizer's last ``step``.
        self.stepped = False
        self._keeps_graph = False  # whether gradients to deliver have a graph (create_graph=True)
        self.schedule: BackwardWatch | None = None  # the unit's
        # Whether users may have seen unsharded parameters outside of the unit's forward, and may hold them.
        self.is_exposed = False
        # Whether the unit's forward or backward runs.
        self.computes = False
        self._holds = False  # whether gradients that wait are shown as ``.grad``
        # Whether a reduction is due, even if a user has dropped the gradients since: the same on all ranks.
        self.owes_reduction = False
        self.writes = GatheredWrites()
        # Cache: kind of collective -> the settings, and the log entry made from them.
        self._log_entries: dict[str, tuple[GroupSettings, str]] = {}
        first = next(iter(plan.params.values())).param
        # Meta parameters get a meta shard, until `to_empty` or a load materializes them.
        self.new_shard(first.dtype, torch.device("meta") if first.is_meta else device)
        self.params = [self._shard_param(slot, plan.params[slot.fqn]) for slot in plan.layout.slots]
        for param in self.params:
            param.written = functools.partial(_note_write, weakref.ref(self))
            param.take(param.sharded)
        self._scattered = [param for param in self.params if param.slot.is_scattered]
        # The dtype is given as a function, because settings may change it from one buffer to the next.
        self.grads = UnshardedGrads(self.layout, self._new_grads, lambda: self.grad_dtype)
        # The policy's own gather, which replaces the all-gather.
        self.policy_gather: Gather | None = None
        if isinstance(mp_policy, GatherPolicy):
            self.policy_gather = mp_policy.gather_of(plan.layout, self.comm, self.compute_dtype)

    # -- construction ---------------------------------------------------------------------------------

    def new_shard(self, dtype: torch.dtype, device: torch.device) -> None:
        """Replace the shard with zeros of a dtype and device. Under CPU offload it is on the host, unless on meta."""
        on_host = device.type != "meta" and self.offload is not None
        # Zeros, not empty: the padding is sent in collectives, too.
        self.shard = torch.zeros(
            self.layout.shard_numel,
            dtype=dtype,
            device="cpu" if on_host else device,
            pin_memory=on_host and self._is_pinned,
        )

    def _shard_param(self, slot: TensorSlot, original: OriginalParam) -> ManagedParam:
        """Copy this rank's piece of an original parameter into the shard; returns the parameter over that piece."""
        param, owners, prior, _ = original
        placement = RaggedShard.from_piece_numels(slot.shape, self.layout.piece_lengths(slot))
        spec = prior.sharded_spec(placement, param.shape, param.dtype)
        piece = self.layout.piece(slot, self.comm.rank)
        local_slice = slice(piece.local_offset, piece.local_offset + piece.numel)
        local = self.shard[local_slice].data  # with a version counter of its own
        if not param.is_meta and not local.is_meta:  # meta parameters get their values later
            local.copy_(self._values_of(param).reshape(-1)[piece.range.start : piece.range.stop])
        # The layout describes the whole tensor only if no other parallelism cuts the parameter.
        layout_ref = (self.layout, slot.fqn) if slot.shape == tuple(param.shape) else None
        ragged = RaggedDTensor.wrap(local, spec, layout_ref=layout_ref)
        sharded = nn.Parameter(ragged, requires_grad=param.requires_grad)
        for name in vars(param).keys() - vars(sharded).keys():
            setattr(sharded, name, vars(param)[name])
        move_hooks(param, sharded)
        return ManagedParam(slot, owners, local_slice, sharded, spec, local_of(sharded), prior)

    def _values_of(self, param: nn.Parameter) -> torch.Tensor:
        """Return the values of an original parameter, from which this rank's piece is cut."""
        return local_part(param)

    def install(self) -> None:
        """Replace the original parameters by the sharded parameters on the modules."""
        for param in self.params:
            param.set_on_modules(param.sharded)

    def is_intact(self) -> bool:
        """Return whether no parameter was replaced, and every sharded parameter is still a view of the shard."""
        for param in self.params:  # a loop is faster than all(..); this runs before every gather
            if local_of(param.sharded) is not param.piece or param.replacements():
                return False
        return not self.shard.is_meta

    # -- dtypes ---------------------------------------------------------------------------------------

    @property
    def compute_dtype(self) -> torch.dtype:
        """dtype of the all-gather and of the forward. Integer and complex parameters are not cast."""
        wanted = self.mp_policy.param_dtype
        return wanted if wanted is not None and self.shard.is_floating_point() else self.shard.dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        """dtype of the reduction: the policy's, or that of the installed torch's FSDP2. Complex stays complex."""
        wanted = self.mp_policy.reduce_dtype
        if wanted is None:
            return self.shard.dtype if REDUCES_AS_STORED else self.compute_dtype
        return torch.promote_types(self.shard.dtype, wanted) if self.shard.is_complex() else wanted

    @property
    def grad_dtype(self) -> torch.dtype:
        """dtype of the gradient buffer: the reduce dtype, or a narrower compute dtype that the reduction can widen.

        If gradients of several backwards are summed, it is the reduce dtype, as in FSDP2.
        """
        narrow, wide = self.compute_dtype, self.reduce_dtype
        if self.sums_grads or narrow.itemsize >= wide.itemsize or not self.comm.sums_in_wider(self.device):
            return wide
        return narrow

    @property
    def home(self) -> torch.device:
        """The device of shards: the unit's device, or the host under CPU offload."""
        return self.device if self.offload is None else torch.device("cpu")

    @property
    def is_offloaded(self) -> bool:
        """Whether the shard is on the host while the unit computes on an accelerator."""
        return self.offload is not None and self.device.type != "cpu"

    @property
    def _is_pinned(self) -> bool:
        """Whether memory on the host is pinned, so that copies to and from the device do not block the host."""
        return self.is_offloaded and self.offload is not None and self.offload.pin_memory

    def note_trained(self) -> bool:
        """Note which parameters require a gradient now; return whether any does."""
        is_trained = False
        for param in self.params:
            if param.sharded.requires_grad:
                param.is_due = is_trained = True
        return is_trained

    @property
    def is_due(self) -> bool:
        """Whether gradients of any parameter may wait for the next reduction, over shards or over replicas."""
        return any(param.is_due for param in self.params) or self._unreplicated is not None

    # -- gather ---------------------------------------------------------------------------------------

    def note_start(self, kind: str) -> None:
        """Log for `OrderWatch` that a gather or a reduction is about to start.

        Args:
            kind: "gather" or "reduction".
        """
        watch, settings = self.comm.watch, self.comm.settings
        if watch is None:
            return
        entry = self._log_entries.get(kind)
        if entry is None or entry[0] is not settings:  # make the text once per settings: steps log often
            # [1:-1] removes the parentheses of the label.
            text = f"{kind} of {self.label[1:-1]} ({self.params[0].slot.fqn}, ..){settings.changes}"
            entry = self._log_entries[kind] = settings, text
        watch.note(entry[1])

    def unshard(self) -> None:
        """Start the all-gather on the current stream; a no-op unless sharded. `finish_gather` must follow."""
        if self.state not in (GroupState.SHARDED, GroupState.PARTLY_SHARDED):
            return
        self.writes.begin(self)
        self._start_gather()
        self.was_gathered = True
        self.state = GroupState.GATHERING

    def allocate_full(self) -> bool:
        """Allocate the memory of the full buffer on the current stream; a no-op if it is allocated.

        The first call also creates the buffer and the unsharded parameters.

        Returns:
            True; False if only a gather can allocate the memory.
        """
        if self.full is None:
            self._check_shard()
            flat = self.comm.allocate_full(self.layout.numel, self.compute_dtype, self.device)
            self.full = DBuffer(self.layout, flat, self.comm.full_pool)
            self.writes.forget()
            for param in self.params:
                # `.data` has a version counter of its own, so that gathers do not count as writes to the parameter.
                view = self.full.view(param.slot).data
                param.take_unsharded(
                    param.prior.full_parameter(view, requires_grad=param.sharded.requires_grad)
                )
        self.full.allocate()
        return True

    def bring_shard(self) -> list[torch.Tensor]:
        """Copy an offloaded shard to the unit's device, on the current stream, for the next gather.

        Returns:
            The copies, which the caller must keep until the gather has read them.
        """
        self._check_shard()
        self._brought = torch.empty(self.shard.shape, dtype=self.shard.dtype, device=self.device)
        self._brought.copy_(self.shard, non_blocking=True)  # does not block the host if the shard is pinned
        return [self._brought]

    def _start_gather(self) -> None:
        self.allocate_full()
        assert self.full is not None
        shard = self.shard if self._brought is None else self._brought
        checks = self.comm.checks and not is_fake(self.shard)
        if self.kept is not None:
            part = self.kept.start(shard, self.full, self.params, self.label[1:-1])
            if not self.kept.is_whole:
                begin = self._begin_check if checks else None
                self.full.start_gather(part, self.comm.gather, before=begin)
        elif self.state is GroupState.PARTLY_SHARDED:
            assert self._part is not None
            begin_part = functools.partial(self._begin_check, is_part=True) if checks else None
            self.full.start_gather(self._part, self.comm.gather_parts, before=begin_part)
        elif self.policy_gather is not None:
            self.full.start_gather(shard, self.policy_gather)
        else:
            # A shard that has the buffer's dtype and device is gathered directly. Any other shard is first copied to
            # this rank's slice of the buffer, which converts it.
            must_move = shard.dtype != self.compute_dtype or (shard is self.shard and self.is_offloaded)
            at = self.layout.shard_range(self.comm.rank) if must_move else None
            self.full.start_gather(
                shard, self.comm.gather, copy_to=at, before=self._begin_check if checks else None
            )
        self._brought = None

    def _begin_check(self, full: torch.Tensor, own: torch.Tensor, *, is_part: bool = False) -> None:
        """Begin to check the gather that starts next."""
        self._check = self.comm.begin_check(full, own, is_part=is_part)

    def _check_shard(self) -> None:
        if self.shard.is_meta:
            raise LifecycleError(
                "Parameters are still on the meta device.",
                expected="materialized parameters before the first forward",
                got=", ".join(param.slot.fqn for param in self.params[:4]),
                todo="call model.to_empty(device=...) and initialize, or load a checkpoint",
            )
        if self.offload is not None and self.shard.device.type != "cpu":
            raise LifecycleError(
                "Under CPUOffloadPolicy shards must be on the host.",
                expected="parameters on cpu",
                got=f"{self.shard.device}",
                where=self.params[0].slot.fqn,
                todo="do not move the module to the accelerator; model.to_empty(device='cpu') if it is meta",
            )

    def finish_gather(self) -> None:
        """Wait for the all-gather. On an accelerator, the current stream waits; it must be the gather stream."""
        assert self.state is GroupState.GATHERING, self.state
        self._finish_gather()
        self.state = GroupState.GATHERED

    def _finish_gather(self) -> None:
        assert self.full is not None
        self.full.wait_gather()
        if self._check is not None:
            check, self._check = self._check, None
            with without_grad():
                check.finish(self.label[1:-1])

    def hand_over(self) -> None:
        """Set the unsharded parameters on the modules. The compute stream must wait for the gather before this call."""
        self._part = None  # not earlier, because the gather reads the part
        self.filled, self.gathered = self.gathered, None
        unsharded = []
        for param in self.params:
            full = param.unsharded
            assert full is not None
            if full.requires_grad != param.trained or param.sharded.requires_grad != param.trained:
                param.follow_requires_grad()
            if param.trained and not param.watched:  # one hook serves all backwards
                full.register_post_accumulate_grad_hook(GradHook(self.take_grad, param))
                param.watched = True
            if param.sharded.__dict__ is not param.attributes:
                param.share_attributes()
            param.set_on_modules(full)
            unsharded.append(full)
        self.writes.open(self, unsharded)
        self.state = GroupState.UNSHARDED

    def expose(self) -> None:
        """Note that users may see the unsharded parameters outside of the unit's forward, and may hold them."""
        if not self.is_exposed:
            self.is_exposed = True
            note_exposed(self)

    def before_step(self) -> None:
        """Bring what users have done to unsharded parameters to the sharded ones, before an optimizer's step."""
        for param in self.params:
            param.follow_grad()
        self.keep_writes()

    def keep_writes(self) -> None:
        """Copy writes to unsharded parameters to the shard, if the group is gathered and stays so."""
        if self.state is GroupState.UNSHARDED:
            self.writes.keep(self, [param.unsharded for param in self.params if param.unsharded is not None])

    def follow_requires_grad(self) -> None:
        """Freeze or unfreeze parameters that a user has frozen or unfrozen while the group stayed gathered."""
        for param in self.params:
            param.follow_requires_grad()
            if param.trained and not param.watched and param.unsharded is not None:
                param.unsharded.register_post_accumulate_grad_hook(GradHook(self.take_grad, param))
                param.watched = True

    def is_stale(self) -> bool:
        """Return whether the shard was written since the last gather."""
        if self.writes.is_stale(self.params):
            return True
        replaced = [piece_in(param.sharded) is not param.piece for param in self.params]  # p.data = tensor
        return True in replaced

    def is_kept_stale(self) -> bool:
        """Return whether the shard was written on this rank since the kept part was gathered over nodes."""
        return self.kept is not None and (self.kept.is_stale(self.params) or self.is_stale())

    def check_not_stale(self, phase: str) -> None:
        """Raise if the shard was written while the unit's forward or backward computed with the gathered values."""
        if self.state is GroupState.UNSHARDED and self.is_stale():
            raise LifecycleError(
                f"Sharded parameters were written during their unit's {phase}, which computes with gathered values.",
                expected="writes to the module's parameters, which are gathered then",
                got=f"a write to a sharded parameter of {self.label[1:-1]}: {self.params[0].slot.fqn}, ..",
                where=phase,
                todo=f"look the parameter up in the module inside the {phase} (module.weight), or write outside of it",
            )

    def reshard(self, *, keep_part: bool = False) -> None:
        """Set the sharded parameters on the modules. The caller frees the full buffer after this (`free_full`).

        Args:
            keep_part: under `reshard_after_forward=<int>`, keep this rank's part of the full buffer for the gather of
                the backward.

        Raises:
            LifecycleError: if unsharded parameters were replaced on the modules, or deleted.
        """
        assert self.state not in (GroupState.GATHERING, GroupState.GATHERED), "the gather was not waited for"
        if self.state is not GroupState.UNSHARDED:
            if not keep_part:  # an optimizer step may follow, after which the kept part would be stale
                self._part, self.state = None, GroupState.SHARDED
            return
        self.computes = False
        # Collected here, because resharding replaces the user's parameters; raised at the end, so that the model is
        # left sharded.
        replaced, unsharded = [], []
        for param in self.params:
            if param.replacements():
                replaced.append(param.slot.fqn)
            assert param.unsharded is not None
            if param.unsharded.requires_grad != param.trained:  # frozen or unfrozen while it was gathered
                param.sharded.requires_grad_(param.unsharded.requires_grad)
            param.follow_grad()
            param.set_on_modules(param.sharded)
            unsharded.append(param.unsharded)
        report = self.writes.close(self, unsharded)
        if keep_part and self.comm.part_size is not None and self.full is not None:
            # A copy, because the caller frees the buffer next.
            self._part = self.full.flat.view(self.comm.part_size, -1)[self.comm.part_rank].clone()
        self.state = GroupState.SHARDED if self._part is None else GroupState.PARTLY_SHARDED
        if replaced:
            raise LifecycleError(
                "Parameters were replaced or deleted while their unit was unsharded. The modules have the sharded "
                "parameters again.",
                expected="the unsharded parameters that the gather made",
                got=", ".join(replaced[:4]),
                todo="write into the sharded parameters instead: load_state_dict, or copy_ of a tensor that "
                "vescale_fsdp.distribute_tensor made",
            )
        if report is not None:
            report()

    def forget_full(self) -> None:
        """Drop the full buffer and its views; the next gather creates a new buffer. All ranks must call this."""
        self.full = None
        if self.kept is not None:
            self.kept.forget()

    def follow_shard(self) -> None:
        """Drop the full buffer after `new_shard`, unless it has the right dtype and device.

        If it stays, tensors that autograd has saved stay views of it, and their versions say whether they are valid.
        """
        kind = (self.compute_dtype, self.device)
        if self.full is not None and (self.full.flat.dtype, self.full.flat.device) != kind:
            self.forget_full()

    # -- writes to gathered parameters ------------------------------------------------------------------

    @property
    def refuses_writes(self) -> tuple[str, str] | None:
        """Why writes to gathered parameters cannot be kept, and what to do; None if they can."""
        if self.policy_gather is None:
            return None
        return (
            "a gather of 8-bit codes",
            "write to the sharded parameter outside of unshard() and forward: p.copy_(..)",
        )

    def digest(self) -> str | None:
        """Return a digest of this rank's part of the gathered values; None if the shard has these values.

        Only on the CPU: on an accelerator, the host would wait.
        """
        if (
            self.policy_gather is None
            or self.full is None
            or self.device.type != "cpu"
            or is_fake(self.shard)
        ):
            return None
        start, stop = self.layout.shard_range(self.comm.rank)
        return digest_of(self.full.flat[start:stop])

    def has_other_data(self) -> bool:
        """Return whether users have set ``p.data = tensor`` of unsharded parameters since the gather."""
        return self.state is GroupState.UNSHARDED and bool(self._with_other_data())

    def _with_other_data(self) -> list[ManagedParam]:
        if self.full is None or is_fake(self.shard):  # parameters that gather themselves, or have no memory
            return []
        locals_ = [local_of(param.unsharded) for param in self.params if param.unsharded is not None]
        views = [self.full.view(param.slot) for param in self.params]
        return [
            param
            for param, view, local in zip(self.params, views, locals_, strict=True)
            if view.data_ptr() != local.data_ptr()
        ]

    def return_to_buffer(self) -> set[str]:
        """Copy values that users have set by ``p.data = tensor`` into the full buffer; return the parameters' names."""
        names = set()
        for param in self._with_other_data():
            if param.unsharded is not None and self.full is not None:
                view = self.full.view(param.slot)
                view.copy_(local_of(param.unsharded).detach())
                if isinstance(param.unsharded, DTensor):
                    set_local(param.unsharded, view.data)
                else:
                    param.unsharded.data = view.data
                names.add(param.slot.fqn)
        return names

    @torch.no_grad()
    def write_back(self, touched: Collection[str]) -> list[str]:
        """Copy gathered values of this rank that differ from the shard to the shard.

        Args:
            touched: names of parameters that are known to be written.

        Returns:
            Names of other parameters that were written, as far as the host knows: on an accelerator none, though they
            are copied. Offloaded shards get the ``touched`` parameters only, because the host must wait for the copy.
        """
        assert self.full is not None
        if self.is_offloaded:
            found = [param for param in self.params if param.slot.fqn in touched]
        elif self.device.type == "cpu":
            found = self._differing()
        else:
            start, stop = self.layout.shard_range(self.comm.rank)
            _copy_written(self.full.flat[start:stop], self.shard)
            found = self._scattered
            increment_versions([param.piece for param in self.params if param.slot.fqn in touched])
        for param in found:
            _copy_written(self._gathered_piece(param), param.piece)
        if self.kept is not None and not self.is_offloaded:
            self.kept.follow(self.full, self.params)
        elif self.kept is not None and touched:
            self.kept.forget()
        return [
            param.slot.fqn for param in found if param.slot.fqn not in touched and not param.slot.is_scattered
        ]

    def _differing(self) -> list[ManagedParam]:
        """Return the parameters of which this rank's part differs from the shard; on the CPU."""
        assert self.full is not None
        start, stop = self.layout.shard_range(self.comm.rank)
        own = self.full.flat[start:stop]
        if not self._scattered and torch.equal(bits_of(own), bits_of(self.shard.to(own.dtype))):
            return []  # the usual case, in one pass
        return [
            param
            for param in self.params
            if not torch.equal(bits_of(self._gathered_piece(param)), bits_of(param.piece.to(own.dtype)))
        ]

    def _gathered_piece(self, param: ManagedParam) -> torch.Tensor:
        """Return this rank's part of a gathered parameter, 1-D: a view of the memory that users write to."""
        assert self.full is not None
        start, stop = self.layout.piece(param.slot, self.comm.rank).range
        return self.full.view(param.slot).view(-1)[start:stop]

    def free_full(self) -> None:
        """Free the memory of the full buffer, unless `set_keep_unsharded_storage` keeps it."""
        is_kept = self.comm.settings.keeps_full or (self.kept is not None and self.kept.is_whole)
        if self.full is not None and not is_kept:
            self.full.free()

    # -- reduce ---------------------------------------------------------------------------------------

    def take_grad(self, param: ManagedParam, grad: torch.Tensor) -> None:
        """Take an unsharded gradient from autograd; called by `GradHook`."""
        if self.schedule is not None:
            if not self.schedule.in_backward:
                self.schedule.begin_backward()
            self.schedule.has_grads = True
        self._keeps_graph |= grad.requires_grad
        param.pending_hooks = param.post_hooks()
        with without_grad(), profiled("FSDP::post_backward_accumulate ", self.label):
            self._take(param, grad)

    def begin_backward(self) -> None:
        """Prepare for gradients of the unit's backward."""
        if self.is_exposed:
            for param in self.params:  # autograd stores a first gradient faster than it adds one
                if param.gathered_grad is not None:
                    param.hide_grad()
        if self._holds and any(param.prior.spec is not None for param in self.params):
            # Autograd would add gradients of a DTensor that are partial sums to what is shown, after it has summed
            # them in their own dtype. `own_grad` sums in the reduce dtype.
            self.settle()

    def _take(self, param: ManagedParam, grad: torch.Tensor) -> None:
        if self._holds:
            self.settle()
        if grad.is_sparse:  # of nn.Embedding(sparse=True); the gradient buffer is dense
            grad = grad.to_dense()
        self.grads.take(param.slot, param.prior.own_grad(grad, self.reduce_dtype))

    def collect_grads(self) -> None:
        """Take gradients that were set without autograd's accumulation, as pipelines set the gradients of weights."""
        for param in self.params:
            grad = None if param.unsharded is None else taken_grad(param.unsharded)
            if grad is not None:
                with without_grad():
                    self._take(param, grad)

    # -- gradients that wait ----------------------------------------------------------------------------

    def hold_grads(self) -> None:
        """Show gradients that wait for a reduction as ``.grad``, so that ``zero_grad`` finds them (`waiting_grad`)."""
        names = self.grads.names
        self.owes_reduction |= bool(names)
        if self._unreplicated is not None:
            names |= self._unreplicated.used
        self._holds = bool(names)
        for param in self.params:
            if param.slot.fqn in names and param.waiting is None:
                zero = functools.partial(_zero_waiting, weakref.ref(self), param.slot.fqn)
                values = WaitingValues(param.piece, param.slot.fqn, zero, param.sharded.grad)
                param.sharded.grad = shown = RaggedDTensor.wrap(values, param.spec)
                param.waiting = shown, param.show(param.like_unsharded(zero, is_gathered=False))
            elif self.is_exposed:
                param.show_grad()

    def settle(self) -> None:
        """Show reduced gradients as ``.grad`` again, and drop those waiting gradients that a user has cleared."""
        self._holds = False
        for param in self.params:
            if param.waiting is None:
                continue
            (shown, full), param.waiting = param.waiting, None
            is_kept = param.sharded.grad is shown
            if full is not None and param.unsharded is not None:
                there = waiting_in(full)
                assert there is not None
                if param.unsharded.grad is full:
                    # `take_grad` or `collect_grads` has still to take what was added.
                    param.unsharded.grad = param.as_unsharded(there.added)
                elif not there.is_added_to:  # cleared through the unsharded parameter
                    is_kept, param.sharded.grad = False, None
            if param.sharded.grad is shown:
                waiting = waiting_in(shown)
                assert waiting is not None
                param.sharded.grad = waiting.reduced
                if waiting.added is not None:  # of a loss on the sharded parameter itself
                    added = RaggedDTensor.wrap(waiting.added, param.spec)
                    param.sharded.grad = added if waiting.reduced is None else waiting.reduced + added
            if not is_kept:
                self._drop_waiting(param)

    def _drop_waiting(self, param: ManagedParam) -> None:
        """Drop a gradient that waits. Collectives depend on `owes_reduction` and `owes_replicas`, which stay."""
        fqn = param.slot.fqn
        self.grads.drop_one(fqn)
        if self._unreplicated is not None:
            self._zero_unreplicated(param)
            self._unreplicated = self._unreplicated._replace(used=self._unreplicated.used - {fqn})
        if self._unreported_used is not None:
            self._unreported_used -= {fqn}

    def zero_waiting(self, fqn: str) -> None:
        """Set a gradient that waits to zeros, and the reduced gradient to which it will be added."""
        param = next(param for param in self.params if param.slot.fqn == fqn)
        self._zero_unreplicated(param)
        with without_grad():
            self.grads.zero(param.slot)
            waiting = None if param.waiting is None else waiting_in(param.waiting[0])
            if waiting is not None:
                waiting.added = None
                if waiting.reduced is not None:
                    waiting.reduced.zero_()

    def _zero_unreplicated(self, param: ManagedParam) -> None:
        """Set the sums of a parameter's gradient that are not yet reduced over replicas to zeros."""
        if self._unreplicated is None:
            return
        first, num = (self.comm.rank, 1) if self.kept is None else (self.kept.first, self.kept.nodes)
        with without_grad():
            for number, slice_ in enumerate(self._unreplicated.part.view(num, -1)):
                piece = self.layout.piece(param.slot, first + number)
                slice_[piece.local_offset : piece.local_offset + piece.numel].zero_()

    def _new_grads(self, dtype: torch.dtype) -> DBuffer:
        flat = self.comm.allocate_grads(self.layout.numel, dtype, self.device)
        return DBuffer(self.layout, flat, self.comm.grads_pool)

    def write_grads(self) -> None:
        """Write the kept gradients into the gradient buffer, which sums the gradients of several backwards."""
        with without_grad():
            self.grads.write_kept()

    def complete_grads(self) -> DBuffer:
        """Return the gradient buffer, filled with all gradients on the current stream, for `start_reduce`.

        The padding is set to zero only where users' code may see it: in a custom reduce-scatter or an all-reduce hook.
        It is also set to zero if this reduction does not reduce over replicas, because a hook may be set before the
        reduction that does.
        """
        with without_grad():
            if self._holds:
                self.settle()
            buffer, settings = self.grads.complete(), self.comm.settings
            is_seen = settings.custom_reduce_scatter is not None or settings.all_reduce_hook is not None
            # An empty list of padding is tested for, because foreach operators refuse it.
            if (is_seen or not self._delivers) and buffer.padding():
                foreach_zero_(buffer.padding())
            return buffer

    def allocate_reduced(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Allocate, on the current stream, the results of a reduction.

        Returns:
            ``part``, ``shard`` and ``home`` of a `ReducedShard`. Under CPU offload the tensor on the host is allocated
            later.
        """
        size, dtype = self.layout.shard_numel, self.reduce_dtype
        shard = self.comm.allocate_grads(size, dtype, self.device)
        part = shard
        if self.kept is not None:
            part = self.comm.allocate_grads(self.kept.nodes * size, dtype, self.device)
        is_home = self.is_offloaded or shard.dtype is self.shard.dtype
        return part, shard, shard if is_home else torch.empty_like(shard, dtype=self.shard.dtype)

    def start_reduce(
        self, source: DBuffer, part: torch.Tensor, shard: torch.Tensor, home: torch.Tensor
    ) -> ReducedShard:
        """Start the reduction of the buffer from `complete_grads`, on the current stream.

        Args:
            source: the buffer.
            part, shard, home: from `allocate_reduced`, written.
        """
        used = self.grads.hand_over()
        self.owes_reduction = False
        # Several reductions of one backward are reported together, so earlier names are kept.
        self._unreported_used = used | (self._unreported_used or frozenset())
        due = frozenset([param.slot.fqn for param in self.params if param.is_due])
        # Not when this reduction is delivered: `note_trained` may have noted the parameters for the next one by then.
        for param in self.params:
            param.is_due = False
        work = self.comm.reduce_scatter(part, source.flat)
        return ReducedShard(part, shard, home, source, work, used, due)

    def start_replicate(self, reduced: ReducedShard) -> tuple[ReducedShard, Work | None] | None:
        """Start to reduce the result of a reduction over replicas. The caller must have waited for the reduction.

        Returns:
            What to `deliver`, and the work to wait for before; None if the result is kept until a later reduction.
        """
        if self._holds:  # shown between a backward and its `finalize_backward`: what waited is delivered now
            self.settle()
        if self._unreplicated is not None:  # the sum of earlier reductions that were not all-reduced
            reduced.part.add_(self._unreplicated.part)
            used, due = reduced.used | self._unreplicated.used, reduced.due | self._unreplicated.due
            reduced = reduced._replace(used=used, due=due)
            self._unreplicated = None
        if not self._delivers:
            # Nothing is delivered to the other tensors.
            self._unreplicated = reduced._replace(shard=reduced.part, home=reduced.part)
            return None
        return reduced, self.comm.finish_sum(reduced.part, reduced.shard)

    def deliver(self, reduced: ReducedShard) -> None:
        """Add the result of a reduction, over replicas too, to the sharded gradients."""
        settings = self.comm.settings
        if settings.on_delivery is not None:
            self._note_step()
        shard, used = reduced.shard, reduced.used
        if not is_fake(shard):
            self.comm.check_reduced(shard, self.label[1:-1])
        if settings.all_reduce_hook is not None:
            settings.all_reduce_hook(shard)
        self.comm.finish_division(shard)  # after the hook, as in FSDP2
        if self.is_offloaded:
            shard = self._to_host(shard)
        elif reduced.home is not shard:
            shard = reduced.home.copy_(shard)
        delivered: dict[str, torch.Tensor] = {}
        for param in self.params:
            fqn, piece = param.slot.fqn, shard[param.local]
            if fqn not in reduced.due and fqn not in used:  # frozen: it gets no gradient
                continue
            # A piece is delivered at once if it is known that some rank has used the parameter, or if adding the piece
            # is right in both cases. Any other piece waits for the flags of other ranks.
            if (
                (settings.zeros_unused and param.sharded.requires_grad)
                or fqn in used
                or (
                    # If no rank has used the parameter, the piece is zeros, which do not change an existing gradient.
                    # But a user's hook must not be called then.
                    param.sharded.grad is not None and settings.on_delivery is None and not param.post_hooks()
                )
            ):
                delivered[fqn] = piece
            else:  # an earlier reduction of the same backward may have deferred a piece, too
                earlier = self._deferred_grads.get(fqn)
                self._deferred_grads[fqn] = piece if earlier is None else earlier.add_(piece)
        self._deliver(delivered)

    def _note_step(self) -> None:
        """Check that the optimizer has not stepped in the backward since its last ``step``.

        All ranks reduce the same groups in the same order, so the error is raised on all ranks.
        """
        if self.stepped:
            raise LifecycleError(
                "step_in_backward has stepped this unit with a part of its gradients: more gradients were reduced "
                "before optimizer.step().",
                expected="one reduction of the unit for each optimizer.step()",
                got="a second reduction",
                where=some(param.slot.fqn for param in self.params),
                todo="call optimizer.step() after each backward; to accumulate, run all backwards but the last under "
                "no_sync; checkpoint modules that run twice with use_reentrant=False; make one unit of modules that "
                "read each other's parameters; or step after the backward, without step_in_backward",
            )
        self.stepped = True

    @property
    def owes_replicas(self) -> bool:
        """Whether earlier results still have to be reduced over replicas, which the next reduction will do."""
        return self._unreplicated is not None and self._delivers

    def unreplicated_sums(self) -> list[torch.Tensor]:
        """Return the results that are not yet reduced over replicas, which the next reduction adds to its own."""
        return [] if self._unreplicated is None else [self._unreplicated.part]

    @property
    def _delivers(self) -> bool:
        """Whether results are added to sharded gradients. If not, they are kept until a reduction over replicas."""
        return self.comm.settings.requires_all_reduce or self.comm.replicate_group is None

    def _deliver(self, pieces: dict[str, torch.Tensor]) -> None:
        """Add pieces (by parameter name) to the sharded gradients, and call the users' hooks of their parameters."""
        params = [param for param in self.params if param.slot.fqn in pieces]
        for param in params:
            piece, sharded = pieces[param.slot.fqn], param.sharded
            if sharded.grad is not None:
                if isinstance(sharded.grad, DTensor) and sharded.grad.placements != param.spec.placements:
                    # A user's own gradient, replicated or cut differently.
                    sharded.grad = redistribute(sharded.grad, param.spec.placements)
                piece = local_of(sharded.grad).add_(piece)
                if not self._keeps_graph:
                    continue
            assert isinstance(sharded, RaggedDTensor)
            if self._keeps_graph:
                wrap = functools.partial(RaggedDTensor.wrap, piece, param.spec, layout_ref=sharded.layout_ref)
                sharded.grad = first_order(sharded, wrap, f"parameter {param.slot.fqn}")
            else:
                sharded.grad = RaggedDTensor.wrap(piece, param.spec, layout_ref=sharded.layout_ref)
        self._keeps_graph = False
        for param in params:  # a second loop: a hook may read the gradients of other parameters
            hooks, param.pending_hooks = param.pending_hooks, None
            for hook in param.post_hooks() if hooks is None else hooks:
                hook(param.sharded)
        if self.comm.settings.on_delivery is not None and params:
            self.comm.settings.on_delivery([param.sharded for param in params])

    def take_used(self) -> list[bool] | None:
        """Return for each parameter whether this rank has used it since the last call.

        None if no gradients were delivered since then.
        """
        if self._unreported_used is None or not self._delivers:
            return None
        used, self._unreported_used = self._unreported_used, None
        return [param.slot.fqn in used for param in self.params]

    @property
    def has_deferred_grads(self) -> bool:
        """Whether a reduced piece waits for other ranks' flags of used parameters."""
        return bool(self._deferred_grads)

    def apply_deferred_grads(self, used: Sequence[bool]) -> None:
        """Deliver the deferred pieces of parameters that some rank has used; drop the pieces of unused parameters.

        Args:
            used: whether any rank has used each parameter, in the order of `take_used`.
        """
        deferred, self._deferred_grads = self._deferred_grads, {}
        names = {param.slot.fqn for param, flag in zip(self.params, used, strict=True) if flag}
        self._deliver({fqn: piece for fqn, piece in deferred.items() if fqn in names})

    def _to_host(self, shard: torch.Tensor) -> torch.Tensor:
        """Return a copy of the reduced shard on the host, for CPU offload."""
        shard = shard.to(self.shard.dtype)
        host = self._room_on_host(shard)
        # The host reads gradients at once if it adds them to existing ones, or calls a hook. Only then is the copy
        # blocking; otherwise `wait_for_host_copies` waits when the backward ends.
        read_at_once = self.comm.settings.on_delivery is not None or any(
            param.sharded.grad is not None or param.post_hooks() for param in self.params
        )
        host.copy_(shard, non_blocking=self._is_pinned and not read_at_once)
        return host

    def _room_on_host(self, shard: torch.Tensor) -> torch.Tensor:
        # New memory for each reduction, because sharded gradients are views of it.
        return torch.empty_like(shard, device="cpu", pin_memory=self._is_pinned)

    def drop_grads(self) -> None:
        """Drop unsharded gradients, deferred pieces, and sums not yet reduced over replicas, after an exception."""
        self.settle()
        self.grads.drop()
        self.owes_reduction = False
        self._unreplicated = self._unreported_used = None
        self._deferred_grads = {}
        self.stepped = False
        for param in self.params:
            param.is_due, param.pending_hooks = False, None
            if param.gathered_grad is not None:
                param.hide_grad()
            if param.unsharded is not None:
                param.unsharded.grad = None


def _note_write(group: weakref.ref[ParamGroup], written: torch.Tensor) -> None:
    alive = group()
    if alive is None or not alive.computes or alive.schedule is None or not alive.is_stale():
        return
    # In the middle of the unit's forward or backward: what follows reads the new values. If autograd needs the old
    # ones, it raises, as without sharding: the version rises now, and not only when torch raises it after this call.
    sharded = [param.sharded for param in alive.params]
    increment_versions([each for each in sharded if each is written or is_view_of(written, each)])
    alive.schedule.gather_again(alive)
    alive.writes.accept_versions()
    if alive.kept is not None:
        alive.kept.accept_versions()


def _zero_grad_of(param: weakref.ref[ManagedParam]) -> None:
    alive = param()
    if alive is not None and alive.sharded.grad is not None:
        alive.sharded.grad.zero_()


def _zero_waiting(group: weakref.ref[ParamGroup], fqn: str) -> None:
    alive = group()
    if alive is not None:
        alive.zero_waiting(fqn)


def _copy_written(values: torch.Tensor, piece: torch.Tensor) -> None:
    """Copy gathered values to a part of the shard, which keeps all its digits where they are equal."""
    if values.dtype == piece.dtype:
        piece.copy_(values)
        return
    there = piece.to(values.device)
    same = bits_of(values) == bits_of(there.to(values.dtype))
    piece.copy_(torch.where(same, there, values)) if there is not piece else torch.where(
        same, piece, values, out=piece
    )
