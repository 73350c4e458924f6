"""What users get: the wheel and the sdist hold the linked folders under one name, and no generic name."""

from __future__ import annotations

import email
import os
import re
import sys
import tarfile
import zipfile
from pathlib import Path

import vescale_fsdp
from tests.house.conftest import ROOT, run


def sources_under(prefix: str) -> set[str]:
    """Files of the checkout that belong into the package, by their installed path."""
    return {
        f"{prefix}{file.relative_to(ROOT / folder)}"
        for folder, prefix in [
            ("vescale_fsdp", "vescale_fsdp/"),
            ("checkpoint", "vescale_fsdp/checkpoint/"),
            ("conversion", "vescale_fsdp/conversion/"),
        ]
        for pattern in ("*.py", "*.md", "*.toml", "*.html", "*.css", "*.js")
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
    assert "vescale_fsdp/py.typed" in names


def test_licence_and_metadata(built: tuple[Path, Path]) -> None:
    """The whole license goes along, and the version is the one that the package says of itself."""
    with zipfile.ZipFile(built[0]) as wheel:
        (license,) = [name for name in wheel.namelist() if name.endswith("/licenses/LICENSE")]
        text = wheel.read(license).decode()
        metadata = email.message_from_bytes(wheel.read(license.replace("licenses/LICENSE", "METADATA")))

    assert text == (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in text and "APPENDIX: How to apply the Apache License" in text
    assert metadata["Version"] == vescale_fsdp.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])


def test_extras_that_the_makefile_installs_are_there(built: tuple[Path, Path]) -> None:
    """By the names that pip finds: it goes on without one that it does not find, with a warning."""
    with zipfile.ZipFile(built[0]) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        provided = email.message_from_bytes(wheel.read(name)).get_all("Provides-Extra", [])
    asked = re.findall(r'"\.\[([^\]]+)\]"', (ROOT / "Makefile").read_text())

    assert asked and {extra for extras in asked for extra in extras.split(",")} <= set(provided)


def test_sdist_holds_the_sources_of_the_linked_folders(built: tuple[Path, Path]) -> None:
    """The source archive is complete as well: the wheel above was built from it."""
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    assert {
        "vescale_fsdp/layout/group_layout.py",
        "vescale_fsdp/checkpoint/__init__.py",
        "vescale_fsdp/py.typed",
        "pyproject.toml",
        "LICENSE",
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
