"""Check the branch for accelerators on a machine with a GPU, in nine minutes, with nothing installed but torch.

    python tools/gpu_run.py --minutes 9 --out gpu_report                    make gpu
    python tools/gpu_run.py --minutes 9 --out gpu_report --device sim       rehearsal on the asynchronous device

In this order, the most informative first; with two or more GPUs, the network is first of all:

    network        several GPUs: the narrow reduction beside one reduce-scatter, and training beside a plain model
    calls          the backend's collectives on a group of one rank: results, and the streams that they run on
    allocator      what the runtime relies on: memory that is freed and comes back, alignment
    schedule       one process as 8 and as 64 equal ranks, with delays, beside a plain model; without waits, which must
                   be noticed; with an allocator that frees at once
    steps          time and memory of a dense step at 8,192 and at 128 tokens, wide and narrow, beside FSDP2
    trace          kernels per stream
    parity         eight switches of training beside a plain model
    sanitizer      CUDA's checks of stream order
    staging        the stall of an asynchronous save; optimizers of 8 bits; checkpoints, if their packages are there

Each step is a process with a time limit; the limits fit into nine minutes. Steps that the budget has no time for are
reported as left out. ``gpu.json`` and ``gpu.md`` are rewritten after each step. Exit code 1 if a check failed.
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


PARITY = "bf16,offload,accumulate,replicas,8-bit gathers,recompute,foreach,compiled"


def steps(out: Path, kind: str, num_gpus: int) -> Iterator[Step]:
    """The steps for a kind of device, in order; their limits add up to nine minutes on one GPU."""
    on = ("--device", kind)
    is_gpu = kind == "cuda"
    if num_gpus > 1:
        yield from _network(out, num_gpus)

    def mirror(name: str, limit_s: int, *options: str, **env: str) -> Step:
        command = _module("tools.mirror", *on, *options, *_json(out, name.replace(" ", "_")))
        return Step(f"schedule, {name}" if name[0].isdigit() else name, command, limit_s, env=env)

    yield Step("versions and calls", _module("tools.gpu.calls", *on, *_json(out, "calls")), 60)
    yield _micro(out, kind, "allocator", 40, "allocator", "alignment")
    yield mirror("8 ranks", 60, "--cases", "bf16,bf16 narrow,two groups", "--control")
    yield mirror("64 ranks", 35, "--world", "64", "--cases", "bf16", "--modes", "synchronized,both late")
    if is_gpu:
        freeing = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
        yield mirror("8 ranks, memory freed at once", 35, "--cases", "bf16", **freeing)
    for tokens, rows in ((8192, 4), (128, 1)):
        size = ["--rows", str(rows), "--seq", str(tokens // rows)]
        if not is_gpu:
            size = ["--rows", "1", "--seq", str(tokens // 64), "--steps", "1"]
        command = _module("tools.gpu.step", *on, *size, *_json(out, f"dense_{tokens}_tokens"))
        yield Step(f"dense step, {tokens} tokens", command, 75 if tokens > 1000 else 45, checks=False)
    yield _micro(out, kind, "trace", 30, "trace")
    yield mirror("parity", 75, "--cases", PARITY, "--modes", "synchronized,both late")
    sanitizer = {"TORCH_CUDA_SANITIZER": "1"} if is_gpu else {}
    yield mirror("sanitizer", 40, "--cases", "bf16,accumulate", "--modes", "as it comes", **sanitizer)
    yield _micro(out, kind, "staging and optimizers", 40, "staging", "optimizers", "checkpoints")


def _network(out: Path, num_gpus: int) -> Iterator[Step]:
    """Several GPUs: what one GPU cannot tell. These steps come on top of the nine minutes of one GPU."""
    ranks = ("--ranks", str(num_gpus))
    size = ("--rows", "4", "--seq", "2048")
    network = _module("tools.gpu.step", "--device", "cuda", *ranks, *size, *_json(out, "network"))
    yield Step("narrow and wide reductions over NCCL", network, 120, checks=False)
    few = ("--device", "cuda", "--backend", "nccl", *ranks, "--only", "bf16", "--control")
    yield Step("training over NCCL", _module("tools.gpu.parity", *few, *_json(out, "parity_nccl")), 120)


def _micro(out: Path, kind: str, name: str, limit_s: int, *groups: str) -> Step:
    """A step of figures."""
    options = ("--device", kind, "--folder", str(out), *_json(out, name.replace(" ", "_")))
    return Step(name, _module("tools.gpu.micro", *groups, *options), limit_s, checks=False)


def _json(out: Path, stem: str) -> tuple[str, ...]:
    return "--json", str(out / f"{stem}.json")


def run(step: Step, left_s: float) -> Outcome:
    """Run a step within its limit and the rest of the budget; returns an outcome in any case."""
    limit_s = min(step.limit_s, left_s)
    if left_s < LEAST_S:
        return Outcome(step, "left out", 0.0, "the budget was spent", [])
    start_s = time.monotonic()
    folders = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    try:
        process = subprocess.Popen(
            step.command,
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": folders,
                "PYTHONUNBUFFERED": "1",
                **step.env,
            },
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


def write_reports(out: Path, outcomes: Sequence[Outcome], num_left: int = 0) -> None:
    """Write ``gpu.json`` with all results, and ``gpu.md`` for people."""
    report = {"machine": machine(), "steps": [asdict(outcome) for outcome in outcomes]}
    (out / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")
    title = "# Checks on a GPU" if torch.cuda.is_available() else "# Rehearsal of the checks on a GPU"
    versions = ", ".join(f"{key} {value}" for key, value in machine().items() if key != "command" and value)
    lines = [
        title,
        "",
        versions,
        "",
        "| step | outcome | seconds | limit |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {each.step.name} | {each.state} | {each.seconds:.0f} | {each.step.limit_s} |" for each in outcomes
    ]
    if num_left:
        lines += ["", f"{num_left} steps have not run yet."]
    for each in outcomes:
        lines += ["", f"## {each.step.name}: {each.state}", "", f"`{_shown(each.step)}`", ""]
        rows = [row for row in each.rows if "metric" in row]
        if rows:
            lines += ["| case | figure | ours | other | ratio | target met |", "|---|---|---|---|---|---|"]
            lines += [_row_text(row) for row in rows]
        # A step that failed explains itself; the rows of one that passed are enough, but for what has no rows.
        if each.state != "passed" or not rows:
            lines += ["", "```", *each.output.strip().splitlines()[-40:], "```"]
    (out / "gpu.md").write_text("\n".join(lines) + "\n")


def _shown(step: Step) -> str:
    """The command as one would type it."""
    words = ["python", *step.command[1:]]
    return " ".join([*(f"{name}={value}" for name, value in step.env.items()), *words])


def _row_text(row: dict[str, Any]) -> str:
    """One row as a line of a Markdown table."""
    unit = "" if row["unit"] in ("", "bool") else f" {row['unit']}"
    ours = ("yes" if row["ours"] else "no") if row["unit"] == "bool" else f"{row['ours']:.4g}{unit}"
    rival = "" if row["rival"] is None else f"{row['rival']:.4g}{unit} ({row['rival_name']})"
    ratio = "" if row["ratio"] is None else f"{row['ratio']:.3f}"
    met = {None: "", True: "yes", False: "NO"}[row["met"]]
    return f"| {row['case']} | {row['metric']} | {ours} | {rival} | {ratio} | {met} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 0 if all correctness steps passed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=9, help="the budget of all steps together")
    parser.add_argument("--out", type=Path, default=Path("gpu_report"), help="folder of the reports")
    parser.add_argument(
        "--device", choices=("cuda", "sim"), default="cuda", help="sim: a rehearsal, in small"
    )
    given = parser.parse_args(arguments)
    num_gpus = torch.cuda.device_count() if given.device == "cuda" else 0
    if given.device == "cuda" and not num_gpus:
        parser.error("torch finds no CUDA device here; --device sim rehearses on the asynchronous device")
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    end_s = time.monotonic() + 60 * given.minutes
    outcomes: list[Outcome] = []
    every = list(steps(out, given.device, num_gpus))
    for step in every:
        outcomes.append(run(step, end_s - time.monotonic()))
        write_reports(out, outcomes, len(every) - len(outcomes))
        print(f"{step.name:<32}{outcomes[-1].state:<14}{outcomes[-1].seconds:6.0f} s", flush=True)
    return int(any(each.step.checks and each.state != "passed" for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
