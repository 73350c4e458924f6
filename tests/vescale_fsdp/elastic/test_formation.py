"""A rank is killed or stalled while groups form, and at every other call: the others end with an error, or go on.

``FAULTS=all`` goes through every call that a rank makes of torch.distributed and of its store, and through moments
around the end of transfers drawn by ``FAULTS_SEED``.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vescale_fsdp.elastic.formation import Death, End, Program, launch, spots_of
from tests.vescale_fsdp.elastic.forming_programs import forms, goes_on, loses_a_node, meets, trains
from vescale_fsdp.checkpoint.memory.ram_tier import NO_COPIES
from vescale_fsdp.errors import LifecycleError, VescaleError

_ALL = os.environ.get("FAULTS") == "all"
_SEED = int(os.environ.get("FAULTS_SEED", "0"))
_LIMIT_S = 150.0
pytestmark = pytest.mark.timeout(7200 if _ALL else 300)


def _others(ends: dict[int, End], death: Death) -> dict[int, End]:
    """The results of the other ranks, which have ended without threads of this library."""
    found = {rank: end for rank, end in ends.items() if rank != death.rank}
    waiting = [rank for rank, end in found.items() if end.exit_code is None]
    texts = "\n".join(f"--- rank {rank} ---\n{end.text}" for rank, end in ends.items())
    assert not waiting, f"ranks {waiting} still wait after {death}\n{texts}"
    for rank, end in found.items():
        left = [name for name in end.threads if name.startswith(("elastic", "transfer"))]
        assert not left or end.error, (death, rank, left)
    return found


def _check_ends_with_its_ranks(folder: Path, death: Death) -> None:
    """Each other rank ends with an error that names the place, unless all work was done before.

    A step in memory is copied to other nodes in the background: if its copy is lost, rank 0 warns.
    """
    others = _others(launch(trains, folder, 3, death, limit_s=_LIMIT_S), death)
    for rank, end in others.items():
        is_torchs = end.error in ("DistStoreError", "RuntimeError", "DistNetworkError")
        assert VescaleError.__name__ in end.bases or (is_torchs and end.text) or not end.error, (
            death,
            rank,
            end,
        )
    if "destroy" not in death.spot and death.signal == signal.SIGKILL:
        is_copy = NO_COPIES in (folder / "err-0").read_text()
        assert is_copy or any(end.error for end in others.values()), death


def _check_forms(folder: Path, death: Death) -> None:
    """Other ranks end, although gloo would wait 50 minutes for them: with an error, or after the last collective."""
    others = _others(launch(forms, folder, 3, death, limit_s=_LIMIT_S), death)
    for rank, end in others.items():
        assert "RuntimeError" in end.bases or not end.error, (death, rank, end)
    if (
        "0//1" in death.spot or death.spot == "formed"
    ):  # earlier, others may agree without it; later, have it all
        assert all(end.error for end in others.values()), death


def _check_meets(folder: Path, death: Death) -> None:
    """Other ranks end with an error of this library; all serve the same version."""
    ends = launch(meets, folder, 3, death, limit_s=_LIMIT_S)
    others = _others(ends, death)
    for rank, end in others.items():
        is_torchs = death.spot == "dist.init_process_group 1" or "engine/" in death.spot
        assert VescaleError.__name__ in end.bases or not end.error or is_torchs, (death, rank, end)
    views = {
        rank: json.loads((folder / f"view-{rank}").read_text())
        for rank in others
        if (folder / f"view-{rank}").exists()
    }
    assert len({view["version"] for view in views.values()}) <= 1, (death, views)
    for rank, view in views.items():
        expected = [-1.0 if view["version"] is None else float(view["version"])]
        assert rank == 0 or view["weights"] == expected, (death, views)


def _in_memory(folder: Path, rank: int) -> list[Path]:
    """Folders of the steps that a rank keeps in memory."""
    return list(folder.glob(f"memory-{rank}/vescale-job/step-*"))


def _check_goes_on(folder: Path, death: Death) -> None:
    """Other ranks finish, use every sample once, and never restart from the beginning after a saved step.

    Where a rank is lost before the first epoch has its members, there are too few for it: the others say so.
    """
    others = _others(launch(goes_on, folder, 3, death, limit_s=_LIMIT_S), death)
    # The last rank is killed in its third step, if that comes.
    done = {rank: end for rank, end in others.items() if end.exit_code != -signal.SIGKILL}
    is_early = "elastic/" in death.spot  # of the first time that a rank asks for the members
    if is_early and done and all(LifecycleError.__name__ in end.bases for end in done.values()):
        return
    assert done and not any(end.error for end in done.values()), (death, done)
    for end in done.values():
        steps = [step for _, step, _ in end.result["epochs"]]
        assert steps == sorted(steps), (death, steps)
        assert all(tier != "start" for _, step, tier in end.result["epochs"] if step), death
    assert (folder / "steps/step-00000006/manifest.json").exists(), death  # the last one, which is due
    for step in [*folder.glob("steps/step-*"), *(step for rank in done for step in _in_memory(folder, rank))]:
        # A killed process may leave the temporary file of its manifest.
        names = sorted(file.name for file in step.rglob("*") if file.suffix not in (".safetensors", ".tmp"))
        if death.signal == signal.SIGSTOP and names == [".lock"] and step.name != "step-00000006":
            continue  # the stalled rank went on when the others had removed the step; `clean` removes the folder
        known = (".lock", "manifest.json")
        assert "manifest.json" in names, (death, step, names)
        assert [name.partition("-")[0] for name in names if name not in known] == ["data"], (death, names)
    taken: dict[int, dict[int, list[int]]] = {}  # by step and epoch
    for file in folder.glob("samples-*"):
        for line in file.read_text().splitlines():
            epoch, step, samples = json.loads(line)
            taken.setdefault(step, {}).setdefault(epoch, []).extend(samples)
    counted = [sample for step in sorted(taken) for sample in taken[step][max(taken[step])]]
    assert sorted(taken) == list(range(6)) and len(counted) == len(set(counted)), (death, taken)


_CHECKS: dict[Program, Callable[[Path, Death], None]] = {
    trains: _check_ends_with_its_ranks,
    forms: _check_forms,
    meets: _check_meets,
    goes_on: _check_goes_on,
}


@pytest.mark.parametrize(
    ("program", "death"),
    [
        (trains, Death(1, "step 1")),
        (forms, Death(1, "store.get 0//1//cpu//0/rank 1")),
        pytest.param(meets, Death(2, "store.get joint-ranks 0 name 0"), marks=pytest.mark.part("faults")),
        pytest.param(meets, Death(2, "dist.barrier 2"), marks=pytest.mark.part("faults")),
        pytest.param(goes_on, Death(1, "store.set 0//cpu//0/rank 0"), marks=pytest.mark.part("faults")),
        pytest.param(
            goes_on, Death(1, "dist.all_reduce 3", signal.SIGSTOP), marks=pytest.mark.part("faults")
        ),
    ],
    ids=["first step", "formation", "meeting", "end of a transfer", "first group", "stalled"],
)
def test_a_job_survives_a_rank_lost_at_some_calls(tmp_path: Path, program: Program, death: Death) -> None:
    """One rank is killed at a call, or stalled."""
    _CHECKS[program](tmp_path, death)
    assert (tmp_path / "death").exists()


@pytest.mark.part("faults")
def test_a_rank_is_lost_between_any_two_calls_of_a_formation(tmp_path: Path) -> None:
    """Of the default group, and of one that the user's code creates."""
    spots = [spot for spot in spots_of(forms, tmp_path / "undisturbed", 3, 1) if "elastic/" not in spot]
    assert spots[0] == "agreed" and "dist.new_group 1" in spots
    for number, spot in enumerate(spots):
        _check_forms(tmp_path / str(number), Death(1, spot))
        assert (tmp_path / str(number) / "death").exists(), spot


