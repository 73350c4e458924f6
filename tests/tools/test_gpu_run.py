"""The command for GPUs, tried on the CPU and the asynchronous device: what it compares, failures, and its reports."""

from __future__ import annotations

import ast
import inspect
import json
import math
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.async_device import needs_device
from tests.support.distributed import run_ranks
from tests.support.processes import run_command
from tools.gpu import parity, switches
from tools.gpu.parity import CONTROLS, backend_for, compare, largest_difference
from tools.gpu.switches import CASES, INDUCTOR, Case
from tools.gpu_run import PARITY, ROOT, Outcome, Step, run, steps, write_reports
from vescale_fsdp import FSDPModule, fully_shard
from vescale_fsdp.collectives.operations import _Gloo

# What is compiled, tests/vescale_fsdp/runtime/test_compile.py trains.
INTERPRETED = [case for case in CASES if not case.compiled]
# The plain case, two more for the controls, and for each field of a case the first one that sets it.
CORE = [
    case
    for place, case in enumerate(INTERPRETED)
    if place < 3
    or any(
        getattr(case, field.name) != field.default
        and all(getattr(earlier, field.name) == field.default for earlier in INTERPRETED[:place])
        for field in fields(Case)
        if field.name not in ("name", "options")
    )
]
REDUCES_WHOLE = ("fp32", "bf16, bf16 reduction", "reduction group of its own", "sums instead of means")


def every_case(cases: list[str], device: str) -> dict[str, tuple[bool, bool]]:
    tried = [case for case in INTERPRETED if case.name in cases]  # by name: functions in cases do not pickle
    found = {case.name: compare(case, torch.device(device)).is_right for case in tried}
    wrong = {
        case.name: compare(case, torch.device(device), sabotage=factor).is_right
        for case, factor in zip(tried, CONTROLS, strict=False)
    }
    with mock.patch.object(_Gloo, "sums_in_wider", return_value=False):  # as of a GPU's memory
        for case in tried:
            found[case.name] &= case.name not in REDUCES_WHOLE or compare(case, torch.device(device)).is_right
    return {name: (right, wrong.get(name, False)) for name, right in found.items()}


@pytest.mark.part("pages")
@pytest.mark.parametrize("cases", [INTERPRETED], ids=["all"])
def test_switches_on_two_ranks(cases: list[Case]) -> None:
    """Weights are a plain model's under every switch, and a weight that was changed is found out.

    The reductions also as gloo carries them out on a GPU.
    """
    names = [case.name for case in cases]
    found = run_ranks(2, every_case, names, "cpu")

    assert found == [dict.fromkeys(names, (True, False))] * 2
    assert len(CASES) - len(INTERPRETED) == 1
    assert {case.name for case in INTERPRETED} >= set(REDUCES_WHOLE)


def test_differences_keep_nan() -> None:
    """A NaN is the largest difference, wherever it is: Python's ``max(0.0, nan)`` is 0."""
    values = [torch.ones(3), torch.ones(2)]
    assert largest_difference(values, [torch.zeros(3), torch.ones(2)]) == 1.0
    for place in range(2):
        broken = [each.clone() for each in values]
        broken[place][0] = math.nan
        assert math.isnan(largest_difference(broken, values))
        assert math.isnan(largest_difference(values, broken))


def broken_at_the_end(device: str) -> bool:
    """A weight becomes NaN after the last step, as a missing wait may leave it."""
    train = parity._train

    def broken(model: Any, *others: Any) -> Any:
        yield from train(model, *others)
        if isinstance(model, FSDPModule):
            with torch.no_grad():
                dict(model.named_parameters())["blocks.1.up.weight"].mul_(math.nan)

    with mock.patch.object(parity, "_train", broken):
        return compare(CASES[0], torch.device(device)).is_right


def test_a_weight_that_ends_as_nan_is_found_out() -> None:
    """No weight is left out, the last one compared no more than others."""
    assert run_ranks(1, broken_at_the_end, "cpu") == [False]


ELSEWHERE = {
    "module": "what is sharded",
    "mesh": "every case has one",
    "dp_mesh_dims": "parameters that are DTensors: tests/vescale_fsdp/runtime/setup/test_dp_mesh_dims.py",
    "set_reduce_scatter_divide_factor": "the older name of set_gradient_divide_factor",
    "set_allocate_memory_from_process_group_for_comm": "refused",
    "set_symm_mem_for_comm": "refused",
}


