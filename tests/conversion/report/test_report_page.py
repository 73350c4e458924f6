"""What the page shows in a browser: Debian's Chromium, without a window and without a network."""

from __future__ import annotations

import re
import shutil
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import run_command
from vescale_fsdp.conversion.report.checkpoint_report import pictures_of, report_page
from vescale_fsdp.layout.planner import TensorSpec, plan_group

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here (Debian: apt-get install chromium)"
)
RANKS, TENSORS = 1024, 1000


def _report() -> dict[str, Any]:
    numel = 4096 * 1024
    tensors = [
        {
            "name": f"model.layers.{i // 10}.part{i % 10}.weight",
            "dtype": "bfloat16",
            "shape": [4096, 1024],
            "bytes": 2 * numel,
            "held": [[0, 1, 100], [1, RANKS - 2, numel // RANKS], [RANKS - 1, 1, 7]],
            "stats": {
                "nan": 3 * (i == 7),
                "inf": 0,
                "zero": i,
                "min": -1.5,
                "max": 2.5,
                "mean": 0.01,
                "norm": i,
            }
            | {"bins": [[[20, 5], [21, 9]], [[20, 4]]]},
            "diff": {"differing": i % 2, "max": 0.25 * (i % 2), "relative": 0.125 * (i % 2)},
        }
        for i in range(TENSORS)
    ]
    layout = plan_group(
        [TensorSpec(row["name"], (4096, 1024), "bfloat16", 1024) for row in tensors[:10]], RANKS
    )
    steps = [
        {"step": s, "bytes": 10**9, "seconds": 2 + s % 3, "metric": None, "pinned": False}
        for s in (10, 20, 30)
    ]
    return {
        "kind": "native",
        "url": "/run/step-00000030",
        "facts": {"saved by ranks": str(RANKS)},
        "ties": {},
        "tensors": tensors,
        "values": {"step": "30", "<b>": "'<i>x</i>'"},
        "files": [f"data-0/{rank:05d}-of-{RANKS:05d}.safetensors" for rank in range(RANKS)],
        "layouts": pictures_of([layout, layout]),
        "history": steps,
        "compare": None,
        "against": "/run/step-00000020",
        "only_there": ["model.lost.weight"],
    }


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of a thousand tensors on 1,024 ranks."""
    file = tmp_path_factory.mktemp("page") / "report.html"
    file.write_text(report_page(_report()))
    return file


def shown(page: Path, view: str = "", width: int = 1400) -> str:
    """The document as Chromium has built it."""
    profile = f"--user-data-dir={page.parent / 'profile'}"
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--window-size={width},1000",
        profile,
        "--dump-dom",
    ]
    done = run_command([str(CHROMIUM), *flags, f"{page.as_uri()}#{view}"], timeout_s=120, check=True)
    return done.stdout.partition('<script type="application/json"')[0]


def rows_of(document: str) -> list[str]:
    """Names of the rows that are drawn."""
    return [unescape(name) for name in re.findall(r'<span class="name"[^>]*title="([^"]*)"', document)]


def test_opens_with_totals_tree_and_lanes(page: Path) -> None:
    """The tree begins folded at the first choice; only rows in view exist; sections that have something are there."""
    document = shown(page)

    assert "native at /run/step-00000030, compared with /run/step-00000020" in document
    assert "<b>1000</b>tensors" in document and "<b>500</b>tensors differ" in document
    assert (
        "NaN or infinity in 1 tensor" in document
        and "only in the other checkpoint: model.lost.weight" in document
    )
    assert rows_of(document)[:4] == ["model.", "model.layers.", "model.layers.0.", "model.layers.1."]
    assert 20 < len(rows_of(document)) < 60
    assert "model.layers.0 on 1,024 ranks, and 1 more units</option>" in document
    assert "rank 1,023" in document and "end of a block" in document
    assert "seconds of a save" in document and "metric</figcaption>" not in document
    assert "<dt>&lt;b&gt;</dt>" in document
    constant = document.partition(">bytes</figcaption>")[2].partition("</svg>")[0]
    assert re.findall(">([^<]+)</text>", constant) == ["1 GB", "0 B", "step 10", "30"]


def test_searches_sorts_and_shows_a_tensor(page: Path) -> None:
    """By the address, as a link to a view says it: rows that match, largest first, and one tensor's numbers."""
    document = shown(page, "q=layers.3.&sort=norm&tensor=model.layers.0.part7.weight", width=400)

    assert rows_of(document) == [f"model.layers.3.part{i}.weight" for i in reversed(range(10))]
    assert "10 of 1000" in document
    detail = document.partition('id="detail"')[2]
    assert "model.layers.0.part7.weight" in detail and "NaN 3" in detail and "zeros 7" in detail
    assert "by up to 0.25; relative distance 0.125" in detail
    assert "rank 1 to rank 1022, 4096 items each" in detail
    assert detail.count("<rect") >= 4


@pytest.fixture(scope="module")
def run_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of a run of four steps: two of them were read, and tensors of odd number change from step to step."""
    report = _report()
    del report["against"], report["only_there"]
    for i, row in enumerate(report["tensors"]):
        del row["diff"]
        row |= {"history": i % 2, "norms": [8, 10], "far": [i % 2 * (1 + i)]}
    names = {"elsewhere": ["model.early.bias"], "num_elsewhere": 1}
    report["compare"] = {
        "steps": [0, 20, 30, 40],
        "read": [1, 3],
        "histories": [[0] * 4, [0, 1, 2, -1]],
    } | names
    file = tmp_path_factory.mktemp("page") / "run.html"
    file.write_text(report_page(report))
    return file


def test_two_steps_are_compared_in_the_page(run_page: Path) -> None:
    """The two that were read are chosen first; any others by the address, as by the two select boxes."""
    document = shown(run_page, "sort=diff&tensor=model.layers.0.part2.weight&from=0&to=20")
    assert rows_of(document)[:2] == ["model.layers.0.part1.weight", "model.layers.0.part3.weight"]
    assert "500 changed, 500 equal" in document and "--steps 0,20 --out report.html" in document
    assert "equal bit for bit" in document and "model.early.bias" in document

    report = run_page.read_text().replace("[0,1,2,-1]", "[0,1,2,3]")
    run_page.with_name("read.html").write_text(report)
    read = shown(run_page.with_name("read.html"), "sort=diff&tensor=model.layers.0.part3.weight")
    assert rows_of(read)[:2] == ["model.layers.99.part9.weight", "model.layers.99.part7.weight"]
    assert "20 (read)" in read and "--steps" not in read
    assert "norm 8 and 10, norm of the difference 4, which is 50 % of step 20's" in read

    lacking = shown(run_page, "from=40&to=10")
    assert "500 equal, 500 in one of the two only" in lacking
