"""The functions that replace torch's while an installation (`install`, `as_fsdp2`) is active.

Each function calls either this package's function or torch's:

    torch's name                     calls this package's function if
    fully_shard                      an installation is active (with the settings of the newest one)
    register_fsdp_forward_method     the module was sharded by this package
    share_comm_ctx                   all modules were sharded by this package
    distribute_tensor                a placement is a RaggedShard
    DTensor.from_local               a placement is a RaggedShard
    get_model_state_dict             the model has sharded modules or ragged parameters
    get_optimizer_state_dict         the model has sharded modules or ragged parameters
    get_state_dict                   the model has sharded modules or ragged parameters
    DTensor.redistribute             a placement is a RaggedShard
    set_model_state_dict             the model has sharded modules or ragged parameters
    set_optimizer_state_dict         the model has sharded modules or ragged parameters
    set_state_dict                   the model has sharded modules or ragged parameters
    FullyShardedDataParallel()       never; raises while an installation is active

A stack may import such a function during an installation and call it after the end of the installation. Since the
function chooses at each call, it then calls torch's function.

torch's ``FSDPModule`` needs no replacement, since this package's class derives from it.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp.checkpoint.state import torch_state_dicts as our_state_dict
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor
from vescale_fsdp.dtensor.ragged_dtensor import distribute_tensor as our_distribute_tensor
from vescale_fsdp.dtensor.spec import is_ragged_spec
from vescale_fsdp.errors import PlacementError, UnsupportedOpError
from vescale_fsdp.integrations.replaced_names import StandIn
from vescale_fsdp.integrations.tried_versions import TRIED, check_version
from vescale_fsdp.layout.granularity import Granularity, GranularityRule, check_rule, resolve_granularity
from vescale_fsdp.layout.padding import PaddingPolicy
from vescale_fsdp.runtime.fsdp_module import FSDPModule
from vescale_fsdp.runtime.fsdp_module import share_comm_ctx as our_share
from vescale_fsdp.runtime.fsdp_state import register_fsdp_forward_method as our_register
from vescale_fsdp.runtime.fully_shard import fully_shard as our_fully_shard


class PatternRule:
    """A granularity mapping for all ``fully_shard`` calls of a stack, which records the patterns that matched.

    If a user calls `fully_shard`, every pattern must match a parameter in this call. A stack makes many calls, and the
    user does not know which parameters are in each of them. So here, every pattern must match in at least one call.

    Args:
        mapping: granularities by name pattern (fnmatch); the first pattern that matches is used. Names are relative to
            the module that the stack shards, so begin a pattern with ``*``: ``*down_proj.weight``.
    """

    def __init__(self, mapping: Mapping[str, Granularity | str]) -> None:
        check_rule(mapping)
        self._mapping = dict(mapping)
        self._matched: set[str] = set()
        self._names: dict[str, None] = {}

    def __call__(self, fqn: str, param: nn.Parameter) -> Granularity:
        """Return the granularity of one parameter; Element if no pattern matches. Records the patterns that match."""
        self._names[fqn] = None
        self._matched.update(pattern for pattern in self._mapping if fnmatch.fnmatchcase(fqn, pattern))
        return resolve_granularity(self._mapping, fqn, param)

    def unmatched(self) -> dict[str, list[str]]:
        """Return similar names for each pattern that matched no parameter. Empty before the first ``fully_shard``."""
        if not self._names:
            return {}
        return {
            # A cutoff below difflib's default of 0.6, because wildcards make a pattern less similar to names.
            pattern: difflib.get_close_matches(pattern, self._names, n=3, cutoff=0.3)
            for pattern in self._mapping
            if pattern not in self._matched
        }


# eq=False: `ACTIVE.remove` must find this installation's settings, and other installations may have equal ones.
@dataclass(frozen=True, eq=False)
class Settings:
    """The arguments that one installation adds to every ``fully_shard`` call."""

    granularity: GranularityRule | PatternRule = None
    padding_policy: PaddingPolicy = field(default_factory=PaddingPolicy)
    checked: set[str] = field(default_factory=set)  # stacks whose version was checked, to warn only once
    # Set once a sharded model was met, or a warning has said that none was.
    settled: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        check_rule(self.granularity)


# Settings of the active installations, oldest first. Only the module `installation` changes this list.
ACTIVE: list[Settings] = []


def settle() -> None:
    """Note in all active installations that they need no warning about unsharded models at their end."""
    for settings in tuple(ACTIVE):  # a copy, since another thread may end an installation
        settings.settled.set()


# The module of transformers that shards a model for ``from_pretrained``, which then loads weights into the shards.
_LOADER_MODULE = "transformers.distributed.fsdp"

_torch_fully_shard = torch_fsdp.fully_shard
_torch_from_local = vars(DTensor)["from_local"]  # the staticmethod object, which getattr would unwrap
_torch_redistribute = DTensor.redistribute
_torch_fsdp1_init = torch_fsdp.FullyShardedDataParallel.__init__


@functools.wraps(_torch_fully_shard)
def fully_shard(module: Any, **kwargs: Any) -> Any:
    """Call this package's `fully_shard` with the settings of the newest installation; torch's if none is active."""
    try:
        settings = ACTIVE[-1]  # not tested before, since another thread may end the installation after a test
    except IndexError:
        return _torch_fully_shard(module, **kwargs)
    for stack in TRIED:
        if stack in sys.modules and stack not in settings.checked:  # it was imported after `install`
            settings.checked.add(stack)
            check_version(stack)
    added = {"granularity": settings.granularity, "padding_policy": settings.padding_policy}
    # Without None: stacks pass None for a policy that the user has not chosen, which our function does not accept.
    chosen = {name: value for name, value in kwargs.items() if value is not None}
    settle()
    return our_fully_shard(module, **{**added, **chosen})


@functools.wraps(torch_distribute_tensor)
def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Call this package's function if a placement is ragged, else torch's. Both send the first rank's values."""
    # torch's function also chooses defaults for arguments that are None.
    if device_mesh is None or placements is None or not is_ragged_spec(placements):
        return torch_distribute_tensor(tensor, device_mesh, placements, src_data_rank=src_data_rank)
    settle()
    return our_distribute_tensor(tensor, device_mesh, placements, src_data_rank=src_data_rank)


