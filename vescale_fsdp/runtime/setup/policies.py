"""Policies: what torch's `MixedPrecisionPolicy` and `OffloadPolicy` say, read field by field: nothing is ignored.

A newer torch may add fields and classes. Those that this module does not know are refused by name, unless they hold
their default. ``param_dtype_override_fn`` (torch 2.15) is followed: parameters that compute in different dtypes form
groups of their own, each with a policy that says so.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from vescale_fsdp.errors import ArgumentError, UnsupportedOpError
from vescale_fsdp.runtime.comm.group_comm import GatherPolicy

_OVERRIDE = "param_dtype_override_fn"
_FOLLOWED: dict[type, set[str]] = {
    MixedPrecisionPolicy: {"param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs", _OVERRIDE},
    CPUOffloadPolicy: {"pin_memory"},
    OffloadPolicy: set(),
}


def check_policies(mp_policy: MixedPrecisionPolicy, offload_policy: OffloadPolicy) -> None:
    """Refuse what a policy asks for and nobody here follows.

    Raises:
        UnsupportedOpError: for a kind of policy, a field that holds another value than its default, or policies that
            exclude each other.
    """
    offload = CPUOffloadPolicy if isinstance(offload_policy, CPUOffloadPolicy) else OffloadPolicy
    if offload is OffloadPolicy and type(offload_policy) is not OffloadPolicy:
        raise UnsupportedOpError(
            "This offload_policy is of a kind that is not supported.",
            expected="OffloadPolicy or CPUOffloadPolicy",
            got=f"{type(offload_policy).__module__}.{type(offload_policy).__name__}",
        )
    if offload is CPUOffloadPolicy and isinstance(mp_policy, GatherPolicy):
        raise UnsupportedOpError(
            "A gather policy reads shards on the device that computes with them.",
            expected="no CPU offload (cpu_offload, offload_policy), or torch's own MixedPrecisionPolicy",
            got=f"{offload_policy} beside {mp_policy}",
            todo="leave one of them out",
        )
    _check_fields("mp_policy", mp_policy, MixedPrecisionPolicy)
    _check_fields("offload_policy", offload_policy, offload)


def _check_fields(argument: str, policy: Any, kind: type) -> None:
    """Of torch's class only: a subclass that has fields of its own knows what they mean."""
    for field in dataclasses.fields(kind):
        value = vars(policy).get(field.name, field.default)
        if field.name not in _FOLLOWED[kind] and value != field.default:
            raise UnsupportedOpError(
                f"{kind.__name__}.{field.name} is not supported.",
                expected=f"{field.name}={field.default!r}",
                got=f"{field.name}={value!r}",
                where=argument,
                todo="leave it out",
            )


def param_dtype_of(policy: MixedPrecisionPolicy, fqn: str, param: nn.Parameter) -> torch.dtype | None:
    """The dtype that a parameter computes in; None: its own.

    Raises:
        ValueError: if ``param_dtype_override_fn`` gives something else than None, ``param_dtype`` or its own.
    """
    override = vars(policy).get(_OVERRIDE)
    wanted = override(param) if override is not None else None
    if wanted is None:
        return policy.param_dtype
    if wanted not in (policy.param_dtype, param.dtype):
        raise ArgumentError(
            f"{_OVERRIDE} gives a parameter another dtype than it may.",
            expected=f"None, {policy.param_dtype} (param_dtype) or {param.dtype} (its own)",
            got=repr(wanted),
            where=fqn,
        )
    return policy.param_dtype if wanted is (policy.param_dtype or param.dtype) else param.dtype


def policy_of_group(policy: MixedPrecisionPolicy, param_dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    """The policy of a group whose parameters all compute in ``param_dtype``."""
    if vars(policy).get(_OVERRIDE) is None:
        return policy
    changes: dict[str, Any] = {"param_dtype": param_dtype, _OVERRIDE: None}
    return dataclasses.replace(policy, **changes)
