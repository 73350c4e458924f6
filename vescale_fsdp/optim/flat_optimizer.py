"""FlatOptimizer: an element-wise torch optimizer that steps whole shards instead of single parameters.

The sharded parameters of a group are adjacent in one allocation, the shard, and their gradients are adjacent in the
reduced shard. An optimizer that updates each element separately can treat them as one tensor::

    shard              | w0      | b0 | w1          | b1 |        one param group for all: one run
    gradients          | w0      | b0 | w1          | b1 |
    exp_avg, ...       | w0      | b0 | w1          | b1 |        state[w0]["exp_avg"] is a view, like w0 itself

A **run** is a sequence of parameters of one param group that have the same step count, and only padding between them in
memory. Padding is stepped too, with gradients of zeros, so that it stays zero; users' collectives and quantizers rely
on that. The torch optimizer steps one flat tensor per run: a few kernels per unit, independent of the number of
parameters. The public attributes are per parameter, as in the torch optimizer: `param_groups` has the sharded
parameters, `state` has ragged tensors, which are views of the flat state. So `state_dict()`, torch's and this library's
checkpoints, learning-rate schedulers, and resuming on another number of ranks work. A checkpoint of the torch optimizer
loads into this one, and vice versa.

    event                                                  effect on the run
    all parameters have gradients in one allocation        stepped in place
    gradients are in several allocations                   stepped with one copy of the gradients
    no parameter has a gradient                            not stepped
    only some parameters have gradients                    split permanently, because step counts differ from now on
    parameters moved (`.to()`, `assign=True`) or loaded    rebuilt from the state of its parameters

`FlatOptimizer.step_in_backward` steps a unit's runs right after its gradients are reduced, so that the gradients of at
most one unit exist at a time.
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
"""torch's optimizers whose update of an element depends only on that element's gradients and state."""


_COUNTERS = ("step", "eta", "mu", "mu_product")  # names of state that has one number per parameter


@dataclass
class _FlatRun:
    """Adjacent parameters, and the flat tensor over their memory that the torch optimizer steps."""

    params: list[torch.Tensor]
    starts: list[int]  # index in ``flat`` of each parameter's first element
    flat: torch.Tensor  # 1-D, a view of the parameters' memory, with the padding between them
    gaps: list[tuple[int, int]]  # padding between the parameters: (start, stop) in ``flat``
    shown: tuple[int, ...] = ()  # ids of the flat state tensors whose views are in `FlatOptimizer.state`

    @staticmethod
    def of(params: list[torch.Tensor]) -> _FlatRun:
        """Make the run of parameters that are adjacent in memory and sorted by address."""
        locals_ = [local_tensor(param) for param in params]
        base = int(locals_[0].storage_offset())
        starts = [int(local.storage_offset()) - base for local in locals_]
        ends = [start + local.numel() for start, local in zip(starts, locals_, strict=True)]
        flat = torch.as_strided(locals_[0], (ends[-1],), (1,), base)
        # Not strict: no parameter follows the last one.
        gaps = [(stop, start) for stop, start in zip(ends, starts[1:], strict=False) if stop < start]
        return _FlatRun(params, starts, flat, gaps)

    def is_current(self) -> bool:
        """Return whether the parameters are still at their offsets in the memory of ``flat``."""
        storage, base = storage_id(self.flat), self.flat.storage_offset()
        return all(
            (local := local_of(param)).storage_offset() == base + start and storage_id(local) == storage
            for param, start in zip(self.params, self.starts, strict=True)
        )

    def flat_grad(self) -> torch.Tensor:
        """Return the gradients as one tensor: a view if they have the parameters' distances in memory, else a copy."""
        grads = [local_grad(param) for param in self.params]
        first = grads[0]
        storage, base = storage_id(first), first.storage_offset()
        placed = zip(grads, self.starts, strict=True)
        if all(g.storage_offset() == base + start and storage_id(g) == storage for g, start in placed):
            flat = torch.as_strided(first, (self.flat.numel(),), (1,), base)
            # Zeros, so that a step leaves the parameters' padding zero. In the reduced shard it may have any values.
            if self.gaps:
                foreach_zero_([flat[start:stop] for start, stop in self.gaps])
            return flat
        flat = torch.zeros_like(self.flat)  # zeros, since padding is stepped too and must stay zero
        parts = [flat[start : start + grad.numel()] for grad, start in zip(grads, self.starts, strict=True)]
        foreach_copy_(parts, grads)
        return flat


