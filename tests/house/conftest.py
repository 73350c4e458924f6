"""Shared by the house tests: all failures of a loop, and the wheel and the sdist, built once."""

from __future__ import annotations

import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import pytest

from tests.support.processes import run_command

ROOT = Path(__file__).parents[2]
SOURCES = ["pyproject.toml", "README.md", "LICENSE", "vescale_fsdp", "checkpoint", "conversion"]


Case = TypeVar("Case")


def failures(check: Callable[[Case], object], cases: Iterable[Case]) -> str:
    """Run a check on every case; returns the tracebacks of those that fail, "" if none does."""
    found = []
    for case in cases:
        try:
            check(case)
        except Exception:  # noqa: BLE001  reported, all at once
            found.append(f"--- {case}\n{traceback.format_exc()}")
    return "\n".join(found)


def run(*command: str, cwd: Path, python_path: str = "") -> str:
    """Standard output of a command that must succeed; PYTHONPATH is only what is asked for."""
    environment = {**os.environ, "PYTHONPATH": python_path}
    done = run_command(command, cwd=cwd, env=environment, timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(wheel, sdist), built offline from a copy of the checkout: a build leaves files behind."""
    copy = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(ROOT / name, copy / name)
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy), cwd=out)
    (wheel,) = out.glob("*.whl")
    (sdist,) = out.glob("*.tar.gz")
    return wheel, sdist
