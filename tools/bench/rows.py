"""The rows of all benchmarks, printed as a table and written as JSON.

A row is ``{case, metric, unit, ours, rival, rival_name, ratio, target, met}``. ``ratio`` is ours / rival, where
``rival`` is the figure of the compared program. ``met`` tells whether the ratio meets the target; null without a
target. The last row of the JSON has versions and the number of cores.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Row:
    """A measured figure and the compared program's. Smaller is better unless ``target`` starts with '>='."""

    case: str
    metric: str
    unit: str
    ours: float
    rival: float | None = None
    rival_name: str | None = None
    target: str | None = None  # for the ratio, such as "< 0.9"; for `ours` if nothing is compared

    @property
    def ratio(self) -> float | None:
        """``ours / rival``; None without a rival."""
        return self.ours / self.rival if self.rival else None

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without a target."""
        if self.target is None:
            return None
        relation, bound = self.target.split()
        value = self.ratio if self.rival else self.ours
        if value is None:
            return None
        limit = float(bound)
        return {"<": value < limit, "<=": value <= limit, ">": value > limit, ">=": value >= limit}[relation]

    def to_json(self) -> dict[str, Any]:
        """The row as JSON values."""
        return {**asdict(self), "ratio": self.ratio, "met": self.met}


def machine() -> dict[str, Any]:
    """Versions and number of cores, the context of a table."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "gpu": gpu,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpu else None,
        "command": " ".join(sys.argv),
    }


def _text(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def print_table(rows: Sequence[Row]) -> None:
    """Print the rows as a Markdown table."""
    head = ("case", "metric", "unit", "ours", "rival", "", "ratio", "target", "met")
    lines = [
        (
            row.case,
            row.metric,
            row.unit,
            _text(row.ours),
            _text(row.rival),
            row.rival_name or "",
            _text(row.ratio),
            row.target or "",
            {True: "yes", False: "NO", None: ""}[row.met],
        )
        for row in rows
    ]
    widths = [max(len(line[i]) for line in (head, *lines)) for i in range(len(head))]
    for line in (head, tuple("-" * width for width in widths), *lines):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |")


def write_json(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows and one row about the machine."""
    path.write_text(json.dumps([*(row.to_json() for row in rows), machine()], indent=1) + "\n")
