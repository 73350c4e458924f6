"""Whatever fails on a rank, at whatever call of a storage: all ranks hear of it, and nothing acknowledged is lost.

make test         a sample in which every two of call, error, rank, form, mode, store and moment meet
make test-faults  all of them
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.support.distributed import RankError, RankTimeout, run_ranks
from tests.support.faults.fault_matrix import (
    SETTINGS,
    WORLD,
    Cell,
    Outcome,
    Setting,
    all_cells,
    judged,
    record,
    run_cells,
)
from tests.support.faults.pairwise import pairwise
from tests.support.faults.watched_storage import Call
from tests.support.s3_server import Weather, s3_server

# botocore still asks for naive UTC times, moto parses with deprecated calls.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")

_ALL = os.environ.get("FAULTS") == "all"
_SEED = int(os.environ.get("FAULTS_SEED", "0"))
_SAMPLE = 340


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """Where an S3 server listens."""
    with s3_server(Weather()) as found:
        yield found


@pytest.fixture(scope="module")
def calls(endpoint: str, tmp_path_factory: pytest.TempPathFactory) -> dict[Setting, list[list[Call]]]:
    """What fault-free runs ask of a storage."""
    return run_ranks(WORLD, record, tmp_path_factory.mktemp("record"), endpoint)[0]


def _name(setting: Setting) -> str:
    return "-".join(setting)


def test_runs_are_recorded_whole(calls: dict[Setting, list[list[Call]]]) -> None:
    """Both ranks make calls in every setting but where one writes for all, and no operation of a storage stays out."""
    asks = {"free_bytes"}  # all that rank 1 does where rank 0 writes for it
    sent = {setting for setting, ranks in calls.items() if {call.operation for call in ranks[1]} <= asks}
    assert set(calls) == set(SETTINGS) and all(ranks[0] for ranks in calls.values())
    one_writer = {("save", "hf", "s3")}
    assert sent == {s for s in SETTINGS if (s.action, s.form, s.store) in one_writer}
    operations = {call.operation for ranks in calls.values() for own in ranks for call in own}
    written = {"lock", "create", "write_at", "close", "commit", "sync_folder", "remove"}
    written |= {"lay_out", "join", "take_over", "list_files", "free_bytes", "rename"}
    read = {"exists", "list_folder", "read_small", "open_file", "read_at", "view"}
    assert operations == written | read


def test_the_sample_meets_every_pair(calls: dict[Setting, list[list[Call]]]) -> None:
    """Every two values that meet in all faults meet in the sample, and every setting is in it."""
    every = all_cells(calls)
    sample = pairwise(every, _SAMPLE, _SEED)

    def pairs(cells: list[Cell]) -> set[Any]:
        return {pair for cell in cells for pair in combinations(cell.factors, 2)}

    assert len(sample) <= _SAMPLE < len(every) and pairs(sample) == pairs(every)
    assert {cell.setting for cell in sample} == set(SETTINGS)


_CELL = Cell(SETTINGS[0], 0, Call("commit", "manifest.json", 0), False, "ctrl-c")
_HIT = Outcome("KeyboardInterrupt", "injected fault", True, 0, True, 0.1)
_TOLD = Outcome("CheckpointError", "rank 0: KeyboardInterrupt: injected fault", False, 0, False, 0.1)


@pytest.mark.parametrize(
    ("first", "second", "complaint"),
    [
        (_HIT, _TOLD, None),
        (_HIT, _TOLD._replace(error=None), "some ranks returned"),
        (_HIT, _TOLD._replace(text="rank 0: hung up"), "not told who met what"),
        (_HIT, _TOLD._replace(error="RuntimeError"), "not told who met what"),
        (_HIT, _TOLD._replace(took_s=100.0), "longer than the time-out"),
        (_HIT._replace(fired=False), _TOLD, "was not made"),
        (_HIT._replace(is_injected=False), _TOLD, "another error than it met"),
        (_HIT._replace(error=None), _TOLD._replace(error=None), "Ctrl-C was lost"),
    ],
)
def test_a_fault_can_go_wrong(first: Outcome, second: Outcome, complaint: str | None) -> None:
    """Each rule of the matrix has an ending that breaks it."""
    problems = judged(_CELL, [first, second], 1)

    assert len(problems) == (complaint is not None)
    assert complaint is None or complaint in problems[0]


@pytest.mark.parametrize("setting", SETTINGS, ids=_name)
def test_faults(
    setting: Setting,
    calls: dict[Setting, list[list[Call]]],
    endpoint: str,
    tmp_path: Path,
) -> None:
    """No rank is left behind, none takes an error for its own, no state is lost, and the next save goes well."""
    every = all_cells(calls)
    cells = [cell for cell in (every if _ALL else pairwise(every, _SAMPLE, _SEED)) if cell.setting == setting]
    print(f"{len(cells)} of {len(every)} faults")
    assert cells
    problems = _run(cells, tmp_path, endpoint)
    assert not problems, f"{len(problems)} of {len(cells)} faults went wrong, first:\n" + "\n\n".join(
        problems[:5]
    )


def _run(cells: list[Cell], folder: Path, endpoint: str) -> list[str]:
    """What is wrong with these cells; a rank that hangs or dies is told with its cell and its stacks."""
    run = _name(cells[0].setting)
    try:
        return run_ranks(WORLD, run_cells, folder, endpoint, cells, run, timeout_s=3600.0)[0]
    except (RankError, RankTimeout) as error:
        where = "\n".join(path.read_text() for path in sorted(folder.glob("cell-*")))
        stacks = "\n".join(path.read_text() for path in sorted(folder.glob("stacks-*")))
        return [f"{where}\n{stacks}\n{error}"]
