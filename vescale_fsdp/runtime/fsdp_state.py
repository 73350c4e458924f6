"""FSDPState: the hooks that turn module calls into steps of the schedule.

    pre-forward     gather the unit's parameters, cast its inputs
    post-forward    reshard (if asked), watch the outputs for their gradients, cast them
    pre-backward    gather again, and the unit that comes next
    post-backward   reshard, reduce the gradients (an autograd node on the inputs runs it)
    end of backward reduce what no node reached (a root whose inputs need no gradient), wait for it all

A unit reduces once the backward is past all its calls, so several forwards before one backward cost one reduction.
Every unit that took part in a forward with gradients is gathered and reduced, with zeros where a rank left parameters
unused, in the same order on all ranks (`vescale_fsdp.runtime.schedule`): no rank waits for another that never comes.

A unit made of a list of modules gathers before the first of them runs and reshards after the last, or, where a
forward runs only some, when the root's forward ends. What runs outside a root's forward (the head of a chunked
loss, called once per chunk) stays gathered until the backward, and each backward adds its reduction.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol, TypeVar

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
from vescale_fsdp.runtime.takeover import gives_own, rebind, refuse_full_tensors
from vescale_fsdp.torch_modes import in_functorch, profiled
from vescale_fsdp.torch_private import is_view, note_sharded

_STATE = "_vescale_fsdp_state"
_Call = tuple[tuple[Any, ...], dict[str, Any]]
_VIEW_WARNING = (
    "The sharded module {} returned a view. An in-place operation on it (x += y) would drop the hook that gathers "
    "parameters for its backward, in silence. Use x = x + y, or clone() the output."
)
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def _eager(function: FunctionT) -> FunctionT:
    """Keep a hook out of torch.compile's graphs: it is a graph break, compile per block inside the unit."""
    return torch.compiler.disable(function)  # type: ignore[no-any-return]


