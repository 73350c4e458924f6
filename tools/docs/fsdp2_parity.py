"""Run PyTorch's own FSDP2 tests against this library, and write the table of docs/fsdp2_parity.md.

    git clone --filter=blob:none https://github.com/pytorch/pytorch PATH && git -C PATH checkout COMMIT
    python -m tools.docs.fsdp2_parity --pytorch PATH [--only NAME ..]

COMMIT is the one that the installed torch was built from (``torch.version.git_version``); tests of another commit need
another torch. The cases run on CPU, on four gloo ranks, once with torch's FSDP2 and once with each way to use this
library. The files are changed on the way (`on_cpu`), in a temporary folder: nothing of them is stored. Cases that pass
with FSDP2 only must be in the page's table of reasons; otherwise they are listed, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import torch

PAGE = Path(__file__).parents[2] / "docs" / "fsdp2_parity.md"
FOLDER = Path("test/distributed")
PATTERNS = (
    "_composable/fsdp/test_fully_shard_*.py",
    "_composable/test_composability/test_*.py",
    "checkpoint/test_state_dict.py",
)
# Files that need a GPU, or test FSDP2's inside alone; the page says which.
LEFT_OUT = ("overlap", "memory", "compile", "logging")
IMPLEMENTATIONS = ("FSDP2", "plain", "as_fsdp2")
QUIET_S = 300  # without a result, a file's process is ended, and the next case runs in a new one
BEGIN, END = "<!-- fsdp2_parity: begin -->", "<!-- fsdp2_parity: end -->"


class Outcome(NamedTuple):
    """What has happened to a case: "passed", "failed", "skipped" or "ended" (its process, by a crash or a hang)."""

    outcome: str
    error: str = ""


Outcomes = dict[str, dict[str, Outcome]]  # implementation -> case -> outcome


def on_cpu(source: str) -> str:
    """Return a test file whose device and backend are the CPU's."""
    changes = {
        r'"[\w:,]*cuda:nccl[\w:,]*"': '"gloo"',
        r'"nccl"': '"gloo"',
        r'"cuda"': '"cpu"',
        r"\.cuda\(\)": ".cpu()",
        r"\btorch\.cuda\.(?=manual_seed|synchronize|set_device|current_device|device_count)": "torch.cpu.",
    }
    for pattern, replacement in changes.items():
        source = re.sub(pattern, replacement, source)
    return source


def test_files(checkout: Path) -> Iterator[tuple[str, Path]]:
    """Yield (short name, path) of each test file that can run on CPU."""
    for pattern in PATTERNS:
        for path in sorted((checkout / FOLDER).glob(pattern)):
            name = path.stem.removeprefix("test_").removeprefix("fully_shard_")
            if name not in LEFT_OUT:
                yield name, path


def run_file(module: str, folder: Path, implementation: str) -> dict[str, Outcome]:
    """Return the outcome of every case of a module in a folder.

    Raises:
        RuntimeError: if the module cannot be imported.
    """
    outcomes: dict[str, Outcome] = {}
    left: list[str] | None = None
    while left is None or left:
        results = folder / f"{module}-{implementation}-{len(outcomes)}.jsonl"
        results.write_text("")
        command = [
            sys.executable, "-m", "tools.docs.fsdp2_cases", str(results), module, implementation, *(left or ())
        ]  # fmt: skip
        log = _run(command, results)
        lines = [json.loads(line) for line in results.read_text().splitlines()]
        if not lines:
            raise RuntimeError(f"{module} cannot be imported:\n{log[-2000:]}")
        ended = {
            row["case"]: Outcome(row["outcome"], row.get("error", "")) for row in lines if "outcome" in row
        }
        started = {row["case"] for row in lines if "case" in row}
        outcomes |= ended | {case: Outcome("ended", "crash or hang") for case in started - ended.keys()}
        if not started:  # the process ends before any case: none of the others would start
            outcomes |= {case: Outcome("ended", "crash") for case in left or lines[0]["cases"]}
        left = [case for case in lines[0]["cases"] if case not in outcomes]
    return outcomes


