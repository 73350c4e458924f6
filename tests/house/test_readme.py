"""The README's example runs as it stands, and the files and tests it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.torchrun_job import Job

ROOT = Path(__file__).parents[2]
TEXTS = [ROOT / "README.md", ROOT / "vescale_fsdp" / "DESIGN.md", ROOT / "docs" / "benchmarks.md"]


def test_example_trains_and_saves(tmp_path: Path) -> None:
    """The python block, run under torchrun on two ranks, leaves a checkpoint of both ranks' pieces."""
    (code,) = re.findall(r"```python\n(.*?)```", TEXTS[0].read_text(), re.DOTALL)
    (tmp_path / "readme_example.py").write_text(code)
    Job("readme_example", 2, [], tmp_path / "log", folder=tmp_path).wait()

    files = sorted(file.name for file in (tmp_path / "checkpoint").iterdir())
    assert files == [".metadata", "__0_0.distcp", "__1_0.distcp"]


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: path.name)
def test_named_files_exist(text: Path) -> None:
    """Every path in backquotes that looks like a file of ours, alone or in a command, is there; patterns match."""
    named = re.findall(r"`(?:python )?((?:[a-z_]+/)*[A-Za-z_*0-9]+\.(?:py|md|txt))[ `]", text.read_text())
    places = [ROOT, text.parent]

    assert len(named) > 5
    assert [name for name in named if not any(list(place.glob(name)) for place in places)] == []
