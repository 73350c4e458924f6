"""Whatever fails on a rank, at whatever call of a storage: all ranks hear of it, and nothing acknowledged is lost.

make test         a sample in which every two of call, error, rank, form, mode, store and moment meet
make test-faults  all of them
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed import RankError, RankTimeout, run_ranks
from tests.fault_matrix import SETTINGS, WORLD, Call, Cell, Setting, all_cells, pairwise, record, run_cells
from tests.s3_server import Weather, s3_server

# botocore still asks for naive UTC times, moto parses with deprecated calls.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")

_ALL = os.environ.get("FAULTS") == "all"
_SEED = int(os.environ.get("FAULTS_SEED", "0"))
_SAMPLE = 300


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
    """Both ranks make calls in every setting, and no operation of a storage stays out."""
    assert set(calls) == set(SETTINGS) and all(ranks[0] and ranks[1] for ranks in calls.values())
    operations = {call.operation for ranks in calls.values() for own in ranks for call in own}
    written = {"lock", "create", "write_at", "close", "commit", "sync_folder", "remove"}
    assert operations == written | {"exists", "list_folder", "read_small", "open_file", "read_at", "view"}


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
