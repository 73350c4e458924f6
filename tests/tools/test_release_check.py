"""What `make release-check` refuses before it installs anything."""

from __future__ import annotations

import io
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest

from tools import release_check

METADATA = """Metadata-Version: 2.4
Version: {version}
Summary: x
Requires-Python: >=3.11
License-Expression: Apache-2.0
Description-Content-Type: text/markdown

x
"""
FILES = ("py.typed", "__init__.py", "__init__.pyi", "checkpoint/__init__.pyi")


def _wheel(path: Path, *more: str, without: str = "", version: str = "1.0", links: bool = False) -> Path:
    """A wheel of a few empty files."""
    wheel = path / "x-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in (*(f"vescale_fsdp/{name}" for name in FILES), *more, "x-1.0.dist-info/licenses/LICENSE"):
            if name != without:
                archive.writestr(name, "")
        if links:
            info = zipfile.ZipInfo("vescale_fsdp/conversion")
            info.external_attr = 0o120777 << 16
            archive.writestr(info, "../conversion")
        archive.writestr("x-1.0.dist-info/METADATA", METADATA.format(version=version))
    return wheel


@pytest.mark.parametrize(
    ("options", "is_good"),
    [
        ({}, True),
        ({"version": "1.1"}, False),
        ({"without": "vescale_fsdp/py.typed"}, False),
        ({"without": "x-1.0.dist-info/licenses/LICENSE"}, False),
        ({"links": True}, False),
    ],
)
def test_wheels(tmp_path: Path, options: dict[str, str], is_good: bool) -> None:
    """Another version, no types, no license, a link."""
    found = list(release_check.problems_of_wheel(_wheel(tmp_path, **options), "1.0"))  # type: ignore[arg-type]
    assert (found == []) is is_good


@pytest.mark.parametrize(
    "name", ["tests/x.py", "checkpoint/x.py", "vescale_fsdp/conftest.py", "vescale_fsdp/tests/x.py"]
)
def test_names(tmp_path: Path, name: str) -> None:
    """Tests, and generic names on a user's import path: in the wheel and in the source archive."""
    found = "\n".join(release_check.problems_of_wheel(_wheel(tmp_path, name), "1.0"))
    assert name in found or (name if name.startswith("vescale_fsdp/") else name.split("/")[0]) in found
    archive = tmp_path / "x-1.0.tar.gz"
    whole = [f"vescale_fsdp/{each}" for each in FILES]
    for names in (whole, [*whole, name]):
        with tarfile.open(archive, "w:gz") as tar:
            for each in ("README.md", *names):
                tar.addfile(tarfile.TarInfo(f"x-1.0/{each}"), io.BytesIO())
        assert bool(list(release_check.problems_of_sdist(archive))) is (names is not whole)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("vescale_fsdp/__init__.py", '__version__ = "', '__version__ = "7.'),
        ("CITATION.cff", "\nversion: ", "\nversion: 7."),
        ("CHANGELOG.md", "\n## ", "\n## 7.0.0\n\n## "),
        ("pyproject.toml", "torch>=2.", "torch>=2.0,>=2."),
        ("docs/compatibility.md", "| 2.13.0 | all |", "| 2.13.0 | some |"),
        (
            "pyproject.toml",
            "[project.scripts]",
            '[project.urls]\nRepository = "Find your page"\n[project.scripts]',
        ),
        ("", "", ""),
    ],
)
def test_sources(tmp_path: Path, file: str, old: str, new: str) -> None:
    """A version, a heading, a requirement or a table that disagrees with the others is named."""
    for name in ("vescale_fsdp/__init__.py", "CITATION.cff", "CHANGELOG.md", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(release_check.ROOT / name, tmp_path / name)
    shutil.copytree(release_check.ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("pictures"))
    if file:
        text = (tmp_path / file).read_text()
        assert old in text
        (tmp_path / file).write_text(text.replace(old, new, 1))
    found = list(release_check.problems_of_source(tmp_path))
    assert len(found) == bool(file) and all(file.partition(".")[0] in each or "7." in each for each in found)


def test_readme_has_what_is_run() -> None:
    """Its script, the commands below it, and losses that fall."""
    script, commands, losses = release_check.readme()
    assert "fully_shard(model)" in script and commands.count("train.py") == 2
    assert len(losses) == 3 and list(losses) == sorted(losses, reverse=True)
