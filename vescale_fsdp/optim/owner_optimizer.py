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

from vescale_fsdp.dtensor.piece_map import local_grad, local_tensor, pieces_of
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor
from vescale_fsdp.dtensor.spec import make_spec, shape_of_local
from vescale_fsdp.errors import LayoutError, UnsupportedOpError
from vescale_fsdp.layout.placement import RaggedShard
from vescale_fsdp.lazy import set_module
from vescale_fsdp.optim.owner_trial import Like, check_parameters_apart, state_after_a_step
from vescale_fsdp.optim.structured_optimizer import AdamWOptions, StructuredOptimizer

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
        LayoutError: if a parameter is cut over several ranks.
        UnsupportedOpError: if the state of the class has values other than tensors and numbers; if its step needs more
            than parameters and gradients, communicates, or depends on all parameters at once.

    Examples:
        >>> from vescale_fsdp import fully_shard
        >>> model = fully_shard(torch.nn.Linear(8, 8, bias=False), granularity="whole")
        >>> optimizer = OwnerOptimizer(torch.optim.Muon, model.parameters(), lr=0.02)
        >>> model(torch.randn(2, 8)).sum().backward()
        >>> optimizer.step()
    """

    algorithm: ClassVar[str] = "owner"
    recorded: ClassVar[tuple[str, ...]] = ("steps_by",)
    pickled: ClassVar[tuple[str, ...]] = ("_adamw", "_kind", "_name", "_options")

    def __init__(self, kind: type[torch.optim.Optimizer], params: Any, **options: Any) -> None:
        self._kind, self._options = kind, options
        self._inner: torch.optim.Optimizer | None = None  # made at the first step
        self._plain: dict[torch.Tensor, nn.Parameter] = {}  # the owned parameters of `_inner`
        self._kinds: dict[Any, dict[str, Any]] = {}  # state after one step, by kind of parameter
        self._likes: dict[torch.Tensor, dict[str, Any]] = {}  # the same, by parameter
        defaults = dict(
            kind([nn.Parameter(torch.ones(2, 2, dtype=torch.float32, device="cpu"))], **options).defaults
        )
        self._name = defaults["steps_by"] = f"{kind.__module__}.{kind.__qualname__}"
        super().__init__(params, defaults, adamw_params=None, adamw=AdamWOptions())
        groups = [(group["params"], _inner_options(group)) for group in self.param_groups]
        check_parameters_apart(
            self._make, self._name, [[_like(p, options) for p in own if p.numel()] for own, options in groups]
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._inner, self._plain, self._kinds, self._likes = None, {}, {}, {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, and create their state."""
        super().add_param_group(param_group)
        self._inner, self._plain = None, {}  # made again from the state at the next step

    def _init_state(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Make state of zeros, with the names, shapes and dtypes of the class's own after one step."""
        pieces = pieces_of(param)
        if pieces is None or sum(1 for numel in pieces.numels if numel) > 1:
            raise LayoutError(
                "OwnerOptimizer steps whole parameters, and this one is cut over several ranks.",
                expected='fully_shard(..., granularity="whole")',
                got=param.placements if isinstance(param, DTensor) else type(param).__name__,
                where=f"parameter of shape {tuple(param.shape)}",
                todo='shard with granularity="whole", or with {pattern: "whole"} for the parameters of this optimizer',
            )
        state = {_STEPPED: _shared_with(param, torch.zeros((), dtype=torch.uint8, device="cpu"))}
        self._likes[param] = likes = self._state_after_a_step(param, group)
        for name, value in likes.items():
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
            for name, value in state.items():
                if not isinstance(value, torch.Tensor) and type(value) not in _NUMBERS:
                    raise UnsupportedOpError(
                        f"OwnerOptimizer cannot reshard the state of {self._kind.__name__}.",
                        expected="state of tensors and numbers",
                        got=f"{name}: {type(value).__name__}",
                        where=f"parameter of shape {tuple(param.shape)}",
                        todo="shard the model so that this optimizer's parameters are plain: ignored_params",
                    )
            self._kinds[kind] = {
                name: value.to("meta") if isinstance(value, torch.Tensor) else value
                for name, value in state.items()
            }
        return self._kinds[kind]

    def _step_groups(self, groups: list[dict[str, Any]]) -> None:
        """Step the owned parameters by the inner optimizer, on plain tensors."""
        inner = self._inner if self._inner is not None else self._make_inner(groups)
        for outer, own in zip(groups, inner.param_groups, strict=True):
            own.update(_inner_options(outer))
        for param, plain in self._plain.items():
            plain.data = local_tensor(param).view(plain.shape)  # parameters may have moved in memory
            plain.grad = None if param.grad is None else local_grad(param).view(plain.shape)
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
        if not local_tensor(state[_STEPPED], "state").item():
            inner.state.pop(plain, None)
            return
        if param not in self._likes:  # after a copy or a pickle
            self._likes[param] = self._state_after_a_step(param, self._group_of(param))
        for name, like in self._likes[param].items():
            local = local_tensor(state[name], "state")
            is_number = not isinstance(like, torch.Tensor)
            inner.state[plain][name] = (
                type(like)(local.item())
                if is_number
                else _unchanged(inner, plain, name, local.view(like.shape))
            )

    def _push(self, param: torch.Tensor, changed: dict[str, Any]) -> None:
        """Bring the inner optimizer's state of an owned parameter into `state`."""
        state = self.state[param]
        if changed.keys() != state.keys() - {_STEPPED}:
            raise UnsupportedOpError(
                f"The state of {self._kind.__name__} has changed its names, so it could not be saved.",
                expected=sorted(state.keys() - {_STEPPED}),
                got=sorted(map(str, changed)),
                where=f"parameter of shape {tuple(param.shape)}",
                todo="use an optimizer whose state is complete after the first step",
            )
        local_tensor(state[_STEPPED], "state").fill_(1)
        for name, value in changed.items():
            local = local_tensor(state[name], "state")
            if not isinstance(value, torch.Tensor):
                local.fill_(value)
            elif value.data_ptr() != local.data_ptr():
                local.copy_(value.detach().reshape(local.shape))

    def _group_of(self, param: torch.Tensor) -> dict[str, Any]:
        return next(g for g in self.param_groups if any(each is param for each in g["params"]))


def _inner_options(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a group that the inner optimizer gets."""
    return {name: value for name, value in group.items() if name not in _OURS}


def _like(param: torch.Tensor, options: dict[str, Any]) -> Like:
    return Like(tuple(param.shape), param.dtype, local_tensor(param).device, options)


def _unchanged(
    inner: torch.optim.Optimizer, plain: nn.Parameter, name: str, value: torch.Tensor
) -> torch.Tensor:
    """Return the inner optimizer's own tensor if it has this memory, since views of it are not replaced needlessly."""
    own = inner.state[plain].get(name)
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
