"""What docs/gpu_expectations.md says follows from the code, and fits what was published where the page says so."""

from __future__ import annotations

import json

import pytest
import torch

from tools.replay.figures import RESULTS
from tools.replay.machine import H800_BYTES, TABLE_1
from tools.replay.models import BLOCKSHARD, FSDP2, OURS, SHARD1
from tools.replay.predict import FRAGMENTATION, Fit, Study, padding
from tools.replay.recording import Peaks

PAGE = json.loads(RESULTS.read_text())


@pytest.mark.parametrize(
    ("model", "library", "ranks", "percent"),
    [
        ("gpt-oss-120B", FSDP2, 128, 0.01),  # 128 experts
        ("gpt-oss-120B", FSDP2, 256, 99.2),
        ("gpt-oss-120B", FSDP2, 1024, 694.3),
        ("gpt-oss-120B", SHARD1, 64, 0.0),  # 2,880 = 45 x 64
        ("gpt-oss-120B", SHARD1, 128, None),
        ("gpt-oss-120B", BLOCKSHARD, 1024, 0.44),
        ("DeepSeek-V3 grouped", FSDP2, 1024, 294.0),
        (
            "DeepSeek-V3 grouped",
            SHARD1,
            1024,
            0.11,
        ),  # the attention's; 2,048 and 7,168 rows of experts divide
        ("DeepSeek-V3 grouped", SHARD1, 2048, None),
    ],
)
def test_padding_of_fsdp2(model: str, library: str, ranks: int, percent: float | None) -> None:
    found = padding(model, ranks, library)
    assert found is None if percent is None else found == pytest.approx(percent / 100, abs=0.001)


@pytest.mark.parametrize(
    ("most_lost", "verdict"), [(0.16, "fits"), (0.1, "depends on fragmentation"), (0.04, "out of memory")]
)
def test_a_step_fits_whatever_is_lost_or_nothing(most_lost: float, verdict: str) -> None:
    pools = 10 * 2**30
    found = Fit(Peaks(0, pools), round(H800_BYTES - pools * (1 + most_lost)))
    assert found.verdict == verdict and found.most_lost == pytest.approx(most_lost)
    assert FRAGMENTATION[0] < 0.1 < FRAGMENTATION[1]
    assert found.total(most_lost) == pytest.approx(H800_BYTES)


@pytest.fixture(scope="module")
def study() -> Study:
    return Study(None)


@pytest.mark.part("numerics")
def test_the_other_row_of_table_1(study: Study) -> None:
    """Calibrated on one row only: collectives within 2 %, copies from 23 % below to the published figure."""
    found = study.table_1()
    assert found.keys() == PAGE["table_1"].keys()
    for name, row in found.items():
        low, high = row["predicted_ms"]
        assert row["predicted_ms"] == pytest.approx(PAGE["table_1"][name]["predicted_ms"], rel=1e-3)
        assert 0.75 * TABLE_1["Shard(1)"][name] < low <= high < 1.02 * TABLE_1["Shard(1)"][name]


@pytest.mark.part("numerics")
def test_fsdp2_runs_out_of_memory_at_256_ranks_and_not_at_128(study: Study) -> None:
    """By the assumed fragmentation only: at 256 ranks little may be lost, at 128 much. Without any, both fit."""
    for ranks, verdict, most_lost in ((128, "fits", 0.497), (256, "out of memory", 0.0457)):
        # The recording does not see what FSDP2 of torch 2.11 frees: 889 GiB instead of 52.
        libraries = (OURS,) if torch.__version__ < "2.12" else (OURS, FSDP2)
        found = study.memory("gpt-oss-120B", ranks, 8192, libraries)
        assert found[OURS]["verdict"] == "fits"
        if FSDP2 in libraries:
            assert found[FSDP2]["verdict"] == verdict
            assert found[FSDP2]["most_lost"] == pytest.approx(most_lost, abs=0.002)
            assert found[FSDP2]["without"] < H800_BYTES / 2**30
        for library, figures_of in found.items():
            assert figures_of["pools"] == pytest.approx(
                PAGE["memory"][str(ranks)][library]["pools"], rel=1e-3
            )
