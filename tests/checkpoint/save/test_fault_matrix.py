"""Whatever fails on a rank, at whatever call of a storage: all ranks hear of it, and nothing acknowledged is lost.

make test                   every call, way and error of some settings, each on every rank and at both moments
make test-part PART=faults  a sample in which every two of call, way, error, rank, store and moment meet
make test-faults            all of them
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.distributed import RankError, RankTimeout, run_ranks
from tests.support.faults.fault_matrix import (
    CORE_SETTINGS,
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
from tests.support.faults.pairwise import core_pairs, every_pair, sample
from tests.support.faults.watched_storage import Call
from tests.support.s3_server import Weather, s3_server

# botocore still asks for naive UTC times, moto parses with deprecated calls.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")

_ALL = os.environ.get("FAULTS") == "all"
_SEED = int(os.environ.get("FAULTS_SEED", "0"))
_CORE, _SAMPLE = 80, 340  # cells at most


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """Where an S3 server listens."""
    with s3_server(Weather()) as found:
        yield found


@pytest.fixture(scope="module")
def calls(endpoint: str, tmp_path_factory: pytest.TempPathFactory) -> dict[Setting, list[list[Call]]]:
    """The calls of storages that fault-free runs make."""
    return run_ranks(WORLD, record, tmp_path_factory.mktemp("record"), endpoint, SETTINGS)[0]


@pytest.fixture(scope="module")
def cells(calls: dict[Setting, list[list[Call]]]) -> list[Cell]:
    """All faults, or a sample of them."""
    every = all_cells(calls)
    return every if _ALL else sample(every, every_pair, _SAMPLE, _SEED)


@pytest.mark.part("faults")
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


@pytest.mark.part("faults")
def test_the_sample_meets_every_pair(calls: dict[Setting, list[list[Call]]]) -> None:
    """Every two values that meet in all faults meet in the sample, and every setting is in it."""
    every = all_cells(calls)
    chosen = sample(every, every_pair, _SAMPLE, _SEED)

    assert len(chosen) <= _SAMPLE < len(every)
    assert set().union(*map(every_pair, chosen)) == set().union(*map(every_pair, every))
    assert {cell.setting for cell in chosen} == set(SETTINGS)


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


def test_a_fault_of_any_call_is_raised_on_all_ranks_and_costs_no_state(endpoint: str, tmp_path: Path) -> None:
    """No rank is left behind, none takes an error for its own, no state is lost, and the next save goes well."""
    calls = run_ranks(WORLD, record, tmp_path, endpoint, CORE_SETTINGS)[0]
    chosen = sample(all_cells(calls), core_pairs, _CORE, _SEED)
    assert {cell.setting for cell in chosen} == set(CORE_SETTINGS)

    _run(sorted(chosen, key=lambda cell: cell.setting), tmp_path, endpoint)


@pytest.mark.part("faults")
@pytest.mark.parametrize("setting", SETTINGS, ids="-".join)
def test_more_faults_in_every_setting(
    setting: Setting, cells: list[Cell], endpoint: str, tmp_path: Path
) -> None:
    """As above, for a larger sample, or for all faults."""
    _run([cell for cell in cells if cell.setting == setting], tmp_path, endpoint)


def _run(cells: list[Cell], folder: Path, endpoint: str) -> None:
    """Assert that these cells end well; a rank that hangs or dies is reported with its cell and its stacks."""
    assert cells
    print(f"{len(cells)} faults")
    try:
        problems = run_ranks(WORLD, run_cells, folder, endpoint, cells, folder.name, timeout_s=3600.0)[0]
    except (RankError, RankTimeout) as error:
        where = "\n".join(path.read_text() for path in sorted(folder.glob("cell-*")))
        stacks = "\n".join(path.read_text() for path in sorted(folder.glob("stacks-*")))
        problems = [f"{where}\n{stacks}\n{error}"]
    first = "\n\n".join(problems[:5])
    assert not problems, f"{len(problems)} of {len(cells)} faults went wrong, first:\n{first}"