@set_module("vescale_fsdp.optim")
class FlatOptimizer(torch.optim.Optimizer):
    """Steps adjacent parameters as one flat tensor with one of torch's element-wise optimizers. Do not subclass it.

    ``FlatOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-3, fused=True)`` computes the same bits as
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
        if kind not in ELEMENT_WISE:  # not issubclass: the update of a subclass may mix elements
            raise UnsupportedOpError(
                "FlatOptimizer does not support this optimizer: its updates need whole matrices, or are not known to "
                "be element-wise.",
                expected=", ".join(each.__name__ for each in ELEMENT_WISE) + " of torch.optim",
                got=f"{kind.__module__}.{kind.__name__}",
                todo="use this optimizer directly, or Muon or Shampoo of vescale_fsdp.optim",
            )
        self._kind = kind
        self._options = options
        self._runs: list[_FlatRun] | None = None  # None: built at the next step
        self._inner: torch.optim.Optimizer | None = None  # the torch optimizer, which steps the flat tensors
        # A number per parameter that was skipped without its neighbors, for lack of a gradient; each such step gives a
        # new number. Parameters with different numbers have different step counts, so they cannot be in one run.
        self._histories: dict[torch.Tensor, int] = {}
        # torch's own optimizer, made for a dummy parameter, checks the options and fills in the defaults.
        defaults = kind([torch.zeros(1, dtype=torch.float32, device="cpu")], **options).defaults
        super().__init__(list(params), defaults)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_kind": self._kind, "_options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the optimizer after loading or unpickling; the next step builds runs from the new state."""
        super().__setstate__(state)
        self._runs = self._inner = None
        self._histories = {}
        self._order_state()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; runs are rebuilt at the next step."""
        super().add_param_group(param_group)
        self._runs = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step all parameters that have gradients.

        Args:
            closure: evaluates the model and returns the loss; optional.

        Returns:
            What the closure returned, or None.
        """
        loss = evaluated(closure)
        self._step_runs(None)
        return loss

    def step_in_backward(self, model: nn.Module) -> None:
        """From now on, step each unit in the backward, as soon as its gradients are reduced, and drop the gradients.

        So gradients of at most one unit exist at a time. The user must still call `step`, for parameters that are not
        sharded. Features that need all gradients before a parameter changes are not possible: clipping by norm, loss
        scaling, and gradient accumulation other than under ``no_sync``.

        Args:
            model: a sharded model. Its parameters that are not in this optimizer are ignored.

        Raises:
            MisuseError: if no module of the model is sharded.
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
        """Step the parameters of one group, whose gradients have just been reduced, and drop their gradients."""
        mine: set[torch.Tensor] = set(self._params()).intersection(params)
        if mine:
            self._step_runs(mine)
        for param in mine:
            param.grad = None

    def _step_runs(self, only: set[torch.Tensor] | None) -> None:
        """Step the runs that contain any of these parameters; None: all runs."""
        # If only some parameters of a run have gradients, their step counts differ from now on: split the run.
        for number, run in enumerate(_runs_of(self._runs or (), only)):
            missing = [param for param in run.params if param.grad is None]
            if missing and len(missing) < len(run.params):
                # A number that no other run gets: parameters of different runs may have different step counts.
                history = 1 + max(self._histories.values(), default=0) + number
                self._histories.update(dict.fromkeys(missing, history))
                self._runs = None
        runs = _runs_of(self._current_runs(only), only)
        assert self._inner is not None
        # Copy options to the torch optimizer: users and schedulers change them in this optimizer's ``param_groups``.
        for outer, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            # Without "params", which are the flat tensors in the torch optimizer.
            inner.update({name: value for name, value in outer.items() if name != "params"})
        for run in runs:
            # The first parameter stands for all: after the split above, all or none of a run have gradients.
            run.flat.grad = run.flat_grad() if run.params[0].grad is not None else None
        self._inner.step()
        for run in runs:
            run.flat.grad = None
        changed = [self._show(run) for run in runs]
        if any(changed):
            self._order_state()

    # -- runs -----------------------------------------------------------------------------------------

    def _current_runs(self, only: set[torch.Tensor] | None = None) -> list[_FlatRun]:
        """Return the runs. Rebuild them if `_runs` is None, or if one of the parameters to step has moved in memory."""
        if self._runs is not None and all(run.is_current() for run in _runs_of(self._runs, only)):
            return self._runs
        for param in self._params():
            # -1: no gradient when the runs are built, so these parameters are not in a run with parameters that step.
            # `setdefault`, since a parameter that was skipped later has a number of its own.
            if self._runs is None and param.grad is None:
                self._histories.setdefault(param, -1)
        groups, self._runs = [], []
        for group in self.param_groups:
            runs = [_FlatRun.of(params) for params in self._adjacent(group["params"])]
            groups.append({**group, "params": [run.flat for run in runs]})
            self._runs += runs
        self._inner = self._kind(groups, **self._options)
        self._take_over(self._runs)
        return self._runs

    def _adjacent(self, params: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Yield the parameters of each run of one param group, in the order of addresses.

        A run ends where parameters are not adjacent in memory, or where step counts differ.
        """
        by_address = []
        for param in params:
            local = local_tensor(param)
            # With the size, so that an empty parameter comes before a parameter with the same offset.
            by_address.append(((storage_id(local), int(local.storage_offset()), local.numel()), param))
        by_address.sort(key=lambda pair: pair[0])  # without the parameter, since tensors cannot be compared
        adjacent: list[torch.Tensor] = []
        end: tuple[int, Any] = (0, None)
        for (storage, start, numel), param in by_address:
            layout_ref = param.layout_ref if isinstance(param, RaggedDTensor) else None
            layout = layout_ref[0] if layout_ref is not None else None  # None for plain tensors
            # State that is not per element, such as step counts, must be equal in a run.
            values = [
                (name, None if _per_element(name, v) else v) for name, v in self.state.get(param, {}).items()
            ]
            counters = tuple((name, v.item() if isinstance(v, torch.Tensor) else v) for name, v in values)
            # What must be equal in a run.
            history = (storage, id(layout), self._histories.get(param), counters)
            # Padding up to the next aligned offset does not end a run. Plain tensors have no padding.
            padding = -end[0] % layout.align_numel if layout is not None else 0
            if adjacent and (history != end[1] or start != end[0] + padding):
                yield adjacent
                adjacent = []
            adjacent.append(param)
            end = start + numel, history
        if adjacent:
            yield adjacent

    # -- state ----------------------------------------------------------------------------------------

    def _take_over(self, runs: list[_FlatRun]) -> None:
        """Copy the state of the parameters of these runs into flat state tensors of the torch optimizer."""
        assert self._inner is not None
        saved = {param: dict(values) for param, values in self.state.items()}
        for run in runs:
            # The first parameter's state stands for all, since counters in a run are equal. State per element is
            # copied at the end of this function.
            first = saved.get(run.params[0], {})
            if first:
                flat_state = self._inner.state[run.flat] = dict(first)
                for name, value in first.items():
                    if _per_element(name, value):
                        flat_state[name] = torch.zeros_like(run.flat, dtype=value.dtype)
                    elif isinstance(value, torch.Tensor):
                        flat_state[name] = value.clone()  # not shared: each run increments its own counters
                self._show(run)
        self._order_state()
        # Copies between placements are collectives, so all ranks need the same order. That is the order of `state`, not
        # of runs: runs are in the order of addresses, which differ between ranks.
        for param, shown in self.state.items():
            if saved.get(param):
                views = {name: value for name, value in shown.items() if _per_element(name, value)}
                copy_state({name: saved[param][name] for name in views}, views)

    def _show(self, run: _FlatRun) -> bool:
        """Put views of a run's flat state tensors into `state`. Returns False if `state` has these views already."""
        assert self._inner is not None
        flat_state = self._inner.state[run.flat]
        shown = tuple(map(id, flat_state.values()))
        if shown == run.shown:  # usual after the first step: later steps update state in place
            return False
        run.shown = shown
        for param, start in zip(run.params, run.starts, strict=True):
            self.state[param] = {
                name: _view(value, param, start) if _per_element(name, value) else value
                for name, value in flat_state.items()
            }
        return True

    def _order_state(self) -> None:
        """Sort `state` in the order of `param_groups`, which is the same on every rank.

        torch's ``get_optimizer_state_dict(full_state_dict=True)`` gathers the entries of `state` one by one, so ranks
        with different orders would wait for each other.
        """
        order = {param: number for number, param in enumerate(self._params())}
        # Entries of parameters that are in no param group come last.
        ordered = sorted(self.state.items(), key=lambda item: order.get(item[0], len(order)))
        self.state = defaultdict(dict, ordered)

    def _params(self) -> Iterator[torch.Tensor]:
        """Return the parameters of all param groups, in their order."""
        return (param for group in self.param_groups for param in group["params"])


def _runs_of(runs: Sequence[_FlatRun], params: set[torch.Tensor] | None) -> list[_FlatRun]:
    """Return the runs that contain any of these parameters; None: all runs."""
    return [run for run in runs if params is None or not params.isdisjoint(run.params)]


def _per_element(name: str, value: Any) -> bool:
    """Return whether the state ``name`` has one element per element of the parameter; counters are tensors too."""
    return isinstance(value, torch.Tensor) and name not in _COUNTERS


def _view(flat: torch.Tensor, param: torch.Tensor, start: int) -> torch.Tensor:
    """Return a parameter's part of a flat state tensor, with the parameter's placements."""
    local = local_of(param)
    piece = flat[start : start + local.numel()].view(local.shape)
    if isinstance(param, DTensor):
        return wrap_like(piece, spec_of(param), like=param)
    return piece
