"""Check a release: build it, check the files, install the wheel in a clean environment, run README's commands.

    python -m tools.release_check [--keep]      make release-check

The clean environment has only the wheel and its dependencies, from pip's configured index. ``--keep`` keeps it in
build/release.
"""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from tools.docs import compatibility

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
WORK = ROOT / "build" / "release"


def run(*command: object, cwd: Path = ROOT, path: Path | None = None, is_long: bool = False) -> str:
    """Run a command that must succeed, without this checkout on its path, and return what it prints.

    Args:
        path: a folder that comes first on PATH.
        is_long: whether it prints so much that only the output of a failure is shown.
    """
    print("$", *command, flush=True)
    loopback = next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if path is not None:
        environment["PATH"] = f"{path}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        # Any free port for torchrun, whose default may be in use.
        env=environment | {"GLOO_SOCKET_IFNAME": loopback, "PET_STANDALONE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if is_long else None,
        text=True,
        timeout=1800,
        check=False,
    )
    if done.returncode or not is_long:
        print(done.stdout, end="", flush=True)
    done.check_returncode()
    return done.stdout


def versions(root: Path) -> dict[str, str]:
    """Return the version that each file of a checkout names: file -> version, "" if it names none."""
    patterns = {
        "vescale_fsdp/__init__.py": r'^__version__ = "(.+)"$',
        "CITATION.cff": r"^version: (.+)$",
        "CHANGELOG.md": r"^## (\S+)",  # the first such heading
    }
    found = {
        file: re.search(pattern, (root / file).read_text(), re.MULTILINE)
        for file, pattern in patterns.items()
    }
    return {file: match[1] if match else "" for file, match in found.items()}


def problems_of_source(root: Path) -> Iterator[str]:
    """Yield what is wrong in the files of a checkout, before anything is built."""
    named = versions(root)
    if len(set(named.values())) > 1 or "" in named.values():
        yield f"versions differ: {named}"
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    if "version" in project:
        yield "pyproject.toml must read the version from the package (dynamic)"
    url = project.get("urls", {}).get("Repository")
    pages = (*root.glob("*.*"), *(root / "docs").rglob("*.md"), *(root / "tools" / "docs").rglob("*.py"))
    repeats = [
        str(page.relative_to(root)) for page in pages if page.is_file() and url and url in page.read_text()
    ]
    if others := sorted({*repeats} - {"pyproject.toml"}):
        yield f"the repository's address, which belongs into pyproject.toml alone, is in {', '.join(others)}"
    # A requirement that ends below a version admits the versions before it.
    (torch,) = (each for each in project["dependencies"] if re.match(r"torch\W", each))
    data = json.loads((root / "docs" / "compatibility.json").read_text())
    tried, page = data["torch"], (root / "docs" / "compatibility.md").read_text()
    if not all(table in page for table in compatibility.tables(data).values()):
        yield "docs/compatibility.md is not what python -m tools.docs.compatibility writes from its data"
    lowest, above = (re.search(rf"{sign}([0-9.]+)", torch)[1] for sign in (">=", "<"))  # type: ignore[index]
    minors = sorted(tuple(map(int, version.split(".")[:2])) for version in tried)
    first, last = (tuple(map(int, bound.split(".")[:2])) for bound in (lowest, above))
    if minors[0] != first or (minors[-1][0], minors[-1][1] + 1) != last:
        yield f"pyproject.toml admits {torch}, but docs/compatibility.json has {', '.join(tried)}"


def problems_of_wheel(wheel: Path, version: str) -> Iterator[str]:
    """Yield what is wrong in a wheel: its version, what it must not contain, what it lacks."""
    with zipfile.ZipFile(wheel) as archive:
        infos = archive.infolist()
        (metadata,) = (info for info in infos if info.filename.endswith(".dist-info/METADATA"))
        fields = email.message_from_bytes(archive.read(metadata))
    names = [info.filename for info in infos]
    yield from _problems_of_names(wheel, (name for name in names if ".dist-info/" not in name))
    if links := [info.filename for info in infos if stat.S_ISLNK(info.external_attr >> 16)]:
        yield f"{wheel.name} contains links: {links}"
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in names):
        yield f"{wheel.name} has no license"
    if fields["Version"] != version:
        yield f"{wheel.name} has version {fields['Version']} in its metadata, not {version}"
    empty = [name for name in ("Summary", "Requires-Python", "License-Expression") if not fields[name]]
    if empty or fields["Description-Content-Type"] != "text/markdown":
        yield f"metadata of {wheel.name}: no {', '.join(empty) or 'README in Markdown'}"


