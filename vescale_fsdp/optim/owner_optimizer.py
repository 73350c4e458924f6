"""OwnerOptimizer: an optimizer of another package that needs whole matrices; each rank steps the matrices it owns.

With ``fully_shard(model, granularity="whole")`` the planner gives every parameter to one rank. That rank steps it, as a
plain tensor of the global shape in the memory of its piece, with an unchanged optimizer class::

    sharded parameter (ragged)   rank 0: [matrix]   rank 1: []         state[param][name] (ragged, whole on the owner)
    inner optimizer              rank 0: (n, m)     rank 1: not there  inner.state[...][name], the same memory

No rank knows the state of a class before its first step. So for each kind of parameter, one step on a tensor of the
same shape is made at construction and discarded: every rank then has the names, shapes and dtypes of all state, owned
or not, and a checkpoint has the same keys on all ranks. ``stepped`` counts whether the owner has made a first step.
Other trials check that parameters do not depend on each other (`owner_trial`).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp.dtensor.first_order import first_order
from vescale_fsdp.dtensor.piece_map import label_of, local_grad, local_tensor, pieces_of
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor
from vescale_fsdp.dtensor.spec import make_spec, shape_of_local
from vescale_fsdp.errors import LayoutError, UnsupportedOpError
from vescale_fsdp.layout.placement import RaggedShard
from vescale_fsdp.lazy import set_module
from vescale_fsdp.optim.owner_trial import (
    Like,
    check_parameters_apart,
    filled,
    groups_of,
    leaves_of,
    state_after_a_step,
)
from vescale_fsdp.optim.structured_optimizer import AdamWOptions, StructuredOptimizer, as_groups, check_class

_STEPPED = "stepped"  # name of our own state: 1 from the owner's first step on
_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}  # dtypes that store numbers exactly
_OURS = ("params", "algorithm", "steps_by")  # keys of param groups that the inner optimizer does not get


@set_module("vescale_fsdp.optim")
class OwnerOptimizer(StructuredOptimizer):
    """Steps each parameter on the rank that owns it, by any optimizer class, without communication.

    Results have the bits of the same class on one process. Its update of a parameter must depend on this parameter
    alone, which trials on small tensors check at construction. Each rank must own whole parameters:
    ``fully_shard(model, granularity="whole")``. Plain and replicated parameters are stepped by every rank.

    Args:
        kind: the optimizer class, such as `torch.optim.Muon`.
        params: sharded or plain parameters, or param groups.
        options: the other arguments of ``kind``, for all groups.

    Raises:
        ArgumentError: if the first argument is not a class, as when the parameters come first.
        LayoutError: if a parameter is cut over several ranks.
        UnsupportedOpError: if the state of the class has values other than tensors and numbers; if its step needs more
            than parameters and dense gradients (a closure, gradients with a graph), communicates, or depends on all
            parameters at once. Errors of the class's constructor pass.

    Examples:
        >>> from vescale_fsdp import fully_shard
        >>> model = fully_shard(torch.nn.Linear(8, 8, bias=False), granularity="whole")
        >>> optimizer = OwnerOptimizer(torch.optim.Muon, model.parameters(), lr=0.02)
        >>> model(torch.randn(2, 8)).sum().backward()
        >>> optimizer.step()
    """

    algorithm: ClassVar[str] = "owner"
    recorded: ClassVar[tuple[str, ...]] = ("steps_by",)
    pickled: ClassVar[tuple[str, ...]] = ("_adamw", "_kind", "_options")

    def __init__(self, kind: type[torch.optim.Optimizer], params: Any, **options: Any) -> None:
        check_class("OwnerOptimizer", kind, params)
        self._kind, self._options = kind, options
        self._inner: torch.optim.Optimizer | None = None  # made at the first step
        self._plain: dict[torch.Tensor, nn.Parameter] = {}  # the owned parameters of `_inner`
        self._kinds: dict[Any, dict[str, Any]] = {}  # state after one step, by kind of parameter
        self._likes: dict[torch.Tensor, dict[str, Any]] = {}  # the same, by parameter
        self._stepped: set[torch.Tensor] = set()  # the parameters whose state `_inner` has
        if "eval" in dir(kind):
            raise UnsupportedOpError(
                f"{self._name} changes parameters outside of its step, and OwnerOptimizer only steps.",
                expected="an optimizer without train() and eval()",
                got="eval()",
                where=f"OwnerOptimizer({self._name}, ...)",
                todo="step sharded parameters by the class itself",
            )
        defaults, outer = groups_of(self._make, as_groups(params))
        defaults["steps_by"] = self._name
        super().__init__(outer, defaults, adamw_params=None, adamw=AdamWOptions())
        groups = [(group["params"], _inner_options(group)) for group in self.param_groups]
        check_parameters_apart(
            self._make, self._name, [[_like(p, options) for p in own if p.numel()] for own, options in groups]
        )

    @property
    def _name(self) -> str:
        return f"{self._kind.__module__}.{self._kind.__qualname__}"

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._inner, self._plain, self._stepped, self._kinds, self._likes = None, {}, set(), {}, {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, and create their state."""
        super().add_param_group(param_group)
        self._forget_inner()

    def _forget_inner(self) -> None:
        """Let the next step make the inner optimizer again, from the state."""
        self._inner, self._plain, self._stepped = None, {}, set()

    def _init_state(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Make state of zeros, with the names, shapes and dtypes of the class's own after one step."""
        pieces = pieces_of(param)
        if pieces is None or sum(1 for numel in pieces.numels if numel) > 1:
            raise LayoutError(
                "OwnerOptimizer steps whole parameters, and this one is cut over several ranks.",
                expected='fully_shard(..., granularity="whole")',
                got=param.placements if isinstance(param, DTensor) else type(param).__name__,
                where=label_of(param),
                todo='shard with granularity="whole", or with {pattern: "whole"} for the parameters of this optimizer',
            )
        state = {_STEPPED: _shared_with(param, torch.zeros((), dtype=torch.uint8, device="cpu"))}
        self._likes[param] = likes = self._state_after_a_step(param, group)
        for name, value in leaves_of(likes).items():
            # float64, so that a number is stored without rounding.
            like = (
                value
                if isinstance(value, torch.Tensor)
                else torch.tensor(value, dtype=_NUMBERS[type(value)], device="cpu")
            )
            state[name] = _shared_with(param, torch.zeros_like(like, dtype=like.dtype, device="cpu"))
        return state

    def _state_after_a_step(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Return the state that the class has after one step of a parameter of this kind."""
        options = _inner_options(group)
        kind = (tuple(param.shape), param.dtype, param.device, str(options))
        if kind not in self._kinds:
            state = state_after_a_step(self._make, self._name, _like(param, options))
            for name, value in leaves_of(state).items():
                if not isinstance(value, torch.Tensor) and type(value) not in _NUMBERS:
                    raise UnsupportedOpError(
                        f"OwnerOptimizer cannot reshard the state of {self._kind.__name__}.",
                        expected="state of tensors and numbers, in lists or dicts if need be",
                        got=f"{name}: {type(value).__name__}",
                        where=label_of(param),
                        todo="shard the model so that this optimizer's parameters are plain: ignored_params",
                    )
            without_values = {
                name: value.to("meta") if isinstance(value, torch.Tensor) else value
                for name, value in leaves_of(state).items()
            }
            self._kinds[kind] = filled(state, without_values)
        return self._kinds[kind]

    def _step_groups(self, groups: list[dict[str, Any]]) -> None:
        """Step the owned parameters by the inner optimizer, on plain tensors."""
        if any(
            not self._has_stepped(param) for param in self._stepped
        ):  # a load has brought an earlier state
            self._forget_inner()
        inner = self._inner if self._inner is not None else self._make_inner(groups)
        for outer, own in zip(groups, inner.param_groups, strict=True):
            own.update(_inner_options(outer))
        for param, plain in self._plain.items():
            plain.data = local_tensor(param).view(plain.shape)  # parameters may have moved in memory
            plain.grad = _grad_of(param, plain)
            self._pull(param, plain, inner)
        with torch.enable_grad():  # as in the caller's own step: some classes call autograd
            inner.step()
        for param, plain in self._plain.items():
            plain.grad = None
            if inner.state.get(plain):
                self._push(param, inner.state[plain])
        for outer, own in zip(groups, inner.param_groups, strict=True):
            outer.update(_inner_options(own))

    def _make_inner(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        inner_groups = []
        for group in groups:
            owned = [p for p in group["params"] if not p.numel() or local_tensor(p).numel()]
            for param in owned:
                self._plain[param] = nn.Parameter(local_tensor(param).view(param.shape))
            inner_groups.append({**_inner_options(group), "params": [self._plain[param] for param in owned]})
        self._inner = self._make(inner_groups)
        return self._inner

    def _make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return self._kind(groups, **self._options)

    def _pull(self, param: torch.Tensor, plain: nn.Parameter, inner: torch.optim.Optimizer) -> None:
        """Let the inner optimizer have the state in `state`, which a load may have changed."""
        state = self.state[param]
        if not self._has_stepped(param):
            return
        if param not in self._likes:  # after a copy or a pickle
            self._likes[param] = self._state_after_a_step(param, self._group_of(param))
        own, values = leaves_of(inner.state[plain]), {}
        for name, like in leaves_of(self._likes[param]).items():
            local = local_tensor(state[name], "state")
            is_number = not isinstance(like, torch.Tensor)
            values[name] = (
                type(like)(local.item()) if is_number else _unchanged(own.get(name), local.view(like.shape))
            )
        inner.state[plain].update(filled(self._likes[param], values))

    def _push(self, param: torch.Tensor, changed: dict[str, Any]) -> None:
        """Bring the inner optimizer's state of an owned parameter into `state`."""
        state, changed = self.state[param], leaves_of(changed)
        expected, got = ({name: _numel(value) for name, value in each.items()} for each in (state, changed))
        del expected[_STEPPED]
        if got != expected:
            raise UnsupportedOpError(
                f"The state of {self._kind.__name__} has other names or sizes than after a first step.",
                expected=f"elements per name {expected}",
                got=got,
                where=label_of(param),
                todo="use an optimizer whose state is complete after the first step",
            )
        local_tensor(state[_STEPPED], "state").fill_(1)
        self._stepped.add(param)
        for name, value in changed.items():
            local = local_tensor(state[name], "state")
            if not isinstance(value, torch.Tensor):
                local.fill_(value)
            elif value.data_ptr() != local.data_ptr():
                local.copy_(value.detach().reshape(local.shape))

    def _has_stepped(self, param: torch.Tensor) -> bool:
        return bool(local_tensor(self.state[param][_STEPPED], "state").item())

    def _group_of(self, param: torch.Tensor) -> dict[str, Any]:
        return next(g for g in self.param_groups if any(each is param for each in g["params"]))


def _numel(value: Any) -> int:
    return value.numel() if isinstance(value, torch.Tensor) else 1


def _inner_options(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a group that the inner optimizer gets."""
    return {name: value for name, value in group.items() if name not in _OURS}


def _grad_of(param: torch.Tensor, plain: nn.Parameter) -> torch.Tensor | None:
    """Return the owned gradient in the shape of ``plain``; with a graph if the parameter's has one."""
    if param.grad is None:
        return None
    grad = local_grad(param).view(plain.shape)
    if not param.grad.requires_grad:
        return grad
    return first_order(plain, lambda: grad, label_of(param))


def _like(param: torch.Tensor, options: dict[str, Any]) -> Like:
    return Like(tuple(param.shape), param.dtype, local_tensor(param).device, options)


def _unchanged(own: Any, value: torch.Tensor) -> torch.Tensor:
    """Return the inner optimizer's own tensor if it has this memory, since views of it are not replaced needlessly."""
    return own if isinstance(own, torch.Tensor) and own.data_ptr() == value.data_ptr() else value


def _shared_with(param: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """Return ``zeros`` as a tensor that is whole on the ranks that own ``param``; plain for a plain parameter."""
    device = local_tensor(param).device
    zeros = zeros.view(zeros.shape or (1,))  # a ragged tensor has at least one dim
    if not isinstance(param, DTensor) or all(p.is_replicate() for p in param.placements):
        return zeros.to(device)
    placements: list[Placement] = []
    for placement in param.placements:
        if placement.is_replicate():
            placements.append(Replicate())
            continue
        pieces = pieces_of(param)
        assert pieces is not None
        owners = [int(numel > 0) for numel in pieces.numels]
        placements.append(RaggedShard((), tuple(owners) if any(owners) else (1, *owners[1:])))
    spec = make_spec(param.device_mesh, tuple(placements), zeros.shape, zeros.dtype)
    return RaggedDTensor.wrap(torch.zeros(shape_of_local(spec), dtype=zeros.dtype, device=device), spec)
