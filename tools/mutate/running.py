"""Runs of the tests on a product that is changed as it is loaded; the checkout's files are not touched."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tools.mutate import loading, plugin
from tools.mutate.mutants import Mutant

_HANGS_S = 180.0  # beside the chosen tests' time: start-up on a loaded machine, and the deadlines of waits


class Covered(NamedTuple):
    """What one test executes, and how long it takes."""

    seconds: float
    blocks: dict[str, list[int]]  # file of the product -> first lines of the blocks that were executed


class Outcome(NamedTuple):
    """How a run of tests ended."""

    failed: bool
    hangs: bool
    failing: list[str]  # ids; with -x, the first; none if pytest itself ended with an error
    seconds: float
    tail: str


@contextmanager
def hooked(root: Path) -> Iterator[dict[str, str]]:
    """An environment whose Python processes load the product of ``root`` through `loading`, and pytest the plugin."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(loading.__file__, Path(folder, "sitecustomize.py"))
        shutil.copy(plugin.__file__, Path(folder, "mutate_plugin.py"))
        path = os.pathsep.join((folder, str(root)))
        yield os.environ | {"PYTHONPATH": path, "MUTATE_ROOT": str(root), "PYTHONDONTWRITEBYTECODE": "1"}


def _tests_of(log: Path) -> Iterator[tuple[str, int, str, float, bool]]:
    """Worker, number, id, seconds and whether it passed, of every test in the plugin's files."""
    for file in sorted(log.glob("*.tests")):
        for line in file.read_text().splitlines():
            number, test, seconds, passed = json.loads(line)
            yield file.stem, number, test, seconds, passed


