"""The vescale-convert command: what it prints, where, and its exit codes."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from contextlib import redirect_stderr, redirect_stdout
from itertools import product
from pathlib import Path

import click
import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from tests.support.command import vescale_convert
from tests.support.processes import run_command
from vescale_fsdp.checkpoint import CheckpointManager, read_state, save
from vescale_fsdp.conversion.cli import main as cli_module
from vescale_fsdp.conversion.cli.commands import SUMMARIES, cli
from vescale_fsdp.errors import ConversionError


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


def test_ls_lists_the_steps_of_a_run(tmp_path: Path) -> None:
    """Steps of all states are listed in order, with size, metric and age; JSON has the same values."""
    root = tmp_path / "run"
    with CheckpointManager(root) as manager:
        for step in (5, 10, 200, 1000):
            manager.save(step, {"w": torch.ones(250)}, metric=step / 2)
        manager.pin(10)
    (root / "step-00001500").mkdir()
    (root / "step-00000200" / "manifest.json").write_text("{")
    found = json.loads(_run("ls", str(root), "--json").stdout)
    assert [(each["step"], each["state"]) for each in found] == [
        (5, "committed"),
        (10, "pinned"),
        (200, "damaged"),
        (1000, "committed"),
        (1500, "incomplete"),
    ]
    assert [each["metric"] for each in found] == [2.5, 5.0, None, 500.0, None]
    assert found[0]["bytes"] >= 1000 and abs(found[0]["unix_s"] - time.time()) < 600
    assert [bool(each["damage"]) for each in found] == [False, False, True, False, False]
    *rows, reason, note = [line.split() for line in _run("ls", str(root)).stdout.splitlines()]
    assert (
        reason[:2] == ["step", "200:"] and len(rows) == 2 + 5 and note[:4] == ["Data", "is", "not", "read:"]
    )
    assert [row[0] for row in rows[2:]] == ["5", "10", "200", "1,000", "1,500"]
    assert [row[-1] for row in rows[2:]] == [each["state"] for each in found]
    assert "1" in rows[2] and rows[5][-2] == "500" and rows[6][1:4] == ["-", "-", "-"]


def test_ls_prints_the_command_that_reads_a_steps_data(tmp_path: Path) -> None:
    """A step without a data file is still "committed", since its manifest alone is read: the last line says so."""
    root = tmp_path / "a run"
    with CheckpointManager(root) as manager:
        manager.save(5, {"w": torch.ones(250)})
    (data,) = (root / "step-00000005").glob("data-*/*.safetensors")
    data.unlink()
    assert [each["state"] for each in json.loads(_run("ls", str(root), "--json").stdout)] == ["committed"]
    *_, row, note = _run("ls", str(root)).stdout.splitlines()
    assert row.endswith("committed") and note.startswith("Data is not read: ")
    command = shlex.split(note.removeprefix("Data is not read: ").removesuffix(" checks a step."))
    result = _run(*[{"N": "5"}.get(word, word) for word in command[1:]])
    assert command[0] == "vescale-convert" and result.exit_code == 1 and "1 problem\n" in result.stdout


def test_ls_names_steps_that_a_rollback_has_abandoned(tmp_path: Path) -> None:
    """Later steps than the one that a run was continued from are there, and marked."""
    state = {"w": torch.ones(3)}
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, state)
    with CheckpointManager(tmp_path) as manager:
        manager.restore(state, step=1)
        manager.save(4, state)
    found = json.loads(_run("ls", str(tmp_path), "--json").stdout)
    assert [each["state"] for each in found] == ["committed", "abandoned", "abandoned", "committed"]


def test_ls_of_a_checkpoint_says_what_it_wants(source: str) -> None:
    """A folder without steps is refused, with the command that prints a checkpoint."""
    result = _run("ls", source)
    assert isinstance(result.exception, ConversionError)
    assert result.exception.where == source and "inspect" in str(result.exception.todo)


def test_inspect_answers_what_a_script_asks(tmp_path: Path) -> None:
    """Which step, how many ranks, which values: of the newest step of a run, in JSON and in the table."""
    for step in (3, 12):
        state = {
            "model": {"w": torch.ones(4)},
            "optimizer": {"lr": step / 100, "betas": (0.9, 0.95)},
            "none": None,
        }
        save(tmp_path / f"run/step-{step:08}", state)
    root = str(tmp_path / "run")
    found = json.loads(_run("inspect", root, "--json").stdout)
    assert found["step"] == 12 and found["facts"]["saved by ranks"] == "1"
    assert found["values"] == {"none": None, "optimizer.betas": [0.9, 0.95], "optimizer.lr": 0.12}
    lines = [line.split() for line in _run("inspect", root).stdout.splitlines()]
    assert ["step:", "12"] in lines and ["optimizer.lr", "0.12"] in lines
    assert json.loads(_run("verify", root, "--json").stdout)["url"].endswith("step-00000012")
    assert "step-00000012" in _run("verify", root).stdout


def test_the_json_of_a_save_is_carried_or_named(tmp_path: Path) -> None:
    """Native and zarr results have it, through all pairs of these; of other formats and of averages it is dropped."""
    notes = {"config": "tiny", "losses": [2.5, None], "nested": {"é": True}}
    save(tmp_path / "native", {"model": {"w": torch.arange(6.0)}}, metadata=notes)
    save(tmp_path / "zarr", {"model": {"w": torch.arange(6.0)}}, metadata=notes, format="zarr")
    for source, kind in product(("native", "zarr"), repeat=2):
        out = tmp_path / f"{source} as {kind}"
        result = vescale_convert(f"to-{kind}", tmp_path / source, out)
        assert result.exit_code == 0, result.output
        assert "metadata" not in result.output
        assert (
            read_state(out).metadata
            == json.loads(vescale_convert("inspect", out, "--json").stdout)["metadata"]
            == notes
        )
        assert "2.5" in vescale_convert("inspect", out).stdout
        assert torch.equal(read_state(out)["model.w"].read(), torch.arange(6.0))
    sides = [tmp_path / "native", tmp_path / "zarr"]
    for number, command in enumerate((("to-fsdp2", sides[0]), ("to-torch", sides[0]), ("average", *sides))):
        result = vescale_convert(*command, tmp_path / f"{number}.pt")
        assert result.exit_code == 0, result.output
        assert "metadata" in result.output
    save(tmp_path / "none", {"model": {"w": torch.arange(6.0)}})
    result = vescale_convert("to-torch", tmp_path / "none", tmp_path / "none.pt")
    assert result.exit_code == 0 and "metadata" not in result.output


def test_to_hf_says_what_it_dropped(source: str, tmp_path: Path) -> None:
    """Summary on stdout names the prefix, the dropped optimizer and the target; the file is there."""
    result = _run("to-hf", source, str(tmp_path / "out"))
    assert result.exit_code == 0
    assert "prefix model." in result.stdout and "1 optimizer entries" in result.stdout
    assert "config.json" in result.stderr
    assert sorted(load_file(tmp_path / "out" / "model.safetensors"))[0] == "layers.0.w"


def test_to_hf_json(source: str, tmp_path: Path) -> None:
    """--json prints one object that counts files, bytes and drops."""
    result = _run("to-hf", source, str(tmp_path / "out"), "--json", "--max-shard-size", "100")
    report = json.loads(result.stdout)
    assert report["total_bytes"] == 128 + 12 + 4 and len(report["files"]) == 2
    assert report["dropped"]["optimizer_entries"] == 1 and report["written"] is True


def test_usage_errors_exit_with_2(source: str) -> None:
    """A missing argument, an unknown option and a size that is none are wrong usage."""
    wrong = [("to-hf", source), ("to-hf", "--nope"), ("to-hf", source, "x", "--max-shard-size", "five")]
    wrong += [("inspect", source, "--layout", "1"), ("to-hf", source, "x", "--rules-to", "hf")]
    wrong += [("diff", source, source, "--rtol", "-1")]
    for args in wrong:
        assert _run(*args).exit_code == 2, args


def test_the_home_folder_is_meant_by_a_tilde(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shells leave it in --assets=~/x and in quotes; a folder named ~ is nothing anybody wants."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("own").mkdir()
    Path("own/config.json").write_text("{}")
    assert _run("to-hf", "~/dcp", "~/out", "--assets=~/own").exit_code == 0
    assert sorted(os.listdir("out")) == ["config.json", "model.safetensors"] and not Path("~").exists()


def test_failures_exit_with_1_and_one_message(source: str, tmp_path: Path) -> None:
    """As a process: exit code 1, nothing on stdout, no traceback, and what to do on stderr."""
    command = [sys.executable, "-m", "vescale_fsdp.conversion", "to-hf"]
    missing = run_command([*command, str(tmp_path / "none"), str(tmp_path / "out")])
    assert missing.returncode == 1 and missing.stdout == ""
    assert f"{tmp_path}/none" in missing.stderr and "Traceback" not in missing.stderr
    nowhere = [str(tmp_path / "none"), str(tmp_path / "out")]
    for more, code in (([], 1), (["--threads", "0"], 2)):
        failed = run_command([*command, *nowhere, *more, "--json"])
        assert failed.returncode == code and json.loads(failed.stdout)["error"] in failed.stderr
    done = run_command([*command, source, str(tmp_path / "out"), "-q"])
    assert done.returncode == 0 and done.stdout == ""


def test_no_space_is_one_message_and_leaves_no_final_name(source: str, tmp_path: Path) -> None:
    """A write that the system refuses (here by a file size limit): exit 1, what to do, nothing published."""
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300)); "
        "from vescale_fsdp.conversion.cli.main import main; main()"
    )
    command = [sys.executable, "-c", code, "to-hf", source, str(tmp_path / "out")]
    result = run_command(command)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert f"{tmp_path}/out" in result.stderr
    assert not (tmp_path / "out").exists()


FLAGS = {
    "inspect": "--from --json --layout --step --svg --trust-pickle",
    "ls": "--json",
    "verify": "--from --json --quick --quiet --step --trust-pickle",
    "report": "--against --from --out --quiet --step --steps --trust-pickle",
    "rules": "--from --model-prefix --step --suggest --trust-pickle",
    "diff": "--all --atol --ignore-dtype --json --model-only --model-prefix --quiet --recorded --rtol",
    "fingerprint": "--assets --dtype --exclude --from --include --json --model-prefix --names --quiet --recorded "
    "--rules --step --trust-pickle",
}
CONVERT = (
    "--assets --dequantize --dry-run --dtype --exclude --from --include --json --max-shard-size --memory-budget "
    "--model-prefix --on-disagreement --overwrite --part --quantize --quiet --resume --rules --rules-to --step "
    "--threads --trust-pickle"
)
STATE = "--optimizer --prefix"
COMBINE = (
    "--compute-dtype --copy --fingerprint --granularity --include-asset --no-assets --prefix --ranks "
    "--require-check --to"
)


def test_flags_are_these() -> None:
    """A new command or flag needs an edit here: each is a promise to people's scripts."""
    expected = {name: flags.split() for name, flags in FLAGS.items()}
    for name, more in {
        "to-hf": "--adapter --adapter-name --fingerprint --include-asset --no-assets --push --require-check",
        "merge-adapter": "--include-asset --no-assets --require-check",
        "average": f"{COMBINE} --last",
        "combine": COMBINE,
        "to-fsdp2": STATE,
        "to-torch": STATE,
        "to-zarr": STATE,
        "to-native": f"{STATE} --fingerprint --granularity --ranks",
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
    result = run_command(command)
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


# Sends itself Ctrl-C when the first file is finished, and TIMES - 1 more when the process has seen it.
INTERRUPTED = """
import os, signal, time
from vescale_fsdp.conversion.engine import journal
from vescale_fsdp.conversion.cli.main import main
add, left = journal.Journal.add, TIMES
def interrupt(self, **line):
    global left
    add(self, **line)
    while left and "file" in line:
        left -= 1
        handler = signal.getsignal(signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        deadline_s = time.monotonic() + 60
        while signal.getsignal(signal.SIGINT) is handler:
            assert time.monotonic() < deadline_s, "Ctrl-C was not noticed"
            time.sleep(0.001)
journal.Journal.add = interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests themselves may run in the background
main()
"""


@pytest.mark.parametrize(("times", "code"), [(1, 130), (2, -signal.SIGINT)])
def test_ctrl_c_stops_and_resume_goes_on(source: str, tmp_path: Path, times: int, code: int) -> None:
    """Stopped by hand: no traceback, nothing under a final name, and what to do; the second time at once, without
    words. --resume keeps what was finished and makes what an undisturbed run makes."""
    options = ["--max-shard-size", "100", "--threads", "1"]
    script = INTERRUPTED.replace("TIMES", str(times))
    command = [sys.executable, "-c", script, "to-hf", source, str(tmp_path / "out"), *options]
    stopped = run_command(command)
    assert stopped.returncode == code and "Traceback" not in stopped.stderr
    assert ("--resume" in stopped.stderr) == (times == 1)
    left = os.listdir(tmp_path / "out")
    assert left and all(name.startswith(".") for name in left)
    report = json.loads(_run("to-hf", source, str(tmp_path / "out"), *options, "--resume", "--json").stdout)
    assert report["kept_files"] and report["published"]
    _run("to-hf", source, str(tmp_path / "expected"), *options)
    names = sorted(os.listdir(tmp_path / "expected"))
    assert sorted(os.listdir(tmp_path / "out")) == names and len(names) == 3
    assert all((tmp_path / "out" / n).read_bytes() == (tmp_path / "expected" / n).read_bytes() for n in names)


def _shown(leader: int) -> str:
    """All that a terminal was sent; the kernel delivers it in pieces, and an error at the end."""
    pieces = []
    with contextlib.suppress(OSError):  # EIO: nobody has the other end open
        while piece := os.read(leader, 100_000):
            pieces.append(piece)
    return b"".join(pieces).decode()


@pytest.mark.parametrize("quiet", [False, True])
def test_progress_is_for_terminals(source: str, tmp_path: Path, quiet: bool) -> None:
    """Bytes on stderr if it is a terminal and nobody asked for quiet; stdout holds the result either way."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "-m", "vescale_fsdp.conversion", "to-hf", source, str(tmp_path / "out")]
    done = run_command([*command, "-q"] if quiet else command, stderr=follower)
    os.close(follower)
    shown = _shown(leader)
    os.close(leader)
    assert done.returncode == 0 and ("B/s" in shown) == (not quiet) and "config.json" in shown
    assert ("wrote 3 tensors" in done.stdout) == (not quiet)
    again = run_command([*command, "--overwrite"])
    assert "B/s" not in again.stderr


def test_a_reader_that_leaves_early_is_no_error_message(source: str) -> None:
    """inspect | head: no traceback, no advice."""
    command = [sys.executable, "-m", "vescale_fsdp.conversion", "inspect", source]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert run_command(command, stdout=writer).stderr == ""
    finally:
        os.close(writer)


(FROM,) = (param.type for param in cli.commands["to-hf"].params if "--from" in param.opts)


@pytest.mark.parametrize("kind", sorted({*FROM.choices} - {"dcp"}))
def test_a_wrong_kind_is_told_from_damage(source: str, tmp_path: Path, kind: str) -> None:
    """--from something else: the message says what the source looks like, and nothing is written."""
    result = _main("to-hf", source, str(tmp_path / "out"), "--from", kind)
    assert (
        result.returncode == 1 and re.search(r"\bdcp\b", result.stderr) and f"--from {kind}" in result.stderr
    )
    assert not (tmp_path / "out").exists()


def _main(*args: str) -> subprocess.CompletedProcess[str]:
    """The command as `main` runs it, in this process: exit code, and what went to stderr."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["vescale-convert", *args])
        with pytest.raises(SystemExit) as ended:
            cli_module.main()
    assert isinstance(ended.value.code, int)
    return subprocess.CompletedProcess(args, ended.value.code, out.getvalue(), err.getvalue())


BAD_RULES = {
    'hf = "layers.{l}.w"\nours = "w.{l}"\nops = [{ melt = 1 }]': "does not exist",
    'hf = "layers.{l}.w"\nours = "w.{l}"\n[[rule]]\nhf = "b"\nours = "b"': "nothing matches b",
    'hf = "layers.0.w"\nours = "w"': "none for layers",
    'hf = "layers.{l}.w"\nours = "w.{l}"\n[[rule]]\nhf = "layers.0.w"\nours = "x"': "two for layers.0.w",
    'hf = "layers.{l}.w"\nours = "w.{l}"\nops = [{ pad = { dim = 0, from = "rows", to = 9 } }]': "rows",
    'hf = "layers.{l}.w"\nours = "w.{l}"\nops = [{ reshape = { hf = [3], ours = [4] } }]': "this shape",
    'hf = "layers.{l}.w"\nours = "w"': "do not match",
    "hf = 3": "cannot be read",
}


@pytest.mark.parametrize("rule", BAD_RULES)
def test_bad_rules_are_sentences(source: str, tmp_path: Path, rule: str) -> None:
    """Every way in which a file of rules can be wrong: exit 1, what to do, nothing written."""
    (tmp_path / "r.toml").write_text(f"format = 1\n[[rule]]\n{rule}\n")
    options = ["--rules", str(tmp_path / "r.toml"), "--rules-to", "ours"]
    result = _main("to-hf", source, str(tmp_path / "out"), *options)
    assert result.returncode == 1 and BAD_RULES[rule] in result.stderr
    assert not (tmp_path / "out").exists()


def test_usage_is_exit_2_in_the_command_itself(source: str, tmp_path: Path) -> None:
    """What click finds wrong is shown as click shows it."""
    for args in (["to-hf", source], ["melt"], ["to-hf", source, "x", "--threads", "0"]):
        result = _main(*args)
        assert result.returncode == 2 and "Usage:" in result.stderr
    assert _main("--version").returncode == 0
    missing = _main("to-hf", source, str(tmp_path / "out"), "--rules", str(tmp_path / "no.toml"))
    assert missing.returncode == 1 and f"{tmp_path}/no.toml" in missing.stderr


def test_the_list_of_commands_is_whole() -> None:
    """Each has a summary, and click cuts none of them."""
    shown = CliRunner().invoke(cli, ["--help"], terminal_width=80).output
    assert SUMMARIES.keys() == cli.commands.keys()
    assert all(f"{name} " in shown and summary in shown for name, (summary, _) in SUMMARIES.items())


@pytest.mark.parametrize("example", [example for _, examples in SUMMARIES.values() for example in examples])
def test_examples_have_options_that_exist(example: str) -> None:
    """With values that these take; nothing is opened."""
    name, *arguments = shlex.split(example)
    assert cli.commands[name].make_context(name, arguments).params
    with pytest.raises(click.UsageError):
        cli.commands[name].make_context(name, [*arguments, "--no-such-option"])
