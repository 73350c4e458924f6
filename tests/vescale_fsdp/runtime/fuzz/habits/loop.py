"""The training loop of a program, and what its user does: one code for all engines."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.vescale_fsdp.runtime.fuzz.habits.engines import Engine, full, gathered
from tests.vescale_fsdp.runtime.fuzz.habits.model import Broken, batch, loss_of
from tests.vescale_fsdp.runtime.fuzz.habits.program import PARAMS, Event, Program

LR = 0.05
Seen = dict[str, list[torch.Tensor]]


class Loop:
    """A program on one rank.

    Attributes:
        seen: what the user has seen, by a label, in order.
        place: what the loop does now.
    """

    def __init__(self, program: Program, engine: Engine) -> None:
        self.program, self.engine = program, engine
        self.seen: Seen = {}
        self.place = "build"
        self._rank = dist.get_rank()
        self._done: set[int] = set()
        self._step = 0
        self._breaks = ""
        self._kept: dict[str, Any] = {}
        self._full: dict[str, Any] = {}
        self._shadows: list[tuple[str, torch.Tensor]] = []
        self.optimizer: Any = None

    def run(self) -> None:
        """Train."""
        program, engine = self.program, self.engine
        self.model = model = engine.build(program)
        model.tell = self._tell
        self._fire("before")
        self.place = "shard"
        engine.shard(model, program)
        self._kept = dict(model.named_parameters(remove_duplicate=False))
        if any(event.handle == "full" for event in program.events):
            with gathered(engine, model, closes=True):
                self._full = dict(model.named_parameters(remove_duplicate=False))
        if self.optimizer is None:
            late = {event.target for event in program.events if event.habit == "optimizer.group"}
            self.optimizer = self._new_optimizer(
                [param for name, param in model.named_parameters() if name not in late]
            )
        for self._step in range(program.steps):
            self._run_step()
        self._end()

    def _run_step(self) -> None:
        program, model, step = self.program, self.model, self._step
        self._fire("sharded")
        if self._has("gathered"):
            with gathered(self.engine, model, program.closes):
                self._fire("gathered")
        if program.evaluates:
            self.place = f"evaluation {step}"
            with torch.no_grad():
                self.see("output", loss_of(model, program, *self._batch(7)))
        if program.breaks and step == 0:
            self._break()
        waiting = []
        for micro in range(program.micros):
            self._before_backward(micro)
            waiting.append(self._forward(micro))
            if program.backward != "ahead":
                self._backward(waiting.pop())
                if micro < program.micros - 1:
                    self._fire("micros")
        for place, loss in enumerate(waiting):
            self._before_backward(place)
            self._backward(loss)
            if place < len(waiting) - 1:
                self._fire("micros")
        if self._has("gathered_graded"):
            with gathered(self.engine, model, closes=True):
                self._fire("gathered_graded")
        self._fire("graded")
        self._optimize()

    def _optimize(self) -> None:
        program, step = self.program, self._step
        self.place = f"optimizer {step}"
        for name, param in self._kept.items():
            if param.grad is not None:
                self.see(f"grad {name}", full(param.grad))
        params = list(self.model.parameters())
        for param in params:
            scale = getattr(param, "lr_scale", None)
            if scale is not None and param.grad is not None:
                param.grad.mul_(scale)
        if program.clips == "norm":
            self.see("norm", full(nn.utils.clip_grad_norm_(params, 0.3)))
        if program.clips == "value":
            nn.utils.clip_grad_value_(params, 0.05)
        self.optimizer.step()
        if program.zeros == "model":
            self.model.zero_grad()
        elif program.zeros != "nothing":
            self.optimizer.zero_grad(set_to_none=program.zeros == "optimizer")

    def _end(self) -> None:
        self.place = "end"
        for name, shadow in self._shadows:
            with torch.no_grad():
                shadow.lerp_(self.model.get_parameter(name).detach(), 0.5)
            self.see(f"shadow {name}", full(shadow))
        for name, param in self._kept.items():
            self.see(f"weight {name}", full(param))

    # -- passes -----------------------------------------------------------------------------------------

    def _batch(self, micro: int) -> Any:
        return batch(self.program, self._step, micro, self.program.replica(self._rank))

    def _forward(self, micro: int) -> torch.Tensor:
        self.place = f"forward {self._step}.{micro}"
        inputs = self._batch(micro)
        loss = loss_of(self.model, self.program, *inputs)
        self.see("loss", loss)
        if self.program.penalty:
            self.place = f"penalty {self._step}.{micro}"
            (grad,) = torch.autograd.grad(loss, inputs[1], create_graph=True)
            loss = loss + grad.square().sum()
            self.see("penalty", loss)
        self._fire("middle")
        return loss

    def _before_backward(self, micro: int) -> None:
        is_last = micro == self.program.micros - 1
        self.engine.sync(self.model, "sync" if is_last else self.program.sync)
        if self.program.stays:
            self.engine.stay(self.model, not is_last)

    def _backward(self, loss: torch.Tensor) -> None:
        self.place = f"backward {self._step}"
        if self.program.backward == "twice":
            self.engine.backward(loss, retain_graph=True)
            self.place = f"second backward {self._step}"
        self.engine.backward(loss)

    def _break(self) -> None:
        """An iteration ends in an exception of the user's; nothing of it is kept."""
        self.place, self._breaks = "broken", self.program.breaks
        try:
            loss = loss_of(self.model, self.program, *self._batch(6))
            self.engine.backward(loss)
        except Broken:
            pass
        self._breaks = ""
        if self.program.resets:
            self.engine.reset(self.model)
        self.model.zero_grad()
        self.optimizer.zero_grad()
        self._fire("broken")

    def _tell(self, place: str, x: torch.Tensor) -> torch.Tensor:
        """What happens at a place of the forward, or when its gradient comes."""
        if self._breaks == "forward" and place == "blocks.1 begins":
            raise Broken
        if self._breaks == "backward" and place == "blocks.0 ends" and x.requires_grad:
            x.register_hook(self._raise)
        if x.requires_grad and self._has("backward", place):
            x.register_hook(lambda grad: self._fire("backward", place))
        self._fire("forward", place)
        return x

    def _raise(self, grad: torch.Tensor) -> None:
        raise Broken

    # -- events -----------------------------------------------------------------------------------------

    def see(self, label: str, value: torch.Tensor) -> None:
        """Write down a value."""
        self.seen.setdefault(label, []).append(value.detach().clone())

    def _is_now(self, number: int, event: Event, moment: str, place: str | None) -> bool:
        return (
            number not in self._done
            and (event.moment, event.step) == (moment, self._step)
            and place in (None, event.place)
        )

    def _has(self, moment: str, place: str | None = None) -> bool:
        events = enumerate(self.program.events)
        return any(self._is_now(number, event, moment, place) for number, event in events)

    def _fire(self, moment: str, place: str | None = None) -> None:
        """Do what a user does at a moment, once."""
        for number, event in enumerate(self.program.events):
            if self._is_now(number, event, moment, place):
                self._done.add(number)
                if not event.alone or self._rank == 0:
                    before = self.place
                    self.place = f"{event.habit} at {moment} {self._step}"
                    getattr(self, f"_{event.kind}")(event, f"{event.habit} {number}")
                    self.place = before

    def _params(self, event: Event) -> list[Any]:
        names = list(PARAMS) if event.target == "all" else [event.target]
        if event.handle == "now":
            return [self.model.get_parameter(name) for name in names]
        held = self._kept if event.handle == "kept" else self._full
        return [held[name] for name in names]

    def _all(self, event: Event) -> list[Any]:
        """All parameters, as a list is made of them at that moment."""
        if event.handle == "now":
            return list(self.model.parameters())
        return list(dict.fromkeys((self._kept if event.handle == "kept" else self._full).values()))

    def _read(self, event: Event, label: str) -> None:
        (param,) = self._params(event)
        if event.habit == "read.sum":
            self.see(label, full(param.detach().sum()))
        elif event.habit == "read.full":
            self.see(label, full(param))
        elif event.habit == "read.rows":
            self.see(label, full(param.detach()[0]))
        elif param.grad is not None:
            self.see(label, full(param.grad.norm()))

    @torch.no_grad()
    def _write(self, event: Event, label: str) -> None:
        (param,) = self._params(event)
        _WRITES[event.habit](param)

    @torch.no_grad()
    def _data(self, event: Event, label: str) -> None:
        self._write(event, label)

    def _load(self, event: Event, label: str) -> None:
        state = {name: value.detach() * 0.9 for name, value in self.model.state_dict().items()}
        self.model.load_state_dict(state)

    def _loss(self, event: Event, label: str) -> None:
        (param,) = self._params(event)
        if param.requires_grad:
            loss = (param * 0.1).sum()
            self.see(label, full(loss))
            loss.backward()

    def _hook(self, event: Event, label: str) -> None:
        (param,) = self._params(event)
        if event.habit == "hook.mask":
            param.register_hook(functools.partial(self._mask, label))
        elif event.habit == "hook.record":
            param.register_hook(functools.partial(self._see_grad, label))
        elif event.habit == "hook.removed":
            param.register_hook(lambda grad: grad * 3).remove()
        else:
            self.engine.after_grad(param, functools.partial(getattr(self, _AFTER[event.habit]), label))

    def _mask(self, label: str, grad: torch.Tensor) -> torch.Tensor:
        self._see_grad(label, grad)
        return grad * (grad > 0)

    def _see_grad(self, label: str, grad: torch.Tensor) -> None:
        self.see(label, full(grad))

    def _after(self, label: str, param: Any) -> None:
        self.see(label, full(param.grad))

    def _after_scale(self, label: str, param: Any) -> None:
        param.grad.mul_(0.5)

    def _after_step(self, label: str, param: Any) -> None:
        with torch.no_grad():
            param.add_(param.grad, alpha=-LR)
        param.grad = None

    def _attribute(self, event: Event, label: str) -> None:
        for param in self._params(event):
            param.lr_scale = 0.5

    def _new_optimizer(self, params: list[Any]) -> Any:
        params = [param for param in params if param.requires_grad]
        if self.program.optimizer == "sgd":
            return torch.optim.SGD(params, lr=LR, momentum=0.9)
        return torch.optim.AdamW(params, lr=LR, foreach=self.program.optimizer == "foreach")

    def _optimizer(self, event: Event, label: str) -> None:
        if event.habit == "optimizer.new":
            self.optimizer = self._new_optimizer(self._all(event))
        elif event.habit == "optimizer.group":
            self.optimizer.add_param_group({"params": self._params(event), "lr": LR / 2})
        else:
            self.optimizer.step()

    def _zero(self, event: Event, label: str) -> None:
        if event.habit == "zero.model":
            self.model.zero_grad()
        elif event.habit == "zero.none":
            for param in self._all(event):
                param.grad = None
        else:
            self.optimizer.zero_grad(set_to_none=event.habit == "zero.optimizer")

    def _clip(self, event: Event, label: str) -> None:
        params = self._all(event)
        if event.habit == "clip.norm":
            self.see(label, full(nn.utils.clip_grad_norm_(params, 0.3)))
        elif event.habit == "clip.value":
            nn.utils.clip_grad_value_(params, 0.05)
        else:
            grads = [param.grad for param in params if param.grad is not None]
            total = torch.stack([full(grad.norm()) for grad in grads]).norm() if grads else torch.zeros(())
            self.see(label, total)
            for grad in grads:
                grad.mul_(0.3 / (total.item() + 0.3))

    def _copy(self, event: Event, label: str) -> None:
        if event.habit == "copy.model":
            self.model.tell, self.model.kept, tell = None, None, self.model.tell
            twin = copy.deepcopy(self.model)
            self.model.tell = tell
            self.see(label, full(twin.get_parameter("blocks.0.up.weight")))
        elif event.habit == "copy.param":
            for param in self._params(event):
                self.see(label, full(copy.deepcopy(param)))
        elif event.habit == "copy.clone":
            for param in self._params(event):
                self.see(label, full(param.clone()))
        elif event.habit == "copy.state":
            state = copy.deepcopy(self.model.state_dict())
            self.see(label, full(state["blocks.0.up.weight"]))
        elif event.habit == "copy.optimizer" and self.optimizer is not None:
            self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        elif event.habit == "copy.ema":
            for name, param in zip(
                PARAMS if event.target == "all" else [event.target], self._params(event), strict=True
            ):
                self._shadows.append((name, param.detach().clone()))

    def _freeze(self, event: Event, label: str) -> None:
        if event.habit == "freeze.module":
            names = list(PARAMS) if event.target == "all" else [event.target]
            for name in names:
                self.model.get_submodule(name.rpartition(".")[0]).requires_grad_(False)
            return
        for param in self._params(event):
            param.requires_grad_(event.habit == "freeze.on")


_AFTER = {"hook.after": "_after", "hook.after_scale": "_after_scale", "hook.after_step": "_after_step"}


def _set_data(param: Any) -> None:
    param.data = param.data * 0.9


def _mask(param: Any) -> None:
    param[param > 0] = 0.0


_WRITES: dict[str, Callable[[Any], object]] = {
    "write.mul": lambda param: param.mul_(0.9),
    "write.row": lambda param: param[0].zero_(),
    "write.init": lambda param: nn.init.constant_(param, 0.1),
    "write.norm": lambda param: param.div_(param.norm() + 1),
    "write.mask": _mask,
    "write.detach": lambda param: param.detach().mul_(0.9),
    "data.mul": lambda param: param.data.mul_(0.9),
    "data.clamp": lambda param: param.data.clamp_(-0.2, 0.2),
    "data.copy": lambda param: param.data.copy_(param.data * 0.9),
    "data.set": _set_data,
    "data.row": lambda param: param.data[0].zero_(),
}