def problems_of_sdist(sdist: Path) -> Iterator[str]:
    """Yield what is wrong in a source archive. Its folder is the checkout without tests and tools."""
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    if links := [member.name for member in members if member.issym() or member.islnk()]:
        yield f"{sdist.name} contains links: {links}"
    names = (member.name.partition("/")[2] for member in members)
    yield from _problems_of_names(sdist, (name for name in names if "/" in name and ".egg-info/" not in name))


def _problems_of_names(archive: Path, names: Iterable[str]) -> Iterator[str]:
    """Yield what is wrong in the names of an archive's files, without those of its metadata."""
    names = list(names)
    if wrong := sorted({name.split("/")[0] for name in names} - {"vescale_fsdp"}):
        yield f"{archive.name} contains {', '.join(wrong)}"
    if tests := [name for name in names if re.search(r"(^|/)(tests|test_[^/]*|conftest)(/|\.py$)", name)]:
        yield f"{archive.name} contains tests: {tests}"
    needed = {f"vescale_fsdp/{name}" for name in ("py.typed", "__init__.pyi", "checkpoint/__init__.pyi")}
    if lacking := sorted(needed.difference(names)):
        yield f"{archive.name} lacks {', '.join(lacking)}"


def readme() -> tuple[str, str, tuple[float, ...]]:
    """Return README's training script, the commands below it, and the losses that the text says of them."""
    text = (ROOT / "README.md").read_text()
    blocks = re.search(r"```python title=\"train\.py\"\n(.*?)```\s*```sh\n(.*?)```", text, re.DOTALL)
    losses = re.search(
        r"falls from ([\d.]+) to ([\d.]+) in the first run, and the second continues at ([\d.]+)\.", text
    )
    if blocks is None or losses is None:
        sys.exit("README has no example, or does not say its losses")
    return blocks[1], blocks[2], tuple(map(float, losses.groups()))


def stop_at(problems: Iterable[str]) -> None:
    """Print all problems and exit, if there are any."""
    if found := list(problems):
        sys.exit("\n".join(["not ready:", *found]))


def main() -> None:
    """Check the sources, build, check what was built, install, run."""
    stop_at(problems_of_source(ROOT))
    for folder in (DIST, WORK):
        shutil.rmtree(folder, ignore_errors=True)
    WORK.mkdir(parents=True)
    run(sys.executable, "-m", "build", "--outdir", DIST, is_long=True)
    files = sorted(DIST.iterdir())
    run(sys.executable, "-m", "twine", "check", "--strict", *files)
    (wheel,) = (file for file in files if file.suffix == ".whl")
    (sdist,) = (file for file in files if file.name.endswith(".tar.gz"))
    version = versions(ROOT)["CHANGELOG.md"]
    stop_at([*problems_of_wheel(wheel, version), *problems_of_sdist(sdist)])
    venv.create(WORK / "venv", with_pip=True)
    programs = WORK / "venv" / "bin"
    run(
        programs / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--constraint",
        ROOT / "constraints.txt",
        wheel,
    )
    script, commands, promised = readme()
    (WORK / "train.py").write_text(script)
    (WORK / "commands.sh").write_text(commands)
    printed = run("bash", "-ex", "commands.sh", cwd=WORK, path=programs)
    first, second = (
        [float(loss) for loss in re.findall(rf"on {ranks} ranks: loss ([\d.]+)", printed)] for ranks in (2, 3)
    )
    # The text that is learned is a file of Python's library, and differs a little from version to version.
    losses = first[0], first[-1], second[0]
    if any(abs(loss - said) > 0.15 for loss, said in zip(losses, promised, strict=True)):
        sys.exit(f"README says the losses {promised}; its commands print {losses}")
    if "--keep" not in sys.argv[1:]:
        shutil.rmtree(WORK)
    if "urls" not in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]:
        print(
            "pyproject.toml has no [project.urls]: neither the package's page nor the site links the repository"
        )
    print(f"ready: {', '.join(file.name for file in files)}")


if __name__ == "__main__":
    main()
