"""The bytes that training sends between nodes, by the counters of their links."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tools.bench.network import main


@pytest.mark.lab
@pytest.mark.part("jobs")
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_step_sends_the_least_between_nodes(dtype: str, tmp_path: Path) -> None:
    """Two nodes of two ranks: a slice crosses once, a node's gradients as their sum or unsummed."""
    file = tmp_path / "rows.json"
    arguments = ["--cases", "2x2", "--models", "dense", "--dtypes", dtype, "--rates", "1", "--steps", "1"]
    done = CliRunner().invoke(main, [*arguments, "--json", str(file)], catch_exceptions=False)
    assert done.exit_code == 0
    rows = [row for row in json.loads(file.read_text()) if row.get("unit") == "bytes per parameter"]
    assert {row["rival_name"]: row["met"] for row in rows} == {"least": True, "fsdp2": True, "ddp": None}
