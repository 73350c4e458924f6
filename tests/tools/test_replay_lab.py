"""Replays of steps in the lab: their arithmetic, and that they take as long as the steps where the network is slow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tools.bench.network import Case
from tools.replay.lab import Measured, main, predicted_s
from tools.replay.recording import Item, Recording

SECOND = int(1e9 / 8 * 1448 / 1514)  # bytes of a link of 1 Gb/s, without headers


def message(stream: str, nbytes: int, event: int) -> tuple[Item, ...]:
    """A message that a thread starts now, and whose end is an event."""
    return (
        Item("record", stream, event=event),
        Item("wait", "link", event=event),
        Item("collective", "link", "message", nbytes, group="link", ranks=2),
        Item("record", "link", event=event + 1),
    )


def test_a_replay_has_one_link_and_a_core_per_rank() -> None:
    """A message of a second runs while two threads compute, each half as fast while both do."""
    items = (
        *message("main", SECOND // 2, 1),
        Item("operator", "main", "one"),
        Item("operator", "reductions", "two"),
        Item("wait", "main", event=2),
        Item("operator", "main", "three"),
    )
    step = Measured(
        Recording(items), {"one": 0.4, "two": 0.4, "three": 0.5}, SECOND, []
    )  # counters: twice the bytes
    case = Case(2, 1, False, "dense", "bf16", 1)
    assert predicted_s(step, case, 1.0, cores=2) == pytest.approx(1.0 + 0.5, abs=0.001)
    assert predicted_s(step, case, 0.5, cores=2) == pytest.approx(2.0 + 0.5, abs=0.001)
    assert predicted_s(step, case, 1.0, cores=1) == pytest.approx(
        1.6 + 1.0, abs=0.001
    )  # now computing takes longer


@pytest.mark.lab
@pytest.mark.alone
@pytest.mark.part("jobs")
def test_a_replay_takes_as_long_as_a_step_between_nodes(tmp_path: Path) -> None:
    """Two nodes over 0.05 Gb/s: ours within 15 %, and FSDP2 slower in both."""
    file = tmp_path / "rows.json"
    arguments = [
        "--cases",
        "2x1",
        "--models",
        "dense",
        "--rates",
        "0.05",
        "--steps",
        "3",
        "--json",
        str(file),
    ]
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    rows = {row["metric"]: row for row in json.loads(file.read_text()) if "metric" in row}
    ours, theirs = (rows[f"step of {library}, predicted"] for library in ("ours", "fsdp2"))
    assert ours["ratio"] == pytest.approx(1, abs=0.15)
    assert theirs["ours"] / ours["ours"] > 1.05 and theirs["rival"] / ours["rival"] > 1.05
