"""What a report says: numbers against numpy's, distances, holders, history; and it never holds a tensor whole."""

from __future__ import annotations

import math
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.command import vescale_convert
from tests.support.distributed import run_ranks
from vescale_fsdp import Rows, fully_shard
from vescale_fsdp.checkpoint import CheckpointManager, save
from vescale_fsdp.conversion import open_source
from vescale_fsdp.conversion.report.checkpoint_report import checkpoint_report, report_page
from vescale_fsdp.conversion.report.tensor_values import ValueSummary, values_of
from vescale_fsdp.layout.dtypes import dtype_from_torch


def test_statistics_are_numpys() -> None:
    """In two pieces, with NaN, infinities and zeros among them."""
    values = np.random.default_rng(0).normal(size=1000).astype(np.float32) * 3
    values[[3, 700]], values[[5]], values[[9, 10, 900]] = np.nan, -np.inf, 0
    summary = ValueSummary()
    summary.add(values[:400])
    summary.add(values[400:])
    found = summary.to_json()
    finite = values[np.isfinite(values)].astype(np.float64)

    assert (found["nan"], found["inf"], found["zero"]) == (2, 1, 3)
    assert (found["min"], found["max"]) == (finite.min(), finite.max())
    assert found["mean"] == pytest.approx(finite.mean()) and found["norm"] == pytest.approx(
        np.linalg.norm(finite)
    )
    counted = sum(count for row in found["bins"] for _, count in row)
    assert counted == 1000 - 2 - 1 - 3


def test_bins_are_powers() -> None:
    """A magnitude lies in the bin of its power of four, negative ones in a row of their own."""
    summary = ValueSummary()
    summary.add(np.array([0.25, 0.99, 1.0, 3.9, 4.0, -1.0, 1e-30, 1e30]))

    assert summary.to_json()["bins"] == [[[32, 1]], [[0, 1], [31, 2], [32, 2], [33, 1], [63, 1]]]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("bfloat16", [1.5, -2.0]), ("float64", [1.5, -2.0]), ("int8", [1, -2]), ("float8_e4m3fn", None)],
)
def test_values_by_dtype(dtype: str, expected: list[float] | None) -> None:
    """Floats and integers are read as numbers; codes are not."""
    raw = torch.tensor([1.5, -2.0]).to(getattr(torch, dtype)).view(torch.uint8).numpy()
    kind = dtype_from_torch(dtype)
    found = values_of(raw.view(kind.raw), kind)

    assert (None if found is None else found.tolist()) == expected


def test_every_kind_of_difference_is_told_apart_across_formats(tmp_path: Path) -> None:
    """Equal, other values, another shape, only here, only there: each is told apart, across formats too."""
    save(
        tmp_path / "a",
        {
            "model": {
                "same": torch.ones(4),
                "near": torch.ones(4),
                "mine": torch.ones(2),
                "cut": torch.ones(3),
            }
        },
    )
    other = {
        "same": torch.ones(4),
        "near": torch.tensor([1, 1, 1, 1.5]),
        "cut": torch.ones(4),
        "theirs": torch.ones(1),
    }
    torch.save({"model": other}, tmp_path / "b.pt")
    found = checkpoint_report(open_source(str(tmp_path / "a")), open_source(str(tmp_path / "b.pt")))
    rows = {row["name"].removeprefix("model."): row["diff"] for row in found["tensors"]}

    assert rows["same"] == {"differing": 0, "max": 0.0, "relative": 0.0}
    assert (rows["near"]["differing"], rows["near"]["max"]) == (1, 0.5)
    assert rows["near"]["relative"] == pytest.approx(0.5 / math.sqrt(3 + 1.5**2))
    assert rows["mine"] is None and rows["cut"] is None
    assert found["only_there"] == ["theirs"]


def _save_sharded(root: str) -> None:
    model = fully_shard(torch.nn.Linear(64, 64), granularity=Rows(4))
    manager = CheckpointManager(root)
    for step in (10, 20):
        manager.save(step, {"model": model, "step": step}, metric=1 / step)
    manager.close()


def test_holders_layouts_and_history(tmp_path: Path) -> None:
    """Of a step that two ranks saved: who holds how much of a tensor, the group's slots, the run's steps."""
    run_ranks(2, _save_sharded, str(tmp_path / "run"))
    found = checkpoint_report(open_source(str(tmp_path / "run" / "step-00000020")))
    (weight,) = [row for row in found["tensors"] if row["name"].endswith("weight")]
    (layout,) = found["layouts"]

    held = {found["files"][first]: numel for first, _, numel in weight["held"]}
    assert len(held) == 2 and sum(held.values()) == 64 * 64 and min(held.values()) > 0
    assert layout["title"] == "(root) on 2 ranks" and "rank 1" in layout["svg"]
    assert "weight" in layout["svg"] and "bias" in layout["svg"]
    assert [(step["step"], step["metric"]) for step in found["history"]] == [(10, 0.1), (20, 0.05)]
    assert found["values"] == {"step": "20"}


def test_memory_is_bounded(tmp_path: Path) -> None:
    """A tensor of 64 MiB is read through a few pieces."""
    torch.save({"w": torch.zeros(16 << 20)}, tmp_path / "big.pt")
    source = open_source(str(tmp_path / "big.pt"))
    tracemalloc.start()
    found = checkpoint_report(source)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert found["tensors"][0]["stats"]["zero"] == 16 << 20
    assert peak < 40 << 20


def test_names_cannot_leave_their_place(tmp_path: Path) -> None:
    """Whatever a tensor is called, the page has one script with data, and nothing is fetched."""
    torch.save({"</script><script>alert(1)</script>": torch.ones(2)}, tmp_path / "evil.pt")
    page = report_page(checkpoint_report(open_source(str(tmp_path / "evil.pt"))))

    assert "alert(1)" in page and "<script>alert" not in page
    assert page.count("</script>") == 2
    assert "http" not in page.replace("http-equiv", "")


def test_the_command_writes_the_page_or_the_error(tmp_path: Path) -> None:
    """The command writes the page and says so; damage ends it with the error."""
    save(tmp_path / "a", {"w": torch.arange(1000.0)})
    out = tmp_path / "report.html"
    done = vescale_convert("report", str(tmp_path / "a"), "--out", str(out))

    assert done.exit_code == 0, done.output
    assert "1 tensor, 4 kB" in done.output and '"name":"w"' in out.read_text()
    (file,) = (tmp_path / "a").glob("data-*/*.safetensors")
    data = bytearray(file.read_bytes())
    data[1000] ^= 1
    file.write_bytes(data)
    damaged = vescale_convert("report", str(tmp_path / "a"), "--out", str(tmp_path / "b.html"))
    assert damaged.exit_code == 1 and not (tmp_path / "b.html").exists()
