"""The text of a training plan: the answer first, then the candidates, the units, the assumptions and the code."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from vescale_fsdp.errors import format_bytes, some
from vescale_fsdp.layout.plan_report import ROOT, text_table

if TYPE_CHECKING:
    from vescale_fsdp.planning.training_plan import TrainingPlan

_SHOWN = 8  # candidates that the text lists
_BYTE_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def _unit_of(value: float, units: Sequence[tuple[str, float]]) -> tuple[str, float]:
    """Return the largest unit that the value has at least one of, or else the smallest unit; units descend."""
    return next((each for each in units if value >= each[1]), units[-1])


def in_unit(value: float, units: Sequence[tuple[str, float]]) -> str:
    """Return a number with its unit, of three digits at least."""
    name, size = _unit_of(value, units)
    number = value / size
    return f"{number:,.0f} {name}" if number >= 1000 else f"{number:.3g} {name}"


def text_lines(plan: TrainingPlan) -> Iterator[str]:
    """Yield the lines of a plan."""
    best, shown = plan.candidates[0], plan.candidates[:_SHOWN]
    rank, on_cpu = plan.cluster.rank_name, plan.cluster.on_cpu
    free = best.memory_bytes - best.needed_bytes
    room = f"{format_bytes(abs(free))} {'free' if free >= 0 else 'too much'} per {rank}"
    memory = f"{format_bytes(best.memory_bytes)} ({best.memory_bytes / 2**30:.3g} GiB)"
    num_gpus = best.replicas * best.shard_size
    gpus = f"{num_gpus:,} {rank}{'s' * (num_gpus > 1)} of {memory}"
    numel = in_unit(plan.numel, (("billion", 1e9), ("million", 1e6), ("thousand", 1e3)))
    step = in_unit(best.step_s, (("s", 1), ("ms", 1e-3), ("us", 1e-6)))
    yield f"{plan.model}, {numel} parameters, on {gpus}: {best.verdict}"
    bound = "" if on_cpu else f"; no step is faster than {step} ({best.limit})"
    yield f"    best: {best.sharding}, {room}{bound}"
    yield from plan.advice
    yield ""
    unit, size = _unit_of(best.needed_bytes, _BYTE_UNITS)
    count = len(plan.candidates)
    which = f"all {count}" if count == len(shown) else f"the first {len(shown)} of {count}"
    by_time = "in the order of GPUs" if on_cpu else "by the time of a step"
    order = f"what fits first, {by_time}, the rest by memory" if plan.fits else "by memory, since none fits"
    yield f"{unit} per {rank}, {which} candidates, {order}:"
    head = "sharding,units,after forward,weights,states,gradients,gathered,activations,step,other,sum,verdict"
    lines = [tuple(head.split(","))]
    for each in shown:
        peak = each.peak
        kinds = (
            peak.weights,
            peak.states,
            peak.gradients,
            peak.gathered,
            peak.activations,
            peak.temporaries,
            each.library_bytes,
        )
        sizes = (f"{nbytes / size:.2f}" for nbytes in (*kinds, each.needed_bytes))
        lines.append((each.sharding, each.wrapping, each.after_forward, *sizes, each.verdict))
    yield from text_table(lines)
    yield ""
    unit, size = _unit_of(max(sum(each.wire) for each in shown), _BYTE_UNITS)
    also = "" if on_cpu else ", and the least milliseconds of each resource"
    yield f"per {rank} and step: {unit} on the wires{also}:"
    head = f"sharding,units,after forward,padding %,copied %,{unit} in node,{unit} network"
    if not on_cpu:
        head += ",compute,in node,network,bound,limit"
    lines = [tuple(head.split(","))]
    for each in shown:
        ratios = (f"{100 * round(ratio, 5):.3g}" for ratio in (each.padding_ratio, each.copied_ratio))
        sizes = (f"{nbytes / size:.2f}" for nbytes in each.wire)
        seconds = (each.compute_s, each.link_s, each.network_s, each.step_s)
        times = (
            f"{1e3 * s:,.0f}" if s >= 1 else f"{1e3 * s:.4g}" if s >= 1e-4 else f"{1e3 * s:.4f}"
            for s in seconds
        )
        bounds = () if on_cpu else (*times, each.limit)
        lines.append((each.sharding, each.wrapping, each.after_forward, *ratios, *sizes, *bounds))
    yield from text_table(lines)
    yield ""
    yield f"units of the first candidate, over {best.shard_size:,} ranks:"
    unit, size = _unit_of(max((row.shard_bytes for row in plan.report.rows), default=0), _BYTE_UNITS[1:])
    lines = [("unit", "x", "dtype", "padding %", "copied %", f"{unit} per rank")]
    for group, row in zip(plan.report.groups, plan.report.rows, strict=True):  # of one number of ranks
        # Of modules whose names differ only in numbers, the first one is named.
        first: dict[str, str] = {}
        for name in group.units:
            first.setdefault(re.sub(r"\d+", "*", name), name or ROOT)
        names = some(first.values(), 2)
        ratios = (f"{100 * ratio:.3g}" for ratio in (row.padding_ratio, row.copied_ratio))
        lines.append((names, str(row.num_units), row.dtype, *ratios, f"{row.shard_bytes / size:,.2f}"))
    yield from text_table(lines)
    yield ""
    yield "assumptions:"
    yield from (f"    {note}" for note in plan.notes)
    yield ""
    yield from plan.code.splitlines()
