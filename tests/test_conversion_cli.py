"""The vescale-convert command: what it prints, where, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from vescale_fsdp.conversion import cli as cli_module


@pytest.fixture
def source(tmp_path: Path) -> str:
    """A small DCP checkpoint with an optimizer entry."""
    state = {
        "model": {
            "layers.0.w": torch.randn(8, 4),
            "layers.10.w": torch.randn(3),
            "layers.2.w": torch.ones(1),
        },
        "optimizer": {"state": {"layers.0.w": {"exp_avg": torch.zeros(8, 4)}}},
    }
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return str(tmp_path / "dcp")


def _run(*args: str) -> Result:
    return CliRunner().invoke(cli_module.cli, list(args))


def test_inspect_prints_a_table_in_natural_order(source: str) -> None:
    """One line per tensor, layers.2 before layers.10, sizes and chunks; JSON holds the same."""
    result = _run("inspect", source)
    assert result.exit_code == 0
    lines = [line.split()[0] for line in result.stdout.splitlines() if line.startswith("model.layers")]
    assert lines == ["model.layers.0.w", "model.layers.2.w", "model.layers.10.w"]
    found = json.loads(_run("inspect", source, "--json").stdout)
    assert found["kind"] == "dcp" and found["model_prefix"] == "model."
    sizes = {tensor["name"]: tensor["bytes"] for tensor in found["tensors"]}
    assert sizes["model.layers.0.w"] == 128 and sizes["optimizer.state.layers.0.w.exp_avg"] == 128


def test_to_hf_says_what_it_dropped(source: str, tmp_path: Path) -> None:
    """Summary on stdout names the prefix, the dropped optimizer and the target; the file is there."""
    result = _run("to-hf", source, str(tmp_path / "out"))
    assert result.exit_code == 0
    assert "prefix model." in result.stdout and "1 optimizer entries" in result.stdout
    assert "no config.json" in result.stderr
    assert sorted(load_file(tmp_path / "out" / "model.safetensors"))[0] == "layers.0.w"


def test_to_hf_json(source: str, tmp_path: Path) -> None:
    """--json prints one object that counts files, bytes and drops."""
    result = _run("to-hf", source, str(tmp_path / "out"), "--json", "--max-shard-size", "100")
    report = json.loads(result.stdout)
    assert report["total_bytes"] == 128 + 12 + 4 and len(report["files"]) == 2
    assert report["dropped"]["optimizer_entries"] == 1 and report["written"] is True


def test_usage_errors_exit_with_2(source: str) -> None:
    """A missing argument, an unknown option and a size that is none are wrong usage."""
    for args in (("to-hf", source), ("to-hf", "--nope"), ("to-hf", source, "x", "--max-shard-size", "five")):
        assert _run(*args).exit_code == 2


def test_failures_exit_with_1_and_one_message(source: str, tmp_path: Path) -> None:
    """As a process: exit code 1, nothing on stdout, no traceback, and what to do on stderr."""
    command = [sys.executable, "-m", "vescale_fsdp.conversion", "to-hf"]
    missing = subprocess.run(
        [*command, str(tmp_path / "none"), str(tmp_path / "out")], capture_output=True, text=True, check=False
    )
    assert missing.returncode == 1 and missing.stdout == ""
    assert "what to do: check the path" in missing.stderr and "Traceback" not in missing.stderr
    done = subprocess.run(
        [*command, source, str(tmp_path / "out"), "-q"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stdout == ""


def test_no_space_is_one_message_and_leaves_no_final_name(source: str, tmp_path: Path) -> None:
    """A write that the system refuses (here by a file size limit): exit 1, what to do, nothing published."""
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300)); "
        "from vescale_fsdp.conversion.cli import main; main()"
    )
    command = [sys.executable, "-c", code, "to-hf", source, str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "make room" in result.stderr
    assert not any(name.startswith("model") for name in os.listdir(tmp_path / "out"))


FLAGS = {
    "inspect": "--from --json --layout --svg --trust-pickle",
    "verify": "--from --json --quick --quiet --trust-pickle",
    "diff": "--atol --ignore-dtype --json --model-only --quiet --rtol",
}
CONVERT = (
    "--assets --dry-run --dtype --exclude --from --include --json --max-shard-size --memory-budget "
    "--model-prefix --overwrite --part --quiet --resume --rules --rules-to --threads --trust-pickle"
)
STATE = "--optimizer --prefix"


def test_flags_are_these() -> None:
    """A new command or flag needs an edit here: each is a promise to people's scripts."""
    expected = {name: flags.split() for name, flags in FLAGS.items()}
    for name, more in {
        "to-hf": "",
        "to-fsdp2": STATE,
        "to-torch": STATE,
        "to-zarr": STATE,
        "to-vescale": f"{STATE} --granularity --ranks",
    }.items():
        expected[name] = sorted(f"{CONVERT} {more}".split())
    found = {
        name: sorted(
            max((o for o in p.opts if o.startswith("--") and o != "--config"), key=len)
            for p in command.params
            if isinstance(p, click.Option)
        )
        for name, command in cli_module.cli.commands.items()
        if name != "plan"
    }
    assert found == expected


def test_a_read_only_target_is_one_message(source: str, tmp_path: Path) -> None:
    """A target that cannot be made (a file is in the way) fails cleanly."""
    (tmp_path / "file").write_text("x")
    command = [
        sys.executable,
        "-m",
        "vescale_fsdp.conversion",
        "to-hf",
        source,
        str(tmp_path / "file" / "out"),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert os.listdir(tmp_path) and (tmp_path / "file").read_text() == "x"


def test_plan_prints_a_report(source: str, tmp_path: Path) -> None:
    """Shapes come from the model in the checkpoint, in natural order; patterns win; pictures are written."""
    args = ["plan", source, "--shards", "2,3", "--granularity", "rows:2", "--granularity", "layers.2*=whole"]
    result = _run(*args, "--out", str(tmp_path / "plan"))
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    named = [line[0] for line in lines if line and line[0].startswith("layers.")]
    assert named == ["layers.*.w", "layers.*.w", "layers.*.w"]
    assert ["layers.*.w", "8", "x", "4", "1", "Rows(2)", "8"] in lines
    assert ["layers.*.w", "1", "1", "Whole('tensor')", "1"] in lines
    assert (tmp_path / "plan" / "padding.svg").exists()
    rows = json.loads(_run(*args, "--json").stdout)["rows"]
    assert [(row["group"], row["num_shards"], row["payload_numel"]) for row in rows[:2]] == [
        ("(root)", 2, 36),
        ("(root)", 3, 36),
    ]


@pytest.mark.parametrize("shards", ["", "8;64", "0", "-2"])
def test_plan_refuses_shards_that_are_no_numbers(source: str, shards: str) -> None:
    """Wrong usage ends in exit code 2 and an example."""
    result = _run("plan", source, "--shards", shards)
    assert result.exit_code == 2
    assert "8,64,512" in result.stderr
