"""How every benchmark reports: rows of one form, a table on the screen, JSON in a file.

A row is ``{case, metric, unit, ours, rival, rival_name, ratio, target, met}``; ``ratio`` is ours / rival,
``met`` says whether the ratio keeps the target, and is null where there is none. The last row of the JSON
holds versions and the number of cores.
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
    """One measured figure beside a rival's. Smaller is better unless ``target`` starts with '>='."""

    case: str
    metric: str
    unit: str
    ours: float
    rival: float | None = None
    rival_name: str | None = None
    target: str | None = None  # such as "< 0.9", on the ratio (on ours where there is no rival)

    @property
    def ratio(self) -> float | None:
        """Ours over the rival's."""
        return self.ours / self.rival if self.rival else None

    @property
    def met(self) -> bool | None:
        """Whether the target holds; None without one."""
        if self.target is None:
            return None
        relation, bound = self.target.split()
        value = self.ratio if self.rival else self.ours
        if value is None:
            return None
        limit = float(bound)
        return {"<": value < limit, "<=": value <= limit, ">": value > limit, ">=": value >= limit}[relation]

    def to_json(self) -> dict[str, Any]:
        """The row as the JSON holds it."""
        return {**asdict(self), "ratio": self.ratio, "met": self.met}


def machine() -> dict[str, Any]:
    """Versions and cores, so that a table can be judged."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "gpu": gpu,
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
