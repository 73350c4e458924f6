"""The script of `examples.from_fsdp2` before and after: the same losses, also after a restart on more ranks."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from tools.torchrun_job import Job

ROOT = Path(__file__).parents[2]
BEFORE, AFTER = (f"examples/from_fsdp2/{name}.py" for name in ("before", "after"))
ROUNDING = 3e-4  # of a loss: gradients are sums in bf16, in another order


def losses_of(module: str, folder: Path) -> dict[int, float]:
    """Losses by step: steps 1 to 5 on 2 ranks, then 6 to 10 on 3."""
    for num_ranks, num_steps in ((2, 5), (3, 10)):
        arguments = [str(folder / "run"), str(num_steps)]
        with Job(module, num_ranks, arguments, folder / f"log{num_ranks}") as job:
            job.wait()
    lines = (folder / "run" / "losses.txt").read_text().splitlines()
    assert [int(line.split()[0]) for line in lines] == list(range(1, 11))
    return {int(step): float(loss) for step, loss in map(str.split, lines)}


@pytest.mark.part("jobs")
def test_losses_stay_the_same(tmp_path: Path) -> None:
    before = losses_of("examples.from_fsdp2.before", tmp_path / "before")
    after = losses_of("examples.from_fsdp2.after", tmp_path / "after")

    assert after == pytest.approx(before, rel=ROUNDING)
    # Negative control: training that does nothing, or starts again, is further away.
    shifted = {step: before[step - 1] for step in range(2, 11)}
    assert all(abs(shifted[step] - before[step]) > 3 * ROUNDING * before[step] for step in shifted)


def test_the_page_shows_the_whole_difference() -> None:
    """Every line that changes in the code; only the docstrings of the two scripts are left out."""
    before, after = ((ROOT / file).read_text().partition('"""\n')[2].splitlines() for file in (BEFORE, AFTER))
    lines = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]
    shown = (
        (ROOT / "docs/from_fsdp2.md").read_text().partition("```diff")[2].partition("```")[0].splitlines()[1:]
    )

    assert [line for line in lines if not line.startswith("@@") and line[1:].strip()] == [
        line for line in shown if line[1:].strip()
    ]
    assert 20 < len(shown) < 45
