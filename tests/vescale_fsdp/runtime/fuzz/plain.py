"""The reference: ordinary data parallelism in one process, held against what ranks have seen.

Each step starts from the weights that the ranks had, and each optimizer from the gradients that they had, after these
were compared: so no difference grows, and what is left is rounding alone. Its bounds, for values whose terms are at
most m in size (the largest gradient of that tensor, added up over ranks, micro-batches and forwards)::

    gradients     (terms + 4) * eps * m      eps of the widest rounding on the way: the reduction's dtype, or the one
                                             that computes where a tensor's uses add up there; terms: what is added, and
                                             twice the layers where products may be summed in another order
    losses        eps of the dtype that computes, times the depth of the model and the width of a layer
    norms         eps of the stored dtype, times the number of tensors
    optimizers    16 eps of the stored dtype: the same operators on the same values, in pieces of other sizes; Muon's
                  updates are of size 1 times the rate, and made in bf16
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from tests.vescale_fsdp.runtime.fuzz.model import WIDTH, Model, batch, build, thaw, ways
from tests.vescale_fsdp.runtime.fuzz.program import Block, Program
from tests.vescale_fsdp.runtime.fuzz.sharded import CLIP, DIVIDE_BY, LR, Seen, Values, optimizers_of, trained
from vescale_fsdp.torch_private import REDUCES_AS_STORED


def check(program: Program, parts: Sequence[Sequence[Sequence[Seen]]]) -> list[str]:
    """What is wrong with what the ranks of each part have seen: the first place that is, since more follow from it."""
    reference = _Plain(program)
    for (part, _), ranks in zip(program.parts, parts, strict=True):
        reference.begin(part)
        told = [[(seen.what, seen.where) for seen in each] for each in ranks]
        if any(each != told[0] for each in told):
            return [f"ranks have seen different things: {told}"]
        for everyone in zip(*ranks, strict=True):
            wrong = list(reference.wrong(everyone))
            if wrong:
                return [f"{everyone[0].what} at {everyone[0].where}: {each}" for each in wrong]
    return []


class _Plain:
    """The reference's training loop, led through what the ranks have seen."""

    def __init__(self, program: Program) -> None:
        self.stored = getattr(torch, program.stored)
        self.computes = getattr(torch, program.params) if program.params else None
        self.reduces = getattr(torch, program.reduces) if program.reduces else None
        if self.reduces is None and not REDUCES_AS_STORED:
            self.reduces = self.computes
        self.program = program
        self.model = build(program)  # whose weights and gradients are those of the ranks
        self.optimizers = optimizers_of(program, trained(self.model), plain=True)
        self.place = (0, 0)  # step, micro-batch
        self.is_thawed = False
        self.ran: set[int] = set()  # blocks, on any rank, with gradients or without

    def begin(self, program: Program) -> None:
        """Go on on the ranks of a part, which have weights and optimizers of the one before, and no gradients."""
        self.program = program
        self.pending: list[list[Values]] = [[] for _ in range(program.replicas)]  # not reduced, by rank
        self.unreplicated: list[list[Values]] = [[] for _ in range(program.replicas)]
        self.ran.clear()
        self.model.zero_grad()

    @property
    def _eps(self) -> float:
        return torch.finfo(self.stored).eps

    def wrong(self, everyone: tuple[Seen, ...]) -> Iterator[str]:
        """What is wrong with one thing that all ranks have seen."""
        kind, step = everyone[0].what, int(everyone[0].where.removeprefix("step ").split(".")[0])
        if kind != "start" and self.program.steps[step].thaws != self.is_thawed:
            thaw(dict(self.model.named_parameters()))
            self.is_thawed = not self.is_thawed
        if kind in ("loss", "output"):
            expected = self._losses(everyone[0].where) if kind == "loss" else self._outputs(everyone[0].where)
            tp = self.program.world // self.program.replicas
            for rank, seen in enumerate(everyone):
                yield from (
                    f"rank {rank}: {each}" for each in self._forward_errors(seen, expected[rank // tp])
                )
            return
        for rank, seen in enumerate(everyone):
            if seen.values.keys() != everyone[0].values.keys():
                yield f"rank {rank} has {sorted(seen.values)}, rank 0 {sorted(everyone[0].values)}"
            elif other := [n for n, v in seen.values.items() if not torch.equal(v, everyone[0].values[n])]:
                yield f"rank {rank} has other values than rank 0: {other}"
        yield from getattr(self, f"_{kind}_errors")(everyone[0].values)

    # -- forward and backward -----------------------------------------------------------------------------

    def _replica(self) -> Model:
        """The model in the dtype that computes."""
        replica = build(self.program)
        with torch.no_grad():
            for param, own in zip(replica.parameters(), self.model.parameters(), strict=True):
                param.copy_(own)
                param.requires_grad_(own.requires_grad)
        return replica if self.computes is None else replica.to(self.computes)

    def _outputs(self, where: str) -> list[Values]:
        step = int(where.removeprefix("step "))
        with torch.no_grad():
            return [
                {"": self._run(self._replica(), batch(step, 7, 0, rank), step, rank)}
                for rank in range(self.program.replicas)
            ]

    def _run(self, replica: Model, x: torch.Tensor, step: int, rank: int) -> torch.Tensor:
        self.ran |= {number for number, runs in enumerate(self.program.runs(step, rank)) if runs}
        y: torch.Tensor = replica(x, ways(self.program, step, rank))
        return y.to(getattr(torch, self.program.outputs)) if self.program.outputs else y

    def _losses(self, where: str) -> list[Values]:
        """Losses of all ranks; their gradients wait for the reduction."""
        step, micro = self.place = tuple(map(int, where.removeprefix("step ").split(".")))  # type: ignore[assignment]
        plan, found = self.program.steps[step].micros[micro], []
        if plan.breaks:  # what is not reduced is forgotten
            self.pending = [[] for _ in self.pending]
            self.unreplicated = [[] for _ in self.unreplicated]
        for rank in range(self.program.replicas):
            replica = self._replica()
            losses = []
            for forward in range(plan.forwards):
                x = batch(step, micro, forward, rank).requires_grad_(plan.watched)
                losses.append(self._run(replica, x, step, rank).square().mean())
            total = torch.stack(losses).sum()
            if total.requires_grad:
                total.backward()
            grads = {
                name: param.grad.double()
                for name, param in trained(replica).items()
                if param.grad is not None
            }
            self.pending[rank].append(grads)
            found.append({str(place): loss.detach() for place, loss in enumerate(losses)})
        return found

    def _forward_errors(self, seen: Seen, expected: Values) -> Iterator[str]:
        eps = torch.finfo(self.computes or self.stored).eps
        for name, value in expected.items():
            yield from _apart(
                name, seen.values[name], value, self._depth * WIDTH * eps * float(value.abs().max())
            )

    def _grads_errors(self, found: Values) -> Iterator[str]:
        sync = self.program.sync(*self.place)
        params = dict(self.model.named_parameters())
        expected = {name: (param.grad, 0.0) for name, param in params.items() if param.grad is not None}
        if sync != "no_sync":
            for rank, waiting in enumerate(self.pending):
                self.unreplicated[rank] += waiting
            self.pending = [[] for _ in self.pending]
        if sync == "sync":
            for name, param in params.items():
                terms = [grads[name] for rank in self.unreplicated for grads in rank if name in grads]
                if terms or (param.requires_grad and self._gets_zeros(name)):
                    expected[name] = self._reduced(param, terms)
            self.unreplicated = [[] for _ in self.unreplicated]
        if found.keys() != expected.keys():
            yield f"gradients of {sorted(found)}, not of {sorted(expected)}"
            return
        for name, (value, bound) in expected.items():
            assert value is not None
            yield from _apart(name, found[name], value.to(params[name].dtype), bound)
        self._take_grads(found)

    def _reduced(self, param: nn.Parameter, terms: list[torch.Tensor]) -> tuple[torch.Tensor, float]:
        """The mean of what ranks and micro-batches have made, on top of what is there; and its bound."""
        divisor = DIVIDE_BY if "divide" in self.program.switches else self.program.replicas
        total = sum(terms, torch.zeros(param.shape, dtype=torch.float64)) / divisor
        size = sum(float(term.abs().max()) for term in terms) / divisor
        if param.grad is not None:
            total, size = total + param.grad, size + float(param.grad.abs().max())
        uses = (len(terms) + 1) * 2 * max(block.times for block in self.program.blocks)
        uses *= 1 + len(self.program.blocks) * bool(self.program.reads)
        dtypes = [self.stored, self.computes or self.stored, self.reduces or self.stored]
        smallest = max(torch.finfo(dtype).tiny * torch.finfo(dtype).eps for dtype in dtypes)
        eps = max(torch.finfo(dtype).eps for dtype in dtypes)
        # Products too may be summed in another order, by other kernels and by tensor parallelism, once a layer.
        layers = 2 * self._depth if self.program.tp or self.computes is None else 0
        return total, (uses + 4 + layers) * (eps * size + smallest)

    @property
    def _depth(self) -> int:
        """How many matrices an input passes, at most."""
        return 3 + 3 * sum(block.times for block in self.program.blocks) + len(self.program.blocks)

    def _gets_zeros(self, name: str) -> bool:
        """Whether zeros are asked for where nobody used a parameter of a unit that somebody has run."""
        if "zeros_unused" not in self.program.switches:
            return False
        if not name.startswith("blocks."):
            return True
        blocks, place = self.program.blocks, int(name.split(".")[1])
        if blocks[place].unit == "root" and not _in_pair(blocks, place):
            return True
        first = last = place
        while first > 0 and blocks[first - 1].unit == "pair":
            first -= 1
        while blocks[last].unit == "pair":
            last += 1
        return any(each in self.ran for each in range(first, last + 1))

    def _take_grads(self, found: Values) -> None:
        for name, param in self.model.named_parameters():
            param.grad = found[name].clone() if name in found else None

    # -- the step -----------------------------------------------------------------------------------------

    def _norm_errors(self, found: Values) -> Iterator[str]:
        params = list(self.model.parameters())
        norm = nn.utils.clip_grad_norm_(params, CLIP)
        yield from _apart("norm", found[""], norm, self._eps * (len(params) + 8) * float(norm))

    def _clipped_errors(self, found: Values) -> Iterator[str]:
        for name, param in self.model.named_parameters():
            if param.grad is not None:
                bound = self._eps * (len(found) + 8) * float(param.grad.abs().max())
                yield from _apart(name, found[name], param.grad, bound)
        self._take_grads(found)

    def _start_errors(self, found: Values) -> Iterator[str]:
        own = dict(self.model.named_parameters())
        assert own.keys() == found.keys()
        for name, param in own.items():
            yield from _apart(name, found[name], param, 0.0)

    def _weights_errors(self, found: Values) -> Iterator[str]:
        for optimizer in self.optimizers if self.program.is_reduced(self.place[0]) else ():
            optimizer.step()
        own = dict(self.model.named_parameters())
        assert own.keys() == found.keys()
        with torch.no_grad():
            for name, param in own.items():
                yield from _apart(name, found[name], param, self._step_bound(param))
                param.copy_(found[name])

    def _step_bound(self, param: torch.Tensor) -> float:
        """What rounding makes of an optimizer's step."""
        bound = 16 * self._eps * (1 + float(param.abs().max()))
        if self.program.optimizer == "muon" and param.ndim == 2:
            bound += 2 * LR * torch.finfo(torch.bfloat16).eps
        return bound

    def _state_errors(self, found: Values) -> Iterator[str]:
        expected = {
            f"{name}/{key}": torch.as_tensor(value)
            for name, param in self.model.named_parameters()
            for optimizer in self.optimizers
            for key, value in optimizer.state.get(param, {}).items()
        }
        early = {
            name for name in found.keys() - expected.keys() if not found[name].any()
        }  # made before it is used
        if expected.keys() != found.keys() - early:
            yield f"state of {sorted(found)}, not of {sorted(expected)}"
            return
        for name, value in expected.items():
            yield from _apart(name, found[name], value, 16 * self._eps * float(value.abs().max()))
        zeros = self.program.steps[self.place[0]].zeros
        if zeros != "keep" and self.program.is_reduced(self.place[0]):
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=zeros == "none")


def _in_pair(blocks: Sequence[Block], place: int) -> bool:
    return blocks[place].unit == "pair" or (place > 0 and blocks[place - 1].unit == "pair")


def _apart(name: str, found: torch.Tensor, expected: torch.Tensor, bound: float) -> Iterator[str]:
    """Whether two values are further apart than a bound, or one of them NaN, or of another kind."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        yield f"{name} is {found.dtype} {list(found.shape)}, not {expected.dtype} {list(expected.shape)}"
    elif torch.equal(found, expected):
        return  # also if both are infinite
    elif not (apart := float((found.double() - expected.double()).abs().max())) <= bound:
        yield f"{name} is {apart:.3g} apart, bound {bound:.3g}, of values up to {float(expected.abs().max()):.3g}"