def _run(command: Sequence[str], results: Path) -> str:
    """Run a command, and end it with its ranks if it writes no result for `QUIET_S`; returns its output."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        written, since = -1, time.monotonic()
        while process.poll() is None:
            if (size := results.stat().st_size) != written:
                written, since = size, time.monotonic()
            elif time.monotonic() - since > QUIET_S:
                os.killpg(process.pid, signal.SIGKILL)
            time.sleep(0.2)
        log.seek(0)
        return log.read()


def table(found: Mapping[str, Outcomes]) -> str:
    """Return the page's table: for each file, cases that pass by implementation, and those only FSDP2 passes."""
    lines = [
        f"| file | cases | {' | '.join(IMPLEMENTATIONS)} | cases that pass with FSDP2 only |",
        "|---" * (len(IMPLEMENTATIONS) + 3) + "|",
    ]
    for name, outcomes in found.items():
        passed = [sum(each.outcome == "passed" for each in outcomes[i].values()) for i in IMPLEMENTATIONS]
        missed = ", ".join(f"`{case}`" for case in fsdp2_only(outcomes))
        lines.append(f"| {name} | {len(outcomes['FSDP2'])} | {' | '.join(map(str, passed))} | {missed} |")
    return "\n".join(lines)


def fsdp2_only(outcomes: Outcomes) -> list[str]:
    """Return the names, without class and "test_", of cases that pass with FSDP2 and not under ``as_fsdp2``."""
    theirs, ours = outcomes["FSDP2"], outcomes["as_fsdp2"]
    return [
        _short(case)
        for case, each in theirs.items()
        if each.outcome == "passed" and ours[case].outcome != "passed"
    ]


def _short(case: str) -> str:
    return case.partition(".")[2].removeprefix("test_").removeprefix("fully_shard_")


def unexplained(cases: Iterable[str], page: str) -> list[str]:
    """Return the cases that no pattern in the page's tables of reasons matches."""
    rows = [line for line in page.splitlines() if line.startswith("|")]
    patterns = {pattern for row in rows for pattern in re.findall(r"`([\w*]+)`", row.split("|")[2])}
    return [case for case in cases if not any(fnmatch(case, pattern) for pattern in patterns)]


def with_table(page: str, text: str) -> str:
    """Return the page with another text between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def commit_of(checkout: Path) -> str:
    """Return the commit of a checkout."""
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pytorch", type=Path, required=True, help="checkout of PyTorch at the pinned commit"
    )
    parser.add_argument(
        "--only", nargs="+", help="names of files, such as comm; the page is not written then"
    )
    given = parser.parse_args(arguments)
    pinned = str(torch.version.git_version)
    if (commit := commit_of(given.pytorch)) != pinned:
        parser.error(f"{given.pytorch} is at commit {commit}: git -C {given.pytorch} checkout {pinned}")
    found: dict[str, Outcomes] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, path in test_files(given.pytorch):
            if given.only and name not in given.only:
                continue
            (Path(folder) / path.name).write_text(on_cpu(path.read_text()))
            found[name] = {each: run_file(path.stem, Path(folder), each) for each in IMPLEMENTATIONS}
            print(table({name: found[name]}).splitlines()[-1], flush=True)
            for case in fsdp2_only(found[name]):
                errors = [
                    each.error for full, each in found[name]["as_fsdp2"].items() if _short(full) == case
                ]
                print(f"    {case}: {errors[0]}", flush=True)
    version, today = torch.__version__.partition("+")[0], f"{datetime.now(UTC):%Y-%m-%d}"
    said = f"Commit {commit[:12]} of PyTorch (torch {version}), on {today}:"
    missing = unexplained([case for each in found.values() for case in fsdp2_only(each)], PAGE.read_text())
    if not given.only:
        PAGE.write_text(with_table(PAGE.read_text(), f"{said}\n\n{table(found)}"))
    if missing:
        print(f"not explained in {PAGE.name}: {', '.join(missing)}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
