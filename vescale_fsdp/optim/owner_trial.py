"""Trials of an optimizer class on plain tensors: what `OwnerOptimizer` has to know before training.

The state that the class has after a step; whether it communicates; and whether its step of a parameter depends on other
parameters, which are on other ranks. All ranks make the same trials, and so raise alike. The caller's random numbers of
torch do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from vescale_fsdp.errors import UnsupportedOpError
from vescale_fsdp.torch_modes import is_wrapper_subclass, without_collectives

_STEPS = 6  # estimates of the learning rate (Prodigy) change after some steps in one direction
_MOST_GROUPS = 4

Kind = Callable[[Any], torch.optim.Optimizer]  # of param groups


class Like(NamedTuple):
    """A parameter to try: its shape, dtype and device, and the options of its group without ``params``."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    options: dict[str, Any]


def state_after_a_step(kind: Kind, name: str, like: Like) -> dict[str, Any]:
    """Return the state of a parameter after one step.

    Raises:
        UnsupportedOpError: if the class communicates, or its step fails on one plain parameter.
    """
    twin = nn.Parameter(torch.full(like.shape, 0.01, dtype=like.dtype, device=like.device))
    twin.grad = torch.full_like(twin, 0.01)
    return dict(_stepped(kind, name, [(twin, like)], 1).state[twin])


def check_parameters_apart(kind: Kind, name: str, groups: Sequence[Sequence[Like]]) -> None:
    """Check that a class steps each parameter as it does without the other parameters.

    The smallest two of each group, of four groups at most, are stepped together and alone, with random gradients.

    Raises:
        UnsupportedOpError: if the results differ: ranks that own different parameters would compute another step.
    """
    likes = [like for group in groups[:_MOST_GROUPS] for like in sorted(group, key=_numel_of)[:2]]
    together = _results(kind, name, likes, range(len(likes)))
    for index in range(len(likes)):
        (alone,) = _results(kind, name, likes, [index])
        if not torch.equal(alone, together[index]):
            raise UnsupportedOpError(
                f"The step of {name} depends on all parameters, and each rank would only see those that it owns.",
                expected="an optimizer that steps each parameter as if it were the only one",
                got=f"a parameter of shape {likes[index].shape} has other values next to "
                f"{len(likes) - 1} other parameters than alone",
                where=f"OwnerOptimizer({name}, ...)",
                todo="step sharded parameters by the class itself, which sees all of them",
            )


def leaves_of(state: Any, name: str = "") -> dict[str, Any]:
    """Return the tensors and numbers of nested state by dotted names. None and texts count as parts of its form.

    Tensor subclasses, such as quantized moments, count as containers of the plain tensors inside.
    """
    if is_wrapper_subclass(state):
        state = {key: getattr(state, key) for key in state.__tensor_flatten__()[0]}
    if isinstance(state, (dict, list, tuple)):
        items = state.items() if isinstance(state, dict) else enumerate(state)
        parts = [leaves_of(value, f"{name}.{key}" if name else str(key)) for key, value in items]
        return {leaf: value for part in parts for leaf, value in part.items()}
    return {} if state is None or isinstance(state, str) else {name: state}


def filled(state: Any, leaves: dict[str, Any], name: str = "") -> Any:
    """Return nested state with other leaves: the inverse of `leaves_of`."""
    if is_wrapper_subclass(state):
        keys, context = state.__tensor_flatten__()
        inner = filled({key: getattr(state, key) for key in keys}, leaves, name)
        return type(state).__tensor_unflatten__(inner, context, state.shape, state.stride())
    if isinstance(state, dict):
        return {
            key: filled(each, leaves, f"{name}.{key}" if name else str(key)) for key, each in state.items()
        }
    if isinstance(state, (list, tuple)):
        return type(state)(filled(each, leaves, f"{name}.{index}") for index, each in enumerate(state))
    return state if state is None or isinstance(state, str) else leaves[name]


def groups_of(kind: Kind, groups: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the defaults of a class, and groups with the options that its constructor gives them.

    Errors of the constructor pass, such as those of a class that takes a model or an optimizer.
    """

    def small(param: torch.Tensor) -> nn.Parameter:
        return nn.Parameter(torch.ones((2,) * param.ndim, dtype=torch.float32, device="cpu"))

    trial = kind([{**group, "params": [*map(small, group["params"])]} for group in groups])
    if len(trial.param_groups) != len(groups):  # it makes groups of its own
        return dict(trial.defaults), list(groups)
    return dict(trial.defaults), [
        {**own, "params": group["params"]} for own, group in zip(trial.param_groups, groups, strict=True)
    ]


def _numel_of(like: Like) -> int:
    return torch.Size(like.shape).numel()


def _results(kind: Kind, name: str, likes: Sequence[Like], indices: Sequence[int]) -> list[torch.Tensor]:
    """Return the values of the parameters of these indices after some steps together."""
    twins = []
    for index in indices:
        like, generator = likes[index], torch.Generator().manual_seed(index)
        values = torch.randn(
            (_STEPS + 1, *like.shape), generator=generator, dtype=torch.float32, device="cpu"
        )
        grads = (values[0] + 0.1 * values[1:]).to(like.device, like.dtype)
        twins.append((nn.Parameter(values[0].to(like.device, like.dtype)), like, grads))
    _stepped(kind, name, [(twin, like) for twin, like, _ in twins], _STEPS, [grads for *_, grads in twins])
    return [twin.detach() for twin, *_ in twins]


def _stepped(
    kind: Kind,
    name: str,
    twins: Sequence[tuple[nn.Parameter, Like]],
    num_steps: int,
    grads: Sequence[torch.Tensor] = (),
) -> torch.optim.Optimizer:
    """Make an optimizer of plain parameters, step it, and return it."""
    groups: dict[int, dict[str, Any]] = {}
    for twin, like in twins:
        groups.setdefault(id(like.options), {**like.options, "params": []})["params"].append(twin)
    with torch.random.fork_rng(), torch.enable_grad(), without_collectives(partial(_communicates, name)):
        torch.default_generator.manual_seed(0)
        try:
            optimizer = kind(list(groups.values()))
            for number in range(num_steps):
                for (twin, _), values in zip(twins, grads, strict=False):
                    twin.grad = values[number].clone()
                optimizer.step()
        except UnsupportedOpError:
            raise
        except Exception as error:  # any class: steps are the code of other packages
            raise UnsupportedOpError(
                f"{name} cannot step plain parameters with dense gradients that have no graph.",
                expected="an optimizer whose step() needs the parameters and their gradients alone",
                got=f"{type(error).__name__}: {error}",
                where=f"OwnerOptimizer({name}, ...), a trial with parameters of shapes "
                f"{[like.shape for _, like in twins]}",
                todo="pass the arguments and groups that the class needs. If its step needs a closure, step sharded "
                "parameters by the class itself. If it needs a graph or sparse gradients, use another optimizer",
            ) from error
    return optimizer


def _communicates(name: str, operator: str) -> UnsupportedOpError:
    return UnsupportedOpError(
        f"{name} communicates in its step, and ranks that own different parameters would send different messages.",
        expected="an optimizer that computes on one process",
        got=operator,
        where=f"OwnerOptimizer({name}, ...), a trial with plain parameters",
        todo="use the class for a single device, if the package has one",
    )