def test_one_of_two_nodes_is_lost(tmp_path: Path) -> None:
    """The other rank continues from its memory, which has copies of the lost files."""
    ends = launch(loses_a_node, tmp_path, 4, limit_s=_LIMIT_S)

    assert [end.exit_code for end in ends.values()] == [0, 0, -signal.SIGKILL, -signal.SIGKILL], ends
    first, (num_ranks, step, tier) = ends[0].result
    assert first[0] == 4 and (num_ranks, step, tier) in ((2, 2, "ram"), (2, 1, "ram")), ends


def _thinned(spots: list[str]) -> list[str]:
    """Every call of a store, every new group and every phase, and every fifth of the many collectives."""
    collectives = [spot for spot in spots if spot.startswith("dist.") and "group" not in spot]
    dropped = set(collectives) - set(collectives[_SEED % 5 :: 5])
    return [spot for spot in spots if spot not in dropped]


@pytest.mark.skipif(not _ALL, reason="FAULTS=all: every call of three programs, killed and stalled")
@pytest.mark.parametrize("program", list(_CHECKS), ids=lambda program: program.__name__)
def test_a_job_survives_a_rank_lost_at_every_call(tmp_path: Path, program: Program) -> None:
    """One rank is killed at each call, and stalled at some."""
    spots = spots_of(program, tmp_path / "undisturbed", 3, 1)
    deaths = [Death(1, spot) for spot in _thinned(spots)]
    deaths += [Death(1, spot, signal.SIGSTOP) for spot in _thinned(spots)[_SEED % 9 :: 9]]
    for number, death in enumerate(deaths):
        _CHECKS[program](tmp_path / str(number), death)
    # Some calls come in another order, or not at all, where threads overtake each other.
    assert sum((tmp_path / str(number) / "death").exists() for number in range(len(deaths))) > 0.8 * len(
        deaths
    )


@pytest.mark.skipif(not _ALL, reason="FAULTS=all: 60 moments around the end of a transfer")
def test_moments_around_the_end_of_a_transfer(tmp_path: Path) -> None:
    """A rank is killed within milliseconds of its last call in a transfer."""
    drawn = random.Random(_SEED)
    for number in range(60):
        run = drawn.choice((1, 2))
        spot = drawn.choice((f"transfer {run}", f"dist.barrier {run + 1}"))
        _check_meets(tmp_path / str(number), Death(drawn.randrange(3), spot, delay_s=drawn.random() * 0.01))
        assert (tmp_path / str(number) / "death").exists()
