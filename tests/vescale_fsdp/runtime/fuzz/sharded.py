"""A program on ranks: what the training loop can see, written down for every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support.grads import reduced_grad
from tests.support.optim_cases import full_value
from tests.vescale_fsdp.runtime.fuzz.model import Broken, batch, build, thaw, ways
from tests.vescale_fsdp.runtime.fuzz.program import Program
from vescale_fsdp import fully_shard
from vescale_fsdp.checkpoint import load, save
from vescale_fsdp.optim import AdamW8bit, Muon
from vescale_fsdp.runtime.comm.streams import Streams
from vescale_fsdp.runtime.comm_context import CommContext
from vescale_fsdp.runtime.fsdp_state import state_of

LR = 0.05
CLIP = 0.5
DIVIDE_BY = 3.0
Values = dict[str, torch.Tensor]


class Seen(NamedTuple):
    """What a rank has seen: "start", "loss", "output", "grads", "norm", "clipped", "weights" or "state", and where."""

    what: str
    where: str
    values: Any


class _Now:
    """A stream and its events where everything is done at once."""

    def record_event(self) -> _Now:
        return self

    def wait_event(self, event: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class StreamsAtOnce(Streams):
    """The accelerator's branch, on a CPU whose collectives are done when they return."""

    def __init__(self) -> None:
        self._only = _Now()

    def new(self) -> Any:
        return self._only

    def current(self) -> Any:
        return self._only

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def synchronize(self) -> None:
        pass


def _on_streams(model: Any) -> None:
    comm = CommContext(StreamsAtOnce())
    for module in model.modules():
        state = state_of(module)
        if state is not None:
            state.join(comm)


def _units(model: Any) -> Iterator[Any]:
    return (module for module in model.modules() if state_of(module) is not None)


def _each(method: str, *arguments: Any) -> Callable[[Any], None]:
    def call(model: Any) -> None:
        for unit in _units(model):
            getattr(unit, method)(*arguments)

    return call


def _prefetch(model: Any) -> None:
    """Two units ahead, either way."""
    units = [module for module in model.blocks if state_of(module) is not None]
    for place, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[place + 1 : place + 3])
        unit.set_modules_to_backward_prefetch(units[max(0, place - 2) : place])


SWITCHES: dict[str, Callable[[Any], None]] = {
    "streams": _on_streams,
    "zeros_unused": lambda model: model.set_reduce_scatter_unused_params(True),
    "force_sum": _each("set_force_sum_reduction_for_comms", True),
    "divide": _each("set_gradient_divide_factor", DIVIDE_BY),
    "wide": lambda model: model.set_narrow_reduction(False),
    "two_buffers": lambda model: model.set_reduce_scatter_max_input_buffers(2),
    "keep_storage": lambda model: model.set_keep_unsharded_storage(True),
    "stays_after_backward": lambda model: None,  # in the loop, until the last micro-batch of a step
    "prefetch": _prefetch,
    "finalizes_by_hand": lambda model: model.set_manual_backward_finalization(True),
    "own_group": lambda model: model.set_separate_reduce_scatter_group(True),
    "unshards_ahead": lambda model: None,  # in the loop
    "hook": _each("set_all_reduce_hook", lambda shard: None),
}


def shard(program: Program) -> tuple[Any, int]:
    """The sharded model, and which replica of the model's inputs this rank is."""
    names = ("replicate", "shard")[-(len(program.mesh) - program.tp) :] + ("tp",) * program.tp
    mesh = init_device_mesh("cpu", program.mesh, mesh_dim_names=names)
    model: Any = build(program)
    data = mesh
    if program.tp:
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        data = mesh[names[:-1]] if len(names) > 2 else mesh[names[0]]
    dtypes = [getattr(torch, name) if name else None for name in (program.params, program.reduces)]
    options = _options(program, data, MixedPrecisionPolicy(*dtypes))
    pair: list[Any] = []
    for block, module in zip(program.blocks, model.blocks, strict=True):
        if pair or block.unit == "pair":
            pair.append(module)
            if block.unit != "pair":
                fully_shard(pair, **options)
                pair = []
            continue
        if block.unit == "nested":
            fully_shard(module.up, **options)
        if block.unit != "root":
            fully_shard(module, **options)
    outputs = getattr(torch, program.outputs) if program.outputs else None
    fully_shard(model, **_options(program, data, MixedPrecisionPolicy(*dtypes, output_dtype=outputs)))
    for name in program.switches:
        SWITCHES[name](model)
    coordinate = data.get_coordinate()
    assert coordinate is not None
    return model, coordinate[0] if data.ndim == 1 else coordinate[0] * data.size(1) + coordinate[1]


