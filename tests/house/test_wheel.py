"""What users get: the wheel and the sdist hold the linked folders under one name, and no generic name.

Built offline from a copy of the sources (a build leaves files behind), and imported outside the checkout.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ["pyproject.toml", "README.md", "vescale_fsdp", "checkpoint", "conversion"]


def run(*command: str, cwd: Path, python_path: str = "") -> str:
    """Standard output of a command that must succeed; PYTHONPATH is only what is asked for."""
    environment = {**os.environ, "PYTHONPATH": python_path}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(wheel, sdist) built from a copy of the checkout, the wheel out of the sdist."""
    copy = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, copy / name)
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy), cwd=out)
    (wheel,) = out.glob("*.whl")
    (sdist,) = out.glob("*.tar.gz")
    return wheel, sdist


def sources_under(prefix: str) -> set[str]:
    """Files of the checkout that belong into the package, by their installed path."""
    return {
        f"{prefix}{file.relative_to(ROOT / folder)}"
        for folder, prefix in [
            ("vescale_fsdp", "vescale_fsdp/"),
            ("checkpoint", "vescale_fsdp/checkpoint/"),
            ("conversion", "vescale_fsdp/conversion/"),
        ]
        for pattern in ("*.py", "*.md", "*.toml")
        for file in (ROOT / folder).rglob(pattern)
        if "__pycache__" not in file.parts
    }


def test_links_are_links_in_the_checkout() -> None:
    """The two folders inside the package are relative links, not copies that could differ."""
    for name in ("checkpoint", "conversion"):
        assert os.readlink(ROOT / "vescale_fsdp" / name) == f"../{name}"


def test_wheel_holds_every_source_and_one_top_level_name(built: tuple[Path, Path]) -> None:
    """Every module, note and rule file is in the wheel, all under vescale_fsdp."""
    names = set(zipfile.ZipFile(built[0]).namelist())
    top = {name.split("/")[0] for name in names if ".dist-info/" not in name}

    assert sources_under("") <= names
    assert top == {"vescale_fsdp"}


def test_sdist_holds_the_sources_of_the_linked_folders(built: tuple[Path, Path]) -> None:
    """The source archive is complete as well: the wheel above was built from it."""
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    assert {
        "vescale_fsdp/layout/group_layout.py",
        "vescale_fsdp/checkpoint/__init__.py",
        "pyproject.toml",
    } <= names


def test_installed_wheel_imports_outside_the_checkout(built: tuple[Path, Path], tmp_path: Path) -> None:
    """From the installed wheel the two packages import by their one name, and no `checkpoint` exists."""
    site = tmp_path / "site"
    run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
        str(built[0]),
        cwd=tmp_path,
    )
    code = (
        "import vescale_fsdp, vescale_fsdp.checkpoint as a, vescale_fsdp.conversion as b;"
        "from importlib.util import find_spec;"
        "print(vescale_fsdp.__file__, a.__file__, b.__file__);"
        "print(find_spec('checkpoint'), find_spec('conversion'))"
    )
    printed = run(sys.executable, "-P", "-c", code, cwd=tmp_path, python_path=str(site)).split()

    assert printed == [
        str(site / "vescale_fsdp" / "__init__.py"),
        str(site / "vescale_fsdp" / "checkpoint" / "__init__.py"),
        str(site / "vescale_fsdp" / "conversion" / "__init__.py"),
        "None",
        "None",
    ]
