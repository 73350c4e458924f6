"""StructuredOptimizer: the base of Muon, Shampoo and AdamW8bit, whose updates need whole matrices or blocks.

`adamw8bit.py` is an example for writing such an optimizer: a `BatchedOptimizer` with ``granularity()`` for
`fully_shard`, ``_init_state`` with a tensor of one value per block (`zeros_sharded_with`), ``_kind`` and
``_step_batch``.

- State is created at construction, for every parameter on every rank, so that a checkpoint has the same keys on all
  ranks and can be loaded before the first step.
- Each param group records the options that define the meaning of its state (momentum form, block size, map). Loading a
  checkpoint with other options raises.
- torch's AdamW steps a param group with ``algorithm="adamw"``, on this rank's elements.
- State keeps its dtype when loaded. `torch.optim.Optimizer.load_state_dict` casts floating-point state to the
  parameter's dtype: an fp32 scale or counter of a bf16 parameter would lose precision (a bf16 counter stops at 256).
  Here, loading copies values into the tensors that were created at construction (`copy_state`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from vescale_fsdp.dtensor.meeting import one_meeting
from vescale_fsdp.dtensor.piece_map import label_of, local_grad, local_part_of, local_tensor, pieces_of
from vescale_fsdp.dtensor.ragged_dtensor import redistribute
from vescale_fsdp.errors import ArgumentError, CheckpointError, LayoutError
from vescale_fsdp.lazy import set_module
from vescale_fsdp.torch_modes import plainly
from vescale_fsdp.torch_private import local_of

T = TypeVar("T")

BATCH_NUMEL = 8 << 20  # bounds memory: a step has up to a dozen fp32 temporaries with this many elements


@set_module("vescale_fsdp.optim")
@dataclass(frozen=True)
class AdamWOptions:
    """Options for the parameters that AdamW steps; the defaults are those of `torch.optim.AdamW`.

    Examples:
        >>> AdamWOptions(lr=3e-4, weight_decay=0.1).betas
        (0.9, 0.999)
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2

    def __post_init__(self) -> None:
        check_rates(self.lr, self.betas, self.eps, self.weight_decay)