def _options(program: Program, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> dict[str, Any]:
    rule: Any = (
        AdamW8bit.granularity(min_8bit_numel=1)
        if program.granularity == "8bit"
        else program.granularity or None
    )
    return {
        "mesh": mesh,
        "shard_optimizer_over": "replicate" if program.spread else None,
        "reshard_after_forward": program.reshard,
        "mp_policy": policy,
        "offload_policy": CPUOffloadPolicy(pin_memory=False) if program.offload else OffloadPolicy(),
        "granularity": rule,
        "check_collectives": len(program.steps) % 3,  # no false alarm, whatever a program does
    }


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained."""
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def optimizers_of(program: Program, params: dict[str, nn.Parameter], *, plain: bool) -> list[Any]:
    """The optimizers of these parameters; the plain ones are torch's where it has them."""
    matrices = [param for param in params.values() if param.ndim == 2]
    others = [param for param in params.values() if param.ndim != 2]
    given = list(params.values())
    if not given:
        return []
    if program.optimizer == "sgd":
        return [torch.optim.SGD(given, lr=LR, momentum=0.9, weight_decay=0.1)]
    if program.optimizer == "8bit":
        return [AdamW8bit(given, lr=LR, min_8bit_numel=1)]
    if program.optimizer == "muon" and matrices:
        kind = torch.optim.Muon if plain else Muon
        rest = [torch.optim.AdamW(others, lr=LR)] if others else []
        return [kind(matrices, lr=LR, weight_decay=0.1), *rest]
    options = {kind: program.optimizer == kind for kind in ("foreach", "fused")}
    return [torch.optim.AdamW(given, lr=LR, **options)]


def run(program: Program, part: range, folder: Path) -> list[Seen]:
    """Some steps of the loop on one rank; the ones before and behind them by way of a checkpoint."""
    model, replica = shard(program)
    params = dict(model.named_parameters())  # the sharded ones, whatever the modules hold later
    optimizers = optimizers_of(program, trained(model), plain=False)
    state = {"model": model, "optimizers": optimizers}
    if part.start > 0:
        load(folder / "saved", state)
    seen = [Seen("start", f"step {part.start}", _values(params))]
    for number in part:
        seen += _step(program, model, params, optimizers, number, replica)
    if part.stop < len(program.steps):
        save(folder / "saved", state)
    return seen


def _values(tensors: Mapping[str, torch.Tensor]) -> Values:
    return {name: full_value(tensor) for name, tensor in tensors.items()}


def _grads(params: Mapping[str, torch.Tensor]) -> Values:
    """Reduced gradients: of a gradient that waits for its reduction, what earlier reductions have left."""
    grads = {name: reduced_grad(param) for name, param in params.items()}
    return _values({name: grad for name, grad in grads.items() if grad is not None})


def _step(
    program: Program,
    model: Any,
    params: dict[str, nn.Parameter],
    optimizers: list[Any],
    number: int,
    replica: int,
) -> Iterator[Seen]:
    step = program.steps[number]
    if step.thaws:
        thaw(params)
    if step.evaluates and not step.late:
        yield _evaluation(program, model, number, replica)
    for micro in range(len(step.micros)):
        yield Seen("loss", f"step {number}.{micro}", _micro(program, model, number, micro, replica))
        if "finalizes_by_hand" in program.switches:
            model.finalize_backward()
        yield Seen("grads", f"step {number}.{micro}", _grads(params))
    is_reduced = program.is_reduced(number)
    if step.clips and is_reduced:
        norm = full_value(nn.utils.clip_grad_norm_(params.values(), CLIP))
        yield Seen("norm", f"step {number}", {"": norm})
        yield Seen("clipped", f"step {number}", _grads(params))
    if step.evaluates and step.late:
        yield _evaluation(program, model, number, replica)
    for optimizer in optimizers if is_reduced else ():
        optimizer.step()
    yield Seen("weights", f"step {number}", _values(params))
    state = {
        f"{name}/{key}": full_value(torch.as_tensor(value))
        for name, param in params.items()
        for optimizer in optimizers
        for key, value in optimizer.state.get(param, {}).items()
    }
    yield Seen("state", f"step {number}", state)
    if step.zeros != "keep" and is_reduced:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=step.zeros == "none")
    if step.thaws:
        thaw(params)


def _evaluation(program: Program, model: Any, number: int, replica: int) -> Seen:
    mode = torch.no_grad if program.steps[number].evaluates == "no_grad" else torch.inference_mode
    with mode():
        output = model(batch(number, 7, 0, replica), ways(program, number, replica))
    return Seen("output", f"step {number}", {"": output.clone()})


def _micro(program: Program, model: Any, number: int, micro: int, replica: int) -> Values:
    plan = program.steps[number].micros[micro]
    model.set_requires_gradient_sync(plan.sync != "no_sync")
    if plan.sync == "no_all_reduce":
        model.set_requires_all_reduce(False)
    if "stays_after_backward" in program.switches:
        model.set_reshard_after_backward(micro == len(program.steps[number].micros) - 1)
    if plan.breaks:
        with contextlib.suppress(Broken):
            model(batch(number, 6, 0, replica), ways(program, number, replica)._replace(breaks=True))
        model.reset_iter_state()
    losses = []
    for forward in range(plan.forwards):
        if "unshards_ahead" in program.switches:
            model.unshard(async_op=True)
        x = batch(number, micro, forward, replica).requires_grad_(plan.watched)
        losses.append(model(x, ways(program, number, replica)).square().mean())
    for place, loss in enumerate(losses if plan.apart else [torch.stack(losses).sum()]):
        if plan.apart:
            model.set_is_last_backward(place == len(losses) - 1)
        if loss.requires_grad:
            loss.backward()
    return {str(place): loss.detach().clone() for place, loss in enumerate(losses)}
