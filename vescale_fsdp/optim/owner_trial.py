"""Trials of an optimizer class on plain tensors: what `OwnerOptimizer` has to know before training.

The state that the class has after a step; what its step needs besides parameters and gradients; whether it
communicates; and whether its step of a parameter depends on other parameters, which are on other ranks. All ranks make
the same trials, and so raise alike. The caller's random numbers of torch do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from vescale_fsdp.errors import UnsupportedOpError
from vescale_fsdp.torch_modes import without_collectives

_STEPS = 6  # estimates of the learning rate (Prodigy) change after some steps in one direction
_MOST_GROUPS = 4

Kind = Callable[[Any], torch.optim.Optimizer]  # of param groups


class Like(NamedTuple):
    """A parameter to try: its shape, dtype and device, and the options of its group without ``params``."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    options: dict[str, Any]


class _Need(NamedTuple):
    """What a step may need besides parameters and dense gradients.

    Attributes:
        grad_of: computes a gradient at a parameter, in the form that the step needs.
        has_closure: whether the step is given a closure.
        problem, expected, got, todo: parts of the error; ``{name}`` is the class's.
    """

    grad_of: Callable[[nn.Parameter], torch.Tensor]
    has_closure: bool
    problem: str
    expected: str
    got: str
    todo: str


def _loss_of(param: torch.Tensor) -> torch.Tensor:
    return param.square().sum()


def _grad_with_graph(param: nn.Parameter) -> torch.Tensor:
    return torch.autograd.grad(_loss_of(param), param, create_graph=True)[0]


# In this order: the first with which a class steps is what it needs.
_NEEDS = (
    _Need(
        _grad_with_graph,
        has_closure=False,
        problem="{name} differentiates gradients in its step, and gradients of sharded parameters have no graph: ranks "
        "reduce them, and OwnerOptimizer steps detached matrices.",
        expected="an optimizer of first derivatives",
        got="a class that only steps after backward(create_graph=True)",
        todo="use an optimizer of first derivatives. Where step() takes an estimate of the Hessian "
        "(AdaHessian and SophiaH of pytorch_optimizer: step(hessian=[...])), step sharded parameters by the class "
        "itself. A product of the Hessian and a vector is the difference of two gradients: at p + eps * vector and at "
        "p, divided by eps",
    ),
    _Need(
        lambda param: 2 * param.detach(),
        has_closure=True,
        problem="{name} evaluates the model in its step, and each rank would do so between steps of its own matrices "
        "alone.",
        expected="an optimizer whose step() needs the parameters and their gradients alone",
        got="a class whose step() needs a closure",
        todo="step sharded parameters by the class itself: step(closure). A class that wraps another (SAM) may wrap "
        "OwnerOptimizer: functools.partial(OwnerOptimizer, cls) in place of cls",
    ),
    _Need(
        lambda param: 2 * param.detach().to_sparse(),
        has_closure=False,
        problem="{name} steps sparse gradients, and gradients of sharded parameters are dense.",
        expected="an optimizer of dense gradients",
        got="a class that only steps sparse gradients",
        todo="use an optimizer of dense gradients, such as torch.optim.Adam",
    ),
)


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
    """Return the tensors and numbers of nested state by dotted names. None and texts count as parts of its form."""
    if isinstance(state, (dict, list, tuple)):
        items = state.items() if isinstance(state, dict) else enumerate(state)
        parts = [leaves_of(value, f"{name}.{key}" if name else str(key)) for key, value in items]
        return {leaf: value for part in parts for leaf, value in part.items()}
    return {} if state is None or isinstance(state, str) else {name: state}


def filled(state: Any, leaves: dict[str, Any], name: str = "") -> Any:
    """Return nested state with other leaves: the inverse of `leaves_of`."""
    if isinstance(state, dict):
        return {
            key: filled(each, leaves, f"{name}.{key}" if name else str(key)) for key, each in state.items()
        }
    if isinstance(state, (list, tuple)):
        return type(state)(filled(each, leaves, f"{name}.{index}") for index, each in enumerate(state))
    return state if state is None or isinstance(state, str) else leaves[name]


