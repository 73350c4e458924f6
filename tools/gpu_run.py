"""Run all checks and benchmarks that need GPUs, in half an hour; continues after a failure.

    python tools/gpu_run.py --minutes 25 --out gpu_report        make gpu
    python tools/gpu_run.py --dry --out gpu_report               on the CPU, in small, without the steps' figures

    correctness   sharded training against a plain model under every switch: one rank, two over gloo on one GPU, all
                  GPUs over NCCL; a changed weight, which must be detected; the tests marked gpu; CUDA's sanitizer
    figures       steps against FSDP2's as one rank of 64 (other ranks' data is garbage, times are right); flat
                  optimizers; memory, alignment; checkpoints, clipping, optimizers; a trace of a step

Each step is a process with a time limit. Steps that do not fit into the budget are reported as left out. ``gpu.json``
and ``gpu.md`` are rewritten after each step. Exit code 1 if a correctness step failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.bench.rows import machine

ROOT = Path(__file__).parents[1]
LEAST_S = 10  # no step is started with less time left


@dataclass(frozen=True)
class Step:
    """One command, its time limit, and whether it checks correctness."""

    name: str
    command: tuple[str, ...]
    limit_s: int
    checks: bool = True
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """The result of a step: ``state`` is passed, failed, out of time or left out."""

    step: Step
    state: str
    seconds: float
    output: str
    rows: list[Any]


def _module(name: str, *options: str) -> tuple[str, ...]:
    return sys.executable, "-m", name, *options


def steps(out: Path, *, dry: bool, num_gpus: int) -> Iterator[Step]:
    """Correctness first, then figures, the most important first."""
    yield from (_parity_in_small(out) if dry else _correctness(out, num_gpus))
    yield from _figures(out, "cpu" if dry else "cuda", dry=dry)


def _parity_in_small(out: Path) -> Iterator[Step]:
    """Two cases in one process: the tests run every case and the mirror on the CPU, and importing torch is slow."""
    few = ("--device", "cpu", "--backend", "gloo", "--ranks", "2", "--only", "bf16, accumulation")
    command = _module("tools.gpu.parity", *few, "--control", *_json(out, "parity"))
    yield Step("parity, two ranks over gloo, and with a weight changed", command, 120)


def _correctness(out: Path, num_gpus: int) -> Iterator[Step]:
    parity = ("tools.gpu.parity", "--device", "cuda", "--backend")
    one = _module(*parity, "nccl", "--inductor", "--control", *_json(out, "parity"))
    yield Step("parity, one rank, and with a weight changed", one, 300)
    yield Step("parity, two ranks over gloo", _module(*parity, "gloo", "--ranks", "2"), 120)
    if num_gpus > 1:
        every = _module(*parity, "nccl", "--ranks", str(num_gpus))
        yield Step("parity, all GPUs over NCCL", every, 240)
    for count in (8, 64):
        mirror = _module("tools.mirror", "--device", "cuda", "--world", str(count))
        yield Step(f"mirror of {count} ranks", mirror, 120)
    tests = _module("pytest", "-m", "gpu", "-q", "-o", "filterwarnings=default", "tests")
    yield Step("tests marked gpu", tests, 240)
    strict = _module(*parity, "nccl", "--only", "bf16")
    yield Step("parity under the sanitizer", strict, 120, env={"TORCH_CUDA_SANITIZER": "1"})


def _figures(out: Path, device: str, *, dry: bool) -> Iterator[Step]:
    micro = _module("tools.gpu.micro", "--device", device, *_json(out, "micro"), "--folder", str(out))
    yield Step("memory, alignment, checkpoints, optimizers, a trace", micro, 240, checks=False)
    if dry:
        return  # the benchmarks of steps take minutes on a CPU
    step = (sys.executable, "tools/bench/step.py", "--device", device, "--fake-world", "64", "--rounds", "1")
    for stem, size in {
        "dense_128_tokens": ("--models", "dense"),
        "dense_8k_tokens": ("--models", "dense", "--rows", "4", "--seq", "2048"),
        "moe": ("--models", "moe", "--rows", "1", "--seq", "256"),
    }.items():
        yield Step(f"step, {stem}", (*step, *size, *_json(out, stem)), 180, checks=False)


def _json(out: Path, stem: str) -> tuple[str, ...]:
    return "--json", str(out / f"{stem}.json")


def run(step: Step, left_s: float) -> Outcome:
    """Run a step within its limit and the rest of the budget; returns an outcome in any case."""
    limit_s = min(step.limit_s, left_s)
    if left_s < LEAST_S:
        return Outcome(step, "left out", 0.0, "the budget was spent", [])
    start_s = time.monotonic()
    try:
        process = subprocess.Popen(
            step.command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **step.env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    except OSError as error:
        return Outcome(step, "failed", 0.0, str(error), [])
    try:
        output, _ = process.communicate(timeout=limit_s)
        state = "passed" if process.returncode == 0 else "failed"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its ranks too
        output, _ = process.communicate()
        state = "out of time"
    return Outcome(step, state, time.monotonic() - start_s, output, _rows_of(step))


def _rows_of(step: Step) -> list[Any]:
    """The rows that a step has written, also if it did not finish."""
    files = [
        Path(after)
        for option, after in zip(step.command, step.command[1:], strict=False)
        if option == "--json"
    ]
    rows: list[Any] = json.loads(files[0].read_text()) if files and files[0].exists() else []
    return rows


def write_reports(out: Path, outcomes: Sequence[Outcome]) -> None:
    """Write ``gpu.json`` with all results, and ``gpu.md`` for people."""
    report = {"machine": machine(), "steps": [asdict(outcome) for outcome in outcomes]}
    (out / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")
    lines = ["# A run on a GPU", "", f"{machine()}", "", "| step | outcome | seconds |", "|---|---|---|"]
    lines += [f"| {each.step.name} | {each.state} | {each.seconds:.0f} |" for each in outcomes]
    for each in outcomes:
        tail = each.output.strip().splitlines()[-40:]
        lines += [
            "",
            f"## {each.step.name}: {each.state}",
            "",
            "```",
            " ".join(each.step.command),
            *tail,
            "```",
        ]
    (out / "gpu.md").write_text("\n".join(lines) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 0 if all correctness steps passed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=25, help="the budget of all steps together")
    parser.add_argument("--out", type=Path, default=Path("gpu_report"), help="folder of the reports")
    parser.add_argument("--dry", action="store_true", help="on the CPU, in small, to try the command itself")
    given = parser.parse_args(arguments)
    if not given.dry and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here; --dry tries the command on the CPU")
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    end_s = time.monotonic() + 60 * given.minutes
    outcomes: list[Outcome] = []
    for step in steps(out, dry=given.dry, num_gpus=0 if given.dry else torch.cuda.device_count()):
        outcomes.append(run(step, end_s - time.monotonic()))
        write_reports(out, outcomes)
        print(f"{step.name:<32}{outcomes[-1].state:<14}{outcomes[-1].seconds:6.0f} s", flush=True)
    return int(any(each.step.checks and each.state != "passed" for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
