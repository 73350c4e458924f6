"""FSDPModule: the methods that `fully_shard` adds to a module's class, with the names of torch's ``FSDPModule``."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

from vescale_fsdp.errors import ArgumentError, LifecycleError, MisuseError, UnsupportedOpError, allows_untried
from vescale_fsdp.layout.group_layout import ModelLayout
from vescale_fsdp.runtime.comm.group_comm import (
    AllGather,
    MemoryKind,
    ProcessGroupMemory,
    ReduceScatter,
    SymmetricMemory,
    separate_reductions,
)
from vescale_fsdp.runtime.comm.streams import Stream
from vescale_fsdp.runtime.comm_context import GradientReductionHandle, UnshardHandle
from vescale_fsdp.runtime.consensus import reach_consensus, require_uncompared
from vescale_fsdp.runtime.fsdp_state import FSDPState, state_of, states_of
from vescale_fsdp.runtime.param_group import ParamGroup, use_memory
from vescale_fsdp.torch_private import SUMS_HALVES_AS_REDUCED, refuse_takers

if TYPE_CHECKING:
    # `fully_shard` makes a subclass of this class and of the module's own class, so every instance is a module. Type
    # checkers then accept both `sharded(x)` and `sharded.unshard()`. A real base would initialize nn.Module twice.
    class _Base(TorchFSDPModule, nn.Module): ...
else:
    _Base = TorchFSDPModule


MEMORY_POOLS = "memory_pools"  # the feature's name in VESCALE_FSDP_UNTRIED


class UnpicklableModuleError(MisuseError, pickle.PicklingError):
    """A sharded module cannot be pickled. Also a ``PicklingError``, for code that catches only that class."""


class FSDPModule(_Base):
    """The class of a sharded module: a subclass of torch's ``FSDPModule`` with all its methods.

    A method that exists only in a newer torch raises an error with the method's name.

    Examples:
        >>> import torch
        >>> from vescale_fsdp import fully_shard
        >>> model = fully_shard(torch.nn.Linear(8, 4))
        >>> isinstance(model, FSDPModule), [name for name, layout in model.model_layout().groups]
        (True, ['<root>'])
    """

    # torch reads the index of the module's own class in the MRO: [sharded, FSDPModule, torch's FSDPModule, own, ..].
    _orig_cls_mro_index: int = 3

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Create an unsharded module of the original class. Slicing a container, such as nn.Sequential, calls this."""
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
        return self._state().fsdp2

    def _states(self, recurse: bool = True) -> Iterator[FSDPState]:
        return iter(states_of(self) if recurse else (self._state(),))

    def model_layout(self) -> ModelLayout:
        """The layouts of all groups under this module, named by module path and, if a unit has several, by number."""
        named: list[tuple[str, Any]] = []
        for state, name in states_of(self).items():
            for index, group in enumerate(state.groups):
                suffix = f"#{index}" if len(state.groups) > 1 else ""
                named.append((f"{name or '<root>'}{suffix}", group.layout))
        return ModelLayout.of(named)

    def reshard(self) -> None:
        """Free this module's full parameters and set its sharded parameters on the modules."""
        state = self._state()
        state.comm.reshard(state.groups)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's parameters.

        Args:
            async_op: return a handle to wait on instead of waiting.
        """
        state = self._state()
        # Before the first gather, which would hang or mix up values if ranks differ.
        if not state.agreed:
            reach_consensus(states_of(*state.modules))
        state.comm.wait_for_compute()
        state.schedule.gather(state)
        handle = UnshardHandle(state.comm, state.groups)
        if async_op:
            return handle
        handle.wait()
        return None

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether the next backwards reduce gradients; if not, they sum them without communication (``no_sync``).

        As in FSDP2 this also sets `set_requires_all_reduce`.
        """
        for state in self._states(recurse):
            state.requires_gradient_sync = requires_gradient_sync
            for group in state.groups:
                group.comm.change(requires_all_reduce=requires_gradient_sync)
                # From now on, micro-batches are summed in the reduction's dtype, as in FSDP2.
                group.sums_grads |= not requires_gradient_sync
                # Such torch sums the halves of a backward in the reduce dtype; pipelines call this before each half.
                if SUMS_HALVES_AS_REDUCED:
                    group.collect_grads()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside the context sum gradients without communication; the next one outside reduces the sums."""
        states = list(self._states())
        # Units may have different values.
        before = [(state, state.requires_gradient_sync) for state in states]
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
        """Set whether the next backward is the last one of this forward.

        False keeps the forward's order for the backwards that follow. The last backward also reduces units that no
        backward has reached, and gradients that arise without a unit's own forward. The setting applies to the whole
        tree, whichever module the method is called on.
        """
        self._state().schedule.is_last_backward = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Set whether backwards leave their last reductions to `finalize_backward` (new in torch 2.15).

        Call it on the root.

        Raises:
            LifecycleError: below the root, or between a backward and its finalization.
        """
        state = self._state()
        if state.has_root:  # before the first forward, the root is not known
            self._check_root("set_manual_backward_finalization")
        state.schedule.set_finalizes_by_hand(enabled)

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce all gradients that backwards have left unreduced; sharded gradients may be read after this.

        Call it on the root; before the first forward it is a no-op. If several backwards precede this call, switch
        gradient synchronization off for them, and on again before the call.

        Args:
            async_op: return a handle to wait on instead of waiting.

        Raises:
            LifecycleError: below the root, or without `set_manual_backward_finalization`.
        """
        state = self._state()
        if not state.has_root:
            return GradientReductionHandle(state.comm, ()) if async_op else None
        self._check_root("finalize_backward")
        if not state.schedule.finalizes_by_hand:
            raise LifecycleError(
                "Without manual finalization, backwards finalize themselves.",
                expected="set_manual_backward_finalization(True) before the forward",
                got="finalize_backward",
                where=type(self).__name__,
            )
        handle = state.schedule.start_finalizing(is_last=True)
        if async_op:
            return handle
        handle.wait()
        return None

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Any:
        """Iterate as in torch. Raises if another data parallelism of torch calls this to shard the module again."""
        if not recurse:  # the wrappers' calls pass recurse=False
            refuse_takers(f"a {type(self).__name__} inside the module")
        return super().named_parameters(prefix, recurse, remove_duplicate)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients as Module.zero_grad; also clears sharded gradients while the modules have full parameters."""
        super().zero_grad(set_to_none)
        for group in self._groups(True):
            for param in group.params:
                grad = param.sharded.grad
                if set_to_none:
                    param.sharded.grad = None
                elif grad is not None:
                    grad.zero_()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether full parameters are freed after the forward. Also overrides the root's default.

        Raises:
            ValueError: unless a bool is given.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ArgumentError(
                "reshard_after_forward can be switched on or off, but not set to another number of ranks.",
                expected="True or False",
                got=repr(reshard_after_forward),
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
        """Set whether this unit's backward needs its parameters (an embedding's does not)."""
        self._state().unshard_in_backward = unshard_in_backward

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the gathers of the next forward wait for this event, not for the compute stream. Call it on the root."""
        self._state().post_optim_event = event

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this unit's summed gradients by ``factor`` instead of by the number of ranks."""
        _change(self._groups(False), divide_factor=factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Call `set_gradient_divide_factor`; this is its former name in torch."""
        warnings.warn("Use set_gradient_divide_factor instead", DeprecationWarning, stacklevel=2)
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Set whether this unit reduces with SUM and divides afterwards, instead of with AVG."""
        _change(self._groups(False), force_sum=enable)

    def set_narrow_reduction(self, enable: bool, *, recurse: bool = True) -> None:
        """Set whether gradients are stored and sent in the dtype they were computed in, and summed in a wider one.

        True, the default, halves bytes and memory: each rank sends every other rank its slice and sums the slices it
        receives in the wider dtype. False: gradients are widened before they are sent, as in FSDP2, and NCCL's
        reduce-scatter sums them; on very many ranks that may be faster.

        Call it before the model's first use, with the same value on all ranks.

        Raises:
            LifecycleError: after the first use.
        """
        require_uncompared(self._states(recurse), "set_narrow_reduction")
        _change(self._groups(recurse), narrow=enable)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Set how many reductions may be in flight, each with its own gradient buffer.

        The largest value of all units under a root applies to the whole tree. It may change at any time.

        Raises:
            TypeError: unless an int is given.
            ValueError: if it is below 1.
        """
        # True is an int, but not a number of reductions.
        is_int = isinstance(max_input_buffers, int) and not isinstance(max_input_buffers, bool)
        if not is_int or max_input_buffers < 1:
            raise ArgumentError(
                "max_input_buffers is a number of reductions.",
                expected="at least 1" if is_int else "an int",
                got=repr(max_input_buffers),
            )
        for state in self._states(recurse):
            state.max_reductions = max_input_buffers
            state.comm.set_limit(state, max_input_buffers)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether the next backwards all-reduce over replicas (HSDP); if not, each replica keeps its own sums."""
        _change(self._groups(recurse), requires_all_reduce=requires_all_reduce)

    def set_all_reduce_hook(  # type: ignore[override]
        self, hook: Callable[[torch.Tensor], None], *, stream: Stream | None = None
    ) -> None:
        """Call ``hook(shard)`` on every reduced shard of this module (1-D, reduce dtype).

        Args:
            hook: changes the shard in place. With replicas, it is called after their all-reduce.
            stream: the stream of the hook; None: the stream of reductions. Later work on the shard waits for the hook.

        Raises:
            ValueError: with a stream and replicas, or for groups over several meshes.
        """
        groups, state = self._groups_of_one_mesh("set_all_reduce_hook"), self._state()
        if stream is not None and any(group.comm.replicate_group is not None for group in groups):
            raise ArgumentError(
                "An all-reduce hook has no stream of its own where replicas are all-reduced.",
                expected="stream=None, or a mesh without a replicating axis",
                got=stream,
                where=type(self).__name__,
            )

        def run(shard: torch.Tensor) -> None:
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
            group.forget_full()  # the next buffer comes from the user's object

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Use this object for the reductions of this module, and for their buffers.

        Raises:
            ValueError: for groups over several meshes.
        """
        for group in self._groups_of_one_mesh("set_custom_reduce_scatter"):
            group.comm.change(custom_reduce_scatter=comm)
            group.grads.spare = {}  # drop buffers that the user's object did not allocate

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Set whether reductions use a communicator of their own. Collective: all ranks call it, in the same order."""
        comms = [group.comm for group in self._groups(recurse)]
        if enable:
            separate_reductions(comms)
            return
        for comm in comms:
            comm.reduce_group = None
            comm.change(separate_reductions=False)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Set whether parameters that no rank has used get gradients of zeros; if not, their gradient stays None.

        All parameters are reduced in both cases, so no rank waits for another one. Parameters that only some ranks have
        used get the sum of those ranks' gradients.
        """
        _change(self._groups(recurse), zeros_unused=reduce_scatter_unused_params)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Set whether the memory of full parameters stays allocated between uses (new in torch 2.15).

        CUDA graphs need this, because they record addresses.
        """
        _change(self._groups(recurse), keeps_full=keep)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Set whether gathered parameters and gradient buffers use memory from the process group's allocator.

        Raises:
            UnsupportedOpError: without ``VESCALE_FSDP_UNTRIED=memory_pools``: this has never run on a GPU.
            ValueError: with custom collectives, or for groups over several meshes.
        """
        self._use_pool(
            "set_allocate_memory_from_process_group_for_comm", ProcessGroupMemory if enable else None
        )

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Put gathered parameters and gradient buffers in symmetric memory. A collective.

        Raises:
            UnsupportedOpError: without ``VESCALE_FSDP_UNTRIED=memory_pools``: this has never run on a GPU.
            ValueError: with custom collectives, for groups over several meshes, or for another backend than NCCL.
        """
        if backend != "NCCL":
            raise ArgumentError(
                "Symmetric memory is supported with NCCL only.",
                expected="backend='NCCL'",
                got=repr(backend),
                where="set_symm_mem_for_comm",
            )
        self._use_pool("set_symm_mem_for_comm", SymmetricMemory)

    def _use_pool(self, method: str, kind: MemoryKind | None) -> None:
        """Put the buffers of this module into memory of this kind; None: into the caching allocator's."""
        groups = self._groups_of_one_mesh(method)
        if kind is not None and not allows_untried(MEMORY_POOLS):
            raise UnsupportedOpError(
                f"{method} has never run on a GPU.",
                expected=f"VESCALE_FSDP_UNTRIED={MEMORY_POOLS} in the environment of all ranks, to try it",
                got=method,
                todo="do not call it, or try it and compare losses with a run without it",
            )
        settings = [group.comm.settings for group in groups]
        if any(each.custom_all_gather or each.custom_reduce_scatter for each in settings):
            raise ArgumentError(
                "Custom collectives allocate their own buffers, so a memory pool would have no effect.",
                expected="a module without custom collectives",
                got="set_custom_all_gather or set_custom_reduce_scatter",
                where=method,
                todo="use either the custom collectives or the memory pool",
            )
        use_memory(groups, kind)

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accepted for compatibility: gathers are always asynchronous."""

    def _groups(self, recurse: bool) -> Iterator[ParamGroup]:
        for state in self._states(recurse):
            yield from state.groups

    def _groups_of_one_mesh(self, method: str) -> list[ParamGroup]:
        groups = self._state().groups
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

        Raises:
            LifecycleError: if this is not the root.
        """
        state = self._state()
        if not state.has_root:
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
        """Apply Module.to, .cuda, to_empty etc. to the sharded parameters: reshard first, adopt new ones afterwards."""
        for state in self._states():
            state._reshard_hook()
        # Skip the method of torch's FSDPModule, which reads FSDP2's state.
        result = super(TorchFSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]
        for state in self._states():
            state.rebind()
        return result


def _change(groups: Iterable[ParamGroup], **settings: Any) -> None:
    for group in groups:
        group.comm.change(**settings)


def _states_of(modules: Sequence[Any]) -> list[FSDPState]:
    states = [state for module in modules if (state := state_of(module)) is not None]
    if len(states) < len(modules):
        got = ", ".join(type(module).__name__ for module in modules if state_of(module) is None)
        raise ArgumentError(
            "All modules must be sharded modules.", expected="modules created by fully_shard", got=got
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
    """Override methods that exist only in torch's class, so that they raise: torch's would read FSDP2's state."""

    def refusing(name: str) -> Callable[..., NoReturn]:
        def refuse(self: object, *args: object, **kwargs: object) -> NoReturn:
            raise UnsupportedOpError(
                f"{name} is not supported.",
                expected="methods that vescale_fsdp's FSDPModule defines",
                got=name,
                todo="do not call it",
            )

        refuse.__name__ = name
        refuse.__doc__ = "A method of a newer torch, which is not supported."
        return refuse

    for name, member in vars(torchs).items():
        if callable(member) and not name.startswith("__") and name not in vars(ours):
            setattr(ours, name, refusing(name))


refuse_unknown(FSDPModule, TorchFSDPModule)