def groups_of(
    kind: Kind, name: str, groups: Sequence[dict[str, Any]]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the defaults of a class, and groups with the options that its constructor gives them.

    Raises:
        UnsupportedOpError: if the class takes a model or an optimizer. Its constructor's other errors pass.
    """
    twins = [
        {
            **group,
            "params": [
                nn.Parameter(torch.ones((2,) * p.ndim, dtype=torch.float32, device="cpu"))
                for p in group["params"]
            ],
        }
        for group in groups
    ]
    try:
        trial = kind(twins)
    except Exception as error:  # any class: constructors are the code of other packages
        taken = _taken_instead(kind, [param for group in twins for param in group["params"]])
        if taken is None:
            raise
        raise UnsupportedOpError(
            f"{name} takes {taken}, and OwnerOptimizer gives its class the parameters that this rank owns.",
            expected="a class that takes parameters",
            got=f"a class that takes {taken}",
            where=f"OwnerOptimizer({name}, ...)",
            todo="step sharded parameters by the class itself; one that takes an optimizer may take an OwnerOptimizer",
        ) from error
    if len(trial.param_groups) != len(groups):  # it makes groups of its own
        return dict(trial.defaults), list(groups)
    return dict(trial.defaults), [
        {**own, "params": group["params"]} for own, group in zip(trial.param_groups, groups, strict=True)
    ]


def _taken_instead(kind: Kind, params: Sequence[nn.Parameter]) -> str | None:
    """Return what a class that cannot be made of param groups takes in their place; None if that is not found out."""
    model = nn.Module()  # not iterable, as parameters are
    for index, param in enumerate(params):
        model.register_parameter(f"param{index}", param)
    for taken, argument in {"a model": model, "an optimizer": torch.optim.SGD(params, lr=0.0)}.items():
        try:
            kind(argument)
        except Exception:  # noqa: BLE001  the caller raises the error that it has
            continue
        return taken
    return None


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
    groups = _groups_with(twins)
    with torch.random.fork_rng(), torch.enable_grad(), without_collectives(partial(_communicates, name)):
        torch.default_generator.manual_seed(0)
        try:
            optimizer = kind(groups)
            for number in range(num_steps):
                for (twin, _), values in zip(twins, grads, strict=False):
                    twin.grad = values[number].clone()
                optimizer.step()
        except UnsupportedOpError:
            raise
        except Exception as error:  # any class: steps are the code of other packages
            raise _cannot_step(kind, name, [like for _, like in twins], error) from error
    return optimizer


def _groups_with(twins: Sequence[tuple[nn.Parameter, Like]]) -> list[dict[str, Any]]:
    groups: dict[int, dict[str, Any]] = {}
    for twin, like in twins:
        groups.setdefault(id(like.options), {**like.options, "params": []})["params"].append(twin)
    return list(groups.values())


def _cannot_step(kind: Kind, name: str, likes: Sequence[Like], error: Exception) -> UnsupportedOpError:
    """Return the error for a class whose trial has failed: by what it needs, if that is found out."""
    where = f"OwnerOptimizer({name}, ...), a trial with parameters of shapes {[like.shape for like in likes]}"
    need = next((need for need in _NEEDS if _steps_with(need, kind, likes)), None)
    if need is not None:
        problem = need.problem.format(name=name)
        return UnsupportedOpError(problem, expected=need.expected, got=need.got, where=where, todo=need.todo)
    return UnsupportedOpError(
        f"{name} cannot step a plain parameter alone.",
        expected="an optimizer whose step() needs the parameters and their gradients alone",
        got=f"{type(error).__name__}: {error}",
        where=where,
        todo="pass the arguments and groups that the class needs",
    )


def _steps_with(need: _Need, kind: Kind, likes: Sequence[Like]) -> bool:
    twins = [
        (nn.Parameter(torch.full(like.shape, 0.01, dtype=like.dtype, device=like.device)), like)
        for like in likes
    ]

    def closure() -> float:
        for twin, _ in twins:
            twin.grad = need.grad_of(twin)
        return sum(_loss_of(twin.detach()).item() for twin, _ in twins)

    closure()
    try:
        optimizer = kind(_groups_with(twins))
        optimizer.step(closure) if need.has_closure else optimizer.step()
    except Exception:  # noqa: BLE001  the caller raises the error without what was tried here
        return False
    return True


def _communicates(name: str, operator: str) -> UnsupportedOpError:
    return UnsupportedOpError(
        f"{name} communicates in its step, and ranks that own different parameters would send different messages.",
        expected="an optimizer that computes on one process",
        got=operator,
        where=f"OwnerOptimizer({name}, ...), a trial with plain parameters",
        todo="use the class for a single device, if the package has one",
    )
