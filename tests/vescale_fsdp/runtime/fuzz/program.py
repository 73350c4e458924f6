"""Programs: what is trained, how it is sharded and what a training loop does with it, as values that print themselves.

``draw(seed)`` makes one. What differs from a default is what is printed, so that a failing program is a bug report that
runs: paste it into `kept.py`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from typing import Any

ALWAYS, NEVER, ODD, SOME_RANKS = "always", "never", "odd steps", "some ranks"


class Printed:
    """Prints the fields that differ from their default."""

    def __repr__(self) -> str:
        shown = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)  # type: ignore[arg-type]
            if getattr(self, field.name) != field.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class Block(Printed):
    """One block of the model.

    Args:
        kind: "mlp", "tied" (both matrices are one), "norm", "adapter" (a low rank beside the first matrix), "gain" (a
            parameter in fp64 beside the others), "dict" (its output is one).
        unit: "own", "nested" (its first layer is a unit inside its own), "pair" (one with the block behind it), "root".
        frozen: "no", "base" (all but adapter and spare), "all".
        recompute: "no", "plain", "reentrant", "inside" (its forward recomputes itself).
        runs: when its forward runs: always, never, odd steps, some ranks.
        drops: whether its output is thrown away.
        spare: when a layer of its own takes part: as ``runs``; "" without such a layer.
        times: how often it runs in a forward.
    """

    kind: str = "mlp"
    unit: str = "own"
    frozen: str = "no"
    recompute: str = "no"
    runs: str = ALWAYS
    drops: bool = False
    spare: str = ""
    times: int = 1


@dataclass(frozen=True, repr=False)
class Micro(Printed):
    """One micro-batch.

    Args:
        forwards: how many, each of other inputs.
        apart: each has a backward of its own, behind all of the forwards; else one of their sum.
        sync: "sync", "no_sync", "no_all_reduce" (over replicas).
        watched: whether inputs need a gradient.
        breaks: before it a forward ends in an exception, and the iteration is reset.
    """

    forwards: int = 1
    apart: bool = False
    sync: str = "sync"
    watched: bool = False
    breaks: bool = False


@dataclass(frozen=True, repr=False)
class Step(Printed):
    """One step of the training loop.

    Args:
        micros: its micro-batches.
        clips: by the norm of all gradients.
        zeros: what follows the optimizer: "none", "zero" (in place), "keep" (gradients add up).
        evaluates: a forward without gradients: "", "no_grad", "inference".
        late: it is between backward and optimizer, not before the step.
        thaws: in this step the first block's frozen parameters are trained, and its trained ones frozen.
    """

    micros: tuple[Micro, ...] = (Micro(),)
    clips: bool = False
    zeros: str = "none"
    evaluates: str = ""
    late: bool = False
    thaws: bool = False


@dataclass(frozen=True, repr=False)
class Program(Printed):
    """A model, how it is sharded, and the loop.

    Args:
        mesh: (shard,), (replicate, shard), and with ``tp`` the ranks of tensor parallelism last.
        spread: whether the optimizer is sharded over replicas too.
        blocks, steps: see there.
        tied: whether the head's matrix is the embedding's.
        positions: whether rows have learned positions.
        reads: "embed", "head", "positions": whose weight a recomputed function behind each block reads; "" none.
        stored, params, reduces, outputs: dtypes; "" leaves a policy's field out.
        reshard: reshard_after_forward.
        granularity: text as `fully_shard` takes it; "8bit" AdamW8bit's.
        optimizer: "sgd", "adamw", "foreach", "fused" (AdamW too), "muon", "8bit".
        switches: names of `sharded.SWITCHES`.
        moves: the mesh from the second step on, on which a checkpoint of the first one is loaded; () without.
    """

    mesh: tuple[int, ...] = (2,)
    tp: bool = False
    spread: bool = False
    blocks: tuple[Block, ...] = (Block(),)
    steps: tuple[Step, ...] = (Step(), Step())
    tied: bool = False
    positions: bool = False
    reads: str = ""
    frozen_ends: bool = False
    stored: str = "float32"
    params: str = ""
    reduces: str = ""
    outputs: str = ""
    reshard: bool | int | None = None
    granularity: str = ""
    offload: bool = False
    optimizer: str = "sgd"
    switches: tuple[str, ...] = ()
    moves: tuple[int, ...] = ()

    @property
    def parts(self) -> list[tuple[Program, range]]:
        """What runs on ranks of its own: the program there, and which steps."""
        if not self.moves:
            return [(self, range(len(self.steps)))]
        return [
            (replace(self, moves=()), range(1)),
            (replace(self, mesh=self.moves, moves=()), range(1, len(self.steps))),
        ]

    @property
    def world(self) -> int:
        """Number of ranks."""
        world = 1
        for size in self.mesh:
            world *= size
        return world

    @property
    def replicas(self) -> int:
        """Number of ranks with inputs of their own."""
        return self.world // (self.mesh[-1] if self.tp else 1)

    def sync(self, step: int, micro: int) -> str:
        """What a micro-batch reduces; without replicas there is nothing to leave out."""
        sync, is_hybrid = self.steps[step].micros[micro].sync, len(self.mesh) - self.tp == 2
        return sync if is_hybrid or sync == "no_sync" else "sync"

    def is_reduced(self, step: int) -> bool:
        """Whether all gradients of a step are reduced at its end. Otherwise the optimizer does not step."""
        return self.sync(step, len(self.steps[step].micros) - 1) == "sync"

    def runs(self, step: int, replica: int) -> tuple[bool, ...]:
        """Which blocks run on a rank in a step."""
        return tuple(_is_now(block.runs, step, replica) for block in self.blocks)

    def spares(self, step: int, replica: int) -> tuple[bool, ...]:
        """Which blocks then do so with their spare layer."""
        return tuple(_is_now(block.spare, step, replica) for block in self.blocks)

    def with_grads(self, step: int, replica: int) -> list[bool]:
        """Whether the output of each block in turn, and so at last the loss, needs a gradient."""
        needs, found = not self.frozen_ends, []
        for block, runs, spare in zip(
            self.blocks, self.runs(step, replica), self.spares(step, replica), strict=True
        ):
            trains = block.frozen == "no" or (block.frozen == "base" and (spare or block.kind == "adapter"))
            if runs and not block.drops:
                needs = needs or (trains and block.recompute != "reentrant")
            found.append(needs)
        return found

    @property
    def is_alike(self) -> bool:
        """Whether in every step the backwards of all ranks come by the same units, and there is one."""
        ranks = range(self.replicas)
        steps = [[self.with_grads(step, rank) for rank in ranks] for step in range(len(self.steps))]
        is_same = all(needs == step[0] and needs[-1] for step in steps for needs in step)
        return is_same and not (self.frozen_ends and any(step.thaws for step in self.steps))

    def __str__(self) -> str:
        """As it is pasted, over a few lines."""
        text = repr(self)
        for name in (
            "blocks=",
            "steps=",
            "tied=",
            "stored=",
            "params=",
            "reshard=",
            "optimizer=",
            "switches=",
        ):
            text = text.replace(f", {name}", f",\n    {name}", 1)
        return text


def _is_now(when: str, step: int, replica: int) -> bool:
    if when in (ALWAYS, NEVER, ""):
        return when == ALWAYS
    return step % 2 == 1 if when == ODD else replica % 2 == 0


def draw(seed: int) -> Program:
    """The program of a seed."""
    dice = random.Random(seed)
    tp = dice.random() < 0.15
    mesh = dice.choice(_TP_MESHES if tp else _MESHES)
    params = dice.choice(["", "", "", "bfloat16"])
    reduces = dice.choice(["", "", "float32", "bfloat16", "float16"])
    optimizer = dice.choice(["sgd", "adamw", "foreach", "fused", *(() if tp else ("muon", "8bit"))])
    stored = "float32" if params or reduces or tp or optimizer in ("muon", "8bit") else "float64"
    hybrid = len(mesh) - tp == 2
    program = Program(
        mesh=mesh,
        tp=tp,
        blocks=_blocks(dice, tp),
        steps=tuple(_step(dice, hybrid) for _ in range(dice.randint(2, 3))),
        tied=dice.random() < 0.3,
        frozen_ends=dice.random() < 0.15,
        stored=dice.choice(["float32", stored]),
        params=params,
        reduces=reduces,
        outputs=dice.choice(["", "float32"]) if params else "",
        reshard=_reshard(dice, mesh[-2] if tp else mesh[-1]),
        granularity=_granularity(dice, optimizer),
        offload=dice.random() < 0.15,
        optimizer=optimizer,
        switches=tuple(name for name, often in _SWITCHES.items() if dice.random() < often),
    )
    other = random.Random(f"root {seed}")  # of its own, so that the rest of the programs stays as it was
    program = replace(program, positions=other.random() < 0.6, reads=other.choice(["", "", "embed", "head"]))
    if program.positions and other.random() < 0.3:
        program = replace(program, reads="positions")
    if "zeros_unused" in program.switches:  # what is gathered ahead for nothing counts as used there
        program = replace(program, switches=tuple(name for name in program.switches if name != "prefetch"))
    if not tp and program.reshard in (None, True, False) and dice.random() < 0.25:
        program = replace(program, moves=dice.choice(_MESHES))
    nodes = random.Random(f"nodes {seed}")
    if len(mesh) - tp == 2 and program.reshard != 2 and nodes.random() < 0.6:
        program = replace(program, spread=True)
        if program.moves and nodes.random() < 0.5:
            program = replace(program, moves=nodes.choice(_NODES))
    elif not tp and nodes.random() < 0.25:
        program = replace(
            program, spread=True, mesh=nodes.choice(_NODES), reshard=program.reshard == 2 or program.reshard
        )
    if any(
        step.micros[-1].sync != "sync" for step in program.steps
    ):  # what waits is of those that were trained
        program = replace(program, steps=tuple(replace(step, thaws=False) for step in program.steps))
    is_alike = all(part.is_alike for part, _ in program.parts)
    return program if is_alike else replace(program, frozen_ends=False)


_MESHES = [(1,), (2,), (2,), (3,), (4,), (2, 2), (1, 2), (2, 1)]
_NODES = [(2, 2), (2, 2), (2, 1), (3, 1), (1, 2)]
_TP_MESHES = [(2, 2), (1, 2), (2, 1), (2, 1, 2), (1, 2, 2)]
_SWITCHES = {
    "streams": 0.4,
    "zeros_unused": 0.15,
    "force_sum": 0.1,
    "divide": 0.1,
    "wide": 0.1,
    "two_buffers": 0.15,
    "keep_storage": 0.1,
    "stays_after_backward": 0.1,
    "prefetch": 0.15,
    "finalizes_by_hand": 0.08,
    "own_group": 0.1,
    "unshards_ahead": 0.08,
    "hook": 0.1,
}


def _reshard(dice: random.Random, shards: int) -> bool | int | None:
    return dice.choice([None, True, False, 2 if shards == 4 else True])


def _granularity(dice: random.Random, optimizer: str) -> str:
    if optimizer == "8bit":
        return "8bit"
    return dice.choice(["", "", "rows:2", "rows:3", "whole"])


def _blocks(dice: random.Random, tp: bool) -> tuple[Block, ...]:
    blocks: list[Block] = []
    for left in reversed(range(dice.randint(1, 4))):
        block = _block(dice, tp, is_last=left == 0)
        if blocks and blocks[-1].unit == "pair" and block.unit != "pair":  # of the unit that began before
            block = replace(block, unit="own", runs=ODD if block.runs == SOME_RANKS else block.runs)
        blocks.append(block)
    return tuple(blocks)


def _block(dice: random.Random, tp: bool, *, is_last: bool) -> Block:
    kind = dice.choice(["mlp", "mlp", "tied", "norm", "adapter", "gain", "dict"])
    unit = dice.choice(["own", "own", "own", "nested", "root", "own" if is_last else "pair"])
    kind = (
        "mlp" if tp and kind in ("tied", "gain") else kind
    )  # norms of two dtypes on two meshes do not stack
    if unit == "nested" and (tp or kind == "tied"):  # a parameter lies in one unit
        unit = "own"
    runs = _chosen(dice, {ALWAYS: 0.75, ODD: 0.15, NEVER: 0.1})
    if unit == "root" and dice.random() < 0.2:
        runs = SOME_RANKS
    recompute = _chosen(dice, {"no": 0.6, "plain": 0.16, "reentrant": 0.12, "inside": 0.12})
    return Block(
        kind=kind,
        unit=unit,
        frozen=_chosen(dice, {"no": 0.7, "base": 0.15, "all": 0.15}),
        recompute="plain" if kind == "dict" and recompute == "reentrant" else recompute,
        runs=runs,
        drops=dice.random() < 0.08,
        spare=dice.choice(["", "", ALWAYS, NEVER, ODD, SOME_RANKS]),
        times=_chosen(dice, {1: 0.85, 2: 0.15}),
    )


def _step(dice: random.Random, hybrid: bool) -> Step:
    micros = []
    for _ in range(dice.choice([1, 1, 2, 3])):
        forwards = _chosen(dice, {1: 0.75, 2: 0.25})
        quiet = ["sync", "no_sync", "no_all_reduce"] if hybrid else ["sync", "no_sync"]
        micros.append(
            Micro(
                forwards=forwards,
                apart=forwards > 1 and dice.random() < 0.4,
                sync=dice.choice(quiet),
                watched=dice.random() < 0.2,
                breaks=dice.random() < 0.08,
            )
        )
    if dice.random() < 0.95:  # else what is not reduced yet waits for the next step
        micros[-1] = replace(micros[-1], sync="sync")
    return Step(
        micros=tuple(micros),
        clips=dice.random() < 0.4,
        zeros=_chosen(dice, {"none": 0.7, "zero": 0.2, "keep": 0.1}),
        evaluates=_chosen(dice, {"": 0.7, "no_grad": 0.2, "inference": 0.1}),
        late=dice.random() < 0.5,
        thaws=dice.random() < 0.12,
    )


def _chosen(dice: random.Random, weights: dict[Any, float]) -> Any:
    return dice.choices(list(weights), list(weights.values()))[0]
