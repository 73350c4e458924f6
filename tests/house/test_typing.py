"""The installed package is typed for its users: mypy --strict and pyright take their script and find their mistakes."""

from __future__ import annotations

import json
import shutil
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.house.conftest import run
from tests.support.processes import run_command
from tools.torchrun_job import Job

SCRIPT = Path(__file__).with_name("user_script.py")
# Each line but the first ones holds one mistake that a type checker must report.
MISTAKES = """
import torch
import vescale_fsdp
from vescale_fsdp import RaggedShard, Rows, fully_shard
from vescale_fsdp.checkpoint import CheckpointManager, load, save
from vescale_fsdp.conversion import ConvertOptions, convert, open_source
model = torch.nn.Linear(2, 2)
# mistakes:
vescale_fsdp.fuly_shard(model)
Rows("32")
fully_shard(model, granularity=32)
fully_shard(model).set_requires_gradient_sync("no", recurs=True)
fully_shard(model).unshard(True).wait()
save("folder", {}, formt="zarr")
save("folder", {}, format="zar")
load("folder", {}, verify="sometimes")
CheckpointManager("folder").save("1", {})
convert("folder", "out", "hf", ConvertOptions())
convert(open_source("folder"), "out", "hf", ConvertOptions(dtyp=[]))
vescale_fsdp.__version__ + 1
"""


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the user's files and `.venv`: an environment that holds the wheel, and ours behind it."""
    folder = tmp_path_factory.mktemp("user")
    venv.create(folder / ".venv", with_pip=False)
    (site,) = folder.glob(".venv/lib/python*/site-packages")
    with zipfile.ZipFile(built[0]) as wheel:
        wheel.extractall(site)
    (site / "dependencies.pth").write_text("\n".join(path for path in sys.path if "site-packages" in path))
    shutil.copy(SCRIPT, folder / "user_script.py")
    (folder / "mistakes.py").write_text(MISTAKES)
    return folder


def mistaken_lines() -> set[tuple[str, int]]:
    """Where the errors stand."""
    lines = MISTAKES.splitlines()
    return {("mistakes.py", number + 1) for number in range(lines.index("# mistakes:") + 1, len(lines))}


@pytest.mark.part("pages")
def test_mypy_strict(installed: Path) -> None:
    """mypy reports every mistake, and nothing else."""
    # Untyped calls: torch has no annotations on Tensor.backward.
    options = [
        "--strict",
        "--allow-untyped-calls",
        "--python-executable",
        str(installed / ".venv/bin/python"),
    ]
    command = [sys.executable, "-m", "mypy", *options, "user_script.py", "mistakes.py"]
    done = run_command(command, cwd=installed)
    reports = [line.split(":", 2) for line in done.stdout.splitlines() if ": error:" in line]

    assert {(file, int(line)) for file, line, _ in reports} == mistaken_lines(), done.stdout + done.stderr


@pytest.mark.part("pages")
def test_pyright(installed: Path) -> None:
    """pyright reports every mistake, and nothing else."""
    options = ["--outputjson", "--pythonpath", str(installed / ".venv/bin/python")]
    command = [sys.executable, "-m", "pyright", *options, "user_script.py", "mistakes.py"]
    done = run_command(command, cwd=installed)
    reports = [each for each in json.loads(done.stdout)["generalDiagnostics"] if each["severity"] == "error"]
    found = {(Path(each["file"]).name, each["range"]["start"]["line"] + 1) for each in reports}

    assert found == mistaken_lines(), done.stdout


def test_types_come_from_the_wheel(installed: Path) -> None:
    """What was checked is the installed package, not the checkout."""
    code = "import vescale_fsdp; print(vescale_fsdp.__file__)"
    file = run(str(installed / ".venv/bin/python"), "-P", "-c", code, cwd=installed).strip()

    assert Path(file).is_relative_to(installed)


@pytest.mark.part("pages")
def test_the_script_runs(tmp_path: Path) -> None:
    """The calls that type-check are calls that work."""
    shutil.copy(SCRIPT, tmp_path / "user_script.py")
    Job("user_script", 2, [str(tmp_path / "out")], tmp_path / "logs", folder=tmp_path).wait()

    assert (tmp_path / "out" / "hf" / "model.safetensors").stat().st_size > 0
