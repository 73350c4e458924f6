"""What torch's names mean while `as_fsdp2` is in force: ours for what is ours, torch's own for everything else.

    torch's name                     ours when                                         settings used
    fully_shard                      an installation is in force                       the newest one's
    register_fsdp_forward_method     the module was sharded by ours
    share_comm_ctx                   all modules were
    distribute_tensor                a placement is a RaggedShard
    DTensor.from_local               likewise
    set_model_state_dict             a parameter of the model is ragged
    set_optimizer_state_dict         likewise
    set_state_dict                   likewise
    FullyShardedDataParallel()       an installation is in force: refused

A stack may keep such a function beyond its installation (it imported the name while it was replaced). The function
then does what torch's does, because each of them asks when it is called.

torch's ``FSDPModule`` needs no stand-in: our class derives from it.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp.checkpoint.formats.dcp import state_dict as our_state_dict
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor
from vescale_fsdp.dtensor.ragged_dtensor import distribute_tensor as our_distribute_tensor
from vescale_fsdp.errors import LifecycleError, PlacementError, UnsupportedOpError
from vescale_fsdp.integrations.replaced_names import StandIn
from vescale_fsdp.integrations.tried_versions import TRIED, check_version
from vescale_fsdp.layout.granularity import Granularity, GranularityRule, check_rule, resolve_granularity
from vescale_fsdp.layout.padding import PaddingPolicy
from vescale_fsdp.layout.placement import RaggedShard
from vescale_fsdp.runtime.fsdp_module import FSDPModule
from vescale_fsdp.runtime.fsdp_module import share_comm_ctx as our_share
from vescale_fsdp.runtime.fsdp_state import register_fsdp_forward_method as our_register
from vescale_fsdp.runtime.fully_shard import fully_shard as our_fully_shard


class PatternRule:
    """A granularity mapping for all ``fully_shard`` calls of a stack; it remembers which patterns matched.

    In a mapping for one `fully_shard` call, every pattern must match a parameter of that call. A stack makes many
    calls, and the user cannot know which call meets which parameter; here a pattern must match in one of them.

    Args:
        mapping: from name patterns (fnmatch) to granularities, the first match wins. A name is the parameter's in the
            module that the stack shards, so ``*down_proj.weight`` is right wherever that begins.
    """

    def __init__(self, mapping: Mapping[str, Granularity | str]) -> None:
        check_rule(mapping)
        self._mapping = dict(mapping)
        self._matched: set[str] = set()
        self._names: dict[str, None] = {}

    def __call__(self, fqn: str, param: nn.Parameter) -> Granularity:
        """The granularity of one parameter; Element where no pattern matches."""
        self._names[fqn] = None
        self._matched.update(pattern for pattern in self._mapping if fnmatch.fnmatchcase(fqn, pattern))
        return resolve_granularity(self._mapping, fqn, param)

    def unmatched(self) -> dict[str, list[str]]:
        """Patterns that no parameter matched, each with the names nearest to it; empty before any parameter came."""
        if not self._names:
            return {}
        return {
            pattern: difflib.get_close_matches(pattern, self._names, n=3, cutoff=0.3)
            for pattern in self._mapping
            if pattern not in self._matched
        }


@dataclass(frozen=True, eq=False)
class Settings:
    """What one installation adds to the arguments that stacks give ``fully_shard``."""

    granularity: GranularityRule | PatternRule = None
    padding_policy: PaddingPolicy = field(default_factory=PaddingPolicy)
    stacks: frozenset[str] = frozenset()  # those that got what they need beside torch's names
    checked: set[str] = field(default_factory=set)  # those whose versions were looked at

    def __post_init__(self) -> None:
        check_rule(self.granularity)


# Of the installations that stand, oldest first; `installation` alone changes it.
IN_FORCE: list[Settings] = []

_LOADS_BEHIND = (
    "transformers.distributed.fsdp"  # shards for ``from_pretrained``, which then loads into the shards
)

_torch_fully_shard = torch_fsdp.fully_shard
_torch_register = torch_fsdp.register_fsdp_forward_method
_torch_share = torch_fsdp.share_comm_ctx
_torch_from_local = vars(DTensor)["from_local"]  # the static method itself, not its function
_torch_fsdp1_init = torch_fsdp.FullyShardedDataParallel.__init__
_torch_set_model = torch_state_dict.set_model_state_dict
_torch_set_optimizer = torch_state_dict.set_optimizer_state_dict
_torch_set_both = torch_state_dict.set_state_dict


@functools.wraps(_torch_fully_shard)
def fully_shard(module: Any, **kwargs: Any) -> Any:
    """Ours, with the settings of the newest installation, or torch's if there is none."""
    try:
        settings = IN_FORCE[-1]
    except IndexError:
        return _torch_fully_shard(module, **kwargs)
    caller = str(sys._getframe(1).f_globals.get("__name__"))
    stack = caller.partition(".")[0]
    if stack in TRIED and stack not in settings.checked:  # it was imported after the installation
        settings.checked.add(stack)
        check_version(stack)
    if "transformers" not in settings.stacks and caller == _LOADS_BEHIND:
        raise LifecycleError(
            "The loader of transformers does not know vescale_fsdp's shards.",
            expected="import transformers' models, in a version that was tried, then install() or as_fsdp2()",
            got="an installation that was made before, or beside another version",
            where="from_pretrained(distributed_config=...)",
            todo="put the imports before the installation; Trainer and TRL work in both orders",
        )
    added = {"granularity": settings.granularity, "padding_policy": settings.padding_policy}
    # torch takes None for a policy that was not chosen.
    chosen = {name: value for name, value in kwargs.items() if value is not None}
    return our_fully_shard(module, **{**added, **chosen})


