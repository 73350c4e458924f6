"""Fsdp2State: what torch's own code asks of FSDP2's state, answered by ours.

torch reaches behind the public methods of its FSDPModule in a few places, and trainers follow it:

    asked                                            by
    module._get_fsdp_state()._pre_forward, .._post_forward   torch's register_fsdp_forward_method
    fully_shard.state(module)                        torch.distributed.pipelining, at the end of a step: all units'
                                                     ``post_backward``, then ``_root_post_backward_final_callback``
                                                     (torch 2.15 calls finalize_backward, and asks which stages share
                                                     a ``_comm_ctx``)
    .._lazy_init()                                   trainers that unshard or train a head before the first forward

A unit's answer to both is one of these, which knows no more than that. What torch's class can and ours cannot is
refused by name (`refuse_unknown`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from torch import nn

from vescale_fsdp.errors import UnsupportedOpError


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
