"""FSDPState: the hooks that gather, reshard and reduce a unit around the forward and backward of its modules.

    pre-forward     gather the unit's parameters, cast its inputs
    post-forward    reshard (if reshard_after_forward), put gradient hooks on the outputs, cast the outputs
    pre-backward    gather the unit again, and the next unit
    post-backward   reshard, reduce the gradients; called by an autograd node on the inputs
    end of backward reduce units that no node reached (a root whose inputs need no gradient), wait for all reductions

A unit reduces once the backward has passed all calls of the unit's forward, so several forwards before one backward
cost one reduction. Every unit that took part in a forward with gradients is gathered and reduced, in the same order on
all ranks (`vescale_fsdp.runtime.schedule`). A rank reduces zeros for parameters it has not used, so that no other rank
waits for it.

A unit made of a list of modules gathers before the first module runs and reshards after the last one. If a forward
runs only some of the modules, the unit reshards when the root's forward ends. A unit that runs outside a root's forward
(the head of a chunked loss, called once per chunk) stays gathered until the backward, and each backward reduces it.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from vescale_fsdp.dtensor.half_loaded import half_loaded_in
from vescale_fsdp.errors import ArgumentError, LifecycleError, UnsupportedOpError
from vescale_fsdp.runtime.comm.streams import Event, streams_of
from vescale_fsdp.runtime.comm_context import CommContext
from vescale_fsdp.runtime.consensus import reach_consensus
from vescale_fsdp.runtime.nested_tensors import (
    PostBackward,
    PostBackwardInTransform,
    PreBackward,
    map_tensors,
    tensors_of,
)
from vescale_fsdp.runtime.param_group import ParamGroup
from vescale_fsdp.runtime.schedule import Moment, Schedule
from vescale_fsdp.runtime.takeover import is_own_state, rebind, refuse_full_tensors
from vescale_fsdp.torch_modes import eager, in_functorch, profiled
from vescale_fsdp.torch_private import STATES_HAVE_ONE_GROUP, node_behind, note_sharded, sequence_number_of

_STATE = "_vescale_fsdp_state"
_Call = tuple[tuple[Any, ...], dict[str, Any]]
_logger = logging.getLogger("vescale_fsdp")


class FSDPState:
    """The state of one `fully_shard` call, a unit: its modules, parameter groups, settings and progress in a step.

    The constructor stores the state on the modules and registers their hooks.

    Args:
        modules: the modules of the call: one, or several that share the groups.
        groups: the unit's parameter groups.
        mp_policy: dtypes of inputs and outputs.
        reshard_after_forward: whether to free full parameters after the forward. None: all units but the root do, and
            the root after forwards without gradients.
        device: where the unit computes.
    """

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        groups: list[ParamGroup],
        mp_policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
        device: torch.device,
    ) -> None:
        self.modules = modules
        self.groups = groups
        self.mp_policy = mp_policy
        self.device = device
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.requires_gradient_sync = True
        self.unshard_in_backward = True
        self.forward_prefetch: list[FSDPState] | None = None
        self.backward_prefetch: list[FSDPState] | None = None
        self.max_reductions = 1  # limit of reductions in flight; each has a gradient buffer of its own
        # The parameters in `ignored_params`; and their modules with the names in these, since `to_empty` replaces
        # parameters on meta.
        self.ignored_params: list[weakref.ref[nn.Parameter]] = []
        self.ignored: frozenset[tuple[nn.Module, str]] = frozenset()
        self.comm = CommContext(streams_of(device))
        # Replaced by the root's schedule in `lazy_init`.
        self._use_schedule(Schedule(self.comm, [self]))
        self.fsdp2 = Fsdp2State(self)
        self.set_name(type(modules[0]).__name__)  # replaced by the unit's name in the model in `lazy_init`
        self.has_root = self.is_root = False
        self.agreed = False  # whether ranks have compared their layouts and settings of this unit
        self.post_optim_event: Event | None = None
        self.overlaps = False  # whether, on the CPU, collectives overlap with compute; as of the last forward
        self._outstanding = 0  # number of forward calls that the backward has not passed yet
        self._calls: dict[int, int] = {}  # number of forward calls of each trace, by the trace's number
        self._took_part = False  # whether the unit ran with gradients enabled since its last reduction
        self._was_reduced = False  # whether this backward has reduced the unit
        self._entered: set[nn.Module] = set()  # modules of the unit that ran in this forward
        self._begin_node = (
            -1
        )  # sequence number of the autograd node on the inputs of the last call; -1: no node
        # Whether the state that load_state_dict is loading contains the unit's own tensors, which an earlier, failed
        # load has partly overwritten.
        self._loads_own = False
        # Number of running methods of `register_fsdp_forward_method`. Such a method may call the forward, and read
        # parameters after the call, so the forward must not reshard.
        self._methods_running = 0
        for module in modules:
            module.__dict__[_STATE] = self
            note_sharded(module, self.fsdp2)
            # This pre-hook runs first, so that users' hooks see full parameters and cast inputs.
            module.register_forward_pre_hook(self._pre_forward, prepend=True, with_kwargs=True)
            # This hook runs after the users' hooks registered so far, so that those hooks see full parameters.
            module.register_forward_hook(self._post_forward, prepend=False)
            # state_dict returns the parameters that are on the modules, which must be the sharded ones.
            module.register_state_dict_pre_hook(self._reshard_hook)
            module.register_load_state_dict_pre_hook(self._before_load)
            module.register_load_state_dict_post_hook(self._loaded_hook)

    # -- root -----------------------------------------------------------------------------------------

    def lazy_init(self) -> None:
        """Make this unit the root of all units below it, which then share its schedule. Called at the first forward.

        Raises:
            LifecycleError: if this unit is a list of modules, a unit below has run before, or ranks have sharded
                differently.
        """
        if self.has_root:
            return
        if len(self.modules) > 1:
            raise LifecycleError(
                "The root of a sharded model cannot be a list of modules.",
                expected="fully_shard(model) on one root module after the lists",
                got=f"a list of {len(self.modules)} modules, called without a sharded module around them",
                todo="call fully_shard on the module whose forward is called first",
            )
        below = states_of(*self.modules)
        for state, name in below.items():
            if state is not self and state.has_root:
                raise LifecycleError(
                    "A sharded submodule ran before its root.",
                    expected="the first forward to be the root's",
                    got=f"{name!r} ({type(state.modules[0]).__name__}) ran first and became a root",
                    where=type(self.modules[0]).__name__,
                    todo="call the outermost sharded module first (for another method than forward, see "
                    "vescale_fsdp.register_fsdp_forward_method), or do not shard the outermost module",
                )
            state.set_name(name or type(state.modules[0]).__name__)
        # Compare before the first change: after an error here, the model can be corrected and called again.
        reach_consensus({state: state.label for state in below})
        self.is_root = True
        for state in below:
            state.has_root = True
            state._use_schedule(self.schedule)
            state.join(self.comm)
        self.schedule.units = list(below)
        _log_sharding(type(self.modules[0]).__name__, list(below))

    def renew(self, groups: list[ParamGroup]) -> None:
        """Replace the groups by groups over other ranks, and return to the state before the first forward.

        Ranks that join are in this state too, so all ranks compare their settings again at the next forward.
        """
        before, self.groups = self.schedule, groups
        self._use(CommContext(streams_of(self.device)))
        self._use_schedule(Schedule(self.comm, [self]))
        self.schedule.is_last_backward = before.is_last_backward
        self.schedule.finalizes_by_hand = before.finalizes_by_hand
        self.has_root = self.is_root = self.agreed = False
        self.post_optim_event = None
        self.forget_iteration()
        self.set_name(self.label)

    def _use_schedule(self, schedule: Schedule) -> None:
        self.schedule = schedule
        for group in self.groups:
            group.schedule = schedule

    def set_name(self, label: str) -> None:
        """Set the unit's name, which profiler ranges show."""
        self.label, self.shown = label, f"({label})"
        for group in self.groups:
            group.label = self.shown

    def join(self, comm: CommContext) -> None:
        """Share the streams, limits and spare buffers of ``comm``."""
        self._use(comm)
        self.schedule.comm = comm
        for group in self.groups:
            comm.adopt(group)

    def _use(self, comm: CommContext) -> None:
        self.comm.set_limit(self, None)  # the previous context must not count this unit any more
        self.comm = comm
        comm.set_limit(self, self.max_reductions)

    # -- forward --------------------------------------------------------------------------------------

    @eager
    def _pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        """Gather the unit; returns the module's inputs, moved, cast, and with the post-backward node."""
        if not self.has_root:
            self.lazy_init()
        schedule = self.schedule
        schedule.check_not_failed()
        # In a backward, activation checkpointing recomputes the root: no new step begins.
        if self.is_root and not schedule.in_backward:
            with profiled("FSDP::root_pre_forward", ""):
                schedule.begin_forward()
                self.comm.count_forward()
                if self.post_optim_event is None:
                    self.comm.wait_for_compute()  # gathers must read the shards that the optimizer has written
                else:
                    self.comm.wait_for_event(self.post_optim_event)
                    self.post_optim_event = None
                if self.device.type != "cpu":  # as FSDP2 does: users may pass inputs on the host
                    with profiled("FSDP::inputs_to_device", ""):
                        args, kwargs = map_tensors(
                            # From pinned memory, the copy does not block the host.
                            lambda tensor: tensor.to(self.device, non_blocking=True),
                            (args, kwargs),
                        )
        with profiled("FSDP::pre_forward ", self.shown):
            dtype = self.mp_policy.param_dtype
            if dtype is not None and self.mp_policy.cast_forward_inputs:
                with profiled("FSDP::cast_forward_inputs", ""):
                    args, kwargs = map_tensors(_caster(dtype), (args, kwargs))
            schedule.enter_forward(self)
        self._entered.add(module)
        return self._watch_inputs(args, kwargs)

    def _watch_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        """Return the inputs, with the autograd node between them and the module that runs `_post_backward`."""
        if not torch.is_grad_enabled():
            return args, kwargs
        # A unit without trainable parameters is gathered in the backward as well, so it needs the node to reshard.
        trained = [group.note_trained() for group in self.groups]  # of all groups
        trains = any(trained)
        self._took_part = self._took_part or trains
        # A forward that activation checkpointing recomputes must not add a second node: the first run added one.
        if self.schedule.in_backward and self._outstanding:
            return args, kwargs
        watched = [tensor for tensor in tensors_of((args, kwargs)) if tensor.requires_grad]
        if not watched and not trains:  # the backward does not need this unit
            return args, kwargs
        if not self._outstanding and not self.schedule.in_backward:
            self._calls.clear()
        self._outstanding += 1
        begin = self.schedule.note(functools.partial(self._leave_backward, is_late=True))
        self._calls[begin.trace.number] = self._calls.get(begin.trace.number, 0) + 1
        self._begin_node = -1
        if not watched:  # without an autograd node, the schedule calls `_leave_backward`
            return args, kwargs
        node = PostBackwardInTransform if in_functorch() else PostBackward
        # One node for all inputs: it runs once the gradients of all of them are computed.
        outputs = node.apply(functools.partial(self._post_backward, begin), *watched)
        self._begin_node = sequence_number_of(outputs[0])
        passed = iter(outputs)
        return map_tensors(lambda tensor: next(passed) if tensor.requires_grad else tensor, (args, kwargs))

    @eager
    def _post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Reshard after the unit's last module; returns the output, cast, and with gradient hooks."""
        schedule = self.schedule
        with profiled("FSDP::post_forward ", self.shown):
            if len(self._entered) == len(self.modules):  # a unit of several modules ends with the last one
                self.finish_forward()
            late: Sequence[FSDPState] = ()
            if self.is_root and not schedule.in_backward:  # in a backward, the forward is recomputed
                late = schedule.end_forward()
            output = self._watch_outputs(output, late)
            if self.mp_policy.output_dtype is not None:
                with profiled("FSDP::cast_forward_outputs", ""):
                    output = map_tensors(_caster(self.mp_policy.output_dtype), output)
        return output

    def enter_method(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        """Gather before a method of `register_fsdp_forward_method`; forwards inside the method do not reshard."""
        args, kwargs = self._pre_forward(module, args, kwargs)
        self._methods_running += 1
        return args, kwargs

    def leave_method(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Reshard after a method of `register_fsdp_forward_method`."""
        # Not below 0: a state_dict call inside the method has set the number to 0.
        self._methods_running = max(0, self._methods_running - 1)
        return self._post_forward(module, args, output)

    def begin_forward(self) -> None:
        """Forget modules that ran in an earlier forward of the root, which has ended in an exception."""
        if not self._methods_running:
            self._entered.clear()

    def finish_forward(self) -> bool:
        """Reshard, once all modules of the unit have run or the root's forward ends; return whether any has run."""
        if self._methods_running or not self._entered:
            return False
        self._entered.clear()
        self.schedule.leave_forward(self, reshards=not self.stays_gathered)
        return True

    @property
    def stays_gathered(self) -> bool:
        """Whether full parameters stay gathered from a forward to the next backward."""
        if self.reshard_after_forward is not None:
            return not self.reshard_after_forward
        # The backward begins with the root's parameters, so the root keeps them. A forward without gradients must not:
        # no backward would free them, and they would be stale once an optimizer or a swap of weights has changed the
        # shards (torch 2.13's FSDP2 has the same rule).
        return self.is_root and torch.is_grad_enabled()

    def _watch_outputs(self, output: Any, late: Sequence[FSDPState] = ()) -> Any:
        """Return the output, with hooks that call `_pre_backward` before the unit's backward begins.

        Args:
            output: the module's output.
            late: units of several modules of which this forward ran only some. The root may have read the weights of
                the other modules itself, as a fused cross-entropy does, so these units are gathered with the root.
        """
        if not torch.is_grad_enabled():
            return output
        watched = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
        is_transformed = in_functorch()
        if not watched and not is_transformed:
            return output
        units = (self, *late)
        end = self.schedule.note(lambda: _enter_backward(units))
        before = functools.partial(self._pre_backward, end, units)
        nodes = []
        for tensor in watched:
            # A hook on the node that computed the output, or its base, also runs if the output is changed in place, if
            # the loss is of another view, or of a tensor that the module has kept. A hook on the tensor would not.
            node = None if is_transformed else node_behind(tensor, after=self._begin_node)
            if node is None:
                tensor.register_hook(before)
            elif node not in nodes:
                nodes.append(node)
                node.register_prehook(before)
        if not is_transformed:
            return output

        def watch(tensor: torch.Tensor) -> torch.Tensor:
            # Inside torch.func, an output may need a gradient for an outer transform though its requires_grad is False.
            if tensor.requires_grad or not (tensor.is_floating_point() or tensor.is_complex()):
                return tensor
            return PreBackward.apply(before, tensor)  # type: ignore[no-any-return]

        return map_tensors(watch, output)

    # -- backward -------------------------------------------------------------------------------------

    @eager
    def _pre_backward(self, end: Moment, units: Sequence[FSDPState], *unused: Any) -> None:
        if torch.is_grad_enabled():  # create_graph=True: a later backward will differentiate this one
            for unit in units:
                self.schedule.enter_differentiable(unit)
            return
        self.schedule.pass_by(end)  # first do the work of later units that autograd has skipped on this rank
        for unit in units:
            unit.count_again(end)
        _enter_backward(units)

    def count_again(self, end: Moment) -> None:
        """Count the forward calls of a graph that a second backward enters, once an earlier backward has reduced."""
        if not self._outstanding and not self.schedule.has_begun(self):
            self._outstanding = self._calls.get(end.trace.number, 0)
            trained = [group.note_trained() for group in self.groups]  # of all groups
            self._took_part |= bool(self._outstanding) and any(trained)

    def enter_backward(self) -> None:
        """Gather the unit for its backward, and the next unit."""
        with profiled("FSDP::pre_backward ", self.shown):
            self.schedule.enter_backward(self)

    @eager
    def _post_backward(self, begin: Moment) -> None:
        if (
            torch.is_grad_enabled()
        ):  # create_graph=True: the unit stays gathered for the backward of this backward
            return
        self.schedule.pass_by(begin)
        self._leave_backward()

    def _leave_backward(self, *, is_late: bool = False) -> None:
        """Count one forward call as passed by the backward; after the last one, reshard and reduce the unit.

        Args:
            is_late: whether autograd has skipped the call. If the unit stayed gathered since its forward, code of the
                user's may still read it, so it is resharded when the backward ends.
        """
        self._outstanding = max(0, self._outstanding - 1)  # it is 0 if `forget_iteration` ran in between
        if self._outstanding == 0:
            for group in self.groups:
                group.check_not_stale("backward")
                group.computes = False  # before hooks of users write the sharded parameters
            if not is_late or self.reshard_after_forward is not False:
                self._reshard_in_backward()  # first, so that the full buffer's memory is free for the reduction
            self.schedule.leave_backward(self)

    def end_backward(self, *, is_last: bool) -> None:
        """Reduce gradients that no post-backward node has reduced; called for every unit when a backward has ended.

        Args:
            is_last: whether no other backward of this forward follows. Then units that backwards skipped reduce too.
        """
        if not self.schedule.in_forward:  # a forward may compute gradients, of a loss in chunks
            # After an exception in a forward, these two were not reset.
            self._entered.clear()
            self._methods_running = 0
        for group in self.groups:
            group.collect_grads()
            group.computes = False
        # Gradients that arose without the unit's own forward, or through inputs that need no gradient. Only some ranks
        # may have such gradients, which therefore wait for the last backward, in which all ranks reduce.
        has_late_grads = any(group.grads or group.owes_reduction for group in self.groups)
        # Two reasons to reduce a unit that this forward did not run: earlier backwards have left sums that are not yet
        # reduced over replicas; or unused parameters get gradients of zeros (`set_reduce_scatter_unused_params`), which
        # as in FSDP2 holds only for units that were gathered before.
        must_reduce_unused = not self._was_reduced and any(
            group.owes_replicas or (group.comm.settings.zeros_unused and group.was_gathered)
            for group in self.groups
        )
        if is_last and (has_late_grads or self._took_part or must_reduce_unused):
            self._outstanding = 0
            self._reshard_in_backward()
            self.reduce()
        elif self._reshards_in_backward:
            self.comm.reshard(self.groups)
        for group in self.groups:  # of a unit that stays gathered: users may read and write its shards next
            group.keep_writes()
        self._was_reduced = False

    @property
    def _reshards_in_backward(self) -> bool:
        return self.reshard_after_backward and not self.schedule.is_kept(self)

    def _reshard_in_backward(self) -> None:
        if self._reshards_in_backward:
            with profiled("FSDP::post_backward_reshard ", self.shown):
                self.comm.reshard(self.groups)

    def reduce(self) -> None:
        """Start the reduction of the gradients; without synchronization sum them in the buffer."""
        trained = [group for group in self.groups if group.note_trained() or group.is_due]
        if not trained:  # a frozen unit has nothing to reduce, and need not wait for a slot
            return
        if not self.requires_gradient_sync:  # sum in the gradient buffer, which frees the kept gradients
            for group in self.groups:
                group.write_grads()
            return
        self._took_part, self._was_reduced = False, True
        try:
            # `reduce` would wait as well; here the wait gets its own range in the profile.
            with profiled("FSDP::post_backward_rs_wait ", self.shown):
                self.comm.wait_for_slot()
            with profiled("FSDP::post_backward_reduce ", self.shown):
                for group in trained:
                    self.comm.reduce(group)
        except RuntimeError as error:  # torch raises it if a collective fails
            self.comm.explain(error)
            raise

    def forget_iteration(self) -> None:
        """Reset the counters, after an exception has ended a forward or a backward."""
        self._outstanding = self._methods_running = 0
        self._took_part = self._was_reduced = False
        self._entered.clear()

    # -- state dict -----------------------------------------------------------------------------------

    def _reshard_hook(self, *unused: Any) -> None:
        self._methods_running = 0  # a running method loses its full parameters: forwards may reshard again
        self.comm.reshard(self.groups)
        for group in self.groups:
            if group.kept is not None:
                group.kept.is_doubtful = True
        self.comm.wait_for_host_copies()  # the caller may write shards on the host

    def _before_load(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *unused: Any
    ) -> None:
        self._reshard_hook()
        # If the state to load is the group's own memory, a failed load stays unrepaired: the group keeps its marks.
        self._loads_own = any(
            half_loaded_in(group.shard) and is_own_state(group, state) for group in self.groups
        )
        # With assign=True full tensors replace parameters, and `rebind` adopts or refuses them. Otherwise they are
        # refused here, before torch copies the first one.
        if not metadata.get("assign_to_params_buffers", False):
            refuse_full_tensors(module, state, prefix)

    def _loaded_hook(self, module: nn.Module, keys: Any) -> None:
        self.rebind(is_whole=not keys.missing_keys and not self._loads_own)

    def rebind(self, *, is_whole: bool = False) -> None:
        """Adopt parameters that were replaced on the modules (`takeover.rebind`), in all groups."""
        for group in self.groups:
            rebind(group, is_whole=is_whole)


def _enter_backward(units: Sequence[FSDPState]) -> None:
    for unit in units:
        unit.enter_backward()


class _AbsentError(UnsupportedOpError, AttributeError):
    """An attribute of FSDP2's state that `Fsdp2State` does not have. An AttributeError: ``hasattr`` returns False."""


def _absent(name: str) -> _AbsentError:
    return _AbsentError(
        "FSDPMemTracker and other tools that read FSDP2's parameter groups are not supported.",
        expected="public methods of FSDPModule",
        got=f"{name} of a module's state",
        todo="track memory with torch.distributed._tools.mem_tracker.MemTracker, or the device's own statistics",
    )


class Fsdp2State:
    """Stands in for FSDP2's private state of one unit: the attributes that torch (2.11-2.15) and trainers read.

    No public method of FSDPModule replaces these attributes. Their readers:

        attribute                                               reader
        module._get_fsdp_state()._pre_forward, ._post_forward   torch's register_fsdp_forward_method
        fully_shard.state(module)                               torch.distributed.pipelining at the end of a step: all
                                                                units' ``post_backward``, then
                                                                ``_root_post_backward_final_callback`` (torch 2.15 calls
                                                                finalize_backward, and compares ``_comm_ctx``; torch
                                                                2.11 reads ``_fsdp_param_group``)
        ._lazy_init()                                           trainers that unshard or train a head before the first
                                                                forward
    """

    def __init__(self, unit: FSDPState) -> None:
        self._unit = unit
        # In torch the state, the context of a tree's states, and parameter groups are three objects; here they are one.
        self._state_ctx = self
        self._fsdp_param_groups = [self]

    def _lazy_init(self) -> None:
        self._unit.lazy_init()

    def _pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        return self._unit.enter_method(module, args, kwargs)

    def _post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return self._unit.leave_method(module, args, output)

    @property
    def all_states(self) -> list[Fsdp2State]:
        """The states of this unit and the units below, in the order of modules, which is the same on all ranks."""
        return [unit.fsdp2 for unit in states_of(*self._unit.modules)]

    def post_backward(self, *unused: Any) -> None:
        """Reduce all groups of the unit; a no-op if they are reduced."""
        self._unit.end_backward(is_last=True)

    @property
    def _comm_ctx(self) -> object:
        return self._unit.comm

    @property
    def _fsdp_param_group(self) -> Fsdp2State:
        """This object if torch's pipelines read it (torch 2.11); otherwise an error, so that ``hasattr`` is False."""
        if STATES_HAVE_ONE_GROUP:
            return self
        raise _absent("_fsdp_param_group")

    @property
    def _pre_forward_hook_handle(self) -> NoReturn:
        """Raise: in torch 2.11, `FSDPMemTracker` reads this attribute after the parameter group."""
        raise _absent("_pre_forward_hook_handle")

    def _root_post_backward_final_callback(self) -> None:
        if self._unit.has_root:  # otherwise no forward has run
            self._unit.schedule.finalize_backward()


def state_of(module: nn.Module) -> FSDPState | None:
    """Return the state of a module that `fully_shard` was called on; None for any other module."""
    return module.__dict__.get(_STATE)


def states_of(*modules: nn.Module) -> dict[FSDPState, str]:
    """Return the units of these modules and of all modules below, each with the name of its first module, in order."""
    states: dict[FSDPState, str] = {}
    for root in modules:
        for name, module in root.named_modules():
            state = state_of(module)
            if state is not None:
                states.setdefault(state, name)
    return states


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method of a sharded module gather the parameters before it runs and reshard after, as ``forward`` does.

    A no-op for modules that are not sharded.

    Raises:
        ValueError: if the module has no such method.

    Examples:
        >>> import torch
        >>> from vescale_fsdp import fully_shard
        >>> class Encoder(torch.nn.Linear):
        ...     def encode(self, x):
        ...         return torch.nn.functional.linear(x, self.weight)
        >>> model = fully_shard(Encoder(8, 4))
        >>> register_fsdp_forward_method(model, "encode")
        >>> model.encode(torch.ones(1, 8)).shape
        torch.Size([1, 4])
    """
    state = state_of(module)
    if state is None:
        return
    method = getattr(module, method_name, None)
    if method is None:
        raise ArgumentError(
            "The module has no such method.",
            expected=f"a method of {type(module).__name__}",
            got=repr(method_name),
            where="register_fsdp_forward_method(method_name=..)",
        )

    @functools.wraps(method)
    def around(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = state.enter_method(module, args, kwargs)
        running = state._methods_running
        try:
            output = method(*args, **kwargs)
        except BaseException:  # also KeyboardInterrupt: otherwise the unit would never reshard
            state._methods_running = running - 1
            raise
        return state.leave_method(module, args, output)

    setattr(module, method_name, around)


def _caster(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that casts floating-point tensors, and returns other tensors unchanged."""
    return lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor


def _log_sharding(model: str, units: Sequence[FSDPState]) -> None:
    """Log how a model was sharded: one line per unit and one for the model.

    Rank 0 logs at INFO, other ranks log at DEBUG. No handler is installed: the program configures logging.
    """
    level = logging.INFO if dist.get_rank() == 0 else logging.DEBUG
    if _logger.isEnabledFor(level):
        for unit in units:
            _logger.log(level, "unit %s: %s", unit.label, _described(unit.groups))
        every = [group for unit in units for group in unit.groups]
        _logger.log(level, "model %s: %d units, %s", model, len(units), _described(every))


def _described(groups: Sequence[ParamGroup]) -> str:
    """Return a text with the total sizes of these groups; under tensor parallelism, of this rank's part."""
    sizes = [(group.layout, group.shard.dtype.itemsize) for group in groups]
    payload = sum(layout.payload_numel * itemsize for layout, itemsize in sizes)
    padding = sum((layout.numel - layout.payload_numel) * itemsize for layout, itemsize in sizes)
    ranks: dict[str, None] = {}  # texts such as "8 ranks in 2 replicas"; a dict, to keep each once, in order
    for group in groups:
        replicas = group.data.mesh.size() // group.data.num_shards
        ranks[f"{group.data.num_shards} ranks" + (f" in {replicas} replicas" if replicas > 1 else "")] = None
    return (
        f"{sum(len(group.params) for group in groups)} parameters of "
        f"{sum(layout.payload_numel for layout, _ in sizes):,} elements over {' and '.join(ranks) or 'no ranks'}, "
        f"padding {padding / payload if payload else 0:.2%}, "
        f"{sum(layout.copied_numel * itemsize for layout, itemsize in sizes):,} bytes scattered, "
        f"{sum(layout.shard_numel * itemsize for layout, itemsize in sizes):,} bytes per rank"
    )
