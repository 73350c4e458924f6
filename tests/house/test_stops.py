"""A tensor's way through a save and a conversion stays short, as tools/stops.py counts it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tools import stops
from tools.stops import Stop, follow
from vescale_fsdp.checkpoint.manifest.torch_dtypes import bytes_of
from vescale_fsdp.layout.geometry import Box

ROOT = Path(__file__).parents[2]
# Ways get shorter, never longer: lower a limit whenever its way has become shorter.
LIMITS = {"save": 30, "save-zarr": 52, "to-hf": 60}


@pytest.fixture(scope="module")
def report() -> dict[str, dict[str, object]]:
    """What the tool prints in a process of its own, where no other test has filled caches or left threads."""
    command = [sys.executable, str(ROOT / "tools" / "stops.py"), "--json"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    found: dict[str, dict[str, object]] = json.loads(done.stdout)
    return found


def test_ways_stay_short(report: dict[str, dict[str, object]]) -> None:
    """No way has more stops than it had."""
    totals = report["totals"]

    assert set(totals) == set(LIMITS)
    assert {name: total for name, total in totals.items() if int(str(total)) > LIMITS[name]} == {}


@pytest.mark.parametrize(
    ("way", "first", "last"),
    [
        ("save", "save", "checkpoint/storage/"),
        ("save-zarr", "save", "checkpoint/storage/"),
        ("to-hf", "open_source", "conversion/output/"),
    ],
)
def test_ways_lead_from_end_to_end(
    report: dict[str, dict[str, list[dict[str, object]]]], way: str, first: str, last: str
) -> None:
    """The measured run really saved and converted: from the public function to those that write files."""
    stops_of_way = report["ways"][way]

    assert stops_of_way[0]["name"] == first
    assert any(str(stop["file"]).startswith(last) for stop in stops_of_way)
    assert len(stops_of_way) > 10


def names_of(work: Callable[[], object]) -> set[str]:
    """The stops of one call."""
    return {stop.name for stop in follow(work).stops()}


def test_only_what_holds_the_tensor_or_calls_on_is_a_stop() -> None:
    """A function given the tensor is a stop, one that is asked for a size is none."""
    box = Box((0, 0), (2, 3))

    assert names_of(lambda: bytes_of(torch.ones(3))) >= {"bytes_of"}
    assert names_of(lambda: box.numel) == set()
    assert names_of(lambda: sorted([3, 1])) == set()


def test_long_functions_are_several_stops() -> None:
    """60 lines are one stop, 61 are two: merging functions shortens no way."""
    weights = [Stop("f", "f.py", 1, lines, 0).weight for lines in (1, 60, 61, 120, 121)]

    assert weights == [1, 1, 2, 2, 3]
    assert stops.LINES_PER_STOP == 60