@functools.wraps(_torch_register)
def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Ours for modules that ours has sharded."""
    (our_register if isinstance(module, FSDPModule) else _torch_register)(module, method_name)


@functools.wraps(_torch_share)
def share_comm_ctx(modules: list[Any]) -> None:
    """Ours for modules that ours has sharded."""
    (our_share if all(isinstance(module, FSDPModule) for module in modules) else _torch_share)(modules)


@functools.wraps(torch_distribute_tensor)
def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Ours if a placement is ragged. As in torch the values are those of the first rank, unless told otherwise."""
    is_ours = any(isinstance(placement, RaggedShard) for placement in placements or ())
    if not is_ours or device_mesh is None or placements is None:
        return torch_distribute_tensor(tensor, device_mesh, placements, src_data_rank=src_data_rank)
    is_placed = isinstance(tensor, RaggedDTensor) and tensor.placements == tuple(placements)
    if is_placed and tensor.device_mesh == device_mesh:  # type: ignore[attr-defined]
        return tensor  # type: ignore[return-value]
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
    """Ours if a placement is ragged, of which torch's operators know nothing (since torch 2.15 not even `detach`)."""
    is_ours = any(isinstance(placement, RaggedShard) for placement in placements or ())
    if not is_ours or device_mesh is None or placements is None:
        return _torch_from_local(  # type: ignore[no-any-return]
            local_tensor, device_mesh, placements, shape=shape, grad_placements=grad_placements, **kwargs
        )
    if shape is None or grad_placements is not None:
        raise PlacementError(
            "A ragged tensor cannot be made of its piece like this.",
            expected="shape=, which a piece does not tell, and no grad_placements",
            got=f"shape={shape}, grad_placements={grad_placements}",
            where="DTensor.from_local",
            todo="DTensor.from_local(piece, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())",
        )
    return RaggedDTensor.from_local(local_tensor, device_mesh, placements, shape=shape)


@functools.wraps(_torch_set_model)
def set_model_state_dict(
    model: nn.Module, model_state_dict: dict[str, Any], *, options: StateDictOptions | None = None
) -> Any:
    """Ours for a model with ragged parameters."""
    chosen = our_state_dict.set_model_state_dict if _is_ours(model) else _torch_set_model
    return chosen(model, model_state_dict, options=options)


@functools.wraps(_torch_set_optimizer)
def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    optim_state_dict: dict[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Ours for a model with ragged parameters."""
    chosen: Callable[..., None] = (
        our_state_dict.set_optimizer_state_dict if _is_ours(model) else _torch_set_optimizer
    )
    chosen(model, optimizers, optim_state_dict, options=options)


@functools.wraps(_torch_set_both)
def set_state_dict(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    *,
    model_state_dict: dict[str, Any],
    optim_state_dict: dict[str, Any],
    options: StateDictOptions | None = None,
) -> Any:
    """Ours for a model with ragged parameters."""
    chosen: Callable[..., Any] = our_state_dict.set_state_dict if _is_ours(model) else _torch_set_both
    return chosen(
        model,
        optimizers,
        model_state_dict=model_state_dict,
        optim_state_dict=optim_state_dict,
        options=options,
    )


@functools.wraps(_torch_fsdp1_init)
def fsdp1_init(self: Any, *args: Any, **kwargs: Any) -> None:
    """Refuse FSDP1 while an installation is in force: the model would train without anything of ours."""
    if not IN_FORCE:
        return _torch_fsdp1_init(self, *args, **kwargs)
    raise UnsupportedOpError(
        "The stack asks for FSDP1, which vescale_fsdp does not stand in for.",
        expected="FSDP2: fsdp_version=2 (accelerate), fsdp_config={'version': 2} (Trainer, TRL)",
        got="torch.distributed.fsdp.FullyShardedDataParallel, which is fsdp_version: 1",
        todo="switch the stack to FSDP2, or leave vescale_fsdp.integrations out",
    )


def _is_ours(model: nn.Module) -> bool:
    # By its modules too: between forward and backward they hold unsharded parameters.
    return any(isinstance(module, FSDPModule) for module in model.modules()) or any(
        isinstance(param, RaggedDTensor) for param in model.parameters()
    )


# Modules inside torch that only use the names (pipelining, DCP's helpers) are no homes. A stack's module is one if it
# binds a name at its top and calls it on users' models.
_FSDP2_HOMES = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)
_STATE_DICT_HOMES = ("torch.distributed.checkpoint.state_dict",)
STAND_INS = (
    StandIn(_torch_fully_shard, fully_shard, (*_FSDP2_HOMES, _LOADS_BEHIND)),
    StandIn(_torch_register, register_fsdp_forward_method, _FSDP2_HOMES),
    StandIn(_torch_share, share_comm_ctx, _FSDP2_HOMES),
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
    StandIn(_torch_set_model, set_model_state_dict, _STATE_DICT_HOMES),
    StandIn(_torch_set_optimizer, set_optimizer_state_dict, _STATE_DICT_HOMES),
    StandIn(_torch_set_both, set_state_dict, _STATE_DICT_HOMES),
    StandIn(_torch_fsdp1_init, fsdp1_init, ("torch.distributed.fsdp:FullyShardedDataParallel",)),
)
