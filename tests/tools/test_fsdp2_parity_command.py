"""The command that runs PyTorch's FSDP2 tests: on a small file of our own, and on the page."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools.docs import fsdp2_cases, fsdp2_parity
from tools.docs.fsdp2_parity import (
    PAGE,
    Outcome,
    fsdp2_only,
    on_cpu,
    run_file,
    table,
    unexplained,
    with_table,
)

CASES = """
import os
import unittest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch.testing._internal.common_fsdp import FSDPTest, get_devtype

device = torch.device("cuda")

class TestTiny(FSDPTest):
    @skip_if_lt_x_gpu(4)
    def test_ranks(self):
        assert device.type == get_devtype().type == "cpu" and torch.accelerator.device_count() == 4
        total = torch.ones(1)
        dist.all_reduce(total)
        self.assertEqual(total.item(), 4)
        weight = fully_shard(torch.nn.Linear(4, 4)).weight
        assert dist.get_rank() != 2 or type(weight).__name__ == "DTensor", "planted"

class TestWithoutRanks(unittest.TestCase):
    def test_crash(self):
        os._exit(3)

    def test_skipped(self):
        self.skipTest("planted")
"""
RANKS, CRASH, SKIPPED = "TestTiny.test_ranks", "TestWithoutRanks.test_crash", "TestWithoutRanks.test_skipped"


@pytest.mark.part("pages")
@pytest.mark.parametrize("implementation", fsdp2_parity.IMPLEMENTATIONS)
def test_a_file_is_run_by_each_implementation(implementation: str, tmp_path: Path) -> None:
    """On four ranks that hold a CPU for an accelerator; a crash ends one case, and the next ones run."""
    (tmp_path / "test_tiny.py").write_text(on_cpu(CASES))
    outcomes = run_file("test_tiny", tmp_path, implementation)
    assert {case: each.outcome for case, each in outcomes.items()} == {
        RANKS: "passed" if implementation == "FSDP2" else "failed",
        CRASH: "ended",
        SKIPPED: "skipped",
    }
    assert implementation == "FSDP2" or outcomes[RANKS].error == "AssertionError: planted"


def test_devices_and_backends_become_the_cpus() -> None:
    """In names, not in words of which they are a part."""
    source = 'init("cuda:nccl"); x.cuda(); "cuda"; torch.cuda.manual_seed(1); cuda_graphs("xcuda", torch.cuda.Event())'
    expected = (
        'init("gloo"); x.cpu(); "cpu"; torch.cpu.manual_seed(1); cuda_graphs("xcuda", torch.cuda.Event())'
    )
    assert on_cpu(source) == expected


def test_the_error_is_that_of_the_rank_that_failed_first() -> None:
    """Not of the process that collects errors, nor of ranks that have lost a peer."""
    text = """RuntimeError: Process 0 exited with error code 10 and exception:
RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:1
Process 1 exited with error code 10 and exception:
torch.testing.SomeError: planted: 1 != 2
"""
    assert fsdp2_cases.error_in(text) == "SomeError: planted: 1 != 2"
    assert fsdp2_cases.error_in("AssertionError: planted") == "AssertionError: planted"


def test_what_the_table_counts() -> None:
    """Passing cases by implementation, and the names of those that only FSDP2 passes."""
    passed, failed = Outcome("passed"), Outcome("failed", "planted")
    outcomes = {
        "FSDP2": {"A.test_one": passed, "A.test_fully_shard_two": passed, "B.test_three": failed},
        "plain": {"A.test_one": failed, "A.test_fully_shard_two": failed, "B.test_three": failed},
        "as_fsdp2": {"A.test_one": passed, "A.test_fully_shard_two": failed, "B.test_three": passed},
    }
    assert fsdp2_only(outcomes) == ["two"]
    assert table({"comm": outcomes}).splitlines()[-1] == "| comm | 3 | 2 | 0 | 2 | `two` |"


def test_the_page_explains_what_it_names() -> None:
    """By a name, or by a pattern; only what is between the marks is replaced."""
    page = PAGE.read_text()
    cases = ["gradient_accumulation", "train_mixed_requires_grad_across_groups", "planted"]
    assert unexplained(cases, page) == ["planted"]
    written = with_table(page, "planted")
    assert with_table(written, "planted") == written != page
    for part in ("## Where training differs", "## Compiling, and custom checkpoint loaders"):
        assert part in written


def test_another_commit_is_refused(tmp_path: Path) -> None:
    """Its tests are of another torch."""
    (tmp_path / "file").write_text("")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *command], check=True, timeout=60)
    with pytest.raises(SystemExit, check=lambda stop: stop.code == 2):
        fsdp2_parity.main(["--pytorch", str(tmp_path)])
