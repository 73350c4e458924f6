"""The gate: format, lint, types, import order and fast tests. All run, two at a time, even after a failure.

    python tools/check.py                      everything (half a minute; two where mypy has no cache)
    python tools/check.py --fix                apply ruff's formatting and fixes, then check
    python tools/check.py --only types         one step
    python tools/check.py --skip fast-tests    all but one

`make check` and the pre-commit hook run this file; `make test` runs its steps as tests (tests/tools/test_check.py).
Exit code 0 if every step passed, 1 otherwise; the failed steps are printed last.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
PYTHON = sys.executable
# Tests of the pure modules and of the house rules: no worker processes, a few seconds in total.
FAST_TESTS = (
    "house/rules/test_errors.py",
    "house/test_public.py",
    "vescale_fsdp/layout/test_geometry.py",
    "vescale_fsdp/layout/test_granularity.py",
    "vescale_fsdp/layout/test_group_layout.py",
    "vescale_fsdp/layout/test_planner.py",
    "vescale_fsdp/dtensor/test_placement.py",
)

STEPS: dict[str, list[str]] = {
    "format": [PYTHON, "-m", "ruff", "format", "--check", "--quiet", "."],
    "lint": [PYTHON, "-m", "ruff", "check", "--quiet", "."],
    "types": [PYTHON, "-m", "mypy"],
    "layering": [PYTHON, "-m", "pytest", "-q", "tests/house/test_layering.py"],
    "fast-tests": [PYTHON, "-m", "pytest", "-q", *(f"tests/{name}" for name in FAST_TESTS)],
}


def fix() -> None:
    """Apply ruff's fixes and formatting."""
    for command in (["check", "--fix", "--quiet", "."], ["format", "--quiet", "."]):
        subprocess.run([PYTHON, "-m", "ruff", *command], cwd=ROOT, check=False)


def run_step(name: str) -> bool:
    """Run one step and print its result, with its output if it fails; returns whether it passed."""
    start_s = time.monotonic()
    done = subprocess.run(STEPS[name], cwd=ROOT, capture_output=True, text=True)
    passed = done.returncode == 0
    output = "" if passed else f"{done.stdout}{done.stderr}\n"
    # One call: another step may print at the same time.
    print(
        f"{output}{name:<12}{'ok' if passed else 'FAILED':<8}{time.monotonic() - start_s:5.1f} s\n",
        end="",
        flush=True,
    )
    return passed


def main() -> int:
    """Parse, run the chosen steps, report."""
    parser = argparse.ArgumentParser(description="format, lint, types, import order, fast tests")
    parser.add_argument("--fix", action="store_true", help="apply ruff's fixes and formatting first")
    parser.add_argument("--only", choices=STEPS, action="append", help="run this step alone (repeatable)")
    parser.add_argument("--skip", choices=STEPS, action="append", default=[], help="leave a step out")
    options = parser.parse_args()
    if options.fix:
        fix()
    chosen = [name for name in options.only or STEPS if name not in options.skip]
    with ThreadPoolExecutor(2) as pool:
        failed = [name for name, passed in zip(chosen, pool.map(run_step, chosen), strict=True) if not passed]
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
