"""`step_in_backward`: one of torch's optimizers steps each unit inside the backward, and drops the unit's gradients.

    backward   compute 3 | reduce 3, step 3 | compute 2 | reduce 2, step 2 | compute 1 ..
    gradients            | of unit 3        |           | of unit 2        |

So the gradients of at most one unit exist at a time. The optimizer, its state and its checkpoints are the user's own: a
step inside the backward is the optimizer's ``step`` on param groups that have only the unit's parameters. A parameter
without a gradient is not stepped, as behind a backward.

A gradient that other ranks, but not this rank, computed is stepped when the backward ends (see
`vescale_fsdp.runtime.comm.unsharded_grads`). Which parameters are stepped is therefore the same on all ranks. A step
has no collectives.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from vescale_fsdp.dtensor.piece_map import label_of
from vescale_fsdp.errors import LifecycleError, MisuseError, UnsupportedOpError, some
from vescale_fsdp.runtime.fsdp_state import FSDPState, states_of
from vescale_fsdp.runtime.nested_tensors import tensors_of
from vescale_fsdp.torch_private import ELEMENTWISE_OPTIMIZERS, wrapper_like


def step_in_backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """From now on, step each unit in the backward, as soon as its gradients are reduced, and drop the gradients.

    So gradients of at most one unit exist at a time. Call ``optimizer.step()`` after each backward all the same: it
    steps parameters that are not sharded. Each backward is a step, so for gradient accumulation all micro-batches but
    the last run under ``no_sync``; a second reduction of a unit before ``optimizer.step()`` raises. Clipping by norm,
    loss scaling and other uses of a gradient after its step raise, too.

    Args:
        model: a sharded model. Its parameters that are not in the optimizer are not stepped.
        optimizer: Adam, AdamW, SGD, Adagrad, RMSprop, NAdam, RAdam, Adamax, Adadelta, ASGD or Rprop of `torch.optim`.

    Raises:
        UnsupportedOpError: for other optimizers.
        MisuseError: if the optimizer has no sharded parameter of the model.

    Examples:
        >>> from vescale_fsdp import fully_shard
        >>> model = fully_shard(torch.nn.Linear(8, 8))
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> step_in_backward(model, optimizer)
        >>> model(torch.randn(2, 8)).sum().backward()
        >>> optimizer.step()
    """
    kind = type(optimizer)
    # Not issubclass: a subclass may use the gradients of several parameters.
    if kind not in ELEMENTWISE_OPTIMIZERS:
        raise UnsupportedOpError(
            "step_in_backward supports torch's element-wise optimizers.",
            expected=", ".join(each.__name__ for each in ELEMENTWISE_OPTIMIZERS) + " of torch.optim",
            got=f"{kind.__module__}.{kind.__name__}",
            where="step_in_backward(model, optimizer)",
            todo="step this optimizer after the backward",
        )
    own = {param for group in optimizer.param_groups for param in group["params"]}
    groups = [group for state in states_of(model) for group in state.groups]
    stepped = [group for group in groups if any(param.sharded in own for param in group.params)]
    if not stepped:
        raise MisuseError(
            "The optimizer has no sharded parameter of the model.",
            expected="an optimizer made after fully_shard, over parameters of the model",
            got=f"{type(model).__name__} with {len(groups)} groups of sharded parameters",
            where="step_in_backward(model, optimizer)",
            todo="call fully_shard, then make the optimizer, then call step_in_backward",
        )
    for group in stepped:
        group.comm.change(on_delivery=_UnitSteps(optimizer))
    optimizer.register_step_pre_hook(partial(_before_step, list(states_of(model))))


class _UnitSteps:
    """The steps of one group of parameters, called with parameters whose gradients have just been reduced.

    Args:
        optimizer: the user's optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        # A copy shares the state. It has neither the user's hooks on ``step`` nor the wrapper that schedulers put
        # around it: both count the user's steps. A copy for each group, because its param groups say what a step has
        # written (`vescale_fsdp.runtime.gathered_writes`).
        self._part = copy.copy(optimizer)

    def __call__(self, params: list[nn.Parameter]) -> None:
        """Step these parameters, and drop their gradients."""
        state = self._part.state = self.optimizer.state  # loading a state dict replaces it
        known = {param for param in params if param in state}
        num_states = len(state)
        # Apart, because torch's fused SGD refuses parameters of which only some have a momentum. Ranks may have
        # different ones among ``params``, and would not fail together.
        for chosen in (known, set(params) - known):
            if chosen:
                self._step(chosen)
        if len(state) > num_states:
            _order_state(self.optimizer)

    def _step(self, chosen: set[nn.Parameter]) -> None:
        self._part.param_groups = [
            {**group, "params": mine}
            for group in self.optimizer.param_groups  # read now, because schedulers change them
            if (mine := [param for param in group["params"] if param in chosen])
        ]
        if self._part.param_groups:
            self._part.step()
        for group in self._part.param_groups:
            for param in group["params"]:
                param.grad = _DroppedGrad.of(param)


def _order_state(optimizer: torch.optim.Optimizer) -> None:
    """Sort the optimizer's state in the order of its parameters, which is the same on every rank.

    torch's ``get_optimizer_state_dict(full_state_dict=True)`` gathers state in this order. The order in which a rank
    has stepped depends on which parameters it used.
    """
    params = (param for group in optimizer.param_groups for param in group["params"])
    order = {param: index for index, param in enumerate(params)}
    ordered = sorted(optimizer.state.items(), key=lambda item: order.get(item[0], len(order)))
    optimizer.state = defaultdict(dict, ordered)


def _before_step(
    states: list[FSDPState], optimizer: torch.optim.Optimizer, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forget the last backward before the user's step; a hook of torch's, which may return other arguments."""
    _forget_backward(states, optimizer)
    closure = args[1] if len(args) > 1 else options.get("closure")
    if closure is None:
        return None

    def evaluated() -> Any:
        loss = closure()
        _forget_backward(states, optimizer)  # the closure's backward has stepped
        return loss

    return args[:1], {"closure": evaluated}


def _forget_backward(states: list[FSDPState], optimizer: torch.optim.Optimizer) -> None:
    """Let the next backward step units again, and remove what stands for dropped gradients."""
    for state in states:
        for group in state.groups:
            steps = group.comm.settings.on_delivery
            if isinstance(steps, _UnitSteps) and steps.optimizer is optimizer:
                group.stepped = False
    for options in optimizer.param_groups:
        for param in options["params"]:
            if isinstance(param.grad, _DroppedGrad):
                param.grad = None


class _DroppedGrad(torch.Tensor):
    """The ``.grad`` of a parameter from its step in the backward to ``optimizer.step()``. Every use of it raises.

    None instead would be wrong without an error: clipping would find no gradients, and a norm of 0.
    """

    of_param: str

    @staticmethod
    def of(param: torch.Tensor) -> _DroppedGrad:
        """Return the stand-in for a parameter's gradient. It has no memory."""
        grad: _DroppedGrad = wrapper_like(_DroppedGrad, param)
        grad.of_param = label_of(param)
        return grad

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: torch._ops.OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> NoReturn:
        names = [each.of_param for each in tensors_of((args, kwargs)) if isinstance(each, _DroppedGrad)]
        raise LifecycleError(
            "step_in_backward has stepped the parameter, and dropped its gradient.",
            expected="no use of the gradient after the backward: no clipping by norm, no loss scaling, no sums",
            got=func,
            where=some(names),
            todo="step after the backward, without step_in_backward; or change each gradient before its step, in a "
            "hook of register_post_accumulate_grad_hook",
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<gradient of {self.of_param}, dropped by step_in_backward>"