def run_tests(
    root: Path, tests: Iterable[str], environment: dict[str, str], limit_s: float, *options: str
) -> Outcome:
    """Run tests in one pytest process; one that does not end within the limit is killed with its children.

    Args:
        root: the checkout.
        tests: ids, in their order.
        environment: of `hooked`.
        limit_s: seconds.
        options: further ones for pytest.
    """
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as output:
        chosen = Path(folder, "tests.txt")
        chosen.write_text("\n".join(tests))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "mutate_plugin",
            *options,
        ]
        process = subprocess.Popen(
            [*command, "-n0", f"--basetemp={folder}/base", f"@{chosen}"],
            cwd=root,
            env=environment | {"MUTATE_LOG": folder},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            failed, hangs = process.wait(limit_s) != 0, False
        except subprocess.TimeoutExpired:
            failed = hangs = True
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()
        output.seek(0)
        failing = [test for _, _, test, _, passed in _tests_of(Path(folder)) if not passed]
        return Outcome(failed, hangs, failing, time.monotonic() - begin, output.read()[-1000:])


def cover(
    root: Path, part: str, jobs: int, tests: Sequence[str] = (), files: Sequence[str] | None = None
) -> dict[str, Covered]:
    """Run the tests once, and return what each executes. Tests that fail, with marks and without, are left out.

    Args:
        root: the checkout.
        part: of the tests; empty for suites without parts.
        jobs: processes that run tests.
        tests: files or folders; all tests by default.
        files: of the product, of which executed blocks are noted; all by default.
    """
    with hooked(root) as environment, tempfile.TemporaryDirectory() as folder:
        log = Path(folder)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "mutate_plugin"]
        command += [
            "-n",
            str(jobs),
            "--dist",
            "loadfile",
            "--no-loadscope-reorder",
            *(tests or ("tests", "--ignore=tests/stacks")),
        ]
        if part:
            command += ["--part", part]
        variables = environment | {"MUTATE_LOG": folder, "MUTATE_HITS": folder}
        if files is not None:
            variables["MUTATE_FILES"] = json.dumps(files)
        subprocess.run(command, cwd=root, env=variables, check=False)
        blocks: dict[tuple[str, int], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for file in log.glob("*.hits"):
            for line in file.read_text().splitlines():
                name, start, running = line.rsplit(" ", 2)
                blocks[file.stem, int(running)][name].append(int(start))
        covered, failed = {}, []
        for worker, number, test, seconds, passed in _tests_of(log):
            found = {name: sorted(set(lines)) for name, lines in blocks[worker, number].items()}
            covered[test] = Covered(seconds, found)
            if not passed:
                failed.append(test)
        # A test may fail because of the marks (it counts calls, or compiles): then it is a test all the same.
        again = run_tests(root, failed, environment, 1800.0) if failed else None
        for test in again.failing if again is not None else ():
            print(f"fails on the unchanged product: {test}", flush=True)
            del covered[test]
        return covered


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def block_of(path: Path, line: int) -> int | None:
    """First line of the innermost block around a line of a file; None outside functions: an import runs it."""
    starts = (
        block[0].lineno
        for block in loading.blocks_of(_tree(path))
        if block[0].lineno <= line <= (block[-1].end_lineno or 0)
    )
    return max(starts, default=None)


def choose(root: Path, mutant: Mutant, covered: dict[str, Covered], budget_s: float) -> list[str]:
    """Tests that execute a mutant's block: those of the mirrored file first, then the quickest, within a budget."""
    block, module = block_of(root / mutant.file, mutant.line), Path(mutant.file)
    executing = [
        test
        for test, (_, blocks) in covered.items()
        if mutant.file in blocks and (block is None or block in blocks[mutant.file])
    ]

    def rank(test: str) -> tuple[bool, bool, float]:
        file = Path(test.partition("::")[0])
        is_near = file.is_relative_to(Path("tests") / module.parent)
        return file.stem != f"test_{module.stem}", not is_near, covered[test].seconds

    chosen: list[str] = []
    for test in sorted(executing, key=rank):
        if covered[test].seconds <= budget_s or not chosen:
            chosen.append(test)
            budget_s -= covered[test].seconds
    return chosen


def run(
    root: Path, mutants: list[Mutant], covered: dict[str, Covered], budget_s: float, jobs: int
) -> list[dict[str, Any]]:
    """Run the chosen tests of every mutant.

    Returns:
        One row per mutant: ``mutant``, ``result`` ("killed", "survived", "not executed"), ``tests`` (how many),
        ``seconds``, and ``killer`` (a test's id, or how the run ended) if it was killed.
    """
    printing = threading.Lock()
    with hooked(root) as environment, ThreadPoolExecutor(jobs) as pool:

        def judge(mutant: Mutant) -> dict[str, Any]:
            tests = choose(root, mutant, covered, budget_s)
            outcome = Outcome(False, False, [], 0.0, "")
            if tests:
                variables = environment | {"MUTATE_MUTANT": json.dumps(mutant._asdict())}
                outcome = run_tests(root, tests, variables, budget_s + _HANGS_S, "-x")
            result = "killed" if outcome.failed else "survived" if tests else "not executed"
            killer = "does not end" if outcome.hangs else next(iter(outcome.failing), "error of pytest")
            with printing:
                print(
                    f"{result:12} {outcome.seconds:5.1f} s {len(tests):4} tests {mutant.file}:{mutant.line}",
                    flush=True,
                )
            row = {
                "mutant": mutant._asdict(),
                "result": result,
                "tests": len(tests),
                "seconds": outcome.seconds,
            }
            return row | ({"killer": killer} if outcome.failed else {})

        rows = list(pool.map(judge, mutants))
        # Failures that the mutant did not cause kill nothing.
        killers = {row["killer"] for row in rows if "::" in row.get("killer", "")}
        odd = set(run_tests(root, sorted(killers), environment, 3600.0).failing) if killers else set()
        for row in rows:
            if row.get("killer") in odd:
                print(f"fails without the mutant too: {row['killer']}", flush=True)
                row["result"] = "survived"
        return rows


def compare(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> str:
    """How many mutants each suite kills, and those that only one of them kills. Mutants that are gone do not count."""
    both = [pair for pair in zip(first, second, strict=True) if all(row["mutant"] for row in pair)]
    lines = []
    for name, rows in zip(("first", "second"), zip(*both, strict=True), strict=True):
        lines.append(f"{name}: {sum(row['result'] == 'killed' for row in rows)} of {len(rows)} killed")
    for one, other in both:
        if one["result"] != other["result"]:
            change = one["mutant"]
            lines.append(
                f"{one['result']} -> {other['result']}: {change['file']}:{change['line']} "
                f"{change['before'][:60]!r} -> {change['after'][:60]!r}"
            )
    return "\n".join(lines)