@functools.wraps(_torch_from_local.__func__)
def from_local(
    local_tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    shape: Sequence[int] | None = None,
    grad_placements: Sequence[Placement] | None = None,
    **kwargs: Any,
) -> DTensor:
    """Call this package's function if a placement is ragged, else torch's.

    For ragged placements, torch's function would return a DTensor that torch's operators reject.

    Raises:
        PlacementError: for a ragged placement without ``shape``, or with ``grad_placements``.
    """
    if device_mesh is None or placements is None or not is_ragged_spec(placements):
        if grad_placements is not None:  # which torch 2.11 lacks
            kwargs["grad_placements"] = grad_placements
        return _torch_from_local(  # type: ignore[no-any-return]
            local_tensor, device_mesh, placements, shape=shape, **kwargs
        )
    if shape is None or grad_placements is not None:
        raise PlacementError(
            "DTensor.from_local of a ragged piece needs the global shape.",
            expected="shape=, which cannot be computed from a flat piece, and no grad_placements",
            got=f"shape={shape}, grad_placements={grad_placements}",
            where="DTensor.from_local",
            todo="DTensor.from_local(piece, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())",
        )
    return RaggedDTensor.from_local(local_tensor, device_mesh, placements, shape=shape)


@functools.wraps(_torch_redistribute)
def redistribute(
    self: DTensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    **options: Any,
) -> DTensor:
    """Call this package's method if a placement is ragged, else torch's.

    So stacks that fill a parameter from a replicated or pending tensor, ``t.redistribute(placements=p.placements)``,
    get the piece of ``p``.
    """
    if placements is None or not is_ragged_spec(placements):
        return _torch_redistribute(self, device_mesh, placements, **options)
    # As a function: it computes on any DTensor.
    return RaggedDTensor.redistribute(self, device_mesh, placements, **options)  # type: ignore[arg-type]