class FSDPState:
    """What one `fully_shard` call keeps: its modules, its groups, and its place in the schedule.

    Args:
        modules: the modules the call was given (one, or a list that shares its groups).
        groups: the unit's parameter groups.
        mp_policy: dtypes of inputs and outputs.
        reshard_after_forward: None means True unless it is the root, and for the root after forwards that no
            backward follows.
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
        self.comm = CommContext(streams_of(device))
        self.schedule: Schedule | None = None
        self.fsdp2 = Fsdp2State(self)
        self.name_it(type(modules[0]).__name__)  # its name in the model, once the root knows it
        self.is_root = False
        self.agreed = False  # whether it was compared with the other ranks'
        self.is_last_backward = True  # as said before the first forward; the root's schedule takes both over
        self.finalizes_by_hand = False
        self.post_optim_event: Event | None = None
        self._outstanding = 0  # calls of its forward that the backward is not past
        self._took_part = False  # in a forward with gradients since the last reduction
        self._was_reduced = False  # in this backward
        self._entered: set[nn.Module] = set()  # of a list of modules: those that ran in this forward
        self._loads_own = False  # in this load_state_dict, something that is half loaded
        self._methods_running = 0  # registered ones, which may call the forward and read parameters behind it
        for module in modules:
            module.register_forward_pre_hook(self._pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._post_forward, prepend=False)
            module.register_state_dict_pre_hook(self._reshard_hook)
            module.register_load_state_dict_pre_hook(self._before_load)
            module.register_load_state_dict_post_hook(self._loaded_hook)

    # -- root -----------------------------------------------------------------------------------------

    def lazy_init(self) -> None:
        """At the first forward: this unit is the root, and all units below it join its schedule."""
        if self.schedule is not None:
            return
        if len(self.modules) > 1:
            raise LifecycleError(
                "The root of a sharded model cannot be a list of modules.",
                expected="fully_shard(model) on one root module after the lists",
                got=f"{len(self.modules)} modules that run without a sharded parent",
                todo="call fully_shard on the module whose forward is called first",
            )
        below: list[FSDPState] = []
        for name, module in self.modules[0].named_modules():
            state = state_of(module)
            if state is None or state in below:
                continue
            if state is not self and state.schedule is not None:
                raise LifecycleError(
                    "A sharded submodule ran before its root.",
                    expected="the first forward to be the root's",
                    got=f"{name!r} ({type(module).__name__}) ran on its own and became a root",
                    where=type(self.modules[0]).__name__,
                    todo="call the outermost module first: another method of it than forward becomes a call of it by "
                    "vescale_fsdp.register_fsdp_forward_method(model, name). Or do not shard it",
                )
            below.append(state)
            state.name_it(name or type(module).__name__)
        reach_consensus([(state.label, state) for state in below])  # before anything of the root is begun
        self.is_root = True
        self.schedule = Schedule(self.comm)
        self.schedule.is_last_backward = self.is_last_backward
        self.schedule.finalizes_by_hand = self.finalizes_by_hand
        for state in below:
            state.schedule = self.schedule
            state.join(self.comm)
            self.schedule.units.append(state)
        log_sharding(type(self.modules[0]).__name__, [(state.label, state.groups) for state in below])

    def renew(self, groups: list[ParamGroup]) -> None:
        """Go on with other groups, over other ranks, as if nothing had run yet: ranks that join start from there."""
        if self.schedule is not None:
            self.is_last_backward = self.schedule.is_last_backward
            self.finalizes_by_hand = self.schedule.finalizes_by_hand
        self._use(CommContext(streams_of(self.device)))
        self.groups, self.schedule = groups, None
        self.is_root = self.agreed = False
        self.post_optim_event = None
        self.forget_iteration()
        self.name_it(self.label)

    def compare_below(self) -> None:
        """Before a first use that is no forward: compare this unit and those below it with the other ranks'."""
        reach_consensus([(name, state) for state, name in self._named_below().items()])

    @property
    def prefetches(self) -> tuple[list[FSDPState] | None, list[FSDPState] | None]:
        """The user's lists of what to gather ahead, in forwards and in backwards."""
        return self.forward_prefetch, self.backward_prefetch

    @property
    def modes(self) -> str:
        """What ranks compare of how backwards end, and of how many reductions may be in flight."""
        return (
            f"set_is_last_backward {self.is_last_backward}, "
            f"set_manual_backward_finalization {self.finalizes_by_hand}, "
            f"set_reduce_scatter_max_input_buffers {self.comm.limit_of(self)}"
        )

    def units_below(self) -> list[FSDPState]:
        """This unit and those of the modules below its own."""
        return list(self._named_below())

    def _named_below(self) -> dict[FSDPState, str]:
        below: dict[FSDPState, str] = {}
        for module in self.modules:
            for name, each in module.named_modules():
                state = state_of(each)
                if state is not None:
                    below.setdefault(state, name)
        return below

    def name_it(self, label: str) -> None:
        """Set the unit's name as profiler ranges hold it."""
        self.label, self.shown = label, f"({label})"
        for group in self.groups:
            group.label = self.shown

    def join(self, comm: CommContext) -> None:
        """Use these streams."""
        self._use(comm)
        for group in self.groups:
            comm.adopt(group)

    def _use(self, comm: CommContext) -> None:
        limit = self.comm.drop_limit(self)
        self.comm = comm
        self.limit_reductions(limit)

    def limit_reductions(self, limit: int) -> None:
        """Allow this many reductions in flight; another unit under the root may allow more."""
        self.comm.set_limit(self, limit)

    # -- forward --------------------------------------------------------------------------------------

    @_eager
    def _pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.schedule is None:
            self.lazy_init()
        schedule = self._schedule()
        if self.is_root and not schedule.in_backward:
            with profiled("FSDP::root_pre_forward", ""):
                self._begin_root_forward()
                args, kwargs = self._move_inputs(args, kwargs)
        with profiled("FSDP::pre_forward ", self.shown):
            args, kwargs = self._cast_inputs(args, kwargs)
            schedule.enter_forward(self)
        self._entered.add(module)
        return self._watch_inputs(args, kwargs)

    def _begin_root_forward(self) -> None:
        self._schedule().begin_forward()
        if self.post_optim_event is not None:
            self.comm.wait_for_event(self.post_optim_event)
            self.post_optim_event = None
        else:
            self.comm.wait_for_compute()

    def _schedule(self) -> Schedule:
        assert self.schedule is not None
        return self.schedule

    def _move_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.device.type == "cpu":
            return args, kwargs

        with profiled("FSDP::inputs_to_device", ""):
            return map_tensors(lambda tensor: tensor.to(self.device, non_blocking=True), (args, kwargs))

    def _cast_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        dtype = self.mp_policy.param_dtype
        if dtype is None or not self.mp_policy.cast_forward_inputs:
            return args, kwargs
        with profiled("FSDP::cast_forward_inputs", ""):
            return map_tensors(_caster(dtype), (args, kwargs))

    def _watch_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Put the post-backward node between the inputs and the module."""
        if not torch.is_grad_enabled():
            return args, kwargs
        # A unit without trainable parameters is gathered in the backward as well, so it needs the node to reshard.
        trains, schedule = self._trains, self._schedule()
        self._took_part = self._took_part or trains
        # A recomputed forward whose first run left its node in the graph must not add a second one.
        if schedule.in_backward and self._outstanding:
            return args, kwargs
        watched = [tensor for tensor in tensors_of((args, kwargs)) if tensor.requires_grad]
        if not watched and not trains:
            return args, kwargs
        self._outstanding += 1
        begin = schedule.note(self._leave_backward)
        if not watched:  # no node: the backward is past it once it comes by something earlier, or ends
            return args, kwargs
        node = PostBackwardInTransform if in_functorch() else PostBackward
        passed = iter(node.apply(functools.partial(self._post_backward, begin), *watched))
        return map_tensors(lambda tensor: next(passed) if tensor.requires_grad else tensor, (args, kwargs))

    @_eager
    def _post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        schedule = self._schedule()
        with profiled("FSDP::post_forward ", self.shown):
            if len(self._entered) == len(self.modules):
                self.finish_forward()
            if self.is_root and not schedule.in_backward:
                schedule.end_forward()
            output = self._watch_outputs(output)
            if self.mp_policy.output_dtype is not None:
                with profiled("FSDP::cast_forward_outputs", ""):
                    output = map_tensors(_caster(self.mp_policy.output_dtype), output)
        return output

    def run_method(
        self, module: nn.Module, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a method of a module of the unit as its forward is called; forwards inside do not reshard the unit."""
        args, kwargs = self.begin_method(module, args, kwargs)
        running = self._methods_running
        try:
            output = method(*args, **kwargs)
        except BaseException:
            self._methods_running = running - 1
            raise
        return self.end_method(module, args, output)

    def begin_method(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The half of `run_method` before the method."""
        args, kwargs = self._pre_forward(module, args, kwargs)
        self._methods_running += 1
        return args, kwargs

    def end_method(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """The half of `run_method` behind it."""
        self._methods_running = max(0, self._methods_running - 1)
        return self._post_forward(module, args, output)

    def finish_forward(self) -> None:
        """All modules of the unit that this forward runs have run (nothing if none has)."""
        if self._methods_running or not self._entered:
            return
        self._entered.clear()
        self._schedule().leave_forward(self, reshards=not self.stays_gathered)

    @property
    def stays_gathered(self) -> bool:
        """Whether full parameters last from a forward to its backward."""
        if self.reshard_after_forward is not None:
            return not self.reshard_after_forward
        # The root's are kept for the backward that begins with them. Without one they would be there still when the
        # optimizer, or a swap of weights, has changed the shards: out of date, in silence (as torch 2.13's FSDP2).
        return self.is_root and torch.is_grad_enabled()

    def _watch_outputs(self, output: Any) -> Any:
        if not torch.is_grad_enabled():
            return output
        watched = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
        is_transformed = in_functorch()
        if not watched and not is_transformed:
            return output
        before = functools.partial(self._pre_backward, self._schedule().note(self._enter_backward))
        for tensor in watched:
            if is_view(tensor):
                warnings.warn(_VIEW_WARNING.format(type(self.modules[0]).__name__), stacklevel=3)
            tensor.register_hook(before)
        if not is_transformed:
            return output
        return map_tensors(functools.partial(_watch_in_transform, before), output)

    # -- backward -------------------------------------------------------------------------------------

    @_eager
    def _pre_backward(self, end: Moment, grad: torch.Tensor) -> torch.Tensor:
        self._schedule().pass_by(end)
        self._enter_backward()
        return grad

    def _enter_backward(self) -> None:
        with profiled("FSDP::pre_backward ", self.shown):
            self._schedule().enter_backward(self)

    @_eager
    def _post_backward(self, begin: Moment) -> None:
        self._schedule().pass_by(begin)
        self._leave_backward()

    def _leave_backward(self) -> None:
        """The backward is past one call of the unit; after the last one, reshard and reduce."""
        self._outstanding = max(0, self._outstanding - 1)
        if self._outstanding == 0:
            self._reshard_in_backward()
            self._schedule().leave_backward(self)
            self._reduce()

    def end_backward(self, *, is_last: bool) -> None:
        """The backward is over: reduce what no post-backward node reached.

        Args:
            is_last: no backward of this forward follows, so that units it did not come by are reduced too.
        """
        self._entered.clear()
        self._methods_running = 0  # of one that ended in an exception
        for group in self.groups:
            group.collect_grads()
        # Without the unit's own forward, or by way of inputs that need no gradient. Only some ranks may have them, so
        # they wait for the last backward, in which all ranks reduce.
        late = any(group.grads for group in self.groups)
        if is_last and (late or self._took_part or self._wants_zeros or self._is_owed):
            self._outstanding = 0
            self._reshard_in_backward()
            self._reduce()
        elif self.reshard_after_backward:
            self.comm.reshard(self.groups)
        self._was_reduced = False

    def finalize_backward(self) -> None:
        """Reduce all units under this root, and wait."""
        if self.schedule is not None:
            self.schedule.finalize_backward()

    def _reshard_in_backward(self) -> None:
        if self.reshard_after_backward:
            with profiled("FSDP::post_backward_reshard ", self.shown):
                self.comm.reshard(self.groups)

    @property
    def _is_owed(self) -> bool:
        """Whether it rests in a backward that is to reduce over replicas what earlier ones have left of it."""
        return not self._was_reduced and any(group.owes_replicas for group in self.groups)

    @property
    def _wants_zeros(self) -> bool:
        """Whether a backward that did not reduce it gives it gradients of zeros, as FSDP2's does: once it was used."""
        return not self._was_reduced and any(
            group.comm.settings.zeros_unused and group.was_gathered for group in self.groups
        )

    @property
    def _trains(self) -> bool:
        """Whether any of its parameters is trainable."""
        return any(group.trainable for group in self.groups)

    def _reduce(self) -> None:
        trained = [group for group in self.groups if group.trainable]
        if not trained:  # not even a wait for other units' reductions
            return
        if not self.requires_gradient_sync:
            for group in self.groups:
                group.write_grads()
            return
        self._took_part, self._was_reduced = False, True
        try:
            with profiled("FSDP::post_backward_rs_wait ", self.shown):
                self.comm.make_way()
            with profiled("FSDP::post_backward_reduce ", self.shown):
                for group in trained:
                    self.comm.reduce(group)
        except RuntimeError as error:
            self.comm.explain(error)
            raise

    def forget_iteration(self) -> None:
        """After an exception in a forward or backward: nothing of it is to come."""
        self._outstanding = self._methods_running = 0
        self._took_part = self._was_reduced = False
        self._entered.clear()

    # -- state dict -----------------------------------------------------------------------------------

    def _reshard_hook(self, *unused: Any) -> None:
        self._methods_running = 0
        self.comm.reshard(self.groups)
        self.comm.wait_for_host_copies()  # the caller may write shards on the host

    def _before_load(
        self,
        module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        *unused: Any,
    ) -> None:
        self._reshard_hook()
        # A good load gives what is half loaded new values, and not its own once more.
        self._loads_own = any(
            half_loaded_in(group.shard) and gives_own(group, state) for group in self.groups
        )
        if not metadata.get("assign_to_params_buffers", False):
            refuse_full_tensors(module, state, prefix)

    def _loaded_hook(self, module: nn.Module, keys: Any) -> None:
        self.rebind(is_whole=not keys.missing_keys and not self._loads_own)

    def rebind(self, *, is_whole: bool = False) -> None:
        """See `rebind`."""
        for group in self.groups:
            rebind(group, is_whole=is_whole)


def _watch_in_transform(before: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """Inside ``torch.func`` an output may not say that it needs a gradient outside."""
    if tensor.requires_grad or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    return PreBackward.apply(before, tensor)  # type: ignore[no-any-return]


def _caster(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that casts floating-point tensors and passes others."""
    return lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor


def state_of(module: nn.Module) -> FSDPState | None:
    """The state of a module that `fully_shard` was called on, or None."""
    return module.__dict__.get(_STATE)


def attach_state(state: FSDPState) -> None:
    """Remember the state on its modules."""
    for module in state.modules:
        module.__dict__[_STATE] = state
        note_sharded(module, state.fsdp2)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Gather before and reshard after another method of a sharded module, as around ``forward``.

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
        )

    @functools.wraps(method)
    def around(*args: Any, **kwargs: Any) -> Any:
        return state.run_method(module, method, args, kwargs)

    setattr(module, method_name, around)


_logger = logging.getLogger("vescale_fsdp")


def log_sharding(model: str, units: Sequence[tuple[str, Sequence[ParamGroup]]]) -> None:
    """Log how a model was sharded.

    Args:
        model: what to call it.
        units: its units' names and groups.
    """
    level = logging.INFO if dist.get_rank() == 0 else logging.DEBUG
    if not _logger.isEnabledFor(level):
        return
    for name, groups in units:
        _logger.log(level, "unit %s: %s", name, _described(groups))
    every = [group for _, groups in units for group in groups]
    _logger.log(level, "model %s: %d units, %s", model, len(units), _described(every))


def _described(groups: Sequence[ParamGroup]) -> str:
    """Sizes of these groups together. Of what tensor parallelism has cut, this rank's part counts."""
    sizes = [(group.layout, group.shard.dtype.itemsize) for group in groups]
    payload = sum(layout.payload_numel * itemsize for layout, itemsize in sizes)
    padding = sum((layout.numel - layout.payload_numel) * itemsize for layout, itemsize in sizes)
    scattered = sum(layout.copied_numel * itemsize for layout, itemsize in sizes)
    per_rank = sum(layout.shard_numel * itemsize for layout, itemsize in sizes)
    return (
        f"{sum(len(group.params) for group in groups)} parameters of "
        f"{sum(layout.payload_numel for layout, _ in sizes):,} elements over {_ranks(groups)}, "
        f"padding {padding / payload if payload else 0:.2%}, {scattered:,} bytes scattered, "
        f"{per_rank:,} bytes per rank"
    )


def _ranks(groups: Sequence[ParamGroup]) -> str:
    """How many ranks hold these groups; several numbers where their meshes differ."""
    found = []
    for group in groups:
        replicas = group.data.mesh.size() // group.data.num_shards
        found.append(f"{group.data.num_shards} ranks" + (f" in {replicas} replicas" if replicas > 1 else ""))
    return " and ".join(dict.fromkeys(found)) or "no ranks"


class _AbsentError(UnsupportedOpError, AttributeError):
    """An attribute of FSDP2's that ours does not have."""


class Answering(Protocol):
    """What a unit does for it (`vescale_fsdp.runtime.fsdp_state.FSDPState` is the only one)."""

    fsdp2: Fsdp2State
    comm: Any

    def begin_method(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Gather before a method of a module of the unit."""

    def end_method(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Reshard after it."""

    def lazy_init(self) -> None:
        """Become the root, unless there is one."""

    def units_below(self) -> list[Any]:
        """This unit and those of the modules below its own."""

    def end_backward(self, *, is_last: bool) -> None:
        """Reduce what the backward left unreduced."""

    def finalize_backward(self) -> None:
        """Reduce all units under this root, and wait."""


class _ParamGroups:
    """All groups of a unit as torch's pipelines see them."""

    def __init__(self, unit: Answering) -> None:
        self._unit = unit

    def post_backward(self, *unused: Any) -> None:
        """Reduce; nothing if that was done."""
        self._unit.end_backward(is_last=True)


class _StateContext:
    """The states of a tree, root first."""

    def __init__(self, unit: Answering) -> None:
        self._unit = unit

    @property
    def all_states(self) -> list[Fsdp2State]:
        """Of the units in the order of their modules, the same on all ranks."""
        return [unit.fsdp2 for unit in self._unit.units_below()]


class Fsdp2State:
    """A unit, as torch names its parts (torch 2.11-2.13).

    Args:
        unit: the one that answers.
    """

    def __init__(self, unit: Answering) -> None:
        self._unit = unit
        self._state_ctx = _StateContext(unit)
        self._fsdp_param_groups = [_ParamGroups(unit)]

    def _lazy_init(self) -> None:
        self._unit.lazy_init()

    def _pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self._unit.begin_method(module, args, kwargs)

    def _post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return self._unit.end_method(module, args, output)

    @property
    def _comm_ctx(self) -> object:
        return self._unit.comm

    @property
    def _fsdp_param_group(self) -> NoReturn:
        """Absent to ``hasattr`` and to ``getattr`` with a default; the error names the alternative."""
        raise _AbsentError(
            "FSDPMemTracker and other tools that read FSDP2's parameter groups are not supported.",
            expected="public methods of FSDPModule",
            got="_fsdp_param_group of a module's state",
            todo="track memory by torch.distributed._tools.mem_tracker.MemTracker, or the device's own statistics",
        )

    def _root_post_backward_final_callback(self) -> None:
        self._unit.finalize_backward()


def refuse_unknown(ours: type, torchs: type) -> None:
    """Refuse by name what torch's class can and ours cannot: inherited, it would work on a state that is not there."""
    for name, member in vars(torchs).items():
        if callable(member) and not name.startswith("__") and name not in vars(ours):
            setattr(ours, name, _refusing(name))


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(self: object, *args: object, **kwargs: object) -> NoReturn:
        raise unsupported(name)

    refuse.__name__ = name
    refuse.__doc__ = "Of a newer torch; not supported."
    return refuse


def unsupported(method: str) -> UnsupportedOpError:
    """The error of a method of torch's class that ours has not."""
    return UnsupportedOpError(
        f"{method} is not supported.", expected="it not to be called", got=method, todo="leave it out"
    )
