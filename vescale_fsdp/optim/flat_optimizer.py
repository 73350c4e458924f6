"""FlatOptimizer: an element-wise torch optimizer that steps whole shards instead of single parameters.

The sharded parameters of a group are adjacent in one allocation, the shard; so are their gradients in the reduced
shard. An optimizer that updates each element alone need not know where one parameter ends::

    shard              | w0      | b0 | w1          | b1 |        one param group for all: one run
    gradients          | w0      | b0 | w1          | b1 |
    exp_avg, ...       | w0      | b0 | w1          | b1 |        state[w0]["exp_avg"] is a view, as w0 is one

A **run** is a sequence of parameters of one param group with only padding in between and with the same step count.
Padding is stepped as well, with gradients of zeros: it stays zero, which users' collectives and quantisers rely on.
The torch optimizer steps one flat tensor per run: a few kernels per unit, however many parameters it has. The public
view is per parameter, as with the torch optimizer alone: `param_groups` have the sharded parameters, `state` has
ragged tensors (views of the flat state). So `state_dict()`, torch's and our checkpoints, learning-rate schedulers and
other numbers of ranks work, and checkpoints of either optimizer load into the other.

    event                                               the run
    all its parameters have gradients, one allocation   is stepped in place
    gradients in other memory                           is stepped from one copy of them
    no parameter has a gradient                         is left alone
    some have none                                      is split permanently: step counts differ from now on
    parameters moved (`.to()`, `assign=True`), loaded   is made again from the state of its parameters

`FlatOptimizer.step_in_backward` steps a unit's runs after its reduction, so that few gradients exist at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale_fsdp.dtensor.piece_map import local_grad, local_tensor
from vescale_fsdp.dtensor.ragged_dtensor import RaggedDTensor, wrap_like
from vescale_fsdp.errors import MisuseError, UnsupportedOpError
from vescale_fsdp.lazy import set_module
from vescale_fsdp.optim.structured_optimizer import copy_state, evaluated
from vescale_fsdp.runtime.fsdp_state import states_of
from vescale_fsdp.torch_private import foreach_copy_, foreach_zero_, local_of, spec_of, storage_id

ELEMENT_WISE = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
"""torch's optimizers whose update of an element depends only on that element's history."""


_COUNTERS = ("step", "eta", "mu", "mu_product")  # state that is one number per parameter


@dataclass
class _FlatRun:
    """Adjacent parameters, and the flat tensor over them that is stepped."""

    params: list[torch.Tensor]
    starts: list[int]  # of each in the run, elements
    flat: torch.Tensor  # 1-D, the memory of the parameters
    gaps: list[tuple[int, int]]  # padding between them, from start to stop in ``flat``
    shown: tuple[int, ...] = ()  # ids of the flat state tensors of which `state` has views

    def flat_grad(self) -> torch.Tensor:
        """The gradients as one tensor: a view if their offsets are those of the parameters, else one copy."""
        grads = [local_grad(param) for param in self.params]
        first = grads[0]
        storage, base = storage_id(first), first.storage_offset()
        placed = zip(grads, self.starts, strict=True)
        if all(g.storage_offset() == base + start and storage_id(g) == storage for g, start in placed):
            flat = torch.as_strided(first, (self.flat.numel(),), (1,), base)
            if self.gaps:
                foreach_zero_([flat[start:stop] for start, stop in self.gaps])
            return flat
        flat = torch.zeros_like(self.flat)
        parts = [flat[start : start + grad.numel()] for grad, start in zip(grads, self.starts, strict=True)]
        foreach_copy_(parts, grads)
        return flat


@set_module("vescale_fsdp.optim")
class FlatOptimizer(torch.optim.Optimizer):
    """Steps runs of parameters with one of torch's element-wise optimizers. Final.

    ``FlatOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-3, fused=True)`` trains with the same bits as
    ``torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)``.

    Args:
        kind: Adam, AdamW, SGD, Adagrad, RMSprop, NAdam, RAdam, Adamax, Adadelta, ASGD or Rprop of `torch.optim`.
        params: sharded or plain parameters, or param groups.
        options: the other arguments of ``kind``, for all groups.

    Raises:
        UnsupportedOpError: for optimizers whose update of an element depends on other elements.

    Examples:
        >>> from vescale_fsdp import fully_shard
        >>> model = fully_shard(torch.nn.Linear(8, 8))
        >>> optimizer = FlatOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-3)
        >>> model(torch.randn(2, 8)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(self, kind: type[torch.optim.Optimizer], params: Any, **options: Any) -> None:
        if kind not in ELEMENT_WISE:
            raise UnsupportedOpError(
                "This optimizer cannot step flat shards: its updates need whole matrices, or are not known "
                "to be element-wise.",
                expected=", ".join(each.__name__ for each in ELEMENT_WISE) + " of torch.optim",
                got=f"{kind.__module__}.{kind.__name__}",
                todo="use it directly, per parameter, or Muon and Shampoo of vescale_fsdp.optim",
            )
        self._kind = kind
        self._options = options
        self._runs: list[_FlatRun] | None = None  # None: to be made at the next step
        self._inner: torch.optim.Optimizer | None = None
        self._histories: dict[torch.Tensor, int] = {}  # equal for parameters that were left out together
        given = list(params)
        super().__init__(given, kind([torch.zeros(1, dtype=torch.float32, device="cpu")], **options).defaults)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_kind": self._kind, "_options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Adopt a loaded or unpickled state; runs are made from it at the next step."""
        super().__setstate__(state)
        self._runs = self._inner = None
        self._histories = {}
        self._order_state()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; runs are made again at the next step."""
        super().add_param_group(param_group)
        self._runs = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step of every run whose parameters have gradients.

        Args:
            closure: evaluates the model and returns the loss; optional.

        Returns:
            What the closure returned, or None.
        """
        loss = evaluated(closure)
        self._step_runs(None)
        return loss

    def step_in_backward(self, model: nn.Module) -> None:
        """Step each unit inside the backward from now on, as soon as its gradients are reduced, and drop the gradients.

        So gradients of at most one unit exist next to weights and state. `step` is still called, for parameters that
        are not sharded. Not possible with it: whatever needs all gradients before a parameter changes (clipping by
        norm, loss scaling), and sums over several backwards other than under ``no_sync``.

        Args:
            model: sharded; its parameters that this optimizer does not have are left alone.
        """
        states = states_of(model)
        if not states:
            raise MisuseError(
                "The model is not sharded.",
                expected="a model that fully_shard was called on",
                got=type(model).__name__,
                where="FlatOptimizer.step_in_backward",
            )
        for state in states:
            for group in state.groups:
                group.comm.change(on_delivery=self._step_delivered)

    @torch.no_grad()
    def _step_delivered(self, params: list[nn.Parameter]) -> None:
        mine: set[torch.Tensor] = set(self._params()).intersection(params)
        if mine:
            self._step_runs(mine)
        for param in mine:
            param.grad = None

    def _step_runs(self, only: set[torch.Tensor] | None) -> None:
        """Step the runs of these parameters, or all."""
        self._split_by_gradients(_runs_of(self._runs or (), only))
        runs = _runs_of(self._current_runs(only), only)
        assert self._inner is not None
        for outer, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update({name: value for name, value in outer.items() if name != "params"})
        for run in runs:
            run.flat.grad = run.flat_grad() if run.params[0].grad is not None else None
        self._inner.step()
        for run in runs:
            run.flat.grad = None
        changed = [self._show(run) for run in runs]
        if any(changed):
            self._order_state()

    # -- runs -----------------------------------------------------------------------------------------

    def _split_by_gradients(self, runs: Sequence[_FlatRun]) -> None:
        """Split runs of which only some parameters have gradients: their step counts differ from now on."""
        for number, run in enumerate(runs):
            missing = [param for param in run.params if param.grad is None]
            if missing and len(missing) < len(run.params):
                left_out = 1 + max(self._histories.values(), default=0) + number
                self._histories.update(dict.fromkeys(missing, left_out))
                self._runs = None

    def _current_runs(self, only: set[torch.Tensor] | None = None) -> list[_FlatRun]:
        """The runs, made again if parameters to be stepped have moved in memory."""
        if self._runs is not None and all(_lies_as_before(run) for run in _runs_of(self._runs, only)):
            return self._runs
        for param in self._params():
            if self._runs is None and param.grad is None:  # before any step: left out from the start
                self._histories.setdefault(param, -1)
        groups, self._runs = [], []
        for group in self.param_groups:
            runs = [_run_of(params) for params in self._adjacent(group["params"])]
            groups.append({**group, "params": [run.flat for run in runs]})
            self._runs += runs
        self._inner = self._kind(groups, **self._options)
        self._take_over(self._runs)
        return self._runs

    def _adjacent(self, params: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Parameters of one group, split where memory has a gap or histories differ."""
        by_address = [(_address(param), param) for param in params]
        by_address.sort(key=lambda pair: pair[0])
        adjacent: list[torch.Tensor] = []
        end: tuple[int, Any] = (0, None)
        for (storage, start, numel), param in by_address:
            layout_ref = param.layout_ref if isinstance(param, RaggedDTensor) else None
            layout = layout_ref[0] if layout_ref is not None else None
            history = (storage, id(layout), self._histories.get(param), self._counters(param))
            padding = -end[0] % layout.align_numel if layout is not None else 0
            if adjacent and (history != end[1] or start != end[0] + padding):
                yield adjacent
                adjacent = []
            adjacent.append(param)
            end = start + numel, history
        if adjacent:
            yield adjacent

    def _counters(self, param: torch.Tensor) -> tuple[Any, ...]:
        """The parts of a parameter's state that are not element-wise, such as step counts."""
        state = self.state.get(param, {})
        values = [(name, None if _per_element(name, value) else value) for name, value in state.items()]
        return tuple((name, v.item() if isinstance(v, torch.Tensor) else v) for name, v in values)

    # -- state ----------------------------------------------------------------------------------------

    def _take_over(self, runs: list[_FlatRun]) -> None:
        """Give the inner optimizer the state of the parameters of these runs."""
        assert self._inner is not None
        saved = {param: dict(values) for param, values in self.state.items()}
        for run in runs:
            first = saved.get(run.params[0], {})
            if first:
                self._inner.state[run.flat] = {
                    name: _room_for(name, value, run.flat) for name, value in first.items()
                }
                self._show(run)
        self._order_state()
        # Copies between placements are collectives: in the order of parameters, since addresses order runs differently
        # on each rank.
        for param, shown in self.state.items():
            if saved.get(param):
                views = {name: value for name, value in shown.items() if _per_element(name, value)}
                copy_state({name: saved[param][name] for name in views}, views)

    def _show(self, run: _FlatRun) -> bool:
        """Put views of a run's flat state into `state`; False if it has them already."""
        assert self._inner is not None
        flat_state = self._inner.state[run.flat]
        shown = tuple(map(id, flat_state.values()))
        if shown == run.shown:
            return False
        run.shown = shown
        for param, start in zip(run.params, run.starts, strict=True):
            self.state[param] = {
                name: _view(value, param, start) if _per_element(name, value) else value
                for name, value in flat_state.items()
            }
        return True

    def _order_state(self) -> None:
        """Sort `state` in the order of `param_groups`, as torch's optimizers have it on every rank.

        ``get_optimizer_state_dict(full_state_dict=True)`` gathers entries of the same index on all ranks.
        """
        order = {param: number for number, param in enumerate(self._params())}
        ordered = sorted(self.state.items(), key=lambda item: order.get(item[0], len(order)))
        self.state = defaultdict(dict, ordered)

    def _params(self) -> Iterator[torch.Tensor]:
        return (param for group in self.param_groups for param in group["params"])


def _runs_of(runs: Sequence[_FlatRun], params: set[torch.Tensor] | None) -> list[_FlatRun]:
    """The runs with one of these parameters; all runs for None."""
    return [run for run in runs if params is None or not params.isdisjoint(run.params)]


def _per_element(name: str, value: Any) -> bool:
    """Whether a part of the state has an element for each of the parameter's."""
    return isinstance(value, torch.Tensor) and name not in _COUNTERS


def _room_for(name: str, value: Any, flat: torch.Tensor) -> Any:
    """A part of the state for a whole run; each run has counters of its own."""
    if _per_element(name, value):
        return torch.zeros_like(flat, dtype=value.dtype)
    return value.clone() if isinstance(value, torch.Tensor) else value


def _address(param: torch.Tensor) -> tuple[int, int, int]:
    """The address of this rank's elements: storage, first element, number."""
    local = local_tensor(param)
    return storage_id(local), int(local.storage_offset()), local.numel()


def _run_of(params: list[torch.Tensor]) -> _FlatRun:
    locals_ = [local_tensor(param) for param in params]
    starts = [_address(param)[1] for param in params]
    flat = torch.as_strided(locals_[0], (starts[-1] + locals_[-1].numel() - starts[0],), (1,), starts[0])
    starts = [start - starts[0] for start in starts]
    ends = [start + local.numel() for start, local in zip(starts, locals_, strict=True)]
    gaps = [(stop, start) for stop, start in zip(ends, starts[1:], strict=False) if stop < start]
    return _FlatRun(params, starts, flat, gaps)


def _lies_as_before(run: _FlatRun) -> bool:
    storage, base = storage_id(run.flat), run.flat.storage_offset()
    return all(
        (local := local_of(param)).storage_offset() == base + start and storage_id(local) == storage
        for param, start in zip(run.params, run.starts, strict=True)
    )


def _view(flat: torch.Tensor, param: torch.Tensor, start: int) -> torch.Tensor:
    """A parameter's part of a flat state tensor, with the parameter's placements."""
    local = local_of(param)
    piece = flat[start : start + local.numel()].view(local.shape)
    if isinstance(param, DTensor):
        return wrap_like(piece, spec_of(param), like=param)
    return piece
