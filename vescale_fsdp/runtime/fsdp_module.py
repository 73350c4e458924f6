"""FSDPModule: the methods that `fully_shard` adds to a module. Names and arguments are those of torch's FSDPModule."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

from vescale_fsdp.dtensor.meeting import meet, one_meeting
from vescale_fsdp.errors import ArgumentError, LifecycleError, MisuseError, UnsupportedOpError, callers_level
from vescale_fsdp.layout.group_layout import ModelLayout
from vescale_fsdp.runtime.comm.group_comm import AllGather, ReduceScatter, separate_reductions
from vescale_fsdp.runtime.comm.streams import Stream
from vescale_fsdp.runtime.comm_context import GradientReductionHandle, UnshardHandle
from vescale_fsdp.runtime.consensus import reach_consensus, require_uncompared
from vescale_fsdp.runtime.fsdp_state import FSDPState, state_of, states_of
from vescale_fsdp.runtime.param_group import ParamGroup
from vescale_fsdp.torch_modes import is_fake
from vescale_fsdp.torch_private import SUMS_HALVES_AS_REDUCED

if TYPE_CHECKING:
    # For type checkers, nn.Module is a base, so that both `sharded(x)` and `sharded.unshard()` are accepted: every
    # instance is a module, because `fully_shard` makes a subclass of this class and of the module's own class. At run
    # time this base would initialize nn.Module twice.
    class _Base(TorchFSDPModule, nn.Module): ...
else:
    _Base = TorchFSDPModule


class UnpicklableModuleError(MisuseError, pickle.PicklingError):
    """A sharded module cannot be pickled. Also a ``PicklingError``, for callers that catch only that class."""


def _no_memory_of_the_library(method: str) -> UnsupportedOpError:
    return UnsupportedOpError(
        "Buffers of collectives cannot be in the communication library's own memory, which no GPU has tried.",
        expected="memory of the caching allocator",
        got=method,
        todo=f"leave the call of {method} out; collectives copy through the library's own buffers, as without it. "
        "For memory of your own, pass set_custom_all_gather an object with a memory_pool",
    )


class FSDPModule(_Base):
    """The class of a sharded module: a subclass of torch's ``FSDPModule`` that replaces all methods of torch's class.

    A method that only a newer torch has raises UnsupportedOpError.

    Examples:
        >>> import torch
        >>> from vescale_fsdp import fully_shard
        >>> model = fully_shard(torch.nn.Linear(8, 4))
        >>> isinstance(model, FSDPModule), [name for name, layout in model.model_layout().groups]
        (True, ['<root>'])
    """

    # torch reads this index of the original class in the MRO: [sharded, FSDPModule, torch's FSDPModule, original, ..].
    _orig_cls_mro_index: int = 3

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return an unsharded module of the original class: nn.Sequential and others call their class when sliced."""
        original = cls.__mro__[cls._orig_cls_mro_index]
        return original(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise MisuseError(
            "A sharded module cannot be deep-copied: a copy would share its buffers and hooks.",
            expected="deepcopy before fully_shard",
            got=f"deepcopy of {type(self).__name__}",
            todo="copy the module first, or build a second one and load this one's state dict",
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnpicklableModuleError(
            "A sharded module cannot be pickled or copied: each rank has only pieces of it, and its class exists only "
            "in this process.",
            expected="a checkpoint of its state",
            got=f"torch.save, pickle or copy.copy of {type(self).__name__}",
            todo="vescale_fsdp.checkpoint.save(path, {'model': model}). For one file of full tensors, call "
            "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) on all ranks, and torch.save "
            "the result on rank 0",
        )

    def _state(self) -> FSDPState:
        state = state_of(self)
        assert state is not None
        return state

    def _get_fsdp_state(self) -> Any:
        return self._state().fsdp2  # torch's register_fsdp_forward_method calls this name

    def _states(self, recurse: bool = True) -> Iterator[FSDPState]:
        return iter(states_of(self) if recurse else (self._state(),))

    def model_layout(self) -> ModelLayout:
        """Return the layouts of all groups under this module, each with a name.

        The name is the unit's path in this module, with ``#0``, ``#1``, .. appended if the unit has several groups.
        """
        named: list[tuple[str, Any]] = []
        for state, name in states_of(self).items():
            for index, group in enumerate(state.groups):
                suffix = f"#{index}" if len(state.groups) > 1 else ""
                named.append((f"{name or '<root>'}{suffix}", group.layout))
        return ModelLayout.of(named)

    def reshard(self) -> None:
        """Free the full parameters of this module's unit, and put the sharded parameters back on its modules."""
        state = self._state()
        state.comm.reshard(state.groups)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the parameters of this module's unit (not of units below), and set them on its modules.

        Args:
            async_op: return an `UnshardHandle` at once; the parameters are set when its ``wait`` is called.

        Raises:
            LifecycleError: without ``async_op``, if not all ranks call it.
        """
        state = self._state()
        with one_meeting(f"unshard of {state.label}"):
            # Pipelines unshard asynchronously, in every step: there, the order of collectives alone is compared.
            to_gather = [
                group for group in state.groups if group.state.is_sharded and not is_fake(group.shard)
            ]
            if not async_op:
                meet([group.comm.shard_group for group in to_gather], "gather")
            # Ranks are compared before the first gather: if they differ, it would hang or mix up values.
            if not state.agreed:
                reach_consensus(states_of(*state.modules))
        state.comm.wait_for_compute()  # the optimizer may have written the shards just now
        state.comm.agree_on_kept([group for group in state.groups if group.state.is_sharded])
        state.schedule.gather(state)
        handle = UnshardHandle(state.comm, state.groups)
        if async_op:
            return handle
        handle.wait()
        return None

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether backwards reduce gradients from now on. False: each rank sums its own gradients (``no_sync``).

        As in FSDP2, this also calls `set_requires_all_reduce` with the same value.
        """
        for state in self._states(recurse):
            state.requires_gradient_sync = requires_gradient_sync
            for group in state.groups:
                group.comm.change(requires_all_reduce=requires_gradient_sync)
                # Once set it stays set: from the first False on, micro-batches are summed in the reduce dtype, as in
                # FSDP2.
                group.sums_grads |= not requires_gradient_sync
                # Pipelines split a backward in two halves, and call this method before each half. FSDP2 of torch 2.15
                # sums the halves in the reduce dtype, so gradients of the first half must move to that buffer now.
                if SUMS_HALVES_AS_REDUCED:
                    group.collect_grads()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which backwards sum gradients locally; the next backward outside reduces the sums."""
        states = list(self._states())
        # Each unit's own value is restored, because units may have different ones.
        before = [(state, state.requires_gradient_sync) for state in states]
        # `set_requires_gradient_sync` changes this setting too, so it is restored as well.
        reduced = [(group, group.comm.settings.requires_all_reduce) for group in self._groups(True)]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for state, value in before:
                state.requires_gradient_sync = value
            for group, value in reduced:
                group.comm.change(requires_all_reduce=value)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward is the last one of this forward; True by default.

        Before a backward that is not the last one, set False: the forward's order of units is then kept for later
        backwards. Only the last backward reduces units that no backward has reached, and gradients that arise without
        a unit's own forward. The setting applies to all units under the root, whichever module the method is called
        on.
        """
        self._state().schedule.is_last_backward = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Set whether the work at the end of each backward is left to `finalize_backward` (new in torch 2.15).

        Call it on the root.

        Raises:
            LifecycleError: below the root, or between a backward and its finalization.
        """
        state = self._state()
        if state.has_root:  # before the first forward, no unit knows which unit is the root
            self._check_root("set_manual_backward_finalization")
        state.schedule.set_finalizes_by_hand(enabled)

    # In torch 2.15 the method has overloads.
    def finalize_backward(  # type: ignore[override]
        self, *, async_op: bool = False
    ) -> GradientReductionHandle | None:
        """Reduce all gradients that backwards have left unreduced. After this, sharded gradients may be read.

        Call it on the root; before the first forward it is a no-op. If several backwards precede one call, switch
        gradient synchronization off (`set_requires_gradient_sync`) for the backwards, and on again before the call.

        Args:
            async_op: return a handle at once; sharded gradients may be read after the handle's ``wait``.

        Raises:
            LifecycleError: below the root, or without `set_manual_backward_finalization`.
        """
        state = self._state()
        if not state.has_root:
            return GradientReductionHandle(state.comm, ()) if async_op else None
        self._check_root("finalize_backward")
        if not state.schedule.finalizes_by_hand:
            raise LifecycleError(
                "finalize_backward requires manual finalization.",
                expected="set_manual_backward_finalization(True) before the forward",
                got="finalize_backward",
                where=type(self).__name__,
            )
        handle = state.schedule.start_finalizing(is_last=True)
        if async_op:
            return handle
        handle.wait()
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients as Module.zero_grad does: reduced ones, and those that wait for a reduction (`no_sync`)."""
        super().zero_grad(set_to_none)  # reaches only the parameters that are on the modules now
        for group in self._groups(True):
            for param in group.params:
                grad = param.sharded.grad
                if set_to_none:
                    param.sharded.grad = None
                elif grad is not None:
                    grad.zero_()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether full parameters are freed after the forward. The value also applies to the root.

        Raises:
            ValueError: for any value but True and False.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ArgumentError(
                "set_reshard_after_forward takes True or False, not a number of ranks.",
                expected="True or False",
                got=repr(reshard_after_forward),
                where="set_reshard_after_forward(reshard_after_forward=..)",
            )
        for state in self._states(recurse):
            state.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether full parameters are freed after the backward."""
        for state in self._states(recurse):
            state.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: list[TorchFSDPModule]) -> None:
        """Set the units to gather when this unit's forward begins, instead of the next unit of the last forward."""
        self._state().forward_prefetch = _states_of(modules)

    def set_modules_to_backward_prefetch(self, modules: list[TorchFSDPModule]) -> None:
        """Set the units to gather when this unit's backward begins, instead of the previous unit of the forward."""
        self._state().backward_prefetch = _states_of(modules)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether this unit's parameters are gathered for its backward, which an embedding does not need."""
        self._state().unshard_in_backward = unshard_in_backward

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the next forward's gathers wait for this event instead of the compute stream. Call it on the root."""
        self._state().post_optim_event = event

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this unit's summed gradients by ``factor`` instead of by the number of ranks."""
        _change(self._groups(False), divide_factor=factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Call `set_gradient_divide_factor`; this is its former name in torch."""
        warnings.warn(
            "Use set_gradient_divide_factor instead", DeprecationWarning, stacklevel=callers_level()
        )
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Set whether this unit reduces with SUM and divides afterwards, instead of with AVG."""
        _change(self._groups(False), force_sum=enable)

    def set_narrow_reduction(self, enable: bool, *, recurse: bool = True) -> None:
        """Set whether gradients are stored and sent in the compute dtype (bf16), and summed in the reduce dtype (fp32).

        True, the default on CPUs, halves bytes and memory: each rank sends every other rank its slice, and sums the
        slices it receives in the reduce dtype. False, the default on accelerators, is FSDP2's way: gradients are
        converted to the reduce dtype before they are sent, and one reduce-scatter of the backend sums them. On
        accelerators, True sends pieces of slices in many small messages; nothing has been measured there.

        Call it before the model's first forward or unshard, with the same value on all ranks.

        Raises:
            LifecycleError: after the first use.
        """
        require_uncompared(self._states(recurse), "set_narrow_reduction")
        _change(self._groups(recurse), narrow=enable)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Set how many reductions may be in flight, each with its own gradient buffer. May be called at any time.

        The largest value of all units under a root applies to all of them.

        Raises:
            TypeError: unless an int is given.
            ValueError: if it is below 1.
        """
        # True is an int, but not a number of reductions.
        is_int = isinstance(max_input_buffers, int) and not isinstance(max_input_buffers, bool)
        if not is_int or max_input_buffers < 1:
            raise ArgumentError(
                "max_input_buffers must be a positive number of reductions.",
                expected="at least 1" if is_int else "an int",
                got=repr(max_input_buffers),
                where="set_reduce_scatter_max_input_buffers(max_input_buffers=..)",
            )
        for state in self._states(recurse):
            state.max_reductions = max_input_buffers
            state.comm.set_limit(state, max_input_buffers)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backwards reduce over the axis that replicates. False: each replica keeps its own sums.

        For HSDP, and for a hybrid cut (``shard_optimizer_over``), where the replicas are the nodes: call it with False
        before all micro-batches of a step but the last, whose backward then sends the sums over the network once.
        """
        _change(self._groups(recurse), requires_all_reduce=requires_all_reduce)

    def set_all_reduce_hook(  # type: ignore[override]
        self, hook: Callable[[torch.Tensor], None], *, stream: Stream | None = None
    ) -> None:
        """Register a hook that is called as ``hook(shard)`` with every reduced shard of this module's unit.

        Args:
            hook: changes the shard (1-D, reduce dtype) in place. With replicas, it is called after their all-reduce.
            stream: the stream of the hook; None: the stream of reductions. Later work on the shard waits for the hook.

        Raises:
            ValueError: with a stream and replicas, or for groups over several meshes.
        """
        groups, state = self._groups_of_one_mesh("set_all_reduce_hook"), self._state()
        if stream is not None and any(group.comm.replicate_group is not None for group in groups):
            raise ArgumentError(
                "set_all_reduce_hook accepts no stream if replicas are all-reduced.",
                expected="stream=None, or a mesh without a replicating axis",
                got=stream,
                where="set_all_reduce_hook(stream=..)",
            )

        def run(shard: torch.Tensor) -> None:
            # `state.comm` is read at each call, because the first forward replaces it by the root's.
            state.comm.run_on(stream, lambda: hook(shard))

        for group in groups:
            group.comm.change(all_reduce_hook=run)

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Use this object for the gathers of this module, and for their buffers.

        Raises:
            ValueError: for groups over several meshes.
        """
        for group in self._groups_of_one_mesh("set_custom_all_gather"):
            group.comm.change(custom_all_gather=comm)
            group.forget_full()  # the present buffer was not allocated by the user's object; the next one is

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Use this object for the reductions of this module, and for their buffers.

        Raises:
            ValueError: for groups over several meshes.
        """
        for group in self._groups_of_one_mesh("set_custom_reduce_scatter"):
            group.comm.change(custom_reduce_scatter=comm)
            group.grads.spare = {}  # drop buffers that the user's object did not allocate

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Set whether reductions use a communicator of their own, so that they do not queue behind gathers.

        Collective: all ranks call it, in the same order.
        """
        comms = [group.comm for group in self._groups(recurse)]
        if enable:
            meet([comm.shard_group for comm in comms], "set_separate_reduce_scatter_group")
            separate_reductions(comms)
            return
        for comm in comms:
            comm.reduce_group = None
            comm.change(separate_reductions=False)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Set whether parameters that no rank has used get gradients of zeros. False: their ``.grad`` is not changed.

        All parameters are reduced in both cases, so that all ranks issue the same collectives. Parameters that only
        some ranks have used get the reduced gradients of these ranks.
        """
        _change(self._groups(recurse), zeros_unused=reduce_scatter_unused_params)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Set whether the memory of full parameters stays allocated between uses (new in torch 2.15).

        CUDA graphs need this, because they record addresses.
        """
        _change(self._groups(recurse), keeps_full=keep)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Accept False, which changes nothing: buffers are in memory of the caching allocator.

        Raises:
            UnsupportedOpError: for True.
        """
        if enable:
            raise _no_memory_of_the_library("set_allocate_memory_from_process_group_for_comm")

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Raise UnsupportedOpError: buffers are in memory of the caching allocator."""
        raise _no_memory_of_the_library("set_symm_mem_for_comm")

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Do nothing: gathers are always asynchronous. torch's FSDPModule has this method, so trainers may call it."""

    def _groups(self, recurse: bool) -> Iterator[ParamGroup]:
        for state in self._states(recurse):
            yield from state.groups

    def _groups_of_one_mesh(self, method: str) -> list[ParamGroup]:
        """Return the unit's groups, or raise an error about ``method`` if the groups are over several meshes."""
        groups = self._state().groups
        if method != "set_all_reduce_hook" and any(group.kept is not None for group in groups):
            raise UnsupportedOpError(
                f"{method} cannot be combined with shard_optimizer_over, whose gathers and reductions take two steps.",
                expected="collectives of this package",
                got=f"{method} of a module with kept parts",
                where=type(self).__name__,
                todo=f"leave the call of {method} out, or shard_optimizer_over",
            )
        meshes = list(dict.fromkeys(group.data.mesh for group in groups))
        if len(meshes) > 1:
            raise ArgumentError(
                f"{method} requires that all parameters of the module share one mesh.",
                expected="one mesh",
                got=meshes,
                where=type(self).__name__,
                todo="call fully_shard separately on the submodule whose parameters have another mesh",
            )
        return groups

    def reset_iter_state(self) -> None:
        """Drop all gathers and reductions in flight, after an exception in forward or backward. Call it on the root.

        Call it on all ranks. It drops gradients that are not reduced, also those of earlier backwards under
        ``no_sync``. Gradients of units that the failed backward had passed are in ``.grad``. After an exception in a
        backward, the next forward raises `LifecycleError` unless this was called.

        Raises:
            LifecycleError: if this is not the root.
        """
        state = self._state()
        if not state.has_root:  # no forward has begun, so nothing is in flight
            return
        self._check_root("reset_iter_state")
        for unit in self._states():
            unit.forget_iteration()
        state.schedule.reset()

    def _check_root(self, method: str) -> None:
        if not self._state().is_root:
            raise LifecycleError(
                f"{method} must be called on the root module.",
                expected="the module whose forward is called first",
                got=type(self).__name__,
                todo="call it on the outermost sharded module",
            )

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Apply Module.to, .cuda, to_empty etc. to the sharded parameters.

        Full parameters are freed first. Afterwards, each unit adopts the parameters that torch has replaced.
        """
        for state in self._states():
            state._reshard_hook()
        # super(TorchFSDPModule, ..) skips `_apply` of torch's FSDPModule, which reads FSDP2's state.
        result = super(TorchFSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]
        for state in self._states():
            state.rebind()
        return result


def _change(groups: Iterable[ParamGroup], **settings: Any) -> None:
    """Change fields of `GroupSettings` in all these groups."""
    for group in groups:
        group.comm.change(**settings)


def _states_of(modules: Sequence[Any]) -> list[FSDPState]:
    """Return the states of these modules; raise if one is not sharded."""
    states = [state for module in modules if (state := state_of(module)) is not None]
    if len(states) < len(modules):
        got = ", ".join(type(module).__name__ for module in modules if state_of(module) is None)
        raise ArgumentError(
            "All modules must be sharded modules.",
            expected="modules created by fully_shard",
            got=got,
            where="modules=..",
        )
    return states


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """Let several roots (pipeline stages) share streams and the limit of reductions in flight.

    Raises:
        ValueError: if a module is not sharded.

    Examples:
        >>> import torch
        >>> from vescale_fsdp import fully_shard
        >>> stages = [fully_shard(torch.nn.Linear(8, 8)) for _ in range(2)]
        >>> share_comm_ctx(stages)
    """
    states = _states_of(modules)
    for module in modules[1:]:  # all use the first module's context
        for state in module._states():
            state.join(states[0].comm)


def refuse_unknown(ours: type, torchs: type) -> None:
    """Add to ``ours`` a raising method for each method that only ``torchs`` has, which would read FSDP2's state."""

    def refusing(name: str) -> Callable[..., NoReturn]:
        def refuse(self: object, *args: object, **kwargs: object) -> NoReturn:
            raise UnsupportedOpError(
                f"{name} is not supported.",
                expected="one of the methods that vescale_fsdp's FSDPModule defines",
                got=name,
                todo="do not call it",
            )

        refuse.__name__ = name
        refuse.__doc__ = "A method of a newer torch, which is not supported."
        return refuse

    # Special methods, which Python itself calls, stay inherited.
    for name, member in vars(torchs).items():
        if callable(member) and not name.startswith("__") and name not in vars(ours):
            setattr(ours, name, refusing(name))


refuse_unknown(FSDPModule, TorchFSDPModule)