@functools.wraps(_torch_fsdp1_init)
def fsdp1_init(self: Any, *args: Any, **kwargs: Any) -> None:
    """Raise an error for FSDP1 while an installation is active: the model would silently train without vescale_fsdp."""
    if not ACTIVE:
        return _torch_fsdp1_init(self, *args, **kwargs)
    raise UnsupportedOpError(
        "The stack uses FSDP1, which vescale_fsdp does not replace.",
        expected="FSDP2: fsdp_version=2 (accelerate), fsdp_config={'version': 2} (Trainer, TRL)",
        got="torch.distributed.fsdp.FullyShardedDataParallel, which is fsdp_version: 1",
        todo="switch the stack to FSDP2, or do not use vescale_fsdp.integrations",
    )


def _is_sharded(module: object) -> bool:
    """Return whether this package's `fully_shard` has sharded the module."""
    return isinstance(module, FSDPModule)


def has_shards(model: nn.Module) -> bool:
    """Return whether a model has sharded modules or ragged parameters."""
    # Modules are checked too, since between forward and backward they have unsharded parameters.
    return any(map(_is_sharded, model.modules())) or any(
        isinstance(param, RaggedDTensor) for param in model.parameters()
    )


def _choice(
    torchs: Callable[..., Any], ours: Callable[..., Any], argument: str, is_ours: Callable[[Any], bool]
) -> Callable[..., Any]:
    """Make a function that calls ``ours`` if ``is_ours`` accepts the first argument, else ``torchs``.

    Args:
        argument: name of the first argument, which callers may pass by keyword.
    """

    @functools.wraps(torchs)
    def call(*args: Any, **kwargs: Any) -> Any:
        subject = args[0] if args else kwargs.get(argument)
        if subject is None or not is_ours(subject):
            return torchs(*args, **kwargs)
        settle()
        return ours(*args, **kwargs)

    return call


def _of_state_dicts(torchs: Callable[..., Any], ours: Callable[..., Any], *, is_needed: bool) -> StandIn:
    """Return what replaces a function of `torch.distributed.checkpoint.state_dict`."""
    home = "torch.distributed.checkpoint.state_dict"
    return StandIn(torchs, _choice(torchs, ours, "model", has_shards), (home,), is_needed)


_GETTERS = (
    (torch_state_dict.get_model_state_dict, our_state_dict.get_model_state_dict),
    (torch_state_dict.get_optimizer_state_dict, our_state_dict.get_optimizer_state_dict),
    (torch_state_dict.get_state_dict, our_state_dict.get_state_dict),
)
_SETTERS = (
    (torch_state_dict.set_model_state_dict, our_state_dict.set_model_state_dict),
    (torch_state_dict.set_optimizer_state_dict, our_state_dict.set_optimizer_state_dict),
    (torch_state_dict.set_state_dict, our_state_dict.set_state_dict),
)


# The modules in which each name is replaced: torch's modules that export the name, but not those that only use it
# (pipelining, DCP's helpers), and modules of stacks that import the name at their top and call it on users' models.
_FSDP2_HOMES = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)
STAND_INS = (
    StandIn(_torch_fully_shard, fully_shard, (*_FSDP2_HOMES, _LOADER_MODULE, "verl.utils.fsdp_utils")),
    StandIn(
        torch_fsdp.register_fsdp_forward_method,
        _choice(torch_fsdp.register_fsdp_forward_method, our_register, "module", _is_sharded),
        _FSDP2_HOMES,
    ),
    StandIn(
        torch_fsdp.share_comm_ctx,
        _choice(torch_fsdp.share_comm_ctx, our_share, "modules", lambda each: all(map(_is_sharded, each))),
        _FSDP2_HOMES,
    ),
    StandIn(
        torch_distribute_tensor,
        distribute_tensor,
        (
            "torch.distributed.tensor",
            "torch.distributed._tensor",
            "transformers.distributed.expert_parallel",
            "transformers.distributed.tensor_parallel",
        ),
    ),
    StandIn(_torch_from_local, staticmethod(from_local), ("torch.distributed.tensor:DTensor",)),
    StandIn(_torch_redistribute, redistribute, ("torch.distributed.tensor:DTensor",)),
    # torch's getters return the same, with a meeting of the ranks per tensor.
    *(_of_state_dicts(torchs, ours, is_needed=False) for torchs, ours in _GETTERS),
    *(_of_state_dicts(torchs, ours, is_needed=True) for torchs, ours in _SETTERS),
    StandIn(_torch_fsdp1_init, fsdp1_init, ("torch.distributed.fsdp:FullyShardedDataParallel",)),
)