def check_rates(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Check the rates of AdamW and related optimizers.

    Raises:
        LayoutError: if rates are out of range; lists their names.
    """
    bad = {
        "lr": not lr >= 0,  # not `lr < 0`, which accepts NaN
        "betas": not (0 <= betas[0] < 1 and 0 <= betas[1] <= 1),  # a second beta of 1: Shampoo's plain sums
        "eps": not eps >= 0,
        "weight_decay": not weight_decay >= 0,
    }
    if any(bad.values()):
        raise LayoutError(
            f"The optimizer does not accept these values: {', '.join(n for n, is_bad in bad.items() if is_bad)}.",
            expected="lr, eps, weight_decay >= 0 and betas in [0, 1) (for Shampoo, the second may be 1)",
            got=f"lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay}",
            todo="correct the optimizer's arguments",
        )


class StructuredOptimizer(torch.optim.Optimizer, ABC):
    """Base of optimizers whose steps depend on how parameters are sharded. Subclasses must not be subclassed."""

    algorithm: ClassVar[str]
    recorded: ClassVar[tuple[str, ...]] = ()
    """Keys of a param group that define the meaning of its state. A checkpoint to load must have the same values."""

    pickled: ClassVar[tuple[str, ...]] = ("_adamw",)
    """Attributes that copies and pickles of the optimizer contain, in addition to those of torch's optimizers."""

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        adamw_params: Iterable[Any] | None,
        adamw: AdamWOptions,
    ) -> None:
        self._adamw = adamw
        groups = as_groups(params)
        if rest := list(adamw_params or ()):
            groups.append({"params": rest, "algorithm": "adamw"})
        super().__init__(groups, {"algorithm": self.algorithm, **defaults})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self.pickled}}

    @abstractmethod
    def _init_state(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Make the complete initial state of a parameter that this optimizer's own algorithm steps.

        Raises:
            LayoutError: if the algorithm does not support this parameter or its placements.
        """

    @abstractmethod
    def _step_groups(self, groups: list[dict[str, Any]]) -> None:
        """Step all parameters that have a gradient: ``groups`` by this optimizer's algorithm, other groups by AdamW."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, and create their state.

        Raises:
            LayoutError: if the group's algorithm is unknown, or a parameter is not supported.
        """
        algorithm = param_group.setdefault("algorithm", self.algorithm)
        if algorithm not in (self.algorithm, "adamw"):
            raise LayoutError(
                "A param group names an unknown algorithm.",
                expected=f"{self.algorithm!r} or 'adamw'",
                got=repr(algorithm),
                where=f"param group {len(self.param_groups)} of {type(self).__name__}",
                todo="do not set 'algorithm', or pass the parameters in adamw_params=[...]",
            )
        if algorithm == "adamw":
            param_group = {**asdict(self._adamw), **param_group}
        super().add_param_group(param_group)
        self._make_state(self.param_groups[-1])

    def make_state(self) -> None:
        """Recreate the initial state of all parameters. Called after the parameters have moved to other ranks."""
        for group in self.param_groups:
            self._make_state(group)

    def _make_state(self, group: dict[str, Any]) -> None:
        """Create the initial state of all parameters of a group."""
        own = group["algorithm"] == self.algorithm
        for param in group["params"]:
            if param.is_meta or not param.is_floating_point():
                raise LayoutError(
                    f"{type(self).__name__} cannot create state for this parameter.",
                    expected="a floating-point tensor with storage",
                    got=f"{param.dtype} on device {param.device}",
                    where=label_of(param),
                    todo="allocate the model first: call model.to_empty(device=...), initialize the parameters, then "
                    "build the optimizer",
                )
            local_tensor(param)  # raises for a tensor that is not contiguous
            if own:
                self.state[param] = self._init_state(param, group)
            else:
                moments = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
                # The step is on the host, as in torch's AdamW, so that reading it does not wait for a device.
                self.state[param] = {"step": torch.zeros((), dtype=torch.float32, device="cpu"), **moments}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step all parameters that have a gradient.

        Args:
            closure: evaluates the model and returns the loss; optional.

        Returns:
            What the closure returned, or None.
        """
        loss = evaluated(closure)
        # `plainly`, so that state does not depend on the caller's autocast or inference mode.
        plainly(self._step_groups)([g for g in self.param_groups if g["algorithm"] == self.algorithm])
        return loss

    def _step_adamw(self) -> None:
        """Step the groups with ``algorithm="adamw"``."""
        for group in self.param_groups:
            if group["algorithm"] != "adamw":
                continue
            params = [p for p in group["params"] if p.grad is not None]
            states = [self.state[p] for p in params]
            beta1, beta2 = group["betas"]
            adamw(
                [local_tensor(p) for p in params],
                [local_grad(p) for p in params],
                [local_tensor(s["exp_avg"], "state") for s in states],
                [local_tensor(s["exp_avg_sq"], "state") for s in states],
                [],  # running maxima, which only amsgrad needs
                [s["step"] for s in states],
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Load state into the existing tensors. If any value does not fit, nothing changes.

        Raises:
            CheckpointError: if the checkpoint's param groups record other options for the meaning of state (momentum
                form, block size, map), or the names or shapes of its state differ.
        """
        self._check_recorded(state_dict["param_groups"])
        own = dict(self.state)
        own_groups = self.param_groups
        # torch's method matches keys to parameters, but it also casts tensors, unless they are wrapped.
        wrapped = {
            key: {name: _Opaque(value) for name, value in parts.items()}
            for key, parts in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": wrapped})  # type: ignore[arg-type]
        loaded = {
            param: {name: opaque.value for name, opaque in parts.items()}
            for param, parts in self.state.items()
        }
        self.state = defaultdict(dict, own)  # undo torch's load: values are copied only after all checks
        try:
            for param, _, where in self._params_with_keys(state_dict):
                # A parameter that was frozen when the state was saved may have no saved state.
                if param in loaded or param.requires_grad:
                    check_state(loaded.get(param, {}), self.state[param], where)
        except CheckpointError:  # a load that does not fit changes nothing
            self.param_groups = own_groups
            raise
        # Copies between placements are collectives, so all ranks need the same order. The order in which states were
        # loaded may differ between ranks.
        with one_meeting(f"load_state_dict of {type(self).__name__}"):
            for param, parts in own.items():
                if param in loaded:
                    copy_state(loaded[param], parts)

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Check recorded options and the names of state, so that a wrong checkpoint fails before tensors are read.

        Args:
            state_dict: a state dict as for `load_state_dict`; its tensors may be replaced by any values.

        Raises:
            CheckpointError: as for `load_state_dict`. Shapes and dtypes are not checked.
        """
        self._check_recorded(state_dict["param_groups"])
        for param, key, where in self._params_with_keys(state_dict):
            # A parameter that was frozen when the state was saved may have no saved state.
            if key in state_dict["state"] or param.requires_grad:
                check_parts(state_dict["state"].get(key, {}), self.state[param], where)

    def _params_with_keys(self, state_dict: Mapping[str, Any]) -> Iterator[tuple[torch.Tensor, Any, str]]:
        """Yield each parameter, its key in the state dict, and a description of it for errors."""
        groups = zip(self.param_groups, state_dict["param_groups"], strict=True)
        for number, (group, saved) in enumerate(groups):
            for index, (param, key) in enumerate(zip(group["params"], saved["params"], strict=True)):
                yield param, key, f"parameter {index} of param group {number}, shape {tuple(param.shape)}"

    def _check_recorded(self, saved_groups: list[dict[str, Any]]) -> None:
        """Check that saved param groups record the same options as this optimizer's groups."""
        # strict=False, since torch's own loading raises an error for a different number of groups.
        for number, (own, saved) in enumerate(zip(self.param_groups, saved_groups, strict=False)):
            keys = ("algorithm", *(self.recorded if own["algorithm"] == self.algorithm else ()))
            expected = {key: _plain(own[key]) for key in keys}
            got = {key: _plain(saved.get(key, "not recorded")) for key in keys}
            if got != expected:
                raise CheckpointError(
                    "The optimizer state in the checkpoint was made with other options than this optimizer has.",
                    expected=expected,
                    got=got,
                    where=f"param group {number} of {type(self).__name__}",
                    todo="build the optimizer with the recorded options; or, if another optimizer wrote the state and "
                    "you know that it used the same options, add these keys to the checkpoint's param groups",
                )


class BatchedOptimizer(StructuredOptimizer):
    """Base of optimizers that step similar parameters as one batch on accelerators, to save kernel launches."""

    def _step_groups(self, groups: list[dict[str, Any]]) -> None:
        """Step all parameters that have a gradient: with AdamW, then in batches with this optimizer's algorithm."""
        self._step_adamw()
        for group in groups:
            params = [param for param in group["params"] if param.grad is not None]
            for param in params:
                self.state[param]["step"] += 1  # before batches are made: their key contains the step count
            items = ((self._alike(param), local_of(param).numel(), param) for param in params)
            for batch in batches_of(items, self._batch_numel(group)):
                self._step_batch(batch, group)

    def _batch_numel(self, group: dict[str, Any]) -> int:
        """Return the maximum number of elements of a batch of a param group."""
        return BATCH_NUMEL

    def _batches_on(self, device: torch.device) -> bool:
        """Return whether a batch saves time. On the CPU there are no launches to save."""
        return launches(device)

    def _alike(self, param: torch.Tensor) -> Hashable:
        """Return a hashable key. Parameters with equal keys are stepped in the same batch."""
        if not self._batches_on(param.device):
            return id(param)
        # With the step count, since a batch has one bias correction.
        return self._kind(param), float(self.state[param]["step"]), param.dtype, param.device

    def _kind(self, param: torch.Tensor) -> Hashable:
        """Return what else must be equal in a batch, such as the shape of blocks; depends on the algorithm."""
        return ()

    @abstractmethod
    def _step_batch(self, params: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        """Step a batch of similar parameters, whose step counts already include this step."""


def launches(device: torch.device) -> bool:
    """Return whether operators on this device are kernel launches, so that stepping many tensors at once is faster."""
    return device.type != "cpu"


def batches_of(items: Iterable[tuple[Hashable, int, T]], most_numel: int) -> Iterator[list[T]]:
    """Divide items into batches of items of equal kind, with a bounded number of elements.

    Args:
        items: tuples (kind, number of elements, item).
        most_numel: maximum number of elements of a batch. A larger item is a batch of its own.

    Yields:
        The items of a batch.
    """
    batches: dict[Hashable, list[T]] = {}
    numels: dict[Hashable, int] = {}
    for kind, numel, item in items:
        if kind in batches and numels[kind] + numel > most_numel:
            yield batches.pop(kind)
        if kind not in batches:
            batches[kind], numels[kind] = [], 0
        batches[kind].append(item)
        numels[kind] += numel
    yield from batches.values()


def evaluated(closure: Callable[[], Any] | None) -> Any:
    """Call the closure of a step and return its result; None if there is no closure."""
    if closure is None:
        return None
    with torch.enable_grad():  # `step` runs without gradients, but the closure calls backward
        return closure()


def _plain(value: Any) -> Any:
    """Replace tuples in a value by lists, since some checkpoint formats save tuples as lists."""
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def check_class(wrapper: str, kind: object, params: object) -> None:
    """Check the first arguments of an optimizer that wraps another one: the class, then the parameters.

    Args:
        wrapper: name of the optimizer that wraps.

    Raises:
        ArgumentError: if ``kind`` is not a class, such as parameters or an optimizer that was made already.
    """
    if isinstance(kind, type):
        return
    meant = "torch.optim.AdamW"  # an example
    if isinstance(params, type):
        meant = params.__qualname__
    elif isinstance(kind, torch.optim.Optimizer):
        meant = type(kind).__qualname__
    raise ArgumentError(
        f"{wrapper} takes an optimizer class first, and then the parameters.",
        expected="a class",
        got=f"a value of type {type(kind).__name__}",
        where=f"{wrapper}(kind=..)",
        todo=f"{wrapper}({meant}, model.parameters(), ...)",
    )


def as_groups(params: Any) -> list[dict[str, Any]]:
    """Convert the ``params`` argument of an optimizer to param groups; empty if it has no parameters.

    Raises:
        LayoutError: if ``params`` is one tensor instead of an iterable.
        ArgumentError: if it is a module, or contains lists, as the result of `Muon.split_params` does.
    """
    if isinstance(params, torch.nn.Module):
        raise ArgumentError(
            "An optimizer takes parameters, not a model.",
            expected="an iterable of parameters or param groups",
            got=type(params).__name__,
            todo="pass model.parameters()",
            where="params=..",
        )
    if isinstance(params, torch.Tensor):
        raise LayoutError(
            "An optimizer takes an iterable of parameters.",
            expected="an iterable of parameters or param groups",
            got="one tensor",
            todo="pass [param]",
        )
    items = list(params)
    if any(isinstance(item, list) for item in items):
        raise ArgumentError(
            "An optimizer takes one list of parameters.",
            expected="an iterable of parameters or param groups",
            got=f"{len(items)} lists",
            todo="matrices, others = Muon.split_params(model); Muon(matrices, adamw_params=others)",
            where="params=..",
        )
    if items and isinstance(items[0], dict):
        return [dict(group) for group in items]  # copies, since torch adds defaults to the dicts
    # No group without parameters: all parameters may be in adamw_params. With no group at all, torch raises an error.
    return [{"params": items}] if items else []


@dataclass(frozen=True, eq=False)
class _Opaque:
    """A wrapper that is not a tensor, so that torch's loading does not cast the value."""

    value: Any


def check_state(saved: Mapping[str, Any], state: Mapping[str, Any], where: str) -> None:
    """Check that ``saved`` state of a parameter can be copied into its existing ``state``.

    Args:
        where: description of the parameter, for errors.

    Raises:
        CheckpointError: if names or shapes differ, or if dtypes differ for a tensor that is not floating-point.
    """
    check_parts(saved, state, where)
    for name, target in state.items():
        value = saved[name]
        kind = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        got_shape = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
        # `copy_` converts floats without harm, but codes of another dtype have another meaning.
        exact = isinstance(value, torch.Tensor) and not target.is_floating_point()
        if got_shape != tuple(target.shape) or (exact and value.dtype != target.dtype):
            raise CheckpointError(
                "A saved optimizer state tensor does not fit.",
                expected=f"{name} of shape {tuple(target.shape)}, {target.dtype}",
                got=f"shape {got_shape}, {kind}",
                where=where,
                todo="load a checkpoint of the same model and the same optimizer options",
            )


def check_parts(saved: Iterable[str], state: Iterable[str], where: str) -> None:
    """Check that ``saved`` state of a parameter has the same names as its existing ``state``.

    Args:
        where: description of the parameter, for errors.

    Raises:
        CheckpointError: if names differ.
    """
    if set(saved) != set(state):
        raise CheckpointError(
            "The saved optimizer state of a parameter has other names than this optimizer's state.",
            expected=sorted(state),
            got=sorted(saved),
            where=where,
            todo="build the optimizer with the param groups and options of the optimizer that was saved; loading never "
            "quantizes or dequantizes state",
        )


def copy_state(saved: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Copy values that `check_state` has checked into the tensors of ``state``. Collective if placements differ.

    saved value                   tensor of ``state``               copied
    DTensor                       DTensor, same placements          the local tensor
    DTensor                       DTensor, other placements         the local tensor, after redistribution
    plain, of the global shape    DTensor                           this rank's piece
    plain, or a number            plain                             the value
    """
    for name, target in state.items():
        _copy_value(saved[name], target)


def _copy_value(value: Any, target: torch.Tensor) -> None:
    """Copy one value into a tensor, as the table in `copy_state` says."""
    if value is target:  # an optimizer may load its own state dict
        return
    if not isinstance(value, torch.Tensor):  # such as a step count that was saved as a number
        target.fill_(value)
        return
    if not isinstance(target, DTensor):
        target.copy_(value.full_tensor() if isinstance(value, DTensor) else value)
        return
    local = local_of(target)
    if isinstance(value, DTensor):
        if value.placements != target.placements:
            value = redistribute(value, target.placements)  # torch's redistribute rejects ragged placements
        local.copy_(local_of(value).view(local.shape))
        return
    pieces = pieces_of(target)
    if pieces is None:  # placements without contiguous pieces, such as tensor parallelism
        # To the target's device, since a checkpoint's tensors may be on the CPU.
        local.copy_(local_part_of(value.to(local.device), target))
        return
    piece = pieces.own_piece
    local_tensor(target, "state").copy_(value.reshape(-1)[piece.start : piece.stop])
