"""FSDPModule and its state: the hooks that turn module calls into steps of the schedule.

    pre-forward     gather the unit's parameters, cast its inputs
    post-forward    reshard (if asked), watch the outputs for their gradients
    pre-backward    gather again, and the unit that comes next
    post-backward   reshard, reduce the gradients (an autograd node on the inputs runs it)
    end of backward reduce what no node reached (a root whose inputs need no gradient), wait for it all

A unit reduces once its last outstanding post-backward has run, so several forwards before one backward cost
one reduction. Every unit that took part in a forward with gradients is reduced, with zeros where a rank left
parameters unused: no rank waits for another that never comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from vescale_fsdp.errors import LifecycleError, explain
from vescale_fsdp.layout import ModelLayout
from vescale_fsdp.param_group import ParamGroup
from vescale_fsdp.schedule import Schedule
from vescale_fsdp.torch_private import pytree

__all__ = ["FSDPModule", "FSDPState", "state_of"]

_STATE = "_vescale_fsdp_state"
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
        reshard_after_forward: None decides at the first forward: True unless it is the root.
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
        self.schedule: Schedule | None = None
        self.is_root = False
        self.post_optim_event: torch.Event | None = None
        self._outstanding = 0  # post-backward nodes of this forward that have not run
        self._took_part = False  # in a forward with gradients since the last reduction
        self._entered: set[nn.Module] = set()  # of a list of modules: those that ran in this forward
        for module in modules:
            module.register_forward_pre_hook(self._pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._post_forward, prepend=False)
            module.register_state_dict_pre_hook(self._reshard_hook)
            module.register_load_state_dict_pre_hook(self._reshard_hook)
            module.register_load_state_dict_post_hook(self._rebind_hook)

    # -- root -----------------------------------------------------------------------------------------

    def lazy_init(self) -> None:
        """At the first forward: this unit is the root, and all units below it join its schedule."""
        if self.schedule is not None:
            return
        if len(self.modules) > 1:
            raise LifecycleError(
                explain(
                    "The root of a sharded model cannot be a list of modules.",
                    expected="fully_shard(model) on one root module after the lists",
                    got=f"{len(self.modules)} modules that run without a sharded parent",
                    todo="call fully_shard on the module whose forward is called first",
                )
            )
        self.is_root = True
        self.schedule = Schedule(self.device)
        below: list[FSDPState] = []
        for name, module in self.modules[0].named_modules():
            state = state_of(module)
            if state is None or state in below:
                continue
            if state is not self and state.schedule is not None:
                raise LifecycleError(
                    explain(
                        "A sharded submodule ran before its root.",
                        expected="the first forward to be the root's",
                        got=f"{name!r} ({type(module).__name__}) ran on its own and became a root",
                        where=type(self.modules[0]).__name__,
                        todo="call the outermost module first, or do not shard it",
                    )
                )
            below.append(state)
        for state in below:
            state.schedule = self.schedule
            self.schedule.units.append(state)
            if state.reshard_after_forward is None:
                state.reshard_after_forward = state is not self

    # -- forward --------------------------------------------------------------------------------------

    @_eager
    def _pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.schedule is None:
            self.lazy_init()
        schedule = self._schedule()
        if self.is_root and not schedule.in_backward:
            self._begin_root_forward()
        with torch.profiler.record_function(f"FSDP::pre_forward ({type(module).__name__})"):
            args, kwargs = self._cast_inputs(args, kwargs)
            schedule.enter_forward(self)
        self._entered.add(module)
        return self._watch_inputs(args, kwargs)

    def _begin_root_forward(self) -> None:
        schedule = self._schedule()
        schedule.begin_forward()
        if self.post_optim_event is not None:
            schedule.wait_for_event(self.post_optim_event)
            self.post_optim_event = None
        else:
            schedule.wait_for_compute()

    def _schedule(self) -> Schedule:
        assert self.schedule is not None
        return self.schedule

    def _cast_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        dtype = self.mp_policy.param_dtype if self.mp_policy.cast_forward_inputs else None
        move = self.is_root and self.device.type != "cpu"
        if dtype is None and not move:
            return args, kwargs

        def convert(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if move and value.device != self.device:
                value = value.to(self.device, non_blocking=True)
            return value.to(dtype) if dtype is not None and value.is_floating_point() else value

        return cast(tuple[tuple[Any, ...], dict[str, Any]], pytree.tree_map(convert, (args, kwargs)))

    def _watch_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Put the post-backward node between the inputs and the module."""
        if not torch.is_grad_enabled() or not any(group.trainable for group in self.groups):
            return args, kwargs
        self._took_part = True
        # A recomputed forward whose first run left its node in the graph must not add a second one.
        if self._schedule().in_backward and self._outstanding:
            return args, kwargs
        leaves, tree = pytree.tree_flatten((args, kwargs))
        watched = [
            i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        if not watched:
            return args, kwargs
        self._outstanding += 1
        passed = _PostBackward.apply(self, *(leaves[i] for i in watched))
        for i, tensor in zip(watched, passed, strict=True):
            leaves[i] = tensor
        return cast(tuple[tuple[Any, ...], dict[str, Any]], pytree.tree_unflatten(leaves, tree))

    @_eager
    def _post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        schedule = self._schedule()
        with torch.profiler.record_function(f"FSDP::post_forward ({type(module).__name__})"):
            finished = len(self._entered) == len(self.modules)
            if finished:
                self._entered.clear()
            if finished and self.reshard_after_forward and not schedule.in_backward:
                schedule.reshard(self)
            output = self._watch_outputs(output)
            dtype = self.mp_policy.output_dtype
            if dtype is not None:
                output = pytree.tree_map(
                    lambda x: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x,
                    output,
                )
        return output

    def _watch_outputs(self, output: Any) -> Any:
        if torch.is_grad_enabled():
            for leaf in pytree.tree_leaves(output):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(self._pre_backward)
        return output

    # -- backward -------------------------------------------------------------------------------------

    @_eager
    def _pre_backward(self, grad: torch.Tensor) -> torch.Tensor:
        with torch.profiler.record_function(f"FSDP::pre_backward ({self._name})"):
            self._schedule().enter_backward(self)
        return grad

    @property
    def _name(self) -> str:
        return type(self.modules[0]).__name__

    @_eager
    def post_backward(self) -> None:
        """One use of the unit has gone through its backward; after the last one, reshard and reduce."""
        self._outstanding = max(0, self._outstanding - 1)
        if self._outstanding == 0:
            self._finish_backward()

    def end_backward(self) -> None:
        """The backward is over: reduce what no post-backward node reached."""
        self._outstanding = 0
        late = any(group.grads is not None for group in self.groups)  # used outside the module's own forward
        if self._took_part or late:
            self._finish_backward()
        elif self.reshard_after_backward:
            self._schedule().reshard(self)

    def _finish_backward(self) -> None:
        schedule = self._schedule()
        if self.reshard_after_backward:
            schedule.reshard(self)
        if not self.requires_gradient_sync:
            return
        self._took_part = False
        with torch.profiler.record_function(f"FSDP::post_backward_reduce ({self._name})"):
            for group in self.groups:
                if group.trainable:
                    schedule.reduce(group)

    # -- state dict -----------------------------------------------------------------------------------

    def _reshard_hook(self, *unused: Any) -> None:
        for group in self.groups:
            group.reshard()

    def _rebind_hook(self, *unused: Any) -> None:
        for group in self.groups:
            group.rebind()


class _PostBackward(torch.autograd.Function):
    """Identity on the inputs whose backward runs after everything inside the module."""

    @staticmethod
    def forward(ctx: Any, state: FSDPState, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.state = state
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        ctx.state.post_backward()
        return None, *grads


def state_of(module: nn.Module) -> FSDPState | None:
    """The state of a module that `fully_shard` was called on, or None."""
    return module.__dict__.get(_STATE)


def attach_state(module: nn.Module, state: FSDPState) -> None:
    """Remember the state on the module (once)."""
    module.__dict__[_STATE] = state


class FSDPModule:
    """What `fully_shard` adds to a module's class. Method for method torch's ``FSDPModule``."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Building the sharded class builds the original one (indexing a container does that)."""
        original = cls.__mro__[2]
        return original(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise LifecycleError(
            explain(
                "A sharded module cannot be deep-copied: its buffers and hooks belong to one module.",
                expected="deepcopy before fully_shard",
                got=f"deepcopy of {type(self).__name__}",
                todo="copy the module first, or build a second one and load this one's state dict",
            )
        )

    def _state(self) -> FSDPState:
        state = state_of(cast(nn.Module, self))
        assert state is not None
        return state

    def _states(self, recurse: bool = True) -> Iterator[FSDPState]:
        if not recurse:
            yield self._state()
            return
        seen: set[int] = set()
        for module in cast(nn.Module, self).modules():
            state = state_of(module)
            if state is not None and id(state) not in seen:
                seen.add(id(state))
                yield state

    def model_layout(self) -> ModelLayout:
        """The layouts of all groups under this module, named by module path and dtype."""
        named: list[tuple[str, Any]] = []
        seen: set[int] = set()
        for name, module in cast(nn.Module, self).named_modules():
            state = state_of(module)
            if state is None or id(state) in seen:
                continue
            seen.add(id(state))
            for index, group in enumerate(state.groups):
                suffix = f"#{index}" if len(state.groups) > 1 else ""
                named.append((f"{name or '<root>'}{suffix}", group.layout))
        return ModelLayout.of(named)

    def reshard(self) -> None:
        """Free this module's full parameters; its parameters are sharded again."""
        state = self._state()
        if state.schedule is None:
            state._reshard_hook()
        else:
            state.schedule.reshard(state)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's parameters.

        Args:
            async_op: return a handle to wait on instead of waiting.
        """
        state = self._state()
        schedule = state.schedule or Schedule(state.device)
        schedule.wait_for_compute()
        schedule.gather(state)
        handle = UnshardHandle(state)
        if async_op:
            return handle
        handle.wait()
        return None

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether the next backwards reduce gradients; without, they add up unreduced (``no_sync``)."""
        for state in self._states(recurse):
            state.requires_gradient_sync = requires_gradient_sync

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside add up gradients without communication; the next one outside reduces them all."""
        states = list(self._states())
        before = [state.requires_gradient_sync for state in states]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for state, value in zip(states, before, strict=True):
                state.requires_gradient_sync = value

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward is the last one of this forward's (False keeps the forward order)."""
        schedule = self._state().schedule
        if schedule is not None:
            schedule.is_last_backward = is_last_backward

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether full parameters are freed after the forward (overrides the root's default too).

        Raises:
            ValueError: unless a bool is given.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                explain(
                    "reshard_after_forward can be switched on or off, not resized.",
                    expected="True or False",
                    got=repr(reshard_after_forward),
                )
            )
        for state in self._states(recurse):
            state.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether full parameters are freed after the backward."""
        for state in self._states(recurse):
            state.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Units to gather when this one starts its forward, instead of the next one in last order."""
        self._state().forward_prefetch = _states_of(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Units to gather when this one starts its backward, instead of the previous in forward order."""
        self._state().backward_prefetch = _states_of(modules)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether this unit's backward needs its parameters (an embedding's does not)."""
        self._state().unshard_in_backward = unshard_in_backward

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Gathers of the next forward wait for this event only (on the root, used once)."""
        self._state().post_optim_event = event

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this unit's summed gradients by ``factor`` instead of by the number of ranks."""
        for group in self._state().groups:
            group.divide_factor = factor

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Reduce this unit with SUM and divide afterwards."""
        for group in self._state().groups:
            group.force_sum = enable

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many reductions may be in flight (their gradient buffers stay alive that long).

        Raises:
            TypeError: unless an int is given.
            ValueError: if it is below 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers: expected an int, got {max_input_buffers!r}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers: expected at least 1, got {max_input_buffers}")
        state = self._state()
        if state.schedule is None:
            state.lazy_init()
        schedule = state._schedule()
        schedule.max_reductions = max(schedule.max_reductions, max_input_buffers)

    def reset_iter_state(self) -> None:
        """After an exception in forward or backward: drop what is in flight. On the root.

        Raises:
            LifecycleError: if this is not the root.
        """
        state = self._state()
        if state.schedule is None:
            return
        if not state.is_root:
            raise LifecycleError(
                explain(
                    "reset_iter_state belongs to the root.",
                    expected="the module whose forward is called first",
                    got=type(self).__name__,
                    todo="call it on the outermost sharded module",
                )
            )
        for unit in self._states():
            unit._outstanding = 0
            unit._took_part = False
            unit._entered.clear()
        state.schedule.reset()

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Module.to, .cuda, to_empty: shard first, then take over what became of the parameters."""
        for state in self._states():
            state._reshard_hook()
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        for state in self._states():
            state._rebind_hook()
        return result


class UnshardHandle:
    """Waits for an unshard that was started with ``async_op=True``."""

    def __init__(self, state: FSDPState) -> None:
        self._state = state

    def wait(self) -> None:
        """After this the module holds its full parameters."""
        for group in self._state.groups:
            group.wait_unsharded()


def _states_of(modules: list[FSDPModule]) -> list[FSDPState]:
    states = [state_of(cast(nn.Module, module)) for module in modules]
    for module, state in zip(modules, states, strict=True):
        if state is None:
            raise ValueError(
                explain(
                    "Only sharded modules can be prefetched.",
                    expected="modules that fully_shard was called on",
                    got=type(module).__name__,
                )
            )
    return cast(list[FSDPState], states)
