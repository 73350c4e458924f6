"""The planner's benchmark: the rivals' rules give their published paddings, targets are judged on our figures."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.support.processes import run_command
from tools.bench.parts.model_shapes import LAYERS
from tools.bench.planner import fsdp2_padding, lcm_padding, measure, rows_of
from vescale_fsdp.layout.geometry import numel_of

# % of payload at so many ranks, as compared in public: (FSDP2, LCM rule).
PUBLISHED = {
    ("Llama-3-70B", 1024): (0, 2.9),
    ("Llama-3-8B", 1024): (0, 7.7),
    ("Qwen2.5-32B", 1024): (0, 16.1),
    ("DeepSeek-V3", 1024): (0.1, 1.0),
    ("DeepSeek-V3 grouped", 64): (0, 22.5),
    ("DeepSeek-V3 grouped", 256): (0.0, 96),
    ("DeepSeek-V3 grouped", 1024): (294, 292),
    ("gpt-oss-120B", 8): (0, 3.3),
    ("gpt-oss-120B", 64): (0, 32.2),
    ("gpt-oss-120B", 256): (99, 32),
    ("gpt-oss-120B", 1024): (694, 429),
    ("Qwen3-30B-A3B grouped", 64): (0, 29.2),
    ("Qwen3-30B-A3B grouped", 256): (97, 29),
    ("Qwen3-30B-A3B grouped", 1024): (679, 417),
    ("Qwen3-30B-A3B", 1024): (22.2, 1.0),
}


@pytest.mark.parametrize(("model", "num_shards"), PUBLISHED)
def test_rivals_pad_what_is_published(model: str, num_shards: int) -> None:
    """Both rules, run on our shapes, give the published figures."""
    shapes = list(LAYERS[model].values())
    rows, payload = [numel_of(shape[1:]) for shape in shapes], sum(map(numel_of, shapes))

    found = (100 * fsdp2_padding(shapes, num_shards), 100 * lcm_padding(rows, payload, num_shards))

    for value, published in zip(found, PUBLISHED[model, num_shards], strict=True):
        assert value == pytest.approx(published, abs=0.6 if isinstance(published, int) else 0.06)


def test_targets_are_set_where_they_apply() -> None:
    """A case has its target on its own figure, and rivals beside it without one."""
    rows = rows_of(measure("gpt-oss-120B", "rows:128", 1024))

    assert [(row.target, row.met) for row in rows] == [
        (None, None),
        ("< 18", True),
        (None, None),
        *[(None, None)] * 3,
    ]
    assert [row.rival_name for row in rows[3:]] == ["FSDP2", "LCM rows", "LCM blocks"]
    assert round(rows[3].ours) == 111
    element = rows_of(measure("Llama-3-8B", "element", 16384))[0]
    assert (element.target, element.met) == ("<= 0.01", False)  # 128 bytes of a shard of 26 KB are more


@pytest.mark.part("jobs")
def test_json_of_a_run(tmp_path: Path) -> None:
    """The command prints tables and writes rows of the common form, the machine last."""
    file = tmp_path / "rows.json"
    tool = Path(__file__).parents[2] / "tools" / "bench" / "planner.py"
    options = ["--models", "gpt-oss", "--granularity", "rows:32", "--shards", "64,1024", "--json", str(file)]

    done = run_command([sys.executable, str(tool), *options], check=True)

    *rows, machine = json.loads(file.read_text())
    assert re.search(r"gpt-oss-120B, 17 .*, rows:32", done.stdout)
    assert {row["case"] for row in rows} == {"gpt-oss-120B rows:32 x64", "gpt-oss-120B rows:32 x1024"}
    assert set(rows[0]) == {"case", "metric", "unit", "ours", "rival", "rival_name", "ratio", "target", "met"}
    assert "cores" in machine