def test_every_switch_has_a_case() -> None:
    """Each argument of `fully_shard`, and each method that sets something, is in the source of the cases."""
    tree = ast.parse(Path(switches.__file__).read_text())
    named = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    named |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    methods = {name for name in vars(FSDPModule) if name.startswith("set_")}
    arguments = set(inspect.signature(fully_shard).parameters)

    assert len(methods) > 20 and len(arguments) > 8
    assert methods | arguments == (named & (methods | arguments)) | ELSEWHERE.keys()


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, INDUCTOR], ids=lambda case: case.name)
def test_every_switch_on_a_gpu(case: Case) -> None:
    """The same on one GPU: streams, offloading, casts and compiled blocks are real, collectives are of one rank."""
    dist.init_process_group(backend_for("cuda", "nccl"), store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert compare(case, torch.device("cuda", 0)).is_right
    finally:
        dist.destroy_process_group()


BARE = """
import sys

class WithoutSome:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        absent = ("xxhash", "tqdm", "zarr", "safetensors", "click", "fsspec", "pytest")
        return None if name.split(".")[0] in absent else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(WithoutSome, sys.meta_path)
"""


@needs_device()
@pytest.mark.alone
@pytest.mark.part("pages")
@pytest.mark.timeout(600)
def test_a_rehearsal_passes_on_a_bare_machine(tmp_path: Path) -> None:
    """Every step passes on the asynchronous device, with no package but torch, and both reports hold all of them."""
    (tmp_path / "sitecustomize.py").write_text(BARE)  # Python imports it when it starts
    out = tmp_path / "report"
    command = (sys.executable, "tools/gpu_run.py", "--device", "sim", "--minutes", "9", "--out", str(out))
    done = run_command(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)}, timeout_s=560)
    assert done.returncode == 0, done.stdout + done.stderr

    report = json.loads((out / "gpu.json").read_text())
    states = {step["step"]["name"]: step["state"] for step in report["steps"]}
    assert states == dict.fromkeys((step.name for step in steps(out, "sim", 0)), "passed")
    rows = [row for step in report["steps"] for row in step["rows"] if "metric" in row]
    assert all(row["met"] for row in rows if row["unit"] == "bool") and len(rows) > 50
    parity = {row["case"].removeprefix("8 ranks, ") for row in rows if row["metric"] == "plain model"}
    assert parity >= set(PARITY.split(","))
    metrics = {row["metric"] for row in rows}
    assert "differs" in metrics  # the run without waits
    assert {"stall of async_save", "step time", "clip_grad_norm_", "step of AdamW8bit"} <= metrics
    assert "xxhash" in report["steps"][-1]["output"]  # checkpoints are left out, and the report says why
    assert (out / "trace.json.gz").stat().st_size > 1000
    text = (out / "gpu.md").read_text()
    assert all(f"| {name} | passed |" in text for name in states)


@pytest.mark.part("jobs")
def test_a_failure_stops_nothing(tmp_path: Path) -> None:
    """A step that fails, hangs, cannot start or has no time left is an outcome like any other."""
    python = (sys.executable, "-c")
    tried = [
        (Step("fails", (*python, "print('why'); exit(3)"), 60), 60.0),
        (Step("hangs", ("sh", "-c", "echo so far; exec sleep 99"), 2), 60.0),
        (Step("is not there", (str(tmp_path / "nothing"),), 60), 60.0),
        (Step("has no time", (*python, ""), 60), 1.0),
        (Step("passes", (*python, "print('well')"), 60), 60.0),
    ]

    outcomes = [run(step, left_s) for step, left_s in tried]
    write_reports(tmp_path, outcomes)

    assert [each.state for each in outcomes] == ["failed", "out of time", "failed", "left out", "passed"]
    assert [word in each.output for word, each in zip(("why", "so far"), outcomes, strict=False)] == [
        True,
        True,
    ]
    assert f"| hangs | {outcomes[1].state} |" in (tmp_path / "gpu.md").read_text()
    assert all(isinstance(each, Outcome) for each in outcomes)


def test_the_steps_of_a_gpu_fit_into_nine_minutes(tmp_path: Path) -> None:
    """The limits of one GPU's steps add up to nine minutes; several GPUs begin with the network."""
    one, four = list(steps(tmp_path, "cuda", 1)), list(steps(tmp_path, "cuda", 4))

    assert sum(step.limit_s for step in one) <= 9 * 60
    assert [step.name for step in four[-len(one) :]] == [step.name for step in one]
    assert "--ranks" in four[0].command and "--ranks" not in [word for step in one for word in step.command]
    assert any(step.env.get("TORCH_CUDA_SANITIZER") for step in one)
    assert any("cudaMallocAsync" in value for step in one for value in step.env.values())
