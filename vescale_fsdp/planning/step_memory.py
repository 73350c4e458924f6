"""The peak memory of a training step, by arithmetic: the runtime's schedule over measured windows. Integers and names.

A *window* is the time in which one module runs, in the forward or in the backward. `meta_step` measures activations and
unsharded gradients of each window. This module adds the buffers of units, in the order in which
`vescale_fsdp.runtime.schedule` gathers, frees and reduces them. On an accelerator they belong to two pools of the
caching allocator (see `vescale_fsdp.runtime.comm_context`)::

    compute   shards, optimizer state, the root's gathered weights, activations, unsharded gradients, gradient buffers,
              reduced gradients
    gather    gathered weights of the unit that runs, and of the unit that is gathered ahead

A pool keeps its memory, so a rank needs the sum of the peaks of both pools. On the CPU there is one pool, gradients are
written into the gradient buffer as they appear, and nothing is gathered ahead in the backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

COMPUTE, GATHER = "compute", "gather"
GRADIENTS, GATHERED, ACTIVATIONS, TEMPORARIES = "gradients", "gathered", "activations", "temporaries"


@dataclass(frozen=True)
class Window:
    """Memory of one module while it runs, in bytes, without its weights.

    Attributes:
        module: the module's name; "" between modules, such as in the loss.
        is_backward: whether the window is in the backward.
        peak_bytes: most activations and unsharded gradients at one time, if gradients are kept to the window's end.
        kept_bytes: the part of ``peak_bytes`` that is kept gradients.
        written_peak_bytes: most activations at one time, if each gradient is freed as soon as it is there.
        grad_bytes: unsharded gradients at the end of the window.
        end_bytes: activations at the end of the window.
    """

    module: str
    is_backward: bool
    peak_bytes: int = 0
    kept_bytes: int = 0
    written_peak_bytes: int = 0
    grad_bytes: int = 0
    end_bytes: int = 0


@dataclass(frozen=True)
class UnitMemory:
    """Bytes of one unit on a rank.

    Attributes:
        name: the unit's name; "" for the root.
        modules: the modules whose windows belong to the unit; the root's include "".
        full_bytes: gathered weights, with the copies of scattered tensors.
        kept_bytes: the part of ``full_bytes`` that stays between forward and backward.
        buffer_bytes: the gradient buffer.
        reduced_bytes: the reduced gradients of this rank.
        lasting_bytes: in a hybrid cut, this rank's kept part of the weights, which lasts from step to step.
        sum_bytes: in a hybrid cut, the gradients of this rank's part, summed over its node.
    """

    name: str
    modules: tuple[str, ...]
    full_bytes: int
    kept_bytes: int
    buffer_bytes: int
    reduced_bytes: int
    lasting_bytes: int = 0
    sum_bytes: int = 0


@dataclass(frozen=True)
class PeakMemory:
    """Memory that a rank needs, in bytes: the sum of the peaks of all pools, by kind.

    Attributes:
        weights: shards of the parameters.
        states: optimizer state.
        gradients: unsharded and reduced gradients, and gradient buffers.
        gathered: gathered weights.
        activations: activations, and temporaries of forward and backward.
        temporaries: of the optimizer's step.
        moment: when the compute pool has its peak.
    """

    weights: int
    states: int
    gradients: int
    gathered: int
    activations: int
    temporaries: int
    moment: str

    @property
    def total(self) -> int:
        """The sum of all kinds."""
        kinds = (self.weights, self.states, self.gradients, self.gathered, self.activations)
        return sum(kinds) + self.temporaries

    def to_json(self) -> dict[str, Any]:
        """Return the kinds, their total and the moment as JSON values."""
        return {**asdict(self), "total": self.total}


class _Pools:
    """Bytes in use by pool, kind and owner, and what each pool holds at its peak."""

    def __init__(self, gather: str) -> None:
        self.gather = gather  # the pool of gathered weights
        self._held: dict[tuple[str, str, object], int] = {}
        self._now: dict[str, Counter[str]] = {COMPUTE: Counter(), gather: Counter()}  # the sums, by kind
        self._peaks: dict[str, tuple[int, Counter[str], str]] = {}

    def hold(self, pool: str, kind: str, owner: object, nbytes: int) -> None:
        self.drop(pool, kind, owner)
        self._held[pool, kind, owner] = nbytes
        self._now[pool][kind] += nbytes

    def drop(self, pool: str, kind: str, owner: object) -> None:
        self._now[pool][kind] -= self._held.pop((pool, kind, owner), 0)

    def holds(self, pool: str, kind: str, owner: object) -> bool:
        return (pool, kind, owner) in self._held

    def see(self, moment: str, **more: int) -> None:
        """Note a moment at which the compute pool has ``more`` bytes by kind."""
        for pool, now in self._now.items():
            kinds = now + Counter(more) if pool == COMPUTE else now
            if pool not in self._peaks or kinds.total() > self._peaks[pool][0]:
                self._peaks[pool] = kinds.total(), kinds.copy(), moment

    def peak(self, weights: int, states: int) -> PeakMemory:
        kinds = sum((kinds for _, kinds, _ in self._peaks.values()), Counter[str]())
        moment = self._peaks[COMPUTE][2]
        return PeakMemory(
            weights,
            states,
            kinds[GRADIENTS],
            kinds[GATHERED],
            kinds[ACTIVATIONS],
            kinds[TEMPORARIES],
            moment,
        )


class _Step:
    """One step of a rank: holds and drops the buffers of units as the runtime does."""

    def __init__(self, units: Sequence[UnitMemory], *, on_cpu: bool, accumulates: bool) -> None:
        self.on_cpu, self.accumulates = on_cpu, accumulates
        self.root = units[-1]
        self.pools = _Pools(COMPUTE if on_cpu else GATHER)
        self.in_flight: UnitMemory | None = None  # whose gradient buffer is being reduced
        self.sums: list[UnitMemory] = []  # whose gradients are being reduced over nodes, the oldest first
        for unit in units:
            self.pools.hold(COMPUTE, GATHERED, ("lasting", unit.name), unit.lasting_bytes)
            if accumulates:  # gradients of earlier micro-batches, or their sums over nodes
                self.pools.hold(
                    COMPUTE, GRADIENTS, ("earlier", unit.name), unit.sum_bytes or unit.reduced_bytes
                )

    def _pool_of(self, unit: UnitMemory) -> str:
        # Weights that last from the forward to the backward have memory of the compute stream.
        return COMPUTE if unit.kept_bytes == unit.full_bytes else self.pools.gather

    def gather(self, unit: UnitMemory | None) -> None:
        if unit is not None:
            self.pools.drop(COMPUTE, GATHERED, ("part", unit.name))
            self.pools.hold(self._pool_of(unit), GATHERED, unit.name, unit.full_bytes)

    def free(self, unit: UnitMemory, kept_bytes: int = 0) -> None:
        if kept_bytes < unit.full_bytes:
            self.pools.drop(self._pool_of(unit), GATHERED, unit.name)
            self.pools.hold(COMPUTE, GATHERED, ("part", unit.name), kept_bytes)

    def run(self, window: Window, unit: UnitMemory) -> None:
        moment = f"{'backward' if window.is_backward else 'forward'} of {window.module or 'the root'}"
        if self.on_cpu:
            if window.grad_bytes:
                self._new_buffer(unit)
            self.pools.see(moment, **{ACTIVATIONS: window.written_peak_bytes})
            return
        activations = window.peak_bytes - window.kept_bytes
        self.pools.see(moment, **{ACTIVATIONS: activations, GRADIENTS: window.kept_bytes})
        self.pools.hold(COMPUTE, GRADIENTS, (unit.name, window.module), window.grad_bytes)

    def _new_buffer(self, unit: UnitMemory) -> None:
        """Let a unit have a gradient buffer, after the reduction in flight has freed its own."""
        if self.in_flight is not None:
            self.pools.drop(COMPUTE, GRADIENTS, ("buffer", self.in_flight.name))
            self.in_flight = None
        self.pools.hold(COMPUTE, GRADIENTS, ("buffer", unit.name), unit.buffer_bytes)

    def _new_sum(self, unit: UnitMemory) -> None:
        """Let a unit have a sum over its node; on an accelerator two earlier ones may be in use by other streams."""
        while len(self.sums) > (0 if self.on_cpu else 2):
            self.pools.drop(COMPUTE, GRADIENTS, ("sum", self.sums.pop(0).name))
        self.pools.hold(COMPUTE, GRADIENTS, ("sum", unit.name), unit.sum_bytes)
        self.sums.append(unit)

    def reduce(self, unit: UnitMemory, activation_bytes: int) -> None:
        self.free(unit)
        if not unit.buffer_bytes:  # frozen
            return
        moment = f"reduction of {unit.name or 'the root'}"
        self._new_buffer(unit)
        self.pools.see(moment, **{ACTIVATIONS: activation_bytes})
        for module in unit.modules:
            self.pools.drop(COMPUTE, GRADIENTS, (unit.name, module))
        self._new_sum(unit)
        # Added to the earlier gradients, and freed, unless those are sums.
        owner = "latest" if self.accumulates and not unit.sum_bytes else unit.name
        self.pools.hold(COMPUTE, GRADIENTS, ("reduced", owner), unit.reduced_bytes)
        self.pools.see(moment, **{ACTIVATIONS: activation_bytes})
        self.in_flight = unit


def peak_of(
    windows: Sequence[Window],
    units: Sequence[UnitMemory],
    *,
    weights: int,
    states: int,
    temporaries: int = 0,
    accumulates: bool = False,
    on_cpu: bool = False,
) -> PeakMemory:
    """Return the memory that a rank needs for a training step, once the optimizer has its state.

    Args:
        windows: the windows of a step, in order.
        units: the units; the root is the last one.
        weights, states: bytes that a rank stores all the time.
        temporaries: bytes that the optimizer's step allocates.
        accumulates: whether this is not the step's first forward and backward.
        on_cpu: whether the step runs on the CPU.
    """
    step = _Step(units, on_cpu=on_cpu, accumulates=accumulates)
    unit_of = {module: unit for unit in units for module in unit.modules}
    step.pools.see("start")
    for is_backward in (False, True):
        visits = [window for window in windows if window.is_backward is is_backward]
        last = {unit_of[window.module].name: index for index, window in enumerate(visits)}
        order = [unit for unit in dict.fromkeys(unit_of[w.module] for w in visits) if unit is not step.root]
        ahead = {unit.name: following for unit, following in pairwise([*order, None]) if unit is not None}
        step.gather(step.root)
        if order and not (is_backward and on_cpu):
            step.gather(order[0])
        for index, window in enumerate(visits):
            unit = unit_of[window.module]
            step.gather(unit)
            if not (is_backward and on_cpu):
                step.gather(ahead.get(unit.name))
            step.run(window, unit)
            if unit is step.root or last[unit.name] != index:
                continue
            if is_backward:
                step.reduce(unit, window.end_bytes)
                if on_cpu:
                    step.gather(ahead[unit.name])
            else:
                step.free(unit, unit.kept_bytes)
    step.reduce(step.root, 0)
    step.pools.see("reduction of the root")
    if step.in_flight is not None:
        step.pools.drop(COMPUTE, GRADIENTS, ("buffer", step.in_flight.name))
    for unit in units:
        step.pools.drop(COMPUTE, GRADIENTS, ("sum", unit.name))
        if unit.sum_bytes:
            step.pools.drop(COMPUTE, GRADIENTS, ("earlier", unit.name))
    step.pools.drop(COMPUTE, GRADIENTS, ("reduced", "latest"))
    step.pools.see("optimizer's step", **{TEMPORARIES: temporaries})
    return step.pools.peak(weights, states)
