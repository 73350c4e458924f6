"""What a conversion loads: no torch unless the format needs it, no numpy where bytes only move."""

from __future__ import annotations

import sys
from itertools import accumulate
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from tests.support.processes import run_command
from vescale_fsdp.checkpoint import save

RUN = """
import sys
from vescale_fsdp.conversion.cli.main import cli
try:
    cli(sys.argv[1:], prog_name="vescale-convert")
except SystemExit as stop:
    assert not stop.code, stop.code
heavy = {"torch", "numpy", "zarr", "fsspec", "tqdm", "google_crc32c"} & set(sys.modules)
print("loaded:", *sorted(heavy))
"""


def loaded(*arguments: str, program: str = RUN) -> set[str]:
    """Which of the heavy libraries one command has loaded when it ends well; or what another program says."""
    command = [sys.executable, "-c", program, *arguments]
    done = run_command(command, cwd=Path(__file__).parents[3], check=True)
    return set(done.stdout.splitlines()[-1].split()[1:])


MORE = pytest.mark.part("formats")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same small state as native, DCP, Hugging Face and torch.save."""
    folder = tmp_path_factory.mktemp("sources")
    model = {"a.weight": torch.randn(64, 32), "b.weight": torch.randn(16).to(torch.bfloat16)}
    state = {"model": model, "step": 3}
    dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True)
    save(folder / "native", state)
    torch.save(state, folder / "state.pt")
    (folder / "hf").mkdir()
    save_file(model, folder / "hf" / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    "source",
    [
        "native",
        pytest.param("dcp", marks=MORE),
        pytest.param("state.pt", marks=MORE),
        pytest.param("hf", marks=MORE),
    ],
)
def test_to_hf_needs_no_torch(sources: Path, tmp_path: Path, source: str) -> None:
    """From every format, values equal; a cast may load numpy but not torch."""
    assert loaded("to-hf", str(sources / source), str(tmp_path / "out")) == set()
    assert loaded("to-hf", str(sources / source), str(tmp_path / "cast"), "--dtype", "bf16") == {"numpy"}
    expected = torch.load(sources / "state.pt", weights_only=True)["model"]
    found, cast = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "cast"))
    assert found.keys() == expected.keys() and len(found) == 2
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(torch.equal(cast[name], expected[name].bfloat16()) for name in expected)


@pytest.mark.parametrize("target", ["to-fsdp2", "to-torch", "to-zarr", "to-native"])
def test_other_targets_need_no_torch(sources: Path, tmp_path: Path, target: str) -> None:
    """Pickles, zips, state trees and zarr chunks are written by hand."""
    assert "torch" not in loaded(target, str(sources / "dcp"), str(tmp_path / "out"))


@pytest.mark.parametrize(
    "source", ["native", "hf", pytest.param("dcp", marks=MORE), pytest.param("state.pt", marks=MORE)]
)
def test_looking_needs_neither_torch_nor_numpy(sources: Path, source: str) -> None:
    """inspect and verify read metadata, checksums and bytes by themselves."""
    assert loaded("inspect", str(sources / source)) | loaded("verify", str(sources / source)) == set()


HELP = """
import sys
before = set(sys.modules)
from vescale_fsdp.conversion.cli.main import cli
try:
    cli(sys.argv[1:], prog_name="vescale-convert")
except SystemExit:
    print("loaded:", *sorted(set(sys.modules) - before))
"""
# What --help may load of ours: the command line and what it is made from, a dozen small files.
OF_HELP = {
    "vescale_fsdp.checkpoint.storage.progress",
    "vescale_fsdp.conversion.cli.commands",
    "vescale_fsdp.conversion.cli.main",
    "vescale_fsdp.conversion.cli.options",
    "vescale_fsdp.conversion.formats.table",
    "vescale_fsdp.errors",
    "vescale_fsdp.lazy",
}
# Parts of Python that take a millisecond or more each, and that click does without.
SLOW = {
    "dataclasses",
    "hashlib",
    "importlib.abc",
    "logging",
    "pathlib",
    "pickle",
    "socket",
    "tempfile",
    "tomllib",
}


def test_help_loads_the_command_line_alone() -> None:
    """Of ours a dozen files, of others click alone: this keeps the start short, whatever the machine."""
    found = loaded("--help", program=HELP)
    expected = {part for name in OF_HELP for part in accumulate(name.split("."), "{}.{}".format)}

    assert {name for name in found if name.startswith("vescale_fsdp")} == expected
    assert {name.split(".")[0] for name in found} - sys.stdlib_module_names == {"click", "vescale_fsdp"}
    assert found & SLOW == set()


def test_help_of_a_command_loads_nothing_heavy() -> None:
    """Of one with all options, whose help names the key rules."""
    assert loaded("to-hf", "--help") == set()


def test_the_probe_sees_torch(tmp_path: Path) -> None:
    """The control: a pickled value of one of torch's own types does load it."""
    state = {"model": {"a.weight": torch.randn(4)}, "precision": torch.bfloat16}
    dcp.save(state, checkpoint_id=tmp_path / "dcp")

    assert "torch" in loaded("verify", str(tmp_path / "dcp"))
