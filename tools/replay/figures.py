"""The figures of docs/gpu_expectations.md, drawn from docs/gpu_expectations.json: bars from the least to the most."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vescale_fsdp.layout.pictures import CURVE_COLORS, INK, QUIET, RULE, Canvas

RESULTS = Path(__file__).parents[2] / "docs" / "gpu_expectations.json"
_LEFT, _TOP, _WIDTH, _HEIGHT = 90, 84, 760, 300
_MARK = 0.05  # gains above it are worth a change of library
_LIMIT_COLOR = "#d0453a"


class Bars(NamedTuple):
    """One color of bars: by x, the least and the most, the same without contention, and a note instead of a bar."""

    name: str
    points: Sequence[dict[str, Any]]


def bars_svg(
    title: str, xs: Sequence[str], x_label: str, series: Sequence[Bars], *, is_log: bool = False
) -> str:
    """Draw gains as bars from the least to the most, on a linear or logarithmic scale.

    Args:
        xs: labels of the groups of bars.
        series: bars with one point per x.
    """
    canvas = Canvas(title, _LEFT + _WIDTH + 40, _TOP + _HEIGHT + 70 + 20 * len(series))
    canvas.text(20, 32, title, size=17, bold=True)
    note = "FSDP2's step time over ours, less 1. Light: all assumptions; dark: without contention; dot: calibrated."
    canvas.text(20, 54, note, size=12, color=QUIET)
    values = [
        point[key] for each in series for point in each.points for key in ("least", "most") if key in point
    ]
    levels = _levels(values, is_log=is_log)

    def y_of(gain: float) -> float:
        low, high = levels[0], levels[-1]
        if is_log:
            gain = max(gain, low)
            share = math.log(gain / low) / math.log(high / low)
        else:
            share = (gain - low) / (high - low)
        return _TOP + _HEIGHT * (1 - share)

    for level in levels:
        canvas.line([(_LEFT, y_of(level)), (_LEFT + _WIDTH, y_of(level))], RULE, width=0.8)
        label = f"{level:+.0%}".replace("%", " %").replace("+0 ", "0 ")
        less = " or less" if is_log and level == levels[0] else ""
        canvas.text(_LEFT - 8, y_of(level) + 4, label + less, size=11, color=QUIET, anchor="end")
    room = _WIDTH / len(xs)
    width = min(34.0, 0.7 * room / len(series))
    for place, label in enumerate(xs):
        middle = _LEFT + room * (place + 0.5)
        canvas.text(middle, _TOP + _HEIGHT + 20, label, size=12, anchor="middle")
        for number, each in enumerate(series):
            x = middle + (number - (len(series) - 1) / 2) * (width + 4)
            _draw_bar(canvas, each.points[place], x, width, CURVE_COLORS[number], y_of)
    canvas.line([(_LEFT, y_of(_MARK)), (_LEFT + _WIDTH, y_of(_MARK))], _LIMIT_COLOR, width=1.2, dashed=True)
    canvas.text(_LEFT + _WIDTH + 4, y_of(_MARK) + 4, "+5 %", size=11, color=_LIMIT_COLOR)
    canvas.text(_LEFT + _WIDTH / 2, _TOP + _HEIGHT + 42, x_label, size=12, color=QUIET, anchor="middle")
    for number, each in enumerate(series):
        y = _TOP + _HEIGHT + 66 + 20 * number
        canvas.rect(_LEFT, y - 10, 12, 12, CURVE_COLORS[number])
        canvas.text(_LEFT + 20, y, each.name, size=12)
    return canvas.svg()


def _levels(values: Sequence[float], *, is_log: bool) -> list[float]:
    if is_log:
        return [
            level
            for level in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)
            if level < 2.2 * max(values)
        ]
    step = 0.05 if max(values) < 0.4 else 0.2
    low, high = math.floor(min(0, *values) / step + 0.01), math.ceil(max(values) / step)
    return [step * number for number in range(low, high + 1)]


def _draw_bar(canvas: Canvas, point: dict[str, Any], x: float, width: float, color: str, y_of: Any) -> None:
    if "refused" in point:
        canvas.text(x, _TOP + _HEIGHT - 6, "refused", size=10, color=QUIET, anchor="middle")
        return
    least, most, calm, calmest, middle = (
        f"{point[key]:+.1%}"
        for key in ("least", "most", "least without contention", "most without contention", "middle")
    )
    tip = f"{least} to {most}; without contention {calm} to {calmest}; calibrated {middle}"
    for low, high, share in (
        ("least", "most", 1.0),
        ("least without contention", "most without contention", 0.5),
    ):
        top, bottom = y_of(point[high]), y_of(point[low])
        fill = color if share < 1 else _pale(color)
        canvas.rect(x - width * share / 2, top, width * share, max(bottom - top, 1.5), fill, tip=tip)
    canvas.dot(x, y_of(point["middle"]), 3.5, INK, tip=tip)


def _pale(color: str) -> str:
    """The color, half way to a gray that both schemes show."""
    parts = [int(color[start : start + 2], 16) for start in (1, 3, 5)]
    return "#" + "".join(f"{(part + 200) // 2:02x}" for part in parts)


def figures() -> dict[str, str]:
    """File name -> SVG, of the results that `python -m tools.replay` wrote last."""
    results = json.loads(RESULTS.read_text())
    drawn = {}
    for model, title in (("Llama-3-70B", "dense"), ("gpt-oss-120B", "experts")):
        by_ranks = results["by_tokens"][model]
        points = next(iter(by_ranks.values()))
        drawn[f"gpu_tokens_{title}.svg"] = bars_svg(
            f"{model}: gain over FSDP2 by tokens per GPU and step",
            [f"{point['tokens'] // 1024} k" for point in points],
            "tokens per GPU and step",
            [Bars(f"{int(ranks):,} GPUs", points) for ranks, points in by_ranks.items()],
        )
    # Not those that FSDP2 mostly refuses.
    series = {
        name: points
        for name, points in results["by_ranks"].items()
        if sum("refused" in point for point in points) < len(points) / 2
    }
    drawn["gpu_ranks.svg"] = bars_svg(
        "Gain over FSDP2 by number of GPUs, 8 k tokens per GPU",
        [f"{point['ranks']:,}" for point in next(iter(series.values()))],
        "GPUs that share one copy of the model",
        [Bars(name, points) for name, points in series.items()],
        is_log=True,
    )
    return drawn
