"""Any two steps of a run compared: by recorded fingerprints without a read, and by values where steps are read."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from tests.support.command import vescale_convert
from vescale_fsdp.checkpoint import CheckpointManager
from vescale_fsdp.conversion import Source, open_source
from vescale_fsdp.conversion.cli.main import cli
from vescale_fsdp.conversion.report.checkpoint_report import checkpoint_report, report_page
from vescale_fsdp.conversion.report.run_steps import RunSteps, urls_of_steps
from vescale_fsdp.errors import ConversionError, CorruptCheckpointError


def _save(root: Path, states: dict[int, dict[str, Any]], *, fingerprint: bool) -> Source:
    with CheckpointManager(root, fingerprint=fingerprint) as manager:
        for step, state in states.items():
            manager.save(step, state)
    return open_source(str(root), step="newest")


def _histories(report: dict[str, Any]) -> dict[str, list[int]]:
    return {row["name"]: report["compare"]["histories"][row["history"]] for row in report["tensors"]}


def _ramp(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# `back` returns to its first value; `late` comes with step 3, and `gone` ends before step 4.
CHANGING: dict[int, dict[str, Any]] = {
    1: {"back": _ramp(3, 4), "same": torch.ones(3), "gone": torch.ones(1)},
    2: {"back": _ramp(3, 5), "same": torch.ones(3), "gone": torch.ones(1)},
    3: {"back": _ramp(6, 5), "same": torch.ones(3), "gone": torch.ones(1), "late": torch.zeros(2)},
    4: {"back": _ramp(3, 4), "same": torch.ones(3), "late": torch.zeros(2)},
}
EQUAL = {"back": [0, 1, 2, 0], "same": [0, 0, 0, 0], "late": [-1, -1, 2, 2]}


def test_recorded_fingerprints_compare_any_two_steps(tmp_path: Path) -> None:
    """Which steps have a tensor's bits, found without a read of any other step's tensors."""
    source = _save(tmp_path, CHANGING, fingerprint=True)
    read: list[int] = []
    report = checkpoint_report(source, progress=read.append)

    assert report["compare"]["steps"] == [1, 2, 3, 4] and report["compare"]["read"] == []
    assert _histories(report) == EQUAL
    assert (report["compare"]["elsewhere"], report["compare"]["num_elsewhere"]) == (["gone"], 1)
    assert sum(read) == source.nbytes
    assert not {"norms", "far"} & report["tensors"][0].keys()


def test_steps_are_read_and_compared_by_values(tmp_path: Path) -> None:
    """Saves without fingerprints: norms and distances as numbers say, and which bits are equal, of what was read."""
    source = _save(tmp_path, CHANGING, fingerprint=False)
    unread = checkpoint_report(source)
    assert {tuple(history) for history in _histories(unread).values()} == {(-2, -2, -2, -2)}

    report = checkpoint_report(source, steps=[open_source(url) for url in urls_of_steps(source, "all")])
    rows = {row["name"]: row for row in report["tensors"]}
    assert _histories(report) == EQUAL and report["compare"]["read"] == [0, 1, 2, 3]
    assert rows["back"]["norms"] == [5.0, 5.831, 7.81, 5.0]
    # Steps 1 and 2, 1 and 3, 1 and 4, 2 and 3, 2 and 4, 3 and 4.
    assert rows["back"]["far"] == [1.0, 3.162, 0.0, 3.0, 1.0, 3.162]
    assert rows["late"]["norms"] == [None, None, 0.0, 0.0]
    assert rows["late"]["far"] == [None, None, None, None, None, 0.0]

    some = checkpoint_report(source, steps=[open_source(url) for url in urls_of_steps(source, [4, 2])])
    assert _histories(some)["back"] == [-2, 1, -2, 3] and some["compare"]["read"] == [1, 3]
    early = checkpoint_report(source, steps=[open_source(url) for url in urls_of_steps(source, [1, 2])])
    assert _histories(early)["late"] == [-1, -1, -2, -2]  # none of the steps that were read has it


def test_values_that_are_no_numbers(tmp_path: Path) -> None:
    """Values that are not finite are left out of distances, not of the comparison; shapes and types may change."""
    states: dict[int, dict[str, Any]] = {
        1: {"bad": _ramp(1, math.nan, 3), "zero": _ramp(0.0), "shape": torch.ones(4), "huge": _ramp(1e300)},
        2: {
            "bad": _ramp(2, 2, math.inf),
            "zero": _ramp(-0.0),
            "shape": torch.ones(2, 2),
            "huge": _ramp(-1e300),
        },
        3: {
            "bad": _ramp(1, 1, 1),
            "zero": _ramp(0.0),
            "shape": torch.ones(4).bfloat16(),
            "huge": _ramp(1e300),
        },
    }
    for step, code in ((1, 1), (2, 0), (3, 1)):
        states[step]["codes"] = torch.full((2,), code).to(torch.float8_e4m3fn)
    source = _save(tmp_path, states, fingerprint=False)
    report = checkpoint_report(source, steps=[open_source(url) for url in urls_of_steps(source, [1, 2, 3])])
    rows, equal = {row["name"]: row for row in report["tensors"]}, _histories(report)

    assert rows["bad"]["norms"] == [3.162, 2.828, 1.732] and rows["bad"]["far"] == [1.0, 2.0, 1.414]
    assert rows["zero"]["far"] == [0.0, 0.0, 0.0] and equal["zero"] == [0, 1, 0]
    assert rows["shape"]["far"] == [None, 0.0, None] and equal["shape"] == [0, 1, 2]
    assert rows["codes"]["norms"] == [None, None, None] and equal["codes"] == [0, 1, 0]
    json.loads(
        report_page(report).partition('id="data">')[2].partition("</script>")[0]
    )  # finite numbers only


def test_the_comparison_is_bounded(tmp_path: Path) -> None:
    """Older steps go where tensors have too many histories; steps that were read stay, and the newest one."""
    states = {step: {f"w{i}": torch.tensor([step // (i + 1)]) for i in range(6)} for step in range(1, 9)}
    source = _save(tmp_path, states, fingerprint=True)
    compare, of_tensors = RunSteps(source, [open_source(urls_of_steps(source, [2])[0])]).versions(most=20)

    assert compare is not None and compare["steps"][0] == 2 and compare["steps"][-1] == 8
    assert len(compare["steps"]) * len(compare["histories"]) <= 20 and len(of_tensors) == 6
    whole, _ = RunSteps(source).versions()
    assert whole is not None and whole["steps"] == [*range(1, 9)]


def test_a_page_of_a_run_is_made_by_the_command(tmp_path: Path) -> None:
    """Steps are chosen by number or all; at most twelve are read, at even distances."""
    states = {step: {"w": torch.full((2,), float(step))} for step in range(0, 300, 10)}
    source = _save(tmp_path / "run", states, fingerprint=False)
    chosen = [open_source(url).url for url in urls_of_steps(source, "all")]
    assert len(chosen) == 12 and chosen[0].endswith("00") and chosen[-1] == source.url

    out = tmp_path / "report.html"
    done = vescale_convert("report", str(tmp_path / "run"), "--steps", "0,290", "--out", str(out))
    assert done.exit_code == 0, done.output
    assert '"read":[0,29]' in out.read_text()
    both = vescale_convert(
        "report", str(tmp_path / "run"), "--steps", "0", "--against", "x", "--out", str(out)
    )
    assert both.exit_code == 2
    assert (
        vescale_convert("report", str(tmp_path / "run"), "--steps", "0-5", "--out", str(out)).exit_code == 2
    )


@pytest.mark.parametrize("count", [0, 1])
def test_a_checkpoint_without_other_steps_has_no_comparison(tmp_path: Path, count: int) -> None:
    """A folder that no manager made, and a run of one step."""
    if count:
        source = _save(tmp_path, {1: {"w": torch.ones(2)}}, fingerprint=True)
    else:
        torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
        source = open_source(str(tmp_path / "w.pt"))
    report = checkpoint_report(source)

    assert report["compare"] is None and len(report["history"]) == count
    assert "history" not in report["tensors"][0]


@pytest.mark.parametrize("gone", [2, 3])
def test_a_step_that_is_removed_while_it_is_read_is_named(
    gone: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the advice to run the command again, which then works; damage of a step that stays is not mistaken."""
    root, page, whole = tmp_path / "run", tmp_path / "report.html", checkpoint_report
    _save(root, CHANGING, fingerprint=False)
    command = ["report", str(root), "--step", "3", "--steps", "2,3", "--out", str(page)]

    def removing(*args: Any, **kwargs: Any) -> Any:
        shutil.rmtree(root / f"step-{gone:08}")
        return whole(*args, **kwargs)

    def damaging(*args: Any, **kwargs: Any) -> Any:
        raise CorruptCheckpointError("planted")

    module = "vescale_fsdp.conversion.report.checkpoint_report.checkpoint_report"
    with monkeypatch.context() as patched:
        patched.setattr(module, damaging)
        assert isinstance(CliRunner().invoke(cli, command).exception, CorruptCheckpointError)
        patched.setattr(module, removing)
        error = CliRunner().invoke(cli, command).exception
    assert isinstance(error, ConversionError) and error.problem == "A step was removed while it was read."
    assert error.where == str(root / f"step-{gone:08}") and error.todo
    assert not page.exists()
    assert CliRunner().invoke(cli, ["report", str(root), "--steps", "all", "--out", str(page)]).exit_code == 0
